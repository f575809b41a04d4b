"""What "auto" and "triton" choose, as far as no device has to be asked."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lattn_compile.errors import UnsupportedError
from lattn_compile.ops import dispatch
from lattn_compile.ops.dispatch import Work, choose, objection

CUDA = Work(torch.device("cuda"), torch.float32, 64, 64, None)


@pytest.fixture(autouse=True)
def _no_other_objection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is said to be there, and its kernels to take everything."""

    class _Takes:
        @staticmethod
        def supports(**work: object) -> None:
            return None

    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda name: _Takes)


@pytest.mark.parametrize("form", ["chunk", "replay"])
def test_decays_above_one_are_the_references(form: str) -> None:
    work = dataclasses.replace(CUDA, growth=True)
    assert choose(form, "auto", CUDA) == "triton"
    assert choose(form, "auto", work) == "reference"
    assert "growth" in str(objection(form, work))
    with pytest.raises(UnsupportedError, match="growth"):
        choose(form, "triton", work)
    assert choose("decode", "auto", work) == "triton"


def test_the_chunk_form_is_taken_for_what_was_proven() -> None:
    for inputs in (torch.float32, torch.float16, torch.bfloat16):
        assert choose("chunk", "auto", dataclasses.replace(CUDA, inputs=inputs)) == "triton"
    assert choose("chunk", "auto", dataclasses.replace(CUDA, device=torch.device("cpu"))) == "reference"
