"""What a calibration found: plain data, and a table of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lattn_compile.policy import PRESETS, Policy, Recipe
from lattn_compile.render import columns
from lattn_compile.render.labels import count, meaning

__all__ = ["CalibratedSite", "CalibrationReport", "Measurement"]

_EXACT = PRESETS["exact"]
_CHOSEN = ("site", "policy", "error", "p95", "growth", "state per sequence")
_UNIFORM = ("one policy everywhere", "sites", "total error", "worst site", "state per sequence")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One policy at one site.

    Attributes:
        nbytes: of the site's state for one sequence, in all layers that run it.
        error: of its outputs, relative to the exact ones (docs/calibrate.md has the formula); 0 for exact.
        p95: exceeded by one token in twenty. growth: error of the last quarter of the horizon over that of the first.
        finite: whether all outputs were; if not, the numbers are infinite and the policy is never chosen.
    """

    policy: Policy
    nbytes: int
    error: float = 0.0
    p95: float = 0.0
    growth: float = 1.0
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class CalibratedSite:
    """One recurrence of the model.

    Attributes:
        id, kind: as in a `Report`. layers: how many run it (more than one: a region that several layers share).
        chosen: what the recipe gives it. measured: all candidates that it could carry, `chosen` and exact among them.
        excluded: `(policy, reason code, why)` of those that it could not.
        own: whether the model's own code gives it a policy, which a recipe does not change and which was not measured.
    """

    id: str
    kind: str
    layers: int
    exact_bytes: int
    chosen: Measurement
    measured: tuple[Measurement, ...]
    excluded: tuple[tuple[Policy, str, str], ...] = ()
    own: bool = False


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """What `lc.calibrate` measured and chose. `print(report)` is its table, `report.full()` has every measurement.

    Attributes:
        recipe: the result. sites: in the order in which they ran.
        budget_bytes, max_error: what was asked for, one of them None.
        horizon: tokens that each sequence was decoded for. recorded: the fewest and the most that one had.
        batches: how many were run.
        total_error: the root of the sum of the squared errors of all layers. bound: no choice within the budget has
            less than this; equal to it unless the search was cut short.
        notes: other lines for the reader.
    """

    recipe: Recipe
    sites: tuple[CalibratedSite, ...]
    budget_bytes: int | None
    max_error: float | None
    horizon: int
    recorded: tuple[int, int]
    batches: int
    total_error: float
    bound: float
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of state of one sequence under the recipe."""
        return sum(site.chosen.nbytes for site in self.sites)

    @property
    def exact_bytes(self) -> int:
        """The same, exact everywhere."""
        return sum(site.exact_bytes for site in self.sites)

    def summary(self) -> str:
        """One line."""
        if self.budget_bytes is not None:
            asked = f"within {self.budget_bytes:,} B"
            best = "the least" if self.bound >= self.total_error else f"the least is at least {_number(self.bound)}"
            error = f"total error {_number(self.total_error)}, {best}"
        else:
            asked = f"error of a site <= {self.max_error:g}"
            error = f"total error {_number(self.total_error)}"
        state = f"state {self.exact_bytes:,} -> {self.nbytes:,} B per sequence"
        batches = "1 batch" if self.batches == 1 else f"{self.batches:,} batches"
        return (
            f"lattn-compile calibrate: {count(len(self.sites), 'site')}, {batches}, {self.horizon:,} tokens decoded; "
            f"{asked}: {state}; {error}"
        )

    def __str__(self) -> str:
        return "\n".join(self._lines(full=False))

    def full(self) -> str:
        """The table with a row for every policy that was measured; the chosen ones have a star."""
        return "\n".join(self._lines(full=True))

    def _lines(self, *, full: bool) -> Iterator[str]:
        yield self.summary()
        rows = []
        for site in self.sites:
            for m in site.measured if full else (site.chosen,):
                star = " *" if full and m == site.chosen else ""
                drift = (_number(m.error), _number(m.p95), f"{m.growth:.2f}" if m.error else "-")
                if site.own:
                    drift = ("not measured", "-", "-")
                elif not m.finite:
                    drift = ("not finite", "-", "-")
                rows.append((site.id, f"{m.policy}{star}", *drift, f"{site.exact_bytes:,} -> {m.nbytes:,} B"))
        root = ("total", "", _number(self.total_error), "", "", f"{self.exact_bytes:,} -> {self.nbytes:,} B")
        yield ""
        yield from columns(_CHOSEN, [*rows, root])
        if uniform := list(self._uniform()):
            yield ""
            yield from columns(_UNIFORM, uniform)
        yield ""
        yield from (f"note: {text}" for text in self._notes())

    def _uniform(self) -> Iterator[tuple[str, ...]]:
        """Each candidate given to every site that can carry it, exact to the others: the worth of choosing per site."""
        free = [site for site in self.sites if not site.own]
        policies = dict.fromkeys(m.policy for site in free for m in site.measured if m.policy != _EXACT)
        for policy in policies:
            given = [(site, m) for site in free for m in site.measured if m.policy == policy]
            total = _number(math.sqrt(sum(site.layers * m.error**2 for site, m in given)))
            saved = sum(site.exact_bytes - m.nbytes for site, m in given)
            own = sum(site.exact_bytes - site.chosen.nbytes for site in self.sites if site.own)
            worst = _number(max(m.error for _, m in given))
            nbytes = f"{self.exact_bytes - saved - own:,} B"
            yield str(policy), f"{len(given)} of {len(free)}", total, worst, nbytes

    def _notes(self) -> Iterator[str]:
        yield (
            "error: of a site's outputs, relative to the exact ones, from exact inputs of the site; total: root of the "
            "sum of squares. growth: error of the last quarter of the tokens over that of the first"
        )
        fewest, most = self.recorded
        if 0 < fewest < self.horizon:
            span = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
            yield (
                f"{span} tokens of a sequence were recorded and repeated until {self.horizon:,} were decoded, which "
                "rather overstates the errors; longer batches do not (docs/calibrate.md)"
            )
        excluded: dict[tuple[str, str], dict[str, list[str]]] = {}
        for site in self.sites:
            for policy, code, why in site.excluded:
                told = meaning({"code": code, "text": why})[0]
                excluded.setdefault((code, told), {}).setdefault(str(policy), []).append(site.id)
        for (code, told), where in excluded.items():
            everywhere = all(len(ids) == len(self.sites) for ids in where.values())
            parts = [p if everywhere else f"{p} at {', '.join(ids)}" for p, ids in where.items()]
            hint = "; dense_cache=False measures them all the same" if code == "DENSE_CACHE" else ""
            yield f"not measured: {', '.join(parts)}: [{code}] {told}{hint}"
        yield from self.notes


def _number(x: float) -> str:
    """Three digits; what is 0 because it is exact looks it."""
    if not math.isfinite(x):
        return str(x)
    return "0" if x == 0 else f"{x:.3g}"
