"""The windowed reference cut into calls: the bits it keeps, the records it leaves, and what it costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lattn_compile.formats.factors import FACTORS
from lattn_compile.kernels.reference import replay, span
from lattn_compile.recurrence import BY_NAME
from lattn_compile.ring import Ring
from tests.kernels.reference.replay_cases import Case, cotangents, make_case, relative

MODES: dict[str, dict[str, Any]] = {
    "replay": {},
    "replay after": {"readout": "after_write"},
    **{f"replay {factors}": {"factors": factors} for factors in FACTORS if factors},
    "replay int8 after": {"factors": "int8", "readout": "after_write"},
    "two_precision": {"paired": True},
    "two_precision bf16": {"paired": True, "anchor_format": "bf16"},
}


def _bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert torch.equal(x.nan_to_num(), want[name].nan_to_num()), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "linear"])
@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(2, 64, 64), (1, 60, 20), (3, 7, 5)])
def test_a_run_cut_at_flushes_has_the_bits_of_the_uncut_run(
    kind: str, mode: str, heads: int, key_dim: int, value_dim: int
) -> None:
    for window in (1, 5, 8):
        case = make_case(
            kind, (6 * window + 3,), window=window, cursor=(2 % window,), dtype=torch.float32, key_heads=heads,
            value_heads=2 * heads, key_dim=key_dim, value_dim=value_dim, **MODES[mode],
        )  # fmt: skip
        first = window - int(case.cursor[0])
        _bits(case.in_pieces(first, first + window, first + 4 * window), case.forward())


@pytest.mark.parametrize("mode", MODES)
def test_sequences_of_one_phase_cut_at_their_flushes_keep_their_bits_and_their_neighbours(mode: str) -> None:
    case = make_case(
        "gdn", (45, 8, 19), window=8, dtype=torch.float32, key_dim=32, value_dim=20, cursor=(3, 3, 3), **MODES[mode]
    )
    _bits(case.in_pieces(5, 13, 29), case.forward())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", BY_NAME)
def test_a_run_cut_inside_windows_continues_with_its_records(kind: str, mode: str) -> None:
    case = make_case(kind, (23, 9), window=6, cursor=(2, 5), **MODES[mode])
    whole, cut = case.forward(), case.in_pieces(1, 3, 3, 12, 17)
    for name, x in whole.items():
        assert relative(cut[name].nan_to_num(), x.nan_to_num()) < 1e-12, name


@pytest.mark.parametrize("mode", ["replay", "replay fp8_e4m3", "two_precision"])
def test_calls_of_one_token_are_one_call_of_all_tokens(mode: str) -> None:
    case = make_case("kda", (14, 11), window=4, **MODES[mode])
    whole, cut = case.forward(), case.in_pieces(*range(1, 14))
    for name, x in whole.items():
        assert relative(cut[name].nan_to_num(), x.nan_to_num()) < 1e-12, name


@pytest.mark.parametrize("mode", MODES)
def test_without_a_flush_the_anchor_comes_back_bit_for_bit_and_the_records_stay(mode: str) -> None:
    case = make_case("gdn", (3, 0, 1), window=8, cursor=(4, 7, 0), dtype=torch.float32, **MODES[mode])
    case.anchor[1, 0, 0, 0] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    case.anchor[1, 0, 0, 1:4] = torch.tensor([torch.inf, -0.0, 1e-45])
    got = case.forward()
    assert torch.equal(got["anchor"].view(torch.int32), case.anchor.view(torch.int32))
    assert case.ring is not None
    for name, x in case.ring._asdict().items():
        if x is not None:
            ours = got[f"ring_{name}"]
            assert torch.equal(ours[case.held], x[case.held]) and (ours[~case.left] == 0).all()
    given = cotangents(case)
    danchor = case.backward({"anchor": given["anchor"]})["danchor"]
    assert torch.equal(danchor, given["anchor"])


def test_records_are_the_normalised_keys_the_updates_and_the_inputs_of_the_tokens_since_the_last_flush() -> None:
    case = make_case("gdn", (10,), window=4, paired=True, gap=0)
    got = case.forward()
    k = torch.nn.functional.normalize(case.k[8:], dim=-1)
    assert relative(got["ring_k"][0, :2], k) < 1e-6
    for name, x in (("g", case.g), ("v", case.v), ("beta", case.beta)):
        assert x is not None and torch.equal(got[f"ring_{name}"][0, :2], x[8:])
        assert (got[f"ring_{name}"][0, 2:] == 0).all()


def test_the_ring_is_not_made_unless_it_is_wanted() -> None:
    case = make_case("gdn", (10,), window=4)
    out = dataclasses.replace(case, keep=False).forward()
    assert set(out) == {"o", "anchor"} and torch.equal(out["anchor"], case.forward()["anchor"])


@pytest.mark.parametrize("mode", ["replay int8", "two_precision"])
def test_no_tokens_and_no_sequences(mode: str) -> None:
    empty = make_case("kda", (0, 0), window=4, gap=0, **MODES[mode])
    got, given = empty.forward(), cotangents(empty)
    assert torch.equal(got["anchor"], empty.anchor) and got["anchor"].data_ptr() != empty.anchor.data_ptr()
    assert (got["ring_u"] == 0).all() and torch.equal(empty.backward(given)["danchor"], given["anchor"])
    nobody = dataclasses.replace(
        empty, anchor=empty.anchor[:0], read=None if empty.read is None else empty.read[:0],
        starts=empty.starts[:0], lengths=empty.lengths[:0], cursor=empty.cursor[:0],
    )  # fmt: skip
    got = nobody.forward() | nobody.backward(cotangents(nobody))
    assert got["anchor"].shape == (0, 4, 8, 6) and got["ring_k"].shape == (0, 3, 2, 8)


@pytest.mark.parametrize("mode", MODES)
def test_inputs_are_not_changed_and_results_share_no_memory_with_them(mode: str) -> None:
    for lengths, cursor in (((9,), (2,)), ((1,), (2,)), ((8,), None)):
        case = make_case("kda", lengths, window=4, cursor=cursor, key_heads=1, value_heads=1, gap=0, **MODES[mode])
        given = cotangents(case)
        inputs = case.tensors() | case.carried() | {f"grad {name}": x for name, x in given.items()}
        copies = {name: x.clone() for name, x in inputs.items()}
        results = case.forward() | case.backward(given)
        _bits(inputs, copies)
        theirs = {x.untyped_storage().data_ptr() for x in inputs.values()}
        shared = [name for name, x in results.items() if x.untyped_storage().data_ptr() in theirs]
        assert not shared
        assert len({x.untyped_storage().data_ptr() for x in results.values()}) == len(results)


@pytest.mark.parametrize("mode", MODES)
def test_low_precision_and_strided_inputs_are_computed_in_the_dtype_of_the_anchor(mode: str) -> None:
    case = make_case("kda", (9, 4), window=4, cursor=(1, 3), dtype=torch.float32, key_heads=2, **MODES[mode])
    low = {name: x.bfloat16() for name, x in case.tensors().items()}
    upcast = dataclasses.replace(case, **{name: x.float() for name, x in low.items()})
    fused = torch.cat([low["q"], low["k"]], -1)

    def strided(x: Tensor) -> Tensor:
        wide = torch.full((x.shape[0], *(2 * n + 1 for n in x.shape[1:])), torch.nan, dtype=x.dtype)
        return wide[(slice(None), *(slice(1, None, 2) for _ in x.shape[1:]))].copy_(x)

    assert case.ring is not None
    views = {name: strided(x) for name, x in low.items()} | {"q": fused[..., :8], "k": fused[..., 8:]}
    ring = Ring(*(None if x is None else strided(x) for x in case.ring))  # type: ignore[arg-type]
    read = None if case.read is None else case.read.mT.contiguous().mT
    other = dataclasses.replace(case, **views, ring=ring, anchor=case.anchor.mT.contiguous().mT, read=read)
    _bits(other.forward(), upcast.forward())
    given = cotangents(case)
    want = upcast.backward(given)
    for name, x in other.backward(
        {name: x if x.dim() < 3 else x.mT.contiguous().mT for name, x in given.items()}
    ).items():
        assert relative(x.nan_to_num(), want[name].nan_to_num()) < 1e-6, name


class _Recorder(TorchDispatchMode):
    """Counts operations, and notes the largest tensor that one of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


