"""Normalise: a copy of a graph in which every operation is a functional ATen op, before autograd.

Dynamo records what the model's code says (`call_method`, in-place writes, views of views). What a recurrence computes
is easier to see when each value is made once: the copy has one node per value, composite ops (matmul, einsum) whole,
and writes into inputs as `aten.copy_` at its end. It is compiled in place of the original, so it must mean the same
to autograd as well: it is traced before autograd, and what cannot be said that way is refused.

Bodies of regions (activation checkpoints, grad-mode regions, `scan`, `cond`, ...) are normalised each on its own. A
region that autograd or the compiler treats as a unit stays one node of the copy.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lattn_compile.errors import Reason, reason
from lattn_compile.mutation import written_by
from lattn_compile.passes.context import bodies_of, value_of

if TYPE_CHECKING:
    from lattn_compile.lowering._torch_trace import Trace

aten = torch.ops.aten

_NUMBER = re.compile(r"(_\d+)+$")


@dataclass
class FunctionalCopy:
    """What `functional_copy` returns.

    Attributes:
        module: the copy, to be compiled in place of the original: same inputs, outputs, gradients and mutations.
        graphs: the functional graphs in it that may be searched and rewritten, bodies of regions included.
        refused: name of a part that stays as it was ("" is the graph itself), and why.
    """

    module: fx.GraphModule
    graphs: list[fx.GraphModule] = field(default_factory=list)
    refused: list[tuple[str, Reason]] = field(default_factory=list)


class NotNormalized(Exception):
    """A graph has no functional counterpart, and why in words."""


def _no_tracer(*args: Any) -> Trace:
    raise NotNormalized("no tracer is wired in")


@dataclass
class Hooks:
    """The tracer, set by the backend: only it may use torch's internals.

    `trace(module, regions, aliasing, writes, known)` traces `module` again; nodes in `regions` are recorded as they
    are, with their bodies replaced by the ones given by name; outputs of those in `aliasing` may share memory with
    their inputs; `writes` are the nodes that may write, and to what; in `known` it keeps what it learned of calls for
    the next graph.
    It raises `untraceable`, with a reason in words. `set_grad_enabled` is the function by which a graph says so.
    """

    trace: Callable[..., Trace] = _no_tracer
    untraceable: type[Exception] = NotNormalized
    set_grad_enabled: Callable[[bool], Any] = torch.set_grad_enabled


HOOKS = Hooks()

# Regions stay nodes, and their bodies are normalised alone.
_UNITS = frozenset(
    (
        "tag_activation_checkpoint",
        "wrap_with_set_grad_enabled",
        "invoke_subgraph",
        "scan",
        "associative_scan",
        "while_loop",
        "cond",
    )
)
# The same, but what their bodies mean depends on more than their inputs: they are not touched.
_SEALED = {
    "wrap_with_autocast": "AUTOCAST_REGION",
    "autograd_function_apply": "NOT_NORMALIZED",
    "flex_attention": "NOT_NORMALIZED",
}


def functional_copy(module: fx.GraphModule) -> FunctionalCopy:
    """A functional copy of `module`; `module` itself is not changed.

    Args:
        module: a graph of Dynamo, of `torch.export` or of `make_fx`, whose placeholders carry fake values.
    Returns:
        FunctionalCopy. Where the graph itself has no functional counterpart, `.module` is a plain copy in which the
        bodies of regions may still be functional, and `.refused` says why.
    """
    work = _Copier()
    bare = _without_guards(module)
    made = work.copy_of(_with_whole_solves(bare or module), "")
    if bare is not None:
        _restore_guards(module, made.module)
    return FunctionalCopy(made.module, work.graphs, work.refused)


@dataclass
class _Made:
    """A copied graph: is it functional, does it write to its inputs, may its outputs share memory with them?"""

    module: fx.GraphModule
    functional: bool
    writes: bool
    aliases: bool


class _Copier:
    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.refused: list[tuple[str, Reason]] = []
        self._made: dict[int, _Made] = {}
        self._known: dict[Any, Any] = {}  # the tracer's

    def copy_of(self, module: fx.GraphModule, name: str) -> _Made:
        """The copy of one graph; a body that several regions share is copied once."""
        if (made := self._made.get(id(module))) is None:
            bare = _without_autocast_off(module)
            why = _not_traceable(bare)
            made = self._made[id(module)] = self._plain(bare, name, why) if why else self._traced(bare, name)
        return made

    def _traced(self, module: fx.GraphModule, name: str) -> _Made:
        graphs = len(self.graphs)
        try:
            trace = self._trace(module, name)
        except Exception as error:
            expected = isinstance(error, (NotNormalized, HOOKS.untraceable))
            detail = str(error) if expected else f"{type(error).__name__}: {error}"
            return self._plain(module, name, reason("NOT_NORMALIZED", detail.strip().split("\n")[0][:200]))
        made = _assemble(module, trace)
        self.graphs.insert(graphs, made)
        return _Made(made, True, bool(trace.written), trace.aliases)

    def _trace(self, module: fx.GraphModule, name: str) -> Trace:
        regions: dict[fx.Node, dict[str, fx.GraphModule]] = {}
        aliasing = set()
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator) and _kind(node) not in {*_UNITS, *_SEALED}:
                raise NotNormalized(f"the operator {_kind(node)} is not known")
        for node, bodies in _regions_of(module):
            kind = _kind(node)
            if kind not in _UNITS and kind not in _SEALED:
                raise NotNormalized(f"the region {kind} is not known")
            unit = kind in _UNITS or _turns_autocast_off(node)
            made = {attr: self._body(kind, body, f"{name}.{attr}".strip("."), unit) for attr, body in bodies.items()}
            if any(m.writes for m in made.values()):
                raise NotNormalized(f"a {kind} region writes to its inputs")
            if any(m.aliases for m in made.values()):
                aliasing.add(node)
            regions[node] = {attr: m.module for attr, m in made.items()}
        writes = {n: n.all_input_nodes if to is None else to for n in module.graph.nodes if (to := written_by(n)) != []}
        return HOOKS.trace(module, regions, frozenset(aliasing), writes, self._known)

    def _body(self, kind: str, body: fx.GraphModule, name: str, unit: bool) -> _Made:
        if unit:
            return self.copy_of(body, name)
        if (made := self._made.get(id(body))) is None:
            made = self._made[id(body)] = self._sealed(body)
            detail = "" if kind == "wrap_with_autocast" else f"the body of {kind} is left to autograd and the compiler"
            self.refused.append((name, reason(_SEALED[kind], detail)))
        return made

    def _sealed(self, module: fx.GraphModule) -> _Made:
        copied = copy_graph_module(module, {})
        return _Made(copied, False, any(written_by(n) != [] for g in _graphs_in(copied) for n in g.nodes), True)

    def _plain(self, module: fx.GraphModule, name: str, why: Reason) -> _Made:
        """A copy as it is; bodies of its regions may still be normalised, unless their meaning depends on it."""
        self.refused.append((name, why))
        if why.code == "AUTOCAST_REGION":
            return self._sealed(module)
        bodies: dict[int, fx.GraphModule] = {}
        for node, named in _regions_of(module):
            for attr, body in named.items():
                kind = _kind(node)
                known = kind in _UNITS or _turns_autocast_off(node)
                made = self.copy_of(body, f"{name}.{attr}".strip(".")) if known else self._sealed(body)
                bodies[id(body)] = made.module
        copied = copy_graph_module(module, bodies)
        return _Made(copied, False, any(written_by(n) != [] for g in _graphs_in(copied) for n in g.nodes), True)


def _guards_of(module: fx.GraphModule) -> list[fx.Node]:
    """Calls of the module with which `ExportedProgram.module()` checks its inputs. They return nothing."""
    return [n for n in module.graph.nodes if n.op == "call_module" and n.target == "_guards_fn" and not n.users]


def _without_guards(module: fx.GraphModule) -> fx.GraphModule | None:
    """A copy without the checks of inputs, None if there are none."""
    if not _guards_of(module):
        return None
    bare = copy_graph_module(module, {})
    for node in _guards_of(bare):
        bare.graph.erase_node(node)
    return bare


_WHOLE: dict[Any, Any] = {
    aten.linalg_inv_ex.default: aten.linalg_inv.default,
    aten._linalg_solve_ex.default: aten.linalg_solve.default,
}
"""Ops that return an error code with their result, and the ones that check it."""


def _with_whole_solves(module: fx.GraphModule) -> fx.GraphModule:
    """The module, or a copy in which an inverse and the check of its error code are the one op that they were taken
    apart from: the check alone is an effect, which a trace cannot order."""
    if not any(_checked_solve(n) for n in module.graph.nodes):
        return module
    made = copy_graph_module(module, {})
    for check in list(made.graph.nodes):
        if (found := _checked_solve(check)) is None:
            continue
        call, info = found
        with made.graph.inserting_before(call):
            whole = made.graph.call_function(_WHOLE[call.target], call.args, _without_check(call.kwargs))
        made.graph.erase_node(check)
        made.graph.erase_node(info)
        for result in list(call.users):
            if result.users:
                whole.meta = dict(result.meta)
                result.replace_all_uses_with(whole)
            made.graph.erase_node(result)
        made.graph.erase_node(call)
    made.recompile()
    return made


def _checked_solve(check: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The call whose error code a node checks, and the code, where that and the first result are all that is used."""
    if check.target is not aten._linalg_check_errors.default or not isinstance(info := check.args[0], fx.Node):
        return None
    call = info.args[0] if info.target is operator.getitem else None
    if not isinstance(call, fx.Node) or call.target not in _WHOLE or len(info.users) != 1:
        return None
    others = [user for user in call.users if user is not info and user.users]
    first = all(user.target is operator.getitem and user.args[1] == 0 for user in others)
    return (call, info) if first and not call.kwargs.get("check_errors") else None


