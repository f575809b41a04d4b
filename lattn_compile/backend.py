"""The `torch.compile` backend: rewrite the graph Dynamo recorded, then hand it to AOTAutograd and Inductor.

Rewriting happens before autograd, so forward and backward both see `lattn::` ops with the policy in their arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import secrets
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lattn_compile import errors, passes, phase
from lattn_compile.attach import GROUP, PATH, RECIPE, attached_anywhere, note_compile_without_recipe
from lattn_compile.errors import (
    LattnError,
    LattnWarning,
    PhaseError,
    PolicyError,
    RewriteError,
    SequenceError,
    nearest,
    reason,
)
from lattn_compile.lowering import _torch_private as private
from lattn_compile.passes import capture, lengths, normalize
from lattn_compile.passes.context import PassContext, value_of
from lattn_compile.passes.report import report_of
from lattn_compile.policy import Policy, Recipe, resolve_recipe
from lattn_compile.report import Report

log = logging.getLogger("lattn_compile")

OWN_OPTIONS = ("policy", "mode", "strict", "verify")

_COMPILES = 0
_SECONDS = 0.0
_REPORTS: deque[Report] = deque(maxlen=256)
_SAID: set[str] = set()


def lattn_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend entry point, found by `torch.compile(model, backend="lattn_compile", options={...})`.

    Options: `policy` (Recipe, Policy, dict, JSON path or preset name), `mode` (torch.compile's modes), `strict`
    (warnings of silence become errors), `verify`; every other key goes to Inductor.

    A mistake raises from the first call of the compiled function, before any computation: raised from here it would
    reach the user wrapped in Dynamo's own exception.
    """
    try:
        return _compile(gm, example_inputs, mode, dict(options or {}))
    except LattnError as error:
        return functools.partial(_raise, error)


def _raise(error: LattnError, *args: Any) -> Any:
    raise error.with_traceback(None)


