"""The in-place Triton kernels in Triton's interpreter. Run by `test_triton_packed.py` with TRITON_INTERPRET=1.

Token and exact mode against the emulated Triton kernel: the same bits. Replay and two_precision against the reference:
semantics §8. The interpreter says nothing about layouts, nor about bf16, which it does not round as a GPU does.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.errors import UnsupportedError
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.ops import dispatch
from lattn_compile.policy import Exact, Policy, Replay, Token, TwoPrecision
from tests.kernels.gluon_stand_in import interpreted
from tests.kernels.packed_calls import SCALE, Rows, Tokens, differing, make_tokens

pytest.importorskip("triton")

from lattn_compile.kernels import packed, packed_launch, packed_token_cuda
from lattn_compile.kernels.common import codec
from lattn_compile.recurrence import gates as gates_in_torch

ALL = "LATTN_COMPILE_ALL" in os.environ

DECODE: dict[str, tuple[Policy, str, dict[str, Any]]] = {
    "exact": (Policy(write=Exact()), "gdn", {"key_dim": 20, "value_dim": 5}),
    "int8": (Policy("int8"), "gdn", {"value_heads": 3}),
    "int8-tiles-kda-after": (Policy("int8/8x8", readout="after_write"), "kda", {"key_dim": 12, "value_dim": 20}),
    "fp8-columns-additive": (Policy("fp8/*x1"), "gla", {"key_dim": 7, "value_heads": 1, "value_dim": 6}),
    "nvfp4": (Policy("nvfp4"), "delta", {"key_dim": 17, "value_dim": 12, "value_heads": 1}),
}
if ALL:
    DECODE |= {
        "fp16": (Policy("fp16"), "retention", {}),
        "int8-128": (Policy("int8"), "kda", {"key_dim": 128, "value_dim": 128, "key_heads": 2, "value_heads": 4}),
        "int8-256": (Policy("int8"), "gdn", {"key_dim": 256, "value_dim": 128}),
        "exact-60x64": (Policy(write=Exact()), "kda", {"key_dim": 60, "value_dim": 64, "value_heads": 3}),
        "int8-64": (Policy("int8/*x16"), "gdn", {"key_dim": 64, "value_dim": 256}),
    }

WINDOWED: dict[str, tuple[Policy, str, dict[str, Any]]] = {
    "gdn-int8": (Policy("int8", write=Replay(3)), "gdn", {}),
    "kda-int8-after": (
        Policy("int8/8x8", write=Replay(3), readout="after_write"),
        "kda",
        {"key_dim": 12, "value_dim": 20, "value_heads": 1},
    ),
    "additive-nvfp4": (Policy("nvfp4", write=Replay(2)), "linear", {"value_heads": 1}),
    "two-precision": (Policy(write=TwoPrecision(3)), "gdn", {"value_heads": 3, "value_dim": 24}),
    "two-precision-kda": (Policy(write=TwoPrecision(2, read="int8")), "kda", {"value_heads": 1}),
}
if ALL:
    WINDOWED |= {
        "gdn-int8-128": (Policy("int8", write=Replay(8)), "gdn", {"key_dim": 128, "value_dim": 128, "value_heads": 3}),
        "kda-fp8-60": (Policy("fp8", write=Replay(4)), "kda", {"key_dim": 60, "value_dim": 64}),
        "delta-int8-256": (Policy("int8/*x16", write=Replay(2)), "delta", {"key_dim": 256, "value_dim": 256}),
    }

SLOTS = [4, 0, 6]


@pytest.fixture(params=["table", "wide 8"])
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A row of the launch table: the one that is chosen, or one whose programs take all the tiles that there are."""
    name: str = request.param
    if name != "table":
        monkeypatch.setattr(packed_launch, "PROGRAMS", 1)
        for form in packed_launch.CHOSEN:
            monkeypatch.setitem(packed_launch.CHOSEN, form, (name,) * 3)
    return name


def _seeded(kind: str, sizes: dict[str, Any], *args: Any, seed: int = 0, **more: Any) -> Tokens:
    return make_tokens(kind, *args, seed=seed, **sizes, **more)


