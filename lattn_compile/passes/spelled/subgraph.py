"""The nodes between a frontier and some outputs of a functional graph: extraction and running them.

The run is a float64 one on the CPU: casts to another floating dtype are the identity, whatever device the graph is for.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.proposal import CONSTANT
from lattn_compile.passes.spelled.smooth import smoothed
from lattn_compile.passes.spelled.writer import value

__all__ = [
    "Loop",
    "Region",
    "Rejected",
    "clean_state",
    "constant",
    "double",
    "extract",
    "grad_disabled",
    "hint",
    "is_arithmetic",
    "is_symbolic",
    "is_trained",
    "loop_of",
    "run",
    "shape_of",
    "sources",
    "tensors",
]


_FILLED = {
    "zeros_like": 0.0,
    "ones_like": 1.0,
    "empty_like": float("nan"),
    "full_like": None,
    "new_zeros": 0.0,
    "new_ones": 1.0,
    "new_empty": float("nan"),
    "new_full": None,
    "empty": float("nan"),
    "empty_strided": float("nan"),
    "new_empty_strided": float("nan"),
}
"""Made from a shape alone, filled with this (None: with an argument). What was never written must not matter: NaN."""

_SHAPED = {"expand_as": "expand", "view_as": "reshape", "reshape_as": "reshape", "type_as": "to"}
"""Take no more than a shape or a dtype of their second argument."""

_OVERWRITE = ("copy", "fill")
"""Take no more than the shape and dtype of their first argument, and spread their second over it."""

_SIZED = {
    "view": 1,
    "_unsafe_view": 1,
    "reshape": 1,
    "expand": 1,
    "broadcast_to": 1,
    "zeros": 0,
    "ones": 0,
    "full": 0,
}
"""Argument that is the output's shape."""


_TURNS = 1 << 16


class Rejected(Exception):
    """The claim cannot be tested, or is not one that a test on random numbers proves; says why."""


@dataclass
class Region:
    """What computes `outputs` from the free values `inputs`.

    Attributes:
        nodes: in an order in which they can run, without the inputs.
        constants: get_attr tensors among `nodes`, read when extracted.
        last_use: per node, the values nothing reads after it.
        modules: bodies of higher-order ops, by their get_attr node.
        smooth: calls that run without their kink (`smooth.py`).
    """

    inputs: list[fx.Node]
    nodes: list[fx.Node]
    outputs: list[fx.Node]
    constants: dict[fx.Node, Tensor]
    last_use: dict[fx.Node, list[fx.Node]]
    modules: dict[fx.Node, fx.GraphModule]
    smooth: set[fx.Node] = field(default_factory=set)


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Plain eager torch, whatever is being traced around: no modes, no functorch, no autocast, gradients on."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    with contextlib.ExitStack() as stack:
        if compiled_autograd is not None:
            stack.enter_context(compiled_autograd._disable())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())  # DeviceContext and other function modes
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # Hooks of a checkpointed region would count, and recompute, tensors that are none of its own.
        traced = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
        stack.callback(torch._C._autograd._saved_tensors_hooks_set_tracing, traced)
        yield


def hint(n: Any) -> Any:
    """A size (or symbolic number) as a number, without a guard. Raises Rejected for one that depends on data."""
    if not isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return n
    if (known := getattr(n.node, "hint", None)) is None:
        raise Rejected(f"the size {n} depends on data")
    return known


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(hint(n) for n in value(node).shape)


def constant(node: fx.Node) -> Any:
    """What a get_attr node names, or the literal that an input stands for; None if that cannot be found."""
    if node.op == "placeholder":
        return node.meta.get(CONSTANT)
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def is_symbolic(node: fx.Node) -> bool:
    """A number of the trace, known by its hint."""
    v = value(node)
    return isinstance(v, (int, float)) or (
        isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) and getattr(v.node, "hint", None) is not None
    )


def is_arithmetic(node: fx.Node) -> bool:
    """A Python operator on numbers, as symbolic sizes have them."""
    return getattr(node.target, "__module__", None) in ("_operator", "math") and node.target is not operator.getitem


