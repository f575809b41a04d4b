"""The options that all ops share: their schema, their checks, and what the kernels get of them.

The dispatcher leaves out an option that has its default, so each is a dataclass field with the schema's default.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch

from lattn_compile.errors import DtypeError, PolicyError
from lattn_compile.formats import Format, parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.modes import PREFILL_OPTIONS, Prefill
from lattn_compile.ops import dispatch
from lattn_compile.ops.residuals import record
from lattn_compile.ops.validate import Geometry, Tensors, check_call, check_words

__all__ = ["OpOptions", "Options", "schema"]


def schema(own: str, *, write: str = 'str write="exact"') -> str:
    """The options of an op's schema, `own` in the middle: an op's text changes where its own options stand."""
    return (
        f'str rule="delta", float scale, bool qk_l2norm=False, {write}, str state_format="fp32", '
        f'str readout="before_write", {own}, str implementation="auto", int site_id=0, bool growth=False, '
        'str rounding="nearest", int seed=0, str? feedback=None, str? rotation=None, str? gate=None, '
        'str prefill_operands="", str prefill_inverse="exact", float prefill_residual=0.001, '
        'str prefill_gradient="inverse"'
    )


@dataclass(frozen=True, slots=True)
class Options:
    """What is left of an op's options below its own file.

    Attributes:
        quantize: what happens to a state that is written; None: nothing is rounded.
        growth: decays may be greater than 1. gate: what g is rounded to before use, prefix included.
        prefill: what is rounded inside the prefix; None: nothing, and the inverse is exact.
        work: what kernels are chosen by.
    """

    rule: str
    scale: float
    qk_l2norm: bool
    readout: str
    implementation: str
    quantize: Quantizer | None
    growth: bool
    gate: str | None
    work: dispatch.Work
    prefill: Prefill | None = None
    site_id: int = 0

    def kernel(self, form: str, *, exact: bool = False) -> ModuleType:
        """The kernel of a form for this call; `exact` for a part of it that rounds nothing."""
        work = replace(self.work, quantize=None) if exact else self.work
        return dispatch.load(form, self.implementation, work)

    def prefix_kernel(self, *, forward: bool) -> tuple[ModuleType, dict[str, Any]]:
        """The kernel of the prefix, and what it takes beside `step`."""
        if self.prefill is None:
            return self.kernel("chunk", exact=True), {}
        own: dict[str, Any] = {"prefill": self.prefill}
        if forward and self.prefill.inverse != "exact":
            own["measured"] = partial(record, self.site_id, str(self.prefill.inverse), self.prefill.max_residual)
        return dispatch.prefill(self.implementation, self.work, self.prefill), own

    def step(self) -> dict[str, Any]:
        """What every kernel function takes."""
        return {"rule": self.rule, "scale": self.scale, "qk_l2norm": self.qk_l2norm}

    def suffix(self) -> dict[str, Any]:
        """What the kernel of the op's own mode takes."""
        return {**self.step(), "quantize": self.quantize, "readout": self.readout}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOptions:
    """The options of one call as the schema names them; each op adds its own."""

    scale: float
    rule: str = "delta"
    qk_l2norm: bool = False
    write: str = "exact"
    state_format: str = "fp32"
    readout: str = "before_write"
    implementation: str = "auto"
    site_id: int = 0
    growth: bool = False
    rounding: str = "nearest"
    seed: int = 0
    feedback: str | None = None
    rotation: str | None = None
    gate: str | None = None
    prefill_operands: str = ""
    prefill_inverse: str = "exact"
    prefill_residual: float = 1e-3
    prefill_gradient: str = "inverse"

    FORM: ClassVar[str]
    WRITES: ClassVar[tuple[str, ...]] = ()

    def interval(self) -> tuple[str, int, int, int | None]:
        """Name, value, least and greatest legal value of the op's own token count."""
        raise NotImplementedError

    @property
    def prefill(self) -> Prefill | None:
        """What is rounded inside the prefix.

        Raises:
            PolicyError: text that no policy writes.
        """
        return Prefill.from_op({name: getattr(self, name) for name in PREFILL_OPTIONS})

    @property
    def rounds_prefill(self) -> bool:
        """Whether a prefix is computed otherwise than a suffix under `exact`."""
        return bool(self.prefill_operands) or self.prefill_inverse != "exact"

    def rounded_format(self) -> Format:
        """What the quantizer rounds to."""
        return parse(self.state_format)

    def checked(self, t: Tensors) -> tuple[Geometry, Options]:
        """Shapes, dtypes and words of the call.

        Raises:
            ShapeError, DtypeError, SequenceError: of the tensors. PolicyError, FormatError: of the options.
            UnsupportedError: a kernel that this release does not have.
        """
        geometry = check_call(t)
        # Who has not imported the phase, which brings Dynamo along, is in none.
        if t.prefix_lengths is not None and (phase := sys.modules.get("lattn_compile.phase")) is not None:
            phase.note_read()
        check_words(self, self.WRITES)
        name, tokens, least, most = self.interval()
        if tokens < least or (most is not None and tokens > most):
            want = f"an int >= {least}" if most is None else f"an int from {least} to {most}"
            raise PolicyError(name, got=str(tokens), want=want, remedy="It counts tokens.")
        quantize = None
        if self.write != "exact":
            quantize = Quantizer(
                self.rounded_format(), self.rounding, self.feedback, self.rotation, self.seed, self.site_id
            )
            quantize.check(geometry.key_dim, geometry.value_dim)
        else:
            parse(self.state_format)
        prefill = self.prefill
        if prefill is not None:
            self._check_prefill(prefill, geometry)
        work = dispatch.Work(
            t.q.device,
            geometry.dtype,
            geometry.key_dim,
            geometry.value_dim,
            quantize,
            inputs=t.q.dtype,
            growth=self.growth,
        )
        if self.implementation == "triton":
            if geometry.dtype is torch.float64:
                raise DtypeError(
                    "implementation",
                    got="'triton' with float64 inputs",
                    want="bfloat16, float16 or float32 inputs on the Triton path",
                    remedy="Use 'reference' (a policy's kernel='reference') for float64, or convert the inputs.",
                )
            dispatch.choose(self.FORM, "triton", work)
            if prefill is not None:
                dispatch.prefill("triton", work, prefill)
        return geometry, Options(
            self.rule,
            self.scale,
            self.qk_l2norm,
            self.readout,
            self.implementation,
            quantize,
            self.growth,
            self.gate,
            work,
            prefill,
            self.site_id,
        )

    def _check_prefill(self, prefill: Prefill, geometry: Geometry) -> None:
        prefill.check(self.rule, geometry.key_dim)
