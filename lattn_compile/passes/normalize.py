"""Normalize: fold into a site's arguments what its op does itself.

transformers 5.17 repeats the key heads before the call, where later versions pass them unrepeated; the op groups heads
itself (value head j uses key head j // R), so the repeat is dropped and the key heads stay at H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lattn_compile.passes.context import PassContext, SiteNode, shape_of


def run(context: PassContext) -> None:
    for site in context.sites:
        _fold_head_repeat(site)


def _fold_head_repeat(site: SiteNode) -> None:
    q, k = (_repeated(site.arguments[name]) for name in ("q", "k"))
    if q is None or k is None or q[1] != k[1]:
        return
    shape_q, shape_k = shape_of(q[0]), shape_of(k[0])
    if shape_q is None or shape_k is None or shape_q[2] != shape_k[2]:
        return
    # The repeats themselves stay, without users: they are pure, and the compiler behind us drops them.
    site.arguments["q"], site.arguments["k"] = q[0], k[0]
    site.folded.append(f"repeat_interleave x{q[1]}")


def _repeated(node: Any) -> tuple[fx.Node, int] | None:
    """`(x, r)` where `node` is `x.repeat_interleave(r, dim=2)` of a 4-d tensor with a constant `r`."""
    if not isinstance(node, fx.Node):
        return None
    method = node.op == "call_method" and node.target == "repeat_interleave"
    function = node.op == "call_function" and node.target in (
        torch.repeat_interleave,
        torch.ops.aten.repeat_interleave.self_int,
    )
    if not (method or function):
        return None
    x = node.args[0]
    repeats = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    shape = shape_of(x)
    if type(repeats) is not int or not isinstance(x, fx.Node) or shape is None or len(shape) != 4 or dim not in (2, -2):
        return None
    return x, repeats
