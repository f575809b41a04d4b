"""Where spellings of a recurrence register, and what each says about itself.

All take `(q, k, v, g, beta, S)`: q, k [B, T, H, K]; v [B, T, H, V]; g [B, T, H] or [B, T, H, K]; beta [B, T, H];
S [B, H, K, V]; and return `(o, S)`. What one computes may differ from the plain recurrence on these inputs (its own
scale, a decay that is a sigmoid, fewer key heads): `means` says which arguments the plain recurrence needs to agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., tuple[Tensor, Tensor]]


class Args(NamedTuple):
    """The six inputs of every spelling."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    S: Tensor


# Arguments of the plain recurrence that differ from the defaults of `Match.meaning`.
Means = Callable[[Args], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Match:
    """A spelling that must be recognised.

    Attributes:
        rule, decay: as `Site.rule` and `Site.decay`.
        means: see the module.
        stored: the dtype to which the spelling itself rounds its state after every token.
        heads: H of its inputs.
        mutates: it writes into its argument S, which it also reads: nothing that could be trained.
        company: the graph has another carried value that is none of ours and may be reported.
        shortest: the smallest T at which anything is carried.
        untraceable: tracers (of `harness.VIAS`) that cannot trace it, with or without us.
    """

    fn: Function
    rule: str
    decay: str
    means: Means
    stored: torch.dtype | None
    heads: int
    mutates: bool
    company: bool
    shortest: int
    untraceable: tuple[str, ...]

    def meaning(self, args: Args) -> dict[str, Any]:
        """Keyword arguments of `harness.recurrence`."""
        plain = {
            **args._asdict(),
            "g": None if self.decay == "none" else args.g,
            "beta": args.beta if self.rule == "delta" else None,
        }
        return {**plain, "rule": self.rule, "stored": self.stored, **self.means(args)}


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """A spelling that must not become an op.

    Attributes:
        why: one line.
        decay: shape of the g it takes.
        either: parts of it, or all of it in other roles, are recurrences: a rewrite is legal where it is right.
        square: it needs K == V.
        differs: "values", or "gradients" where only those tell it from the recurrence.
    """

    fn: Function
    why: str
    decay: str
    either: bool
    square: bool
    differs: str


MATCH: dict[str, Match] = {}
REFUSE: dict[str, Refuse] = {}


def match(
    rule: str,
    decay: str,
    *,
    means: Means = lambda args: {},
    stored: torch.dtype | None = None,
    heads: int = 2,
    mutates: bool = False,
    company: bool = False,
    shortest: int = 1,
    untraceable: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    def register(fn: Function) -> Function:
        assert fn.__name__ not in MATCH, fn.__name__
        MATCH[fn.__name__] = Match(
            fn=fn,
            rule=rule,
            decay=decay,
            means=means,
            stored=stored,
            heads=heads,
            mutates=mutates,
            company=company,
            shortest=shortest,
            untraceable=untraceable,
        )
        return fn

    return register


def refuse(
    why: str, *, decay: str = "head", either: bool = False, square: bool = False, differs: str = "values"
) -> Callable[[Function], Function]:
    def register(fn: Function) -> Function:
        assert fn.__name__ not in REFUSE, fn.__name__
        REFUSE[fn.__name__] = Refuse(fn=fn, why=why, decay=decay, either=either, square=square, differs=differs)
        return fn

    return register


def make_args(
    tokens: int,
    decay: str,
    *,
    batch: int = 2,
    heads: int = 2,
    key_dim: int = 4,
    value_dim: int = 6,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Args:
    """Random inputs: keys of norm about 1, decays in (0, 1), write strengths in (0, 1)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    gate = (batch, tokens, heads, key_dim) if decay == "channel" else (batch, tokens, heads)
    args = Args(
        q=normal(batch, tokens, heads, key_dim),
        k=normal(batch, tokens, heads, key_dim) * key_dim**-0.5,
        v=normal(batch, tokens, heads, value_dim),
        g=F.logsigmoid(normal(*gate) + 1),
        beta=normal(batch, tokens, heads).sigmoid(),
        S=normal(batch, heads, key_dim, value_dim),
    )
    return Args(*(x.to(dtype) for x in args))
