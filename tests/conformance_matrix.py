"""What the conformance tests range over, and a small set of cases in which every legal pair of choices occurs.

Every axis comes from the registry that defines it, so that a new kind, format or write mode is tested without a change
here. What is legal is asked of `Policy` itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lattn_compile.errors import LattnError
from lattn_compile.formats import REGISTRY, Format, Int8, TiledFormat
from lattn_compile.formats.factors import FACTORS
from lattn_compile.modes import ANCHORS, MODES, Chunk, Exact, Replay, Token, TwoPrecision, WriteMode
from lattn_compile.policy import Policy
from lattn_compile.recurrence import BY_NAME, KINDS
from lattn_compile.site_policy import FEEDBACKS, GATES, READOUTS, ROTATIONS, ROUNDINGS
from lattn_compile.testing import RAW_GATES

__all__ = ["AXES", "NEUTRAL", "Assignment", "Case", "is_legal", "legal_pairs", "pairs_of", "pairwise_cover", "sample"]

Assignment = dict[str, Any]

BLOCKS_V = (1, 16, 64, None)
WINDOW, CHUNK = 4, 5  # short, so that a few tokens cross several

# Write modes whose options are worth a case of their own; a mode that is not listed is taken with its defaults.
_MODES: dict[type[WriteMode], tuple[WriteMode, ...]] = {
    Exact: (Exact(),),
    Chunk: (Chunk(CHUNK),),
    Token: (Token(),),
    Replay: (Replay(1), *(Replay(WINDOW, factors=f) for f in FACTORS)),
    TwoPrecision: tuple(TwoPrecision(WINDOW, anchor=a) for a in ANCHORS),
}


def _formats() -> tuple[Format, ...]:
    tiled = (cls(block_v) for cls in REGISTRY if issubclass(cls, TiledFormat) for block_v in BLOCKS_V)
    rest = (cls() for cls in REGISTRY if not issubclass(cls, TiledFormat))
    # The read copy's own tile (semantics §3), and one that no axis is a multiple of.
    odd = (cls(7, block_k=24) for cls in REGISTRY if issubclass(cls, TiledFormat))
    return (*tiled, *rest, *odd)


AXES: dict[str, tuple[Any, ...]] = {
    "kind": tuple(kind.name for kind in KINDS),
    "write": tuple(w for cls in MODES.values() for w in _MODES.get(cls, (cls(),))),
    "format": _formats(),
    "readout": READOUTS,
    "rounding": ROUNDINGS,
    "feedback": FEEDBACKS,
    "rotation": ROTATIONS,
    "gate": GATES,
    "group": (1, 2, 3),
    "size": ((16, 16), (16, 72), (32, 8), (60, 20), (100, 12), (256, 16)),
    "tokens": (1, 16, 33),
    "layout": ("whole", "prefix", "ragged", "packed"),
    "state": ("none", "dense", "carried"),
    "raw_gate": (None, *RAW_GATES),
    "hostile": (None, "repeated_key", "reset", "strong_decay", "mixed_channels", "masked", "zero_keys"),
    "dtype": (torch.float64, torch.float32, torch.bfloat16),
}
"""Every axis and its values. `size` is (K, V), `group` value heads a key head; `state`: where the call starts from,
"carried" being two cuts in the middle; a `raw_gate` makes g from a projection, A_log and dt_bias; `hostile`: see
`testing.HOSTILE`, less what is about the range of a state and has tests of its own."""

# A value of each axis that goes with every value of every other one: it fills up what an assignment leaves open.
NEUTRAL: Assignment = {
    "kind": "gdn",
    "write": Token(),
    "format": Int8(),
    "readout": "before_write",
    "rounding": "nearest",
    "feedback": None,
    "rotation": None,
    "gate": None,
    "group": 1,
    "size": (16, 16),
    "tokens": 16,
    "layout": "whole",
    "state": "dense",
    "raw_gate": None,
    "hostile": None,
    "dtype": torch.float64,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One value of every axis."""

    kind: str
    write: WriteMode
    format: Format
    readout: str
    rounding: str
    feedback: str | None
    rotation: str | None
    gate: str | None
    group: int
    size: tuple[int, int]
    tokens: int
    layout: str
    state: str
    raw_gate: str | None
    hostile: str | None
    dtype: torch.dtype

    @property
    def policy(self) -> Policy:
        """The policy of the case; the format is that of the read copy where there is one."""
        write = self.write
        if isinstance(write, TwoPrecision):
            write = dataclasses.replace(write, read=self.format)
        return Policy(
            self.format,
            write=write,
            readout=self.readout,
            rounding=self.rounding,
            seed=0 if self.rounding == "nearest" else 2**40 + 3,
            feedback=self.feedback,
            rotation=self.rotation,
            gate=self.gate,
        )

    def __str__(self) -> str:
        raw = f"raw {self.raw_gate}" if self.raw_gate else ""
        words = [self.policy, self.kind, raw, f"R={self.group}", "x".join(map(str, self.size)), f"T={self.tokens}"]
        words += [self.layout, self.state, self.hostile or "", str(self.dtype).removeprefix("torch.")]
        return " ".join(str(word) for word in words if word)


