"""Long runs: where fp32 and float64 stay together, what continues bit for bit, and how errors grow (semantics §5, 8).

257 tokens by default, 4,096 with `LATTN_CONFORMANCE=full`.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lattn_compile import EncodedState, Policy, ReplayState, encode_state, linear_attention
from lattn_compile.formats import REGISTRY, Format, Fp8, Fp32, Int8, Nvfp4
from lattn_compile.modes import Chunk, Replay, Token, TwoPrecision
from lattn_compile.testing import Inputs, OracleResult, make_inputs, oracle

LONG = 4096 if os.environ.get("LATTN_CONFORMANCE") == "full" else 257
SITE = 2
IDS, START = [3, 2**33 + 1], torch.tensor([5, 2**32 - 7])

ROUNDED = [cls() for cls in REGISTRY if cls is not Fp32]
by_name = {"ids": lambda x: str(x)}


def inputs(kind: str = "gdn", tokens: int = LONG, *, batch: int = 2, dtype: Any = torch.float32, **more: Any) -> Inputs:
    sizes = {"key_heads": 1, "value_heads": 2, "key_dim": 32, "value_dim": 24, **more}
    return make_inputs(kind, batch=batch, tokens=tokens, dtype=dtype, **sizes)


def call(x: Inputs, policy: Policy | None, a: int = 0, b: int | None = None, state: Any = ..., **more: Any) -> Any:
    """Tokens a to b from `state` (default: the inputs' own): (o, state)."""
    tokens = [None if y is None else y[:, a:b] for y in (x.q, x.k, x.v, x.g, x.beta)]
    identity = {"position": START[: x.q.shape[0]] + a, "sequence_ids": IDS[: x.q.shape[0]], "site_id": SITE}
    return linear_attention(
        *tokens,
        rule=x.rule,
        use_qk_l2norm_in_kernel=x.qk_l2norm,
        initial_state=x.initial_state if state is ... else state,
        output_final_state=True,
        policy=policy,
        **(identity | more),
    )


def loop(x: Inputs, policy: Policy | None, **more: Any) -> OracleResult:
    """The free-running float64 loop."""
    options = {} if policy is None else policy.op_kwargs()
    identity = {"position": START[: x.q.shape[0]], "sequence_ids": torch.tensor(IDS[: x.q.shape[0]]), "site_id": SITE}
    with torch.no_grad():
        return oracle(*x.tensors(), **x.options(), **options, **identity, **more)


def same_state(a: Any, b: Any) -> bool:
    """Bit for bit, whatever a state is made of."""
    one, two = pytree.tree_leaves(a), pytree.tree_leaves(b)
    bits = [(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in zip(one, two, strict=True)]
    return all(torch.equal(x, y) for x, y in bits)


# fp32 and float64, free running ---------------------------------------------------------------------------------------


def ratio(o: Tensor, rounded: Tensor, exact: Tensor) -> float:
    return float((o.double() - rounded).norm() / (exact - rounded).norm())


@pytest.mark.parametrize("fmt", ROUNDED, **by_name)
@pytest.mark.parametrize("write", [Chunk(64), TwoPrecision(16)], **by_name)
@pytest.mark.parametrize(("kind", "rounding"), [("gdn", "nearest"), ("kda", "stochastic")])
def test_1024_tokens_of_chunk_and_two_precision_stay_within_a_tenth_of_their_error(
    fmt: Format, write: Any, kind: str, rounding: str
) -> None:
    if isinstance(write, TwoPrecision):
        write = TwoPrecision(16, read=fmt)
    policy = Policy(fmt, write=write, rounding=rounding)
    x = inputs(kind, 1024, batch=1)
    o, _ = call(x, policy)
    assert ratio(o, loop(x, policy).o, loop(x, None).o) <= 0.1


@pytest.mark.parametrize("fmt", ROUNDED, **by_name)
@pytest.mark.parametrize("write", [Token(), Replay(8), Replay(4, factors="int8"), Replay(4, factors="bf16")], **by_name)
@pytest.mark.parametrize(("kind", "rounding"), [("gdn", "nearest"), ("kda", "stochastic")])
def test_16_tokens_of_token_and_replay_stay_within_a_tenth_of_their_error(
    fmt: Format, write: Any, kind: str, rounding: str
) -> None:
    policy = Policy(fmt, write=write, rounding=rounding)
    x = inputs(kind, 96)
    o, _ = call(x, policy, prefix_lengths=80)
    prefix = torch.tensor(80)
    got, want, exact = (y[:, 80:] for y in (o, loop(x, policy, prefix_lengths=prefix).o, loop(x, None).o))
    assert ratio(got, want, exact) <= 0.1


@pytest.mark.parametrize("kind", ["gdn", "kda", "gla", "delta"])
def test_the_anchor_of_two_precision_is_the_exact_recurrence(kind: str) -> None:
    x = inputs(kind, slow_decay=True)
    state = call(x, Policy(write=TwoPrecision(16)))[1]
    assert isinstance(state, ReplayState) and state.cursor.tolist() == [LONG % 16] * 2
    exact = loop(x, None).final_state
    rate = 0.0 if x.g is None else float(x.g.abs().mean())
    bound = 5e-6 + 2.0**-24 * min(LONG, 1 / rate if rate else LONG)
    assert (state.dense() - exact).norm() <= bound * exact.norm()
    # Read error is there, and is much larger.
    assert (state.read.decoded() - state.anchor.decoded()).norm() > 1e-3 * exact.norm()  # type: ignore[union-attr]


@pytest.mark.parametrize("fmt", [Int8(), Fp8(), Nvfp4()], **by_name)
@pytest.mark.parametrize("write", [Token(), Replay(16)], **by_name)
def test_the_error_of_a_chaotic_run_is_that_of_the_loop_within_a_twentieth(fmt: Format, write: Any) -> None:
    """Not token by token, but over the trajectory (semantics §8), and over enough heads for a mean to be one."""
    x = inputs("gdn", 257, batch=2, value_heads=8, slow_decay=True)
    policy = Policy(fmt, write=write)
    exact, want, o = loop(x, None).o, loop(x, policy).o, call(x, policy)[0].double()
    ours, theirs = ((y - exact).flatten(2).norm(dim=-1).mean() for y in (o, want))
    assert abs(ours / theirs - 1) <= 0.05
    if isinstance(write, Token):
        assert ratio(o, want, exact) > 0.1  # token by token they are far apart


# Bit for bit ----------------------------------------------------------------------------------------------------------

WRITTEN = [
    *(Policy(fmt) for fmt in ROUNDED),
    Policy(Int8(16), readout="after_write", feedback="int4"),
    Policy(Fp8(8), rounding="stochastic", seed=7, rotation="hadamard_k"),
    Policy(Nvfp4(), rounding="stochastic", feedback="int8", gate="bf16"),
    Policy(Fp32(), gate="fp16"),
]


@pytest.mark.parametrize("policy", WRITTEN, **by_name)
def test_token_calls_one_by_one_are_one_call_and_every_stored_state_restarts_it(policy: Policy) -> None:
    x = inputs("kda", 40)
    whole, last = call(x, policy)
    states, outs = [x.initial_state], []
    for t in range(40):
        o, state = call(x, policy, t, t + 1, states[-1])
        outs.append(o)
        states.append(state)
    assert torch.equal(torch.cat(outs, 1), whole) and same_state(states[-1], last)
    for t in range(1, 40):
        o, state = call(x, policy, t, None, states[t])
        assert torch.equal(o, whole[:, t:]) and same_state(state, last)


@pytest.mark.parametrize("policy", WRITTEN, **by_name)
def test_a_window_of_one_without_factors_is_token_mode(policy: Policy) -> None:
    x = inputs("gdn", 40)
    token, state = call(x, policy, prefix_lengths=[0, 7])
    replay, other = call(x, _with(policy, Replay(1)), prefix_lengths=[0, 7])
    assert isinstance(state, EncodedState) and isinstance(other, ReplayState)
    assert torch.equal(token, replay) and torch.equal(state.dense(), other.dense())
    assert all(same_state(y, other.anchor.tensors[name]) for name, y in state.tensors.items())


def _with(policy: Policy, write: Any) -> Policy:
    options = {name: getattr(policy, name) for name in ("readout", "rounding", "seed", "feedback", "rotation", "gate")}
    return Policy(policy.state, write=write, **options)


CUT = [
    *(_with(policy, Chunk(8)) for policy in WRITTEN),
    *(_with(policy, Replay(8)) for policy in WRITTEN),
    Policy(Int8(), write=Replay(8, factors="int8"), readout="after_write"),
    Policy(Fp8(), write=Replay(4, factors="fp8_e4m3"), rounding="stochastic"),
    Policy(write=TwoPrecision(8)),
    Policy(write=TwoPrecision(8, read=Int8(), anchor="bf16"), rounding="stochastic", rotation="hadamard_k"),
]


@pytest.mark.parametrize("policy", CUT, **by_name)
def test_a_cut_where_a_state_is_stored_changes_no_bit(policy: Policy) -> None:
    x = inputs("gdn", 40)
    whole, last = call(x, policy)
    state: Any = x.initial_state
    outs = []
    for a, b in itertools.pairwise((0, 8, 16, 32, 40)):
        o, state = call(x, policy, a, b, state)
        assert state.cursor.tolist() == [0, 0]
        outs.append(o)
    assert torch.equal(torch.cat(outs, 1), whole) and same_state(state, last)


@pytest.mark.parametrize("policy", [WRITTEN[0], *WRITTEN[-4:], *CUT], **by_name)
def test_a_saved_state_continues_as_the_live_one_in_the_middle_of_a_window_too(policy: Policy) -> None:
    x = inputs("gdn", 40)
    for cut in (21, 24):
        _, live = call(x, policy, 0, cut)
        file = io.BytesIO()
        torch.save(live, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is type(live) and torch.equal(live.dense(), loaded.dense())
        (o, state), (again, other) = (call(x, policy, cut, None, s) for s in (live, loaded))
        assert torch.equal(o, again) and same_state(state, other)


@pytest.mark.parametrize("policy", [WRITTEN[0], *WRITTEN[-4:], *CUT], **by_name)
def test_a_state_continued_in_another_order_is_the_same_sequence(policy: Policy) -> None:
    x = inputs("gdn", 40)
    whole, last = call(x, policy)
    state = call(x, policy, 0, 24)[1]
    swap = torch.tensor([1, 0])
    other = x.map(lambda y: y[swap])
    identity = {"position": START[swap] + 24, "sequence_ids": [IDS[1], IDS[0]]}
    o, state = call(other, policy, 24, None, state.index_select(swap), **identity)
    assert torch.equal(o[swap], whole[:, 24:]) and torch.equal(state.dense()[swap], last.dense())


def test_a_carried_state_knows_the_position_of_its_next_token() -> None:
    for write in (Token(), Replay(4), TwoPrecision(4)):
        policy = Policy(Int8(), write=write, rounding="stochastic")
        x = inputs("gdn", 24)
        whole = call(x, policy)[0]
        state = call(x, policy, 0, 16)[1]
        assert torch.equal(call(x, policy, 16, None, state, position=None)[0], whole[:, 16:])
        assert not torch.equal(call(x, policy, 16, None, state, position=17)[0], whole[:, 16:])


def test_random_numbers_do_not_depend_on_who_else_is_in_the_batch() -> None:
    policy = Policy(Int8(), rounding="stochastic", seed=11)
    x = inputs("gdn", 20)
    together = call(x, policy)[0]
    for i in range(2):
        alone = Inputs(**{**x.__dict__, **{name: y[i : i + 1] for name, y in x.leaves().items()}})
        o = call(alone, policy, position=START[i : i + 1], sequence_ids=[IDS[i]])[0]
        assert torch.equal(o[0], together[i])
    other = call(x, Policy(Int8(), rounding="stochastic", seed=12))[0]
    assert not torch.equal(other, together)


# How errors grow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [Int8(), Fp8(), Nvfp4()], **by_name)
@pytest.mark.parametrize("write", [Token(), Replay(8)], **by_name)
def test_error_feedback_lowers_the_error_and_more_bits_lower_it_more(fmt: Format, write: Any) -> None:
    x = inputs("gdn", slow_decay=True)
    exact = loop(x, None).final_state
    errors = [
        float((call(x, Policy(fmt, write=write, feedback=feedback))[1].dense() - exact).norm() / exact.norm())
        for feedback in (None, "int4", "int8")
    ]
    assert errors[1] < 0.35 * errors[0] and errors[2] < 0.35 * errors[1], errors


def test_a_longer_window_lowers_the_error() -> None:
    x = inputs("gdn", slow_decay=True)
    exact = loop(x, None).o
    errors = [float((call(x, Policy(Int8(), write=Replay(w)))[0] - exact).norm()) for w in (1, 4, 16)]
    assert errors[0] > errors[1] > errors[2]


def test_stochastic_rounding_is_unbiased_over_a_trajectory() -> None:
    """The mean over sequences that differ in nothing but their random numbers comes near the exact state."""
    one = inputs("gdn", 32, batch=1, slow_decay=True)
    many = one.map(lambda y: y.expand(64, *y.shape[1:]))
    state = call(many, Policy(Int8(), rounding="stochastic"), position=0, sequence_ids=list(range(64)))[1].dense()
    exact = loop(one, None).final_state
    single = (state - exact).flatten(1).norm(dim=1).mean()
    assert (state.mean(0, keepdim=True) - exact).norm() < 0.2 * single  # 1/8 for 64 independent ones


@pytest.mark.skipif(LONG < 4096, reason="LATTN_CONFORMANCE=full: the hazard shows after hundreds of tokens")
def test_nvfp4_grows_in_token_mode_and_not_in_replay() -> None:
    x = inputs("gdn", 2048, batch=1, key_dim=64, value_dim=64, slow_decay=True)
    exact = loop(x, None).final_state
    token, replay = (call(x, Policy(Nvfp4(), write=w))[1].dense() for w in (Token(), Replay(16)))
    assert (replay - exact).norm() < 0.5 * (token - exact).norm()


def test_a_stored_state_that_is_encoded_by_hand_starts_like_a_dense_one() -> None:
    x = inputs("gdn", 10)
    assert x.initial_state is not None
    o = call(x, Policy(Int8()), state=encode_state(x.initial_state, Int8()))[0]
    assert torch.equal(o, call(x, Policy(Int8()))[0])


def test_the_page_on_drift_is_made_of_its_measurement() -> None:
    """Numbers in docs/drift.md are those of benchmarks/results/drift.json: `python docs/write_drift.py` writes both."""
    root = Path(__file__).parent.parent
    pages = runpy.run_path(str(root / "docs" / "write_drift.py"))["pages"]
    data = json.loads((root / "benchmarks" / "results" / "drift.json").read_text(encoding="utf-8"))
    for name, text in pages(data).items():
        assert (root / "docs" / name).read_text(encoding="utf-8") == text, name
    measured = runpy.run_path(str(root / "benchmarks" / "drift.py"))
    assert [row["policy"] for row in data["rows"] if row["kind"] == "gdn"] == [str(p) for p in measured["policies"]()]
