"""A functional copy means what the graph meant: values, gradients, writes into inputs, and what shares memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import lattn_compile.backend
from lattn_compile.passes.normalize import FunctionalCopy, functional_copy, with_graph
from tests.passes.traces import counted, same
from tests.tiny_models import build

aten = torch.ops.aten
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # where a compiler chooses its own order of arithmetic


class Copies:
    """A backend that runs functional copies eagerly (or hands them to `inner`) and keeps them."""

    def __init__(self, inner: Callable[..., Any] | None = None) -> None:
        self.inner, self.made = inner, []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        before, gradients = gm.code, torch.is_grad_enabled()
        made = functional_copy(gm)
        assert gm.code == before and torch.is_grad_enabled() is gradients
        with counted(trace_all=True):
            plain = functional_copy(gm)
        assert str(made.refused) == str(plain.refused)
        self.made.append(made)
        names = [(n.name, n.target) for n in gm.graph.nodes if n.op == "placeholder"]
        assert names == [(n.name, n.target) for n in made.module.graph.nodes if n.op == "placeholder"]
        if not made.refused:
            assert_functional(made)
            same(made.module, plain.module)
            assert made.graphs[0] is made.module
            again = functional_copy(made.module)
            assert not again.refused and again.module.code == made.module.code
            kept = [n.meta.keys() for n in gm.graph.nodes if n.op == "placeholder"]
            assert kept == [n.meta.keys() for n in made.module.graph.nodes if n.op == "placeholder"]
        return made.module if self.inner is None else self.inner(made.module, inputs)

    @property
    def refused(self) -> list[tuple[str, str]]:
        return [(name, r.code) for m in self.made for name, r in m.refused]


def inductor(gm: fx.GraphModule, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs)


def aot_eager(gm: fx.GraphModule, inputs: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, inputs)


def assert_functional(made: FunctionalCopy) -> None:
    for gm in made.graphs:
        gm.graph.lint()
        nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        assert all(n.op == "call_function" for n in nodes)
        tail = True
        for node in reversed(nodes):
            writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
            if writes:
                assert tail and node.target is aten.copy_.default and node.args[0].op in ("placeholder", "get_attr")
            tail = tail and (writes or node.target is torch._C._set_grad_enabled)


def leaves(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def run(fn: Callable[..., Any], inputs: list[Any], seed: int = 1) -> dict[str, Any]:
    """Outputs, inputs afterwards, gradients, and which outputs share memory with which input or earlier output."""
    copies = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    torch.manual_seed(seed)
    out = fn(*copies)
    outs, ins = leaves(out), leaves(copies)
    shares = [[o.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in [*ins, *outs]] for o in outs]
    loss = sum((o.double() * (i + 1)).sum() for i, o in enumerate(outs) if o.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    return {
        "out": outs,
        "plain": [x for x in torch.utils._pytree.tree_leaves(out) if not isinstance(x, Tensor)],
        "requires_grad": [o.requires_grad for o in outs],
        "inputs": [x.detach() for x in ins],
        "gradients": [x.grad for x in ins],
        "shares": shares,
    }


def check(
    fn: Callable[..., Any], inputs: list[Any], refused: list[tuple[str, str]] | None = None, **options: Any
) -> Copies:
    """Eager and through functional copies, twice: the same. `refused` is what stays as it was, None for nothing."""
    copies = Copies(options.pop("inner", None))
    tolerance = options.pop("tolerance", {"rtol": 0, "atol": 0})
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=copies, fullgraph=True, **options)
    for seed in (1, 2):
        want, got = run(fn, inputs, seed), run(compiled, inputs, seed)
        for key in ("requires_grad", "shares", "plain"):
            assert got[key] == want[key], key
        for key in ("out", "inputs", "gradients"):
            torch.testing.assert_close(got[key], want[key], **tolerance, equal_nan=True)
    assert copies.made and copies.refused == (refused or [])
    return copies


def targets(copies: Copies) -> list[Any]:
    return [n.target for made in copies.made for g in made.graphs for n in g.graph.nodes if n.op == "call_function"]


def randn(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def mlp(x: Tensor, w1: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    return nn.functional.silu(x @ w1 + b) @ w2.t()


def test_mlp_keeps_composite_ops_and_metadata() -> None:
    copies = check(
        lambda *a: torch.einsum("bi,bj->bij", mlp(*a), a[0]), [randn(3, 4), randn(4, 6), randn(6), randn(4, 6)]
    )
    assert aten.matmul.default in targets(copies) and aten.einsum.default in targets(copies)
    nodes = [n for n in copies.made[0].module.graph.nodes if n.op == "call_function"]
    assert all("val" in n.meta and n.meta["stack_trace"] for n in nodes)


def write_input(x: Tensor, cache: Tensor) -> Tensor:
    cache.mul_(2)
    cache.add_(x.detach())
    return (cache * x).sum(0)


def write_view(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    cache[:, 1:3].copy_(x[:, :2].t().contiguous().t())
    cache.view(-1)[0] = 7.0
    cache.t()[2] += 1
    return cache.sum() * 2 + x, cache.view(-1)[3:]


def write_cast(x: Tensor, cache: Tensor) -> Tensor:
    cache[0].copy_(x[0].double())  # another dtype
    cache[1].copy_(x[1, :1])  # expanded
    cache.t().copy_(x.t() * 2)  # another layout than the view taken below
    return cache.view(-1) * x.view(-1)


def write_index(x: Tensor, cache: Tensor) -> Tensor:
    cache.index_copy_(0, torch.tensor([1, 0], device=x.device), x[:2].detach())
    cache.masked_fill_(cache > 1, 0.5)
    cache.index_put_((torch.tensor([2]),), x.detach()[0])
    cache[:, 0].zero_()
    cache[:, 1].fill_(3.0)
    return cache @ x.t()


def intermediate_writes(x: Tensor, other: Tensor) -> Tensor:
    h = (x * 2).neg_()
    h[0] = other[0]
    h[:, 1].zero_()
    h[:, 2].fill_(4.0)
    out = torch.zeros_like(h)
    for i in range(3):
        out[i] = h[i] * other[i] + (out[i - 1] if i else 0)
    return out.mul_(2)


def saved_by_autograd(x: Tensor, cache: Tensor) -> Tensor:
    cache.mul_(x)  # saves the old value
    cache.sigmoid_()
    return cache.sum(0)


def no_grad_region(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(x)
    with torch.no_grad():
        cache.copy_(h)  # the value, not its gradient
        scale = h.abs().max()
    return h / scale, cache * x


def outputs_alias(x: Tensor, cache: Tensor) -> tuple[Any, ...]:
    cache.add_(1)
    y = x * 2
    return x, cache, cache[0], x.view(-1), y, y.t(), 3, None, "a"


def returned_then_written(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    row = cache[1]
    before = row.clone()
    cache.mul_(3)
    return row, before + x[1]


def integers(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return x[index.long()] * (index > 0)[:, None], index + 1


@pytest.mark.parametrize(
    "fn",
    [
        write_input,
        write_view,
        write_cast,
        write_index,
        intermediate_writes,
        saved_by_autograd,
        no_grad_region,
        outputs_alias,
        returned_then_written,
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_and_views(fn: Callable[..., Any], dynamic: bool) -> None:
    check(fn, [randn(3, 4), randn(3, 4, grad=False)], dynamic=dynamic)


def test_integer_and_bool_inputs() -> None:
    check(integers, [randn(3, 4), torch.tensor([2, 0, 1], dtype=torch.int32)])


def test_a_write_makes_the_cache_differentiable() -> None:
    def fn(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache[:, :2].copy_(x[:, :2] * 2)
        return cache * x, cache

    check(fn, [randn(3, 4), randn(3, 4, grad=False)])


def hidden_write(x: Tensor, y: Tensor) -> Tensor:
    h = x * 2
    with torch.no_grad():
        h.mul_(3)
    return h * y


def hidden_write_detached(x: Tensor, y: Tensor) -> Tensor:
    h = x * 2
    h.detach().mul_(3)
    return h * 2 + y


def hidden_write_to_leaf(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(3)
    return x * y


@pytest.mark.parametrize("fn", [hidden_write, hidden_write_detached, hidden_write_to_leaf])
def test_writes_hidden_from_autograd_are_refused(fn: Callable[..., Any]) -> None:
    check(fn, [randn(3, 4), randn(3, 4)], refused=[("", "NOT_NORMALIZED")])


def test_the_same_writes_without_gradients() -> None:
    check(hidden_write_to_leaf, [randn(3, 4, grad=False), randn(3, 4)])
    with torch.no_grad():
        check(hidden_write, [randn(3, 4), randn(3, 4)])


def test_inputs_that_share_memory() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    base, other = torch.randn(6), torch.randn(6)
    copies = Copies()
    compiled = torch.compile(fn, backend=copies)
    want = fn(base[:4].clone(), base[2:].clone()), (base + 1)[2:4] * 2
    got = compiled(base[:4], base[2:])
    assert copies.refused == [("", "NOT_NORMALIZED")]
    torch.testing.assert_close(got[:2], want[1])
    assert torch.equal(got[2:], want[0][2:])
    del other


@pytest.mark.parametrize("training", [False, True])
def test_dropout(training: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        h = nn.functional.dropout(x, 0.5, training)
        return h.add_(1) if not training else h * 2

    check(fn, [randn(3, 4, grad=training)])


def test_buffers_and_parameters_of_a_module() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.linear = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.norm(self.linear(x)) + self.steps + self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])

    eager = Norm()
    mine = copy.deepcopy(eager)
    copies = Copies(aot_eager)
    compiled = torch.compile(mine, backend=copies, fullgraph=True)
    x = randn(5, 4)
    for _ in range(2):
        want, got = eager(x), compiled(x)
        assert torch.equal(want, got)
        want.sum().backward()
        got.sum().backward()
    assert copies.refused == []
    for a, b in zip(eager.state_dict().values(), mine.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(eager.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)


def recurrence(x: Tensor, w: Tensor) -> Tensor:
    h = torch.zeros_like(x[0])
    out = []
    for i in range(3):
        h = h * 0.5 + (x[i] @ w).relu_()
        out.append(h)
    return torch.stack(out)


def test_checkpointed_regions_stay_regions() -> None:
    def fn(x: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(x.detach())
        y = checkpoint(recurrence, x.clone().mul_(2), w, use_reentrant=False)
        return checkpoint(recurrence, y, w, use_reentrant=False) * cache

    copies = check(fn, [randn(3, 2, 4), randn(4, 4), randn(3, 2, 4, grad=False)])
    made = copies.made[0]
    assert len(made.graphs) == 3
    regions = [n for n in made.module.graph.nodes if "tag_activation_checkpoint" in str(n.target)]
    assert len(regions) == 2 and all(n.kwargs.get("use_reentrant") is False for n in regions)


def test_region_next_to_something_unknown() -> None:
    """The graph itself stays, the region's body is still normalised."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x * 2
        h.detach().mul_(3)
        return checkpoint(recurrence, x, w, use_reentrant=False) + h

    copies = check(fn, [randn(3, 2, 4), randn(4, 4)], refused=[("", "NOT_NORMALIZED")])
    assert len(copies.made[0].graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_scan(dynamic: bool) -> None:
    from torch._higher_order_ops import scan

    def fn(h: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
        def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = h * 0.5 + x.relu()
            return h, h.clone() * 2

        return scan(step, h + 1, xs)

    copies = check(fn, [randn(4, grad=False), randn(5, 4, grad=False)], dynamic=dynamic)
    assert len(copies.made[0].graphs) == 2
    assert aten.relu.default in targets(copies)


def test_cond() -> None:
    def fn(x: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag.sum() > 0, lambda x: x.sin() * 2, lambda x: x.relu() + 1, (x,))

    copies = check(fn, [randn(4), torch.ones(2)])
    assert len(copies.made[0].graphs) == 3


def test_nested_compile_region_is_copied_once() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return recurrence(x, w)

    copies = check(lambda x, w: layer(layer(x, w), w), [randn(3, 2, 4), randn(4, 4)], inner=aot_eager, tolerance=CLOSE)
    assert len(copies.made[0].graphs) == 2


def test_custom_autograd_function_keeps_its_backward() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 5  # not the derivative, on purpose

    copies = Copies()
    x = randn(4)
    torch.compile(lambda x: Twice.apply(x * 1) + 1, backend=copies, fullgraph=True)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 5.0))
    assert copies.made[0].graphs and {code for _, code in copies.refused} == {"NOT_NORMALIZED"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(mlp, [randn(3, 4, dtype=dtype), randn(4, 6, dtype=dtype), randn(6, dtype=dtype), randn(4, 6, dtype=dtype)])


def test_autocast_inside_is_refused() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(lambda x, w: (x @ w).float() + 1, x, w, use_reentrant=False)

    check(fn, [randn(3, 4), randn(4, 6)], refused=[("", "AUTOCAST_REGION")])


@pytest.mark.parametrize("inner", [None, inductor])
def test_autocast_around(inner: Any) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        h = x @ w
        return h.float() * 2 + (h * h).sum(-1, keepdim=True), h

    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(fn, [randn(3, 4), randn(4, 6)], inner=inner, tolerance={"rtol": 2e-2, "atol": 2e-2} if inner else {})


def test_symbolic_sizes_are_kept() -> None:
    def fn(x: Tensor, n: int, s: float) -> Tensor:
        return (x * s).view(-1, n) + x.shape[0]

    copies = Copies()
    compiled = torch.compile(fn, backend=copies, dynamic=True, fullgraph=True)
    for b, n, s in ((2, 4, 0.5), (3, 6, 0.25), (5, 2, 3.0)):
        x = torch.randn(b, 12)
        assert torch.equal(compiled(x, n, s), fn(x, n, s))
    assert copies.refused == [] and len(copies.made) <= 2


def test_inference_mode() -> None:
    with torch.inference_mode():
        check(write_view, [randn(3, 4, grad=False), randn(3, 4, grad=False)])


@pytest.mark.parametrize("fn", [write_view, no_grad_region, outputs_alias])
def test_through_inductor(fn: Callable[..., Any]) -> None:
    check(fn, [randn(3, 4), randn(3, 4, grad=False)], inner=inductor, tolerance=CLOSE)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("captured", [False, True])
def test_tiny_models(name: str, captured: bool) -> None:
    model, layers = build(name, layers=2)
    ids = torch.randint(3, 90, (2, 9))
    eager = model(ids, labels=ids)
    eager.loss.backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    copies = Copies()
    context = lattn_compile.passes.capture.capturing() if captured else contextlib.nullcontext()
    torch._dynamo.reset()
    with context:
        got = torch.compile(model, backend=copies)(ids, labels=ids)
    got.loss.backward()
    torch.testing.assert_close(got.logits, eager.logits, rtol=1e-4, atol=1e-4)
    for n, p in model.named_parameters():
        if n in want:
            torch.testing.assert_close(p.grad, want[n], rtol=1e-3, atol=1e-4)
    assert copies.refused == []
    ops = [n for m in copies.made for n in m.module.graph.nodes if "lattn" in str(n.target)]
    assert len(ops) == (layers if captured else 0)
    assert all("lattn" in n.meta["custom"] and n.meta["nn_module_stack"] for n in ops)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            scale = x.abs().amax() + 1
        h = self.linear(x / scale).relu_()
        self.cache[:2].copy_(h[:2].detach())
        return h * self.cache[0], h


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_programs(strict: bool, dynamic: bool, tmp_path: Any) -> None:
    module, x = Stateful(), torch.randn(3, 4)
    shapes = ({0: torch.export.Dim("batch", min=3, max=64)},) if dynamic else None
    program = torch.export.export(module, (x,), strict=strict, dynamic_shapes=shapes)
    made = functional_copy(program.graph_module)
    assert made.refused == [] and made.graphs[0] is made.module
    rebuilt = with_graph(program, made.module)
    torch.export.save(rebuilt, tmp_path / "p.pt2")
    loaded = torch.export.load(tmp_path / "p.pt2")
    for batch in (3, 7) if dynamic else (3,):
        x = torch.randn(batch, 4)
        decomposed = rebuilt.run_decompositions().module()  # no longer differentiable: it drops every detach
        with torch.no_grad():
            torch.testing.assert_close(decomposed(x), copy.deepcopy(module)(x), rtol=0, atol=0)
        for variant in (rebuilt, loaded):
            module.zero_grad()  # parameters are shared with the programs
            eager, mine = copy.deepcopy(module), variant.module()
            mine.zero_grad()
            want, got = eager(x), mine(x)
            torch.testing.assert_close(got, want, rtol=0, atol=0)
            want[0].sum().backward()
            got[0].sum().backward()
            torch.testing.assert_close(
                [p.grad for p in mine.parameters()], [p.grad for p in eager.parameters()], rtol=0, atol=0
            )
            torch.testing.assert_close(dict(mine.named_buffers()), dict(eager.named_buffers()), rtol=0, atol=0)
            mine.load_state_dict(eager.state_dict())


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode: str) -> None:
    constant = torch.arange(4.0)

    def fn(x: Tensor, cache: Tensor) -> dict[str, Any]:
        cache.mul_(0.5)
        cache[0].copy_(x[0])
        return {"y": (cache @ x.t()) * 2, "z": [constant + x, 3]}

    x, cache = torch.randn(3, 4), torch.randn(3, 4)
    traced = make_fx(fn, tracing_mode=mode, pre_dispatch=True, _allow_non_fake_inputs=True)(x, cache.clone())
    made = functional_copy(traced)
    assert made.refused == [] and made.graphs
    assert_functional(made)
    mine, eager = cache.clone(), cache.clone()
    torch.testing.assert_close(made.module(x, mine), fn(x, eager), rtol=0, atol=0)
    assert torch.equal(mine, eager)


