"""What stands around a decode step on a GPU and is taken into kernels: gates, and the short convolution before it.

A pass over a graph that is about to be lowered. A decode step of a layer is a handful of numbers a head, and each
operation left beside its kernel is a launch of its own. Taken are, where the graph says exactly that:

* `beta = sigmoid(b)`, rounded to the type of b;
* `g = -exp(log_rate) * softplus(a + bias)`, in fp32, of any a, log_rate and bias that are cast to it;
* a convolution of each channel over its last inputs, of which only the newest output is used: `cat` of the cached
  inputs with the new one, the convolution, `silu`, and the write of the last inputs back to where they were cached;
* beside that convolution, the product with weights that only those gates are read from.

A step of a packed state is a call of an op (`packed/ops.py`), which gates cannot be taken into as they lie. There they
are made where the product is, beside the convolution; and queries and keys that the model repeated for its value heads
are read from where they were repeated.

Operands are read where a projection left them: splits, reshapes and copies in between move nothing. Whatever is
anything else stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lattn_compile.lowering import _torch_in_place as in_place
from lattn_compile.lowering import _torch_triton as private

__all__ = [
    "Placed",
    "erase",
    "fold_convolutions",
    "fold_gates",
    "fold_repeats",
    "memory_of",
    "origin",
    "packed_steps",
    "placed",
    "silu",
    "sources",
    "transposed",
]

_aten, _prims = torch.ops.aten, torch.ops.prims

_SAME_ORDER = frozenset(
    {
        _aten.reshape.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.unsqueeze.default,
    }
)
"""They keep the order of a tensor's elements, and so does a contiguous copy."""

_VIEWS = _SAME_ORDER | {
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.transpose.int,
}

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Placed(NamedTuple):
    """Rows of numbers in memory: number j of row i lies at `i * row + j // run * group + j % run * step`."""

    node: fx.Node
    row: int
    group: int
    step: int
    run: int


