"""`lattn::decode` at the shapes of Qwen3-Next (GDN) and Kimi Linear (KDA): H = 16, HV = 32, K = V = 128, bf16 inputs.

The ops are called as a training step calls them, hand-over and checkpoints included.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lattn_compile.ops  # noqa: F401 - registers the ops
from lattn_compile.bench.timing import by_kernel, copy_bandwidth, milliseconds, peak_bytes
from lattn_compile.ops import CHECKPOINT_EVERY

__all__ = ["CASES", "Case", "check", "measure", "prepare"]

KEY_HEADS, VALUE_HEADS, KEY, VALUE = 16, 32, 128, 128
NAMES = ("q", "k", "v", "g", "beta", "state")


@dataclass(frozen=True)
class Case:
    """A kind of decay, and the format that the state is rounded to after every token; None: exact mode."""

    kind: str
    spec: str | None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.spec or 'exact'}"


CASES = (
    Case("gdn", None),
    *(Case("gdn", f"int8/*x{tile}") for tile in ("16", "32", "64", "*")),
    Case("gdn", "fp8_e4m3/*x64"),
    Case("gdn", "nvfp4"),
    Case("gdn", "bf16"),
    Case("kda", None),
    Case("kda", "int8/*x32"),
)


class Call:
    """Random tensors of one case, B sequences of T tokens."""

    def __init__(self, case: Case, batch: int, tokens: int, every: int = CHECKPOINT_EVERY) -> None:
        rng = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, device="cuda")

        heads = (batch, tokens, VALUE_HEADS)
        gates = heads if case.kind == "gdn" else (*heads, KEY)
        self.tensors = [
            normal(batch, tokens, KEY_HEADS, KEY).bfloat16(),
            normal(batch, tokens, KEY_HEADS, KEY).bfloat16(),
            normal(*heads, VALUE).bfloat16(),
            -torch.nn.functional.softplus(normal(*gates) - 2),
            normal(*heads).sigmoid().bfloat16(),
            normal(batch, VALUE_HEADS, KEY, VALUE),
        ]
        self.grad_o, self.grad_state = normal(*heads, VALUE).bfloat16(), normal(batch, VALUE_HEADS, KEY, VALUE)
        self.every = every
        self.options: dict[str, Any] = {"scale": KEY**-0.5, "qk_l2norm": True, "write": "exact"}
        if case.spec is not None:
            self.options |= {"write": "token", "state_format": case.spec}

    def forward(self) -> Any:
        return torch.ops.lattn.decode(*self.tensors, *(None,) * 4, **self.options)

    def train(self) -> tuple[Tensor, ...]:
        """o, final state, and the gradients of the tensors."""
        options = {**self.options, "checkpoint_every": self.every}
        o, state, rows = torch.ops.lattn.decode(*self.tensors, *(None,) * 4, **options)
        grads = torch.ops.lattn.decode_backward(
            self.grad_o, self.grad_state, *self.tensors, *(None,) * 6, rows, **options
        )
        return o, state, *grads

    @property
    def bytes(self) -> int:
        """Of q, k, v, g, beta and o."""
        return sum(x.nbytes for x in self.tensors[:5]) + self.tensors[2].nbytes

    @property
    def state_bytes(self) -> int:
        return self.tensors[5].nbytes


def check(case: Case) -> list[tuple[str, float, float]]:
    """`(what, error, bound)` of every result on three short sequences, against float64, relative.

    Quantized, over 4 tokens: later ones depend on ties too much.
    """
    call = Call(case, 3, 40 if case.spec is None else 4, every=8)
    got = call.train()
    for name in ("tensors", "grad_o", "grad_state"):
        x = getattr(call, name)
        setattr(call, name, [t.double() for t in x] if isinstance(x, list) else x.double())
    found = []
    for name, ours, want in zip(("o", "final", *(f"d{n}" for n in NAMES)), got, call.train(), strict=True):
        error = float((ours.double() - want).norm() / want.norm())
        # bf16 results are within 2^-9 of float64's; float32 ones (a few codes rounded the other way) far closer.
        bound = 3e-3 if ours.dtype is torch.bfloat16 or case.spec is not None else 1e-5
        found.append((name, error, bound))
    return found


def prepare(case: Case) -> list[tuple[str, float, float]]:
    """`check`, and every kernel that `measure` will launch compiled, for all processes of this machine."""
    found = check(case)
    call = Call(case, 1, 16 * CHECKPOINT_EVERY)  # cut into stretches and parts as a long one is
    call.forward()
    call.train()
    torch.cuda.synchronize()
    return found


def _fla(call: Call) -> Callable[[], object] | None:
    """FLA's recurrent GDN forward on the same tokens, unquantized; None without FLA."""
    try:
        rule = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    except ImportError as error:
        print(f"without flash-linear-attention: {error}")
        return None
    q, k, v, g, beta, state = call.tensors

    def run() -> object:
        with torch.no_grad():
            return rule(
                q, k, v, g=g, beta=beta, scale=KEY**-0.5, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

    return run


def measure(cases: Sequence[Case], batch: int, tokens: int) -> Iterator[dict[str, Any]]:
    """After every case what was found so far, JSON-ready.

    Times in ms, memory beside the tensors as a share of theirs, bandwidths as shares of a copy's.
    """
    copied = copy_bandwidth()
    sizes = {"B": batch, "T": tokens, "H": KEY_HEADS, "HV": VALUE_HEADS, "K": KEY, "V": VALUE}
    rows: list[dict[str, Any]] = []
    baseline: float | None = None
    for case in cases:
        call = Call(case, batch, tokens)
        if baseline is None and case.kind == "gdn" and (run := _fla(call)) is not None:
            baseline = milliseconds(run)
        forward, train = milliseconds(call.forward), milliseconds(call.train, 5)
        # What a training step cannot do without: its tensors, their gradients, and the states at both ends.
        needed = call.bytes + call.state_bytes * 2
        rows.append(
            {
                "kind": case.kind,
                "format": case.spec or "exact",
                "forward_ms": forward,
                "train_ms": train,
                "token_us": forward / tokens * 1e3,
                "forward_bandwidth": (call.bytes + 2 * call.state_bytes) / (forward / 1e3) / copied,
                "train_bandwidth": (3 * call.bytes + 4 * call.state_bytes) / (train / 1e3) / copied,
                "memory": (peak_bytes(call.train) - needed) / call.bytes,
                "kernels_ms": by_kernel(call.train),
            }
        )
        print({name: x for name, x in rows[-1].items() if name != "kernels_ms"}, flush=True)
        del call
        torch.cuda.empty_cache()
        yield {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": importlib.import_module("triton").__version__,
            "shape": {**sizes, "checkpoint_every": CHECKPOINT_EVERY},
            "copy_bytes_per_second": copied,
            "fla_fused_recurrent_gdn_forward_ms": baseline,
            "rows": rows,
        }
