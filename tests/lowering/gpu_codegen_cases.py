"""What Inductor writes for our kernels' launches, and the written kernels compiled for Hopper. Run by `test_gpu.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc

pytest.importorskip("triton")

from lattn_compile.kernels.chunk_pairs import pairs_head
from lattn_compile.kernels.decode_forward import advance
from lattn_compile.lowering import gpu
from lattn_compile.lowering._torch_triton import self_contained
from tests.kernels.offline import build
from tests.lowering.cuda_codegen import fake_cuda, generated, kernels_in

LAYERS, BATCH, HEADS, VALUE_HEADS, DIM = 2, 2, 2, 4, 64


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
    (code,) = generated(_layers, mixed, *gates, *states)
    return code


def test_a_step_launches_our_kernel_and_writes_the_state_where_it_lies() -> None:
    code = _code("auto")
    assert "torch.ops.lattn" not in code
    (step,) = [k for k in kernels_in(code) if k.is_ours]
    assert step.name.startswith("step") and len(step.launches) == LAYERS
    for arguments in step.launches:
        names = _memory(arguments)
        assert names[7] == names[9] and names[7].startswith("arg"), "source and final are the cache's own memory"
        assert names[3] == names[6] and names[3].startswith("arg"), "a and b are read where they lie"
        assert [x[:3] for x in names[4:6]] == ["arg", "arg"], "A_log and dt_bias are parameters"
    # A layer's silu and the sum behind it, which are one kernel between two layers.
    assert sum(len(k.launches) for k in kernels_in(code)) <= 2 * LAYERS + 1
    assert "'scale': 'fp32'" in step.source and "'enable_fp_fusion': False" in step.source
    built = build(step.launch(), "sm_90")
    assert built.stack == 0 and built.registers <= 255
    report = lc.last_report()
    assert report is not None
    for site in report.sites:
        assert site.kernel == "triton"
        around = ("q: l2norm", "k: l2norm", "g: exp, neg, cast, add, softplus, mul", "beta: sigmoid")
        assert site.folded == (*around, "final_state: written in place")


def _memory(arguments: str) -> list[str]:
    """The buffers of a launch, views and all."""
    return re.sub(r"reinterpret_tensor\((\w+),[^()]*\([^()]*\)[^()]*\([^()]*\)[^()]*\)", r"\1", arguments).split(", ")


def test_a_short_convolution_moves_its_inputs_on_where_they_lie_and_takes_a_product_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of keys, queries and values that one projection leaves in groups; the convolution's weight is `[C, 1, taps]`."""
    monkeypatch.setattr(gpu, "PROVEN", gpu.PROVEN | {"convolution", "projection"})
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    channels = (2 * HEADS + VALUE_HEADS) * DIM
    x, matrix, small = (torch.empty(n, 32, **new) for n in (BATCH, HEADS * 4 * DIM, 2 * VALUE_HEADS))
    past, weight = torch.empty(BATCH, channels, 4, **new), torch.empty(channels, 1, 4, **new)
    state = torch.empty(BATCH, VALUE_HEADS, DIM, DIM, device="cuda")

    def layer(x: Tensor, matrix: Tensor, small: Tensor, past: Tensor, weight: Tensor, state: Tensor) -> Tensor:
        b = torch.nn.functional.linear(x, small).view(BATCH, 1, -1)[..., VALUE_HEADS:]
        projected = torch.nn.functional.linear(x, matrix).view(BATCH, 1, HEADS, -1)
        parts = [x.reshape(BATCH, 1, -1) for x in projected.split([DIM, DIM, 2 * DIM], -1)]
        joined = torch.cat([past, torch.cat(parts, -1).transpose(1, 2)], -1)
        past.copy_(joined[..., -4:])
        mixed = torch.nn.functional.conv1d(joined, weight, groups=channels)[..., -1:]
        mixed = torch.nn.functional.silu(mixed).transpose(1, 2)
        sizes = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM]
        q, k, v = (y.unflatten(-1, (-1, DIM)) for y in mixed.split(sizes, -1))
        o, new = torch.ops.lattn.decode(
            q, k, v, None, b.sigmoid(), state, None, None, None, None,
            scale=DIM**-0.5, qk_l2norm=True, implementation="triton",
        )[:2]  # fmt: skip
        state.copy_(new)
        return o

    (code,) = generated(layer, x, matrix, small, past, weight, state, shape_padding=False)
    convolve, step = kernels_in(code)
    assert convolve.is_ours and step.is_ours
    assert re.findall(r"extern_kernels\.(\w+)\(", code) == ["mm"], "the product that gates come from is taken along"
    (arguments,) = convolve.launches
    names = _memory(arguments)
    assert names[0] == names[1] == names[2], "read where the product left it"
    assert [names[i][:3] for i in (3, 4, 7, 8)] == ["arg"] * 4, "moved on where it lies"
    assert "'SILU': True" in convolve.source
    assert build(convolve.launch(), "sm_90").stack == 0


def test_nothing_unproven_is_launched_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PROVEN", frozenset())
    code = _code("auto")
    assert code.count("torch.ops.lattn.decode_recorded.default(") == LAYERS
    assert not [k for k in kernels_in(code) if k.is_ours]


def test_every_name_in_a_written_kernel_is_its_own() -> None:
    """Codecs of three formats have functions and constants of one name, and other names where they are called."""
    source = self_contained(advance)
    defined = re.findall(r"^(?:def )?(\w+)(?:\(| = )", source, re.MULTILINE)
    assert len(defined) == len(set(defined))
    assert source.startswith("def advance(") and "round_int8" not in source


def test_a_process_that_compiles_a_kernel_asks_no_device() -> None:
    """Inductor compiles in forked processes, which may not."""
    assert "is_hip" not in self_contained(pairs_head)
