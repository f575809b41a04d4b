"""Scans and while loops whose body is a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_module
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import lattn_compile  # noqa: F401
from lattn_compile.passes.spelled.proposal import NearMiss, Proposal, withdraw
from lattn_compile.passes.spelled.scan import is_scan, is_while_loop, rewrite_scan, rewrite_while_loop
from lattn_compile.passes.spelled.search import find
from lattn_compile.passes.spelled.verify import verify
from lattn_compile.testing.backend import recorded
from tests.passes.spelled.harness import gradients as gradients_of
from tests.passes.spelled.harness import worst_error

B, T, H, K, V = 2, 6, 3, 4, 5


def match_body(body: fx.GraphModule) -> Proposal | NearMiss | None:
    found = find(body, in_loop=True)
    return next(iter([*found.proposals, *found.misses]), None)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    g, beta = -normal(B, T, H).abs(), normal(B, T, H).sigmoid()
    return q, torch.nn.functional.normalize(k, dim=-1), v, g, beta, normal(B, H, K, V)


class Gdn(torch.nn.Module):
    """Delta rule, gate and beta made of raw values inside the step, the output scaled by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, H, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def step(s: Tensor, x: Any) -> tuple[Tensor, Tensor]:
            q, k, v, g, beta = x
            k = torch.nn.functional.normalize(k, dim=-1)
            s = s * (-torch.nn.functional.softplus(g)).exp()[..., None, None]
            u = (v - torch.einsum("bhkv,bhk->bhv", s, k)) * beta.sigmoid()[..., None]
            s = s + k[..., None] * u[..., None, :]
            return s.clone(), torch.einsum("bhkv,bhk->bhv", s, q) * self.weight[:, None]

        state, o = scan(step, state, (q, k, v, g, beta), dim=1)
        return o.movedim(0, 1) if o.shape[0] == T and o.shape[1] == B else o, state


class Retention(torch.nn.Module):
    """Additive, a constant decay, the state value-major, run backwards if asked, outputs reshaped in the step."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.reverse = reverse
        self.register_buffer("log_decay", torch.log1p(-torch.exp2(-torch.arange(2.0, H + 2, dtype=torch.float64))))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def step(s: Tensor, x: Any) -> tuple[Tensor, Tensor]:
            q, k, v = x
            s = s * self.log_decay.exp()[:, None, None] + v[..., None] * k[..., None, :]
            return s.clone(), (s @ q[..., None]).reshape(B, H * V)

        state, o = scan(step, state.mT.contiguous(), (q, k, v), dim=1, reverse=self.reverse)
        return o, state.mT


class Delta(torch.nn.Module):
    """No gate, heads folded into the batch, a carry that nothing reads, one that stays, an output without the state."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            s, count, offset = carry
            q, k, v, beta = x
            err = v - torch.bmm(k.unsqueeze(1), s).squeeze(1)
            s = s + torch.bmm(k.unsqueeze(2), (beta[:, None] * err).unsqueeze(1))
            o = torch.bmm(q.unsqueeze(1), s).squeeze(1) + offset
            return (s.clone(), count + 1, offset.clone()), (o, v.exp().sum(-1))

        fold = [x.transpose(1, 2).reshape(B * H, T, -1) for x in (q, k, v)]
        carry = (state.reshape(B * H, K, V), torch.zeros(1), torch.ones(V, dtype=state.dtype))
        (state, _, offset), (o, e) = scan(step, carry, (*fold, beta.transpose(1, 2).reshape(B * H, T)), dim=1)
        return o, state, e, offset