@pytest.mark.parametrize("name", DECODE)
def test_a_step_has_the_bits_of_the_emulated_kernel(name: str, row: str) -> None:
    """From slots full of NaN and out of order: one token, then several, ragged."""
    policy, kind, sizes = DECODE[name]
    rows: Rows | None = None
    for seed, (tokens, lengths) in enumerate([(1, None), (3, [3, 0, 2])]):
        x = _seeded(kind, sizes, tokens, SLOTS, lengths=lengths, seed=seed)
        rows = rows or Rows(policy, kind, x, 8)
        want_o, want, _ = rows.emulated(x, "triton")
        before = rows.records(x.slots)
        free = rows.records(torch.tensor([1, 2, 3, 5, 7]))
        o = rows.step(x, "triton")
        assert torch.equal(o, want_o)
        for i in range(3):
            idle = lengths is not None and lengths[i] == 0
            expected = before if idle else want
            got = rows.records(x.slots)
            assert differing({n: y[i] for n, y in got.items()}, {n: y[i] for n, y in expected.items()}) == []
        assert differing(free, rows.records(torch.tensor([1, 2, 3, 5, 7]))) == []
        assert rows.cursor.tolist() == [0, -1, -1, -1, 0, -1, 0, -1]


def test_nvfp4_of_every_size_and_of_no_number_has_the_bits_of_the_emulated_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Columns from 2^-120 to 2^120, then NaN and infinities. Its bytes are made a word at a time and must be those that
    are made value by value: an emulated state does not say what zeros were encoded as."""
    rows: Rows | None = None
    fast = packed._fast
    for seed in range(3):
        x = _seeded("gdn", {"key_dim": 20, "value_dim": 72}, 1, SLOTS, seed=seed)
        v = x.x[2]
        v.mul_(torch.exp2((torch.arange(72) * 37 % 241 - 120).float()))
        if seed == 1:
            v[0, ..., 3], v[1, ..., 70], v[2, ..., 5] = torch.nan, torch.inf, -torch.inf
        rows = rows or Rows(Policy("nvfp4"), "gdn", x, 8)
        single = rows.copy()
        want, _, _ = rows.emulated(x, "triton")
        got = rows.step(x, "triton")
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
        monkeypatch.setattr(packed, "_fast", lambda *_: 0)
        single.step(x, "triton")
        monkeypatch.setattr(packed, "_fast", fast)
        assert differing(rows.records(x.slots), single.records(x.slots)) == []


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gdn": ("gdn", {"key_heads": 2, "value_heads": 4}),
    "kda": ("kda", {"key_heads": 1, "value_heads": 3}),
    "linear": ("linear", {"key_heads": 1, "value_heads": 1}),
}


@pytest.mark.parametrize("row", ["heads", "half heads"] if ALL else ["half heads"])
@pytest.mark.parametrize("name", HEADS if ALL else ["gdn"])
def test_whole_heads_are_what_columns_are(name: str, row: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`packed_token_cuda.py` against `packed_token.py`, from slots full of rubbish on, one of them fresh, one padding,
    and with a scale whose products with codes need more bits than most. Sums run in numpy's order here, not in a
    thread's: a code may be off by one."""
    kind, sizes = HEADS[name]
    kernel = interpreted(packed_token_cuda, tmp_path)
    monkeypatch.setattr(kernel, "scales_of", lambda amax, largest, fast: codec.scales(amax, largest))
    monkeypatch.setattr(packed, "whole_heads", lambda: kernel)
    monkeypatch.setattr(packed_launch, "FULL", {"whole": 1, "half": 1})
    monkeypatch.setattr(packed, "_fits_whole_heads", lambda *_: packed_launch.CHOSEN["int8"][0] == row)
    both: list[Rows] = []
    for seed in range(3):
        x = make_tokens(kind, 1, [4, 0, -1], seed=seed, key_dim=128, value_dim=128, has=[True, seed > 0, True], **sizes)
        both = both or [Rows(Policy("int8"), kind, x, 6) for _ in range(2)]
        if seed == 1:
            both[0].tensors["state_scale"].view(-1)[3] = 65535 * 2.0**-20
            for other, tensor in both[1].tensors.items():
                tensor.copy_(both[0].tensors[other])
        found = []
        for rows, way in zip(both, ("narrow", row), strict=True):
            monkeypatch.setitem(packed_launch.CHOSEN, "int8", (way,) * 3)
            found.append(rows.step(x, "triton"))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6, equal_nan=True)
        kept = [rows.records(x.slots[:2]) for rows in both]
        torch.testing.assert_close(kept[0]["state_scale"], kept[1]["state_scale"], rtol=2e-5, atol=0)
        apart = (kept[0]["codes"].int() - kept[1]["codes"].int()).abs()
        assert apart.max() <= 1 and apart.double().mean() < 1e-3
        assert torch.equal(both[0].cursor, both[1].cursor)


