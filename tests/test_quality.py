"""The benchmark of quality measures what it says: its layers are the backend's, its questions have answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lattn_compile as lc
from benchmarks import generate
from benchmarks.quality import tasks, verdict
from benchmarks.quality.config import FULL, HEADLINE, METHODS, NEAREST, OTHERS, RULE, TINY, arms, control_of, weights_of
from benchmarks.quality.text import load_corpus
from lattn_compile.testing.backend import recorded

pytest.importorskip("transformers")

from benchmarks.quality import reduced, slopes, stages
from benchmarks.quality.findings import shares
from benchmarks.quality.lab import Lab
from benchmarks.quality.measure import evaluate
from benchmarks.quality.models import Size, build, linear_layers, logits_of, recurrence, under
from benchmarks.quality.results import restore
from benchmarks.quality.train import Arm, Method, loss_of, rate, run

_SIZE = Size(hidden=32, inner=32, linear=2, heads=2, dim=16)


@pytest.fixture(scope="module", autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "policy"), [("gdn", "nvfp4 replay 8"), ("kda", "int8 token")])
def test_a_layer_is_what_the_backend_makes_of_it_in_a_training_phase(kind: str, policy: str) -> None:
    """The same values and gradients as `torch.compile(backend="lattn_compile")` under `lc.training_phase`."""
    model = build(kind, _SIZE, 0)
    ids = load_corpus().train[: 2 * 100].view(2, 100)
    with recorded() as record, lc.training_phase(tasks.PREFIX):
        compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": NEAREST[policy]})  # type: ignore[call-overload]
        want = compiled(input_ids=ids.long(), use_cache=False).logits
        want.square().sum().backward()
        assert record.lattn_ops == _SIZE.linear
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with recurrence(under([NEAREST[policy]] * _SIZE.linear, tasks.PREFIX), _SIZE.linear):
        got = logits_of(model, ids)
        got.square().sum().backward()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    for a, b in zip([p.grad for p in model.parameters() if p.grad is not None], grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item() + 1e-7, rtol=1e-3)
    assert len(linear_layers(model)) == _SIZE.linear
    exact = model(input_ids=ids.long(), use_cache=False).logits
    assert (exact[:, : tasks.PREFIX] - got[:, : tasks.PREFIX]).abs().max() < 1e-5
    assert (exact - got).abs().max() > 1e-5, "nothing was rounded"


def _answers(batch: tasks.Batch, kind: str) -> list[tuple[int, int, bytes]]:
    """Row, position in ids and the bytes up to there of every answer."""
    found = (batch.kinds == tasks.KINDS[kind]).nonzero().tolist()
    return [(row, at + 1, bytes(batch.ids[row, : at + 2].tolist())) for row, at in found]


def test_every_question_has_its_answer_earlier_in_the_sequence() -> None:
    corpus = load_corpus()
    generator = torch.Generator().manual_seed(0)
    trained = tasks.recalling(corpus.train, 8, 512, generator, 12)
    copied = tasks.copying(corpus.train, 8, 512, generator, 12)
    held = tasks.measured(corpus.heldout, {"text": 2, "recall": 4, "copy": 8}, 1024, 0)
    for batch in (trained, held["recall"]):
        answers = _answers(batch, "recall")
        assert len(answers) >= len(batch) * 18
        for row, _, seen in answers:
            key, value = seen[-2:]
            assert 128 <= key < 192 <= value < 224
            first = seen.index(key)
            assert first < len(seen) - 2 and seen[first + 1] == value, row
    for batch in (copied, held["copy"]):
        assert {len([r for r, _, _ in _answers(batch, "copy") if r == row]) % 31 for row in range(8)} == {0}
        for row, at, seen in _answers(batch, "copy"):
            start = seen.rindex(b"\3")
            assert start > 31 and seen[1 : 1 + at - start] == seen[start + 1 :], row
    # Each pair is asked for once, and none is stored behind the prefix.
    for row in held["recall"].ids.tolist():
        stored, keys = row[: 2 * tasks.PAIRS : 2], [x for x in row[tasks.PREFIX :] if 128 <= x < 192]
        assert len(set(stored)) == tasks.PAIRS and set(keys) <= set(stored)
        assert len(keys) == len(set(keys)) == 18
    per_bucket = [
        sum(low <= at - 1 - tasks.PREFIX < high for _, at, _ in _answers(held["recall"], "recall"))
        for low, high in ((0, 64), (64, 256), (256, 1024))
    ]
    assert per_bucket == [24, 24, 24]


def test_models_begin_able_to_look_up_what_followed() -> None:
    """Keys are the queries one byte later, in every linear layer; and nothing that is learnt is zero or huge."""
    for kind in ("gdn", "kda"):
        model, seen = build(kind, _SIZE, 1), list[tuple[torch.Tensor, torch.Tensor]]()

        def look(
            i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor, seen: Any = seen
        ) -> torch.Tensor:
            seen.append((q, k))
            return v

        ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        with torch.no_grad(), recurrence(look, _SIZE.linear):
            logits_of(model, ids)
        assert len(seen) == _SIZE.linear
        for q, k in seen:
            after, same = (
                torch.cosine_similarity(a.flatten(2), b.flatten(2), dim=-1).mean()
                for a, b in ((q[:, :-1], k[:, 1:]), (q, k))
            )
            assert after > 0.85 > same + 0.1, (kind, after, same)


def test_each_kind_of_byte_has_its_share_of_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 50, 256, generator=generator)
    ids = torch.randint(256, (2, 51), generator=generator, dtype=torch.uint8)
    kinds = torch.zeros(2, 50, dtype=torch.uint8)
    kinds[0, :30], kinds[0, 40], kinds[1, 4:9] = 1, 2, 3
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:].long(), reduction="none")
    want = nats[0, :30].mean() + 0.5 * nats[0, 40] + 0.25 * nats[1, 4:9].mean()
    torch.testing.assert_close(loss_of(logits, ids, kinds), want)
    assert loss_of(logits, ids, torch.zeros_like(kinds)) == 0


def test_texts_are_apart_and_batches_repeat() -> None:
    corpus = load_corpus()
    train = bytes(corpus.train.tolist())
    assert min(corpus.train.min(), corpus.heldout.min()) >= 8 and max(corpus.train.max(), corpus.heldout.max()) < 128
    assert corpus.about["heldout_files"] > 10 and len(corpus.heldout) > 300_000
    windows = [bytes(corpus.heldout[i : i + 400].tolist()) for i in range(0, len(corpus.heldout) - 400, 40_000)]
    assert sum(window in train for window in windows) <= 1  # a licence may be in many files
    a, b = (tasks.Mixture(corpus.train, 8, 256, 3, (0.5, 0.25)) for _ in range(2))
    for _ in range(2):
        assert torch.equal(a.draw().ids, b.draw().ids)


def test_measuring_tells_exact_from_rounded_and_lost_states() -> None:
    corpus = load_corpus()
    model = build("gdn", _SIZE, 0)
    data = tasks.measured(corpus.heldout, {"text": 2, "recall": 2, "copy": 2}, 256, 0)
    layers = _SIZE.linear
    row, reference = evaluate(model, [None] * layers, data)
    assert set(row["bits"]) == {"64", "256", "all"} and 7 < row["bits"]["all"] < 9
    floor, _ = evaluate(model, [None] * layers, data, reference, way="steps")
    coarse, _ = evaluate(model, [NEAREST["nvfp4 token"]] * layers, data, reference)
    noisy, _ = evaluate(model, [OTHERS["nvfp4 token, stochastic"]] * layers, data, reference)
    mixed, _ = evaluate(model, [None, NEAREST["int8 replay 8"]], data, reference)
    lost, _ = evaluate(model, [None] * layers, data, reference, clear=True)
    assert abs(floor["kl"]["all"]) < 1e-8 < min(coarse["kl"]["all"], noisy["kl"]["all"])
    assert noisy["kl"]["all"] != coarse["kl"]["all"], "both were rounded alike"
    assert all(x < 1e-5 for layer in floor["drift"] for x in layer)
    assert mixed["drift"][0] == [0.0, 0.0] and 0 < mixed["drift"][1][1] < coarse["drift"][1][1]
    assert 1 > lost["drift"][0][0] > 3 * lost["drift"][0][1], "what is lost is forgotten anyway, in time"


def test_qat_sees_the_rounding_and_qad_its_teacher() -> None:
    corpus = load_corpus()

    def trained(method: Method, policy: lc.Policy | None = None, teacher: Any = None) -> Arm:
        data = tasks.Mixture(corpus.train, 2, 128, 0, (0.5, 0.0))
        arm = Arm("x", build("kda", _SIZE, 0), method, data, policy=policy, teacher=teacher)
        assert run([arm], steps=2, tick=lambda text: None) == 2 and arm.failed is None
        return arm

    exact, again = (trained(Method()) for _ in range(2))
    qat = trained(Method(), NEAREST["nvfp4 token"])
    qad = trained(METHODS["qad"], NEAREST["nvfp4 token"], build("kda", _SIZE, 0).requires_grad_(False))
    weights = [torch.cat([p.flatten() for p in arm.model.parameters()]) for arm in (exact, again, qat, qad)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2]) and not torch.equal(weights[2], weights[3])
    assert 0 < qad.curve[-1][1] < 0.02 * qat.curve[-1][1], "a teacher is nearer than the text"


def test_a_checkpoint_has_the_weights_in_float16_and_a_failure_is_written_down(tmp_path: Path) -> None:
    lab = Lab(TINY, tmp_path, "cpu")
    model = build("gdn", TINY.size, 5)
    lab.save("gdn", 0, model)
    again = lab.load("gdn", 0)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.half().float(), b)
    assert lab.attempt("fails", lambda: 1 / 0) is False and lab.has("failed fails")


def test_a_training_begins_slowly_whatever_the_clock_says() -> None:
    """By the clock, what passes before the first step would count, and a model begin at the full rate."""
    peak = 3e-3
    assert rate(0.1, peak, 1 / 50) == pytest.approx(peak / 50) and rate(0.1, peak, 2.0) == peak
    assert rate(1.0, peak) == pytest.approx(peak / 20) and rate(0.0, peak, 0.5) == peak / 2
    arm = Arm(
        "x", build("gdn", _SIZE, 0), Method(peak=peak, warm=4), tasks.Mixture(load_corpus().train, 2, 96, 0, (0.5, 0.0))
    )
    seen = []
    arm.step = seen.append  # type: ignore[method-assign]
    for arm.steps in range(6):
        run([arm], steps=1, done=lambda n: 0.5, every=99, tick=lambda text: None)
    assert seen == pytest.approx([peak * x for x in (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)])


def _rows(weights: str, policy: str, bits: list[float], **more: Any) -> list[dict[str, Any]]:
    return [
        {"model": "gdn", "seed": s, "weights": weights, "policy": policy, "on": "all", "bits": {"all": x}, **more}
        for s, x in enumerate(bits)
    ]


@pytest.mark.parametrize(
    ("under_policy", "qat", "verdict_"),
    [
        ([1.40, 1.41, 1.42], [1.32, 1.33, 1.34], "recovered"),
        ([1.40, 1.41, 1.42], [1.37, 1.38, 1.39], "not recovered"),  # less than half of it
        ([1.40, 1.41, 1.42], [1.20, 1.41, 1.38], "not recovered"),  # within two spreads
        ([1.30, 1.32, 1.31], [1.30, 1.30, 1.30], "no cost shown"),
        ([1.40], [1.30], "one seed"),
    ],
)
def test_the_rule_that_was_fixed_beforehand(under_policy: list[float], qat: list[float], verdict_: str) -> None:
    rows = _rows("control", "exact", [1.30, 1.31, 1.32]) + _rows("control", "nvfp4 token", under_policy)
    rows += _rows("qat nvfp4 token", "nvfp4 token", qat)
    found = verdict.judged(rows, "gdn", "qat nvfp4 token", "nvfp4 token", "bits")
    assert found is not None and found.verdict == verdict_
    assert verdict.judged(rows, "kda", "qat nvfp4 token", "nvfp4 token", "bits") is None
    assert "at least half" in RULE


def test_what_is_won_back_is_of_what_the_training_began_with() -> None:
    """QAT sees labels, as its control does; QAD sees its teacher, the base."""
    name, rows = "int8 token", list[dict[str, Any]]()
    for weights, exact, under_policy in (("base", 1.3, 1.5), ("control", 1.2, 1.6)):
        rows += _rows(weights, "exact", [exact]) + _rows(weights, name, [under_policy])
    rows += _rows(f"qat {name}", name, [1.3]) + _rows(f"qad {name}", name, [1.4])
    assert shares(rows, "gdn", f"qat {name}", name) == {0: pytest.approx(0.75)}
    assert shares(rows, "gdn", f"qad {name}", name) == {0: pytest.approx(0.5)}


def test_rows_of_weights_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    lab = Lab(TINY, tmp_path, "cpu")
    names = ["gdn 0 qat int8 token exact", "gdn 0 qat int8 token int8 token", "gdn 0 qat int8 replay 8 exact"]
    for name in names:
        lab.write(name, {})
    lab.forget_rows("gdn", 0, "qat int8 token")
    assert [lab.has(name) for name in names] == [False, False, True]


def test_an_order_is_of_rows_that_are_apart_and_a_broken_one_is_seen() -> None:
    def rows(weights: str, policy: str, changes: list[float]) -> list[dict[str, Any]]:
        return [row | {"dlogp": {"256": row["bits"]["all"]}} for row in _rows(weights, policy, changes)]

    published = rows("control", "int8 token", [1.0, 2.0, 8.0]) + rows("control", "fp8 token", [1.2, 1.9, 9.0])
    published += rows("control", "nvfp4 token", [3.0, 6.5, 22.0])  # of each seed's own, about three times
    pairs = [("int8 token", "nvfp4 token"), ("fp8 token", "nvfp4 token")]
    assert sorted(verdict.order(published, "gdn", "dlogp", "256")) == sorted(pairs)
    again = rows("base", "int8 token", [3.0]) + rows("base", "nvfp4 token", [2.5])
    found = {pair[:2]: pair[2] for pair in verdict.reproduced(published, again, "gdn", "dlogp", "256")}
    assert found == {pairs[0]: False, pairs[1]: None}


def test_what_was_not_measured_is_no_other_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert reduced.check({"rows": []}) == 1
    said = capsys.readouterr().out
    assert "not measured here" in said and "not so here" not in said and "--seconds" in said


def test_what_is_run_covers_what_was_asked_for() -> None:
    assert len(NEAREST) == 12 and len(OTHERS) == 21 and set(HEADLINE) <= set(NEAREST)
    every = arms(FULL)
    assert len(set(every)) == len(every) and {method for method, _, _ in every} <= set(METHODS)
    for policy in HEADLINE:
        assert {s for method, name, s in every if (method, name) == ("qat", policy)} == {0, 1, 2}
        assert any(x[:2] == ("qad", policy) for x in every)
    assert every[:3] == [("exact", "exact", s) for s in range(3)], "the control comes first"
    for kind in FULL.models:
        with torch.device("meta"):
            model = build(kind, FULL.size, 0)
        assert sum(p.numel() for p in model.parameters()) < 15_000_000


def test_a_training_is_held_against_an_exact_one_of_as_many_steps() -> None:
    for method, policy, _ in arms(FULL):
        control = control_of(weights_of(method, policy))
        assert control == ("exact, three times exact" if method.endswith("three times") else "control"), method
    todo = [("gdn", *x) for x in arms(TINY)]
    groups = list(stages._side_by_side(todo, 3))
    assert [x for group in groups for x in group] == todo and max(map(len, groups)) <= 3
    assert all(len({METHODS[method].times for _, method, _, _ in group}) == 1 for group in groups)


def test_results_of_other_text_are_not_gone_on_with(tmp_path: Path) -> None:
    about: dict[str, Any] = {"corpus": dict(load_corpus(TINY.text).about)}
    (tmp_path / "out.json").write_text(json.dumps({"about": about, "rows": []}))
    assert restore(tmp_path / "out.json", tmp_path / "run", TINY) == 0
    about["corpus"] |= {"sha256": "0" * 64, "python": "3.9.1"}
    (tmp_path / "out.json").write_text(json.dumps({"about": about, "rows": []}))
    with pytest.raises(ValueError, match=r"measured on other text.*000000000000.*3\.9\.1.*without --resume"):
        restore(tmp_path / "out.json", tmp_path / "run", TINY)


def test_slopes_of_an_exact_model_are_what_its_gradient_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact loss is smooth: a short way along its gradient it changes by what the gradient says, in every part."""
    lab = Lab(TINY, tmp_path, "cpu")
    lab.save("gdn", 0, build("gdn", TINY.size, 0))
    monkeypatch.setattr(slopes, "POLICIES", ("exact", "fp8 token"))
    monkeypatch.setattr(slopes, "_BATCHES", 2)
    slopes.slopes(lab, float("inf"), "gdn")
    exact, fp8 = (json.loads((tmp_path / "parts" / f"slopes gdn {n}.json").read_text()) for n in slopes.POLICIES)
    for part, (promised, _) in exact["promised"].items():
        assert exact["kept"]["0.01"][part][0] == pytest.approx(promised, rel=0.05, abs=0.02), part
    assert exact["promised"]["loss"][0] > 0.1 and exact["promised"] != fp8["promised"]


