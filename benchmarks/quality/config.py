"""What is trained and measured, at which sizes, and what counts as recovered: fixed before anything was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lattn_compile as lc
from benchmarks.quality.models import Size
from benchmarks.quality.train import Method

__all__ = [
    "CALIBRATED",
    "FULL",
    "HEADLINE",
    "INVERSES",
    "METHODS",
    "NEAREST",
    "OPERANDS",
    "OTHERS",
    "OTHER_WAYS",
    "PREFILLS",
    "REDUCED",
    "RULE",
    "TINY",
    "Batches",
    "Settings",
    "arms",
    "control_of",
    "policy_named",
    "weights_of",
]  # fmt: skip

RULE = """\
A policy costs something if, over the seeds, the mean of (bits per byte under the policy - bits per byte exact) of the
control exceeds two spreads. The control is the base, trained on with an exact state for as many steps as QAT has; a
spread is the standard deviation over the seeds of that seed's own difference. QAT (or QAD) has recovered if the mean of
(control under the policy - trained under the policy) is at least half of that cost and exceeds two spreads of its own
differences. Of memory tasks the same, with the share of wrong answers over the whole suffix in the place of bits.
Where one seed was run there is no spread and no verdict.
"""

_FORMATS = {"int8": lc.Int8(), "fp8": lc.Fp8(), "nvfp4": lc.Nvfp4()}
_READ: dict[str, lc.Int8 | lc.Fp8 | lc.Nvfp4] = {
    "int8": lc.Int8(block_k=128, block_v=1),
    "fp8": lc.Fp8(block_k=128, block_v=1),
    "nvfp4": lc.Nvfp4(),
}
_WRITES = {"token": lc.Token(), "replay 8": lc.Replay(8), "replay 16": lc.Replay(16)}

NEAREST: dict[str, lc.Policy] = {
    **{f"{f} {w}": lc.Policy(fmt, write=write) for w, write in _WRITES.items() for f, fmt in _FORMATS.items()},
    **{f"{f} two-precision 16": lc.Policy(write=lc.TwoPrecision(16, read=fmt)) for f, fmt in _READ.items()},
}
"""Rounded to nearest: Triton kernels compute these on a GPU."""

OTHERS: dict[str, lc.Policy] = {
    **{
        f"{f} {w}, int4 feedback": lc.Policy(fmt, write=write, feedback="int4")
        for w, write in _WRITES.items()
        for f, fmt in _FORMATS.items()
    },
    **{
        f"{f} {w}, stochastic": lc.Policy(fmt, write=write, rounding="stochastic", seed=1)
        for w, write in _WRITES.items()
        for f, fmt in _FORMATS.items()
    },
    **{
        f"{f} two-precision 16, stochastic": lc.Policy(
            write=lc.TwoPrecision(16, read=fmt), rounding="stochastic", seed=1
        )
        for f, fmt in _READ.items()
    },
}
"""The torch reference computes these, token by token, on fewer sequences. Two precisions have no error feedback (their
anchor is exact)."""

HEADLINE = tuple(f"{f} {w}" for w in ("token", "replay 8") for f in _FORMATS)
"""Measured with every seed."""

_SITES = ("kk", "qk", "w", "u", "ws", "qs", "av", "kv")
OPERANDS: dict[str, dict[str, str]] = {
    "fp32 operands": {},
    "int8 operands": dict.fromkeys(_SITES, "int8"),
    "fp8 operands": dict.fromkeys(_SITES, "fp8_e4m3"),
    "nvfp4 operands": dict.fromkeys(_SITES, "nvfp4"),
    "fp8 operands of kk, qk": dict.fromkeys(("kk", "qk"), "fp8_e4m3"),
    "fp8 operands of kk, qk, qs, kv": dict.fromkeys(("kk", "qk", "qs", "kv"), "fp8_e4m3"),
    "fp8 operands of ws, qs, av, kv": dict.fromkeys(("ws", "qs", "av", "kv"), "fp8_e4m3"),
    "int8 operands of all but w, u": {site: "int8" for site in _SITES if site not in ("w", "u")},
}
INVERSES: dict[str, Any] = {
    "exact inverse": "exact",
    "neumann(15)": lc.Neumann(order=15),
    "neumann(63)": lc.Neumann(order=63),
    "newton_schulz(4)": lc.NewtonSchulz(iterations=4),
    "newton_schulz(6)": lc.NewtonSchulz(iterations=6),
    "block_doubling(8)": lc.BlockDoubling(8),
    "block_doubling(16)": lc.BlockDoubling(16),
}
_EVERY = ("fp32 operands", "int8 operands", "fp8 operands", "nvfp4 operands")
PREFILLS: dict[str, lc.Prefill] = {
    f"{operands}, {inverse}": lc.Prefill(OPERANDS[operands], inverse=INVERSES[inverse])
    for operands in OPERANDS
    for inverse in INVERSES
    if (operands in _EVERY or INVERSES[inverse] == "exact") and (OPERANDS[operands] or INVERSES[inverse] != "exact")
}
"""Of the exact prefill, every token of which is prefix: parts of the products with the exact inverse only."""

CALIBRATED = (
    lc.Policy(lc.Int8()),
    lc.Policy(lc.Int8(block_v=16)),
    lc.Policy(lc.Fp8()),
    lc.Policy(lc.Nvfp4()),
    lc.Policy(lc.Nvfp4(), write=lc.Replay(16, factors="int8")),
    lc.Policy(lc.Nvfp4(), feedback="int4"),
)
"""What lc.calibrate chooses from, within three quarters of the bytes of int8 in token mode."""


def policy_named(name: str) -> lc.Policy | None:
    """The policy of a row; None for "exact".

    Raises:
        KeyError: no such row.
    """
    return None if name == "exact" else {**NEAREST, **OTHERS}[name]


METHODS: dict[str, Method] = {
    "exact": Method(peak=3e-4),
    "qat": Method(peak=3e-4),
    "qad": Method("distil", peak=2e-4, decay=0.0),
    "qat of text": Method(peak=3e-4, shares=(1.0, 0.0, 0.0)),
    "qat, memory a thirtieth": Method(peak=3e-4, shares=(1.0, 0.5 / 30, 0.25 / 30)),
    "qat at 1e-4": Method(peak=1e-4),
    "qat at 1e-3": Method(peak=1e-3),
    "qat, long warm-up": Method(peak=3e-4, warm=30),
    "exact, three times": Method(peak=3e-4, times=3),
    "qat, three times": Method(peak=3e-4, times=3),
}
"""Further trainings."""

OTHER_WAYS = ("qat of text", "qat, memory a thirtieth", "qat at 1e-4", "qat at 1e-3", "qat, long warm-up")
"""Whether the recipe of "qat" is what fails under fp8."""


def weights_of(method: str, policy: str) -> str:
    """What rows call the weights of a further training."""
    return "control" if method == "exact" else f"{method} {policy}"


def control_of(weights: str) -> str:
    """The weights that those of a further training are held against: trained on exactly for as many steps."""
    found = next((m for m in sorted(METHODS, key=len, reverse=True) if weights.startswith(f"{m} ")), "exact")
    times = METHODS[found].times
    return next(weights_of(m, "exact") for m in METHODS if m.startswith("exact") and METHODS[m].times == times)


def arms(settings: Settings) -> list[tuple[str, str, int]]:
    """Further trainings of each model in the order of their importance, `(method, policy, seed)`."""
    seeds = range(settings.seeds)
    found = [("exact", "exact", s) for s in seeds]
    found += [(method, name, s) for method, name in settings.trained for s in seeds]
    found += [(method, name, 0) for method, name in settings.trained_once]
    return [x for x in found if not settings.methods or x[0] in settings.methods]


@dataclass(frozen=True)
class Batches:
    """Sequences of a batch, their length, and how often a question is asked in those of recall: bytes for each."""

    count: int
    length: int
    spacing: int = 40


@dataclass(frozen=True)
class Settings:
    """Sizes of one run.

    Attributes:
        curriculum: batches of the base's training, and the share of its time or steps that each is for: memory is
            learned over short distances first. further: batches of QAT and the like.
        recall, copy: shares of such sequences in a batch.
        base_steps, steps: of the base and of the further trainings; base_steps None: as many as the time allows.
        counts: held-out sequences over `horizon` bytes. few: for what the torch reference computes; of the prefill's
            operands over `short_horizon` only.
        methods: of METHODS, those that are trained now; none: all.
        text: bytes of training text, None: all. headline_only: no other policies are measured.
        trained: method (of METHODS) and policy of further trainings with every seed; trained_once: with the first one.
    """

    models: tuple[str, ...] = ("gdn", "kda")
    seeds: int = 3
    size: Size = field(default_factory=Size)
    curriculum: tuple[tuple[Batches, float], ...] = (
        (Batches(48, 192, 4), 0.15),
        (Batches(24, 384, 8), 0.1),
        (Batches(12, 1024, 24), 0.3),
        (Batches(4, 4160, 100), 0.45),
    )
    further: Batches = Batches(4, 4160, 100)
    recall: float = 0.375
    copy: float = 0.25
    base_steps: int | None = None
    steps: int = 100
    base: Method = field(default_factory=lambda: Method(peak=3e-3, warm=50))
    counts: tuple[int, int, int] = (48, 96, 48)
    horizon: int = 4096
    few: tuple[int, int, int] = (16, 32, 16)
    short_horizon: int = 1024
    trained: tuple[tuple[str, str], ...] = (
        *(("qat", f"{f} token") for f in _FORMATS),
        *(("qad", f"{f} token") for f in ("int8", "nvfp4", "fp8")),
        *(("qat", f"{f} replay 8") for f in _FORMATS),
        *((method, "fp8 token") for method in OTHER_WAYS),
    )
    trained_once: tuple[tuple[str, str], ...] = (
        *(("qat", f"{f} replay 16") for f in _FORMATS),
        *(("qad", f"{f} replay 8") for f in _FORMATS),
        ("exact, three times", "exact"),
        *(("qat, three times", f"{f} token") for f in ("fp8", "int8", "nvfp4")),
    )
    methods: tuple[str, ...] = ()
    text: int | None = None
    headline_only: bool = False


FULL = Settings()
"""For a GPU."""

REDUCED = Settings(
    models=("gdn",),
    seeds=1,
    size=Size(hidden=128, inner=256, linear=2, heads=2, dim=128),
    curriculum=((Batches(8, 256, 12), 1.0),),
    recall=0.25,
    copy=0.125,
    base_steps=160,
    counts=(16, 4, 4),
    horizon=256,
    headline_only=True,
)
"""Five minutes of two CPU cores."""

TINY = Settings(
    seeds=1,
    size=Size(hidden=32, inner=32, linear=2, heads=2, dim=16),
    curriculum=((Batches(4, 128, 6), 0.5), (Batches(2, 192), 0.5)),
    further=Batches(2, 128),
    base_steps=4,
    steps=2,
    counts=(2, 2, 2),
    horizon=64,
    few=(1, 1, 1),
    short_horizon=64,
    trained=(("qat", "nvfp4 token"),),
    trained_once=(
        ("qad", "int8 replay 8"),
        ("qat of text", "fp8 token"),
        ("exact, three times", "exact"),
        ("qat, three times", "fp8 token"),
    ),
    text=200_000,
)
"""To see that everything runs."""
