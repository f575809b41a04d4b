"""Bad input to the ops, refused by name before anything is computed.

`check_call` needs shapes, dtypes and devices only, so the fakes run it too and a bad call is refused at trace time.
`check_lengths` and `check_gates` look at values; they do so on CPU tensors alone, because reading a device tensor would
wait for the device. There `ops.segments` clamps instead, so that no length can reach outside the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import (
    DtypeError,
    LattnError,
    PolicyError,
    SequenceError,
    ShapeError,
    StateError,
    nearest,
)
from lattn_compile.formats.quantizer import ROUNDINGS
from lattn_compile.formats.residual import FEEDBACKS
from lattn_compile.formats.rotation import ROTATIONS
from lattn_compile.ops.arguments import check_dense, check_device, query_scale, refuse_position
from lattn_compile.site_policy import GATES, KERNELS, READOUTS

__all__ = [
    "Geometry",
    "Tensors",
    "check_call",
    "check_gates",
    "check_lengths",
    "check_state",
    "check_words",
]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)

RULES = ("delta", "additive")


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensor arguments that every op takes, in schema order."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    prefix_lengths: Tensor | None
    sequence_lengths: Tensor | None
    cursor: Tensor | None
    position: Tensor | None = None
    sequence_ids: Tensor | None = None

    def floats(self) -> dict[str, Tensor]:
        """The floating-point arguments that are present, by name."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "g", "beta", "initial_state")}
        return {name: x for name, x in named.items() if x is not None}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one call; under tracing any of them may be symbolic.

    `sequences` (N) is the batch, or the number of packed sequences; `dtype` is what states are computed in.
    """

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    sequences: int
    dtype: torch.dtype

    @property
    def flat_tokens(self) -> int:
        return self.batch * self.tokens

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.sequences, self.value_heads, self.key_dim, self.value_dim)


def _unequal(a: int, b: int) -> bool:
    """`a != b`, guarding on symbolic sizes; an unbacked size counts as equal and is compared when the op runs."""
    return _holds(a != b)


def _holds(condition: bool) -> bool:
    if type(condition) is bool:
        return condition
    # Symbolic sizes exist only where this module is loaded already; importing it up front costs every process 0.5 s.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def hint_of(size: Any) -> int | None:
    """The size that a graph was traced with, None if nobody knows it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return size.node.hint if size.node.has_hint() else None  # type: ignore[no-any-return]


def told(size: Any) -> Any:
    """A size as an error shows it: as it is now, not the graph's name for it."""
    known = hint_of(size)
    return size if known is None else known


def _shape(x: Tensor) -> str:
    return str([told(n) for n in x.shape])


def _check_shape(name: str, x: Tensor, names: str, want: Sequence[int], remedy: str) -> None:
    if x.dim() != len(want) or any(_unequal(a, b) for a, b in zip(x.shape, want, strict=True)):
        raise ShapeError(name, got=_shape(x), want=f"{names} = {[told(n) for n in want]}", remedy=remedy)


def check_call(t: Tensors) -> Geometry:
    """Shapes, dtypes and devices of one call.

    Raises:
        ShapeError, DtypeError, SequenceError: naming the argument, what it is and what it should be.
    """
    for name, x in t.floats().items():
        check_dense(name, x)
        if x.dtype not in FLOATS:
            raise DtypeError(
                name,
                got=str(x.dtype),
                want="bfloat16, float16, float32 or float64",
                remedy="Pass the decoded state, or an EncodedState to lc.linear_attention."
                if name == "initial_state"
                else f"Convert {name} to a floating-point dtype.",
            )
        if x.device != t.q.device:
            raise DtypeError(name, got=str(x.device), want=f"q's device {t.q.device}", remedy=f"Move {name} there.")

    for name, x, names in (("q", t.q, "[B, T, H, K]"), ("k", t.k, "[B, T, H, K]"), ("v", t.v, "[B, T, HV, V]")):
        if x.dim() != 4:
            raise ShapeError(name, got=_shape(x), want=names, remedy="The token axis comes before the heads.")
    batch, tokens, heads, key_dim = t.q.shape
    value_heads, value_dim = t.v.shape[2:]
    for name, size, axis in (("q", heads, "H"), ("q", key_dim, "K"), ("v", value_heads, "HV"), ("v", value_dim, "V")):
        if not _unequal(size, 0):
            raise ShapeError(name, got=f"{axis} = 0", want=f"{axis} >= 1", remedy="Only B and T may be empty.")
    _check_shape("k", t.k, "[B, T, H, K]", (batch, tokens, heads, key_dim), "k must have q's shape.")
    if _unequal(t.v.shape[0], batch) or _unequal(t.v.shape[1], tokens):
        raise ShapeError(
            "v",
            got=_shape(t.v),
            want=f"[B, T, HV, V] with B, T = {[batch, tokens]}",
            remedy="v must have as many sequences and tokens as q; is it [B, HV, T, V]?",
        )
    if _unequal(value_heads % heads, 0):
        raise ShapeError(
            "v",
            got=f"HV = {value_heads} value heads",
            want=f"a multiple of q's H = {heads} key heads",
            remedy="Value head j reads key head j // (HV // H); repeat or drop heads until HV = R * H.",
        )
    if t.g is not None:
        if t.g.dim() == 4:
            _check_shape(
                "g", t.g, "[B, T, HV, K]", (batch, tokens, value_heads, key_dim), "A channel decay has one gate a key."
            )
        else:
            _check_shape(
                "g",
                t.g,
                "[B, T, HV]",
                (batch, tokens, value_heads),
                "A head decay is [B, T, HV], a channel decay [B, T, HV, K], both per value head.",
            )
    if t.beta is not None:
        _check_shape("beta", t.beta, "[B, T, HV]", (batch, tokens, value_heads), "beta has one value a value head.")

    sequences = batch
    if t.cu_seqlens is not None:
        check_device("cu_seqlens", t.cu_seqlens, t.q.device)
        sequences = _check_packed(t.cu_seqlens, batch, t.q)
    dtype = torch.float64 if any(x.dtype is torch.float64 for x in t.floats().values()) else torch.float32
    geometry = Geometry(batch, tokens, heads, value_heads, key_dim, value_dim, sequences, dtype)
    if t.initial_state is not None:
        check_state(t.initial_state, geometry)
    for name in ("prefix_lengths", "sequence_lengths", "cursor", "position", "sequence_ids"):
        if (x := getattr(t, name)) is not None:
            check_device(name, x, t.q.device)
            _check_per_sequence(name, x, sequences, scalar=name != "cursor")
    return geometry


