from __future__ import annotations

from typing import Any

import pytest
import torch

from lattn_compile.ops import checkpoint_interval
from tests.ops.cases import NAMES, OPS, assert_like_the_loop, inputs, ints, options

PACKED = torch.tensor([0, 7, 7, 18])


@pytest.mark.parametrize("write", ["exact", "token"])
@pytest.mark.parametrize("rule", ["delta", "additive"])
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_equals_the_loop_for_every_rule_and_decay(write: str, rule: str, decay: str | None) -> None:
    tensors = inputs(decay=decay, grad=True)
    assert_like_the_loop("decode", tensors, (None,) * 4, **options("decode", write, rule=rule, qk_l2norm=True))


@pytest.mark.parametrize("readout", ["before_write", "after_write"])
@pytest.mark.parametrize("state_format", ["fp32", "fp16", "fp8_e4m3/4x3", "nvfp4"])
def test_equals_the_loop_for_every_format_and_readout(state_format: str, readout: str) -> None:
    kwargs = options("decode", "token", state_format=state_format, readout=readout)
    assert_like_the_loop("decode", inputs(grad=True), (None,) * 4, **kwargs)


@pytest.mark.parametrize(
    ("batch", "cu_seqlens", "prefix", "length", "cursor"),
    [
        pytest.param(2, None, torch.tensor(6), None, None, id="scalar prefix"),
        pytest.param(2, None, torch.tensor(99), ints(20, 3), None, id="a scalar prefix is clamped to each sequence"),
        pytest.param(2, None, ints(0, 11), ints(13, 11), None, id="prefix and length per sequence"),
        pytest.param(2, None, None, None, ints(0, -1), id="one handed over before, one new"),
        pytest.param(
            2, None, ints(4, 0), ints(20, 0), ints(0, -1), id="prefix after a stored state; an empty sequence"
        ),
        pytest.param(1, PACKED, None, None, None, id="packed"),
        pytest.param(1, PACKED, ints(2, 0, 6), ints(7, 0, 9), ints(-1, 0, 0), id="packed, with everything"),
    ],
)
@pytest.mark.parametrize("every", [0, 3])
def test_equals_the_loop_for_every_kind_of_length(
    batch: int, cu_seqlens: Any, prefix: Any, length: Any, cursor: Any, every: int
) -> None:
    tensors = inputs(batch, sequences=None if cu_seqlens is None else 3, grad=True)
    lengths = (cu_seqlens, prefix, length, cursor)
    assert_like_the_loop("decode", tensors, lengths, **options("decode", "token", checkpoint_every=every))


@pytest.mark.parametrize("absent", [("g",), ("beta",), ("initial_state",), ("g", "beta", "initial_state")])
def test_absent_inputs_are_their_neutral_values(absent: tuple[str, ...]) -> None:
    tensors = inputs(
        decay=None if "g" in absent else "head",
        beta="beta" not in absent,
        state="initial_state" not in absent,
        grad=True,
    )
    assert_like_the_loop("decode", tensors, (None, torch.tensor(4), None, None), **options("decode", "token"))


def test_one_token_training_step_has_exact_gradients() -> None:
    # a decode step is differentiable, its initial state included, and T = 1, 2, 3 pass the final state's gradient on
    for tokens in (1, 2, 3):
        for write in ("exact", "token"):
            assert_like_the_loop("decode", inputs(tokens=tokens, grad=True), (None,) * 4, **options("decode", write))


