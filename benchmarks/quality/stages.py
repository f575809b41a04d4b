"""The parts of a run, each in a process of its own (`work.py`): what one leaves unfinished, another goes on with.

A part writes its results as soon as it has them, skips those that are there, and goes on behind a failure.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lattn_compile as lc
from benchmarks.quality.ahead import compiling
from benchmarks.quality.config import (
    CALIBRATED,
    HEADLINE,
    METHODS,
    NEAREST,
    OTHERS,
    PREFILLS,
    Batches,
    Settings,
    arms,
    policy_named,
    weights_of,
)  # fmt: skip
from benchmarks.quality.lab import Lab
from benchmarks.quality.measure import Reference, evaluate
from benchmarks.quality.models import linear_layers, logits_of, recurrence, under
from benchmarks.quality.slopes import slopes
from benchmarks.quality.tasks import PREFIX, Batch
from benchmarks.quality.train import Arm, run

__all__ = ["ahead", "bases", "calibrate", "further", "others", "ptq", "rows"]


def _ready(arm: Arm) -> Arm:
    """Records the arm's step, or leaves it to be launched kernel by kernel where that cannot be done."""
    try:
        arm.record()
    except Exception as error:
        print(f"{arm.name}: not recorded as a CUDA graph: {error!r}", flush=True)
        arm.graph = None
        arm.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    _free()  # what it took before it was recorded: each arm's stream keeps memory of its own
    return arm


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bases(lab: Lab, until: float, after: Path | None = None) -> None:
    """Trains every base from random weights, exactly: short sequences first, long ones last. Begins once `after` is
    there: the kernels are compiled."""
    s = lab.settings
    names = [(kind, seed) for seed in range(s.seeds) for kind in s.models if not lab.checkpoint(kind, seed).exists()]
    if not names:
        return
    drafts = [lab.checkpoint(kind, seed, draft=True) for kind, seed in names]
    if all(draft.exists() for draft in drafts):
        for draft, (kind, seed) in zip(drafts, names, strict=True):
            print(f"base {kind} {seed}: the training ended early, and its draft is taken", flush=True)
            draft.replace(lab.checkpoint(kind, seed))
        return
    _tf32(True)
    made = [lab.base_arm(kind, seed) for kind, seed in names]
    while after is not None and not after.exists():
        time.sleep(0.05)
    began = time.perf_counter()
    counts: list[dict[str, int]] = []
    for number, (batches, share) in enumerate(s.curriculum):
        if number:
            for arm, (_, seed) in zip(made, names, strict=True):
                arm.load(lab.stage(number, seed))
            _free()
        for arm in made:
            _ready(arm)
        before = sum(x["steps"] for x in counts)
        if s.base_steps is None:
            later = sum(share for _, share in s.curriculum[number:])
            end = time.perf_counter() + share / later * (until - time.perf_counter())
            n = run(made, until=end, done=lambda n: (time.perf_counter() - began) / (until - began), tick=_said)
        else:
            steps = max(1, round(share * s.base_steps))
            n = run(made, steps=steps, until=until, done=partial(_through, before, s.base_steps), tick=_said)
        counts.append({"steps": n, "batch": batches.count, "tokens": batches.length})
        last = number == len(s.curriculum) - 1
        for arm, (kind, seed) in zip(made, names, strict=True):
            if arm.failed is not None:
                lab.write(f"failed base {kind} {seed}", {"failed": f"base {kind} {seed}", "why": arm.failed})
                continue
            part = {"base": kind, "seed": seed, "stages": counts, "curve": arm.curve, "graph": arm.graph is not None}
            part |= {"parameters": sum(p.numel() for p in arm.model.parameters())}
            lab.write(f"base {kind} {seed}", part | {"seconds": time.perf_counter() - began, "together": len(made)})
            lab.save(kind, seed, arm.model, draft=not last)


def _through(before: int, all_: int, n: int) -> float:
    return (before + n) / all_


def _said(text: str) -> None:
    print(text, flush=True)


def _tf32(on: bool) -> None:
    """Matrix products outside of the recurrence: with TF32 in training, without where something is measured."""
    torch.set_float32_matmul_precision("high" if on else "highest")


