"""Failures that people reported elsewhere, under torch.compile and torch.export: tracing, caches, padding, checkpoints.

Each stands for a kind; the report's id is in a comment. `recorded()` runs the rewritten graphs without Inductor.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.inputs import make_inputs
from lattn_compile.testing.oracle import oracle

from . import tiny_models

pytest.importorskip("transformers")

names = pytest.mark.parametrize("name", tiny_models.NAMES)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield


def _ids(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def _compile(target: Any, policy: Any = "exact", **more: Any) -> Any:
    more = {"fullgraph": True, **more}
    return torch.compile(target, backend="lattn_compile", options={"policy": policy}, **more)


def _chunk_function(name: str = "torch_chunk_gated_delta_rule") -> Any:
    from transformers.models.qwen3_next import modeling_qwen3_next

    return vars(modeling_qwen3_next)[name]


class Layer(nn.Module):
    """One projection, one recurrence; `between` runs inside forward, where a model may break its graph."""

    def __init__(self, policy: Any = None, between: Callable[[], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy, self.between = policy, between
        self.project = nn.Linear(16, 5 * 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate, z = self.project(x).unflatten(-1, (5, 2, 8)).unbind(-3)
        o, _ = lc.linear_attention(q, k, v, -gate[..., 0].exp(), use_qk_l2norm_in_kernel=True, policy=self.policy)
        if self.between is not None:
            self.between()
        return x + (o * z.sigmoid()).flatten(-2)


class Stack(nn.Module):
    def __init__(self, between: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(between=between) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# --- tracing ----------------------------------------------------------------------------------------------------------


def test_four_layers_compile_without_breaks_also_when_breaks_are_allowed() -> None:  # B04
    model, linear_layers = tiny_models.build("qwen3_next", layers=4)
    with recorded() as record, torch.no_grad():
        _compile(model, fullgraph=False)(_ids(1, 9))
    assert len(record.graphs) == 1 and record.lattn_ops == linear_layers == 3
    assert record.report.graph_breaks == [] and record.report.skipped_frames == []
    assert "0 graph breaks" in record.report.summary()


def test_a_forward_that_dynamo_gave_up_on_is_reported_loudly() -> None:  # B04
    backend._SAID.clear()  # said once a process, and another test may have been the one
    with recorded() as record, pytest.warns(lc.LattnWarning):
        _compile(Stack(torch._dynamo.graph_break), fullgraph=False)(torch.randn(1, 5, 16))
    report = record.report
    assert len(report.graph_breaks) >= 1
    assert len(report.skipped_frames) >= 1
    assert "WARNING" in report.summary() and "skipped" in report.summary()
    assert "skipped" in str(report)


@names
def test_dtypes_of_gates_are_those_of_the_traced_model(name: str) -> None:  # B05, B41
    model, _ = tiny_models.build(name, layers=2)
    model = model.bfloat16()
    ids = _ids(1, 14)
    seen: list[dict[str, Tensor]] = []
    module = sys.modules[type(model).__module__]
    f_name = "chunk_kimi_delta_attention" if name == "kimi_linear" else "torch_chunk_gated_delta_rule"
    original = vars(module)[f_name]

    def spy(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        seen.append({"q": query, "k": key, "v": value, "g": g, "beta": beta})
        return original(query, key, value, g=g, beta=beta, **options)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, f_name, spy)
        want = model(ids).logits
    with torch.no_grad(), recorded() as record:
        got = _compile(model)(ids).logits
    for argument, value in seen[0].items():
        ours = record.calls[0].arguments[argument]
        assert ours.dtype is value.dtype, argument
        assert torch.equal(ours, value), argument
    assert (got - want).abs().max() <= 2**-6 * want.abs().max(), "a few units of bf16's last place"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cast_of_the_gate_is_kept_bit_for_bit(dtype: torch.dtype) -> None:  # B05
    x = make_inputs("gdn", batch=1, tokens=9, dtype=torch.bfloat16)
    A_log = torch.linspace(0, 2, 4)

    def layer(q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor) -> Any:
        g = (-A_log.exp() * F.softplus(a.float())).to(dtype)
        return _chunk_function()(q, k, v, g=g, beta=beta), g

    with recorded() as record:
        _, g = _compile(layer)(x.q, x.k, x.v, x.g, x.beta)
    taken = record.calls[0].arguments["g"]
    assert taken.dtype is dtype and torch.equal(taken, g)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_positions_with_resets_put_no_data_dependent_op_into_the_graph(name: str) -> None:  # B05
    model, _ = tiny_models.build(name, layers=2)
    ids, positions = _ids(1, 10), torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]])
    with recorded() as record, torch.no_grad():
        got = _compile(model)(ids, position_ids=positions, use_cache=False).logits
        want = model(ids, position_ids=positions, use_cache=False).logits
    called = {getattr(n.target, "__name__", str(n.target)) for n in record.graphs[-1].graph.nodes}
    assert not called & {"nonzero", "item", "tolist", "where"}
    assert (got - want).abs().max() < 1e-5


def test_cost_does_not_grow_with_the_number_of_segments() -> None:  # B06
    def events(segments: int) -> int:
        x = make_inputs("gdn", lengths=[4096 // segments] * segments, key_dim=8, value_dim=8, initial_state=False)
        x = x.map(lambda t: t.requires_grad_())
        with torch.autograd.profiler.profile() as profile:
            o, _ = torch.ops.lattn.chunk(*x.tensors(), None, None, None, **x.options())
            o.sum().backward()
        return len(profile.function_events)

    assert events(1024) <= 1.2 * events(64)


def test_segment_boundaries_are_data_in_the_traced_path() -> None:  # B06
    x = make_inputs("gdn", lengths=[4] * 1024, key_dim=8, value_dim=8, initial_state=False)

    def attend(cu_seqlens: Tensor) -> Tensor:
        return lc.linear_attention(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)[0]

    with recorded() as record:
        compiled = _compile(attend, "int8", dynamic=True)
        for cu_seqlens in (x.cu_seqlens, torch.tensor([0, 5, 4096], dtype=torch.int32), torch.arange(0, 4097, 8)):
            assert cu_seqlens is not None
            assert torch.equal(compiled(cu_seqlens), _eager_int8(x, cu_seqlens))
    assert len(record.graphs) <= 2, "one more for int64"


def _eager_int8(x: Any, cu_seqlens: Tensor) -> Tensor:
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "use_qk_l2norm_in_kernel": True, "policy": "int8"}
    return lc.linear_attention(x.q, x.k, x.v, x.g, x.beta, **options)[0]


class Recurrence(nn.Module):
    """transformers' own chunk function; `bare` is the torch body behind its wrapper."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        f = _chunk_function()
        self.f = f.__wrapped__ if bare else f

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        return self.f(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)[0]


