"""Every use of torch's private interfaces, in one place, with what it stands on.

Tested on torch 2.11 to 2.13. When a torch release moves something, this file and nothing else changes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    maybe_enable_thunkify,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.fx.traceback import preserve_node_meta
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lattn_compile.errors import LattnError

BACKEND = "lattn_compile"

__all__ = [
    "BACKEND",
    "CacheIdentity",
    "FunctionalTrace",
    "Untraceable",
    "before_every_trace",
    "compile_with_inductor",
    "compiling_options",
    "current_compile",
    "dynamo_counters",
    "inductor_options",
    "module_path",
    "trace_before_autograd",
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
    if tx is None:
        return None
    layers: list[Any] = []
    fn: Any = tx.output.compiler_fn
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
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "__wrapped__", "compiler_fn"):
        inner = getattr(fn, name, None)
        if inner is not None and inner is not fn:
            return inner
    return None


def as_unsupported(error: LattnError) -> LattnError:
    """`error` in the shape that Dynamo does not wrap: also its own `Unsupported`.

    Under fullgraph=True that reaches the user unchanged; otherwise the graph breaks here and the eager call raises.
    """
    if _translator() is None:
        return error
    from torch._dynamo.exc import Unsupported

    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    passing: Any = type(kind.__name__, (kind, Unsupported), names)
    raised = passing.__new__(passing)
    raised.__dict__.update(Unsupported(str(error)).__dict__, **error.__dict__)
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


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """AOTAutograd and Inductor on `gm`, which is taken over. (`torch._inductor.compile_fx.compile_fx`)"""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs, config_patches=patches)  # type: ignore[return-value]


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


def configured_post_grad_pass(patches: dict[str, Any]) -> Any | None:
    """The post-grad pass that user options or Inductor's global config ask for."""
    from torch._inductor import config

    return patches.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)


class Untraceable(Exception):
    """A graph has no functional counterpart before autograd, and why in words."""


@dataclass
class FunctionalTrace:
    """One graph traced again, functional: `passes.normalize.Trace`."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    written: dict[int, bool]
    aliases: bool
    gradients: bool
    training: bool


class _BeforeAutograd(FunctionalTensorMode):
    """Functionalization before autograd that keeps composite ops (matmul, einsum, training dropout) whole.

    Taking writes away before autograd is sound only where autograd saw them: a write that was hidden from it (under
    `no_grad`, or through `detach`) into memory that it differentiates through would cut or redirect gradients. Values
    of a trace do not know whether they are differentiated, so that is followed here, by memory.
    """

    def __init__(self) -> None:
        super().__init__(pre_dispatch=True, export=True)
        self.writes = 0
        self.differentiated: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.dropout.default and not (args[2] and args[1] > 0):
            return args[0]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FunctionalTensor)]
        if func._schema.is_mutable:
            self._check_write(func, args, kwargs or {})
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.differentiated:
            self._follow(func, given, [x for x in tree_leaves(out) if isinstance(x, FunctionalTensor)])
        return out

    def _follow(self, func: OpOverload, given: list[Any], out: list[Any]) -> None:
        tracked = torch.is_grad_enabled() and any(
            _memory(x) in self.differentiated and not hasattr(x, "_hidden") for x in given
        )
        if tracked and func is not torch.ops.aten.detach.default:
            self.differentiated.update(_memory(x) for x in out if x.is_floating_point() or x.is_complex())
            return
        for x in out:
            if _memory(x) in self.differentiated and not any(x is y for y in given):
                x._hidden = True  # a view that autograd does not follow

    def _check_write(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        self.writes += 1
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is None or not a.alias_info.is_write:
                continue
            for x in tree_leaves(args[i] if i < len(args) else kwargs.get(a.name)):
                if not isinstance(x, FunctionalTensor) or _memory(x) not in self.differentiated:
                    continue
                if not torch.is_grad_enabled() or hasattr(x, "_hidden"):
                    raise Untraceable(f"{func} writes, hidden from autograd, into a tensor that is differentiated")


def _memory(x: FunctionalTensor) -> StorageWeakRef:
    return StorageWeakRef(x.elem.untyped_storage())


def _functional_copy_op(detach: bool, self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """`aten.copy` in ops that have a derivative: `src` in the dtype, shape and layout of `self`.

    `detach`: where gradients are off, `src` itself must not carry them past the copy.
    """
    if src.dtype != self.dtype or src.device != self.device:
        src = torch.ops.aten._to_copy(src, dtype=self.dtype, device=self.device)
    elif not torch.is_grad_enabled() and src.is_floating_point() and detach:
        src = src.detach()
    if list(src.shape) != list(self.shape):
        src = src.expand(self.shape)
    # Views of what was written to are taken of this value; where it is no view itself, it is laid out densely.
    if src.stride() != self.stride() and self.is_contiguous():
        src = src.clone(memory_format=torch.contiguous_format)
    return src


class _Retrace(PropagateUnbackedSymInts):
    """Runs a graph under the tracer. Tensors it holds are inputs of the trace; regions are recorded as they are."""

    def __init__(
        self, module: fx.GraphModule, held: dict[str, Any], regions: Mapping[fx.Node, Any], outputs: list[fx.Node]
    ) -> None:
        super().__init__(module)
        self.held, self.regions, self.outputs = held, regions, outputs
        self._node: fx.Node | None = None

    @staticmethod
    def _fresh(node: fx.Node) -> Any:
        """The region's outputs, as new fake tensors: the tracer knows tensors by identity."""
        value = node.meta.get("val", node.meta.get("example_value"))
        if value is None:
            raise Untraceable(f"the region {node.name} has no example value")
        return tree_map_only(Tensor, _new_fake, value)

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.held[target] if target in self.held else super().get_attr(target, args, kwargs)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return [self.env[node] for node in self.outputs]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        node = self._node
        if node is None or node not in self.regions:
            return super().call_function(target, args, kwargs)
        proxies = get_proxy_mode()
        assert proxies is not None
        tracer: Any = proxies.tracer
        names = {id(self.fetch_attr(name)): (name, body) for name, body in self.regions[node].items()}

        def recorded(x: Any) -> Any:
            if id(x) in names:
                name, body = names[id(x)]
                if not hasattr(tracer.root, name):
                    tracer.root.register_module(name, body)
                return tracer.create_proxy("get_attr", name, (), {})
            if isinstance(x, FunctionalTensor):
                x = x.from_functional()
            return tracer.unwrap_proxy(x)

        args, kwargs = tree_map(recorded, (args, kwargs))
        with disable_proxy_modes_tracing(), disable_functional_mode():
            out = self._fresh(node)
        track_tensor_tree(out, tracer.create_proxy("call_function", target, args, kwargs), constant=None, tracer=tracer)
        return tree_map_only(Tensor, FunctionalTensor.to_functional, out)