@pytest.mark.parametrize("name", ["exact", "int8", "nvfp4", "gdn-int8", "two-precision"])
def test_codes_may_lie_value_first(name: str) -> None:
    """`[slots, HV, V, K]` in memory: the same bits, in place."""
    policy, kind, sizes = DECODE[name] if name in DECODE else WINDOWED[name]
    plain: Rows | None = None
    for seed, (tokens, lengths) in enumerate([(1, None), (4, [4, 0, 3]), (1, None)]):
        x = _seeded(kind, sizes, tokens, SLOTS, lengths=lengths, seed=seed)
        if plain is None:
            plain, turned = Rows(policy, kind, x, 8), Rows(policy, kind, x, 8, v_first=True)
            where = [y.data_ptr() for y in turned.tensors.values()]
        assert torch.equal(turned.step(x, "triton"), plain.step(x, "triton"))
        assert differing(turned.records(x.slots), plain.records(x.slots)) == []
    if plain.call.window is not None:
        for rows in (plain, turned):
            rows.flush(x.slots, "triton")
        assert differing(turned.records(x.slots), plain.records(x.slots)) == []
    assert [y.data_ptr() for y in turned.tensors.values()] == where


def _near(a: Tensor, b: Tensor, bound: float = 3e-6) -> None:
    assert a.shape == b.shape
    if a.dtype.itemsize == 1:
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    elif a.numel():
        assert float((a.double() - b.double()).norm()) <= bound * float(b.double().norm()) + 1e-30


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_is_the_reference_from_the_same_stored_rows(name: str, row: str) -> None:
    """Appends, reads, flushes of calls of one and of several tokens, ragged; each call from the kernel's own rows."""
    policy, kind, sizes = WINDOWED[name]
    rows: Rows | None = None
    for seed, (tokens, lengths) in enumerate([(1, None), (4, [4, 0, 3]), (1, None)]):
        x = _seeded(kind, sizes, tokens, SLOTS, lengths=lengths, seed=seed)
        rows = rows or Rows(policy, kind, x, 8)
        reference, begin = rows.copy(), rows.copy()
        want = reference.step(x, "reference")
        got = rows.step(x, "triton")
        _near(got, want)
        assert rows.cursor.tolist() == reference.cursor.tolist()
        for field, y in reference.records(x.slots).items():
            _near(rows.records(x.slots)[field], y)
        if lengths is not None:  # several tokens in one call are as many calls of one
            for t in range(tokens):
                one = begin.step(x.at(t, torch.tensor(lengths)), "triton")
                for i, n in enumerate(lengths):
                    assert t >= n or torch.equal(one[i, 0], got[i, t])
            assert differing(begin.records(x.slots), rows.records(x.slots)) == []
    assert rows is not None
    reference = rows.copy()
    for one, implementation in ((reference, "reference"), (rows, "triton")):
        one.flush(torch.tensor(SLOTS, dtype=torch.int32), implementation)
    assert rows.cursor.tolist() == reference.cursor.tolist() == [0, -1, -1, -1, 0, -1, 0, -1]
    for field, y in reference.records(torch.tensor(SLOTS)).items():
        if not field.startswith("ring_"):
            _near(rows.records(torch.tensor(SLOTS))[field], y)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_fresh_sequence_reads_what_its_own_call_has_stored(name: str, row: str) -> None:
    """Seven tokens pass a window's end twice, in slots that are full of another sequence."""
    policy, kind, sizes = WINDOWED[name]
    clean_x = _seeded(kind, sizes, 7, SLOTS)
    clean, used = Rows(policy, kind, clean_x, 8), Rows(policy, kind, clean_x, 8)
    want = clean.step(clean_x, "triton")
    used.step(_seeded(kind, sizes, 4, SLOTS, seed=1), "triton")
    got = used.step(_seeded(kind, sizes, 7, SLOTS, has=[False] * 3), "triton")
    assert torch.equal(got, want)
    assert differing(used.records(clean_x.slots), clean.records(clean_x.slots)) == []


