"""A recipe inside a checkpoint: one entry of a state dict, and where to find it again.

The entry is the recipe's JSON, the same as in `lattn_recipe.json`, as a uint8 tensor `[n]`. A tensor, because every
road that weights take carries one: `torch.save` with `weights_only=True`, safetensors, distributed checkpoints, and the
broadcasts in between; a dict or a string is refused by some of them. UTF-8 JSON, because it can then be read with
nothing but `bytes(t.tolist()).decode()`. Padded with spaces, because a distributed checkpoint is read into a tensor of
the same size, which the recipe that a model happens to have now should not decide.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import FileFormatError, LattnError, RecipeError, UnsupportedError
from lattn_compile.policy import RECIPE_FILE, Recipe

__all__ = ["KEY", "from_tensor", "is_key", "recipe_in", "to_tensor"]

# In torch's own words: Unexpected key(s) in state_dict: "lattn_recipe__lc_attach_before_load_state_dict". No dot may be
# in it: distributed checkpoints walk a key's parts as attributes of the model.
KEY = "lattn_recipe__lc_attach_before_load_state_dict"
SIZE = 16384  # bytes; recipes beyond it (some 40 rules) take the next power of two

_REMEDY = "Save it again from a model that lc.attach gave its recipe, or attach the recipe by hand."


def is_key(name: object) -> bool:
    """Whether a state dict's key is a recipe's, of the saved module itself or of one inside it."""
    return isinstance(name, str) and (name == KEY or name.endswith("." + KEY))


def to_tensor(recipe: Recipe) -> Tensor:
    """The recipe as uint8 `[n]` on the CPU, n a power of two."""
    text = json.dumps(recipe.to_dict(), separators=(",", ":"), allow_nan=False).encode()
    size = max(SIZE, 1 << (len(text) - 1).bit_length())
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)


def from_tensor(value: object, key: str = KEY) -> Recipe:
    """The recipe that `to_tensor` wrote; `key` is for errors.

    Raises:
        RecipeError: not such a tensor, another version, an unknown key. PolicyError, FormatError: a policy in it is
            not valid here.
    """
    if not isinstance(value, Tensor) or value.dtype is not torch.uint8 or value.dim() != 1 or value.is_meta:
        what = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise _unreadable(key, what)
    try:
        data = json.loads(bytes(value.tolist()).decode())
    except ValueError as error:
        raise _unreadable(key, f"bytes that are not JSON ({error})") from error
    try:
        return Recipe.from_dict(data)
    except LattnError as error:
        error.add_note(f"This was read from state_dict[{key!r}].")
        raise


def _unreadable(key: str, got: str) -> RecipeError:
    return RecipeError(
        f"state_dict[{key!r}]", got=got, want="a recipe's JSON in a uint8 tensor [n] with values", remedy=_REMEDY
    )


def recipe_in(source: object) -> Recipe | None:
    """The recipe in a state dict, or in a file or folder of weights; None if `source` is nothing of the kind.

    Args:
        source: a state dict, or a dict of state dicts; the path of a `torch.save` or safetensors file; a folder that
            holds safetensors files or a distributed checkpoint, and no `lattn_recipe.json` (which is the caller's).
    Raises:
        RecipeError: weights without a recipe, or with several that differ. As `from_tensor`.
        FileFormatError: a file that cannot be read. UnsupportedError: safetensors is not installed.
    """
    if isinstance(source, Mapping):
        return _in_mapping(source, "recipe")
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_file() and path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
            return _in_mapping(_torch_load(path), str(path)) or _missing(str(path))
        if path.is_file() and path.suffix == ".safetensors":
            return _in_safetensors([path])
        if path.is_dir() and not (path / RECIPE_FILE).exists():
            if (path / ".metadata").is_file():
                return _in_distributed(path)
            if files := sorted(path.glob("*.safetensors")):
                return _in_safetensors(files)
    return None


def _in_mapping(state_dict: Mapping[Any, Any], where: str) -> Recipe | None:
    nested = [v for v in state_dict.values() if isinstance(v, Mapping)]
    if any(is_key(k) for k in state_dict):
        return _one(((k, from_tensor(v, k)) for k, v in state_dict.items() if is_key(k)), where)
    for inner in nested:
        if any(is_key(k) for k in inner):
            return _in_mapping(inner, where)
    # What else may be given is the dict of a recipe or of a policy, and those hold no tensors.
    if any(isinstance(v, Tensor) for d in (state_dict, *nested) for v in d.values()):
        return _missing(where)
    return None


def _one(found: Iterable[tuple[str, Recipe]], where: str) -> Recipe:
    recipes = dict(found)
    if len(set(recipes.values())) > 1:
        raise RecipeError(
            where,
            got=f"recipes that differ, {', '.join(recipes)}",
            want="one recipe",
            remedy="Attach each to its own module, given the part of the state dict that is that module's.",
        )
    return next(iter(recipes.values()))


def _missing(where: str) -> Recipe:
    raise RecipeError(
        where,
        got=f"weights without the entry {KEY!r}",
        want="a state dict of a model that lc.attach gave a recipe",
        remedy="Attach a Recipe, a Policy or a preset's name; weights saved before lc.attach have none.",
    )


def _torch_load(path: Path) -> Mapping[Any, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise FileFormatError(
            "recipe",
            got=f"{str(path)!r}, which cannot be read ({str(error).splitlines()[0]})",
            want="a state dict that torch.save wrote",
            remedy="Load it yourself and pass its state dict.",
        ) from error
    if not isinstance(loaded, Mapping):
        raise FileFormatError(
            "recipe",
            got=f"{str(path)!r} with a {type(loaded).__name__}",
            want="a state dict",
            remedy="Load it yourself and pass its state dict.",
        )
    return loaded


def _in_safetensors(files: list[Path]) -> Recipe:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise UnsupportedError(
            "recipe",
            got="a .safetensors file, and safetensors is not installed",
            want="safetensors",
            remedy="Install it with: pip install safetensors",
        ) from error
    found: dict[str, Recipe] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                tensors = {name: weights.get_tensor(name) for name in weights.keys() if is_key(name)}  # noqa: SIM118
        except Exception as error:
            raise FileFormatError(
                "recipe",
                got=f"{str(file)!r}, which cannot be read ({error})",
                want="a safetensors file",
                remedy="Check the file.",
            ) from error
        found |= {name: from_tensor(tensor, name) for name, tensor in tensors.items()}
    where = str(files[0] if len(files) == 1 else files[0].parent)
    return _one(found.items(), where) if found else _missing(where)


def _in_distributed(folder: Path) -> Recipe:
    from torch.distributed import checkpoint

    reader = checkpoint.FileSystemReader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise FileFormatError(
            "recipe",
            got=f"{str(folder)!r}, whose .metadata cannot be read ({(str(error) or repr(error)).splitlines()[0]})",
            want="a distributed checkpoint",
            remedy="Load it yourself and pass its state dict.",
        ) from error
    target = {name: torch.empty(entry.size, dtype=torch.uint8) for name, entry in entries.items() if is_key(name)}  # type: ignore[union-attr]
    if not target:
        return _missing(str(folder))
    # Every rank reads it for itself: it is small, and attaching is no collective call.
    checkpoint.load(target, storage_reader=reader, no_dist=True)  # type: ignore[arg-type]
    return _one(((name, from_tensor(tensor, name)) for name, tensor in target.items()), str(folder))
