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
from lattn_compile.formats import Fp8, Fp32, Int8, Nvfp4
from lattn_compile.modes import (
    MODES,
    PREFILL_OPTIONS,
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
    Prefill({"kv": Int8(), "w": "fp8", "qs": Nvfp4()}),
    Prefill(inverse=Neumann(63), gradient="series"),
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


@pytest.mark.parametrize("prefill", EVERY_PREFILL, ids=repr)
def test_prefill_options_survive_an_ops_arguments_as_text_and_numbers(prefill: Prefill) -> None:
    arguments = prefill.op_kwargs()
    assert all(isinstance(x, str | float) for x in arguments.values()) and set(arguments) <= set(PREFILL_OPTIONS)
    assert Prefill.from_op(arguments) == (None if prefill.changes_nothing else prefill)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"prefill_operands": "kk"}, "prefill_operands"),
        ({"prefill_operands": "kk=int8,kk=int8"}, "prefill_operands"),
        ({"prefill_operands": "kq=int8"}, "kq"),
        ({"prefill_operands": "kk=int4"}, "kk"),
        ({"prefill_inverse": "neuman(3)"}, "prefill_inverse"),
        ({"prefill_inverse": "neumann"}, "prefill_inverse"),
        ({"prefill_inverse": "neumann(0)"}, "order"),
        ({"prefill_inverse": "block_doubling(32)"}, "block"),
        ({"prefill_inverse": "neumann(3)", "prefill_residual": -1.0}, "max_residual"),
        ({"prefill_inverse": "neumann(3)", "prefill_gradient": "both"}, "gradient"),
    ],
)
def test_text_that_no_policy_writes_is_refused_by_name(arguments: Any, argument: str) -> None:
    error = error_of(lambda: Prefill.from_op(arguments))
    assert isinstance(error, PolicyError) and error.argument == argument


def test_operands_are_named_by_format_in_the_order_of_the_sites() -> None:
    assert Prefill({"qs": Fp8(), "kk": Int8(), "w": "fp8", "u": None}).formats == {
        "kk": "int8", "w": "fp8_e4m3", "qs": "fp8_e4m3",
    }  # fmt: skip


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
        (lambda: Neumann(64), "order"),
        (lambda: NewtonSchulz(-1), "iterations"),
        (lambda: NewtonSchulz(7), "iterations"),
        (lambda: BlockDoubling(32), "block"),
        (lambda: BlockDoubling(8.0), "block"),  # type: ignore[arg-type]
        (lambda: Prefill({"kq": "int8"}), "kq"),
        (lambda: Prefill({"kk": "int4"}), "kk"),
        (lambda: Prefill({"kk": Int8(32)}), "kk"),
        (lambda: Prefill({"kk": Int8}), "kk"),  # type: ignore[dict-item]
        (lambda: Prefill({"kk": Fp32()}), "kk"),
        (lambda: Prefill({"kk": "bf16"}), "kk"),
        (lambda: Prefill(3), "operands"),  # type: ignore[arg-type]
        (lambda: Prefill(inverse="neumann"), "inverse"),
        (lambda: Prefill(inverse=BlockDoubling), "inverse"),  # type: ignore[arg-type]
        (lambda: Prefill(gradient="exact"), "gradient"),
        (lambda: Prefill(gradient="series"), "gradient"),
        (lambda: Prefill(inverse=BlockDoubling(), gradient="series"), "gradient"),
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
