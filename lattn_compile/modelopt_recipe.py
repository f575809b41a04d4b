"""Model Optimizer recipes read as ours: dictionaries in, the dictionary of a `Recipe` out.

Written after the public configuration of NVIDIA Model Optimizer's linear-attention state quantization: the nested form
(`state.block_v`, `decode.mode`, `decode.replay.window`) and the flat one that followed (`state_block_v`,
`replay_window`). Three rules of that configuration shape this file: entries of `quant_cfg` are applied in order and the
last one wins; an entry with `cfg` replaces everything set before, one with only `enable` flips a switch; the last
matching entry of `linear_attention` replaces the others as a whole. Our recipes are read from the top, so the order
turns around.

Nothing is approximated in silence. A setting that changes a recurrence's numbers and has no counterpart raises a
`RecipeError` that names it; what does not concern the recurrence is returned as a note that names it.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lattn_compile.errors import RecipeError, nearest
from lattn_compile.modelopt_quantizers import KINDS, Layer, format_of, layers, refuse
from lattn_compile.modelopt_quantizers import entries as entries_of
from lattn_compile.strict import check_keys

__all__ = ["translate"]

EXACT: dict[str, Any] = {"state": {"format": "fp32"}, "write": {"mode": "exact"}}

# Further quantizers of the recurrence itself: operands of the prefill.
_MATMULS = ("key_interaction", "wy_value", "wy_key", "state_read", "state_update", "output_state", "output_score")
OPERAND_QUANTIZERS = (
    "gdn_w_quantizer",
    "kda_w_quantizer",
    *(f"linear_attn_sites.{m}.{side}_quantizer" for m in (*_MATMULS, "output_value") for side in ("lhs", "rhs")),
)


def translate(cfg: object) -> tuple[dict[str, Any], list[str]]:
    """The dictionary of a recipe, and what it does not carry over, by name.

    Args:
        cfg: the dictionary with `quant_cfg` and `linear_attention`, also inside a recipe file's `quantize`, or an
            object whose `model_dump()` returns it.

    Raises:
        RecipeError: a setting without a counterpart, or no setting about a recurrence's state.
    """
    cfg = cfg.model_dump() if hasattr(cfg, "model_dump") else cfg
    if isinstance(cfg, Mapping) and "quantize" in cfg:
        cfg = cfg["quantize"]
    if not isinstance(cfg, Mapping) or not {"quant_cfg", "linear_attention"} & set(cfg):
        refuse("cfg", repr(cfg), "a dictionary with quant_cfg or linear_attention", "Pass what mtq.quantize takes.")
    notes = [str(k) for k in cfg if k not in ("quant_cfg", "linear_attention", "algorithm")]
    if cfg.get("algorithm") not in (None, "max"):
        notes.append(f"algorithm={cfg['algorithm']!r} (state scales are dynamic: there is nothing to calibrate)")

    entries = entries_of(cfg.get("quant_cfg"), notes)
    for name in OPERAND_QUANTIZERS:
        if any(layer.enabled for layer in layers(entries, name, [])):
            refuse(name, "enabled", "it disabled", "Set operands of the prefill with Policy(prefill=Prefill(...)).")
    schedules = _schedules(cfg.get("linear_attention"), notes)

    rules: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    control = True
    for kind in KINDS:
        states = layers(entries, f"{kind}_state_quantizer", notes)
        reads = layers(entries, f"{kind}_read_quantizer", notes)
        if any(layer.enabled for layer in (*states, *reads)):
            control = False
            rules[kind] = _rules(kind, schedules, states, reads, notes)
    if control:
        if cfg.get("linear_attention") is None:
            refuse("quant_cfg", "no enabled state quantizer", "one, such as *gdn_state_quantizer", "Enable it.")
        # Every state quantizer off under an explicit policy is the exact control run.
        rules = {"": [(glob, {**EXACT, **s.common()}) for glob, s in reversed(schedules)]}
    elif len(rules) == len(KINDS) and rules["gdn"] == rules["kda"]:
        rules = {"": rules["gdn"]}
    flat = [(f"{g}/{kind}#*" if kind else g, policy) for kind, pairs in rules.items() for g, policy in pairs]
    data = {"version": 1, "rules": [{"match": g, "policy": p} for g, p in dict(flat).items()]}
    return data, list(dict.fromkeys(notes))


# --- linear_attention: when the state is rounded


@dataclass(frozen=True)
class _Schedule:
    """One execution policy of `linear_attention`."""

    mode: str = "chunk"
    window: int = 1
    factors: str | None = None
    readout: str = "before_write"
    block_v: int = 64
    kernel: str = "auto"
    prefill: Mapping[str, Any] | None = None

    def common(self) -> dict[str, Any]:
        return {"kernel": self.kernel, **({} if self.prefill is None else {"prefill": dict(self.prefill)})}


def _schedules(rules: object, notes: list[str]) -> list[tuple[str, _Schedule]]:
    if rules is None:
        return [("*", _Schedule())]
    if not isinstance(rules, list | tuple) or not rules:
        refuse("linear_attention", repr(rules), "a list of {module_name, cfg}", "Leave the key out for the default.")
    schedules = []
    for index, rule in enumerate(rules):
        where = f"linear_attention[{index}]"
        if not isinstance(rule, Mapping) or not isinstance(rule.get("module_name"), str):
            refuse(where, repr(rule), "a dict with module_name and cfg", "Name the modules by a glob.")
        check_keys(RecipeError, where, rule, ("module_name", "cfg"))
        schedules.append((rule["module_name"], _schedule(f"{where}.cfg", rule.get("cfg") or {}, notes)))
    return schedules


class _Settings:
    """A dictionary from which settings are taken one by one; what is left in the end is unknown."""

    def __init__(self, where: str, data: object) -> None:
        if not isinstance(data, Mapping):
            refuse(where, repr(data), "a dictionary", "Pass the settings by name.")
        self.where, self.left = where, dict(data)
        self.known: list[str] = []

    def take(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The setting `key`; without `allowed`, any value."""
        self.known.append(key)
        value = self.left.pop(key, default)
        if allowed and not any(type(value) is type(a) and value == a for a in allowed):
            hint = nearest(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else ""
            want = " or ".join(repr(a) for a in allowed)
            refuse(f"{self.where}.{key}", repr(value), want, f"A policy has no other.{hint}")
        return value

    def end(self) -> None:
        check_keys(RecipeError, self.where, self.left, self.known)


def _schedule(where: str, cfg: object, notes: list[str]) -> _Schedule:
    top = _Settings(where, cfg)
    version = top.take("schema_version", None, 1, 2, 3)
    top.take("backend", "fla", "matmul", "serving", default="fla")
    precision = top.take("precision", None, "full", "vllm", "vllm_0_15", "vllm_kimi_k3")
    top.take("chunk_size", 64, default=64)
    for key in ("matmul", "elementwise"):
        top.take(key, None, {})
    state = _Settings(f"{where}.state", top.take("state") or {})
    block_v = state.take("block_v", default=top.take("state_block_v", default=64))
    state.take("mode", "chunk", default="chunk")
    state.take("quantize_initial", True, default=True)
    solve = _Settings(f"{where}.solve", top.take("solve") or {})
    method, degree = solve.take("method", "exact", "neumann", default="exact"), solve.take("degree")
    solve.take("implementation")
    window, decode = top.take("replay_window"), top.take("decode")
    for settings in (top, state, solve):
        settings.end()
    prefill = None if method == "exact" else {"inverse": {"method": "neumann", "order": degree}}
    if decode is None and (window is not None or precision is not None):
        decode = {"mode": "replay", "replay": {"window": window}} if window not in (None, 1) else {}
        # The flat form fixes both; see LinearAttentionConfig.
        decode["readout"] = "working"
        if "replay" in decode:
            decode["replay"]["factor_qdq"] = False
    if precision not in (None, "full"):
        notes.append(f"{where}.precision={precision!r} (bf16 operands of a serving kernel)")
    if decode is None:
        return _Schedule(block_v=block_v, prefill=prefill)
    return replace(_decode(f"{where}.decode", decode, version, notes), block_v=block_v, prefill=prefill)


def _decode(where: str, data: object, version: int | None, notes: list[str]) -> _Schedule:
    decode = _Settings(where, data)
    # The defaults of these two changed between versions of the schema: only version 1 says which is meant.
    first = version == 1

    def assumed(settings: _Settings, key: str, meaning: object) -> None:
        if key not in settings.left and not first:
            notes.append(f"{settings.where}.{key}, which is not given (taken as {meaning!r})")

    mode = decode.take("mode", "token", "replay", default="token")
    implementation = decode.take("implementation", None, "torch", "triton")
    decode.take("precision", None, "full", "vllm_0_15")
    decode.take("quantize_initial", True, default=True)
    decode.take("prefill_state_qdq", False, default=False)
    decode.take("state_codec", "tile", default="tile")
    decode.take("decay_log_step", None)
    assumed(decode, "readout", "working")
    readout = decode.take("readout", "working", "stored", default="stored" if first else "working")
    replay = decode.take("replay")
    decode.end()
    if (mode == "replay") != (replay is not None):
        refuse(f"{where}.replay", repr(replay), "settings exactly where mode is 'replay'", "Set both or neither.")
    window, factors = 1, None
    if replay is not None:
        settings = _Settings(f"{where}.replay", replay)
        window = settings.take("window", default=8)
        settings.take("encoding", "once", default="once")
        assumed(settings, "factor_qdq", False)
        if settings.take("factor_qdq", True, False, default=first):
            factors = "fp8_e4m3"
            notes.append(f"{where}.replay.factor_qdq by value block (here one scale spans a whole update vector)")
        settings.end()
    return _Schedule(
        mode=mode,
        window=window,
        factors=factors,
        readout="before_write" if readout == "working" else "after_write",
        kernel={None: "auto", "torch": "reference", "triton": "triton"}[implementation],
    )


# --- both together


def _rules(
    kind: str,
    schedules: Sequence[tuple[str, _Schedule]],
    states: Sequence[Layer],
    reads: Sequence[Layer],
    notes: list[str],
) -> list[tuple[str, dict[str, Any]]]:
    # The first of three reversed lists whose globs all match is the last of each: just what wins over there.
    rules: dict[str, dict[str, Any]] = {}
    for (module, schedule), state, read in itertools.product(reversed(schedules), reversed(states), reversed(reads)):
        glob: str | None = module
        for other in (state.glob, read.glob):
            glob = glob and _meet(glob, other)
        if glob is not None and glob not in rules:
            rules[glob] = _policy(kind, schedule, state, read, notes)
    return list(rules.items())


def _meet(a: str, b: str) -> str | None:
    """A glob for what two globs both match, None if nothing."""
    for narrow, wide in ((a, b), (b, a)):
        # A pattern stands for all its matches only where the wider one has nothing but stars to meet it with.
        if narrow == wide or (not set("?[") & set(wide) and fnmatch.fnmatchcase(narrow, wide)):
            return narrow
    heads = [re.split(r"[*?\[]", glob)[0] for glob in (a, b)]
    if not heads[0].startswith(heads[1]) and not heads[1].startswith(heads[0]):
        return None
    refuse("linear_attention", f"{a!r} and {b!r}", "globs of which one contains the other", "Spell the sites out.")


def _policy(kind: str, schedule: _Schedule, state: Layer, read: Layer, notes: list[str]) -> dict[str, Any]:
    if not state.enabled and not read.enabled:
        return {**EXACT, **schedule.common()}
    if read.enabled:
        name = f"{kind}_read_quantizer"
        if state.enabled:
            refuse(
                name, f"it beside {kind}_state_quantizer", "one of the two: an anchor is not rounded", "Disable one."
            )
        if schedule.mode != "replay" or schedule.factors is not None or schedule.readout != "before_write":
            refuse(
                name,
                f"decode.mode={schedule.mode!r}, factors {schedule.factors}, readout {schedule.readout!r}",
                "decode.mode='replay' with factor_qdq=False and readout='working'",
                "A read copy is refreshed once a window, from exact updates.",
            )
        fmt = format_of(name, read.attributes, schedule.block_v, notes)
        return {"write": {"mode": "two_precision", "window": schedule.window, "read": fmt}, **schedule.common()}
    write: dict[str, Any] = {"mode": schedule.mode}
    if schedule.mode == "chunk":
        write["chunk_size"] = 64
    elif schedule.mode == "replay":
        write |= {"window": schedule.window, "factors": schedule.factors}
    fmt = format_of(f"{kind}_state_quantizer", state.attributes, schedule.block_v, notes)
    return {"state": fmt, "write": write, "readout": schedule.readout, **schedule.common()}