def _new_fake(x: Any, mode: FakeTensorMode | None = None) -> Any:
    """A fake tensor with memory of its own, otherwise like the fake `x`."""
    if is_traceable_wrapper_subclass(x) or x.layout is not torch.strided or not isinstance(x, FakeTensor):
        raise Untraceable(f"a tensor is a {type(x).__name__} of layout {x.layout}")
    with mode or x.fake_mode:
        return torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad and x.is_leaf
        )


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return functools.reduce(getattr, str(node.target).split("."), module)


def _fakes(inputs: Sequence[fx.Node], module: fx.GraphModule) -> tuple[FakeTensorMode, list[Any]]:
    """One fake mode, and the value of each input in it."""
    values = [n.meta.get("val", n.meta.get("example_value")) if n.op == "placeholder" else None for n in inputs]
    modes = [x.fake_mode for x in tree_leaves(values) if isinstance(x, FakeTensor)]
    mode = next((m for m in modes if m.shape_env is not None), modes[0] if modes else FakeTensorMode())

    def own(x: Any) -> Any:
        if is_traceable_wrapper_subclass(x) or x.layout is not torch.strided:
            raise Untraceable(f"an input is a {type(x).__name__} of layout {x.layout}")
        if isinstance(x, FakeTensor):
            return x if x.fake_mode is mode else _new_fake(x, mode)
        return mode.from_tensor(x, static_shapes=True)

    for i, node in enumerate(inputs):
        if node.op == "get_attr":
            values[i] = _attribute(module, node)
        elif isinstance(values[i], FakeTensor):
            values[i] = _as_given(node, values[i])
    return mode, tree_map_only(Tensor, own, values)


def _as_given(placeholder: fx.Node, fake: Any) -> Any:
    """The fake input of a Dynamo graph as autograd knew the real one: Dynamo ran the graph's own writes on the fake."""
    try:
        real = getattr(placeholder.meta.get("grapharg"), "example", None)
    except (AssertionError, RuntimeError):  # the input is gone
        return fake
    if not isinstance(real, Tensor) or real.requires_grad or not fake.requires_grad:
        return fake
    with fake.fake_mode:
        return fake.detach()


