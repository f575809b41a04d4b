"""Model Optimizer's `quant_cfg`, read for the quantizers of a recurrence: which are on, where, and in what format.

Entries are applied in order and the last one wins; an entry with `cfg` replaces all attributes set before, one with
only `enable` flips a switch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from lattn_compile.errors import RecipeError
from lattn_compile.strict import check_keys

__all__ = ["KINDS", "Entry", "Layer", "entries", "format_of", "layers", "refuse"]

KINDS = ("gdn", "kda")

# Attributes of a quantizer that must stay as they are by default: each other value gives other numbers or gradients.
FIXED = {
    "unsigned": False,
    "fake_quant": True,
    "pass_through_bwd": True,
    "rotate": False,
    "bias": None,
    "backend": None,
    "use_constant_amax": False,
    "learn_amax": False,
}
# Without a meaning for dynamic quantization of a state.
IDLE = ("narrow_range", "calibrator", "trt_high_precision_dtype", "backend_extra_args")

SEQUENCE = "<quantizers in sequence>"


def refuse(argument: str, got: str, want: str, remedy: str) -> NoReturn:
    raise RecipeError(argument, got=got, want=want, remedy=remedy)


@dataclass(frozen=True)
class Entry:
    """One entry of `quant_cfg`. `attributes` is None where it only flips the switch."""

    glob: str
    attributes: Mapping[str, Any] | None
    enable: bool
    parent: str | None = None


@dataclass(frozen=True)
class Layer:
    """One quantizer's setting for the sites that `glob` matches; later layers cover earlier ones."""

    glob: str
    attributes: Mapping[str, Any] | None
    enabled: bool


def entries(quant_cfg: object, notes: list[str]) -> list[Entry]:
    """The entries in order. Enabled ones that mean none of a recurrence's quantizers are named in `notes`."""
    found: list[Entry] = []
    if isinstance(quant_cfg, Mapping):  # the older form: {glob: attributes with enable}
        for glob, value in quant_cfg.items():
            if isinstance(value, Mapping | list) and not str(glob).startswith("nn."):
                found.append(_entry(f"quant_cfg[{glob!r}]", "*" if glob == "default" else str(glob), value, None))
            else:
                notes.append(f"quant_cfg[{glob!r}]")
    elif isinstance(quant_cfg, list | tuple):
        for index, value in enumerate(quant_cfg):
            where = f"quant_cfg[{index}]"
            glob = value.get("quantizer_name", value.get("quantizer_path")) if isinstance(value, Mapping) else None
            if not isinstance(glob, str):
                refuse(where, repr(value), "a dict with quantizer_name", "Name the quantizers by a glob.")
            check_keys(RecipeError, where, value, ("quantizer_name", "quantizer_path", "parent_class", "cfg", "enable"))
            found.append(_entry(where, glob, value.get("cfg"), value.get("enable"), value.get("parent_class")))
    elif quant_cfg is not None:
        refuse("quant_cfg", repr(quant_cfg), "a list of entries, or a dict of globs", "Pass what mtq.quantize takes.")
    ours = [f"{kind}_{role}_quantizer" for kind in KINDS for role in ("state", "read", "w")]
    for entry in found:
        foreign = not any(_sites(entry.glob, name) for name in ours) and "linear_attn_sites" not in entry.glob
        if entry.enable and foreign:
            notes.append(f"quant_cfg[{entry.glob!r}] (not a recurrence's state)")
    return found


def _entry(where: str, glob: str, cfg: object, enable: object, parent: str | None = None) -> Entry:
    if isinstance(cfg, list):  # quantizers in sequence: refused only if this entry turns out to mean a state
        cfg = {SEQUENCE: cfg}
    if cfg is not None and not isinstance(cfg, Mapping):
        refuse(where, repr(cfg), "a dictionary of quantizer attributes", "Pass what mtq.quantize takes.")
    attributes = {str(k): v for k, v in (cfg or {}).items()}
    inner = attributes.pop("enable", True)
    for switch in (enable, inner):
        if switch not in (True, False, None):
            refuse(where, f"enable={switch!r}", "true or false", "Write a truth value.")
    return Entry(glob, attributes or None, enable is not False and inner is not False, parent)


def _sites(glob: str, quantizer: str) -> list[str]:
    """Globs of the site paths `P` for which `glob` matches the quantizer `P.quantizer`; ["?"] if that is not clear."""
    # A character that no glob spells: only a wildcard can have matched it, and then any path does.
    if all(fnmatch.fnmatchcase(f"{path}.{quantizer}", glob) for path in ("\0", "\0" * 5)):
        return ["*"]
    if glob.endswith(quantizer):
        head = glob[: -len(quantizer)]
        if head.endswith("."):
            return [head[:-1]]
        if head.endswith(".*"):
            return [head[:-2], head]
        return [head] if head.endswith("*") else []
    tail = re.split(r"[*?\]]", glob)[-1]
    return ["?"] if tail != glob and f".{quantizer}".endswith(tail) else []


