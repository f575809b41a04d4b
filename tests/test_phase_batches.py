"""A batch in a phase, packed or padded, is its sequences one by one: through `lc.linear_attention` and library calls.

Packed sequences have lengths of their own in `cu_seqlens`, and may be padded inside it as well. In float64, so that an
order of sums does not turn into another code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.inputs import Inputs, make_inputs

SIZES, PREFIX, LENGTHS = [7, 1, 12, 4], [3, 1, 0, 2], [7, 1, 9, 2]  # 9 of 12 and 2 of 4: padded inside the pack
IDS, POSITION = [3, 2**33, 0, 5], [0, 4, 9, 1]

POLICIES = {
    "token": lc.Policy(lc.Int8()),
    "chunk": lc.Policy(lc.Fp8(), write=lc.Chunk(4), readout="after_write"),
    "stochastic": lc.Policy(lc.Int8(), rounding="stochastic", seed=1),
    "replay": lc.Policy(lc.Int8(), write=lc.Replay(3)),
    "two_precision": lc.Policy(lc.Fp8(), write=lc.TwoPrecision()),
}

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


Call = Callable[..., Tensor]


def own(policy: lc.Policy) -> Call:
    def call(x: Inputs) -> Tensor:
        return lc.linear_attention(
            x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens, policy=policy, use_qk_l2norm_in_kernel=True
        )[0]

    return call


def _own_function(policy: lc.Policy) -> Callable[..., Any]:
    def f(*x: Tensor, **options: Any) -> Any:
        return lc.linear_attention(*x, policy=policy, **options)

    return f


def captured(f: Callable[..., Any], policy: lc.Policy, **options: Any) -> Call:
    """`f` through the backend; one graph for all calls of a layout."""

    def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor | None) -> Tensor:
        return f(q, k, v, g=g, beta=beta, cu_seqlens=cu, use_qk_l2norm_in_kernel=True, **options)[0]  # type: ignore[no-any-return]

    compiled = torch.compile(plain, backend="lattn_compile", fullgraph=True, options={"policy": policy})
    return lambda x: compiled(x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens)


def _transformers(module: str, name: str) -> Callable[..., Any]:
    return vars(pytest.importorskip(f"transformers.models.{module}.modeling_{module}"))[name]  # type: ignore[no-any-return]


def _fla(module: str, name: str) -> Callable[..., Any]:
    return getattr(pytest.importorskip(f"fla.ops.{module}"), name)  # type: ignore[no-any-return]


CALLS: dict[str, tuple[str, Callable[[lc.Policy], Call]]] = {
    "lc": ("gdn", own),
    "lc kda": ("kda", own),
    "lc compiled": ("gdn", lambda policy: captured(_own_function(policy), policy)),
    "transformers chunk": (
        "gdn",
        lambda policy: captured(_transformers("qwen3_next", "torch_chunk_gated_delta_rule"), policy),
    ),
    "transformers recurrent": (
        "gdn",
        lambda policy: captured(
            _transformers("qwen3_next", "torch_recurrent_gated_delta_rule"),
            policy,
            initial_state=None,
            output_final_state=False,
        ),
    ),
    "transformers kda": (
        "kda",
        lambda policy: captured(_transformers("kimi_linear", "chunk_kimi_delta_attention"), policy),
    ),
    "fla chunk": ("gdn", lambda policy: captured(_fla("gated_delta_rule", "chunk_gated_delta_rule"), policy)),
    "fla recurrent": (
        "gdn",
        lambda policy: captured(_fla("gated_delta_rule", "fused_recurrent_gated_delta_rule"), policy),
    ),
    "fla kda": ("kda", lambda policy: captured(_fla("kda", "chunk_kda"), policy)),
}
calls = pytest.mark.parametrize("call", CALLS)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def batch(kind: str, *, packed: bool) -> Inputs:
    """Poisoned beyond each sequence's length."""
    shape: dict[str, Any] = {"lengths": SIZES} if packed else {"batch": len(SIZES), "tokens": max(SIZES)}
    made = make_inputs(kind, **shape, key_dim=8, value_dim=8, dtype=torch.float64, initial_state=False, seed=2)
    return made.ragged(LENGTHS).map(leaf)


def alone(x: Inputs, i: int, *, packed: bool) -> Inputs:
    """Sequence i without its padding."""
    row, start = (0, sum(SIZES[:i])) if packed else (i, 0)
    part = x.map(lambda t: leaf(t[row : row + 1, start : start + LENGTHS[i]]))
    return type(x)(**{**vars_of(part), "cu_seqlens": None})


def vars_of(x: Inputs) -> dict[str, Any]:
    return {name: getattr(x, name) for name in x.__dataclass_fields__}


