"""Every use of torch's private interfaces by the backend, with what it stands on; tracing is in `_torch_trace`.

Tested on torch 2.11 to 2.13. When a torch release moves something, this file and nothing else changes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._inductor.custom_graph_pass import CustomGraphPass

from lattn_compile import phase
from lattn_compile.errors import LattnError

BACKEND = "lattn_compile"

__all__ = [
    "BACKEND",
    "CacheIdentity",
    "before_every_trace",
    "compile_with_inductor",
    "compiling_options",
    "current_compile",
    "dynamo_counters",
    "inductor_options",
    "module_path",
    "traced_modules",
]


class _Lasting(list):  # type: ignore[type-arg]
    """Dynamo's list of start callbacks, one of which `torch._dynamo.reset` does not take away.

    A reset forgets compiled code; that the library can be found by the next trace is not part of that.
    """

    def __init__(self, items: Any, lasting: Callable[[Any], None]) -> None:
        super().__init__([*items, lasting])
        self._lasting = lasting

    def clear(self) -> None:
        super().clear()
        self.append(self._lasting)


def before_every_trace(callback: Callable[[], None]) -> None:
    """Run `callback` before Dynamo traces a frame, whatever the backend. (`torch._dynamo.callback`)"""
    from torch._dynamo.callback import callback_handler

    callback_handler.start_callbacks = _Lasting(callback_handler.start_callbacks, lambda args: callback())


def _translator() -> Any | None:
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:  # no trace is running on this thread
        return None


def compiling_options() -> dict[str, Any] | None:
    """Keyword arguments (`mode`, `options`) of the `lattn_compile` backend whose trace is running, None if another's.

    Dynamo wraps the backend in layers (debug wrapper, `_TorchCompileWrapper`); the name shows through all of them.
    """
    tx = _translator()
    return None if tx is None else options_of(tx.output.compiler_fn)


def options_of(fn: Any) -> dict[str, Any] | None:
    """Keyword arguments of the `lattn_compile` backend below the layers around it, None if it is another's."""
    layers: list[Any] = []
    while fn is not None and len(layers) < 8:
        layers.append(fn)
        fn = _inner(fn)
    if not any(BACKEND in (getattr(f, "compiler_name", None), getattr(f, "__name__", None)) for f in layers):
        return None
    keywords: dict[str, Any] = {}
    for fn in reversed(layers):  # an outer layer's keywords win, as in a partial of a partial
        given = fn.keywords if isinstance(fn, functools.partial) else getattr(fn, "kwargs", None)
        keywords |= given if isinstance(given, dict) else {}
    return keywords


def current_compile() -> str:
    """Which of Dynamo's compiles is running, the same while it traces and when it calls the backend."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def _inner(fn: Any) -> Any | None:
    if isinstance(fn, functools.partial):
        return fn.func
    # Around a DistributedDataParallel that is compiled as a whole stands Dynamo's DDPOptimizer, which cuts the graph.
    if (cut := getattr(getattr(fn, "__self__", None), "backend_compile_fn", None)) is not None:
        return cut
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "__wrapped__", "compiler_fn"):
        inner = getattr(fn, name, None)
        if inner is not None and inner is not fn:
            return inner
    return None


def as_unsupported(error: LattnError) -> LattnError:
    """`error` in the shape that Dynamo does not wrap: also its own `Unsupported`.

    Under fullgraph=True that reaches the user unchanged; otherwise the graph breaks here and the eager call raises. Not
    where a phase is wrong, of which an eager library call knows nothing: then the frame is given up at once, and
    `_torch_frames` raises.
    """
    if _translator() is None:
        return error
    from torch._dynamo.exc import Unsupported

    return as_also(error, Unsupported, **({"skip_frame": _ALWAYS} if error.argument in phase.NAMES else {}))


_ALWAYS = property(lambda self: True, lambda self, value: None)  # Dynamo takes it back from callee to caller


def as_also(error: LattnError, kind: type[Exception], **attributes: Any) -> LattnError:
    """`error` as an instance of `kind`, one of Dynamo's exceptions, too, of a class with these attributes."""
    own = type(error)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    passing: Any = type(own.__name__, (own, kind), names | attributes)
    raised = passing.__new__(passing)
    raised.__dict__.update(kind(str(error)).__dict__, **error.__dict__)
    raised.args = (str(error),)
    return raised  # type: ignore[no-any-return]


def traced_modules() -> list[tuple[Any, Any]]:
    """`(frame, Dynamo's variable)` for the modules on the frame stack being traced, innermost first.

    A variable's `.value` is the module. Reading a constant attribute through `guarded_constant` also guards it.
    """
    tx = _translator()
    frame = None if tx is None else tx.output.current_tx
    found: list[tuple[Any, Any]] = []
    while frame is not None:
        for local in frame.symbolic_locals.values():
            # A module whose code is running has been realized; realizing others would add guards of our making.
            realized = isinstance(local, LazyVariableTracker) and local.is_realized()
            variable = local.realize() if realized else local
            if isinstance(variable, UnspecializedNNModuleVariable):
                found.append((frame, variable))
                break
        frame = getattr(frame, "parent", None)
    return found


def guarded_constant(frame: Any, variable: Any, name: str) -> Any:
    """The constant attribute `name` of a traced module, with a guard: another value means another graph."""
    attribute = variable.var_getattr(frame, name)
    if hasattr(attribute, "realize"):
        attribute = attribute.realize()
    return attribute.as_python_constant()


