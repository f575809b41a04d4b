"""Every mode of torch.compile on a CPU, checkpointed training, and a process in which nothing is compiled at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lattn_compile as lc
from lattn_compile.backend import compile_count
from lattn_compile.testing.backend import recorded
from tests.ops.cases import assert_close, inputs

ROOT = Path(__file__).parents[2]
ALL = bool(os.environ.get("LATTN_COMPILE_ALL"))


def _step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor) -> Tensor:
    o, final = lc.linear_attention(
        q, k, v, -torch.nn.functional.softplus(a), beta.sigmoid(), initial_state=state, output_final_state=True
    )
    assert isinstance(final, Tensor)
    state.copy_(final)
    return o


@pytest.mark.parametrize("mode", ["max-autotune", *(["default", "reduce-overhead"] if ALL else [])])
def test_every_mode_computes_the_same(mode: str) -> None:
    q, k, v, a, beta, state = inputs(tokens=1, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(_step, backend="lattn_compile", fullgraph=True, options={"mode": mode})
    ours, theirs = state.clone(), state.clone()
    with torch.no_grad():
        for seed in range(3):
            q, k, v, a, beta, _ = inputs(tokens=1, dtype=torch.float32, seed=seed)
            assert_close(compiled(ours, q, k, v, a, beta), _step(theirs, q, k, v, a, beta), "o", 1e-6)
    assert_close(ours, theirs, "state", 1e-6)


def test_checkpointed_training_of_any_length_and_batch_is_eagers() -> None:
    """One graph for both calls, gradients recomputed in it."""

    def loss(q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        def layer(*x: Tensor) -> Tensor:
            g = -torch.nn.functional.softplus(x[3])
            o, final = lc.linear_attention(*x[:3], g, x[4].sigmoid(), initial_state=x[5], output_final_state=True)
            assert isinstance(final, Tensor)
            return o.square().sum() + final.square().sum()

        done: Tensor = checkpoint(layer, q, k, v, a, beta, state, use_reentrant=False)  # type: ignore[assignment]
        return done

    def gradients() -> list[tuple[Tensor, ...]]:
        torch._dynamo.reset()
        before = compile_count()
        compiled = torch.compile(loss, backend="lattn_compile", fullgraph=True, options={"policy": "int8"})
        found = []
        for batch, tokens in ((2, 3), (3, 20)):
            tensors = inputs(batch=batch, tokens=tokens, dtype=torch.float32, grad=True, seed=batch)
            for x in tensors:
                torch._dynamo.mark_dynamic(x, [0, 1] if x is not tensors[-1] else 0)
            with lc.training_phase(1):
                found.append(torch.autograd.grad(compiled(*tensors), tensors))
        assert compile_count() == before + 1
        return found

    got = gradients()
    with recorded():  # the same graph, run op by op
        want = gradients()
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_close(a, b, "gradient", 1e-5)


_EAGER = """
import torch, lattn_compile as lc
from tests import tiny_models
from tests.ops.cases import inputs
import tests.lowering.test_modes as here
x = inputs(tokens=1, dtype=torch.float32)
q, k, v, a, beta, state = x
ours, theirs = state.clone(), state.clone()
with torch.no_grad():
    o = torch.compile(here._step, backend="lattn_compile", options={"policy": "int8"})(ours, q, k, v, a, beta)
    assert torch.equal(o, here._step(theirs, q, k, v, a, beta)) and torch.equal(ours, theirs)
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = torch.randint(1, 90, (2, 9))
    got = torch.compile(model, backend="lattn_compile", options={"policy": "int8"})(ids).logits
    assert torch.equal(got, model(ids).logits)
from lattn_compile.backend import compile_count
assert compile_count() == 0
"""


def test_with_dynamo_disabled_everything_is_eager_and_right() -> None:
    """The functional op is its own eager code, and a model runs as if it were not compiled."""
    pytest.importorskip("transformers")
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _EAGER], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
