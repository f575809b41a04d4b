"""The chunked reference: it is the float64 token loop, forward and backward, whatever the shapes, gates and grid."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Identity
from lattn_compile.kernels.reference import chunk, span
from tests.kernels.reference.chunk_cases import DECAYS, RULES, Case, assert_close, make_case, relative

SHAPES = {
    "rule": st.sampled_from(RULES),
    "decay": st.sampled_from(DECAYS),
    "lengths": st.lists(st.sampled_from([0, 1, 2, 5, 17, 63, 64, 65, 100]), min_size=1, max_size=3).map(tuple),
    "spare": st.sampled_from([0, 3]),
    "key_heads": st.sampled_from([1, 2]),
    "groups": st.sampled_from([1, 2, 3]),
    "key_dim": st.sampled_from([1, 3, 8, 20]),
    "value_dim": st.sampled_from([1, 5, 8]),
    "beta": st.booleans(),
    "qk_l2norm": st.booleans(),
    "seed": st.integers(0, 10**6),
}
BUDGETS = st.sampled_from([1, span.SPAN_BUDGET])


@settings(max_examples=75, deadline=None)
@given(st.fixed_dictionaries(SHAPES), BUDGETS)
def test_exact_float64_equals_the_token_loop_with_all_gradients(shape: dict[str, Any], budget: int) -> None:
    case = make_case(**shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span, "SPAN_BUDGET", budget)
        assert_close(case, case.both(), case.expected(), 1e-9)


@settings(max_examples=75, deadline=None)
@given(
    st.fixed_dictionaries(SHAPES),
    BUDGETS,
    st.sampled_from([1, 3, 16, 17, 64, 65, 100, 128]),
    st.sampled_from(["int8", "fp8_e4m3/4x1", "nvfp4", "bf16"]),
    st.sampled_from(["before_write", "after_write"]),
    st.one_of(st.none(), st.lists(st.integers(0, 127), min_size=3, max_size=3)),
)
def test_rounding_on_the_grid_in_float64_equals_the_token_loop_with_all_gradients(
    shape: dict[str, Any], budget: int, chunk_size: int, state_format: str, readout: str, leads: list[int] | None
) -> None:
    offsets = None if leads is None else tuple(x % chunk_size for x in leads[: len(shape["lengths"])])
    case = make_case(**shape, offsets=offsets, chunk_size=chunk_size, state_format=state_format, readout=readout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span, "SPAN_BUDGET", budget)
        assert_close(case, case.both(), case.expected(), 1e-9)


# Field reports B14b, B33-B37: gates that break chunk forms built on differences of cumulative sums or on exponentials
# of non-causal pairs. One value for all 130 tokens (two block borders), then exceptions `(where, value)`.
Exceptions = list[tuple[Any, float]]
GATES: dict[str, tuple[float, Exceptions]] = {
    "no decay": (0.0, []),
    "-90 first, then slow": (-0.01, [(0, -90.0)]),
    "-200 next to slow": (-0.01, [(slice(5, None, 9), -200.0)]),
    "-80 everywhere": (-80.0, []),
    "reset at the first token": (-0.1, [(0, -torch.inf)]),
    "reset inside, at borders, twice in a row": (-0.1, [([10, 11, 31, 32, 63, 64, 127, 129], -torch.inf)]),
    "reset everywhere": (-torch.inf, []),
    "slow": (-1e-4, []),
}
CHANNEL_GATES: dict[str, tuple[float, Exceptions]] = {
    "all at the lower bound": (-5.0, []),
    "0, -0.5, -2.5, -3 and -5 side by side": (
        -5.0,
        [((..., 0), 0.0), ((..., 1), -0.5), ((..., 2), -2.5), ((..., 3), -3.0), ((slice(None, None, 7), 0, 4), 0.0)],
    ),
    "one channel reset": (-0.1, [((slice(3, None, 20), 0, 2), -torch.inf)]),
}


def _gate(decay: str, fill: float, exceptions: Exceptions) -> Tensor:
    g = torch.full((130, 2) if decay == "head" else (130, 2, 8), fill, dtype=torch.float64)
    for where, value in exceptions:
        g[where] = value
    return g


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("decay", "gate"),
    [("head", name) for name in GATES] + [("channel", name) for name in GATES | CHANNEL_GATES],
)
def test_hostile_gates_are_exact_and_have_finite_gradients(rule: str, decay: str, gate: str) -> None:
    case = make_case(rule=rule, decay=decay)
    case.g = _gate(decay, *(GATES | CHANNEL_GATES)[gate])
    want = case.expected()
    assert all(x.isfinite().all() for x in want.values())
    assert_close(case, case.both(), want, 1e-9)
    single = case.map(Tensor.float)
    got = single.both()
    assert all(x.isfinite().all() for x in got.values())
    assert_close(single, got, single.expected(), 5e-6)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gate_gradients_do_not_cancel_under_strong_decay(decay: str) -> None:
    # Field report B44. They are of order exp(-20) here: a difference of sums of order 1 would leave only noise.
    case = make_case(decay=decay, dtype=torch.float32)
    assert case.g is not None
    case.g[:] = -20 + 5 * case.g.clamp(-1, 0)
    got, want = case.both()["dg"][1:].double(), case.expected()["dg"][1:]
    assert 0 < want.abs().max() < 1e-6
    assert (got - want).norm() / want.norm() < 5e-6


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_reset_forgets_the_initial_state(decay: str) -> None:
    case = make_case(decay=decay, dtype=torch.float32)
    assert case.g is not None
    case.g[20] = -torch.inf
    other = dataclasses.replace(case, state=case.state + 100)
    ours, theirs = case.both(), other.both()
    assert torch.equal(ours["final"], theirs["final"]) and torch.equal(ours["o"][20:], theirs["o"][20:])
    assert (ours["dg"][20] == 0).all() and not torch.equal(ours["o"][:20], theirs["o"][:20])


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_zero_keys_and_zero_beta_have_finite_exact_gradients(rule: str, decay: str) -> None:
    case = make_case(rule=rule, decay=decay)
    assert case.beta is not None
    case.k[::5], case.q[::7], case.beta[::3] = 0, 0, 0
    want = case.expected()
    assert all(x.isfinite().all() for x in want.values())
    assert_close(case, case.both(), want, 1e-9)
    single = case.map(Tensor.float)
    assert_close(single, single.both(), want, 5e-6)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_masked_tokens_are_the_exact_identity(rule: str, decay: str) -> None:
    case = make_case(rule=rule, decay=decay, dtype=torch.float32, lengths=(64,))
    assert case.beta is not None
    case.beta[5:] = 0
    if case.g is not None:
        case.g[5:] = 0
    short = dataclasses.replace(case, lengths=torch.tensor([5]))
    # The blocks differ in size, so the five written tokens may differ in their last bits.
    assert relative(case.forward()["final"], short.forward()["final"]) < 3e-7
    case.beta[:] = 0
    if case.g is not None:
        case.g[:] = 0
    assert torch.equal(case.forward()["final"], case.state)


@pytest.mark.parametrize(("decay", "g"), [("none", 0.0), *((d, g) for d in ("head", "channel") for g in (0.0, -0.01))])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("kind", ["repeated", "cosine 0.9"])
def test_correlated_keys_hold_the_fp32_bound(decay: str, g: float, beta: float, kind: str) -> None:
    case = make_case(decay=decay, lengths=(512,), key_dim=32, value_dim=16, dtype=torch.float32)
    direction = torch.nn.functional.normalize(case.k[:1], dim=-1)
    noise = torch.nn.functional.normalize(case.k, dim=-1)
    case.k = direction.expand_as(case.k).clone() if kind == "repeated" else 0.9 * direction + 0.19**0.5 * noise
    assert case.beta is not None
    case.beta.fill_(beta)
    if case.g is not None:
        case.g.fill_(g)
    double = case.map(Tensor.double)
    want = double.both()
    assert_close(case, {n: want[n] for n in ("o", "final")}, double.expected(gradients=False), 1e-9)
    # What a token loop in fp32 reaches. Solving I + A in fp32 is several times worse.
    assert_close(case, case.both(), want, 3e-6)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_fp32_holds_the_bound_over_4096_tokens(rule: str, decay: str) -> None:
    case = make_case(rule=rule, decay=decay, lengths=(4096,), groups=1, key_dim=64, value_dim=32, dtype=torch.float32)
    if case.g is not None:
        case.g.fill_(-1e-3)
    double = case.map(Tensor.double)
    want = double.both()
    assert_close(case, {n: want[n] for n in ("o", "final")}, double.expected(gradients=False), 1e-9)
    assert_close(case, case.both(), want, 5e-6)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(256, 1), (1, 256), (100, 129), (256, 256)])
def test_wide_and_odd_heads(decay: str, key_dim: int, value_dim: int) -> None:
    case = make_case(decay=decay, lengths=(70,), key_dim=key_dim, value_dim=value_dim)
    assert_close(case, case.both(), case.expected(), 1e-9)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rule", RULES)
def test_gradcheck(rule: str, decay: str) -> None:
    case = make_case(rule=rule, decay=decay, lengths=(3, 0, 19), key_dim=3, value_dim=2)
    names = [*case.tensors(), "state"]

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
            ctx.case = dataclasses.replace(case, **dict(zip(names, inputs, strict=True)))
            out = ctx.case.forward()
            return out["o"], out["final"]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            return tuple(ctx.case.backward(*grads).values())

    inputs = [getattr(case, name).clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(Kernel.apply, inputs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("readout", ["before_write", "after_write"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (60, 20), (7, 5)])
@pytest.mark.parametrize("chunk_size", [16, 100])
def test_a_run_cut_on_the_grid_has_the_bits_of_the_uncut_run(
    decay: str, readout: str, key_dim: int, value_dim: int, chunk_size: int
) -> None:
    length = 5 * chunk_size + 7
    case = make_case(
        decay=decay, lengths=(length,), key_dim=key_dim, value_dim=value_dim, dtype=torch.float32,
        chunk_size=chunk_size, state_format="int8", readout=readout,
    )  # fmt: skip
    whole = case.forward()
    state, first, pieces = case.state, 0, []
    for tokens in (chunk_size, 3 * chunk_size, chunk_size, length - 5 * chunk_size):
        rows = slice(first, first + tokens)
        piece = dataclasses.replace(
            case,
            **{name: x[rows].clone() for name, x in case.tensors().items()},
            state=state,
            rooms=torch.tensor([tokens]),
            lengths=torch.tensor([tokens]),
        ).forward()
        pieces.append(piece["o"])
        state, first = piece["final"], first + tokens
    assert torch.equal(state, whole["final"]) and torch.equal(torch.cat(pieces), whole["o"])


def test_a_run_cut_off_the_grid_continues_with_its_offset() -> None:
    case = make_case(lengths=(150,), chunk_size=40, state_format="int8", readout="after_write")
    whole = case.forward()
    state, pieces = case.state, []
    for first, last in ((0, 13), (13, 97), (97, 97), (97, 150)):
        piece = dataclasses.replace(
            case,
            **{name: x[first:last] for name, x in case.tensors().items()},
            state=state,
            rooms=torch.tensor([last - first]),
            lengths=torch.tensor([last - first]),
            offsets=torch.tensor([first]),
        ).forward()
        pieces.append(piece["o"])
        state = piece["final"]
    assert relative(state, whole["final"]) < 1e-12 and relative(torch.cat(pieces), whole["o"]) < 1e-12


def test_after_write_the_last_token_of_a_chunk_reads_the_rounded_state() -> None:
    case = make_case(lengths=(20,), groups=1, chunk_size=20, state_format="int8", readout="after_write")
    after = case.forward()
    before = dataclasses.replace(case, readout="before_write").forward()
    exact = dataclasses.replace(case, state_format=None).forward()
    q = torch.nn.functional.normalize(case.q[19, 0], dim=0)
    assert torch.equal(after["final"], parse("int8").qdq(exact["final"]))
    assert relative(after["o"][19, 0], case.scale * q @ after["final"][0, 0]) < 1e-5
    assert torch.equal(after["o"][:19], exact["o"][:19]) and torch.equal(before["o"], exact["o"])


ROUNDINGS = {
    "stochastic": {"rounding": "stochastic", "seed": 3, "site_id": 5},
    "feedback": {"feedback": "int4"},
    "rotation": {"rotation": "hadamard_k"},
}


@pytest.mark.parametrize("readout", ["before_write", "after_write"])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_every_line_is_rounded_as_the_write_of_its_token_and_a_final_state_not_at_all(name: str, readout: str) -> None:
    case = make_case(
        lengths=(40, 33, 0, 7), spare=1, offsets=(0, 7, 3, 5), chunk_size=10, state_format="int8", readout=readout,
        rounding=ROUNDINGS[name], position=70,
    )  # fmt: skip
    got = case.both()
    assert_close(case, got, case.expected(), 1e-9)
    plain = dataclasses.replace(case, rounding={}).forward()
    assert relative(got["o"][case.inside], plain["o"][case.inside]) > 1e-6


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_run_cut_on_the_grid_has_the_bits_of_the_uncut_run_if_its_caller_writes_the_state(name: str) -> None:
    case = make_case(
        lengths=(25,), chunk_size=10, state_format="int8", rounding=ROUNDINGS[name], position=4, dtype=torch.float32
    )
    whole, quantize = case.forward(), case.options()["quantize"]
    state, pieces = case.state, []
    for first, last in ((0, 10), (10, 25)):
        piece = dataclasses.replace(
            case,
            **{name: x[first:last].clone() for name, x in case.tensors().items()},
            state=state,
            rooms=torch.tensor([last - first]),
            lengths=torch.tensor([last - first]),
            position=4 + first,
        ).forward()
        pieces.append(piece["o"])
        state = quantize.qdq(piece["final"], Identity(torch.tensor([4 + last - 1]), case.names))
    assert torch.equal(torch.cat(pieces), whole["o"]) and torch.equal(piece["final"], whole["final"])


@pytest.mark.parametrize("quantized", [False, True])
def test_an_empty_sequence_returns_its_state_and_its_gradient_bit_for_bit(quantized: bool) -> None:
    options = {"state_format": "int8", "offsets": (5, 63, 0)} if quantized else {}
    case = make_case(lengths=(0, 70, 0), spare=1, dtype=torch.float32, **options)
    got, (_, grad_final) = case.both(), case.cotangents()
    for i in (0, 2):
        assert torch.equal(got["final"][i], case.state[i]) and torch.equal(got["dstate"][i], grad_final[i])
    alone = make_case(lengths=(0,), dtype=torch.float32)
    assert torch.equal(alone.forward()["final"], alone.state)
    assert alone.forward()["final"].data_ptr() != alone.state.data_ptr()


def test_no_sequences_at_all() -> None:
    got = make_case(lengths=(), spare=0).both()
    assert got["final"].shape == (0, 2, 8, 6) and got["o"].shape == (0, 2, 6)


@pytest.mark.parametrize("decay", DECAYS)
def test_inputs_are_not_changed_and_results_share_no_memory_with_them(decay: str) -> None:
    case = make_case(decay=decay, lengths=(64,), key_heads=1, groups=1, dtype=torch.float32, qk_l2norm=False)
    grad_o, grad_final = case.cotangents()
    inputs = [*case.tensors().values(), case.state, grad_o, grad_final]
    copies = [x.clone() for x in inputs]
    results = case.forward() | case.backward(grad_o, grad_final)
    assert all(torch.equal(x, y) for x, y in zip(inputs, copies, strict=True))
    assert not {x.data_ptr() for x in results.values()} & {x.data_ptr() for x in inputs}


def test_absent_cotangents_are_zero_and_absent_names_are_not_written() -> None:
    case = make_case()
    grad_o, grad_final = case.cotangents()
    for given_o, given_final in ((grad_o, None), (None, grad_final), (None, None)):
        got = case.backward(given_o, given_final)
        want = case.backward(
            torch.zeros_like(grad_o) if given_o is None else given_o,
            torch.zeros_like(grad_final) if given_final is None else given_final,
        )
        assert all(torch.equal(got[name], want[name]) for name in want)
    only = {"dk": torch.zeros_like(case.k)}
    chunk.backward(grad_o, grad_final, *case.arguments(), only, **case.options())
    assert torch.equal(only["dk"], case.backward(grad_o, grad_final)["dk"])


def test_low_precision_and_strided_inputs_are_computed_in_the_states_dtype() -> None:
    case = make_case(dtype=torch.float32, decay="channel", groups=1)
    low = {name: x.bfloat16() for name, x in case.tensors().items()}
    fused = torch.cat([low["q"], low["k"]], -1)
    strided = dataclasses.replace(case, **low | {"q": fused[..., :8], "k": fused[..., 8:]})
    upcast = dataclasses.replace(case, **{name: x.float() for name, x in low.items()})
    assert all(torch.equal(x, y) for x, y in zip(strided.both().values(), upcast.both().values(), strict=True))


def test_values_beyond_the_range_of_fp16_survive() -> None:
    case = make_case(lengths=(70,), dtype=torch.float32)
    half = dataclasses.replace(case, **{name: x.half() for name, x in case.tensors().items()}, state=case.state * 7e4)
    got = half.both()
    assert all(x.isfinite().all() for x in got.values())
    assert_close(half, got, half.expected(), 5e-6)


class _Recorder(TorchDispatchMode):
    """Counts operations, and notes the largest tensor that one of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def _recorded(case: Case) -> tuple[_Recorder, _Recorder]:
    """What forward and backward do, each on its own."""
    o, grads = torch.empty_like(case.v), {f"d{name}": torch.empty_like(x) for name, x in case.tensors().items()}
    grad_o, grad_final = case.cotangents()
    with _Recorder() as forward:
        chunk.forward(*case.arguments(), o, **case.options())
    with _Recorder() as backward:
        chunk.backward(grad_o, grad_final, *case.arguments(), grads, **case.options())
    return forward, backward


@pytest.mark.parametrize("decay", DECAYS)
def test_it_runs_by_blocks_not_by_tokens(decay: str) -> None:
    short, long = (make_case(decay=decay, lengths=(n,), dtype=torch.float32) for n in (1024, 2048))
    for before, after in zip(_recorded(short), _recorded(long), strict=True):
        assert after.calls - before.calls < 2 * 1024  # a token loop takes several operations a token and pass


@pytest.mark.parametrize("decay", DECAYS)
def test_no_intermediate_is_as_large_as_an_input(decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(decay=decay, lengths=(2048,), key_dim=64, value_dim=64, dtype=torch.float32)
    monkeypatch.setattr(span, "SPAN_BUDGET", case.v.numel())
    for recorded in _recorded(case):
        assert recorded.largest < case.v.numel()
