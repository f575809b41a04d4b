"""Capture: calls of known library functions become one `lattn::` node each, before anyone can trace into them.

Three tracers have to be reached, each in its own way:

* Dynamo (torch.compile, strict export) asks `substitute_in_graph` for a stand-in by the function's identity, so a
  reference that was bound long ago, a `self.rule`, a partial, or a function marked `torch.compiler.disable` is caught.
  The stand-in is process-wide and cannot be taken back: it therefore decides at trace time, and for every other
  backend it traces a copy of the original.
* Non-strict export runs Python, so while `capture()` is active the function's code object is swapped for a
  trampoline. That too reaches every bound reference, and it is undone on exit.
* Everyone else (eager, other backends) is not affected. One exception: a call with a `QuantizedState` is one that the
  library itself cannot make, so it becomes the op on the packed tensors under every tracer, and, while somebody holds
  what `serve_eagerly()` returned, in eager code.

The captured node is the *exact* op: it means what the library function means. Policies are put on it later.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import lattn_compile.ops  # noqa: F401  (registers the ops that capture emits)
from lattn_compile import functional, phase
from lattn_compile.errors import LattnWarning
from lattn_compile.packed import serving
from lattn_compile.recurrence import BY_NAME, KINDS, KnownCall, Recurrence
from lattn_compile.recurrence.linear import normalize as normalize_output
from lattn_compile.refusal import refuse

META = "lattn"  # key in node.meta["custom"]: kind and library function
POLICY = "lattn_policy"  # the same, for the policy of a site that is all prefix


@dataclass(frozen=True)
class SiteContext:
    """What is known about a captured call only while it is traced.

    `attached` is the full path and policy group that `lc.attach` left on the innermost module, or None.
    """

    call: str
    kind: str
    attached: tuple[str, str] | None = None
    recipe: Any = None


@dataclass(frozen=True)
class Refused:
    """A known call whose arguments have no exact counterpart, and why."""

    call: str
    why: str


@dataclass(frozen=True)
class LeftAlone:
    """A known call that the recipe wants left alone: the library's own function is traced in its place."""

    call: str
    kind: str
    path: str
    rule_index: int | None


def _nothing(key: str, kind: str) -> None:
    return None


def _silent(refused: Refused) -> None:
    return None


def _never() -> bool:
    return False


def _no_module() -> tuple[str, Any] | None:
    return None


def _no_context() -> tuple[tuple[str, str] | None, Any]:
    return None, None


@dataclass
class Hooks:
    """What capture needs to know about the tracer; set by the backend, since only it may use torch's internals.

    `compiling_for_us()` says whether the trace now running was started by our backend; `attached()` returns the
    attached site and recipe of the module being traced, guarding the trace on them, and `attached_root()` those of the
    module that was handed to the compiler, once it has been traced; `left_alone(key, kind)` says that
    the recipe in force leaves the call being traced alone; `rule_number(kind)` numbers what its rule asks for;
    `current_compile()` says which trace is running; `compiled_module()` gives name and
    module that were handed to the compiler; `say_refused(refused)` tells the user of a call not captured.
    """

    compiling_for_us: Callable[[], bool] = _never
    attached: Callable[[], tuple[tuple[str, str] | None, Any]] = _no_context
    attached_root: Callable[[], tuple[tuple[str, str] | None, Any]] = _no_context
    left_alone: Callable[[str, str], LeftAlone | None] = _nothing
    rule_number: Callable[[str], int] = lambda kind: 0
    current_compile: Callable[[], str] = str
    compiled_module: Callable[[], tuple[str, Any] | None] = _no_module
    say_refused: Callable[[Refused], None] = _silent
    module_path: Callable[[str], str] = str


HOOKS = Hooks()
CONTEXTS: dict[str, SiteContext] = {}
REFUSALS: list[tuple[str, Refused | LeftAlone]] = []  # with the trace that each belongs to
_NOT_CAPTURED: dict[str, Refused] = {}  # while `capture()` is active: what it left as it was
OWN_CALL = "lattn_compile.linear_attention"
# A saved program brings tags of another process along; they must not find contexts of this one.
_PROCESS = secrets.token_hex(4)
_COUNTER = itertools.count(1)
_LOCK = threading.RLock()
_MAX_CONTEXTS = 4096  # abandoned traces leave contexts behind; more than this many live sites is not a real model