def _compile(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    global _COMPILES, _SECONDS
    started = time.perf_counter()
    recipe, strict, patches = parse_options(mode, options)
    training = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    left_alone, refused = _take_left_alone()
    verify = bool(options.get("verify", True))
    context = PassContext(
        gm, recipe, training, left_alone, refused, verify=verify, live=True, resumed=private.resumes_a_frame()
    )
    try:
        # Tensors of our own tracing and checking are none of those that a checkpoint or an offloading around us counts.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            passes.run(context)
    finally:
        if _depends_on_the_phase(context):
            private.guard_global(phase.__name__, phase.KIND)
    gm = context.module
    if any(s.recipe is None for s in context.sites):
        note_compile_without_recipe()
    _COMPILES += 1
    report = report_of(context)
    report.compiles = 1
    _REPORTS.append(report)
    _speak(context, report, recipe, strict)
    inner = private.configured_post_grad_pass(patches)
    identity = f"{source_hash()}:{_policies_fingerprint(context)}"
    patches["post_grad_custom_post_pass"] = private.CacheIdentity(identity, inner)
    compiled = private.compile_with_inductor(gm, [*inputs, *context.appended.values()], patches)
    if _depends_on_the_phase(context):
        compiled = _with_lengths(compiled, context)
    report.seconds = time.perf_counter() - started
    _SECONDS += report.seconds
    log.info("%s", report.summary())
    return compiled


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _depends_on_the_phase(context: PassContext) -> bool:
    """Whether a phase of another kind needs another graph: captured calls say so themselves, to Dynamo."""
    return bool(context.appended) or any(s.proposal is not None and s.rewritten for s in context.sites)


def _with_lengths(compiled: Callable[..., Any], context: PassContext) -> Callable[..., Any]:
    """`compiled`, handed the tensors of the phase that is active when it is called, as its last inputs."""
    served = phase.kind()
    wanted = [lengths.NAMES.index(name) for name in context.appended]
    sizes = [_size_of_a_call(x.shape[0], context) if x.dim() else None for x in context.appended.values()]

    def run(*args: Any) -> Any:
        if phase.kind() != served:
            raise PhaseError(
                "lc.training_phase",
                got=f"{phase.kind() or 'no phase'} around a graph that was compiled for {served or 'no phase'}",
                want="lengths of the kind that it was compiled for, where nothing compiles it anew",
                remedy="Call it through torch.compile, which does.",
            )
        tensors = lengths.active()
        handed: list[Any] = [tensors[i] for i in wanted]
        for name, x, size in zip(context.appended, handed, sizes, strict=True):
            if size is not None and x.shape[0] != (sequences := size(args)):
                raise SequenceError(
                    name,
                    got=f"{x.shape[0]} numbers in lc.training_phase",
                    want=f"{sequences}, the sequences of the batch",
                    remedy="Give one a sequence.",
                )
        return compiled(*args, *handed)

    return run


def _size_of_a_call(size: Any, context: PassContext) -> Callable[[Sequence[Any]], int] | None:
    """From the arguments of a call, what `size` is in it: a symbol of the graph is read off an input."""
    if not isinstance(size, torch.SymInt):
        return lambda args: size  # type: ignore[no-any-return]
    for i, node in enumerate(context.module.graph.find_nodes(op="placeholder")):
        value = value_of(node)
        if _same_symbol(value, size):
            return lambda args: int(args[i])
        for dim, n in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if _same_symbol(n, size):
                return lambda args: args[i].shape[dim]  # type: ignore[no-any-return]
    return None


def _same_symbol(a: Any, b: torch.SymInt) -> bool:
    return isinstance(a, torch.SymInt) and a.node.expr == b.node.expr


def parse_options(mode: str | None, options: dict[str, Any]) -> tuple[Recipe | None, bool, dict[str, Any]]:
    """`(recipe or None, strict, Inductor config patches)`. Raises LattnError for a key nobody knows."""
    recipe = resolve_recipe(options["policy"]) if options.get("policy") is not None else None
    mode = options.get("mode", mode)
    try:
        patches = private.inductor_options(mode)
    except RuntimeError as error:
        raise PolicyError(
            "options['mode']",
            got=repr(mode),
            want="default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs",
            remedy="Use one of torch.compile's modes.",
        ) from error
    for name in ("strict", "verify"):
        if not isinstance(options.get(name, False), bool):
            raise PolicyError(
                f"options[{name!r}]", got=repr(options[name]), want="True or False", remedy="Pass a bool."
            )
    known = private.inductor_option_names()
    for key, value in options.items():
        if key in OWN_OPTIONS:
            continue
        name = key.replace("-", "_")
        if name not in known:
            raise PolicyError(
                "options",
                got=f"key {key!r}",
                want=f"{', '.join(OWN_OPTIONS)}, or an option of Inductor",
                remedy=f"Remove it.{nearest(key, [*OWN_OPTIONS, *known])}",
            )
        patches[name] = value
    return recipe, bool(options.get("strict", False)), patches


def _speak(context: PassContext, report: Report, recipe: Recipe | None, strict: bool) -> None:
    """Say once what silence would hide; under `strict` raise it."""
    spoken = [*context.warnings, *(u.reason.text for u in report.unmatched)]
    # Under an attached recipe, regions without a recurrence, and layers left alone as asked, are nothing to remark.
    expected = recipe is None and attached_anywhere() and not report.left_though_asked
    if not report.rewritten and not expected:
        why = "; ".join(
            sorted(
                {f"{r.code}: {r.text}. {r.remedy}" for x in report.left_though_asked + report.left if (r := x.reason)}
            )
        )
        spoken.append(
            "nothing was rewritten in a compiled graph: "
            + (why or "no known recurrence was found in it (lc.inspect shows what is recognised)")
        )
    for text in spoken:
        if strict:
            raise RewriteError(
                "options['strict']", got=text, want="every site rewritten as asked", remedy="Mend it or drop strict."
            )
        _say(text)
    undecided = [s for s in context.sites if s.recipe is None and s.arguments["write"] == "exact"]
    if recipe is None and undecided and "no recipe" not in _SAID:
        _SAID.add("no recipe")
        log.warning('no policy in options and none attached: recurrences stay exact (options={"policy": ...})')


def _say(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, LattnWarning, stacklevel=3)


def _say_refused(refused: capture.Refused) -> None:
    """Said while tracing: a frame without a graph, or a trace that fails later, never reaches the backend."""
    _say(reason("CALL_OPTIONS", f"{refused.call}: {refused.why}").text)


def _take_left_alone() -> tuple[list[capture.LeftAlone], list[capture.Refused]]:
    """What the trace behind this graph did not capture, once each: a wrapper and what it wraps are both known."""
    mine = private.current_compile()
    # Traces that Dynamo gave up leave entries behind that are not this graph's.
    taken, capture.REFUSALS[:] = [entry for trace, entry in capture.REFUSALS if trace == mine], []
    left_alone = {r.path: r for r in taken if isinstance(r, capture.LeftAlone)}
    refused = {r.call: r for r in taken if isinstance(r, capture.Refused)}
    return list(left_alone.values()), list(refused.values())


def _policies_fingerprint(context: PassContext) -> str:
    parts = [f"{s.id}={s.policy!r}" for s in context.sites]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


@functools.cache
def source_hash() -> str:
    """Hash of every source file of this package: an artifact made by other sources is never reused.

    Where the files cannot be seen (a zip, a torch.package), no other process gets the same.
    """
    root = Path(__file__).parent
    files = sorted(root.rglob("*.py"))
    if not files:
        return secrets.token_hex(8)
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(root)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def compile_count() -> int:
    """Graphs that reached this backend in this process."""
    return _COMPILES


def reports() -> list[Report]:
    """Reports of the compiles of this process, oldest first (256 at most). `Report.merge(lc.reports())` is one table of
    them all: what regional compiles and graph breaks cut into several graphs."""
    return list(_REPORTS)


def last_report() -> Report | None:
    """Report of the most recent compile in this process, with compiles, seconds and graph breaks counted until now.

    None if nothing reached the backend; the log then says what Dynamo skipped.
    """
    counted = private.dynamo_counters()
    skipped = counted["frames_total"] - counted["frames_ok"]
    if not _REPORTS:
        log.warning(
            "no graph has gone through the lattn_compile backend: Dynamo saw %d frame(s) and skipped %d of them; "
            "an error of the call says why, or compile with fullgraph=True",
            counted["frames_total"],
            skipped,
        )
        return None
    return dataclasses.replace(
        _REPORTS[-1],
        compiles=_COMPILES,
        seconds=_SECONDS,
        graph_breaks=[why for why, n in counted["graph_breaks"].items() for _ in range(n)],
        skipped_frames=["a frame that Dynamo could not compile runs uncompiled"] * skipped,
    )


def _compiling_for_us() -> bool:
    return private.compiling_options() is not None


def _rule(kind: str) -> tuple[str, int | None, Policy | None] | None:
    """Path, rule and policy of the call being traced, if a recipe is in force. One that is not valid is the backend's
    to report."""
    keywords = private.compiling_options() or {}
    attached, recipe = _attached()
    try:
        if (policy := (keywords.get("options") or {}).get("policy")) is not None:
            recipe = resolve_recipe(policy)
    except LattnError:
        return None
    if recipe is None:
        return None
    path = attached[0] if attached else private.traced_path()
    return (path, *recipe.resolve(f"{path}/{kind}#0"))


def _left_alone(key: str, kind: str) -> capture.LeftAlone | None:
    found = _rule(kind)
    return capture.LeftAlone(key, kind, found[0], found[1]) if found is not None and found[2] is None else None


def _rule_number(kind: str) -> int:
    found = _rule(kind)
    return 0 if found is None or found[1] is None else found[1]


def _attached() -> tuple[tuple[str, str] | None, Recipe | None]:
    """Attached path, group and recipe of the innermost marked module on the traced frames."""
    for frame, variable in private.traced_modules():
        module = variable.value
        if GROUP in module.__dict__:
            group = private.guarded_constant(frame, variable, GROUP)
            return (module.__dict__[PATH], group), module.__dict__[RECIPE]
    return None, None


def _attached_root() -> tuple[tuple[str, str] | None, Recipe | None]:
    """Attached path, group and recipe of the module being compiled."""
    found = private.compiled_module()
    if found is None or GROUP not in found[1].__dict__:
        return None, None
    local, module = found
    private.guard_attribute(local, GROUP)
    return (module.__dict__[PATH], module.__dict__[GROUP]), module.__dict__[RECIPE]


def _wire_capture() -> None:
    errors.through_tracer = private.as_unsupported
    capture.HOOKS.compiling_for_us = _compiling_for_us
    capture.HOOKS.attached = _attached
    capture.HOOKS.attached_root = _attached_root
    capture.HOOKS.left_alone = _left_alone
    capture.HOOKS.say_refused = _say_refused
    capture.HOOKS.rule_number = _rule_number
    capture.HOOKS.current_compile = private.current_compile
    capture.HOOKS.module_path = private.module_path
    normalize.HOOKS.trace = private.trace_before_autograd
    normalize.HOOKS.untraceable = private.Untraceable
    normalize.HOOKS.set_grad_enabled = private.set_grad_enabled
    source_hash()  # of the files as they are loaded, not as someone may edit them before the first compile
    private.before_every_trace(capture.install)
    capture.install()


_wire_capture()
