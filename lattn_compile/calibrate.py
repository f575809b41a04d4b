"""`lc.calibrate`: which policy each recurrence of a model can afford, measured.

`calibration.record` runs the model and stands at its recurrences, `calibration.measure` decodes what passes there
under every candidate, `calibration.choose` chooses, and this file asks, and writes the answer as a `Recipe`.
"""

from __future__ import annotations

import fnmatch
import glob
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lattn_compile.attach import uncompiled, unwrapped_path
from lattn_compile.calibration.choose import Choice, Option, least, within_budget, within_error
from lattn_compile.calibration.record import RecordedSite, Recorder
from lattn_compile.calibration.report import CalibratedSite, CalibrationReport, Measurement
from lattn_compile.errors import LattnError, PolicyError, nearest
from lattn_compile.formats import Fp8, Int8, Nvfp4
from lattn_compile.policy import PRESETS, Policy, Recipe, Replay, Token
from lattn_compile.strict import check_choice, check_int

__all__ = ["CANDIDATES", "calibrate"]

CANDIDATES: tuple[Policy, ...] = (
    *(
        Policy(state, write=write)
        for state in (Int8(), Int8(block_v=16), Fp8(), Nvfp4())
        for write in (Token(), Replay(8, factors="int8"), Replay(16, factors="int8"))
    ),
    *(Policy(state, feedback="int4") for state in (Int8(), Fp8(), Nvfp4())),
)
"""What `lc.calibrate` measures by default.

Replay has factors in int8: beside the anchor's rounding theirs is small, and a ring of fp32 factors takes four times as
much. Two-precision policies are not among them: they save bandwidth, not bytes.
"""

_EXACT = PRESETS["exact"]


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget_bytes: int | None = None,
    max_error: float | None = None,
    horizon: int = 1024,
    candidates: Iterable[Policy | str | Mapping[str, Any]] | None = None,
    dense_cache: bool | None = None,
    show: Callable[[CalibrationReport], object] | None = print,
    process_group: dist.ProcessGroup | None = None,
) -> Recipe:
    """Measure how far each recurrence's outputs drift under each candidate policy, and choose one for each.

    The model runs once over `batches`, exactly. What passes each recurrence is decoded again for `horizon` tokens, once
    exactly and once under each candidate, from the exact inputs of that recurrence: errors are those of the site alone.

    Args:
        model: any module that `torch.compile` can trace. It is run in eval mode, without gradients, and left as it was.
        batches: an iterable of tensors, dicts or tuples, on the model's device: `model(x)`, `model(**x)`, `model(*x)`.
            Inside `lc.training_phase`, prefix tokens are exact prefill, and neither they nor padding are measured.
        budget_bytes: bytes of recurrent state of one sequence in the whole model (`Policy.nbytes`: scales, residuals
            and rings included). The result has the least total error within it, by which is meant the root of the sum
            of the squared errors of all layers: many small errors add up to less than one layer that is lost.
        max_error: the largest error of a site. The result takes the fewest bytes; exact where no candidate meets it.
            Exactly one of the two has to be given.
        horizon: tokens to decode, at least 4. If a batch has fewer they are repeated, the state going on; if it has
            more, the first ones count.
        candidates: policies, presets' names or dicts of policies; default `CANDIDATES` of this module, without those
            that take as many bytes as exact at a site. Exact is always one.
        dense_cache: whether the model's states travel between calls as dense tensors, as in transformers' caches. That
            allows token writes with nearest rounding and no feedback only. None: where the traced model does so.
        show: is given the `CalibrationReport` when all is done; `print` prints its table, `list.append` keeps it.
        process_group: of several processes that each hold the whole model and run batches of their own. What they
            measured is put together, so that each returns the recipe of all batches.

    Returns:
        A `Recipe` for `lc.attach` or `options={"policy": ...}`. Sites that did not run stay exact.

    Raises:
        PolicyError: not one of the two bounds, a budget that nothing fits (the error has the smallest recipe there is),
            or a candidate that is no policy. UnsupportedError: one that is not built.
        LattnError: no batches, a model in which no recurrence was found, or outputs that are not finite when exact.
    """
    if not isinstance(model, nn.Module):
        raise LattnError(
            "model", got=type(model).__name__, want="an nn.Module", remedy="Pass the model, not its forward."
        )
    _check_bounds(budget_bytes, max_error)
    check_int(PolicyError, "calibrate", "horizon", horizon, low=4)
    check_choice(PolicyError, "calibrate", "dense_cache", dense_cache, (None, True, False))
    if show is not None and not callable(show):  # said before the hours of measuring, not after
        raise LattnError(
            "show", got=repr(show), want="a function of the report, or None", remedy="print is the default."
        )
    policies = _candidates(candidates)
    model = uncompiled(model)
    recorder = Recorder(policies, horizon, dense_cache, drop_useless=candidates is None)
    recorder.run(model, _iterable(batches))
    if process_group is not None:
        recorder.gather(process_group)
    sites = list(recorder.sites.values())
    _check_found(recorder, sites)

    measured = [_measurements(site, policies) for site in sites]
    picks, bound = _choose(model, sites, measured, budget_bytes, max_error)
    chosen = [found[pick] for found, pick in zip(measured, picks, strict=True)]
    recipe = _recipe(model, sites, [m.policy for m in chosen])
    total = math.sqrt(sum(len(s.paths) * m.error**2 for s, m in zip(sites, chosen, strict=True)))
    counted = [s.errors for s in sites if s.errors.sequences]
    report = CalibrationReport(
        recipe=recipe,
        sites=tuple(_site(*of, policies) for of in zip(sites, measured, chosen, strict=True)),
        budget_bytes=budget_bytes,
        max_error=max_error,
        horizon=horizon,
        recorded=(min((e.shortest for e in counted), default=0), max((e.longest for e in counted), default=0)),
        batches=recorder.batches,
        total_error=total,
        bound=total if bound is None else bound,
        notes=tuple(_notes(recorder, sites)),
    )
    if show is not None:
        show(report)
    return recipe


