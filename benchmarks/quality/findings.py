"""What the rows of a run say, in sentences with the numbers in them; `docs/write_quality.py` puts them on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.quality.config import HEADLINE, OTHER_WAYS
from benchmarks.quality.tasks import BUCKETS, PAIRS
from benchmarks.quality.verdict import judged, metric, seeds

__all__ = ["findings", "on_few", "shares"]

Row = dict[str, Any]
NAMES = {"gdn": "GDN", "kda": "KDA"}
INT8, FP8, NVFP4 = "int8 token", "fp8 token", "nvfp4 token"


def _short(x: float) -> str:
    return f"{x:.2g}".replace("e+", "e")


def _span(values: list[float], digits: int = 3, sign: str = "+", by: float = 1.0) -> str:
    low, high = (f"{by * x:{sign}.{digits}f}" for x in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


class Rows:
    """Rows of a run, of one kind of model after another."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.models = [m for m in NAMES if any(r["model"] == m for r in rows)]

    def some(self, model: str, policy: str, weights: str = "base", on: str = "all") -> dict[int, Row]:
        """Seed -> row."""
        wanted = (model, weights, policy, on)
        return {
            r["seed"]: r for r in self.rows if (r["model"], r["weights"], r["policy"], r["on"]) == wanted
        }  # fmt: skip

    def costs(self, model: str, policy: str, weights: str = "base", on: str = "all") -> list[float]:
        return [r["cost"] for r in self.some(model, policy, weights, on).values() if r["cost"] is not None]

    def right(self, model: str, policy: str, step: str, of: str = "recall") -> list[float]:
        return [r[of][step] for r in self.some(model, policy).values() if r[of].get(step) is not None]

    def each(self, say: Any) -> str:
        """What `say(model)` says, of one model after another."""
        return "; ".join(f"{NAMES[m]} {say(m)}" for m in self.models)


def shares(rows: list[Row], model: str, weights: str, policy: str, of: str = "bits") -> dict[int, float]:
    """Seed -> the part of its own cost that a training won back; of seeds that pay anything.

    QAT is held against the control, QAD against the base: it sees no labels, and the base is its teacher.
    """
    start = "base" if weights.startswith("qad") else "control"
    exact, under = (seeds(rows, model, start, p, of) for p in ("exact", policy))
    after = seeds(rows, model, weights, policy, of)
    both = exact.keys() & under.keys() & after.keys()
    return {s: (under[s] - after[s]) / (under[s] - exact[s]) for s in sorted(both) if under[s] > exact[s]}


def on_few(rows: list[Row]) -> str:
    """The sequences that error feedback and stochastic rounding were measured on."""
    return next((on for on in ("few", "short") if any(r["on"] == on and "," in r["policy"] for r in rows)), "few")