def compiled_module() -> tuple[str, torch.nn.Module] | None:
    """The module whose forward was traced into the graph that the backend is being handed, and its name there."""
    tx = _translator()
    if tx is None or tx.output.root_tx is None or not tx.output.root_tx.f_code.co_argcount:
        return None
    name = tx.output.root_tx.f_code.co_varnames[0]
    module = tx.output.root_tx.f_locals.get(name)
    return (name, module) if isinstance(module, torch.nn.Module) else None


def guard_attribute(local: str, name: str) -> None:
    """Another value of the string attribute `name` of a local of the traced frame means another graph.
    (`torch._dynamo.guards.install_guard`)"""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, LocalSource

    source = AttrSource(LocalSource(local), name)
    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def guard_global(module: str, name: str) -> None:
    """Another value of the string `name` of a module of ours means another graph, as if the frame had read it.
    Without a trace nothing is guarded. (`InstructionTranslator.import_source`)"""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    tx = _translator()
    if tx is not None:
        source = AttrSource(tx.import_source(module), name)
        install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def resumes_a_frame() -> bool:
    """Whether the graph that the backend is being handed is of the rest of a frame behind a graph break."""
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

    tx = _translator()
    return tx is not None and TORCH_DYNAMO_RESUME_IN_PREFIX in tx.output.root_tx.f_code.co_name


def traced_path() -> str:
    """Module path of the frame being traced, as in `node.meta["nn_module_stack"]`."""
    tx = _translator()
    if tx is None:
        return ""
    stack = tx.output.current_tx.nn_module_stack
    return module_path(list(stack.values())[-1][0]) if stack else ""


def module_path(raw: str) -> str:
    """`L['self']._modules['model'].layers.3.attn`, in any of Dynamo's spellings, as `model.layers.3.attn`."""
    # A forward behind a decorator is traced as args[0]; the root has no name of its own.
    path = re.sub(r"^[LG]\[(['\"])(args|kwargs)\1\]\[[^\]]+\]|^[LG]\[['\"]\w+['\"]\]", "", raw)
    path = re.sub(r"\._modules\[['\"]([^'\"]+)['\"]\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    path = path.replace("._orig_mod", "")
    return path.strip(".")


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], decompositions: dict[Any, Callable[..., Any]]
) -> Callable[..., Any]:
    """AOTAutograd and Inductor on `gm`, which is taken over. (`torch._inductor.compile_fx.compile_fx`)

    `decompositions` stand beside Inductor's own, for this graph alone.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    for op in decompositions:
        _keep_as_call(op)
    with config.patch(patches):
        table = _Decompositions({**select_decomp_table(), **decompositions})
    return compile_fx(gm, inputs, config_patches=patches, decompositions=table)  # type: ignore[return-value]


class _Decompositions(dict[Any, Callable[..., Any]]):
    """A table that stands in a cache key by name: functions have none there, and a key that cannot be made is no cache
    at all. What the table is follows from the config and the source hash of `CacheIdentity`, both in the key."""

    def __reduce__(self) -> Any:
        return str, ("decompositions of lattn_compile",)


def _keep_as_call(op: Any) -> None:
    """An op that a decomposition declined is called, as it would be without one: Inductor refuses to do that by itself.
    (`torch._inductor.lowering.make_fallback`)"""
    from torch._inductor import lowering

    if op not in lowering.lowerings:
        constraint = lowering.tag_to_layout_constraint(lowering.get_layout_constraint_tag(op, with_default=True))
        lowering.make_fallback(op, layout_constraint=constraint, warn=False, override_decomp=True)


def without_mutation(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` of one tensor, its in-place operations traced as ones that return. (`functional_tensor`)

    What a decomposition traces must be functional, and AOTAutograd has functionalized what called it, not it.
    """
    from torch._subclasses.functional_tensor import dispatch_functionalize

    return dispatch_functionalize(function)


def inductor_options(mode: str | None, dynamic: bool | None = None) -> dict[str, Any]:
    """Inductor's config for one of torch.compile's modes. Raises RuntimeError naming the known ones."""
    from torch._inductor import list_mode_options

    return {} if mode in (None, "default") else dict(list_mode_options(mode, dynamic))


def inductor_option_names() -> frozenset[str]:
    from torch._inductor import config

    return frozenset(config.get_config_copy())


def dynamo_counters() -> dict[str, Any]:
    """Graph breaks by reason and frames seen, since the process started. (`torch._dynamo.utils.counters`)"""
    from torch._dynamo.utils import counters

    return {
        "graph_breaks": dict(counters["graph_break"]),
        "frames_total": counters["frames"]["total"],
        "frames_ok": counters["frames"]["ok"],
    }


class CacheIdentity(CustomGraphPass):
    """A pass that does nothing but stand in Inductor's cache keys: sources of this package and the policy.

    Without it a change in a kernel, a fake or a backward formula would be served from a stale artifact: only op names
    and their arguments are in the key. A pass that was configured before is kept and run.
    """

    def __init__(self, identity: str, inner: Any | None = None) -> None:
        self.identity, self.inner = identity, inner

    def _inner_passes(self) -> list[Any]:
        if self.inner is None:
            return []
        return list(self.inner) if isinstance(self.inner, (list, tuple)) else [self.inner]

    def __call__(self, graph: fx.Graph) -> None:
        for inner in self._inner_passes():
            inner(graph)

    def uuid(self) -> Any:
        # A pass that does not say what it does keeps its graphs out of the caches, as it would without this one.
        inner = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._inner_passes()]
        return None if any(not u for u in inner) else (self.identity, *inner)


def configured_pass(name: str, patches: dict[str, Any]) -> Any | None:
    """The custom pass of that name in Inductor's config that user options or its global config ask for."""
    from torch._inductor import config

    return patches.get(name, getattr(config, name))
