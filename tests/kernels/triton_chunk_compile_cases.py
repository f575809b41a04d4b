"""Every kernel of the chunk form compiled for GPUs that are not here, within budgets. Run by `test_triton_chunk.py`.

LATTN_COMPILE_ALL=1 compiles more shapes and formats, which takes minutes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import chunk, chunk_fine
from tests.kernels.chunk_calls import make_call
from tests.kernels.offline import TARGETS, Built, build, launches, sketch

FULL: dict[str, Any] = {"key_dim": 128, "value_dim": 128, "ratio": 2, "key_heads": 2, "lengths": (200,)}
ALL = "LATTN_COMPILE_ALL" in os.environ
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB that a program may have."""

MORE: dict[str, dict[str, Any]] = {
    "gdn float32": {"dtype": torch.float32},
    "retention": {"rule": "additive", "beta": False},
    "kda": {"decay": "channel"},
    "kda float32": {"decay": "channel", "dtype": torch.float32},
    "256": {"key_dim": 256, "value_dim": 256},
    "256 kda": {"key_dim": 256, "value_dim": 256, "decay": "channel"},
    "odd": {"key_dim": 7, "value_dim": 5, "rule": "additive"},
    "int8": {"state_format": "int8", "chunk_size": 32},
    "int8 kda": {"state_format": "int8", "chunk_size": 64, "decay": "channel"},
    "int8 of all columns": {"state_format": "int8/*x*", "chunk_size": 64, "readout": "after_write"},
    "nvfp4": {"state_format": "nvfp4", "chunk_size": 100},
}


@pytest.fixture(autouse=True, params=[True, False], ids=["spread", "registers"])
def _spread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both loops over blocks, see `chunk_fine.is_spread`."""
    monkeypatch.setattr(chunk_fine, "is_spread", lambda device: request.param)
    return bool(request.param)


def _compiled(
    target: str, only: tuple[str, ...] = (), dtype: torch.dtype = torch.bfloat16, **more: Any
) -> dict[str, Built]:
    call = make_call(**FULL | more).inputs(dtype)
    found = {}
    for launch in launches(lambda: call.both(chunk)):
        if not only or launch.name in only:
            again = " again" if launch.constants.get("KEEP") or launch.constants.get("BACK") else ""
            found[launch.name + again] = build(launch, target)
    return found


def _checked(built: dict[str, Built], target: str) -> None:
    for name, kernel in built.items():
        assert kernel.shared <= SHARED[target] * 1024, (name, kernel.shared)
        # Its operands would be read while the program runs on, which its assembler does not know: see chunk.py.
        assert "wgmma" not in kernel.text, name


def test_no_kernel_has_a_product_that_hopper_reads_late() -> None:
    built = _compiled("sm_90")
    _checked(built, "sm_90")
    for name in ("head_rows", "pairs_rows", "solve_fine", "grad_pairs", "deliver"):
        assert built[name].stack == 0, (name, built[name].stack)


LOOPS = {
    ("spread", "head"): {
        "carry_cuda": (120, 850, 0),
        "carry_cuda again": (112, 850, 0),
        "carry_back_cuda": (168, 1150, 0),
    },
    ("spread", "channel"): {"carry_cuda": (176, 1050, 32), "carry_back_cuda": (216, 1300, 32)},
    ("registers", "head"): {"carry": (480, 2600, 500), "carry_back": (672, 4100, 1000)},
    ("registers", "channel"): {"carry": (704, 3100, 550), "carry_back": (864, 4300, 1000)},
}
"""Of a loop over blocks: products of 16 x 8 x 16 a warp, and at most so many instructions and bytes of stack."""


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_loops_over_blocks_have_little_but_products(decay: str, _spread: bool) -> None:
    built = _compiled("sm_90", ("carry", "carry_back", "carry_cuda", "carry_back_cuda"), decay=decay)
    _checked(built, "sm_90")
    for name, (products, instructions, stack) in LOOPS["spread" if _spread else "registers", decay].items():
        assert built[name].count("HMMA") == products, (name, built[name].count("HMMA"))
        assert len(built[name].loop) <= instructions, (name, len(built[name].loop))
        assert (built[name].stack or 0) <= stack, (name, built[name].stack)
        if _spread:  # where copies came, behind a maximum, and before each of three products
            assert built[name].count("BAR") == 5, (name, built[name].count("BAR"))


TILES = {
    "block_cuda": (148, 1850, 200, 3),
    "block_cuda again": (188, 2250, 220, 3),
    "keys_cuda": (120, 620, 450, 2),
    "levels_cuda": (40, 620, 150, 0),
}
"""Of the longest loop, products, and at most so many instructions, bytes of the kernel's stack, and barriers."""


