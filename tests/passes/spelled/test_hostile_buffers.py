"""Buffers that may not be trusted, input gates that may not be taken apart, and masks of two numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.report import Report
from lattn_compile.testing.backend import recorded

B, H, T, K, V = 2, 2, 8, 4, 6


def inputs(tokens: int = T) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(B, H, tokens, K), torch.randn(B, H, tokens, K), torch.randn(B, H, tokens, V)


def codes(report: Report) -> list[str]:
    return [u.reason.code for u in report.unmatched]


def exported(module: nn.Module, args: tuple[Tensor, ...], decomposed: bool = False) -> tuple[Any, Report]:
    program = torch.export.export(module, args, strict=False)
    result = lc.rewrite(program.run_decompositions({}) if decomposed else program, "exact")
    return result.module.module(), result.report


def compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})


def scanned(gamma: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    S, outs = q.new_zeros(B, H, K, V), []
    for t in range(q.shape[2]):
        S = gamma[:, None, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        outs.append((q[:, :, t, None] @ S).squeeze(2))
    return torch.stack(outs, 2)


class Growing(nn.Module):
    """A loop whose decays the layer itself changes at every call, before or after it reads them."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.register_buffer("gamma", torch.tensor([0.9, 0.8]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.first:
            self.gamma.mul_(1.1)
        o = scanned(self.gamma, q, k, v)
        if not self.first:
            self.gamma.mul_(1.1)
        return o


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("way", ["exported", "decomposed", "compiled"])
def test_decays_in_a_buffer_that_the_graph_writes_are_not_trusted(way: str, first: bool) -> None:
    layer, args = Growing(first), inputs(3)
    if way == "compiled":
        made = compiled(Growing(first))
        with recorded():
            outs = [made(*args) for _ in range(4)]
        report = lc.last_report()
    else:
        made, report = exported(Growing(first), args, decomposed=way == "decomposed")
        outs = [made(*args) for _ in range(4)]
    for got in outs:  # the last ones of decays above 1
        want = layer(*args)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert report is not None and codes(report) == ["DECAY_RANGE"]


class Table(nn.Module):
    """A parallel form whose table of powers of a decay the layer itself changes."""

    def __init__(self) -> None:
        super().__init__()
        i = torch.arange(T).float()
        self.register_buffer("D", ((i[:, None] - i) * torch.tensor([0.9, 0.8]).log()[:, None, None]).exp().tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = ((q @ k.mT) * self.D) @ v
        self.D.mul_(1.1)
        return o


def test_a_table_that_the_graph_writes_is_not_trusted() -> None:
    layer, args = Table(), inputs()
    made, report = exported(Table(), args)
    for _ in range(2):
        want = layer(*args)
        assert (made(*args) - want).abs().max() <= 1e-5 * want.abs().max()
    assert not report.rewritten


class Given(nn.Module):
    """Decays are an argument, whatever it is called."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, my_buffers_gamma: Tensor) -> Tensor:
        return scanned(my_buffers_gamma, q, k, v)


def test_an_argument_is_no_buffer_by_its_name() -> None:
    args, made = inputs(3), compiled(Given())
    for gamma in (torch.tensor([0.5, 0.6]), torch.tensor([1.5, 0.6])):
        with recorded(), torch.no_grad():
            got = made(*args, gamma)
        want = Given()(*args, gamma)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    report = lc.last_report()
    assert report is not None and codes(report) == ["DECAY_RANGE"]


def test_a_buffer_is_still_told_where_dynamo_found_it() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gamma", torch.tensor([0.9, 0.8]))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scanned(self.gamma, q, k, v)

    made = compiled(nn.Sequential(Buffered())[0])
    with recorded(), torch.no_grad():
        made(*inputs(3))
    report = lc.last_report()
    assert report is not None and [s.form for s in report.rewritten] == ["loop"]


class Gated(nn.Module):
    """mLSTM's parallel form without a stabiliser: exp(c_i - c_j + i_j), c the cumulative sum of decays."""

    def __init__(self, decay: Callable[[Tensor], Tensor], gate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decay, self.gate = decay, gate

    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, i: Tensor) -> Tensor:
        c = self.decay(a).cumsum(-1)
        d = c[..., :, None] - c[..., None, :] + self.gate(i)[..., None, :]
        return ((q @ k.mT) * d.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf).exp()) @ v


def gates(decay: float, gate: float) -> tuple[Tensor, Tensor]:
    a = torch.zeros(B, H, T)
    a[..., 1:4] = decay
    return a, torch.full((B, H, T), gate)


@pytest.mark.parametrize(
    ("decay", "gate", "hostile"),
    [
        (lambda a: a, lambda i: i, (30.0, -110.0)),
        (lambda a: a, F.logsigmoid, (25.0, -120.0)),
        (F.logsigmoid, lambda i: i, (-100.0, 87.0)),
        (F.logsigmoid, lambda i: i.clamp(max=80.0), (-100.0, 80.0)),
    ],
)
def test_an_input_gate_in_the_exponent_that_may_overflow_alone_is_left(
    decay: Callable[[Tensor], Tensor], gate: Callable[[Tensor], Tensor], hostile: tuple[float, float]
) -> None:
    layer, args = Gated(decay, gate), (*inputs(), *gates(-1.0, -1.0))
    made, report = exported(layer, args)
    assert codes(report) == ["DECAY_RANGE"]
    args = (*inputs(), *gates(*hostile))
    assert torch.equal(made(*args), layer(*args))


@pytest.mark.parametrize("gate", [F.logsigmoid, lambda i: i.clamp(max=10.0), lambda i: 15.0 * torch.tanh(i / 15.0)])
def test_an_input_gate_in_the_exponent_that_is_bounded_is_found(gate: Callable[[Tensor], Tensor]) -> None:
    layer, args = Gated(F.logsigmoid, gate), (*inputs(), *gates(-1.0, 1.0))
    made, report = exported(layer, args)
    assert [(s.kind, s.form) for s in report.rewritten] == [("retention", "chunk")]
    for extreme in ((-100.0, 100.0), (100.0, 100.0), (0.0, -100.0)):
        args = (*inputs(), *gates(*extreme))
        want = layer(*args)
        assert want.isfinite().all()
        assert (made(*args) - want).abs().max() <= 1e-5 * want.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize(
    "mask",
    [
        lambda tri: torch.where(tri, 1.0, 0.0),
        lambda tri: torch.where(tri, 0.0, -torch.inf).exp(),
        lambda tri: torch.where(tri, 0.1, 0.0) * 10.0,
    ],
)
def test_a_mask_of_two_numbers_is_no_fault(mask: Callable[[Tensor], Tensor]) -> None:
    class Masked(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ((q @ k.mT) * mask(torch.ones(T, T, dtype=torch.bool).tril())) @ v

    args = inputs()
    made, report = exported(Masked(), args)
    assert [(s.kind, s.form) for s in report.rewritten] == [("linear", "chunk")]
    assert (made(*args) - Masked()(*args)).abs().max() <= 1e-5
