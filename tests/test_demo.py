"""The demo's pieces, small: its whole length is for people, its promises are held here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lattn_compile as lc
from lattn_compile import demo
from lattn_compile.errors import LattnError, RewriteError, UnsupportedError
from lattn_compile.report import Report

pytest.importorskip("transformers")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two short sequences and two layers: what is tested does not depend on size, and compiling does."""
    sizes = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32}
    monkeypatch.setattr(demo, "SIZES", demo.SIZES | sizes | {"intermediate_size": 32})
    for name, value in {"BATCH": 2, "LENGTH": 48, "PREFIX": 16}.items():
        monkeypatch.setattr(demo, name, value)
    yield
    torch.compiler.reset()


def test_what_is_held_out_occurs_nowhere_in_training_and_is_counted_once() -> None:
    text = demo.load_text()
    train = " ".join(bytes(text.train.tolist()).decode().split())
    windows = [bytes(w.tolist()) for w in text.heldout.flatten(0, 1)]
    assert len(windows) == demo.HELDOUT_BATCHES * demo.BATCH and len(windows[0]) == demo.LENGTH + 1
    assert len(train) > 200_000 and len(set(windows)) == len(windows)
    # Half a window, whitespace apart; pages repeat each other, and one repeated page would make the numbers a fraud.
    middles = [" ".join(w[64:192].decode(errors="ignore").split()) for w in windows]
    assert not [m for m in middles if m in train]
    assert text.batch(torch.Generator().manual_seed(0)).shape == (demo.BATCH, demo.LENGTH + 1)


@pytest.mark.parametrize("name", sorted(demo.MODELS))
def test_every_model_has_three_linear_layers_and_a_memory(name: str) -> None:
    before = torch.random.get_rng_state()
    model = demo.build_model(name, seed=3)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random numbers were touched"
    assert model.config.layer_types.count("linear_attention") == 3
    gates = [m for m in model.modules() if hasattr(m, "A_log")]
    assert len(gates) == 3
    for gate in gates:
        decay = gate.A_log.exp().flatten().max() * F.softplus(gate.dt_bias)
        assert decay.min() >= 1e-3 * 0.999 and decay.max() <= 1e-1 * 1.001, "it remembers 10 to 1000 tokens"
    again, other = demo.build_model(name, seed=3), demo.build_model(name, seed=4)
    pairs = list(zip(model.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and not all(torch.equal(a, c) for a, _, c in pairs)


def test_a_missing_compiler_is_reported_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "cxx_compiler", lambda: None)
    monkeypatch.setattr(demo, "build_model", lambda *a: pytest.fail("work was done before the check"))
    with pytest.raises(UnsupportedError, match=r"C\+\+ compiler.*apt-get install g\+\+"):
        demo.run(model="no such model")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(LattnError, match=r"model: got 'qwen3next'.*Did you mean 'qwen3_next'"):
        demo.run(model="qwen3next")
    with pytest.raises(LattnError, match="steps: got 0"):
        demo.run(steps=0)


def test_missing_transformers_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'lattn-compile\[hf\]'"):
        demo.build_model()


def test_training_lowers_the_loss_and_a_snapshot_restores_it_exactly(small: None) -> None:
    lab = demo.Lab(demo.build_model(), demo.load_text(batches=1))
    start, untrained = lab.bits(demo.LENGTH), lab.snapshot()
    assert start.shape == (demo.BATCH, demo.LENGTH - demo.PREFIX) and 7 < start.mean() < 9, (
        "an untrained model knows 8 bits of nothing"
    )
    lab.fit(30, demo.LENGTH)
    trained = lab.bits(demo.LENGTH)
    assert trained.mean() < start.mean() - 1
    lab.restore(untrained)
    assert torch.equal(lab.bits(demo.LENGTH), start)
    lab.fit(30, demo.LENGTH)
    torch.testing.assert_close(lab.bits(demo.LENGTH), trained)


def test_a_linear_layer_left_alone_fails_the_demo(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(lc, "last_report", lambda: Report())
    lab = demo.Lab(demo.build_model(), demo.load_text(batches=1))
    with pytest.raises(RewriteError, match="0 of 1 linear layers rewritten"):
        lab.compile("int8")


def test_a_quantized_state_with_the_exact_numbers_fails_the_demo() -> None:
    bits = torch.tensor([[2.0, 2.5]], dtype=torch.float64)
    row = demo.Row("int8", "PTQ", bits, bits.clone(), None, 100)
    with pytest.raises(RewriteError, match="exactly the exact model's numbers under int8"):
        demo._must_differ(row)
    demo._must_differ(replace(row, bits=bits + 1e-9))


def test_the_cost_is_that_of_the_paired_windows() -> None:
    exact = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], dtype=torch.float64)
    shift = torch.tensor([[0.1, 0.1], [0.2, 0.2], [0.0, 0.2], [0.5, -0.1]], dtype=torch.float64)
    row = demo.Row("int8", "PTQ", exact + shift, exact, exact, 4112)
    assert row.cells() == ("int8", "PTQ", "2.6500", "+0.1500 ± 0.0289", "0.1750", "4,112 B")
    assert demo.Row("exact", "8 steps", exact, None, None, 16384).cells()[3:5] == ("-", "-")


def test_all_means_every_other_format_in_token_mode() -> None:
    names = [p.state.name for p in demo._other_formats("int8")]
    assert sorted(names) == ["bf16", "fp16", "fp8_e4m3", "nvfp4"]
    assert all(isinstance(p.write, lc.Token) for p in demo._other_formats("int8"))


def test_the_whole_demo_in_small(small: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(demo, "load_text", lambda load=demo.load_text: load(batches=1))
    assert demo.run(steps=4) == 0
    out, err = capsys.readouterr()
    assert "1 of 1 site rewritten" in out
    table = out[: out.index("\nbits/byte:")].splitlines()[-7:]
    assert [row.split("  ")[0] for row in table[2:]] == ["exact fp32"] * 2 + ["int8/*x64 token"] * 3
    assert "16,384 B" in table[2] and "4,112 B" in table[4]
    assert "compiling forward and backward ..." in err, "compiling must not look like hanging"
