"""The oracle against what can be said without a loop: closed forms, hand-computed states, and the rules of phases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lattn_compile.errors import UnsupportedError
from lattn_compile.formats import parse
from lattn_compile.recurrence import KINDS
from lattn_compile.recurrence.gates import l2norm
from lattn_compile.testing import make_inputs, oracle, straight_through

SMALL: dict[str, Any] = {"key_dim": 8, "value_dim": 6, "dtype": torch.float64}
INT8 = {"state_format": "int8/*x4"}


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# The recurrence -------------------------------------------------------------------------------------------------------


def test_linear_attention_is_the_masked_product() -> None:
    x = make_inputs("linear", key_heads=4, initial_state=False, **SMALL)
    scores = torch.einsum("bthk,bshk->bhts", x.q, x.k).tril()
    got = oracle(*x.tensors(), **x.options())
    near(got.o, x.scale * torch.einsum("bhts,bshv->bthv", scores, x.v))
    near(got.final_state, torch.einsum("bthk,bthv->bhkv", x.k, x.v))


def test_the_delta_rule_recalls_orthonormal_keys_exactly_and_replaces_what_a_key_held() -> None:
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 1]].view(1, 4, 1, 4)
    v = torch.randn(1, 4, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = oracle(k, k, v, scale=1.0)
    near(got.o, v)  # a token reads after its own write
    near(got.final_state[0, 0], torch.stack([v[0, 0, 0], v[0, 3, 0], v[0, 2, 0], torch.zeros(3, dtype=torch.float64)]))


def test_decay_acts_before_the_write_and_a_reset_clears_the_state() -> None:
    ones = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    g = torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64).log().view(1, 3, 1)
    got = oracle(ones, ones, ones, g, None, 8 * ones[:, :1], rule="additive", scale=1.0)
    near(got.o.flatten(), torch.tensor([5.0, 2.25, 1.0], dtype=torch.float64))


def test_value_head_j_uses_key_head_j_over_r() -> None:
    x = make_inputs("gdn", key_heads=2, value_heads=6, **SMALL)
    assert x.g is not None and x.beta is not None and x.initial_state is not None
    got = oracle(*x.tensors(), **x.options())
    for j in range(6):
        head, value = slice(j // 3, j // 3 + 1), slice(j, j + 1)
        one = oracle(
            x.q[:, :, head], x.k[:, :, head], x.v[:, :, value], x.g[:, :, value], x.beta[:, :, value],
            x.initial_state[:, value], **x.options(),
        )  # fmt: skip
        near(got.o[:, :, value], one.o)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_it_agrees_with_the_step_that_each_kind_writes_down(kind: Any) -> None:
    x = make_inputs(kind.name, batch=1, tokens=5, **SMALL)
    state, rows = x.initial_state, []
    for t in range(5):
        q, k = (l2norm(y[:, t]) if x.qk_l2norm else y[:, t] for y in (x.q, x.k))
        q, k = (y.repeat_interleave(2, 1) for y in (q, k))
        gate, beta = (None if y is None else y[:, t] for y in (x.g, x.beta))
        o, state = kind.step(state, q, k, x.v[:, t], gate, beta, x.scale)
        rows.append(o)
    got = oracle(*x.tensors(), **x.options())
    near(got.o, torch.stack(rows, 1))
    near(got.final_state, state)


def test_sequences_do_not_see_each_other_and_spare_tokens_are_never_read() -> None:
    x = make_inputs("kda", lengths=(5, 0, 9), spare_tokens=3, **SMALL)
    x = x.map(lambda leaf: leaf.requires_grad_())
    assert x.g is not None and x.beta is not None and x.initial_state is not None
    got = oracle(*x.tensors(), **x.options())
    for i, (a, b) in enumerate(((0, 5), (5, 5), (5, 14))):
        tokens = [y[:, a:b] for y in (x.q, x.k, x.v, x.g, x.beta)]
        alone = oracle(*tokens, x.initial_state[i : i + 1], **x.options())
        near(got.o[:, a:b], alone.o)
        near(got.final_state[i : i + 1], alone.final_state)
    assert torch.equal(got.final_state[1], x.initial_state[1]) and not got.o[:, 14:].any()
    for gradient in torch.autograd.grad(got.o.sum() + got.final_state.sum(), list(x.leaves().values())):
        assert gradient.isfinite().all()
        assert gradient.shape[1] != 17 or not gradient[:, 14:].any()


# Phases and writes ----------------------------------------------------------------------------------------------------


def test_the_prefix_is_exact_and_hand_over_is_just_before_the_first_suffix_token() -> None:
    x = make_inputs("gdn", batch=3, tokens=6, **SMALL)
    exact = oracle(*x.tensors(), **x.options())
    got = oracle(*x.tensors(), prefix_lengths=ints(0, 4, 9), **x.options(), write="token", **INT8)
    assert torch.equal(got.o[1, :4], exact.o[1, :4]) and torch.equal(got.o[2], exact.o[2])
    assert not torch.equal(got.o[0, 0], exact.o[0, 0]) and not torch.equal(got.o[1, 4], exact.o[1, 4])
    assert torch.equal(got.final_state[2], exact.final_state[2])  # p = n returns the exact state
    assert got.cursor.tolist() == [0, 0, -1]

    one = x.map(lambda y: y[1:2])
    handed = _tokens(one, 0, 4, write="exact").final_state
    rounded = parse("int8/*x4").qdq(handed)
    rest = _tokens(one, 4, 6, state=rounded, cursor=ints(0), write="token", **INT8)
    assert torch.equal(got.o[1, 4:], rest.o[0]) and torch.equal(got.final_state[1:2], rest.final_state)


def _tokens(x: Any, a: int, b: int, *, state: Tensor | None = None, **options: Any) -> Any:
    tokens = [None if y is None else y[:, a:b] for y in (x.q, x.k, x.v, x.g, x.beta)]
    return oracle(*tokens, x.initial_state if state is None else state, **(x.options() | options))


def test_token_mode_is_one_rounding_after_each_token_by_hand() -> None:
    x, fmt = make_inputs("gdn", batch=1, tokens=4, **SMALL), parse("int8/*x4")
    assert x.initial_state is not None
    state, before, after = fmt.qdq(x.initial_state), [], []
    for t in range(4):
        step = _tokens(x, t, t + 1, state=state)
        before.append(step.o)
        state = fmt.qdq(step.final_state)
        key = x.q[0, t] / (x.q[0, t].square().sum(-1, keepdim=True) + 1e-6).sqrt()
        after.append(x.scale * torch.einsum("hkv,hk->hv", state[0], key.repeat_interleave(2, 0)))
    for readout, rows in (("before_write", torch.cat(before, 1)), ("after_write", torch.stack(after)[None])):
        got = oracle(*x.tensors(), **x.options(), write="token", readout=readout, **INT8)
        near(got.o, rows)
        near(got.final_state, state)


def test_cutting_a_token_run_and_carrying_state_and_cursor_changes_nothing() -> None:
    x = make_inputs("kda", batch=2, tokens=7, **SMALL)
    whole = oracle(*x.tensors(), **x.options(), write="token", state_format="nvfp4")
    head = _tokens(x, 0, 3, write="token", state_format="nvfp4")
    tail = _tokens(x, 3, 7, state=head.final_state, cursor=head.cursor, write="token", state_format="nvfp4")
    assert torch.equal(whole.final_state, tail.final_state)
    assert torch.equal(whole.o, torch.cat([head.o, tail.o], 1))


def test_the_chunk_grid_counts_from_the_prefix_and_carries_an_exact_state_off_it() -> None:
    x, fmt = make_inputs("gdn", batch=2, tokens=9, **SMALL), parse("int8/*x4")
    chunk = {"write": "chunk", "chunk_size": 4, **INT8}
    whole = oracle(*x.tensors(), prefix_lengths=ints(0, 2), **x.options(), **chunk)
    assert whole.cursor.tolist() == [1, 3]
    head = _tokens(x, 0, 7, prefix_lengths=ints(0, 2), **chunk)
    assert head.cursor.tolist() == [3, 1]
    tail = _tokens(x, 7, 9, state=head.final_state, cursor=head.cursor, **chunk)
    assert torch.equal(whole.final_state, tail.final_state)
    assert torch.equal(whole.cursor, tail.cursor)
    assert not torch.equal(head.final_state, fmt.qdq(head.final_state))
    # A prefix starts from the dense value of what was carried, and off the grid that is its rounding.
    again = _tokens(x, 7, 9, state=head.final_state, cursor=head.cursor, prefix_lengths=ints(2, 2), **chunk)
    dense = _tokens(x, 7, 9, state=fmt.qdq(head.final_state))
    assert torch.equal(again.o, dense.o) and again.cursor.tolist() == [-1, -1]


def test_under_after_write_only_the_last_token_of_a_chunk_reads_the_rounded_state() -> None:
    x = make_inputs("gdn", batch=1, tokens=8, **SMALL)
    chunk = {"write": "chunk", "chunk_size": 4, **INT8}
    before = oracle(*x.tensors(), **x.options(), **chunk)
    after = oracle(*x.tensors(), **x.options(), **chunk, readout="after_write")
    differs = (before.o != after.o).flatten(2).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [3, 7]


def test_tokens_beyond_the_sequence_length_vanish() -> None:
    x = make_inputs("gdn", batch=2, tokens=6, **SMALL)
    poisoned = x.map(lambda y: y.clone())
    for y in (poisoned.q, poisoned.k, poisoned.v, poisoned.g, poisoned.beta):
        assert y is not None
        y[0, 4:] = torch.nan
    got = oracle(*poisoned.tensors(), sequence_lengths=ints(4, 6), **x.options(), write="token", **INT8)
    short = _tokens(x, 0, 4, write="token", **INT8)
    assert torch.equal(got.o[0, :4], short.o[0]) and not got.o[0, 4:].any()
    assert torch.equal(got.final_state[0], short.final_state[0])
    nothing = oracle(*x.tensors(), sequence_lengths=torch.tensor(0), **x.options(), write="token", **INT8)
    assert x.initial_state is not None and torch.equal(nothing.final_state, x.initial_state)
    assert nothing.cursor.tolist() == [-1, -1]


# Gradients ------------------------------------------------------------------------------------------------------------


def test_a_rounding_passes_its_cotangent_on_even_at_infinity() -> None:
    x = torch.tensor([[1.0, torch.inf], [-0.3, 2.0]], dtype=torch.float64, requires_grad=True)
    y = straight_through(x, parse("int8"))
    assert y.isnan().all()
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(x, 3.0))
    assert torch.equal(gradient, torch.full_like(x, 3.0))


def test_fp32_as_a_format_neither_aliases_nor_changes_an_fp32_value() -> None:
    x = torch.randn(3, 3)
    y = straight_through(x, parse("fp32"))
    assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()


def test_gradcheck_passes_without_rounding() -> None:
    x = make_inputs("kda", batch=1, tokens=3, key_heads=1, value_heads=2, key_dim=3, value_dim=2, dtype=torch.float64)
    leaves = x.map(lambda y: y.requires_grad_())
    call = lambda *tensors: oracle(*tensors, **x.options())[:2]  # noqa: E731
    assert torch.autograd.gradcheck(call, list(leaves.leaves().values()))


@pytest.mark.parametrize("option", [{"rule": "gated"}, {"write": "ring"}, {"readout": "later"}])
def test_what_has_no_loop_is_refused_by_name(option: dict[str, str]) -> None:
    x = make_inputs("gdn", tokens=1, **SMALL)
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        oracle(*x.tensors(), **(x.options() | option))
