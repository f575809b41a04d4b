"""Replace: write the op that carries each site's policy. A site with a reason keeps the exact op it has."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from lattn_compile.modes import PREFILL_OPTIONS
from lattn_compile.ops import CHECKPOINT_EVERY, checkpoint_interval
from lattn_compile.passes import capture
from lattn_compile.passes.context import PassContext, SiteNode, graph_modules_of, shape_of
from lattn_compile.passes.spelled.proposal import withdraw
from lattn_compile.passes.spelled.search import commit, tidy
from lattn_compile.policy import Exact


def run(context: PassContext) -> None:
    _settle(context.sites)
    for number, site in enumerate(context.sites):
        if site.policy is None or site.reason is not None:
            continue  # exactly as it was
        target, options = _choose(site)
        site.node = _write(site, target, options, number, context.training)
    graphs = {site.node.graph for site in context.sites if site.proposal is not None}
    for graph_module in graph_modules_of(context.module):
        if graph_module.graph in graphs:
            tidy(graph_module, [s.node for s in context.sites if s.node.graph is graph_module.graph])
        graph_module.recompile()


def _settle(sites: list[SiteNode]) -> None:
    """Spelled-out recurrences: their ops are put in use, or taken away where the spelling stays.

    One site's output may be another's argument, so all are settled before any op is written.
    """
    replaced: dict[fx.Node, fx.Node] = {}
    for site in sites:
        if site.proposal is None:
            continue
        if site.policy is None or site.reason is not None:
            withdraw(site.proposal)
            site.node = site.proposal.anchor
        else:
            replaced.update(commit(site.proposal))
    for site in sites:
        site.arguments = {k: replaced.get(v, v) if isinstance(v, fx.Node) else v for k, v in site.arguments.items()}


def _choose(site: SiteNode) -> tuple[Any, dict[str, Any]]:
    """The op and its policy arguments.

    A chunk-form call outside a phase is all prefix, which no policy quantizes: it stays the exact chunk op, whatever
    the policy. With lengths, or in recurrent form, the op is that of the policy's write mode.
    """
    assert site.policy is not None
    options = site.policy.op_kwargs()
    if site.proposal is not None and site.proposal.state_dtype is not None:
        stored = {torch.bfloat16: "bf16", torch.float16: "fp16"}[site.proposal.state_dtype]
        return torch.ops.lattn.decode, {**options, "write": "token", "state_format": stored, "readout": "before_write"}
    if isinstance(site.policy.write, Exact) or site.all_prefix:
        kept = ("implementation", "gate", *PREFILL_OPTIONS)
        return site.node.target, {name: options[name] for name in kept if name in options}
    if site.policy.op_form == "replay" and site.arguments["write"] == "exact":
        options["keep_ring"] = False  # by recipe: a site that hands its state on to a dense cache has no such policy
    return getattr(torch.ops.lattn, site.policy.op_form), options


def _write(site: SiteNode, target: Any, options: dict[str, Any], number: int, training: bool) -> fx.Node:
    old = site.node
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    names = [a.name for a in target._schema.arguments]
    values = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    values.update({k: v for k, v in site.arguments.items() if k in names})
    values.update(options)
    if "checkpoint_every" in names and training:
        shape = shape_of(site.arguments["q"])
        values["checkpoint_every"] = CHECKPOINT_EVERY if shape is None else checkpoint_interval(shape[1])
    if site.call != capture.OWN_CALL:  # a caller's own number is theirs
        values["site_id"] = number
    positional = [a.name for a in target._schema.arguments if not a.kwarg_only]
    kwargs = {
        a.name: values[a.name]
        for a in target._schema.arguments
        if a.kwarg_only and not (a.has_default_value() and values[a.name] == a.default_value)
    }
    while (
        positional
        and target._schema.arguments[len(positional) - 1].default_value is None
        and (target._schema.arguments[len(positional) - 1].has_default_value() and values[positional[-1]] is None)
    ):
        positional.pop()  # as everybody writes a call
    args = tuple(values.get(n) for n in positional)
    new = old
    if not (old.target == target and tuple(old.args) == args and dict(old.kwargs) == kwargs):
        with old.graph.inserting_before(old):
            new = old.graph.call_function(target, args, kwargs)
        new.meta = dict(old.meta)
    if site.all_prefix and site.policy is not None and not isinstance(site.policy.write, Exact):
        new.meta["custom"] = {**(old.meta.get("custom") or {}), capture.POLICY: site.policy.to_dict()}
    if new is not old:
        old.replace_all_uses_with(new)
        old.graph.erase_node(old)
    _erase_unused(new.users, len(target._schema.returns))
    return new


def _erase_unused(readers: Iterable[fx.Node], outputs: int) -> None:
    """Drop reads of outputs that the new op does not have.

    Not `Graph.eliminate_dead_code`: a Dynamo graph is not functional yet, and that would take `copy_` into a cache for
    dead.
    """
    for reader in list(readers):
        index = reader.args[1] if reader.target is operator.getitem else None
        if isinstance(index, int) and index >= outputs and not reader.users:
            reader.graph.erase_node(reader)
