"""What compiled graphs promise whose ops are launches of our kernels in Inductor's module (`lowering/gpu.py`).

Checked on a GPU, against float64 and against the ops themselves; of whole models in `lowering_models.py`. Needs torch
and Triton; the checks of a model need transformers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from lattn_compile.backend import lattn_compile
from lattn_compile.lowering import gpu
from tests.gpu.checks import Row
from tests.gpu.lowering_models import (
    CHECKS,
    EXACT,
    MODES,
    PROVEN,
    RECORDING,
    calls_of_ops,
    clear,
    error,
    recorded,
)
from tests.ops.cases import inputs, options

__all__ = ["CHECKS"]

_check, _each = CHECKS.check, CHECKS.each

HALF = 2.0**-8

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
    "chunk bf16 gradients": {
        "op": "chunk", "tokens": 150, "qk_l2norm": True, "dtype": torch.bfloat16, "gradients": True,
    },
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


@_each("call", CALLS)
def _call(name: str) -> list[Row]:
    clear()
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
    in_gluon = op is torch.ops.lattn.chunk.default and tensors[0].dtype is torch.bfloat16
    if in_gluon:  # which Inductor cannot write
        forms = ("chunk", "chunk_backward")
        found = [code.count(f"torch.ops.lattn.{x}.default(") for x, code in zip(forms, codes, strict=False)]
        rows.append(("calls of the op missing", 1.0 + gradients - sum(found), 0.0))
    else:
        rows += [("calls of ops", calls_of_ops(code), 0.0) for code in codes[kept:]]
    names = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
    own_results = _results(call, there, gradients)
    for what, mine, own in zip(names, got, own_results, strict=False):
        if tensors[0].shape[1] > 1:
            rows.append((f"{what} unlike the op's", float((mine != own).sum()), 0.0))
        elif keywords.get("write", "exact") != "exact":  # one token is a kernel of its own: a code may flip
            rows.append((what, float((mine - own).norm() / own.norm()), 1e-2))
    if keywords.get("write", "exact") == "exact":
        wide = [x if x is None else x.double() for x in tensors]
        want = _results(lambda *x: op(*x, **keywords, implementation="reference"), wide, gradients)
        for what, mine, right in zip(names, got, want, strict=False):
            rounded = tensors[0].dtype is not torch.float32 and what != "state"
            rows.append((what, error(mine, right), HALF if rounded else EXACT * (5 if what.startswith("d") else 1)))
    return rows


@_each(
    "in place",
    [*(f"{mode} {write}" for mode in MODES for write in ("exact", "int8")), "max-autotune exact", "cpp_wrapper exact"],
)
def _in_place(which: str) -> list[Row]:
    """A hundred steps of three layers on states that a cache holds, beside the ops called one by one."""
    mode, write = which.split()
    clear()
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
        worst = max(worst, error(o, want))
    bound = 1e-5 if write == "exact" else 2e-3
    return [
        ("o", worst, bound),
        ("state", max(error(x, y) for x, y in zip(states, own, strict=True)), 1e-5 if write == "exact" else 2e-2),
        ("states that moved", float(at != [x.data_ptr() for x in states]), 0.0),
        ("graphs", float(len(code)), 1.0),
        ("calls of ops", calls_of_ops(code[0]), 0.0),
        ("graphs skipped", float(counters["inductor"]["cudagraph_skips"]), 0.0),
        ("graphs not recorded", float(mode in RECORDING and not recorded()), 0.0),
    ]


@_each("few rows", ["1", "8", "16", "40", "64", "1 early", "8 early", "64 early"])
def _few_rows(which: str) -> list[Row]:
    """A layer's step whose products with weights are kernels for few rows, or some, beside float64 and the operations
    apart.

    "early": with kernels that begin before the one in front has ended, in a CUDA graph that is replayed.
    """
    clear()
    count, *early = which.split()
    rng = torch.Generator().manual_seed(0)
    hidden, wide, rows = 512, 1024, int(count)
    shapes = [(4 * hidden, hidden), (hidden, hidden), (wide, hidden), (wide, hidden), (hidden, wide)]
    weights = [torch.nn.Parameter(torch.randn(*s, generator=rng).mul(s[1] ** -0.5).bfloat16().cuda()) for s in shapes]
    x, state = torch.randn(rows, 1, hidden, generator=rng), torch.randn(rows, 4, 128, 128, generator=rng).cuda()
    keywords = options("decode", qk_l2norm=True)

    def layer(x: Tensor, state: Tensor, qkvz: Tensor, own: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
        q, k, v, z = (y.unflatten(-1, (4, 128)) for y in linear(x, qkvz).chunk(4, -1))
        o, new = torch.ops.lattn.decode(q, k, v, None, None, state, *[None] * 4, **keywords)[:2]
        state.copy_(new)
        x = x + (o * z).flatten(-2) + linear(x, own)  # one launch with the other product of this x
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
        ("o", error(got.double(), want), 1.5 * error(own.double(), want) + EXACT),
        ("products of a library", float(code.count("extern_kernels.mm(")), 0.0),
        ("launches of products", float(len(re.findall(r"multiply\w*_\d+\.run\(", code))), 3.0),
        ("pairs apart", float("silu" in "".join(re.findall(r"triton_poi\w+\.run", code))), 0.0),
    ]


_SOME: dict[str, tuple[int, tuple[int, ...], int, bool]] = {
    "pair": (64, (5120,), 2048, True),
    "pair of many columns": (40, (8576,), 512, True),
    "cut": (64, (2048,), 5120, False),
    "cut, of 17": (17, (2048, 128), 4096, False),
    "three": (64, (8192, 512, 512), 2048, False),
    "many columns": (33, (12288,), 2048, False),
    "one by one": (64, (5120,), 512, False),
}
"""Rows, columns of each matrix, depth, and whether they are a pair."""


@_each("some rows", _SOME)
def _some_rows(which: str) -> list[Row]:
    """Products of some dozens of rows beside float64 and the operations apart, outputs poisoned."""
    from lattn_compile.kernels import some_rows

    rows, columns, depth, pair = _SOME[which]
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth + 64, generator=rng).bfloat16().cuda()[:, :depth]
    shapes = [(n, depth) for n in columns * (1 + pair)]
    matrices = [torch.randn(*s, generator=rng).mul(depth**-0.5).bfloat16().cuda() for s in shapes]

    def apart(x: Tensor, *matrices: Tensor) -> list[Tensor]:
        products = [x @ m.T for m in matrices]
        return [torch.nn.functional.silu(products[0]) * products[1]] if pair else products

    want, own = apart(x.double(), *(m.double() for m in matrices)), apart(x, *matrices)
    with _poisoned():
        got = some_rows.forward(x, *matrices, pair=pair)
    return [
        (f"{i}", error(a.double(), b), 1.5 * error(c.double(), b) + EXACT)
        for i, (a, b, c) in enumerate(zip(got, want, own, strict=True))
    ]


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    made = Tensor.new_empty
    with mock.patch.object(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan)):
        yield


@_each("convolution step", ["1", "8", "64", "256", "3 of three", "5 of float32", "5 of float16"])
def _convolution_step(which: str) -> list[Row]:
    """The convolution's kernel with the gates beside it, beside float64 and the operations apart; inputs that moved on
    bit by bit."""
    from lattn_compile.kernels import conv_step

    count, dtype = int(which.split()[0]), getattr(torch, which.split()[-1], torch.bfloat16)
    kept, channels, heads = 3 if "three" in which else 4, 8192, 32
    rng = torch.Generator().manual_seed(count)
    shapes = [
        (count, 12288),
        (count, channels, kept),
        (channels, 4),
        (count, 2048),
        (2 * heads, 2048),
        (heads,),
        (heads,),
    ]
    scales = [1.0, 1.0, 0.5, 1.0, 2048**-0.5, 1.0, 1.0]
    cpu = [(torch.randn(*s, generator=rng) * scale).to(dtype) for s, scale in zip(shapes, scales, strict=True)]
    cpu[1][0, :4, 1] = torch.tensor([0.0, -0.0, torch.inf, torch.nan]).to(dtype)
    cpu[1][0, 4:8, -1] = torch.tensor([-0.0, 0.0, -torch.inf, torch.nan]).to(dtype)
    given = [x.cuda() for x in cpu]

    def parts(memory: Tensor) -> list[Tensor]:
        groups = memory.view(count, 16, 768)
        return [groups[..., :128], groups[..., 128:256], groups[..., 256:512]]

    def apart(
        memory: Tensor, past: Tensor, weight: Tensor, x: Tensor, matrix: Tensor, rate: Tensor, bias: Tensor
    ) -> Any:
        joined = torch.cat([past, torch.cat([y.reshape(count, -1) for y in parts(memory)], 1)[..., None]], -1)
        out = torch.nn.functional.conv1d(joined[..., -4:], weight[:, None], groups=channels)[..., 0]
        rows, wide = x @ matrix.T, torch.promote_types(x.dtype, torch.float32)
        decay = -rate.to(wide).exp() * torch.nn.functional.softplus(rows[:, heads:].to(wide) + bias.to(wide))
        return torch.nn.functional.silu(out), joined[..., 1:], decay, rows[:, :heads].sigmoid()

    memory, past, weight, x, matrix, rate, bias = given
    want, own = apart(*(y.double() for y in given)), apart(*given)
    starts = (memory, memory[:, 128:], memory[:, 256:])
    new = [(y, 16 * p.shape[2], 12288, 768, p.shape[2]) for y, p in zip(starts, parts(memory), strict=True)]
    gates = conv_step.Gates(rate, bias, dtype, (0, 0, 1, heads), (heads, 0, 1, heads))
    with _poisoned():
        out, moved, decay, strength = conv_step.forward(
            new, past.clone(), weight, None, silu=True, beside=(x, matrix), gates=gates
        )
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    finite = want[0].isfinite()
    rows: list[Row] = [
        ("moved", float((moved.view(bits) != own[1].contiguous().view(bits)).sum()), 0.0),
        ("not numbers", float((out.isnan() != own[0].isnan()).sum()), 0.0),
    ]
    named = {"out": (out, want[0], own[0]), "g": (decay, want[2], own[2]), "beta": (strength, want[3], own[3])}
    for name, (a, b, c) in named.items():
        a, b, c = (y.double()[finite] if name == "out" else y.double() for y in (a, b, c))
        rows.append((name, error(a, b), 1.5 * error(c, b) + EXACT))
    return rows


@_each("rotation", ["1", "8", "40", "3 each", "3 alone", "3 of 96 channels", "3 of float32", "64 early"])
def _rotation(which: str) -> list[Row]:
    """Norm and rotation of a token's queries and keys beside a step of a recurrence, beside float64 and the operations
    apart: of one position, or of a position each sequence; queries alone; and in float32, which stays apart."""
    clear()
    dim = 96 if "96" in which else 256
    batch, dtype = int(which.split()[0]), torch.float32 if "float32" in which else torch.bfloat16
    rng = torch.Generator().manual_seed(batch)
    shapes = [(batch, 1, 512), (1536, 512), (16 * 2 * dim, 512), (2 * dim, 512), (dim,), (dim,)]
    given = [torch.randn(*s, generator=rng).mul(s[-1] ** -0.5 if i in (1, 2, 3) else 1.0) for i, s in enumerate(shapes)]
    angle = torch.randn(batch if "each" in which else 1, 1, 32, generator=rng).repeat(1, 1, 2)
    given = [x.to(dtype).cuda() for x in (*given, angle.cos(), angle.sin())]
    state = torch.randn(batch, 4, 128, 128, generator=rng).cuda()
    keywords = options("decode", qk_l2norm=True)

    def layer(state: Tensor, *given: Tensor) -> list[Tensor]:
        x, qkv, query, keys, q_weight, k_weight, cos, sin = given
        linear = torch.nn.functional.linear
        q, k, v = (y.unflatten(-1, (4, 128)) for y in linear(x, qkv).chunk(3, -1))
        o, new = torch.ops.lattn.decode(q, k, v, None, None, state, *[None] * 4, **keywords)[:2]
        state.copy_(new)

        def turned(y: Tensor, weight: Tensor) -> Tensor:
            wide = y if y.dtype is torch.float64 else y.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            y = (wide * (1.0 + weight.to(wide.dtype))).type_as(y).transpose(1, 2)
            part, rest = y[..., :64], y[..., 64:]
            part = part * cos.unsqueeze(1) + torch.cat([-part[..., 32:], part[..., :32]], -1) * sin.unsqueeze(1)
            return torch.cat([part, rest], -1)

        heads = linear(x, query).unflatten(-1, (16, 2 * dim))[..., :dim], linear(x, keys).unflatten(-1, (2, dim))
        return [o, turned(heads[0], q_weight), heads[1] if "alone" in which else turned(heads[1], k_weight)]

    with torch.no_grad():
        want = layer(state.double(), *(x.double() for x in given))
        own = layer(state.clone(), *given)
        how: dict[str, Any] = {"mode": "reduce-overhead", "triton.enable_pdl": True} if "early" in which else {}
        kept = state.clone()
        torch._dynamo.mark_static_address(kept)
        compiled = torch.compile(layer, backend=lattn_compile, options={"shape_padding": False, **how})
        got, (code,) = run_and_get_code(compiled, kept, *given)
        got, worst = [x.clone() for x in got], 0.0
        for _ in range(20 if "early" in which else 0):
            kept.copy_(state)
            torch.compiler.cudagraph_mark_step_begin()
            worst = max(worst, *(float((x != y).sum()) for x, y in zip(compiled(kept, *given), got, strict=True)))
    names = ("o", "query", "keys")
    rows: list[Row] = [
        (name, error(x.double(), y), 1.5 * error(z.double(), y) + EXACT)
        for name, x, y, z in zip(names, got, want, own, strict=True)
    ]
    return [
        *rows,
        ("replays unlike the first", worst, 0.0),
        ("launches unlike", float(len(re.findall(r"rotate_\d+\.run\(", code)) != (dtype is torch.bfloat16)), 0.0),
    ]


@_each("attention", ["1", "3", "40", "3 of 5000 keys", "1 by a library", "40 by a library"])
def _attention(which: str) -> list[Row]:
    """One token over keys that heads share, under a mask, beside float64: by our kernel, or by a library's."""
    clear()
    gpu.PROVEN = PROVEN - {"attend"} if "library" in which else PROVEN
    batch, keys = int(which.split()[0]), 5000 if "5000" in which else 256
    rng = torch.Generator().manual_seed(batch)
    q, *kv = (torch.randn(batch, h, t, 256, generator=rng) for h, t in ((16, 1), (2, keys), (2, keys)))
    past = torch.randint(1, keys, (batch,), generator=rng).cuda()

    def attend(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 8, -1, -1).reshape(batch, 16, keys, 256) for x in (k, v))
        mask = torch.arange(keys, device="cuda") <= past[:, None, None, None]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    given = [x.bfloat16().cuda() for x in (q, *kv)]
    want = attend(*(x.double() for x in given), past)
    own = attend(*given, past)
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(attend, backend=lattn_compile), *given, past)
    return [
        ("o", error(got.double(), want), 1.5 * error(own.double(), want) + EXACT),
        ("repeated", float("clone" in "".join(re.findall(r"triton_poi\w+\.run", code))), 0.0),
        ("calls of a library", float("cudnn_attention" in code), float("library" in which)),
    ]


