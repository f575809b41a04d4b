"""The policy of one site: what it refuses when made, what it refuses when used, and what an op gets from it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

import lattn_compile.ops  # noqa: F401  (registers the ops)
from lattn_compile.errors import FormatError, LattnError, PolicyError, UnsupportedError
from lattn_compile.formats import REGISTRY, Bf16, Format, Fp8, Fp16, Fp32, Int8, Nvfp4
from lattn_compile.modes import BlockDoubling, Chunk, Exact, Neumann, Prefill, Replay, Token, TwoPrecision, WriteMode
from lattn_compile.site_policy import FEEDBACKS, GATES, KERNELS, READOUTS, ROTATIONS, ROUNDINGS, STORAGES, Policy

tiles = st.none() | st.integers(1, 256)
formats = st.one_of(
    st.sampled_from([Fp32(), Bf16(), Fp16(), Nvfp4()]),
    st.builds(Int8, tiles, block_k=tiles),
    st.builds(Fp8, tiles, block_k=tiles),
)
modes = st.one_of(
    st.sampled_from([Exact(), Token()]),
    st.builds(Chunk, st.integers(1, 4096)),
    st.builds(Replay, st.integers(1, 64), factors=st.sampled_from([None, "bf16", "fp8_e4m3", "int8"])),
    st.builds(TwoPrecision, st.integers(1, 64), read=formats, anchor=st.sampled_from(["fp32", "bf16"])),
)
prefills = st.none() | st.builds(
    Prefill,
    st.dictionaries(st.sampled_from(["kk", "av"]), st.sampled_from([None, "int8", "nvfp4"])),
    inverse=st.sampled_from(["exact", Neumann(7), BlockDoubling(8)]),
    max_residual=st.floats(1e-6, 1e6),
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    options: dict[str, Any] = {
        "write": draw(modes),
        "readout": draw(st.sampled_from(READOUTS)),
        "rounding": draw(st.sampled_from(ROUNDINGS)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "feedback": draw(st.sampled_from(FEEDBACKS)),
        "rotation": draw(st.sampled_from(ROTATIONS)),
        "gate": draw(st.sampled_from(GATES)),
        "prefill": draw(prefills),
        "storage": draw(st.sampled_from(STORAGES)),
        "kernel": draw(st.sampled_from(KERNELS)),
    }
    state = draw(formats)
    while True:
        try:
            return Policy(state, **options)
        except PolicyError as error:
            # Every refused combination is refused for one key, and legal without it.
            assert error.argument in options, error
            del options[error.argument]


def error_of(call: Any) -> LattnError:
    with pytest.raises(LattnError) as caught:
        call()
    return caught.value


def test_the_default_is_fp8_after_every_token() -> None:
    policy = Policy()
    assert (policy.state, policy.write) == (Fp8(), Token())
    rest = {n: v for n, v in policy.to_dict().items() if n not in ("state", "write")}
    assert rest == {
        "readout": "before_write",
        "rounding": "nearest",
        "seed": 0,
        "feedback": None,
        "rotation": None,
        "gate": None,
        "prefill": None,
        "storage": "emulated",
        "kernel": "auto",
    }


@given(policies())
def test_a_policy_survives_json_pickle_hash_repr_and_replace(policy: Policy) -> None:
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict(), allow_nan=False))) == policy
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy and hash(again) == hash(policy)
    assert dataclasses.replace(policy) == policy
    assert eval(repr(policy)) == policy
    assert str(policy) and "\n" not in str(policy)


@given(policies())
def test_a_policy_is_either_built_or_refused_when_used(policy: Policy) -> None:
    unbuilt = policy.unbuilt()
    if unbuilt:
        error = error_of(policy.op_kwargs)
        assert isinstance(error, UnsupportedError) and all(part in error.got for part in unbuilt)
    else:
        kwargs = policy.op_kwargs()
        schema = getattr(torch.ops.lattn, policy.op_form).default._schema
        assert set(kwargs) <= {a.name for a in schema.arguments if a.kwarg_only}
        assert kwargs["write"] == policy.write.mode
        whole = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} | kwargs
        exact = isinstance(policy.write, Exact)
        kept = {n: getattr(policy, n) for n in ("kernel", "gate")} if exact else dataclasses.asdict(policy)
        again = Policy.from_op(whole)
        assert again.prefill == policy.prefill
        for name in set(kept) - {"state", "seed", "write", "prefill"}:
            assert getattr(again, name) == getattr(policy, name)
        assert again.write == policy.write and again.rounded_format == policy.rounded_format
        assert policy.rounding == "nearest" or again.seed == policy.seed


def test_this_version_builds_what_it_says() -> None:
    built: list[WriteMode] = [Exact(), Chunk(16), Token(), Replay(), Replay(4, factors="int8"), TwoPrecision()]
    for cls, write, readout, kernel in itertools.product(REGISTRY, built, READOUTS, ("auto", "reference")):
        if not (isinstance(write, TwoPrecision) and readout == "after_write"):
            Policy(cls(), write=write, readout=readout, kernel=kernel).require_built()
    Policy(Int8(), prefill=Prefill({"kk": "int8"}), kernel="triton").require_built()
    policy = Policy(Int8(), storage="packed")
    assert [p.split("=")[0] for p in policy.unbuilt()] == ["storage"]
    with pytest.raises(UnsupportedError):
        policy.require_built()


def test_what_is_missing_is_named_with_what_is_there() -> None:
    policy = Policy(Int8(), storage="packed", prefill=Prefill({"kk": "int8"}), kernel="triton")
    assert_expected_inline(
        str(error_of(policy.require_built)),
        """\
