"""Steps that a CUDA graph may record: no value is read on the host, whatever the mode; and a kernel for packed rows is
asked first, and gets what it was promised.

A tensor on the meta device has no values: reading one (`item`, `tolist`, `bool`, `nonzero`) raises. So whoever runs
through there reads nothing.
"""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.errors import LattnError, SequenceError, StateError, UnsupportedError
from lattn_compile.ops import dispatch
from lattn_compile.packed import flush, layout, ops, rows
from lattn_compile.policy import Policy, Replay, TwoPrecision
from tests.ops.cases import inputs
from tests.packed.cases import same

HEADS = layout.Heads(2, 4, 16, 24, "head", True)
POLICIES = {
    "token": Policy(lc.Int8(8)),
    "token, stochastic, feedback": Policy(lc.Nvfp4(), rounding="stochastic", feedback="int4"),
    "replay": Policy(lc.Int8(8), write=Replay(4, factors="int8")),
    "two precisions": Policy(write=TwoPrecision(4)),
    "exact": Policy(write=lc.Exact()),
}
any_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def tokens(batch: int, count: int, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    made = inputs(batch, count, key_dim=16, value_dim=24, dtype=torch.float32, seed=seed)[:5]
    return [x.to(device) for x in made]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to("meta")


def test_reading_a_value_on_the_meta_device_raises() -> None:
    x = torch.ones(2, device="meta")
    for read in (lambda: x[0].item(), x.tolist, lambda: bool(x.any()), lambda: x.nonzero()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()


@any_policy
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "cu_seqlens"])
def test_a_step_reads_no_value(policy: Policy, packed: bool) -> None:
    call = layout.call_of(policy)
    state = list(layout.empty(call, HEADS, 7, "meta").values())
    position = torch.zeros(7, dtype=torch.int64, device="meta") if policy.rounding == "stochastic" else None
    x = tokens(1 if packed else 3, 6, "meta")
    cu = ints(0, 2, 3, 6) if packed else None
    has = torch.ones(3, dtype=torch.bool, device="meta")
    slots = (torch.empty(7, dtype=torch.int32, device="meta"), ints(4, -1, 2), has)
    ids = None if position is None else ints(1, 2, 3)
    # The function behind the op: the op itself would take the fake's shapes for an answer.
    o = ops._step(*x, state, *slots, cu, ints(1, 2, 1), position, ids, scale=0.3, **call.op_options())
    assert o.shape == x[2].shape
    if call.window is not None:
        options = {n: y for n, y in call.op_options().items() if n not in ("readout", "gate")}
        own = {"heads": HEADS[:4], "decay": "head", "has_beta": True}
        flush._flush(state, *slots[:2], position, ids, **own, **options)


@any_policy
def test_staging_stepping_drafting_and_moving_read_no_value(policy: Policy) -> None:
    state = lc.QuantizedState(policy).stage(torch.empty(3, 4, 16, 24, device="meta"), seen=5)
    state.step(*tokens(3, 2, "meta"))
    assert state.exact is None
    state.verify(*tokens(3, 4, "meta"))
    state.accept(ints(4, 0, 2))
    state.verify(*tokens(3, 4, "meta"))
    state.accept(1)
    state.flush()
    pool = lc.QuantizedState(policy).allocate(HEADS, 7, device="meta")
    indices = {"state_indices": ints(6, -1, 0), "padding_slot": 99}
    pool.step(*tokens(3, 2, "meta"), **indices, has_initial_state=torch.ones(3, dtype=torch.bool, device="meta"))
    pool.verify(*tokens(3, 2, "meta"), **indices)
    pool.accept(ints(1, 2, 0))
    pool.flush(indices["state_indices"])
    pool.dense(), pool.index_select(0, ints(1, 2)), pool.clone(), pool.zero_()


