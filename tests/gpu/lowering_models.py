"""What compiled graphs of whole models promise whose ops are launches of our kernels (`lowering/gpu.py`), checked on a
GPU; and what the checks of calls (`lowering_checks.py`) use as well.

Needs torch and Triton; all but the package need transformers.
"""

from __future__ import annotations

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
from tests.tiny_models import torch_alone

__all__ = ["CHECKS", "EXACT", "MODES", "PROVEN", "RECORDING", "calls_of_ops", "clear", "error", "recorded"]

CHECKS = Checks("lowering ")
_check, _each = CHECKS.check, CHECKS.each

EXACT = 2e-5
"""Of a result's largest value: fp32 sums in another order, and the kernels' own products."""

PROVEN = gpu.PROVEN
MODES = ("default", "reduce-overhead")
RECORDING = ("reduce-overhead", "max-autotune")


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def calls_of_ops(code: str) -> float:
    """Calls of ops in generated code, without those of a codec, which stay what they are, and what a comment says."""
    said = "\n".join(line for line in code.splitlines() if not line.startswith("#"))
    return float(said.count("torch.ops.lattn.") - said.count("torch.ops.lattn.qdq_state."))


def clear() -> None:
    torch._dynamo.reset()
    counters.clear()
    gpu.PROVEN = PROVEN


def recorded() -> bool:
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
    clear()
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
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    return [
        ("logits", max(errors), 1e-3 if policy == "exact" else 0.1),
        ("sites unlike", float(kernels != ["triton"] * layers), 0.0),
        ("graphs skipped", float(counters["inductor"]["cudagraph_skips"]), 0.0),
        ("graphs not recorded", float(mode in RECORDING and not recorded()), 0.0),
    ]


def _qwen3_next(dtype: torch.dtype, *, trained: bool) -> Any:
    from tests import tiny_models

    model, _ = tiny_models.build("qwen3_next")
    return model.cuda().to(dtype).train(trained).requires_grad_(trained)


def _long(model: Any, which: str) -> Callable[..., Any]:
    """`model` compiled with the recurrence on Triton, and its convolution, or "apart" by a library."""
    clear()
    gpu.PROVEN = PROVEN - {"sequence"} if "apart" in which else PROVEN
    policy = lc.Policy(write=lc.Exact(), kernel="triton")
    return torch.compile(model, backend=lattn_compile, options={"policy": policy})


@_each("prefill", ["exact", "exact, convolved apart"])
def _prefill(which: str) -> list[Row]:
    """Logits of 150 tokens, beside the model in float64."""
    ids = torch.randint(2, 97, (2, 150), generator=torch.Generator().manual_seed(1)).cuda()
    model = _qwen3_next(torch.float32, trained=False)
    with torch.no_grad(), torch_alone(model):
        want = _qwen3_next(torch.float64, trained=False)(input_ids=ids, use_cache=False).logits
        own = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        got, (code,) = run_and_get_code(_long(model, which), input_ids=ids, use_cache=False)
    return [
        ("logits", error(got.logits.double(), want), 2 * error(own.double(), want) + EXACT),
        ("calls of ops", calls_of_ops(code), 0.0),
        (
            "convolutions of a library",
            float(code.count("extern_kernels.convolution(")),
            3.0 if "apart" in which else 0.0,
        ),
    ]


@_each("training", ["exact", "exact, convolved apart", "exact, checkpointed"])
def _training(which: str) -> list[Row]:
    """Loss and gradients of every parameter, beside the model in float64."""
    ids = torch.randint(2, 97, (2, 150), generator=torch.Generator().manual_seed(1)).cuda()

    def step(model: Any, call: Callable[..., Any]) -> tuple[float, dict[str, Tensor]]:
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    wide, model = _qwen3_next(torch.float64, trained=True), _qwen3_next(torch.float32, trained=True)
    with torch_alone(model):
        loss, want = step(wide, wide)
        own = step(model, model)[1]
    model.zero_grad(set_to_none=True)
    if "checkpointed" in which:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    (mine, got), codes = run_and_get_code(step, model, _long(model, which))

    def off(grads: dict[str, Tensor], name: str) -> float:
        return float((grads[name] - want[name]).norm() / want[name].norm())

    worst = max(off(got, name) / (off(own, name) + EXACT) for name in want)
    report = lc.last_report()
    return [
        ("sites unlike", float(report is None or [s.kernel for s in report.sites] != ["triton"] * 3), 0.0),
        ("loss", abs(mine - loss) / loss, EXACT),
        ("gradients, of eager's own distance", worst, 4.0),
        ("parameters without", float(want.keys() != got.keys()), 0.0),
        *(("calls of ops", calls_of_ops(code), 0.0) for code in codes),
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
        # Some compilers link libstdc++ into what they build, and the package's std::regex dies by torch's locale.
        shared = {"aot_inductor.custom_op_libs": [":libstdc++.so.6"]}
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/step.pt2", inductor_configs=shared
        )
        package = torch._inductor.aoti_load_package(path)
        errors = [error(package(*x), layer(*x)) for x in steps]
    return [("o", max(errors), 1e-5), ("launches missing", float(launched == 0), 0.0)]