def layers(found: Sequence[Entry], quantizer: str, notes: list[str]) -> list[Layer]:
    """The quantizer's settings after all entries, that of every site first. A state's quantizers start disabled."""
    stack = [Layer("*", None, False)]
    for entry in found:
        for site in _sites(entry.glob, quantizer):
            if site == "?":
                notes.append(f"quant_cfg[{entry.glob!r}] (by path: add a rule of your own if it means a recurrence)")
            elif entry.parent is not None:
                if entry.glob.endswith(quantizer):
                    refuse("parent_class", repr(entry.parent), "none on a state quantizer", "Select sites by path.")
            elif site == "*" and entry.attributes is not None:
                stack = [Layer("*", entry.attributes, entry.enable)]
            elif site == "*":
                stack = [replace(layer, enabled=entry.enable) for layer in stack]
            else:
                below = next(x for x in reversed(stack) if x.glob == site or fnmatch.fnmatchcase(site, x.glob))
                stack.append(Layer(site, entry.attributes or below.attributes, entry.enable))
    while len(stack) > 1 and not any(layer.enabled for layer in stack[:2]):
        del stack[1]
    return stack


def format_of(name: str, attributes: Mapping[str, Any] | None, block_v: object, notes: list[str]) -> dict[str, Any]:
    """The state format, as a dictionary, of a quantizer's attributes; `block_v` tiles those without block sizes."""
    attributes = attributes or {}
    if SEQUENCE in attributes:
        refuse(name, "quantizers in sequence", "a single one", "Give its cfg as one dictionary.")
    check_keys(RecipeError, name, attributes, ("num_bits", "axis", "type", "block_sizes", *FIXED, *IDLE))
    for key, usual in FIXED.items():
        value = attributes.get(key, usual)
        value = value.get("enable", True) if key == "rotate" and isinstance(value, Mapping) else value
        if value is not None and value is not usual:
            refuse(f"{name}.{key}", repr(value), f"{usual!r}", "A policy has no other.")
    bits = _tuple(attributes.get("num_bits", 8))
    fmt = {"8": "int8", "(4, 3)": "fp8_e4m3", "(2, 1)": "nvfp4"}.get(repr(bits))
    if fmt is None:
        refuse(f"{name}.num_bits", repr(bits), "8, (4, 3) or (2, 1)", "The formats are int8, fp8_e4m3 and nvfp4.")
    sizes = attributes.get("block_sizes") or {}
    if not isinstance(sizes, Mapping):
        refuse(f"{name}.block_sizes", repr(sizes), "a dictionary of axes and sizes", "For example {-1: 32}.")
    blocks = {str(k): v for k, v in sizes.items()}
    if "dynamic" not in (attributes.get("type"), blocks.pop("type", None)):
        refuse(f"{name}.type", repr(attributes.get("type", "static")), "'dynamic'", "A policy has no static scales.")
    scale_bits = _tuple(blocks.pop("scale_bits", None))
    if fmt == "nvfp4":
        if list(blocks.items()) not in ([("-1", 16)], [("-2", 16)]) or scale_bits not in (None, (4, 3)):
            refuse(f"{name}.block_sizes", repr(sizes), "blocks of 16 with scale_bits (4, 3)", "nvfp4 has no others.")
        notes.append(
            f"{name}.block_sizes={sizes!r} as such (here a block is 16 key channels of one value column, and 64 columns"
            " of a head share the outer scale)"
        )
        return {"format": fmt}
    if scale_bits is not None or not set(blocks) <= {"-1", "-2"}:
        refuse(f"{name}.block_sizes", repr(sizes), "sizes of the axes -1 and -2", "Drop the rest.")
    if blocks:
        # ModelOpt has a scale for each index of an axis that has no block size.
        return {"format": fmt, "block_v": blocks.get("-1", 1), "block_k": blocks.get("-2", 1)}
    axis = _tuple(attributes.get("axis"))
    if axis != (0, 1):
        refuse(f"{name}.axis", repr(axis), "(0, 1): scales for each sequence and head", "Or give block_sizes.")
    return {"format": fmt, "block_v": block_v, "block_k": None}


def _tuple(value: object) -> object:
    # JSON has no tuples.
    return tuple(value) if isinstance(value, list) else value
