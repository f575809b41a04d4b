"""Every kernel of the prefill compiled for GPUs that are not here, within budgets. Run by `test_triton_prefill.py`.

LATTN_COMPILE_ALL=1 compiles more formats and inverses, which takes minutes.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lattn_compile.kernels import prefill, prefill_call
from lattn_compile.modes import BlockDoubling, Neumann, NewtonSchulz, Prefill
from tests.kernels.offline import TARGETS, Built, build, launches
from tests.kernels.prefill_calls import ALL, call_of
from tests.kernels.triton_chunk_compile_cases import FULL, SHARED

EVERY = "LATTN_COMPILE_ALL" in os.environ
INVERSES = {str(x): Prefill(inverse=x) for x in (Neumann(7), NewtonSchulz(4), BlockDoubling(8), BlockDoubling(16))}


def _compiled(target: str, policy: Prefill, only: tuple[str, ...] = (), **more: Any) -> dict[str, Built]:
    call = call_of(policy, **FULL | more).inputs(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_call, "shared_memory", lambda _: SHARED[target] * 1024)
        found = {x.name: x for x in launches(lambda: call.forward(prefill))}
    built = {name: build(x, target) for name, x in found.items() if name in only or not only}
    for name, kernel in built.items():
        assert kernel.shared <= SHARED[target] * 1024, (name, kernel.shared)
        # Its operands would be read while the program runs on, which its assembler does not know: see chunk.py.
        assert "wgmma" not in kernel.text, name
        assert kernel.scattered_reductions() == [], name
    return built


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3"])
def test_products_of_codes_are_the_devices_own(fmt: str) -> None:
    built = _compiled("sm_90", ALL[fmt])
    mma = {"int8": "m16n8k32.row.col.satfinite.s32.s8.s8.s32", "fp8_e4m3": "m16n8k16.row.col.f32.f16.f16.f32"}[fmt]
    for name in ("pairs_of_heads", "state_operands", "walk"):
        assert (built[name].stack or 0) <= 400, (name, built[name].stack)  # registers were limited, as measured
        assert not set(re.findall(r"mma\.sync\.aligned\.([\w.]+)", built[name].text)) - {mma}, name
    # The loop over chunks is what 8,192 tokens of one sequence wait for: of one warp, for 16 columns.
    assert len(built["walk"].loop) <= 2200 and built["walk"].count("HMMA", "IMMA") == (112 if fmt == "int8" else 224)
    assert (built["walk"].stack or 0) <= 64


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_operands_have_as_many_parts_in_memory_as_they_are_read_with(decay: str) -> None:
    """bf16 queries have one, of which Triton's interpreter has no notion: an assertion of the compiler sees it."""
    call = call_of(Prefill({"kk": "int8"}), **FULL, decay=decay).inputs(torch.bfloat16)
    for launch in launches(lambda: call.backward(prefill)):
        if launch.name in ("pairs_of_heads", "pairs_of_channels", "walk_back"):
            build(launch, "sm_90")


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_the_backward_compiles_within_its_budgets(decay: str) -> None:
    call = call_of(ALL["fp8_e4m3"], **FULL, decay=decay).inputs(torch.bfloat16)
    for launch in launches(lambda: call.backward(prefill)):
        built = build(launch, "sm_90")
        assert "wgmma" not in built.text and built.shared <= SHARED["sm_90"] * 1024, launch.name
        assert built.scattered_reductions() == [] and (built.stack or 0) <= 1200, (launch.name, built.stack)


def test_a_decay_by_channel_sums_its_gates_by_products() -> None:
    """Sums along tokens, one after the other, were a third of all instructions. What spills is outside of the loops."""
    built = _compiled("sm_90", ALL["fp8_e4m3"], ("pairs_of_channels", "state_operands"), decay="channel")
    assert all((kernel.stack or 0) <= 600 for kernel in built.values()), {n: x.stack for n, x in built.items()}
    pairs = built["pairs_of_channels"]
    assert "tt.scan" not in pairs.ttgir and len(pairs.sass) <= 7000, len(pairs.sass)


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "sm_90"])
def test_the_kernels_compile_for_every_target(target: str) -> None:
    formats = [fmt for fmt in ALL if fmt != "fp8_e4m3" or target == "sm_100"]
    for fmt in formats if EVERY else formats[:1]:
        for decay in ("head", "channel") if EVERY else ("head" if target == "sm_100" else "channel",):
            _compiled(target, ALL[fmt], decay=decay)


@pytest.mark.skipif(not EVERY, reason="takes minutes")
@pytest.mark.parametrize("name", INVERSES)
def test_every_inverse_compiles(name: str) -> None:
    _compiled("sm_90", INVERSES[name], decay="channel")
    _compiled("sm_90", INVERSES[name], ("solve", "walk"), key_dim=256, value_dim=256)


def test_what_a_device_lacks_is_refused_by_site_format_and_device() -> None:
    fp8, int8, nvfp4 = Prefill({"kk": "fp8_e4m3"}), Prefill({"ws": "int8"}), Prefill({"qs": "nvfp4"})
    for policy in (fp8, int8, nvfp4, Prefill(inverse=Neumann(7))):
        assert prefill.lacking(policy, "", (9, 0)) is None
    assert prefill.lacking(int8, "", (8, 0)) is None and prefill.lacking(int8, "gfx942", (9, 4)) is None
    assert prefill.lacking(fp8, "", (8, 9)) is None and prefill.lacking(fp8, "gfx950", (9, 5)) is None
    assert "sm_80 has no FP8 numbers, which fp8_e4m3 at site kk" in str(prefill.lacking(fp8, "", (8, 0)))
    assert "sm_75 has no int8 matrix products, which int8 at site ws" in str(prefill.lacking(int8, "", (7, 5)))
    assert "gfx942" in str(prefill.lacking(fp8, "gfx942", (9, 4)))

    def reason(policy: Prefill, device: str = "cuda", dtype: torch.dtype = torch.float32, key_dim: int = 128) -> str:
        return str(prefill.supports(
            device=torch.device(device), dtype=dtype, key_dim=key_dim, value_dim=128, prefill=policy
        ))  # fmt: skip

    assert "cpu" in reason(int8, "cpu") and "float64" in reason(int8, dtype=torch.float64)
    assert "257" in reason(int8, key_dim=257)
    assert "gradient='series'" in reason(Prefill(inverse=Neumann(7), gradient="series"))
