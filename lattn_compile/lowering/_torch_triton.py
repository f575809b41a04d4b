"""torch's private interfaces for a Triton kernel of ours inside a graph: how it is written there and how it is built.

Inductor takes a user's kernel over: its source and that of what it calls go into the generated module, with its warps
and stages. Some things get lost there that are a matter of numbers, or of compiling at all, and are put right for our
kernels alone, where `PythonWrapperCodegen` writes one down:

* `enable_fp_fusion`, which Inductor's launcher knows (of its own kernels) and its writer does not;
* floats are fp32 to Triton, and fp64 to Inductor;
* a number that happens to be 1 becomes a constant, also where the kernel says `do_not_specialize`;
* whether a kernel begins before the one in front of it has ended;
* functions that go by another name where they are called, and functions or constants of the same name in two files.

What a kernel writes to is read off its intermediate code, anew for every launch and several times each; here once for
launches that differ in numbers only. On torch 2.11 that reading takes all numbers for constants, which no kernel has to
bear, and of a kernel that does not, torch says that it writes to all of its tensors, so that they are copied.

Tested on torch 2.11 with Triton 3.6 and torch 2.13 with Triton 3.7.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx
from torch.library import wrap_triton

from lattn_compile.errors import LattnError
from lattn_compile.kernels.common.launch import recording

__all__ = [
    "arguments",
    "begin_early",
    "begins_early",
    "functional",
    "implementation",
    "inserted",
    "is_function",
    "kept",
    "launches",
    "literal",
    "real_tensors",
    "relaunch",
    "self_contained",
    "sorted_again",
    "written",
]

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
    """`lattn::kept`: its argument, in memory, neighbours there as they were where the graph was traced: so a launch was
    told its strides. Stands in a graph between the last pass and Inductor's lowering, no longer.
    (`torch._inductor.lowering.register_lowering`, `ExternKernel.require_stride_order`)"""
    from torch._inductor.ir import ExternKernel, get_stride_order
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    torch.library.define("lattn::kept", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl("lattn::kept", "default", torch.clone)
    torch.library.register_fake("lattn::kept", torch.empty_like)
    op = torch.ops.lattn.kept.default

    def lower(x: Any) -> Any:
        value = V.graph.current_node.meta["val"]
        if not value.is_contiguous() and all(isinstance(n, int) for n in value.stride()):
            x = ExternKernel.require_stride_order(x, get_stride_order(value.stride()))
        x.realize()
        return x

    register_lowering(op, type_promotion_kind=None)(lower)
    return op


def launches(graph: fx.Graph, kernel: Any | None = None) -> list[tuple[fx.Node, dict[str, Any]]]:
    """Nodes of `graph` that launch a user's kernel, or this one, and return what it wrote, with what it is given in the
    graph, by name."""
    op = torch.ops.higher_order.triton_kernel_wrapper_functional
    nodes = graph.find_nodes(op="call_function", target=op)
    return [(node, dict(node.kwargs["kwargs"])) for node in nodes if kernel is None or _kernel_of(node) is kernel]


def _kernel_of(node: fx.Node) -> Any:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    return kernel if is_function(kernel) else kernel.fn  # type: ignore[attr-defined]


def arguments(node: fx.Node) -> dict[str, Any]:
    """All that a launch is given, by name. (`kernel_side_table`)"""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    beside = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    return {**beside, **node.kwargs["kwargs"]}  # type: ignore[dict-item]


def relaunch(node: fx.Node, arguments: dict[str, Any]) -> None:
    """Gives a launch other arguments, of which it writes to the same."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    in_graph = {k: x for k, x in arguments.items() if isinstance(x, (fx.Node, int, float))}
    index = kernel_side_table.add_constant_args({k: x for k, x in arguments.items() if k not in in_graph})
    node.kwargs = {**node.kwargs, "kwargs": in_graph, "constant_args_idx": index}
    if "eager_input_vals" in node.meta:  # the layouts that a launch may count on
        node.meta["eager_input_vals"] = ((), fx.map_arg(node.kwargs, lambda x: x.meta["val"]))


