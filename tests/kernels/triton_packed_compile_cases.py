"""The in-place kernels compiled for GPUs that are not here, within budgets. Run by `test_triton_packed.py`.

Their speed rests on the budgets: no spilled registers, bytes made numbers by permutation and not by conversion, codes
moved eight and more bytes at a time. LATTN_COMPILE_ALL=1 compiles every format and mode for every target.
"""

from __future__ import annotations

import collections
import os
import re
from typing import Any

import pytest
import torch
import triton

from lattn_compile.packed import layout
from lattn_compile.policy import Exact, Policy, Replay, TwoPrecision

pytest.importorskip("triton")

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import decode, packed, packed_launch
from tests.kernels.decode_calls import make_call
from tests.kernels.offline import TARGETS, Built, Launch, build, launches

ALL = "LATTN_COMPILE_ALL" in os.environ
H, HV = 16, 32


def _launches(
    policy: Policy,
    *,
    batch: int = 256,
    tokens: int = 1,
    decay: str = "head",
    flush: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    slots: int = 1,
    **sizes: int,
) -> list[Launch]:
    """What a step of a model's layer launches; slots: of the pool."""
    K, V = sizes.get("key_dim", 128), sizes.get("value_dim", 128)
    call, heads = layout.call_of(policy), layout.Heads(H, HV, K, V, decay, True)
    rows = {n: torch.empty(1, *size, dtype=d) for n, (d, size) in layout.shapes(call, heads).items()}
    cursor, slots = torch.zeros(slots, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    quantize = None if call.write == "exact" else Quantizer(parse(call.state_format))
    written: dict[str, Any] = {"write": call.write, "quantize": quantize, "window": call.window, "anchor": call.anchor}
    if flush:
        own = {"heads": heads[:4], "decay": decay, "has_beta": True, "rule": "delta", "padding_slot": -1}
        return launches(lambda: packed.flush(rows, cursor, slots, **own, **written))
    x = [torch.empty(batch, tokens, h, n, dtype=dtype) for h, n in ((H, K), (H, K), (HV, V))]
    g = torch.empty(batch, tokens, HV, *([K] if decay == "channel" else []))
    beta = torch.empty(batch, tokens, HV, dtype=torch.bfloat16)
    own = {"rule": "delta", "scale": 0.1, "qk_l2norm": True, "padding_slot": -1, "readout": call.readout}
    return launches(lambda: packed.step(*x, g, beta, rows, cursor, slots, None, None, None, **own, **written))


def _built(policy: Policy, target: str = "sm_90", **more: Any) -> Built:
    (launch,) = _launches(policy, **more)
    kernel = build(launch, target)
    # Four programs of halves of heads have room on a multiprocessor.
    assert kernel.shared <= (55 if launch.name == "token_step_cuda" else 48) * 1024
    return kernel


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """No steps by whole heads, `packed_token_cuda.py`."""
    monkeypatch.setattr(packed, "_fits_whole_heads", lambda *_: False)


@pytest.fixture
def heads() -> None:
    """Steps by whole heads, if Triton has them."""
    if packed.whole_heads() is None:
        pytest.skip("another Triton than it was written for")
    for form in ("int8", "fp8_e4m3"):
        assert packed_launch.LAUNCHES[packed_launch.CHOSEN[form][2]].heads


def _opcodes(kernel: Built) -> collections.Counter[str]:
    """Instructions of the whole program."""
    return collections.Counter(line.split()[0] for line in kernel.sass if line)


@pytest.mark.parametrize(
    ("policy", "instructions"),
    [(Policy("int8"), 3300), (Policy("fp8"), 4100), (Policy(write=Exact()), 1300)],
    ids=["int8", "fp8", "exact"],
)
def test_a_token_spills_nothing_and_converts_nothing(policy: Policy, instructions: int, columns: None) -> None:
    """Instructions of a program: two heads of 8-bit codes, one of numbers. Triton 3.7 has one register too few for two
    heads of codes, which Triton 3.6, that was timed on a GPU, has not."""
    kernel = _built(policy)
    found = _opcodes(kernel)
    spilled = 8 if policy.write != Exact() and not triton.__version__.startswith("3.6.") else 0
    assert kernel.registers is not None and kernel.registers <= 255 and kernel.stack is not None
    assert kernel.stack <= spilled
    assert not any(name.startswith("I2F") for name in found), found
    assert sum(found.values()) <= instructions
    # Eight codes, or four numbers, an access.
    wide = found["LDG.E.64"] if policy.write != Exact() else found["LDG.E.128"]
    assert wide >= 16


@pytest.mark.parametrize(("spec", "decay"), [("int8", "head"), ("int8", "channel"), ("fp8", "head")])
def test_whole_heads_go_through_shared_memory(spec: str, decay: str, heads: None) -> None:
    """Codes come and go by the copy engine, and between shared memory and registers sixteen bytes at a time; what is
    left for a head, of 128 values in a thread, are some 12 instructions a value, 3 more for steps that are rare."""
    kernel = _built(Policy(spec), decay=decay)
    found = _opcodes(kernel)
    assert kernel.registers is not None and kernel.registers <= 255 and kernel.stack == 0
    assert kernel.scattered_reductions() == []
    assert not any(name.startswith(("I2F", "F2I")) for name in found), found
    assert kernel.count("LDSM.16.M88.4") == kernel.count("STSM.16.M88.4") == 8
    assert kernel.count("UTMALDG") == kernel.count("UTMASTG") == 1 and kernel.count("REDUX") == 1
    assert kernel.count("SHFL") <= 17 and len(kernel.loop) <= (2050 if spec == "int8" else 1600)


def test_nvfp4_goes_a_word_at_a_time() -> None:
    """Of two heads, what is done only where a block is no number included; no byte of codes goes through shared memory,
    and no division through a subroutine."""
    kernel = _built(Policy("nvfp4"))
    found = _opcodes(kernel)
    assert kernel.registers is not None and kernel.registers <= 255 and kernel.stack <= 128
    assert sum(found.values()) <= 4800
    assert found["LDG.E.64"] >= 8 and kernel.shared <= 1024
    assert not any(name.startswith(("I2F", "F2I")) for name in found), found


def test_the_next_tile_is_asked_for_before_this_ones_sums(columns: None) -> None:
    """Left to itself the assembler puts these loads off until registers are free: too late to hide their latency."""
    kernel = _built(Policy("int8"))
    loads = [i for i, line in enumerate(kernel.loop) if line.startswith("LDG.E.64")]
    assert len(loads) >= 16 and loads[-1] < next(i for i, line in enumerate(kernel.loop) if line.startswith("SHFL"))


@pytest.mark.parametrize("decay", ["head", "channel"] if ALL else ["head"])
def test_a_window_spills_addresses_only(decay: str) -> None:
    """A step with records holds its state once and the next tile's codes; what does not fit is a few addresses."""
    for policy in (
        (Policy("int8", write=Replay(8)), Policy(write=TwoPrecision(16))) if ALL else (Policy("int8", write=Replay(8)),)
    ):
        kernel = _built(policy, decay=decay)
        assert kernel.registers is not None and kernel.registers <= 255
        assert kernel.stack <= (192 if isinstance(policy.write, TwoPrecision) else 96)
        assert kernel.scattered_reductions() == []
        assert not any(name.startswith("I2F") for name in _opcodes(kernel))


@pytest.mark.parametrize(
    ("policy", "stack", "instructions"),
    [
        (Policy("int8", write=Replay(8)), 16, 800),
        (Policy("fp8", write=Replay(8)), 64, 680),
        (Policy(write=TwoPrecision(16)), 320, 3200),
    ],
    ids=["int8", "fp8", "two-precision"],
)
def test_a_large_pool_is_read_by_whole_lines(policy: Policy, stack: int, instructions: int) -> None:
    """128 registers, so that sixteen warps share a multiprocessor; 16 bytes of a row a thread; no byte is converted.
    Instructions of a head at a window's end, of two-precision of those of a key head."""
    kernel = _built(policy, slots=256)
    found = _opcodes(kernel)
    assert kernel.registers is not None and kernel.registers <= 128 and kernel.stack is not None
    assert kernel.stack <= stack and len(kernel.loop) <= instructions
    assert found["LDG.E.128"] >= 32 and found["HMMA.16816.F32"] == 64
    assert kernel.scattered_reductions() == []
    assert not any(name.startswith("I2F") for name in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("key_dim", [64, 128, 256] if ALL else [128])
def test_norms_are_summed_in_the_order_of_the_emulated_kernel(dtype: torch.dtype, key_dim: int, columns: None) -> None:
    """What makes a step's bits those of the emulated kernel: a row's threads, and the numbers that each has of it."""
    if dtype is torch.float32 and key_dim == 256:
        pytest.skip("the emulated kernel spreads such a row over two warps")
    call = make_call(key_dim=key_dim, ratio=2, key_heads=2, lengths=(4,))
    call = call.map(lambda x: x.to(dtype) if x.dim() == 3 else x)
    (theirs,) = (x for x in launches(lambda: call.forward(decode)) if x.name == "pair_up")
    (ours,) = _launches(Policy("int8"), key_dim=key_dim, dtype=dtype)
    rows = [_rows_of_sums(build(launch, "sm_90"), key_dim) for launch in (theirs, ours)]
    assert rows[0] and rows[0] == rows[1]


def test_whole_heads_sum_norms_in_that_order_too(heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = _launches(Policy("int8"))
    monkeypatch.setattr(packed, "_fits_whole_heads", lambda *_: False)
    (columns,) = _launches(Policy("int8"))
    rows = [_rows_of_sums(build(launch, "sm_90"), 128) for launch in (whole, columns)]
    assert whole.name != columns.name and rows[0] and rows[0] == rows[1]


def _rows_of_sums(kernel: Built, key_dim: int) -> set[tuple[str, str]]:
    """(numbers a thread, threads a warp) along the rows of the sums over `key_dim` channels."""
    layouts = dict(re.findall(r"^(#blocked\d*) = #ttg.blocked<\{(.*)\}>$", kernel.ttgir, re.MULTILINE))
    names = re.findall(rf'"tt\.reduce".*?\}}\) : \(tensor<\d+x{key_dim}xf32, (#\w+)>\) ->', kernel.ttgir, re.DOTALL)
    found = set()
    for name in names:
        what = ("sizePerThread", "threadsPerWarp")
        size, threads = (re.findall(rf"{x} = \[\d+, (\d+)\]", layouts[name])[0] for x in what)
        found.add((size, threads))
    return found


POLICIES = {
    "exact": Policy(write=Exact()),
    "int8": Policy("int8"),
    "fp8": Policy("fp8"),
    "bf16": Policy("bf16"),
    "nvfp4": Policy("nvfp4"),
    "int8-replay": Policy("int8", write=Replay(8)),
    "fp8-two-precision": Policy(write=TwoPrecision(16)),
}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = int(target.removeprefix("sm_")) if target.startswith("sm_") else 0
    monkeypatch.setattr(packed, "NVIDIA", version > 0)
    monkeypatch.setattr(packed, "_capable", lambda _, least: divmod(version, 10) >= least)
    if not ALL:
        if target != "sm_90":
            _built(Policy("int8"), target, key_dim=32, value_dim=32)
        return
    for name, policy in POLICIES.items():
        for decay in ("head", "channel"):
            _built(policy, target, decay=decay)
        _built(policy, target, tokens=4)
        _built(policy, target, key_dim=60, value_dim=100, batch=3)
        if "-" in name:
            _built(policy, target, flush=True)


@pytest.mark.parametrize("spec", ["int8", "fp8", "bf16", "fp32"])
def test_every_row_of_the_table_sums_alike(spec: str) -> None:
    """So that a sequence has the same bits in any batch, whichever row is chosen."""
    quantize = Quantizer(parse(spec))
    for key_dim, value_dim in ((128, 128), (64, 256), (60, 64), (256, 128), (128, 5)):
        seen = set()
        for launch in packed_launch.LAUNCHES.values():
            lay = packed_launch.stored_layout(key_dim, value_dim, quantize, launch)
            seen.add((lay.lanes, lay.pieces, lay.step))
            assert lay.width * lay.blocks >= value_dim and lay.lanes * lay.columns == 32 * lay.vector
        assert len(seen) == 1


@pytest.mark.parametrize("heads", [(16, 32), (16, 16), (2, 6), (3, 3), (8, 64), (1, 32)])
@pytest.mark.parametrize("sequences", [1, 64, 256, 1024])
def test_programs_of_whole_heads_fit_shared_memory_and_leave_none_idle(heads: tuple[int, int], sequences: int) -> None:
    key_heads, value_heads = heads
    for row in ("heads", "half heads"):
        launch = packed_launch.LAUNCHES[row]
        keys = packed_launch.keys_a_program(launch, key_heads, value_heads, sequences)
        assert key_heads % keys == 0 and keys * value_heads // key_heads <= packed_launch.MOST_HEADS
        assert keys == 1 or sequences * key_heads // keys >= packed_launch.FULL[launch.heads]


@pytest.mark.parametrize("heads", [(16, 32), (2, 6), (3, 3)])
@pytest.mark.parametrize("sequences", [1, 7, 64, 256])
def test_programs_take_whole_heads_and_leave_none_idle(heads: tuple[int, int], sequences: int) -> None:
    """Tiles of a program: whole heads or parts of one, several key heads only with all of theirs, as many as the row
    has while there are programs for a large GPU."""
    key_heads, value_heads = heads
    for launch in packed_launch.LAUNCHES.values():
        lay = packed_launch.stored_layout(128, 256, Quantizer(parse("int8")), launch)
        of_key = value_heads // key_heads * lay.blocks
        keys, tiles = packed_launch.tiles_a_program(launch, lay, key_heads, value_heads, sequences)
        assert of_key % tiles == 0 and key_heads % keys == 0 and (keys == 1 or tiles == of_key)
        assert tiles % lay.blocks == 0 or lay.blocks % tiles == 0
        assert keys * tiles <= launch.tiles
        programs = sequences * key_heads * of_key // (keys * tiles)
        assert programs >= packed_launch.PROGRAMS // 2 or keys * tiles == 1
        assert packed_launch.tiles_a_program(launch, lay, key_heads, value_heads, sequences, keys=False)[0] == 1


def test_what_overlaps_waits_first() -> None:
    """A launch that may begin before the kernel before it has ended reads nothing until it has, but for an index past
    the nearest cache, by which it has lines brought to the cache behind that, which all share."""
    replay = Policy("int8", write=Replay(8))
    for policy, slots in ((Policy("int8"), 1), (replay, 1), (replay, 256)):
        kernel = _built(policy, slots=slots)
        at = next(i for i, line in enumerate(kernel.sass) if line.startswith("ACQBULK"))
        early = [line for line in kernel.sass[:at] if line.startswith(("LDG", "STG", "RED", "ATOM", "UTMA"))]
        assert all(line.startswith("LDG.E.STRONG.GPU") for line in early) and len(early) <= 1