@pytest.mark.parametrize("policy", [Policy("int8"), Policy("int8", write=Replay(3))], ids=["token", "replay"])
def test_padding_fresh_packed_and_wrong_slots(policy: Policy) -> None:
    """Padding as often as one likes gives zeros; a slot that there is not gives NaN; neither writes. A fresh sequence
    starts at zero whatever its slot's cursor says. Rows behind the last sequence are zeros."""
    x = make_tokens("gdn", 2, [5, 2, -1, 9, 5], lengths=[2, 2, 2, 2, 2], has=[False] * 5)
    x.x[2][0] = torch.nan  # padding's inputs may be anything
    rows = Rows(policy, "gdn", x, 6)
    rows.cursor.fill_(1)
    before = rows.copy()
    o = _unchecked(rows, x, padding_slot=5)
    assert not o[[0, 2, 4]].any() and o[3].isnan().all()
    alone = Rows(policy, "gdn", x, 6)
    own = make_tokens("gdn", 2, [5, 2, -1, 9, 5], lengths=[2, 2, 2, 2, 2])
    one = dataclasses.replace(own, x=[t[1:2] for t in own.x], slots=x.slots[1:2], lengths=None)
    assert torch.equal(_unchecked(alone, one)[0], o[1])
    at = torch.tensor([2])
    assert differing(alone.records(at), rows.records(at)) == []
    rest = torch.tensor([0, 1, 3, 4, 5])
    assert differing(before.records(rest), rows.records(rest)) == []
    line = make_tokens("gdn", 0, [1, 3, 0], lengths=[2, 0, 1], packed=True)
    many = Rows(policy, "gdn", line, 6)
    o = _unchecked(many, line)
    assert o[0, :3].any() and not o[0, 3].any()
    assert many.cursor.tolist() == ([0, 0] if policy.write == Token() else [1, 2]) + [-1] * 4


def _unchecked(rows: Rows, x: Tokens, padding_slot: int = -1) -> Tensor:
    """The kernel itself: on a CPU the op looks at slots and lengths, on a GPU nobody does."""
    call = rows.call
    work = dispatch.Work(x.x[0].device, torch.float32, rows.heads.K, rows.heads.V, _quantizer(call))
    return packed.step(
        *x.x, rows.tensors, rows.cursor, x.slots, x.has, x.ends, x.lengths, rule=rows.rule, scale=SCALE,
        qk_l2norm=True, padding_slot=padding_slot, write=call.write, readout=call.readout, quantize=work.quantize,
        window=call.window, anchor=call.anchor,
    )  # fmt: skip


def _quantizer(call: Any) -> Quantizer | None:
    return None if call.write == "exact" else Quantizer(parse(call.state_format))