class Packed(torch.nn.Module):
    """One packed input split in the step, two value heads a key head, a constant in the step, dicts in and out."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def step(s: Tensor, x: Any) -> tuple[Tensor, Any]:
            q, k, v = x["qkv"].split([H * K, H * K, 2 * H * V], -1)
            q, k = (y.reshape(B, H, K).repeat_interleave(2, 1) for y in (q, k))
            v = v.reshape(B, 2 * H, V) * torch.tensor(0.5, dtype=s.dtype)
            s = s * x["g"].exp().repeat_interleave(2, 1)[..., None, None] + k.unsqueeze(-1) @ v.unsqueeze(-2)
            o = (q.unsqueeze(-2) @ s).squeeze(-2)
            return s.clone(), {"o": o.flatten(1), "gate": torch.sigmoid(x["g"])}

        qkv = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2), v.flatten(2)], -1)
        state, y = scan(step, torch.cat([state, state], 1), {"qkv": qkv, "g": g}, dim=1)
        return y["o"] * y["gate"].sum(), state


class TwoStates(torch.nn.Module):
    """The normaliser of a retention is a carry of its own: the scan has to stay."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            s, n = carry
            q, k, v, g = x
            s = s * g.exp()[..., None, None] + k[..., None] * v[..., None, :]
            n = torch.tanh(n + k)
            size = 1 + (q * n).sum(-1, keepdim=True) ** 2
            return (s.clone(), n.clone()), torch.einsum("bhkv,bhk->bhv", s, q) / size

        (state, _), o = scan(step, (state, torch.zeros_like(k[:, 0])), (q, k, v, g), dim=1)
        return o, state


