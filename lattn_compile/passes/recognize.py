"""Recognize: list the recurrences of a graph.

Captured library calls, `lc.linear_attention` and what `discover` found stand in the graph as one op each; their kind
follows from the rule and the shape of the decay, not from a name.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from lattn_compile.passes import capture
from lattn_compile.passes.context import PassContext, SiteNode, bodies_of, graph_modules_of, nodes_of, shape_of
from lattn_compile.recurrence import classify

_PACKED = tuple(
    f"lattn::{name}" for name in ("decode_", "decode_device_", "decode_packed", "replay_", "replay_device_")
)
"""On packed states: captured with their policy."""
_OPS = {
    "lattn::chunk": "chunk",
    **dict.fromkeys(("lattn::decode", "lattn::replay", *_PACKED), "recurrent"),
}
HEADS_CUT = "_lattn_heads_cut"
"""Set on the class of a layer whose heads are cut over ranks: over how many (`integrations.tensor_parallel`)."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def run(context: PassContext) -> None:
    counts: dict[tuple[str, str], int] = {}
    shared = _callers(context.module)
    in_loops = {p.step.op for p in context.proposals.values() if p.step is not None}
    for node in nodes_of(context.module):
        overload = overload_of(node)
        if overload is None or overload._schema.name not in _OPS or node in in_loops:
            continue
        site = _site(node, overload)
        if (proposal := context.proposals.get(node)) is not None:
            site.proposal = proposal
            _attach(site)
        key = (site.path, site.kind.name)
        number = counts[key] = counts.get(key, -1) + 1
        site.id = f"{site.path}/{site.kind.name}#{number}"
        site.other_paths = _other_paths(site.path, module_path_of(node), shared.get(id(node.graph), []))
        (context.packed if overload._schema.name in _PACKED else context.sites).append(site)


def _attach(site: SiteNode) -> None:
    """What `lc.attach` knows of a spelled-out recurrence: that of the module being compiled, in which it stands."""
    attached, site.recipe = capture.HOOKS.attached_root()
    if attached is not None:
        site.path = ".".join(part for part in (attached[0], site.path) if part)


def _callers(module: fx.GraphModule) -> dict[int, list[str]]:
    """Module paths of the calls of each region body, by the id of its graph, in order."""
    callers: dict[int, list[str]] = {}
    for graph_module in graph_modules_of(module):
        for node, body in bodies_of(graph_module):
            users = node.users if node.op == "get_attr" else [node]
            callers.setdefault(id(body.graph), []).extend(module_path_of(user) for user in users)
    return callers


def _other_paths(path: str, traced: str, callers: list[str]) -> tuple[str, ...]:
    """Where else a site of a shared body runs: its path below the first caller, below each of the others.

    `path` may be attached, and then has a prefix that the `traced` one and the callers lack.
    """
    if len(set(callers)) < 2:
        return ()
    if not traced.startswith(callers[0]) or not path.endswith(traced):
        return tuple(callers)
    prefix, below = path.removesuffix(traced), traced.removeprefix(callers[0])
    return tuple(prefix + caller + below for caller in callers[1:])


def overload_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The `lattn` overload a node calls. Dynamo records packets, ATen graphs record overloads."""
    target = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, torch._ops.OpOverloadPacket) and str(target).startswith("lattn."):
        target = target.default
    return target if isinstance(target, torch._ops.OpOverload) and target.namespace == "lattn" else None


def _site(node: fx.Node, overload: torch._ops.OpOverload) -> SiteNode:
    arguments: dict[str, Any] = {}
    for i, a in enumerate(overload._schema.arguments):
        if i < len(node.args):
            arguments[a.name] = node.args[i]
        else:
            arguments[a.name] = node.kwargs.get(a.name, a.default_value)
    g = arguments["g"]
    decay = "none" if g is None else ("head" if len(shape_of(g) or ()) == 3 else "channel")
    call, saved = _from_tag(node)
    path = (saved.attached[0] if saved and saved.attached else "") or module_path_of(node)
    return SiteNode(
        node=node,
        kind=classify(arguments["rule"], decay),
        form=_OPS[overload._schema.name],
        call=call,
        path=path,
        source=source_of(node),
        arguments=arguments,
        recipe=saved.recipe if saved else None,
        before=node.format_node(),
    )


def _from_tag(node: fx.Node) -> tuple[str, capture.SiteContext | None]:
    """The library function a node was captured from, and what was known while it was traced.

    Capture tags nodes `kind:qualified.name[:context]`; the op of a `lc.linear_attention` call has no tag. The context
    is of this process and is taken off, so that equal programs have equal metadata.
    """
    custom = node.meta.get("custom") or {}
    parts = str(custom.get(capture.META, "")).split(":")
    if len(parts) < 2:
        return capture.OWN_CALL, None
    node.meta["custom"] = {**custom, capture.META: ":".join(parts[:2])}
    return parts[1], capture.CONTEXTS.pop(parts[2], None) if len(parts) > 2 else None


def module_path_of(node: fx.Node) -> str:
    """Path of the innermost module a node was traced in, `model.layers.3.linear_attn`; "" at the root."""
    stack = node.meta.get("nn_module_stack") or {}
    return capture.HOOKS.module_path(list(stack.values())[-1][0]) if stack else ""


def heads_cut(module: object) -> int:
    """Over how many ranks the heads of a layer (or its class) are cut: 1 if they are not."""
    return int(getattr(module, HEADS_CUT, 1))


def heads_cut_around(node: fx.Node) -> int:
    """`heads_cut` of the modules that a node was traced in, the compiled one included. Exported programs keep their
    classes' names only, and none is of such a layer: it refuses to be exported."""
    classes = [entry[1] for entry in (node.meta.get("nn_module_stack") or {}).values()]
    root = capture.HOOKS.compiled_module()
    return max(map(heads_cut, classes if root is None else [*classes, root[1]]), default=1)


def source_of(node: fx.Node) -> str | None:
    """`file:line` of the innermost frame that is the model's own, not this package's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f"{file}:{line}" for file, line in frames if "/lattn_compile/" not in file.replace("\\", "/")]
    return own[-1] if own else None