@pytest.mark.parametrize("bare", [False, True], ids=["wrapped", "bare"])
@pytest.mark.parametrize("tracer", ["compile", "export", "strict export"])
@pytest.mark.parametrize("lengths", [None, [5, 4]], ids=["plain", "packed"])
def test_one_recurrence_is_recognised_in_every_graph_and_keeps_packed_samples_apart(
    tracer: str, bare: bool, lengths: list[int] | None
) -> None:  # B07, B20, B21a: the torch body differs while exporting, and ignores cu_seqlens
    x = make_inputs("gdn", batch=1, tokens=9, lengths=lengths, seed=5, initial_state=False)
    layer, args = Recurrence(bare), (x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens)
    want = oracle(*x.tensors(), **x.options()).o
    if tracer == "compile":
        with recorded() as record:
            got, sites = _compile(layer)(*args), None
            sites = record.report.sites
    else:
        with lc.capture():
            program = torch.export.export(layer, args, strict=tracer == "strict export")
        result = lc.rewrite(program, "exact")
        got, sites = result.module.module()(*args), result.report.sites
    assert [(s.kind, s.verdict) for s in sites] == [("gdn", "rewritten")]
    assert (got - want).norm() / want.norm() < 2e-6


def test_packed_samples_of_a_model_are_kept_apart_or_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """B20, B21: without FLA, transformers refuses packed samples in its recurrence; once that is captured nobody does,
    and its causal convolution, which is not ours, mixes the samples without a word."""
    monkeypatch.setattr(backend, "_SAID", set())  # a warning is given once a process
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids, cu = _ids(1, 14), torch.tensor([0, 5, 14], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(9)])[None]
    packing = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    with torch.no_grad(), recorded() as record, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            got = _compile(model)(ids, position_ids=positions, use_cache=False, **packing).logits
        except Exception as error:
            assert "packed" in str(error)
            return
        want = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])], 1)
    assert torch.equal(record.calls[0].arguments["cu_seqlens"], cu), "the recurrence itself sees the boundaries"
    apart = (got - want).abs().max() < 1e-5
    assert apart or any("conv" in str(w.message) and "packed" in str(w.message) for w in said)


