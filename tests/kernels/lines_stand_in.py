"""`packed_lines.py` for Triton's interpreter, which knows neither Gluon nor machine code.

`interpreted` makes its modules anew with a stand-in for Gluon: layouts are nothing, shared memory is an array, and each
text of instructions is done as it says, products of the matrix unit by the places that PTX gives their fragments
(`mma.m16n8k16`, `mma.m16n8k8`). It finds wrong places, masks, orders and formulas, and says nothing about barriers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl

from lattn_compile.kernels import packed_lines, packed_lines_end, packed_lines_parts
from lattn_compile.kernels.common import codec
from tests.kernels.gluon_stand_in import Language, jit, made_anew, tensor

__all__ = ["interpreted"]

Array = Any


def _floats(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.float32)


def _bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint32)


def _byte(x: Array, i: int) -> Array:
    return (_bits(x) >> (8 * i)) & 0xFF


def _halves(x: Array) -> Array:
    return np.stack([(_bits(x) >> at & 0xFFFF).astype(np.uint16).view(np.float16) for at in (0, 16)], -1).astype(float)


def _int8(x: Array) -> Array:
    return x.astype(np.uint8).view(np.int8).astype(float)


def _fp8(x: Array) -> Array:
    return torch.from_numpy(x.astype(np.uint8)).view(torch.float8_e4m3fn).double().numpy()


def _to_fp8(x: Array) -> Array:
    held = torch.from_numpy(np.clip(_floats(x), -448, 448).astype(np.float32))
    return held.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)


def _to_int8(x: Array) -> Array:
    return (np.rint(_floats(x)).astype(np.int64) & 0xFF).astype(np.uint32)


def _product(a: Sequence[Array], b: Sequence[Array], c: Sequence[Array], depth: int) -> list[Array]:
    """c and a product of 16 by `depth` with `depth` by 8, as fragments `[warps, t, g, numbers(, 2)]`."""
    warps, _, _, numbers = c[0].shape
    A, B = np.zeros((warps, numbers, 16, depth)), np.zeros((warps, numbers, depth, 8))
    wide = depth == 16
    for t in range(4):
        for g in range(8):
            for half in range(2 if wide else 1):
                at = (2 * t + half, 2 * t + half + 8) if wide else (t, t + 4)
                for i, fragment in enumerate(a):
                    A[:, :, g + 8 * (i % 2), at[i // 2]] = fragment[:, t, g, :, half] if wide else fragment[:, t, g]
                for i, fragment in enumerate(b):
                    B[:, :, at[i], g] = fragment[:, t, g, :, half] if wide else fragment[:, t, g]
    D, out = A @ B, [np.array(x, dtype=float) for x in c]
    for t in range(4):
        for g in range(8):
            for i in range(4):
                out[i][:, t, g] += D[:, :, g + 8 * (i // 2), 2 * t + i % 2]
    return out


def _codes_met(x: list[Array], value: Callable[[Array], Array]) -> list[Array]:
    rows = [[value(_byte(word, i)) for i in range(4)] for word in x[:4]]
    parts, acc = [_halves(y) for y in x[4:6]], [_floats(y) for y in x[6:]]
    out = []
    for pair in range(2):
        a = [np.stack([rows[r][2 * pair + i], rows[r + 1][2 * pair + i]], -1) for r in (0, 2) for i in range(2)]
        out += _product(a, parts, acc[4 * pair : 4 * pair + 4], 16)
    return out


def _multiplied(x: list[Array]) -> list[Array]:
    a, b, acc = x[:4], x[4:12], x[12:]
    a, b, acc = ([_floats(y).astype(float) for y in z] for z in (a, b, acc))
    pairs = [(b[i] + b[i + 2], b[i + 1] + b[i + 3]) for i in (0, 4)]
    return [y for i, pair in enumerate(pairs) for y in _product(a, pair, acc[4 * i : 4 * i + 4], 8)]


def _word_of(x: list[Array], code: Callable[[Array], Array], keep: Array) -> Array:
    return sum((code(y) << (8 * i) for i, y in enumerate(x)), np.uint32(0)) & _bits(keep)


def _turned(x: list[Array]) -> list[Array]:
    return [sum((_byte(y, i) << (8 * j) for j, y in enumerate(x)), np.uint32(0)) for i in range(4)]


def _pairs_of(x: list[Array]) -> Array:
    low, high = (_floats(y).astype(np.float16).view(np.uint16).astype(np.uint32) for y in x)
    return low | high << 16


def _meanings() -> dict[str, tuple[Callable[[list[Array]], Any], Any, Any]]:
    """What each text does: to numbers, of which type, numpy's and Triton's."""
    end, f32, i32 = packed_lines_end, (np.float32, tl.float32), (np.int32, tl.int32)
    return {
        packed_lines._INT8.value: (lambda x: _codes_met(x, _int8), *f32),
        packed_lines._FP8.value: (lambda x: _codes_met(x, _fp8), *f32),
        packed_lines_parts._PRODUCT.value: (_multiplied, *f32),
        packed_lines_parts._TRANSPOSED.value: (_turned, *i32),
        packed_lines_parts._PAIR.value: (_pairs_of, *i32),
        end._INT8_NUMBERS.value: (lambda x: [_int8(_byte(x[0], i)) for i in range(4)], *f32),
        end._FP8_NUMBERS.value: (lambda x: [_fp8(_byte(x[0], i)) for i in range(4)], *f32),
        end._INT8_WORD.value: (lambda x: _word_of(x[:4], _to_int8, x[4]), *i32),
        end.FP8_BYTES.value: (lambda x: _word_of(x[:4], _to_fp8, x[4]), *i32),
        end._FP8_PAIR.value: (lambda x: _to_fp8(x[0]) | _to_fp8(x[1]) << 8, np.int16, tl.int16),
        packed_lines_parts._BRING.value: (lambda x: x[0] * 0, *i32),
        packed_lines_parts._FENCE.value: (lambda x: x[0], *i32),
    }


def _asm(text: Any, constraints: Any, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    do, numpy_type, type_ = _meanings()[getattr(text, "value", text)]
    found = do(list(np.broadcast_arrays(*(x.handle.data for x in args))))

    def made(x: Array) -> Any:
        x = np.asarray(x)
        if x.dtype.kind == "u":
            x = x.astype(np.uint16).view(np.int16) if numpy_type is np.int16 else x.astype(np.uint32).view(np.int32)
        return tensor(np.ascontiguousarray(x.astype(numpy_type)), type_)

    return tuple(map(made, found)) if isinstance(found, list) else made(found)


class _Language(Language):
    inline_asm_elementwise = staticmethod(_asm)


def interpreted(folder: Path) -> types.ModuleType:
    """`packed_lines` with the stand-in in the place of Gluon, from copies of the sources in `folder`."""
    language = _Language("triton.experimental.gluon.language")
    gluon = types.ModuleType("triton.experimental.gluon")
    gluon.__dict__.update(language=language, jit=jit)
    parent = types.ModuleType("triton.experimental")
    parent.__dict__.update(gluon=gluon)
    replaced: dict[str, types.ModuleType] = {x.__name__: x for x in (parent, gluon, language)}
    made = made_anew((packed_lines_parts, packed_lines_end, packed_lines), replaced, folder)
    # Without divisions they begin with an approximate reciprocal, which is the GPU's own.
    made.end_codes.fn.__globals__["scales_of"] = lambda amax, largest, fast=False: codec.scales(amax, largest)
    return made