def test_a_pool_on_a_device_reads_no_value() -> None:
    pool = lc.StatePool({"a": (POLICIES["replay"], HEADS), "b": (POLICIES["token"], HEADS)}, 3, device="meta")
    buffer = torch.empty(4, dtype=torch.int32, device="meta")
    a, b = pool.allocate(sequence_id=4), pool.allocate()
    pool.stage(a, {site: torch.zeros(4, 16, 24) for site in pool}, seen=2)
    assert pool.indices([a, None, b], out=buffer) is buffer
    pool.copy(a, b)
    pool.restore(pool.snapshot(a), b)
    pool.free(b)
    with pytest.raises(StateError, match="every slot once"):
        pool.indices([a, a])  # what nobody looks at on a device is looked at where it is made
    with pytest.raises(SequenceError, match=r"int32 \[N\], N >= 5"):
        pool.indices([None] * 5, out=buffer)


def test_the_buffer_of_a_recorded_step_is_filled_up_with_padding() -> None:
    pool = lc.StatePool({"a": (POLICIES["token"], HEADS)}, 3)
    buffer = torch.full((4,), 7, dtype=torch.int32)
    slots = [pool.allocate(), pool.allocate()]
    pool.indices([slots[1], slots[0]], out=buffer)
    assert buffer.tolist() == [slots[1], slots[0], -1, -1]


@any_policy
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "cu_seqlens"])
def test_where_nobody_looks_a_slot_that_there_is_not_gives_nan_and_writes_nothing(policy: Policy, packed: bool) -> None:
    state = lc.QuantizedState(policy).allocate(HEADS, 3)
    x = tokens(3, 2)
    flat = [y.reshape(1, 6, *y.shape[2:]) for y in x] if packed else x
    options = {"cu_seqlens": torch.tensor([0, 2, 4, 6]) if packed else None}
    want = lc.QuantizedState(policy).allocate(HEADS, 3)
    lost, known = torch.tensor([2, 5, 0]), torch.tensor([2, 9, 0])
    with mock.patch.object(rows, "check_slots"):  # as on a device
        o = state.step(*flat, state_indices=lost, **options)
    right = want.step(*flat, state_indices=known, padding_slot=9, **options)
    o, right = (y.reshape(3, 2, 4, 24) for y in (o, right))
    assert o[1].isnan().all() and not right[1].any()
    assert torch.equal(o[[0, 2]], right[[0, 2]])
    assert all(same(y, want.held()[name]) for name, y in state.held().items())
    with pytest.raises(StateError, match="slots 0 to 2"):
        state.step(*flat, state_indices=lost, **options)


@any_policy
def test_codes_may_lie_value_first(policy: Policy) -> None:
    """`[slots, HV, V, K]` in memory, as pools of serving engines have it: the same numbers."""
    mine = lc.QuantizedState(policy).allocate(HEADS, 4, v_first=True)
    plain = lc.QuantizedState(policy).allocate(HEADS, 4)
    where = mine.tensors["codes"].data_ptr()
    assert mine.tensors["codes"].transpose(-1, -2).is_contiguous() and mine.nbytes == plain.nbytes
    slots = torch.tensor([3, 1])
    for seed, count in enumerate((1, 3, 2)):
        x = tokens(2, count, seed=seed)
        assert same(mine.step(*x, state_indices=slots), plain.step(*x, state_indices=slots))
    assert mine.tensors["codes"].data_ptr() == where
    assert all(torch.equal(y[[1, 3]].float(), plain.tensors[name][[1, 3]].float()) for name, y in mine.tensors.items())
    triton = lc.QuantizedState(Policy.from_dict({**policy.to_dict(), "kernel": "triton"})).allocate(HEADS, 2)
    codes = triton.tensors["codes"]
    triton.tensors["codes"] = codes.transpose(0, 1).contiguous().transpose(0, 1)  # neither way
    with pytest.raises(UnsupportedError, match="contiguous rows"):
        triton.step(*tokens(2, 1))


