"""`lattn::decode_` and `lattn::replay_` in Triton: one launch a step on stored rows, in place.

    step     tokens of every sequence, from the codes that its slot holds to the codes that it holds then
    flush    pending records of slots into their anchors

What a sequence has (slot, cursor, tokens) is read on the device, so a step can be recorded in a CUDA graph. Slots are
not looked at here: a slot that there is not gives outputs of NaN and writes nothing, and two sequences in one slot are
a race.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import decode, packed_lines_call
from lattn_compile.kernels.common.host import interpreted, on
from lattn_compile.kernels.common.launch import aligned
from lattn_compile.kernels.common.layout import MAX_WARPS, Layout
from lattn_compile.kernels.decode_call import strides
from lattn_compile.kernels.packed_decode import step as decode_step
from lattn_compile.kernels.packed_flush import flush as replay_flush
from lattn_compile.kernels.packed_launch import (
    LAUNCHES,
    MOST_HEADS,
    Launch,
    keys_a_program,
    launch_of,
    ring_layout,
    stored_layout,
    tile_constants,
    tiles_a_program,
)
from lattn_compile.kernels.packed_replay import step as replay_step
from lattn_compile.kernels.packed_token import token_step

__all__ = ["RawGates", "flush", "step", "supports"]

_MAX_WINDOW = 64
_BYTES = ("int8", "fp8_e4m3")


class RawGates(NamedTuple):
    """What makes gates of raw projections (`recurrence/gates.py`), in the kernel.

    Attributes:
        a_log: fp32 `[HV]`, or None under `lower_bound`. dt_bias: `[HV]`, of a decay by channel `[HV, K]`, or None.
        lower_bound: KDA's safe gate; None: softplus. raw_decay, raw_beta: which of g and beta are raw. beta_scale: 1.0,
            or 2.0 where negative eigenvalues are allowed.
    """

    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    raw_decay: bool = True
    raw_beta: bool = False
    beta_scale: float = 1.0


def supports(
    *,
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    quantize: Quantizer | None,
    write: str,
    window: int = 0,
    factors: str | None = None,
) -> str | None:
    """Why these kernels cannot step such a state, in words, or None if they can.

    Args:
        dtype: of the arithmetic. write: "exact" | "token" | "replay" | "two_precision". quantize: of the state's
            format, in two_precision of the read copy's; None where nothing is rounded.
    """
    why = decode.supports(device=device, dtype=dtype, key_dim=key_dim, value_dim=value_dim, quantize=quantize)
    if why is not None:
        return why.replace("the Triton decode kernel", "the packed Triton kernel")
    if factors is not None:
        return f"the packed Triton kernels keep records as they are, not in {factors!r}"
    if write == "two_precision" and window == 1:
        return "two_precision with a window of one token has no records"
    if window > _MAX_WINDOW:
        return f"a window of {window} tokens exceeds {_MAX_WINDOW}"
    layout = ring_layout if window > 1 else stored_layout
    if layout(key_dim, value_dim, quantize, launch_of(quantize, 1, window=window > 1)).warps > MAX_WARPS:
        return f"a state of {quantize} with K = {key_dim}, V = {value_dim} does not fit into one program"
    return None


@torch.no_grad()
def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    stored: Mapping[str, Tensor],
    cursor: Tensor,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    sequence_lengths: Tensor | None,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    padding_slot: int,
    write: str,
    readout: str,
    quantize: Quantizer | None,
    window: int | None = None,
    factors: str | None = None,
    anchor: str | None = None,
    gates: RawGates | None = None,
) -> Tensor:
    """One step, as `lattn::decode_` and `lattn::replay_` describe it, where `supports` has no objection.

    Args:
        stored: by name, `[slots, ...]`, contiguous, written in place. g: rounded by the policy's gate already; raw, as
            beta, where `gates` says so.

    Returns:
        o `[B, T, HV, V]`, in v's dtype.
    """
    x = _Inputs.of(q, k, v, g, beta, cursor, state_indices, has_initial_state, cu_seqlens, sequence_lengths)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if o.numel() == 0:
        return o
    if x.sequences == 0:
        return o.zero_()
    options = _Options(
        rule, float(scale), qk_l2norm, padding_slot, readout, quantize, gates or RawGates(raw_decay=False)
    )
    with on(q.device):
        if window is None or window == 1:
            _decode(x, stored, o, options)
        else:
            _replay(x, stored, o, options, window, _anchor(write, anchor))
    return o


@torch.no_grad()
def flush(
    stored: Mapping[str, Tensor],
    cursor: Tensor,
    state_indices: Tensor | None,
    *,
    heads: Sequence[int],
    decay: str,
    has_beta: bool,
    rule: str,
    padding_slot: int,
    write: str,
    quantize: Quantizer | None,
    window: int,
    factors: str | None = None,
    anchor: str | None = None,
) -> None:
    """Pending records of slots into their states, as `lattn::flush_` describes it; arguments as `step` has them.

    Args:
        heads: H, HV, K, V. decay: "none" | "head" | "channel".
    """
    key_heads, value_heads, key_dim, value_dim = heads
    sequences = cursor.shape[0] if state_indices is None else state_indices.shape[0]
    if sequences == 0 or window == 1 or min(heads) == 0:
        return
    launch = launch_of(quantize, sequences * value_heads, window=True)
    lay = ring_layout(key_dim, value_dim, quantize, LAUNCHES["narrow"] if _turned(stored["codes"]) else launch)
    form = "" if quantize is None or quantize.fmt.name == "fp32" else quantize.fmt.name
    with on(cursor.device):
        replay_flush[(lay.blocks * value_heads * sequences,)](
            *_held(stored, write), cursor, _dense(state_indices), cursor.shape[0], padding_slot,
            H=key_heads, HV=value_heads, **lay.constants(), WINDOW=window, DELTA=rule == "delta",
            DECAY=("none", "head", "channel").index(decay), **_written(stored, lay, quantize, form, write, anchor),
            num_warps=lay.warps, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def _anchor(write: str, anchor: str | None) -> str | None:
    """The format of two_precision's anchor, "fp32" by default; None in replay, which has none."""
    return (anchor or "fp32") if write == "two_precision" else None


