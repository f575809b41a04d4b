"""Trace a graph again, functional, before autograd. Private interfaces of torch, tested on torch 2.11 to 2.13."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, disable_functional_mode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
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

from lattn_compile.lowering._torch_repeats import Repeats, Unforeseen, Value, facts_of, memory_of, touched_by

__all__ = ["Trace", "Untraceable", "set_grad_enabled", "trace_before_autograd"]


class Untraceable(Exception):
    """A graph has no functional counterpart before autograd, and why in words."""


@dataclass
class Trace:
    """One graph traced again, functional.

    Attributes:
        module: takes a value for each of `inputs`; returns the outputs, then the new values of `written`.
        inputs: placeholders of the traced graph, in order, then one node of each tensor it holds (`get_attr`).
        outputs: nodes that the traced graph returns, each once.
        written: positions of inputs that were written to, and whether all of that happened without autograd.
        aliases: whether an output is, or is a view of, an input.
        gradients: whether gradients are on where the graph begins (and ends).
        training: whether they are, and an input has one.
        calls: how many of the graph's calls were traced; the others are like one of those.
    """

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    written: dict[int, bool]
    aliases: bool
    gradients: bool
    training: bool
    calls: int


class _BeforeAutograd(FunctionalTensorMode):
    """Functionalization before autograd that keeps composite ops (matmul, einsum, training dropout) whole.

    Taking writes away before autograd is sound only where autograd saw them: a write that was hidden from it (under
    `no_grad`, or through `detach`) into memory that it differentiates through would cut or redirect gradients. Values
    of a trace do not know whether they are differentiated, so that is followed here, by memory.
    """

    def __init__(self) -> None:
        super().__init__(pre_dispatch=True, export=True)
        self.writes = 0
        self.written: set[StorageWeakRef] = set()
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
            memory_of(x) in self.differentiated and not hasattr(x, "_hidden") for x in given
        )
        if tracked and func is not torch.ops.aten.detach.default:
            self.differentiated.update(memory_of(x) for x in out if x.is_floating_point() or x.is_complex())
            return
        for x in out:
            if memory_of(x) in self.differentiated and not any(x is y for y in given):
                x._hidden = True  # a view that autograd does not follow

    def _check_write(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        self.writes += 1
        for i, a in enumerate(func._schema.arguments):
            if a.alias_info is None or not a.alias_info.is_write:
                continue
            for x in tree_leaves(args[i] if i < len(args) else kwargs.get(a.name)):
                if not isinstance(x, FunctionalTensor):
                    continue
                self.written.add(memory_of(x))
                if memory_of(x) not in self.differentiated:
                    continue
                if not torch.is_grad_enabled() or hasattr(x, "_hidden"):
                    raise Untraceable(f"{func} writes, hidden from autograd, into a tensor that is differentiated")


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
    """Runs a graph under the tracer. Tensors it holds are inputs of the trace; regions are recorded as they are.

    Calls like one that was traced are not: their values are `Value`s until something asks for the tensor.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        regions: Mapping[fx.Node, Any],
        outputs: list[fx.Node],
        repeats: Repeats,
        *,
        trust: bool,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.regions, self.outputs, self.repeats, self.trust = regions, outputs, repeats, trust
        self.calls = 0
        self._node: fx.Node | None = None

    @staticmethod
    def _fresh(node: fx.Node) -> Any:
        """The region's outputs, as new fake tensors: the tracer knows tensors by identity."""
        value = node.meta.get("val", node.meta.get("example_value"))
        if value is None:
            raise Untraceable(f"the region {node.name} has no example value")
        return tree_map_only(Tensor, _new_fake, value)

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        if n.target is operator.getitem and type(n.args[1]) is int and isinstance(n.args[0], fx.Node):
            sequence = self.env[n.args[0]]
            if type(sequence) in (tuple, list):
                return sequence[n.args[1]]
        if not self.trust or n in self.regions or (found := self.repeats.key(n, self.env)) is None:
            return self._trace(n)
        if (template := self.repeats.find(found[0])) is not None:
            return self.repeats.repeat(n, template, found[1])
        nodes, writes = self.repeats.tracer.graph.nodes, self.repeats.mode.writes
        last = next(iter(reversed(nodes)), None)
        out = self._trace(n)
        if self.repeats.mode.writes == writes:
            made = list(itertools.takewhile(lambda node: node is not last, reversed(nodes)))[::-1]
            self.repeats.learn(*found, made, out)
        return out

    def _trace(self, n: fx.Node) -> Any:
        self._node = n
        self.calls += 1
        return super().run_node(n)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return fx.map_arg(args, lambda x: self.repeats.real(self.env[x]))

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return [self.env[node] for node in self.outputs]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        node = self._node
        if node is None or node not in self.regions:
            return super().call_function(target, args, kwargs)
        tracer = _tracer()
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