# --- export -----------------------------------------------------------------------------------------------------------


def test_boundaries_may_be_given_twice() -> None:  # B20: transformers' collator sends seq_idx beside cu_seqlens
    x = make_inputs("gdn", lengths=[5, 4], seed=5, initial_state=False)
    seq_idx = torch.tensor([[0] * 5 + [1] * 4], dtype=torch.int32)

    def call() -> Tensor:
        options = {"cu_seqlens": x.cu_seqlens, "seq_idx": seq_idx, "use_qk_l2norm_in_kernel": True}
        return _chunk_function()(x.q, x.k, x.v, g=x.g, beta=x.beta, **options)[0]

    with recorded() as record:
        got = _compile(call)()
    assert record.lattn_ops == 1
    assert (got - oracle(*x.tensors(), **x.options()).o).abs().max() < 1e-5


class DecodeStep(nn.Module):
    """One Qwen3-Next layer with transformers' cache, whose tensors are this module's buffers."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        super().__init__()
        from transformers import DynamicCache

        self.layer = model.model.layers[0].linear_attn
        self.cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=self.cache)
        self.register_buffer("conv", self.cache.layers[0].conv_states[0].clone())
        self.register_buffer("state", self.cache.layers[0].recurrent_states[0].clone())

    def forward(self, hidden: Tensor) -> Tensor:
        # 5.24's cache layer then does `recurrent_states[0].copy_(new)`.
        cached = self.cache.layers[0]
        cached.conv_states[0], cached.recurrent_states[0] = self.conv, self.state
        return self.layer(hidden, cache=self.cache)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_decode_step_writes_its_state(strict: bool) -> None:  # B09
    model, _ = tiny_models.build("qwen3_next", layers=2)
    step = DecodeStep(model, _ids(1, 9))
    start = {n: b.clone() for n, b in step.named_buffers()}
    hidden = torch.randn(1, 1, 48, generator=torch.Generator().manual_seed(2))

    def restart(module: nn.Module) -> nn.Module:
        for n, b in module.named_buffers():
            b.copy_(start[n.split(".")[-1]])
        return module

    with torch.no_grad():
        with lc.capture():
            program = torch.export.export(step, (hidden,), strict=strict)
        want = restart(step)(hidden)
        after = {n: b.clone() for n, b in step.named_buffers()}
        assert not torch.equal(after["state"], start["state"])

        file = io.BytesIO()
        torch.export.save(lc.rewrite(program, "exact").module, file)
        file.seek(0)
        loaded = torch.export.load(file)
        for version in (program, lc.rewrite(program, "exact").module, loaded):
            module = restart(version.module())
            assert (module(hidden) - want).abs().max() < 1e-5
            buffers = dict(module.named_buffers())
            assert buffers["state"].abs().max() > 0
            for n, value in after.items():
                assert (buffers[n] - value).abs().max() < 1e-5, n

        int8 = lc.rewrite(program, "int8")
        assert [s.op for s in int8.report.rewritten] == ["lattn::decode"]
        module = restart(int8.module.module())
        module(hidden)
        stored = dict(module.named_buffers())["state"]
        assert 1e-6 < (stored - after["state"]).abs().max() < 0.1
        assert torch.equal(lc.Int8().qdq(stored), stored), "what is written back is what 8 bits can hold"


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["exact", "int8"])
def test_a_long_sequence_adds_a_constant_number_of_autograd_nodes(policy: str) -> None:  # B10
    def nodes(tokens: int) -> int:
        layer = Layer(policy)
        todo, seen = [layer(torch.randn(1, tokens, 16)).grad_fn], set()
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [n for n, _ in node.next_functions]
        return len(seen)

    assert nodes(4096) == nodes(8) < 40
    with recorded() as record:
        _compile(Layer(), policy)(torch.randn(1, 96, 16, requires_grad=True)).sum().backward()
    assert [s.autograd_nodes for s in record.report.sites] == [1]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "slice of a wider buffer": lambda x: F.pad(x, (2, 3), value=float("nan"))[..., 2:-3],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "last axis slow": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded batch": lambda x: x[:1].expand(x.shape),
}


def test_strides_are_honoured_with_dynamic_shapes() -> None:  # B12
    x = make_inputs("gdn", batch=2, tokens=20, key_dim=8, value_dim=12)

    def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return lc.linear_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    baseline = 0

    def count(gm: Any, _: Any) -> Any:
        nonlocal baseline
        baseline += 1
        return gm.forward

    with recorded() as record, torch._dynamo.config.patch(recompile_limit=32):
        compiled, other = _compile(attend, "int8", dynamic=True), torch.compile(attend, backend=count, dynamic=True)
        for layout in LAYOUTS.values():
            args = [layout(t) for t in (x.q, x.k, x.v, x.g, x.beta) if t is not None]
            dense = [t.contiguous() for t in args]
            options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "policy": "int8"}
            want = lc.linear_attention(*dense, **options)[0]
            assert torch.equal(compiled(*args), want)
            other(*args)
    assert len(record.graphs) <= baseline, "no specialisation on strides of our own"


def test_inductor_reads_slices_of_a_fused_projection() -> None:  # B12
    def layer(x: Tensor) -> Tensor:
        q, k, v, g, beta = x.split([16, 16, 48, 4, 4], -1)
        q, k, v = q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), F.silu(v).unflatten(-1, (4, 12))
        return lc.linear_attention(q, k, v, -g.exp(), beta.sigmoid(), use_qk_l2norm_in_kernel=True)[0]

    compiled = _compile(layer, dynamic=True)
    for shape in ((2, 7), (3, 9)):
        wide = torch.randn(*shape, 100, generator=torch.Generator().manual_seed(0))
        assert torch.allclose(compiled(wide[..., 6:94]), layer(wide[..., 6:94].contiguous()), atol=1e-6)


def _step(f: Callable[[Tensor], Tensor], layer: nn.Module) -> list[Tensor]:
    """Output and gradients of one training step under a phase."""
    x = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    layer.zero_grad()
    with lc.training_phase([10, 20]):
        y = f(x)
        y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


reentrant = pytest.mark.parametrize("use_reentrant", [True, False])


@reentrant
@pytest.mark.parametrize("policy", ["exact", "int8", lc.Policy(lc.Fp8(), write=lc.Chunk(4))], ids=str)
def test_an_eager_layer_recomputes_bit_identically(policy: Any, use_reentrant: bool) -> None:  # B13
    layer = Layer(policy)
    plain = _step(layer, layer)
    again = _step(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), layer)  # type: ignore[arg-type,return-value]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@reentrant
def test_a_compiled_layer_recomputes_bit_identically(use_reentrant: bool) -> None:  # B13
    layer = Layer()
    with recorded() as record:
        compiled = _compile(layer, "int8")
        plain = _step(compiled, layer)
        again = _step(lambda x: checkpoint(compiled, x, use_reentrant=use_reentrant), layer)  # type: ignore[arg-type,return-value]
    assert {c.op for c in record.calls} == {"lattn::decode"}
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@reentrant
def test_a_checkpoint_inside_the_compiled_region_is_rewritten_too(use_reentrant: bool) -> None:
    """B13. Dynamo puts the checkpointed function into a subgraph (`tag_activation_checkpoint`): the passes have to look
    for sites there as well, or the policy is silently not applied."""
    layer = Layer()
    with recorded():
        plain = _step(_compile(layer, "int8"), layer)
    torch._dynamo.reset()

    def forward(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=use_reentrant)  # type: ignore[return-value]

    with recorded() as record:
        again = _step(_compile(forward, "int8"), layer)
        assert [(s.verdict, s.op) for s in record.report.sites] == [("rewritten", "lattn::decode")]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_with_gradient_checkpointing_trains_as_without(use_reentrant: bool) -> None:  # B13
    model, linear_layers = tiny_models.build("qwen3_next", layers=3)
    model.train()
    model.config.use_cache = False
    ids = _ids(2, 24)

    def gradients() -> dict[str, Tensor]:
        torch._dynamo.reset()
        model.zero_grad(set_to_none=True)
        with lc.training_phase([10, 20]):
            _compile(model, "int8")(ids, labels=ids).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    with recorded() as record, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        plain = gradients()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        again = gradients()
        assert [s.op for s in record.report.rewritten] == ["lattn::decode"] * linear_layers
    assert all(torch.equal(plain[n], again[n]) for n in plain)


# --- padding and caches of whole models -------------------------------------------------------------------------------


@names
def test_a_left_padded_batch_of_one_equals_its_own_eager(name: str) -> None:  # B15, B19
    model, _ = tiny_models.build(name, layers=2)
    model.train()
    ids, mask = _ids(1, 8), torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    want = model(ids, attention_mask=mask).logits
    want[:, 3:].square().sum().backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    with recorded():
        got = _compile(model)(ids, attention_mask=mask).logits
        got[:, 3:].square().sum().backward()
        assert (got - want)[:, 3:].abs().max() < 1e-5
        for n, p in model.named_parameters():
            if n in wanted:
                assert p.grad is not None and p.grad.isfinite().all(), n
                assert (p.grad - wanted[n]).norm() <= 1e-4 * wanted[n].norm() + 1e-5, n
        assert (model(ids[:, 3:]).logits - got[:, 3:]).abs().max() < 1e-5, "and the same tokens unpadded"


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_very_short_training_sequences_equal_eager(name: str) -> None:  # B56: shorter than the convolution's window
    model, _ = tiny_models.build(name, layers=2)
    model.train()
    with recorded() as record:
        compiled = _compile(model)
        for tokens in (1, 2, 3):
            found = []
            for f in (model, compiled):
                model.zero_grad(set_to_none=True)
                f(_ids(2, tokens)).logits.square().sum().backward()
                found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            largest = max(float(want.norm()) for want in found[0].values())
            for n, want in found[0].items():
                assert (found[1][n] - want).norm() <= 1e-4 * want.norm() + 1e-6 * largest, (tokens, n)
    assert len(record.graphs) <= 2


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_prefill_and_one_step_of_a_model_equal_the_full_forward(name: str) -> None:  # B24
    from transformers import DynamicCache

    model, _ = tiny_models.build(name, layers=2)
    with recorded(), torch.no_grad():
        compiled = _compile(model)
        for tokens in (65, 128):
            ids, cache = _ids(1, tokens), DynamicCache(config=model.config)
            full = model(ids, use_cache=False).logits
            compiled(ids[:, :-1], past_key_values=cache)
            step = compiled(ids[:, -1:], past_key_values=cache).logits
            assert (step - full[:, -1:]).abs().max() < 5e-6, tokens


def test_several_new_tokens_may_come_with_a_mask_over_the_whole_history() -> None:  # B32
    from transformers import DynamicCache

    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids, mask = _ids(2, 20), torch.ones(2, 20, dtype=torch.int64)
    logits = []
    with recorded() as record, torch.no_grad():
        for f in (model, _compile(model)):
            cache = DynamicCache(config=model.config)
            f(ids[:, :17], attention_mask=mask[:, :17], past_key_values=cache)
            logits.append(f(ids[:, 17:], attention_mask=mask, past_key_values=cache).logits)
    assert (logits[0] - logits[1]).abs().max() < 1e-5
    assert record.calls[-1].arguments["initial_state"] is not None


def test_a_static_cache_serves_a_longer_prompt_without_recompiling_its_steps() -> None:  # B11
    model, _ = tiny_models.build("qwen3_next", layers=2)

    def generate(ids: Tensor) -> Tensor:
        return model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation="static")  # type: ignore[operator]

    prompts = [_ids(1, 9), _ids(1, 30)]
    want = [generate(ids) for ids in prompts]
    forward = model.forward
    with recorded() as record, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", _compile(forward))
        counts = []
        for ids, expected in zip([*prompts, *prompts], [*want, *want], strict=True):
            assert torch.equal(generate(ids), expected)
            counts.append(len(record.graphs))
    assert counts[0] <= 3 and counts[1] - counts[0] <= 1 and counts[1] == counts[3]
