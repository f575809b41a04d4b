"""Which policy each site of a model gets: `Recipe`, the presets, and every name that policies are written with.

`modes.py` holds the write modes, `site_policy.py` the `Policy` of one site; both are re-exported here.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lattn_compile.errors import FileFormatError, LattnWarning, PolicyError, RecipeError, nearest
from lattn_compile.formats import Fp8, Fp32, Int8, Nvfp4
from lattn_compile.formats.base import Format
from lattn_compile.modelopt_recipe import translate
from lattn_compile.modes import (
    BlockDoubling,
    Chunk,
    Exact,
    Neumann,
    NewtonSchulz,
    Prefill,
    Replay,
    Token,
    TwoPrecision,
    WriteMode,
)
from lattn_compile.site_policy import Policy
from lattn_compile.strict import check_keys, read_json, strict, write_json

__all__ = [
    "PRESETS",
    "RECIPE_FILE",
    "RECIPE_VERSION",
    "BlockDoubling",
    "Chunk",
    "Exact",
    "Neumann",
    "NewtonSchulz",
    "Policy",
    "Prefill",
    "Recipe",
    "Replay",
    "Token",
    "TwoPrecision",
    "WriteMode",
    "preset",
    "resolve_recipe",
]

PRESETS: Mapping[str, Policy] = MappingProxyType(
    {
        "exact": Policy(Fp32(), write=Exact()),
        "int8": Policy(Int8()),
        "fp8": Policy(Fp8()),
        "int8-replay": Policy(Int8(), write=Replay(8)),
        "fp8-replay": Policy(Fp8(), write=Replay(8)),
        # In token mode nvfp4 grows under slow decay (semantics, numbers to hold); replayed over 16 tokens it does not.
        "nvfp4": Policy(Nvfp4(), write=Replay(16)),
        "fp8-two-precision": Policy(Fp8(), write=TwoPrecision()),
    }
)

RECIPE_FILE = "lattn_recipe.json"
RECIPE_VERSION = 1


@strict(RecipeError)
@dataclass(frozen=True)
class Recipe:
    """Which policy each site of a model gets: `(glob, policy)` rules, of which the first that matches wins.

    A glob is matched by `fnmatch.fnmatchcase` against a site's path (`model.layers.3.linear_attn`) and against its id
    (`model.layers.3.linear_attn/gdn#0`): case counts, `*` matches any characters (dots and slashes too), `?` one, and
    `[0-3]` one of a range. `"*/kda#*"` therefore means all KDA sites. A policy may be given as a preset's name; None
    leaves the site alone, as if there were no backend.

        Recipe(rules=[("model.layers.[0-3].*", "exact"), ("model.layers.*.linear_attn", Policy(Int8())), ("*", None)])

    Raises:
        RecipeError: rules of another shape. PolicyError: a name that is no preset.
    """

    rules: tuple[tuple[str, Policy | None], ...]

    if TYPE_CHECKING:  # what the constructor takes is wider than what it keeps

        def __init__(self, rules: Iterable[tuple[str, Policy | str | None]]) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.rules, str | Mapping) or not isinstance(self.rules, Iterable):
            raise _not_rules(repr(self.rules))
        object.__setattr__(self, "rules", tuple(_rule(i, r) for i, r in enumerate(self.rules)))

    def resolve(self, site: str) -> tuple[int | None, Policy | None]:
        """The first rule that matches a site, as `(index, policy)`.

        `(None, None)`: no rule matches. `(i, None)`: rule i leaves the site alone. `site` is the site's id; given a
        bare path, which tells no kind, a rule for one kind (`"*/kda#*"`) is judged by the part before its slash.

        Raises:
            RecipeError: no such id.
        """
        if not isinstance(site, str):
            raise RecipeError(
                "site",
                got=repr(site),
                want="a site's id, or a module's path",
                remedy="A report lists the ids of sites.",
            )
        path, slash, _ = site.partition("/")
        for index, (glob, policy) in enumerate(self.rules):
            other = fnmatch.fnmatchcase(path, glob if slash else glob.partition("/")[0])
            if other or fnmatch.fnmatchcase(site, glob):
                return index, policy
        return None, None

    def require_built(self) -> None:
        """`Policy.require_built` for every rule; the error names the rule."""
        for index, (glob, policy) in enumerate(self.rules):
            if policy is not None:
                policy.require_built(f"rules[{index}] ({glob!r})")

    def fingerprint(self) -> str:
        """A hash of the content, the same in every process: what a compile cache may be keyed by."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: `{"version": 1, "rules": [{"match": glob, "policy": {...} or null}, ...]}`."""
        rules = [{"match": g, "policy": None if p is None else p.to_dict()} for g, p in self.rules]
        return {"version": RECIPE_VERSION, "rules": rules}

    @classmethod
    def from_dict(cls, data: object) -> Recipe:
        """The recipe that `to_dict` wrote.

        Raises:
            RecipeError: another version, an unknown key, a rule of another shape.
            PolicyError, FormatError: a rule's policy is not valid.
        """
        if not isinstance(data, Mapping):
            raise RecipeError("recipe", got=repr(data), want="a dict with version and rules", remedy=_RECIPE_REMEDY)
        # The version comes first: a newer file's unknown keys are news of the version, not spelling mistakes.
        version = data.get("version")
        if type(version) is not int or version != RECIPE_VERSION:
            newer = type(version) is int and version > RECIPE_VERSION
            raise RecipeError(
                "version",
                got=repr(version) if "version" in data else "a recipe without it",
                want=f"{RECIPE_VERSION}, the version of recipes that this lattn_compile reads",
                remedy="Upgrade lattn_compile: this recipe was written by a newer one." if newer else _RECIPE_REMEDY,
            )
        check_keys(RecipeError, "a recipe", data, ("version", "rules"))
        rules = data.get("rules")
        if not isinstance(rules, list | tuple):
            raise _not_rules(repr(rules))
        pairs = []
        for index, rule in enumerate(rules):
            if not isinstance(rule, Mapping) or "match" not in rule or "policy" not in rule:
                raise RecipeError(
                    f"rules[{index}]",
                    got=repr(rule),
                    want='{"match": glob, "policy": {...} or null}',
                    remedy="Give the rule both keys; null leaves its sites alone.",
                )
            check_keys(RecipeError, f"rules[{index}]", rule, ("match", "policy"))
            policy = rule["policy"]
            pairs.append((rule["match"], Policy.from_dict(policy) if isinstance(policy, Mapping) else policy))
        return cls(rules=tuple(pairs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, or to `lattn_recipe.json` in it if it is a folder."""
        target = _path(path)
        target = target / RECIPE_FILE if target.is_dir() else target
        write_json(target, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read what `save` wrote; of a folder, `lattn_recipe.json` in it.

        Raises:
            FileFormatError: no such file, or not JSON. RecipeError, PolicyError, FormatError: not a valid recipe.
        """
        source = _path(path)
        return cls.from_dict(read_json(source / RECIPE_FILE if source.is_dir() else source))

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Recipe:
        """The recipe that lies beside a model's weights: `lattn_recipe.json` in the local folder `path`.

        Raises:
            FileFormatError: no such folder, or no recipe in it.
        """
        if not _path(path).is_dir():
            raise FileFormatError(
                "path",
                got=repr(os.fspath(path)),
                want="a local folder that a model was saved to",
                remedy="For a model on a hub, pass the folder that huggingface_hub.snapshot_download returns.",
            )
        return cls.load(Path(path) / RECIPE_FILE)

    @classmethod
    def from_modelopt(cls, cfg: object) -> Recipe:
        """Read the `quant_cfg` / `linear_attention` dictionaries of a Model Optimizer recipe.

        What has no effect on a recurrence's state (weight quantizers, calibration, ...) is named in one `LattnWarning`;
        what a `Policy` cannot express is refused by name, because the numbers would be others than asked for.

        Raises:
            RecipeError: a setting that cannot be carried over, or nothing about a recurrence's state.
        """
        data, notes = translate(cfg)
        if notes:
            warnings.warn(
                "Recipe.from_modelopt does not carry over: " + "; ".join(notes) + ".", LattnWarning, stacklevel=2
            )
        return cls.from_dict(data)


_RECIPE_REMEDY = f'A recipe looks like {{"version": {RECIPE_VERSION}, "rules": [{{"match": "*", "policy": "int8"}}]}}.'


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise FileFormatError("path", got=repr(path), want="a path", remedy="A str, or a pathlib.Path.")
    return Path(path)


def _not_rules(got: str) -> RecipeError:
    return RecipeError(
        "rules",
        got=got,
        want="a list of (glob, policy) pairs",
        remedy='For one policy everywhere: rules=[("*", policy)].',
    )


def _rule(index: int, rule: object) -> tuple[str, Policy | None]:
    if not isinstance(rule, list | tuple) or len(rule) != 2:
        raise _not_rules(f"rules[{index}] = {rule!r}")
    glob, policy = rule
    if not isinstance(glob, str) or not glob:
        raise RecipeError(
            f"rules[{index}]", got=repr(glob), want="a glob of a site's path", remedy='"*" matches every site.'
        )
    if isinstance(policy, str):
        policy = preset(policy, f"rules[{index}]")
    if policy is not None and not isinstance(policy, Policy):
        raise RecipeError(
            f"rules[{index}] ({glob!r})",
            got=repr(policy),
            want="a Policy, a preset's name, or None",
            remedy="None leaves the site alone.",
        )
    return glob, policy


def preset(name: str, argument: str) -> Policy:
    """The preset of that name. PolicyError, which names the `argument`, where there is none."""
    if name in PRESETS:
        return PRESETS[name]
    raise PolicyError(
        argument,
        got=repr(name),
        want=f"a preset: {', '.join(PRESETS)}",
        remedy=f"Correct the name, or build a Policy.{nearest(name, PRESETS)}",
    )


def as_policy(policy: object, argument: str) -> Policy:
    """A policy, or the preset of that name. PolicyError, which names the `argument`, for anything else."""
    if isinstance(policy, str):
        return preset(policy, argument)
    if not isinstance(policy, Policy):
        raise PolicyError(
            argument,
            got=repr(policy),
            want="a Policy, or a preset's name",
            remedy="One site has one policy: recipe.resolve(path)[1] is what a recipe has for it.",
        )
    return policy


def resolve_recipe(policy: object, argument: str = "policy") -> Recipe:
    """Whatever a `policy=` option may be, as a `Recipe`.

    Args:
        policy: a `Recipe`; a `Policy`, the dict of one or a preset's name (for every site); the dict of a recipe; the
            path of a recipe's JSON file or of the folder it lies in; None (exact for every site).
        argument: the option's name, for errors.

    Raises:
        PolicyError, RecipeError, FormatError, FileFormatError: it is none of these, or not a valid one.
    """
    if isinstance(policy, Recipe):
        return policy
    if policy is None:
        policy = PRESETS["exact"]
    elif isinstance(policy, Mapping):
        if "rules" in policy or "version" in policy:
            return Recipe.from_dict(policy)
        policy = Policy.from_dict(policy)
    elif isinstance(policy, os.PathLike) or (isinstance(policy, str) and _looks_like_path(policy)):
        return Recipe.from_pretrained(policy) if Path(policy).is_dir() else Recipe.load(policy)
    elif isinstance(policy, str):
        policy = preset(policy, argument)
    if not isinstance(policy, Policy):
        remedy = "Start from a preset: " + ", ".join(PRESETS) + "."
        if isinstance(policy, Format):
            remedy = f"A format is a part of a policy: lc.Policy(lc.{type(policy).__name__}(...), write=...)."
        raise RecipeError(
            argument,
            got=repr(policy),
            want="a Recipe, a Policy, a dict, a preset's name or the path of a recipe's JSON file",
            remedy=remedy,
        )
    return Recipe(rules=(("*", policy),))


def _looks_like_path(text: str) -> bool:
    # A preset's name wins over a file of the same name: what a recipe means must not depend on the working directory.
    return text not in PRESETS and (text.endswith(".json") or "/" in text or os.sep in text or os.path.exists(text))
