"""How far a rounded state drifts from the exact one: relative errors of state and output along a long slow trajectory.

    python benchmarks/drift.py [--tokens 4096] [--out FILE.json] [--no-docs]

Two random recurrences (H = 2, HV = 4, K = V = 64) with decays of about exp(-0.0005) a token: "gdn", whose delta rule
overwrites what a key held, and "retention", which only adds, so that nothing but the decay forgets. For the first every
write mode and format, and the policy's other roundings one at a time; for the second some of them. The exact run is
float64, the others fp32, made in calls of 64 tokens that carry their state.
Afterwards `docs/write_drift.py` makes docs/drift.md and its plots of the file, unless told not to.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.formats import REGISTRY, Fp32
from lattn_compile.testing import Inputs, make_inputs

EVERY = 64  # tokens between two points of a curve
SIZE = {"key_heads": 2, "value_heads": 4, "key_dim": 64, "value_dim": 64}
HERE = Path(__file__).resolve().parent


def policies() -> Iterator[lc.Policy]:
    """All that is measured."""
    formats = [cls() for cls in REGISTRY if cls is not Fp32]
    scaled = [fmt for fmt in formats if not fmt.is_plain]
    for fmt in formats:
        for write in (lc.Token(), lc.Chunk(64), *(lc.Replay(w) for w in (4, 8, 16, 64))):
            yield lc.Policy(fmt, write=write)
        yield lc.Policy(write=lc.TwoPrecision(16, read=fmt))
    yield lc.Policy(write=lc.TwoPrecision(16))
    yield lc.Policy(write=lc.TwoPrecision(16, anchor="bf16"))
    for factors in ("bf16", "fp8_e4m3", "int8"):
        yield lc.Policy(lc.Fp8(), write=lc.Replay(16, factors=factors))
    for fmt in scaled:
        for feedback in ("int4", "int8", "bf16"):
            yield lc.Policy(fmt, feedback=feedback)
    for fmt in formats:
        yield lc.Policy(fmt, rounding="stochastic")
    for fmt in scaled:
        yield lc.Policy(fmt, rotation="hadamard_k")
    for block_v in (1, 16, None):
        yield lc.Policy(lc.Int8(block_v))
        yield lc.Policy(lc.Fp8(block_v))
    for gate in ("bf16", "fp16"):
        yield lc.Policy(write=lc.Exact(), gate=gate)


def additive_policies() -> Iterator[lc.Policy]:
    """What is measured of the recurrence that only adds."""
    for fmt in (lc.Bf16(), lc.Int8(), lc.Fp8(), lc.Nvfp4()):
        for write in (lc.Token(), lc.Replay(16), lc.TwoPrecision(16, read=fmt)):
            yield lc.Policy(fmt, write=write)
        yield lc.Policy(fmt, rounding="stochastic")
    for fmt in (lc.Int8(), lc.Fp8(), lc.Nvfp4()):
        yield lc.Policy(fmt, feedback="int4")


def run(x: Inputs, policy: lc.Policy | None) -> Iterator[tuple[Tensor, Any]]:
    """Output and carried state of every `EVERY` tokens."""
    state: Any = x.initial_state
    for a in range(0, x.q.shape[1], EVERY):
        tokens = [None if y is None else y[:, a : a + EVERY] for y in (x.q, x.k, x.v, x.g, x.beta)]
        o, state = lc.linear_attention(
            *tokens,
            rule=x.rule,
            use_qk_l2norm_in_kernel=x.qk_l2norm,
            initial_state=state,
            output_final_state=True,
            policy=policy,
            position=a,
        )
        yield o, state


def dense(state: Any) -> Tensor:
    return state if isinstance(state, Tensor) else state.dense()


def off(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@torch.no_grad()
def measure(kind: str, chosen: Iterable[lc.Policy], tokens: int) -> list[dict[str, Any]]:
    """A row for each policy: errors after every `EVERY` tokens (of the state) and over them (of the output)."""
    x = make_inputs(kind, batch=1, tokens=tokens, slow_decay=True, initial_state=False, **SIZE)  # type: ignore[arg-type]
    exact = [(o, dense(S)) for o, S in run(x.map(Tensor.double), None)]
    rows = []
    for policy in chosen:
        began = time.process_time()
        state_error, output_error, stored = [], [], 0.0
        for (o, state), (want_o, want_S) in zip(run(x, policy), exact, strict=True):
            state_error.append(off(dense(state), want_S))
            output_error.append(off(o, want_o))
            stored = nbytes(state) / want_S.numel()
        row = {"kind": kind, "policy": str(policy), "bytes_a_value": round(stored, 4)}
        rows.append(row | {"state_error": rounded(state_error), "output_error": rounded(output_error)})
        print(f"{kind:9} {row['policy']:52} state {state_error[-1]:.3g}  output {output_error[-1]:.3g}", end="")
        print(f"  ({time.process_time() - began:.1f} s)", flush=True)
    return rows


def nbytes(state: Any) -> int:
    return state.numel() * state.element_size() if isinstance(state, Tensor) else state.nbytes


def rounded(values: list[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "drift.json")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/drift.md as it is")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure("gdn", policies(), args.tokens) + measure("retention", additive_policies(), args.tokens)
    result = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "tokens": args.tokens,
        "every": EVERY,
        "size": SIZE,
        "decay": "g = -1e-3 * U(0, 1)",
    }
    # One row of numbers a line: a curve is data, not prose.
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    args.out.write_text(json.dumps(result, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')
    if not args.no_docs:
        runpy.run_path(str(HERE.parent / "docs" / "write_drift.py"), run_name="__main__")


if __name__ == "__main__":
    main()
