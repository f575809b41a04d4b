"""`lc.attach`: the recipe lives with the module.

Every submodule is marked with its full path and with a *group* (recipe and rule). The group is a string attribute that
a trace reads, and so guards, on the module it is in: when one compiled artifact serves several layers, as regional
`layer.compile()` does, layers of one group share it and a layer of another group gets its own.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from lattn_compile.errors import LattnError, LattnWarning
from lattn_compile.policy import Policy, Recipe, resolve_recipe
from lattn_compile.recurrence import KINDS

GROUP = "_lattn_group"  # str, guarded by the trace
PATH = "_lattn_path"  # str, not guarded: layers of one group share a graph
RECIPE = "_lattn_recipe"

_compiled_before_attach = False
_attached_anywhere = False


def attach(model: nn.Module, recipe: Recipe | Policy | dict[str, Any] | str) -> nn.Module:
    """Attach a recipe to a model, in place, for `torch.compile(..., backend="lattn_compile")` without options.

    Args:
        model: the module whose submodule paths the recipe's globs speak of.
        recipe: anything `options={"policy": ...}` takes. Replaces a recipe attached before.
    Returns:
        `model`.
    Raises:
        LattnError: `model` is no module. RecipeError, PolicyError: the recipe is not valid.
    """
    if not isinstance(model, nn.Module):
        raise LattnError(
            "model", got=type(model).__name__, want="an nn.Module", remedy="Attach to the model, before compiling it."
        )
    resolved = resolve_recipe(recipe)
    fingerprint, ids = resolved.fingerprint(), _site_names(resolved)
    hit: set[int | None] = set()
    for name, module in model.named_modules():
        path = name.replace("_orig_mod.", "").removesuffix("_orig_mod")
        rules = [resolved.resolve(path + name)[0] for name in ids]
        hit.update(rules)
        object.__setattr__(module, GROUP, f"{fingerprint}:{rules[0] if len(set(rules)) == 1 else rules}")
        object.__setattr__(module, PATH, path)
        object.__setattr__(module, RECIPE, resolved)
    _warn_about_idle_rules(resolved, hit)
    _forget_unattached_artifacts()
    global _attached_anywhere
    _attached_anywhere = True
    return model


def attached_anywhere() -> bool:
    """Whether a recipe was attached in this process: a graph without sites may then be one region of many."""
    return _attached_anywhere


def _warn_about_idle_rules(recipe: Recipe, hit: set[int | None]) -> None:
    """All module names are known here: a rule that can never apply is said once, not by every region's compile."""
    for index, (glob, _) in enumerate(recipe.rules):
        if glob != "*" and index not in hit:
            warnings.warn(
                f"recipe rule {index} ({glob!r}) matches no module of the attached model, or only such as an earlier "
                "rule takes",
                LattnWarning,
                stacklevel=3,
            )


def _site_names(recipe: Recipe) -> list[str]:
    """What follows a module's path in the ids of its sites, as far as the recipe's globs can tell them apart.

    Two layers are of one group only if every site of theirs gets the same rule: a rule for one kind that matches both
    paths says nothing about which rule a site of another kind gets.
    """
    numbers = range(16) if any("#" in glob.replace("#*", "") for glob, _ in recipe.rules) else range(1)
    return [f"/{kind.name}#{n}" for kind in KINDS for n in numbers]


def detach(model: nn.Module) -> nn.Module:
    """Undo `attach`."""
    for module in model.modules():
        for name in (GROUP, PATH, RECIPE):
            module.__dict__.pop(name, None)
    _forget_unattached_artifacts()
    return model


def attached_recipe(model: nn.Module) -> Recipe | None:
    """The recipe attached to `model` or None."""
    return model.__dict__.get(RECIPE)


def note_compile_without_recipe() -> None:
    """A trace of an unattached module has no guard on the attribute's absence; the next `attach` must drop it."""
    global _compiled_before_attach
    _compiled_before_attach = True


def _forget_unattached_artifacts() -> None:
    global _compiled_before_attach
    if _compiled_before_attach:
        torch.compiler.reset()
        _compiled_before_attach = False