def _held(stored: Mapping[str, Tensor], write: str) -> tuple[Tensor | None, ...]:
    """The stored tensors in the order in which the replay kernels take them."""
    read = _rows(stored, "read_") if write == "two_precision" else (None, None, None)
    ring = (stored.get(f"ring_{name}") for name in ("k", "u", "g", "v", "beta"))
    return (*_rows(stored), *read, *ring)


def _written(
    stored: Mapping[str, Tensor], lay: Layout, quantize: Quantizer | None, form: str, write: str, anchor: str | None
) -> dict[str, Any]:
    """How the replay kernels write, as constants."""
    two = write == "two_precision"
    block_k, block_v = tile_constants(lay, quantize)
    codes, scales, blocks = _rows(stored, "read_" if two else "")
    return {
        "ANCHOR": (anchor or "").replace("fp32", ""),
        "FORMAT": form,
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "FAST": _fast(form, lay, codes),
        "TWO": two,
        "HEAD_CODES": _elements(codes),
        "HEAD_SCALES": _elements(scales),
        "HEAD_BLOCKS": _elements(blocks),
        "TURNED": _turned(codes),
        "ODD": not aligned(codes),
    }


def _replay(
    x: _Inputs, stored: Mapping[str, Tensor], o: Tensor, options: _Options, window: int, anchor: str | None
) -> None:
    if _lines(x, options, window, anchor):
        _replay_lines(x, stored, o, options, window, two=anchor is not None)
        return
    key_dim, value_dim = x.q.shape[-1], x.v.shape[-1]
    key_heads, value_heads = x.heads
    ratio = value_heads // key_heads
    launch = launch_of(options.quantize, x.sequences * value_heads, window=True)
    if _turned(stored["codes"]):
        launch = LAUNCHES["narrow"]
    lay = ring_layout(key_dim, value_dim, options.quantize, launch)
    tiles = ratio * lay.blocks
    if x.single:
        _, tiles = tiles_a_program(launch, lay, key_heads, value_heads, x.sequences, keys=False)
    gates, write = options.gates, "replay" if anchor is None else "two_precision"
    replay_step[(lay.blocks * value_heads // tiles * x.sequences,)](
        x.q, x.k, x.v, x.g, x.beta, *_held(stored, write), x.cursor, x.indices, x.fresh, x.ends, x.lengths, o,
        gates.a_log, gates.dt_bias, options.scale, gates.lower_bound or 0.0, *strides(x.q), *strides(x.k),
        *x.v.stride(), *strides(x.g), *strides(x.beta), x.tokens, x.sequences, x.cursor.shape[0], options.padding_slot,
        H=key_heads, HV=value_heads, **lay.constants(), **options.gate_constants(x),
        BK=triton.next_power_of_2(key_dim), WINDOW=window, ROWS=triton.next_power_of_2(window), SINGLE=x.single,
        TILES=tiles, SOONER=launch.sooner and options.format in _BYTES and NVIDIA and not interpreted(),
        **_overlapping(o.device), AFTER=options.readout == "after_write" and options.format != "",
        **_written(stored, lay, options.quantize, options.format, write, anchor),
        num_warps=lay.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def _lines(x: _Inputs, options: _Options, window: int, anchor: str | None) -> bool:
    """Whether `packed_lines.py` steps such a pool: on NVIDIA GPUs from sm_89 on, never in Triton's interpreter."""
    sizes = (*x.heads, x.q.shape[-1], x.v.shape[-1])
    after = options.readout == "after_write" and options.format != ""
    decay = 0 if x.g is None else x.g.dim() - 1
    return (
        not interpreted()
        and _capable(x.q.device, (8, 9))
        and packed_lines_call.fits(
            options.quantize,
            slots=x.cursor.shape[0],
            heads=sizes,
            decay=decay,
            window=window,
            anchor=anchor,
            after=after,
        )
    )


def _replay_lines(
    x: _Inputs, stored: Mapping[str, Tensor], o: Tensor, options: _Options, window: int, *, two: bool
) -> None:
    key_heads, value_heads = x.heads
    gates, quantize = options.gates, options.quantize
    assert quantize is not None
    read, read_scales, _ = _rows(stored, "read_" if two else "")
    codes, scales, _ = _rows(stored)
    ring = (stored.get(f"ring_{name}") for name in ("k", "u", "g", "v", "beta"))
    heads = packed_lines_call.heads_of(x.sequences * value_heads, key_heads, value_heads, single=x.single)
    packed_lines_call.step[(value_heads // heads * x.sequences,)](
        x.q, x.k, x.v, x.g, x.beta, codes, scales, *((read, read_scales) if two else (None, None)), *ring, x.cursor,
        x.indices, x.fresh, x.ends, x.lengths, o, gates.a_log, gates.dt_bias, options.scale, gates.lower_bound or 0.0,
        *strides(x.q), *strides(x.k), *x.v.stride(), *strides(x.g), *strides(x.beta), x.tokens, x.sequences,
        x.cursor.shape[0], options.padding_slot,
        H=key_heads, HV=value_heads, WINDOW=window, HEADS=heads, SINGLE=x.single, TWO=two, **options.gate_constants(x),
        **packed_lines_call.constants_of(read, quantize, x.q.dtype), **_overlapping(o.device),
    )  # fmt: skip


class _Options(NamedTuple):
    rule: str
    scale: float
    qk_l2norm: bool
    padding_slot: int
    readout: str
    quantize: Quantizer | None
    gates: RawGates

    @property
    def format(self) -> str:
        """The codes' format; "" where nothing is rounded."""
        return "" if self.quantize is None or self.quantize.fmt.name == "fp32" else self.quantize.fmt.name

    def gate_constants(self, x: _Inputs) -> dict[str, Any]:
        raw = self.gates
        gate = 0 if not raw.raw_decay or x.g is None else 1 if raw.lower_bound is None else 2
        return {
            "DELTA": self.rule == "delta",
            "DECAY": 0 if x.g is None else x.g.dim() - 1,
            "GATE": gate,
            "SIGMOID": 0 if not raw.raw_beta else 2 if raw.beta_scale == 2.0 else 1,
            "NORM": self.qk_l2norm,
        }


class _Inputs(NamedTuple):
    """A step's tensors, tokens flat: q, k `[M, H, K]`, v `[M, HV, V]`, g `[M, HV(, K)]`, beta `[M, HV]`.

    `tokens` is T, or M under `ends`. `single`: by their shapes, no sequence has more than one token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    cursor: Tensor
    indices: Tensor | None
    fresh: Tensor | None
    ends: Tensor | None
    lengths: Tensor | None
    sequences: int
    tokens: int
    single: bool

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        cursor: Tensor,
        indices: Tensor | None,
        has: Tensor | None,
        ends: Tensor | None,
        lengths: Tensor | None,
    ) -> _Inputs:
        sequences = q.shape[0] if ends is None else ends.shape[0] - 1
        tokens = q.shape[1]
        if lengths is not None:
            lengths = lengths.expand(sequences).contiguous()
        fresh = None if has is None else has.contiguous().view(torch.uint8)
        flat = (_lined_up(x.flatten(0, 1)) if x is not None else None for x in (q, k, v, g, beta))
        single = tokens == 1 or (ends is not None and sequences == 1 and tokens <= 1)
        return _Inputs(*flat, cursor, _dense(indices), fresh, _dense(ends), lengths, sequences, tokens, single)  # type: ignore[arg-type,call-arg]

    @property
    def heads(self) -> tuple[int, int]:
        """Key heads, value heads."""
        return self.q.shape[1], self.v.shape[1]


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _lined_up(x: Tensor) -> Tensor:
    """Vectors of channels without gaps; other strides are the kernels' own business."""
    return x if x.dim() == 2 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _decode(x: _Inputs, stored: Mapping[str, Tensor], o: Tensor, options: _Options) -> None:
    key_dim, value_dim = x.q.shape[-1], x.v.shape[-1]
    key_heads, value_heads = x.heads
    codes, scales, blocks = _rows(stored)
    launch = LAUNCHES["narrow"] if _turned(codes) else launch_of(options.quantize, x.sequences * value_heads)
    if launch.heads and _whole_heads(x, codes, scales, options):
        _decode_heads(x, codes, scales, o, options, launch)
        return
    lay = stored_layout(key_dim, value_dim, options.quantize, launch)
    block_k, block_v = tile_constants(lay, options.quantize)
    gates = options.gates
    kernel, programs, own = decode_step, lay.blocks * value_heads, {}
    if x.single:
        keys, tiles = tiles_a_program(launch, lay, key_heads, value_heads, x.sequences)
        kernel, programs = token_step, programs // (keys * tiles)
        own = {
            "KEYS": keys,
            "TILES": tiles,
            "EARLY": launch.early and NVIDIA and not interpreted(),
            **_overlapping(codes.device),
            "SOONER": launch.sooner and options.format in _BYTES and NVIDIA and not interpreted(),
        }
    kernel[(programs * x.sequences,)](
        x.q, x.k, x.v, x.g, x.beta, codes, scales, blocks, x.cursor, x.indices, x.fresh, x.ends, x.lengths, o,
        gates.a_log, gates.dt_bias, options.scale, gates.lower_bound or 0.0, *strides(x.q), *strides(x.k),
        *x.v.stride(), *strides(x.g), *strides(x.beta), x.tokens, x.sequences,
        x.cursor.shape[0], options.padding_slot,
        H=key_heads, HV=value_heads, **lay.constants(), **options.gate_constants(x),
        BK=triton.next_power_of_2(key_dim), FORMAT=options.format, BLOCK_K=block_k, BLOCK_V=block_v,
        AFTER=options.readout == "after_write" and options.format != "",
        FAST=_fast(options.format, lay, codes),
        HEAD_CODES=_elements(codes), HEAD_SCALES=_elements(scales), HEAD_BLOCKS=_elements(blocks),
        TURNED=_turned(codes), ODD=not aligned(codes), **own, num_warps=lay.warps, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def _whole_heads(x: _Inputs, codes: Tensor, scales: Tensor | None, options: _Options) -> bool:
    """Whether `packed_token_cuda.py` has a step for these rows and this GPU."""
    return (
        x.single
        and x.ends is None
        and (x.q.shape[-1], x.v.shape[-1]) == (128, 128)
        and x.v.shape[1] <= MOST_HEADS * x.q.shape[1]
        and options.format in _BYTES
        and options.readout != "after_write"
        and codes.is_contiguous()
        and aligned(codes)
        and scales is not None
        and tuple(scales.shape[2:]) == (1, 2)
        and _fits_whole_heads(x, codes, options)
    )


def _fits_whole_heads(x: _Inputs, codes: Tensor, options: _Options) -> bool:
    """Whether the GPU can, and steps like this one were run on one: with other inputs, raw gates or keys without a norm
    none was."""
    ready = options.qk_l2norm and not (options.gates.raw_decay or options.gates.raw_beta)
    inputs = {t.dtype for t in (x.q, x.k, x.v)} == {torch.bfloat16}
    return ready and inputs and not interpreted() and _capable(codes.device, (9, 0)) and whole_heads() is not None


def _decode_heads(
    x: _Inputs, codes: Tensor, scales: Tensor | None, o: Tensor, options: _Options, launch: Launch
) -> None:
    key_heads, value_heads = x.heads
    kernel, gates = whole_heads(), options.gates
    keys = keys_a_program(launch, key_heads, value_heads, x.sequences)
    kernel.token_step_cuda[(key_heads // keys * x.sequences,)](
        kernel.rows_of(codes, launch.heads), codes, x.q, x.k, x.v, x.g, x.beta, scales, x.cursor, x.indices, x.fresh,
        x.lengths, o, gates.a_log, gates.dt_bias, options.scale, gates.lower_bound or 0.0, *strides(x.q), *strides(x.k),
        *x.v.stride(), *strides(x.g), *strides(x.beta), x.cursor.shape[0], options.padding_slot,
        H=key_heads, HV=value_heads, KEYS=keys, HEADS=triton.next_power_of_2(keys * value_heads // key_heads),
        FORM=launch.heads, **options.gate_constants(x), FORMAT=options.format, **_overlapping(o.device),
        num_warps=kernel.WARPS[launch.heads], num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


@functools.cache
def whole_heads() -> Any:
    """`packed_token_cuda.py`, None where Triton has no Gluon, or another than it was written for."""
    if not triton.__version__.startswith("3.6."):
        return None
    try:
        return importlib.import_module("lattn_compile.kernels.packed_token_cuda")
    except (ImportError, AttributeError):
        return None


def _rows(stored: Mapping[str, Tensor], prefix: str = "") -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes, scales and block scales as the kernels read them: 8-bit ones as bytes."""
    codes = stored[f"{prefix}codes"]
    scales = stored.get(f"{prefix}state_scale", stored.get(f"{prefix}group_scale"))
    blocks = stored.get(f"{prefix}block_scale")
    return _bytes(codes), scales, None if blocks is None else _bytes(blocks)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _elements(x: Tensor | None) -> int:
    """Of one head."""
    return 0 if x is None else math.prod(x.shape[2:])


def _turned(codes: Tensor) -> bool:
    """Whether heads lie in memory as `[V, K]`. Their bytes are moved one or two at a time, so rows of the launch table
    that others gain by are none for them."""
    return not codes.is_contiguous()


def _fast(name: str, lay: Layout, codes: Tensor) -> int:
    """Whether bytes are made numbers and numbers bytes a word at a time: 2 by NVIDIA's instructions, those of fp8 by
    conversions of the GPU's own; 1 in Triton's operations, of nvfp4; else 0.

    int8 and fp8 codes that begin anywhere in a buffer are moved byte by byte: words have to begin at their own size.
    """
    own = NVIDIA and not interpreted()
    if name == "nvfp4":
        fits = lay.step == 2 and lay.pieces * lay.step == 16 and lay.vector % 4 == 0 and not _turned(codes)
        return (2 if own else 1) if fits else 0
    if lay.vector * lay.step < 4 or not own or not aligned(codes):
        return 0
    return 2 * (name == "int8" or (name == "fp8_e4m3" and _capable(codes.device, (8, 9))))


def _capable(device: torch.device, least: tuple[int, int]) -> bool:
    """Whether it is an NVIDIA GPU of this compute capability; compiled for one that is not here, it is."""
    return NVIDIA and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= least)


def _overlapping(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that may be launched while the one before it ends, for which `packed_rows.begin` waits: what
    GPUs from sm_90 on can do."""
    if interpreted() or not _capable(device, (9, 0)):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


NVIDIA = torch.version.hip is None
