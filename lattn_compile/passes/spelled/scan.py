"""`scan` and `while_loop`: loops that stand in a graph as one node, with one token's step as a subgraph.

A scan whose body is a step, and whose other outputs are made of the step's output token by token, is one op over all
tokens. Any other loop is kept, and the step inside its body is replaced.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from lattn_compile.passes.spelled.labels import same_size
from lattn_compile.passes.spelled.lift import (
    PARTS,
    VIEWS,
    Call,
    Operand,
    Tensors,
    as_before,
    bind,
    copies,
    is_function,
    reshaped,
    reshapes,
    rule_of,
)
from lattn_compile.passes.spelled.proposal import OUTER, NearMiss, Proposal
from lattn_compile.passes.spelled.vectorize import parts
from lattn_compile.passes.spelled.writer import Writer, aten, value

MatchBody = Callable[[fx.GraphModule], "Proposal | NearMiss | None"]

_STATE = 5
"""Position of `initial_state` in the op's arguments."""


def is_scan(node: fx.Node) -> bool:
    return _name(node) == "scan"


def is_while_loop(node: fx.Node) -> bool:
    return _name(node) == "while_loop"


def _name(node: fx.Node) -> str | None:
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else None


def rewrite_while_loop(gm: fx.GraphModule, node: fx.Node, match_body: MatchBody) -> Proposal | NearMiss | None:
    """The step in the body of a `while_loop` replaced; the loop is kept. The proposal stands in the body's graph."""
    _, body, carried, additional = node.args
    with _known_inputs(gm, body, len(carried), list(additional)):  # type: ignore[arg-type]
        found = match_body(_submodule(gm, body))
    return _inside(found, "a while_loop has no fixed number of tokens")


def rewrite_scan(gm: fx.GraphModule, scan_node: fx.Node, match_body: MatchBody) -> Proposal | NearMiss | None:
    """One op over all tokens in place of a scan, or, where that is not the same, the step in its body replaced.

    Args:
        gm: the functional graph that `scan_node` stands in.
        match_body: matches the body as one step; its proposal stands in the body's graph, over one token.

    Returns: a proposal in the graph of `gm`, with the body's as its `step`, or, with `evidence["kept"]` saying why,
        that of the body. The step is what was found and wants verifying; that it is done at every token follows
        from the rules of `lift`, whatever else the body computes.
    """
    _, init, xs, additional = scan_node.args
    with _known_inputs(gm, scan_node.args[0], len(init), [*xs, *additional]):  # type: ignore[arg-type, misc]
        found = match_body(_submodule(gm, scan_node.args[0]))
    if not isinstance(found, Proposal):
        return found
    writer = Writer(before=scan_node, like=scan_node)
    try:
        proposal = _Unrolled(gm, scan_node, found, writer).proposal()
    except _Keep as keep:
        writer.undo()
        return _inside(found, str(keep))
    return proposal


@contextlib.contextmanager
def _known_inputs(gm: fx.GraphModule, named: Any, carried: int, given: list[Any]) -> Iterator[None]:
    """What a loop's body is given at every token, or a slice of, is known outside: a decay that is a constant, or made
    by a sigmoid. A body that several loops share has inputs of several meanings.

    Args:
        named: the node that names the body. carried: how many of its inputs are. given: what the others are outside.
    """
    body = _submodule(gm, named)
    same = (n for n in gm.graph.find_nodes(op="get_attr") if getattr(gm, str(n.target), None) is body)
    callers = {user for n in same for user in n.users}
    inputs = body.graph.find_nodes(op="placeholder")[carried:]
    outer = given if len(callers) == 1 else []
    known = [(x, y) for x, y in zip(inputs, outer, strict=False) if isinstance(y, fx.Node)]
    for x, y in known:
        x.meta[OUTER] = y
    try:
        yield
    finally:
        for x, _ in known:
            del x.meta[OUTER]


def _inside(found: Proposal | NearMiss | None, why: str) -> Proposal | NearMiss | None:
    if not isinstance(found, Proposal):
        return found
    new = []
    for x, old in zip(found.new, found.old, strict=True):
        writer = Writer(before=x.next, like=x)
        # A loop insists on the strides of what it carries.
        settled = as_before(writer, x, old)
        assert settled is not None
        new.append(settled)
        found.inserted.extend(writer.inserted)
    return replace(found, form="scan", new=new, evidence={**found.evidence, "kept": why})


def _submodule(gm: fx.GraphModule, node: Any) -> fx.GraphModule:
    module = gm.get_submodule(node.target)
    assert isinstance(module, fx.GraphModule)
    return module


class _Keep(Exception):
    """Why the scan cannot go."""