def _check_bounds(budget_bytes: object, max_error: object) -> None:
    if (budget_bytes is None) == (max_error is None):
        raise PolicyError(
            "budget_bytes, max_error",
            got="neither" if budget_bytes is None else "both",
            want="exactly one of them",
            remedy="budget_bytes bounds the bytes and minimises the error, max_error the other way round.",
        )
    if budget_bytes is not None:
        check_int(PolicyError, "calibrate", "budget_bytes", budget_bytes, low=1)
    elif type(max_error) not in (int, float) or not 0 < max_error < math.inf:  # type: ignore[operator]
        raise PolicyError(
            "max_error",
            got=repr(max_error),
            want="a finite number above 0",
            remedy="It is relative: 0.01 is an error of one percent of the outputs.",
        )


def _candidates(given: Iterable[Policy | str | Mapping[str, Any]] | None) -> list[Policy]:
    """The policies to measure, each once. Exact needs no measurement."""
    if given is None:
        return list(CANDIDATES)
    if isinstance(given, str | Mapping | Policy) or not isinstance(given, Iterable):
        raise PolicyError(
            "candidates",
            got=repr(given),
            want="a list of policies",
            remedy="Put a single one into a list; exact is always a candidate.",
        )
    policies: dict[Policy, None] = {}
    for i, item in enumerate(given):
        name = f"candidates[{i}]"
        if isinstance(item, str) and item not in PRESETS:
            raise PolicyError(
                name,
                got=repr(item),
                want=f"a preset: {', '.join(PRESETS)}",
                remedy=f"Correct the name, or build a Policy.{nearest(item, PRESETS)}",
            )
        policy: Any = PRESETS[item] if isinstance(item, str) else item
        policy = Policy.from_dict(policy) if isinstance(policy, Mapping) else policy
        if not isinstance(policy, Policy):
            raise PolicyError(
                name, got=repr(item), want="a Policy, a preset's name or a dict", remedy="See lc.Policy and lc.PRESETS."
            )
        policy.require_built(name)
        if policy.prefill is not None:
            raise PolicyError(
                name,
                got=f"prefill={policy.prefill!r}",
                want="prefill=None: candidates are compared by how they decode, behind an exact prefix",
                remedy="Give the chosen recipe's policies their prefill afterwards, by dataclasses.replace.",
            )
        policies[policy] = None
    return [policy for policy in policies if policy != _EXACT]


def _iterable(batches: Any) -> Iterable[Any]:
    if isinstance(batches, str | Mapping | Tensor) or not isinstance(batches, Iterable):
        raise LattnError(
            "batches",
            got=type(batches).__name__,
            want="an iterable of batches: tensors, dicts or tuples",
            remedy="Put a single batch into a list.",
        )
    return batches


def _check_found(recorder: Recorder, sites: Sequence[RecordedSite]) -> None:
    if not recorder.batches:
        raise LattnError("batches", got="none", want="at least one batch", remedy="A generator is used up by one pass.")
    if not sites:
        why = "".join(f"; {text}" for text in recorder.unmatched)
        if recorder.frames.skipped:
            why += f"; Dynamo could not compile {recorder.frames.skipped} frame(s)"
        raise LattnError(
            "model",
            got=f"a model in which no recurrence was found{why}",
            want="one with linear-attention layers that the backend recognises",
            remedy="docs/recognition.md says what is recognised and how to make a layer recognisable.",
        )
    for site in sites:
        if site.sizes is None or (site.own is None and not site.errors.sequences):
            raise LattnError(
                "batches",
                got=f"no token to decode at {site.id}",
                want="sequences that are longer than their prefix",
                remedy="Use longer batches, or a shorter prefix in lc.training_phase.",
            )


