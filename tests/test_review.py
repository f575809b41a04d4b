"""What a hostile review found: regions, mutation, merged layers, and promises that two features made together."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.lowering import _torch_private as private
from lattn_compile.passes.context import nodes_of
from lattn_compile.testing.backend import Record, recorded


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_SAID", set())


def _inputs(T: int = 6, H: int = 2, HV: int = 4, grad: bool = False) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    k = torch.nn.functional.normalize(draw(2, T, H, 8), dim=-1)
    tensors = (draw(2, T, H, 8), k, draw(2, T, HV, 12), -draw(2, T, HV).abs(), draw(2, T, HV).sigmoid())
    return tuple(x.requires_grad_(grad) for x in tensors)


def _layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return lc.linear_attention(q, k, v, g, beta)[0]


def _quantized(*inputs: Tensor) -> Tensor:
    return lc.linear_attention(*inputs, policy="int8")[0]  # type: ignore[arg-type]


def _compiled(f: Callable[..., Any], policy: Any = "int8", **options: Any) -> Any:
    return torch.compile(f, backend="lattn_compile", fullgraph=True, options={"policy": policy, **options})


def _formats(record: Record) -> list[str]:
    ops = [n for n in nodes_of(record.graphs[-1]) if str(n.target).startswith("lattn.")]
    return [n.kwargs.get("state_format", "fp32") for n in ops]


# Regions -------------------------------------------------------------------------------------------------------------


def _checkpointed(*x: Tensor) -> Any:
    return checkpoint(_layer, *x, use_reentrant=False)


def _branches(q: Tensor, *x: Tensor) -> Any:
    return torch.cond(q.sum() > 1e9, lambda q, *x: _layer(q, *x), lambda q, *x: _layer(q, *x) + 0, (q, *x))


def _scanned(*x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    def step(S: Tensor, token: Any) -> Any:
        o, S = lc.linear_attention(*[t[:, None] for t in token], initial_state=S, output_final_state=True)
        return S.clone(), o[:, 0].clone()

    return scan(step, torch.zeros(2, 4, 8, 12), tuple(t.transpose(0, 1) for t in x))[1].transpose(0, 1)


def _cast(*x: Tensor) -> Any:
    # One region only: torch 2.13 cannot load a program in which one stands directly in another.
    with torch.autocast("cpu", enabled=False):
        return _layer(*x)


@pytest.mark.parametrize(("f", "sites"), [(_checkpointed, 1), (_branches, 2), (_scanned, 1), (_cast, 1)])
def test_a_site_inside_a_region_is_rewritten_under_compile(f: Any, sites: int) -> None:
    x = _inputs()
    with recorded() as record:
        got = _compiled(f, strict=True)(*x)
    assert _formats(record) == ["int8/*x64"] * sites
    assert len(record.report.rewritten) == sites
    assert (got - _quantized(*x)).abs().max() < 1e-5
    assert (got - _layer(*x)).abs().max() > 1e-3


class _Module(nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return self.f(q, k, v, g, beta)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("f", "sites"), [(_branches, 2), (_scanned, 1), (_cast, 1)])
def test_a_site_inside_a_region_of_a_program_is_rewritten_in_a_copy(
    f: Any, sites: int, strict: bool, tmp_path: Any
) -> None:
    x = _inputs()
    with lc.capture():
        program = torch.export.export(_Module(f), x, strict=strict)
    result = lc.rewrite(program, "int8")
    assert len(result.report.rewritten) == sites
    torch.export.save(result.module, tmp_path / "p.pt2")
    loaded = torch.export.load(tmp_path / "p.pt2").module()
    assert (loaded(*x) - _quantized(*x)).abs().max() < 1e-5
    assert (program.module()(*x) - _layer(*x)).abs().max() < 1e-5, "the input is never changed"


def test_a_checkpointed_site_trains_through_inductor() -> None:
    x = _inputs(grad=True)
    loss = _compiled(lambda *x: checkpoint(_layer, *x, use_reentrant=False).square().sum())(*x)
    want = torch.autograd.grad(_quantized(*x).square().sum(), x)
    for a, b in zip(torch.autograd.grad(loss, x), want, strict=True):
        assert (a - b).norm() / b.norm() < 1e-5


class _Region(nn.Module):
    @torch.compiler.nested_compile_region
    def forward(self, *x: Tensor) -> Tensor:
        return _layer(*x)


class _Two(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.a, self.b = layer(), layer()

    def forward(self, *x: Tensor) -> Tensor:
        return self.a(*x) + self.b(*x)


@pytest.mark.parametrize("attached", [False, True])
def test_a_region_that_serves_several_layers_never_takes_the_first_ones_policy(attached: bool) -> None:
    x = _inputs()
    model = _Two(_Region)
    with recorded() as record:
        for recipe, formats in (
            (lc.Recipe(rules=[("b", "fp8"), ("*", "int8")]), [{"fp32"}, {"int8/*x64", "fp8_e4m3/*x64"}]),
            (lc.Recipe(rules=[("*", "int8")]), [{"int8/*x64"}]),
        ):
            torch._dynamo.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nothing was rewritten
                if attached:
                    torch.compile(lc.attach(model, recipe), backend="lattn_compile", fullgraph=True)(*x)
                else:
                    _compiled(model, recipe)(*x)
            assert set(_formats(record)) in formats
            for site in record.report.left:
                assert site.reason is not None
                assert site.reason.code == "SHARED_REGION"


# Normalising ---------------------------------------------------------------------------------------------------------


def test_a_head_repeat_is_not_folded_over_a_write_to_what_it_read() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k = q * 1, k * 1
        q2, k2 = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
        k.view(-1).mul_(0.5)
        return _layer(q2, k2, v, g, beta) + k.sum()

    def repeated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q2, k2 = q.repeat_interleave(2, 2), k.repeat_interleave(2, 2)
        q2[:, 0] = 1
        return _layer(q2, k2, v, g, beta)

    x = _inputs()
    for g in (f, repeated):
        with recorded():
            assert (_compiled(g, "exact")(*x) - g(*x)).abs().max() < 1e-5


def test_a_cat_that_writes_to_out_stays() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out = torch.zeros_like(k)
        torch.cat([k.new_zeros(2, 0, 2, 8), k], 1, out=out)
        return _layer(q, k, v, g, beta) + out.sum()

    x = _inputs()
    with recorded():
        assert (_compiled(f, "exact")(*x) - f(*x)).abs().max() < 1e-5


# Attach --------------------------------------------------------------------------------------------------------------


def test_an_attached_recipe_reaches_the_models_own_linear_attention_calls() -> None:
    class Layer(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return _layer(*x)

    model = lc.attach(_Two(Layer), lc.Recipe(rules=[("a", "int8"), ("*", "fp8")]))
    x = _inputs()
    with recorded() as record:
        compiled = torch.compile(model, backend="lattn_compile", fullgraph=True)
        compiled(*x)
        assert _formats(record) == ["int8/*x64", "fp8_e4m3/*x64"]
        assert [s.call for s in record.report.sites] == ["lattn_compile.linear_attention"] * 2
        lc.attach(model, "fp8")
        compiled(*x)
        assert _formats(record) == ["fp8_e4m3/*x64"] * 2
        # Regional: one code object, a group each.
        torch._dynamo.reset()
        regional = lc.attach(_Two(Layer), lc.Recipe(rules=[("a", "int8"), ("*", "fp8")]))
        for layer in (regional.a, regional.b):
            layer.compile(backend="lattn_compile", fullgraph=True)
        record.calls.clear()
        regional(*x)
        assert [c.arguments["state_format"] for c in record.calls] == ["int8/*x64", "fp8_e4m3/*x64"]


def test_layers_of_one_group_agree_in_every_rule_that_a_site_of_theirs_may_get() -> None:
    """A rule for another kind matches both paths; the rules behind it tell the layers apart."""

    class Layer(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return _layer(*x)

    recipe = lc.Recipe(rules=[("*/kda#*", "exact"), ("a", "int8"), ("*", "fp8")])
    model = lc.attach(_Two(Layer), recipe)
    for layer in (model.a, model.b):
        layer.compile(backend="lattn_compile", fullgraph=True)
    with recorded() as record:
        model(*_inputs())
    assert [c.arguments["state_format"] for c in record.calls] == ["int8/*x64", "fp8_e4m3/*x64"]


# Capture -------------------------------------------------------------------------------------------------------------


def _gdn(**options: Any) -> Callable[..., Any]:
    hf = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

    def f(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        # A keyword that FLA honours and the torch function behind the same name does not.
        return hf.torch_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, **options
        )[0]

    return f


def test_a_partial_of_the_backend_captures_and_reads_its_options() -> None:
    recipe = lc.Recipe(rules=[("*", "int8")])
    ours = functools.partial(backend.lattn_compile, options={"policy": recipe})
    with recorded() as record:
        torch.compile(_gdn(), backend=ours, fullgraph=True)(*_inputs(H=4))
    assert _formats(record) == ["int8/*x64"]


def test_a_refusal_is_reported_where_it_happened_and_nowhere_else() -> None:
    x = _inputs(H=4)
    f = _gdn(scale=1.0)
    with pytest.warns(lc.LattnWarning, match="left .*gated_delta_rule as it was: scale="), lc.capture():
        torch.export.export(_Module(f), x, strict=False)
    assert [u.reason.code for u in lc.inspect(_Module(f), x).unmatched] == ["CALL_OPTIONS"]
    broken = torch.compile(lambda *x: (f(*x), torch._dynamo.graph_break()), backend="lattn_compile", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken(*x)  # a trace that never reaches the backend
    with recorded() as record:
        _compiled(_layer, strict=True)(*x)
    assert record.report.unmatched == []


# Caches --------------------------------------------------------------------------------------------------------------


class _Known(private.CustomGraphPass):
    def __call__(self, graph: Any) -> None: ...

    def uuid(self) -> str:
        return "known"


def test_a_users_pass_without_identity_keeps_its_graphs_out_of_the_caches() -> None:
    unknown: Callable[[Any], None] = lambda graph: None  # noqa: E731
    assert private.CacheIdentity("ours").uuid()
    assert private.CacheIdentity("ours", _Known()).uuid() != private.CacheIdentity("ours").uuid()
    assert private.CacheIdentity("ours", unknown).uuid() is None
    assert private.CacheIdentity("ours", [_Known(), unknown]).uuid() is None
    seen: list[int] = []
    private.CacheIdentity("ours", [seen.append, seen.append])(1)  # type: ignore[arg-type]
    assert seen == [1, 1]
