"""Quantization-aware distillation: the quantized model learns to say what the exact one says, on the suffix.

    python examples/qad.py [--steps 60] [--policy int8] [--save DIR]

No labels are needed: the loss is KL(exact model || quantized model). The exact model is the same compiled graph under a
phase that is all prefix, with the weights that training started from.
"""

from __future__ import annotations

from typing import Any

import torch
from _shared import arguments, check_restored, measure, nats, parser, table, train

import lattn_compile as lc
from lattn_compile import demo
from lattn_compile.integrations.distill import suffix_kl, swapped


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="lattn_compile", fullgraph=True, dynamic=False)


def main(argv: list[str] | None = None) -> None:
    options = arguments(parser(__doc__ or "", steps=60, lr=2e-4), argv)
    text = demo.load_text()
    model = lc.attach(demo.build_model(options.model, options.seed), options.policy)
    step = compiled(model)

    def exactly(windows: torch.Tensor) -> torch.Tensor:
        with lc.training_phase(demo.LENGTH):
            value = nats(step, windows).mean()
            value.backward()
        return value.detach()

    print("training with an exact state (the first step compiles, which takes half a minute)", flush=True)
    train(model, exactly, text, steps=options.pretrain, lr=3e-3, seed=options.seed)
    print(lc.last_report(), flush=True)
    rows = [("before", measure(step, text, demo.PREFIX), measure(step, text, demo.LENGTH))]

    # Without these, the teacher would be the student's own weights with an exact state, and nothing would hold the two
    # to the text: a model that forgets everything is the same with any state.
    teacher = [(p, p.detach().clone()) for p in model.parameters()]

    def distilled(windows: torch.Tensor) -> torch.Tensor:
        ids = windows[:, :-1]
        with swapped(teacher), lc.training_phase(demo.LENGTH):
            wanted = step(input_ids=ids).logits.detach()  # not under no_grad, which would be another graph to compile
        with lc.training_phase(demo.PREFIX):
            value = suffix_kl(step(input_ids=ids).logits, wanted, demo.PREFIX)
            value.backward()
        return value.detach()

    print("QAD: distilling the exact model into the quantized one", flush=True)
    train(model, distilled, text, steps=options.steps, lr=options.lr, seed=options.seed + 1, decay=0.0)
    rows.append((f"{options.steps} steps of QAD", measure(step, text, demo.PREFIX), measure(step, text, demo.LENGTH)))
    table(rows)

    model.save_pretrained(options.save)
    check_restored(options.save, compiled, text, rows[-1][1])


if __name__ == "__main__":
    main()