def _without_check(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in kwargs.items() if name != "check_errors"}


def _restore_guards(module: fx.GraphModule, made: fx.GraphModule) -> None:
    inputs = {n.target: n for n in made.graph.nodes if n.op == "placeholder"}
    for node in _guards_of(module):
        made.add_submodule(str(node.target), module.get_submodule(str(node.target)))
        args = fx.map_arg(node.args, lambda n: inputs[n.target])
        with made.graph.inserting_after(list(inputs.values())[-1]):
            made.graph.call_module(str(node.target), args)
    made.recompile()


def _kind(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else str(node.target)


def _regions_of(module: fx.GraphModule) -> list[tuple[fx.Node, dict[str, fx.GraphModule]]]:
    """Nodes of `module` that run region bodies, with the bodies by attribute name."""
    regions: dict[fx.Node, dict[str, fx.GraphModule]] = {}
    for node, body in bodies_of(module):
        for user in node.users if node.op == "get_attr" else [node]:
            regions.setdefault(user, {})[str(node.target)] = body
    return list(regions.items())


def _graphs_in(module: fx.GraphModule) -> Iterator[fx.Graph]:
    yield module.graph
    for _, body in bodies_of(module):
        yield from _graphs_in(body)


# What changes the meaning of the ops after it, other than the grad mode, is not seen by a trace before autograd.
_AMBIENT = {
    "_enter_autocast": "AUTOCAST_REGION",
    "_exit_autocast": "AUTOCAST_REGION",
    "_enter_inference_mode": "NOT_NORMALIZED",
    "_exit_inference_mode": "NOT_NORMALIZED",
}


def _turns_autocast_off(node: fx.Node) -> bool:
    """Whether a region, or what enters one, keeps casts away that there are none of around it either: its ops are what
    they say. Dynamo's guards and the region itself hold that for later runs."""
    if _kind(node) != "wrap_with_autocast" and getattr(node.target, "__name__", "") != "_enter_autocast":
        return False
    device, _, enabled = (*node.args, None, None, None)[:3]
    return enabled is False and isinstance(device, str) and not torch.is_autocast_enabled(device)


def _without_autocast_off(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of Dynamo without the calls that turn autocast off and on again, if it has no others; else itself."""
    enters = [n for n in module.graph.nodes if getattr(n.target, "__name__", "") == "_enter_autocast"]
    dynamos = any("example_value" in n.meta for n in module.graph.nodes if n.op == "placeholder")
    if not enters or not dynamos or not all(map(_turns_autocast_off, enters)):
        return module
    made = copy_graph_module(module, {})
    for node in reversed(made.graph.nodes):
        if getattr(node.target, "__name__", "") in ("_enter_autocast", "_exit_autocast"):
            made.graph.erase_node(node)
    made.recompile()
    return made


def _not_traceable(module: fx.GraphModule) -> Reason | None:
    """Why a graph is not even tried."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "__name__", "")
            if name in _AMBIENT:
                return reason(_AMBIENT[name], name)
            if "functorch" in (getattr(node.target, "__module__", None) or ""):
                return reason("NOT_NORMALIZED", f"functorch's {name}")
        elif node.op == "call_module":
            return reason("NOT_NORMALIZED", f"the graph calls the module {node.target}")
        elif node.op == "placeholder" and not ("val" in node.meta or "example_value" in node.meta):
            return reason("NOT_NORMALIZED", f"the input {node.name} has no example value")
    return None


def _assemble(original: fx.GraphModule, trace: Trace) -> fx.GraphModule:
    """The graph that was traced, with the original's inputs, tensors and output structure, and writes at its end."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    traced = [n for n in trace.module.graph.nodes if n.op == "placeholder"]
    for old, new in zip(trace.inputs, traced, strict=True):
        if old.op == "placeholder":
            node = graph.create_node("placeholder", old.target, old.args, {}, old.name, old.type)
        else:
            node = graph.create_node("get_attr", old.target, (), {}, old.name)
            attributes[str(old.target)] = _attribute(original, str(old.target))
        node.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):  # which Dynamo hangs on the node itself
            node._dynamo_source = old._dynamo_source
        if "example_value" not in node.meta:  # `make_fx` made each value with a fake mode of its own
            node.meta["val"] = new.meta.get("val")
        env[new] = node
    results: Any = ()
    _tidy(trace)
    reads = _read_copies(graph, trace, traced, env)
    for node in trace.module.graph.nodes:
        if node.op == "output":
            (results,) = node.args
        elif node.op == "get_attr":
            target = _free_name(str(node.target), attributes)
            env[node] = graph.create_node("get_attr", target, (), {}, target)
            env[node].meta = dict(node.meta)
            attributes[target] = _attribute(trace.module, str(node.target))
        elif node.op != "placeholder":
            read = env if node.target in _AS_THEY_ARE else ChainMap(reads, env)
            args, kwargs = fx.map_arg((node.args, node.kwargs), read.__getitem__)
            # Not the traced name: it counts what has been dropped.
            # fx looks through arguments that are given with the call for longer than all the rest takes.
            new = env[node] = graph.create_node(node.op, node.target, name=_NUMBER.sub("", node.name))
            new.args, new.kwargs, new.meta = args, kwargs, dict(node.meta)
    results = fx.map_arg(list(results), env.__getitem__)
    outputs = dict(zip(trace.outputs, results, strict=False))
    if trace.training:
        _carry_differentiability(outputs)
    _write_back(graph, trace, [env[n] for n in traced], results[len(trace.outputs) :])
    old_output = next(n for n in reversed(original.graph.nodes) if n.op == "output")
    output = graph.output(fx.map_arg(old_output.args[0], outputs.__getitem__), old_output.type)
    output.meta = dict(old_output.meta)
    graph.set_codegen(copy.deepcopy(original.graph._codegen))
    graph.lint()
    kind = type(original).__bases__[0]  # Dynamo's write their code when someone asks for it
    made = (kind if issubclass(kind, fx.GraphModule) else fx.GraphModule)(attributes, graph, type(original).__name__)
    made.training = original.training
    made.meta.update(original.meta)
    for name, value in vars(original).items():
        made.__dict__.setdefault(name, value)
    for name, value in attributes.items():
        _hold(made, name, value, original)
    return made


def _hold(made: fx.GraphModule, name: str, value: Any, original: fx.GraphModule) -> None:
    """A tensor that the original does not register is not registered here: compilers look registered ones up."""
    registered = {n for n, _ in (*original.named_parameters(), *original.named_buffers())}
    parent, _, last = name.rpartition(".")
    owner = made.get_submodule(parent)
    if last in owner._buffers and name not in registered:
        del owner._buffers[last]
        object.__setattr__(owner, last, value)


def _read_copies(
    graph: fx.Graph, trace: Trace, traced: list[fx.Node], env: Mapping[fx.Node, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """By traced input, a clone that everything reads in place of an input that is written to at the end.

    What autograd saves for the backward must not change. An in-place op sees to that itself; its functional form
    saves the input as it is.
    """
    reads = {}
    for node in (traced[i] for i in trace.written if trace.training):
        if any(user.op != "output" and user.target not in _AS_THEY_ARE for user in node.users):
            reads[node] = graph.create_node("call_function", aten.clone.default, (env[node],), {}, "clone")
            reads[node].meta = {k: v for k, v in env[node].meta.items() if k == "stack_trace"}
            reads[node].meta["val"] = value_of(env[node])
    return reads


# Users that are no reason for a clone, and that may not read one: the views of inputs that are returned.
_AS_THEY_ARE = (aten.as_strided.default, aten.clone.default)


def _carry_differentiability(outputs: Mapping[fx.Node, Any]) -> None:
    """Whether an output requires a gradient: a trace before autograd does not know, and regions ask their bodies."""
    for old, new in outputs.items():
        value = value_of(old)
        if not isinstance(value, torch.Tensor) or not isinstance(new, fx.Node) or new.op != "call_function":
            continue
        if value.requires_grad and not value_of(new).requires_grad:
            new.meta["val"] = value
        if "example_value" in old.meta:
            new.meta["example_value"] = value


def _tidy(trace: Trace) -> None:
    """Drop from a traced graph what says nothing, so that a functional graph is traced to an equal one."""
    graph = trace.module.graph
    for node in list(graph.nodes):
        if _says_nothing(node):
            graph.erase_node(node)
    output = graph.output_node()
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for i, hidden in enumerate(trace.written.values(), len(trace.outputs)):
        if hidden and values[i].target is aten.detach.default:
            values[i] = values[i].args[0]  # which is copied without autograd anyway
    output.args = (values,)
    # Unlike a Dynamo graph, this one is functional but for what `is_impure` knows.
    graph.eliminate_dead_code(is_impure_node=_stays)
    on = trace.gradients
    for node in list(graph.nodes):
        if node.target is HOOKS.set_grad_enabled:
            if node.next.target is HOOKS.set_grad_enabled or node.args[0] is on:
                graph.erase_node(node)  # nothing runs under it
            else:
                on = node.args[0]


def _stays(node: fx.Node) -> bool:
    checks = isinstance(node.target, torch._ops.OpOverload) and "assert" in node.target._schema.name
    return checks or node.is_impure() or isinstance(node.target, torch._ops.HigherOrderOperator)


def _says_nothing(node: fx.Node) -> bool:
    return node.target is aten._assert_tensor_metadata.default


def _attribute(module: torch.nn.Module, target: str) -> Any:
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """A name for something the trace made, which is not that of a tensor of the original."""
    number, free = 0, name
    while free in taken:
        number, free = number + 1, f"{name}_{number}"
    return free


def _write_back(graph: fx.Graph, trace: Trace, inputs: list[fx.Node], values: list[fx.Node]) -> None:
    """`copy_` of the new values into the inputs that were written to; without autograd where that was so."""
    writes = list(zip(trace.written.items(), values, strict=True))
    for hidden in (False, True):
        group = [(inputs[i], value) for (i, without), value in writes if (without and trace.gradients) is hidden]
        if hidden and group:
            _toggle(graph, False)
        for target, value in group:
            node = graph.call_function(aten.copy_.default, (target, value))
            node.meta = {k: v for k, v in value.meta.items() if k in ("stack_trace", "nn_module_stack")}
            node.meta["val"] = target.meta.get("val", target.meta.get("example_value"))
        if hidden and group:
            _toggle(graph, True)


def _toggle(graph: fx.Graph, on: bool) -> None:
    graph.call_function(HOOKS.set_grad_enabled, (on,)).meta["val"] = None


def copy_graph_module(module: fx.GraphModule, bodies: Mapping[int, fx.GraphModule]) -> fx.GraphModule:
    """A copy with its own graph and its own region bodies, parameters and buffers shared.

    `bodies` are copies to take for bodies that have been copied already, by the id of the original.
    """
    copies = dict(bodies)

    def copied(current: fx.GraphModule) -> fx.GraphModule:
        made = copies[id(current)] = fx.GraphModule(current, copy.deepcopy(current.graph))
        made.meta.update(current.meta)
        for node, body in bodies_of(current):
            parent, _, name = str(node.target).rpartition(".")
            setattr(made.get_submodule(parent), name, copies.get(id(body)) or copied(body))
        return made

    return copied(module)


def with_graph(program: ExportedProgram, graph_module: fx.GraphModule, *, renamed: bool = False) -> ExportedProgram:
    """`program` with another graph of the same inputs and as many outputs; its signature names the new output nodes.

    Args:
        renamed: whether nodes inside are called otherwise than before; signatures of inner modules, which name them,
            are then dropped.
    Raises:
        ValueError: inputs or number of outputs differ.
    """
    signature = copy.deepcopy(program.graph_signature)
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    before = [n for n in program.graph.nodes if n.op == "placeholder"]
    if [n.target for n in inputs] != [n.target for n in before]:
        raise ValueError(f"inputs of the graph changed: {[n.target for n in inputs]}")
    for node, old in zip(inputs, before, strict=True):
        node.name = old.name  # a copy renames those that are called like a builtin
    output = next(n for n in reversed(graph_module.graph.nodes) if n.op == "output")
    outputs: Any = output.args[0]
    if len(outputs) != len(signature.output_specs):
        raise ValueError(f"the graph has {len(outputs)} outputs, the signature {len(signature.output_specs)}")
    for spec, node in zip(signature.output_specs, outputs, strict=True):
        if isinstance(node, fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = node.name
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=[
            dataclasses.replace(entry, signature=None) if renamed and entry.fqn else entry
            for entry in program.module_call_graph
        ],
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
