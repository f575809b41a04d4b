"""`nvfp4`: 4-bit E2M1 codes, an E4M3 scale for 16 key channels of a column, an fp32 scale for 64 columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lattn_compile.formats.base import Encoded, Format, as_state, check_encoded
from lattn_compile.formats.rounding import TINY, divide, invert, keep_where, rn16, round_to_minifloat_
from lattn_compile.formats.tiled import (
    column_tiles,
    join_rows,
    live_scale,
    pack_rows,
    split_rows,
    spread_columns,
    unpack_rows,
)

__all__ = ["Nvfp4"]

_BLOCK = 16  # key channels that share an E4M3 scale
_GROUP = 64  # value columns that share an fp32 scale
_LARGEST = 6.0  # of E2M1
_LARGEST_SCALE = 448.0  # of E4M3
_SMALLEST_SCALE = 2.0**-6  # E4M3's smallest normal number


@dataclasses.dataclass(frozen=True)
class Nvfp4(Format):
    """E2M1 codes in two levels of scales; the tile is fixed.

    64 value columns of a head (all K) share `s_g = RN16(amax_group / 2688)`; each block of 16 key channels of one
    column has `b = e4m3(clamp((amax_block / 6) / s_g, 2^-6, 448))`; the step is `b · s_g`, which is exact. Last groups
    and blocks may be smaller. Edge rules of a block: `amax < 2^-100` gives codes 0 and `b = 1`; a NaN or an infinity
    gives codes 0 and `b` NaN, while `s_g` is formed from the group's finite values (1 if these stay below 2^-100).
    The sign of zero is kept in the other blocks.

    Encoded: "codes" uint8 `[..., ceil(K/2), V]`, as `pack_rows` packs them (sign, then magnitude); "block_scale"
    float8_e4m3fn `[..., ceil(K/16), V]`; "group_scale" `[..., ceil(V/64)]` in the compute dtype.
    """

    name: ClassVar[str] = "nvfp4"
    summary: ClassVar[str] = "E2M1, half a byte a value, an E4M3 scale for 16 of them and an fp32 scale for 64 columns"
    keys: ClassVar[tuple[str, ...]] = ("codes", "block_scale", "group_scale")

    @property
    def residual_tile(self) -> tuple[int | None, int | None] | None:
        return None, _GROUP

    def _quantize(self, S: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Code values `[..., nK, 16, V]`, block scales `[..., nK, 1, V]`, group scales `[..., 1, 1, V or 1]`."""
        x = split_rows(as_state(S), _BLOCK)
        magnitude = x.abs()
        block_amax = magnitude.amax(-2, keepdim=True)
        finite_amax = magnitude.nan_to_num_(0.0, 0.0, 0.0).amax((-3, -2), keepdim=True)
        group_amax = column_tiles(finite_amax, _GROUP)
        group = torch.where(group_amax >= TINY, rn16(divide(group_amax, _LARGEST * _LARGEST_SCALE)), 1.0)
        ratio = divide(divide(block_amax, _LARGEST), group).clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
        block, safe, live = live_scale(block_amax, round_to_minifloat_(ratio, mantissa=3, min_exponent=-6))
        y = keep_where(live, x).mul_(invert(safe * group)).clamp_(-_LARGEST, _LARGEST)
        r = None if r is None else split_rows(r, _BLOCK)
        return round_to_minifloat_(y, mantissa=1, min_exponent=0, r=r), block, group

    def encode(self, S: Tensor, r: Tensor | None = None) -> Encoded:
        values, block, group = self._quantize(S, r)
        values = join_rows(values, S.shape[-2])
        codes = _magnitude_code(values.abs()) | (values.signbit().to(torch.uint8) << 3)
        return {
            "codes": pack_rows(codes),
            "block_scale": block.squeeze(-2).to(torch.float8_e4m3fn).contiguous(),
            "group_scale": group[..., 0, 0, ::_GROUP].clone(memory_format=torch.contiguous_format),
        }

    def decode(self, enc: Mapping[str, Tensor], *, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        check_encoded(self, enc)
        codes, block, group = enc["codes"], enc["block_scale"], enc["group_scale"]
        K, V = (2 * codes.shape[-2], codes.shape[-1]) if shape is None else shape[-2:]
        shapes = {"codes": (-(-K // 2), V), "block_scale": (-(-K // _BLOCK), V), "group_scale": (-(-V // _GROUP),)}
        check_encoded(self, enc, shapes)
        nibbles = unpack_rows(codes, K)
        magnitudes = _magnitude(nibbles.bitwise_and(7).to(group.dtype))
        values = split_rows(torch.where(nibbles > 7, -magnitudes, magnitudes), _BLOCK)
        step = block.to(group.dtype) * spread_columns(group.unsqueeze(-2), _GROUP, V)
        return join_rows(values.mul_(step.unsqueeze(-2)), K).to(dtype or group.dtype)

    def qdq(self, S: Tensor, r: Tensor | None = None) -> Tensor:
        values, block, group = self._quantize(S, r)
        return join_rows(values.mul_(block * group), S.shape[-2]).to(S.dtype)

    def nbytes(self, K: int, V: int) -> int:
        return -(-K // 2) * V + -(-K // _BLOCK) * V + 4 * -(-V // _GROUP)


# E2M1's magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 lie on three straight pieces over their codes 0 to 7. Arithmetic instead
# of a table: a table would be copied from the host at every call, which a CUDA graph capture refuses.


def _magnitude_code(magnitude: Tensor) -> Tensor:
    upper = (magnitude - 2.0).clamp_(0.0, 2.0)
    top = (magnitude - 4.0).clamp_(0.0, 2.0).mul_(0.5)
    return (magnitude.clamp(max=2.0).mul_(2.0) + upper + top).to(torch.uint8)


def _magnitude(code: Tensor) -> Tensor:
    upper = (code - 4.0).clamp_(0.0, 2.0)
    top = (code - 6.0).clamp_(0.0, 1.0).mul_(2.0)
    return code.clamp(max=4.0).mul_(0.5) + upper + top
