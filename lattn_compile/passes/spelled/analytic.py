"""What a float64 run on random numbers can prove: equality of analytic functions."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from lattn_compile.passes.spelled.aten import given_arguments, short_name
from lattn_compile.passes.spelled.literals import changes
from lattn_compile.passes.spelled.masks import ELEMENTWISE
from lattn_compile.passes.spelled.smooth import can_smooth
from lattn_compile.passes.spelled.subgraph import (
    Region,
    Rejected,
    grad_disabled,
    is_arithmetic,
    is_symbolic,
    loop_of,
    sources,
    tensors,
)
from lattn_compile.passes.spelled.writer import value

__all__ = ["vet"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ANALYTIC = _words("""
    add sub rsub mul multiply div divide true_divide neg reciprocal exp exp2 expm1 log log1p log2 sigmoid log_sigmoid
    log_sigmoid_forward softplus silu tanh pow square sqrt rsqrt erf sin cos
    erfc special_ndtr atan logaddexp logsumexp softmax log_softmax
    mm bmm matmul einsum addmm baddbmm addbmm addmv mv dot vdot outer ger inner linear sum mean cumsum cumprod prod
    linalg_solve_triangular triangular_solve linalg_inv inverse linalg_vector_norm norm lerp addcmul addcdiv diff trace
    layer_norm native_layer_norm rms_norm tril triu diag diagonal diag_embed kron
    subtract negative linalg_vecdot linalg_matmul linalg_multi_dot chain_matmul tensordot addr cross linalg_cross
    gelu mish nan_to_num linalg_solve linalg_solve_ex _linalg_solve_ex linalg_inv_ex
""")
"""Analytic in every tensor argument, on the domain where the values are finite, as nan_to_num is there."""

_LAYOUT = _words("""
    view _unsafe_view reshape clone alias select slice narrow unsqueeze squeeze permute transpose t mT numpy_T
    movedim swapaxes swapdims moveaxis expand expand_as broadcast_to split split_with_sizes chunk unbind flatten
    unflatten view_as reshape_as contiguous to _to_copy type_as lift_fresh_copy convert_element_type flip roll repeat
    repeat_interleave tile cat concat stack hstack vstack constant_pad_nd pad select_scatter slice_scatter
    diagonal_scatter copy fill masked_fill where index index_put _unsafe_index index_select gather scatter scatter_add
    index_copy index_fill index_add unfold broadcast_tensors meshgrid getitem
    mH adjoint column_stack dstack