@_each("attention shut", ["256 keys", "5000 keys"])
def _shut(which: str) -> list[Row]:
    """One token where a mask shuts every key, or half of them, by numbers and by truth values, beside the library's
    call on the same mask: what it gives there is its own (0 by -inf and by the least number, a mean of all by less)."""
    clear()
    keys = int(which.split()[0])
    rng = torch.Generator().manual_seed(keys)
    q, *kv = (torch.randn(6, h, t, 256, generator=rng) for h, t in ((16, 1), (2, keys), (2, keys)))
    bias = torch.zeros(6, 1, 1, keys)
    bias[0], bias[1], bias[2] = -torch.inf, torch.finfo(torch.bfloat16).min, -65504.0
    bias[3, ..., : keys // 2], bias[4, ..., : keys // 2] = -torch.inf, torch.finfo(torch.bfloat16).min
    given = [x.bfloat16().cuda() for x in (q, *kv, bias)]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 8, -1, -1).reshape(6, 16, keys, 256) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    rows: list[Row] = []
    for what, mask in (("numbers", given[3]), ("truth values", given[3] == 0)):
        own = attend(*given[:3], mask)
        torch._dynamo.reset()
        with torch.no_grad():
            got, (code,) = run_and_get_code(torch.compile(attend, backend=lattn_compile), *given[:3], mask)
        each = [
            error(x.double(), y.double()) if y.any() else float(x.abs().max()) for x, y in zip(got, own, strict=True)
        ]
        rows += [(f"{what}, sequence {i}", x, 2 * HALF) for i, x in enumerate(each)]
        rows += [
            (f"{what}: not numbers", float(got.isnan().sum() + own.isnan().sum()), 0.0),
            (f"{what}: shut by the library", -float((own == 0).all(-1).all(-1).sum()), -32.0 * (what == "numbers")),
            (f"{what}: calls of a library", float("cudnn_attention" in code), 0.0),
        ]
    return rows


