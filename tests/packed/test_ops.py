"""`lattn::decode_` and `lattn::replay_`: the bits of `lc.linear_attention` under the same policy, in every mode."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from lattn_compile.carry import Call
from lattn_compile.errors import DtypeError, LattnError, PolicyError, SequenceError, ShapeError, StateError
from lattn_compile.formats import Int8
from lattn_compile.functional import linear_attention
from lattn_compile.packed import layout, ops
from lattn_compile.policy import Chunk, Exact, Policy, Replay, Token, TwoPrecision
from tests.packed.cases import SITE, Step, bits, case_of, cover, heads_of, rubbish, rule_of, same, steps

SLOTS = 7
LENGTHS = [1, 6, 2]


class Packed:
    """Stored tensors as an engine holds them, stepped by the ops."""

    def __init__(self, policy: Policy, heads: layout.Heads, dtype: torch.dtype, slots: int, rule: str) -> None:
        self.call, self.heads, self.rule = layout.call_of(policy), heads, rule
        self.tensors = layout.empty(self.call, heads, slots, "cpu", dtype)
        self.cursor = torch.full((slots,), -1, dtype=torch.int32)
        self.position = torch.zeros(slots, dtype=torch.int64) if policy.rounding == "stochastic" else None

    def step(self, x: Step, slots: Tensor | None = None, has: Tensor | None = None, ids: Any = None, **kw: Any) -> Any:
        op = getattr(torch.ops.lattn, ops.OPS[self.call.write])
        options = {**self.call.op_options(), "rule": self.rule, "scale": 0.3, "qk_l2norm": True, "site_id": SITE}
        state = (list(self.tensors.values()), self.cursor, slots, has, x.cu_seqlens, x.sequence_lengths)
        ids = ids if self.position is not None else None
        return op(*x.tokens, *state, self.position, ids, **options, **kw)

    def row(self, slot: int) -> list[Tensor]:
        return [x[slot].clone() for x in (*self.tensors.values(), self.cursor)]


def emulated(x: Step, policy: Policy, state: Any, ids: Tensor, rule: str) -> Any:
    """The same call of `lc.linear_attention`; under `Exact` always token by token, as a cache is stepped."""
    options = {"scale": 0.3, "rule": rule}
    if isinstance(policy.write, Exact):
        call = Call(**{n: v for n, v in policy.op_kwargs().items() if n in Call._fields}).op_options()
        lengths = (x.cu_seqlens, None, x.sequence_lengths, None)
        return torch.ops.lattn.decode(*x.tokens, state, *lengths, **options, **call, qk_l2norm=True)[:2]
    return linear_attention(
        *x.tokens,
        policy=policy,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=x.cu_seqlens,
        sequence_lengths=x.sequence_lengths,
        sequence_ids=ids,
        site_id=SITE,
        **options,
    )


@pytest.mark.parametrize("number", range(4))
def test_packed_has_the_bits_of_emulated_over_every_pair_of_choices(number: int) -> None:
    """Outputs, codes, scales, residuals, rings and cursors, after calls of several lengths; a pairwise cover."""
    mine = cover()[number::4]
    assert len(mine) > 10
    for assignment in mine:
        case = case_of(assignment)
        run = steps(case, 4, LENGTHS)
        heads, dtype = heads_of(run[0]), torch.float64 if case.dtype is torch.float64 else torch.float32
        packed = Packed(case.policy, heads, dtype, 4 if assignment["slots"] == "none" else SLOTS, rule_of(case))
        slots, has, ids = None, None, torch.tensor([5, 2**33, 7, 9])
        if assignment["slots"] != "none":
            rubbish(packed.tensors)
            slots = torch.tensor([4, 0, 6, 2], dtype=torch.int32)
        if assignment["slots"] == "fresh":
            packed.cursor.fill_(2)  # an engine that keeps no cursor of free slots
        state: Any = None
        for i, x in enumerate(run):
            o, state = emulated(x, case.policy, state, ids, rule_of(case))
            if assignment["slots"] == "fresh":
                # Until its first token a sequence has no state.
                has = torch.stack([y.counts for y in run[:i]]).sum(0) > 0 if i else torch.zeros(4, dtype=torch.bool)
            if assignment["slots"] == "padding" and x.cu_seqlens is None:
                got = packed.step(*_with_padding(x, slots), ids=torch.tensor([1, 5, 2**33, 7, 9]), padding_slot=5)
                assert not got[0].any()
                got = got[1:]
            else:
                got = packed.step(x, slots, has, ids)
            assert same(o, got), (str(case), i)
        stored = torch.stack([x.counts for x in run]).sum(0) > 0
        at = torch.arange(4) if slots is None else slots.long()
        for name, want in layout.pack(state, packed.call).items():
            have = packed.tensors[name].index_select(0, at) if want.dtype.itemsize > 1 else None
            have = packed.tensors[name].view(torch.uint8)[at].view(want.dtype) if have is None else have
            assert torch.equal(bits(have)[stored], bits(want)[stored]), (str(case), name)
        if not isinstance(state, Tensor):
            assert torch.equal(packed.cursor[at][stored], state.cursor[stored])


def _with_padding(x: Step, slots: Any) -> tuple[Step, Tensor]:
    """A padding sequence in front, whose inputs are NaN."""
    tokens = [None if y is None else torch.cat([torch.full_like(y[:1], torch.nan), y]) for y in x.tokens]
    lengths = x.sequence_lengths
    lengths = None if lengths is None else torch.cat([lengths.new_tensor([x.tokens[0].shape[1]]), lengths])
    return Step(tokens, None, lengths, x.counts), torch.cat([torch.tensor([5]), slots]).to(torch.int32)


POLICIES = {
    "token": Policy(Int8(8)),
    "token, stochastic, feedback": Policy(Int8(8), rounding="stochastic", feedback="int4"),
    "replay": Policy(Int8(8), write=Replay(4, factors="int8")),
    "replay, nvfp4": Policy("nvfp4", write=Replay(3), rotation="hadamard_k"),
    "two precisions": Policy(write=TwoPrecision(4)),
    "exact": Policy(write=Exact()),
}
any_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def _ready(policy: Policy, sequences: int = 3, **kwargs: Any) -> tuple[Packed, list[Step]]:
    case = case_of({"size": (16, 16), "group": 2, "dtype": torch.float32, "layout": "whole", **kwargs})
    run = steps(case, sequences, [2, 3, 1])
    return Packed(policy, heads_of(run[0]), torch.float32, SLOTS, "delta"), run


@any_policy
def test_slots_that_no_sequence_names_keep_their_bytes(policy: Policy) -> None:
    packed, run = _ready(policy)
    rubbish(packed.tensors)
    slots = torch.tensor([3, -1, 1])
    before = [packed.row(i) for i in range(SLOTS)]
    for x in run:
        o = packed.step(x, slots)
        assert not o[1].any() and o[[0, 2]].isfinite().all()
    for i in range(SLOTS):
        unchanged = all(same(a, b) for a, b in zip(before[i], packed.row(i), strict=True))
        assert unchanged == (i not in (1, 3)), i


@any_policy
def test_a_call_without_tokens_changes_nothing(policy: Policy) -> None:
    packed, run = _ready(policy)
    packed.step(run[0], torch.tensor([0, 1, 2]))
    before = [packed.row(i) for i in range(SLOTS)]
    nothing = Step([None if y is None else y[:, :0] for y in run[1].tokens], None, None, run[1].counts)
    assert packed.step(nothing, torch.tensor([0, 1, 2])).shape[1] == 0
    muted = Step(run[1].tokens, None, torch.tensor([0, 0, 0]), run[1].counts)
    assert not packed.step(muted, torch.tensor([0, 1, 2]), torch.tensor([True, False, True])).any()
    assert all(same(a, b) for i in range(SLOTS) for a, b in zip(before[i], packed.row(i), strict=True))


@any_policy
def test_a_sequence_has_the_bits_it_has_alone(policy: Policy) -> None:
    packed, run = _ready(policy)
    alone, _ = _ready(policy)
    ids = torch.tensor([3, 4, 5])
    for x in run:
        o = packed.step(x, torch.tensor([0, 1, 2]), ids=ids)
        one = Step([None if y is None else y[1:2] for y in x.tokens], None, None, x.counts[1:2])
        assert same(alone.step(one, torch.tensor([6]), ids=ids[1:2])[0], o[1])
    assert all(same(a, b) for a, b in zip(alone.row(6), packed.row(1), strict=True))


@any_policy
def test_a_flush_leaves_what_the_end_of_a_window_leaves(policy: Policy) -> None:
    packed, run = _ready(policy)
    slots = torch.tensor([2, 5, 0])
    packed.step(run[0], slots)
    window = packed.call.window
    before = [packed.row(i) for i in range(SLOTS)]
    state = layout.unpack(dict(packed.tensors), packed.call, packed.cursor, packed.heads, rule="delta")
    row = (state if isinstance(state, Tensor) else state.dense())[5:6].clone()
    flush = _flush_options(packed)
    ordered = (list(packed.tensors.values()), packed.cursor)
    torch.ops.lattn.flush_(*ordered, torch.tensor([5, -1]), packed.position, None, **flush)
    for i in range(SLOTS):
        changed = not all(same(a, b) for a, b in zip(before[i], packed.row(i), strict=True))
        assert changed == (i == 5 and window is not None)
    if window is None:
        return
    assert packed.cursor[5] == 0
    # The state is handed over anew: what a dense start of these values would store.
    want = layout.handed_over(row, packed.call, packed.heads, rule="delta", site_id=SITE)
    assert all(same(want[name][0], x[5]) for name, x in packed.tensors.items())
    torch.ops.lattn.flush_(*ordered, None, packed.position, None, **flush)
    assert packed.cursor[slots].tolist() == [0, 0, 0]


def _flush_options(packed: Packed) -> dict[str, Any]:
    h = packed.heads
    call = packed.call._replace(window=packed.call.window or 1)
    options = {n: x for n, x in call.op_options().items() if n not in ("readout", "implementation", "gate")}
    return {**options, "heads": list(h[:4]), "decay": h.decay, "has_beta": h.has_beta, "site_id": SITE}


@pytest.mark.parametrize("policy", [*list(POLICIES.values())[:3], Policy(write=TwoPrecision(4, read=Int8(8)))], ids=str)
def test_the_ops_keep_the_promises_of_their_schemas(policy: Policy) -> None:
    packed, run = _ready(policy)
    op = getattr(torch.ops.lattn, ops.OPS[packed.call.write]).default
    state = [x.clone() for x in packed.tensors.values()]
    arguments = (state, packed.cursor.clone(), torch.tensor([0, -1, 4]), None, None, torch.tensor([1, 2, 0]))
    options = {**packed.call.op_options(), "scale": 0.3}
    ids = None if packed.position is None else torch.tensor([1, 2, 3])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(op, (*run[0].tokens, *arguments, packed.position, ids), options, test_utils=checks)
    if packed.call.window is not None:
        flush = (state, packed.cursor.clone(), None, packed.position, None)
        torch.library.opcheck(torch.ops.lattn.flush_.default, flush, _flush_options(packed), test_utils=checks)


def test_a_chunk_policy_has_no_packed_form() -> None:
    with pytest.raises(PolicyError, match="Inside a chunk the state is exact"):
        layout.call_of(Policy(Int8(), write=Chunk(8)))


BAD: dict[str, tuple[type[LattnError], str, dict[str, Any]]] = {
    "one slot twice": (StateError, "a slot of its own", {"slots": torch.tensor([1, 1, 2])}),
    "no such slot": (StateError, "slots 0 to 6", {"slots": torch.tensor([1, 7, 2])}),
    "a slot below": (StateError, "slots 0 to 6", {"slots": torch.tensor([1, -2, 2])}),
    "too few slots": (SequenceError, r"\[N\] = \[3\]", {"slots": torch.tensor([1, 2])}),
    "no slots named": (SequenceError, "None beside 7 slots", {"slots": None}),
    "slots as floats": (DtypeError, "state_indices", {"slots": torch.tensor([1.0, 2.0, 3.0])}),
    "has_initial_state as ints": (
        DtypeError,
        "has_initial_state",
        {"slots": torch.tensor([1, 2, 3]), "has": torch.tensor([1, 0, 1])},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_slots_are_refused_before_anything_is_written(name: str) -> None:
    error, text, arguments = BAD[name]
    packed, run = _ready(Policy(Int8(8)))
    before = [packed.row(i) for i in range(SLOTS)]
    with pytest.raises(error, match=text):
        packed.step(run[0], **arguments)
    assert all(same(a, b) for i in range(SLOTS) for a, b in zip(before[i], packed.row(i), strict=True))


def test_tensors_of_another_policy_are_refused_by_name() -> None:
    packed, run = _ready(Policy(Int8(8)))
    slots = torch.tensor([0, 1, 2])
    scale = packed.tensors["state_scale"]
    packed.tensors["state_scale"] = scale[..., :1].contiguous()
    with pytest.raises(ShapeError, match=r"state\[state_scale\]: got torch.float32 \[7, 4, 1, 1\]"):
        packed.step(run[0], slots)
    del packed.tensors["state_scale"]
    with pytest.raises(StateError, match=r"got 1 tensors; want 2: codes, state_scale"):
        packed.step(run[0], slots)
    packed.tensors["state_scale"] = scale[:1].expand(7, -1, -1, -1)
    with pytest.raises(ShapeError, match="several values in one place"):
        packed.step(run[0], slots)
    packed.tensors["state_scale"] = scale
    with pytest.raises(DtypeError, match=r"dtype=torch\.float64"):
        packed.step(dataclasses.replace(run[0], tokens=[x.double() for x in run[0].tokens]), slots)
    stochastic, run = _ready(Policy(Int8(8), rounding="stochastic"))
    stochastic.position = None
    with pytest.raises(StateError, match="position"):
        stochastic.step(run[0], slots)


@pytest.mark.parametrize("write", [Token(), Replay(4), TwoPrecision(4)], ids=str)
def test_stored_bytes_are_those_that_the_policy_promises(write: Any) -> None:
    chosen = Policy(Int8(8), write=write)
    packed, _ = _ready(chosen)
    held = sum(x.numel() * x.element_size() for x in packed.tensors.values())
    cursor = 0 if isinstance(write, Token) else 4 * SLOTS
    assert held + cursor == SLOTS * chosen.nbytes(2, 4, 16, 16)