""")
"""Move, copy or cast values; which value goes where must not depend on data (`_CHOICES`)."""

_ALLOWED = _ANALYTIC | _LAYOUT

_CHOICES = {
    "where": 0,
    "masked_fill": 1,
    "index": 1,
    "_unsafe_index": 1,
    "index_put": 1,
    "index_select": 2,
    "gather": 2,
    "scatter": 2,
    "scatter_add": 2,
    "index_copy": 2,
    "index_fill": 2,
    "index_add": 2,
    "repeat_interleave": 1,
}
"""Argument that says which value goes where: a mask or an index."""

_SOFTPLUS_THRESHOLD = 20.0


def vet(region: Region, data: Iterable[fx.Node], *, smooth: bool = True) -> set[fx.Node]:
    """Raises Rejected unless random numbers can prove an equality of what the region computes.

    That holds for analytic functions: where two agree at random points, they agree everywhere. So no value may choose
    a branch. What does not depend on `data` (masks made of ranges, say) may be computed in any deterministic way.

    Args:
        smooth: whether clamps and the like may run without their kinks; which do is noted in the region.

    Returns the nodes that depend on `data`.
    """
    tainted = set(data)
    # Of booleans alone, element by element: both values of each are drawn, so such a function may be any.
    chosen = {n for n in tainted if isinstance(n, fx.Node) and _boolean(n)}
    tainted.update(node for node, t in region.constants.items() if changes(node, t))
    for node in region.nodes:
        if node.op != "call_function" or is_symbolic(node):
            continue
        depends = any(n in tainted for n in sources(node))
        name = short_name(node)
        of_chosen = depends and all(n in chosen for n in sources(node) if n in tainted)
        if name.startswith("higher_order::"):
            _vet_loop(node, name, region, tainted)
        elif of_chosen and (f"aten::{name}" in ELEMENTWISE or name in _CASTS):
            chosen.add(node)
        elif depends and smooth and can_smooth(node, name):
            region.smooth.add(node)
        elif isinstance(node.target, torch._ops.OpOverload):
            _vet_call(node, name, tainted, depends)
        elif node.target is not operator.getitem and (depends or not is_arithmetic(node)):
            raise Rejected(f"{node} calls {name}, no ATen op")
        if depends:
            tainted.add(node)
        if of_chosen and name in _LAYOUT:
            chosen.add(node)
    return tainted


_CASTS = _words("to _to_copy convert_element_type")


def _vet_call(node: fx.Node, name: str, tainted: set[fx.Node], depends: bool) -> None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise Rejected(f"{node}: {name} is random")
    if target._schema.is_mutable and (depends or name != "detach_"):
        raise Rejected(f"{node}: {name} has a side effect")
    dynamic = torch.Tag.dynamic_output_shape in target.tags and not _by_integers(node, name)
    if dynamic or (depends and torch.Tag.data_dependent_output in target.tags):
        raise Rejected(f"{node}: what {name} returns has a shape or type that depends on data")
    if name.startswith("lattn::"):
        _vet_lattn(node, name, tainted)
        return
    if "::" in name:
        raise Rejected(f"{node}: {name} is not an ATen op")
    if not depends:
        return
    if name == "detach":
        raise Rejected(f"{node}: detach cuts the gradient")
    if name not in _ALLOWED:
        raise Rejected(f"{node}: {name} of data is not analytic, or not known to be")
    if (reason := _branches(node, name, tainted)) is not None:
        raise Rejected(f"{node}: {reason}")
    for t in tensors(value(node)):
        if t.is_complex():
            raise Rejected(f"{node}: {name} is complex")
        if not t.is_floating_point() and any(_floating(n) for n in sources(node) if n in tainted):
            raise Rejected(f"{node}: {name} makes integers of floating data")


def _by_integers(node: fx.Node, name: str) -> bool:
    """Whether a tensor is indexed by integers alone: the shape of what is picked is known. Masks are counted."""
    places = [n for n in tree_leaves(node.args[1]) if isinstance(n, fx.Node)] if name == "index" else []
    return bool(places) and all(t.dtype in (torch.int64, torch.int32) for n in places for t in tensors(value(n)))


def _floating(node: fx.Node) -> bool:
    return any(t.is_floating_point() for t in tensors(value(node)))


def _branches(node: fx.Node, name: str, tainted: set[fx.Node]) -> str | None:
    """Why an op of the list is none for these arguments."""
    given = given_arguments(node)
    if given.get("rounding_mode") is not None:
        return f"{name} rounds"
    if name in _CHOICES:
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        at = _CHOICES[name]
        chosen = given.get(schema[at].name) if at < len(schema) else None
        # A boolean input is drawn from both values, and no boolean is made of other data: see below.
        if any(isinstance(n, fx.Node) and n in tainted and not _boolean(n) for n in tree_leaves(chosen)):
            return f"{name} chooses by data"
    if name == "softplus" and given.get("threshold", _SOFTPLUS_THRESHOLD) < _SOFTPLUS_THRESHOLD:
        return f"softplus with the threshold {given['threshold']} has two branches"
    if name in ("linalg_vector_norm", "norm") and given.get("ord", given.get("p", 2)) not in (2, 2.0, None):
        return f"{name} of an order that is not 2 is not analytic"
    if name in ("scatter", "index_put", "index_copy") and given.get("reduce") not in (None, "add"):
        return f"{name} with reduce={given['reduce']!r}"
    if name == "view" and "dtype" in given:
        return "view as another dtype is not analytic"
    if name == "pad" and given.get("mode", "constant") != "constant":
        return f"pad with mode={given['mode']!r}"
    return None


def _boolean(node: fx.Node) -> bool:
    return all(t.dtype == torch.bool for t in tensors(value(node)))


def _vet_lattn(node: fx.Node, name: str, tainted: set[fx.Node]) -> None:
    if name not in ("lattn::chunk", "lattn::decode"):
        raise Rejected(f"{node}: {name} is not a forward op")
    if node.kwargs.get("write", "exact") != "exact":
        raise Rejected(f"{node}: {name} rounds its state (write={node.kwargs['write']!r})")
    if any(isinstance(lengths, fx.Node) and lengths in tainted for lengths in node.args[6:]):
        raise Rejected(f"{node}: the lengths of {name} depend on data")


def _vet_loop(node: fx.Node, name: str, region: Region, tainted: set[fx.Node]) -> None:
    """Vets the body for the carries that depend on data, which may become more from one turn to the next."""
    loop = loop_of(node, region)
    carries = len(loop.carries)
    depends = [isinstance(a, fx.Node) and a in tainted for a in loop.arguments]
    while True:
        data = {n for n, d in zip(loop.body.inputs, depends, strict=True) if d}
        found = data | vet(loop.body, data, smooth=False)
        after = [d or n in found for d, n in zip(depends[:carries], loop.body.outputs[:carries], strict=True)]
        if after == depends[:carries]:
            break
        depends[:carries] = after
    if any(changes(n, t) for n, t in loop.body.constants.items()):
        raise Rejected(f"{node}: its body reads a parameter or a buffer that is not passed in")
    if grad_disabled(loop.body.nodes):
        raise Rejected(f"{node}: its body switches gradients off")
    if loop.condition is not None:
        data = {n for n, d in zip(loop.condition.inputs, depends, strict=True) if d}
        found = data | vet(loop.condition, data)
        if any(n in found for n in loop.condition.outputs):
            raise Rejected(f"{node}: {name} runs for as long as data say")