@_check("attention causal")
def _causal() -> list[Row]:
    """A prefill under a mask that a traced model makes of sizes, beside float64."""
    clear()
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
        ("o", error(got.double(), want), 1.5 * error(own.double(), want) + EXACT),
        ("masks", float("None, False, 0.0, True" not in code), 0.0),
    ]


@_each("convolution", ["float32", "bfloat16"])
def _convolution(which: str) -> list[Row]:
    """A short convolution of a sequence and its gradients, beside float64 and the operation."""
    clear()
    dtype, rng = getattr(torch, which), torch.Generator().manual_seed(0)
    given = [torch.randn(2, 150, 512, generator=rng), torch.randn(512, 1, 4, generator=rng) / 2]

    def results(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, weight = (y.to(dtype).cuda().requires_grad_() for y in given)
        y = call(x, weight)
        weights = torch.linspace(-1.0, 1.0, y.numel(), dtype=torch.float64, device="cuda").view(y.shape).to(dtype)
        return [y.detach().double(), *(g.double() for g in torch.autograd.grad((y * weights).sum(), [x, weight]))]

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.nn.functional.conv1d(x.transpose(1, 2), weight, padding=3, groups=512)[..., :150]
        return torch.nn.functional.silu(y).transpose(1, 2)

    given = [x.to(dtype) for x in given]
    want, own = results(convolve, torch.float64), results(convolve, dtype)
    compiled = torch.compile(convolve, backend=lattn_compile, fullgraph=True)
    got, codes = run_and_get_code(results, compiled, dtype)
    rows = [(n, error(a, w), 2 * error(b, w) + EXACT) for n, a, b, w in zip("yxw", got, own, want, strict=True)]
    library = sum(code.count("convolution(") + code.count("convolution_backward.default(") for code in codes)
    return [*rows, ("convolutions of a library", float(library), 0.0)]


@_each("any size", ["batch", "of all in a step", "length"])
def _any_size(which: str) -> list[Row]:
    """One graph for every batch of a decode step, which launches, and for all sizes of one, or every length of a
    prefill, which call the op."""
    clear()
    form = "chunk" if which == "length" else "decode"
    keywords = options(form, "exact", qk_l2norm=True)

    def call(*given: Tensor) -> Any:
        return getattr(torch.ops.lattn, form)(*given, *[None] * 4, **keywords, implementation="triton")[:2]

    compiled = torch.compile(call, backend=lattn_compile, fullgraph=True, dynamic=None if which == "batch" else True)
    rows: list[Row] = []
    codes: list[str] = []
    for size in (3, 5, 70):
        shape = {"batch": 2, "tokens": size} if which == "length" else {"batch": size, "tokens": 1}
        tensors = inputs(heads=2, value_heads=4, key_dim=128, value_dim=128, dtype=torch.float32, **shape)
        given = [x.cuda() for x in tensors]
        for x in given if which == "batch" else []:
            torch._dynamo.mark_dynamic(x, 0)
        if codes:
            got = compiled(*given)
        else:
            got, codes = run_and_get_code(compiled, *given)  # which forgets what was compiled before
        rows += [(f"{what} of {size}", error(a, b), 1e-5) for what, a, b in zip("os", got, call(*given), strict=True)]
    calls = (calls_of_ops(codes[0]) > 0) is not (which != "batch")
    return [*rows, ("graphs", float(counters["stats"]["unique_graphs"]), 1.0), ("op unlike", float(calls), 0.0)]
