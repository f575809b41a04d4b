"""What compiled graphs promise whose ops are launches of our kernels in Inductor's module (`lowering/gpu.py`).

Checked on a GPU, against float64 and against the ops themselves. Needs torch and Triton; the checks of a model need
transformers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import lattn_compile as lc
from lattn_compile.backend import lattn_compile
from lattn_compile.lowering import gpu
from tests.gpu.checks import Checks, Row
from tests.ops.cases import inputs, options

__all__ = ["CHECKS"]

CHECKS = Checks("lowering ")
_check, _each = CHECKS.check, CHECKS.each

EXACT = 2e-5
"""Of a result's largest value: fp32 sums in another order, and the kernels' own products."""

HALF = 2.0**-8
_PROVEN = gpu.PROVEN
MODES = ("default", "reduce-overhead")
_RECORDING = ("reduce-overhead", "max-autotune")

CALLS: dict[str, dict[str, Any]] = {
    "decode": {"op": "decode", "tokens": 1, "qk_l2norm": True},
    "decode of one": {"op": "decode", "tokens": 1, "batch": 1, "heads": 1, "value_heads": 1},
    "decode int8": {"op": "decode", "tokens": 1, "write": "token", "state_format": "int8/*x64", "qk_l2norm": True},
    "decode fp8, read after": {
        "op": "decode", "tokens": 1, "write": "token", "state_format": "fp8/*x64", "readout": "after_write",
    },
    "decode nvfp4": {"op": "decode", "tokens": 1, "write": "token", "state_format": "nvfp4", "qk_l2norm": True},
    "decode kda": {"op": "decode", "tokens": 1, "decay": "channel"},
    "decode additive": {"op": "decode", "tokens": 1, "rule": "additive", "beta": False},
    "decode bf16": {"op": "decode", "tokens": 1, "qk_l2norm": True, "dtype": torch.bfloat16},
    "decode 7 tokens": {"op": "decode", "tokens": 7, "qk_l2norm": True, "gradients": True},
    "decode int8 7 tokens": {
        "op": "decode", "tokens": 7, "write": "token", "state_format": "int8/*x64", "gradients": True,
    },
    "chunk": {"op": "chunk", "tokens": 150, "qk_l2norm": True},
    "chunk gradients": {"op": "chunk", "tokens": 150, "qk_l2norm": True, "gradients": True},
    "chunk kda": {"op": "chunk", "tokens": 100, "decay": "channel", "value_heads": 2},
    "chunk bf16": {"op": "chunk", "tokens": 150, "qk_l2norm": True, "dtype": torch.bfloat16},
    "replay": {"op": "replay", "tokens": 37, "write": "replay", "window": 8, "state_format": "int8/*x64"},
}  # fmt: skip


def _case(name: str) -> tuple[Callable[..., Any], list[Any], dict[str, Any], bool]:
    """The op, its tensors on the CPU, its options, and whether it is differentiated."""
    case = dict(CALLS[name])
    op, dtype, gradients = case.pop("op"), case.pop("dtype", torch.float32), case.pop("gradients", False)
    shape = ("tokens", "batch", "heads", "value_heads", "decay", "beta")
    given = {"batch": 3, "heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128}
    given |= {key: case.pop(key) for key in shape if key in case}
    tensors = inputs(dtype=torch.float32, **given)
    tensors = [x if x is None or i in (3, 5) else x.to(dtype) for i, x in enumerate(tensors)]
    rest = [None] * (10 if op == "replay" else 4)
    return (
        getattr(torch.ops.lattn, op).default,
        [*tensors, *rest],
        options(op, case.pop("write", "exact"), **case),
        gradients,
    )


def _results(call: Callable[..., Any], arguments: list[Any], gradients: bool) -> list[Tensor]:
    """Output, state and gradients, in float64 on the CPU."""
    given = [x if x is None else x.detach().requires_grad_(gradients) for x in arguments]
    o, final = call(*given)[:2]
    results = [o, final]
    if gradients:
        weights = torch.linspace(-1.0, 1.0, o.numel(), dtype=torch.float64).view(o.shape).to(o)
        loss = (o * weights).sum() + (final * final).sum() / final.shape[-1]
        results += torch.autograd.grad(loss, [x for x in given if x is not None])
    return [x.detach().double().cpu() for x in results]


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def _ops(code: str) -> float:
    """Calls of ops in generated code, without those of a codec, which stay what they are, and what a comment says."""
    said = "\n".join(line for line in code.splitlines() if not line.startswith("#"))
    return float(said.count("torch.ops.lattn.") - said.count("torch.ops.lattn.qdq_state."))


@_each("call", CALLS)
def _call(name: str) -> list[Row]:
    _clear()
    op, tensors, keywords, gradients = _case(name)
    there = [x if x is None else x.cuda() for x in tensors]

    def call(*given: Any) -> Any:
        return op(*given, **keywords, implementation="triton")

    compiled = torch.compile(call, backend=lattn_compile, fullgraph=True)
    got, codes = run_and_get_code(_results, compiled, there, gradients)
    rows: list[Row] = [
        ("graphs", float(len(codes)), 1.0 + gradients),
        ("graphs missing", 1.0 + gradients - len(codes), 0.0),
    ]
    # Encoded checkpoints stay the op's: a kernel writes them through two views of one buffer.
    kept = op is torch.ops.lattn.decode.default and gradients and keywords.get("write", "exact") != "exact"
    rows += [("calls of ops", _ops(code), 0.0) for code in codes[kept:]]
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
    for what, mine, own in zip(names, got, _results(call, there, gradients), strict=False):
        if tensors[0].shape[1] > 1:
            rows.append((f"{what} unlike the op's", float((mine != own).sum()), 0.0))
        elif keywords.get("write", "exact") != "exact":  # one token is a kernel of its own: a code may flip
            rows.append((what, float((mine - own).norm() / own.norm()), 1e-2))
    if keywords.get("write", "exact") == "exact":
        wide = [x if x is None else x.double() for x in tensors]
        want = _results(lambda *x: op(*x, **keywords, implementation="reference"), wide, gradients)
        for what, mine, right in zip(names, got, want, strict=False):
            rounded = tensors[0].dtype is not torch.float32 and what != "state"
            rows.append((what, _error(mine, right), HALF if rounded else EXACT * (5 if what.startswith("d") else 1)))
    return rows


def _clear() -> None:
    torch._dynamo.reset()
    counters.clear()
    gpu.PROVEN = _PROVEN


@_each(
    "in place",
    [*(f"{mode} {write}" for mode in MODES for write in ("exact", "int8")), "max-autotune exact", "cpp_wrapper exact"],
)
def _in_place(which: str) -> list[Row]:
    """A hundred steps of three layers on states that a cache holds, beside the ops called one by one."""
    mode, write = which.split()
    _clear()
    keywords = options("decode", "exact" if write == "exact" else "token", qk_l2norm=True)
    if write == "int8":
        keywords["state_format"] = "int8/*x64"
    steps = 100
    layers = 3
    tensors = inputs(batch=4, tokens=steps, heads=4, value_heads=8, key_dim=128, value_dim=128, dtype=torch.float32)
    q, k, v, g, beta, state = (x.cuda() for x in tensors)
    states = [state.clone() for _ in range(layers)]
    own = [state.clone() for _ in range(layers)]
    for x in states:
        torch._dynamo.mark_static_address(x)

    def step(implementation: str, states: list[Tensor], *x: Tensor) -> Tensor:
        q, k, v, g, beta = x
        for state in states:
            o, new = torch.ops.lattn.decode(
                q, k, v, g, beta, state, None, None, None, None, **keywords, implementation=implementation
            )[:2]
            state.copy_(new)
            v = v + 0.5 * torch.tanh(o)
        return v

    chosen: dict[str, Any] = {"cpp_wrapper": True} if mode == "cpp_wrapper" else {"mode": mode}
    compiled = torch.compile(step, backend=lattn_compile, fullgraph=True, options=chosen)
    worst = 0.0
    code: list[str] = []
    at = [x.data_ptr() for x in states]
    for t in range(steps):
        now = [x[:, t : t + 1].contiguous() for x in (q, k, v, g, beta)]
        torch.compiler.cudagraph_mark_step_begin()
        if t:
            o = compiled("triton", states, *now)
        else:
            o, code = run_and_get_code(compiled, "triton", states, *now)
        want = step("triton", own, *now)
        worst = max(worst, _error(o, want))
    bound = 1e-5 if write == "exact" else 2e-3
    return [
        ("o", worst, bound),
        ("state", max(_error(x, y) for x, y in zip(states, own, strict=True)), 1e-5 if write == "exact" else 2e-2),
        ("states that moved", float(at != [x.data_ptr() for x in states]), 0.0),
        ("graphs", float(len(code)), 1.0),
        ("calls of ops", _ops(code[0]), 0.0),
        ("graphs skipped", float(counters["inductor"]["cudagraph_skips"]), 0.0),
        ("graphs not recorded", float(mode in _RECORDING and not _recorded()), 0.0),
    ]


def _recorded() -> bool:
    """Whether a CUDA graph was recorded for the current device."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    return manager is not None and manager.new_graph_id().id > 0


