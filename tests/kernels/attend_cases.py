"""Attention of one token. Run with TRITON_INTERPRET=1, whose products of bf16 are wrong: fp32 here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lattn_compile.kernels import attend_step


@pytest.mark.parametrize("mask", ["none", "one", "each", "shut"])
@pytest.mark.parametrize(
    ("batch", "groups", "share", "keys", "dims"),
    [(1, 2, 8, 256, (32, 16)), (3, 1, 3, 70, (16, 32)), (2, 2, 16, 1, (16, 16)), (40, 4, 1, 45, (16, 16))],
)
def test_a_token(
    batch: int, groups: int, share: int, keys: int, dims: tuple[int, int], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **k: made(*a, **k).fill_(torch.nan))
    rng = torch.Generator().manual_seed(keys)
    q = torch.randn(batch, groups * share, dims[0], generator=rng)
    k, v = (torch.randn(batch, keys, groups, n, generator=rng).transpose(1, 2) for n in dims)
    bias = None
    if mask != "none":
        rows = 1 if mask == "one" else batch
        bias = torch.randn(rows, keys, generator=rng)
        if mask == "shut":  # whole stretches of keys, and another number of them for each sequence
            seen = torch.arange(keys) <= torch.randint(0, keys, (rows, 1), generator=rng)
            bias = bias.masked_fill(~seen, -torch.inf)
    got = attend_step.forward(q, k, v, bias, 0.3)
    wide = k.double().repeat_interleave(share, 1), v.double().repeat_interleave(share, 1)
    scores = 0.3 * torch.einsum("bhd,bhsd->bhs", q.double(), wide[0])
    want = (scores if bias is None else scores + bias[:, None]).softmax(-1).unsqueeze(-2).matmul(wide[1]).squeeze(-2)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("keys", [20, 300], ids=["one stretch", "several"])
def test_sequences_whose_keys_are_all_shut(keys: int) -> None:
    """By -inf or the least number: nothing is seen, and that is 0. By what cuDNN writes for a false mask: all keys are
    seen. By either where others are open: as ever."""
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, keys, 16), torch.randn(5, 2, keys, 16)
    bias = torch.zeros(5, keys)
    bias[0], bias[1], bias[2] = -torch.inf, torch.finfo(torch.bfloat16).min, -65504.0
    bias[3, : keys // 2], bias[4, : keys // 2] = -torch.inf, torch.finfo(torch.bfloat16).min
    got = attend_step.forward(q, k, v, bias, 0.5)
    wide = k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
    scores = (0.5 * torch.einsum("bhd,bhsd->bhs", q.double(), wide[0]).float() + bias[:, None]).double()
    want = scores.softmax(-1).unsqueeze(-2).matmul(wide[1]).squeeze(-2)
    assert (got[:2] == 0).all() and (got[3:] - want[3:]).abs().max() <= 1e-5
    # Times log2 e, scores there are multiples of 2^-7.
    assert (got[2] - want[2]).abs().max() <= 2**-6 * v[2].abs().max()


def test_a_key_that_is_not_a_number_is_not_hidden() -> None:
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 64, 16), torch.randn(2, 2, 64, 16)
    k[0, 1, 50] = torch.nan
    got = attend_step.forward(q, k, v, None, 1.0)
    assert got.isnan().any(-1).tolist() == [[False, False, True, True], [False] * 4]
