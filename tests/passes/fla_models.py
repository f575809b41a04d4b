"""transformers' models with FLA installed on a machine without a GPU: eager dies, this backend does not.

Run by `test_capture.py` in a process that has FLA.
"""

from __future__ import annotations

import os

import pytest
import torch

import lattn_compile as lc
from lattn_compile.testing.backend import recorded
from tests import tiny_models

pytest.importorskip("fla.ops")

FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


def _torch_path(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind the torch functions again, as transformers does without FLA."""
    import sys

    module = sys.modules[type(model).__module__]
    for name in FUNCTIONS:
        if name in vars(module):
            monkeypatch.setattr(module, name, vars(module)[name].__wrapped__)


NAMES = tiny_models.NAMES if "LATTN_COMPILE_ALL" in os.environ else ("qwen3_next", "kimi_linear")  # one of each kind


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_model_runs_in_our_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, linear_layers = tiny_models.build(name, layers=3)
    ids = torch.randint(2, 97, (2, 70))
    with torch.no_grad(), pytest.raises(Exception, match=r"active drivers|driver|CUDA|[Tt]riton"):
        model(ids)
    torch._dynamo.reset()
    with torch.no_grad(), recorded() as record:
        got = torch.compile(model, backend="lattn_compile", fullgraph=True)(ids).logits
        with lc.capture():
            program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
        exported = program.module()(ids, use_cache=False).logits
        with monkeypatch.context() as patch:
            _torch_path(model, patch)
            want = model(ids).logits
    assert record.lattn_ops == linear_layers
    assert (got - want).abs().max() < 1e-5
    assert (exported - want).abs().max() < 1e-5
