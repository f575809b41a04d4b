"""The same promises on CUDA tensors: the reference ops, and whole models through Inductor's GPU code.

Skipped where there is no GPU; nothing here measures speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
import lattn_compile.ops
from lattn_compile.ops.dispatch import Work, choose, choose_prefill
from lattn_compile.recurrence import KINDS
from lattn_compile.testing.inputs import Inputs, make_inputs
from lattn_compile.testing.oracle import oracle
from tests import tiny_models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODES = [
    ("decode", {"write": "exact"}),
    ("decode", {"write": "token", "state_format": "int8/*x64"}),
    ("decode", {"write": "token", "state_format": "fp8_e4m3/*x64", "readout": "after_write"}),
    ("decode", {"write": "token", "state_format": "nvfp4"}),
    ("chunk", {"write": "exact"}),
    ("chunk", {"write": "chunk", "state_format": "int8/*x64", "chunk_size": 8}),
    ("decode", {"write": "token", "state_format": "int8/*x64", "rounding": "stochastic", "seed": 3, "gate": "bf16"}),
    ("decode", {"write": "token", "state_format": "fp8_e4m3/*x64", "feedback": "int4"}),
    ("replay", {"write": "replay", "state_format": "int8/*x64", "window": 4}),
    ("replay", {"write": "replay", "state_format": "nvfp4", "window": 5, "factors": "fp8_e4m3"}),
    ("replay", {"write": "two_precision", "state_format": "fp8_e4m3/128x1", "window": 4, "anchor": "bf16"}),
]


@pytest.mark.parametrize("kind", [k.name for k in KINDS])
@pytest.mark.parametrize(("op", "options"), MODES, ids=["-".join(map(str, (o, *m.values()))) for o, m in MODES])
def test_an_op_computes_in_float64_what_the_oracle_computes(kind: str, op: str, options: dict[str, Any]) -> None:
    x = make_inputs(kind, lengths=[13, 0, 16], seed=5).map(torch.Tensor.double)
    prefix = torch.tensor([4, 0, 9], dtype=torch.int32)
    cpu = [t.requires_grad_() if t is not None and t.is_floating_point() else t for t in (*x.tensors(), prefix)]
    want = oracle(*cpu, **x.options(), **options)
    cuda = [None if t is None else t.detach().cuda().requires_grad_(t.requires_grad) for t in cpu]
    carried = [None] * 6 if op == "replay" else []
    o, final, *_ = getattr(torch.ops.lattn, op)(*cuda[:6], *carried, *cuda[6:], None, None, **x.options(), **options)
    assert (o.cpu() - want.o).norm() <= 1e-9 * want.o.norm()
    assert (final.cpu() - want.final_state).norm() <= 1e-9 * want.final_state.norm()
    leaves = [[t for t in of if t is not None and t.requires_grad] for of in (cuda, cpu)]
    ours = torch.autograd.grad(o.square().sum() + final.sum(), leaves[0])
    theirs = torch.autograd.grad(want.o.square().sum() + want.final_state.sum(), leaves[1])
    for mine, loops in zip(ours, theirs, strict=True):
        assert (mine.cpu() - loops).norm() <= 1e-9 * loops.norm() + 1e-12


@pytest.mark.parametrize(
    "policy",
    [
        lc.Policy(lc.Int8(), rounding="stochastic", seed=5, feedback="int8"),
        lc.Policy(lc.Fp8(), write=lc.Replay(4, factors="int8"), rotation="hadamard_k"),
        lc.Policy(write=lc.TwoPrecision(4), rounding="stochastic"),
        lc.Policy(lc.Nvfp4(), write=lc.Chunk(4), rounding="stochastic"),
    ],
    ids=str,
)
def test_a_carried_state_moves_between_devices_and_continues(policy: lc.Policy) -> None:
    """In float64: codes are those of the CPU, whichever device computed the first half."""
    tokens = make_inputs("gdn", lengths=[12, 12], seed=5).map(torch.Tensor.double).tensors()[:5]
    halves = [[t if t is None else t[:, at] for t in tokens] for at in (slice(0, 7), slice(7, 12))]
    kwargs = {"policy": policy, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def run(half: int, device: str, state: object = None) -> tuple[Tensor, object]:
        args = [t if t is None else t.to(device) for t in halves[half]]
        return lc.linear_attention(*args, initial_state=state, **kwargs)  # type: ignore[arg-type,return-value]

    state = run(0, "cpu")[1]
    want, end = run(1, "cpu", state)
    for first, second in (("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")):
        got, last = run(1, second, run(0, first)[1].to(second))  # type: ignore[attr-defined]
        assert (got.cpu() - want).norm() <= 1e-9 * want.norm()
        assert (last.dense().cpu() - end.dense()).norm() <= 1e-9 * end.dense().norm()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_generates_and_trains_as_eager_does(name: str, mode: str) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    model, linear_layers = tiny_models.build(name, layers=3)
    model.cuda()
    ids = torch.randint(2, 97, (2, 70), generator=torch.Generator().manual_seed(1)).cuda()
    options = {"policy": "exact", "mode": mode}
    compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options=options)
    with torch.no_grad():
        with tiny_models.torch_alone(model):
            want = model(ids, use_cache=False).logits
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(ids, use_cache=False).logits.clone()
            assert (got - want).abs().max() < 1e-3  # TF32 is off; cuBLAS sums in another order
    report = lc.last_report()
    assert report is not None
    assert len(report.rewritten) == linear_layers
    model.train()
    with tiny_models.torch_alone(model):
        model(ids, labels=ids, use_cache=False).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.compiler.cudagraph_mark_step_begin()
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    for n, p in model.named_parameters():
        if grads[n] is not None:
            assert (p.grad - grads[n]).norm() <= 1e-3 * grads[n].norm() + 1e-6, n


def test_a_phase_quantizes_on_the_gpu_what_it_quantizes_on_the_cpu() -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    model, _ = tiny_models.build("qwen3_next", layers=3)
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    logits = {}
    with torch.no_grad(), lc.training_phase([24, 30]):
        for device in ("cpu", "cuda"):
            torch._dynamo.reset()
            model.to(device)
            compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": "int8"})
            logits[device] = compiled(ids.to(device), use_cache=False).logits.cpu()
        with tiny_models.torch_alone(model):
            exact = model(ids.cuda(), use_cache=False).logits.cpu()
    effect = (logits["cpu"] - exact).norm()
    assert (logits["cpu"] - logits["cuda"]).norm() <= 0.2 * effect


@pytest.mark.parametrize("policy", ["exact", "int8"])
def test_a_spelled_out_loop_is_found_and_computes_the_same(policy: str) -> None:
    """Found in the graph of CUDA tensors, checked on the CPU, compiled by Inductor for the device."""

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        o = []
        for t in range(q.shape[1]):
            S = S * g[:, t, :, None, None].exp()
            u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])) * beta[:, t, :, None]
            S = S + k[:, t, :, :, None] * u[:, :, None]
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(o, 1), S

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    B, T, H, K, V = 2, 6, 3, 32, 48
    shapes = ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H), (B, H, K, V))
    q, k, v, g, beta, S = (torch.randn(*s, generator=generator).cuda() for s in shapes)
    k, g, beta = torch.nn.functional.normalize(k, dim=-1), -g.abs(), beta.sigmoid()
    args = [x.requires_grad_() for x in (q, k, v, g, beta, S)]
    compiled = torch.compile(loop, backend="lattn_compile", options={"policy": policy}, fullgraph=True)
    got = compiled(*args)
    report = lc.last_report()
    assert report is not None and [(s.form, s.rule, s.verdict) for s in report.sites] == [
        ("loop", "delta", "rewritten")
    ]
    chosen = None if policy == "exact" else policy
    o, state = lc.linear_attention(q, k, v, g, beta, scale=1.0, initial_state=S, output_final_state=True, policy=chosen)
    want = (o, state if isinstance(state, Tensor) else state.dense())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    if policy == "exact":
        plain = loop(*args)
        grads = [torch.autograd.grad(sum(x.square().sum() for x in out), args) for out in (got, plain)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["gdn", "kda", "gla", "linear"])
@pytest.mark.parametrize("write", [{"write": "exact"}, {"write": "token", "state_format": "int8/*x32"}])
def test_auto_takes_triton_where_it_can_and_computes_what_the_reference_does(kind: str, write: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    x = make_inputs(kind, lengths=[13, 0, 16], seed=5)
    prefix = torch.tensor([4, 0, 9], dtype=torch.int32)
    found = {}
    for implementation in ("auto", "reference"):
        cuda = [t if t is None else t.cuda() for t in (*x.tensors(), prefix)]
        leaves = [t.requires_grad_() for t in cuda if t is not None and t.is_floating_point()]
        options = {**x.options(), **write, "implementation": implementation}
        o, final, *_ = torch.ops.lattn.decode(*cuda, None, None, **options, checkpoint_every=8)
        found[implementation] = [o, final, *torch.autograd.grad(o.square().sum() + final.sum(), leaves)]
    value_dim = x.v.shape[-1]
    work = Work(torch.device("cuda"), torch.float32, x.q.shape[-1], value_dim, None)
    assert choose("decode", "auto", work) == ("triton" if value_dim % 4 == 0 else "reference")
    for mine, theirs in zip(found["auto"], found["reference"], strict=True):
        # A code that flips is a step of 1/127 of a tile's maximum; without one, fp32 sums in another order.
        assert (mine - theirs).norm() <= (1e-5 if write["write"] == "exact" else 1e-2) * theirs.norm() + 1e-6


def _chunk_of(x: Inputs, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Outputs, final state and gradients of a chunk-form call on the GPU, of q, k and v in that dtype."""
    cuda = [t if t is None else t.cuda() for t in x.tensors()]
    cuda[:3] = [t if t is None else t.to(dtype) for t in cuda[:3]]
    leaves = [t.requires_grad_() for t in cuda if t is not None and t.is_floating_point()]
    o, final, *_ = torch.ops.lattn.chunk(*cuda, *(None,) * 3, **x.options() | options)
    return [o, final, *torch.autograd.grad(o.float().square().sum() + final.sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gdn", "kda", "linear"])
@pytest.mark.parametrize(
    "write", [{"write": "exact"}, {"write": "chunk", "state_format": "int8/*x16", "chunk_size": 8}]
)
def test_auto_takes_the_chunk_kernels_for_what_was_proven(kind: str, dtype: torch.dtype, write: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    x = make_inputs(kind, lengths=[70, 0, 90], seed=5)
    found = {name: _chunk_of(x, dtype, **write, implementation=name) for name in ("auto", "reference")}
    work = Work(torch.device("cuda"), torch.float32, x.q.shape[-1], x.v.shape[-1], None, inputs=dtype)
    assert choose("chunk", "auto", work) == "triton"
    for mine, theirs in zip(found["auto"], found["reference"], strict=True):
        near = 1e-2 if write["write"] == "chunk" or mine.dtype is torch.bfloat16 or dtype is torch.bfloat16 else 1e-5
        assert (mine - theirs).norm() <= near * theirs.norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_auto_takes_the_prefill_kernels_for_what_was_proven(kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    x = make_inputs(kind, lengths=[70, 0, 90], seed=5)
    prefill = {"prefill_operands": "kk=int8,qk=int8,kv=int8", "prefill_inverse": "block_doubling(8)"}
    found = {name: _chunk_of(x, dtype, **prefill, implementation=name) for name in ("auto", "reference")}
    sizes = x.q.shape[-1], x.v.shape[-1]
    work = Work(torch.device("cuda"), torch.float32, *sizes, None, inputs=dtype)
    assert choose_prefill("auto", work, lc.Prefill({"kk": "int8", "qk": "int8"})) == "triton"
    for mine, theirs in zip(found["auto"], found["reference"], strict=True):
        # A code that falls the other way is a step of 1/127 of its row.
        assert (mine - theirs).norm() <= 1e-2 * theirs.norm() + 1e-6


def test_what_triton_cannot_do_is_the_references_or_refused_with_the_reason() -> None:
    pytest.importorskip("triton")
    x = make_inputs("gdn", lengths=[5], seed=5)
    cuda = [t if t is None else t.cuda() for t in x.tensors()]
    rounding = {"write": "token", "state_format": "int8/*x32", "rounding": "stochastic"}
    o, *_ = torch.ops.lattn.decode(*cuda, *(None,) * 3, **x.options(), **rounding)
    assert o.isfinite().all()
    with pytest.raises(lc.LattnError, match=r"implementation: got 'triton', but .*stochastic"):
        torch.ops.lattn.decode(*cuda, *(None,) * 3, **x.options(), **rounding, implementation="triton")
