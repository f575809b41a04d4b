"""Write modes and prefill options: what they hold, what they refuse, and their JSON form."""

from __future__ import annotations

import contextlib
import json
import pickle
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from lattn_compile.errors import FormatError, LattnError, PolicyError
from lattn_compile.formats import Fp8, Int8, Nvfp4
from lattn_compile.modes import (
    MODES,
    SITES,
    BlockDoubling,
    Chunk,
    Exact,
    Neumann,
    NewtonSchulz,
    Prefill,
    Replay,
    Token,
    TwoPrecision,
    WriteMode,
)

EVERY_MODE = [
    Exact(),
    Chunk(),
    Chunk(7),
    Token(),
    Replay(),
    Replay(64, factors="int8"),
    TwoPrecision(),
    TwoPrecision(1, read=Nvfp4(), anchor="bf16"),
]
EVERY_PREFILL = [
    Prefill(),
    Prefill({"kv": "int8", "kk": "fp8_e4m3", "qk": None}),
    Prefill(inverse=Neumann(3), max_residual=1),
    Prefill(dict.fromkeys(SITES, "nvfp4"), inverse=NewtonSchulz(iterations=4)),
    Prefill(inverse=BlockDoubling(8)),
]


def error_of(call: Any) -> LattnError:
    with pytest.raises(LattnError) as caught:
        call()
    return caught.value


def test_defaults_are_those_of_the_public_contract() -> None:
    assert Chunk().chunk_size == 64
    assert (Replay().window, Replay().factors) == (8, None)
    two = TwoPrecision()
    assert (two.window, two.read, two.anchor) == (16, Fp8(block_k=128, block_v=1), "fp32")


@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
def test_a_mode_survives_json_pickle_and_hashing(mode: WriteMode) -> None:
    assert WriteMode.from_dict(json.loads(json.dumps(mode.to_dict()))) == mode
    assert pickle.loads(pickle.dumps(mode)) == mode
    assert len({mode, pickle.loads(pickle.dumps(mode))}) == 1


@pytest.mark.parametrize("prefill", EVERY_PREFILL, ids=repr)
def test_prefill_options_survive_json_pickle_and_hashing(prefill: Prefill) -> None:
    assert Prefill.from_dict(json.loads(json.dumps(prefill.to_dict()))) == prefill
    assert len({prefill, pickle.loads(pickle.dumps(prefill))}) == 1


def test_modes_of_different_kinds_are_never_equal() -> None:
    assert Exact() != Token()
    assert len(set(EVERY_MODE)) == len(EVERY_MODE)


def test_every_mode_is_listed_under_its_name() -> None:
    assert list(MODES) == ["exact", "chunk", "token", "replay", "two_precision"]
    assert all(WriteMode.from_dict(name) == cls() for name, cls in MODES.items())


@pytest.mark.parametrize("value", [0, -1, 65, 8.0, True, "8", None, [8]])
@pytest.mark.parametrize("cls", [Replay, TwoPrecision])
def test_a_window_is_an_int_from_1_to_64(cls: type, value: object) -> None:
    error = error_of(lambda: cls(value))
    assert isinstance(error, PolicyError) and error.argument == "window" and "from 1 to 64" in error.want


@pytest.mark.parametrize("value", [0, -64, 64.0, True, "64", None])
def test_a_chunk_has_at_least_one_token(value: Any) -> None:
    assert error_of(lambda: Chunk(value)).argument == "chunk_size"


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: Replay(factors="fp8"), "factors"),
        (lambda: Replay(factors=Fp8()), "factors"),  # type: ignore[arg-type]
        (lambda: Replay(factors=["int8"]), "factors"),  # type: ignore[arg-type]
        (lambda: TwoPrecision(anchor="fp16"), "anchor"),
        (lambda: TwoPrecision(read=Fp8), "read"),  # type: ignore[arg-type]
        (lambda: TwoPrecision(read=None), "read"),  # type: ignore[arg-type]
        (lambda: Replay(8, 4), "Replay"),  # type: ignore[misc]
        (lambda: Token(1), "Token"),  # type: ignore[call-arg]
        (lambda: Exact(window=1), "window"),  # type: ignore[call-arg]
        (lambda: Neumann(0), "order"),
        (lambda: Neumann(), "order"),  # type: ignore[call-arg]
        (lambda: NewtonSchulz(-1), "iterations"),
        (lambda: BlockDoubling(32), "block"),
        (lambda: BlockDoubling(8.0), "block"),  # type: ignore[arg-type]
        (lambda: Prefill({"kq": "int8"}), "kq"),
        (lambda: Prefill({"kk": "int4"}), "kk"),
        (lambda: Prefill({"kk": Int8()}), "kk"),  # type: ignore[dict-item]
        (lambda: Prefill(3), "operands"),  # type: ignore[arg-type]
        (lambda: Prefill(inverse="neumann"), "inverse"),
        (lambda: Prefill(max_residual=0), "max_residual"),
        (lambda: Prefill(max_residual=float("nan")), "max_residual"),
        (lambda: Prefill(max_residual=True), "max_residual"),
    ],
)
def test_a_value_that_no_mode_has_is_refused_by_name(call: Any, argument: str) -> None:
    error = error_of(call)
    assert isinstance(error, PolicyError) and error.argument == argument


def test_messages_say_what_is_wanted_and_what_to_do() -> None:
    assert_expected_inline(
        str(error_of(lambda: Replay(factors="fp8"))),
        """\
[policy] factors: got Replay(factors='fp8'); want None or 'bf16' or 'fp8_e4m3' or 'int8'. Choose one of these. \
Did you mean 'fp8_e4m3'?""",
    )
    assert_expected_inline(
        str(error_of(lambda: TwoPrecision(read=Fp8))),  # type: ignore[arg-type]
        """\
[policy] read: got TwoPrecision(read=<class 'lattn_compile.formats.fp8_e4m3.Fp8'>); want a format, such as \
Int8(block_v=64), Fp8() or Nvfp4(). Write Fp8().""",
    )
    assert_expected_inline(
        str(error_of(lambda: WriteMode.from_dict({"mode": "replai"}))),
        """\
[policy] write.mode: got 'replai'; want one of exact, chunk, token, replay, two_precision. The modes are exact, \
chunk, token, replay, two_precision. Did you mean 'replay'?""",
    )
    assert_expected_inline(
        str(error_of(lambda: WriteMode.from_dict({"mode": "token", "window": 8}))),
        """\
[policy] window: got an unknown key of {"mode": "token"}; want one of mode. Remove it or correct its name.""",
    )


def test_a_format_may_be_given_by_its_spec() -> None:
    assert TwoPrecision(read="int8/*x32").read == Int8(32)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="Did you mean 'int8'"):
        TwoPrecision(read="int9")  # type: ignore[arg-type]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(list(MODES)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.just("mode"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values)
def test_hostile_data_gives_a_mode_or_an_error_of_ours(data: Any) -> None:
    for build in (WriteMode.from_dict, Prefill.from_dict):
        with contextlib.suppress(LattnError):
            build(data)