def check_state(state: Tensor, geometry: Geometry) -> None:
    """`initial_state` is `[N, HV, K, V]`; a value-first one is named as such."""
    n, value_heads, key_dim, value_dim = geometry.state_shape
    remedy = "One state a sequence and value head, key axis before value axis."
    # The mismatch first: asking whether K is V of every good call would guard a graph of symbolic sizes on it.
    if (
        state.dim() == 4
        and _unequal(state.shape[2], key_dim)
        and not _unequal(state.shape[2], value_dim)
        and not _unequal(state.shape[3], key_dim)
    ):
        remedy += " This one looks value-first, [N, HV, V, K]: pass state.transpose(-1, -2)."
    _check_shape("initial_state", state, "[N, HV, K, V]", (n, value_heads, key_dim, value_dim), remedy)


def _check_packed(cu_seqlens: Tensor, batch: int, q: Tensor) -> int:
    if cu_seqlens.dtype not in INTEGERS:
        raise DtypeError(
            "cu_seqlens", got=str(cu_seqlens.dtype), want="int32 or int64", remedy="cu_seqlens counts tokens."
        )
    if cu_seqlens.dim() != 1 or _holds(cu_seqlens.shape[0] < 2):
        raise SequenceError(
            "cu_seqlens",
            got=f"shape {_shape(cu_seqlens)}",
            want="[N + 1] cumulative lengths, N >= 1",
            remedy="Start with 0; each further entry is the end of one sequence.",
        )
    if _unequal(batch, 1):
        raise SequenceError(
            "cu_seqlens",
            got=f"a batch of {told(batch)} sequences, q of shape {_shape(q)}",
            want="B = 1 when cu_seqlens is given",
            remedy="Flatten the batch to [1, B * T, ...] and give the boundaries in cu_seqlens.",
        )
    return cu_seqlens.shape[0] - 1


def _check_per_sequence(name: str, x: Tensor, sequences: int, *, scalar: bool) -> None:
    if x.dtype not in INTEGERS:
        remedy = "An id is a number." if name == "sequence_ids" else f"{name} counts tokens."
        raise DtypeError(name, got=str(x.dtype), want="int32 or int64", remedy=remedy)
    if (x.dim() == 0 and scalar) or (x.dim() == 1 and not _unequal(x.shape[0], sequences)):
        return
    raise SequenceError(
        name,
        got=f"shape {_shape(x)}",
        want=f"{'a scalar or ' if scalar and name != 'sequence_ids' else ''}[N] = [{told(sequences)}], one a sequence",
        remedy="N is the batch size, or len(cu_seqlens) - 1 for packed sequences.",
    )


def check_words(options: Any, writes: Sequence[str]) -> None:
    """The words of an op's options, `writes` being the write modes that the op has, and its query scale.

    Raises:
        PolicyError: an unknown one, with those that are known; a scale that is not finite.
    """
    for name, known in (
        ("rule", RULES),
        ("write", writes),
        ("readout", READOUTS),
        ("implementation", KERNELS),
        ("rounding", ROUNDINGS),
        ("feedback", FEEDBACKS),
        ("rotation", ROTATIONS),
        ("gate", GATES),
    ):
        word = getattr(options, name)
        if word not in known:
            raise PolicyError(name, got=repr(word), want=" or ".join(map(repr, known)), remedy=_other(word, known))
    query_scale(options.scale, None)


