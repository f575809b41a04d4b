"""Graph API: `rewrite` and `inspect` on GraphModules and ExportedPrograms."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path

from lattn_compile import backend, passes  # noqa: F401  (backend wires capture to the tracers)
from lattn_compile.errors import FileFormatError, LattnError, LattnWarning
from lattn_compile.passes.capture import Refused, capture, capturing  # noqa: F401  (lc.capture)
from lattn_compile.passes.context import PassContext
from lattn_compile.passes.normalize import copy_graph_module, with_graph
from lattn_compile.passes.report import report_of
from lattn_compile.passes.spelled.chunk_tables import VALUE
from lattn_compile.passes.spelled.proposal import CONSTANT
from lattn_compile.policy import Policy, Recipe, resolve_recipe
from lattn_compile.report import Report

PolicyLike = Recipe | Policy | dict[str, Any] | str


@dataclass(frozen=True)
class RewriteResult:
    """What `rewrite` returns: the rewritten copy, of the type it was given, and the report."""

    module: Any
    report: Report


def rewrite(target: fx.GraphModule | ExportedProgram, policy: PolicyLike | None) -> RewriteResult:
    """Put `policy` on every recurrence of a graph. The input is never changed.

    Args:
        target: a GraphModule of Dynamo, `make_fx` or `torch.export`, or an ExportedProgram. Calls of known libraries
            are found if it was traced under `lc.capture()`, spelled-out recurrences anyway.
        policy: Recipe, Policy, dict, JSON path or preset name; None keeps every site exact.
    Returns:
        RewriteResult with `.module` (GraphModule or ExportedProgram, as given) and `.report`.
    Raises:
        LattnError: `target` is neither, or the policy is not valid or has a part that is not built.
    """
    recipe = None if policy is None else resolve_recipe(policy)
    return _rewrite(target, recipe, [])


def _rewrite(target: fx.GraphModule | ExportedProgram, recipe: Recipe | None, refused: list[Refused]) -> RewriteResult:
    context = PassContext(_copy(target), recipe, training=False, refused=refused)
    if isinstance(target, ExportedProgram):
        _name_constants(context.module, target)
    passes.run(context)
    for node in context.module.graph.find_nodes(op="placeholder"):
        node.meta.pop(CONSTANT, None)
        node.meta.pop(VALUE, None)
    module: Any = context.module
    if isinstance(target, ExportedProgram):
        module = with_graph(target, module, renamed=bool(context.proposals))
    for text in (*context.warnings, *context.idle_rules.values()):
        warnings.warn(text, LattnWarning, stacklevel=3)
    report = report_of(context)
    if not context.sites:
        report.notes.append(
            "no recurrence was found. A layer that spells one out is found by what it computes (unmatched candidates "
            "say how far that came); library calls are one node each in a graph that was traced under lc.capture()"
        )
    return RewriteResult(module, report)


def inspect(
    target: fx.GraphModule | ExportedProgram | nn.Module | str | os.PathLike[str],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    policy: PolicyLike | None = None,
) -> Report:
    """What a rewrite under `policy` would find and do, without doing it.

    Args:
        target: GraphModule, ExportedProgram, path to a `.pt2`, or an nn.Module, which is exported with `args` and
            `kwargs` under `lc.capture()`. It may return anything that holds tensors, a cache of transformers say.
        policy: as for `rewrite`; None shows every site as exact.
    Raises:
        FileFormatError: the file is missing or no exported program. LattnError: as `rewrite`, or arguments that
            `target` does not take. What the module itself raises passes through.
    """
    refused: list[Refused] = []
    if isinstance(target, (str, os.PathLike)):
        target = load_program(target)
    elif isinstance(target, torch.jit.ScriptModule):
        raise LattnError(
            "target",
            got=f"{type(target).__name__}, a module of TorchScript",
            want="an nn.Module of Python, a GraphModule or an ExportedProgram",
            remedy="Pass the module that was scripted or traced.",
        )
    elif isinstance(target, nn.Module) and not isinstance(target, fx.GraphModule):
        args, kwargs = _call_of(target, args, kwargs)
        with capturing() as refused:
            target = _exported(target, args, kwargs)
    report = _rewrite(target, None if policy is None else resolve_recipe(policy), refused).report
    if report.sites:
        other = " (give a policy to see another)" if policy is None else ""
        report.notes.append(f"nothing was changed: 'rewritten' is what lc.rewrite would do, to the policy shown{other}")
    return report


def _call_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an example call of `module`."""
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping | None):
        raise LattnError(
            "args, kwargs",
            got=f"{type(args).__name__} and {type(kwargs).__name__}",
            want="a tuple of positional arguments, and a dict of keyword arguments or None",
            remedy="For one tensor: lc.inspect(module, (x,)).",
        )
    args, kwargs = tuple(args), dict(kwargs or {})
    try:
        signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise LattnError(
            "args, kwargs",
            got=f"{len(args)} positional and {len(kwargs)} keyword arguments ({error})",
            want=f"those of {type(module).__name__}.forward",
            remedy="The module is traced with them: pass an example call.",
        ) from error
    return args, kwargs


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    try:
        with torch.no_grad(), _returning_tensors(module):
            return torch.export.export(module, args, kwargs, strict=False)
    except ValueError as error:
        if not str(error).startswith("Unsupported input type"):
            raise
        for path, x in tree_leaves_with_path((args, kwargs)):
            if not isinstance(x, (torch.Tensor, int, float, str, NoneType)):
                raise LattnError(
                    f"{('args', 'kwargs')[path[0].idx]}{keystr(path[1:])}",  # type: ignore[attr-defined]
                    got=f"an object of class {type(x).__name__}",
                    want="tensors and numbers, in lists, dicts and other containers that torch.export knows",
                    remedy="Inspect a module that takes the tensors and makes the object of them.",
                ) from error
        raise


