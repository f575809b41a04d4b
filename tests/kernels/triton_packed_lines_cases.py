"""`packed_lines.py` in Triton's interpreter, by a stand-in for Gluon and matrix units. Run by `test_triton_packed.py`.

Every step from the kernel's own stored rows against the reference in float64, as `triton_packed_cases.py` does for the
other kernels; and what a call promises bit for bit.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lattn_compile.policy import Policy, Replay, TwoPrecision
from lattn_compile.recurrence import gates

pytest.importorskip("triton")

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import packed, packed_lines_call
from tests.kernels.lines_stand_in import interpreted
from tests.kernels.packed_calls import SCALE, Rows, Tokens, differing, make_tokens

ALL = "LATTN_COMPILE_ALL" in os.environ
SLOTS = [2, 0]
SIZES = {"key_dim": 128, "value_dim": 128}
CASES: dict[str, tuple[Policy, str, dict[str, Any]]] = {
    "int8": (Policy("int8", write=Replay(3)), "gdn", {}),
    "int8 12": (Policy("int8", write=Replay(12)), "gdn", {}),
    "fp8": (Policy("fp8", write=Replay(3)), "delta", {"key_heads": 2}),
    "additive": (Policy("int8", write=Replay(2)), "retention", {}),
    "two precision": (Policy(write=TwoPrecision(3)), "gdn", {}),
    "two precision 12": (Policy(write=TwoPrecision(12)), "gdn", {}),
    "two precision, additive": (Policy(write=TwoPrecision(2)), "retention", {}),
}


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Has these kernels step what they can, without a GPU; every answer to whether they do."""
    found: list[bool] = []
    fits = packed_lines_call.fits

    def seen(*args: Any, **kwargs: Any) -> bool:
        found.append(fits(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(packed_lines_call, "fits", seen)
    monkeypatch.setattr(packed_lines_call, "STATES", 1)
    monkeypatch.setattr(packed, "interpreted", lambda: False)
    monkeypatch.setattr(packed, "_capable", lambda _, least: least == (8, 9))
    monkeypatch.setattr(packed_lines_call, "step", interpreted(tmp_path).step)
    return found


def _near(a: Tensor, b: Tensor, what: str) -> None:
    if a.dtype.itemsize == 1:
        # A number between two codes may be rounded to either.
        assert float((a.view(torch.uint8) != b.view(torch.uint8)).sum()) <= 2, what
    elif "scale" in what:  # of 16 bits, two units of the last place
        assert bool(((a.double() - b.double()).abs() <= 2**-15 * b.double().abs()).all()), what
    elif a.numel():
        assert float((a.double() - b.double()).norm()) <= 3e-6 * float(b.double().norm()) + 1e-30, what


def _tokens(name: str, tokens: int, slots: list[int], seed: int, **more: Any) -> Tokens:
    _, kind, sizes = CASES[name]
    return make_tokens(kind, tokens, slots, seed=seed, **{**SIZES, **sizes}, **more)


@pytest.mark.parametrize("name", CASES if ALL else ["int8", "fp8", "two precision 12"])
def test_a_window_is_the_reference_from_the_same_stored_rows(name: str, taken: list[bool]) -> None:
    policy, kind, _ = CASES[name]
    rows: Rows | None = None
    window = policy.write.window
    for seed in range(3 if window > 3 else window + 1):
        x = _tokens(name, 1, SLOTS, seed)
        rows = rows or Rows(policy, kind, x, 4)
        if window > 3 and seed == 1:  # the last places of a long window, with records of one that was
            for n, y in rows.tensors.items():
                if n.startswith("ring_"):
                    y[x.slots.long(), 1:] = y[x.slots.long(), :1] * torch.linspace(0.5, 1, y.shape[1] - 1).view(
                        -1, *[1] * (y.dim() - 2)
                    )
            rows.cursor[x.slots.long()] = window - 2
        oracle = rows.copy(torch.float64)
        want = oracle.step(x.in_dtype(torch.float64), "reference")
        _near(rows.step(x, "triton"), want, f"outputs {seed}")
        assert rows.cursor.tolist() == oracle.cursor.tolist()
        theirs = oracle.records(x.slots)
        stored = rows.cursor[x.slots.long()] >= 0
        for n, y in rows.records(x.slots).items():
            a, b = ((z.view(torch.uint8) if z.dtype.itemsize == 1 else z) for z in (y, theirs[n]))
            if not n.startswith("ring_"):
                a, b = a[stored], b[stored]
            _near(a, b, f"{n} {seed}")
    assert all(taken)


@pytest.mark.parametrize("name", ["int8", "two precision"])
def test_several_tokens_have_the_bits_of_one_at_a_time(name: str, taken: list[bool]) -> None:
    """Over a window's end, ragged; and however many heads a program has, in whatever order codes lie."""
    policy, kind, _ = CASES[name]
    x = _tokens(name, 4, SLOTS, 0, lengths=[4, 2], value_heads=8, key_heads=4)
    whole = Rows(policy, kind, x, 4)
    cut = whole.copy()
    o = whole.step(x, "triton")
    assert x.lengths is not None
    ones = [cut.step(x.at(t, x.lengths), "triton") for t in range(4)]
    assert torch.equal(o, torch.cat(ones, 1))
    assert differing(whole.records(x.slots), cut.records(x.slots)) == []
    assert all(taken)


@pytest.mark.parametrize("name", ["int8", "two precision"])
def test_bits_do_not_depend_on_how_it_is_launched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a program, codes value-first, codes that begin anywhere."""
    policy, kind, _ = CASES[name]
    plan = [_tokens(name, 1, [0], seed, value_heads=8, key_heads=4) for seed in range(3)]
    first: tuple[Tensor, dict[str, Tensor]] | None = None
    for way in ("2", "4", "8", "turned", "odd") if ALL else ("2", "8", "turned", "odd"):
        rows = Rows(policy, kind, plan[0], 1, v_first=way == "turned")
        if way.isdigit():
            monkeypatch.setattr(packed_lines_call, "heads_of", lambda *_, single, own=int(way): own)
        if way == "odd":
            for n, x in rows.tensors.items():
                if n.endswith("codes") and x.dtype.itemsize == 1:
                    buffer = torch.zeros(x.numel() + 1, dtype=torch.uint8)
                    rows.tensors[n] = buffer[1:].view(x.dtype).view(x.shape)
        o = torch.cat([rows.step(x, "triton") for x in plan])
        got = rows.records(plan[0].slots)
        first = first or (o, got)
        assert torch.equal(o, first[0]), way
        assert differing(got, first[1]) == [], way


@pytest.mark.parametrize("name", ["int8", "two precision"])
def test_gates_of_raw_projections(name: str, taken: list[bool]) -> None:
    """As an engine's layer left them, to a window's end and into the next one."""
    policy, kind, _ = CASES[name]
    plan = [_tokens(name, 1, SLOTS, seed) for seed in range(4)]
    rows = Rows(policy, kind, plan[0], 4)
    call = rows.call
    a_log, bias = torch.tensor([0.3, -0.5]), torch.tensor([0.1, 0.7])
    for seed, x in enumerate(plan):
        raw, raw_beta = torch.randn(x.x[3].shape), torch.randn(x.x[4].shape)
        g, beta = gates.softplus_gate(raw, a_log, bias), gates.write_strength(raw_beta, allow_neg_eigval=True)
        oracle = rows.copy(torch.float64)
        given = dataclasses.replace(x, x=[*x.x[:3], g, beta])
        want = oracle.step(given.in_dtype(torch.float64), "reference")
        o = packed.step(
            *x.x[:3], raw, raw_beta, rows.tensors, rows.cursor, x.slots, None, None, None, rule=rows.rule, scale=SCALE,
            qk_l2norm=True, padding_slot=-1, write=call.write, readout=call.readout,
            quantize=Quantizer(parse(call.state_format)), window=call.window, anchor=call.anchor,
            gates=packed.RawGates(a_log, bias, raw_beta=True, beta_scale=2.0),
        )  # fmt: skip
        _near(o, want, f"outputs {seed}")
        theirs = oracle.records(x.slots)
        for n, y in rows.records(x.slots).items():
            if n.startswith("ring_"):
                _near(y, theirs[n], f"{n} {seed}")
    assert all(taken)
