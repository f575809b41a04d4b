"""What it costs to find spelled-out recurrences: seconds of search against seconds of Inductor, for 1 to 64 layers.

    python benchmarks/recognition.py [--layers 1 4 16 48] [--inductor 48] [--form step|loop] [--out FILE.json]

Each layer is a spelled-out gated delta rule with its projections, gates and an MLP. "search" is everything this library
does to a graph before Inductor gets it (functional copy, search, self-check, rewrite); "plain Inductor" is
`backend="inductor"` on the same model, caches off. Times are process CPU seconds, so that a busy machine counts less.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.testing.backend import recorded

HEADS, KEY, VALUE, WIDTH = 4, 16, 16, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, HEADS * (2 * KEY + VALUE))
        self.gates = nn.Linear(WIDTH, 2 * HEADS)
        self.out = nn.Linear(HEADS * VALUE, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH))

    def forward(self, x: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, -1)).split([KEY, KEY, VALUE], -1)
        k = F.normalize(k, dim=-1)
        g, beta = self.gates(x).chunk(2, -1)
        g, beta = -F.softplus(g), beta.sigmoid()
        outs = []
        for t in range(tokens):
            S = S * g[:, t].exp()[..., None, None]
            u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])) * beta[:, t, :, None]
            S = S + k[:, t, :, :, None] * u[:, :, None]
            outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        x = x + self.out(torch.stack(outs, 1).flatten(2))
        return x + self.mlp(x), S


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        new = []
        for layer, S in zip(self.layers, states, strict=True):
            x, S = layer(x, S)
            new.append(S)
        return x, new


def measure(layers: int, tokens: int, *, inductor: bool) -> dict[str, float]:
    torch.manual_seed(0)
    model = Model(layers).eval()
    args = torch.randn(2, tokens, WIDTH), [torch.randn(2, HEADS, KEY, VALUE) for _ in range(layers)]
    row: dict[str, float] = {"layers": layers}
    with torch.no_grad():
        torch._dynamo.reset()
        before = len(lc.reports())
        with recorded() as record:
            began = time.process_time()
            torch.compile(model, backend="lattn_compile", options={"policy": "int8"}, fullgraph=True)(*args)
            total = time.process_time() - began
        report = lc.reports()[before]
        assert len(report.rewritten) == layers, report
        row |= {"nodes_after": len(record.graphs[-1].graph.nodes), "search_s": report.seconds, "with_dynamo_s": total}
        if inductor:
            torch._dynamo.reset()
            began = time.process_time()
            children = time.clock_gettime(time.CLOCK_MONOTONIC)
            with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
                torch.compile(model, fullgraph=True)(*args)
            row["inductor_cpu_s"] = time.process_time() - began
            row["inductor_wall_s"] = time.clock_gettime(time.CLOCK_MONOTONIC) - children
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64])
    parser.add_argument("--inductor", type=int, nargs="*", default=[48], help="layers for which Inductor is timed too")
    parser.add_argument("--form", choices=("step", "loop"), default="step", help="one token, or a loop of 8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tokens = 1 if args.form == "step" else 8
    measure(1, tokens, inductor=False)  # imports and caches of the process
    rows = [measure(n, tokens, inductor=n in args.inductor) for n in args.layers]
    print(f"torch {torch.__version__}, {platform.machine()}, form {args.form}")
    print("| layers | search s | s a layer | plain Inductor wall s | share |\n|---|---|---|---|---|")
    for r in rows:
        wall = r.get("inductor_wall_s")
        share = f"{wall:.1f} | {100 * r['search_s'] / wall:.1f} %" if wall else "- | -"
        print(f"| {r['layers']} | {r['search_s']:.2f} | {r['search_s'] / r['layers']:.3f} | {share} |")
    if args.out:
        made = {"command": "benchmarks/recognition.py", "torch": torch.__version__, "form": args.form, "rows": rows}
        args.out.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
