"""How far the outputs of one recurrence drift from the exact ones, under each candidate policy.

A recorded call is decoded again: its tokens are the suffix of a sequence, in the policy's own write mode, for `horizon`
tokens. What was found is kept as sums and counts, so that neither batches nor candidates cost memory.

Where fewer tokens were recorded they are repeated, the state going on: decays, key statistics and the number of
roundings are those of a long text. What differs is that few distinct keys leave directions of the state that a delta
rule never corrects, where errors pile up. So the errors come out too large rather than too small (measured in
docs/calibrate.md: from four times K tokens on by a few percent), and formats that would run away do so sooner.

The error of a site is

    sqrt(mean over heads of  Σ_t ‖o'_t − o_t‖² / Σ_t ‖o_t‖²)

where o is exact and o' is the policy's. Heads count alike, whatever their scale: the normalisation behind a recurrence
is per head in these models, so a head of small outputs is as loud as any other in what the rest of the model sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lattn_compile.errors import LattnError
from lattn_compile.functional import linear_attention
from lattn_compile.ops.segments import split
from lattn_compile.policy import Policy

__all__ = ["QUARTERS", "Drift", "Errors"]

QUARTERS = 4
_INPUTS = ("q", "k", "v", "g", "beta")

# Errors of single tokens are counted in bins of a sixteenth of an octave: a quantile is then right within 2.2 %.
_BINS_AN_OCTAVE, _LOWEST = 16, -48
_BINS = _BINS_AN_OCTAVE * 96


class Drift(NamedTuple):
    """What a policy does to a site's outputs, relative to them.

    `error` is that of all tokens (the formula above), `p95` is exceeded by one token in twenty (within 2.2 %), `growth`
    the error of the last quarter of the horizon over that of the first. `finite`: no output was infinite or NaN; if one
    was, the numbers are infinite.
    """

    error: float
    p95: float
    growth: float
    finite: bool


_LOST = Drift(math.inf, math.inf, math.inf, False)


@dataclass
class _Sums:
    """Of one candidate: squared deviations by quarter and head, and tokens by bin of their error."""

    deviation: Tensor
    bins: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.int64))


class Errors:
    """Running sums of one site's errors.

    Attributes:
        horizon: tokens that every sequence is decoded for.
        sequences, shortest, longest: how many sequences were recorded, and of how many tokens behind their prefix.
    """

    def __init__(self, site: str, horizon: int) -> None:
        self.site, self.horizon = site, horizon
        self.sequences, self.shortest, self.longest = 0, 0, 0
        self._sums: dict[Policy, _Sums] = {}
        self._energy: Tensor | None = None  # squared outputs, by quarter and head
        self._lost: set[Policy] = set()

    def add(self, call: Mapping[str, Any], policies: Sequence[Policy]) -> None:
        """Decode one recorded call under each of `policies`.

        Args:
            call: the arguments of a `lattn::` op, by name.
        Raises:
            LattnError: an exact output is not finite.
        """
        for group in _groups(call):
            self.sequences += group.count
            self.shortest = min(self.shortest, group.tokens) if self.shortest else group.tokens
            self.longest = max(self.longest, group.tokens)
            self._decode(group, policies)

    def merge(self, other: Errors) -> None:
        """Add what was found for the same site on other batches."""
        if not other.sequences:
            return
        self.sequences += other.sequences
        self.shortest = min(self.shortest, other.shortest) if self.shortest else other.shortest
        self.longest = max(self.longest, other.longest)
        assert other._energy is not None
        self._energy = other._energy if self._energy is None else self._energy + other._energy
        self._lost |= other._lost
        for policy, theirs in other._sums.items():
            mine = self._sums.setdefault(policy, _Sums(torch.zeros_like(theirs.deviation)))
            mine.deviation += theirs.deviation
            mine.bins += theirs.bins

    def _decode(self, group: _Group, policies: Sequence[Policy]) -> None:
        exact = list(group.outputs(self.horizon, None))
        if not all(bool(o.isfinite().all()) for o in exact):
            raise LattnError(
                "batches",
                got=f"a batch for which the exact recurrence at {self.site} gives infinite or NaN outputs",
                want="batches that the model computes finite outputs for",
                remedy="Drop that batch, or look for what overflows in the layers before.",
            )
        starts = [i * group.tokens for i in range(len(exact))]
        energy = sum(self._by_quarter(_squares(o), start) for o, start in zip(exact, starts, strict=True))
        assert isinstance(energy, Tensor)
        self._energy = energy if self._energy is None else self._energy + energy
        # A token is compared with the mean token of its head: one that happens to be near zero is no large error.
        usual = energy.sum(0) / (self.horizon * group.count)
        for policy in policies:
            if policy in self._lost:
                continue
            sums = self._sums.setdefault(policy, _Sums(torch.zeros_like(energy)))
            for o, want, start in zip(group.outputs(self.horizon, policy), exact, starts, strict=True):
                deviation = _squares(o - want)
                if not bool(deviation.isfinite().all()):
                    self._lost.add(policy)
                    break
                sums.deviation += self._by_quarter(deviation, start)
                sums.bins += _count(_relative(deviation, usual))

    def _by_quarter(self, squares: Tensor, start: int) -> Tensor:
        """Sums of `squares [n, tokens, HV]`, of which the first token is token `start` of the horizon: `[4, HV]`."""
        position = torch.arange(start, start + squares.shape[1])
        sums = torch.zeros(QUARTERS, squares.shape[2], dtype=torch.float64)
        return sums.index_add_(0, position * QUARTERS // self.horizon, squares.sum(0))

    def drift(self, policy: Policy) -> Drift:
        """What was found for a policy, which every call must have been decoded under."""
        if policy in self._lost:
            return _LOST
        sums, energy = self._sums[policy], self._energy
        assert energy is not None
        first, last = (_relative(sums.deviation[i], energy[i]).item() for i in (0, -1))
        growth = last / first if first > 0 else (math.inf if last > 0 else 1.0)
        return Drift(_relative(sums.deviation.sum(0), energy.sum(0)).item(), _quantile(sums.bins, 0.95), growth, True)


def _squares(o: Tensor) -> Tensor:
    """`Σ_v o²` in float64 on the CPU: `[n, tokens, HV]`."""
    return o.double().square().sum(-1).cpu()


def _relative(deviation: Tensor, energy: Tensor) -> Tensor:
    """sqrt(mean over heads of deviation / energy). A head without outputs has no error if it still has none."""
    ratio = torch.where((deviation == 0) & (energy == 0), 0.0, deviation / energy)
    return ratio.mean(-1).sqrt()


def _count(errors: Tensor) -> Tensor:
    place = ((errors.log2() - _LOWEST) * _BINS_AN_OCTAVE).clamp(0, _BINS - 1)
    return torch.bincount(place.flatten().to(torch.int64), minlength=_BINS)


def _quantile(bins: Tensor, share: float) -> float:
    total = int(bins.sum())
    index = int(torch.searchsorted(bins.cumsum(0), math.ceil(share * total)))
    return 0.0 if index == 0 else 2.0 ** (_LOWEST + (index + 0.5) / _BINS_AN_OCTAVE)


@dataclass
class _Group:
    """Sequences of one length, decoded side by side: inputs `[n, tokens, ...]` and the state that they start from."""

    inputs: dict[str, Tensor | None]
    state: Tensor | None
    options: dict[str, Any]

    @property
    def count(self) -> int:
        return self._q.shape[0]

    @property
    def tokens(self) -> int:
        return self._q.shape[1]

    @property
    def _q(self) -> Tensor:
        q = self.inputs["q"]
        assert q is not None
        return q

    def outputs(self, horizon: int, policy: Policy | None) -> Iterator[Tensor]:
        """Outputs `[n, <= tokens, HV, V]` of `horizon` tokens, one round of the recorded ones at a time."""
        state: Any = self.state
        for start in range(0, horizon, self.tokens):
            tokens = min(self.tokens, horizon - start)
            taken = {name: None if x is None else x[:, :tokens] for name, x in self.inputs.items()}
            o, state = linear_attention(
                **taken,  # type: ignore[arg-type]
                **self.options,
                initial_state=state,
                output_final_state=True,
                policy=policy,
                # Said here, so that an active phase, which was for the recorded call, says nothing.
                prefix_lengths=0,
                sequence_lengths=tokens,
                sequence_ids=list(range(self.count)),
            )
            yield o


def _groups(call: Mapping[str, Any]) -> Iterator[_Group]:
    """The recorded sequences behind their exact prefix, those of equal lengths together, in order; none without a
    suffix."""
    q = call["q"]
    batch, tokens = q.shape[:2]
    cu = call["cu_seqlens"]
    segments = split(batch, tokens, cu, call["prefix_lengths"], call["sequence_lengths"], q.device)
    lengths = zip(segments.prefix.tolist(), segments.total.tolist(), strict=True)
    alike: dict[tuple[int, int], list[int]] = {}
    for sequence, (prefix, total) in enumerate(lengths):
        if total > prefix:
            alike.setdefault((prefix, total), []).append(sequence)
    # Half precision would round the outputs, and that would count as their error.
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    flat = {name: None if call[name] is None else call[name].detach().flatten(0, 1) for name in _INPUTS}
    options = {"rule": call["rule"], "scale": call["scale"], "use_qk_l2norm_in_kernel": call["qk_l2norm"]}
    begin = segments.begin.tolist()
    for (prefix, total), members in alike.items():
        inputs = {
            name: None if x is None else torch.stack([x[begin[i] : begin[i] + total] for i in members]).to(dtype)
            for name, x in flat.items()
        }
        state = call["initial_state"]
        if state is not None:
            state = state.detach()[members].to(dtype)
        if prefix:
            head = {name: None if x is None else x[:, :prefix] for name, x in inputs.items()}
            _, state = linear_attention(
                **head,  # type: ignore[arg-type]
                **options,
                initial_state=state,
                output_final_state=True,
                prefix_lengths=0,
                sequence_lengths=prefix,
            )
            inputs = {name: None if x is None else x[:, prefix:] for name, x in inputs.items()}
        yield _Group(inputs, state, {**options, "site_id": call["site_id"]})
