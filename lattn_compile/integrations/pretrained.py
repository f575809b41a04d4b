"""transformers' `save_pretrained` of an attached model: weights without our entry, and `lattn_recipe.json` beside them.

`lc.attach` calls `install` when it meets a model of transformers; nothing here imports that library. The method is
wrapped on the class, once, because an attribute of the instance would be lost by pickling; a model without a recipe
goes straight through.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lattn_compile.attach import attached_recipe, is_root, recipe_elsewhere
from lattn_compile.errors import LattnWarning
from lattn_compile.policy import RECIPE_FILE
from lattn_compile.saved_recipe import is_key

_WRAPPED = "_lattn_wrapped"


def install(cls: type[Any]) -> None:
    """Wrap `cls.save_pretrained` (of `transformers.PreTrainedModel`). Idempotent."""
    original = cls.save_pretrained
    if getattr(original, _WRAPPED, False):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            call = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            return original(self, *args, **kwargs)  # which says what is wrong with the call
        options = {**call, **call.get("kwargs", {})}
        folder = Path(os.fspath(options["save_directory"]))
        roots = [name for name, module in self.named_modules() if is_root(module)]
        if not roots:
            _warn_of_what_is_not_saved(self, folder)
            return original(self, *args, **kwargs)

        if isinstance(state_dict := options.get("state_dict"), Mapping):
            call["state_dict"] = {key: value for key, value in state_dict.items() if not is_key(key)}
            given = {name: call[name] for name in call if name not in ("self", "kwargs")}
            args, kwargs = (), {**given, **call.get("kwargs", {})}
        recipe = attached_recipe(self) if roots == [""] else None
        if recipe is None:
            _warn_of_inner_recipes(roots)
        writes = recipe is not None and _is_writer(self, options.get("is_main_process", True))

        written = False

        def write() -> None:
            nonlocal written
            if recipe is not None and writes:
                recipe.save(folder / RECIPE_FILE)
                written = True

        # While the weights are collected, not only afterwards: `push_to_hub=True` uploads at the end of the call.
        with recipe_elsewhere(write):
            result = original(self, *args, **kwargs)
        if not written and recipe is not None and writes:
            write()
            if options.get("push_to_hub"):
                warnings.warn(
                    f"save_pretrained(push_to_hub=True, state_dict=...): {RECIPE_FILE} was written to {folder}, but "
                    "too late to be uploaded. Upload it by hand, or leave state_dict out.",
                    LattnWarning,
                    stacklevel=2,
                )
        return result

    setattr(save_pretrained, _WRAPPED, True)
    cls.save_pretrained = save_pretrained


def _is_writer(model: Any, is_main_process: bool) -> bool:
    """Whether this process writes files: the newer transformers ask the model, whose shards may be on many ranks."""
    ask = getattr(model, "should_save_on_this_rank", None)
    return bool(is_main_process if ask is None else ask(is_main_process))


def _warn_of_inner_recipes(roots: list[str]) -> None:
    warnings.warn(
        f"save_pretrained: recipes are attached to modules inside this model ({', '.join(r or '<root>' for r in roots)}"
        f"), and {RECIPE_FILE} holds one recipe of a whole model, so none is written. Attach one recipe to the model, "
        "or save its state_dict, which keeps them all.",
        LattnWarning,
        stacklevel=3,
    )


def _warn_of_what_is_not_saved(model: Any, folder: Path) -> None:
    if attached_recipe(model) is not None:
        warnings.warn(
            "save_pretrained: the recipe was attached to a module around this model, whose paths it speaks of, so "
            f"{RECIPE_FILE} is not written. Attach a recipe to the model itself to save it.",
            LattnWarning,
            stacklevel=3,
        )
    if (folder / RECIPE_FILE).is_file():
        warnings.warn(
            f"save_pretrained: {folder} has a {RECIPE_FILE} of an earlier save, and the model now saved there has no "
            "recipe. Delete that file, or attach it to the model.",
            LattnWarning,
            stacklevel=3,
        )
