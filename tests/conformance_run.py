"""One conformance case: made, run through the public call and through the float64 loop, and compared.

float64 inputs are compared with the loop itself (semantics §8: 1e-9 relative, equal codes). In fp32 and bf16 rounding
is chaotic, so there the loop takes over the states and factors that the call stored, each of which must be what the
loop would have stored but for values next to a tie; outputs and gradients are then compared at one point, and the
outputs once more against the free-running loop.
"""

from __future__ import annotations

import dataclasses
import zlib
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lattn_compile import linear_attention
from lattn_compile.formats import Fp32, parse
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.policy import Chunk, Exact, Policy, Replay, Token, TwoPrecision
from lattn_compile.recurrence.gates import lower_bound_gate, softplus_gate
from lattn_compile.testing import Inputs, OracleResult, RawGate, make_inputs, make_raw_gate, oracle
from tests.conformance_matrix import Case

__all__ = ["Built", "build", "check", "dense", "double_loop", "run"]

KEY_HEADS = 2
SITE = 3
FREE_RUN = 16  # suffix tokens over which a free-running fp32 trajectory in token or replay mode means something

Stored = dict[tuple[int, int, str], Tensor]


@dataclasses.dataclass(frozen=True)
class Built:
    """The tensors and lengths of a case; `inputs.g` is None where `raw` makes it.

    Attributes:
        rooms: tokens that each sequence has in the buffers; spare ones follow the last packed sequence.
        prefix, lengths, position, ids: one a sequence.
        cuts: where the call is cut and its state carried on.
    """

    case: Case
    inputs: Inputs
    raw: RawGate | None
    rooms: list[int]
    spare: int
    prefix: list[int]
    lengths: list[int]
    position: list[int]
    ids: list[int]
    cuts: list[int]

    @property
    def packed(self) -> bool:
        return self.inputs.cu_seqlens is not None

    def leaves(self) -> dict[str, Tensor]:
        return self.inputs.leaves() | ({} if self.raw is None else self.raw.leaves())

    def with_grad(self, dtype: torch.dtype | None = None) -> Built:
        """The same with leaves of their own, in `dtype` if one is given."""

        def leaf(x: Tensor) -> Tensor:
            return x.detach().to(dtype or x.dtype, copy=True).requires_grad_()

        raw = None if self.raw is None else self.raw.map(leaf)
        return dataclasses.replace(self, inputs=self.inputs.map(leaf), raw=raw)


