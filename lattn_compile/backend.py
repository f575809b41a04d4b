"""The `torch.compile` backend: rewrite the graph Dynamo recorded, then hand it to AOTAutograd and Inductor.

Rewriting happens before autograd, so forward and backward both see `lattn::` ops with the policy in their arguments.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx

from lattn_compile import errors, history, passes, phase
from lattn_compile.attach import GROUP, PATH, RECIPE, attached_anywhere, first_alike, note_compile_without_recipe
from lattn_compile.errors import (
    LattnError,
    LattnWarning,
    PhaseError,
    PolicyError,
    RewriteError,
    SequenceError,
    UnsupportedError,
    nearest,
    reason,
)
from lattn_compile.history import last_report, reports
from lattn_compile.lowering import _torch_frames as frames
from lattn_compile.lowering import _torch_kept as kept
from lattn_compile.lowering import _torch_private as private
from lattn_compile.lowering import gpu
from lattn_compile.lowering._torch_trace import Untraceable, set_grad_enabled, trace_before_autograd
from lattn_compile.lowering.decompositions import DECOMPOSITIONS, name_kernels
from lattn_compile.ops.recorded import name_recorded_calls
from lattn_compile.passes import capture, lengths, normalize
from lattn_compile.passes.context import PassContext, value_of
from lattn_compile.passes.report import report_of
from lattn_compile.passes.spelled.chunk_tables import VALUE
from lattn_compile.policy import PRESETS, RECIPE_FILE, Policy, Recipe, resolve_recipe
from lattn_compile.report import Report
from lattn_compile.sources import digest

__all__ = ["compile_count", "last_report", "lattn_compile", "parse_options", "reports"]

log = logging.getLogger("lattn_compile")

OWN_OPTIONS = ("policy", "mode", "strict", "verify")

_COMPILES = 0
_SAID: set[str] = set()

FILES = frames.Values()
"""What guards look up at every call of a graph whose recipe is a file: which version of it lies there."""


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
    reach the user wrapped in Dynamo's own exception. Numbers of a phase that do not fit the batch are no part of what
    guards look at: nothing is kept of them, and the call with the right ones is traced anew.
    """
    try:
        _follow_file((options or {}).get("policy"))
        return _compile(gm, example_inputs, mode, dict(options or {}))
    except SequenceError as error:
        if frames.current_frame() is not None:
            raise
        return functools.partial(_raise, error)
    except LattnError as error:
        return functools.partial(_raise, error)


def _raise(error: LattnError, *args: Any) -> Any:
    raise error.with_traceback(None)


