"""Validate: after the rewrite the graph is well formed and every site gives what it gave, in shape and dtype.

A site that the active phase cannot reach, and to which it would have made a difference, is refused here.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lattn_compile import phase
from lattn_compile.errors import RewriteError
from lattn_compile.passes.context import PassContext, SiteNode, graph_modules_of, value_of
from lattn_compile.passes.devmap import is_batched
from lattn_compile.passes.recognize import overload_of


def run(context: PassContext) -> None:
    for graph_module in graph_modules_of(context.module):
        graph_module.graph.lint()
    for site in context.sites:
        if site.blocked is not None and (site.op_quantizes or (site.rewritten and phase.current()[1] is not None)):
            raise site.blocked
        _same_outputs(site)


def _same_outputs(site: SiteNode) -> None:
    """Run the new op's fake on the site's fake arguments and compare with what the graph held before."""
    before = value_of(site.node)
    overload = overload_of(site.node)
    if before is None or overload is None or any(value_of(n) is None for n in site.node.all_input_nodes):
        return
    args = torch.utils._pytree.tree_map_only(torch.fx.Node, value_of, (site.node.args, site.node.kwargs))
    if any(map(is_batched, torch.utils._pytree.tree_leaves(args))):
        return  # a call inside of a vmap, which cannot be run outside of it
    fake = next((a.fake_mode for a in args[0] if hasattr(a, "fake_mode")), None)
    if fake is None:
        return
    with fake, torch.no_grad():
        args, kwargs = torch.utils._pytree.tree_map_only(FakeTensor, lambda x: _of_mode(fake, x), args)
        after = overload(*args, **kwargs)
    for index, name in enumerate(("o", "final_state")):
        was, now = before[index], after[index]
        if was.dtype != now.dtype or tuple(was.shape) != tuple(now.shape):
            raise RewriteError(
                f"{site.id}.{name}",
                got=f"{now.dtype} {list(now.shape)} after the rewrite",
                want=f"{was.dtype} {list(was.shape)} as before it",
                remedy="This is a fault of lattn_compile; report it with the graph.",
            )
    for key in ("val", "example_value"):
        if key in site.node.meta:
            site.node.meta[key] = after


def _of_mode(mode: FakeTensorMode, x: FakeTensor) -> torch.Tensor:
    """A tensor like `x`, of the active mode: make_fx, tracing real tensors, may give each node one of its own."""
    return x if x.fake_mode is mode else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