@contextlib.contextmanager
def _returning_tensors(module: nn.Module) -> Iterator[None]:
    """Inside, `module` returns all tensors that its output holds, in a list. torch.export takes no other objects, and
    what a model leaves in a cache alone would be dead code."""
    hook = module.register_forward_hook(lambda _, args, out: list(_tensors_in(out, set())))
    try:
        yield
    finally:
        hook.remove()


def _tensors_in(x: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(x):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _tensors_in(list(vars(leaf).values()), seen)


def load_program(path: str | os.PathLike[str]) -> ExportedProgram:
    """`torch.export.load` with an error that says what is wrong with the file."""
    file = Path(path)
    if not file.is_file():
        raise FileFormatError(
            "path",
            got=f"{file} ({'a folder' if file.is_dir() else 'no such file'})",
            want="a .pt2 written by torch.export.save",
            remedy="Check the path.",
        )
    if not zipfile.is_zipfile(file):
        raise _not_a_program(file, "not a zip archive")
    with zipfile.ZipFile(file) as archive:
        # torch.export.load would log a traceback and then say "check the warnings above".
        if not any(name.rpartition("/")[2] in _PROGRAM_ENTRIES for name in archive.namelist()):
            raise _not_a_program(file, "an archive of something else")
        if (damaged := archive.testzip()) is not None:
            raise _not_a_program(file, f"damaged: {damaged}")
    try:
        return torch.export.load(io.BytesIO(file.read_bytes()))
    except Exception as error:
        raise _not_a_program(file, f"{type(error).__name__}: {(str(error) or 'unreadable').splitlines()[0]}") from error


# What an archive of torch.export.save holds, in the present layout and in the one before it.
_PROGRAM_ENTRIES = ("archive_format", "serialized_exported_program.json")


def _not_a_program(file: Path, why: str) -> FileFormatError:
    return FileFormatError(
        "path",
        got=f"{file} ({why})",
        want="a .pt2 written by torch.export.save",
        remedy="Export the model under lc.capture() and save it with torch.export.save(program, path).",
    )


def _name_constants(module: fx.GraphModule, program: ExportedProgram) -> None:
    """Literals of the code and buffers are inputs of an exported graph: what they hold, for the search."""
    lifted, buffers = (
        program.graph_signature.inputs_to_lifted_tensor_constants,
        program.graph_signature.inputs_to_buffers,
    )
    held = {**program.constants, **program.state_dict}  # buffers that are not persistent are no state
    written = set(program.graph_signature.buffers_to_mutate.values())  # the next call finds something else there
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in lifted:
            node.meta[CONSTANT] = program.constants.get(lifted[node.name])
        elif node.name in buffers and buffers[node.name] not in written:
            node.meta[VALUE] = held.get(buffers[node.name])


def _copy(target: Any) -> fx.GraphModule:
    """A copy of the target's graph that may be changed, with parameters and buffers shared."""
    if isinstance(target, ExportedProgram):
        return copy_graph_module(target.graph_module, {})
    if isinstance(target, fx.GraphModule):
        return copy_graph_module(target, {})
    raise LattnError(
        "target",
        got=type(target).__name__,
        want="a torch.fx.GraphModule or a torch.export.ExportedProgram",
        remedy="Export the module first: with lc.capture(): torch.export.export(module, args).",
    )
