from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.cases import OPS, assert_like_the_loop, inputs, ints, options

PACKED = torch.tensor([0, 7, 7, 18])


@pytest.mark.parametrize("write", ["exact", "chunk"])
@pytest.mark.parametrize("rule", ["delta", "additive"])
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_equals_the_loop_for_every_rule_and_decay(write: str, rule: str, decay: str | None) -> None:
    tensors = inputs(decay=decay, grad=True)
    assert_like_the_loop("chunk", tensors, (None,) * 4, **options("chunk", write, rule=rule, qk_l2norm=True))


@pytest.mark.parametrize("readout", ["before_write", "after_write"])
@pytest.mark.parametrize("state_format", ["fp32", "bf16", "fp8_e4m3/4x3", "nvfp4"])
def test_equals_the_loop_for_every_format_and_readout(state_format: str, readout: str) -> None:
    kwargs = options("chunk", "chunk", state_format=state_format, readout=readout)
    assert_like_the_loop("chunk", inputs(grad=True), (None,) * 4, **kwargs)


@pytest.mark.parametrize(
    ("batch", "cu_seqlens", "prefix", "length", "cursor"),
    [
        pytest.param(2, None, torch.tensor(6), None, None, id="scalar prefix"),
        pytest.param(2, None, torch.tensor(99), ints(20, 3), None, id="a scalar prefix is clamped to each sequence"),
        pytest.param(2, None, ints(0, 11), ints(13, 11), None, id="prefix and length per sequence"),
        pytest.param(2, None, None, None, ints(3, -1), id="one continued inside a chunk, one new"),
        pytest.param(2, None, ints(4, 0), ints(20, 0), ints(2, 4), id="prefix after a chunk state; an empty sequence"),
        pytest.param(1, PACKED, None, None, None, id="packed"),
        pytest.param(1, PACKED, ints(2, 0, 6), ints(7, 0, 9), ints(-1, 3, 0), id="packed, with everything"),
    ],
)
@pytest.mark.parametrize("readout", ["before_write", "after_write"])
def test_equals_the_loop_for_every_kind_of_length(
    batch: int, cu_seqlens: Any, prefix: Any, length: Any, cursor: Any, readout: str
) -> None:
    tensors = inputs(batch, sequences=None if cu_seqlens is None else 3, grad=True)
    lengths = (cu_seqlens, prefix, length, cursor)
    assert_like_the_loop("chunk", tensors, lengths, **options("chunk", "chunk", readout=readout))


def test_exact_reads_neither_prefix_nor_cursor() -> None:
    tensors, kwargs = inputs(), options("chunk")
    plain = OPS["chunk"](*tensors, None, None, None, None, **kwargs)
    other = OPS["chunk"](*tensors, None, ints(3, 20), None, ints(4, 9), **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("absent", [("g",), ("beta",), ("initial_state",), ("g", "beta", "initial_state")])
def test_absent_inputs_are_their_neutral_values(absent: tuple[str, ...]) -> None:
    tensors = inputs(
        decay=None if "g" in absent else "head",
        beta="beta" not in absent,
        state="initial_state" not in absent,
        grad=True,
    )
    assert_like_the_loop("chunk", tensors, (None, torch.tensor(4), None, None), **options("chunk", "chunk"))


def test_on_the_grid_cut_is_bitwise_the_uncut_run() -> None:
    # float32, where two orders of summation would show
    q, k, v, g, beta, state = inputs(dtype=torch.float32, tokens=30)
    kwargs = options("chunk", "chunk", chunk_size=10)

    def run(first: int, last: int, state: torch.Tensor, cursor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        part = [x[:, first:last] for x in (q, k, v, g, beta)]
        return OPS["chunk"](*part, state, None, None, None, cursor, **kwargs)

    whole_o, whole = run(0, 30, state, None)
    o1, middle = run(0, 10, state, None)
    o2, last = run(10, 30, middle, ints(0, 0))
    assert torch.equal(torch.cat([o1, o2], 1), whole_o)
    assert torch.equal(last, whole)


@pytest.mark.parametrize("write", ["exact", "chunk"])
def test_opcheck(write: str) -> None:
    tensors = inputs(tokens=11, dtype=torch.float32, grad=True)
    lengths = (None, torch.tensor(3), ints(11, 8), None)
    torch.library.opcheck(OPS["chunk"], (*tensors, *lengths), options("chunk", write, qk_l2norm=True))
    packed = inputs(1, 18, dtype=torch.bfloat16, decay="channel", beta=False, state=False, grad=True)
    packed[3] = packed[3].detach()
    lengths = (PACKED, ints(2, 0, 4), None, ints(-1, 0, 2))
    torch.library.opcheck(OPS["chunk"], (*packed, *lengths), options("chunk", write, rule="additive"))


def test_opcheck_of_the_backward() -> None:
    tensors = inputs(tokens=11, dtype=torch.float32)
    tensors[0], tensors[4], tensors[5] = tensors[0].bfloat16(), tensors[4].half(), tensors[5].bfloat16()
    lengths = (None, torch.tensor(3), ints(11, 8), None)
    kwargs = options("chunk", "chunk")
    o, state = OPS["chunk"](*tensors, *lengths, **kwargs)
    backward = torch.ops.lattn.chunk_backward.default
    torch.library.opcheck(backward, (o, state, *tensors, *lengths), kwargs)
    absent = [*tensors[:3], None, None, None]
    torch.library.opcheck(backward, (None, state, *absent, *lengths), kwargs)
