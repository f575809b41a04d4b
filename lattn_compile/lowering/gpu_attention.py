"""Attention in a hybrid's other layers, on a GPU: calls of a library that a compiled model spells dearer than needed.

Of one new token: a model whose query heads share key heads repeats keys and values for them in front of the call, which
with a mask knows no other way, and that copy is most of the work. But the query heads of a group, which see the same
keys under the same mask, are to the library as good as that many tokens of one head: the same sums. So they are to a
kernel made for it (`kernels/attend_step.py`), for the sizes that it has.

Of a prefill: a model that is traced makes a causal mask of numbers, which nobody can look at then. Where it is made of
nothing but sizes it can be looked at here, and "causal" said instead, which reads no mask and skips half of the work.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from lattn_compile.lowering import _torch_triton as private

__all__ = ["say_causal", "share_keys"]

_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_cudnn_attention.default
_BACKWARD = _aten._scaled_dot_product_cudnn_attention_backward.default
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)

_SHUT = -65504.0
"""What torch adds for cuDNN where a mask of truth values is false; so does anyone who adds less. Beside a diagonal that
is open, its share of a softmax is 0."""

_MOST_SCORES, _MOST_STEPS = 1 << 26, 64
"""Of a mask that is looked at: its numbers, and the operations that it is made of."""


def share_keys(graph: fx.Graph, *, launched: bool) -> int:
    """Lets attention of one token in `graph` read keys and values that were repeated for it as they were before, by a
    kernel of ours with `launched`; returns how many calls. A pass behind all others
    (`post_grad_custom_post_pass`)."""
    found, masks, known = 0, dict[str, fx.Node](), dict[Any, str]()
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        if (shared := _shared(node)) is not None:
            if isinstance(mask := _given(node)["attn_bias"], fx.Node):
                node.replace_input_with(mask, masks.setdefault(_spelled(mask, known), mask))
            _replace(graph, node, *shared, launched=launched)
            found += 1
    return found


def say_causal(graph: fx.Graph) -> int:
    """Takes masks from attention in `graph` that are causal whatever the inputs are; returns from how many calls.

    On the graph of forward and backward: behind their partition, a mask is an input of the latter.
    """
    found, known = 0, dict[fx.Node, bool]()
    calls = [x for op in (_ATTENTION, _BACKWARD) for x in graph.find_nodes(op="call_function", target=op)]
    for node in calls:
        given = _given(node)
        mask = given["attn_bias"]
        if not isinstance(mask, fx.Node) or given["is_causal"]:
            continue
        if mask not in known:
            known[mask] = _is_causal(mask)
        if known[mask]:
            given |= {"attn_bias": None, "is_causal": True}
            scale = given.pop("scale")
            node.args, node.kwargs = tuple(given.values()), {"scale": scale}
            found += 1
    return found


def _is_causal(mask: fx.Node) -> bool:
    """Whether a mask that is added, `[1, 1, S, S]`, is 0 up to the diagonal and shut behind it, of sizes alone."""
    shape = mask.meta["val"].shape
    if len(shape) != 4 or not all(isinstance(n, int) for n in shape):
        return False
    if tuple(shape[:2]) != (1, 1) or shape[2] != shape[3] or shape[2] * shape[3] > _MOST_SCORES:
        return False
    value = _computed(mask)
    if value is None:
        return False
    with private.real_tensors():
        lower = torch.ones(shape[2:], dtype=torch.bool).tril_()
        value = value[0, 0]
        return bool(((value == 0) == lower).all() and ((value <= _SHUT) == ~lower).all())


def _computed(node: fx.Node) -> Tensor | None:
    """The value of `node`, on the CPU, if no input of the graph has a part in it."""
    needed, seen = [node], {node}
    for x in needed:
        if x.op != "call_function" or not isinstance(x.target, torch._ops.OpOverload) or len(needed) > _MOST_STEPS:
            return None
        if torch.Tag.nondeterministic_seeded in x.target.tags:
            return None
        needed += [y for y in x.all_input_nodes if y not in seen and not seen.add(y)]  # type: ignore[func-returns-value]
    values: dict[fx.Node, Any] = {}

    def here(x: Any) -> Any:
        return torch.device("cpu") if isinstance(x, torch.device) else x

    try:
        with private.real_tensors():
            for x in [x for x in node.graph.nodes if x in seen]:
                args, kwargs = map_aggregate(fx.map_arg((x.args, x.kwargs), values.__getitem__), here)  # type: ignore[misc]
                values[x] = x.target(*args, **kwargs)
                for y in [y for y in x.all_input_nodes if all(z in values for z in y.users if z in seen)]:
                    values.pop(y)  # nobody reads it any more
    except Exception:  # an operation that no CPU has, or no memory: the mask stays what it was
        return None
    value = values[node]
    return value if isinstance(value, Tensor) and value.device.type == "cpu" else None


def _given(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by name, in the order of its schema."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    return given | dict(zip(given, node.args, strict=False)) | dict(node.kwargs)


def _shared(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Keys and values `[B, groups, S, D]` of a call that reads them repeated, and whose query is one token."""
    given = _given(node)
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_bias"))
    if given["dropout_p"] or given["is_causal"] or given["return_debug_mask"] or given["compute_log_sumexp"]:
        return None
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return None
    if query.meta["val"].shape[2] != 1:
        return None
    keys, values = _repeated(key), _repeated(value)
    if keys is None or values is None or keys.meta["val"].shape[:2] != values.meta["val"].shape[:2]:
        return None
    sized = [x.meta["val"] for x in (query, keys, values, mask) if x is not None]
    if not all(isinstance(n, int) for x in sized for n in x.shape):
        return None
    batch, _, length, _ = keys.meta["val"].shape
    # A mask may also be one number for all keys, or one for each head.
    if mask is not None and tuple(sized[-1].shape) not in ((1, 1, 1, length), (batch, 1, 1, length)):
        return None
    return keys, values


