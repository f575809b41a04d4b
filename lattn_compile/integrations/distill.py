"""What quantization-aware distillation is made of, for a loop of one's own: KL on the suffix, and a teacher's weights.

The teacher needs no second model: an exact state is the same compiled graph under a phase that is all prefix, and other
weights are other values of its inputs.

    weights = [(p, p.detach().clone()) for p in model.parameters()]        # before training
    with swapped(weights), lc.training_phase(tokens):
        teacher = model(ids).logits.detach()
    with lc.training_phase(prefix):
        suffix_kl(model(ids).logits, teacher, prefix).backward()
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lattn_compile import phase
from lattn_compile.errors import DtypeError, LattnError, SequenceError, ShapeError
from lattn_compile.phase import Lengths

__all__ = ["all_prefix", "suffix_kl", "swapped"]


@contextlib.contextmanager
def swapped(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, the two tensors of each pair have each other's values. In place: a compiled graph keeps its inputs.

    Raises:
        LattnError: no pairs of tensors. ShapeError, DtypeError: two that cannot hold each other's values bit for bit.
            Nothing has been swapped then.
    """
    pairs = list(pairs) if isinstance(pairs, Iterable) else pairs
    if not isinstance(pairs, list) or not all(_are_two_tensors(pair) for pair in pairs):
        raise LattnError("pairs", got=repr(pairs)[:200], want="pairs of tensors", remedy="[(parameter, weight), ...].")
    for i, (a, b) in enumerate(pairs):
        if a.shape != b.shape:
            remedy = "Pair each parameter with a weight of its own shape."
            raise ShapeError(f"pairs[{i}]", got=f"{[*a.shape]} and {[*b.shape]}", want="one shape", remedy=remedy)
        if a.dtype != b.dtype:
            remedy = "Convert the weight first, weight.to(parameter.dtype): the narrower one would round the other."
            raise DtypeError(f"pairs[{i}]", got=f"{a.dtype} and {b.dtype}", want="one dtype", remedy=remedy)

    def swap(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            for a, b in pairs:
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)

    swap(pairs)
    try:
        yield
    finally:
        swap(reversed(pairs))  # a tensor may stand in several


def _are_two_tensors(pair: Any) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)


def suffix_kl(
    student: Tensor,
    teacher: Tensor,
    prefix_lengths: Lengths | None,
    sequence_lengths: Lengths | None = None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Mean KL(teacher ‖ student) in nats over the suffix tokens `p <= t < n` of a batch, times temperature².

    Args:
        student, teacher: logits `[B, T, vocabulary]`; computed in float32 (float64 stays).
        prefix_lengths, sequence_lengths: as `lc.training_phase` takes them; None: 0, and T.
    Returns:
        A scalar, 0 (with zero gradients) if there is no suffix token.
    Raises:
        LattnError: a temperature that is no number above 0. DtypeError, ShapeError: no logits, or logits of two shapes.
            DtypeError, SequenceError: lengths that are not lengths, or of another number of sequences.
    """
    for name, x in (("student", student), ("teacher", teacher)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise DtypeError(name, got=got, want="logits, a floating-point tensor", remedy="Pass outputs.logits.")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0.0 < temperature < math.inf:
        raise LattnError("temperature", got=repr(temperature), want="a number above 0", remedy="1.0 is usual.")
    if student.shape != teacher.shape or student.dim() != 3:
        raise ShapeError(
            "teacher",
            got=f"{list(teacher.shape)} beside {list(student.shape)}",
            want="[B, T, vocabulary], both",
            remedy="Give both models the same batch.",
        )
    batch, tokens = student.shape[:2]
    where = torch.arange(tokens, device=student.device).expand(batch, tokens)
    suffix = torch.ones_like(where, dtype=torch.bool)
    for name, lengths in (("prefix_lengths", prefix_lengths), ("sequence_lengths", sequence_lengths)):
        if (n := phase.as_lengths(name, lengths)) is not None:
            if n.dim() and n.shape[0] != batch:
                raise SequenceError(
                    name,
                    got=f"shape {list(n.shape)}",
                    want=f"a scalar or [B] = [{batch}], one a sequence of logits {list(student.shape)}",
                    remedy="Give what the phase around the student's call was given.",
                )
            n = n.to(student.device).view(-1, 1)
            suffix = suffix & (where >= n if name == "prefix_lengths" else where < n)
    wide = torch.float64 if student.dtype is torch.float64 else torch.float32
    log_q, log_p = (F.log_softmax(x[suffix].to(wide) / temperature, dim=-1) for x in (student, teacher))
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True) * temperature**2
    return kl / suffix.sum().clamp(min=1)


def all_prefix(prefix: Tensor, sequence: Tensor | None, tokens: int) -> Tensor:
    """Lengths that make every token prefix, of the kind (one, or one a sequence) that `prefix` is: no new graph."""
    everything = torch.full_like(prefix, tokens)
    return (
        torch.minimum(everything, sequence.to(prefix.device)) if prefix.dim() and sequence is not None else everything
    )