class _Kernel(types.SimpleNamespace):
    """Stands for a kernel for packed rows: notes what it is called with."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def step(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
        self.calls.append((rest, options))
        return torch.zeros_like(v)

    def flush(self, *rest: Any, **options: Any) -> None:
        self.calls.append((rest, options))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_kernel_for_packed_rows_is_asked_first(device: str) -> None:
    """It gets tensors by name, rounded gates and no rows taken out; on a CPU after everything was looked at."""
    kernel, chosen = _Kernel(), Policy(lc.Int8(8), write=Replay(4, factors="int8"), gate="bf16")
    state = lc.QuantizedState(chosen).allocate(HEADS, 7, device=device)
    call, x = state.call, tokens(2, 1, device)
    stored, slots = list(state.tensors.values()), torch.tensor([2, 5], dtype=torch.int32).to(device)
    asked: list[Any] = []

    def packed(implementation: str, work: dispatch.Work, **more: Any) -> _Kernel:
        asked.append((implementation, work, more))
        return kernel

    arguments = (stored, state.cursor, slots, None, None, None, None, None)
    with mock.patch.object(dispatch, "packed", packed):
        ops._step(*x, *arguments, scale=0.3, rule="delta", qk_l2norm=True, **call.op_options())
        if device == "cpu":
            for bad in ({"slots": [2, 9]}, {"slots": [2, 2]}, {"lengths": [1, 2]}, {"cursor": 4}, {"gate": 0.5}):
                before = state.cursor.clone()  # type: ignore[union-attr]
                wrong = [stored, state.cursor, torch.tensor(bad.get("slots", [2, 5])), None, None]
                wrong += [torch.tensor(bad["lengths"]) if "lengths" in bad else None, None, None]
                state.cursor[2] = bad.get("cursor", -1)  # type: ignore[index]
                y = [x[0], x[1], x[2], x[3] + bad.get("gate", 0.0) * 100, x[4]]
                with pytest.raises(LattnError):
                    ops._step(*y, *wrong, scale=0.3, **call.op_options())
                state.cursor.copy_(before)  # type: ignore[union-attr]
        options = {n: y for n, y in call.op_options().items() if n not in ("readout", "gate")}
        flush._flush(stored, state.cursor, slots, None, None, heads=HEADS[:4], decay="head", has_beta=True, **options)
    implementation, work, more = asked[0]
    assert (implementation, more) == ("auto", {"write": "replay", "anchor": None})
    assert (work.window, work.factors, work.key_dim, work.value_dim, work.dtype) == (4, "int8", 16, 24, torch.float32)
    assert len(kernel.calls) == 2, "a refused call never reaches the kernel"
    (g, beta, named, cursor, indices, *_), given = kernel.calls[0]
    assert list(named) == list(state.tensors) and all(named[n] is y for n, y in state.tensors.items())
    assert beta is x[4] and cursor is state.cursor and indices is slots
    assert (given["window"], given["factors"], given["padding_slot"], given["qk_l2norm"]) == (4, "int8", -1, True)
    assert given["quantize"].fmt == lc.Int8(8)
    if device == "cpu":
        assert torch.equal(g, x[3].bfloat16().float()) and not torch.equal(g, x[3])


@pytest.mark.parametrize("name", ["token", "replay"])
def test_a_report_names_the_step_that_kernels_serve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose ops a trace here can hold but nobody run."""
    from lattn_compile import backend

    torch._dynamo.reset()
    state = lc.QuantizedState(POLICIES[name]).allocate(HEADS, 3)
    x = tokens(3, 1)
    monkeypatch.setattr(lc.QuantizedState, "_op", lambda self, name, *rest: f"{name}device_")
    monkeypatch.setattr("lattn_compile.packed.state.is_one_step", lambda *rest: False)
    monkeypatch.setattr(backend.private, "compile_with_inductor", lambda *rest: lambda *args: (x[2],))
    torch.compile(lambda *y: state.step(*y), backend="lattn_compile", fullgraph=True)(*x)
    report = lc.last_report()
    assert report is not None
    op = "lattn::replay_device_" if name == "replay" else "lattn::decode_device_"
    assert [(site.op, site.kernel, site.verdict) for site in report.sites] == [(op, "triton", "rewritten")]