[unsupported] policy: got storage='packed'; want storage 'emulated'. Packed states are stepped by lc.QuantizedState \
and lc.StatePool, and held by caches that quantize_cache made; here the state is dense.""",
    )


def test_an_op_gets_strings_and_numbers_only() -> None:
    assert Policy(Int8()).op_kwargs() == {
        "write": "token",
        "state_format": "int8/*x64",
        "readout": "before_write",
        "implementation": "auto",
    }
    assert Policy(Nvfp4(), write=Chunk(32), readout="after_write", kernel="reference").op_kwargs() == {
        "write": "chunk",
        "state_format": "nvfp4",
        "readout": "after_write",
        "implementation": "reference",
        "chunk_size": 32,
    }


def test_exact_policies_give_the_same_op_whatever_else_they_say() -> None:
    want = {"write": "exact", "state_format": "fp32", "readout": "before_write", "implementation": "auto"}
    assert Policy(write=Exact()).op_kwargs() == want
    assert Policy(Int8(), write=Exact(), readout="after_write").op_kwargs() == want


@pytest.mark.parametrize(
    ("policy", "rounded", "stored"),
    [
        (Policy(Int8()), Int8(), Int8()),
        (Policy(Int8(), write=Exact()), None, Fp32()),
        (Policy(Nvfp4(), write=Replay(16)), Nvfp4(), Nvfp4()),
        (Policy(Int8(), write=TwoPrecision()), Fp8(block_k=128, block_v=1), Fp32()),
        (Policy(Int8(), write=TwoPrecision(anchor="bf16", read=Nvfp4())), Nvfp4(), Bf16()),
    ],
    ids=str,
)
def test_which_format_is_rounded_to_and_which_travels(policy: Policy, rounded: Format | None, stored: Format) -> None:
    assert (policy.rounded_format, policy.stored_format) == (rounded, stored)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"readout": "after_write", "write": TwoPrecision()}, "readout"),
        ({"feedback": "int8", "write": TwoPrecision()}, "feedback"),
        ({"feedback": "int8", "state": Fp32()}, "feedback"),
        ({"feedback": "int4", "state": Bf16()}, "feedback"),
        ({"feedback": "bf16", "state": Fp16(), "write": Replay()}, "feedback"),
        ({"feedback": "int8", "write": Exact()}, "feedback"),
        ({"rounding": "stochastic", "write": Exact()}, "rounding"),
        ({"rounding": "stochastic", "state": Fp32()}, "rounding"),
        ({"rounding": "stochastic", "write": TwoPrecision(read=Fp32())}, "rounding"),
        ({"rotation": "hadamard_v", "write": Exact()}, "rotation"),
        ({"storage": "packed", "write": Chunk()}, "storage"),
    ],
)
def test_a_combination_without_meaning_is_refused_when_made(options: dict[str, Any], argument: str) -> None:
    error = error_of(lambda: Policy(**options))
    assert isinstance(error, PolicyError) and error.argument == argument


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "stochastic", "state": Bf16()},
        {"rounding": "stochastic", "state": Fp32(), "write": TwoPrecision()},
        {"rotation": "hadamard_k", "write": TwoPrecision()},
        {"feedback": "int4", "state": Nvfp4(), "write": Chunk()},
        {"gate": "fp16", "write": Exact()},
        {"storage": "packed", "write": Replay(factors="int8")},
        {"prefill": Prefill(inverse=Neumann(7)), "write": Exact()},
    ],
    ids=str,
)
def test_what_the_semantics_allow_is_not_refused_when_made(options: dict[str, Any]) -> None:
    Policy(**options)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"readout": "after"}, "readout"),
        ({"rounding": None}, "rounding"),
        ({"feedback": "fp8"}, "feedback"),
        ({"feedback": False}, "feedback"),
        ({"rotation": "hadamard"}, "rotation"),
        ({"gate": "fp32"}, "gate"),
        ({"storage": "real"}, "storage"),
        ({"kernel": ["auto"]}, "kernel"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": True}, "seed"),
        ({"state": 8}, "state"),
        ({"state": Int8}, "state"),
        ({"state": None}, "state"),
        ({"write": "token"}, "write"),
        ({"write": Token}, "write"),
        ({"prefill": {"operands": {}}}, "prefill"),
        ({"stat": Int8()}, "stat"),
    ],
)
def test_a_value_that_no_key_has_is_refused_by_name(options: dict[str, Any], argument: str) -> None:
    error = error_of(lambda: Policy(**options))
    assert isinstance(error, PolicyError) and error.argument == argument


def test_messages_say_what_is_wanted_and_what_to_do() -> None:
    def message(**options: Any) -> str:
        return str(error_of(lambda: Policy(**options)))

    assert_expected_inline(
        message(formt=Int8()),
        """\
