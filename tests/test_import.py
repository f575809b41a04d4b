"""`import lattn_compile` and `inspect` need torch only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lattn_compile as lc

ROOT = Path(__file__).parents[1]

_BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "transformers", "fla"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
import lattn_compile as lc

class Layer(torch.nn.Module):
    def forward(self, q, v):
        return lc.linear_attention(q, q, v, rule="additive", output_final_state=True)

args = (torch.randn(1, 6, 2, 4), torch.randn(1, 6, 2, 4))
report = lc.inspect(Layer(), args, policy="int8")
assert [s.kind for s in report.sites] == ["linear"], report
assert not {"triton", "transformers", "fla"} & set(sys.modules)
print(report.summary())
"""


def test_import_and_inspect_work_without_triton_transformers_and_fla() -> None:
    done = subprocess.run([sys.executable, "-c", _BLOCKED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 of 1 site rewritten" in done.stdout


def test_a_bare_import_loads_nothing_else() -> None:
    code = (
        "import sys, lattn_compile; known = ('lattn_compile', 'triton', 'transformers', 'fla'); "
        "print(sorted(m for m in sys.modules if m.startswith(known)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "['lattn_compile']", done.stderr


def test_every_public_name_exists() -> None:
    assert set(lc.__all__) == {*lc._HOME, "__version__"}
    for name in lc.__all__:
        assert getattr(lc, name) is not None
        assert name in dir(lc)
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = lc.quantise


def test_the_modules_named_like_functions_do_not_replace_them() -> None:
    code = "import lattn_compile as lc, lattn_compile.attach; assert callable(lc.attach); import lattn_compile.api"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
