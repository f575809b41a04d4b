"""What "auto" and "triton" choose, as far as no device has to be asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lattn_compile.errors import UnsupportedError
from lattn_compile.modes import Prefill
from lattn_compile.ops import dispatch
from lattn_compile.ops.dispatch import Work, choose, choose_prefill, objection

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
    known = dataclasses.replace(CUDA, key_dim=128, value_dim=128)
    work = dataclasses.replace(known, growth=True)
    assert choose(form, "auto", known) == "triton"
    assert choose(form, "auto", work) == "reference"
    assert "growth" in str(objection(form, work))
    with pytest.raises(UnsupportedError, match="growth"):
        choose(form, "triton", work)
    assert choose("decode", "auto", work) == "triton"


def test_the_chunk_form_is_taken_for_what_was_proven() -> None:
    for inputs in (torch.float32, torch.float16, torch.bfloat16):
        assert choose("chunk", "auto", dataclasses.replace(CUDA, inputs=inputs)) == "triton"
    assert choose("chunk", "auto", dataclasses.replace(CUDA, device=torch.device("cpu"))) == "reference"


def test_a_rounded_prefill_is_taken_for_what_was_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Prefill({"kk": "int8", "qs": "nvfp4"})

    def chosen(implementation: str = "auto", **work: Any) -> str:
        return choose_prefill(implementation, dataclasses.replace(CUDA, **work), wanted)

    for inputs in (torch.float32, torch.bfloat16):
        assert chosen(inputs=inputs) == "triton"
        assert chosen("reference", inputs=inputs) == "reference"
    assert chosen(inputs=torch.float16) == "reference" and chosen("triton", inputs=torch.float16) == "triton"
    assert chosen(device=torch.device("cpu")) == "reference" and chosen(growth=True) == "reference"
    with pytest.raises(UnsupportedError, match="growth"):
        chosen("triton", growth=True)
    assert chosen(key_dim=7, value_dim=5) == chosen(value_dim=256) == "triton"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert chosen() == "reference" and chosen("triton") == "triton"
