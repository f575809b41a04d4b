"""The windowed reference: it is semantics §5 token by token, forward and backward, in both of its modes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.factors import FACTORS
from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference import chunk, decode, replay, span
from lattn_compile.recurrence import BY_NAME
from lattn_compile.testing import HOSTILE
from tests.kernels.reference.replay_cases import (
    Case,
    assert_close,
    assert_is_the_loop,
    cotangents,
    loop,
    make_case,
    relative,
)

KINDS = tuple(BY_NAME)
READOUTS = ("before_write", "after_write")
WINDOWS = (1, 2, 5, 8, 16, 64)
FORMATS = ("int8", "fp8_e4m3/4x1", "nvfp4", "bf16", "fp32")


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_replay_and_all_its_gradients_are_those_of_the_float64_loop(kind: str, window: int, readout: str) -> None:
    i, j = KINDS.index(kind), WINDOWS.index(window)
    for pending in (False, True):
        factors = FACTORS[(i + j + pending) % len(FACTORS)]
        case = make_case(
            kind,
            (7, 0, 19),
            window=window,
            factors=factors,
            readout=readout,
            fmt=FORMATS[(i + 2 * j + 3 * pending) % len(FORMATS)],
            cursor=(window // 2, window // 3, window - 1) if pending else None,
        )
        assert_is_the_loop(case)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_precision_and_all_its_gradients_are_those_of_the_float64_loop(kind: str, window: int) -> None:
    i, j = KINDS.index(kind), WINDOWS.index(window)
    for pending in (False, True):
        case = make_case(
            kind,
            (7, 0, 19),
            window=window,
            paired=True,
            anchor_format=("fp32", "bf16")[(i + j + pending) % 2],
            fmt=FORMATS[(i + 2 * j) % len(FORMATS)],
            cursor=(window // 2, window // 3, window - 1) if pending else None,
        )
        assert_is_the_loop(case)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 9, 25]), min_size=1, max_size=3),
    window=st.sampled_from([1, 2, 3, 7, 8, 20, 70]),
    mode=st.sampled_from([(None, False), ("bf16", False), ("int8", False), ("fp8_e4m3", False), (None, True)]),
    readout=st.sampled_from(READOUTS),
    fmt=st.sampled_from([None, "fp32", "bf16", "fp16", "int8", "int8/3x4", "fp8_e4m3/5x1", "nvfp4"]),
    anchor_format=st.sampled_from(["fp32", "bf16"]),
    leads=st.one_of(st.none(), st.lists(st.integers(0, 69), min_size=3, max_size=3)),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    gap=st.integers(0, 2),
    beta=st.booleans(),
    l2norm=st.booleans(),
    budget=st.sampled_from([1, span.SPAN_BUDGET]),
    seed=st.integers(0, 5),
)
def test_any_shape_segmentation_and_mode_is_the_loop(
    kind: str,
    lengths: list[int],
    window: int,
    mode: tuple[str | None, bool],
    readout: str,
    fmt: str | None,
    anchor_format: str,
    leads: list[int] | None,
    heads: tuple[int, int],
    dims: tuple[int, int],
    gap: int,
    beta: bool,
    l2norm: bool,
    budget: int,
    seed: int,
) -> None:
    factors, paired = mode
    case = make_case(
        kind,
        lengths,
        window=window,
        factors=factors,
        fmt=fmt,
        readout="before_write" if paired else readout,
        paired=paired,
        anchor_format=anchor_format,
        cursor=None if leads is None else [lead % window for lead in leads[: len(lengths)]],
        gap=gap,
        beta=beta,
        qk_l2norm=l2norm,
        seed=seed,
        key_heads=heads[0],
        value_heads=heads[0] * heads[1],
        key_dim=dims[0],
        value_dim=dims[1],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span, "SPAN_BUDGET", budget)
        assert_is_the_loop(case)


MODES: dict[str, dict[str, Any]] = {
    "replay": {},
    "replay int8": {"factors": "int8"},
    "replay fp8 after": {"factors": "fp8_e4m3", "readout": "after_write"},
    "two_precision": {"paired": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("kind", ["gdn", "kda", "retention"])
def test_hostile_inputs_give_the_loop_and_finite_gradients(kind: str, hostile: str, mode: str) -> None:
    # The records are drawn with the tokens, so they are hostile too.
    case = make_case(kind, (7, 11), window=4, cursor=(3, 2), hostile=hostile, gap=0, **MODES[mode])
    assert_is_the_loop(case)
    single = case.map(Tensor.float)
    assert all(x.isfinite().all() for x in single.forward().values())
    given = {name: x.nan_to_num() for name, x in cotangents(single).items()}
    assert all(x.isfinite().all() for x in single.backward(given).values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_reset_forgets_the_anchor_and_the_records(kind: str, mode: str) -> None:
    case = make_case(kind, (9,), window=5, cursor=(3,), gap=0, dtype=torch.float32, **MODES[mode])
    assert case.g is not None and case.ring is not None
    case.g[1] = -torch.inf
    other = dataclasses.replace(
        case, anchor=case.anchor + 7, read=None if case.read is None else case.read - 3,
        ring=case.ring._replace(u=case.ring.u * 2),
    )  # fmt: skip
    ours, theirs = case.forward(), other.forward()
    assert all(torch.equal(ours[name][1:], theirs[name][1:]) for name in ("o", "ring_u"))
    assert torch.equal(ours["anchor"], theirs["anchor"]) and not torch.equal(ours["o"][0], theirs["o"][0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(256, 1), (1, 256), (60, 100), (100, 60)])
def test_wide_and_odd_heads(key_dim: int, value_dim: int, mode: str) -> None:
    for kind in ("gdn", "kda"):
        assert_is_the_loop(
            make_case(kind, (11,), window=8, cursor=(5,), key_dim=key_dim, value_dim=value_dim, **MODES[mode])
        )


@pytest.mark.parametrize(("readout", "paired"), [(READOUTS[0], False), (READOUTS[1], False), (READOUTS[0], True)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck_passes_without_rounding(kind: str, readout: str, paired: bool) -> None:
    case = make_case(
        kind, (2,), window=2, fmt="fp32", readout=readout, paired=paired, cursor=(1,), gap=0,
        key_heads=1, value_heads=2, key_dim=2, value_dim=2,
    )  # fmt: skip
    names = [*case.tensors(), *case.carried()]

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
            values = dict(zip(names, tensors, strict=True))
            ring = case.ring._replace(**{n[5:]: x for n, x in values.items() if n.startswith("ring_")})  # type: ignore[union-attr]
            ctx.case = dataclasses.replace(case, **{n: x for n, x in values.items() if n[:5] != "ring_"}, ring=ring)
            out = ctx.case.forward()
            ctx.outputs = list(out)
            return tuple(out.values())

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            found = ctx.case.backward(dict(zip(ctx.outputs, grads, strict=True)))
            return tuple(found[f"d{name}"] for name in names)

    leaves = [x.clone().requires_grad_() for x in (case.tensors() | case.carried()).values()]
    assert torch.autograd.gradcheck(Kernel.apply, leaves, rtol=1e-6, atol=1e-8)


# Known answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("window", [1, 4, 30])
@pytest.mark.parametrize("kind", ["gdn", "kda", "linear"])
def test_fp32_without_factors_is_the_exact_mode(kind: str, window: int, readout: str) -> None:
    case = make_case(kind, (23, 8), window=window, fmt="fp32", readout=readout)
    got, o = case.forward(), torch.full_like(case.v, torch.nan)
    exact = {n: case.options[n] for n in ("rule", "scale", "qk_l2norm", "readout")} | {"chunk_size": 64}
    chunk.forward(*case.arguments()[:5], case.anchor, case.starts, case.lengths, None, o, **exact, quantize=None)
    assert relative(got["o"][case.inside], o[case.inside]) < 1e-12


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("kind", ["gdn", "kda", "linear"])
def test_a_window_of_one_without_factors_is_the_token_mode(kind: str, readout: str) -> None:
    case = make_case(kind, (9, 5), window=1, readout=readout)
    got, o = case.forward(), torch.full_like(case.v, torch.nan)
    options = {n: case.options[n] for n in ("rule", "scale", "qk_l2norm", "readout", "quantize")}
    final = decode.forward(
        *case.arguments()[:5], case.anchor, case.starts, case.lengths, o, None, 0, **options, identity=None
    )
    assert relative(got["anchor"], final) < 1e-12 and relative(got["o"][case.inside], o[case.inside]) < 1e-12


@pytest.mark.parametrize("window", [5, 16, 70])
def test_replay_without_factors_has_the_bits_of_the_chunk_mode_on_its_windows(window: int) -> None:
    case = make_case("gdn", (3 * window,), window=window, dtype=torch.float32, key_dim=33, value_dim=20)
    got, o = case.forward(), torch.full_like(case.v, torch.nan)
    options = {n: case.options[n] for n in ("rule", "scale", "qk_l2norm", "readout", "quantize")}
    final = chunk.forward(
        *case.arguments()[:5], case.anchor, case.starts, case.lengths, None, o, **options, chunk_size=window
    )
    assert torch.equal(got["anchor"], final) and torch.equal(got["o"][case.inside], o[case.inside])


@pytest.mark.parametrize("cursor", [None, (3, 0)])
@pytest.mark.parametrize("kind", ["gdn", "kda", "linear"])
def test_the_fp32_anchor_of_two_precision_never_sees_the_error_of_its_read_copy(
    kind: str, cursor: tuple[int, int] | None
) -> None:
    rounded = make_case(kind, (20, 33), window=4, paired=True, fmt="int8", cursor=cursor)
    exact = dataclasses.replace(rounded, options=rounded.options | {"quantize": None})
    ours, theirs = rounded.forward(), exact.forward()
    assert torch.equal(ours["anchor"], theirs["anchor"])
    assert relative(ours["o"][rounded.inside], theirs["o"][rounded.inside]) > 1e-4
    if cursor is None:
        exact_o, options = torch.empty_like(rounded.v), {n: exact.options[n] for n in ("rule", "scale", "qk_l2norm")}
        flushed = rounded.lengths // 4 * 4
        want = chunk.forward(
            *rounded.arguments()[:5], rounded.anchor, rounded.starts, flushed, None, exact_o,
            **options, chunk_size=64, quantize=None, readout="before_write",
        )  # fmt: skip
        assert relative(ours["anchor"], want) < 1e-12


@pytest.mark.parametrize("factors", ["bf16", "fp8_e4m3", "int8"])
def test_a_token_reads_its_own_update_unrounded_before_the_write_and_rounded_after_it(factors: str) -> None:
    case = make_case("linear", (1,), window=4, factors=factors, gap=0, key_heads=1, value_heads=1)
    case.anchor = torch.zeros_like(case.anchor)
    before, after = (
        dataclasses.replace(case, options=case.options | {"readout": readout}).forward() for readout in READOUTS
    )
    k, u = after["ring_k"][0, 0, 0], after["ring_u"][0, 0, 0]
    q = case.options["scale"] * case.q[0, 0]
    assert relative(before["o"][0, 0], q @ case.k[0, 0] * case.v[0, 0]) < 1e-12
    assert relative(after["o"][0, 0], q @ k * u) < 1e-12
    assert not torch.equal(k, case.k[0, 0]) and not torch.equal(u, case.v[0, 0])


def test_after_write_the_last_token_of_a_window_reads_the_new_anchor() -> None:
    case = make_case("gdn", (6,), window=6, factors="int8", readout="after_write", gap=0, key_heads=1, value_heads=1)
    got = case.forward()
    q = torch.nn.functional.normalize(case.q[5, 0], dim=0)
    assert relative(got["o"][5, 0], case.options["scale"] * q @ got["anchor"][0, 0]) < 1e-5


# Rounding that depends on whose write it is, or that would round twice ------------------------------------------------

QUANTIZERS = {
    "stochastic": {"rounding": "stochastic", "seed": 3, "site_id": 5},
    "feedback": {"feedback": "int4"},
    "rotation": {"rotation": "hadamard_k"},
}


def _unusual(name: str, lengths: tuple[int, ...], **options: Any) -> Case:
    case = make_case("gdn", lengths, **options)
    quantize = Quantizer(parse("int8"), **QUANTIZERS[name])  # type: ignore[arg-type]
    identity = Identity(100 * torch.arange(len(lengths)) + 7, torch.arange(len(lengths)) + 2**33)
    case.options |= {"quantize": quantize, "identity": identity}
    return case


@pytest.mark.parametrize("options", [{}, {"factors": "int8", "readout": "after_write"}, {"paired": True}])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_every_flush_is_rounded_as_the_write_of_its_token(name: str, options: dict[str, Any]) -> None:
    assert_is_the_loop(_unusual(name, (9, 14, 3), window=4, cursor=(2, 0, 3), **options))


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_returned_anchor_is_encoded_once_by_its_caller(name: str) -> None:
    case = _unusual(name, (10,), window=4, dtype=torch.float32, gap=0)
    whole = case.forward()
    head = case.piece(0, 8, case.carried()).forward()
    quantize, identity = case.options["quantize"], case.options["identity"]
    stored = quantize.qdq(head["anchor"], Identity(identity.position + 7, identity.sequence))
    assert not torch.equal(stored, head["anchor"])
    tail = case.piece(8, 10, head | {"anchor": stored})
    tail.options = case.options | {"identity": Identity(identity.position + 8, identity.sequence)}
    out = tail.forward()
    assert torch.equal(torch.cat((head["o"], out["o"])), whole["o"])
    assert torch.equal(out["anchor"], stored) and torch.equal(whole["anchor"], head["anchor"])


# fp32 (semantics §8) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gdn", "kda", "retention"])
def test_two_precision_in_fp32_stays_within_a_tenth_of_the_quantization_effect_over_1024_tokens(kind: str) -> None:
    case = make_case(
        kind, (1024,), window=16, paired=True, fmt="fp8_e4m3/128x1", dtype=torch.float32, gap=0, slow_decay=True,
        key_heads=1, value_heads=2, key_dim=32, value_dim=32,
    )  # fmt: skip
    wide = case.map(Tensor.double)
    want = wide.forward()["o"]
    exact = dataclasses.replace(wide, read=wide.anchor, options=wide.options | {"quantize": None}).forward()["o"]
    assert 0 < (case.forward()["o"] - want).norm() <= 0.1 * (exact - want).norm()


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize(("kind", "fmt"), [("gdn", "int8"), ("kda", "fp8"), ("retention", "nvfp4")])
def test_replay_in_fp32_stays_within_a_tenth_of_the_quantization_effect_for_a_short_suffix(
    kind: str, fmt: str, factors: str | None
) -> None:
    case = make_case(
        kind, (16, 13), window=8, factors=factors, fmt=fmt, dtype=torch.float32, gap=0, key_dim=64, value_dim=64
    )
    wide = case.map(Tensor.double)
    want, exact = wide.forward()["o"], None
    exact = dataclasses.replace(wide, options=wide.options | {"quantize": None, "factors": None}).forward()["o"]
    assert 0 < (case.forward()["o"] - want).norm() <= 0.1 * (exact - want).norm()


@pytest.mark.parametrize("readout", READOUTS)
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("kind", ["gdn", "kda", "gla"])
def test_gradients_in_fp32_are_those_of_the_float64_loop_from_the_same_roundings(
    kind: str, factors: str | None, readout: str
) -> None:
    for window, lengths in ((16, (15, 4)), (8, (8, 8))):
        case = make_case(
            kind, lengths, window=window, factors=factors if window == 16 else None, readout=readout,
            dtype=torch.float32, key_dim=32, value_dim=32,
        )  # fmt: skip
        given = cotangents(case)
        got = case.forward()
        assert_close(case, got | case.backward(given), loop(case, given, got), 1e-5)


@pytest.mark.parametrize("mode", ["replay", "two_precision"])
def test_exact_fp32_is_within_the_bound_of_float64_over_a_long_sequence(mode: str) -> None:
    case = make_case(
        "gdn", (1024,), window=8, fmt="fp32", dtype=torch.float32, gap=0, key_dim=32, value_dim=32, slow_decay=True,
        **MODES[mode],
    )  # fmt: skip
    got, want = case.forward(), case.map(Tensor.double).forward()
    assert relative(got["o"], want["o"]) < 5e-6 and relative(got["anchor"], want["anchor"]) < 5e-6


@pytest.mark.parametrize("beta", [0.5, 1.0, 1.9])
@pytest.mark.parametrize("g", [0.0, -0.01])
@pytest.mark.parametrize("factors", [None, "fp8_e4m3"])
def test_one_key_repeated_holds_the_fp32_bound(g: float, beta: float, factors: str | None) -> None:
    # Nothing is flushed, so the only roundings are the factors', and one key has one encoding.
    case = make_case("gdn", (63,), window=64, factors=None, dtype=torch.float32, gap=0, key_dim=32, value_dim=16)
    assert case.g is not None and case.beta is not None
    case.k[:], case.g[:], case.beta[:] = case.k[:1].clone(), g, beta
    case.options["factors"] = factors
    got = case.forward()
    want = loop(case, None, got)
    assert relative(got["o"], want["o"]) < 5e-6


def test_only_the_gradients_asked_for_are_written_and_absent_cotangents_are_zero() -> None:
    case = make_case("gdn", (7, 4), window=4, cursor=(1, 3))
    given = cotangents(case)
    for absent in ("o", "anchor", "ring_k", "ring_u", "ring_g"):
        some = {name: x for name, x in given.items() if name != absent}
        zero = given | {absent: torch.zeros_like(given[absent])}
        want = case.backward(zero)
        assert all(torch.equal(x.nan_to_num(), want[name].nan_to_num()) for name, x in case.backward(some).items())
    none = case.backward({})
    assert all((x.nan_to_num() == 0).all() for x in none.values())
    grads = {"dv": torch.zeros_like(case.v)}
    replay.backward(given["o"], None, None, *case.arguments(), grads, **case.options)
    assert torch.equal(grads["dv"][case.inside], case.backward({"o": given["o"]})["dv"][case.inside])
