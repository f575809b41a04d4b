"""Slots: nothing outside a sequence is read or written; heads and the l2norm, with its gradient."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattn_compile.kernels.reference.padding import Slots, gather, l2norm, l2norm_backward, scatter_, split_heads


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_gather_and_scatter_touch_the_slots_tokens_and_nothing_else(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(0, 12))
    rows, width = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(tokens)))
    cells = [*order[: rows * width], *[None] * (rows * width - tokens)]
    cells = data.draw(st.permutations(cells))
    index = torch.tensor([c or 0 for c in cells], dtype=torch.int64).reshape(rows, width)
    valid = torch.tensor([c is not None for c in cells], dtype=torch.bool).reshape(rows, width)
    slots = Slots(index, None if valid.all() else valid)
    held = [c for c in cells if c is not None]
    x = torch.full((tokens, 2), torch.nan)
    x[held] = torch.randn(len(held), 2)

    padded = gather(x, slots, torch.float64)
    assert padded.shape == (rows, width, 2) and padded.dtype == torch.float64
    assert torch.equal(padded[valid], x[index[valid]].double())
    assert (padded[~valid] == 0).all()

    out = torch.full((tokens, 2), 7.0)
    scatter_(out, slots, padded)
    assert torch.equal(out[held], x[held])
    assert (out[[t for t in range(tokens) if t not in held]] == 7.0).all()


def test_a_run_of_tokens_is_gathered_as_a_view_and_scattered_in_place() -> None:
    x = torch.randn(10, 3)
    slots = Slots(torch.arange(2, 8).reshape(2, 3), None, first=2)
    padded = gather(x, slots, x.dtype)
    assert padded.data_ptr() == x[2].data_ptr() and torch.equal(padded, x[2:8].reshape(2, 3, 3))
    out = torch.zeros(10, 3, dtype=torch.bfloat16)
    scatter_(out, slots, padded)
    assert torch.equal(out[2:8], x[2:8].bfloat16())
    assert (out[:2] == 0).all() and (out[8:] == 0).all()


def test_split_heads_lets_value_head_j_read_key_head_j_over_r() -> None:
    key_head = torch.arange(2)
    per_value_head = key_head.repeat_interleave(3)
    assert torch.equal(split_heads(per_value_head, 2, 0), key_head[:, None].expand(2, 3))


def test_l2norm_and_its_gradient_have_the_eps_inside_the_root() -> None:
    x = torch.randn(5, 7, dtype=torch.float64) * torch.tensor([0.0, 1e-4, 1e-3, 1.0, 30.0]).double()[:, None]
    x.requires_grad_()
    expected = x / torch.sqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    cotangent = torch.randn_like(expected)
    (want,) = torch.autograd.grad(expected, x, cotangent)
    normed, rstd = l2norm(x.detach())
    torch.testing.assert_close(normed, expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(l2norm_backward(cotangent, normed, rstd), want, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(want[0], 1e3 * cotangent[0])  # a zero row: large, finite
