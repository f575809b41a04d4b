"""`lattn_compile.bench` where there is no GPU: what it refuses, and what it makes of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lattn_compile.bench import run, tables
from lattn_compile.errors import UnsupportedError


def found(**changed: Any) -> dict[str, Any]:
    row = {"forward_ms": 5.0, "train_ms": 20.0, "token_us": 1.25, "forward_bandwidth": 0.03, "train_bandwidth": 0.02}
    row |= {"memory": 0.97, "kernels_ms": {"advance(int)": 11.0, "fill": 0.001}}
    return {
        "gpu": "A GPU",
        "torch": "2",
        "triton": "3",
        "shape": {"B": 4, "T": 4096, "checkpoint_every": 64},
        "copy_bytes_per_second": 4e12,
        "fla_fused_recurrent_gdn_forward_ms": 8.0,
        "rows": [{**row, "kind": "gdn", "format": "int8/*x32"}, {**row, "kind": "kda", "format": "exact"}],
    } | changed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to time")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="CUDA device"):
        run()


def test_the_table_compares_with_fla_only_what_fla_computes() -> None:
    gdn, kda = [line for line in tables.markdown(found()).splitlines() if line.startswith(("| gdn", "| kda"))]
    assert gdn == "| gdn | int8/*x32 | 5.00 | 1.25 | 0.62 | 20.00 | 2.50 | 0.97 | 3 % |"
    assert kda == "| kda | exact | 5.00 | 1.25 | - | 20.00 | - | 0.97 | 3 % |"
    assert "not installed" in tables.markdown(found(fla_fused_recurrent_gdn_forward_ms=None))


def test_a_plot_is_drawn_where_matplotlib_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tables.plot(found(), tmp_path / "kernels.png")
    assert drawn == (tmp_path / "kernels.png").exists()
    assert drawn or "matplotlib" in capsys.readouterr().out
