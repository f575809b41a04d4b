"""Checks of `lattn_compile.distributed.context`: on three ranks the last one needs the middle one's transition. Two do
on a machine of two GPUs."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lattn_compile as lc
from lattn_compile import distributed as lcd
from lattn_compile.errors import LattnError, SequenceError
from tests.distributed.ranks import DEVICE

FOLDER = Path()  # where to write; `ranks.py` sets it
RANK, LAST = dist.get_rank(), dist.get_world_size() - 1
ENDS = (0, 40, 73, 103) if LAST == 2 else (0, 73, 103)
B, H, HV, K, V = 2, 2, 4, 8, 6


randn, rand = (functools.partial(make, device=DEVICE) for make in (torch.randn, torch.rand))


def inputs(decay: str, dtype: torch.dtype = torch.float64, *, beta: bool = True) -> list[Tensor | None]:
    """q, k, v, g, beta of whole sequences, the same on every rank."""
    T = ENDS[-1]
    q, k = (randn(B, T, H, K, dtype=dtype) for _ in range(2))
    v = randn(B, T, HV, V, dtype=dtype)
    g = None if decay == "none" else -0.1 * rand(B, T, HV, *([K] if decay == "channel" else []), dtype=dtype)
    return [q, k, v, g, rand(B, T, HV, dtype=dtype) if beta else None]


def leaves(xs: list[Tensor | None], mine: bool) -> list[Tensor | None]:
    where = slice(ENDS[RANK], ENDS[RANK + 1]) if mine else slice(None)
    return [None if x is None else x[:, where].detach().clone().requires_grad_() for x in xs]


def both(xs: list[Tensor | None], state: Tensor | None, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """(one device, all ranks) of this rank's outputs, gradients and states."""
    policy, weight = (
        options.pop("policy", None),
        torch.linspace(-1, 1, B * ENDS[-1] * HV * V, dtype=torch.float64, device=DEVICE),
    )
    weight = weight.view(B, -1, HV, V).to(xs[0].dtype)
    whole, part = leaves(xs, False), leaves(xs, True)
    start = None if state is None else state.clone().requires_grad_()
    mine = None if state is None else state.clone().requires_grad_()
    exact = {} if policy is not None else {"prefix_lengths": ENDS[-1]}
    if policy is not None and "prefix_lengths" not in options:
        exact = {"prefix_lengths": ENDS[-2]}
    o, final = lc.linear_attention(
        *whole, initial_state=start, policy=policy, output_final_state=True, **exact, **options
    )
    o2, final2 = lcd.context_parallel(*part, initial_state=mine, policy=policy, output_final_state=True, **options)
    dense, dense2 = (x if x is None or isinstance(x, Tensor) else x.dense() for x in (final, final2))
    assert (final2 is not None) == (RANK == LAST)
    here = slice(ENDS[RANK], ENDS[RANK + 1])
    loss, loss2 = (o * weight).sum(), (o2 * weight[:, here]).sum()
    if policy is None:
        loss = loss + dense.square().sum()
        loss2 = loss2 + (0 if dense2 is None else dense2.square().sum())
    loss.backward()
    loss2.backward()
    found = [(o[:, here], o2)]
    found += [(x.grad[:, here], y.grad) for x, y in zip(whole, part, strict=True) if x is not None]
    if start is not None and RANK == 0:
        found.append((start.grad, mine.grad))
    if RANK == LAST:
        found.append((dense, dense2))
    return found


def check_outputs_states_and_gradients_are_those_of_one_device() -> None:
    for rule, decay, norm in itertools.product(("delta", "additive"), ("none", "head", "channel"), (False, True)):
        xs = inputs(decay, beta=norm)
        if not norm and rule == "delta":
            xs[1] = xs[1] / xs[1].norm(dim=-1, keepdim=True)
        state = randn(B, HV, K, V, dtype=torch.float64) if norm else None
        for x, y in both(xs, state, rule=rule, use_qk_l2norm_in_kernel=norm):
            assert (x - y).norm() <= 1e-9 * x.norm(), (rule, decay, norm, (x - y).norm() / x.norm())


def check_a_quantized_suffix_on_the_last_rank_goes_on_from_the_true_state() -> None:
    policies = (
        lc.Policy(lc.Int8(block_v=6)),
        lc.Policy(lc.Int8(block_v=6), rounding="stochastic", seed=3),
        lc.Policy(lc.Fp8(block_v=6), write=lc.Replay(4)),
        lc.Policy(write=lc.TwoPrecision(4, read=lc.Fp8(block_k=8, block_v=1))),
    )
    for policy, prefix in itertools.product(policies, (None, [73, 80])):
        options: dict[str, Any] = {} if prefix is None else {"prefix_lengths": prefix}
        found = both(inputs("head"), None, policy=policy, use_qk_l2norm_in_kernel=True, **options)
        for x, y in found:
            assert (x - y).norm() <= 1e-9 * x.norm(), (policy, prefix, (x - y).norm() / x.norm())


