"""The Triton replay kernels in Triton's interpreter. Run by `test_triton_replay.py` with TRITON_INTERPRET=1.

It runs the kernels' own Python on the CPU: it finds wrong indices, masks, orders and formulas. It says nothing about
layouts or races. The interpreter cuts off bits where a GPU rounds to bf16, so operands of bf16 inputs are the same
numbers in fp32 tensors there, and results are asked for in fp32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels.reference import replay as reference

pytest.importorskip("triton")

from lattn_compile.kernels import replay, replay_run
from lattn_compile.kernels.replay_windows import Windows, windows
from lattn_compile.ops import dispatch
from lattn_compile.testing import make_inputs
from tests.kernels.replay_calls import Call, errors, make_call, poisoned

SMALL: dict[str, Any] = {"key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 6, "lengths": (6,), "gap": 1}
CASES: dict[str, dict[str, Any]] = {
    "gdn-int8-ragged": {"fmt": "int8", "lengths": (5, 0, 2)},
    "gdn-exact-after-a-cursor": {"fmt": None, "cursor": (3,), "keep": True},
    "kda-fp8-after": {"kind": "kda", "fmt": "fp8/4x2", "readout": "after_write", "value_heads": 1},
    "kda-ring": {"kind": "kda", "lengths": (2, 3), "cursor": (1, 2), "keep": True, "value_heads": 1},
    "gdn-pairs-ring": {"paired": True, "fmt": "fp8/8x1", "lengths": (4,), "cursor": (2,), "keep": True},
    "gla-nvfp4": {"kind": "gla", "fmt": "nvfp4", "value_dim": 20, "value_heads": 1, "lengths": (5,)},
    "delta-window-17": {"kind": "delta", "window": 17, "lengths": (18,), "value_heads": 1, "fmt": "int8/2x4"},
    "gdn-int8-records": {"factors": "int8", "lengths": (6, 0, 3)},
    "gdn-bf16-records-ring": {"factors": "bf16", "lengths": (5, 2), "cursor": (1, 3), "keep": True},
    "kda-fp8-records-after-ring": {
        "kind": "kda", "factors": "fp8_e4m3", "fmt": "fp8", "readout": "after_write", "keep": True, "cursor": (2,),
    },
    "retention-fp8-records": {"kind": "retention", "factors": "fp8_e4m3", "fmt": "fp8", "keep": True},
    "gla-int8-records-after": {"kind": "gla", "factors": "int8", "fmt": None, "readout": "after_write"},
    "delta-window-17-int8-records": {
        "kind": "delta", "factors": "int8", "window": 17, "lengths": (18,), "value_heads": 1,
    },
}  # fmt: skip
HALF: dict[str, dict[str, Any]] = {
    "gdn-int8": {"fmt": "int8", "lengths": (9,)},
    "kda-fp8-after": {"kind": "kda", "fmt": "fp8", "readout": "after_write", "value_heads": 1},
    "gdn-from-no-codes": {"fmt": "int8", "cursor": (3,), "lengths": (9,)},
    "gdn-pairs-ring": {"paired": True, "fmt": "fp8/8x1", "lengths": (4,), "cursor": (2,), "keep": True},
    "kda-fp8-records-ring": {"kind": "kda", "factors": "fp8_e4m3", "fmt": "fp8", "keep": True, "cursor": (2,)},
    "delta-keys-of-any-norm": {"kind": "delta", "fmt": "int8", "factors": "int8", "qk_l2norm": False},
}


def _worst(call: Call) -> dict[str, float]:
    with poisoned():
        got = call.both()
    return errors(got, call.want())


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_are_the_float64_reference(name: str) -> None:
    found = _worst(make_call(**SMALL | CASES[name]).inputs_in(torch.float32))
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("name", HALF)
def test_bf16_inputs_lose_no_more_than_fp32_ones(name: str) -> None:
    call = make_call(**SMALL | HALF[name]).inputs_in(torch.bfloat16)
    found = _worst(dataclasses.replace(call, results=torch.float32))
    assert max(found.values()) <= 1e-5, found


def test_stretches_of_any_length_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call(**SMALL | {"fmt": "int8", "lengths": (5, 3), "value_heads": 1}).inputs_in(torch.float32)
    whole = call.both()
    monkeypatch.setattr(replay_run, "_SHARE", 0.0)
    monkeypatch.setattr(replay_run, "_SMALL", 0)
    with poisoned():
        parts = call.both()
    assert all(torch.equal(x.nan_to_num(7.5), whole[name].nan_to_num(7.5)) for name, x in parts.items())


def test_strides_of_any_kind_are_read_and_written() -> None:
    call = make_call("kda", **SMALL | {"fmt": "int8", "lengths": (3,), "value_heads": 1}).inputs_in(torch.float32)
    wide = call.map(lambda x: torch.stack((x, x), -1)[..., 0])
    assert not wide.case.q.is_contiguous()
    whole = call.both()
    assert all(torch.equal(x.nan_to_num(7.5), whole[name].nan_to_num(7.5)) for name, x in wide.both().items())


def test_no_tokens_leave_everything_as_it_is() -> None:
    call = make_call(**SMALL | {"lengths": (0, 0), "gap": 0, "cursor": (2, 0), "keep": True}).inputs_in(torch.float32)
    got, want = call.both(), call.both(reference)
    assert errors(got, want) == dict.fromkeys(want, 0.0)
    assert got["anchor"].equal(call.case.anchor) and got["anchor"].data_ptr() != call.case.anchor.data_ptr()


def test_a_reset_clears_the_state_and_a_zero_beta_divides_nothing() -> None:
    call = make_call("kda", **SMALL | {"fmt": None, "value_heads": 1}).inputs_in(torch.float32)
    assert call.case.g is not None and call.case.beta is not None
    call.case.g[3] = -torch.inf
    call.case.beta[2::2] = 0.0
    found = _worst(call)
    assert max(found.values()) <= 1e-5, found


def test_what_is_refused_is_refused_with_a_reason() -> None:
    def reason(key_dim: int = 128, value_dim: int = 128, spec: str | None = "int8", **more: Any) -> str | None:
        return replay.supports(
            device=more.pop("device", torch.device("cuda")),
            dtype=more.pop("dtype", torch.float32),
            key_dim=key_dim,
            value_dim=value_dim,
            factors=more.pop("factors", None),
            quantize=None if spec is None else Quantizer(parse(spec), **more),
        )

    for spec in (None, "int8", "int8/*x*", "int8/16x16", "fp8", "fp8/128x1", "nvfp4", "bf16", "fp16", "fp32"):
        assert reason(spec=spec) is None
    assert reason(7, 5) is None and reason(256, 256, "int8") is None
    assert "float64" in str(reason(dtype=torch.float64))
    for factors in ("int8", "fp8_e4m3", "bf16"):
        assert reason(factors=factors) is None
    assert reason(256, 256, factors="bf16") is None and "one scale" in str(reason(256, 256, factors="int8"))
    assert "fp16" in str(reason(factors="fp16"))
    assert "stochastic" in str(reason(rounding="stochastic"))
    assert "hadamard_k" in str(reason(rotation="hadamard_k"))
    assert "block_v = 48" in str(reason(spec="int8/*x48"))
    assert "fit" in str(reason(256, 256, "int8/*x*"))
    assert "257" in str(reason(257))


def test_records_and_windows_are_part_of_what_is_asked() -> None:
    work = dispatch.Work(torch.device("cuda"), torch.float32, 128, 128, Quantizer(parse("int8")), None, 16)
    assert dispatch.choose("replay", "auto", work) == dispatch.choose("replay", "triton", work) == "triton"
    half: dict[str, Any] = {"inputs": torch.bfloat16}
    for proven in (
        half | {"window": 32},
        half | {"quantize": Quantizer(parse("nvfp4"))},
        half | {"quantize": Quantizer(parse("int8/*x16"))},
        half | {"factors": "fp8_e4m3"},
        {"factors": "int8"},
        {"quantize": Quantizer(parse("fp8/128x1")), "paired": True},
        {"quantize": None},
    ):
        other = dataclasses.replace(work, **proven)  # type: ignore[arg-type]
        assert dispatch.choose("replay", "auto", other) == "triton"
    for unproven in (
        half | {"window": 33},
        half | {"paired": True},
        half | {"factors": "int8", "quantize": Quantizer(parse("nvfp4"))},
        {"window": 17},
        {"inputs": torch.float16},
        {"key_dim": 64},
        {"quantize": Quantizer(parse("nvfp4"))},
        {"quantize": Quantizer(parse("int8/*x16"))},
    ):
        other = dataclasses.replace(work, **unproven)  # type: ignore[arg-type]
        assert dispatch.choose("replay", "auto", other) == "reference"
        assert dispatch.choose("replay", "triton", other) == "triton"
    wide = dataclasses.replace(work, key_dim=256, value_dim=256, factors="int8")
    assert dispatch.choose("replay", "auto", wide) == "reference"
    assert "one scale" in str(dispatch.objection("replay", wide))


@pytest.mark.parametrize(("window", "beta", "g"), [(16, 1.9, 0.0), (16, 1.9, -0.01), (32, 1.9, -0.01)])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
def test_one_repeated_key_stays_within_the_bounds(inputs: torch.dtype, window: int, beta: float, g: float) -> None:
    """Where an inverse by powers of `A` is wrong by up to 1e19, and errors add up that alternate in sign."""
    tokens = 256 if inputs is torch.float32 else 96
    call = make_call(**SMALL | {"fmt": None, "value_heads": 1, "lengths": (tokens,), "window": window})
    call = dataclasses.replace(call.inputs_in(inputs), results=torch.float32)
    case = call.case
    assert case.g is not None and case.beta is not None
    case.g.fill_(g)
    case.beta.fill_(beta)
    case.k.copy_(case.k[5:6].clone())
    found = errors(call.forward(), call.exact().forward(reference))
    bound = 5e-6 + 2.0**-24 * (tokens if g == 0 else min(tokens, -1 / g))
    if inputs is torch.bfloat16:
        # Read to 16 bits, since outputs of bf16 inputs have 8.
        assert found.pop("o") <= 2.0**-13
    assert max(found.values()) <= bound, (found, bound)
    if inputs is torch.bfloat16:
        found = errors(call.backward(), call.exact().backward(reference))
        assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("write", ["replay", "two_precision"])
def test_the_op_hands_its_tensors_to_the_kernel(write: str) -> None:
    """A state with a ring that a call left behind, gone on with, and all gradients; what `ops/replay.py` does
    around."""
    x = make_inputs("gdn", lengths=[3, 2], key_heads=1, value_heads=2, key_dim=8, value_dim=6)
    tensors = [t for t in x.tensors() if t is not None]
    op, found = torch.ops.lattn.replay, {}
    for implementation in ("triton", "reference"):
        options = {**x.options(), "write": write, "state_format": "int8/*x1", "window": 4}
        options["implementation"] = implementation
        _, anchor, *ring = op(*x.tensors()[:6], *(None,) * 6, *x.tensors()[6:], None, None, None, **options)
        read = torch.ops.lattn.qdq_state(anchor, state_format="int8/*x1") if write == "two_precision" else None
        carried = [t if t.numel() else None for t in (anchor, *ring)]
        carried = [t if t is None else t.detach().requires_grad_() for t in (carried[0], read, *carried[1:])]
        leaves = [t.detach().requires_grad_() for t in tensors[:5]]
        cursor = torch.tensor([3, 2], dtype=torch.int32)
        out = op(*leaves, *carried, *x.tensors()[6:], None, None, cursor, **options)
        out = [t for t in out if t.numel()]
        given = [t for t in (*leaves, *carried) if t is not None]
        grads = torch.autograd.grad(sum(t.square().sum() for t in out), given)
        found[implementation] = [*out, *grads]
    for mine, theirs in zip(found["triton"], found["reference"], strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7


def _run(table: Windows, i: int, first: int, last: int) -> range:
    """As `replay_windows.runs` finds it."""
    ends = []
    for rank in (first, last):
        at = int(table.at[rank])
        step = at - int(table.origin[i]) + (int(table.begin[at]) + int(table.place[i]) < rank)
        ends.append(min(max(step, 0), int(table.count[i])))
    return range(*ends)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_window_has_one_rank_and_every_stretch_its_windows(data: st.DataObject) -> None:
    window, together = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    lengths = data.draw(st.lists(st.integers(0, 18), min_size=1, max_size=7))
    leads = [data.draw(st.integers(0, window - 1)) for _ in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    sequences = (torch.tensor(x) for x in (starts, lengths, leads))
    table = windows(*sequences, window, sum(lengths), together=together)
    counts = [-(-(lead + n) // window) if n else 0 for n, lead in zip(lengths, leads, strict=True)]
    assert table.count.tolist() == counts
    found = {}
    for i, count in enumerate(counts):
        for j in range(count):
            found[int(table.begin[table.origin[i] + j] + table.place[i])] = (i, j)
    assert sorted(found) == list(range(sum(counts)))
    assert all((int(table.owner[r]), int(table.step[r])) == window_of for r, window_of in found.items())
    assert bool((table.owner[len(found) :] == -1).all())
    size = data.draw(st.integers(1, 9))
    for first in range(0, table.ranks, size):
        last = min(first + size, table.ranks)
        here = {found[r] for r in range(first, last) if r in found}
        assert here == {(i, j) for i in range(len(counts)) for j in _run(table, i, first, last)}
        # What is kept between two stretches has a place of its own.
        cut = [i for i, count in enumerate(counts) if 0 < _run(table, i, 0, last).stop < count]
        assert len({int(table.place[i]) for i in cut}) == len(cut) and max(table.place.tolist()) < table.together


def test_a_cut_at_a_flush_changes_no_bit() -> None:
    call = make_call(**SMALL | {"fmt": "int8", "lengths": (7,), "value_heads": 1}).inputs_in(torch.float32)
    whole, case = call.forward(), call.case
    half = Call(dataclasses.replace(case, lengths=case.lengths - 3), {}).forward()
    rest = dataclasses.replace(case, starts=case.starts + 4, lengths=case.lengths - 4, anchor=half["anchor"])
    again = Call(rest, {}).forward()
    o = torch.where(half["o"].isnan(), again["o"], half["o"])
    assert torch.equal(o.nan_to_num(7.5), whole["o"].nan_to_num(7.5)) and torch.equal(again["anchor"], whole["anchor"])
