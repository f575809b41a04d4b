"""`lc.attach`: the recipe lives with the module, and with its checkpoints.

Every submodule is marked with its full path and with a *group* (recipe and policy). The group is a string attribute
that a trace reads, and so guards, on the module it is in: when one compiled artifact serves several layers, as regional
`layer.compile()` does, layers of one group share it and a layer of another group gets its own.

In a state dict the recipe is one more entry (`saved_recipe.py` says of what kind). It has to be in every state dict of
the model, and out of the way of every load. Three mechanisms could carry it:

* `get_extra_state` is looked up on the class, and would have to replace the model's class by one of our own;
* state-dict hooks alone give an entry that is no parameter and no buffer, and tools that walk these to rename or
  broadcast entries (distributed checkpoints of a DDP-wrapped or a compiled model) lose it or trip over it;
* a buffer alone is known to all of those, but a load copies it only into the same size, complains where weights have
  none, and never tells anyone; and `to_empty` leaves garbage in it.

So there is a buffer, which makes the entry an ordinary one, and there are hooks, which are what is believed: saving
writes the entry anew from the recipe, loading takes the recipe out of it and leaves the buffer as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from lattn_compile.errors import LattnError, LattnWarning
from lattn_compile.policy import Policy, Recipe, resolve_recipe
from lattn_compile.recurrence import KINDS
from lattn_compile.saved_recipe import KEY, from_tensor, recipe_in, to_tensor

GROUP = "_lattn_group"  # str, guarded by the trace
PATH = "_lattn_path"  # str, not guarded: layers of one group share a graph
RECIPE = "_lattn_recipe"
ROOT = "_lattn_root"  # on the module that was attached: what undoes it

_compiled_before_attach = False
_attached_anywhere = False


def attach(model: nn.Module, recipe: Recipe | Policy | Mapping[str, Any] | str | os.PathLike[str]) -> nn.Module:
    """Attach a recipe to a model, in place, for `torch.compile(..., backend="lattn_compile")` without options.

    The model's `state_dict()` has the recipe from then on, and so have copies, pickles, distributed checkpoints and
    what transformers' `save_pretrained` writes (`lattn_recipe.json`). `load_state_dict` into an attached model attaches
    the checkpoint's recipe, with a `LattnWarning` if it is another one; weights without a recipe change none. Attach
    before wrapping the model in DDP or FSDP.

    Args:
        model: the module whose submodule paths the recipe's globs speak of.
        recipe: anything `options={"policy": ...}` takes: Recipe, Policy, dict, preset name, path of a recipe's JSON or
            of a folder that `save_pretrained` wrote. Or where an attached model was saved: its state dict, or the path
            of a `torch.save` file, of a safetensors file, or of the folder of a distributed checkpoint. Replaces
            recipes attached before, to the model or inside of it.
    Returns:
        `model`.
    Raises:
        LattnError: `model` is no module. RecipeError, PolicyError, FormatError: the recipe is not valid, or a
            checkpoint has none. FileFormatError: a path that cannot be read.
    """
    _check_module(model)
    resolved = recipe_in(recipe) or resolve_recipe(recipe)
    root = uncompiled(model)
    for module in root.modules():
        if module is not root:
            _no_root(module)
    _warn_about_idle_rules(resolved, _mark(root, resolved))
    _root(root)
    _tell_transformers(root)
    return model


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise LattnError(
            "model", got=type(model).__name__, want="an nn.Module", remedy="Attach to the model, before compiling it."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise LattnError(
            "model",
            got=f"{type(model).__name__}, a module of TorchScript",
            want="a module of Python, which torch.compile traces",
            remedy="Attach to the module that was scripted or traced.",
        )


def detach(model: nn.Module) -> nn.Module:
    """Undo `attach`, and every `attach` to a module inside `model`: no recipe, no entry in state dicts, no hooks.

    Raises:
        LattnError: `model` is no module.
    """
    _check_module(model)
    for module in model.modules():
        _no_root(module)
        for name in (GROUP, PATH, RECIPE):
            module.__dict__.pop(name, None)
    _forget_unattached_artifacts()
    return model


def attached_recipe(model: nn.Module) -> Recipe | None:
    """The recipe attached to `model`, or to a module that it is inside of; None without one."""
    return uncompiled(model).__dict__.get(RECIPE)


def attached_anywhere() -> bool:
    """Whether a recipe was attached in this process: a graph without sites may then be one region of many."""
    return _attached_anywhere


def is_root(module: nn.Module) -> bool:
    """Whether a recipe was attached to this very module."""
    return ROOT in module.__dict__


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(model)` wraps: the recipe is the model's, whichever of the two is at hand."""
    inner = model._modules.get("_orig_mod") if type(model).__name__ == "OptimizedModule" else None
    return model if inner is None else inner


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrapped_path(name: str) -> str:
    """A module's path in `named_modules()` without the parts that wrappers put into the names of what they wrap."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def first_alike(recipe: Recipe, rule: int | None) -> int | None:
    """The number of the first rule that has the policy of that rule. Where code may be shared, rules are told apart by
    what they ask: a calibrated recipe has a rule for almost every layer, and few policies."""
    if rule is None:
        return None
    policies = [policy for _, policy in recipe.rules]
    return policies.index(policies[rule])


def _mark(root: nn.Module, recipe: Recipe) -> set[int | None]:
    """Marks `root` and what is in it, but not what a recipe of its own was attached to. Returns the rules that hit."""
    global _attached_anywhere
    fingerprint, ids = recipe.fingerprint(), _site_names(recipe)
    hit: set[int | None] = set()
    own: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if name.startswith(own):
            continue
        if is_root(module) and module is not root:
            own += (f"{name}.",)
            continue
        path = unwrapped_path(name)
        rules = [recipe.resolve(path + name)[0] for name in ids]
        hit.update(rules)
        asked = [first_alike(recipe, rule) for rule in rules]
        object.__setattr__(module, GROUP, f"{fingerprint}:{asked[0] if len(set(asked)) == 1 else asked}")
        object.__setattr__(module, PATH, path)
        object.__setattr__(module, RECIPE, recipe)
    _forget_unattached_artifacts()
    _attached_anywhere = True
    return hit


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

    Two layers are of one group only if every site of theirs gets the same policy: a rule for one kind that matches both
    paths says nothing about what a site of another kind gets.
    """
    numbers = range(16) if any("#" in glob.replace("#*", "") for glob, _ in recipe.rules) else range(1)
    return [f"/{kind.name}#{n}" for kind in KINDS for n in numbers]