def check_packed_sequences_are_those_of_one_device() -> None:
    for bounds in ([0, 103], [0, 10, 40, 73, 103], [0, 5, 5, 41, 90, 103, 103], [0, 0, 39, 103]):
        cu, n = torch.tensor(bounds, device=DEVICE), len(bounds) - 1
        for (rule, decay), start in itertools.product((("delta", "head"), ("additive", "channel")), (False, True)):
            xs = [None if x is None else x[:1] for x in inputs(decay)]
            whole, part = leaves(xs, False), leaves(xs, True)
            state = randn(n, HV, K, V, dtype=torch.float64) if start else None
            one, two = (None if state is None else state.clone().requires_grad_() for _ in range(2))
            options: dict[str, Any] = {"rule": rule, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
            o, final = lc.linear_attention(
                *whole, initial_state=one, cu_seqlens=cu, prefix_lengths=cu.diff(), **options
            )
            o2, final2 = lcd.context_parallel(*part, initial_state=two, cu_seqlens=cu, **options)
            here = slice(ENDS[RANK], ENDS[RANK + 1])
            weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=DEVICE).view(o.shape)
            ((o * weight).sum() + final.square().sum()).backward()
            ((o2 * weight[:, here]).sum() + final2.square().sum()).backward()
            for x, y in zip(whole, part, strict=True):
                assert (x.grad[:, here] - y.grad).norm() <= 1e-9 * x.grad.norm(), (bounds, rule, start)
            assert (o[:, here] - o2).norm() <= 1e-9 * o.norm(), (bounds, rule, start)
            every: list[Any] = [None] * (LAST + 1)
            dist.all_gather_object(every, final2.detach().cpu())
            assert (torch.cat(every).to(final) - final).norm() <= 1e-9 * final.norm(), (bounds, rule, start)
            if one is not None and two is not None:
                dist.all_reduce(two.grad)
                assert (one.grad - two.grad).norm() <= 1e-9 * one.grad.norm(), (bounds, rule)


def check_what_packed_sequences_cannot_be_is_refused() -> None:
    xs = [None if x is None else x[:1] for x in leaves(inputs("head"), True)]
    refused: tuple[tuple[Any, str], ...] = (
        ({"cu_seqlens": torch.tensor([0, 103], device=DEVICE), "policy": "int8"}, "policy"),
        ({"cu_seqlens": torch.tensor([0, 40], device=DEVICE)}, "cu_seqlens"),
    )
    for options, argument in refused:
        try:
            lcd.context_parallel(*xs, **options)
        except LattnError as error:
            assert error.argument == argument, error
        else:
            raise AssertionError


def check_a_compiled_function_breaks_around_it() -> None:
    xs = [x[:, ENDS[RANK] : ENDS[RANK + 1]] for x in inputs("head")]

    def layer(*tokens: Tensor) -> Tensor:
        return lcd.context_parallel(*tokens, use_qk_l2norm_in_kernel=True)[0] * 2

    try:
        torch.compile(layer, backend="eager", fullgraph=True)(*xs)
    except torch._dynamo.exc.Unsupported as error:
        assert "which a graph cannot know" in str(error), error
    else:
        raise AssertionError
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, backend="eager")(*xs), layer(*xs))


def check_fp32_is_as_good_as_one_device() -> None:
    xs = inputs("head")
    exact = lc.linear_attention(*xs, use_qk_l2norm_in_kernel=True)[0][:, ENDS[RANK] : ENDS[RANK + 1]]
    part = [x[:, ENDS[RANK] : ENDS[RANK + 1]].float() for x in xs]
    o, _ = lcd.context_parallel(*part, use_qk_l2norm_in_kernel=True)
    assert o.dtype is torch.float32 and (o - exact).norm() <= 5e-6 * exact.norm(), (o - exact).norm() / exact.norm()
    o, _ = lcd.context_parallel(*(x.bfloat16() for x in part), use_qk_l2norm_in_kernel=True)
    once, _ = lc.linear_attention(*(x.bfloat16() for x in xs), use_qk_l2norm_in_kernel=True)
    once = once[:, ENDS[RANK] : ENDS[RANK + 1]]
    assert o.dtype is torch.bfloat16 and (o - exact).norm() <= 2 * (once - exact).norm()


def check_wide_heads_take_two_calls_and_clearing_gates_pass() -> None:
    xs = [randn(1, 12, 1, 160, dtype=torch.float64) for _ in range(3)]
    g = torch.zeros(1, 12, 1, dtype=torch.float64, device=DEVICE)
    g[:, 5] = -torch.inf  # before the last rank: nothing of what was written until then is left
    want, _ = lc.linear_attention(*xs, g, use_qk_l2norm_in_kernel=True)
    each = 12 // (LAST + 1)
    here = slice(each * RANK, each * (RANK + 1))
    o, _ = lcd.context_parallel(*(x[:, here] for x in xs), g[:, here], use_qk_l2norm_in_kernel=True)
    assert (o - want[:, here]).norm() <= 1e-9 * want[:, here].norm()


def check_a_convolution_takes_its_first_tokens_from_the_rank_before() -> None:
    x = randn(B, ENDS[-1], 5, dtype=torch.float64)
    weight = randn(5, 1, 4, dtype=torch.float64)

    def convolved(y: Tensor) -> Tensor:
        return F.conv1d(y.transpose(1, 2), weight, groups=5).transpose(1, 2)

    whole, part = (x[:, s].clone().requires_grad_() for s in (slice(None), slice(ENDS[RANK], ENDS[RANK + 1])))
    want = convolved(F.pad(whole, (0, 0, 3, 0)))
    want.square().sum().backward()
    mine = convolved(torch.cat([lcd.before(part, 3), part], 1))
    mine.square().sum().backward()
    here = slice(ENDS[RANK], ENDS[RANK + 1])
    torch.testing.assert_close(mine, want[:, here])
    torch.testing.assert_close(part.grad, whole.grad[:, here])


def check_a_suffix_before_the_last_rank_is_refused_on_every_rank() -> None:
    try:
        lcd.context_parallel(*leaves(inputs("head"), True), policy="int8", prefix_lengths=[73, 72])
    except SequenceError as error:
        assert "at least 73" in str(error)
    else:
        raise AssertionError
    try:
        lcd.before(randn(1, 2, 3), 3)
    except SequenceError as error:
        assert "at least 3" in str(error)
    else:
        raise AssertionError