@_each("model", [f"{mode} {policy}" for mode in MODES for policy in ("exact", "int8")])
def _model(which: str) -> list[Row]:
    """Steps of a small model through transformers' `StaticCache`, beside the same policy on the reference kernels, or
    beside the model itself."""
    from transformers import StaticCache

    from tests import tiny_models

    mode, policy = which.split()
    _clear()
    model, layers = tiny_models.build("qwen3_next")
    model.cuda().requires_grad_(False)
    ids = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(1)).cuda()
    steps = 100

    def chosen(kernel: str) -> lc.Policy:
        return lc.Policy(write=lc.Exact(), kernel=kernel) if policy == "exact" else lc.Policy(lc.Int8(), kernel=kernel)

    def run(call: Callable[..., Any]) -> list[Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=128)
        logits = [model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]]
        for i in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            token = (ids[:, :1] + i) % 95 + 2
            logits.append(call(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].clone())
        return logits

    def ours(kernel: str, mode: str) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(model, backend=lattn_compile, options={"policy": chosen(kernel), "mode": mode})

    with torch.no_grad():
        want = run(model if policy == "exact" else ours("auto", "default"))
        got = run(ours("triton", mode))
    report = lc.last_report()
    kernels = [] if report is None else [s.kernel for s in report.sites]
    errors = [_error(a, b) for a, b in zip(got, want, strict=True)]
    return [
        ("logits", max(errors), 1e-3 if policy == "exact" else 0.1),
        ("sites unlike", float(kernels != ["triton"] * layers), 0.0),
        ("graphs skipped", float(counters["inductor"]["cudagraph_skips"]), 0.0),
        ("graphs not recorded", float(mode in _RECORDING and not _recorded()), 0.0),
    ]