class _Root:
    """What `attach` put on a module beside the marks: the buffer and the hooks. Copies and pickles with the module."""

    def __init__(self, module: nn.Module) -> None:
        # Where the parameters are: a broadcast of a module's tensors wants them on one device.
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        module.register_buffer(KEY, to_tensor(module.__dict__[RECIPE]).to(device))
        self.handles = [
            module.register_state_dict_post_hook(_write_entry),
            module.register_load_state_dict_pre_hook(_read_entry),
        ]

    def remove(self, module: nn.Module) -> None:
        for handle in self.handles:
            handle.remove()
        delattr(module, KEY)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In a process that unpickles a model, nobody has called `attach`.
        self.__dict__.update(state)
        global _attached_anywhere
        _attached_anywhere = True
        if (modeling := sys.modules.get(_MODELING)) is not None:
            _wrap_save_pretrained(modeling.PreTrainedModel)


def _root(module: nn.Module) -> None:
    if not is_root(module):
        object.__setattr__(module, ROOT, _Root(module))


def _no_root(module: nn.Module) -> None:
    root = module.__dict__.pop(ROOT, None)
    if root is not None:
        root.remove(module)


_on_state_dict: ContextVar[Callable[[], None] | None] = ContextVar("lattn_on_state_dict", default=None)


@contextlib.contextmanager
def recipe_elsewhere(write: Callable[[], None]) -> Iterator[None]:
    """Inside, state dicts have no recipe, for a format that keeps it in a file of its own: `write` is called instead,
    whenever a state dict of an attached module is made."""
    token = _on_state_dict.set(write)
    try:
        yield
    finally:
        _on_state_dict.reset(token)


def _write_entry(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    write = _on_state_dict.get()
    if write is None:
        state_dict[prefix + KEY] = to_tensor(module.__dict__[RECIPE])
    else:
        state_dict.pop(prefix + KEY, None)
        write()


def _read_entry(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """The checkpoint's recipe is attached, because its weights were trained for it; that of the model was a guess.

    Raises what cannot be read before any weight is copied.
    """
    key = prefix + KEY
    if key in state_dict:
        saved, mine = from_tensor(state_dict[key], key), module.__dict__[RECIPE]
        if saved != mine:
            _mark(module, saved)
            warnings.warn(
                f"load_state_dict: these weights were saved with another recipe than the attached one. Attached is now "
                f"{_short(saved)}, no longer {_short(mine)}. To keep yours, call lc.attach(model, recipe) after "
                "loading.",
                LattnWarning,
                stacklevel=2,
            )
    # The buffer is loaded with what it holds: another size is no error, and weights without a recipe miss nothing.
    state_dict[key] = getattr(module, KEY).clone()


def _short(recipe: Recipe) -> str:
    rules = [f"{glob}: {'left alone' if policy is None else policy}" for glob, policy in recipe.rules]
    return "{" + "; ".join(rules[:4] + (["..."] if len(rules) > 4 else [])) + "}"


_MODELING = "transformers.modeling_utils"


def _tell_transformers(root: nn.Module) -> None:
    """Where transformers' own saving is concerned: only if it has been imported, for it made the model then."""
    modeling = sys.modules.get(_MODELING)
    if modeling is not None and any(isinstance(m, modeling.PreTrainedModel) for m in root.modules()):
        _wrap_save_pretrained(modeling.PreTrainedModel)


def _wrap_save_pretrained(cls: type[Any]) -> None:
    # By name at call time: what knows another library stands above this module.
    importlib.import_module("lattn_compile.integrations.pretrained").install(cls)


def note_compile_without_recipe() -> None:
    """A trace of an unattached module has no guard on the attribute's absence; the next `attach` must drop it."""
    global _compiled_before_attach
    _compiled_before_attach = True


def _forget_unattached_artifacts() -> None:
    global _compiled_before_attach
    if _compiled_before_attach:
        torch.compiler.reset()
        _compiled_before_attach = False
