"""What Inductor writes for our kernels' launches, and the written kernels compiled for Hopper. Run by `test_gpu.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass

import lattn_compile as lc

pytest.importorskip("triton")

from lattn_compile.kernels.decode_forward import advance
from lattn_compile.lowering import gpu
from lattn_compile.lowering._torch_triton import self_contained
from tests.kernels.offline import build
from tests.lowering.cuda_codegen import fake_cuda, generated, kernels_in

LAYERS, BATCH, HEADS, VALUE_HEADS, DIM = 2, 2, 2, 4, 64


class _PostGrad(CustomGraphPass):
    def __call__(self, graph: torch.fx.Graph) -> None:
        gpu.post_grad(graph)

    def uuid(self) -> str:
        return "lattn_compile.lowering.gpu.post_grad"


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with fake_cuda(), torch.no_grad():
        yield


def _layers(mixed: Tensor, ab: Tensor, A_log: Tensor, dt_bias: Tensor, *states: Tensor) -> Tensor:
    """Gated delta layers one behind the other, each on a projection as Qwen3-Next has it."""
    x = mixed
    for state in states:
        sizes = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM]
        q, k, v = (y.unflatten(-1, (-1, DIM)) for y in torch.nn.functional.silu(x).split(sizes, -1))
        a, b = ab.chunk(2, -1)
        g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
        o, new = torch.ops.lattn.decode(
            q, k, v, g, b.sigmoid(), state, None, None, None, None,
            scale=DIM**-0.5, qk_l2norm=True, implementation=_layers.kernel,
        )[:2]  # fmt: skip
        state.copy_(new)
        x = x + o.flatten(-2).repeat(1, 1, 2)
    return x


def _code(kernel: str) -> str:
    _layers.kernel = kernel
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    mixed = torch.empty(BATCH, 1, (2 * HEADS + VALUE_HEADS) * DIM, **new)
    gates = [
        torch.empty(BATCH, 1, 2 * VALUE_HEADS, **new),
        *(torch.empty(VALUE_HEADS, device="cuda") for _ in range(2)),
    ]
    states = [torch.empty(BATCH, VALUE_HEADS, DIM, DIM, device="cuda") for _ in range(LAYERS)]
    (code,) = generated(_layers, mixed, *gates, *states, post_grad_custom_post_pass=_PostGrad())
    return code


def test_a_step_launches_our_kernels_and_writes_the_state_where_it_lies() -> None:
    code = _code("triton")
    assert "torch.ops.lattn" not in code
    kernels = {re.sub(r"_\d+$", "", k.name): k for k in kernels_in(code)}
    (state_step,) = [k for k in kernels_in(code) if k.name.startswith("advance")]
    assert len(state_step.launches) == len(kernels["pair_up"].launches) == LAYERS
    for arguments in state_step.launches:
        names = re.sub(r"reinterpret_tensor\((\w+),[^()]*\([^()]*\)[^()]*\([^()]*\)[^()]*\)", r"\1", arguments).split(
            ", "
        )
        assert names[5] == names[9] and names[5].startswith("arg"), "source and final are the cache's own memory"
    # Two layers: runs of tokens once (2), and a layer's silu (1), gates (2), kernels (2); sums in between or behind.
    assert sum(len(k.launches) for k in kernels_in(code)) <= 2 + LAYERS * 6
    assert "'scale': 'fp32'" in kernels["pair_up"].source
    for k in kernels_in(code):
        if k.is_ours:
            assert "'enable_fp_fusion': False" in k.source
            built = build(k.launch(), "sm_90")
            assert built.stack == 0 and built.registers <= 255, k.name


def test_nothing_unproven_is_launched_unless_it_is_asked_for() -> None:
    assert "decode" not in gpu.PROVEN
    code = _code("auto")
    assert code.count("torch.ops.lattn.decode_recorded.default(") == LAYERS
    assert not [k for k in kernels_in(code) if k.is_ours]


def test_every_name_in_a_written_kernel_is_its_own() -> None:
    """Codecs of three formats have functions and constants of one name, and other names where they are called."""
    source = self_contained(advance)
    defined = re.findall(r"^(?:def )?(\w+)(?:\(| = )", source, re.MULTILINE)
    assert len(defined) == len(set(defined))
    assert source.startswith("def advance(") and "round_int8" not in source
    assert lc.__version__