def is_trained(x: Tensor) -> bool:
    """Other values of a parameter must agree too: it is data, though no input."""
    return x.requires_grad or isinstance(x, torch.nn.Parameter)


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values this one reads; those it reads a shape of only are none of them."""
    name = short_name(node) if node.op == "call_function" else ""
    if name in _FILLED:
        fill = [*node.args, node.kwargs.get("fill_value")][_fill_at(name) :] if _FILLED[name] is None else []
        return [n for n in fill[:1] if isinstance(n, fx.Node)]
    if name in _SHAPED or (name == "to" and _to_other(node)):
        assert isinstance(node.args[0], fx.Node)
        return [node.args[0]]
    if name in _OVERWRITE:
        return [n for n in node.args[1:2] if isinstance(n, fx.Node)]
    return node.all_input_nodes


def _fill_at(name: str) -> int:
    return 2 if name == "new_full" else 1


def _to_other(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._overloadname == "other"


def extract(outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> Region:
    """The region between them. Raises Rejected, naming a graph input that is reached past `inputs`."""
    free = set(inputs)
    order: list[fx.Node] = []
    constants: dict[fx.Node, Tensor] = {}
    modules: dict[fx.Node, fx.GraphModule] = {}
    state: dict[fx.Node, bool] = {}  # False: being visited, True: done
    stack = [(n, False) for n in reversed(outputs)]
    while stack:
        node, ready = stack.pop()
        if ready:
            state[node] = True
            order.append(node)
            continue
        if node in free or node in state:
            continue
        state[node] = False
        stack.append((node, True))
        if is_symbolic(node):
            continue
        if node.op == "placeholder" and CONSTANT not in node.meta:
            raise Rejected(f"the graph input {node} is reached past the frontier {_names(inputs)}")
        if node.op == "get_attr" or CONSTANT in node.meta:
            found = constant(node)
            if isinstance(found, fx.GraphModule):
                modules[node] = found
            elif isinstance(found, Tensor) and not isinstance(found, torch._subclasses.FakeTensor):
                constants[node] = found
            else:
                raise Rejected(f"the value of {node} is not known here, and it is not on the frontier {_names(inputs)}")
            continue
        if node.op != "call_function":
            raise Rejected(f"{node} is a {node.op}, no ATen call")
        stack.extend((n, False) for n in reversed(sources(node)))

    position = {node: i for i, node in enumerate(order)}
    reader: dict[fx.Node, int] = {}
    for node in order:
        if not is_symbolic(node) and node.op == "call_function":
            for source in sources(node):
                reader[source] = position[node]
    for node in outputs:
        reader.pop(node, None)
    last_use: dict[fx.Node, list[fx.Node]] = {}
    for node, at in reader.items():
        last_use.setdefault(order[at], []).append(node)
    return Region(list(inputs), order, list(outputs), constants, last_use, modules)


def _names(nodes: Iterable[fx.Node]) -> str:
    return "[" + ", ".join(str(n) for n in nodes) + "]"


def grad_disabled(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of `nodes`, all of one graph, that stand where the trace had gradients switched off."""
    nodes = list(nodes)
    if not nodes:
        return set()
    graph, mode = nodes[0].graph, torch.autograd.grad_mode
    targets = (torch._C._set_grad_enabled, mode._enter_inference_mode, mode._exit_inference_mode)
    switches = sorted(n for target in targets for n in graph.find_nodes(op="call_function", target=target))
    off = set()
    for node in nodes:
        at = bisect.bisect_left(switches, node)
        if at and _switches_off(switches[at - 1]):
            off.add(node)
    return off


def _switches_off(node: fx.Node) -> bool:
    if node.target is torch._C._set_grad_enabled:
        return not node.args[0]
    return node.target is torch.autograd.grad_mode._enter_inference_mode and bool(node.args[0])


def tensors(v: Any) -> list[Tensor]:
    return [t for t in tree_leaves(v) if isinstance(t, Tensor)]


@dataclass
class Loop:
    """A scan or a while_loop.

    Attributes:
        body: its inputs are `arguments` with the carries of this turn and, of scanned tensors, this turn's slices; its
            outputs are the next carries, then (scan) the slices of stacked outputs.
        condition: of a while_loop, on the same inputs.
        carries, scanned, rest: what is passed in.
    """

    body: Region
    condition: Region | None
    carries: list[Any]
    scanned: list[Any]
    rest: list[Any]

    @property
    def arguments(self) -> list[Any]:
        return [*self.carries, *self.scanned, *self.rest]


def loop_of(node: fx.Node, region: Region) -> Loop:
    """The loop that a higher-order op is. Raises Rejected for any other."""
    name, args = short_name(node), list(node.args)
    bodies = [_body(a, region) for a in args if isinstance(a, fx.Node) and a in region.modules]
    parts = [list(a) for a in args if isinstance(a, (list, tuple))]
    if name == "higher_order::scan" and len(bodies) == 1 and len(parts) == 3 and parts[1]:
        return Loop(bodies[0], None, *parts)
    if name == "higher_order::while_loop" and len(bodies) == 2 and len(parts) == 2:
        return Loop(bodies[1], bodies[0], parts[0], [], parts[1])
    raise Rejected(f"{node}: {name} cannot be run here")


def _body(node: fx.Node, region: Region) -> Region:
    graph = region.modules[node].graph
    outputs = [n for n in tree_leaves(graph.output_node().args[0]) if isinstance(n, fx.Node)]
    return extract(outputs, graph.find_nodes(op="placeholder"))