@_each("few rows", ["1", "8", "16", "8 early"])
def _few_rows(which: str) -> list[Row]:
    """A layer's step whose products with weights are kernels for few rows, beside float64 and the operations apart.

    "early": with kernels that begin before the one in front has ended, in a CUDA graph that is replayed.
    """
    _clear()
    count, *early = which.split()
    rng = torch.Generator().manual_seed(0)
    hidden, wide, rows = 512, 1024, int(count)
    shapes = [(4 * hidden, hidden), (wide, hidden), (wide, hidden), (hidden, wide)]
    weights = [torch.nn.Parameter(torch.randn(*s, generator=rng).mul(s[1] ** -0.5).bfloat16().cuda()) for s in shapes]
    x, state = torch.randn(rows, 1, hidden, generator=rng), torch.randn(rows, 4, 128, 128, generator=rng).cuda()
    keywords = options("decode", qk_l2norm=True)

    def layer(x: Tensor, state: Tensor, qkvz: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
        q, k, v, z = (y.unflatten(-1, (4, 128)) for y in linear(x, qkvz).chunk(4, -1))
        o, new = torch.ops.lattn.decode(q, k, v, None, None, state, *[None] * 4, **keywords)[:2]
        state.copy_(new)
        x = x + (o * z).flatten(-2)
        return x + linear(silu(linear(x, gate)) * linear(x, up), down)

    given = x.bfloat16().cuda()
    with torch.no_grad():
        want = layer(given.double(), state.double(), *(w.double() for w in weights))
        own = layer(given, state.clone(), *weights)
        how: dict[str, Any] = {"mode": "reduce-overhead", "triton.enable_pdl": True} if early else {}
        kept = state.clone()
        torch._dynamo.mark_static_address(kept)
        compiled = torch.compile(layer, backend=lattn_compile, options={"shape_padding": False, **how})
        got, (code,) = run_and_get_code(compiled, given, kept, *weights)
        got = got.clone()
        worst = 0.0
        for _ in range(50 if early else 0):
            kept.copy_(state)
            torch.compiler.cudagraph_mark_step_begin()
            again = compiled(given, kept, *weights)
            worst = max(worst, float((again != got).sum()))
    return [
        ("replays unlike the first", worst, 0.0),
        ("waits missing", float(bool(early) and "gdc_wait" not in code), 0.0),
        ("o", _error(got.double(), want), 1.5 * _error(own.double(), want) + EXACT),
        ("products of a library", float(code.count("extern_kernels.mm(")), 0.0),
        ("pairs apart", float("silu" in "".join(re.findall(r"triton_poi\w+\.run", code))), 0.0),
    ]


@_each("attention", [1, 3, 40])
def _attention(batch: int) -> list[Row]:
    """One token over keys that heads share, under a mask, beside float64."""
    _clear()
    rng = torch.Generator().manual_seed(batch)
    q, *kv = (torch.randn(batch, h, t, 256, generator=rng) for h, t in ((16, 1), (2, 256), (2, 256)))
    past = torch.randint(1, 256, (batch,), generator=rng).cuda()

    def attend(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 8, -1, -1).reshape(batch, 16, 256, 256) for x in (k, v))
        mask = torch.arange(256, device="cuda") <= past[:, None, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    given = [x.bfloat16().cuda() for x in (q, *kv)]
    want = attend(*(x.double() for x in given), past)
    own = attend(*given, past)
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(attend, backend=lattn_compile), *given, past)
    return [
        ("o", _error(got.double(), want), 1.5 * _error(own.double(), want) + EXACT),
        ("repeated", float("clone" in "".join(re.findall(r"triton_poi\w+\.run", code))), 0.0),
    ]