def _tracer() -> Any:
    """The tracer of the `make_fx` that is running."""
    proxies = get_proxy_mode()
    assert proxies is not None
    return proxies.tracer


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
    module: fx.GraphModule,
    regions: Mapping[fx.Node, Any],
    aliasing: frozenset[fx.Node],
    writes: Mapping[fx.Node, Collection[fx.Node]],
    known: dict[Any, Any] | None,
) -> Trace:
    """`passes.normalize.Hooks.trace`. (`make_fx(pre_dispatch=True)` over `FunctionalTensorMode(pre_dispatch=True)`)

    `known` is what earlier traces learned of calls; None traces every call.
    """
    try:
        return _trace(module, regions, aliasing, writes, known)
    except Unforeseen:
        return _trace(module, regions, aliasing, writes, None)


def _trace(
    module: fx.GraphModule,
    regions: Mapping[fx.Node, Any],
    aliasing: frozenset[fx.Node],
    writes: Mapping[fx.Node, Collection[fx.Node]],
    known: dict[Any, Any] | None,
) -> Trace:
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
    gradients = torch.is_grad_enabled()
    training = gradients and any(x.requires_grad for x in values if isinstance(x, Tensor))
    # Here, where no mode sees the questions.
    facts = [facts_of(x, x.requires_grad) if isinstance(x, Tensor) else None for x in values]
    touched = touched_by(module, writes)
    written: dict[int, bool] = {}
    aliases = bool(aliasing)
    calls = 0

    def run() -> Any:
        nonlocal aliases, calls
        not_above = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with maybe_enable_thunkify(), not_above:
            learned = {} if known is None else known.setdefault((fake_mode, training), {})
            repeats = Repeats(_tracer(), mode, touched, learned)
            given = [repeats.given(n, x, f) for n, x, f in zip(inputs, values, facts, strict=True)]
            owners = {x.memory: i for i, x in enumerate(given) if isinstance(x, Value)}
            env = dict(zip(inputs, given, strict=True))
            env.update(
                (n, env[held[str(n.target)]]) for n in module.graph.find_nodes(op="get_attr") if str(n.target) in held
            )
            retrace = _Retrace(module, regions, outputs, repeats, trust=known is not None)
            results = retrace.run(initial_env=env, enable_io_processing=False)
            calls = retrace.calls
            repeats.check()
            if mode.writes and aliasing:
                raise Untraceable("it writes to tensors, and outputs of a region may share memory with its inputs")
            tensors = {i: x.real for i, x in enumerate(given) if isinstance(x, Value) and x.real is not None}
            written.update(_written(values, tensors))

            def returned(x: Any) -> Any:
                nonlocal aliases
                owner = owners.get(x.memory if isinstance(x, Value) else repeats.memory(x))
                aliases = aliases or owner is not None
                if owner in written:
                    return _view_of(values[owner], tensors[owner], repeats.real(x))
                return fx.Proxy(x.node, repeats.tracer) if isinstance(x, Value) else x.from_functional()

            new = [tensors[i].from_functional() for i in written]
            return [tree_map_only((FunctionalTensor, Value), returned, x) for x in results] + new

    try:
        with preserve_node_meta(), fake_mode, enable_python_dispatcher(), mode, _use_lazy_graph_module(True):
            traced = make_fx(
                run,
                decomposition_table={torch.ops.aten.copy.default: functools.partial(_functional_copy_op, training)},
                pre_dispatch=True,
                _disable_torch_fn_metadata_mode=True,
            )()
    except Exception:
        if shape_env is not None:
            shape_env.pending_fresh_unbacked_symbols[:] = pending
        raise
    finally:
        torch.set_grad_enabled(gradients)  # a trace that ends in the middle of a section leaves its mode
    return Trace(traced, inputs, outputs, written, aliases, gradients, training, calls)


def _written(inputs: Sequence[Any], tensors: Mapping[int, FunctionalTensor]) -> dict[int, bool]:
    """Inputs that a trace wrote to, and whether all of that was without autograd. `tensors`: those it used."""
    written = {}
    for i, x in tensors.items():
        if torch._functionalize_was_storage_changed(x.elem) or torch._functionalize_has_metadata_mutation(x.elem):
            raise Untraceable("it changes the shape or the storage of an input in place")
        if not torch._functionalize_has_data_mutation(x.elem):  # type: ignore[attr-defined]
            continue
        memory = StorageWeakRef(inputs[i].untyped_storage())
        others = (other for j, other in enumerate(inputs) if j != i and isinstance(other, Tensor))
        if any(StorageWeakRef(other.untyped_storage()) == memory for other in others):
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