def test_generating_is_timed_between_two_tokens_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    monkeypatch.setattr(generate, "SECONDS", 0.0)
    monkeypatch.setattr(generate, "LONG", 24)
    args = argparse.Namespace(device="cpu", tiny=True, checkpoint=None, commit="c")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        row = generate.measure("trained/eager/2", args)
    assert row["rounds"] == 3 and row["tokens_per_s"] * row["ms"] == pytest.approx(2000)
    assert row["states_gb_fp32"] == pytest.approx(4e-9 * 2 * TINY.size.linear * 2 * 16 * 16)
    names = [p.split("/") for p in generate.parts(False)]
    assert {n for _, arm, n in names} == {"1", "64", "256"} and {m for m, _, _ in names} == {"shaped", "trained"}
    for name, policy in generate.policies().items():
        assert name == "exact" or policy == NEAREST[name]


def test_docs_have_the_numbers_of_the_results() -> None:
    root = Path(__file__).parents[1]
    results = root / "benchmarks" / "results" / "quality.json"
    if not results.exists():
        pytest.skip("not measured yet")
    import runpy

    made = runpy.run_path(str(root / "docs" / "write_quality.py"))["pages"](json.loads(results.read_text()))
    assert all("/tmp" not in text and "/root" not in text for text in made.values())
    for name, text in made.items():
        assert (root / name).read_text(encoding="utf-8") == text, f"{name}: run python docs/write_quality.py"
