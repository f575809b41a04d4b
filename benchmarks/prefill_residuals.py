"""How well each approximate inverse solves the chunks of trained models: residuals of the quality benchmark's bases.

    python benchmarks/prefill_residuals.py --bases FOLDER [--count 4] [--seeds 3] [--out FILE.json]

FOLDER has the `base_<kind>_<seed>.safetensors` of a run of `python -m benchmarks.quality`. Held-out sequences of text,
of recall and of copying, 1,088 bytes each, go through the exact model; every linear layer's own keys, gates and beta
also go through each inverse, in float32, so that no error of one layer reaches the next. Printed and written for each
base, layer and inverse: chunks and heads, how many left a residual `‖(I + A) T − I‖` over `max_residual`, and the
largest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import lattn_compile as lc
from benchmarks.quality.config import FULL, INVERSES
from benchmarks.quality.lab import Lab
from benchmarks.quality.models import exact, linear_layers, logits_of, recurrence
from lattn_compile.ops.residuals import inverse_residuals, reset_inverse_residuals

APPROXIMATE = (lc.Neumann(7), *(x for x in INVERSES.values() if x != "exact"))


@torch.no_grad()
def measured(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """A row for each linear layer and inverse."""
    found: list[dict[str, Any]] = []

    def layer(i: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        for inverse in APPROXIMATE:
            reset_inverse_residuals()
            policy = lc.Policy(write=lc.Exact(), prefill=lc.Prefill(inverse=inverse))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", lc.LattnWarning)  # an excess is what is looked for
                lc.linear_attention(
                    q, k, v, g, beta, policy=policy, prefix_lengths=q.shape[1], use_qk_l2norm_in_kernel=True
                )
                (one,) = inverse_residuals()
            found.append({"layer": i, "inverse": one.inverse, "chunks": one.chunks, "over": one.over})
            found[-1]["largest"] = one.largest
        return exact(q, k, v, g, beta)[0]

    model.eval()
    with recurrence(layer, len(linear_layers(model))):
        logits_of(model, ids)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bases", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=4, help="sequences of each kind")
    parser.add_argument("--seeds", type=int, default=FULL.seeds)
    parser.add_argument("--commit", help="that this is run at, for the file")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    lab = Lab(FULL, args.bases, "cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.cat([batch.ids[: args.count, :-1] for batch in lab.data("short").values()]).to(lab.device)
    result: dict[str, Any] = {
        "command": f"python benchmarks/prefill_residuals.py --bases FOLDER --count {args.count} --seeds {args.seeds}",
        "commit": args.commit, "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if lab.device == "cuda" else f"{os.cpu_count()} CPU cores",
        "sequences": len(ids), "tokens": ids.shape[1],
        "max_residual": lc.Prefill().max_residual, "rows": [],
    }  # fmt: skip
    for kind in FULL.models:
        for seed in range(args.seeds):
            for row in measured(lab.load(kind, seed), ids):
                result["rows"].append({"model": kind, "seed": seed, **row})
                print(result["rows"][-1], flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
