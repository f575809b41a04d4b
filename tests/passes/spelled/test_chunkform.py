"""Chunk forms are found by what they compute: one op replaces each, and nothing of them stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lattn_compile.passes.spelled.chunkform import find_chunk_forms
from lattn_compile.passes.spelled.proposal import NearMiss, Proposal, withdraw
from lattn_compile.passes.spelled.verify import verify
from tests.passes.spelled.chunk_spellings import CHUNKED, gdn_inverse_tokens_first

TOKEN_MIXING = ("cumsum", "matmul", "bmm", "einsum", "baddbmm", "linalg", "tril", "triu", "aten.exp.", "scatter", "cat")


class _Function(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def functional(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> fx.GraphModule:
    """The functional graph of a function; its inputs are `args`."""
    module = fn if isinstance(fn, nn.Module) else _Function(fn)
    gm = torch.export.export(module, tuple(args), **options).run_decompositions({}).graph_module
    for node in list(gm.graph.nodes):
        if "_assert" in str(node.target):
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def random_inputs(
    B: int, T: int, H: int, K: int, V: int, *, heads: int | None = None, decay: str = "head"
) -> list[Any]:
    generator = torch.Generator().manual_seed(T)
    heads = heads or H

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    g = -torch.rand(*((B, T, heads, K) if decay == "channel" else (B, T, heads)), generator=generator)
    k = nn.functional.normalize(randn(B, T, H, K), dim=-1)
    beta = torch.rand(B, T, heads, generator=generator)
    return [randn(B, T, H, K), k, randn(B, T, heads, V), g, beta, randn(B, heads, K, V)]


def rewritten(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> tuple[Proposal, fx.GraphModule]:
    """The one proposal, verified and committed; the graph's value is what it was."""
    gm = functional(fn, args, **options)
    args = [*(fn.buffers() if isinstance(fn, nn.Module) else ()), *args]
    want = tree_leaves(gm(*args))
    found = find_chunk_forms(gm, set())
    assert len(found) == 1 and isinstance(found[0], Proposal), found
    proposal = found[0]
    verdict = verify(proposal)
    assert verdict.ok, verdict.detail
    for old, new in zip(proposal.old, proposal.new, strict=True):
        old.replace_all_uses_with(new)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(want, tree_leaves(gm(*args)), strict=True):
        torch.testing.assert_close(b, a, atol=2e-5, rtol=2e-5)
    return proposal, gm


def mixing(gm: fx.GraphModule) -> list[str]:
    """What is left that mixes tokens."""
    return [str(n.target) for n in gm.graph.nodes if any(name in str(n.target) for name in TOKEN_MIXING)]


FULL = os.environ.get("LATTN_CORPUS") == "full"
SHAPES = [(2, 48, 4, 8, 6), (1, 32, 2, 32, 32)]
"""Each spelling is tried with one of them, and with both where everything is."""


@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for i, n in enumerate(CHUNKED) for j, s in enumerate(SHAPES) if FULL or i % 2 == j]
)
def test_every_spelling_becomes_one_op(name: str, shape: tuple[int, ...]) -> None:
    fn, rule, decay = CHUNKED[name]
    proposal, gm = rewritten(fn, random_inputs(*shape, decay=decay))
    assert (proposal.form, proposal.rule, proposal.decay) == ("chunk", rule, decay)
    assert not mixing(gm)


LENGTHS = [(1, 16, True), (70, 64, False), (32, 16, True)]
"""Less than a chunk, a chunk and a part of one, whole chunks. Exported models have more of them (`test_models`). A
chunk of 64, which is the library's, takes four times as long as one of 16."""