@_check("attention causal")
def _causal() -> list[Row]:
    """A prefill under a mask that a traced model makes of sizes, beside float64."""
    _clear()
    gpu.PROVEN = _PROVEN | {"causal"}
    rng = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, 300, 128, generator=rng).bfloat16().cuda() for _ in range(3)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.arange(300, device="cuda")
        mask = (at <= at[:, None])[None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    want, own = attend(*(x.double() for x in given)), attend(*given)
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(attend, backend=lattn_compile), *given)
    return [
        ("o", _error(got.double(), want), 1.5 * _error(own.double(), want) + EXACT),
        ("masks", float("None, False, 0.0, True" not in code), 0.0),
    ]


def _qwen3_next(dtype: torch.dtype, *, trained: bool) -> Any:
    from tests import tiny_models

    model, _ = tiny_models.build("qwen3_next")
    return model.cuda().to(dtype).train(trained).requires_grad_(trained)


def _long(model: Any, which: str) -> Callable[..., Any]:
    """`model` compiled with the recurrence on Triton, and its convolution, or "apart" by a library."""
    _clear()
    gpu.PROVEN = _PROVEN if "apart" in which else _PROVEN | {"causal", "sequence"}
    policy = lc.Policy(write=lc.Exact(), kernel="triton")
    return torch.compile(model, backend=lattn_compile, options={"policy": policy})


@_each("prefill", ["exact", "exact, convolved apart"])
def _prefill(which: str) -> list[Row]:
    """Logits of 150 tokens, beside the model in float64."""
    ids = torch.randint(2, 97, (2, 150), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.no_grad():
        want = _qwen3_next(torch.float64, trained=False)(input_ids=ids, use_cache=False).logits
        model = _qwen3_next(torch.float32, trained=False)
        own = model(input_ids=ids, use_cache=False).logits
        got, (code,) = run_and_get_code(_long(model, which), input_ids=ids, use_cache=False)
    return [
        ("logits", _error(got.logits.double(), want), 2 * _error(own.double(), want) + EXACT),
        ("calls of ops", _ops(code), 0.0),
        (
            "convolutions of a library",
            float(code.count("extern_kernels.convolution(")),
            3.0 if "apart" in which else 0.0,
        ),
    ]


@_each("training", ["exact", "exact, convolved apart"])
def _training(which: str) -> list[Row]:
    """Loss and gradients of every parameter, beside the model in float64."""
    ids = torch.randint(2, 97, (2, 150), generator=torch.Generator().manual_seed(1)).cuda()

    def step(model: Any, call: Callable[..., Any]) -> tuple[float, dict[str, Tensor]]:
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    wide, model = _qwen3_next(torch.float64, trained=True), _qwen3_next(torch.float32, trained=True)
    loss, want = step(wide, wide)
    own = step(model, model)[1]
    model.zero_grad(set_to_none=True)
    (mine, got), codes = run_and_get_code(step, model, _long(model, which))

    def off(grads: dict[str, Tensor], name: str) -> float:
        return float((grads[name] - want[name]).norm() / want[name].norm())

    worst = max(off(got, name) / (off(own, name) + EXACT) for name in want)
    return [
        ("loss", abs(mine - loss) / loss, EXACT),
        ("gradients, of eager's own distance", worst, 4.0),
        ("parameters without", float(want.keys() != got.keys()), 0.0),
        *(("calls of ops", _ops(code), 0.0) for code in codes),
    ]


@_check("package")
def _package() -> list[Row]:
    """A decode step compiled ahead of time, its state in a buffer, beside the module itself."""
    from lattn_compile.lowering.export import to_aten
    from tests.lowering.test_export import _draw, _Layer

    torch.manual_seed(0)
    layer = _Layer().cuda().requires_grad_(False)
    steps = [tuple(x.cuda() for x in _draw(1, seed)) for seed in range(4)]
    program = to_aten(lc.rewrite(torch.export.export(layer, steps[0], strict=False), "exact").module)
    launched = sum("triton_kernel" in str(node.target) for node in program.graph.nodes)
    with tempfile.TemporaryDirectory() as folder:
        fast = {"aot_inductor.compile_wrapper_opt_level": "O0"}
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/step.pt2", inductor_configs=fast
        )
        package = torch._inductor.aoti_load_package(path)
        errors = [_error(package(*x), layer(*x)) for x in steps]
    return [("o", max(errors), 1e-5), ("launches missing", float(launched == 0), 0.0)]
