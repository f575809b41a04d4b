"""Every kernel of the decode form compiled for GPUs that are not here, within budgets. Run by `test_triton_compile.py`.

The budgets are what the kernel's speed rests on: no spilled registers, no barrier and no shared memory in the token
loop of a program that is one warp, few shuffles. Nothing is unsupported anywhere: fp8 is arithmetic on int32 and fp32,
so that sm_80, which has no such type, computes it too. LATTN_COMPILE_ALL=1 compiles every format for every target.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.kernels.decode_calls import make_call

pytest.importorskip("triton")

from lattn_compile.kernels import decode
from tests.kernels.decode_meta import training_bytes
from tests.kernels.offline import TARGETS, Built, build, launches

FULL: dict[str, Any] = {"key_dim": 128, "value_dim": 128, "ratio": 2, "key_heads": 2, "lengths": (4, 4)}
ALL = "LATTN_COMPILE_ALL" in os.environ
FORMATS = [None, "bf16", "fp16", "int8/*x16", "int8/*x32", "int8/*x64", "int8/*x*", "int8/16x16", "fp8", "fp8/*x1"]


def _compiled(target: str, *, training: bool = True, only: str = "", **options: Any) -> dict[str, Built]:
    call = make_call(**FULL | options).map(lambda x: x if x.dim() == 4 else x.to(torch.bfloat16))

    def run() -> None:
        if training:
            call.both(decode, 4)
        else:
            call.forward(decode)

    found = {}
    for launch in launches(run):
        name = launch.name + (" again" if launch.constants.get("SAVE") else "")
        if name.startswith(only):
            found[name] = build(launch, target)
    return found


def _within_registers(built: dict[str, Built], stack: int = 0) -> None:
    for name, kernel in built.items():
        assert kernel.shared <= 48 * 1024, name
        if kernel.registers is not None:
            assert kernel.registers <= 255 and kernel.stack <= stack, (name, kernel.registers, kernel.stack)


def test_the_token_loop_of_one_warp_waits_for_no_other() -> None:
    built = _compiled("sm_90", state_format="int8/*x16")
    _within_registers(built)
    for name in ("advance", "advance again", "retreat"):
        loop = built[name]
        assert loop.count("BAR") == 0 and loop.count("LDS", "STS") == 0, name
    # 12 for each sum over keys; what a warp's maximum takes is one instruction.
    assert built["advance"].count("SHFL") <= 24
    assert built["advance again"].count("SHFL") <= 12
    # Per value: decay, two products, update, maximum, code, code's two roundings, its value; two values a channel.
    assert len(built["advance"].loop) <= 900
    assert len(built["advance again"].loop) <= 830
    assert len(built["retreat"].loop) <= 1300


def test_a_tile_of_several_warps_takes_one_exchange() -> None:
    built = _compiled("sm_90", training=False, state_format="int8/*x64")
    _within_registers(built)
    assert built["advance"].count("BAR") <= 3
    assert built["advance"].count("SHFL") <= 28


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (60, 33)])
def test_forward_and_backward_spread_a_state_alike(key_dim: int, value_dim: int) -> None:
    """What makes a state that the backward computes again the same to the bit: its sums run in one order."""
    for state_format in (None, "int8/*x32", "bf16"):
        built = _compiled("sm_90", state_format=state_format, key_dim=key_dim, value_dim=value_dim, only="advance")
        layouts = {kernel.layout for kernel in built.values()}
        assert len(built) == 2 and len(layouts) == 1 and "" not in layouts, layouts


@pytest.mark.parametrize(
    ("only", "right", "options"), [("advance", True, {"state_format": "int8"}), ("retreat", False, {"value_dim": 16})]
)
def test_sums_go_over_neighbouring_lanes(
    only: str, right: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One column a thread, or a layout that Triton does not choose: sums over joined axes would take wrong lanes."""
    from lattn_compile.kernels.common import layout

    monkeypatch.setattr(layout, "FLIP", layout.FLIP if right else not layout.FLIP)
    for name, kernel in _compiled("sm_90", only=only, **{"key_dim": 16, "value_dim": 5} | options).items():
        assert "tt.reduce" in kernel.ttgir
        assert kernel.scattered_reductions() == [], name


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str) -> None:
    stack = 0 if target == "sm_90" else 64  # spilled bytes a thread: sm_90 is what the kernels are tuned for
    for state_format in FORMATS if ALL else ["fp8"]:
        _within_registers(_compiled(target, training=ALL, state_format=state_format), stack)
    if ALL:
        for options in (
            {"decay": "channel", "state_format": "int8/*x32"},
            {"decay": None, "rule": "additive", "beta": False, "state_format": "fp8"},
            {"key_dim": 256, "value_dim": 256, "state_format": "int8/*x64"},
            {"key_dim": 60, "value_dim": 100, "state_format": "int8"},
        ):
            _within_registers(_compiled(target, **options), stack)
        # These spill a little, on some targets: what nvfp4 keeps for the backward is fp32, an output read after the
        # write needs a second state.
        _compiled(target, state_format="nvfp4")
        _compiled(target, state_format="fp8", readout="after_write")
        _compiled(target, decay="channel")


