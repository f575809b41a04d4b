"""Promises that both ops keep alike: what counts, what may be read, what is returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.cases import NAMES, OPS, inputs, ints, options

MODES = [("chunk", "exact"), ("chunk", "chunk"), ("decode", "exact"), ("decode", "token")]
modes = pytest.mark.parametrize(("op", "write"), MODES)
NONE = (None,) * 4


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Every `torch.empty` is full of NaN, as it may be in production."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def _poison(tensors: list[Tensor], rows: slice, sequence: slice = slice(None)) -> list[Tensor]:
    out = [x.detach().clone() for x in tensors]
    for x in out[:5]:
        x[sequence, rows] = float("nan")
    return [x.requires_grad_() for x in out]


def _gradients(op: str, tensors: list[Tensor], lengths: tuple[Any, ...], **kwargs: Any) -> tuple[Any, ...]:
    o, state = OPS[op](*tensors, *lengths, **kwargs)[:2]
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    # The cotangent of a token that vanishes may be anything, too.
    weights = weights.masked_fill(tensors[0].isnan().any(-1).any(-1)[:, :, None, None], float("nan"))
    return o, state, torch.autograd.grad([o, state], tensors, [weights, torch.ones_like(state)])


@modes
def test_rows_beyond_cu_seqlens_are_exact_zeros_whatever_they_hold(op: str, write: str, poisoned_memory: None) -> None:
    tensors = inputs(1, 128, sequences=2, dtype=torch.float32, grad=True)
    kwargs = options(op, write)
    cu = torch.tensor([0, 50, 100])
    lengths = (cu, torch.tensor(20), None, None)
    o, state, grads = _gradients(op, _poison(tensors, slice(100, None)), lengths, **kwargs)
    assert not o[:, 100:].any() and o[:, :100].isfinite().all() and state.isfinite().all()
    for name, grad in zip(NAMES, grads, strict=True):
        assert grad.isfinite().all(), name
        if name != "initial_state":
            assert not grad[:, 100:].any() and grad[:, :100].any(), name
    # and each packed sequence is what it is alone
    for i, (a, b) in enumerate(((0, 50), (50, 100))):
        part = [x[:, a:b] for x in tensors[:5]] + [tensors[5][i : i + 1]]
        alone_o, alone = OPS[op](*part, None, torch.tensor(20), None, None, **kwargs)[:2]
        torch.testing.assert_close(o[:, a:b], alone_o, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[i : i + 1], alone, rtol=1e-5, atol=1e-5)


@modes
def test_right_padding_leaves_the_state_of_the_last_real_token(op: str, write: str, poisoned_memory: None) -> None:
    tensors, kwargs = inputs(tokens=8, dtype=torch.float32), options(op, write)
    padded = _poison(tensors, slice(3, None), slice(0, 1))
    o, state, grads = _gradients(op, padded, (None, None, ints(3, 8), None), **kwargs)
    short = [x[:1, :3] for x in tensors[:5]] + [tensors[5][:1]]
    alone_o, alone = OPS[op](*short, *NONE, **kwargs)[:2]
    torch.testing.assert_close(o[:1, :3], alone_o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state[:1], alone, rtol=1e-6, atol=1e-6)
    assert not o[0, 3:].any()
    for name, grad in zip(NAMES[:5], grads[:5], strict=True):
        assert not grad[0, 3:].any() and grad.isfinite().all(), name


@modes
def test_positive_gates_in_tokens_that_vanish_are_no_error(op: str, write: str) -> None:
    tensors = inputs(tokens=8, dtype=torch.float32)
    tensors[3][0, 3:] = 7.0
    OPS[op](*tensors, None, None, ints(3, 8), None, **options(op, write))


@pytest.mark.parametrize("op", ["chunk", "decode"])
@pytest.mark.parametrize("masked", [[2, 3], [0, 1, 2]], ids=["interior hole", "left padding"])
def test_a_masked_token_is_the_exact_identity(op: str, masked: list[int]) -> None:
    # g = 0 and beta = 0: state and later outputs are those of the sequence without the token
    q, k, v, g, beta, state = inputs(1, 6, dtype=torch.float64)
    g[:, masked] = 0.0
    beta[:, masked] = 0.0
    kept = [t for t in range(6) if t not in masked]
    o, final = OPS[op](q, k, v, g, beta, state, *NONE, **options(op))[:2]
    short = [x[:, kept] for x in (q, k, v, g, beta)]
    short_o, short_final = OPS[op](*short, state, *NONE, **options(op))[:2]
    torch.testing.assert_close(o[:, kept], short_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, short_final, rtol=1e-12, atol=1e-12)


@modes
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_no_tokens_or_no_sequences(op: str, write: str, shape: tuple[int, int]) -> None:
    tensors = inputs(*shape, dtype=torch.float32, grad=True)
    o, state = OPS[op](*tensors, *NONE, **options(op, write))[:2]
    assert o.shape == (*shape, 4, 12)
    assert torch.equal(state, tensors[5])
    grads = torch.autograd.grad([o, state], tensors, [torch.ones_like(o), torch.full_like(state, 3.0)])
    assert torch.equal(grads[5], torch.full_like(state, 3.0))
    assert all(grad.shape == x.shape for grad, x in zip(grads, tensors, strict=True))


@modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_sequence_of_length_zero_returns_its_state_bit_for_bit(op: str, write: str, dtype: torch.dtype) -> None:
    # not handed over either: with write != exact a rounding would change these bits
    tensors = inputs(1, 9, sequences=3, dtype=dtype)
    cu = torch.tensor([0, 4, 4, 9])
    state = OPS[op](*tensors, cu, torch.tensor(2), None, None, **options(op, write))[1]
    assert torch.equal(state[1], tensors[5][1].to(state.dtype))
    state = OPS[op](*inputs(1, 9, sequences=3, state=False), cu, None, None, None, **options(op, write))[1]
    assert not state[1].any()


@modes
def test_a_call_that_ends_inside_its_prefix_returns_the_exact_state(op: str, write: str) -> None:
    tensors = inputs()
    exact = OPS["chunk"](*tensors, *NONE, **options("chunk"))[1]
    state = OPS[op](*tensors, None, torch.tensor(20), None, None, **options(op, write))[1]
    torch.testing.assert_close(state, exact, rtol=1e-12, atol=1e-12)


@modes
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("state_format", ["fp32", "int8"])
def test_final_state_never_shares_memory_with_an_input(op: str, write: str, tokens: int, state_format: str) -> None:
    tensors = inputs(tokens=tokens, dtype=torch.float32)
    before = [x.clone() for x in tensors]
    for lengths in (NONE, (None, None, ints(0, 0), None), (None, torch.tensor(tokens), None, None)):
        outputs = OPS[op](*tensors, *lengths, **options(op, write, state_format=state_format))
        mine = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
        theirs = [x.untyped_storage().data_ptr() for x in outputs if x.numel()]
        assert not mine & set(theirs) and len(set(theirs)) == len(theirs)
        outputs[1].add_(1.0)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@modes
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_dtypes_mix_and_gradients_have_their_inputs_dtypes(op: str, write: str, low: torch.dtype) -> None:
    q, k, v, g, beta, state = inputs(dtype=torch.float32)
    tensors = [q.to(low), k.to(low), v.to(low), g, beta.to(low), state.to(torch.bfloat16)]
    tensors = [x.requires_grad_() for x in tensors]
    o, final, grads = _gradients(op, tensors, (None, torch.tensor(3), None, None), **options(op, write))
    assert o.dtype == low and final.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [x.dtype for x in tensors]
    # low-precision inputs are only read: the arithmetic is that of the same values in float32
    wide = [x.detach().float().requires_grad_() for x in tensors]
    wide_o, wide_final = OPS[op](*wide, None, torch.tensor(3), None, None, **options(op, write))[:2]
    assert torch.equal(o, wide_o.to(low)) and torch.equal(final, wide_final)


@modes
def test_one_float64_input_makes_the_state_float64(op: str, write: str) -> None:
    tensors = inputs(dtype=torch.float32)
    tensors[3] = tensors[3].double()
    o, state = OPS[op](*tensors, *NONE, **options(op, write))[:2]
    assert o.dtype == torch.float32 and state.dtype == torch.float64


@modes
def test_strides_do_not_matter(op: str, write: str) -> None:
    tensors = inputs(dtype=torch.float32, grad=True)
    lengths = (None, ints(3, 0), ints(20, 18), None)

    def strided(x: Tensor) -> Tensor:
        # a slice of a fused projection, with the last two axes stored the other way round
        wide = torch.zeros(*x.shape[:-2], x.shape[-1], 2 * x.shape[-2] + 1)
        view = wide[..., 1::2].transpose(-1, -2)
        view.copy_(x.detach())
        assert view.shape == x.shape and not view.is_contiguous()
        return view.requires_grad_()

    want = _gradients(op, tensors, lengths, **options(op, write))
    got = _gradients(op, [strided(x) for x in tensors], lengths, **options(op, write))
    for a, b in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert got[0].is_contiguous()


@modes
def test_autocast_changes_nothing(op: str, write: str) -> None:
    tensors = inputs(dtype=torch.float32, grad=True)
    lengths = (None, torch.tensor(4), None, None)
    want = _gradients(op, tensors, lengths, **options(op, write))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = _gradients(op, tensors, lengths, **options(op, write))
    for a, b in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@modes
def test_the_batch_a_sequence_is_in_does_not_change_its_rounding(op: str, write: str) -> None:
    tensors = inputs(3, dtype=torch.float64)
    whole = OPS[op](*tensors, *NONE, **options(op, write))
    alone = OPS[op](*[x[1:2] for x in tensors], *NONE, **options(op, write))
    for a, b in zip(whole[:2], alone[:2], strict=True):
        torch.testing.assert_close(a[1:2], b, rtol=1e-12, atol=1e-12)


@modes
def test_a_bf16_state_is_the_same_start_as_its_float32_values(op: str, write: str) -> None:
    tensors = inputs(dtype=torch.float32)
    low = [*tensors[:5], tensors[5].bfloat16()]
    wide = [*tensors[:5], tensors[5].bfloat16().float()]
    for a, b in zip(*(OPS[op](*x, *NONE, **options(op, write))[:2] for x in (low, wide)), strict=True):
        assert torch.equal(a, b)


@modes
def test_a_reset_gate_clears_the_state_and_leaves_finite_gradients(op: str, write: str) -> None:
    tensors = inputs(dtype=torch.float32, grad=True)
    with torch.no_grad():
        tensors[3][:, 7] = float("-inf")
        tensors[1][:, 9] = 0.0  # and a zero key, where the norm's gradient is steep
    o, state, grads = _gradients(op, tensors, NONE, **options(op, write, qk_l2norm=True))
    assert o.isfinite().all() and state.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)
    state = OPS[op](*tensors, *NONE, **options(op, write, qk_l2norm=True))[1]
    assert not torch.autograd.grad(state.sum(), tensors[5])[0].any()
