"""Calls of `lattn::decode` that a CUDA graph may record: which are renamed, and that the names mean the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lattn_compile.ops import dispatch
from lattn_compile.ops.recorded import name_recorded_calls
from tests.ops.cases import inputs, options

UNSAFE = torch.Tag.cudagraph_unsafe


@pytest.fixture(autouse=True)
def triton_serves_decode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "objection", lambda form, work: None if form == "decode" else "not yet")


def graph_of(device: str, write: str = "token", *, prefix: bool = False, **more: Any) -> fx.GraphModule:
    """Forward and backward of a call of fake tensors."""
    kwargs = options("decode", write, checkpoint_every=4, **more)

    def both(*x: torch.Tensor) -> Any:
        lengths = (None, torch.ones(2, dtype=torch.int32, device=device) if prefix else None, None, None)
        o, state, rows = torch.ops.lattn.decode(*x, *lengths, **kwargs)
        grads = torch.ops.lattn.decode_backward(o, state, *x, *lengths, None, None, rows, **kwargs)
        return o, grads

    with FakeTensorMode():
        x = [torch.empty(t.shape, device=device, dtype=torch.float32) for t in inputs(tokens=9)]
        return make_fx(both)(*x)


def unsafe_ops(module: fx.GraphModule) -> list[str]:
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return [str(t) for t in targets if isinstance(t, torch._ops.OpOverload) and UNSAFE in t.tags]


def test_a_call_that_triton_serves_loses_the_tag_forward_and_backward() -> None:
    module = graph_of("cuda")
    assert unsafe_ops(module) == ["lattn.decode.default", "lattn.decode_backward.default"]
    assert name_recorded_calls(module.graph) == 2
    assert unsafe_ops(module) == []


def test_an_exact_call_has_no_prefix_to_wait_for() -> None:
    assert name_recorded_calls(graph_of("cuda", "exact", prefix=True).graph) == 2


@pytest.mark.parametrize(
    ("device", "more"),
    [("cpu", {}), ("cuda", {"implementation": "reference"}), ("cuda", {"prefix": True})],
    ids=["no GPU", "the reference, which reads lengths", "a prefix, which the reference computes"],
)
def test_what_reads_the_host_keeps_its_name(device: str, more: dict[str, Any]) -> None:
    module = graph_of(device, **more)
    assert name_recorded_calls(module.graph) == 0
    assert len(unsafe_ops(module)) == 2


@pytest.mark.parametrize("write", ["exact", "token"])
def test_both_names_are_one_function(write: str) -> None:
    x = inputs(tokens=9, dtype=torch.float32)
    kwargs = options("decode", write, checkpoint_every=2)
    want = torch.ops.lattn.decode(*x, *(None,) * 4, **kwargs)
    got = torch.ops.lattn.decode_recorded(*x, *(None,) * 4, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    saved = (want[0], want[1], *x, *(None,) * 6, want[2])
    grads = torch.ops.lattn.decode_backward(*saved, **kwargs)
    again = torch.ops.lattn.decode_backward_recorded(*saved, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))
    torch.library.opcheck(torch.ops.lattn.decode_recorded.default, (*x, *(None,) * 4), kwargs, test_utils="test_schema")
