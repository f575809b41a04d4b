"""Cases, inputs and comparisons that the tests of packed states share."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import torch
from torch import Tensor

from lattn_compile.modes import Chunk
from lattn_compile.packed.layout import Heads
from lattn_compile.policy import Policy
from lattn_compile.recurrence import BY_NAME
from lattn_compile.testing.inputs import make_inputs
from tests.conformance_matrix import AXES, NEUTRAL, Assignment, Case, is_legal, pairwise_cover

SITE = 3
AXES_HERE: dict[str, tuple[Any, ...]] = {
    **{name: AXES[name] for name in ("kind", "format", "readout", "rounding", "feedback", "rotation", "gate", "group")},
    "write": tuple(w for w in AXES["write"] if not isinstance(w, Chunk)),
    "size": ((16, 16), (16, 72), (60, 20)),
    "layout": ("whole", "ragged", "packed"),
    "slots": ("none", "indices", "padding", "fresh"),
    "dtype": AXES["dtype"],
}
"""The axes of the conformance tests that a packed state has, and how its sequences find their slots."""


def _legal(assignment: Assignment) -> bool:
    return is_legal({name: x for name, x in assignment.items() if name != "slots"})


@functools.cache
def cover() -> list[Assignment]:
    """Legal assignments in which every legal pair of values occurs."""
    return pairwise_cover(AXES_HERE, _legal)


def case_of(assignment: Assignment) -> Case:
    return Case(**{**NEUTRAL, **{name: x for name, x in assignment.items() if name != "slots"}})


@dataclasses.dataclass(frozen=True)
class Step:
    """One call: tokens `q, k, v, g, beta`, and the lengths of its sequences."""

    tokens: list[Any]
    cu_seqlens: Tensor | None
    sequence_lengths: Tensor | None
    counts: Tensor


def steps(case: Case, sequences: int, lengths: list[int]) -> list[Step]:
    """Calls of `lengths` tokens for each of some sequences, as the case's layout has them."""
    made = []
    for number, T in enumerate(lengths):
        counts = [T, T // 2, 0, max(T - 1, 0)][:sequences]
        packed = case.layout == "packed"
        x = make_inputs(
            case.kind,
            batch=1 if packed else sequences,
            tokens=sum(counts) if packed else T,
            key_heads=2,
            value_heads=2 * case.group,
            key_dim=case.size[0],
            value_dim=case.size[1],
            lengths=counts if packed else None,
            dtype=case.dtype,
            seed=zlib.crc32(f"{case}{number}".encode()),
        )
        whole = case.layout == "whole"
        counts = [T] * sequences if whole else counts
        lens = torch.tensor(counts) if case.layout == "ragged" else None
        made.append(Step([x.q, x.k, x.v, x.g, x.beta], x.cu_seqlens, lens, torch.tensor(counts)))
    return made


def heads_of(step: Step) -> Heads:
    q, _, v, g, beta = step.tokens
    decay = "none" if g is None else "head" if g.dim() == 3 else "channel"
    return Heads(q.shape[2], v.shape[2], q.shape[3], v.shape[3], decay, beta is not None)


def rule_of(case: Case) -> str:
    return BY_NAME[case.kind].rule


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8) if x.dim() == 0 else x.contiguous().view(torch.uint8)


def rubbish(tensors: dict[str, Tensor], seed: int = 0) -> None:
    """Fills stored tensors with NaN where they can hold one, and with random codes."""
    rng = torch.Generator().manual_seed(seed)
    for x in tensors.values():
        if x.dtype.is_floating_point and x.dtype.itemsize > 1:
            x.fill_(torch.nan)
        else:
            flat = x.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, generator=rng, dtype=torch.uint8))


def policy(spec: Any, **options: Any) -> Policy:
    return Policy(spec, storage="packed", **options)