def inserted(graph: fx.Graph, place: fx.Node, function: Callable[..., Any], nodes: list[fx.Node]) -> Any:
    """What `function` of these nodes returns, written into `graph` before `place`. For Inductor, after all passes."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    values = [x.meta["val"] for x in nodes]
    with values[0].fake_mode, recording(written):
        traced = make_fx(functional(function), decomposition_table=select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    by_node = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
    with graph.inserting_before(place):
        return graph.graph_copy(traced.graph, by_node)


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside, operations compute, also while a graph is compiled. (`unset_fake_temporarily`)"""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()  # type: ignore[no-any-return]


def sorted_again(graph: fx.Graph) -> None:
    """Puts nodes behind what they read, and leaves them in their order else. (`pattern_matcher`)"""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


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
        configs, values, *rest = args
        values = {**values, **{name: _Number(values[name]) for name in _general(kernel, values)}}
        with _as_ours(self, fusion=_OURS[kernel.fn], early=bool(values.get("EARLY"))):
            return original(self, kernel, configs, values, *rest, **kwargs)

    PythonWrapperCodegen.define_user_defined_triton_kernel = define  # type: ignore[method-assign]
    _take_over_reading()
    _take_over_waiting()


class _Number(int):
    """A number that is not looked at when a kernel is compiled."""


def _general(kernel: Any, values: dict[str, Any]) -> list[str]:
    """Numbers among a launch's arguments that its kernel is not to be specialised for."""
    return [
        p.name for p in kernel.params if p.do_not_specialize and isinstance(values.get(p.name), (int, sympy.Integer))
    ]


def begins_early() -> bool:
    """Whether kernels of the graph that is compiled are to begin before the one in front has ended.
    (`config.triton.enable_pdl`)"""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonKernel

    # Without the hook nobody could see to it that kernels wait.
    wanted = getattr(config.triton, "enable_pdl", False) and hasattr(TritonKernel, "_handle_pdl_before_access")
    if not wanted or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9


def begin_early(node: fx.Node) -> None:
    """Makes a launch one of those, if its kernel can be."""
    given = arguments(node)
    if "EARLY" in given and _kernel_of(node).fn in _OURS:
        relaunch(node, given | {"EARLY": True})


def _take_over_waiting() -> None:
    """A kernel of Inductor's may read what was written two kernels before it waits for the one in front, which it knows
    to have waited. Of graphs with our kernels every kernel waits first: what they write has names of its own there."""
    from torch._inductor import ir
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    original = getattr(TritonKernel, "_handle_pdl_before_access", None)
    if original is None:
        return

    @functools.wraps(original)
    def wait(self: Any, buffer: Any, *dependencies: Any, **more: Any) -> None:
        nodes = () if V.graph.scheduler is None else V.graph.scheduler.nodes
        if not self._enable_pdl_codegen() or not any(isinstance(x.node, ir.UserDefinedTritonKernel) for x in nodes):
            original(self, buffer, *dependencies, **more)
            return
        in_loop = self.inside_reduction and self.range_trees[-1].is_loop
        (self.body if in_loop else buffer).writeline(self.GDC_WAIT)

    TritonKernel._handle_pdl_before_access = wait  # type: ignore[method-assign,assignment]


def _take_over_reading() -> None:
    from torch._higher_order_ops import triton_kernel_wrap as module

    name = next(x for x in ("identify_accessed_tensors", "identify_mutated_tensors") if hasattr(module, x))
    original = getattr(module, name)
    known: dict[Any, Any] = {}

    @functools.wraps(original)
    def read(kernel: Any, values: dict[str, Any], *rest: Any) -> Any:
        jitted = kernel if is_function(kernel) else kernel.fn
        if jitted.fn not in _OURS:
            return original(kernel, values, *rest)
        constants = {p.name for p in jitted.params if p.is_constexpr}
        if "EARLY" in constants:  # what is sent for early is not written to
            values = {**values, "EARLY": False}
        kinds = ((k, repr(x) if k in constants or x is None else _kind(x)) for k, x in sorted(values.items()))
        key = (jitted.fn, *kinds)
        if key not in known:
            with _numbers_vary():
                known[key] = original(kernel, values, *rest)
        return known[key]

    setattr(module, name, read)


