"""Which kernel runs an op. Kernels are imported here, at call time, and nowhere else above `kernels/`.

One dictionary a backend, form -> module: a new kernel is one new line. All of them have the reference's functions,
`forward` and `backward` on flat tokens. The ops spell the policy's `kernel` as `implementation`: Inductor's fallback
passes an op's keywords on beside an argument of its own that is called `kernel`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["choose", "load"]

REFERENCE = {
    "chunk": "lattn_compile.kernels.reference.chunk",
    "decode": "lattn_compile.kernels.reference.decode",
}


def choose(form: str, implementation: str) -> str:
    """The backend that runs `form` ("chunk" | "decode") for the policy's `kernel`, as reports name it.

    This release has the torch reference only, on every device; `ops.validate` refuses "triton".
    """
    assert form in REFERENCE and implementation in ("auto", "reference"), (form, implementation)
    return "reference"


def load(form: str, implementation: str) -> ModuleType:
    """The kernel module itself."""
    choose(form, implementation)
    return importlib.import_module(REFERENCE[form])
