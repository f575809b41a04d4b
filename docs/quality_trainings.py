"""Tables of `quality.md` about further trainings: what they win back, what they cost, and other ways to train."""

from __future__ import annotations

from benchmarks.quality.config import HEADLINE, NEAREST, control_of, weights_of
from benchmarks.quality.findings import shares
from benchmarks.quality.slopes import POLICIES as SLOPES
from benchmarks.quality.verdict import judged, seeds, spread
from docs.quality_rows import NAMES, SHORT, Results, grid, percent, pm


def answer_training(r: Results) -> str:
    """What QAT and QAD leave of the cost, a row a policy."""
    rows = []
    for name in HEADLINE:
        cells = []
        for model in r.models:
            qat = judged(r.rows, model, f"qat {name}", name, "bits")
            qad = judged(r.rows, model, f"qad {name}", name, "bits", against="base")
            kept = "not run" if qat is None else f"{qat.cost.mean:+.4f} → {qat.left.mean:+.4f}, {qat.verdict}"
            seeds_ = "" if qad is None or qad.cost.count > 1 else ", one seed"
            taught = "not run" if qad is None else f"{qad.cost.mean:+.4f} → {qad.left.mean:+.4f}{seeds_}"
            cells += [kept, taught]
        rows.append([name, *cells])
    heads = ["bits per byte over exact"]
    for model in r.models:
        heads += [f"{SHORT[model]}, QAT", f"{SHORT[model]}, QAD"]
    return grid(heads, rows)


def trained(r: Results, model: str, methods: tuple[str, ...]) -> list[tuple[str, str]]:
    """Method and policy of a model's further trainings, in the order of the policies."""
    found = {t["trained"] for t in r.data.get("trained", ()) if t["model"] == model}
    every = [(method, name) for name in NEAREST for method in methods]
    return [x for x in every if weights_of(*x) in found]


