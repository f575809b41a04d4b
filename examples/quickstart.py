"""The main job with nothing around it: train, measure the 8-bit state, train with the 8-bit state, measure again.

    python examples/quickstart.py

`lattn-compile demo` does the same with a control, error bars, other models and formats; this file is the one to read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import lattn_compile as lc
from lattn_compile.demo import LENGTH, PREFIX, build_model, load_text

STEPS, MORE = 120, 30

torch.set_num_threads(1)  # matrices this small gain nothing from a second core
text = load_text()
model = build_model("qwen3_next")  # any transformers model with linear-attention layers, nothing special about it
compiled = torch.compile(model, backend="lattn_compile", options={"policy": "int8", "strict": True}, fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
generator = torch.Generator().manual_seed(0)


def loss(windows: torch.Tensor) -> torch.Tensor:
    logits = compiled(input_ids=windows[:, :-1]).logits[:, PREFIX:]
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1 + PREFIX :].flatten()) / torch.log(torch.tensor(2.0))


def train(steps: int, prefix: int, lr: float) -> None:
    optimizer.param_groups[0]["lr"] = lr
    for step in range(steps):
        # The first `prefix` tokens are exact prefill; the others write an int8 state, token by token, and the gradient
        # passes the rounding straight through. The length is data: no other value compiles anything again.
        with lc.training_phase(prefix):
            bits = loss(text.batch(generator))
            bits.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"  step {step}: {bits.item():.3f} bits/byte", flush=True)


def measure(prefix: int) -> float:
    # With autograd on, the graph compiled for training serves here too; without it, a second one would be compiled.
    with lc.training_phase(prefix):
        return sum(loss(windows).item() for windows in text.heldout) / len(text.heldout)


print("training with an exact state (the first step compiles, which takes a minute)", flush=True)
train(STEPS, prefix=LENGTH, lr=3e-3)
print(lc.last_report())
exact, ptq = measure(prefix=LENGTH), measure(prefix=PREFIX)
print("training on with the int8 state", flush=True)
train(MORE, prefix=PREFIX, lr=6e-4)
qat = measure(prefix=PREFIX)

print(f"held-out bits per byte: exact {exact:.4f}, int8 untrained {ptq:.4f}, int8 after {MORE} more steps {qat:.4f}")
for site in lc.last_report().rewritten:
    print(f"{site.path}: {site.state_bytes_before:,} -> {site.state_bytes_after:,} bytes of state per sequence")