def run(
    region: Region, inputs: Sequence[Any], sizes: Callable[[fx.Node], Any], leaves: dict[fx.Node, Tensor]
) -> list[Any]:
    """The outputs for these inputs. `sizes` says a node's shape (or number); `leaves` are values for constants.

    A value is dropped once nothing needs it.
    """
    env: dict[fx.Node, Any] = dict(zip(region.inputs, inputs, strict=True))
    for node in region.nodes:
        if node in env:
            continue
        if is_symbolic(node):
            env[node] = sizes(node)
        elif node in region.constants:
            env[node] = leaves[node] if node in leaves else double(region.constants[node])
        elif node in region.modules:
            env[node] = None
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            env[node] = _loop(node, region, env, sizes)
        elif node in region.smooth:
            env[node] = smoothed(node, short_name(node), env)
        else:
            env[node] = out = _call(node, env, sizes)
            if isinstance(out, Tensor) and tuple(out.shape) != tuple(sizes(node)):
                raise ValueError(f"{node} is {list(out.shape)} and should be {list(sizes(node))}")
        for dead in region.last_use.get(node, ()):
            env.pop(dead, None)
    return [env[node] for node in region.outputs]


def double(x: Tensor) -> Tensor:
    x = x.detach().to("cpu")
    return x.to(torch.float64) if x.is_floating_point() else x


def _loop(node: fx.Node, region: Region, env: dict[fx.Node, Any], sizes: Callable[[fx.Node], Any]) -> list[Any]:
    loop = loop_of(node, region)
    carries, scanned, rest = (
        [env[a] if isinstance(a, fx.Node) else a for a in part] for part in (loop.carries, loop.scanned, loop.rest)
    )
    turns: Iterable[int] = range(scanned[0].shape[0]) if scanned else range(_TURNS + 1)
    stacked: list[list[Tensor]] = []
    for t in turns:
        if loop.condition is not None and not run(loop.condition, [*carries, *rest], sizes, {})[0]:
            break
        if t == _TURNS:
            raise Rejected(f"{node}: more than {_TURNS} turns")
        out = run(loop.body, [*carries, *(x[t] for x in scanned), *rest], sizes, {})
        carries = out[: len(carries)]
        stacked.append(out[len(carries) :])
    return [*carries, *(torch.stack(ys) for ys in zip(*stacked, strict=True))]


def _call(node: fx.Node, env: dict[fx.Node, Any], sizes: Callable[[fx.Node], Any]) -> Any:
    name = short_name(node)
    if name == "getitem":
        args = tree_map_only(fx.Node, env.__getitem__, node.args)
        return operator.getitem(*args)
    v = value(node)
    if is_arithmetic(node):
        args, kwargs = tree_map_only(fx.Node, env.__getitem__, (node.args, node.kwargs))
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if name in _FILLED:
        fill: Any = _FILLED[name]
        if fill is None:
            given = node.args[_fill_at(name)] if len(node.args) > _fill_at(name) else node.kwargs["fill_value"]
            fill = env[given] if isinstance(given, fx.Node) else given
        if fill != fill and not v.is_floating_point():
            fill = -1
        return torch.full(sizes(node), fill, dtype=torch.float64 if v.is_floating_point() else v.dtype)
    if name in _SHAPED or (name == "to" and _to_other(node)):
        x = env[node.args[0]]  # type: ignore[index]
        if _SHAPED.get(name, "to") == "to":
            return x.to(torch.float64 if v.is_floating_point() else v.dtype)
        return getattr(x, _SHAPED[name])(sizes(node))

    if name in _OVERWRITE:
        x = torch.as_tensor(_argument(node.args[1], env))
        return x.to(torch.float64 if v.is_floating_point() else v.dtype).expand(sizes(node))

    args = [_argument(a, env) for a in node.args]
    kwargs = {k: _argument(a, env) for k, a in node.kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    if name in _SIZED and "size" not in kwargs and "shape" not in kwargs:
        args[_SIZED[name]] = sizes(node)
    target: Any = node.target
    if name in ("view", "_unsafe_view"):
        return args[0].reshape(args[1])  # what was contiguous after a cast may not be without it
    floats = isinstance(v, Tensor) and v.is_floating_point()
    if floats and kwargs.get("dtype") is None and _factory(target):
        kwargs["dtype"] = torch.float64
    out = target(*args, **kwargs)
    if any(t.is_floating_point() and t.dtype != torch.float64 for t in tensors(out)):
        # Integers became floats of the default dtype: exactly the same in double.
        if name == "where":  # of two numbers, perhaps: these become floats, the condition stays what it is
            target = torch.ops.aten.where.self
            args = [args[0], *(torch.as_tensor(x, dtype=torch.float64) for x in args[1:])]
        else:
            args = [x.to(torch.float64) if isinstance(x, Tensor) else x for x in args]
        out = tree_map_only(
            Tensor, lambda t: t.to(torch.float64) if t.is_floating_point() else t, target(*args, **kwargs)
        )
    return out


def _factory(target: Any) -> bool:
    arguments = target._schema.arguments
    return any(a.name == "dtype" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def _argument(a: Any, env: dict[fx.Node, Any]) -> Any:
    def one(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return env.get(x)
        if isinstance(x, torch.dtype):
            return torch.float64 if x.is_floating_point else x
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return hint(x)

    if isinstance(a, (list, tuple)):
        return [one(x) if not isinstance(x, (list, tuple)) else _argument(x, env) for x in a]
    return tree_map(one, a)