def trace_before_autograd(
    module: fx.GraphModule, regions: Mapping[fx.Node, Any], aliasing: frozenset[fx.Node]
) -> FunctionalTrace:
    """`passes.normalize.Hooks.trace`. (`make_fx(pre_dispatch=True)` over `FunctionalTensorMode(pre_dispatch=True)`)"""
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    held: dict[str, fx.Node] = {}
    for node in module.graph.nodes:
        # A literal of the code (`torch.tensor(...)`) is no state: it is made anew at every run.
        literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        if node.op == "get_attr" and not literal and isinstance(_attribute(module, node), Tensor):
            held.setdefault(str(node.target), node)
    inputs += held.values()
    output = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    outputs = list(dict.fromkeys(x for x in tree_leaves(output.args[0]) if isinstance(x, fx.Node)))
    fake_mode, values = _fakes(inputs, module)
    shape_env = fake_mode.shape_env
    pending = list(shape_env.pending_fresh_unbacked_symbols) if shape_env is not None else []
    mode = _BeforeAutograd()
    training = torch.is_grad_enabled() and any(x.requires_grad for x in values if isinstance(x, Tensor))
    written: dict[int, bool] = {}
    aliases = bool(aliasing)

    def run(*args: Any) -> Any:
        nonlocal aliases
        not_above = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with maybe_enable_thunkify(), not_above:
            functional = [FunctionalTensor.to_functional(x) if isinstance(x, Tensor) else x for x in args]
            tensors = {i: x for i, x in enumerate(functional) if isinstance(x, FunctionalTensor)}
            mode.differentiated.update(_memory(x) for x in tensors.values() if x.requires_grad)
            owners = {_memory(x): i for i, x in tensors.items()}
            placeholders = len(functional) - len(held)
            retrace = _Retrace(module, dict(zip(held, functional[placeholders:], strict=True)), regions, outputs)
            results = retrace.run(*functional[:placeholders], enable_io_processing=False)
            if mode.writes and aliasing:
                raise Untraceable("it writes to tensors, and outputs of a region may share memory with its inputs")
            written.update(_written(args, tensors))

            def returned(x: Any) -> Any:
                nonlocal aliases
                owner = owners.get(_memory(x))
                aliases = aliases or owner is not None
                return x.from_functional() if owner not in written else _view_of(args[owner], tensors[owner], x)

            new = [tensors[i].from_functional() for i in written]
            return [tree_map_only(FunctionalTensor, returned, x) for x in results] + new

    try:
        with preserve_node_meta(), fake_mode, enable_python_dispatcher(), mode:
            traced = make_fx(
                run,
                decomposition_table={torch.ops.aten.copy.default: functools.partial(_functional_copy_op, training)},
                pre_dispatch=True,
                _disable_torch_fn_metadata_mode=True,
            )(*values)
    except Exception:
        if shape_env is not None:
            shape_env.pending_fresh_unbacked_symbols[:] = pending
        raise
    return FunctionalTrace(traced, inputs, outputs, written, aliases, torch.is_grad_enabled(), training)


def _written(args: Sequence[Any], tensors: Mapping[int, FunctionalTensor]) -> dict[int, bool]:
    """Inputs that a trace wrote to, and whether all of that was without autograd."""
    written = {}
    for i, x in tensors.items():
        if torch._functionalize_was_storage_changed(x.elem) or torch._functionalize_has_metadata_mutation(x.elem):
            raise Untraceable("it changes the shape or the storage of an input in place")
        if not torch._functionalize_has_data_mutation(x.elem):  # type: ignore[attr-defined]
            continue
        memory = StorageWeakRef(args[i].untyped_storage())
        if any(j != i and StorageWeakRef(args[j].untyped_storage()) == memory for j in tensors):
            raise Untraceable("it writes to an input that shares memory with another")
        written[i] = torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(x.elem)
    return written


def _view_of(base: Tensor, written: FunctionalTensor, output: FunctionalTensor) -> Tensor:
    """`output`, which shares memory with an input that was written to, as a view of that input."""
    if output is written:
        return base
    x = output.from_functional()
    if x.dtype != base.dtype:
        raise Untraceable("an output is a view, in another dtype, of an input that is written to")
    if (
        list(x.shape) == list(base.shape)
        and x.stride() == base.stride()
        and x.storage_offset() == base.storage_offset()
    ):
        return base
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


set_grad_enabled = torch._C._set_grad_enabled  # as graphs of Dynamo and of export before dispatch spell it