def _compile(
    gm: fx.GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    global _COMPILES
    started = time.perf_counter()
    recipe, strict, patches = parse_options(mode, options)
    training = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    left_alone, refused = _take_left_alone()
    verify = bool(options.get("verify", True))
    if not training and kept.records(patches):
        _keep_or_record(gm, patches)
    context = PassContext(
        gm, recipe, training, left_alone, refused, verify=verify, live=True, resumed=private.resumes_a_frame()
    )
    try:
        # Tensors of our own tracing and checking are none of those that a checkpoint or an offloading around us counts.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is), values_known(context, inputs):
            passes.run(context)
        _refuse_forward_mode(context)
    finally:
        if _depends_on_the_phase(context):
            private.guard_global(phase.__name__, phase.KIND)
    gm = context.module
    if any(s.recipe is None for s in context.sites):
        note_compile_without_recipe()
    _COMPILES += 1
    report = report_of(context)
    name_kernels(report, [s.node for s in context.sites + context.packed])
    report.compiles = 1
    compiled_so_far = history.current()
    _speak(context, report, recipe, strict, compiled_so_far)
    history.note(compiled_so_far, report)
    identity = f"{source_hash()}:{_policies_fingerprint(context)}:{gpu.identity()}"
    for name, kind in (("joint_custom_post_pass", _Joint), ("post_grad_custom_post_pass", _PostGrad)):
        patches[name] = kind(identity, private.configured_pass(name, patches))
    compiled = private.compile_with_inductor(gm, [*inputs, *context.appended.values()], patches, DECOMPOSITIONS)
    if _depends_on_the_phase(context):
        compiled = _with_lengths(compiled, context)
    elif phase.kind() and context.sites:
        compiled = _noted(compiled)
    report.seconds = time.perf_counter() - started
    log.info("%s", report.summary())
    return compiled


def _refuse_forward_mode(context: PassContext) -> None:
    """The ops have no rule for tangents, and would drop them without a word."""
    site = next((s for s in context.sites if s.rewritten), None)
    if site is None or not any(getattr(n.target, "__name__", "") == "_make_dual" for n in context.module.graph.nodes):
        return
    raise UnsupportedError(
        site.id,
        got="forward-mode AD (jvp, jacfwd, dual numbers) in the compiled region that it stands in",
        want="first-order reverse mode",
        remedy="Use torch.autograd.grad, or keep it out of that region.",
    )


def _keep_or_record(gm: fx.GraphModule, patches: dict[str, Any]) -> None:
    """A graph that leaves tensors in objects is not recorded as a CUDA graph, which would take them back: a prefill, a
    cache that grows, the first step of a packed state. One that only writes to what was there is."""
    if stored := kept.kept_outputs(gm.graph):
        patches["triton.cudagraphs"] = False
        log.info("no CUDA graph: %d new tensors stay in objects (%s, ...)", len(stored), stored[0].name)
    else:
        kept.fix_written_attributes(gm.graph)


@contextlib.contextmanager
def values_known(context: PassContext, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, placeholders of the graph hold the tensors that it is compiled for: tables that a model keeps in buffers
    are recognised by what they hold (and the graph then asserts that they still do)."""
    given = context.module
    for node, x in zip(given.graph.find_nodes(op="placeholder"), inputs, strict=False):
        if isinstance(x, torch.Tensor):
            node.meta[VALUE] = x
    try:
        yield
    finally:
        for module in (given, context.module):
            for node in module.graph.find_nodes(op="placeholder"):
                node.meta.pop(VALUE, None)


class _Joint(private.CacheIdentity):
    """What this backend runs on a graph before forward and backward are parted."""

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        gpu.joint(graph)


class _PostGrad(private.CacheIdentity):
    """What this backend runs on a graph with its gradients in it."""

    def __call__(self, graph: fx.Graph) -> None:
        name_recorded_calls(graph)
        super().__call__(graph)
        gpu.post_grad(graph)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _depends_on_the_phase(context: PassContext) -> bool:
    """Whether a phase of another kind needs another graph: captured calls say so themselves, to Dynamo."""
    return bool(context.appended) or any(s.proposal is not None and s.rewritten for s in context.sites)


def _noted(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, whose inputs hold the lengths of the phase already, and which says so when it runs."""

    def run(*args: Any) -> Any:
        phase.note_read()
        return compiled(*args)

    return run


def _with_lengths(compiled: Callable[..., Any], context: PassContext) -> Callable[..., Any]:
    """`compiled`, handed the tensors of the phase that is active when it is called, as its last inputs."""
    served = phase.kind()
    wanted = [phase.NAMES.index(name) for name in context.appended]
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
                    got=f"{x.shape[0]} number{'s' if x.shape[0] > 1 else ''} in lc.training_phase",
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
        if not isinstance(mode, str | None) or mode == "":
            raise RuntimeError
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


def _speak(
    context: PassContext, report: Report, recipe: Recipe | None, strict: bool, compiled: history.Compiled
) -> None:
    """Say once what silence would hide; under `strict` raise it.

    A callable whose graph broke is judged by all of its graphs: one of them says nothing of the others.
    """
    before, idle = compiled.idle_rules, context.idle_rules
    compiled.idle_rules = idle if before is None else {n: text for n, text in idle.items() if n in before}
    piece = context.resumed or frames.ends_in_a_break() or compiled.in_pieces
    frame = frames.current_frame()
    last = frame is not None and frame.rest_of_root and not frames.ends_in_a_break() and not compiled.skipped
    spoken = [*context.warnings, *(u.reason.text for u in report.unmatched)]
    of_all = list(compiled.idle_rules.values())
    # Under an attached recipe, regions without a recurrence, and layers left alone as asked, are nothing to remark.
    expected = recipe is None and attached_anywhere() and not report.left_though_asked
    if not report.rewritten and not expected:
        why = "; ".join(
            sorted(
                {f"{r.code}: {r.text}. {r.remedy}" for x in report.left_though_asked + report.left if (r := x.reason)}
            )
        )
        nothing = "nothing was rewritten in a compiled graph: "
        if why:
            spoken.append(nothing + why)
        elif not (piece and compiled.has_sites):
            of_all.append(nothing + "no known recurrence was found in it (lc.inspect shows what is recognised)")
    for text in spoken:
        if strict:
            _refuse_silence(text)
        _say(text)
    for text in of_all:
        if strict and (last or not piece):
            _refuse_silence(text + (f"; nor in the graphs before it, into which {_root(frame)} broke" if last else ""))
        _say(text + ("; it is a piece of a function whose graph broke" if piece else ""))
    undecided = [s for s in context.sites if s.recipe is None and s.arguments["write"] == "exact"]
    if recipe is None and undecided and "no recipe" not in _SAID:
        _SAID.add("no recipe")
        log.warning('no policy in options and none attached: recurrences stay exact (options={"policy": ...})')


def _root(frame: frames.Frame | None) -> str:
    return "the function" if frame is None else f"{frame.root.co_qualname} ({frame.root.co_filename})"


def _refuse_silence(text: str) -> NoReturn:
    raise RewriteError(
        "options['strict']", got=text, want="every site rewritten as asked", remedy="Mend it or drop strict."
    )


def _follow_file(policy: object) -> None:
    """A recipe that is a file's is read again when the file has changed: another version of it means another graph."""
    if not isinstance(policy, os.PathLike) and not (isinstance(policy, str) and policy not in PRESETS):
        return
    path = Path(policy).absolute()
    file = path / RECIPE_FILE if path.is_dir() else path
    seen = [_version(file)]

    def version() -> str:
        # A file that is gone takes nothing back: what was compiled from it goes on.
        seen[0] = _version(file) or seen[0]
        return seen[0]

    frames.guard_lookup(__name__, "FILES", FILES.name_of(hashlib.sha256(os.fsencode(file)).hexdigest()[:16], version))


def _version(file: Path) -> str:
    try:
        found = os.stat(file)
    except OSError:
        return ""
    return f"{found.st_mtime_ns}:{found.st_size}:{found.st_ino}"


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
    """Hash of every source file of this package: an artifact made by other sources is never reused."""
    return digest("**/*.py")


def compile_count() -> int:
    """Graphs that reached this backend in this process."""
    return _COMPILES


def _compiling_for_us() -> bool:
    return private.compiling_options() is not None


class _Rule(NamedTuple):
    """What a recipe says of the call being traced: the call's path, the number of its rule, and that rule's policy."""

    recipe: Recipe
    path: str
    number: int | None
    policy: Policy | None


def _rule(kind: str) -> _Rule | None:
    """None if no recipe is in force. One that is not valid is the backend's to report."""
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
    return _Rule(recipe, path, *recipe.resolve(f"{path}/{kind}#0"))


def _left_alone(key: str, kind: str) -> capture.LeftAlone | None:
    rule = _rule(kind)
    return None if rule is None or rule.policy is not None else capture.LeftAlone(key, kind, rule.path, rule.number)


def _rule_number(kind: str) -> int:
    rule = _rule(kind)
    return 0 if rule is None else first_alike(rule.recipe, rule.number) or 0


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
    history.watch(lattn_compile, _say)
    errors.through_tracer = private.as_unsupported
    capture.HOOKS.compiling_for_us = _compiling_for_us
    capture.HOOKS.attached = _attached
    capture.HOOKS.attached_root = _attached_root
    capture.HOOKS.left_alone = _left_alone
    capture.HOOKS.say_refused = _say_refused
    capture.HOOKS.rule_number = _rule_number
    capture.HOOKS.current_compile = private.current_compile
    capture.HOOKS.module_path = private.module_path
    capture.HOOKS.compiled_module = private.compiled_module
    normalize.HOOKS.trace = trace_before_autograd
    normalize.HOOKS.untraceable = Untraceable
    normalize.HOOKS.set_grad_enabled = set_grad_enabled
    source_hash()  # of the files as they are loaded, not as someone may edit them before the first compile
    private.before_every_trace(capture.install)
    capture.install()


_wire_capture()