class _Unrolled:
    """The body's nodes, each written once for all tokens, with a leading token axis, before the scan."""

    def __init__(self, gm: fx.GraphModule, scan_node: fx.Node, step: Proposal, writer: Writer) -> None:
        self.gm, self.node, self.step, self.writer = gm, scan_node, step, writer
        _, init, xs, additional = scan_node.args
        self.init: list[fx.Node] = list(init)  # type: ignore[arg-type]
        self.xs: list[fx.Node] = list(xs)  # type: ignore[arg-type]
        self.body = _submodule(gm, scan_node.args[0])
        inputs = self.body.graph.find_nodes(op="placeholder")
        n = len(self.init)
        self.carries, self.slices = inputs[:n], inputs[n : n + len(self.xs)]
        self.outer = dict(zip(inputs, [*self.init, *self.xs, *additional], strict=True))  # type: ignore[misc]
        self.returned: list[Any] = list(self.body.graph.output_node().args[0])  # type: ignore[arg-type]
        self.instead = dict(zip(step.old, step.new, strict=True))
        self.length = value(self.xs[0]).shape[0] if self.xs else 0
        self.env: dict[fx.Node, Any] = {}
        self.state: fx.Node | None = None

    def proposal(self) -> Proposal:
        step, writer = self.step, self.writer
        if step.state_dtype is not None:
            raise _Keep(f"the state is stored as {step.state_dtype} at every token")
        if not self.xs or not all(same_size(value(x).shape[0], self.length) for x in self.xs):
            raise _Keep("what it scans over is not known to be of one length")
        carried = self._carried()
        self._constants()
        args = [self._over_tokens(x) for x in step.op.args[:_STATE]]
        args.append(self._initial_state(carried))
        if any(isinstance(x, fx.Node) for x in step.op.args[_STATE + 1 :]):
            raise _Keep("the step has lengths of its own")
        op = writer.call(step.op.target, *args, *step.op.args[_STATE + 1 :], **step.op.kwargs)
        self._outputs_of(op)

        old, new = [], []
        for user in self.node.users:
            if user.target is not operator.getitem:
                raise _Keep("its outputs are not taken one by one")
            index: int = user.args[1]  # type: ignore[assignment]
            if not user.users:
                continue
            old.append(user)
            final = index < len(self.carries) and self.carries[index] is carried
            new.append(self._final(op) if final else self._returned(index))
        new = [self._like(x, y) for x, y in zip(new, old, strict=True)]
        roles = dict(zip(("q", "k", "v", "g", "beta", "state"), args, strict=True))
        frontier = dict.fromkeys(
            x for x in tree_leaves(self.node.args[1:]) if isinstance(x, fx.Node) and isinstance(value(x), torch.Tensor)
        )
        return Proposal(
            form="scan",
            rule=step.rule,
            decay=step.decay,
            anchor=self.node,
            op=op,
            frontier=list(frontier),
            old=old,
            new=new,
            inserted=writer.inserted,
            roles=roles,
            domains={self.outer[n]: domain for n, domain in step.domains.items() if n in self.outer},
            evidence={**step.evidence, "scan": self.node.name, "tokens": str(self.length)},
            step=step,
        )

    # --- the state -------------------------------------------------------------------------------------------------

    def _carried(self) -> fx.Node:
        """The carry that is the state; checks that what it becomes is the new state, in the layout it came in."""
        initial = self.step.op.args[_STATE]
        if not isinstance(initial, fx.Node):
            raise _Keep("the state does not come from a carry")
        self._into, carried = self._views(initial)
        if carried not in self.carries:
            raise _Keep("the state is not a carry as it is")
        self._out_of, self.state = self._views(self.returned[self.carries.index(carried)])
        if self.state.target is not operator.getitem or self.state.args != (self.step.op, 1):
            raise _Keep("the state that is carried on is not the one that was computed")
        if not self._inverse(value(carried), carried):
            raise _Keep("the state is carried on in another layout than it came in")
        return carried

    def _views(self, node: Any) -> tuple[list[fx.Node], fx.Node]:
        """The views, in order, that lead to `node`, and where they begin."""
        chain: list[fx.Node] = []
        while True:
            node = self.instead.get(node, node)
            if node.target in VIEWS or (_casts(node) and value(node).dtype == value(node.args[0]).dtype):
                chain.append(node)
                node = node.args[0]
            else:
                return chain[::-1], node

    def _inverse(self, like: torch.Tensor, carried: fx.Node) -> bool:
        """Whether the views from the new state to the carry undo those from the carry to the state.

        Followed on numbered elements; symbols stand for distinct primes, so that sizes do not agree by chance.
        """
        primes = iter([3, 5, 7, 11, 13, 17, 19])
        known: dict[Any, int] = {}

        def size(n: Any) -> int:
            if not isinstance(n, torch.SymInt):
                return int(n)
            for symbol in sorted(n.node.expr.free_symbols, key=str):
                if symbol not in known:
                    known[symbol] = next(primes)
            return int(n.node.expr.subs(known))

        try:
            shape = [size(n) for n in like.shape]
            x = numbers = torch.arange(math.prod(shape)).reshape(shape)
            for node in (*self._into, *self._out_of):
                if reshapes(node.target):
                    x = x.reshape([size(n) for n in value(node).shape])
                elif not _casts(node):
                    args = [a for a in tree_leaves((node.args[1:], node.kwargs)) if isinstance(a, fx.Node)]
                    if args:
                        return False
                    x = node.target(x, *node.args[1:])  # type: ignore[operator]
        except (StopIteration, RuntimeError, IndexError):
            return False
        return x.shape == numbers.shape and torch.equal(x, numbers)

    def _viewed(self, chain: Iterable[fx.Node], x: fx.Node) -> fx.Node:
        """`x` through views of the body."""
        for node in chain:
            if reshapes(node.target):
                x = self._sized(lambda x=x, node=node: reshaped(self.writer, x, value(node).shape))  # type: ignore[misc]
            elif not _casts(node):
                x = self.writer.call(node.target, x, *node.args[1:])
        return x

    def _initial_state(self, carried: fx.Node) -> fx.Node:
        return self._viewed(self._into, self.outer[carried])

    def _final(self, op: fx.Node) -> fx.Node:
        return self._viewed(self._out_of, self.writer.getitem(op, 1))

    # --- everything else -------------------------------------------------------------------------------------------

    def _over_tokens(self, node: Any) -> fx.Node | None:
        """An argument of the step's op, [B, 1, ...], as [B, T, ...]."""
        if node is None:
            return None
        one = _one_token(node)
        x = self._lifted(one or node).stacked()
        if one is None:
            x = self.writer.call(aten.squeeze.dim, x, 2)
        return self.writer.permute(x, [1, 0, *range(2, value(x).dim())])

    def _outputs_of(self, op: fx.Node) -> None:
        """The step's output, [B, 1, HV, V], at every token."""
        for node in self.step.op.users:
            if node.target is operator.getitem and node.args[1] == 0:
                tokens = self.writer.permute(self.writer.getitem(op, 0), [1, 0, 2, 3])
                self.env[node] = self._operand(node, write=lambda tokens=tokens: self.writer.unsqueeze(tokens, 2))
                for user in node.users:
                    if user.target is aten.select.int and user.args[1:] == (1, 0):
                        self.env[user] = self._operand(user, write=lambda tokens=tokens: tokens)

    def _returned(self, index: int) -> fx.Node:
        node = self.returned[index]
        if index < len(self.carries):
            if self._unchanged(index):
                return self.init[index]
            raise _Keep(f"it also carries {self.carries[index].name}")
        if not isinstance(node, fx.Node):
            raise _Keep("one of its outputs is no tensor")
        return self._lifted(node).stacked()

    def _unchanged(self, index: int) -> bool:
        """Whether a carry is the same at every token."""
        chain, root = self._views(self.returned[index])
        return root is self.carries[index] and all(copies(n.target) for n in chain)

    def _like(self, new: fx.Node, old: fx.Node) -> fx.Node:
        settled = as_before(self.writer, new, old)
        if settled is None:
            raise _Keep(f"its output {old.name} has another shape")
        return settled

    def _constants(self) -> None:
        """Inputs of the body, and sizes computed in it."""
        for node in self.body.graph.nodes:
            if node in self.slices:
                self.env[node] = self._operand(node, write=lambda node=node: self.outer[node])
            elif node in self.carries:
                if self._unchanged(self.carries.index(node)):
                    self.env[node] = self._operand(node, constant=self.outer[node])
            elif node.op == "placeholder":
                outer = self.outer[node]
                tensor = isinstance(value(node), torch.Tensor)
                self.env[node] = self._operand(node, constant=outer) if tensor else outer
            elif isinstance(value(node), torch.SymInt):
                self.env[node] = self._size(node)

    def _size(self, node: fx.Node) -> Any:
        try:
            return self.writer.size(value(node))
        except LookupError:
            if all(n in self.env and isinstance(value(n), torch.SymInt) for n in node.all_input_nodes):
                return self.writer.call(node.target, *tree_map_only(fx.Node, self.env.get, node.args))
            raise _Keep(f"the size {node.name} is not known outside it") from None

    def _operand(self, node: fx.Node, **how: Any) -> Operand:
        return Operand(self.writer, self.length, value(node), **how)

    def _lifted(self, node: fx.Node) -> Operand:
        """A tensor of the body at every token, what it is computed from first."""
        waiting = [node]
        while waiting:
            current = self.instead.get(waiting[-1], waiting[-1])
            if current is self.step.op:
                raise _Keep("it needs the state at every token")
            todo = [x for x in self._inputs(current) if self.instead.get(x, x) not in self.env]
            if current not in self.env and todo:
                waiting.extend(todo)
                continue
            if current not in self.env:
                self.env[current] = self._written(current)
            waiting.pop()
        return self.env[self.instead.get(node, node)]  # type: ignore[no-any-return]

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        if node.target is operator.getitem and isinstance(source := node.args[0], fx.Node) and source.target in PARTS:
            return [bind(source.target, source.args, source.kwargs)["self"]]
        return node.all_input_nodes

    def _written(self, node: fx.Node) -> Operand:
        if node in self.carries:
            raise _Keep(f"token by token, it also needs {node.name}")
        if node.op == "get_attr":
            return self._attribute(node)
        if not is_function(node):
            raise _Keep(f"it calls {node.target}")
        if node.target is operator.getitem:
            return self._part(node)
        inputs = [self.env[self.instead.get(x, x)] for x in node.all_input_nodes]
        if not isinstance(value(node), torch.Tensor):
            raise _Keep(f"it calls {node.target}")
        if all(not isinstance(x, Operand) or x.constant is not None for x in inputs):
            args, kwargs = tree_map_only(fx.Node, self._constant, (node.args, node.kwargs))
            return self._operand(node, constant=self.writer.call(node.target, *args, **kwargs))
        rule = rule_of(node.target)
        args, kwargs = tree_map_only(fx.Node, self._argument, (node.args, node.kwargs))
        call = Call(self.writer, self.length, node, bind(node.target, args, kwargs), lambda x: self.env[x[0]])
        write = None if rule is None else rule(call)
        if write is None:
            raise _Keep(f"there is no {node.target} over all tokens at once")
        return self._operand(node, write=lambda: self._sized(write))

    def _sized(self, write: Callable[[], fx.Node]) -> fx.Node:
        try:
            return write()
        except LookupError as error:
            raise _Keep(str(error)) from None

    def _argument(self, node: fx.Node) -> Any:
        node = self.instead.get(node, node)
        known = self.env[node]
        return Tensors([node]) if isinstance(known, Operand) else known

    def _constant(self, node: fx.Node) -> Any:
        known = self.env[self.instead.get(node, node)]
        return known.constant if isinstance(known, Operand) else known

    def _part(self, node: fx.Node) -> Operand:
        known = parts(node.args[0]) if isinstance(node.args[0], fx.Node) else None
        piece = known[node.args[1]] if known is not None else None  # type: ignore[index]
        if piece is None:
            raise _Keep(f"the sizes of {node.name} are not known")
        base, dim, end = self.env[self.instead.get(piece.base, piece.base)], piece.dim + 1, piece.start + piece.size

        def write() -> fx.Node:
            if piece.keep:
                return self.writer.call(aten.slice.Tensor, base.stacked(), dim, piece.start, end)
            return self.writer.select(base.stacked(), dim, piece.start)

        return self._operand(node, write=write)

    def _attribute(self, node: fx.Node) -> Operand:
        tensor = operator.attrgetter(str(node.target))(self.body)
        if not isinstance(tensor, torch.Tensor):
            raise _Keep(f"it uses {node.target}")
        names = (f"{self.node.name}_{node.name}_{i}" for i in range(1000))
        name = next(n for n in names if getattr(self.gm, n, tensor) is tensor)
        self.gm.register_buffer(name, tensor, persistent=False)
        with self.writer.graph.inserting_before(self.writer.before):
            outer = self.writer.graph.get_attr(name)
        outer.meta["val"] = value(node)
        self.writer.inserted.append(outer)
        return self._operand(node, constant=outer)


def _one_token(node: fx.Node) -> fx.Node | None:
    """What was given an axis of one token at position 1, if that is what `node` is."""
    at: Any = 1
    if node.target is aten.permute.default and node.args[1] == [1, 0, *range(2, value(node).dim())]:
        node, at = node.args[0], 0  # type: ignore[assignment]
    added = node.target is aten.unsqueeze.default and node.args[1] == at
    return node.args[0] if added else None  # type: ignore[return-value]


def _casts(node: fx.Node) -> bool:
    return node.target in (aten.to.dtype, aten._to_copy.default)
