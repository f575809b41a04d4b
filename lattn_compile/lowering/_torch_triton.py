"""torch's private interfaces for a Triton kernel of ours inside a graph: how it is written there and how it is built.

Inductor takes a user's kernel over: its source and that of what it calls go into the generated module, with its warps
and stages. Three things get lost there that are a matter of numbers, or of compiling at all, and are put right for our
kernels alone, where `PythonWrapperCodegen` writes one down:

* `enable_fp_fusion`, which Inductor's launcher knows (of its own kernels) and its writer does not;
* floats are fp32 to Triton, and fp64 to Inductor;
* functions that go by another name where they are called, and functions or constants of the same name in two files.

Tested on torch 2.13 and Triton 3.7.
"""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.library import wrap_triton

from lattn_compile.errors import LattnError

__all__ = ["functional", "implementation", "kept", "launches", "self_contained", "written"]

_OURS: dict[Any, bool] = {}
"""Functions of kernels that were written, and whether the compiler may contract their products and sums."""


def functional(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, what it does in place traced as operations that return. (`functional_tensor`)

    A decomposition runs below the functionalization of what called it.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    def run(*args: Any, **kwargs: Any) -> Any:
        return dispatch_functionalize(function, FunctionalTensorMode())(*args, **kwargs)

    return run


@functools.cache
def kept() -> Any:
    """`lattn::kept`: its argument, in memory. Stands in a graph between the last pass and Inductor's lowering, no
    longer. (`torch._inductor.lowering.register_lowering`)"""
    from torch._inductor.lowering import register_lowering

    torch.library.define("lattn::kept", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl("lattn::kept", "default", torch.clone)
    torch.library.register_fake("lattn::kept", torch.empty_like)
    op = torch.ops.lattn.kept.default

    def lower(x: Any) -> Any:
        x.realize()
        return x

    register_lowering(op, type_promotion_kind=None)(lower)
    return op


def launches(graph: fx.Graph) -> list[tuple[fx.Node, dict[str, Any]]]:
    """Nodes of `graph` that launch a user's kernel and return what it wrote, with its arguments by name."""
    op = torch.ops.higher_order.triton_kernel_wrapper_functional
    return [(node, dict(node.kwargs["kwargs"])) for node in graph.find_nodes(op="call_function", target=op)]


def implementation(op: Any) -> Callable[..., Any]:
    """What an op runs on a GPU, past the modes and keys that a call of it meets first. (`OpOverload.redispatch`)"""
    return functools.partial(op.redispatch, torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA))


def written(kernel: Any) -> Any:
    """`kernel`, launched as ever with `[grid](*args, **options)`, but into the graph that is traced."""
    _take_over_writing()
    return _Written(kernel)


class _Written:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, enable_fp_fusion: bool = True, **options: Any) -> None:
        _OURS[self._kernel.fn] = enable_fp_fusion
        wrap_triton(self._kernel)[grid](*args, **options)


@functools.cache
def _take_over_writing() -> None:
    """Once a process. Kernels that are not ours are written as they always were."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    original = PythonWrapperCodegen.define_user_defined_triton_kernel

    @functools.wraps(original)
    def define(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if kernel.fn not in _OURS:
            return original(self, kernel, *args, **kwargs)
        with _as_ours(self, fusion=_OURS[kernel.fn]):
            return original(self, kernel, *args, **kwargs)

    PythonWrapperCodegen.define_user_defined_triton_kernel = define  # type: ignore[method-assign]


@contextlib.contextmanager
def _as_ours(wrapper: Any, *, fusion: bool) -> Iterator[None]:
    from torch._inductor import config
    from torch._inductor.codegen import wrapper as module

    define_kernel, seen = wrapper.define_kernel, "triton_meta={"

    def define(name: str, body: str, *rest: Any, **more: Any) -> Any:
        if seen not in body:
            raise LattnError(
                "lattn_compile",
                got=f"torch {torch.__version__}, whose Inductor writes a user's Triton kernels in an unknown form",
                want=f"{seen!r} in what it writes",
                remedy='Use a tested torch, or a policy of kernel="auto".',
            )
        return define_kernel(name, body.replace(seen, f"{seen}'enable_fp_fusion': {fusion}, ", 1), *rest, **more)

    closure = "user_defined_triton_kernel_transitive_closure_source_code"
    with (
        mock.patch.object(wrapper, "define_kernel", define),
        mock.patch.object(module, closure, lambda kernel, epilogue=None: self_contained(kernel)),
        config.patch(_use_fp64_for_unbacked_floats=False),
    ):
        yield


def self_contained(kernel: Any) -> str:
    """Source of `kernel` (without its decorator) and, behind it, of all that it uses, everything under a name of its
    own, and none of it in need of a module but `triton` and `tl`."""
    names: dict[Any, str] = {}
    taken: set[str] = set()
    parts: list[str] = []

    def name_of(value: Any, wish: str) -> str:
        key = value.fn if _is_function(value) else (wish, repr(value))
        if key not in names:
            own, n = wish, 1
            while own in taken:
                own, n = f"{wish}_{n}", n + 1
            names[key] = own
            taken.add(own)
            parts.append(_definition(own, value, name_of))
        return names[key]

    # In the order of their first use, and the kernel, which needs no decorator, in front.
    source = _definition(kernel.__name__, kernel, name_of, taken).removeprefix("@triton.jit\n")
    return "\n\n".join([source, *parts])


def _is_function(value: Any) -> bool:
    return type(value).__name__ == "JITFunction"


def _definition(own: str, value: Any, name_of: Callable[[Any, str], str], taken: set[str] | None = None) -> str:
    """What defines `value` under the name `own`."""
    if not _is_function(value):
        if type(value).__name__ == "constexpr":
            return f"{own} = tl.constexpr({value.value!r})"
        if getattr(value, "__module__", "").startswith("triton."):
            return f"from {value.__module__} import {value.__name__} as {own}"
        raise LattnError(
            own, got=f"{value!r} outside of a kernel", want="a function or a tl.constexpr", remedy="Make it one."
        )
    if taken is not None:
        taken.add(own)
    tree = ast.parse(value.src).body[0]
    assert isinstance(tree, ast.FunctionDef)
    code, around = value.fn.__code__, value.fn.__globals__
    local = {*code.co_varnames, *code.co_cellvars}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and node.id not in local
            and node.id in around
            and node.id not in ("tl", "triton")
        ):
            found = around[node.id]
            node.id = name_of(found, found.__name__ if _is_function(found) else node.id)
    tree.name, tree.decorator_list = own, []
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    return f"@triton.jit\n{ast.unparse(tree)}"