def trained(call: Call, x: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    o = call(x)
    draw = torch.Generator().manual_seed(5)
    # Every sequence is given the cotangent that it is given alone; what pads are given is NaN.
    cotangent = torch.full_like(o, torch.nan)
    for rows, n in zip(rows_of(x), lengths_of(x), strict=True):
        size = o[rows][:n].shape
        cotangent[rows][:n] = torch.randn(16, *size[1:], generator=draw, dtype=o.dtype)[:n]
    names = list(x.leaves())
    found = torch.autograd.grad(o, [x.leaves()[n] for n in names], cotangent)
    return o.detach(), dict(zip(names, found, strict=True))


def rows_of(x: Inputs) -> list[Any]:
    """The tokens of each sequence, pads included."""
    if x.cu_seqlens is not None:
        return [(0, slice(a, b)) for a, b in pairwise(x.cu_seqlens.tolist())]
    return [(i, slice(None)) for i in range(x.q.shape[0])]


def lengths_of(x: Inputs) -> list[int]:
    return LENGTHS if len(rows_of(x)) == len(LENGTHS) else [x.q.shape[1]]


@calls
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_with_lengths_of_its_own_is_its_sequences_one_by_one(call: str, packed: bool, policy: str) -> None:
    kind, make = CALLS[call]
    x = batch(kind, packed=packed)
    with recorded() as record:
        f = make(POLICIES[policy])
        with lc.training_phase(PREFIX, LENGTHS, sequence_ids=IDS, position=POSITION):
            o, grads = trained(f, x)
        if record.calls:  # in the write mode that was asked for, prefix included
            assert record.calls[-1].arguments["prefix_lengths"].tolist() == PREFIX
            assert record.calls[-1].arguments["write"] != "exact"
        for (row, rows), n in zip(rows_of(x), LENGTHS, strict=True):
            assert (o[row, rows][n:] == 0).all()
            assert all((d[row, rows][n:] == 0).all() for d in grads.values()), "a pad's gradient is exactly 0"
        torch._dynamo.reset()
        f = make(POLICIES[policy])
        draws = torch.Generator().manual_seed(5)
        for i, (row, rows) in enumerate(rows_of(x)):
            part = alone(x, i, packed=packed)
            with lc.training_phase(PREFIX[i : i + 1], sequence_ids=IDS[i : i + 1], position=POSITION[i : i + 1]):
                y = f(part)
            names = list(part.leaves())
            cotangent = torch.randn(16, *y.shape[2:], generator=draws, dtype=y.dtype)[: LENGTHS[i]]
            found = torch.autograd.grad(y, [part.leaves()[n] for n in names], cotangent[None])
            torch.testing.assert_close(o[row, rows][: LENGTHS[i]], y[0].detach(), rtol=1e-9, atol=1e-9)
            for name, d in zip(names, found, strict=True):
                torch.testing.assert_close(
                    grads[name][row, rows][: LENGTHS[i]], d[0], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"d{n}: {m}"
                )


@pytest.mark.parametrize("call", ["lc compiled", "transformers chunk", "transformers recurrent", "fla chunk"])
def test_lengths_and_borders_of_a_packed_batch_are_data(call: str) -> None:
    kind, make = CALLS[call]
    with recorded() as record:
        f = make(POLICIES["token"])
        outputs = []
        for sizes, prefix, n in (
            ([7, 1, 12, 4], [3, 1, 0, 2], [7, 1, 9, 2]),
            ([2, 10, 6, 6], [2, 3, 6, 1], [2, 10, 6, 5]),
            ([24, 0, 0, 0], [9, 0, 0, 0], [20, 0, 0, 0]),
        ):
            x = make_inputs(kind, lengths=sizes, key_dim=8, value_dim=8, dtype=torch.float64, initial_state=False)
            with torch.no_grad(), lc.training_phase(prefix, n):
                outputs.append(f(x))
                assert torch.equal(outputs[-1], own(POLICIES["token"])(x))
        assert len(record.graphs) == 1


@pytest.mark.parametrize("policy", ["token", "chunk", "stochastic"])
def test_pads_in_front_belong_to_the_prefix_and_change_nothing(policy: str) -> None:
    """Left padding is masked, not cut (g = 0 and beta = 0): the exact identity, which still counts as tokens."""
    pads = [3, 0]
    x = make_inputs("gdn", batch=2, tokens=11, key_dim=8, value_dim=8, dtype=torch.float64, initial_state=False)
    assert x.g is not None and x.beta is not None
    for i, n in enumerate(pads):
        x.g[i, :n] = x.beta[i, :n] = 0
    f = own(POLICIES[policy])
    with lc.training_phase([n + 4 for n in pads], sequence_ids=[1, 2]):
        together = f(x)
    for i, n in enumerate(pads):
        part = x.map(lambda t, i=i, n=n: t[i : i + 1, n:])
        with lc.training_phase([4], sequence_ids=[i + 1], position=n):
            torch.testing.assert_close(together[i : i + 1, n:], f(part), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_an_unmasked_gate_in_the_padding_may_be_anything(packed: bool) -> None:
    """A positive log decay is a mistake of the caller, unless no token of a sequence has it."""
    x = batch("gdn", packed=packed)
    assert x.g is not None
    start = sum(SIZES[:2])
    bad = x.g.detach().clone()
    (bad[0, start:] if packed else bad[2])[LENGTHS[2] : LENGTHS[2] + 1] = 3.0
    x = type(x)(**{**vars_of(x), "g": bad.requires_grad_()})
    f = own(POLICIES["token"])
    with lc.training_phase(PREFIX, LENGTHS):
        trained(f, x)
    longer = [*LENGTHS[:2], LENGTHS[2] + 1, LENGTHS[3]]
    with pytest.raises(lc.LattnError, match="g: got"), lc.training_phase(PREFIX, longer):
        f(x)