def test_checkpoints_lie_where_the_schema_says() -> None:
    tensors = inputs(1, 18, sequences=3)
    lengths = (PACKED, ints(2, 0, 6), None, None)
    every = 4
    kwargs = options("decode", "token", checkpoint_every=every)
    checkpoints = OPS["decode"](*tensors, *lengths, **kwargs)[2]
    assert checkpoints.shape == (18 // every + 3, 4, 8, 12)
    used = set()
    for i, (start, end, prefix) in enumerate(((0, 7, 2), (7, 7, 0), (7, 18, 6))):
        first = start + prefix
        for j, token in enumerate(range(first, end, every)):
            slot = first // every + i + j
            used.add(slot)
            part = [x[:, start:token] for x in tensors[:5]] + [tensors[5][i : i + 1]]
            before = OPS["decode"](*part, None, torch.tensor(prefix), None, None, **options("decode", "token"))[1]
            if j == 0:  # the first one comes after the hand-over, which an all-prefix call leaves to its successor
                nothing = [x[:, :1] * 0 for x in tensors[:5]]
                before = OPS["decode"](*nothing, before, *(None,) * 4, **options("decode", "token"))[1]
            torch.testing.assert_close(checkpoints[slot], before[0], rtol=1e-12, atol=1e-12)
    unused = [slot for slot in range(checkpoints.shape[0]) if slot not in used]
    assert unused and not checkpoints[unused].any()


@pytest.mark.parametrize("prefix", [None, torch.tensor(5)])
def test_gradients_do_not_depend_on_the_checkpoint_interval(prefix: Any) -> None:
    def gradients(every: int) -> tuple[torch.Tensor, ...]:
        tensors = inputs(dtype=torch.float32, grad=True)
        kwargs = options("decode", "token", checkpoint_every=every)
        o, state, _ = OPS["decode"](*tensors, None, prefix, None, None, **kwargs)
        return torch.autograd.grad(o.sum() + state.sum(), tensors)

    want = gradients(0)
    for every in (1, 7, 64):
        for name, a, b in zip(NAMES, gradients(every), want, strict=True):
            assert torch.equal(a, b), (every, name)


def _trained(every: int, cursor: Any = None, **more: Any) -> tuple[torch.Tensor, ...]:
    tensors = inputs(tokens=13, dtype=torch.float32, grad=True)
    kwargs = options("decode", "token", checkpoint_every=every, **more)
    o, state, rows = OPS["decode"](*tensors, None, None, ints(13, 6), cursor, **kwargs)
    return o, state, *torch.autograd.grad(o.sum() + state.square().sum(), tensors), rows


@pytest.mark.parametrize("state_format", ["int8/3x5", "fp8_e4m3", "nvfp4", "bf16", "fp16"])
def test_checkpoints_in_bytes_change_no_bit(state_format: str) -> None:
    *want, _ = _trained(0, state_format=state_format)
    *got, rows = _trained(2, state_format=state_format)
    assert rows.dtype == torch.uint8 and rows.dim() == 2
    for name, a, b in zip(("o", "state", *NAMES), got, want, strict=True):
        assert torch.equal(a, b), name


def test_a_state_that_no_code_stands_for_is_not_taken_from_a_checkpoint() -> None:
    """Handed in as stored already, so that nothing rounds it: its codes would be another state."""
    *want, _ = _trained(0, cursor=ints(0, 0))
    *got, _ = _trained(2, cursor=ints(0, 0))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("write", "state_format", "share"),
    [("exact", "fp32", 0.36), ("token", "int8", 0.34), ("token", "bf16", 0.35), ("token", "nvfp4", 0.2)],
)
def test_checkpoints_are_a_third_of_the_tensors_in_every_mode(write: str, state_format: str, share: float) -> None:
    """q, k, v, g, beta and o of B = 4, T = 4,096, H = 16, HV = 32, K = V = 128 in bf16, as fakes."""
    x = [
        torch.empty(4, 4096, h, *d, dtype=torch.bfloat16, device="meta") for h, *d in ((16, 128), (16, 128), (32, 128))
    ]
    x += [torch.empty(4, 4096, 32, device="meta"), torch.empty(4, 4096, 32, dtype=torch.bfloat16, device="meta")]
    kwargs = options("decode", write, state_format=state_format, checkpoint_every=checkpoint_interval(4096))
    o, _, rows = OPS["decode"](*x, *(None,) * 5, **kwargs)
    assert rows.nbytes <= share * sum(t.nbytes for t in (*x, o))


def test_one_token_has_no_checkpoint() -> None:
    rows = OPS["decode"](*inputs(tokens=1), *(None,) * 4, **options("decode", "token", checkpoint_every=64))[2]
    assert rows.shape == (0,)


def test_the_interval_grows_like_the_root_of_the_tokens() -> None:
    assert [checkpoint_interval(n) for n in (0, 1, 256, 257, 4096)] == [16, 16, 16, 17, 64]


@pytest.mark.parametrize("state_format", ["int8", "fp8_e4m3", "bf16", "nvfp4"])
@pytest.mark.parametrize("readout", ["before_write", "after_write"])
def test_tokens_one_by_one_or_together_are_bitwise_equal(state_format: str, readout: str) -> None:
    q, k, v, g, beta, state = inputs(dtype=torch.float32, tokens=9)
    kwargs = options("decode", "token", state_format=state_format, readout=readout, qk_l2norm=True)
    whole_o, whole, _ = OPS["decode"](q, k, v, g, beta, state, *(None,) * 4, **kwargs)
    outs, cursor = [], None
    for t in range(9):
        part = [x[:, t : t + 1] for x in (q, k, v, g, beta)]
        o, state, _ = OPS["decode"](*part, state, None, None, None, cursor, **kwargs)
        cursor = ints(0, 0)
        outs.append(o)
    assert torch.equal(torch.cat(outs, 1), whole_o)
    assert torch.equal(state, whole)


@pytest.mark.parametrize("write", ["exact", "token"])
def test_opcheck(write: str) -> None:
    tensors = inputs(tokens=11, dtype=torch.float32, grad=True)
    lengths = (None, torch.tensor(3), ints(11, 8), None)
    kwargs = options("decode", write, qk_l2norm=True, checkpoint_every=4)
    torch.library.opcheck(OPS["decode"], (*tensors, *lengths), kwargs)
    packed = inputs(1, 18, dtype=torch.bfloat16, decay="channel", beta=False, state=False, grad=True)
    packed[3] = packed[3].detach()
    lengths = (PACKED, ints(2, 0, 4), None, ints(-1, 0, 0))
    torch.library.opcheck(OPS["decode"], (*packed, *lengths), options("decode", write, rule="additive"))


def test_opcheck_of_the_backward() -> None:
    tensors = inputs(tokens=11, dtype=torch.float32)
    tensors[0], tensors[4], tensors[5] = tensors[0].bfloat16(), tensors[4].half(), tensors[5].bfloat16()
    lengths = (None, torch.tensor(3), ints(11, 8), None)
    kwargs = options("decode", "token", checkpoint_every=4)
    o, state, checkpoints = OPS["decode"](*tensors, *lengths, **kwargs)
    backward = torch.ops.lattn.decode_backward.default
    torch.library.opcheck(backward, (o, state, *tensors, *lengths, None, None, checkpoints), kwargs)
    absent = [*tensors[:3], None, None, None]
    torch.library.opcheck(backward, (None, state, *absent, *lengths, None, None, torch.empty(0)), options("decode"))
