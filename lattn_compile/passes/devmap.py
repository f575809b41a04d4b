"""What `torch.vmap` batches, as the batched ATen calls that it comes to.

Dynamo and `torch.export` record a vmapped section as it was written, between calls that add and take away a hidden
batch axis. Nothing that is looked for in a graph can be seen there. A section is run here once, on fake tensors, and
the calls that functorch's batching rules make are written in its place: the same ones that running it would make.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from lattn_compile.passes.context import value_of

__all__ = ["is_batched", "without_vmap"]

_BEGIN, _END = "_vmap_increment_nesting", "_vmap_decrement_nesting"
_INSIDE = frozenset((_BEGIN, _END, "_add_batch_dim", "_remove_batch_dim", "lazy_load_decompositions"))


def without_vmap(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of `module` with its vmapped sections written out; `module` itself where there are none, or where one
    cannot be (random numbers, other transforms in it)."""
    if not any(_functorch(n) == _BEGIN for n in module.graph.nodes):
        return module
    if any((name := _functorch(n)) is not None and name not in _INSIDE for n in module.graph.nodes):
        return module
    made = _copy(module)
    for section in list(_sections(made.graph)):
        if not _write_out(made, _in_use(section)):
            return module
    for node in made.graph.find_nodes(op="placeholder"):
        if not node.users and is_batched(value_of(node)):
            node.meta["val"] = None  # it escaped from its vmap: `torch.export` keeps such a value as a constant
    made.graph.lint()
    made.recompile()
    return made


def is_batched(value: Any) -> bool:
    """Whether a value has the hidden axis of a vmap, of which outside of it nothing can be asked."""
    try:
        return isinstance(value, Tensor) and value.detach() is None
    except RuntimeError:
        return True


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
        if hasattr(node, "_dynamo_source"):  # which Dynamo hangs on the node itself
            env[node]._dynamo_source = node._dynamo_source
    graph.set_codegen(copy.deepcopy(module.graph._codegen))
    made = fx.GraphModule(module, graph, type(module).__name__)
    made.training = module.training
    made.meta.update(module.meta)
    for name, value in vars(module).items():
        made.__dict__.setdefault(name, value)
    return made


def _functorch(node: fx.Node) -> str | None:
    """The name of what a node calls in functorch."""
    if node.op != "call_function" or "functorch" not in (getattr(node.target, "__module__", None) or ""):
        return None
    return str(getattr(node.target, "__name__", node.target))


def _changes_mode(node: fx.Node) -> bool:
    """Whether a node turns gradients, inference mode or autocast on or off: written out, the section would lose it."""
    name = str(getattr(node.target, "__name__", node.target))
    return any(word in name for word in ("grad_enabled", "inference_mode", "autocast"))


def _sections(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes from the beginning of each outermost vmap to its end."""
    depth, section = 0, []
    for node in graph.nodes:
        name = _functorch(node)
        depth += (name == _BEGIN) - (name == _END)
        if depth or name in _INSIDE:
            section.append(node)
        if name == _END and not depth:
            yield section
            section = []


def _in_use(section: list[fx.Node]) -> list[fx.Node]:
    """A section without views that nothing uses: an export leaves those of a batched value that escaped from it."""
    kept = []
    for node in reversed(section):
        view = isinstance(node.target, torch._ops.OpOverload) and any(
            r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns
        )
        if view and not node.users:
            node.graph.erase_node(node)
        else:
            kept.append(node)
    return kept[::-1]


def _write_out(module: fx.GraphModule, section: list[fx.Node]) -> bool:
    inside = set(section)
    inputs = list(dict.fromkeys(x for n in section for x in n.all_input_nodes if x not in inside))
    outputs = [n for n in section if any(u not in inside for u in n.users)]
    if any(n.op not in ("call_function", "call_method", "get_attr") or _changes_mode(n) for n in section):
        return False
    values = [value_of(x) for x in inputs]
    if not all(_plain(v) for v in [*values, *map(value_of, outputs)]):
        return False
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is not None:
        values = [mode.from_tensor(v) if isinstance(v, Tensor) and not isinstance(v, FakeTensor) else v for v in values]
    part = _module_of(module, section, inputs, outputs)
    runner = _Runner(part)
    try:
        # The mode is for what the section makes itself, zeros for instance.
        with mode or contextlib.nullcontext(), preserve_node_meta(), torch.no_grad():
            traced = make_fx(runner.run)(*values)
    except Exception:  # whatever functorch has no rule for
        runner.leave()
        return False
    if not all(_known(n) for n in traced.graph.nodes) or any(_is_fake(traced, n) for n in traced.graph.nodes):
        return False
    env: dict[fx.Node, fx.Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    graph = module.graph
    with graph.inserting_before(section[0]):
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                name = f"_vmapped_{section[0].name}_{str(node.target).strip('_')}"
                module.register_buffer(name, getattr(traced, str(node.target)), persistent=False)
                env[node] = graph.get_attr(name)
                env[node].meta = dict(node.meta)
            elif node.op == "call_function":
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = {**node.meta, "example_value": node.meta.get("val")}
    results = tree_leaves(traced.graph.output_node().args[0])
    for old, new in zip(outputs, results, strict=True):
        env[new].meta["example_value"] = value_of(old)
        old.replace_all_uses_with(env[new], delete_user_cb=lambda user: user not in inside)
    for node in reversed(section):
        graph.erase_node(node)
    return True


class _Runner(fx.Interpreter):
    """Runs a section; `leave` ends the vmaps in which it stopped."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._ends: list[Callable[[], Any]] = []

    def run_node(self, n: fx.Node) -> Any:
        result, name = super().run_node(n), _functorch(n)
        if name == _BEGIN:
            self._ends.append(next(m.target for m in n.graph.nodes if _functorch(m) == _END))  # type: ignore[misc]
        elif name == _END:
            self._ends.pop()
        return result

    def leave(self) -> None:
        while self._ends:
            self._ends.pop()()


def _plain(v: Any) -> bool:
    """A tensor, or a number."""
    return isinstance(v, (Tensor, int, float, bool, torch.SymInt))


def _known(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr", "output")
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") == "_operator"  # of several results, or of sizes
    return torch.Tag.nondeterministic_seeded not in target.tags


def _is_fake(traced: fx.GraphModule, node: fx.Node) -> bool:
    """A constant of the section of which nothing but its shape is left."""
    return node.op == "get_attr" and isinstance(getattr(traced, str(node.target), None), FakeTensor)


def _module_of(
    module: fx.GraphModule, section: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    env = {x: graph.placeholder(f"input_{i}") for i, x in enumerate(inputs)}
    for node in section:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output([env[x] for x in outputs])
    return fx.GraphModule(module, graph)
