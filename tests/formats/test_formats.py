"""The registry: specs, JSON, and what is said about a wrong one."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from lattn_compile.errors import FormatError
from lattn_compile.formats import REGISTRY, Bf16, Format, Fp8, Fp16, Fp32, Int8, Nvfp4, from_dict, parse
from tests.formats.states import said

block = st.one_of(st.none(), st.integers(1, 256))
formats = st.one_of(
    st.sampled_from([cls() for cls in REGISTRY]),
    st.builds(lambda cls, v, k: cls(v, block_k=k), st.sampled_from([Int8, Fp8]), block, block),
)


def refusal(make: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(FormatError) as error:
        make(*args, **kwargs)
    return said(error.value)


def test_the_registry_names_the_six_formats() -> None:
    assert [cls.name for cls in REGISTRY] == ["fp32", "bf16", "fp16", "int8", "fp8_e4m3", "nvfp4"]
    assert [cls.__name__ for cls in REGISTRY] == ["Fp32", "Bf16", "Fp16", "Int8", "Fp8", "Nvfp4"]
    assert [cls.is_plain for cls in REGISTRY] == [True, True, True, False, False, False]
    assert all(cls.summary for cls in REGISTRY)
    assert all(cls.options == tuple(f.name for f in dataclasses.fields(cls)) for cls in REGISTRY)


@given(fmt=formats)
def test_a_format_survives_its_spec_its_json_and_pickling(fmt: Format) -> None:
    assert parse(str(fmt)) == fmt and parse(fmt) is fmt
    assert from_dict(json.loads(json.dumps(fmt.to_dict()))) == fmt == Format.from_dict(fmt.to_dict())
    assert pickle.loads(pickle.dumps(fmt)) == fmt == copy.deepcopy(fmt)
    assert hash(parse(str(fmt))) == hash(fmt) and eval(repr(fmt)) == fmt


def test_specs_are_canonical() -> None:
    specs = {"int8": "int8/*x64", "fp8": "fp8_e4m3/*x64", "fp8/128x1": "fp8_e4m3/128x1", "int8/*x*": "int8/*x*"}
    assert {spec: str(parse(spec)) for spec in specs} == specs
    assert [str(cls()) for cls in (Fp32, Bf16, Fp16, Nvfp4)] == ["fp32", "bf16", "fp16", "nvfp4"]
    assert parse("fp8_e4m3/128x1") == Fp8(1, block_k=128) and parse("int8") is parse("int8")


def test_json_is_stable() -> None:
    assert Int8().to_dict() == {"format": "int8", "block_v": 64, "block_k": None}
    assert Nvfp4().to_dict() == {"format": "nvfp4"} and from_dict({"format": "fp8", "block_v": 1}) == Fp8(1)


def test_formats_are_values() -> None:
    assert Int8() == Int8(64, block_k=None) != Fp8() and len({Int8(), Int8(64), Int8(32)}) == 2
    with pytest.raises(AttributeError):
        Int8().block_v = 3  # type: ignore[misc]


def test_wrong_specs_are_explained() -> None:
    lines = [refusal(parse, spec) for spec in ("int9", "fp8_e5m2", "", "bf16/*x64", "int8/64", "int8/ax3", "int8/-1x4")]
    lines += [
        refusal(parse, "int8/0x64"),
        refusal(parse, "int8/*x257"),
        refusal(parse, 8),
        refusal(parse, "nvfp8", argument="state"),
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
format: got 'int9'
  want one of fp32, bf16, fp16, int8, fp8_e4m3, nvfp4
  Choose a known format. Did you mean 'int8'?
format: got 'fp8_e5m2'
  want one of fp32, bf16, fp16, int8, fp8_e4m3, nvfp4
  Choose a known format. Did you mean 'fp8_e4m3'?
format: got ''
  want one of fp32, bf16, fp16, int8, fp8_e4m3, nvfp4
  Choose a known format.
format: got 'bf16/*x64'
  want 'bf16'
  This format has no tile to choose.
format: got 'int8/64'
  want "int8/KxV" with K key channels by V value columns a tile, "*" for a whole axis
  For example "int8/*x64".
format: got 'int8/ax3'
  want "int8/KxV" with K key channels by V value columns a tile, "*" for a whole axis
  For example "int8/*x64".
format: got 'int8/-1x4'
  want "int8/KxV" with K key channels by V value columns a tile, "*" for a whole axis
  For example "int8/*x64".
Int8.block_k: got 0
  want an int from 1 to 256, or None for the whole axis
  Choose a tile that fits the head, for example the default block_v=64, block_k=None.
Int8.block_v: got 257
  want an int from 1 to 256, or None for the whole axis
  Choose a tile that fits the head, for example the default block_v=64, block_k=None.
format: got 8
  want a format, or its spec as a string
  For example lc.Int8() or "int8/*x64".
state: got 'nvfp8'
  want one of fp32, bf16, fp16, int8, fp8_e4m3, nvfp4
  Choose a known format. Did you mean 'nvfp4'?""",
    )


def test_wrong_keys_and_tiles_are_explained() -> None:
    lines = [refusal(Int8, block_w=64), refusal(Int8, 64, 128), refusal(Nvfp4, block_v=16), refusal(Bf16, 3)]
    lines += [refusal(Fp8, bad) for bad in (0, True, 1.5, "64")]
    lines += [
        refusal(from_dict, bad) for bad in ({"format": "int8", "blok_v": 8}, {"block_v": 8}, {"format": "int4"}, "int8")
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
Int8.block_w: got an unknown key
  want block_v or block_k
  Correct or drop it. Did you mean 'block_v'?
Int8: got the positional arguments (64, 128)
  want at most 1
  Spell block_k=... out.
Nvfp4.block_v: got an unknown key
  want no keys
  Correct or drop it.
Bf16: got the positional arguments (3,)
  want at most 0
  Drop it: this format has no options.
Fp8.block_v: got 0
  want an int from 1 to 256, or None for the whole axis
  Choose a tile that fits the head, for example the default block_v=64, block_k=None.
Fp8.block_v: got True
  want an int from 1 to 256, or None for the whole axis
  Choose a tile that fits the head, for example the default block_v=64, block_k=None.
Fp8.block_v: got 1.5
  want an int from 1 to 256, or None for the whole axis
  Choose a tile that fits the head, for example the default block_v=64, block_k=None.
Fp8.block_v: got '64'
  want an int from 1 to 256, or None for the whole axis
  Choose a tile that fits the head, for example the default block_v=64, block_k=None.
Int8.blok_v: got an unknown key
  want block_v or block_k
  Correct or drop it. Did you mean 'block_v'?
format: got {'block_v': 8}
  want a dictionary with the format's name under "format"
  For example {"format": "int8", "block_v": 64, "block_k": null}.
format: got 'int4'
  want one of fp32, bf16, fp16, int8, fp8_e4m3, nvfp4
  Choose a known format. Did you mean 'int8'?
format: got 'int8'
  want a dictionary with the format's name under "format"
  For example {"format": "int8", "block_v": 64, "block_k": null}.""",
    )
