"""Every write mode and every rounding on real models: transformers' hybrid classes, tiny, trained without a cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lattn_compile as lc
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.oracle import oracle

from . import tiny_models

pytest.importorskip("transformers")

POLICIES = {
    "replay": lc.Policy(lc.Int8(block_v=8), write=lc.Replay(8, factors="int8")),
    "replay, bf16 factors, read after": lc.Policy(
        lc.Fp8(), write=lc.Replay(5, factors="bf16"), readout="after_write", gate="bf16"
    ),
    "two precisions": lc.Policy(write=lc.TwoPrecision(6), rounding="stochastic", seed=3),
    "nvfp4": "nvfp4",
    "chunk": lc.Policy(lc.Nvfp4(), write=lc.Chunk(7), rotation="hadamard_k"),
    "token, stochastic, feedback": lc.Policy(lc.Int8(), rounding="stochastic", seed=11, feedback="int4"),
    "token, rotated": lc.Policy(lc.Int8(), rotation="hadamard_k", gate="fp16"),
}
OPS = {"replay": "lattn::replay", "two_precision": "lattn::replay", "chunk": "lattn::chunk", "token": "lattn::decode"}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def _model(name: str) -> tuple[torch.nn.Module, int, torch.Tensor]:
    # In float64 an op equals the oracle to 1e-9: no code flips because two sums were formed in another order.
    model, linear_layers = tiny_models.build(name, layers=3)
    return model.double(), linear_layers, torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(1))


CASES = [("qwen3_next", p) for p in POLICIES] + [("kimi_linear", p) for p in ("replay", "two precisions", "nvfp4")]


@pytest.mark.parametrize(("name", "policy"), [(n, POLICIES[p]) for n, p in CASES], ids=[f"{n}, {p}" for n, p in CASES])
def test_a_training_step_is_the_oracles_in_every_mode(name: str, policy: lc.Policy | str) -> None:
    model, linear_layers, ids = _model(name)
    model.train()
    exact = model(ids, use_cache=False).logits
    prefix = torch.tensor([24, 30])
    with recorded() as record, lc.training_phase(prefix):
        compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": policy})
        logits = compiled(ids, use_cache=False).logits
        logits[:, 30:].logsumexp(-1).sum().backward()
        chosen = lc.PRESETS[policy] if isinstance(policy, str) else policy
        assert [site.verdict for site in record.report.sites] == ["rewritten"] * linear_layers
        assert all(lc.Policy.from_dict(site.policy) == chosen for site in record.report.sites)
    if chosen.gate is None:
        assert all((logits[i, :p] - exact[i, :p]).abs().max() < 1e-5 for i, p in enumerate(prefix.tolist()))
    assert (logits[:, 30:] - exact[:, 30:]).abs().max() > 1e-4, "quantization must be visible"
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    forwards = [call for call in record.calls if not call.op.endswith("_backward")]
    assert [call.op for call in forwards] == [OPS[chosen.write.mode]] * linear_layers
    for call in forwards:
        want = oracle(**call.arguments)
        assert call.outputs[0].dtype is torch.float64
        assert (call.outputs[0] - want.o).norm() <= 1e-9 * want.o.norm()


@pytest.mark.parametrize("policy", [POLICIES["replay"], POLICIES["two precisions"]], ids=["replay", "two precisions"])
def test_a_dense_cache_keeps_the_exact_op_and_says_what_to_do(policy: lc.Policy) -> None:
    model, _, ids = _model("qwen3_next")
    with recorded() as record, torch.no_grad(), lc.training_phase(24):
        logits = torch.compile(model, backend="lattn_compile", options={"policy": policy})(ids).logits
        assert {site.reason.code for site in record.report.sites if site.reason} == {"DENSE_CACHE"}
        assert "use_cache=False" in record.report.sites[0].reason.remedy
    assert (logits - model(ids).logits).abs().max() < 1e-5
