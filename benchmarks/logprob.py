"""What a packed state costs a model that is decoded with it: teacher-forced log-probabilities against an fp32 state.

    python benchmarks/logprob.py [--model NAME] [--train 120] [--tokens 2048] [--weights FILE.pt] [--out FILE.json]

The demo's model (0.7 M parameters, trained on English text in windows of 256 bytes; `--train 0`: random weights) reads
held-out text: 64 bytes of exact prefill, then `--tokens` suffix tokens on a packed cache, every token given. The same
text on transformers' own cache, an fp32 tensor, is what everything is compared with. The control arm rounds nothing:
fp32 states through the packed ops, whose sums have another order. What it shows is chance.

Tokens come in calls of 64, as drafts of which all are accepted: the state is written after every token all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile.demo import LENGTH, MODELS, Lab, build_model, load_text
from lattn_compile.integrations.transformers import cache_bytes, quantize_cache

PREFIX = 64
BLOCK = 64
CONTROL = "fp32, packed (control)"
POLICIES: dict[str, lc.Policy] = {
    CONTROL: lc.PRESETS["exact"],
    "bf16 token": lc.Policy(lc.Bf16()),
    "int8 token": lc.PRESETS["int8"],
    "int8 token, stochastic": lc.Policy(lc.Int8(), rounding="stochastic"),
    "int8 token, int4 feedback": lc.Policy(lc.Int8(), feedback="int4"),
    "fp8 token": lc.PRESETS["fp8"],
    "int8 replay 8": lc.PRESETS["int8-replay"],
    "int8 replay 8, fp8 factors": lc.Policy(lc.Int8(), write=lc.Replay(8, factors="fp8_e4m3")),
    "fp8 replay 8": lc.PRESETS["fp8-replay"],
    "nvfp4 token": lc.Policy(lc.Nvfp4()),
    "nvfp4 replay 16": lc.PRESETS["nvfp4"],
    "fp8 two-precision 16": lc.PRESETS["fp8-two-precision"],
}


def calls(total: int, prefix: int, block: int) -> Iterator[tuple[int, int]]:
    """First and last token of each call."""
    yield 0, prefix
    for a in range(prefix, total, block):
        yield a, min(a + block, total)


@torch.no_grad()
def log_probs(model: Any, ids: Tensor, policy: lc.Policy | None, *, prefix: int, block: int) -> tuple[Tensor, int]:
    """Log-probabilities `[B, T - prefix, vocabulary]` float64 of the suffix, and bytes of the recurrent states.

    Args:
        ids: `[B, T]`. policy: None is transformers' own cache.
    """
    given: dict[str, Any] = {}
    logits = []
    with contextlib.nullcontext() if policy is None else quantize_cache(model, policy):
        for a, b in calls(ids.shape[1], prefix, block):
            out = model(ids[:, a:b], use_cache=True, **given)
            key = "cache" if out.get("cache") is not None else "past_key_values"  # the version's own name
            cache = out[key]
            given = {key: cache}
            if a:
                logits.append(out.logits.double())
            if policy is not None:
                cache.crop(0) if a else cache.activate_past_recording()  # from now on drafts, and all are right
    return torch.cat(logits, 1).log_softmax(-1), cache_bytes(cache)["recurrent"]


def compare(want: Tensor, got: Tensor, ids: Tensor) -> dict[str, Any]:
    """Of `got` against `want`, `[B, S, vocabulary]`, at the tokens that follow in the text.

    `change`: mean of |Δ log p| of the next byte, in nats; `worst`: its greatest; `bias`: mean of Δ log p, with its
    standard error over tokens; `kl`: mean of KL(want || got); `argmax`: share of positions with the same likeliest
    byte; `quarters`: `change` in each quarter of the suffix.
    """
    next_byte = ids[:, -want.shape[1] + 1 :, None]
    delta = (got - want)[:, :-1].gather(-1, next_byte).squeeze(-1)
    kl = (want.exp() * (want - got)).sum(-1)
    return {
        "change": delta.abs().mean().item(),
        "worst": delta.abs().max().item(),
        "bias": delta.mean().item(),
        "bias_error": (delta.std() / delta.numel() ** 0.5).item(),
        "kl": kl.mean().item(),
        "argmax": (want.argmax(-1) == got.argmax(-1)).double().mean().item(),
        "quarters": [x.abs().mean().item() for x in delta.chunk(4, 1)],
    }


def measure(
    model: Any, ids: Tensor, policies: dict[str, lc.Policy], *, prefix: int = PREFIX, block: int = BLOCK
) -> dict[str, dict[str, Any]]:
    """`compare` for every policy, and `of_fp32`: bytes of its states, those of the fp32 states = 1."""
    want, dense = log_probs(model, ids, None, prefix=prefix, block=block)
    rows = {}
    for name, policy in policies.items():
        start = time.perf_counter()
        got, held = log_probs(model, ids, policy, prefix=prefix, block=block)
        rows[name] = {**compare(want, got, ids), "of_fp32": held / dense, "seconds": time.perf_counter() - start}
        print(f"{name:28} {rows[name]['change']:.2e} nats, {rows[name]['seconds']:.0f} s", flush=True)
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| state | bytes, fp32 = 1 | mean change of log p | in the last quarter | worst | bias | KL | same argmax |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        lines.append(
            f"| {name} | {r['of_fp32']:.3f} | {r['change']:.2e} | {r['quarters'][-1]:.2e} | {r['worst']:.2e} "
            f"| {r['bias']:+.1e} ± {r['bias_error']:.0e} | {r['kl']:.1e} | {r['argmax']:.2%} |"
        )
    return "\n".join(lines)


def trained(name: str, steps: int, weights: Path | None) -> Any:
    """The demo's model after some steps of exact training, or as it was saved."""
    model = build_model(name)
    if weights is not None and weights.exists():
        model.load_state_dict(torch.load(weights, weights_only=True))
    elif steps:
        Lab(model, load_text()).fit(steps, LENGTH)
        if weights is not None:
            torch.save(model.state_dict(), weights)
    return model.eval()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3_next")
    parser.add_argument("--train", type=int, default=120, help="steps; 0 leaves the weights random")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--weights", type=Path, help="where the trained model is kept between runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "logprob.json")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = trained(args.model, args.train, args.weights)
    # Held-out windows one after another.
    text = load_text().heldout[..., :-1].reshape(-1, LENGTH)
    total = PREFIX + args.tokens
    windows = -(-total // LENGTH)
    ids = text[: args.sequences * windows].reshape(args.sequences, -1)[:, :total]
    rows = measure(model, ids, POLICIES)
    about = {
        "model": args.model,
        "steps": args.train,
        "sequences": args.sequences,
        "prefix": PREFIX,
        "tokens": args.tokens,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    head = (
        f"{args.model}, {args.train} steps of training; {args.sequences} sequences of {args.tokens} decoded tokens, "
        f"torch {torch.__version__}. Log-probabilities in nats, against transformers' own fp32 cache.\n\n"
    )
    args.out.with_suffix(".md").write_text(head + table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