@pytest.mark.parametrize(
    "fn", [lambda a, b: torch.linalg.inv(a) @ b, torch.linalg.solve, lambda a, b: torch.linalg.solve(a, b, left=False)]
)
def test_an_inverse_that_was_taken_apart_keeps_its_check(fn: Callable[..., Any]) -> None:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    traced = make_fx(fn)(a, b)
    before = traced.code
    assert "_linalg_check_errors" in before
    made = functional_copy(traced)
    assert made.refused == [] and traced.code == before
    assert_functional(made)
    torch.testing.assert_close(made.module(a, b), fn(a, b), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="singular"):
        made.module(torch.zeros(3, 3), b)


def test_an_error_code_that_is_read_is_left() -> None:
    def fn(a: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.linalg.inv_ex(a))

    a = torch.randn(2, 2)
    made = functional_copy(make_fx(fn)(a))
    assert made.refused == []
    torch.testing.assert_close(made.module(a), fn(a), rtol=0, atol=0)


def test_a_graph_without_values_is_refused() -> None:
    made = functional_copy(fx.symbolic_trace(lambda x: x + 1))
    assert [(n, r.code) for n, r in made.refused] == [("", "NOT_NORMALIZED")] and made.graphs == []
    assert torch.equal(made.module(torch.ones(2)), torch.ones(2) + 1)