def _spelled(node: Any, known: dict[Any, str], steps: int = _MOST_STEPS) -> str:
    """What a mask is computed as: each call of a library makes one of its own, of the same truth values."""
    if isinstance(node, (list, tuple)):
        return f"[{', '.join(_spelled(x, known, steps) for x in node)}]"
    if not isinstance(node, fx.Node):
        return repr(node)
    if node in known:
        return known[node]
    if not steps or node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.name
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return node.name
    given = _spelled(
        [*node.args, *sorted(node.kwargs), *(node.kwargs[x] for x in sorted(node.kwargs))], known, steps - 1
    )
    known[node] = known.setdefault(f"{node.target}{given}", f"number {len(known)}")
    return known[node]


def _repeated(node: fx.Node) -> fx.Node | None:
    """x of `x[:, :, None].expand(-1, -1, n, -1, -1).reshape(B, groups * n, S, D)`."""
    value = node.meta["val"]
    if node.target not in _VIEWS or value.dim() != 4:
        return None
    copy = node.args[0]
    if not isinstance(copy, fx.Node) or copy.target is not _aten.clone.default:
        return None
    wide = copy.args[0]
    if not isinstance(wide, fx.Node) or wide.target is not _aten.expand.default:
        return None
    one = wide.args[0]
    if not isinstance(one, fx.Node) or one.target is not _aten.unsqueeze.default or one.args[1] not in (2, -3):
        return None
    x, repeats = one.args[0].meta["val"], wide.meta["val"].shape[2]  # type: ignore[union-attr]
    if x.dim() != 4 or tuple(value.shape) != (x.shape[0], x.shape[1] * repeats, *x.shape[2:]):
        return None
    return one.args[0] if wide.meta["val"].shape[:2] == x.shape[:2] else None  # type: ignore[return-value]


def _replace(graph: fx.Graph, node: fx.Node, keys: fx.Node, values: fx.Node, *, launched: bool) -> None:
    from lattn_compile.kernels import attend_step

    given = _given(node)
    query, mask, scale = (given[name] for name in ("query", "attn_bias", "scale"))
    batch, heads, _, dim = query.meta["val"].shape
    groups, value_dim = keys.meta["val"].shape[1], values.meta["val"].shape[3]
    launched = launched and attend_step.supports(heads // groups, dim, value_dim, query.meta["val"].dtype)

    def launch(query: Tensor, keys: Tensor, values: Tensor, *mask: Tensor) -> Tensor:
        bias = mask[0][:, 0, 0] if mask else None
        o = attend_step.forward(query[:, :, 0], keys, values, bias, dim**-0.5 if scale is None else scale)
        return o.unsqueeze(2)

    def call(query: Tensor, keys: Tensor, values: Tensor, *mask: Tensor) -> Tensor:
        rows = query.reshape(batch, groups, heads // groups, dim)
        bias: Any = None
        if mask:
            bias = mask[0].expand(-1, -1, heads // groups, -1).contiguous()
        o = _ATTENTION(rows, keys, values, bias, False, scale=scale)[0]
        return o.reshape(batch, heads, 1, o.shape[-1])

    nodes = [query, keys, values, *([] if mask is None else [mask])]
    new = private.inserted(graph, node, launch if launched else call, nodes)
    for user in list(node.users):
        user.replace_all_uses_with(new)
        graph.erase_node(user)
    graph.erase_node(node)
