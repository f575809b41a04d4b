"""Calls that are written down again instead of traced again: what `_torch_trace` learns while it traces a graph.

Tracing a call costs a millisecond of torch's dispatch, and a model repeats its calls layer by layer and token by token.
What a call is traced to depends on what it calls, its literals, and the shapes, dtypes and layout of its tensors: the
first of equal calls is traced, the others are copies of its nodes.

Memory that is written to anywhere in a graph is left to torch: what makes, reads or writes it is traced call by call.
Which memory that is, is foretold from the example values and checked at the end.

Private interfaces of torch (proxies, functional tensors), tested on torch 2.11 to 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    extract_val,
    py_sym_types,
    track_tensor,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.fx.proxy import _COPY_META_FIELDS
from torch.fx.traceback import NodeSource, NodeSourceAction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Repeats", "Unforeseen", "Value", "facts_of", "memory_of", "touched_by"]

_NAMESPACES = frozenset(("aten", "prims", "lattn"))
# Functions of these modules are a matter of their arguments alone; others may keep something between calls.
_MODULES = frozenset(
    (
        "torch",
        "torch.functional",
        "torch.nn.functional",
        "torch._C._nn",
        "torch._C._linalg",
        "torch._C._special",
        "torch._C._fft",
        "_operator",
    )
)
_LITERALS = (int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)
# What the nodes of a call are told of by the call itself.
_OF_THE_CALL = frozenset((*_COPY_META_FIELDS, "stack_trace", "from_node")) - {"original_aten"}


class Unforeseen(Exception):
    """A write reached memory that nothing foretold: the graph has to be traced call by call."""


class _Unlike(Exception):
    """A call that cannot be told to be like another."""


def memory_of(x: FunctionalTensor) -> StorageWeakRef:
    return StorageWeakRef(x.elem.untyped_storage())


def touched_by(module: fx.GraphModule, writes: Mapping[fx.Node, Collection[fx.Node]]) -> set[fx.Node]:
    """Nodes that make, read or write memory of what `writes` says is written to, as the example values share it."""
    written = {m for targets in writes.values() for n in targets for m in _memories(n)}
    touched = set(writes)
    if written:
        shares = {n: not written.isdisjoint(_memories(n)) for n in module.graph.nodes}
        touched.update(n for n in shares if shares[n] or any(shares[x] for x in n.all_input_nodes))
    return touched


def _memories(node: fx.Node) -> list[StorageWeakRef]:
    value = node.meta.get("val", node.meta.get("example_value"))
    return [StorageWeakRef(x.untyped_storage()) for x in tree_leaves(value) if isinstance(x, FakeTensor)]


class _Memory:
    """A storage of the trace, under all names it has.

    Attributes:
        names: of the storages of traced tensors that stand for it.
        differentiated: whether autograd follows it, as far as a repeated call said so.
        repeated: whether a repeated call made or read it.
    """

    __slots__ = ("differentiated", "names", "repeated")

    def __init__(self, *names: StorageWeakRef) -> None:
        self.names = list(names)
        self.differentiated = self.repeated = False


class Value:
    """A tensor of the trace: its node, and the tensor itself (`real`) once a call that is traced needs it.

    `hidden`: it is a view that autograd does not follow. `facts`: what a call can know of it.
    """

    __slots__ = ("facts", "fake", "hidden", "memory", "node", "real")

    def __init__(
        self,
        node: fx.Node,
        fake: Tensor,
        facts: Facts | None,
        memory: _Memory,
        *,
        hidden: bool = False,
        real: FunctionalTensor | None = None,
    ) -> None:
        self.node, self.fake, self.facts, self.memory, self.hidden, self.real = node, fake, facts, memory, hidden, real


class Facts(NamedTuple):
    """What a call can know of a tensor.

    `sizes`: shape, strides and offset; symbolic ones as expressions. `leaf`: whether it is an input that requires a
    gradient, `requires_grad`: whether it is, or is computed from one.
    """

    dtype: torch.dtype
    device: torch.device
    sizes: tuple[Any, ...]
    leaf: bool
    requires_grad: bool


def facts_of(x: Tensor, leaf: bool) -> Facts | None:
    """None for a tensor whose values a trace knows, and for one that is more than numbers in memory."""
    if (
        type(x) is not FakeTensor
        or x.constant is not None
        or x.layout is not torch.strided
        or x.is_conj()
        or x.is_neg()
    ):
        return None
    sizes = tuple(map(_number, (*x.shape, *x.stride(), x.storage_offset())))
    return Facts(x.dtype, x.device, sizes, leaf, x.requires_grad)


def _number(n: Any) -> Any:
    return n if type(n) is int else (type(n), n.node.expr)


@dataclass(frozen=True)
class _Given:
    """The tensor of this number among those of the call."""

    index: int


@dataclass(frozen=True)
class _Made:
    """The node of this number among those that the call is traced to; of memory, a name for new one."""

    index: int


@dataclass
class _Call:
    """One node that a call is traced to. Nodes in its arguments hold in the whole graph: they are sizes."""

    target: Any
    args: Any
    kwargs: Any
    name: str
    meta: dict[str, Any]


@dataclass
class _Output:
    node: _Given | _Made
    memory: _Given | _Made
    facts: Facts
    hidden: bool
    differentiated: bool


@dataclass
class _Template:
    """What a call is traced to. `structure` of its outputs: None if it is one tensor."""

    calls: list[_Call]
    outputs: list[_Output]
    structure: TreeSpec | None


class _Seen:
    """Tensors of a call in the order of their first use, and their memory, numbered."""

    __slots__ = ("memories", "values")

    def __init__(self) -> None:
        self.values: dict[Value, int] = {}
        self.memories: dict[_Memory, int] = {}


class Repeats:
    """The calls that one trace knows.

    Args:
        tracer: of `make_fx`, which is running.
        mode: the functional mode of the trace: it says what was `written` and what is `differentiated`.
        touched: nodes that are traced whatever is known.
        known: what traces of the same fake mode have learned; it is added to.
    """

    def __init__(self, tracer: Any, mode: Any, touched: Collection[fx.Node], known: dict[Any, Any]) -> None:
        self.tracer, self.mode, self.touched, self.known = tracer, mode, touched, known
        self._here: dict[Any, _Template] = {}  # holds in this graph only
        self._memories: dict[StorageWeakRef, _Memory] = {}
        self._values: dict[int, Value] = {}

    def given(self, node: fx.Node, value: Any, facts: Facts | None) -> Any:
        """The next input of the trace, for what `node` is in the graph that is traced."""
        proxy = self.tracer.create_proxy("placeholder", "input", (), {})
        if not isinstance(value, Tensor):
            track_tensor_tree(value, proxy, constant=None, tracer=self.tracer)
            return value
        # Dynamo's own example value is kept with an input that has one.
        proxy.node.meta["val"] = value if "example_value" in node.meta else extract_val(value)
        given = Value(proxy.node, value, facts, _Memory())
        given.memory.differentiated = value.requires_grad
        if facts is None or any(isinstance(n, tuple) for n in facts.sizes):
            self._make_real(given, value)  # its sizes are to be known, in order
        return given

    def memory(self, x: FunctionalTensor) -> _Memory:
        name = memory_of(x)
        if (found := self._memories.get(name)) is None:
            found = self._memories[name] = _Memory(name)
        return found

    def _value(self, x: FunctionalTensor) -> Value:
        """What is known of a tensor that was traced. Raises _Unlike."""
        if (known := self._values.get(id(x))) is None:
            inner = x.from_functional()
            slot = self.tracer.tensor_tracker.get(inner)
            if slot is None or slot.constant is not None:
                raise _Unlike
            facts = facts_of(inner, x.requires_grad)
            known = Value(slot.proxy.node, inner, facts, self.memory(x), hidden=hasattr(x, "_hidden"), real=x)
            self._values[id(x)] = known  # which keeps x, and with it the number
        return known

    def real(self, value: Any) -> Any:
        """A value as a call that is traced takes it."""
        if isinstance(value, (tuple, list)):
            leaves, structure = tree_flatten(value)
            return tree_unflatten(map(self.real, leaves), structure) if any(type(x) is Value for x in leaves) else value
        if not isinstance(value, Value):
            return value
        if value.real is None:
            if value.node.op == "placeholder":
                self._make_real(value, value.fake)
            else:
                with disable_proxy_modes_tracing(), disable_functional_mode():
                    fake = _like(value.fake)
                self._make_real(value, fake)
                if value.facts is not None and value.facts.requires_grad:
                    fake.requires_grad_()  # which autograd tells the fake tensor, and not the functional one
        return value.real

    def _make_real(self, value: Value, fake: Tensor) -> None:
        with disable_proxy_modes_tracing(), disable_functional_mode():
            track_tensor(fake, fx.Proxy(value.node, self.tracer), constant=None, tracer=self.tracer)
        value.real = FunctionalTensor.to_functional(fake)
        self._values[id(value.real)] = value
        name = memory_of(value.real)
        self._memories[name] = value.memory
        value.memory.names.append(name)
        if value.memory.differentiated:
            self.mode.differentiated.add(name)
        if value.hidden:
            value.real._hidden = True  # type: ignore[attr-defined]

    def _differentiated(self, memory: _Memory) -> bool:
        known = self.mode.differentiated
        return memory.differentiated or (bool(known) and any(name in known for name in memory.names))

    def check(self) -> None:
        """Raises Unforeseen if memory was written to that a repeated call made or read."""
        if any(self._memories[name].repeated for name in self.mode.written if name in self._memories):
            raise Unforeseen

    def key(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> tuple[Any, list[Value]] | None:
        """What a call is known by, and its tensors; None for one that is traced whatever is known."""
        if node in self.touched or not _may_repeat(node):
            return None
        if node.op == "call_method":
            owner = env[node.args[0]] if isinstance(node.args[0], fx.Node) else None
            if not isinstance(owner, (Value, FunctionalTensor)):
                return None
        seen = _Seen()
        try:
            args = self._look((node.args, node.kwargs), env, seen)
        except _Unlike:
            return None
        return (node.target, torch.is_grad_enabled(), args), list(seen.values)

    def _look(self, x: Any, env: Mapping[fx.Node, Any], seen: _Seen) -> Any:
        """What of an argument belongs to the key. Raises _Unlike."""
        if isinstance(x, fx.Node):
            x = env[x]
        if isinstance(x, FunctionalTensor):
            x = self._value(x)
        if isinstance(x, Value):
            if x.facts is None:
                raise _Unlike
            if (number := seen.values.get(x)) is not None:
                return (Value, number)
            seen.values[x] = len(seen.values)
            shared = seen.memories.setdefault(x.memory, len(seen.memories))
            return (x.facts, shared, x.hidden, self._differentiated(x.memory))
        if isinstance(x, _LITERALS):
            return (type(x), x)
        if isinstance(x, (float, complex)):
            return (type(x), repr(x))  # 0.0 is not -0.0
        if isinstance(x, (tuple, list)):
            return (isinstance(x, list), *[self._look(y, env, seen) for y in x])
        if isinstance(x, slice):
            return (slice, *[self._look(y, env, seen) for y in (x.start, x.stop, x.step)])
        if isinstance(x, dict):
            return (dict, *[(k, self._look(y, env, seen)) for k, y in x.items()])
        if isinstance(x, py_sym_types):
            return (type(x), x.node.expr)
        raise _Unlike

    def find(self, key: Any) -> _Template | None:
        return self.known.get(key) or self._here.get(key)

    def repeat(self, node: fx.Node, template: _Template, given: list[Value]) -> Any:
        """What `node` returns, by copies of the nodes that a call like it was traced to."""
        made: list[fx.Node] = []

        def of(x: Any) -> Any:
            if isinstance(x, _Given):
                return given[x.index].node
            if isinstance(x, _Made):
                return made[x.index]
            if isinstance(x, (tuple, list)):
                return type(x)([of(y) for y in x])
            if isinstance(x, slice):
                return slice(of(x.start), of(x.stop), of(x.step))
            return {k: of(y) for k, y in x.items()} if isinstance(x, dict) else x

        meta = {k: node.meta[k] for k in _OF_THE_CALL if k in node.meta}
        meta["from_node"] = [NodeSource(node, type(self).__name__, NodeSourceAction.CREATE)]
        for call in template.calls:
            # Arguments that are given with the call are looked through by fx, for longer than all the rest takes.
            new = self.tracer.graph.create_node("call_function", call.target, name=call.name)
            new.args, new.kwargs = of(call.args), of(call.kwargs)
            new.meta = {**call.meta, **meta}
            made.append(new)
        for value in given:
            value.memory.repeated = True
        fresh: dict[_Made, _Memory] = {}
        results: list[Any] = []
        for output in template.outputs:
            if isinstance(output.node, _Given):
                results.append(given[output.node.index])
                continue
            if isinstance(output.memory, _Given):
                memory = given[output.memory.index].memory
            else:
                memory = fresh.setdefault(output.memory, _Memory())
            memory.repeated = True
            if output.differentiated and not memory.differentiated:
                memory.differentiated = True
                self.mode.differentiated.update(memory.names)
            new = made[output.node.index]
            results.append(Value(new, new.meta["val"], output.facts, memory, hidden=output.hidden))
        return results[0] if template.structure is None else tree_unflatten(results, template.structure)

    def learn(self, key: Any, given: list[Value], made: list[fx.Node], out: Any) -> None:
        """Remember what a call was traced to (nodes `made`, the value `out`), if all of it can be said again."""
        places: dict[fx.Node, Any] = {}
        for i, value in enumerate(given):
            places.setdefault(value.node, _Given(i))
        calls: list[_Call] = []
        bound = False  # to this graph, by a node of it
        for node in made:
            symbolic = isinstance(node.meta.get("val"), py_sym_types)
            if node.op != "call_function" or not _is_pure(node.target, symbolic):
                return
            if symbolic:
                places[node] = node
                continue
            for x in node.all_input_nodes:
                if x not in places and not isinstance(x.meta.get("val"), py_sym_types):
                    return
                bound |= isinstance(places.setdefault(x, x), fx.Node)
            args, kwargs = fx.map_arg((node.args, node.kwargs), places.__getitem__)
            meta = {k: v for k, v in node.meta.items() if k not in _OF_THE_CALL}
            places[node] = _Made(len(calls))
            calls.append(_Call(node.target, args, kwargs, node.name, meta))
        leaves, structure = tree_flatten(out)
        try:
            outputs = self._outputs(given, places, leaves)
        except _Unlike:
            return
        if outputs:
            single = None if leaves[0] is out else structure
            (self._here if bound else self.known)[key] = _Template(calls, outputs, single)

    def _outputs(self, given: list[Value], places: Mapping[fx.Node, Any], leaves: list[Any]) -> list[_Output]:
        """Raises _Unlike if they are not all tensors that the nodes at those places make."""
        outputs: list[_Output] = []
        memories: dict[_Memory, Any] = {}
        for i, value in enumerate(given):
            memories.setdefault(value.memory, _Given(i))
        for x in leaves:
            if not isinstance(x, FunctionalTensor):
                raise _Unlike
            value = self._value(x)
            place: _Given | _Made | None = places.get(value.node)
            if not isinstance(place, (_Given, _Made)) or value.facts is None:
                raise _Unlike
            if isinstance(place, _Given) and given[place.index] is not value:
                raise _Unlike
            if isinstance(place, _Made) and (x.requires_grad or has_free_unbacked_symbols(value.fake)):
                raise _Unlike
            memory = memories.setdefault(value.memory, _Made(len(memories)))
            differentiated = self._differentiated(value.memory)
            outputs.append(_Output(place, memory, value.facts, value.hidden, differentiated))
        return outputs


def _may_be_like_another(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return target.namespace in _NAMESPACES and not target._schema.is_mutable
    return target is getattr or getattr(target, "__module__", None) in _MODULES


def _may_repeat(node: fx.Node) -> bool:
    return node.op == "call_method" or (node.op == "call_function" and _may_be_like_another(node.target))


def _is_pure(target: Any, symbolic: bool) -> bool:
    """Whether a traced node says all there is to say. A number that no shape tells depends on data."""
    if isinstance(target, OpOverload):
        return target._schema.name.startswith("aten::sym_") if symbolic else not target._schema.is_mutable
    return symbolic or target is operator.getitem


def _like(fake: Tensor) -> Tensor:
    """A tensor like the fake one, in memory of its own that is as large."""
    size = fake.untyped_storage().nbytes() // fake.element_size()
    with fake.fake_mode:  # type: ignore[attr-defined]
        whole = torch.empty((size,), dtype=fake.dtype, device=fake.device)
        return whole.as_strided(fake.shape, fake.stride(), fake.storage_offset())
