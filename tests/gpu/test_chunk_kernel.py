"""The chunk kernel on a CUDA device, against the reference in float64: what `supports` lets through."""

from __future__ import annotations

import pytest
import torch

from lattn_compile.kernels.reference import chunk as reference
from tests.kernels.test_triton_chunk import compared, inputs, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("decay", "sizes"),
    [(0, (2, 2, 128, 128)), (1, (1, 2, 128, 128)), (2, (2, 2, 128, 128)), (2, (2, 2, 100, 60)), (2, (1, 2, 64, 64))],
)
def test_outputs_and_states_hold_the_bounds_of_semantics_8(
    decay: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, strong: bool
) -> None:
    from lattn_compile.kernels import chunk

    lengths = [700, 1, 0, 260]
    x = [None if t is None else t.cuda() for t in inputs(decay, True, sizes, lengths, strong)]
    x[:3] = [t.to(dtype) for t in x[:3]]
    used = sum(lengths)
    ours, state = compared(chunk, x)
    want, want_state = compared(reference, x, double=True)
    o, _ = compared(reference, [x[0].float(), x[1].float(), x[2].float(), *x[3:]])
    own = relative(o.to(dtype)[:used], want[:used])
    assert relative(ours[:used], want[:used]) <= (2 * own if dtype is torch.bfloat16 else 5e-6)
    assert relative(state, want_state) <= (1e-5 if dtype is torch.bfloat16 else 5e-6)
    assert bool((ours[used:] == 7.5).all())