def is_legal(assignment: Mapping[str, Any]) -> bool:
    """Whether some case has these values: the axes that are left open are filled up with neutral ones."""
    case = Case(**{**NEUTRAL, **assignment})
    if case.raw_gate is not None and BY_NAME[case.kind].decay == "none":
        return False
    try:
        case.policy.check_shape(*case.size)
    except LattnError:
        return False
    return True


Pair = tuple[tuple[str, int], tuple[str, int]]
"""Two axes and the indices of their values, in the order of the axes."""


def legal_pairs(ranges: Mapping[str, Sequence[Any]], legal: Callable[[Assignment], bool] = is_legal) -> set[Pair]:
    """Every pair of values of two axes that some case has."""
    return {
        ((a, i), (b, j))
        for a, b in itertools.combinations(ranges, 2)
        for i, x in enumerate(ranges[a])
        for j, y in enumerate(ranges[b])
        if legal({a: x, b: y})
    }


def pairs_of(case: Mapping[str, Any], ranges: Mapping[str, Sequence[Any]]) -> set[Pair]:
    """The pairs that occur in a case."""
    at = [(name, list(ranges[name]).index(case[name])) for name in ranges]
    return set(itertools.combinations(at, 2))


def pairwise_cover(
    ranges: Mapping[str, Sequence[Any]], legal: Callable[[Assignment], bool] = is_legal, *, seed: int = 0
) -> list[Assignment]:
    """A list of legal assignments, small but not smallest, in which every legal pair occurs.

    Greedy and deterministic: each starts from a pair that is still missing, and gives the other axes, in random order,
    the value that is legal with what is there and adds most missing pairs. `legal` judges partial assignments, and
    whatever it allows must be completable.
    """
    rng = random.Random(seed)
    missing = legal_pairs(ranges, legal)
    cover = []
    while missing:
        best: tuple[int, dict[str, int]] = (0, {})
        for start in rng.sample(sorted(missing), min(len(missing), 4)):
            at = _complete(dict(start), ranges, legal, missing, rng)
            gain = sum(pair in missing for pair in _pairs(at, ranges))
            best = max(best, (gain, at), key=lambda found: found[0])
        missing -= _pairs(best[1], ranges)
        cover.append({name: ranges[name][i] for name, i in best[1].items()})
    return cover


def _pairs(at: Mapping[str, int], ranges: Mapping[str, Sequence[Any]]) -> set[Pair]:
    return set(itertools.combinations([(name, at[name]) for name in ranges], 2))


def _complete(
    at: dict[str, int],
    ranges: Mapping[str, Sequence[Any]],
    legal: Callable[[Assignment], bool],
    missing: set[Pair],
    rng: random.Random,
) -> dict[str, int]:
    order = {name: i for i, name in enumerate(ranges)}
    rest = [name for name in ranges if name not in at]
    rng.shuffle(rest)
    for name in rest:
        before = [other for other in at.items() if order[other[0]] < order[name]]
        after = [other for other in at.items() if order[other[0]] > order[name]]

        def gain(i: int, name: str = name, before: list[Any] = before, after: list[Any] = after) -> int:
            one = (name, i)
            return sum((other, one) in missing for other in before) + sum((one, other) in missing for other in after)

        chosen = {other: ranges[other][j] for other, j in at.items()}
        choices = list(range(len(ranges[name])))
        rng.shuffle(choices)
        choices.sort(key=gain, reverse=True)
        at[name] = next(i for i in choices if legal({**chosen, name: ranges[name][i]}))
    return at


def sample(ranges: Mapping[str, Sequence[Any]], count: int, *, seed: int = 0) -> list[Assignment]:
    """`count` legal assignments drawn from the whole product, every legal one as likely as another."""
    rng = random.Random(seed)
    drawn: list[Assignment] = []
    while len(drawn) < count:
        one = {name: rng.choice(values) for name, values in ranges.items()}
        if is_legal(one):
            drawn.append(one)
    return drawn