@pytest.mark.parametrize(
    ("tokens", "size", "state"), [(n, 64, s) for n in (1, 5, 64, 70, 128) for s in (False, True)] if FULL else LENGTHS
)
def test_transformers_gdn_when_exported(tokens: int, size: int, state: bool) -> None:
    """Exporting, transformers solves the triangular system by a loop over the rows of a chunk but one."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        more = {"initial_state": S} if state else {}
        return qwen.torch_chunk_gated_delta_rule(
            q, k, v, g, beta, chunk_size=size, output_final_state=True, use_qk_l2norm_in_kernel=True, **more
        )

    proposal, gm = rewritten(layer, random_inputs(2, tokens, 2, 4, 6, heads=4))
    assert (proposal.rule, proposal.decay) == ("delta", "head")
    assert (proposal.roles["initial_state"] is not None) == state
    assert not mixing(gm)


@pytest.mark.parametrize("tokens", [64, 70])
def test_transformers_gdn_when_compiled(tokens: int) -> None:
    """Compiled by another backend, the triangular system is one operator."""
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from torch._functorch.aot_autograd import aot_export_module

    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((gm, inputs))
        return gm.forward

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return qwen.torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)

    torch._dynamo.reset()
    torch.compile(layer, backend=keep, fullgraph=True)(*random_inputs(2, tokens, 2, 4, 6, heads=4)[:5])
    (traced, inputs), *_ = graphs
    gm = aot_export_module(traced, inputs, trace_joint=False, pre_dispatch=True)[0]
    (proposal,) = find_chunk_forms(gm, set())
    assert isinstance(proposal, Proposal) and proposal.rule == "delta"
    assert any("solve_triangular" in str(n.target) for n in gm.graph.nodes)
    assert verify(proposal).ok


@pytest.mark.parametrize(("tokens", "size"), [(5, 64), (64, 64), (70, 64)] if FULL else [(5, 16), (16, 16), (70, 64)])
def test_transformers_kda(tokens: int, size: int) -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        more = {"chunk_size": size, "initial_state": S, "output_final_state": True}
        return kimi.chunk_kimi_delta_attention(q, k, v, g, beta, **more)

    proposal, gm = rewritten(layer, random_inputs(2, tokens, 2, 4, 6, decay="channel"))
    assert (proposal.rule, proposal.decay) == ("delta", "channel")
    assert not mixing(gm)


@pytest.mark.parametrize("tokens", [5, 64, 70])
def test_transformers_mamba2_keeps_its_groups(tokens: int) -> None:
    mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")

    def layer(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Any:
        return mamba.mamba2_chunk_scan(x, dt, -A, B, C, 16, D=D, dt_softplus=True, return_final_states=True)

    x, dt, B, C = (torch.randn(2, tokens, *s) for s in ((4, 6), (4,), (2, 8), (2, 8)))
    proposal, _ = rewritten(layer, [x, dt, torch.rand(4), B, C, torch.rand(4)])
    assert (proposal.rule, proposal.decay) == ("additive", "head")
    q = proposal.op.args[0]
    assert isinstance(q, fx.Node) and q.meta["val"].shape == (2, tokens, 2, 8)


class _Lightning(nn.Module):
    """MiniMax's block loop, its decays either tables or powers of a slope."""

    def __init__(self, *, tables: bool) -> None:
        super().__init__()
        self.slope = nn.Buffer((0.5 ** (torch.arange(4) + 1.0))[:, None, None])
        made = self.made() if tables else ()
        self.tables = tables
        for name, x in zip(("query", "key", "diagonal"), made, strict=False):
            self.register_buffer(name, x)

    def made(self) -> tuple[Tensor, Tensor, Tensor]:
        r = torch.arange(16) + 1
        diagonal = torch.where(r[:, None] >= r, -self.slope * (r[:, None] - r), float("-inf")).exp()
        return torch.exp(-self.slope * r[:, None]), torch.exp(-self.slope * (16 - r[:, None])), diagonal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        query, key, diagonal = (self.query, self.key, self.diagonal) if self.tables else self.made()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        S, o = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
        for i in range(0, q.shape[2], 16):
            n = min(16, q.shape[2] - i)
            qi, ki, vi = (x[:, :, i : i + n] for x in (q, k, v))
            o.append(((qi @ ki.mT) * diagonal[:, :n, :n]) @ vi + (qi * query[:, :n]) @ S)
            S = S * torch.exp(-self.slope * n) + (ki * key[:, -n:]).mT @ vi
        return torch.cat(o, -2).transpose(1, 2), S


def test_decays_of_a_slope_are_found_in_the_graph() -> None:
    q, k, v, *_ = random_inputs(2, 70, 4, 8, 8)
    proposal, gm = rewritten(_Lightning(tables=False), [q, k, v])
    assert (proposal.rule, proposal.decay) == ("additive", "head")
    assert not mixing(gm)


def test_decays_from_tables_are_named_and_left() -> None:
    q, k, v, *_ = random_inputs(2, 70, 4, 8, 8)
    (miss,) = find_chunk_forms(functional(_Lightning(tables=True), [q, k, v]), set())
    assert isinstance(miss, NearMiss) and miss.reason.code == "CHUNK_DECAY_INPUTS"


def _one_sided(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    """Keys that are erased along are others than those written along."""
    o = []
    for i in range(0, q.shape[1], 16):
        qi, ki, vi, gi, bi = (x[:, i : i + 16].transpose(1, 2) for x in (q, k, v, g, beta))
        G = gi.cumsum(-1)
        D = (G[..., None] - G[..., None, :]).tril().exp().tril()
        A = (bi[..., None] * (ki.roll(1, -1) @ ki.mT) * D).tril(-1) + torch.eye(16)
        rhs = bi[..., None] * (vi - (ki.roll(1, -1) * G.exp()[..., None]) @ S)
        u = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True)
        o.append((qi * G.exp()[..., None]) @ S + ((qi @ ki.mT) * D) @ u)
        S = S * G[..., -1, None, None].exp() + (ki * (G[..., -1:] - G).exp()[..., None]).mT @ u
    return torch.cat(o, 2).transpose(1, 2), S