class Turned(torch.nn.Module):
    """The state is transposed from token to token (K = V): not one recurrence."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def step(s: Tensor, x: Any) -> tuple[Tensor, Tensor]:
            q, k, g = x
            s = s * g.exp()[..., None, None] + k[..., None] * k[..., None, :]
            return s.mT.clone(memory_format=torch.contiguous_format), torch.einsum("bhkv,bhk->bhv", s, q)

        state, o = scan(step, state[..., :K].contiguous(), (q, k, g), dim=1)
        return o, state


class While(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def more(t: Tensor, s: Tensor) -> Tensor:
            return t < T

        def step(t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            kt = k.index_select(1, t.reshape(1)).squeeze(1)
            vt = v.index_select(1, t.reshape(1)).squeeze(1)
            return t + 1, s * 0.9 + kt[..., None] * vt[..., None, :]

        t, state = while_loop(more, step, (torch.zeros((), dtype=torch.int64), state))
        return t, state


def functional(module: torch.nn.Module, args: tuple[Tensor, ...], dynamic: bool | None = None) -> Any:
    """The functional ATen graph of what Dynamo captures, and its example inputs."""
    box: list[Any] = []

    def backend(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        box.append((aot_export_module(gm, examples, trace_joint=False, pre_dispatch=True)[0], examples))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    ((gm, examples),) = box
    return gm, [x.node.hint if isinstance(x, torch.SymInt) else x for x in examples]


def node_of(gm: fx.GraphModule, which: Callable[[fx.Node], bool]) -> fx.Node:
    (node,) = (n for n in gm.graph.nodes if which(n))
    return node


def commit(proposal: Proposal, gm: fx.GraphModule) -> None:
    inserted = set(proposal.inserted)
    for old, new in zip(proposal.old, proposal.new, strict=True):
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inserted)
    for module in (proposal.op.graph.owning_module, gm):
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()


@pytest.mark.parametrize(
    "module",
    [Gdn(), Retention(), Retention(reverse=True), Delta(), Packed()],
    ids=["gdn", "retention", "reversed", "delta", "packed"],
)
def test_a_scan_becomes_one_op(module: torch.nn.Module) -> None:
    gm, examples = functional(module, inputs())
    node = node_of(gm, is_scan)
    want = gm(*examples)
    before = [str(gm.graph), str(gm.get_submodule(node.args[0].target).graph)]
    withdraw(rewrite_scan(gm, node, match_body))
    assert [str(gm.graph), str(gm.get_submodule(node.args[0].target).graph)] == before
    proposal = rewrite_scan(gm, node, match_body)
    assert isinstance(proposal, Proposal), proposal
    assert proposal.form == "scan" and "kept" not in proposal.evidence, proposal.evidence
    assert proposal.op.args[0].meta["val"].shape[1] == T
    verdict = verify(proposal.step)
    assert verdict.ok, verdict.detail
    if not isinstance(module, Gdn):  # a norm is not analytic
        verdict = verify(proposal)
        assert verdict.ok, verdict.detail
    commit(proposal, gm)
    assert not any(map(is_scan, gm.graph.nodes))
    for got, expected in zip(gm(*examples), want, strict=True):
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("module", "why"),
    [(TwoStates(), "child"), (Turned(), "layout")],
    ids=["another carry", "transposed state"],
)
def test_a_scan_that_is_kept_has_its_step_replaced(module: torch.nn.Module, why: str) -> None:
    gm, examples = functional(module, inputs())
    node = node_of(gm, is_scan)
    want = gm(*examples)
    before = str(gm.graph)
    proposal = rewrite_scan(gm, node, match_body)
    assert isinstance(proposal, Proposal), proposal
    assert proposal.form == "scan" and proposal.evidence["kept"], proposal.evidence
    assert proposal.op.graph is gm.get_submodule(node.args[0].target).graph
    assert str(gm.graph) == before
    assert verify(proposal).ok
    commit(proposal, gm)
    for got, expected in zip(gm(*examples), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_the_step_in_a_while_loop_is_replaced() -> None:
    gm, examples = functional(While(), inputs())
    node = node_of(gm, is_while_loop)
    want = gm(*examples)
    proposal = rewrite_while_loop(gm, node, match_body)
    assert isinstance(proposal, Proposal), proposal
    assert proposal.form == "scan" and proposal.evidence["kept"]
    commit(proposal, gm)
    for got, expected in zip(gm(*examples), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("module", [Gdn(), Retention(), Delta()], ids=["gdn", "retention", "delta"])
def test_symbolic_sizes(module: torch.nn.Module) -> None:
    """One graph for other lengths and batches; nothing is specialised or guarded on the way."""
    gm, examples = functional(module, inputs(), dynamic=True)
    node = node_of(gm, is_scan)
    env = next(v.fake_mode.shape_env for v in (n.meta.get("val") for n in gm.graph.nodes) if hasattr(v, "fake_mode"))
    step = match_body(gm.get_submodule(node.args[0].target))
    assert isinstance(step, Proposal)
    withdraw(step)
    guards = len(env.guards)  # with those of the op's own checks
    proposal = rewrite_scan(gm, node, match_body)
    assert isinstance(proposal, Proposal), proposal
    assert "kept" not in proposal.evidence, proposal.evidence
    assert [g.expr for g in env.guards[guards:]] == []
    want = gm(*examples)
    commit(proposal, gm)
    for got, expected in zip(gm(*examples), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("module", [Gdn(), Retention(), Delta()], ids=["gdn", "retention", "delta"])
def test_gradients(module: torch.nn.Module) -> None:
    def gradients(backend: Any) -> list[Tensor | None]:
        torch._dynamo.reset()
        args = [x.requires_grad_() for x in inputs()]
        outputs = torch.compile(module, backend=backend, fullgraph=True)(*args)
        loss = sum((o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view_as(o)).sum() for o in outputs)
        loss.backward()
        assert isinstance(loss, Tensor)
        return [loss.detach(), *(x.grad for x in args)]

    def rewriting(gm: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        flat, _ = aot_export_module(gm, examples, trace_joint=False, pre_dispatch=True)
        proposal = rewrite_scan(flat, node_of(flat, is_scan), match_body)
        assert isinstance(proposal, Proposal) and "kept" not in proposal.evidence
        commit(proposal, flat)
        return flat

    for got, want in zip(gradients(rewriting), gradients("aot_eager"), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_state_that_is_rounded_at_every_token_keeps_its_scan() -> None:
    class Rounded(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            def step(s: Tensor, x: Any) -> tuple[Tensor, Tensor]:
                q, k, v, g = x
                f = s.float() * g.exp()[..., None, None] + k[..., None] * v[..., None, :]
                return f.bfloat16(), torch.einsum("bhkv,bhk->bhv", f, q)

            state, o = scan(step, s.bfloat16(), (q, k, v, g), dim=1)
            return o, state

    gm, examples = functional(Rounded(), inputs(torch.float32))
    want = gm(*examples)
    proposal = rewrite_scan(gm, node_of(gm, is_scan), match_body)
    assert isinstance(proposal, Proposal), proposal
    assert "bfloat16" in proposal.evidence["kept"] and proposal.state_dtype == torch.bfloat16
    commit(proposal, gm)
    for got, expected in zip(gm(*examples), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def _through_the_backend(module: Callable[..., Any], *args: Tensor) -> Any:
    """The report, once values and gradients are those of the module run as it is, and no scan is left in the graph."""
    torch._dynamo.reset()
    own, plain = ([x.detach().clone().requires_grad_() for x in args] for _ in range(2))
    compiled = torch.compile(module, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})
    with recorded() as record:
        got = compiled(*own)
    want = module(*plain)
    assert worst_error(got, want) < 1e-9
    assert worst_error(gradients_of(got, own), gradients_of(want, plain)) < 1e-9
    assert not any(is_scan(n) for n in record.graphs[-1].graph.nodes)
    return record.report


def _retention(decay: Callable[[], Tensor], carried: Callable[[Tensor], Tensor] = torch.clone) -> Callable[..., Any]:
    def layer(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        d = decay()[:, None, None]

        def step(s: Tensor, x: Any) -> tuple[Tensor, Tensor]:
            q, k, v = x
            s = d * s + k[..., None] * v[..., None, :]
            return carried(s), (q[..., None] * s).sum(-2)

        state, o = scan(step, state, (q, k, v), dim=1)
        return o, state

    return layer


def test_a_scan_that_does_not_clone_its_carry_leaves_nothing_behind() -> None:
    """Autograd refuses such a scan, also one that nothing uses; without gradients it can be run."""
    q, k, v, _, _, state = inputs()
    layer = _retention(lambda: torch.full((H,), 0.97, dtype=torch.float64), carried=lambda s: s)
    report = _through_the_backend(layer, q, k, v, state)
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [("additive", "head", "rewritten")]


@pytest.mark.parametrize(
    "decay",
    [
        lambda: torch.tensor([0.9, 0.95, 0.99], dtype=torch.float64),
        lambda: 1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64)),
        lambda: torch.linspace(0.5, 0.9, H, dtype=torch.float64).exp().reciprocal(),
    ],
    ids=["literal", "powers", "computed"],
)
def test_decays_made_outside_of_the_step_are_looked_at_there(decay: Callable[[], Tensor]) -> None:
    q, k, v, _, _, state = inputs()
    report = _through_the_backend(_retention(decay), q, k, v, state)
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [("additive", "head", "rewritten")], str(report)


def test_decays_of_all_tokens_made_outside_of_the_step() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        def step(s: Tensor, x: Any) -> tuple[Tensor, Tensor]:
            q, k, v, a, b = x
            s = s * a[..., None, None]
            s = s * b[..., None, None] + k[..., None] * v[..., None, :]
            return s.clone(), (q[..., None] * s).sum(-2)

        state, o = scan(step, state, (q, k, v, torch.sigmoid(g), g.exp()), dim=1)
        return o, state

    q, k, v, g, _, state = inputs()
    report = _through_the_backend(layer, q, k, v, g, state)
    assert [(s.rule, s.decay, s.verdict) for s in report.sites] == [("additive", "head", "rewritten")], str(report)


def test_a_decay_that_is_an_input_is_refused_and_the_reason_says_so() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return _retention(lambda: d)(q, k, v, state)  # type: ignore[no-any-return]

    q, k, v, _, _, state = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})
    with recorded() as record, torch.no_grad():
        compiled(q, k, v, torch.full((H,), 0.9, dtype=torch.float64), state)
    (miss,) = record.report.unmatched
    assert miss.reason.code == "DECAY_RANGE" and "input of the graph" in miss.stopped_at
