"""Identity matrices by whatever they are made of: `torch.eye` is known by its name, others are run and looked at.

A decomposed `eye` is a comparison of two ranges, and so are many that people write: `(i[:, None] == i).float()`,
`diag(ones(n))`. Of `I - beta k k^T` the search has to know what I is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.aten import is_tensor, name_of
from lattn_compile.passes.spelled.chunk_ops import Constants, ones_dropped
from lattn_compile.passes.spelled.labels import constant_size
from lattn_compile.passes.spelled.scaled import real
from lattn_compile.passes.spelled.subgraph import Rejected, clean_state, extract, run
from lattn_compile.passes.spelled.writer import Writer, keep_gradient, value

__all__ = ["restore_identities"]

_LARGEST = 256
"""K is at most this."""

_FILLED = frozenset(f"aten::{name}" for name in ("zeros", "ones", "full", "empty", "tril", "triu", "rand", "randn"))


def restore_identities(graph: fx.Graph) -> None:
    """Writes `eye` for every floating identity matrix that the graph makes of numbers."""
    constants = Constants()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.users and (n := _side(node)) and node in constants and _is_eye(node):
            w = Writer(node, node)
            v = value(node)
            eye = w.reshape(w.call(torch.ops.aten.eye.default, n, dtype=v.dtype, device=v.device), v.shape)
            keep_gradient(eye, node)
            node.replace_all_uses_with(eye)
            graph.erase_node(node)


def _side(node: fx.Node) -> int | None:
    """n, of a floating `[n, n]` that may be an identity, axes of size 1 aside."""
    if not is_tensor(node) or name_of(node) == "aten::eye" or name_of(node) in _FILLED:
        return None
    v = value(node)
    sizes = [constant_size(n) for n in v.shape]
    if not v.is_floating_point() or any(n is None for n in sizes):
        return None
    wide = [sizes[i] for i in ones_dropped(v.shape)]
    return wide[0] if len(wide) == 2 and wide[0] == wide[1] and wide[0] <= _LARGEST else None  # type: ignore[operator]


def _is_eye(node: fx.Node) -> bool:
    try:
        with clean_state(), torch.no_grad():
            made = [n for n in extract([node], []).nodes if is_tensor(n) and value(n).is_floating_point()]
            found = run(extract(made, []), [], real, {})
    except (Rejected, RuntimeError, TypeError, ValueError):
        return False  # whatever it is, it cannot be run here
    if not all(_is_exact(x, value(n).dtype) for n, x in zip(made, found, strict=True)):
        return False
    x = found[made.index(node)].squeeze()
    return torch.equal(x, torch.eye(len(x), dtype=x.dtype))


def _is_exact(x: Any, dtype: torch.dtype) -> bool:
    """Whether what was computed in float64 is what the graph computes in its own type: numbers that it has."""
    return isinstance(x, Tensor) and torch.equal(x.to(dtype).to(x.dtype), x)
