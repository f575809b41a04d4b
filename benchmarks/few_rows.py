"""Products of a decode step, a few rows times a matrix of weights, beside a library's: microseconds of one.

    python benchmarks/few_rows.py --out rows.jsonl [--shape 0 3] [--rows 1 8] [--tiles]

Shapes are those of `benchmarks/model_decode.py`. Each number is that of a CUDA graph of two dozen launches, one behind
the other, on different weights that no cache holds together, and of the floor, which is reading the weights at the
bandwidth of a copy. Of 17 rows and more a sum that is cut into pieces is added up by a kernel of torch's here, which is
a part of the next one in a compiled graph. `--tiles` tries launches of other constants than the kernel's own choice.
Processes share a GPU by taking turns (`--lock`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:] = [p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent]

from lattn_compile.bench.timing import milliseconds  # noqa: E402

SHAPES = [
    (12288, 2048, False), (5120, 2048, True), (2048, 5120, False), (2048, 4096, False), (8192, 2048, False),
    (512, 2048, False), (32000, 2048, False),
]  # fmt: skip
"""Columns, depth, and whether it is a pair with `silu`."""

TILES = [
    (4, 16, 64, 4, 4), (4, 16, 64, 4, 6), (4, 16, 128, 4, 3), (8, 16, 64, 8, 3), (4, 32, 64, 4, 4), (2, 32, 64, 4, 5),
    (8, 32, 64, 8, 3), (2, 16, 128, 2, 5), (1, 16, 256, 1, 4), (1, 32, 128, 4, 5), (1, 64, 128, 4, 4),
    (4, 64, 64, 8, 3), (1, 16, 256, 1, 3), (2, 16, 128, 2, 4), (2, 16, 128, 2, 6), (4, 16, 64, 4, 8), (8, 16, 64, 8, 4),
]  # fmt: skip
"""PARTS, BLOCK_N, BLOCK_K, warps, stages."""

TILES_OF_SOME = [
    (1, 64, 64, 4, 4), (1, 64, 64, 4, 6), (1, 64, 64, 4, 8), (1, 32, 64, 4, 6), (1, 128, 64, 4, 4), (1, 128, 64, 4, 6),
    (1, 128, 64, 4, 8), (1, 128, 64, 8, 6), (4, 64, 64, 4, 4), (4, 64, 64, 4, 6), (4, 64, 64, 4, 8), (8, 64, 64, 4, 4),
    (8, 128, 64, 4, 4), (2, 64, 64, 4, 8),
]  # fmt: skip
"""SPLITS, BLOCK_N, BLOCK_K, warps, stages: of 17 rows and more."""

LAUNCHES = 24


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(call: Callable[[int], Any]) -> float:
    """Microseconds of `call(i)`, recorded for LAUNCHES numbers i."""
    return 1e3 * milliseconds(lambda: [call(i) for i in range(LAUNCHES)]) / LAUNCHES


def measure(shape: tuple[int, int, bool], rows: int, tiles: bool, lock: Path | None) -> Iterator[dict[str, Any]]:
    import torch
    from torch.nn.functional import silu

    from lattn_compile.kernels import few_rows, some_rows

    kernels = few_rows if rows <= few_rows.MOST_ROWS else some_rows
    columns, depth, pair = shape
    copies = max(2, min(LAUNCHES, (1 << 28) // (2 * columns * depth)))
    new = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, depth, **new)
    weights = [[torch.randn(columns, depth, **new) / depth**0.5 for _ in range(1 + pair)] for _ in range(copies)]
    wide = [x.double() @ w.double().T for w in weights[0]]
    want = silu(wide[0]) * wide[1] if pair else wide[0]

    def library(i: int) -> Any:
        products = [x @ w.T for w in weights[i % copies]]
        return silu(products[0]) * products[1] if pair else products[0]

    def ours(i: int) -> Any:
        return kernels.forward(x, *weights[i % copies], pair=pair)[0]

    row = {"columns": columns, "depth": depth, "pair": pair, "rows": rows, "bytes": 2 * columns * depth * (1 + pair)}
    calls: list[tuple[str, Callable[[int], Any], Any]] = [("library", library, None), ("ours", ours, None)]
    if tiles:
        calls += [("ours", ours, tile) for tile in (TILES if kernels is few_rows else TILES_OF_SOME)]
    for name, call, tile in calls:
        try:
            with contextlib.ExitStack() as stack:
                if tile is not None:
                    cut = "PARTS" if kernels is few_rows else "SPLITS"
                    chosen = dict(zip((cut, "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"), tile, strict=True))
                    if kernels is few_rows:
                        chosen["ROWS"] = max(8, 1 << (rows - 1).bit_length())
                    stack.enter_context(mock.patch.object(kernels, "tile", lambda *args, c=chosen: c))
                error = float((call(0).double() - want).abs().max() / want.abs().max())
                with turn(lock):
                    us = timed(call)
            yield row | {"what": name, "tile": tile, "us": round(us, 2), "error": error}
        except Exception as e:
            yield row | {"what": name, "tile": tile, "refused": f"{type(e).__name__}: {e}"[:200]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", type=int, nargs="+", default=list(range(len(SHAPES))))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--lock", type=Path)
    args = parser.parse_args()
    for index in args.shape:
        for rows in args.rows:
            for row in measure(SHAPES[index], rows, args.tiles, args.lock):
                with args.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
