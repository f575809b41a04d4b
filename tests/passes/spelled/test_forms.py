"""Decays, masks and products in further notations, each with its near miss: what is certain is rewritten, what is not
is left with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lattn_compile.report import Report
from tests.passes.spelled.harness import copies, gradients, rewrite_graph, worst_error
from tests.passes.spelled.registry import make_args

T = 3
pytestmark = pytest.mark.filterwarnings("ignore")


def _read(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", x, S)


def _outer(k: Tensor, u: Tensor) -> Tensor:
    return k[..., :, None] * u[..., None, :]


def _report(loop: Callable[..., Any], *extra: Tensor, **sizes: int) -> Report:
    """Of a loop that is rewritten, if at all, into something equal in value and gradient."""
    args = (*(x.requires_grad_() for x in make_args(T, "head", dtype=torch.float64, **sizes)), *extra)
    rewritten, report = rewrite_graph(loop, args, "make_fx", tracing_mode="fake")
    own, original = copies(args), copies(args)
    got, want = rewritten(*own), loop(*original)
    assert worst_error(got, want) < 1e-9
    assert worst_error(gradients(got, own), gradients(want, original)) < 1e-9
    return report


def _is_one_loop(report: Report, rule: str, decay: str = "head") -> None:
    assert [(s.form, s.rule, s.decay, s.verdict) for s in report.sites] == [("loop", rule, decay, "rewritten")], report
    assert not report.unmatched, str(report)


def _is_left(report: Report, *codes: str) -> None:
    assert not report.rewritten and {u.reason.code for u in report.unmatched} == set(codes), str(report)


Gate = Callable[[Tensor], Tensor]

DECAYS: dict[str, Gate] = {
    "relu6": lambda x: F.relu6(x + 3) / 6,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x + 0.5, 0.0, 1.0),
    "quotient": lambda x: 1 / (1 + torch.exp(x)),
    "reciprocal": lambda x: (1 + x * x).reciprocal(),
    "half of 1 + tanh": lambda x: (torch.tanh(x) + 1) / 2,
    "half of 1 + erf": lambda x: 0.5 * (1 + torch.erf(x)),
    "half of erfc": lambda x: torch.special.erfc(x) / 2,
    "ndtr": torch.special.ndtr,
    "expit": torch.special.expit,
    "lower bound": lambda x: 0.9 + (1 - 0.9) * torch.sigmoid(x),
    "learned lower bound": lambda x: torch.sigmoid(2 * x) + (1 - torch.sigmoid(2 * x)) * torch.sigmoid(x),
    "lerp to 1": lambda x: torch.lerp(torch.sigmoid(x), torch.ones_like(x), torch.sigmoid(2 * x)),
    "power of a tensor": lambda x: torch.pow(torch.full((), 0.9, dtype=x.dtype), F.softplus(x)),
    "softmax": lambda x: torch.softmax(torch.stack([x, torch.zeros_like(x)], -1), -1)[..., 0],
}
NO_DECAYS: dict[str, Gate] = {
    "relu6 of 7": lambda x: F.relu6(x + 3) / 5,
    "hardtanh below 0": lambda x: F.hardtanh(x),
    "quotient below 1": lambda x: 1 / (0.9 + torch.exp(x)),
    "more than half of 1 + tanh": lambda x: (torch.tanh(x) + 1) / 1.9,
    "erfc": torch.special.erfc,
    "lower bound too high": lambda x: 0.9 + 0.11 * torch.sigmoid(x),
    "two weights": lambda x: torch.sigmoid(2 * x) + (1 - torch.sigmoid(3 * x)) * torch.sigmoid(x),
    "lerp beyond": lambda x: torch.lerp(torch.sigmoid(x), torch.ones_like(x), 2 * torch.sigmoid(2 * x)),
}


def _decayed_by(gate: Gate) -> Callable[..., Any]:
    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        outs = []
        for t in range(T):
            S = S * gate(g[:, t])[..., None, None]
            S = S + _outer(k[:, t], beta[:, t, :, None] * (v[:, t] - _read(S, k[:, t])))
            outs.append(_read(S, q[:, t]))
        return torch.stack(outs, 1), S

    return loop


@pytest.mark.parametrize("name", DECAYS)
def test_what_lies_between_0_and_1_is_a_decay(name: str) -> None:
    _is_one_loop(_report(_decayed_by(DECAYS[name])), "delta")


@pytest.mark.parametrize("name", NO_DECAYS)
def test_what_may_exceed_1_is_none(name: str) -> None:
    _is_left(_report(_decayed_by(NO_DECAYS[name])), "DECAY_RANGE")


Mask = Callable[[Tensor], Tensor]
Keep = Callable[[Tensor, Tensor, Tensor], Tensor]

KEEPS: dict[str, tuple[torch.dtype, Keep]] = {
    "bytes that are not 0": (torch.uint8, lambda m, old, new: torch.where(m != 0, new, old)),
    "bytes that are 1": (torch.uint8, lambda m, old, new: torch.where(m == 1, new, old)),
    "integers as booleans": (torch.int64, lambda m, old, new: torch.where(m.bool(), new, old)),
    "integers below 1": (torch.int64, lambda m, old, new: torch.where(m < 1, old, new)),
    "products with bytes": (torch.uint8, lambda m, old, new: m * new + (1 - m) * old),
    "minus a mask": (torch.int64, lambda m, old, new: m * new + (-m + 1) * old),
    "clamped": (torch.float64, lambda m, old, new: m.clamp(0, 1) * new + (1 - m.clamp(0, 1)) * old),
    "type_as": (torch.bool, lambda m, old, new: m.type_as(new) * new + (1 - m.type_as(new)) * old),
    "exclusive or": (torch.bool, lambda m, old, new: torch.where(m ^ True, old, new)),
    "above a half": (torch.float32, lambda m, old, new: torch.where(m > 0.5, new, old)),
}


def _kept_by(keep: Keep, mask: Mask) -> Callable[..., Any]:
    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, *given: Tensor) -> Any:
        m, outs = mask(given[0] if given else beta), []
        for t in range(T):
            new = S * g[:, t, :, None, None].exp()
            new = new + _outer(k[:, t], beta[:, t, :, None] * (v[:, t] - _read(new, k[:, t])))
            S = keep(m[:, t, None, None, None], S, new)
            outs.append(_read(S, q[:, t]))
        return torch.stack(outs, 1), S

    return loop


@pytest.mark.parametrize("name", KEEPS)
def test_a_mask_may_be_a_number(name: str) -> None:
    dtype, keep = KEEPS[name]
    _is_one_loop(_report(_kept_by(keep, lambda beta: (beta[..., 0] > 0.4).to(dtype)), batch=3), "delta")


@pytest.mark.parametrize("name", ["bytes that are not 0", "integers as booleans", "above a half"])
def test_a_mask_may_be_an_input_that_is_compared(name: str) -> None:
    dtype, keep = KEEPS[name]
    given = (torch.arange(3 * T).reshape(3, T) % 2).to(dtype)
    _is_one_loop(_report(_kept_by(keep, lambda m: m), given, batch=3), "delta")


def test_an_input_of_numbers_is_no_mask() -> None:
    given = torch.arange(3 * T).reshape(3, T) % 2
    report = _report(_kept_by(lambda m, old, new: m * new + (1 - m) * old, lambda m: m), given, batch=3)
    assert not report.rewritten and "NOT_RANK_ONE" in {u.reason.code for u in report.unmatched}, str(report)


Write = Callable[[Tensor, Tensor, Tensor], Tensor]

WRITES: dict[str, Write] = {
    "addbmm": lambda S, k, u: torch.addbmm(S, k[None, :, None], u[None, None]),
    "tensordot": lambda S, k, u: S + torch.tensordot(k, u, dims=0),
    "kron": lambda S, k, u: S + torch.kron(k[:, None], u[None]),
    "ger": lambda S, k, u: S + torch.ger(k, u),
    "addr": torch.addr,
}


def _of_one_head(write: Write) -> Callable[..., Any]:
    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        s, outs = S[0, 0], []
        for t in range(T):
            s = s * g[0, t, 0].exp()
            s = write(s, k[0, t, 0], beta[0, t, 0] * (v[0, t, 0] - k[0, t, 0] @ s))
            outs.append(torch.linalg.multi_dot([q[0, t, 0], s]))
        return torch.stack(outs)[None, :, None], s[None, None]

    return loop


@pytest.mark.parametrize("name", WRITES)
def test_an_outer_product_has_many_names(name: str) -> None:
    _is_one_loop(_report(_of_one_head(WRITES[name]), batch=1, heads=1), "delta")


def test_two_outer_products_in_one_sum_are_told() -> None:
    def two(S: Tensor, k: Tensor, u: Tensor) -> Tensor:
        return torch.addbmm(S, torch.stack([k, k.roll(1)])[..., None], torch.stack([u, u.flip(0)])[:, None])

    report = _report(_of_one_head(two), batch=1, heads=1)
    assert not report.rewritten, str(report)


def test_a_complex_state_is_told() -> None:
    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        turn, state, outs = torch.polar(torch.sigmoid(g), beta), S.to(torch.complex128), []
        for t in range(T):
            state = state * turn[:, t, :, None, None] + _outer(k[:, t], v[:, t]).to(state.dtype)
            outs.append(_read(state, q[:, t].to(state.dtype)).real)
        return torch.stack(outs, 1), state.real

    _is_left(_report(loop), "ARITHMETIC_DTYPE")


def test_several_queries_a_state_are_told() -> None:
    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        outs = []
        for t in range(T):
            S = S * torch.sigmoid(g[:, t])[..., None, None] + _outer(k[:, t], v[:, t])
            queries = torch.stack([q[:, t], q[:, t].flip(-1)], 2)
            outs.append(torch.einsum("bgrk,bgkv->bgrv", queries, S).flatten(1, 2))
        return torch.stack(outs, 1), S

    _is_left(_report(loop), "GROUPED_QUERIES")


def test_a_bonus_for_the_token_is_told() -> None:
    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        outs = []
        for t in range(T):
            write = _outer(k[:, t], v[:, t])
            outs.append(_read(S + beta[:, t, :, None, None] * write, q[:, t]))
            S = S * torch.sigmoid(g[:, t])[..., None, None] + write
        return torch.stack(outs, 1), S

    report = _report(loop)
    assert not report.rewritten and "READ_BEFORE_WRITE" in {u.reason.code for u in report.unmatched}, str(report)
