"""Annotate: give every site its policy, or the reason why it keeps the exact op it was captured as."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from lattn_compile.errors import FormatError, PolicyError, Reason, reason
from lattn_compile.passes.capture import POLICY
from lattn_compile.passes.context import PassContext, SiteNode, shape_of, value_of
from lattn_compile.passes.discover import form_of
from lattn_compile.passes.recognize import heads_cut_around
from lattn_compile.policy import Exact, Policy, Recipe


def run(context: PassContext) -> None:
    for site in context.packed:
        _packed(site, context.recipe or site.recipe)
    hits: dict[int, set[int]] = {}
    for site in context.sites:
        recipe = context.recipe or site.recipe
        if site.arguments["write"] != "exact":
            site.policy = Policy.from_op(site.arguments)
            if recipe is not None:
                site.rule_index, asked = recipe.resolve(site.id)
                if site.rule_index is not None:
                    hits.setdefault(id(recipe), set()).add(site.rule_index)
                if asked != site.policy and not _rounds_of_its_own(site, asked):
                    site.reason = reason("EXPLICIT_POLICY")
            continue
        if recipe is None:
            site.policy = prefill_policy(site.node) or Policy.from_op(site.arguments)
            continue
        site.rule_index, site.policy = recipe.resolve(site.id)
        if site.rule_index is not None:
            hits.setdefault(id(recipe), set()).add(site.rule_index)
        if site.policy is None:
            site.reason = reason("NO_RULE" if site.rule_index is None else "RULE_NONE")
            continue
        asked = site.policy
        if site.all_prefix and asked.storage == "packed":
            # Exact prefill, as under any policy; a packed cache takes over what it leaves.
            site.policy = dataclasses.replace(asked, storage="emulated")
        site.policy.require_built()
        site.reason = obstacle(site, asked) or _disagreement(site, asked, recipe)
    if context.recipe is not None and (context.sites or context.left_alone):
        # An attached recipe's rules were checked against all modules when it was attached.
        left_alone = {left.rule_index for left in context.left_alone if left.rule_index is not None}
        _warn_about_idle_rules(context, context.recipe, hits.get(id(context.recipe), set()) | left_alone)
    _warn_about_missing_phase(context)
    _warn_about_packed_convolutions(context)


def _packed(site: SiteNode, recipe: Recipe | None) -> None:
    """A packed state has its policy from whoever made it; a recipe can only agree."""
    site.policy = dataclasses.replace(Policy.from_op(site.arguments), storage="packed")
    if recipe is None:
        return
    site.rule_index, asked = recipe.resolve(site.id)
    same = None if asked is None else dataclasses.replace(asked, storage="emulated", kernel=site.policy.kernel)
    if same is None or dataclasses.replace(Policy.from_op(same.op_kwargs()), storage="packed") != site.policy:
        site.reason = reason("PACKED_STATE", f"{site.policy}")


def _rounds_of_its_own(site: SiteNode, asked: Policy | None) -> bool:
    """A spelled-out recurrence that stores its state in 16 bits keeps that rounding under `exact`."""
    plain = site.arguments["state_format"] in ("bf16", "fp16")
    return plain and form_of(site.call) is not None and asked is not None and isinstance(asked.write, Exact)


def prefill_policy(node: fx.Node) -> Policy | None:
    """What an earlier rewrite asked of an all-prefix site, whose op rounds nothing and so says nothing of it."""
    saved = (node.meta.get("custom") or {}).get(POLICY)
    return None if saved is None else Policy.from_dict(saved)


def obstacle(site: SiteNode, policy: Policy) -> Reason | None:
    """Why `policy` cannot be carried by this site, if so."""
    if isinstance(policy.write, Exact):
        return None
    if policy.rounding == "stochastic" and (ranks := heads_cut_around(site.node)) > 1:
        return reason("HEADS_CUT", f"over {ranks} ranks")
    if site.proposal is not None and site.proposal.state_dtype is not None:
        return reason("STATE_DTYPE", f"it is rounded to {site.proposal.state_dtype} after every token")
    state = site.arguments["initial_state"]
    if state is not None and (value := value_of(state)) is not None:
        dtype = value.dtype
        if dtype not in (torch.float32, torch.float64):
            return reason("STATE_DTYPE", f"the initial state is {dtype}")
    if (state is not None or site.used(1)) and not policy.rewrites_alike and policy.storage != "packed":
        return reason("DENSE_CACHE", f"the policy is {policy!r}")
    shape_k, shape_v = shape_of(site.arguments["k"]), shape_of(site.arguments["v"])
    if shape_k is not None and shape_v is not None:
        try:
            policy.check_shape(shape_k[-1], shape_v[-1])
        except (FormatError, PolicyError) as error:
            return reason("FORMAT_SHAPE", str(error))
    return None


def _disagreement(site: SiteNode, policy: Policy, recipe: Recipe) -> Reason | None:
    """Several layers run this one node: what the recipe says of one of them must be what it says of all."""
    name = site.id.removeprefix(site.path)
    for path in site.other_paths:
        if recipe.resolve(path + name)[1] != policy:
            return reason("SHARED_REGION", f"{site.path} and {path}")
    return None


def _warn_about_idle_rules(context: PassContext, recipe: Recipe, hit: set[int]) -> None:
    for index, (glob, _) in enumerate(recipe.rules):
        if glob != "*" and index not in hit:
            known = {s.path for s in context.sites} | {left.path for left in context.left_alone}
            paths = ", ".join(sorted(path or "<root>" for path in known))
            context.idle_rules[index] = (
                f"recipe rule {index} ({glob!r}) matched no site of this graph; its sites: {paths}. "
                "Paths are relative to the compiled module; lc.attach(model, recipe) gives them in full."
            )


def _warn_about_missing_phase(context: PassContext) -> None:
    silent = [
        s
        for s in context.sites
        if context.training
        and s.policy is not None
        and s.reason is None
        and not isinstance(s.policy.write, Exact)
        and s.all_prefix
    ]
    if silent:
        context.warnings.append(
            f"training without a phase: {len(silent)} chunk-form site(s) are all prefix, so nothing is quantized. "
            "Wrap the step in lc.training_phase(prefix_lengths)."
        )


def _warn_about_packed_convolutions(context: PassContext) -> None:
    """transformers refuses packed sequences without FLA, for its torch recurrence would mix them. Ours does not, but
    the model's convolution before it still may."""
    packed = [s for s in context.sites if s.call.startswith("transformers.") and s.arguments["cu_seqlens"] is not None]
    if packed:
        context.warnings.append(
            f"{len(packed)} recurrence(s) keep packed sequences (cu_seqlens) apart; the model's short conv before them "
            "is transformers' own, and without the causal_conv1d package it reads across their borders."
        )
