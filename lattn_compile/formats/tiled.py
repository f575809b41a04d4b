"""What int8 and fp8_e4m3 share: one code a value, one fp32 scale a tile (semantics §3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lattn_compile.errors import FormatError
from lattn_compile.formats.base import Encoded, Format, as_state, check_encoded
from lattn_compile.formats.rounding import TINY, divide, invert, keep_where, rn16, round_at_random

__all__ = [
    "TiledFormat",
    "column_tiles",
    "join_rows",
    "live_scale",
    "pack_rows",
    "round_to_int",
    "split_rows",
    "spread_columns",
    "unpack_rows",
]

_MAX_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class TiledFormat(Format):
    """Codes with one scale for each tile of `block_k × block_v` values of one head's `[K, V]` state.

    `None` means the whole axis; the last tile of an axis may be smaller. Tiles never span heads or sequences.

    A tile's scale is `RN16(amax / largest)`, its codes `round(fl(x · fl(1/scale)))`. A tile with `amax < 2^-100` gets
    codes 0 and scale 1; one with a NaN or an infinity gets codes 0 and scale NaN, so that all of it decodes to NaN.

    Encoded: "codes" `[..., K, V]`, "state_scale" `[..., ceil(K/block_k), ceil(V/block_v)]` in the compute dtype.
    """

    block_v: int | None = 64
    block_k: int | None = dataclasses.field(default=None, kw_only=True)

    options: ClassVar[tuple[str, ...]] = ("block_v", "block_k")
    keys: ClassVar[tuple[str, ...]] = ("codes", "state_scale")
    code_dtype: ClassVar[torch.dtype]
    largest: ClassVar[float]

    def __post_init__(self) -> None:
        for name in self.options:
            block = getattr(self, name)
            if block is not None and (type(block) is not int or not 1 <= block <= _MAX_BLOCK):
                raise FormatError(
                    f"{type(self).__name__}.{name}",
                    got=repr(block),
                    want=f"an int from 1 to {_MAX_BLOCK}, or None for the whole axis",
                    remedy="Choose a tile that fits the head, for example the default block_v=64, block_k=None.",
                )
        # Spelled once: Dynamo may take a tile's size for a symbolic int, and a spec cannot be spelled of one.
        object.__setattr__(self, "_spec", f"{self.name}/{self.block_k or '*'}x{self.block_v or '*'}")

    def __str__(self) -> str:
        spec: str = self.__dict__["_spec"]
        return spec

    @property
    def residual_tile(self) -> tuple[int | None, int | None] | None:
        return self.block_k, self.block_v

    def _round(self, y: Tensor, r: Tensor | None) -> Tensor:
        """Scaled values, which it may overwrite, rounded to the numbers that codes stand for."""
        raise NotImplementedError

    def _quantize(self, S: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor]:
        """Code values `[..., nK, block_k, V]` (K padded) and scales `[..., nK, 1, V or 1]`, a tile's repeated."""
        x = split_rows(as_state(S), self.block_k)
        amax = column_tiles(x.abs().amax(-2, keepdim=True), self.block_v)
        scale, safe, live = live_scale(amax, rn16(divide(amax, self.largest)))
        y = keep_where(live, x).mul_(invert(safe))
        y.clamp_(-self.largest, self.largest)
        return self._round(y, None if r is None else split_rows(r, self.block_k)), scale

    def encode(self, S: Tensor, r: Tensor | None = None) -> Encoded:
        values, scale = self._quantize(S, r)
        codes = join_rows(values.to(self.code_dtype), S.shape[-2])
        tiles = scale.squeeze(-2)[..., :: self.block_v or 1]
        return {"codes": codes.contiguous(), "state_scale": tiles.clone(memory_format=torch.contiguous_format)}

    def decode(self, enc: Mapping[str, Tensor], *, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        check_encoded(self, enc)
        codes, scale = enc["codes"], enc["state_scale"]
        K, V = codes.shape[-2:] if shape is None else shape[-2:]
        check_encoded(self, enc, {"codes": (K, V), "state_scale": (_tiles(K, self.block_k), _tiles(V, self.block_v))})
        values = split_rows(codes.to(scale.dtype), self.block_k)
        S = join_rows(values.mul_(spread_columns(scale.unsqueeze(-2), self.block_v, V)), K)
        return S.to(dtype or scale.dtype)

    def qdq(self, S: Tensor, r: Tensor | None = None) -> Tensor:
        values, scale = self._quantize(S, r)
        return join_rows(values.mul_(scale), S.shape[-2]).to(S.dtype)

    def nbytes(self, K: int, V: int) -> int:
        return K * V + 4 * _tiles(K, self.block_k) * _tiles(V, self.block_v)


def round_to_int(y: Tensor, r: Tensor | None) -> Tensor:
    """`y`, which it may overwrite, as integers: to nearest, ties to even, or with the random numbers `r`."""
    # An integer has no -0, so none may come out of qdq either.
    return y.round_().add_(0.0) if r is None else round_at_random(y, r)


def pack_rows(codes: Tensor) -> Tensor:
    """4-bit codes, uint8 `[..., K, V]` of 0 to 15, as bytes `[..., ceil(K/2), V]`.

    Key channel 2i is in a byte's low and 2i + 1 in its high half, which is zero beyond an odd K.
    """
    if codes.shape[-2] % 2:
        codes = pad(codes, (0, 0, 0, 1))
    return (codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)).contiguous()