def _clamped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    o = []
    for i in range(0, q.shape[1], 16):
        one, S = gdn_inverse_tokens_first(*(x[:, i : i + 16] for x in (q, k, v, g, beta)), S)
        S = S.clamp(-1, 1)
        o.append(one)
    return torch.cat(o, 1), S


@pytest.mark.parametrize("fn", [_one_sided, _clamped])
def test_what_is_something_else_is_left_with_a_reason(fn: Callable[..., Any]) -> None:
    gm = functional(fn, random_inputs(2, 32, 2, 8, 6))
    before = str(gm.graph)
    found = find_chunk_forms(gm, set())
    # The last chunk of a clamped state ends in one: the part before it is a recurrence of its own.
    for x in found:
        if isinstance(x, Proposal):
            assert fn is _clamped and verify(x).ok
            withdraw(x)
        else:
            assert x.reason.code in ("CHUNK_NOT_EQUAL", "CHUNK_OPERATOR", "CHUNK_INPUTS")
    assert found and str(gm.graph) == before


def test_softmax_attention_is_no_candidate() -> None:
    def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        q, k, v = (nn.functional.linear(x, w).unflatten(-1, (2, 8)).transpose(1, 2) for w in (wq, wk, wv))
        scores = (q @ k.mT) * 8**-0.5 + torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)

    gm = functional(attention, [torch.randn(2, 32, 16), *(torch.randn(16, 16) for _ in range(3))])
    assert find_chunk_forms(gm, set()) == []


def test_layers_in_a_row_are_found_one_by_one() -> None:
    def stack(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        o, _ = gdn_inverse_tokens_first(q, k, v, g, beta, S)
        return gdn_inverse_tokens_first(q, k, nn.functional.silu(o), g, beta, S)

    found = find_chunk_forms(functional(stack, random_inputs(2, 32, 2, 8, 6)), set())
    assert len(found) == 2 and all(isinstance(p, Proposal) and verify(p).ok for p in found)


def test_sites_of_others_are_not_looked_into() -> None:
    fn, _, decay = CHUNKED["deltanet_rows"]
    gm = functional(fn, random_inputs(1, 32, 2, 8, 6, decay=decay))
    assert find_chunk_forms(gm, {n for n in gm.graph.nodes if n.op == "call_function"}) == []


def test_a_withdrawn_proposal_leaves_the_graph_as_it_was() -> None:
    gm = functional(gdn_inverse_tokens_first, random_inputs(1, 32, 2, 8, 6))
    before = str(gm.graph)
    (proposal,) = find_chunk_forms(gm, set())
    assert isinstance(proposal, Proposal)
    withdraw(proposal)
    assert str(gm.graph) == before


def _split_slopes(q: Tensor, k: Tensor, v: Tensor, both: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if both.shape[0] > q.shape[1]:
        both = both.split([q.shape[1], 1])[0]
    s, m = both.view(-1, 1, 1), q.shape[2]
    at = torch.arange(m).view(-1, 1)
    weights = q @ k.mT * torch.exp(-s * (at - at.T).clamp(min=0)).tril()
    o = weights @ v + (q * torch.exp(-s * (at + 1))) @ S
    return o.transpose(1, 2), torch.exp(-s * m) * S + (k * torch.exp(-s * (m - 1 - at))).mT @ v


def _split_states(q: Tensor, k: Tensor, v: Tensor, s: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    return _split_slopes(q, k, v, s, both.split([both.shape[0] - 1, 1])[0])


@pytest.mark.parametrize("form", [_split_slopes, _split_states], ids=["a decay", "the state"])
def test_one_of_several_results_of_what_is_taken_already_is_an_input(form: Callable[..., Any]) -> None:
    q, k, v, _, _, S = random_inputs(2, 8, 3, 4, 5)
    args = (q, k, v, torch.tensor([0.1, 0.2, 0.3, 0.4][: 4 if form is _split_slopes else 3]), S)
    if form is _split_states:
        args = (*args[:4], torch.cat([S, S[:1]]))
    gm = functional(form, args)
    (split,) = [n for n in gm.graph.nodes if "split" in str(n.target)]
    (found,) = find_chunk_forms(gm, {split})
    assert isinstance(found, Proposal) and verify(found).ok, found