def recovered(r: Results, of: str) -> str:
    """Every further training under its policy, beside the control under it."""
    show = pm if of == "bits" else percent
    parts = []
    for model in r.models:
        rows = []
        for method, name in trained(r, model, ("qat", "qad")):
            j = judged(r.rows, model, f"{method} {name}", name, of)
            if j is None:
                continue
            own = shares(r.rows, model, f"{method} {name}", name, of)
            share = " / ".join(f"{100 * x:.0f} %" for x in own.values()) if of == "bits" and method == "qat" else ""
            rows.append(
                [
                    f"{name}, {method.upper()}",
                    str(j.cost.count),
                    show(j.cost),
                    show(j.left),
                    show(j.gain),
                    share,
                    j.verdict,
                ]
            )
        what = "bits per byte over exact" if of == "bits" else "wrong answers over exact, %"
        heads = ["", "seeds", f"{what}: control", "trained", "won back", "of a seed's own", "by the rule"]
        if rows:
            parts.append(f"{NAMES[model]}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts) or "Not run."


def distilled(r: Results) -> str:
    """QAD beside its teacher, the base: in bits, and in wrong answers of recall and copy."""
    parts = []
    for model in r.models:
        rows = []
        for method, name in trained(r, model, ("qad",)):
            cells = []
            for of in ("bits", "recall", "copy"):
                exact, under = (seeds(r.rows, model, "base", p, of) for p in ("exact", name))
                after = seeds(r.rows, model, f"{method} {name}", name, of)
                both = sorted(exact.keys() & under.keys() & after.keys())
                show = pm if of == "bits" else percent
                cells += [show(spread(x[s] - exact[s] for s in both)) for x in (under, after)]
            own = " / ".join(f"{100 * x:.0f} %" for x in shares(r.rows, model, f"{method} {name}", name).values())
            j = judged(r.rows, model, f"{method} {name}", name, "bits", against="base")
            rows.append([name, *cells[:2], own, "" if j is None else j.verdict, *cells[2:]])
        heads = ["", "bits per byte over exact: base", "distilled", "won back", "as the rule, against the base"]
        heads += [
            f"{what}: {which}" for what in ("wrong recall, %", "wrong copy, %") for which in ("base", "distilled")
        ]
        if rows:
            parts.append(f"{NAMES[model]}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts) or "Not run."


def objective(r: Results) -> str:
    """What the trainings themselves minimise, above the control's on the same batches: first and last steps."""
    parts = []
    for model in r.models:
        curves = {
            (t["trained"], t["seed"]): {point[0]: point[1] for point in t["curve"]}
            for t in r.data.get("trained", ())
            if t["model"] == model
        }
        rows = []
        for method, name in trained(r, model, ("qat",)):
            own = {seed: curve for (weights, seed), curve in curves.items() if weights == f"{method} {name}"}
            both = {s: (curve, curves["control", s]) for s, curve in own.items() if ("control", s) in curves}
            if not both:
                continue
            first, last = (pick(next(iter(own.values()))) for pick in (min, max))
            over = [spread(curve[at] - control[at] for curve, control in both.values()) for at in (first, last)]
            rows.append([f"{name}, {method.upper()}", str(len(both)), *map(pm, over)])
        if rows:
            heads = ["training loss over the control's, nats", "seeds", f"steps 1-{first}", f"steps {last - 19}-{last}"]
            parts.append(f"{NAMES[model]}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts) or "Not run."


RECIPES = {
    "qat": "QAT",
    "qat of text": "loss of text only",
    "qat, memory a thirtieth": "answers and letters at a thirtieth of their weight",
    "qat at 1e-4": "a third of the learning rate",
    "qat at 1e-3": "three times the learning rate",
    "qat, long warm-up": "30 steps of warm-up, not 5",
    "qat, three times": "three times the steps (control too)",
    "qad": "QAD",
}


def recipes(r: Results) -> str:
    """Other ways to train under fp8 in token mode."""
    name, parts = "fp8 token", []
    for model in r.models:
        rows = []
        for method, _ in [x for m in RECIPES for x in trained(r, model, (m,)) if x[1] == name]:
            weights = weights_of(method, name)
            bits, recall, copy = (judged(r.rows, model, weights, name, of) for of in ("bits", "recall", "copy"))
            if bits is None or recall is None or copy is None:
                continue
            # What is left of the cost is what the state costs the new weights, and what the new weights cost exactly.
            exact, under = (seeds(r.rows, model, weights, p, "bits") for p in ("exact", name))
            control = seeds(r.rows, model, control_of(weights), "exact", "bits")
            both = sorted(exact.keys() & under.keys() & control.keys())
            gap, moved = (spread(x[s] - y[s] for s in both) for x, y in ((under, exact), (exact, control)))
            wrong = [percent(s) for j in (recall, copy) for s in (j.cost, j.left)]
            cells = [pm(bits.cost), pm(bits.left), pm(gap), pm(moved), bits.verdict]
            rows.append([RECIPES[method], str(bits.cost.count), *cells, *wrong])
        if rows:
            heads = ["fp8 in token mode", "seeds", "bits per byte over exact: control", "trained"]
            heads += ["of it the state", "of it the weights", "by the rule"]
            heads += [f"wrong {what}, %: {which}" for what in ("recall", "copy") for which in ("control", "trained")]
            parts.append(f"{NAMES[model]}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts) or "Not run."


def downhill(r: Results) -> str:
    """What the straight-through gradient promises and what the loss keeps of it, a unit of length along it."""
    found = r.data.get("slopes", ())
    parts = []
    for model in r.models:
        rows = []
        mine = {x["slopes"]: x for x in found if x["model"] == model}
        for name in [x for x in SLOPES if x in mine]:
            x = mine[name]
            kept = [f"{mean:.3f} ± {error:.3f}" for mean, error in (way["loss"] for way in x["kept"].values())]
            promised = [f"{x['promised'][part][0]:.3f}" for part in ("loss", "text")]
            rows.append([name, f"{x['norm']:.2f}", promised[0], *kept, promised[1]])
        if rows:
            heads = [NAMES[model], "norm of the gradient", "the loss falls by: promised"]
            heads += [f"really, {far} far" for far in next(iter(mine.values()))["kept"]]
            parts.append(grid([*heads, "the text's part, promised"], rows))
    return "\n\n".join(parts) or "Not run."


def paid(r: Results) -> str:
    """What a training costs the exact model: bits and wrong answers against the control's, with an exact state."""
    parts = []
    for model in r.models:
        rows = []
        for method, name in trained(r, model, ("qat",)):
            cells = []
            for of in ("bits", "recall", "copy"):
                after, control = (seeds(r.rows, model, w, "exact", of) for w in (f"{method} {name}", "control"))
                s = spread(after[i] - control[i] for i in sorted(after.keys() & control.keys()))
                cells.append(pm(s) if of == "bits" else percent(s))
            rows.append([f"{name}, {method.upper()}", *cells])
        if rows:
            heads = ["exact state, against the control", "bits per byte", "wrong recall, %", "wrong copy, %"]
            parts.append(f"{NAMES[model]}:\n\n" + grid(heads, rows))
    return "\n\n".join(parts) or "Not run."