class _Bench:
    """Rows of one set of weights on one set of held-out sequences; the exact model runs when it is first needed."""

    def __init__(self, lab: Lab, model: Any, labels: dict[str, Any], *, on: str = "all") -> None:
        self.lab, self.model, self.labels, self.on = lab, model, labels, on
        self.data: dict[str, Batch] = lab.data(on)
        self.layers = lab.settings.size.linear
        self.reference: Reference | None = None

    def exact(self) -> Reference:
        if self.reference is None:
            began = time.perf_counter()
            row, self.reference = evaluate(self.model, [None] * self.layers, self.data)
            self._write("exact", row, began)
        return self.reference

    def row(self, name: str, policies: list[lc.Policy | None], **options: Any) -> None:
        """Measures one policy, unless that was done."""
        if self.lab.has(self._name(name)):
            return
        reference = self.exact()

        def measure() -> None:
            began = time.perf_counter()
            row, _ = evaluate(self.model, policies, self.data, reference, **options)
            self._write(name, row, began)

        self.lab.attempt(f"row {self._name(name)}", measure)

    def _name(self, policy: str) -> str:
        l = self.labels
        return f"{l['model']} {l['seed']} {l['weights']} {'' if self.on == 'all' else self.on + ' '}{policy}"

    def _write(self, policy: str, row: dict[str, Any], began: float) -> None:
        part = {**self.labels, "policy": policy, "on": self.on, "device": self.lab.device}
        self.lab.write(self._name(policy), part | row | {"seconds": time.perf_counter() - began})


def rows(lab: Lab, until: float, kind: str, after: Path | None) -> None:
    """Everything that is measured on the bases of one model, once `after` is there."""
    _wait(lab, until, kind, after)
    ptq(lab, until, (kind,))
    calibrated(lab, until, kind)
    slopes(lab, until, kind)
    prefills(lab, until, kind)


def _wait(lab: Lab, until: float, kind: str, after: Path | None) -> None:
    """What a process needs to start is done while the bases are trained."""
    if after is not None:
        warm = lab.base_arm(kind, 0, linear=1)
        with torch.no_grad(), recurrence(under([NEAREST["int8 token"]], PREFIX), 1):
            logits_of(warm.model, warm.ids[:, :-1])
        del warm
        _free()
        while not after.exists() and time.perf_counter() < until:
            time.sleep(0.05)


def ptq(lab: Lab, until: float, kinds: tuple[str, ...] = ()) -> None:
    """The bases under every policy that is rounded to nearest; of seeds but the first, the headline's."""
    _tf32(False)
    s = lab.settings
    for seed in range(s.seeds):
        for kind in kinds or s.models:
            if not lab.checkpoint(kind, seed).exists():
                continue
            bench = _Bench(lab, lab.load(kind, seed), {"model": kind, "seed": seed, "weights": "base"})
            wanted: list[tuple[str, lc.Policy | None, dict[str, Any]]]
            wanted = [("exact, windows of 16 (control)", None, {"way": "fast"})] if lab.device == "cuda" else []
            wanted += [("exact, chunks of 64 (control)", None, {"way": "chunk"})]
            wanted += [("exact, prefix lost", None, {"clear": True})]
            more = seed == 0 and not s.headline_only
            names = [*HEADLINE, *(n for n in NEAREST if more and n not in HEADLINE)]
            wanted += [(name, NEAREST[name], {}) for name in names]
            for name, policy, options in wanted:
                if time.perf_counter() > until:
                    return
                bench.row(name, [policy] * s.size.linear, **_exactly(lab, options))
            del bench
            _free()


def _exactly(lab: Lab, options: dict[str, Any]) -> dict[str, Any]:
    """On a CPU the exact parts are computed in chunks, where a loop over tokens is slow; a control goes by tokens."""
    if lab.device != "cuda" and options.get("way") == "chunk":
        return {**options, "way": "steps"}
    return options


_Further = tuple[str, str, str, int]
"""Model, method, policy and seed of a further training."""


