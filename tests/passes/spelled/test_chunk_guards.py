"""Chunk forms with guards against overflow, gates made after the cut into chunks, and tables in buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import lattn_compile as lc
from lattn_compile.passes.spelled import chunkform
from lattn_compile.report import Report

B, H, T, K, V, C = 2, 2, 8, 4, 6, 4


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(*shape) for shape in ((B, H, T, K), (B, H, T, K), (B, H, T, V), (B, H, T)))


class Masked(nn.Module):
    """(Q K^T ∘ D) V with D = guard(c_i - c_j), c the cumulative sum of g(a) over tokens."""

    def __init__(self, guard: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor] = F.logsigmoid) -> None:
        super().__init__()
        self.guard, self.g = guard, g

    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        c = self.g(a).cumsum(-1)
        return ((q @ k.mT) * self.guard(c[..., :, None] - c[..., None, :])) @ v


def rewritten(module: nn.Module, args: tuple[Tensor, ...] | None = None, **options: Any) -> tuple[nn.Module, Report]:
    """As exported; values and gradients are compared."""
    args = inputs() if args is None else args
    result = lc.rewrite(torch.export.export(module, args, strict=False, **options), "exact")
    made = result.module.module()
    results = []
    for run in (module, made):
        leaves = [x.clone().requires_grad_() for x in args]
        out = run(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert (want - got).abs().max() <= 1e-5 * want.abs().max().clamp(min=1)
    return made, result.report


def codes(report: Report) -> list[str]:
    return [u.reason.code for u in report.unmatched]


@pytest.mark.parametrize(
    "guard",
    [
        lambda d: d.clamp(max=0).exp().tril(),
        lambda d: torch.clamp_max(d, 0.0).exp() * torch.ones(T, T).tril(),
        lambda d: torch.where(torch.ones(T, T, dtype=torch.bool).tril(), d.clamp(max=0), -torch.inf).exp(),
    ],
)
def test_a_clamp_that_only_guards_the_exponential_is_looked_through(guard: Callable[[Tensor], Tensor]) -> None:
    _, report = rewritten(Masked(guard))
    assert [s.kind for s in report.rewritten] == ["retention"]
    assert not report.unmatched


def test_a_clamp_of_a_column_minus_a_row_is_looked_through() -> None:
    class Transposed(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
            c = F.logsigmoid(a).cumsum(-1)
            mask = (
                (c[..., None, :] - c[..., :, None]).clamp(max=0).exp().triu()
            )  # [token that is read, token that reads]
            return ((q @ k.mT) * mask.mT) @ v

    _, report = rewritten(Transposed())
    assert [s.kind for s in report.rewritten] == ["retention"]


@pytest.mark.parametrize(
    ("guard", "g"),
    [
        (lambda d: d.clamp(max=0).exp().tril(), lambda a: a),
        (lambda d: d.clamp(max=0).exp().tril(), lambda a: -F.logsigmoid(a)),
        (lambda d: d.clamp(min=-1.0, max=0).exp().tril(), F.logsigmoid),
        (lambda d: d.clamp(max=-0.5).exp().tril(), F.logsigmoid),
    ],
)
def test_a_clamp_that_may_do_something_is_left_and_told(
    guard: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]
) -> None:
    _, report = rewritten(Masked(guard, g))
    assert not report.rewritten
    assert codes(report) == ["CHUNK_CLAMPED"]


def test_a_clamp_of_what_is_left_keeps_its_gradient_at_the_bound() -> None:
    """Where a log decay is 0, a clamp has the gradient of its kink, whatever is rewritten beside it."""

    class Both(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
            c = (-F.relu(a)).cumsum(-1)
            d = (c[..., :, None] - c[..., None, :]).clamp(max=0).exp()
            return ((q @ k.mT) * d) @ v + torch.tanh((q.sin() @ k.cos().mT).tril() @ v)

    args = inputs()
    made, report = rewritten(Both(), (*args[:3], args[3].abs() * torch.tensor([1.0, 0.0] * (T // 2))))
    assert len(report.rewritten) == 1
    assert any("clamp" in str(n.target) for n in made.graph.nodes)


class NormalisedChunks(nn.Module):
    """Additive, a decay a head; keys are normalised and decays made once tokens are cut into chunks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        q, k, v, a = (x.unflatten(2, (-1, C)) for x in (q, k, v, a))
        q, k, g = F.normalize(q, dim=-1), F.normalize(k, dim=-1), F.logsigmoid(a).cumsum(-1)
        D = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
        inside = ((q @ k.mT) * D) @ v
        states = (k * (g[..., -1:] - g).exp()[..., None]).mT @ v
        S, outs = torch.zeros_like(states[:, :, 0]), []
        for i in range(q.shape[2]):
            outs.append((q[:, :, i] * g[:, :, i, :, None].exp()) @ S)
            S = g[:, :, i, -1, None, None].exp() * S + states[:, :, i]
        return (inside + torch.stack(outs, 2)).flatten(2, 3)


