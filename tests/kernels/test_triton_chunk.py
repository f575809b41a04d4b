"""The chunk kernel in Triton's interpreter, on the CPU in fp32, against the float64 reference. bf16 needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

FILE = Path(__file__)
CASES = {
    "head decay, shared keys, ragged": (1, "delta", True, (2, 4, 32, 16), [70, 0, 33], False),
    "no decay": (0, "delta", True, (1, 1, 16, 16), [130], False),
    "channel decay, odd sizes": (2, "delta", True, (1, 2, 24, 20), [70, 5], False),
    "cleared states, by head": (1, "delta", True, (1, 1, 16, 16), [100], True),
    "cleared states, by channel": (2, "delta", True, (1, 1, 16, 16), [100], True),
    "additive, by head": (1, "additive", False, (1, 2, 16, 16), [66, 64], False),
    "additive, by channel": (2, "additive", False, (1, 1, 16, 16), [40], False),
    "additive, no decay, a few tokens": (0, "additive", False, (1, 1, 16, 16), [12], False),
}
ROUNDED = {
    "int8/*x64": (16, None, "before_write", 1),
    "fp8_e4m3/8x8": (24, [5, 0, 23], "after_write", 2),
    "nvfp4": (100, [5, 0, 99], "before_write", 1),
}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


def inputs(decay: int, beta: bool, sizes: tuple[int, int, int, int], lengths: list[int], strong: bool) -> list:
    rng = torch.Generator().manual_seed(0)
    H, HV, K, V = sizes
    M = sum(lengths) + 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    q, k, v = draw(M, H, K), draw(M, H, K), draw(M, HV, V)
    g = None
    if decay:
        g = -torch.nn.functional.softplus(draw(M, HV) if decay == 1 else draw(M, HV, K)) * (30 if strong else 0.3)
        if strong:
            g.view(-1)[::7] = -torch.inf
    b = draw(M, HV).sigmoid() * 1.5 if beta else None
    state = 0.5 * draw(len(lengths), HV, K, V)
    for x in (q, k, v, g, b):
        if x is not None:
            x[M - 3 :] = torch.nan
    starts = torch.tensor([0, *accumulate(lengths)])[:-1]
    return [q, k, v, g, b, state, starts, torch.tensor(lengths)]


def compared(module, x: list, offsets: list[int] | None = None, double: bool = False, **options) -> tuple:
    if double:
        x = [None if t is None else t.double() if t.is_floating_point() else t for t in x]
    o = torch.full(x[2].shape, 7.5, dtype=x[0].dtype, device=x[0].device)
    at = None if offsets is None else torch.tensor(offsets)
    defaults = {"qk_l2norm": True, "chunk_size": 64, "quantize": None, "readout": "before_write", "rule": "delta"}
    state = module.forward(*x, at, o, scale=x[0].shape[-1] ** -0.5, **{**defaults, **options})
    return o, state


def main(what: str) -> None:
    from lattn_compile.formats import parse
    from lattn_compile.formats.quantizer import Quantizer
    from lattn_compile.kernels import chunk
    from lattn_compile.kernels.reference import chunk as reference

    if what in CASES:
        decay, rule, norm, sizes, lengths, strong = CASES[what]
        x = inputs(decay, rule == "delta", sizes, lengths, strong)
        ours = compared(chunk, x, rule=rule, qk_l2norm=norm)
        want = compared(reference, x, double=True, rule=rule, qk_l2norm=norm)
        bound = 2e-6
    else:
        size, offsets, readout, decay = ROUNDED[what]
        lengths = [60, 24, 1] if offsets else [40, 16, 3]
        x = inputs(decay, True, (1, 2, 32, 16), lengths, False)
        options = {"chunk_size": size, "quantize": Quantizer(parse(what)), "readout": readout}
        ours, want = (compared(m, x, offsets, **options) for m in (chunk, reference))
        bound = 1e-4  # a code may fall the other way
    used = sum(lengths)
    assert relative(ours[0][:used], want[0][:used]) < bound
    assert relative(ours[1], want[1]) < bound
    assert bool((ours[0][used:] == 7.5).all()), "rows of no sequence were written to"


@pytest.mark.parametrize("what", [*CASES, *ROUNDED])
def test_the_interpreted_kernel_computes_what_the_reference_does(what: str) -> None:
    # The interpreter is chosen when Triton is imported, so it needs a process of its own.
    code = f"from tests.kernels.test_triton_chunk import main; main({what!r})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=FILE.parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "by_channel", "reason"),
    [(128, 128, False, None), (100, 60, True, None), (64, 64, False, "unproven"), (16, 64, True, "not from 33")],
)
def test_a_shape_that_is_miscompiled_or_unproven_is_refused_in_words(
    key_dim: int, value_dim: int, by_channel: bool, reason: str | None
) -> None:
    from lattn_compile.kernels.chunk import supports

    said = supports(
        device=torch.device("cuda"), dtype=torch.float32, key_dim=key_dim, value_dim=value_dim, quantize=None,
        by_channel=by_channel, inputs=torch.bfloat16,
    )  # fmt: skip
    assert (said is None) if reason is None else (said is not None and reason in said)
