"""One decode step with everything around it, and the short convolution before it. Run with TRITON_INTERPRET=1, whose
casts to bf16 cut off: 16 bits are fp16 here."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels import conv_step, decode_step
from tests.ops.cases import inputs, options


@pytest.mark.parametrize(("dtype", "grouped"), [(torch.float32, True), (torch.float16, False)])
def test_gates_are_computed_as_a_model_computes_them(dtype: torch.dtype, grouped: bool) -> None:
    x = inputs(batch=3, tokens=1, heads=2, value_heads=6, key_dim=20, value_dim=24, dtype=torch.float32)
    q, k, v, state = x[0][:, 0], x[1][:, 0], x[2][:, 0], x[5]
    rng = torch.Generator().manual_seed(3)
    both = torch.randn(3, 2, 6, generator=rng).mul(12).to(dtype)  # of two groups: three before a sigmoid, three decays
    rate, bias = (torch.randn(6, generator=rng).to(dtype) for _ in range(2))
    b, a = (both[:, :, i : i + 3] for i in (0, 3))
    where = {"group": 6, "head": 1, "run": 3, "token": 12}
    if not grouped:
        b, a = b.reshape(3, 6), a.reshape(3, 6)
        where = {"group": 0, "head": 1, "run": 6, "token": 6}
    gates = [
        b.reshape(3, 6).sigmoid(),
        -rate.float().exp() * torch.nn.functional.softplus(a.reshape(3, 6).float() + bias),
    ]
    beta, g = (y[:, None] for y in gates)
    keywords = options("decode", qk_l2norm=True)
    want = torch.ops.lattn.decode(*x[:3], g, beta, state, *[None] * 4, **keywords, implementation="reference")
    o, new = torch.empty(3, 6, 24), state.clone()
    _step_with_gates(q, k, v, a, rate, bias, b, new, o, where, keywords)
    torch.testing.assert_close(o, want[0][:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(new, want[1], rtol=1e-5, atol=1e-5)


def _step_with_gates(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, rate: Tensor, bias: Tensor, b: Tensor, state: Tensor, o: Tensor,
    where: dict[str, int], keywords: dict[str, Any],
) -> None:  # fmt: skip
    """Launches `step` with what the pass over a graph gives it."""
    found: dict[str, Any] = {}

    class Launch:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                names = decode_step.step.arg_names
                found.update(dict(zip(names, args, strict=False)) | kwargs, grid=grid)

            return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_step, "launched", lambda kernel: Launch())
        flat = [x.reshape(3, 6) for x in (a, b)]
        decode_step.forward(
            q, k, v, *flat, state, o, rule="delta", scale=keywords["scale"], qk_l2norm=True, quantize=None,
            readout="before_write", enter=False,
        )  # fmt: skip
    found |= {"g": a, "beta": b, "log_rate": rate, "bias": bias}
    found |= {"DECAY": decode_step.MAMBA, "BETA": decode_step.SIGMOID}
    for name in ("g", "beta"):
        found |= {f"{name}_{x}": where[x] for x in ("group", "head", "token")} | {f"{name.upper()}_RUN": where["run"]}
    for name in ("num_warps", "num_stages", "enable_fp_fusion"):
        del found[name]
    decode_step.step[found.pop("grid")](**found)


@triton.jit
def _softplus(x, y):
    at = tl.arange(0, 4)
    tl.store(y + at, decode_step.softplus(tl.load(x + at)))


def test_softplus_passes_on_what_is_no_number_though_a_gpu_minimum_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    monkeypatch.setattr(builder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, np.fmin))
    x, y = torch.tensor([torch.nan, -30.0, 1.0, 25.0]), torch.empty(4)
    _softplus[(1,)](x, y)
    torch.testing.assert_close(y, torch.nn.functional.softplus(x), equal_nan=True)


@pytest.mark.parametrize("sequences", [2, 33])
@pytest.mark.parametrize(
    ("parts", "taps", "kept", "silu", "dtype"),
    [
        (3, 4, 4, True, torch.float32),
        (3, 4, 4, True, torch.float16),
        (3, 4, 4, False, torch.bfloat16),
        (2, 3, 4, True, torch.float16),
        (1, 4, 3, False, torch.float32),
        (2, 3, 5, True, torch.float32),
    ],
)
def test_a_step_of_a_convolution(
    parts: int, taps: int, kept: int, silu: bool, dtype: torch.dtype, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few sequences and of so many that a program has several; four numbers of 16 bits are a word."""
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))
    rng = torch.Generator().manual_seed(0)
    sizes = [(4, 96), (4, 96), (4, 224)][:parts]  # groups, channels of one
    memory = torch.randn(sequences, 4, sum(n for _, n in sizes), generator=rng).to(dtype)
    given, first = [], 0
    for groups, run in sizes:
        given.append((memory[:, :, first : first + run], groups * run, memory.stride(0), memory.stride(1), run))
        first += run
    channels = sum(x[1] for x in given)
    past = torch.randn(sequences, channels, kept, generator=rng).to(dtype)
    past[0, :5, 1] = torch.tensor([0.0, -0.0, torch.inf, torch.nan, -1.0]).to(dtype)
    weight, bias = torch.randn(channels, taps, generator=rng).to(dtype), torch.randn(channels, generator=rng).to(dtype)
    joined = torch.cat([past, torch.cat([x[0].reshape(sequences, -1) for x in given], 1)[..., None]], -1)
    want = torch.nn.functional.conv1d(joined.double(), weight.double()[:, None], bias.double(), groups=channels)[
        ..., -1
    ]
    want = want.to(dtype)
    want = torch.nn.functional.silu(want) if silu else want
    beside = None
    if parts > 1:  # five rows are a whole program's and part of another's
        beside = torch.randn(sequences, 700, generator=rng).to(dtype), torch.randn(5, 700, generator=rng).to(dtype)
    near = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}[dtype]  # not rounded as on a GPU
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    out, moved, *more = conv_step.forward(given, past.clone(), weight, bias, silu=silu, beside=beside)
    assert torch.equal(moved.view(bits), joined[..., 1:].contiguous().view(bits))
    assert len(more) == (beside is not None)
    if beside is not None:
        x, matrix = (y.double() for y in beside)
        torch.testing.assert_close(more[0], (x @ matrix.T).to(dtype), rtol=max(near, 1e-3), atol=1e-4)
    torch.testing.assert_close(out, want, rtol=near, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("beta", "g"), [((0, 6, 1, 3), (3, 6, 1, 3)), ((6, 0, 1, 6), (0, 0, 1, 6)), ((1, 0, 2, 6), (0, 0, 2, 6))]
)
def test_gates_of_a_projection_beside_a_convolution(
    dtype: torch.dtype, beta: tuple[int, ...], g: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six heads: in two groups, in one half of the rows each, and one by one."""
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))
    rng = torch.Generator().manual_seed(0)
    x, matrix = (torch.randn(*n, generator=rng).to(dtype) for n in ((2, 700), (12, 700)))
    past, weight = torch.randn(2, 32, 4, generator=rng).to(dtype), torch.randn(32, 4, generator=rng).to(dtype)
    rate, bias = (torch.randn(6, generator=rng).to(dtype) for _ in range(2))
    new = [(torch.randn(2, 32, generator=rng).to(dtype), 32, 32, 0, 32)]
    gates = conv_step.Gates(rate, bias, torch.float32, beta, g)
    out, moved, log_decay, strength = conv_step.forward(
        new, past.clone(), weight, None, silu=True, beside=(x, matrix), gates=gates
    )
    rows = (x.double() @ matrix.double().T).to(dtype)
    heads = range(6)
    b, a = (rows[:, [at + i // run * group + i % run * step for i in heads]] for at, group, step, run in (beta, g))
    near = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(strength, b.sigmoid().float(), rtol=near, atol=near)
    want = -rate.float().exp() * torch.nn.functional.softplus(a.float() + bias.float())
    torch.testing.assert_close(log_decay, want, rtol=near, atol=near)
    assert out.isfinite().all() and torch.equal(moved[..., -1], new[0][0])
