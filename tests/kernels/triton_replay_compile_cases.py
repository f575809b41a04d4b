"""The replay kernels compiled for GPUs that are not here, within budgets. Run by `test_triton_replay.py`.

The budgets are what speed rests on: hardly a spilled register in what windows wait for, a walk's state in registers
from product to product. No wgmma anywhere: with the ptxas that Triton brings it is not safe (`chunk.py`).
LATTN_COMPILE_ALL=1 compiles everything for every target.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lattn_compile.kernels import replay_run
from tests.kernels.offline import TARGETS, Built, build, launches, sketch
from tests.kernels.replay_calls import make_call

ALL = "LATTN_COMPILE_ALL" in os.environ
MODEL: dict[str, Any] = {
    "key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128, "window": 16, "lengths": (40,), "fmt": "int8",
}  # fmt: skip


def _compiled(
    target: str, monkeypatch: pytest.MonkeyPatch, only: tuple[str, ...] = (), inputs: torch.dtype = torch.bfloat16,
    **options: Any,
) -> dict[str, Built]:  # fmt: skip
    monkeypatch.setattr(replay_run, "_SHARE", 0.0)
    monkeypatch.setattr(replay_run, "_SMALL", 0)  # several stretches, so that every launch is among these
    monkeypatch.setattr(torch.version, "hip", "none" if target.startswith("gfx") else None)
    call = make_call(options.pop("kind", "gdn"), **MODEL | options).inputs_in(inputs)
    found = {}
    for launch in launches(call.both):
        if not only or launch.name in only:
            kept = {name: launch.constants[name] for name in ("READ", "KEEP", "BACK") if launch.constants.get(name)}
            found[" ".join((launch.name, *kept))] = build(launch, target)
    assert found
    return found


def _within(built: dict[str, Built], stack: int, shared: int = 64 * 1024) -> None:
    for name, kernel in built.items():
        assert kernel.shared <= shared, (name, kernel.shared)
        assert "wgmma" not in kernel.text, name
        if kernel.registers is not None:
            assert kernel.registers <= 255 and kernel.stack <= stack, (name, kernel.registers, kernel.stack)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_training_on_hopper_stays_in_registers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = _compiled("sm_90", monkeypatch, kind=kind, only=() if kind == "gdn" or ALL else ("relate", "deliver"))
    # A walk spills where it starts from a state that is no codes, so once a sequence at most in these formats.
    _within(
        {name: kernel for name, kernel in built.items() if not name.startswith("deliver")}, stack=256, shared=96 * 1024
    )
    _within(built, stack=512, shared=96 * 1024)
    if kind == "gdn":
        walk = built["walk READ"]
        # A tile's maximum takes two exchanges; the rest are operands that arrive, and outputs turned for their rows.
        assert walk.count("BAR") <= 20 and walk.count("SHFL") <= 12
        # The longest loop: of a walk, that over windows that start from a state that is no codes.
        assert len(walk.loop) <= 1800 and len(built["retreat READ"].loop) <= 1800


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "sm_90"])
def test_what_windows_wait_for_compiles_everywhere(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _within(_compiled(target, monkeypatch, only=() if ALL else ("walk",), fmt="fp8"), stack=384)
    if ALL:
        for options in (
            {"kind": "kda", "fmt": "fp8", "readout": "after_write"},
            {"kind": "linear", "fmt": "nvfp4"},
            {"fmt": "int8/32x16", "window": 8},
            {"paired": True, "fmt": "fp8/128x1", "cursor": (3,), "keep": True},
            {"inputs": torch.float32},
            {"factors": "int8"},
            {"factors": "fp8_e4m3", "kind": "kda", "fmt": "fp8", "cursor": (3,), "keep": True},
            {"factors": "bf16", "kind": "linear", "readout": "after_write"},
            {"factors": "int8", "inputs": torch.float32, "window": 8},
        ):
            if target.startswith("gfx") and options.get("inputs") is torch.float32:
                continue  # Triton has no products of float64 there, so "auto" takes no replay on AMD
            _compiled(target, monkeypatch, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS)
def test_records_in_few_bits_compile_everywhere(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _within(_compiled(target, monkeypatch, only=("encode", "walk"), factors="int8"), stack=1024)


@pytest.mark.skipif(not ALL, reason="a minute; set LATTN_COMPILE_ALL=1")
def test_long_windows_and_wide_keys_compile_without_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        {"window": 64, "lengths": (70,)},
        {"window": 33, "kind": "kda"},
        {"key_dim": 256, "value_dim": 256},
    ):
        _within(_compiled("sm_90", monkeypatch, **options), stack=4096, shared=200 * 1024)  # type: ignore[arg-type]


def test_inputs_of_any_strides_run_the_same_kernels() -> None:
    """Of channels apart, loads have another layout, and sums another order: bits would differ."""
    for kind, dtype in (("kda", torch.float32), ("gdn", torch.bfloat16)):
        call = make_call(kind, **MODEL).inputs_in(dtype)
        wide = call.map(lambda x: torch.stack((x, x), -1)[..., 0])
        kept, others = ({launch.key() for launch in launches(x.both)} for x in (call, wide))
        assert kept == others


def test_square_tiles_leave_every_product_its_own() -> None:
    """K as large as a window: operands have one shape, and Triton 3.6 tells them apart by nothing else."""
    for keys, window in ((16, 16), (32, 32)) if ALL else ((16, 16),):
        sizes = MODEL | {"key_dim": keys, "value_dim": 16, "window": window}
        for options in ({}, {"factors": "int8"}) if ALL else ({"factors": "int8"},):
            for kind in ("gdn", "kda") if ALL else ("gdn",):
                call = make_call(kind, **sizes | options).inputs_in(torch.bfloat16)
                for launch in launches(call.both):
                    if ALL or launch.name in ("relate", "prepare", "walk", "retreat"):
                        sketch(launch, "sm_90")
        if not ALL:
            call = make_call("kda", **sizes).inputs_in(torch.bfloat16)
            for launch in launches(call.both):
                if launch.name in ("relate", "prepare"):
                    sketch(launch, "sm_90")