def test_no_tokens_and_no_sequences_change_nothing() -> None:
    for policy in (Policy("int8"), Policy("int8", write=Replay(3))):
        x = make_tokens("gdn", 1, SLOTS)
        rows = Rows(policy, "gdn", x, 8)
        rows.step(x, "triton")
        before = rows.copy()
        none = dataclasses.replace(x, x=[t[:, :0] for t in x.x])
        assert rows.step(none, "triton").shape[1] == 0
        nobody = dataclasses.replace(x, x=[t[:0] for t in x.x], slots=x.slots[:0])
        assert rows.step(nobody, "triton").shape[0] == 0
        if policy.write != Token():
            rows.flush(x.slots[:0], "triton")
        assert differing(before.tensors, rows.tensors) == [] and torch.equal(before.cursor, rows.cursor)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_raw_gates_are_those_of_torch(kind: str) -> None:
    """A slice of an engine's packed projection as q, k and v; gates before their activations."""
    x = make_tokens(kind, 1, SLOTS, key_heads=1, value_heads=2)
    rows = Rows(Policy("int8"), kind, x, 8)
    shape = x.x[3].shape
    raw, a_log = torch.randn(shape), torch.rand(2)
    bias, raw_beta = torch.randn(shape[2:]), torch.randn(shape[:3])
    g, beta = gates_in_torch.softplus_gate(raw, a_log, bias), gates_in_torch.write_strength(raw_beta)
    line = torch.cat([y.flatten(2) for y in x.x[:3]], -1)
    q, k, v = (y.unflatten(2, (-1, 16)) for y in line.split([16, 16, 32], 2))
    other = rows.copy()
    want = other.step(dataclasses.replace(x, x=[q, k, v, g, beta]), "reference")
    got = packed.step(
        q, k, v, raw, raw_beta, rows.tensors, rows.cursor, x.slots, None, None, None, rule=rows.rule, scale=SCALE,
        qk_l2norm=True, padding_slot=-1, write="token", readout="before_write",
        quantize=_quantizer(rows.call), gates=packed.RawGates(a_log, bias, raw_beta=True),
    )  # fmt: skip
    _near(got, want)
    for field, y in other.records(x.slots).items():
        _near(rows.records(x.slots)[field], y)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Policy("int8", rounding="stochastic"), "stochastic"),
        (Policy("int8", feedback="int4"), "feedback"),
        (Policy("int8", write=Replay(4, factors="int8")), "records"),
        (Policy("int8/*x48"), "48"),
    ],
)
def test_what_is_refused_is_refused_by_name_before_anything_is_written(policy: Policy, says: str) -> None:
    x = make_tokens("gdn", 1, SLOTS, value_dim=64)
    rows = Rows(policy, "gdn", x, 8)
    if policy.rounding == "stochastic":
        quantize = Quantizer(parse("int8"), policy.rounding)
        why = dispatch.packed_objection(dispatch.Work(torch.device("cpu"), torch.float32, 16, 64, quantize), "token")
        assert why is not None and says in why
        return
    before = rows.copy()
    with pytest.raises(UnsupportedError, match=says):
        rows.step(x, "triton")
    assert differing(before.tensors, rows.tensors) == []


@pytest.mark.parametrize("write", [Token(), Replay(3)], ids=["token", "replay"])
def test_a_compiled_step_is_the_op_that_a_graph_may_record(write: Any) -> None:
    x = make_tokens("gdn", 1, [0, 1])
    eager, traced = (lc.QuantizedState(Policy("int8", write=write, kernel="triton")) for _ in range(2))
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if "lattn" in str(node.target))
        return graph

    step = torch.compile(lambda tokens: traced.step(*tokens), backend=backend, fullgraph=True)
    for state in (eager, traced):
        state.step(*x.x)
    for _ in range(3):
        assert torch.equal(step(x.x), eager.step(*x.x))
    assert set(found) == {f"lattn.{'replay_' if write == Replay(3) else 'decode_'}device_"}
    assert differing(eager.held(), traced.held()) == []


@pytest.mark.parametrize(
    ("spec", "write", "other", "taken"),
    [
        (None, "exact", {}, True),
        ("int8", "token", {}, True),
        ("nvfp4", "token", {"inputs": torch.bfloat16}, True),
        ("int8", "replay", {"window": 16}, True),
        ("fp8", "two_precision", {"window": 16}, True),
        ("int8", "replay", {"window": 17}, False),
        ("nvfp4", "replay", {"window": 8}, False),
        ("fp16", "replay", {"window": 8}, False),
        ("int8", "token", {"inputs": torch.float16}, False),
        ("int8/*x48", "token", {}, False),
        ("int8", "token", {"device": torch.device("cpu")}, False),
    ],
)
def test_auto_takes_what_a_gpu_has_proven(spec: str | None, write: str, other: dict[str, Any], taken: bool) -> None:
    quantize = None if spec is None else Quantizer(parse(spec))
    work = dispatch.Work(torch.device("cuda"), torch.float32, 128, 128, quantize)
    work = dataclasses.replace(work, **other)
    assert dispatch.packed("reference", work, write=write) is None
    assert (dispatch.packed("auto", work, write=write) is not None) == taken