def _other(word: Any, known: Sequence[Any]) -> str:
    home = {
        "token": "lattn::decode",
        "chunk": "lattn::chunk",
        "replay": "lattn::replay",
        "two_precision": "lattn::replay",
    }.get(word)
    if home is not None:
        return f"The write mode {word!r} belongs to {home}."
    return nearest(str(word), [k for k in known if k is not None]).strip() or "Choose one of these."


def _on_cpu(*tensors: Tensor | None) -> bool:
    return all(x is None or x.device.type == "cpu" for x in tensors)


def check_lengths(t: Tensors, geometry: Geometry, *, cursor_end: int) -> None:
    """Values of cu_seqlens, lengths and cursor: `0 <= p <= n <= T` per sequence, `-1 <= cursor < cursor_end`.

    A scalar prefix may exceed a sequence: it is one number for all of them, clamped to each (semantics §4).
    """
    sizes: Tensor | None = None
    if t.cu_seqlens is not None and _on_cpu(t.cu_seqlens):
        sizes = t.cu_seqlens.diff()
        ends = t.cu_seqlens.tolist()
        if ends[0] != 0:
            raise SequenceError("cu_seqlens", got=f"a first entry of {ends[0]}", want="0", remedy="Start at token 0.")
        if bool((sizes < 0).any()):
            at = int((sizes < 0).nonzero()[0])
            raise SequenceError(
                "cu_seqlens",
                got=f"{ends[at]} followed by {ends[at + 1]} at entry {at + 1}",
                want="entries that never decrease",
                remedy="cu_seqlens holds cumulative ends, not the lengths themselves.",
            )
        if ends[-1] > geometry.tokens:
            raise SequenceError(
                "cu_seqlens",
                got=f"a last entry of {ends[-1]}",
                want=f"at most T = {geometry.tokens} tokens",
                remedy="q, k and v must hold every token that cu_seqlens counts.",
            )
    elif t.cu_seqlens is None and (t.sequence_lengths is not None or t.prefix_lengths is not None):
        sizes = torch.tensor(geometry.tokens)
    length = sizes
    if t.sequence_lengths is not None and _on_cpu(t.sequence_lengths):
        _check_range("sequence_lengths", t.sequence_lengths, sizes, "the sequence's T tokens")
        length = t.sequence_lengths
    if t.prefix_lengths is not None and _on_cpu(t.prefix_lengths):
        scalar = t.prefix_lengths.dim() == 0
        _check_range("prefix_lengths", t.prefix_lengths, None if scalar else length, "the sequence's own length n")
    # From a tensor, a position beyond 2**32 counts modulo it, on every device.
    if t.position is not None and _on_cpu(t.position) and bool((t.position < 0).any()):
        refuse_position(str(t.position.tolist()))
    if t.cursor is not None and _on_cpu(t.cursor) and bool(((t.cursor < -1) | (t.cursor >= cursor_end)).any()):
        raise StateError(
            "cursor",
            got=str(t.cursor.tolist()),
            want=f"-1 (not handed over) to {cursor_end - 1}",
            remedy="Continue with the same write mode and chunk_size that produced the state.",
        )


_CLAMPED = {
    "prefix_lengths": "lengths one a sequence are not clamped. One int for all is, to each sequence's length.",
    "sequence_lengths": "lengths are not clamped.",
}


def _check_range(name: str, x: Tensor, most: Tensor | None, of_what: str) -> None:
    if bool((x < 0).any()):
        raise SequenceError(name, got=str(x.tolist()), want="lengths >= 0", remedy=f"{name} counts tokens.")
    if most is not None and bool((x > most).any()):
        raise SequenceError(
            name,
            got=str(x.tolist()),
            want=f"at most {of_what}, {most.tolist()}",
            remedy="0 <= p <= n <= T must hold for every sequence: " + _CLAMPED[name],
        )


def check_gates(g: Tensor | None, rows: Callable[[], Tensor]) -> None:
    """Refuses a positive log decay in a token that counts. `rows()` is bool `[B * T]`, the tokens that do: the others
    may hold anything, so they are looked at only when something positive turned up."""
    if g is None or not _on_cpu(g) or not bool((g > 0).any()):
        return
    flat = g.detach().flatten(0, 1)
    positive = (flat > 0) & rows().reshape(-1, *(1,) * (flat.dim() - 1))
    if not bool(positive.any()):
        return
    at = positive.nonzero()[0].tolist()
    raise LattnError(
        "g",
        got=f"{float(flat[tuple(at)]):.6g} at token {at[0]}, head {at[1]}",
        want="a natural-log decay <= 0",
        remedy="g is log(alpha) of one step, not alpha itself and not log2; pass -exp(A_log) * softplus(...) or "
        "logsigmoid(...).",
    )
