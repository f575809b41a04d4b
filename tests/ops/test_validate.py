"""Bad input: refused by name, before anything is computed; in eager calls and, where shapes tell, at trace time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lattn_compile.errors import (
    DtypeError,
    FormatError,
    LattnError,
    PolicyError,
    SequenceError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from tests.ops.cases import NAMES, OPS, inputs, ints, options

LENGTHS = ("cu_seqlens", "prefix_lengths", "sequence_lengths", "cursor")


def call(op: str, write: str = "exact", *, batch: int = 2, **changes: Any) -> None:
    """One call of B=2, T=6, H=2, HV=4, K=8, V=12 with some arguments changed."""
    arguments: dict[str, Any] = dict(zip(NAMES, inputs(batch, 6, dtype=torch.float32), strict=True))
    arguments |= dict.fromkeys(LENGTHS)
    kwargs = options(op, write)
    for name, value in changes.items():
        (arguments if name in arguments else kwargs)[name] = value
    OPS[op](*arguments.values(), **kwargs)


def zeros(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(*shape, **kwargs)


BY_SHAPE = [
    pytest.param({"q": zeros(2, 6, 8)}, ShapeError, "q: got [2, 6, 8]; want [B, T, H, K]", id="q of 3 axes"),
    pytest.param({"k": zeros(2, 6, 2, 7)}, ShapeError, "k: got [2, 6, 2, 7]; want [B, T, H, K] = [2, 6, 2, 8]", id="K"),
    pytest.param({"k": zeros(2, 6, 3, 8)}, ShapeError, "k: got [2, 6, 3, 8]; want [B, T, H, K] = [2, 6, 2, 8]", id="H"),
    pytest.param(
        {"v": zeros(2, 4, 6, 12)},
        ShapeError,
        "v: got [2, 4, 6, 12]; want [B, T, HV, V] with B, T = [2, 6]. "
        "v must have as many sequences and tokens as q; is it [B, HV, T, V]?",
        id="heads before tokens",
    ),
    pytest.param(
        {"v": zeros(2, 6, 3, 12)},
        ShapeError,
        "v: got HV = 3 value heads; want a multiple of q's H = 2 key heads",
        id="HV",
    ),
    pytest.param({"v": zeros(2, 6, 4, 0)}, ShapeError, "v: got V = 0; want V >= 1", id="V = 0"),
    pytest.param(
        {"g": zeros(2, 6, 2)}, ShapeError, "g: got [2, 6, 2]; want [B, T, HV] = [2, 6, 4]", id="g per key head"
    ),
    pytest.param(
        {"g": zeros(2, 6, 4, 12)},
        ShapeError,
        "g: got [2, 6, 4, 12]; want [B, T, HV, K] = [2, 6, 4, 8]",
        id="g per value channel",
    ),
    pytest.param(
        {"beta": zeros(2, 6, 4, 1)}, ShapeError, "beta: got [2, 6, 4, 1]; want [B, T, HV] = [2, 6, 4]", id="beta"
    ),
    pytest.param(
        {"initial_state": zeros(2, 4, 12, 8)},
        ShapeError,
        "initial_state: got [2, 4, 12, 8]; want [N, HV, K, V] = [2, 4, 8, 12]. One state a sequence and value head, "
        "key axis before value axis. This one looks value-first, [N, HV, V, K]: pass state.transpose(-1, -2).",
        id="value-first state",
    ),
    pytest.param(
        {"initial_state": zeros(3, 4, 8, 12)},
        ShapeError,
        "initial_state: got [3, 4, 8, 12]; want [N, HV, K, V] = [2, 4, 8, 12]",
        id="states of another batch",
    ),
    pytest.param(
        {"initial_state": zeros(2, 4, 8, 12, dtype=torch.int8)},
        DtypeError,
        "initial_state: got torch.int8; want bfloat16, float16, float32 or float64. Pass the decoded state, or an "
        "EncodedState to lc.linear_attention.",
        id="integer state",
    ),
    pytest.param({"v": zeros(2, 6, 4, 12, dtype=torch.int32)}, DtypeError, "v: got torch.int32", id="integer v"),
    pytest.param({"k": zeros(2, 6, 2, 8, device="meta")}, DtypeError, "k: got meta; want q's device cpu", id="device"),
    pytest.param(
        {"cu_seqlens": torch.tensor([0, 6, 12])},
        SequenceError,
        "cu_seqlens: got a batch of 2 sequences, q of shape [2, 6, 2, 8]; want B = 1 when cu_seqlens is given. "
        "Flatten the batch to [1, B * T, ...]",
        id="packed with B > 1",
    ),
    pytest.param(
        {"cu_seqlens": torch.tensor([0.0, 6.0])},
        DtypeError,
        "cu_seqlens: got torch.float32; want int32 or int64",
        id="float cu_seqlens",
    ),
    pytest.param(
        {"cu_seqlens": torch.tensor([0])}, SequenceError, "cu_seqlens: got shape [1]; want [N + 1]", id="cu of 1"
    ),
    pytest.param(
        {"prefix_lengths": ints(1, 2, 3)},
        SequenceError,
        "prefix_lengths: got shape [3]; want a scalar or [N] = [2], one a sequence",
        id="prefixes",
    ),
    pytest.param(
        {"sequence_lengths": torch.tensor(2.0)}, DtypeError, "sequence_lengths: got torch.float32", id="float n"
    ),
    pytest.param(
        {"cursor": torch.tensor(0)}, SequenceError, "cursor: got shape []; want [N] = [2]", id="scalar cursor"
    ),
    pytest.param(
        {"rule": "detla"},
        PolicyError,
        "rule: got 'detla'; want 'delta' or 'additive'. Did you mean 'delta'?",
        id="rule",
    ),
    pytest.param(
        {"readout": "after"}, PolicyError, "readout: got 'after'; want 'before_write' or 'after_write'", id="readout"
    ),
    pytest.param({"implementation": "trition"}, PolicyError, "implementation: got 'trition'", id="kernel"),
    pytest.param(
        {"implementation": "triton"},
        UnsupportedError,
        "implementation: got 'triton', but ",
        id="triton on a CPU",
    ),
    pytest.param(
        {"implementation": "triton", "q": zeros(2, 6, 2, 8, dtype=torch.float64)},
        DtypeError,
        "implementation: got 'triton' with float64 inputs",
        id="float64 on the Triton path",
    ),
    pytest.param({"state_format": "int9"}, FormatError, "int9", id="format"),
]

BY_VALUE = [
    pytest.param(
        {"cu_seqlens": torch.tensor([0, 4, 2, 6])},
        SequenceError,
        "cu_seqlens: got 4 followed by 2 at entry 2; want entries that never decrease",
        id="decreasing",
    ),
    pytest.param(
        {"cu_seqlens": torch.tensor([0, 4, 9, 9])},
        SequenceError,
        "cu_seqlens: got a last entry of 9; want at most T = 6 tokens",
        id="past T",
    ),
    pytest.param(
        {"cu_seqlens": torch.tensor([1, 4, 6, 6])},
        SequenceError,
        "cu_seqlens: got a first entry of 1; want 0",
        id="not from 0",
    ),
    pytest.param(
        {"sequence_lengths": ints(3, 7, 0)},
        SequenceError,
        "sequence_lengths: got [3, 7, 0]; want at most the sequence's T tokens, 6",
        id="n > T",
    ),
    pytest.param(
        {"sequence_lengths": torch.tensor(-1)},
        SequenceError,
        "sequence_lengths: got -1; want lengths >= 0",
        id="negative",
    ),
    pytest.param(
        {"prefix_lengths": ints(3, 5, 0), "sequence_lengths": ints(4, 4, 4)},
        SequenceError,
        "prefix_lengths: got [3, 5, 0]; want at most the sequence's own length n, [4, 4, 4]",
        id="p > n",
    ),
    pytest.param(
        {"cursor": ints(0, 99, 0)}, StateError, "cursor: got [0, 99, 0]; want -1 (not handed over) to ", id="cursor"
    ),
    pytest.param(
        {"g": torch.full((3, 6, 4), 0.25)},
        LattnError,
        "g: got 0.25 at token 0, head 0; want a natural-log decay <= 0",
        id="g > 0",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BY_SHAPE)
@pytest.mark.parametrize("op", ["chunk", "decode"])
def test_refused_by_shape(op: str, changes: dict[str, Any], error: type[LattnError], text: str) -> None:
    with pytest.raises(error) as caught:
        call(op, **changes)
    assert text in str(caught.value)
    assert caught.value.argument in changes or caught.value.argument == "format"


@pytest.mark.parametrize(("changes", "error", "text"), BY_SHAPE)
@pytest.mark.parametrize("op", ["chunk", "decode"])
def test_refused_by_shape_while_tracing(op: str, changes: dict[str, Any], error: type[LattnError], text: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {n: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
        with pytest.raises(error) as caught:
            call(op, **fakes)
    assert text in str(caught.value)


@pytest.mark.parametrize(("changes", "error", "text"), BY_VALUE)
@pytest.mark.parametrize(("op", "write"), [("chunk", "chunk"), ("decode", "token")])
def test_refused_by_value(op: str, write: str, changes: dict[str, Any], error: type[LattnError], text: str) -> None:
    packed = "cu_seqlens" in changes
    with pytest.raises(error) as caught:
        call(op, write, batch=1 if packed else 3, **({"initial_state": None} if packed else {}), **changes)
    assert text in str(caught.value)


def test_nothing_is_computed_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from lattn_compile.ops import dispatch

    def no_kernel(*_: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(dispatch, "load", no_kernel)
    for changes, error, _ in (p.values for p in BY_SHAPE):
        with pytest.raises(error):
            call("decode", **changes)
    for changes, error, _ in (p.values for p in BY_VALUE):
        packed = "cu_seqlens" in changes
        with pytest.raises(error):
            call("decode", "token", batch=1 if packed else 3, **({"initial_state": None} if packed else {}), **changes)


def test_a_write_mode_of_the_other_op_is_named_as_such() -> None:
    with pytest.raises(PolicyError, match="The write mode 'token' belongs to lattn::decode"):
        call("chunk", "token")
    with pytest.raises(PolicyError, match="The write mode 'chunk' belongs to lattn::chunk"):
        OPS["decode"](*inputs(), *(None,) * 4, scale=1.0, write="chunk")


def test_intervals_are_counts() -> None:
    with pytest.raises(PolicyError, match=r"chunk_size: got 0; want an int >= 1"):
        call("chunk", "chunk", chunk_size=0)
    with pytest.raises(PolicyError, match=r"checkpoint_every: got -1; want an int >= 0"):
        call("decode", checkpoint_every=-1)


def test_a_compiled_call_is_refused_with_the_same_words() -> None:
    tensors = inputs(dtype=torch.float32)
    tensors[1] = tensors[1][..., :7]

    @torch.compile(backend="eager", fullgraph=True)
    def step(*x: torch.Tensor) -> torch.Tensor:
        return OPS["chunk"](*x, None, None, None, None, scale=1.0)[0]

    with pytest.raises(Exception, match=r"k: got \[2, 20, 2, 7\]; want \[B, T, H, K\] = \[2, 20, 2, 8\]"):
        step(*tensors)


def test_a_compiled_call_checks_values_when_it_runs() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(n: torch.Tensor, *x: torch.Tensor) -> torch.Tensor:
        return OPS["chunk"](*x, None, None, n, None, scale=1.0)[0]

    step(ints(3, 4), *inputs(dtype=torch.float32))
    with pytest.raises(SequenceError, match=r"sequence_lengths: got \[3, 40\]"):
        step(ints(3, 40), *inputs(dtype=torch.float32))


def test_sizes_known_only_at_run_time_are_checked_when_it_runs() -> None:
    # unbacked sizes, as behind a nonzero(): nothing can be compared while tracing, so nothing is refused there
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:

        @torch.compile(backend="eager", fullgraph=True)
        def step(rows: torch.Tensor, others: torch.Tensor, *x: torch.Tensor) -> torch.Tensor:
            q, k, v = x[:3]
            i, j = rows.nonzero()[:, 0], others.nonzero()[:, 0]
            q, k, v = q[:, i], k[:, j], v[:, i]
            return OPS["chunk"](q, k, v, *(None,) * 7, scale=1.0)[0]

        tensors = inputs(tokens=6, dtype=torch.float32)
        rows = torch.tensor([1, 0, 1, 1, 0, 1])
        assert step(rows, rows, *tensors).shape == (2, 4, 4, 12)
        with pytest.raises(ShapeError, match=r"k: got \[2, 6, 2, 8\]"):
            step(rows, torch.ones(6), *tensors)
    finally:
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
