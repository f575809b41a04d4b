"""How the `lattn::` ops are cut over a device mesh: one rule for all of them, over the table in `axes.py`.

A recurrence is a loop over tokens whose state is `[K, V]` of one head of one sequence. So T, K and V are never cut, and
two things are, each on any mesh dimension:

    sequences   the batch, N and the slots of packed states, together
    heads       the key heads, with the value heads that read them

A cut op computes what it always computes, of fewer sequences or heads, and no rank asks another for anything. Scales,
rings, cursors and residuals follow their states. A rank's codes have the bits of one device wherever these do not
depend on how many sequences and heads are computed beside one another: a tile is one head's of one sequence.

q (of the codecs the state) says what is cut. Every floating-point tensor has to be cut in the same way, or the call is
refused with the placement that it wants: moving activations between ranks is the caller's decision. Incoming gradients,
which autograd makes, and integers are brought to what is wanted; a plain integer tensor counts as the same on every
rank. Stochastic rounding numbers the heads, and an op knows a rank's own only: cutting heads is refused there. Cutting
sequences is not: the random bits go by the caller's `sequence_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lattn_compile import codec, ops
from lattn_compile.distributed.axes import HEADS, OPS, PACKED, RAW_GATES, SEQUENCES, axes_of_output, axes_of_tensors
from lattn_compile.errors import PlacementError, StateError
from lattn_compile.lowering._torch_distributed import begins_at, compute_by, local_of
from lattn_compile.packed import flush as packed_flush
from lattn_compile.packed import ops as packed_ops

__all__ = ["register"]

_REGISTERED_BY = (ops, codec, packed_ops, packed_flush)
"""Importing these defines the ops."""

_WRITTEN = ("cursor", "position")


def register() -> None:
    """Makes every `lattn::` op take DTensors, in the whole process; again changes nothing."""
    assert _REGISTERED_BY
    for name in OPS:
        compute_by(getattr(torch.ops.lattn, name).default, _run)


def _run(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _Call(op, args, kwargs).run()


class _Call:
    """One call of an op with DTensors among its arguments.

    Attributes:
        axes: letters of every tensor argument, by name. sizes: of each letter, whole.
        anchor: the tensor that says what is cut. cuts: for every mesh dimension `SEQUENCES`, `HEADS` or "".
    """

    def __init__(self, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.op, self.options = op, dict(kwargs)
        self.name = op._schema.name.removeprefix("lattn::")
        names = [a.name for a in op._schema.arguments if not a.kwarg_only]
        self.arguments: dict[str, Any] = dict(zip(names, args, strict=False))
        self.axes = axes_of_tensors(self.name, self.arguments, self.options)
        self.tensors = self._flat()
        self.anchor = (
            "q" if "q" in self.axes else next(name for name in self.axes if name.startswith(("state", "tensors")))
        )
        anchor = self.tensors[self.anchor]
        if not isinstance(anchor, DTensor):
            first = next(name for name, x in self.tensors.items() if isinstance(x, DTensor))
            self._refuse(self.anchor, f"a plain tensor beside {first}, a DTensor", "a DTensor too")
        self.mesh = anchor.device_mesh
        self.sizes = {a: n for name, x in self.tensors.items() for a, n in zip(self.axes[name], x.shape, strict=True)}
        if "b" in self.sizes:
            packed = self.arguments.get("cu_seqlens")
            self.sizes["n"] = self.sizes["b"] if packed is None else packed.shape[0] - 1
        if self.name.startswith("flush_"):
            self.sizes["h"], self.sizes["j"] = self.options["heads"][:2]
        self.cuts = [self._cut(i, placement) for i, placement in enumerate(anchor.placements)]
        self._check_cuts()

    def _flat(self) -> dict[str, Tensor]:
        found: list[Tensor] = []
        for x in (*self.arguments.values(), *(self.options.get(name) for name in RAW_GATES)):
            found += [x] if isinstance(x, Tensor) else x if isinstance(x, (list, tuple)) else []
        return dict(zip(self.axes, found, strict=True))

    def _refuse(self, name: str, got: str, want: str, remedy: str | None = None) -> NoReturn:
        if remedy is None:
            remedy = (
                f"Make it one with distribute_tensor, or x.redistribute(placements=...), before lattn::{self.name}."
            )
        raise PlacementError(name, got=got, want=want, remedy=remedy)

    def _cut(self, dim: int, placement: Placement) -> str:
        """What the anchor's placement on mesh dimension `dim` cuts."""
        if placement.is_replicate():
            return ""
        axes = self.axes[self.anchor]
        if type(placement) is Shard:
            letter = axes[placement.dim]
            for cut in (SEQUENCES, HEADS):
                if letter in cut:
                    return cut
        possible = [f"Shard({i})" for i, a in enumerate(axes) if a in SEQUENCES + HEADS]
        self._refuse(
            self.anchor,
            f"{_word(placement)} on mesh dimension {dim}",
            f"{', '.join(possible)} or Replicate()" if possible else "Replicate()",
            "Sequences and heads can be cut; tokens and channels cannot, nor can values that are still to be summed.",
        )

    def _ranks(self, axes: str) -> int:
        """How many parts those axes are cut into."""
        parts = 1
        for i, cut in enumerate(self.cuts):
            parts *= self.mesh.size(i) if cut == axes else 1
        return parts

    def _check_cuts(self) -> None:
        ranks = self._ranks(HEADS)
        for letter, what in (("h", "key"), ("j", "value")) if ranks > 1 else ():
            if self.sizes.get(letter, 0) % ranks:
                self._refuse(
                    "k" if letter == "h" else "v",
                    f"{self.sizes[letter]} {what} heads over {ranks} ranks",
                    f"a multiple of {ranks}, so that a key head stays with the value heads that read it",
                    "Cut the batch, Shard(0), instead; or repeat key heads until they divide (k.repeat_interleave).",
                )
        if ranks > 1 and self.options.get("rounding") == "stochastic":
            self._refuse(
                self.anchor,
                f"heads cut over {ranks} ranks with rounding='stochastic'",
                "sequences cut, Shard(0), or Replicate()",
                "Random bits go by the number of a head, and a rank would number its own from 0.",
            )
        if self._ranks(SEQUENCES) > 1 and self.arguments.get("cu_seqlens") is not None:
            self._refuse(
                "cu_seqlens",
                "packed sequences with the batch cut",
                "heads cut, Shard(2), or Replicate()",
                "A packed batch has B = 1: give each rank packed sequences of its own as plain tensors.",
            )

    def _placements(self, axes: str) -> tuple[Placement, ...]:
        """Where a tensor with those axes lies in this call."""
        at = [next((i for i, a in enumerate(axes) if a in cut), None) for cut in self.cuts]
        return tuple(Replicate() if i is None else Shard(i) for i in at)

    def _local(self, name: str) -> Tensor:
        """A tensor argument as this rank computes with it."""
        x, want = self.tensors[name], self._placements(self.axes[name])
        written = self.name in PACKED and (name in _WRITTEN or name.startswith("state["))
        moves = name.startswith("grad_") or not (
            written or x.is_floating_point() or "[" in name or name == "checkpoints"
        )
        if not isinstance(x, DTensor):
            if all(p.is_replicate() for p in want):
                return x
            if not moves:
                self._refuse(name, "a plain tensor", f"a DTensor at {_text(want)}, as {self.anchor} is cut")
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if x.device_mesh != self.mesh:
            self._refuse(name, f"on {x.device_mesh}", f"on {self.mesh}, where {self.anchor} is")
        if tuple(x.placements) != want:
            if not moves:
                self._refuse(name, _text(x.placements), f"{_text(want)}, as {self.anchor} is cut")
            x = x.redistribute(placements=want)
        return local_of(x)

    def _slots(self, indices: Tensor) -> Tensor:
        """`state_indices`, whole numbers of all slots, as those of this rank's.

        Raises:
            StateError: a sequence of this rank has its slot on another.
        """
        cursor = self.tensors["cursor"]
        if self._ranks(SEQUENCES) == 1 or not isinstance(cursor, DTensor):
            return indices
        begin, here = begins_at(cursor)[0], local_of(cursor).shape[0]
        live = (indices >= 0) & (indices != self.options.get("padding_slot", -1))
        moved = torch.where(live, indices - begin, -1)
        if bool((live & ((moved < 0) | (moved >= here))).any()):
            raise StateError(
                "state_indices",
                got=f"slots {indices.tolist()} on a rank that holds {begin} to {begin + here - 1}",
                want="sequences on the rank where their slot is",
                remedy="Order the batch by slots, or keep the slots whole and cut heads.",
            )
        return moved

    def run(self) -> Any:
        """The op on local tensors; what it returns as DTensors."""
        local = {name: self._local(name) for name in self.axes}
        if "state_indices" in local:
            local["state_indices"] = self._slots(local["state_indices"])
        given = iter(local.values())
        args: list[Any] = []
        for x in self.arguments.values():
            if isinstance(x, Tensor):
                args.append(next(given))
            else:
                args.append([next(given) for _ in x] if isinstance(x, (list, tuple)) else x)
        options = {**self.options, **{name: local[name] for name in RAW_GATES if name in local}}
        if self.name.startswith("flush_"):
            ranks = self._ranks(HEADS)
            options = {**options, "heads": [n // ranks for n in options["heads"][:2]] + list(options["heads"][2:])}
        if "padding_slot" in options and "state_indices" in local:
            options = {**options, "padding_slot": -1}
        out = self.op(*args, **options)
        if out is None:
            return None
        if isinstance(out, Tensor):
            return self._whole("", out)
        if isinstance(out, list):
            return [self._whole("", x) for x in out]
        return tuple(self._whole(r.name, x) for r, x in zip(self.op._schema.returns, out, strict=True))

    def _whole(self, name: str, x: Tensor) -> DTensor:
        axes = axes_of_output(self.name, name, x, self.arguments)
        shape = []
        for letter, size in zip(axes, x.shape, strict=True):
            cut = next((c for c in self.cuts if letter in c), None)
            # Nobody knows a whole checkpoint: its backward takes each rank's rows as they are.
            shape.append(size if cut is None else self.sizes.get(letter, size * self._ranks(cut)))
        stride, step = [0] * len(shape), 1
        for i in reversed(range(len(shape))):
            stride[i], step = step, step * max(shape[i], 1)
        placements = self._placements(axes)
        return DTensor.from_local(
            x, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


def _text(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(_word, placements))}]"


def _word(placement: Placement) -> str:
    """As the caller writes it."""
    return f"Shard({placement.dim})" if type(placement) is Shard else repr(placement)
