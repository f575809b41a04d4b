"""Which kernel runs an op. Kernels are imported here, at call time, and nowhere else above `kernels/`.

One dictionary a backend, form -> module: a new kernel is one new line. All of them have the reference's functions,
`forward` and `backward` on flat tokens; one that is not the reference has `supports`, which answers from devices,
dtypes, sizes and formats alone. The ops spell the policy's `kernel` as `implementation`: Inductor's fallback passes an
op's keywords on beside an argument of its own that is called `kernel`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lattn_compile.errors import UnsupportedError
from lattn_compile.formats import TiledFormat
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.modes import Prefill

__all__ = [
    "Work",
    "choose",
    "choose_prefill",
    "count_residuals",
    "load",
    "objection",
    "packed",
    "packed_objection",
    "prefill",
    "prefill_objection",
]

REFERENCE = {
    "chunk": "lattn_compile.kernels.reference.chunk",
    "decode": "lattn_compile.kernels.reference.decode",
    "replay": "lattn_compile.kernels.reference.replay",
}
TRITON = {
    "chunk": "lattn_compile.kernels.chunk",
    "decode": "lattn_compile.kernels.decode",
    "replay": "lattn_compile.kernels.replay",
}
PREFILL = "lattn_compile.kernels.prefill"
"""The prefix with rounded operands or an approximate inverse; the reference is the chunk form's."""
TALLY = "lattn_compile.kernels.prefill_tally"
"""Counts what that inverse left."""

PACKED = "lattn_compile.kernels.packed"
"""Steps packed rows in place; the reference is `packed/ops.py` itself."""

PROVEN = frozenset({"chunk", "decode", "replay", "packed", "prefill"})
"""Triton forms that hold semantics §8 on a GPU: "auto" takes these, "triton" all. "packed" and "prefill" stand
for `PACKED` and `PREFILL`."""

_PROVEN_WINDOW = 16
"""Of packed rows."""
_PROVEN_REPLAY_WINDOWS = {torch.float32: 16, torch.bfloat16: 32}
_PROVEN_REPLAY_CHANNELS = 128
_PROVEN_REPLAY = frozenset({"", "fp32", "int8", "fp8_e4m3"})
_PROVEN_REPLAY_ROUNDED = frozenset({"bf16", "fp16", "nvfp4"})
_PROVEN_REPLAY_TILES = frozenset({(None, 64), (128, 1)})
"""What of replay was seen to (docs/kernels.md), by inputs: windows; K and V; formats, the second ones from bf16 inputs
and with records as they are; tiles `block_k x block_v` from float32 inputs, from bf16 ones any. Two precisions: float32
inputs. In a window of 64 tokens of bf16 inputs, one key repeated with beta 1.9 leaves float32 gates' gradients off by
2.6e-5."""

_PROVEN_CHUNK_INPUTS = (torch.float32, torch.float16, torch.bfloat16)
_PROVEN_PREFILL_INPUTS = (torch.float32, torch.bfloat16)
_PROVEN_PACKED_INPUTS = (torch.float32, torch.bfloat16)
_PROVEN_PACKED = frozenset({"", "fp32", "bf16", "fp16", "int8", "fp8_e4m3", "nvfp4"})
_PROVEN_RINGS = frozenset({"bf16", "int8", "fp8_e4m3"})
_PROVEN_ANCHORS = (None, "fp32", "bf16")
"""What of packed rows was seen to (docs/kernels.md): formats without and with records, "" where nothing is rounded."""


_DECAYS_ONLY = ("chunk", "replay")
_GROWS = (
    "decays may be greater than 1 here (growth), which its sums of gates cut off; a gate of -softplus, logsigmoid or "
    "clamp(max=0) is known not to be"
)
"""Forms whose Triton kernels hold every sum of gates at or below 0, and why they cannot do others; prefill too."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kernel's `supports` is asked about: `dtype` is the arithmetic's, `quantize` None where it is exact.

    `factors`, `window`, `paired` (two precisions): of the replay form; no other has any. `inputs`: the dtype of q, k
    and v. `growth`: whether decays may be greater than 1.
    """

    device: torch.device
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    quantize: Quantizer | None
    factors: str | None = None
    window: int = 0
    inputs: torch.dtype = torch.float32
    growth: bool = False
    paired: bool = False


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def objection(form: str, work: Work) -> str | None:
    """Why no Triton kernel can do this work, in words; None if one can."""
    if form not in TRITON:
        return f"there is no Triton kernel for the {form} form yet"
    if not _has_triton():
        return "Triton is not installed"
    if work.growth and form in _DECAYS_ONLY:
        return _GROWS
    own = {"factors": work.factors} if form == "replay" else {}
    answer: str | None = importlib.import_module(TRITON[form]).supports(
        device=work.device,
        dtype=work.dtype,
        key_dim=work.key_dim,
        value_dim=work.value_dim,
        quantize=work.quantize,
        **own,
    )
    return answer


