"""The oracle's replay and two_precision against sums written another way, and what keys and carries a write."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lattn_compile.errors import UnsupportedError
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.modes import MODES
from lattn_compile.recurrence import BY_NAME
from lattn_compile.testing import Inputs, OracleResult, make_inputs, oracle
from lattn_compile.testing.loops import SUFFIXES

SMALL: dict[str, Any] = {"key_dim": 6, "value_dim": 5, "dtype": torch.float64}
INT8 = {"state_format": "int8/*x4"}
REPLAY = {"write": "replay", "window": 4, **INT8}
TWO = {"write": "two_precision", "window": 4, **INT8}
# A write mode whose windows are short enough to be crossed and cut in a few tokens.
WRITES = {"token": {"write": "token"}, "chunk": {"write": "chunk", "chunk_size": 4}, "replay": REPLAY, "two": TWO}


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(x: Inputs, a: int = 0, b: int | None = None, before: OracleResult | None = None, **options: Any) -> Any:
    """Tokens a to b of the inputs, after the call that returned `before`."""
    tokens = [None if y is None else y[:, a:b] for y in (x.q, x.k, x.v, x.g, x.beta)]
    state, carried = x.initial_state, {}
    if before is not None:
        state = before.carry
        carried = {"cursor": before.cursor, "read_state": before.read}
        if before.ring is not None:
            carried |= {f"ring_{name}": value for name, value in before.ring._asdict().items()}
    return oracle(*tokens, state, **(x.options() | carried | options))


def summed(x: Inputs, anchor: Tensor, t: int, first: int, ring: list[tuple[Tensor, Tensor]], rule: str) -> Any:
    """`S~_t`, k_t and u_t of batch row 0 by the sum over the window, decays formed per pair of tokens."""
    heads = x.v.shape[2] // x.k.shape[2]

    def key(s: int) -> Tensor:
        k = x.k[0, s].repeat_interleave(heads, 0)
        return k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt() if x.qk_l2norm else k

    def gamma(a: int, b: int) -> Tensor:
        """Decay from the end of token a to that of token b, `[HV, 1 or K, 1]`."""
        if x.g is None:
            return torch.ones(1, 1, 1, dtype=torch.float64)
        total = x.g[0, a + 1 : b + 1].sum(0).exp()
        return total[:, None, None] if total.dim() == 1 else total[:, :, None]

    state = gamma(first - 1, t) * anchor
    for i, (k, u) in enumerate(ring):
        state = state + gamma(first + i, t) * k[:, :, None] * u[:, None, :]
    u = x.v[0, t] - torch.einsum("hkv,hk->hv", state, key(t)) if rule == "delta" else x.v[0, t]
    return state, key(t), u if x.beta is None else x.beta[0, t, :, None] * u


def test_every_write_mode_has_a_loop() -> None:
    assert set(SUFFIXES) == set(MODES) - {"exact"}


# Replay ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factors", [None, "bf16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "gla", "linear"])
def test_replay_is_anchor_plus_decayed_encoded_updates(kind: str, factors: str | None) -> None:
    x = make_inputs(kind, batch=1, tokens=9, **SMALL)
    assert x.initial_state is not None
    fmt = parse(INT8["state_format"])

    def stored(y: Tensor) -> Tensor:
        """One vector at a time through the codec of a one-row state."""
        if factors is None:
            return y
        spec = "bf16" if factors == "bf16" else f"{factors}/*x*"
        return torch.stack([parse(spec).qdq(row[None])[0] for row in y])

    def read(state: Tensor, t: int) -> Tensor:
        q = x.q[0, t].repeat_interleave(2, 0)
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() if x.qk_l2norm else q
        return x.scale * torch.einsum("hkv,hk->hv", state, q)

    anchor, ring, first = fmt.qdq(x.initial_state)[0], [], 0
    outputs: dict[str, list[Tensor]] = {"before_write": [], "after_write": []}
    for t in range(9):
        decayed, k, u = summed(x, anchor, t, first, ring, BY_NAME[kind].rule)
        ring.append((stored(k), stored(u)))
        kept = decayed + ring[-1][0][:, :, None] * ring[-1][1][:, None, :]
        outputs["before_write"].append(read(decayed + k[:, :, None] * u[:, None, :], t))
        if len(ring) == 4:
            anchor, ring, first = fmt.qdq(kept), [], t + 1
            kept = anchor
        outputs["after_write"].append(read(kept, t))
    for readout, rows in outputs.items():
        got = run(x, **REPLAY, factors=factors, readout=readout)
        near(got.o[0], torch.stack(rows))
        near(got.final_state[0], anchor)
        assert got.cursor.tolist() == [1] and got.ring is not None
        near(got.ring.k[0, 0].repeat_interleave(2, 0), ring[0][0])
        near(got.ring.u[0, 0], ring[0][1])
        assert not got.ring.k[0, 1:].any() and not got.ring.u[0, 1:].any() and got.ring.v is got.ring.beta is None
        near(got.dense[0], kept)


@pytest.mark.parametrize("readout", ["before_write", "after_write"])
def test_a_window_of_one_without_factors_is_the_token_mode(readout: str) -> None:
    x = make_inputs("kda", tokens=6, **SMALL)
    options = {"prefix_lengths": ints(0, 2), "readout": readout, **INT8}
    replay, token = (run(x, write=w, window=1, **options) for w in ("replay", "token"))
    for a, b in zip(replay[:6], token[:6], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("write", [REPLAY, TWO], ids=lambda w: w["write"])
def test_replay_that_rounds_nothing_is_exact(write: dict[str, Any]) -> None:
    x = make_inputs("gdn", tokens=11, **SMALL)
    got, exact = run(x, **(write | {"state_format": "fp32"})), run(x)
    near(got.o, exact.o)
    near(got.dense, exact.final_state)


# Two precisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gdn", "kda", "gla", "retention"])
@pytest.mark.parametrize("anchor", ["fp32", "bf16"])
def test_two_precision_reads_a_copy_and_advances_the_anchor_without_it(kind: str, anchor: str) -> None:
    x = make_inputs(kind, batch=1, tokens=10, **SMALL)
    assert x.initial_state is not None
    cast, fmt = parse(anchor), parse(INT8["state_format"])
    kept = cast.qdq(x.initial_state)
    rows, first, ring = [], 0, []
    for t in range(10):
        decayed, k, u = summed(x, fmt.qdq(kept)[0], t, first, ring, BY_NAME[kind].rule)
        ring.append((k, u))
        q = x.q[0, t].repeat_interleave(2, 0)
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() if x.qk_l2norm else q
        rows.append(x.scale * torch.einsum("hkv,hk->hv", decayed + k[:, :, None] * u[:, None, :], q))
        if len(ring) == 4:
            tokens = [None if y is None else y[:, first : t + 1] for y in (x.q, x.k, x.v, x.g, x.beta)]
            kept = cast.qdq(oracle(*tokens, kept, **x.options()).final_state)
            first, ring = t + 1, []
    got = run(x, **TWO, anchor=anchor)
    near(got.o[0], torch.stack(rows))
    near(got.final_state, kept)
    near(got.read, fmt.qdq(kept))
    assert got.cursor.tolist() == [2] and got.ring is not None
    near(got.ring.v[0, :2], x.v[0, 8:])
    near(got.ring.u[0, :2], torch.stack([u for _, u in ring]))
    tokens = [None if y is None else y[:, 8:] for y in (x.q, x.k, x.v, x.g, x.beta)]
    near(got.dense, oracle(*tokens, kept, **x.options()).final_state)


def test_read_error_never_enters_an_fp32_anchor() -> None:
    x = make_inputs("gdn", tokens=40, slow_decay=True, **SMALL)
    got, exact = run(x, **TWO), run(x)
    token = run(x, write="token", **INT8)
    scale = exact.final_state.norm()
    assert (got.final_state - exact.final_state).norm() < 1e-6 * scale < (token.final_state - exact.final_state).norm()
    assert (got.o - exact.o).norm() > 1e-4 * exact.o.norm()


# What keys a write, and what continues --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "want"),
    [("token", [11, 12, 13, 14]), ("chunk", [11, 13, 14]), ("replay", [11, 13]), ("two_precision", [11, 13])],
)
def test_a_write_is_keyed_by_its_own_token_and_hand_over_by_the_one_before(
    write: str, want: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    plain = Quantizer.qdq

    def spy(self: Quantizer, S: Tensor, identity: Identity | None = None) -> Tensor:
        assert identity is not None and S.dim() == 4
        seen.append((int(identity.sequence), int(identity.position)))
        return plain(self, S, identity)

    monkeypatch.setattr(Quantizer, "qdq", spy)
    x = make_inputs("gdn", batch=2, tokens=5, **SMALL)
    options: dict[str, Any] = {"write": write, "chunk_size": 2, "window": 2, "prefix_lengths": ints(2, 5), **INT8}
    run(x, position=ints(10, 99), sequence_ids=torch.tensor([1 << 40, 7]), **options)
    # chunk is left off its grid: what a reader sees of it is rounded as a write of the last token would be
    assert seen == [(1 << 40, p) for p in want]
    seen.clear()
    run(x, **options)
    assert seen == [(0, p - 10) for p in want]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_cuts_anywhere_continue_the_uncut_call(data: st.DataObject) -> None:
    options = data.draw(st.sampled_from(list(WRITES.values())))
    factors = data.draw(st.sampled_from([None, "int8"])) if options is REPLAY else None
    total = 14
    prefixes = [data.draw(st.integers(0, total)) for _ in range(2)]
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    x = make_inputs("kda", batch=2, tokens=total, **SMALL).map(Tensor.requires_grad_)
    options = {**INT8, **options, "factors": factors}
    whole = run(x, prefix_lengths=ints(*prefixes), **options)
    before, outs = None, []
    for a, b in itertools.pairwise(cuts):
        rest = ints(*(min(max(p - a, 0), b - a) for p in prefixes))
        before = run(x, a, b, before, prefix_lengths=rest, position=a, **options)
        outs.append(before.o)
    assert before is not None
    near(torch.cat(outs, 1), whole.o)
    for name in ("final_state", "carry", "dense", "read"):
        if getattr(whole, name) is not None:
            near(getattr(before, name), getattr(whole, name))
    assert before.cursor.tolist() == whole.cursor.tolist() and before.written.tolist() == whole.written.tolist()
    leaves = list(x.leaves().values())
    ours, theirs = (
        torch.autograd.grad(o.square().sum() + r.dense.square().sum(), leaves)
        for o, r in ((torch.cat(outs, 1), before), (whole.o, whole))
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_prefix_after_a_carried_state_starts_from_what_a_reader_sees(write: dict[str, Any]) -> None:
    x, options = make_inputs("gdn", tokens=8, **SMALL), {**INT8, **write}
    before = run(x, 0, 3, **options)
    again = run(x, 3, 8, before, prefix_lengths=ints(5, 5), **options)
    tokens = [y[:, 3:] for y in (x.q, x.k, x.v, x.g, x.beta) if y is not None]
    assert torch.equal(again.o, oracle(*tokens, before.dense, **x.options()).o) and again.cursor.tolist() == [-1, -1]


def test_a_call_without_tokens_changes_nothing() -> None:
    x = make_inputs("gdn", tokens=6, **SMALL)
    for options in (REPLAY, TWO):
        before = run(x, 0, 6, **options)
        after = run(x, 6, 6, before, **options)
        for name in ("final_state", "carry", "dense", "cursor"):
            assert torch.equal(getattr(before, name), getattr(after, name)), name
        assert before.ring is not None and after.ring is not None and torch.equal(before.ring.u, after.ring.u)


# Gates, given values, gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["bf16", "fp16"])
@pytest.mark.parametrize("write", ["exact", "token", "replay", "two_precision"])
def test_a_rounded_gate_is_rounded_once_before_any_use_and_its_gradient_passes(gate: str, write: str) -> None:
    x = make_inputs("kda", tokens=7, hostile="reset", **SMALL)
    assert x.g is not None
    options = {"write": write, "prefix_lengths": ints(2, 2), "window": 4, **INT8}
    kept = x.g.to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[gate])).double()
    assert not torch.equal(kept, x.g)
    leaf, other = x.g.clone().requires_grad_(), kept.clone().requires_grad_()
    results = [
        oracle(x.q, x.k, x.v, g, x.beta, x.initial_state, **x.options(), **options, gate=name)
        for g, name in ((leaf, gate), (other, None))
    ]
    assert torch.equal(results[0].o, results[1].o) and torch.equal(results[0].dense, results[1].dense)
    grads = [torch.autograd.grad(r.o.sum(), g)[0] for r, g in zip(results, (leaf, other), strict=True)]
    assert torch.equal(*grads) and grads[0].isfinite().all()


def test_given_values_stand_in_for_roundings() -> None:
    x = make_inputs("gdn", batch=1, tokens=4, **SMALL).map(Tensor.requires_grad_)
    options = {"write": "replay", "window": 2, "factors": "int8", **INT8}
    plain = run(x, **options)
    states = {(0, p, "state"): torch.full((4, 6, 5), float(p)) for p in (-1, 1, 3)}
    got = run(x, **options, given=lambda i, p, name, value, rounded: states.get((i, p, name)))
    assert (got.final_state == 3.0).all() and not torch.equal(got.o, plain.o)
    factor = run(x, 0, 1, **options, given=lambda i, p, name, *_: torch.ones(4, 5) if name == "u" else None)
    assert factor.ring is not None and (factor.ring.u[0, 0] == 1.0).all()
    # The cotangent goes on to what the value stands for.
    grads = torch.autograd.grad(got.final_state.sum(), [x.v, x.initial_state])  # type: ignore[list-item]
    assert all(y.any() and y.isfinite().all() for y in grads)


@pytest.mark.parametrize("write", ["token", "chunk", "replay", "two_precision"])
def test_gradcheck_passes_where_nothing_is_rounded(write: str) -> None:
    x = make_inputs("kda", batch=1, tokens=5, key_heads=1, value_heads=2, key_dim=3, value_dim=2, dtype=torch.float64)
    leaves = x.map(Tensor.requires_grad_)
    options = {**x.options(), "write": write, "state_format": "fp32", "window": 2, "chunk_size": 2}

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        got = oracle(*tensors, prefix_lengths=ints(1), **options)
        return got.o, got.dense

    assert torch.autograd.gradcheck(call, list(leaves.leaves().values()), fast_mode=True)


@pytest.mark.parametrize("option", [{"write": "ring"}, {"gate": "fp8"}])
def test_what_has_no_loop_is_refused_by_name(option: dict[str, str]) -> None:
    x = make_inputs("gdn", tokens=1, **SMALL)
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        run(x, **option)


def test_the_loop_in_fp32_is_the_same_loop() -> None:
    x = make_inputs("gdn", tokens=6, **SMALL)
    for options in ({"write": "exact"}, REPLAY, TWO):
        single, double = (run(x, **options, dtype=dtype) for dtype in (torch.float32, torch.float64))
        assert single.o.dtype == single.dense.dtype == torch.float32
        torch.testing.assert_close(single.o.double(), double.o, rtol=1e-4, atol=1e-5)