[policy] formt: got an unknown key of Policy; want one of state, write, readout, rounding, seed, feedback, rotation, \
gate, prefill, storage, kernel. Remove it or correct its name.""",
    )
    assert_expected_inline(
        message(readout="after_wrte"),
        """\
[policy] readout: got Policy(readout='after_wrte'); want 'before_write' or 'after_write'. Choose one of these. \
Did you mean 'after_write'?""",
    )
    assert_expected_inline(
        message(write=Token),
        """\
[policy] write: got Policy(write=<class 'lattn_compile.modes.Token'>); want Exact(), Chunk(...), Token(), \
Replay(...) or TwoPrecision(...). Write Token().""",
    )
    assert_expected_inline(
        message(state=Bf16(), feedback="int8"),
        """\
[policy] feedback: got 'int8' on the plain format bf16; want None on fp32, bf16 and fp16: they have no scale for a \
residual. Drop feedback, or choose Int8, Fp8 or Nvfp4.""",
    )
    assert_expected_inline(
        message(write=TwoPrecision(), readout="after_write"),
        """\
[policy] readout: got 'after_write' with write=TwoPrecision(...); want 'before_write': outputs come from the read \
copy, and nothing stored is read back. Drop readout, or choose Replay(...).""",
    )


def test_a_state_format_may_be_given_by_its_spec() -> None:
    assert Policy("int8/16x32").state == Int8(32, block_k=16)  # type: ignore[arg-type]
    error = error_of(lambda: Policy("nvfp5"))  # type: ignore[arg-type]
    assert isinstance(error, FormatError) and error.argument == "state" and "nvfp4" in error.remedy


def test_a_shape_is_checked_with_the_rotation_of_its_axis() -> None:
    Policy(Int8(), rotation="hadamard_k").check_shape(64, 100)
    Policy(Int8(), rotation="hadamard_v").check_shape(100, 1)
    Policy(write=Exact()).check_shape(100, 60)
    Policy(prefill=Prefill({"kk": "int8", "av": "nvfp4"})).check_shape(60, 60)
    error = error_of(lambda: Policy(prefill=Prefill({"ws": "nvfp4"})).check_shape(60, 64))
    assert isinstance(error, FormatError) and error.argument == "prefill" and "K = 60" in error.got
    error = error_of(lambda: Policy(Int8(), rotation="hadamard_k").check_shape(60, 64))
    assert_expected_inline(
        str(error),
        """\
[policy] rotation: got 'hadamard_k' on a state with K = 60; want a power of two for K. Drop rotation, or rotate the \
other axis.""",
    )


def test_a_line_for_tables_shows_what_is_not_usual() -> None:
    lines = [
        Policy(),
        Policy(Int8(32), readout="after_write", seed=3, rounding="stochastic"),
        Policy(Nvfp4(), write=Replay(16, factors="bf16")),
        Policy(Int8(), write=TwoPrecision()),
        Policy(Int8(), write=Exact()),
    ]
    assert_expected_inline(
        "\n".join(map(str, lines)),
        """\
fp8_e4m3/*x64 token
int8/*x32 token readout='after_write' rounding='stochastic' seed=3
nvfp4 replay(16, bf16 factors)
two_precision(16, read fp8_e4m3/128x1, anchor fp32)
exact""",
    )


def test_json_may_leave_keys_out_and_name_formats_and_modes() -> None:
    assert Policy.from_dict({}) == Policy()
    assert Policy.from_dict({"state": "int8", "write": "exact"}) == Policy(Int8(), write=Exact())
    assert Policy.from_dict({"state": {"format": "int8", "block_v": 16}}) == Policy(Int8(16))


def test_unknown_keys_are_refused_at_every_depth() -> None:
    plain = Policy(Int8(), write=TwoPrecision(), prefill=Prefill(inverse=Neumann(3))).to_dict()
    holders = [plain, plain["state"], plain["write"], plain["write"]["read"], plain["prefill"]]
    holders += [plain["prefill"]["operands"], plain["prefill"]["inverse"]]
    for holder in holders:
        holder["blok_v"] = 1
        assert "blok_v" in str(error_of(lambda: Policy.from_dict(plain)))
        del holder["blok_v"]
    Policy.from_dict(plain)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=6,
)


@given(st.sampled_from(list(Policy().to_dict())), json_values)
def test_hostile_data_gives_a_policy_or_an_error_of_ours(key: str, value: Any) -> None:
    try:
        policy = Policy.from_dict({**Policy(Int8()).to_dict(), key: value})
    except LattnError:
        return
    assert Policy.from_dict(policy.to_dict()) == policy


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().seed = 1  # type: ignore[misc]