def test_gates_and_norms_may_come_after_the_cut_into_chunks() -> None:
    made, report = rewritten(NormalisedChunks())
    assert [(s.kind, s.form) for s in report.rewritten] == [("retention", "chunk")]
    assert not report.unmatched
    assert not any("cumsum" in str(n.target) for n in made.graph.nodes)


class AnyChunks(nn.Module):
    """The same for any number of chunks: states are summed up to each by a mask of decays between chunks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        q, k, v, a = (x.unflatten(2, (-1, C)) for x in (q, k, v, a))
        k, g = F.normalize(k, dim=-1), F.logsigmoid(a).cumsum(-1)
        D = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
        states = (k * (g[..., -1:] - g).exp()[..., None]).mT @ v
        total = F.pad(g[..., -1], (1, 0)).cumsum(-1)
        between = (total[..., :-1, None] - total[..., None, 1:]).tril(-1).exp().tril(-1)
        S = torch.einsum("bhzc,bhckv->bhzkv", between, states)
        return (((q @ k.mT) * D) @ v + (q * g.exp()[..., None]) @ S).flatten(2, 3)


def test_a_form_that_was_cut_may_be_of_any_length() -> None:
    made, report = rewritten(AnyChunks(), dynamic_shapes=({2: C * Dim("chunks", min=2, max=64)},) * 4)
    assert [(s.kind, s.form) for s in report.rewritten] == [("retention", "chunk")]
    args = tuple(torch.cat([x, x, x[:, :, :C]], 2) for x in inputs())
    assert (made(*args) - AnyChunks()(*args)).abs().max() <= 1e-5


class Buffered(nn.Module):
    """Retention, token by token, its decays in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gamma", torch.tensor([0.9, 0.8]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S, outs = q.new_zeros(B, H, K, V), []
        for t in range(3):
            S = self.gamma[:, None, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
            outs.append((q[:, :, t, None] @ S).squeeze(2))
        return torch.stack(outs, 2)


def test_decays_in_a_buffer_are_checked_at_every_run() -> None:
    layer, args = Buffered(), inputs()[:3]
    made, report = rewritten(layer, args)
    assert [(s.kind, s.form) for s in report.rewritten] == [("retention", "loop")]
    for gamma in (torch.tensor([0.5, 0.0]), torch.tensor([1.0, 0.3])):
        layer.gamma.copy_(gamma)
        made.gamma.copy_(gamma)
        assert (made(*args) - layer(*args)).abs().max() <= 1e-5
    for gamma in (torch.tensor([1.5, 0.5]), torch.tensor([-0.5, 0.5]), torch.tensor([float("nan"), 0.5])):
        made.gamma.copy_(gamma)
        with pytest.raises(RuntimeError, match="does not hold decays"):
            made(*args)


def test_a_buffer_that_holds_no_decay_now_is_left() -> None:
    layer = Buffered()
    layer.gamma.copy_(torch.tensor([1.25, 0.5]))
    _, report = rewritten(layer, inputs()[:3])
    assert codes(report) == ["DECAY_RANGE"]


def test_decays_in_an_attribute_of_a_graph_module_are_checked_at_every_run() -> None:
    args = inputs()[:3]
    result = lc.rewrite(torch.export.export(Buffered(), args, strict=False).module(), "exact")
    assert [(s.kind, s.form) for s in result.report.rewritten] == [("retention", "loop")]
    result.module.gamma.copy_(torch.tensor([1.5, 0.5]))
    with pytest.raises(RuntimeError, match="does not hold decays"):
        result.module(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_in_an_attribute_of_a_graph_module_is_no_constant(dtype: torch.dtype) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(T, T).tril().to(dtype))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ((q @ k.mT) * self.mask) @ v

    layer, args = Scores(), inputs()[:3]
    program = torch.export.export(layer, args, strict=False)
    made = lc.rewrite(program.module(), "exact")
    assert codes(made.report) == codes(lc.rewrite(program, "exact").report) != []
    for module in (layer, made.module):
        module.mask.copy_(torch.eye(T))
    assert torch.allclose(made.module(*args), layer(*args), atol=1e-5)


def test_a_literal_of_a_graph_module_is_a_constant() -> None:
    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ((q @ k.mT) * torch.tensor([[float(j <= i) for j in range(T)] for i in range(T)])) @ v

    made = lc.rewrite(torch.export.export(Scores(), inputs()[:3], strict=False).module(), "exact")
    assert [s.kind for s in made.report.rewritten] == ["linear"]


def test_what_holds_for_a_buffer_is_not_taken_to_hold_for_a_parameter() -> None:
    """exp(inf * log gamma), by which a mask may be 0, has no gradient: that of a buffer nobody wants."""

    class Retention(nn.Module):
        def __init__(self, trained: bool) -> None:
            super().__init__()
            gamma = torch.tensor([0.9, 0.8]).log()
            self.register_parameter("gamma", nn.Parameter(gamma)) if trained else self.register_buffer("gamma", gamma)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            i = torch.arange(T, dtype=torch.float32)
            distance = (i[:, None] - i).masked_fill(torch.ones(T, T).triu(1).bool(), torch.inf)
            mask = torch.nan_to_num(torch.exp(distance * self.gamma[:, None, None]))
            return ((q @ k.mT) * mask) @ v

    _, report = rewritten(Retention(False), inputs()[:3])
    assert [s.kind for s in report.rewritten] == ["retention"]
    _, report = rewritten(Retention(True), inputs()[:3])
    assert codes(report) == ["SELF_CHECK"]


def test_an_empty_part_of_a_sequence_is_no_fault() -> None:
    class Empty(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
            S = (k[:, :, :0] * a[:, :, :0, None]).mT @ v[:, :, :0]  # what was written before the first token
            return ((q @ k.mT) * torch.tanh(a)[..., None]).tril() @ v + q @ S

    _, report = rewritten(Empty())
    assert "SEARCH_FAILED" not in codes(report)


def test_a_fault_in_one_form_is_not_the_end_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
            first = (q @ k.mT).tril() @ v
            return (
                torch.tanh(first) + (torch.tanh(k) @ torch.tanh(q).mT).tril() @ torch.tanh(v) * a.sigmoid()[..., None]
            )

    propose, calls = chunkform.propose, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("on purpose")
        return propose(*args)

    monkeypatch.setattr(chunkform, "propose", failing)
    _, report = rewritten(Two())
    assert len(report.rewritten) == 1
    assert codes(report) == ["SEARCH_FAILED"]


@pytest.mark.parametrize("name", ["ridge", "kalman", "gaussian_process"])
def test_a_system_that_is_not_triangular_is_no_candidate(name: str) -> None:
    eye = torch.eye(6)

    def ridge(x: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve(b.mT @ b + eye, b.mT @ x)

    def kalman(x: Tensor, b: Tensor) -> Tensor:
        return b - (x @ b) @ torch.linalg.inv(b.mT @ b + eye)

    def gaussian_process(x: Tensor, b: Tensor) -> Tensor:
        return (b @ b.mT) @ torch.linalg.solve(b @ b.mT + torch.eye(8), b)

    fn = {"ridge": ridge, "kalman": kalman, "gaussian_process": gaussian_process}[name]
    module = nn.Module()
    module.forward = fn  # type: ignore[method-assign]
    program = torch.export.export(module, (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 6)), strict=False)
    report = lc.rewrite(program, "exact").report
    assert not report.sites and not report.unmatched
