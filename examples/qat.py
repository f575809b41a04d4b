"""Quantization-aware training: cross entropy of the suffix, whose tokens write a quantized state.

    python examples/qat.py [--steps 60] [--policy int8] [--save DIR]

A tiny Qwen3-Next learns English with an exact state. Then it learns on, twice from the same point: with an exact state
(the control) and with the state that decoding will have. What QAT gained is the difference of these two when decoded.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from _shared import arguments, check_restored, measure, nats, parser, table, train

import lattn_compile as lc
from lattn_compile import demo


def compiled(model: Any) -> Any:
    # No options: the recipe is the attached one. Works as well: model.compile(...), or layer.compile(...) one by one.
    return torch.compile(model, backend="lattn_compile", fullgraph=True, dynamic=False)


def main(argv: list[str] | None = None) -> None:
    options = arguments(parser(__doc__ or "", steps=60, lr=6e-4), argv)
    text = demo.load_text()
    model = lc.attach(demo.build_model(options.model, options.seed), options.policy)
    step = compiled(model)

    def loss(prefix: int) -> Any:
        def of(windows: torch.Tensor) -> torch.Tensor:
            # The first `prefix` tokens are exact prefill, the others write a quantized state; the gradient passes the
            # rounding straight through, and the prefix gets its part of it. A length is data: no other one recompiles.
            with lc.training_phase(prefix):
                value = nats(step, windows).mean()
                value.backward()
            return value.detach()

        return of

    print("training with an exact state (the first step compiles, which takes half a minute)", flush=True)
    train(model, loss(demo.LENGTH), text, steps=options.pretrain, lr=3e-3, seed=options.seed)
    print(lc.last_report(), flush=True)
    rows = [("before", measure(step, text, demo.PREFIX), measure(step, text, demo.LENGTH))]
    before = copy.deepcopy(model.state_dict())

    print("control: training on with an exact state", flush=True)
    train(model, loss(demo.LENGTH), text, steps=options.steps, lr=options.lr, seed=options.seed + 1)
    rows.append(
        (f"{options.steps} more steps, exact", measure(step, text, demo.PREFIX), measure(step, text, demo.LENGTH))
    )

    print("QAT: training on with the quantized state", flush=True)
    model.load_state_dict(before)
    train(model, loss(demo.PREFIX), text, steps=options.steps, lr=options.lr, seed=options.seed + 1)
    rows.append(
        (f"{options.steps} more steps, QAT", measure(step, text, demo.PREFIX), measure(step, text, demo.LENGTH))
    )
    table(rows)

    model.save_pretrained(options.save)
    check_restored(options.save, compiled, text, rows[-1][1])


if __name__ == "__main__":
    main()
