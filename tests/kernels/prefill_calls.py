"""Calls of the prefill, and how far a kernel is from the float64 reference; for Triton's interpreter and for a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import lattn_compile as lc
from lattn_compile.kernels import prefill
from lattn_compile.kernels.reference import chunk as reference
from lattn_compile.modes import SITES, Prefill
from tests.kernels.chunk_calls import Call, make_call
from tests.kernels.decode_calls import Outcome

__all__ = ["ALL", "INVERSES", "ONE", "call_of", "off"]

ALL = {fmt: Prefill(dict.fromkeys(SITES, fmt)) for fmt in ("int8", "fp8_e4m3", "nvfp4")}
ONE = {site: Prefill({site: fmt}) for site, fmt in zip(SITES, ("int8", "fp8_e4m3", "nvfp4") * 3, strict=False)}
INVERSES = (lc.Neumann(3), lc.Neumann(63), lc.NewtonSchulz(2), lc.BlockDoubling(8), lc.BlockDoubling(16))


def call_of(policy: Prefill, **options: Any) -> Call:
    call = make_call(**options)
    return dataclasses.replace(call, options=call.options | {"prefill": policy})


def off(call: Call, floor: float = 5e-6, *, backward: bool = False, beside: bool = False) -> dict[str, float]:
    """Errors of a call against float64, in units of what is allowed: a tenth of what the policy changes, `floor` where
    it changes next to nothing, and twice what rounding to their own dtype costs. Rounding is not continuous: a code may
    fall the other way.

    Args:
        beside: twice the error of the reference with these inputs is allowed, too, as semantics §8 has it of bf16.
    """

    def run(c: Call, kernel: Any) -> Outcome:
        return c.backward(kernel) if backward else c.forward(kernel)

    want = run(call.exact(), reference)
    changed = run(dataclasses.replace(call.exact(), options=call.options | {"prefill": None}), reference).errors(want)
    got = run(call, prefill)
    own = Outcome({name: x.to(got.tensors[name].dtype) for name, x in want.tensors.items()}).errors(want)
    own = {name: 2 * error if error > 1e-4 else 0.0 for name, error in own.items()}
    theirs = run(call, reference).errors(want) if beside else dict.fromkeys(changed, 0.0)
    allowed = {name: max(0.1 * changed[name], floor, 2 * theirs[name]) + own[name] for name in changed}
    return {name: e / allowed[name] for name, e in got.errors(want).items()}