def test_what_a_warp_makes_of_its_tile_alone_waits_for_no_other() -> None:
    built = _compiled("sm_90", ("block_cuda", "keys_cuda", "levels_cuda"), decay="channel")
    if not built:
        pytest.skip("these are the spread ones")
    _checked(built, "sm_90")
    for name, (products, instructions, stack, barriers) in TILES.items():
        assert built[name].count("HMMA") == products, (name, built[name].count("HMMA"))
        assert len(built[name].loop) <= instructions, (name, len(built[name].loop))
        assert (built[name].stack or 0) <= stack, (name, built[name].stack)
        assert built[name].count("BAR") <= barriers, (name, built[name].count("BAR"))


@pytest.mark.parametrize("target", [t for t in TARGETS if ALL or t != "sm_90"])
def test_the_kernels_compile_for_every_target(target: str, _spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if _spread and not target.startswith("sm_"):
        pytest.skip("NVIDIA's only")
    monkeypatch.setattr(chunk_fine, "shared_memory", lambda device: SHARED[target] * 1024)
    only = (
        ()
        if ALL
        else (
            *("block_fine", "carry", "grad_levels"),
            *("block_cuda", "carry_cuda", "carry_back_cuda", "keys_cuda", "levels_cuda"),
        )
    )
    for decay in ("head", "channel") if ALL or _spread else ("channel",):
        _checked(_compiled(target, only, decay=decay), target)


SIZES = [(keys, values) for keys in (16, 32, 64, 128, 256) for values in (16, 32, 256)]
"""K x V as kernels know them: other K are these but for a mask, other V but for the number of programs."""

LONG = ("solve_fine", "grad_levels", "grad_pairs", "deliver")
"""Left out by default: the first takes no size, the others are compiled for K = V = 128 anyway."""


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_every_size_has_room_and_no_product_that_hopper_reads_late(decay: str, _spread: bool) -> None:
    """For every dtype that `auto` takes; by default bf16 and the ends of what there is."""
    if not ALL and _spread:
        pytest.skip("of these sizes the loops are in registers")
    found = {}
    for keys, values in SIZES if ALL else ((16, 16), (256, 32)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if ALL else (torch.bfloat16,):
            sizes = {"key_dim": keys, "value_dim": values, "decay": decay, "ratio": 2, "key_heads": 1, "lengths": (90,)}
            call = make_call(**sizes).inputs(dtype)
            for launch in launches(lambda call=call: call.both(chunk)):  # type: ignore[misc]
                # Of the widest, what has products of a whole block or takes most memory.
                wanted = keys == 16 or any(part in launch.name for part in ("rows", "fine", "back"))
                if ALL or (wanted and launch.name not in LONG):
                    found[launch.key()] = (keys, values, dtype), launch
    assert found
    for what, launch in found.values():
        built = sketch(launch, "sm_90")
        assert built.shared <= SHARED["sm_90"] * 1024, (launch.name, what, built.shared)
        assert built.text and "wgmma" not in built.text, (launch.name, what)


@pytest.mark.skipif(not ALL, reason="takes minutes")
@pytest.mark.parametrize("name", MORE)
def test_every_kind_of_call_compiles(name: str) -> None:
    _checked(_compiled("sm_90", **MORE[name]), "sm_90")


def test_what_is_refused_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(key_dim: int = 128, value_dim: int = 128, spec: str | None = None, **more: Any) -> str | None:
        return chunk.supports(
            device=more.pop("device", torch.device("cuda")),
            dtype=more.pop("dtype", torch.float32),
            key_dim=key_dim,
            value_dim=value_dim,
            quantize=None if spec is None else Quantizer(parse(spec), **more),
        )

    for sizes in ((1, 1), (7, 5), (128, 128), (256, 256)):
        assert reason(*sizes) is None
    assert "cpu" in str(reason(device=torch.device("cpu")))
    assert "float64" in str(reason(dtype=torch.float64))
    assert "257" in str(reason(257))
    monkeypatch.setattr(chunk, "WRITES", frozenset({"int8"}))
    assert reason(spec="int8") is None
    assert "fp8" in str(reason(spec="fp8"))
    assert "stochastic" in str(reason(spec="int8", rounding="stochastic"))
    assert "hadamard_k" in str(reason(spec="int8", rotation="hadamard_k"))
    assert "block_v = 48" in str(reason(spec="int8/*x48"))
    assert "fit" in str(reason(256, 256, spec="int8/*x*"))