def findings(data: dict[str, Any]) -> list[str]:
    """Sentences about the results of one run, as `results.collect` writes them."""
    r = Rows(data["rows"])
    steps = [str(h) for h in next(iter(r.some(r.models[0], "exact").values()))["horizons"]]
    settings = data["about"]["settings"]
    answers = settings["counts"][1] * (PAIRS // len(BUCKETS))
    return [*_paid(r, steps, answers), *_trained(r, data), *_others(r, settings)]


def _paid(r: Rows, steps: list[str], answers: int) -> list[str]:
    first, before, last = steps[0], steps[-2], steps[-1]

    def recall(policy: str, step: str = last) -> str:
        return r.each(lambda m: f"{_span(r.right(m, policy, step), 0, '', 100)} %")

    better = sum(
        r.some(m, FP8)[s]["cost"] < r.some(m, INT8)[s]["cost"] for m in r.models for s in r.some(m, INT8)
    )  # fmt: skip
    count = sum(len(r.some(m, INT8)) for m in r.models)
    grown = [max(layer[-1] for layer in x["drift"]) for m in r.models for x in r.some(m, NVFP4).values()]

    def by_horizon(policy: str, step: str) -> str:
        return _span([x["dlogp"][step] for m in r.models for x in r.some(m, policy).values()], 3, "")

    return [
        f"**Bits per byte over {last} decoded bytes, all seeds.** int8 in token mode costs "
        f"{r.each(lambda m: _span(r.costs(m, INT8)))}. fp8: {r.each(lambda m: _span(r.costs(m, FP8)))}. nvfp4: "
        f"{r.each(lambda m: _span(r.costs(m, NVFP4)))}. Exact bases need "
        f"{r.each(lambda m: _span([x['bits']['all'] for x in r.some(m, 'exact').values()], 2, ''))}.",
        "**The loss on text and memory do not agree on which 8 bits are better.** In bits per byte "
        "fp8 costs less than "
        f"int8 in {better} of {count} bases. Of answers {before} to {last} bytes away there are right in int8: "
        f"{recall(INT8)}; in fp8: {recall(FP8)}; exactly: {recall('exact')} (token mode; {answers} "
        "answers a base). Text is "
        "predicted from what was just seen, and an error in an old entry shows in recall only. Measure what the model "
        "is for.",
        f"**A write every 8 tokens instead of every token** brings int8 to "
        f"{r.each(lambda m: _span(r.costs(m, 'int8 replay 8'), 4))} and fp8 to "
        f"{r.each(lambda m: _span(r.costs(m, 'fp8 replay 8'), 4))} bits per byte, and recall of the "
        "farthest answers to "
        f"{recall('int8 replay 8')} and {recall('fp8 replay 8')}.",
        "**It grows with the horizon.** Mean |Δ log p| of int8 in token mode is "
        f"{by_horizon(INT8, first)} over the first "
        f"{first} bytes and {by_horizon(INT8, last)} from {before} to {last}; of fp8 {by_horizon(FP8, first)} and "
        f"{by_horizon(FP8, last)}; of fp8 replay 8 {by_horizon('fp8 replay 8', first)} and "
        f"{by_horizon('fp8 replay 8', last)}.",
        f"**nvfp4 in token mode is for short texts only.** Over the first {first} bytes its change is "
        f"{by_horizon(NVFP4, first)}, not far from int8's, and from {before} to {last} {by_horizon(NVFP4, last)}; the "
        f"layer that is farthest off ends {_short(min(grown))} to {_short(max(grown))} times its own "
        "size away. Replayed "
        f"over 16 tokens it costs {r.each(lambda m: _span(r.costs(m, 'nvfp4 replay 16'), 4))}.",
    ]


def _trained(r: Rows, data: dict[str, Any]) -> list[str]:
    if not data.get("trained"):
        return []
    names = {t["trained"] for t in data["trained"]}
    said = [*_qat(r, data["about"]["settings"]["steps"]), *_weights(r)]
    if any(name.startswith("qad") for name in names):
        said += _qad(r)
    if any(name.startswith(OTHER_WAYS) for name in names):
        said.append(_recipes(r))
    return said + ([_slopes(r, data["slopes"])] if data.get("slopes") else [])


def _back(r: Rows, method: str, policy: str) -> str:
    """What a training won back of each seed's own cost."""

    def of(model: str) -> str:
        found = list(shares(r.rows, model, f"{method} {policy}", policy).values())
        return f"{_span(found, 0, '', 100)} %" if found else "not run"

    return r.each(of)


def _ruled(r: Rows, method: str, of: str) -> str:
    """The rule's verdicts, and what each is about."""
    verdicts: dict[str, list[str]] = {}
    for model in r.models:
        for name in HEADLINE:
            j = judged(r.rows, model, f"{method} {name}", name, of)
            if j is not None:
                verdicts.setdefault(j.verdict, []).append(f"{NAMES[model]} {name}")
    return ". ".join(f"{word[0].upper()}{word[1:]}: {', '.join(verdicts[word])}" for word in sorted(verdicts))


def _wrong(r: Rows, method: str, policy: str) -> str:
    """Wrong answers of recall under a policy, before a training (of the control; of QAD's teacher) and after it."""

    def of(model: str) -> str:
        start = "base" if method == "qad" else "control"
        before, after = (r.some(model, policy, w) for w in (start, f"{method} {policy}"))
        if not before.keys() & after.keys():
            return "not run"
        wrong = ([metric("recall")(x[s]) for s in sorted(before.keys() & after.keys())] for x in (before, after))
        return "from {} % to {} %".format(*(_span(x, 1, "", 100) for x in wrong))

    return r.each(of)


def _qat(r: Rows, steps: int) -> list[str]:
    said = [
        f"**QAT of {steps} steps won back**, of each seed's own cost in bits, {_back(r, 'qat', INT8)} in int8 token "
        f"mode; {_back(r, 'qat', FP8)} in fp8; {_back(r, 'qat', NVFP4)} in nvfp4; in replay 8, int8 "
        f"{_back(r, 'qat', 'int8 replay 8')}, fp8 {_back(r, 'qat', 'fp8 replay 8')}, nvfp4 "
        f"{_back(r, 'qat', 'nvfp4 replay 8')}.",
        f"**By the rule that was fixed beforehand**, in bits per byte: {_ruled(r, 'qat', 'bits')}.",
    ]
    helped = []
    for model in r.models:
        for name in HEADLINE:
            j = judged(r.rows, model, f"qat {name}", name, "bits")
            if j is not None and j.verdict == "not recovered" and j.gain.mean > 0:
                helped.append(f"{NAMES[model]} {name} {100 * j.gain.mean / j.cost.mean:.0f} %")
    if helped:
        said.append(
            f"**Not recovered is not without help.** Of the mean cost there were won back: {', '.join(helped)}; the "
            "rule asks for half, and for two spreads of three seeds. Where it says that no cost is shown, three seeds "
            "differ too much."
        )
    said.append(
        "**Memory under QAT.** Wrong answers of recall over the whole suffix go in int8 token mode "
        f"{_wrong(r, 'qat', INT8)}; in fp8 {_wrong(r, 'qat', FP8)}; in nvfp4 {_wrong(r, 'qat', NVFP4)}."
    )
    return said


def _weights(r: Rows) -> list[str]:
    def dearer(name: str) -> str:
        def of(model: str) -> str:
            after, control = (seeds(r.rows, model, w, "exact", "bits") for w in (f"qat {name}", "control"))
            found = [after[s] - control[s] for s in after.keys() & control.keys()]
            return _span(found) if found else "not run"

        return r.each(of)

    def learnt(weights: str) -> str:
        """Bits of exact text that a training takes off the base's."""

        def of(model: str) -> str:
            base, after = (seeds(r.rows, model, w, "exact", "bits") for w in ("base", weights))
            found = [base[s] - after[s] for s in base.keys() & after.keys()]
            return _span(found) if found else "not run"

        return r.each(of)

    return [
        "**Under fp8 the text is not trained.** As many exact steps take off the bases' text "
        f"{learnt('control')} bits per byte; QAT under int8 {learnt(f'qat {INT8}')}, read exactly; QAT under fp8 "
        f"{learnt(f'qat {FP8}')}: memory takes the steps.",
        "**QAT is for one policy.** With an exact state after all, a model trained under int8 in token mode needs "
        f"{dearer(INT8)} bits per byte against the control, under fp8 {dearer(FP8)}, under nvfp4 {dearer(NVFP4)}.",
    ]


def _qad(r: Rows) -> list[str]:
    run = [name for name in HEADLINE if any(r.some(m, name, f"qad {name}") for m in r.models)]
    won = ", in ".join(f"{name} {_back(r, 'qad', name)}" for name in run)
    wrong = ", in ".join(f"{name} {_wrong(r, 'qad', name)}" for name in run)
    return [
        f"**QAD**, held against its teacher, the base, won back in {won}. Wrong answers of recall go in {wrong}.",
        "**By the rule**, which holds QAD against the control that has seen as many labels as QAT: "
        f"{_ruled(r, 'qad', 'bits')}.",
    ]


RECIPES = ("qat", *OTHER_WAYS, "qat, three times", "qad")


def _recipes(r: Rows) -> str:
    """What ways of training under fp8 leave of its cost."""

    def of(model: str) -> str:
        found = {m: judged(r.rows, model, f"{m} {FP8}", FP8, "bits") for m in RECIPES}
        left = [f"{m} {j.left.mean:+.3f}" for m, j in found.items() if j is not None]
        return f"{found['qat'].cost.mean:+.3f} before, {', '.join(left)}" if found["qat"] is not None else "not run"

    return f"**Other ways to train under fp8** leave, of bits per byte over the control's: {r.each(of)}."


def _slopes(r: Rows, found: list[dict[str, Any]]) -> str:
    """Norms of gradients, and how much of what they promise the loss keeps."""

    def each(policy: str, say: Callable[[dict[str, Any]], str]) -> str:
        mine = {x["model"]: x for x in found if x["slopes"] == policy}
        return r.each(lambda m: say(mine[m]) if m in mine else "not run")

    def norm(policy: str) -> str:
        return each(policy, lambda x: f"{x['norm']:.2f}")

    def kept(policy: str) -> str:
        ratio = lambda x: [way["loss"][0] / x["promised"]["loss"][0] for way in x["kept"].values()]  # noqa: E731
        return each(policy, lambda x: _span(ratio(x), 1, ""))

    return (
        f"**Straight-through gradients** of the bases have a norm of {norm('exact')} exactly, {norm(INT8)} in int8 "
        f"token mode, {norm('fp8 replay 8')} in fp8 replay 8, {norm(FP8)} in fp8 and {norm(NVFP4)} in nvfp4. Of the "
        f"fall that they promise the loss keeps, over three lengths of the way, exactly {kept('exact')}; in int8 "
        f"{kept(INT8)}; in fp8 replay 8 {kept('fp8 replay 8')}; in fp8 {kept(FP8)}; in nvfp4 {kept(NVFP4)} times."
    )


def _others(r: Rows, settings: dict[str, Any]) -> list[str]:
    on = on_few(r.rows)
    horizon = settings["horizon" if on == "few" else "short_horizon"]

    def few(policy: str) -> str:
        return r.each(lambda m: _span(costs, 4) if (costs := r.costs(m, policy, on=on)) else "-")

    def lost(operands: str, inverse: str) -> str:
        name = f"prefill: {operands} operands, {inverse}"

        def of(model: str) -> str:
            found = r.some(model, name, on="short")
            return f"{found[0]['cost']:+.4f}" if found and found[0]["cost"] is not None else "not finite"

        return r.each(of)

    return [
        f"**An int4 residual is worth its half byte.** Over {horizon:,} bytes int8 in token mode costs "
        f"{few(INT8)}, with error "
        f"feedback {few(f'{INT8}, int4 feedback')}, with stochastic rounding {few(f'{INT8}, stochastic')}; fp8 "
        f"{few(FP8)}, {few(f'{FP8}, int4 feedback')} and {few(f'{FP8}, stochastic')}; nvfp4 {few(NVFP4)}, "
        f"{few(f'{NVFP4}, int4 feedback')} and {few(f'{NVFP4}, stochastic')}.",
        "**The recipe of lc.calibrate**, within three quarters of the bytes of int8, costs "
        f"{few('calibrated')} where "
        f"int8 in token mode costs {few(INT8)}.",
        f"**Prefill**: all operands in int8 cost {lost('int8', 'exact inverse')}, in fp8 "
        f"{lost('fp8', 'exact inverse')}, "
        f"in nvfp4 {lost('nvfp4', 'exact inverse')}. Series cut at order 15 (neumann(15), "
        "newton_schulz(4)) give numbers "
        "that are not finite; newton_schulz(6), all 63 orders: "
        f"{lost('fp32', 'newton_schulz(6)')}; block_doubling(16): {lost('fp32', 'block_doubling(16)')}.",
    ]