def further(lab: Lab, until: float, kind: str, after: Path | None, together: int) -> None:
    """QAT, QAD and the control of a model, once `after` is there: so many side by side, each measured at once."""
    _wait(lab, until, kind, after)
    pace = 0.0  # seconds of a group of the usual steps
    left = [(kind, *x) for x in arms(lab.settings) if not lab.has(f"trained {_label(kind, *x)}")]
    left = [x for x in left if lab.checkpoint(kind, x[3]).exists()]
    for todo in _side_by_side(left, together):
        began, times = time.perf_counter(), METHODS[todo[0][1]].times
        # One that cannot end is not begun: arms of fewer steps compare with nothing.
        if began + 0.8 * pace * times > until:
            continue
        if not lab.attempt(f"group of {len(todo)}, {_label(*todo[0])}", partial(_group, lab, todo, until)):
            for one in todo if len(todo) > 1 else ():  # of one that failed, the others are not lost
                _free()
                lab.forget_rows(one[0], one[3], weights_of(one[1], one[2]))  # of the weights that are gone
                lab.attempt(f"group of 1, {_label(*one)}", partial(_group, lab, [one], until))
        pace = max(pace, (time.perf_counter() - began) / times)
        _free()


def _side_by_side(arms: list[_Further], together: int) -> Iterator[list[_Further]]:
    """Groups of so many, all of as many steps."""
    for _, same in itertools.groupby(arms, lambda x: METHODS[x[1]].times):
        every = list(same)
        for first in range(0, len(every), together):
            yield every[first : first + together]


def _label(kind: str, method: str, policy: str, seed: int) -> str:
    return f"{kind} {seed} {method} {policy}"


def _group(lab: Lab, todo: list[_Further], until: float) -> None:
    s = lab.settings
    _tf32(True)
    made = [_ready(lab.further_arm(kind, method, policy, seed)) for kind, method, policy, seed in todo]
    began, steps = time.perf_counter(), s.steps * METHODS[todo[0][1]].times
    n = run(made, steps=steps, until=until, tick=_said)
    spent = time.perf_counter() - began
    _tf32(False)
    for arm, (kind, method, policy, seed) in zip(made, todo, strict=True):
        label = _label(kind, method, policy, seed)
        if n < steps or arm.failed is not None:
            why = arm.failed or f"the time ended after {n} of {steps} steps"
            lab.write(f"failed {label}", {"failed": label, "why": why})
            continue
        weights = weights_of(method, policy)
        bench = _Bench(lab, arm.model, {"model": kind, "seed": seed, "weights": weights})
        bench.exact()
        for name in HEADLINE if policy == "exact" else (policy,):
            bench.row(name, [policy_named(name)] * s.size.linear)
        if method == "exact" and seed == 0:
            for _, name in s.trained_once:
                bench.row(name, [policy_named(name)] * s.size.linear)
        part = {"trained": weights, "model": kind, "seed": seed, "steps": n, "curve": arm.curve, "seconds": spent}
        lab.write(f"trained {label}", part | {"together": len(made), "graph": arm.graph is not None})


def prefills(lab: Lab, until: float, kind: str) -> None:
    """The prefill's operands and inverses, on the shorter set."""
    _tf32(False)
    s = lab.settings
    if not lab.checkpoint(kind, 0).exists():
        return
    bench = _Bench(lab, lab.load(kind, 0), {"model": kind, "seed": 0, "weights": "base"}, on="short")
    for name, prefill in PREFILLS.items():
        if time.perf_counter() < until:
            policy = lc.Policy(write=lc.Exact(), prefill=prefill)
            bench.row(f"prefill: {name}", [policy] * s.size.linear, way="whole")


def others(lab: Lab, until: float, kind: str, share: int, shares: int, after: Path | None) -> None:
    """Stochastic rounding and error feedback, and what is beside them: every `shares`-th policy."""
    _wait(lab, until, kind, after)
    _tf32(False)
    s = lab.settings
    if not lab.checkpoint(kind, 0).exists():
        return
    bench = _Bench(lab, lab.load(kind, 0), {"model": kind, "seed": 0, "weights": "base"}, on="few")
    for name, policy in list({**NEAREST, **OTHERS}.items())[share::shares]:
        if time.perf_counter() < until:
            bench.row(name, [policy] * s.size.linear)


def calibrated(lab: Lab, until: float, kind: str) -> None:
    """The recipe of `calibrate`, once it is there."""
    recipe = lab.folder / f"recipe_{kind}.json"
    while not recipe.exists() and not lab.has(f"failed calibrate {kind}") and time.perf_counter() < until:
        time.sleep(0.2)
    if recipe.exists() and lab.checkpoint(kind, 0).exists():
        bench = _Bench(lab, lab.load(kind, 0), {"model": kind, "seed": 0, "weights": "base"}, on="few")
        rules = lc.Recipe.load(recipe)
        found = [rules.resolve(f"{path}/{kind}#0")[1] for path in linear_layers(bench.model)]
        bench.row("calibrated", [p if p is not None and p.rounded_format is not None else None for p in found])