def _recorded(case: Case) -> tuple[_Recorder, _Recorder]:
    """What forward and backward do, each on its own."""
    grads = {f"d{name}": torch.empty_like(x) for name, x in case.tensors().items()}
    given, o = cotangents(case), torch.empty_like(case.v)
    with _Recorder() as forward:
        replay.forward(*case.arguments(), o, **case.options, keep=True)
    with _Recorder() as backward:
        replay.backward(given["o"], given["anchor"], None, *case.arguments(), grads, **case.options)
    return forward, backward


@pytest.mark.parametrize("mode", ["replay", "two_precision"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_it_runs_by_windows_not_by_tokens(kind: str, mode: str) -> None:
    # Without the codec's own operations.
    short, long = (make_case(kind, (n,), window=64, fmt="fp32", **MODES[mode]) for n in (512, 1024))
    for before, after in zip(_recorded(short), _recorded(long), strict=True):
        assert after.calls - before.calls < 4 * 512  # a token loop takes tens of operations a token


@pytest.mark.parametrize("mode", ["replay", "replay int8", "two_precision"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_no_intermediate_is_as_large_as_an_input(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(
        kind, (1024,), window=16, dtype=torch.float32, key_heads=1, value_heads=2, key_dim=32, value_dim=32,
        **MODES[mode],
    )  # fmt: skip
    monkeypatch.setattr(span, "SPAN_BUDGET", case.v.numel() // 2)
    for recorded in _recorded(case):
        assert recorded.largest < case.v.numel()
