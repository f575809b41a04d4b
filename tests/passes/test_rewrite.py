"""What the rewritten graph looks like, pinned: one linear-attention layer before and after."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import TestCase

import lattn_compile as lc
from lattn_compile.passes.recognize import overload_of
from lattn_compile.testing.backend import Record, recorded
from tests import tiny_models

pytest.importorskip("transformers")


def _site_lines(record: Record) -> str:
    """The op, what it reads and who reads it, with parameter names shortened to what a person would call them."""
    lines = []
    for node in record.graphs[-1].graph.nodes:
        if overload_of(node) is not None:
            near = [*node.all_input_nodes, node, *node.users]
            lines += [n.format_node() for n in near if n.op != "placeholder"]
    text = "\n".join(line.strip() for line in lines if line)
    text = re.sub(r"l_self_modules_model_modules_layers_modules_(\d+)_modules_\w+?_parameters_", r"layer\1_", text)
    return re.sub(r" : \[num_users=\d+\]", "", text)


def _layer(policy: Any, *, phase: int | None = None, train: bool = False) -> Record:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = torch.randint(2, 97, (2, 9))
    torch._dynamo.reset()
    with recorded() as record, torch.set_grad_enabled(train):
        compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": policy})
        if phase is None:
            compiled(ids, use_cache=False)
        else:
            with lc.training_phase(phase):
                compiled(ids, use_cache=False)
    return record


class TestRewrittenLayer(TestCase):
    def test_exact_prefill(self) -> None:
        self.assertExpectedInline(
            _site_lines(_layer("exact")),
            """\
%query_3 = call_method[target=reshape](args = (%query_2, 2, 9, -1, 16), kwargs = {})
%key_3 = call_method[target=reshape](args = (%key_2, 2, 9, -1, 16), kwargs = {})
%value_4 = call_method[target=reshape](args = (%value_3, 2, 9, -1, 24), kwargs = {})
%g = call_function[target=operator.mul](args = (%neg, %softplus), kwargs = {})
%beta = call_method[target=sigmoid](args = (%b_1,), kwargs = {})
%chunk_default = call_function[target=torch.ops.lattn.chunk.default](args = (%query_3, %key_3, %value_4, %g, %beta, None, None, None, None, None), kwargs = {scale: 0.25, qk_l2norm: True})
%o = call_function[target=operator.getitem](args = (%chunk_default, 0), kwargs = {})""",
        )

    def test_token_int8_under_a_phase_for_training(self) -> None:
        self.assertExpectedInline(
            _site_lines(_layer("int8", phase=5, train=True)),
            """\
%query_3 = call_method[target=reshape](args = (%query_2, 2, 9, -1, 16), kwargs = {})
%key_3 = call_method[target=reshape](args = (%key_2, 2, 9, -1, 16), kwargs = {})
%value_4 = call_method[target=reshape](args = (%value_3, 2, 9, -1, 24), kwargs = {})
%g = call_function[target=operator.mul](args = (%neg, %softplus), kwargs = {})
%beta = call_method[target=sigmoid](args = (%b_1,), kwargs = {})
%decode_default = call_function[target=torch.ops.lattn.decode.default](args = (%query_3, %key_3, %value_4, %g, %beta, None, None, %g_import_lattn_compile_dot_phase_prefix, None, None), kwargs = {scale: 0.25, qk_l2norm: True, write: token, state_format: int8/*x64, checkpoint_every: 16})
%o = call_function[target=operator.getitem](args = (%decode_default, 0), kwargs = {})""",
        )

    def test_chunk_fp8_under_a_phase(self) -> None:
        policy = lc.Policy(lc.Fp8(), write=lc.Chunk(16), readout="after_write")
        self.assertExpectedInline(
            _site_lines(_layer(policy, phase=5)),
            """\
%query_3 = call_method[target=reshape](args = (%query_2, 2, 9, -1, 16), kwargs = {})
%key_3 = call_method[target=reshape](args = (%key_2, 2, 9, -1, 16), kwargs = {})
%value_4 = call_method[target=reshape](args = (%value_3, 2, 9, -1, 24), kwargs = {})
%g = call_function[target=operator.mul](args = (%neg, %softplus), kwargs = {})
%beta = call_method[target=sigmoid](args = (%b_1,), kwargs = {})
%chunk_default = call_function[target=torch.ops.lattn.chunk.default](args = (%query_3, %key_3, %value_4, %g, %beta, None, None, %g_import_lattn_compile_dot_phase_prefix, None, None), kwargs = {scale: 0.25, qk_l2norm: True, write: chunk, state_format: fp8_e4m3/*x64, readout: after_write, chunk_size: 16})
%o = call_function[target=operator.getitem](args = (%chunk_default, 0), kwargs = {})""",
        )


def test_nothing_else_in_the_graph_changes() -> None:
    exact, int8 = _layer("exact", phase=4), _layer("int8", phase=4)

    def others(record: Record) -> list[str]:
        nodes = [n for n in record.graphs[-1].graph.nodes if overload_of(n) is None]
        return [f"{n.op} {n.target}" for n in nodes]

    assert others(exact) == others(int8)


def test_in_place_writes_survive() -> None:
    """A Dynamo graph is not functional: dead-code elimination would drop the cache's copy_."""
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = torch.randint(2, 97, (1, 6))
    torch._dynamo.reset()
    with recorded() as record, torch.no_grad():
        cache = model(ids).past_key_values
        compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})
        before = [layer.recurrent_states for layer in cache.layers if hasattr(layer, "recurrent_states")]
        tensors = [t.clone() for t in _tensors(before)]
        compiled(ids[:, :1], past_key_values=cache)
        after = _tensors([layer.recurrent_states for layer in cache.layers if hasattr(layer, "recurrent_states")])
    assert tensors
    assert all(not torch.equal(a, b) for a, b in zip(tensors, after, strict=True))
    assert any("copy_" in str(n.target) for n in record.graphs[-1].graph.nodes)


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves([v if not isinstance(v, dict) else list(v.values()) for v in value])
    return [t for t in leaves if isinstance(t, torch.Tensor)]