def _on_meta(batch: int, tokens: int, decay: str = "head") -> list[torch.Tensor]:
    """q, k, v, g, beta of H = 16, HV = 32, K = V = 128."""
    sizes = ((16, 128), (16, 128), (32, 128), (32,) if decay == "head" else (32, 128), (32,))
    dtypes = (torch.bfloat16,) * 3 + (torch.float32, torch.bfloat16)
    return [torch.empty(batch, tokens, *s, dtype=d, device="meta") for s, d in zip(sizes, dtypes, strict=True)]


@pytest.mark.parametrize("state_format", [None, "int8", "nvfp4", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_length_is_read_on_the_host(state_format: str | None, packed: bool) -> None:
    """Else a CUDA graph could not record the op. A prefix is the chunk form's."""
    sequences = 3 if packed else 2
    counts = torch.empty(sequences, dtype=torch.int32, device="meta")
    cursor = None if state_format is None else counts
    ends = torch.empty(4, dtype=torch.int32, device="meta") if packed else None
    state = torch.empty(sequences, 32, 128, 128, device="meta")
    options = {"write": "exact"} if state_format is None else {"write": "token", "state_format": state_format}
    tensors = _on_meta(1 if packed else 2, 100)
    training_bytes([*tensors, state], (ends, None, counts, cursor), scale=1.0, checkpoint_every=16, **options)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("state_format", [*FORMATS, "fp8/*x*", "nvfp4"])
def test_training_holds_no_more_than_its_tensors_again(state_format: str | None, decay: str) -> None:
    """q, k, v, g, beta and o of B = 4, T = 4,096, and their gradients."""
    x = _on_meta(4, 4096, decay)
    bar = sum(t.nbytes for t in x) + x[2].nbytes
    options = {"write": "exact"} if state_format is None else {"write": "token", "state_format": state_format}
    forward, backward = training_bytes([*x, None], scale=1.0, checkpoint_every=64, **options)
    assert forward <= bar and backward <= bar, (forward / bar, backward / bar)


def test_a_layout_holds_any_state() -> None:
    from lattn_compile.formats import parse
    from lattn_compile.formats.quantizer import Quantizer
    from lattn_compile.kernels.common.layout import layout
    from lattn_compile.kernels.decode_call import layout_of

    for key_dim in (*range(1, 40), 63, 64, 65, 127, 128, 129, 255, 256):
        for value_dim in (1, 2, 3, 4, 6, 12, 16, 31, 33, 64, 100, 129, 256):
            for spec in (None, "int8/*x*", "int8/1x1", "int8/4x8", "fp8", "nvfp4"):
                x = layout_of(key_dim, value_dim, None if spec is None else Quantizer(parse(spec)))
                run = x.pieces * x.step
                assert x.lanes * run >= key_dim and x.width * x.blocks >= value_dim
                assert value_dim % x.vector == 0 and x.lanes * x.columns == 32 * x.vector
                # Smaller than the program: then Triton loads a vector in the layout that it is used in.
                assert x.lanes * x.step < 32 * x.warps and x.columns < 32
                assert spec != "nvfp4" or (run % 16 == 0 and x.width >= 64)
                own = layout(key_dim, value_dim, least_run=run, step=x.step)
                assert (own.lanes, own.pieces, own.step, own.columns) == (x.lanes, x.pieces, x.step, x.columns)
                assert x.width % own.width == 0 and own.groups <= x.groups


def test_what_is_refused_is_refused_with_a_reason() -> None:
    from lattn_compile.formats import parse
    from lattn_compile.formats.quantizer import Quantizer

    def reason(key_dim: int = 128, value_dim: int = 128, spec: str | None = "int8", **more: Any) -> str | None:
        return decode.supports(
            device=more.pop("device", torch.device("cuda")),
            dtype=more.pop("dtype", torch.float32),
            key_dim=key_dim,
            value_dim=value_dim,
            quantize=None if spec is None else Quantizer(parse(spec), **more),
        )

    for spec in (*FORMATS, "nvfp4", "int8/1x1", "fp8/128x1"):
        assert reason(spec=spec) is None
    assert "cpu" in str(reason(device=torch.device("cpu")))
    assert "float64" in str(reason(dtype=torch.float64))
    assert "stochastic" in str(reason(rounding="stochastic"))
    assert "hadamard_k" in str(reason(rotation="hadamard_k"))
    assert "block_v = 48" in str(reason(spec="int8/*x48"))
    assert reason(value_dim=48, spec="int8/*x48") is None and reason(value_dim=5) is None
    assert "fit" in str(reason(256, 256, spec="int8/*x*"))
    assert "257" in str(reason(257))