def build(case: Case) -> Built:
    """Inputs of a case, the same every time."""
    seed = zlib.crc32(str(case).encode())
    T, (K, V) = case.tokens, case.size
    lengths: list[int] | None = None
    packed, spare = None, 0
    if case.layout == "packed":
        packed, spare = [T, 0, T // 2 + 1], 2
        rooms, prefix, lengths = packed, [T // 3, 0, 0], [T - 1, 0, T // 2 + 1]
        prefix[0] = min(prefix[0], T - 1)
    elif case.layout == "ragged":
        rooms, prefix, lengths = [T] * 3, [T // 3, 0, 0], [T, T // 2, 0]
    elif case.layout == "prefix":
        rooms, prefix = [T] * 3, [0, T // 3, T]
    else:
        rooms, prefix = [T] * 2, [0, 0]
    ends = rooms if lengths is None else lengths
    if case.dtype != torch.float64 and isinstance(case.write, Token | Replay):
        prefix = [max(p, n - FREE_RUN) for p, n in zip(prefix, ends, strict=True)]
    batch = len(rooms)
    inputs = make_inputs(
        case.kind,
        batch=batch,
        tokens=T,
        key_heads=KEY_HEADS,
        value_heads=KEY_HEADS * case.group,
        key_dim=K,
        value_dim=V,
        lengths=packed,
        spare_tokens=spare,
        dtype=case.dtype,
        initial_state=case.state != "none",
        hostile=case.hostile,
        seed=seed,
    )
    raw = None
    if case.raw_gate is not None:
        rows, tokens = inputs.q.shape[:2]
        sizes = {"batch": rows, "tokens": tokens, "value_heads": KEY_HEADS * case.group, "key_dim": K}
        raw = make_raw_gate(
            case.kind, case.raw_gate, **sizes, strong=case.hostile == "strong_decay", dtype=case.dtype, seed=seed
        )
        inputs = dataclasses.replace(inputs, g=None)
    if lengths is not None:
        inputs = inputs.ragged(lengths)
    # Positions and names beyond 32 bits' worth: the counter has a word for each half.
    position = [7 * i + (2**32 - 5 if i == 1 else 0) for i in range(batch)]
    ids = [5 + i * (2**33 + 1) for i in range(batch)]
    # Twice, one token apart: a call that finds records in the ring and leaves without a flush. At T = 1 some are empty.
    cuts = [T * 2 // 5, T * 2 // 5 + 1] if case.state == "carried" else []
    return Built(case, inputs, raw, rooms, spare, prefix, list(ends), position, ids, cuts)


def gate(b: Built) -> Tensor | None:
    """g as the call gets it: of a raw gate in fp32 by the library's own gate ops, in float64 by the formula."""
    raw = b.raw
    if raw is None:
        return b.inputs.g
    if b.case.dtype == torch.float64:
        return raw.decay()
    if raw.form == "softplus":
        return softplus_gate(raw.g_raw, raw.A_log, raw.dt_bias)
    return lower_bound_gate(raw.g_raw, raw.A_log, raw.lower_bound, raw.dt_bias)


def dense(state: Any) -> Tensor:
    return state if isinstance(state, Tensor) else state.dense()


def run(
    b: Built,
    first: int,
    last: int,
    state: Any,
    g: Tensor | None,
    only: int | None = None,
    policy: Policy | None = None,
) -> Any:
    """`lc.linear_attention` on tokens first to last of every sequence (or of one): (o of each sequence, state)."""
    x, case = b.inputs, b.case
    chosen = range(len(b.rooms)) if only is None else [only]
    starts = [sum(b.rooms[:i]) for i in range(len(b.rooms))]
    spans = [range(min(first, b.rooms[i]), min(last, b.rooms[i])) for i in chosen]
    rows = torch.tensor([starts[i] + t for i, span in zip(chosen, spans, strict=True) for t in span], dtype=torch.int64)
    batch = [len(spans), last - first]
    if b.packed:
        size = sum(b.rooms) + b.spare
        rows, batch = torch.cat([rows, torch.arange(size - b.spare, size)]), [1, rows.numel() + b.spare]

    def part(y: Tensor | None) -> Tensor | None:
        return None if y is None else y.flatten(0, 1)[rows].unflatten(0, batch)

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor([values[i] for i in chosen], dtype=torch.int64)

    widths = torch.tensor([len(span) for span in spans])
    lengths = torch.minimum((numbers(b.lengths) - first).clamp(min=0), widths)
    prefix = torch.minimum((numbers(b.prefix) - first).clamp(min=0), lengths)
    q, k, v, decay, beta = (part(y) for y in (x.q, x.k, x.v, g, x.beta))
    assert q is not None and k is not None and v is not None
    o, state = linear_attention(
        q,
        k,
        v,
        decay,
        beta,
        rule=x.rule,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=x.qk_l2norm,
        cu_seqlens=torch.cat([widths.new_zeros(1), widths.cumsum(0)]) if b.packed else None,
        prefix_lengths=prefix if any(b.prefix) else None,
        sequence_lengths=lengths if b.lengths != b.rooms else None,
        policy=policy or case.policy,
        position=numbers(b.position) + first,
        sequence_ids=numbers(b.ids),
        site_id=SITE,
    )
    return list(o.flatten(0, 1).split([*widths.tolist(), b.spare])), state


def whole(b: Built, g: Tensor | None) -> tuple[Tensor, Any]:
    """The call of the case, in one piece or three: o `[M, HV, V]`, flat, and the state."""
    T = b.case.tokens
    state: Any = b.inputs.initial_state
    outs = []
    for first, last in pairwise([0, *b.cuts, T]):
        o, state = run(b, first, last, state, g)
        outs.append(o)
    rows = [torch.cat([o[i] for o in outs]) for i in range(len(b.rooms))]
    return torch.cat([*rows, outs[-1][-1]]), state


def double_loop(b: Built, g: Tensor | None, **options: Any) -> OracleResult:
    """The oracle on the same inputs."""
    x, policy = b.inputs, b.case.policy
    arguments = {**policy.op_kwargs(), **x.options(), **options}
    return oracle(
        x.q, x.k, x.v, g, x.beta, x.initial_state, x.cu_seqlens,
        torch.tensor(b.prefix), torch.tensor(b.lengths),
        position=torch.tensor(b.position), sequence_ids=torch.tensor(b.ids), site_id=SITE, **arguments,
    )  # fmt: skip


def check(case: Case) -> None:
    """Outputs, final state, codes and every gradient of a case.

    Raises:
        AssertionError: which of them is off, and by how much.
    """
    b = build(case)
    ours, theirs = b.with_grad(), b.with_grad(torch.float64)
    g = gate(ours)
    o, state = whole(ours, g)
    outside = _outside(b)
    assert not o[outside].any(), "o beyond the sequences is not exactly 0"

    leaves, wanted = ours.leaves(), theirs.leaves()
    g64 = theirs.inputs.g if theirs.raw is None else theirs.raw.decay()
    if case.dtype == torch.float64:
        tolerance = 1e-9
        want = double_loop(theirs, g64)
        _codes(state, want, b)
    else:
        tolerance = 1e-5
        if ours.raw is not None:
            # The activation has errors of its own, which are not the op's: the loop starts from g as it came out.
            assert g is not None and g64 is not None
            _close("g", g[g.isfinite()], g64[g64.isfinite()], 1e-6)
            g64 = g.detach().double().requires_grad_()
            leaves = {"g": g, **leaves}
            wanted = {"g": g64, **theirs.inputs.leaves()}
        _free_running(theirs, g64, o)
        moved = _Moved(stored(b, None if g is None else g.detach()), feedback=case.feedback is not None)
        want = double_loop(theirs, g64, given=moved)
        moved.check()
    half = 2.0**-8  # two bf16 roundings, each half a unit of 2^-8
    _close("o", o, want.o.flatten(0, 1), half if o.dtype == torch.bfloat16 else tolerance)
    _close("state", dense(state), want.dense, tolerance)
    if not isinstance(state, Tensor):
        assert state.cursor.tolist() == want.cursor.tolist(), "cursor"

    rng = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.dtype) for x in (o, dense(state))]
    mine = _gradients([o, dense(state)], cotangents, leaves)
    them = _gradients([want.o.flatten(0, 1), want.dense], [c.double() for c in cotangents], wanted)
    if ours.raw is not None and "g" in them:
        assert g is not None
        them |= _gradients([g], [them["g"].to(g.dtype)], ours.raw.leaves())
    assert set(mine) == set(them)
    for name, x in mine.items():
        _close(f"d{name}", x, them[name], half if x.dtype == torch.bfloat16 else tolerance)
        if x.dim() > 2 and name != "initial_state":
            assert not x.flatten(0, 1)[outside].any(), f"d{name} beyond the sequences is not exactly 0"


def _gradients(outputs: list[Tensor], cotangents: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    reached = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if x.requires_grad]
    if not reached:
        return {name: torch.zeros_like(x) for name, x in leaves.items()}
    grads = torch.autograd.grad(
        [x for x, _ in reached],
        list(leaves.values()),
        [c for _, c in reached],
        retain_graph=True,  # a raw gate's part is used once more
        materialize_grads=True,
        allow_unused=True,
    )
    return dict(zip(leaves, grads, strict=True))


def _outside(b: Built) -> Tensor:
    """Bool `[M]`: tokens of no sequence."""
    inside: list[bool] = []
    for room, length in zip(b.rooms, b.lengths, strict=True):
        inside += [True] * length + [False] * (room - length)
    return ~torch.tensor([*inside, *[False] * b.spare], dtype=torch.bool)


def _close(name: str, a: Tensor, b: Tensor, tolerance: float) -> None:
    """‖a − b‖ ≤ tolerance ‖b‖, in float64, beside numbers too small for the dtype of `a`; NaN fails."""
    tiny = torch.finfo(a.dtype).tiny
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape, f"{name}: shape {list(a.shape)}, want {list(b.shape)}"
    size = b.norm()
    off = (a - b).norm()
    assert off <= tolerance * size + tiny, (
        f"{name}: off by {off / size:.3g} of its norm {size:.3g}; want {tolerance:.1e}"
    )


def quantizer(case: Case) -> Quantizer:
    """That of the case's policy at this test's site."""
    p = case.policy
    assert p.rounded_format is not None
    return Quantizer(p.rounded_format, p.rounding, p.feedback, p.rotation, p.seed, SITE)


def _codes(state: Any, want: OracleResult, b: Built) -> None:
    """The codes of a carried state are those of the loop's last write, where there was one."""
    if isinstance(b.case.write, Exact):
        return
    two = isinstance(b.case.write, TwoPrecision)
    encoded = state if not hasattr(state, "anchor") else state.read if two else state.anchor
    codec, source = quantizer(b.case), want.final_state.detach()
    wanted = codec.encode(source, Identity(want.written, torch.tensor(b.ids)))
    assert set(encoded.tensors) == set(wanted) == set(codec.keys)
    shape = (source.shape[-2], source.shape[-1])
    # Decoded, because the two zeros of a code are one number: which of them a sum gives depends on its order.
    pairs = {name: (encoded.tensors[name], wanted[name]) for name in wanted if "scale" in name}
    decoded = (codec.decode(e, shape=shape, dtype=torch.float64) for e in (encoded.tensors, wanted))
    pairs["codes"] = tuple(decoded)  # type: ignore[assignment]
    for name, (ours, theirs) in pairs.items():
        for i in (want.cursor >= 0).nonzero().flatten().tolist():
            if codec.fmt == Fp32():  # rounds nothing: its codes are the numbers themselves
                _close("codes", ours[i], theirs[i], 1e-9)
                continue
            same = ours[i].double() == theirs[i].double()
            assert same.all(), f"{name} of sequence {i}: {(~same).sum()} of {same.numel()} differ"


def _free_running(b: Built, g: Tensor | None, o: Tensor) -> None:
    """‖o − o_q‖ ≤ 0.1 ‖o_exact − o_q‖, o_q of the free-running loop (semantics §8), beside what fp32 itself costs.

    Two kinds of case exceed the tenth whoever computes them, float64 loops whose inputs differ by 1e-7 included: error
    feedback, where one value at a tie changes a whole tile by all that feedback leaves, and one repeated key with
    beta = 1.9. They may come as far apart as two independent roundings do; what judges them is the comparison from the
    same stored states, write by write.
    """
    chaotic = b.case.feedback is not None or b.case.hostile == "repeated_key"
    with torch.no_grad():
        rounded, exact = double_loop(b, g).o, double_loop(b, g, write="exact").o
    off = (o.double().view_as(rounded) - rounded).norm()
    cost = 5e-6 + 2.0**-24 * b.case.tokens + (2.0**-8 if b.case.dtype == torch.bfloat16 else 0.0)
    bound = (1.5 if chaotic else 0.1) * (exact - rounded).norm() + cost * rounded.norm()
    assert off <= bound, f"free-running: off by {off:.3g}; want {bound:.3g}"


# What a call stored ---------------------------------------------------------------------------------------------------


class _Moved:
    """Hands the oracle what a call stored, and judges it by what the oracle would have stored there.

    Next to a tie fp32 and float64 round apart, by one step, and the last bit of a scale may be another. So: no value is
    off by more than a step, and few tensors are off by more than a tenth of the rounding error that they all have.
    Under feedback, whose error is as small as the last bits of the scales: by more than that error.
    """

    def __init__(self, values: Stored, *, feedback: bool) -> None:
        self.values, self.share = values, 1.5 if feedback else 0.1
        self.moved = self.total = 0
        self.off: dict[str, Tensor] = {}
        self.error: dict[str, Tensor] = {}
        self.size: dict[str, Tensor] = {}

    def __call__(self, sequence: int, position: int, name: str, x: Tensor, rounded: Tensor) -> Tensor | None:
        value = self.values.get((sequence, position, name))
        if value is None:
            return None
        value = value.double()
        error, off = rounded - x, value - rounded
        for kept, new in ((self.off, off), (self.error, error), (self.size, rounded)):
            kept[name] = torch.maximum(kept.get(name, new.new_zeros(())), new.abs().max())
        self.moved += int(off.norm() > self.share * error.norm() + 1e-6 * rounded.norm())
        self.total += 1
        return value

    def check(self) -> None:
        for name, off in self.off.items():
            step = 2 * self.error[name]
            assert off <= 1.5 * step + 2.0**-14 * self.size[name], f"a stored {name} is off by {off:.3g}; {step=:.3g}"
        assert self.moved <= 1 + self.total // 10, f"{self.moved} of {self.total} stored tensors are not the loop's"


@torch.no_grad()
def stored(b: Built, g: Tensor | None) -> Stored:
    """Every state and factor that the call rounds, found by making it in pieces that end where it rounds.

    Bitwise those of the call: it is cut where its own cut is, after the prefix, and where a window ends.
    """
    write = b.case.write
    found: Stored = {}
    if isinstance(write, Exact):
        return found
    size = write.chunk_size if isinstance(write, Chunk) else getattr(write, "window", 1)
    # The exact part with the tensors and lengths of the call itself: products of other shapes sum in another order.
    exact = dense(whole(dataclasses.replace(b, lengths=b.prefix), g)[1])
    for i, (p, n) in enumerate(zip(b.prefix, b.lengths, strict=True)):
        if n > p:
            _handed_over(b, i, exact[i : i + 1], found)
        state: Any = exact[i : i + 1]
        for first, last in pairwise(sorted({*range(p, n, size), n} | {c for c in b.cuts if p < c < n})):
            at = b.position[i] + last - 1
            before, state = state, run(b, first, last, state, g, only=i)[1]
            flushed = (last - p) % size == 0
            if isinstance(write, Replay) and write.factors is not None:
                ring = _last_ring(b, first, last, before, g, i) if flushed else state.ring
                pending = (last - p - 1) % size + 1
                for j in range(pending):
                    found[i, at + 1 - pending + j, "k"] = ring.k[0, j]
                    found[i, at + 1 - pending + j, "u"] = ring.u[0, j]
            if flushed or (isinstance(write, Chunk) and last == n):  # off its grid, as a reader sees it
                kept = dense(state)
                if isinstance(write, TwoPrecision):
                    found[i, at, "anchor"], kept = kept[0], state.read.decoded()
                found[i, at, "state"] = kept[0]
    return found


def _handed_over(b: Built, i: int, state: Tensor, found: Stored) -> None:
    """What sequence i starts its suffix from, made here: a call never shows it by itself."""
    write, at = b.case.write, b.position[i] + b.prefix[i] - 1
    if isinstance(write, TwoPrecision):
        state = parse(write.anchor).qdq(state)
        found[i, at, "anchor"] = state[0]
    identity = Identity(torch.tensor([at]), torch.tensor([b.ids[i]]))
    found[i, at, "state"] = quantizer(b.case).qdq(state, identity)[0]


def _last_ring(b: Built, first: int, last: int, state: Any, g: Tensor | None, only: int) -> Any:
    """The ring after tokens first to last, which fill a window, before the flush empties it.

    The last record is seen by computing its token in a window that is one longer.
    """
    write = b.case.write
    assert isinstance(write, Replay)
    state = run(b, first, last - 1, state, g, only)[1]
    longer = dataclasses.replace(write, window=write.window + 1)
    ring = [None if x is None else torch.cat([x, x.new_zeros(1, 1, *x.shape[2:])], 1) for x in state.ring]
    state = dataclasses.replace(state, window=longer.window, ring=type(state.ring)(*ring))
    policy = dataclasses.replace(b.case.policy, write=longer)
    return run(b, last - 1, last, state, g, only, policy)[1].ring
