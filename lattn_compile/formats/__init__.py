"""How a state is stored: one folder a format, with its spec and its torch codec (semantics §3).

A new format is a folder and a line in `REGISTRY`; names, specs, JSON and the conformance tests follow from the list.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from lattn_compile.errors import FormatError, nearest
from lattn_compile.formats.base import Encoded, Format
from lattn_compile.formats.bf16 import Bf16
from lattn_compile.formats.fp8_e4m3 import Fp8
from lattn_compile.formats.fp16 import Fp16
from lattn_compile.formats.fp32 import Fp32
from lattn_compile.formats.int8 import Int8
from lattn_compile.formats.nvfp4 import Nvfp4
from lattn_compile.formats.tiled import TiledFormat

__all__ = [
    "REGISTRY",
    "Bf16",
    "Encoded",
    "Format",
    "Fp8",
    "Fp16",
    "Fp32",
    "Int8",
    "Nvfp4",
    "TiledFormat",
    "from_dict",
    "parse",
]

REGISTRY: tuple[type[Format], ...] = (Fp32, Bf16, Fp16, Int8, Fp8, Nvfp4)

_BY_NAME = {cls.name: cls for cls in REGISTRY}
_ALIASES = {"fp8": "fp8_e4m3"}


def parse(spec: str | Format, *, argument: str = "format") -> Format:
    """The format of a spec: a name, and for int8 and fp8 optionally a tile `/block_k x block_v` with `*` for None.

    `"int8"` is `Int8()`, `"fp8_e4m3/128x1"` is `Fp8(1, block_k=128)`, `"fp8"` is short for `"fp8_e4m3"`; a `Format` is
    returned as it is. `parse(str(fmt)) == fmt`.

    Raises:
        FormatError: an unknown name (with the nearest known one) or a bad tile; `argument` is named in the message.
    """
    if isinstance(spec, Format):
        return spec
    if not isinstance(spec, str):
        raise FormatError(
            argument,
            got=repr(spec),
            want="a format, or its spec as a string",
            remedy='For example lc.Int8() or "int8/*x64".',
        )
    return _parse(spec, argument)


@functools.lru_cache(maxsize=256)
def _parse(spec: str, argument: str) -> Format:
    name, slash, tile = spec.partition("/")
    cls = _named(name, argument, spec)
    if not slash:
        return cls()
    if not issubclass(cls, TiledFormat):
        raise FormatError(argument, got=repr(spec), want=repr(cls.name), remedy="This format has no tile to choose.")
    blocks = tile.split("x")
    if len(blocks) != 2 or not all(b == "*" or (b.isascii() and b.isdigit()) for b in blocks):
        raise FormatError(
            argument,
            got=repr(spec),
            want=f'"{cls.name}/KxV" with K key channels by V value columns a tile, "*" for a whole axis',
            remedy=f'For example "{cls.name}/*x64".',
        )
    block_k, block_v = (None if b == "*" else int(b) for b in blocks)
    return cls(block_v, block_k=block_k)


def _named(name: str, argument: str, got: str) -> type[Format]:
    known = [*_BY_NAME, *_ALIASES]
    cls = _BY_NAME.get(_ALIASES.get(name, name))
    if cls is None:
        raise FormatError(
            argument,
            got=repr(got),
            want=f"one of {', '.join(_BY_NAME)}",
            remedy=f"Choose a known format.{nearest(name, known)}",
        )
    return cls


def from_dict(data: Mapping[str, Any], *, argument: str = "format") -> Format:
    """The format that `Format.to_dict` wrote. Missing keys take their defaults.

    Raises:
        FormatError: not such a dictionary, an unknown format, an unknown key or a bad tile.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("format"), str):
        raise FormatError(
            argument,
            got=repr(data),
            want='a dictionary with the format\'s name under "format"',
            remedy='For example {"format": "int8", "block_v": 64, "block_k": null}.',
        )
    options = {str(key): value for key, value in data.items() if key != "format"}
    return _named(data["format"], argument, data["format"])(**options)