def calibrate(lab: Lab, kind: str) -> None:
    """A recipe for the first base within three quarters of the bytes of int8 in token mode, on training text."""
    s = lab.settings
    if (lab.folder / f"recipe_{kind}.json").exists():
        return
    model = lab.load(kind, 0, "cpu").eval()
    uniform = s.size.linear * lc.Policy(lc.Int8()).nbytes(s.size.heads, s.size.heads, s.size.dim, s.size.dim)
    tokens = min(1024, s.curriculum[-1][0].length)
    batch = lab.mixture(Batches(2, tokens), 77).draw()
    began = time.perf_counter()
    reports: list[Any] = []
    recipe = lc.calibrate(
        model, [{"input_ids": batch.ids[:, :-1].long(), "use_cache": False}], budget_bytes=uniform * 3 // 4,
        horizon=tokens, candidates=CALIBRATED, dense_cache=False, show=reports.append,
    )  # fmt: skip
    recipe.save(lab.folder / f"recipe_{kind}.json")
    part = {"recipe": recipe.to_dict(), "model": kind, "seed": 0, "budget_bytes": uniform * 3 // 4}
    lab.write(f"recipe {kind}", part | {"report": str(reports[0]), "seconds": time.perf_counter() - began})


def ahead(lab: Lab, share: int, shares: int, first: list[str] | None = None) -> None:
    """Compiles its share of all Triton kernels of a run, in the order in which the run needs them, or those of the jobs
    `first` before others."""
    torch.manual_seed(0)
    with compiling(share, shares) as done:
        jobs = dict(_jobs(lab))
        for name in dict.fromkeys([*(x for x in first or () if x in jobs), *jobs]):
            job = jobs[name]
            before, began = len(done), time.perf_counter()
            try:
                job()
            except Exception as error:
                print(f"{name}: {error!r}", flush=True)
            spent = time.perf_counter() - began
            said = ", ".join(f"{kernel} {seconds:.1f}" for kernel, seconds in done[before:])
            print(f"@@ {name} {spent:.1f} s: {said}", flush=True)
            _free()


def _jobs(lab: Lab) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of everything still to be done that launches Triton kernels, on models of one linear layer."""
    s: Settings = lab.settings
    for stage in range(len(s.curriculum)):
        for kind in s.models:
            if all(lab.checkpoint(kind, seed).exists() for seed in range(s.seeds)):
                continue

            def base(kind: str = kind, stage: int = stage) -> None:
                lab.base_arm(kind, 0, stage=stage, linear=1).compute()

            yield f"base {kind}" if stage == 0 else f"base {kind} {stage}", base
    one = replace(s, size=replace(s.size, linear=1))
    thin = Lab(one, lab.folder, lab.device)
    # As many sequences as `evaluate` takes at a time.
    few = {"text": 16, "recall": 32, "copy": 16}
    data = {name: Batch(b.ids[: few[name]], b.kinds[: few[name]]) for name, b in lab.data().items()}
    for kind in s.models:
        for name, policy in [("exact", None), *NEAREST.items()]:
            if lab.has(f"{kind} 0 base {name}"):
                continue

            def row(kind: str = kind, policy: lc.Policy | None = policy) -> None:
                evaluate(thin.base_arm(kind, 0).model, [policy], data)

            yield f"row {kind} {name}", row

        def control(kind: str = kind) -> None:
            evaluate(thin.base_arm(kind, 0).model, [None], data, way="fast")

        if not lab.has(f"{kind} 0 base exact, windows of 16 (control)"):
            yield f"row {kind} fast", control
    every = arms(s)
    met: set[tuple[str, bool, str]] = set()
    for method, name in dict.fromkeys((m, n) for m, n, _ in every):
        for kind in s.models:
            seeds = [seed for m, n, seed in every if (m, n) == (method, name)]
            same = (kind, METHODS[method].loss == "distil", name)  # methods differ by numbers only
            if same in met or all(lab.has(f"trained {_label(kind, method, name, seed)}") for seed in seeds):
                continue
            met.add(same)

            def train(kind: str = kind, method: str = method, name: str = name) -> None:
                lab.further_arm(kind, method, name, 0, linear=1).compute()

            yield f"train {kind} {method} {name}", train