def choose(form: str, implementation: str, work: Work) -> str:
    """The backend that runs `form` ("chunk" | "decode" | "replay") under the policy's `kernel`, as reports name it.

    Raises:
        UnsupportedError: "triton" was asked for and cannot do it.
    """
    if implementation == "reference":
        return "reference"
    if implementation == "auto":
        # Off CUDA nothing has to be imported to know the answer.
        proven = form in PROVEN and work.device.type == "cuda"
        if form == "replay":
            proven = proven and torch.version.hip is None and _is_proven_replay(work)
        if form == "chunk":
            proven = proven and torch.version.hip is None and work.inputs in _PROVEN_CHUNK_INPUTS
        return "triton" if proven and objection(form, work) is None else "reference"
    why = objection(form, work)
    if why is not None:
        raise _refused(why)
    return "triton"


def _is_proven_replay(work: Work) -> bool:
    """Whether such windows were held to semantics §8 on a GPU."""
    half, fmt = work.inputs is torch.bfloat16, None if work.quantize is None else work.quantize.fmt
    known = _PROVEN_REPLAY | (_PROVEN_REPLAY_ROUNDED if half and work.factors is None else frozenset())
    if half and work.paired:
        return False
    if work.window > _PROVEN_REPLAY_WINDOWS.get(work.inputs, 0) or ("" if fmt is None else fmt.name) not in known:
        return False
    if isinstance(fmt, TiledFormat) and not half and (fmt.block_k, fmt.block_v) not in _PROVEN_REPLAY_TILES:
        return False
    return work.key_dim == work.value_dim == _PROVEN_REPLAY_CHANNELS


def _refused(why: str) -> UnsupportedError:
    return UnsupportedError(
        "implementation",
        got=f"'triton', but {why}",
        want="'auto' or 'reference'",
        remedy="'auto' (a policy's kernel='auto') takes Triton where it can, and the report says where it did.",
    )


def packed_objection(work: Work, write: str) -> str | None:
    """Why no Triton kernel can step such packed rows in place, in words; None if one can."""
    if not _has_triton():
        return "Triton is not installed"
    answer: str | None = importlib.import_module(PACKED).supports(
        device=work.device,
        dtype=work.dtype,
        key_dim=work.key_dim,
        value_dim=work.value_dim,
        quantize=work.quantize,
        write=write,
        window=work.window,
        factors=work.factors,
    )
    return answer


def packed(implementation: str, work: Work, *, write: str, anchor: str | None = None) -> ModuleType | None:
    """The kernels that step packed rows in place; None where `packed/ops.py` does it out of the functional ops.

    Args:
        work: `quantize` is of the state's format, in two_precision of the read copy's; `window` 0 where there is none.
        write: "exact" | "token" | "replay" | "two_precision". anchor: the format of a two-precision anchor.

    Raises:
        UnsupportedError: "triton" was asked for and cannot do it.
    """
    if implementation == "reference":
        return None
    if implementation == "auto" and not (work.device.type == "cuda" and _is_proven(work) and anchor in _PROVEN_ANCHORS):
        return None
    why = packed_objection(work, write)
    if why is None:
        return importlib.import_module(PACKED)
    if implementation == "auto":
        return None
    raise _refused(why)


def _is_proven(work: Work) -> bool:
    """Whether such a step of packed rows was held to semantics §8 on a GPU."""
    name = "" if work.quantize is None else work.quantize.fmt.name
    formats = _PROVEN_RINGS if work.window > 1 else _PROVEN_PACKED
    known = name in formats and work.window <= _PROVEN_WINDOW and work.inputs in _PROVEN_PACKED_INPUTS
    return "packed" in PROVEN and known


def load(form: str, implementation: str, work: Work) -> ModuleType:
    """The kernel module itself."""
    modules = TRITON if choose(form, implementation, work) == "triton" else REFERENCE
    return importlib.import_module(modules[form])


def prefill_objection(work: Work, wanted: Prefill) -> str | None:
    """Why no Triton kernel can compute such a prefix, in words; None if one can."""
    if not _has_triton():
        return "Triton is not installed"
    if work.growth:
        return _GROWS
    answer: str | None = importlib.import_module(PREFILL).supports(
        device=work.device, dtype=work.dtype, key_dim=work.key_dim, value_dim=work.value_dim, prefill=wanted
    )
    return answer


def choose_prefill(implementation: str, work: Work, wanted: Prefill) -> str:
    """The backend of a prefix with rounded operands or an approximate inverse, as reports name it.

    Raises:
        UnsupportedError: "triton" was asked for and cannot do it.
    """
    if implementation == "reference":
        return "reference"
    if implementation == "auto" and not _is_proven_prefill(work):
        return "reference"
    why = prefill_objection(work, wanted)
    if why is None:
        return "triton"
    if implementation == "auto":
        return "reference"
    raise _refused(why)


def _is_proven_prefill(work: Work) -> bool:
    if "prefill" not in PROVEN or work.device.type != "cuda" or torch.version.hip is not None:
        return False
    return work.inputs in _PROVEN_PREFILL_INPUTS


def prefill(implementation: str, work: Work, wanted: Prefill) -> ModuleType:
    """The kernels of such a prefix, chosen as `choose_prefill` says."""
    chosen = choose_prefill(implementation, work, wanted)
    return importlib.import_module(PREFILL if chosen == "triton" else REFERENCE["chunk"])


def count_residuals(norms: Tensor, bound: float, counts: Tensor, largest: Tensor) -> None:
    """What `ops.residuals` counts, on a GPU with Triton."""
    importlib.import_module(TALLY).count_residuals(norms, bound, counts, largest)
