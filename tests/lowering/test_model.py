"""A decode step of a whole model on a CPU: what Inductor makes of it, and that a hundred of them stay right."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch._inductor.utils import run_and_get_code

import lattn_compile as lc
from lattn_compile.backend import compile_count
from lattn_compile.testing.backend import recorded
from tests import tiny_models

transformers = pytest.importorskip("transformers")

ALL = bool(os.environ.get("LATTN_COMPILE_ALL"))
STEPS = 100
STATE = (1, 4, 16, 24)


def _cache(kind: str, model: Any) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=STEPS + 16)
    return transformers.DynamicCache(config=model.config)


def _linear(cache: Any) -> Any:
    return cache.layers[0].recurrent_states[0]


class _Run:
    """A prompt through `model` and a cache of its own, then one token after another through `step`."""

    def __init__(self, kind: str, model: Any, prompt: torch.Tensor) -> None:
        self.model, self.cache = model, _cache(kind, model)
        model(input_ids=prompt, past_key_values=self.cache, use_cache=True)

    def __call__(self, step: Any, token: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = step(input_ids=token, past_key_values=self.cache, use_cache=True).logits
        return logits


def _check_code(code: str) -> None:
    """Of an exact step of two layers: no call of an op of ours; at most three kernels hold loops of the recurrence
    (where its neighbours' library calls stand decides how they are cut); the state is read where it lies and written
    there, and memory of its size is nowhere made."""
    assert "torch.ops.lattn" not in code
    body = code[code.index("def call(") :]
    calls = [line.strip() for line in body.splitlines() if re.match(r"\s*(cpp_fused|extern_kernels)", line)]
    kinds = ["extern" if line.startswith("extern") else "fused" for line in calls]
    assert 1 <= sum("decode" in line for line in calls if line.startswith("cpp_fused")) <= 3, calls
    # Three projections of the linear layer, four of attention, three of each feed-forward, the head.
    assert kinds.count("extern") == 3 + 4 + 2 * 3 + 1, calls
    assert kinds.count("fused") <= kinds.count("extern"), calls
    shape = re.escape(str(STATE))
    (state,) = re.findall(rf"(\w+) = rand_strided\({shape}", code)
    assert not re.search(rf"empty_strided_cpu\({shape}", body)
    # Two passes, each with loops of the op: one for what the token erases and reads, one that writes.
    uses = [(line, n) for line in calls if (n := re.findall(r"\w+", line).count(state))]
    assert all("decode" in line for line, _ in uses), uses
    assert sum(n for _, n in uses) <= 3, uses


_CASES = [
    ("static", "reduce-overhead", "exact"),
    *(
        [
            (kind, mode, policy)
            for kind in ("static", "dynamic")
            for mode in ("default", "max-autotune")
            for policy in ("exact", "int8")
        ]
        if ALL
        else []
    ),
]


@pytest.mark.parametrize(("kind", "mode", "policy"), _CASES)
def test_a_hundred_compiled_steps_are_eagers_and_the_state_never_moves(kind: str, mode: str, policy: str) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    tokens = torch.randint(1, 90, (STEPS + 8, 1, 1), generator=torch.Generator().manual_seed(1))
    prompt = tokens[:8].view(1, 8)
    torch._dynamo.reset()
    with torch.no_grad():
        ours, theirs = (_Run(kind, model, prompt) for _ in range(2))
        where = _linear(ours.cache).data_ptr()
        options = {"policy": policy, "mode": mode}
        compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options=options)
        eager = model
        if policy != "exact":  # what the policy means, without Inductor

            def eager(**kwargs: Any) -> Any:
                with recorded():
                    return reference(**kwargs)

            reference = torch.compile(model, backend="lattn_compile", fullgraph=True, options=options)
        (first, (code, *_)) = run_and_get_code(ours, compiled, tokens[8])
        report = lc.last_report()
        want = theirs(eager, tokens[8])
        assert (first - want).abs().max() <= 1e-5 * want.abs().max()
        if policy == "exact" and kind == "static":
            _check_code(code)
        compiles = compile_count()
        for token in tokens[9:]:
            got, want = ours(compiled, token), theirs(eager, token)
            assert (got - want).abs().max() <= 1e-4 * want.abs().max()
            if policy != "exact":  # rounded trajectories part: every step is held to the same stored state
                _linear(theirs.cache).copy_(_linear(ours.cache))
        assert _linear(ours.cache).data_ptr() == where
        assert kind == "dynamic" or compile_count() == compiles
    if policy == "exact":
        error = (_linear(ours.cache) - _linear(theirs.cache)).abs().max()
        assert error <= 1e-4 * _linear(theirs.cache).abs().max()
    assert report is not None
    (site,) = report.sites
    assert site.kernel == "inductor"
    assert site.folded == (
        "q: silu, l2norm",
        "k: silu, l2norm",
        "v: silu",
        "g: exp, neg, add, softplus, mul",
        "beta: sigmoid",
        "final_state: written in place",
    )


class TestRewrittenStep(TestCase):
    def test_the_graph_of_a_decode_step(self) -> None:
        """Gates, op and the write into the cache, as the backend hands them on."""
        model, _ = tiny_models.build("qwen3_next", layers=2)
        torch._dynamo.reset()
        with torch.no_grad(), recorded() as record:
            run = _Run("static", model, torch.ones(1, 8, dtype=torch.int64))
            step = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": "int8"})
            run(step, torch.ones(1, 1, dtype=torch.int64))
        nodes = list(record.graphs[-1].graph.nodes)
        (op,) = [n for n in nodes if "lattn" in str(n.target)]
        near = [*op.all_input_nodes, op, *op.users, *(r for u in op.users for r in u.users)]
        lines = [str(n.format_node()).strip() for n in near if n.op != "placeholder"]
        text = re.sub(r" : \[num_users=\d+\]", "", "\n".join(lines))
        self.assertExpectedInline(
            text,
            """\
%query_3 = call_method[target=reshape](args = (%query_2, 1, 1, -1, 16), kwargs = {})
%key_3 = call_method[target=reshape](args = (%key_2, 1, 1, -1, 16), kwargs = {})
%value_4 = call_method[target=reshape](args = (%value_3, 1, 1, -1, 24), kwargs = {})
%g = call_function[target=operator.mul](args = (%neg, %softplus), kwargs = {})
%beta = call_method[target=sigmoid](args = (%b_1,), kwargs = {})
%decode_default = call_function[target=torch.ops.lattn.decode.default](args = (%query_3, %key_3, %value_4, %g, %beta, %l_kwargs_past_key_values_layers_0_recurrent_states_0_, None, None, None, None), kwargs = {scale: 0.25, qk_l2norm: True, write: token, state_format: int8/*x64})
%o = call_function[target=operator.getitem](args = (%decode_default, 0), kwargs = {})
%final = call_function[target=operator.getitem](args = (%decode_default, 1), kwargs = {})
%core_attn_out = call_method[target=reshape](args = (%o, -1, 24), kwargs = {})
%copy__1 = call_method[target=copy_](args = (%l_kwargs_past_key_values_layers_0_recurrent_states_0_, %final), kwargs = {})""",  # noqa: E501
        )