def placed(node: Any, rows: int, numbers: int) -> Placed | None:
    """Where `node`, taken as `[rows, numbers]` in the order of its elements, lies in memory, if two strides say it."""
    value = _value(node)
    if value is None or value.numel() != rows * numbers:
        return None
    node = origin(node)
    value = _value(node)
    if value is None:
        return None
    dims = [(n, s) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]
    if not all(isinstance(n, int) and isinstance(s, int) for n, s in dims):
        return None
    inner: list[tuple[int, int]] = []
    left = numbers
    while left > 1 and dims:
        n, s = dims.pop()
        if left % n and n % left:
            return None
        if n > left:  # the rest of this axis counts rows
            dims.append((n // left, s * left))
            n = left
        left //= n
        if inner and s == inner[-1][0] * inner[-1][1]:
            n, s = n * inner[-1][0], inner.pop()[1]
        inner.append((n, s))
    outer: list[tuple[int, int]] = []
    while dims:
        n, s = dims.pop()
        if outer and s == outer[-1][0] * outer[-1][1]:
            n, s = n * outer[-1][0], outer.pop()[1]
        outer.append((n, s))
    if left > 1 or len(inner) > 2 or len(outer) > 1:
        return None
    inner = inner or [(1, 1)]
    (run, step), (_, group) = inner[0], inner[1] if len(inner) == 2 else (1, 0)
    return Placed(node, outer[0][1] if outer else 0, group, step, run)


def origin(node: fx.Node) -> fx.Node:
    """What has the elements of `node` in the same order, and moved nothing to have them so."""
    while node.target in _SAME_ORDER or _is_contiguous_copy(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_contiguous_copy(node: fx.Node) -> bool:
    kept = node.kwargs.get("memory_format", torch.preserve_format)
    return node.target is _aten.clone.default and kept in (torch.contiguous_format, torch.preserve_format)


def _value(node: Any) -> Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _uncast(node: Any) -> Any:
    """What is cast to fp32 here, or the node itself."""
    if _is(node, _prims.convert_element_type.default) and node.args[1] is torch.float32:
        value = _value(node.args[0])
        if value is not None and value.dtype in _FLOATS:
            return node.args[0]
    return node


def _pairs(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """The two operands of a commutative operation, either way round."""
    if _is(node, target) and len(node.args) == 2 and not node.kwargs:
        a, b = node.args
        yield a, b
        yield b, a


def packed_steps(graph: fx.Graph) -> list[tuple[fx.Node, dict[str, Any]]]:
    """Steps of one token of packed states by Triton kernels, and what they are given."""
    ops = (torch.ops.lattn.decode_device_.default, torch.ops.lattn.replay_device_.default)
    ragged = ("cu_seqlens", "sequence_lengths", "state_indices")
    found = []
    for node, given in in_place.calls(graph, ops):
        if _value(given["q"]).shape[1] == 1 and all(given[name] is None for name in ragged):  # type: ignore[union-attr]
            found.append((node, given))
    return found


def fold_repeats(graph: fx.Graph) -> int:
    """Gives packed steps of `graph` queries and keys from where they were repeated; returns how many steps."""
    found = 0
    for node, given in packed_steps(graph):
        old = [given["q"], given["k"]]
        q, k = (_unrepeated(x) for x in old)
        if q is not None and k is not None:
            in_place.change(node, q=q, k=k)
            erase(graph, old)
            found += 1
    return found


def _unrepeated(node: Any) -> fx.Node | None:
    """Of heads `[B, 1, H, D]` that are every R-th of `[B, 1, H * R, D]`, which are those each R times: those."""
    if not _is(node, _aten.slice.Tensor) or len(node.args) != 5 or node.args[1] not in (2, -2) or node.args[2] != 0:
        return None
    value, wide, spread = _value(node), _value(node.args[0]), origin(node.args[0])
    if value is None or wide is None or not _is(spread, _aten.expand.default):
        return None
    once: Any = spread.args[0]
    once = once.args[0] if _is(once, _aten.unsqueeze.default) and once.args[1] in (3, -2) else None
    given, repeats = _value(once), node.args[4]
    if given is None or given.shape != value.shape or node.args[3] < wide.shape[2]:
        return None
    batch, tokens, heads, dim = given.shape
    same = tuple(_value(spread).shape) == (batch, tokens, heads, repeats, dim)  # type: ignore[union-attr]
    return once if same and tuple(wide.shape) == (batch, tokens, heads * repeats, dim) else None


def fold_gates(graph: fx.Graph) -> int:
    """Takes gates into the decode steps of `graph`; returns how many."""
    from lattn_compile.kernels import decode_step

    taken = 0
    for node, _ in private.launches(graph, decode_step.step):
        given = private.arguments(node)
        heads, (sequences, *_) = given["value_heads"], given["source"].meta["val"].shape
        if not isinstance(sequences, int):
            continue
        beta = _sigmoid_of(given["beta"], sequences, heads)
        if beta is not None:
            given |= {"beta": beta.node, "BETA": decode_step.SIGMOID, **_where("beta", beta)}
        decay = _mamba(given["g"], sequences, heads) if given["DECAY"] == 1 else None
        if decay is not None:
            rate, x, bias = decay
            given |= {"g": x.node, "log_rate": rate, "bias": bias, "DECAY": decode_step.MAMBA, **_where("g", x)}
        old = private.arguments(node)
        private.relaunch(node, given)
        erase(graph, [x for x in (old["beta"], old["g"]) if isinstance(x, fx.Node)])
        taken += (beta is not None) + (decay is not None)
    return taken


def _where(name: str, at: Placed) -> dict[str, int]:
    return {
        f"{name}_token": at.row,
        f"{name}_group": at.group,
        f"{name}_head": at.step,
        f"{name.upper()}_RUN": at.run,
    }


def _sigmoid_of(node: Any, rows: int, heads: int) -> Placed | None:
    if not isinstance(node, fx.Node):
        return None
    node = _uncast(origin(node))
    node = origin(node)
    if not _is(node, _aten.sigmoid.default):
        return None
    raw = _value(node.args[0])
    if raw is None or raw.dtype not in _FLOATS:
        return None
    return placed(node.args[0], rows, heads)


def _mamba(node: fx.Node, rows: int, heads: int) -> tuple[fx.Node, Placed, fx.Node] | None:
    """`log_rate, a, bias` of `-exp(log_rate) * softplus(a + bias)`."""
    for rate, soft in _pairs(origin(node), _aten.mul.Tensor):
        if not _is(rate, _aten.neg.default) or not _is(rate.args[0], _aten.exp.default):
            continue
        log_rate, x = _uncast(rate.args[0].args[0]), _softplus_of(soft)
        if x is None or not _is_vector(log_rate, heads):
            continue
        if any(_value(y).dtype is not torch.float32 for y in (rate, x)):  # type: ignore[union-attr]
            continue
        for a, bias in _pairs(x, _aten.add.Tensor):
            bias = _uncast(bias)
            if _is_vector(bias, heads) and (at := placed(_uncast(a), rows, heads)) is not None:
                return log_rate, at, bias
    return None


def _is_vector(node: Any, heads: int) -> bool:
    """Whether it is one number a head, neighbours in memory, and no value of the graph that might be fused."""
    value = _value(node)
    return (
        value is not None
        and node.op in ("placeholder", "get_attr")
        and tuple(value.shape) == (heads,)
        and value.stride() == (1,)
        and value.dtype in _FLOATS
    )


def _softplus_of(node: Any) -> fx.Node | None:
    """x of `where(x > 20, x, log1p(exp(x)))`."""
    if _is(node, _aten.softplus.default):
        return node.args[0] if tuple(node.args[1:]) in ((), (1,), (1, 20)) else None  # type: ignore[no-any-return]
    if not _is(node, _aten.where.self):
        return None
    above, x, below = node.args
    if not _is(above, _aten.gt.Scalar) or tuple(above.args) != (x, 20) or not _is(below, _aten.log1p.default):
        return None
    exp = below.args[0]
    return x if _is(exp, _aten.exp.default) and exp.args[0] is x else None


class _Convolution(NamedTuple):
    """What `fold_convolutions` replaces: `output` and `kept` (the inputs moved on), both made of `joined`."""

    joined: fx.Node
    output: fx.Node
    kept: fx.Node
    new: list[tuple[Placed, int]]
    past: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    silu: bool


_MOST_ROWS, _MOST_SEQUENCES = 128, 256
"""Of a projection that is taken along: a library's product reads the weights once for all sequences, we do for each."""


class _Beside(NamedTuple):
    """A product that a convolution takes along, and what is made of it there: g and beta of a step, or nothing."""

    product: fx.Node
    g: fx.Node | None = None
    beta: fx.Node | None = None
    log_rate: fx.Node | None = None
    bias: fx.Node | None = None
    at_g: tuple[int, int, int, int] = (0, 0, 0, 1)
    at_beta: tuple[int, int, int, int] = (0, 0, 0, 1)


def fold_convolutions(graph: fx.Graph, *, projections: bool) -> int:
    """Puts one kernel in the place of each step of a short convolution in `graph`; returns how many.

    Args:
        projections: the product that gates come from is taken along.
    """
    found = 0
    for node in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        if (step := _convolution(node)) is not None:
            _replace(graph, step, _projection(step) if projections else None)
            found += 1
    if found:
        private.sorted_again(graph)
    return found


def _projection(c: _Convolution) -> _Beside | None:
    """The small product that nothing but decode steps reads, of the same input as the product that the convolution's
    inputs come from."""
    from lattn_compile.kernels import decode_step

    product = memory_of(c.new[0][0].node)
    if not _is(product, _aten.mm.default) or not isinstance(product.args[0], fx.Node):
        return None
    source = origin(product.args[0])
    steps = {node for node, _ in private.launches(product.graph, decode_step.step)}
    packed = packed_steps(product.graph)
    for node in product.graph.find_nodes(op="call_function", target=_aten.mm.default):
        x, weights = node.args
        if node is product or not isinstance(x, fx.Node) or origin(x) is not source:
            continue
        value, given = _value(node), _value(x)
        if value is None or given is None or not given.is_contiguous() or given.dtype not in _FLOATS:
            continue
        sequences, rows = value.shape
        fits = isinstance(sequences, int) and sequences <= _MOST_SEQUENCES and rows <= _MOST_ROWS
        if not fits or transposed(weights) is None:
            continue
        if _readers(node) <= steps:
            return _Beside(node)
        for _, arguments in packed:
            if (made := _gates_of(node, arguments["g"], arguments["beta"])) is not None:
                return made
    return None


def _gates_of(product: fx.Node, g: Any, beta: Any) -> _Beside | None:
    """How g and beta, which alone are made of `product`, are made of it."""
    sequences, rows = product.meta["val"].shape
    if not isinstance(g, fx.Node) or not isinstance(beta, fx.Node) or rows % 2:
        return None
    if any(tuple(_value(x).shape) != (sequences, 1, rows // 2) for x in (g, beta)):  # type: ignore[union-attr]
        return None
    strength, decay = _sigmoid_of(beta, sequences, rows // 2), _mamba(g, sequences, rows // 2)
    if strength is None or decay is None or _value(g).dtype is not torch.float32:  # type: ignore[union-attr]
        return None
    log_rate, a, bias = decay
    places = [_rows_of(at, product) for at in (a, strength)]
    own = {g, beta, *_made_of(g), *_made_of(beta)}
    if None in places or not _read_within(product, own, {g, beta}):
        return None
    return _Beside(product, g, beta, log_rate, bias, *places)  # type: ignore[arg-type]


def _rows_of(at: Placed, product: fx.Node) -> tuple[int, int, int, int] | None:
    """Which rows of weights the numbers come from, if they lie in what `product` wrote: the first, group, step, run."""
    node = at.node
    while node is not product:
        parent = node.all_input_nodes[0] if node.target in _VIEWS or _is(node, operator.getitem) else None
        if parent is None:
            return None
        above = _value(parent)
        # A view of what lies in one piece is none that was copied.
        if node.target in _SAME_ORDER and (above is None or not above.is_contiguous()):
            return None
        node = parent
    value, (sequences, rows) = _value(at.node), product.meta["val"].shape
    if value is None or not product.meta["val"].is_contiguous() or not isinstance(value.storage_offset(), int):
        return None
    inside = sequences == 1 or at.row == rows
    return (int(value.storage_offset()), at.group, at.step, at.run) if inside else None


def _read_within(node: fx.Node, own: set[fx.Node], ends: set[fx.Node]) -> bool:
    """Whether whatever is made of `node` is in `own`, up to `ends`."""
    return all(user in own and (user in ends or _read_within(user, own, ends)) for user in node.users)


def transposed(node: Any) -> fx.Node | None:
    """A parameter, contiguous, of which `node` is the transpose."""
    if not _is(node, _aten.permute.default) or node.args[1] != [1, 0]:
        return None
    weight, value = node.args[0], _value(node.args[0])
    return weight if value is not None and weight.op == "placeholder" and value.is_contiguous() else None


def memory_of(node: fx.Node) -> fx.Node:
    """What a view, or a part of one, is a view of."""
    while node.target in _VIEWS or _is(node, operator.getitem):
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> set[fx.Node]:
    """Who reads `node` or views of it."""
    found: set[fx.Node] = set()
    for user in node.users:
        found |= _readers(user) if user.target in _VIEWS or _is(user, operator.getitem) else {user}
    return found


def _convolution(node: fx.Node) -> _Convolution | None:
    joined, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if not isinstance(joined, fx.Node) or not isinstance(weight, fx.Node) or not _is(joined, _aten.cat.default):
        return None
    taps, parts, dim = _value(weight), _nodes(joined.args[0]), joined.args[1] if len(joined.args) > 1 else 0
    if taps is None or taps.dim() != 3 or taps.shape[1] != 1 or taps.shape[0] != groups or len(parts) != 2:
        return None
    if transposed or (stride, padding, dilation) != ([1], [0], [1]) or dim not in (-1, 2):
        return None
    (past, new), memory = parts, origin(weight)
    inputs, stored = _value(past), _value(memory)
    if inputs is None or stored is None or inputs.device.type != "cuda" or inputs.dtype not in _FLOATS:
        return None
    # Weights may be computed: of a layer that is cut by heads they are put in order here.
    if past.op != "placeholder" or joined in _made_of(memory):
        return None
    if not all(x.is_contiguous() and x.dtype is inputs.dtype for x in (inputs, stored)):
        return None
    sequences, channels, kept = inputs.shape
    if not isinstance(sequences, int) or taps.shape[2] - 1 > kept or channels != groups:
        return None
    if bias is not None and not _is_vector(bias, channels):
        return None
    new_inputs = sources(new, sequences, channels)
    last = _last(node, kept + 2 - taps.shape[2])
    moved = [x for x in joined.users if x is not node]
    if new_inputs is None or last is None or len(moved) != 1 or not _is_last(moved[0], kept, kept + 1):
        return None
    active = silu(last)
    by_channel = bias if isinstance(bias, fx.Node) else None
    return _Convolution(joined, active or last, moved[0], new_inputs, past, memory, by_channel, active is not None)


def _made_of(node: fx.Node) -> set[fx.Node]:
    """What `node` is computed from."""
    found, above = set[fx.Node](), [node]
    while above:
        above = [x for y in above for x in y.all_input_nodes if x not in found and not found.add(x)]  # type: ignore[func-returns-value]
    return found


def _nodes(x: Any) -> list[fx.Node]:
    return [y for y in x if isinstance(y, fx.Node)] if isinstance(x, (list, tuple)) else []


def _last(node: fx.Node, length: int) -> fx.Node | None:
    """Who alone reads of `node` `[.., length]`, and only its last output."""
    if length == 1:
        return node
    users = list(node.users)
    return users[0] if len(users) == 1 and _is_last(users[0], 1, length) else None


def _is_last(node: fx.Node, count: int, length: int) -> bool:
    """Whether it is the last `count` of `length` on the last of three axes."""
    if not _is(node, _aten.slice.Tensor) or len(node.args) != 4 or node.args[1] not in (2, -1):
        return False
    start, end = node.args[2:]
    if not isinstance(start, int) or not isinstance(end, int):
        return False
    return (start + length if start < 0 else start) == length - count and end >= length


def silu(node: fx.Node) -> fx.Node | None:
    """`silu` of `node`, if nothing else is made of it: x / (1 + exp(-x)) in fp32, then cast back."""
    dtype = _value(node).dtype  # type: ignore[union-attr]
    x = node
    if dtype is not torch.float32:
        if len(node.users) != 1 or _uncast(wide := next(iter(node.users))) is not node:
            return None
        x = wide
    for quotient in x.users:
        if _is(quotient, _aten.div.Tensor) and quotient.args[0] is x and _one_more(quotient.args[1], x):
            if set(x.users) != {quotient, quotient.args[1].args[0].args[0]}:  # type: ignore[union-attr]
                return None
            if dtype is torch.float32:
                return quotient
            users = list(quotient.users)
            back = _is(users[0], _prims.convert_element_type.default) and users[0].args[1] is dtype
            return users[0] if len(users) == 1 and back else None
    return None


def _one_more(node: Any, x: fx.Node) -> bool:
    """Whether it is `exp(-x) + 1`."""
    if not _is(node, _aten.add.Tensor) or node.args[1] != 1 or not _is(node.args[0], _aten.exp.default):
        return False
    negative = node.args[0].args[0]
    return _is(negative, _aten.neg.default) and negative.args[0] is x


def sources(node: fx.Node, sequences: int, channels: int) -> list[tuple[Placed, int]] | None:
    """Where new inputs `[N, C, 1]`, or `[.., C]` of N rows, lie, in the order of their channels."""
    from lattn_compile.kernels.conv_step import SOURCES

    node = origin(node)
    if _is_turned(node):
        inner, one = origin(node.args[0]), node.meta["val"].shape[2] == 1  # type: ignore[arg-type]
        if _is_turned(inner):
            node = origin(inner.args[0])  # type: ignore[arg-type]
        elif one:  # whose order is the same either way
            node = inner
    value, parts = _value(node), [node]
    if value is not None and _is(node, _aten.cat.default) and value.shape[-1] == channels:
        dim, several = node.args[1] if len(node.args) > 1 else 0, _nodes(node.args[0])
        if dim in (-1, value.dim() - 1) and len(several) <= SOURCES:
            parts = several
    found = []
    for part in parts:
        value = _value(part)
        at = None if value is None else placed(part, sequences, value.numel() // sequences)
        if value is None or at is None or at.step != 1:
            return None
        found.append((at, value.numel() // sequences))
    return found if sum(count for _, count in found) == channels else None


def _is_turned(node: fx.Node) -> bool:
    """Whether it has the last two of three axes in each other's place."""
    return _is(node, _aten.permute.default) and node.args[1] == [0, 2, 1]


def _replace(graph: fx.Graph, c: _Convolution, taken: _Beside | None) -> None:
    from lattn_compile.kernels import conv_step

    nodes = [at.node for at, _ in c.new]
    rest = [c.past, c.weight, *([] if c.bias is None else [c.bias])]
    beside: list[Any] = [] if taken is None else [taken.product.args[0], transposed(taken.product.args[1])]
    gated: list[Any] = [] if taken is None or taken.g is None else [taken.log_rate, taken.bias]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        new = [(next(given), count, at.row, at.group, at.run) for at, count in c.new]
        past, weight, bias = next(given), next(given), None if c.bias is None else next(given)
        weight = weight.view(past.shape[1], -1)
        x = (next(given), next(given)) if beside else None
        gates = None
        if taken is not None and gated:
            dtype = taken.beta.meta["val"].dtype  # type: ignore[union-attr]
            gates = conv_step.Gates(next(given), next(given), dtype, taken.at_beta, taken.at_g)
        out, moved, *more = conv_step.forward(new, past, weight, bias, silu=c.silu, beside=x, gates=gates)
        return (out.unsqueeze(-1), moved, *(y.unsqueeze(1) if gated else y for y in more))

    out, moved, *more = private.inserted(graph, c.joined, call, [*nodes, *rest, *beside, *gated])
    old = [user for user in c.kept.users if _is(user, _aten.copy.default) and user.args == (c.past, c.kept)]
    replaced = [(c.output, out), *((x, moved) for x in (*old, c.kept))]
    if taken is not None:
        replaced += zip((taken.g, taken.beta) if gated else (taken.product,), more, strict=True)  # type: ignore[arg-type]
    for node, new in replaced:
        node.replace_all_uses_with(new)
    erase(graph, [node for node, _ in replaced])


def erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Nodes that nobody reads any more, and what nobody else read."""
    gone: set[fx.Node] = set()
    while nodes:
        node = nodes.pop(0)
        if node not in gone and not node.users and node.op == "call_function":
            gone.add(node)
            nodes += node.all_input_nodes
            graph.erase_node(node)
