"""Quantization-aware distillation: the quantized model learns to say what the exact one says, on the suffix.

    python examples/qad.py [--steps 60] [--teacher start | self] [--policy int8] [--save DIR]

The loss is KL(exact model || quantized model). The exact model is no second model: it is the same compiled graph under
a phase that is all prefix. With which weights is a choice:

* start: those that training started from, kept beside the model. No labels are needed.
* self: the present ones, which takes no memory. Half the loss is the usual one then: alone, nothing would hold the pair
  to the text, because a model that remembers nothing is the same with any state.
"""

from __future__ import annotations

from typing import Any

import torch
from _shared import arguments, check_restored, cross_entropy, measure, nats, parser, table, train

import lattn_compile as lc
from lattn_compile import demo
from lattn_compile.integrations.distill import suffix_kl, swapped


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="lattn_compile", fullgraph=True, dynamic=False)


def main(argv: list[str] | None = None) -> None:
    made = parser(__doc__ or "", steps=60, lr=2e-4)
    made.add_argument("--teacher", choices=("start", "self"), default="start", help="whose weights the exact model has")
    options = arguments(made, argv)
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

    share = 1.0 if options.teacher == "start" else 0.5
    teacher = [(p, p.detach().clone()) for p in model.parameters()] if options.teacher == "start" else []

    def distilled(windows: torch.Tensor) -> torch.Tensor:
        ids = windows[:, :-1]
        with swapped(teacher), lc.training_phase(demo.LENGTH):
            wanted = step(input_ids=ids).logits.detach()  # not under no_grad, which would be another graph to compile
        with lc.training_phase(demo.PREFIX):
            logits = step(input_ids=ids).logits
            value = share * suffix_kl(logits, wanted, demo.PREFIX)
            if share < 1.0:
                value = value + (1.0 - share) * cross_entropy(logits, windows).mean()
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