@dataclass(eq=False)
class _Known:
    """A resolved library function: the object, its original code, and the call it is."""

    call: KnownCall
    kind: str
    key: str
    function: types.FunctionType
    code: types.CodeType
    copy: types.FunctionType = field(init=False)
    trampolines: dict[str, types.CodeType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        f = self.function
        copy = types.FunctionType(self.code, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
        copy.__kwdefaults__ = f.__kwdefaults__
        copy.__dict__.update(f.__dict__)
        copy.__qualname__ = f.__qualname__
        self.copy = copy


_KNOWN: dict[int, _Known] = {}
_ACTIVE_CAPTURES = 0


class Serving:
    """While it lives, eager calls of known functions are looked at for packed states. A copy is the thing itself."""

    def __copy__(self) -> Serving:
        return self

    def __deepcopy__(self, memo: Any) -> Serving:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (serve_eagerly, ())


def _nobody() -> Serving | None:
    return None


_SERVING: Callable[[], Serving | None] = _nobody


def _modules(pattern: str) -> Iterator[types.ModuleType]:
    if "*" not in pattern:
        if (module := sys.modules.get(pattern)) is not None:
            yield module
        return
    prefix, depth = pattern.split("*")[0], pattern.count(".")
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix) and name.count(".") == depth and isinstance(module, types.ModuleType):
            yield module


def _resolve() -> Iterator[tuple[KnownCall, str, str, types.FunctionType]]:
    """Known functions in the modules imported so far, wrapped ones included, without importing anything."""
    for kind in KINDS:
        for call in kind.calls:
            for module in _modules(call.module):
                # vars(), not getattr: a lazy module's __getattr__ would import half of transformers.
                f = vars(module).get(call.name)
                seen = 0
                while isinstance(f, types.FunctionType) and seen < 8:
                    yield call, kind.name, f"{module.__name__}.{call.name}", f
                    f, seen = getattr(f, "__wrapped__", None), seen + 1


def install() -> None:
    """Make the known functions imported so far capturable. Idempotent; called before every trace."""
    with _LOCK:
        for call, kind, key, function in list(_resolve()):
            if id(function) in _KNOWN:
                continue
            known = _Known(call, kind, key, function, function.__code__)
            _KNOWN[id(function)] = known
            torch.compiler.substitute_in_graph(function, skip_signature_check=True)(_stand_in(known))
            if _ACTIVE_CAPTURES:
                _swap(known)
            elif _SERVING() is not None:
                _rest(known)


@torch.compiler.assume_constant_result
def _captures(key: str, kind: str) -> bool:
    """Whether this call is to be captured in the trace now running (evaluated while tracing, never guarded)."""
    if _ACTIVE_CAPTURES > 0:
        return True
    if not HOOKS.compiling_for_us():
        return False
    left = HOOKS.left_alone(key, kind)
    if left is not None:
        REFUSALS.append((HOOKS.current_compile(), left))
    return left is None


@torch.compiler.assume_constant_result
def _open_site(key: str, kind: str) -> str:
    """Remember the trace-time context of one captured call; the tag finds it again from the node."""
    attached, recipe = HOOKS.attached()
    return _remember(key, kind, attached, recipe)


def _remember(key: str, kind: str, attached: tuple[str, str] | None, recipe: Any) -> str:
    with _LOCK:
        index = f"{_PROCESS}.{next(_COUNTER)}"
        CONTEXTS[index] = SiteContext(key, kind, attached, recipe)
        if len(CONTEXTS) > _MAX_CONTEXTS:
            del CONTEXTS[next(iter(CONTEXTS))]
    return f"{kind}:{key}:{index}"


@torch.compiler.assume_constant_result
def _rule_number(kind: str) -> int:
    """What the recipe asks of the call being traced, as a number. It goes into the node: Dynamo merges the bodies of
    equal regions, and layers that differ in their policy alone would look equal to it."""
    return HOOKS.rule_number(kind)


def _own_call_tag() -> str:
    """The tag of a `lc.linear_attention` call being traced, where `lc.attach` has something to say about it."""
    if not HOOKS.compiling_for_us():
        return ""
    attached, recipe = HOOKS.attached()
    return "" if attached is None else _remember(OWN_CALL, "own", attached, recipe)


functional.own_call_tag = _own_call_tag


@torch.compiler.assume_constant_result
def _note_refusal(key: str, why: str) -> bool:
    if HOOKS.compiling_for_us():
        REFUSALS.append((HOOKS.current_compile(), Refused(key, why)))
        HOOKS.say_refused(Refused(key, why))
    else:
        _NOT_CAPTURED.setdefault(key, Refused(key, why))
    return True


def _stand_in(known: _Known) -> Callable[..., Any]:
    key, kind, form, adapter, copy = known.key, known.kind, known.call.form, known.call.adapter, known.copy

    def captured(*args: Any, **kwargs: Any) -> Any:
        if serving.carries(args, kwargs):
            return _serve(key, kind, form, adapter(*args, **kwargs), _open_site(key, kind))
        if not _captures(key, kind):
            return copy(*args, **kwargs)
        call = adapter(*args, **kwargs)
        if isinstance(call, str):
            _note_refusal(key, call)
            return copy(*args, **kwargs)
        if said := functional.refused_transform():
            refuse("unsupported", key, *said)
        return emit(call, kind, form, _open_site(key, kind), _rule_number(kind))

    return captured


def emit(call: Recurrence, kind: str, form: str, tag: str, site_id: int = 0) -> tuple[Tensor, Any]:
    """The exact op for one recurrence call, with its layout and normaliser around it as plain torch.

    Args:
        call: the normalised call. kind: name of its kind. form: "chunk" or "recurrent".
        tag: what is written to the nodes' `meta["custom"]["lattn"]`. site_id: the op's.
    Returns:
        `(o, final_state)` in the library's own convention.
    """
    rule = BY_NAME[kind].rule
    state = call.initial_state
    if state is not None and call.state_v_first:
        state = state.transpose(-1, -2)
    scale = call.k.shape[-1] ** -0.5 if call.scale is None else call.scale
    options = {"rule": rule, "scale": scale, "qk_l2norm": call.qk_l2norm}
    if site_id:
        options["site_id"] = site_id
    prefix, sequence = phase.current()
    tensors = [call.q, call.k, call.v, call.g, call.beta, state, call.cu_seqlens, prefix, sequence, None]
    if (identity := phase.current_identity()) != (None, None):
        tensors += identity
    with torch.fx.traceback.annotate({META: tag}):
        if form == "chunk":
            o, final = torch.ops.lattn.chunk(*tensors, **options)
        else:
            o, final, _ = torch.ops.lattn.decode(*tensors, **options)
    final_state: Any = final.transpose(-1, -2) if call.state_v_first else final
    if not call.output_final_state:
        final_state = None
    if call.normalize:
        o, z_state = normalize_output(o, call.q, call.k, scale, call.z_state)
        final_state = (final_state, z_state)
    return o, final_state


def _serve(key: str, kind: str, form: str, call: Recurrence | str, tag: str) -> tuple[Tensor, Any]:
    """The op on packed tensors for one recurrence call."""
    if isinstance(call, str):
        raise serving.refuse_call(key, call)
    with torch.fx.traceback.annotate({META: tag}):
        return serving.serve(call, name=key, rule=BY_NAME[kind].rule, form=form)


def run_captured(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a swapped function runs while `capture()` is active."""
    known = _KNOWN[index]
    call = known.call.adapter(*args, **kwargs)
    if serving.carries(args, kwargs):
        return _serve(known.key, known.kind, known.call.form, call, f"{known.kind}:{known.key}")
    if isinstance(call, str):
        _NOT_CAPTURED.setdefault(known.key, Refused(known.key, call))
        return known.copy(*args, **kwargs)
    return emit(call, known.kind, known.call.form, f"{known.kind}:{known.key}")


def run_served(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a known function runs in eager code while packed states are served there."""
    known = _KNOWN[index]
    if serving.carries(args, kwargs):
        return _serve(known.key, known.kind, known.call.form, known.call.adapter(*args, **kwargs), "")
    out = known.copy(*args, **kwargs)
    # Sizes alone are wanted, so that what is made of the inputs has no memory. Of arguments that only the function
    # itself knows nothing is noted, and the first decoded token stores what would have been stored ahead.
    with contextlib.suppress(Exception):
        there, named = tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        serving.note(out, known.call.adapter(*there, **named), BY_NAME[known.kind].rule)
    return out


def serve_eagerly() -> Serving:
    """While the returned object lives, known functions called in eager code take a packed state, in the whole process.

    Everyone who makes packed states for eager code keeps it. When nobody does, the functions are as they were.
    """
    global _SERVING
    install()
    with _LOCK:
        held = _SERVING()
        if held is None:
            held = Serving()
            _SERVING = weakref.ref(held)
            weakref.finalize(held, _put_back).atexit = False
            _put_back()
    return held


def _put_back() -> None:
    """Every known function runs what it runs while nothing is captured."""
    with _LOCK:
        if _ACTIVE_CAPTURES == 0:
            for known in _KNOWN.values():
                _rest(known)


def _trampoline(known: _Known, runner: str) -> types.CodeType:
    """Code that calls `runner`, closing over the same number of cells as the function it stands in for."""
    if runner in known.trampolines:
        return known.trampolines[runner]
    cells = known.code.co_freevars
    keep = f"        ({', '.join(cells)},)\n" if cells else ""
    source = (
        f"def outer({', '.join(cells)}):\n"
        "    def captured(*args, **kwargs):\n"
        f"{keep}"
        f"        from lattn_compile.passes.capture import {runner}\n"
        f"        return {runner}({id(known.function)}, args, kwargs)\n"
        "    return captured\n"
    )
    scope: dict[str, Any] = {}
    exec(compile(source, "<lattn_compile capture>", "exec"), scope)
    code: types.CodeType = scope["outer"](*cells).__code__
    return known.trampolines.setdefault(runner, code)


def _swap(known: _Known) -> None:
    known.function.__code__ = _trampoline(known, "run_captured")


def _rest(known: _Known) -> None:
    """What the function runs while nothing is captured."""
    known.function.__code__ = _trampoline(known, "run_served") if _SERVING() is not None else known.code


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """While active, known library calls become one node each in whatever is traced.

    Put it around `torch.export.export(...)` (strict or not) or `make_fx`. It swaps functions of the libraries for the
    whole process until it is left, so do not run other threads' models through them meanwhile. Nests. A known call that
    has no exact counterpart is traced as it is, and a `LattnWarning` on exit says so.

    Example:
        >>> with lc.capture():
        ...     program = torch.export.export(model, (input_ids,))
    """
    with capturing() as refused:
        yield
    for entry in refused:
        warnings.warn(f"lc.capture() left {entry.call} as it was: {entry.why}", LattnWarning, stacklevel=3)


@contextlib.contextmanager
def capturing() -> Iterator[list[Refused]]:
    """`capture()` for callers that report what was not captured themselves: the list is filled on exit."""
    global _ACTIVE_CAPTURES
    install()
    refused: list[Refused] = []
    with _LOCK:
        _ACTIVE_CAPTURES += 1
    try:
        with _LOCK:
            if _ACTIVE_CAPTURES == 1:
                for known in _KNOWN.values():
                    _swap(known)
        # Non-strict export keeps annotations of nodes only where node metadata is preserved.
        with torch.fx.traceback.preserve_node_meta():
            yield refused
    finally:
        with _LOCK:
            _ACTIVE_CAPTURES -= 1
            if _ACTIVE_CAPTURES == 0:
                for known in _KNOWN.values():
                    _rest(known)
                refused += _NOT_CAPTURED.values()
                _NOT_CAPTURED.clear()
