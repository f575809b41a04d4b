"""torch.compile backend and graph rewriter for linear-attention recurrences with quantized state.

    model = torch.compile(model, backend="lattn_compile", options={"policy": "int8"})

Names are loaded when first used: `import lattn_compile` needs torch only, and neither Triton, transformers nor FLA has
to be installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOME: dict[str, str] = {
    **dict.fromkeys(("rewrite", "inspect", "RewriteResult"), "api"),
    "calibrate": "calibrate",
    "capture": "passes.capture",
    **dict.fromkeys(("attach", "detach"), "attach"),
    **dict.fromkeys(("last_report", "reports"), "backend"),
    "linear_attention": "functional",
    "training_phase": "phase",
    **dict.fromkeys(("encode_state", "decode_state", "EncodedState"), "state"),
    "ReplayState": "replay_state",
    "QuantizedState": "packed.state",
    "StatePool": "packed.pool",
    "Heads": "packed.layout",
    **dict.fromkeys(
        (
            "Policy",
            "Recipe",
            "Exact",
            "Chunk",
            "Token",
            "Replay",
            "TwoPrecision",
            "Prefill",
            "Neumann",
            "NewtonSchulz",
            "BlockDoubling",
            "PRESETS",
        ),
        "policy",
    ),
    **dict.fromkeys(("Int8", "Fp8", "Nvfp4", "Bf16", "Fp16", "Fp32"), "formats"),
    **dict.fromkeys(("Report", "Site"), "report"),
    **dict.fromkeys(("LattnError", "LattnWarning"), "errors"),
}

__all__ = [
    "PRESETS",
    "Bf16",
    "BlockDoubling",
    "Chunk",
    "EncodedState",
    "Exact",
    "Fp8",
    "Fp16",
    "Fp32",
    "Heads",
    "Int8",
    "LattnError",
    "LattnWarning",
    "Neumann",
    "NewtonSchulz",
    "Nvfp4",
    "Policy",
    "Prefill",
    "QuantizedState",
    "Recipe",
    "Replay",
    "ReplayState",
    "Report",
    "RewriteResult",
    "Site",
    "StatePool",
    "Token",
    "TwoPrecision",
    "__version__",
    "attach",
    "calibrate",
    "capture",
    "decode_state",
    "detach",
    "encode_state",
    "inspect",
    "last_report",
    "linear_attention",
    "reports",
    "rewrite",
    "training_phase",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'lattn_compile' has no attribute {name!r}")
    module = importlib.import_module(f"lattn_compile.{home}")
    if name == "capture":
        # Capture has to know the tracers before it is entered; the backend wires it to them.
        importlib.import_module("lattn_compile.backend")
    if "torch" in sys.modules:
        importlib.import_module("lattn_compile.packed.state")
    value = getattr(module, name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """`lc.attach` is a function in a module of the same name; importing that module must not put it in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if TYPE_CHECKING:
    from lattn_compile.api import RewriteResult, inspect, rewrite
    from lattn_compile.attach import attach, detach
    from lattn_compile.backend import last_report, reports
    from lattn_compile.calibrate import calibrate
    from lattn_compile.errors import LattnError, LattnWarning
    from lattn_compile.formats import Bf16, Fp8, Fp16, Fp32, Int8, Nvfp4
    from lattn_compile.functional import linear_attention
    from lattn_compile.packed.layout import Heads
    from lattn_compile.packed.pool import StatePool
    from lattn_compile.packed.state import QuantizedState
    from lattn_compile.passes.capture import capture
    from lattn_compile.phase import training_phase
    from lattn_compile.policy import (
        PRESETS,
        BlockDoubling,
        Chunk,
        Exact,
        Neumann,
        NewtonSchulz,
        Policy,
        Prefill,
        Recipe,
        Replay,
        Token,
        TwoPrecision,
    )
    from lattn_compile.replay_state import ReplayState
    from lattn_compile.report import Report, Site
    from lattn_compile.state import EncodedState, decode_state, encode_state


class _WhenTorchComes:
    """Registers the `lattn::` ops, and the states as pytrees, as soon as torch is there, so that saved programs load.

    Importing torch here would make a bare import of this package, and the command line's help, take seconds.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                # A module of ours that is importing torch itself is not whole yet; `__getattr__` registers them then.
                if not any(name.startswith("lattn_compile.") for name in sys.modules):
                    importlib.import_module("lattn_compile.packed.state")

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "torch" in sys.modules:
    importlib.import_module("lattn_compile.packed.state")
else:
    sys.meta_path.insert(0, _WhenTorchComes())