def unpack_rows(packed: Tensor, K: int) -> Tensor:
    """Undoes `pack_rows`."""
    return torch.stack((packed & 15, packed >> 4), -2).flatten(-3, -2)[..., :K, :]


def _tiles(size: int, block: int | None) -> int:
    return 1 if block is None else -(-size // block)


def split_rows(x: Tensor, block: int | None) -> Tensor:
    """`[..., K, V]` as `[..., nK, block, V]`: a view, or zero-padded where the last tile is smaller."""
    K = x.shape[-2]
    if block is None or block >= K:
        return x.unsqueeze(-3)
    if K % block:
        x = pad(x, (0, 0, 0, -K % block))
    return x.unflatten(-2, (-1, block))


def join_rows(x: Tensor, K: int) -> Tensor:
    """Undoes `split_rows`."""
    if x.shape[-3] == 1:
        return x.squeeze(-3)
    x = x.flatten(-3, -2)
    return x if x.shape[-2] == K else x.narrow(-2, 0, K)


def column_tiles(amax: Tensor, block: int | None) -> Tensor:
    """Maxima of columns, `[..., V]`, to those of tiles of `block` columns, repeated for each column.

    Repeated, because products with a row `[1, V]` run three times as fast on a CPU as with a strided `[nV, 1]`, and
    so one copy of the maxima serves scale, inverse and edge rules. One tile only: `[..., 1]`, which broadcasts.
    """
    V = amax.shape[-1]
    if block == 1:
        return amax
    if block is None or block >= V:
        return amax.amax(-1, keepdim=True)
    if V % block:
        amax = pad(amax, (0, -V % block))
    return spread_columns(amax.unflatten(-1, (-1, block)).amax(-1), block, V)


def spread_columns(tiles: Tensor, block: int | None, V: int) -> Tensor:
    """Tile values `[..., nV]` repeated for each of the V columns; `[..., 1]` stays, for it broadcasts."""
    if block is None or block == 1 or tiles.shape[-1] == 1:
        return tiles
    rest = V % block
    # The smaller last tile is put on by itself, not cut from a whole one: Inductor's C++ (torch 2.13) leaves the last
    # tile of `expand -> flatten -> slice` unwritten.
    whole = tiles[..., :-1] if rest else tiles
    columns = whole.unsqueeze(-1).expand(*whole.shape, block).flatten(-2)
    return torch.cat((columns, tiles[..., -1:].expand(*tiles.shape[:-1], rest)), -1) if rest else columns


def live_scale(amax: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The edge rules: (scale to store, finite scale to invert, is the tile live) from a NaN-propagating `amax`."""
    finite = amax < torch.inf
    live = (amax >= TINY).logical_and_(finite)
    safe = torch.where(live, scale, 1.0)
    return torch.where(finite, safe, torch.nan), safe, live