def _kind(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    return ("tensor", dtype) if isinstance(dtype, torch.dtype) else isinstance(x, (float, torch.SymFloat))


@contextlib.contextmanager
def _numbers_vary() -> Iterator[None]:
    """Inside, arguments of a kernel are constants only where it says so, or where there are none."""
    source = importlib.import_module("triton.compiler.compiler").ASTSource
    original = source.__init__

    def begin(self: Any, kernel: Any, signature: Any, constants: Any, *rest: Any) -> None:
        own = {p.name for p in kernel.params if p.is_constexpr}
        original(self, kernel, signature, {k: x for k, x in constants.items() if k in own or x is None}, *rest)

    with mock.patch.object(source, "__init__", begin):
        yield


@contextlib.contextmanager
def _as_ours(wrapper: Any, *, fusion: bool, early: bool) -> Iterator[None]:
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
        own = f"{seen}'enable_fp_fusion': {fusion}, 'launch_pdl': {early}, "
        return define_kernel(name, body.replace(seen, own, 1), *rest, **more)

    def source(kernel: Any, epilogue: Any = None) -> str:
        if epilogue is not None:
            raise LattnError(
                "epilogue_fusion_user_defined_triton_kernel",
                got="True, and what follows one of this library's kernels was to be written into it",
                want="False: these kernels are written as they are",
                remedy="Leave that option of Inductor off.",
            )
        return self_contained(kernel)

    closure = "user_defined_triton_kernel_transitive_closure_source_code"
    equal = module.V.graph.sizevars.statically_known_equals

    def known_equal(left: Any, right: Any) -> bool:
        return not isinstance(left, _Number) and equal(left, right)

    with (
        mock.patch.object(wrapper, "define_kernel", define),
        mock.patch.object(module.V.graph.sizevars, "statically_known_equals", known_equal),
        mock.patch.object(module, closure, source),
        config.patch(_use_fp64_for_unbacked_floats=False),
    ):
        yield


def self_contained(kernel: Any) -> str:
    """Source of `kernel` (without its decorator) and, behind it, of all that it uses, everything under a name of its
    own, and none of it in need of a module but `triton` and `tl`.

    Raises:
        LattnError: a string has a backslash, which some versions of Inductor do not keep.
    """
    names: dict[Any, str] = {}
    taken: set[str] = set()
    parts: list[str] = []

    def name_of(value: Any, wish: str) -> str:
        key = value.fn if is_function(value) else (wish, repr(value))
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
    whole = "\n\n".join([source, *parts])
    if "\\" in whole:
        raise LattnError(
            kernel.__name__,
            got=f"a backslash in {next(line for line in whole.splitlines() if chr(92) in line)!r}",
            want="none: torch 2.11 writes kernels into a string of its module as they are",
            remedy="Write the kernel without it.",
        )
    return whole


class _Texts(ast.NodeTransformer):
    """Texts of several lines become constants outside of the function, as `literal` writes them."""

    def __init__(self, named: Callable[[str], str]) -> None:
        self._named = named

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and "\n" in node.value:
            return ast.Name(self._named(node.value), ast.Load())
        return node


class _Known(ast.NodeTransformer):
    """Answers in the place of questions about the device: a process that only compiles has none to ask."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        asked = self._names.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if getattr(asked, "__module__", "") != "triton.language.target_info":
            return self.generic_visit(node)
        answer = asked(*map(ast.literal_eval, node.args))  # type: ignore[misc]
        return ast.Constant(getattr(answer, "value", answer))


def is_function(value: Any) -> bool:
    return type(value).__name__ == "JITFunction"


def literal(value: Any) -> str:
    """An expression for `value` without an escaped newline, which the module of torch 2.11 would have as a newline."""
    if not isinstance(value, str) or "\n" not in value:
        return repr(value)
    return f"chr(10).join({value.split(chr(10))!r})"


def _definition(own: str, value: Any, name_of: Callable[[Any, str], str], taken: set[str] | None = None) -> str:
    """What defines `value` under the name `own`."""
    if not is_function(value):
        if type(value).__name__ == "constexpr":
            return f"{own} = tl.constexpr({literal(value.value)})"
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
    tree = _Known(around).visit(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and node.id not in local
            and node.id in around
            and node.id not in ("tl", "triton")
        ):
            found = around[node.id]
            node.id = name_of(found, found.__name__ if is_function(found) else node.id)
    tree.name, tree.decorator_list = own, []
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:] or [ast.Pass()]
    constexpr = importlib.import_module("triton.language").constexpr
    tree = _Texts(lambda text: name_of(constexpr(text), "TEXT")).visit(tree)
    return f"@triton.jit\n{ast.unparse(tree)}"