def _measurements(site: RecordedSite, policies: Sequence[Policy]) -> tuple[Measurement, ...]:
    """What can be chosen for a site, exact last."""
    layers = len(site.paths)
    if site.own is not None:
        return (Measurement(policy=site.own, nbytes=layers * site.nbytes(site.own)),)
    found = []
    for policy in policies:
        if policy not in site.excluded:
            drift = site.errors.drift(policy)
            found.append(Measurement(policy=policy, nbytes=layers * site.nbytes(policy), **drift._asdict()))
    return (*found, Measurement(policy=_EXACT, nbytes=layers * site.exact_bytes))


def _choose(
    model: nn.Module,
    sites: Sequence[RecordedSite],
    measured: Sequence[Sequence[Measurement]],
    budget_bytes: int | None,
    max_error: float | None,
) -> tuple[list[int], float | None]:
    """The number of each site's measurement that is chosen, and a bound that no total error within the budget is below.

    Raises:
        PolicyError: the budget is too small for any choice.
    """
    usable = [[i for i, m in enumerate(found) if m.finite] for found in measured]

    def options(power: int) -> list[list[Option]]:
        return [
            [
                Option(found[i].nbytes, found[i].error if power == 1 else len(site.paths) * found[i].error ** 2)
                for i in of
            ]
            for site, found, of in zip(sites, measured, usable, strict=True)
        ]

    def numbers(choice: Choice) -> list[int]:
        return [of[pick] for of, pick in zip(usable, choice.picks, strict=True)]

    if budget_bytes is None:
        assert max_error is not None
        return numbers(within_error(options(1), [max_error] * len(sites))), None
    squares = options(2)
    choice = within_budget(squares, budget_bytes)
    if choice is not None:
        return numbers(choice), math.sqrt(choice.bound) if choice.bound < choice.cost else None
    smallest = least(squares)
    policies = [found[i].policy for found, i in zip(measured, numbers(smallest), strict=True)]
    raise PolicyError(
        "budget_bytes",
        got=f"{budget_bytes:,} bytes of state for one sequence",
        want=f"at least {smallest.nbytes:,}, the smallest that these candidates allow: "
        f"{_recipe(model, sites, policies)!r}, at a total error of {math.sqrt(smallest.cost):.3g}",
        remedy="Raise the budget to that, or add smaller candidates.",
    )


def _site(
    site: RecordedSite, measured: tuple[Measurement, ...], chosen: Measurement, policies: Sequence[Policy]
) -> CalibratedSite:
    excluded = [(policy, site.excluded[policy]) for policy in policies if policy in site.excluded and not site.own]
    return CalibratedSite(
        id=site.id,
        kind=site.kind,
        layers=len(site.paths),
        exact_bytes=len(site.paths) * site.exact_bytes,
        chosen=chosen,
        measured=measured,
        excluded=tuple((policy, why.code, why.text) for policy, why in excluded),
        own=site.own is not None,
    )


def _notes(recorder: Recorder, sites: Sequence[RecordedSite]) -> Iterable[str]:
    for site in sites:
        if site.own is not None:
            yield f"{site.id} has a policy of its own, {site.own}: not measured, its bytes count"
        if len(site.paths) > 1:
            yield f"{site.id} stands for {len(site.paths)} layers, which share its code: {', '.join(site.paths)}"
    for text in recorder.unmatched:
        yield f"not recognised, so not measured: {text}"
    if recorder.frames.breaks:
        yield f"graph breaks: {recorder.frames.breaks}; a recurrence that one cuts through is missing"
    if recorder.frames.skipped:
        yield (
            f"frames that Dynamo could not compile: {recorder.frames.skipped}; a recurrence in the very code of such a "
            "frame is missing"
        )


_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


def _recipe(model: nn.Module, sites: Sequence[RecordedSite], policies: Sequence[Policy]) -> Recipe:
    """Rules by path; by id where recurrences of one module differ. Of layers that differ in their number only, those
    with the commonest policy share one rule, after the others, if its glob means no other module."""
    at: dict[str, dict[str, Policy]] = {}
    for site, policy in zip(sites, policies, strict=True):
        for path, name in zip(site.paths, site.ids, strict=True):
            at.setdefault(path, {})[name] = policy
    rules: list[tuple[str, Policy]] = []
    families: dict[str, dict[str, Policy]] = {}
    for path, found in at.items():
        if path == "" or len(set(found.values())) > 1:
            rules += [(glob.escape(name), policy) for name, policy in found.items()]
            continue
        number = _LAYER.search(path)
        family = path if number is None else f"{path[: number.start()]}\0{path[number.end() :]}"
        families.setdefault(family, {})[path] = next(iter(found.values()))
    modules = {unwrapped_path(name) for name, _ in model.named_modules()}
    for family, members in families.items():
        common, times = Counter(members.values()).most_common(1)[0]
        pattern = "*".join(map(glob.escape, family.split("\0")))
        meant = {m for m in modules if fnmatch.fnmatchcase(m, pattern)}
        share = times > 1 and meant <= members.keys()
        rules += [(glob.escape(p), policy) for p, policy in members.items() if not (share and policy == common)]
        rules += [(pattern, common)] if share else []
    return Recipe(rules=[*rules, ("*", _EXACT)])
