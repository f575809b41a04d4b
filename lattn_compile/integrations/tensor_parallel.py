"""Tensor parallelism for hybrid models of transformers: linear-attention layers cut by heads.

transformers' own plans cut the projections of these layers and gather what they return: every rank then runs the whole
recurrence, and holds the whole state. Here a layer is cut once, from its projections to its output. Of n ranks each has
H / n key heads with the value heads that read them: their rows of the projections, their channels of the convolution,
their gates and their part of the state. What comes out is summed by one all-reduce, and so is the input's gradient; in
between no rank asks another for anything.

    from lattn_compile.integrations.tensor_parallel import parallelize

    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
    parallelize(model, mesh)                       # before compiling, and before fully_shard
    model.compile(backend="lattn_compile", options={"policy": "int8"})

Parameters become DTensors under their old names, so that FSDP2, optimizers and distributed checkpoints know how they
are cut. Where a layer packs q, k and v one after another, rows of one head are not side by side, and no even cut of
the rows gives whole heads: such a parameter is kept with the rows of each key head together (as Qwen3-Next packs its
projection from the start). State dicts have the library's order, which costs a gather: every rank has to ask for one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lattn_compile.attach import RECIPE
from lattn_compile.errors import PlacementError, UnsupportedError, reason
from lattn_compile.passes.recognize import HEADS_CUT
from lattn_compile.policy import Recipe
from lattn_compile.recurrence import KINDS

__all__ = ["HeadParallel", "parallelize"]


@dataclass(frozen=True)
class _Layout:
    """How the parameters of a layer class lie, by their names in it; those not named here are whole on every rank.

    Attributes:
        key_heads, value_heads: names of the attributes that count them. sizes: attributes that are multiples of them.
        rows, columns: cut evenly along the axis that is given; rows of one head are side by side.
        flat: attributes that give the sizes of the parts that a parameter (rows) packs one after another.
    """

    key_heads: str
    value_heads: str
    sizes: tuple[str, ...]
    rows: Mapping[str, int]
    columns: tuple[str, ...]
    flat: Mapping[str, tuple[str, ...]]


_QKV = ("key_dim", "key_dim", "value_dim")
_GDN = _Layout(
    "num_k_heads",
    "num_v_heads",
    ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"),
    {
        **dict.fromkeys(("in_proj_qkvz.weight", "in_proj_ba.weight"), 0),  # Qwen3-Next: interleaved by key head
        **dict.fromkeys(("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"), 0),  # Qwen3.5: by value head
        **dict.fromkeys(("A_log", "dt_bias"), 0),
    },
    ("out_proj.weight",),
    {"in_proj_qkv.weight": _QKV, "conv1d.weight": _QKV},
)
_KDA = _Layout(
    "num_heads",
    "num_heads",
    ("num_heads", "qkv_dim", "conv_dim", "forget_gate.num_heads", "forget_gate.qkv_dim"),
    {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "b_proj.weight", "g_b_proj.weight"), 0),
        "forget_gate.f_b_proj.weight": 0,
        "forget_gate.dt_bias": 0,
        "forget_gate.A_log": 2,
    },
    ("o_proj.weight",),
    {"conv1d.weight": ("qkv_dim",) * 3},
)
LAYOUTS = {
    "Qwen3NextGatedDeltaNet": _GDN,
    "Qwen3_5GatedDeltaNet": _GDN,
    "Qwen3_5MoeGatedDeltaNet": _GDN,
    "KimiLinearDeltaAttention": _KDA,
}
"""By class name: a model of transformers is found without importing it."""


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str] | None = None) -> nn.Module:
    """Cut a model over the ranks of `mesh`, in place; every rank has to hold the same weights.

    Args:
        model: of transformers; its linear-attention layers are cut by heads (`HeadParallel`).
        mesh: of one dimension.
        plan: what happens to the rest, in transformers' own words (module or parameter with `*` for numbers -> style).
            Default: the model's `tp_plan`, without what it says of linear-attention layers and of tied embeddings.
            `{}`: the rest is whole on every rank.

    Returns:
        `model`.
    Raises:
        PlacementError: the ranks do not divide the heads, or `mesh` has several dimensions. UnsupportedError: no layer
            of a kind that can be cut, a style that this transformers does not have, or a policy that the cut would
            change (stochastic rounding).
    """
    if mesh.ndim != 1:
        raise PlacementError(
            "mesh",
            got=f"{mesh.ndim} dimensions",
            want="one",
            remedy='Pass the dimension of the tensor parallelism: mesh["tp"].',
        )
    layers = [name for name, module in model.named_modules() if type(module).__name__ in LAYOUTS]
    if not layers:
        raise UnsupportedError(
            "model",
            got=f"{type(model).__name__}, without a layer that can be cut by heads",
            want=f"layers of {', '.join(LAYOUTS)}",
            remedy="Cut the arguments of lc.linear_attention, as DTensors, in a layer of your own.",
        )
    for name in layers:
        _Cut.of(model.get_submodule(name), mesh.size()).check(name)
    _check_policies(model, layers)
    rest = _plan_of_the_rest(model, layers, plan)
    parallelize_module(model, mesh, {name: HeadParallel() for name in layers})
    if rest:
        _apply(model, mesh, rest)
    return model


class HeadParallel(ParallelStyle):
    """A linear-attention layer of transformers, cut by heads: a style for torch's `parallelize_module`.

    The layer takes and returns whole tensors. Its parameters become DTensors; inside it each rank sees its own.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = _Cut.of(module, device_mesh.size())
        cut.check("module")
        cut.distribute(module, device_mesh)
        module.register_forward_pre_hook(functools.partial(_enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(functools.partial(_leave, device_mesh))
        return module


@dataclass(frozen=True)
class _Cut:
    """One layer's layout with its sizes, whole, and the number of ranks."""

    layout: _Layout
    ranks: int
    heads: int
    value_heads: int
    parts: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, module: nn.Module, ranks: int) -> _Cut:
        layout = LAYOUTS.get(type(module).__name__)
        if layout is None or hasattr(type(module), HEADS_CUT):
            raise UnsupportedError(
                "module",
                got=type(module).__name__ + (", cut by heads already" if layout is not None else ""),
                want=f"one of {', '.join(LAYOUTS)}",
                remedy="Call parallelize once, on the model as transformers made it.",
            )
        parts = {name: tuple(getattr(module, size) for size in sizes) for name, sizes in layout.flat.items()}
        return cls(layout, ranks, getattr(module, layout.key_heads), getattr(module, layout.value_heads), parts)

    def check(self, name: str) -> None:
        """Raises PlacementError where the ranks do not divide the key heads."""
        if self.heads % self.ranks or self.value_heads % self.heads:
            raise PlacementError(
                name,
                got=f"{self.heads} key heads and {self.value_heads} value heads over {self.ranks} ranks",
                want=f"a number of ranks that divides {self.heads}, so that a key head stays with its value heads",
                remedy="Use fewer ranks for tensor parallelism, and the others for data parallelism.",
            )

    def distribute(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Parameters as DTensors, counts and sizes as this rank's, and classes that show the layer its own part."""
        for path, child in list(module.named_modules()):
            prefix = f"{path}." if path else ""
            own = [name for name, p in child._parameters.items() if p is not None]
            for name in own:
                self._distribute(child, name, prefix + name, mesh)
            # A weight is put into the library's order where the layer reads it; a projection's is large, and there it
            # is what it returns.
            projection = isinstance(child, nn.Linear)
            packed = tuple((name, () if projection else self._parts(prefix + name)) for name in own)
            child.__class__ = _showing_local(type(child), packed, self.groups, self.ranks)  # type: ignore[arg-type]
            if projection and (parts := self._parts(prefix + "weight")):
                child.register_forward_hook(functools.partial(_in_parts, parts, self.groups))
        for size in self.layout.sizes:
            path, _, attribute = size.rpartition(".")
            owner = module.get_submodule(path)
            setattr(owner, attribute, getattr(owner, attribute) // self.ranks)

    @property
    def groups(self) -> int:
        """Key heads of one rank."""
        return self.heads // self.ranks

    def _parts(self, name: str) -> tuple[int, ...]:
        """Rows of each part that a parameter packs, on one rank; () where it packs none."""
        return tuple(rows // self.ranks for rows in self.parts.get(name, ()))

    def _distribute(self, child: nn.Module, name: str, path: str, mesh: DeviceMesh) -> None:
        parameter = child._parameters[name]
        assert parameter is not None
        whole, placement = parameter.detach(), self._placement(path)
        parts = self.parts.get(path)
        if parts is not None:
            whole = _by_head(whole, parts, self.heads)
            child.register_state_dict_post_hook(functools.partial(_save_flat, name, parts, self.heads))
            child.register_load_state_dict_pre_hook(functools.partial(_load_flat, name, parts, self.heads))
        # A copy: a view would keep the whole weight alive.
        local = distribute_tensor(whole, mesh, [placement], src_data_rank=None).to_local().clone()
        cut = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
        child._parameters[name] = nn.Parameter(cut, requires_grad=parameter.requires_grad)

    def _placement(self, path: str) -> Placement:
        if path in self.layout.columns:
            return Shard(1)
        if path in self.parts:
            return Shard(0)
        rows = self.layout.rows.get(path)
        return Replicate() if rows is None else Shard(rows)


def _by_head(x: Tensor, parts: tuple[int, ...], heads: int) -> Tensor:
    """Rows from parts one after another, each of all heads, to heads one after another, each with its rows of all
    parts."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in x.split(parts)], 1).flatten(0, 1)


def _by_part(x: Tensor, parts: tuple[int, ...], heads: int, dim: int = 0) -> Tensor:
    """The way back, along the axis `dim >= 0`."""
    split = x.unflatten(dim, (heads, -1)).split([rows // heads for rows in parts], dim + 1)
    return torch.cat([part.flatten(dim, dim + 1) for part in split], dim)


@functools.cache
def _showing_local(cls: type, packed: tuple[tuple[str, tuple[int, ...]], ...], groups: int, ranks: int) -> type:
    """A subclass of `cls` whose parameters are DTensors and show as this rank's tensors; one for all layers alike,
    which compiled code can share."""
    shown = {name: property(functools.partial(_shown, name=name, parts=parts, groups=groups)) for name, parts in packed}
    return type(cls.__name__, (cls,), {**shown, HEADS_CUT: ranks, "__module__": cls.__module__})


def _shown(module: nn.Module, *, name: str, parts: tuple[int, ...], groups: int) -> Tensor:
    x = module._parameters[name]
    if not isinstance(x, DTensor):
        assert x is not None
        return x
    if x.device_mesh.ndim > 1:
        return x  # no rank's heads are whole: FSDP has cut them further and asks by name; for a layer it gathers them
    # Inside the layer every rank computes with its own heads: of a tensor that all of them have, each has a part of the
    # gradient.
    whole = [p.is_replicate() for p in x.placements]
    if any(whole):
        x = x.redistribute(placements=x.placements)
    local = x.to_local(grad_placements=[Partial() if w else p for w, p in zip(whole, x.placements, strict=True)])
    return _by_part(local, parts, groups) if parts else local


def _in_parts(parts: tuple[int, ...], groups: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return _by_part(output, parts, groups, output.dim() - 1)


def _reordered(x: Tensor, order: Any, *how: Any) -> Tensor:
    if not isinstance(x, DTensor):
        return order(x, *how)
    whole = DTensor.from_local(order(x.full_tensor(), *how), x.device_mesh, [Replicate()] * x.device_mesh.ndim)
    return whole.redistribute(placements=x.placements)


def _save_flat(
    name: str, parts: tuple[int, ...], heads: int, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    state_dict[prefix + name] = _reordered(state_dict[prefix + name].detach(), _by_part, parts, heads)


def _load_flat(
    name: str, parts: tuple[int, ...], heads: int, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    if prefix + name in state_dict:
        state_dict[prefix + name] = _reordered(state_dict[prefix + name], _by_head, parts, heads)


def _enter(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole input on every rank; of its gradient every rank has a part.

    Raises:
        UnsupportedError: in torch.export, which knows no DTensors. (A strict one says so itself, in words of its own.)
    """
    # Dynamo first: in torch 2.11 it takes everything that it traces for an export.
    if not torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting():
        raise UnsupportedError(
            "module",
            got=f"torch.export of {type(module).__name__}, cut by heads over {mesh.size()} ranks",
            want="torch.compile there, or an export of the model as it was before parallelize",
            remedy="Exported programs hold no DTensors and no process groups: export on one device.",
        )
    if args:
        return (_whole_input(args[0], mesh), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _whole_input(kwargs["hidden_states"], mesh)}


def _whole_input(x: Tensor, mesh: DeviceMesh) -> Tensor:
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _leave(mesh: DeviceMesh, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The sum of what the ranks' heads contribute."""
    return (
        DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
    )


def _check_policies(model: nn.Module, layers: Iterable[str]) -> None:
    """Stochastic rounding numbers the heads of a call, and a rank's call has its own from 0: other bits than uncut."""
    for name in layers:
        recipe = model.get_submodule(name).__dict__.get(RECIPE)
        if not isinstance(recipe, Recipe):
            continue
        policies = [recipe.resolve(f"{name}/{kind.name}#0")[1] for kind in KINDS]
        if any(policy is not None and policy.rounding == "stochastic" for policy in policies):
            raise UnsupportedError(
                "model",
                got=f"a policy with rounding='stochastic' at {name}",
                want="rounding='nearest' where heads are cut",
                remedy=reason("HEADS_CUT").remedy,
            )


def _plan_of_the_rest(model: nn.Module, layers: Iterable[str], plan: Mapping[str, str] | None) -> dict[str, str]:
    """Module or parameter -> style, parameters before the module that owns them, as transformers applies them."""
    if plan is None:
        tied = _tied(model)
        plan = {name: style for name, style in dict(getattr(model, "tp_plan", None) or {}).items() if name not in tied}
    if not plan:
        return {}
    styles = _styles()
    if unknown := set(plan.values()) - set(styles.keys()):
        raise UnsupportedError(
            "plan",
            got=f"the styles {sorted(unknown)}",
            want=f"those of transformers: {', '.join(sorted(styles.keys()))}",
            remedy="Correct the plan, or install the transformers that it was written for.",
        )
    ours = tuple(f"{name}." for name in layers)
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if f"{path}.".startswith(ours):
            continue
        style = plan.get(_NUMBER.sub("*", path))
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            own = plan.get(_NUMBER.sub("*", full), style)
            if own is not None:
                found[full] = own
        if style is not None:
            found[path] = style
    return found


def _tied(model: nn.Module) -> set[str]:
    """Modules that share a parameter with another: cut one by one they would be tied no more."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(path)
    return {path for paths in owners.values() if len(paths) > 1 for path in paths}


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""Of a layer or an expert in a path; "*" in a plan."""


def _styles() -> Any:
    """transformers' styles by name."""
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError:
        raise UnsupportedError(
            "plan",
            got="a transformers without transformers.distributed.tensor_parallel",
            want="transformers 5.17 or newer for its tensor-parallel styles",
            remedy="plan={} cuts the linear-attention layers alone, and keeps the rest whole on every rank.",
        ) from None
    return ALL_PARALLEL_STYLES


def _apply(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """As `apply_tensor_parallelism` of transformers 5.24 does it; that of 5.17 takes the model's own plan only."""
    parameters, styles = dict(model.named_parameters()), _styles()
    for path, name in plan.items():
        style = styles[name]
        if path in parameters:
            owner, _, parameter = path.rpartition(".")
            module = model.get_submodule(owner)
            style.validate_param(module, parameter, mesh, parameter_name=path)
            style.shard_param(module, parameter, mesh)
        else:
            module = model.get_submodule(path)
            if name == "mla_kv_a_proj":  # it has to know how the projection packs its outputs
                module.config = model.config.get_text_config()  # type: ignore[operator, union-attr]
            style.install_forward(module, mesh)
        module._is_hooked = True  # type: ignore[assignment]
