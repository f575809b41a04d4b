"""What every process of a run shares: settings, data, checkpoints, and the files that results are written to."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lattn_compile as lc
from benchmarks.quality.config import FULL, METHODS, REDUCED, TINY, Batches, Settings, policy_named
from benchmarks.quality.models import build
from benchmarks.quality.tasks import Batch, Mixture, measured
from benchmarks.quality.text import load_corpus
from benchmarks.quality.train import Arm

__all__ = ["NAMED", "Lab"]

NAMED = {"full": FULL, "reduced": REDUCED, "tiny": TINY}

_FURTHER = 1000
"""What the seed of a further training's batches is ahead of its base's."""
_HELD_OUT = 7


@dataclass
class Lab:
    """One run.

    Attributes:
        folder: of parts and checkpoints. device: "cuda" or "cpu".
    """

    settings: Settings
    folder: Path
    device: str

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.corpus = load_corpus(self.settings.text)

    def data(self, on: str = "all") -> dict[str, Batch]:
        """The held-out sequences: "all", "few" of them, or few and "short"."""
        s = self.settings
        counts = dict(zip(("text", "recall", "copy"), s.counts if on == "all" else s.few, strict=True))
        return measured(self.corpus.heldout, counts, s.short_horizon if on == "short" else s.horizon, _HELD_OUT)

    def mixture(self, batches: Batches, seed: int) -> Mixture:
        s = self.settings
        return Mixture(self.corpus.train, batches.count, batches.length, seed, (s.recall, s.copy), batches.spacing)

    def base_arm(self, kind: str, seed: int, *, stage: int = 0, linear: int | None = None) -> Arm:
        """A new base, with batches of a stage of the curriculum; `linear`: with so many linear layers instead."""
        s = self.settings
        size = s.size if linear is None else replace(s.size, linear=linear)
        model = build(kind, size, seed).to(self.device)
        return Arm(f"{kind} {seed}", model, s.base, self.stage(stage, seed))

    def stage(self, number: int, seed: int) -> Mixture:
        """The batches of one stage of the curriculum."""
        return self.mixture(self.settings.curriculum[number][0], seed + 100 * number)

    def further_arm(self, kind: str, method: str, policy: str, seed: int, *, linear: int | None = None) -> Arm:
        """A further training from the base, or with `linear` from new weights of so many linear layers."""
        s = self.settings

        def model() -> Any:
            if linear is not None:
                return build(kind, replace(s.size, linear=linear), seed).to(self.device)
            return self.load(kind, seed)

        how = METHODS[method]
        teacher = model().requires_grad_(False) if how.loss == "distil" else None
        data = self.mixture(s.further, seed + _FURTHER)
        name = f"{kind} {seed} {method} {policy}"
        return Arm(name, model(), how, data, policy=policy_named(policy), teacher=teacher)

    def checkpoint(self, kind: str, seed: int, *, draft: bool = False) -> Path:
        return self.folder / f"{'draft' if draft else 'base'}_{kind}_{seed}.safetensors"

    def save(self, kind: str, seed: int, model: Any, *, draft: bool = False) -> None:
        """The weights in float16. A draft is of a training that goes on: what there is, should it die."""
        from safetensors.torch import save_file

        tensors = {name: p.detach().half().cpu().contiguous() for name, p in model.named_parameters()}
        target = self.checkpoint(kind, seed, draft=draft)
        whole = target.with_suffix(".tmp")
        save_file(tensors, whole)
        whole.replace(target)

    def load(self, kind: str, seed: int, device: str | None = None) -> Any:
        from safetensors.torch import load_file

        model = build(kind, self.settings.size, seed)
        weights = load_file(self.checkpoint(kind, seed))
        model.load_state_dict({name: x.float() for name, x in weights.items()}, strict=False)
        assert set(weights) == {name for name, _ in model.named_parameters()}
        return model.to(self.device if device is None else device)

    def write(self, name: str, part: dict[str, Any]) -> None:
        """One part of the results, at once or not at all."""
        path = self.folder / "parts" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}.tmp")
        whole.write_text(json.dumps(part))
        whole.replace(path)

    def has(self, name: str) -> bool:
        return (self.folder / "parts" / f"{name}.json").exists()

    def attempt(self, name: str, what: Callable[[], Any]) -> bool:
        """Does `what` unless it failed before or a process died of it. A failure is written down and the next thing
        goes on, in a new process where this one has no device any more."""
        marker = f"began {name}"
        if self.has(f"failed {name}"):
            return False
        if self.has(marker):
            self.write(f"failed {name}", {"failed": name, "why": "the process that did it ended"})
            return False
        self.write(marker, {})
        began = time.perf_counter()
        try:
            what()
        except Exception:
            why = traceback.format_exc()
            print(f"{name} failed\n{why}", flush=True)
            self.write(f"failed {name}", {"failed": name, "why": why[-2000:]})
            self.forget(marker)
            if "CUDA error" in why or "Triton Error [CUDA]" in why:
                os._exit(3)  # nothing runs in this process after it; another one goes on behind this
            return False
        self.forget(marker)
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        return True

    def forget(self, name: str) -> None:
        (self.folder / "parts" / f"{name}.json").unlink(missing_ok=True)

    def forget_rows(self, kind: str, seed: int, weights: str) -> None:
        """What was measured on some weights."""
        for path in (self.folder / "parts").glob(f"{kind} {seed} {weights} *.json"):
            path.unlink()

    def policies(self, kind: str, policy: lc.Policy | None) -> list[lc.Policy | None]:
        return [policy] * self.settings.size.linear
