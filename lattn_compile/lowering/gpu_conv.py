"""The short causal convolution of a whole sequence on a GPU, forward and backward: launches of our kernels.

In front of a recurrence each channel is convolved with its last three or four inputs. The library's convolution wants
tokens as neighbours in memory, and leaves them so: a copy before it, and slow reads behind it. The kernels take a
projection as it lies and leave channels as neighbours. What a decode step has is `gpu_fold.py`'s.

Two spellings: decompositions, below autograd, and a pass behind all others, which takes into a launch what is around it
where nothing else reads that: the parts of a projection that were put behind each other for it, and `silu`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.lowering import _torch_triton as private
from lattn_compile.lowering import gpu
from lattn_compile.lowering.gpu_fold import erase, origin, silu, sources

__all__ = ["convolution", "convolution_backward", "fold_sequences"]

_aten = torch.ops.aten
_SEEN = (_aten.clone.default, _aten.permute.default, _aten.slice.Tensor)

_LEAST_OUTPUTS = 17
"""A decode step's convolution has fewer, and stays one for `gpu_fold.py` to find."""

_MOST_TAPS, _MOST_SEQUENCES = 8, 65535


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    """Decomposition of `aten.convolution` `[B, C, L]` of one channel a group; NotImplemented for any other.

    Sums in fp32. The result is laid out as the library's: a copy, which `fold_sequences` drops where it takes `silu`
    along.
    """
    if not _is_short(input, weight, bias, stride, padding, dilation, transposed, groups):
        return NotImplemented
    from lattn_compile.kernels import conv_sequence as kernel

    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.contiguous().view(weight.shape[0], -1)
        return kernel.forward(x.transpose(1, 2), weight, bias, padding[0]).transpose(1, 2).contiguous()

    return gpu.traced(call, input, weight, bias)


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> Any:
    """Decomposition of `aten.convolution_backward` of the same convolutions."""
    if not _is_short(input, weight, None, stride, padding, dilation, transposed, groups):
        return NotImplemented
    from lattn_compile.kernels import conv_sequence as kernel

    def call(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad, taps = kernel.in_rows(grad.transpose(1, 2)), weight.shape[-1]  # once for both
        rows = weight.contiguous().view(-1, taps)
        dx = kernel.grad_input(grad, rows, padding[0]).transpose(1, 2).contiguous() if output_mask[0] else None
        dw, db = None, None
        if output_mask[1]:
            dw = kernel.grad_weight(x.transpose(1, 2), grad, taps, padding[0])[:, None].to(weight.dtype).contiguous()
        if output_mask[2]:
            db = grad.float().sum((0, 1)).to(weight.dtype)
        return dx, dw, db

    return gpu.traced(call, grad_output, input, weight)


def _is_short(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    groups: int,
) -> bool:
    if "sequence" not in gpu.PROVEN or input.device.type != "cuda" or input.dim() != 3 or transposed:
        return False
    channels, one, taps = weight.shape
    if (one, groups, input.shape[1]) != (1, channels, channels) or input.dtype not in (torch.float32, torch.bfloat16):
        return False
    if any(x is not None and x.dtype is not input.dtype for x in (weight, bias)):
        return False
    if tuple(stride) != (1,) or tuple(dilation) != (1,) or not 0 <= padding[0] < taps <= _MOST_TAPS:
        return False
    if not all(isinstance(n, int) for n in (*input.shape, channels, taps)):
        return False
    return 0 < input.shape[0] <= _MOST_SEQUENCES and input.shape[2] + 2 * padding[0] - taps + 1 >= _LEAST_OUTPUTS


def fold_sequences(graph: fx.Graph) -> int:
    """Takes into the convolutions of `graph` what is around them; returns how many operations that were."""
    from lattn_compile.kernels import conv_sequence as kernel

    taken = sum(_shorter(graph, node) for node, _ in private.launches(graph, kernel.convolve_sequence))
    for node, _ in private.launches(graph, kernel.convolve_sequence):
        given = private.arguments(node)
        if given["b"] is None and (parts := _parts(given)) is not None:
            private.relaunch(node, given | parts)
            erase(graph, [given["a"]])
            taken += 1
        output = _result(node)
        if output is not None and not given["SILU"] and (active := silu(output)) is not None:
            private.relaunch(node, private.arguments(node) | {"SILU": True})
            active.replace_all_uses_with(origin(output))
            erase(graph, [active])
            taken += 1
    return taken


def _shorter(graph: fx.Graph, node: fx.Node) -> bool:
    """Leaves out the last outputs where nothing reads them: behind tokens that are padded on both sides."""
    from lattn_compile.kernels import conv_sequence as kernel

    given, chain, x = private.arguments(node), [node], node
    while len(chain) < 4 and len(x.users) == 1:
        x = next(iter(x.users))
        chain += [] if x.target is _aten.clone.default else [x]
    if len(chain) < 4 or chain[2].target is not _aten.permute.default or chain[3].target is not _aten.slice.Tensor:
        return False
    axis, start, end = (*chain[3].args[1:], None, None, None)[:3]
    if given["BACKWARD"] or axis not in (2, -1) or start not in (0, None) or not isinstance(end, int):
        return False
    if len(chain[3].args) > 4 or not 0 < end < given["outputs"]:
        return False

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel.forward(x, weight, bias, given["padding"], end).transpose(1, 2)

    nodes = [x for x in (given["a"], given["weight"], given["bias"]) if x is not None]
    chain[3].replace_all_uses_with(private.inserted(graph, node, call, nodes))
    erase(graph, [chain[3]])
    return True


def _parts(given: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of a launch that reads its inputs where they lay before they were put behind each other for it."""
    from lattn_compile.kernels import conv_sequence as kernel

    x, channels = given["a"], given["CHANNELS"]
    sequences, tokens, _ = x.meta["val"].shape
    if len(x.users) != 1:
        return None
    found = sources(x, sequences * tokens, channels)
    if found is None or not 1 < len(found) <= kernel.SOURCES:
        return None
    ends = [found[0][1], sum(count for _, count in found[:2])]
    groups = [0 if at.run == count else at.group for at, count in found]
    runs = [at.run for at, _ in found]
    if kernel.widest(*ends[: len(found) - 1], *runs, *groups) < given["BLOCK_C"]:
        return None
    parts: dict[str, Any] = {"A_END": ends[0], "B_END": ends[1]}
    for name, (at, _), group, run in zip("abc", found, groups, runs, strict=False):
        parts |= {name: at.node, f"{name}_token": at.row, f"{name.upper()}_GROUP": group, f"{name.upper()}_RUN": run}
    return parts


def _result(node: fx.Node) -> fx.Node | None:
    """The output of a launch, or the only view of it that is read."""
    users = list(node.users)
    while len(users) == 1:
        (x,) = users
        users = [y for y in x.users if y.target in _SEEN]
        if len(users) != len(x.users) or not users:
            return x
    return None
