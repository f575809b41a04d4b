"""Plain formats: torch's own casts and nothing else."""

from __future__ import annotations

import pytest
import torch

from lattn_compile.formats import Bf16, Fp16, Fp32
from lattn_compile.formats.plain import PlainFormat
from tests.formats.states import randn, rough, same

PLAIN = (Fp32(), Bf16(), Fp16())


@pytest.mark.parametrize("fmt", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_storing_is_a_plain_cast(fmt: PlainFormat, dtype: torch.dtype) -> None:
    S = rough(3, 20, 30, dtype=dtype)
    S[0, 0, 0] = 1e38
    stored = dtype if fmt.name == "fp32" else fmt.dtype  # fp32 rounds nothing, in float64 computations neither
    assert same(fmt.encode(S)["codes"], S.to(stored))
    assert same(fmt.qdq(S), S.to(stored).to(dtype))


def test_no_edge_rule_applies() -> None:
    S = torch.tensor([[1e-40, -0.0, 7e4, torch.inf]])
    assert Bf16().qdq(S)[0, 0].item() != 0.0 and Bf16().qdq(S).signbit()[0, 1]
    assert Fp16().qdq(S)[0, 2].item() == torch.inf and not Fp16().qdq(S)[0, :2].isnan().any()


@pytest.mark.parametrize("fmt", PLAIN, ids=str)
def test_an_encoded_state_does_not_share_memory_with_the_state(fmt: PlainFormat) -> None:
    S = randn(4, 4)
    codes = fmt.encode(S)["codes"]
    before = codes.clone()
    S.zero_()
    assert same(codes, before)


def test_decoding_gives_fp32_unless_asked() -> None:
    enc = Bf16().encode(randn(4, 4))
    assert Bf16().decode(enc).dtype == torch.float32
    assert Bf16().decode(enc, shape=(4, 4), dtype=torch.float64).dtype == torch.float64
