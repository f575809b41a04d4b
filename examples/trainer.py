"""QAT and QAD with transformers' Trainer: a callback for the phase, a mixin for lengths and distillation.

    python examples/trainer.py [--steps 60] [--qad 0.5] [--policy int8] [--save DIR]

Needs accelerate, as every Trainer does (pip install accelerate). The texts are of different lengths and right-padded,
and each has its own prefix; the labels of the prefix are -100, so the loss is that of the suffix.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from _shared import arguments, parser
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

import lattn_compile as lc
from lattn_compile import demo
from lattn_compile.integrations.transformers import LattnCallback, LattnTrainerMixin


class LattnTrainer(LattnTrainerMixin, Trainer):
    pass


class Windows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Items of LENGTH bytes at most, each with a prefix of a quarter of it, or all of it if `exact`."""

    def __init__(self, windows: torch.Tensor, *, exact: bool) -> None:
        self.windows, self.exact = windows, exact

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids, where = self.windows[i], torch.arange(demo.LENGTH)
        n = demo.LENGTH - (i * 37) % (demo.LENGTH // 4)
        mask = (where < n).long()
        labels = torch.where((where >= n // 4) & (where < n), ids, -100)
        return {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "labels": labels,
            "prefix_lengths": n if self.exact else n // 4,
        }


def main(argv: list[str] | None = None) -> None:
    options_parser = parser(__doc__ or "", steps=60, lr=1e-3)
    options_parser.add_argument("--qad", type=float, default=0.0, help="share of KL(exact || quantized) in the loss")
    options = arguments(options_parser, argv)
    text = demo.load_text()
    heldout = text.heldout[..., : demo.LENGTH].flatten(0, 1)
    start = torch.randint(
        len(text.train) - demo.LENGTH, (4096, 1), generator=torch.Generator().manual_seed(options.seed)
    )
    train = text.train[start + torch.arange(demo.LENGTH)]

    def trainer(model: Any, exact: bool, steps: int, lr: float, qad: float = 0.0) -> LattnTrainer:
        settings = TrainingArguments(
            tempfile.mkdtemp(),
            max_steps=max(1, steps),
            learning_rate=lr,
            lr_scheduler_type="cosine",
            warmup_steps=steps // 6,
            per_device_train_batch_size=demo.BATCH,
            per_device_eval_batch_size=demo.BATCH,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=options.seed,
        )
        # The prefix is a column here. For one prefix everywhere: a plain Trainer with callbacks=[LattnCallback(64)].
        callback = LattnCallback(0, state_error_every=None if exact else 20)
        made = LattnTrainer(
            model=model,
            args=settings,
            train_dataset=Windows(train, exact=exact),
            eval_dataset={"exact": Windows(heldout, exact=True), "quantized": Windows(heldout, exact=False)},
            callbacks=[callback],
            qad=qad,
        )
        made.remove_callback(PrinterCallback)
        return made

    def evaluate(label: str, made: LattnTrainer) -> dict[str, float]:
        metrics = made.evaluate()
        found = {name: metrics[f"eval_{name}_loss"] / math.log(2) for name in ("quantized", "exact")}
        print(f"{label:28} quantized {found['quantized']:.4f}   exact {found['exact']:.4f} bits/byte", flush=True)
        return found

    model = lc.attach(demo.build_model(options.model, options.seed), options.policy)
    model.compile(backend="lattn_compile", fullgraph=True, dynamic=False)
    print("training with an exact state, then evaluating (each compiles once)", flush=True)
    exactly = trainer(model, True, options.pretrain, 3e-3)
    exactly.train()
    evaluate("before", exactly)

    quantized = trainer(model, False, options.steps, options.lr, options.qad)
    quantized.train()
    trained = evaluate(f"{options.steps} steps of {'QAD' if options.qad else 'QAT'}", quantized)
    for entry in quantized.state.log_history:
        for name in (n for n in entry if n.startswith("state_error/")):
            print(f"  step {entry['step']}: {name} {entry[name]:.4f}")

    quantized.save_model(options.save)  # the Trainer's own way; its checkpoints hold the recipe as well
    restored = lc.attach(AutoModelForCausalLM.from_pretrained(options.save), options.save)
    restored.compile(backend="lattn_compile", fullgraph=True, dynamic=False)
    again = evaluate("restored", trainer(restored, True, 1, 0.0))
    print("same numbers:", again == trained, flush=True)
    if again != trained:
        raise SystemExit("the restored model is not the saved one")


if __name__ == "__main__":
    main()
