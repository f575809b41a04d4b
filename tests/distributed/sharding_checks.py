"""Checks of `lattn_compile.distributed.sharding` on two ranks: what one device computes, cut (see `ranks.py`)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication

import lattn_compile as lc
import lattn_compile.distributed
from lattn_compile import codec
from lattn_compile.distributed.axes import OPS
from lattn_compile.errors import LattnError, PlacementError
from lattn_compile.packed.layout import Heads, call_of, empty, names
from tests.distributed.ranks import DEVICE, GPU

FOLDER = Path()  # where to write; `ranks.py` sets it
DTYPE = torch.float64 if GPU else torch.float32
NOT_ON_A_GPU = ("check_packed_states_are_written_where_they_lie",)  # compares codes of float32 arithmetic
B, T, H, HV, K, V = 4, 11, 2, 4, 8, 8
MESH = init_device_mesh(DEVICE, (2,), mesh_dim_names=("tp",))
CUTS = {"sequences": (0, 0), "heads": (2, 1)}
"""Where tokens, and where states, are cut."""

POLICIES: dict[str, Any] = {
    "exact": None,
    "chunk": lc.Policy(lc.Int8(block_v=8), write=lc.Chunk(4)),
    "token": lc.Policy(lc.Int8(block_v=8)),
    "token residual": lc.Policy(lc.Int8(block_v=8), feedback="int4", rotation="hadamard_k"),
    "replay": lc.Policy(lc.Fp8(block_v=8), write=lc.Replay(4, factors="int8")),
    "two precision": lc.Policy(write=lc.TwoPrecision(4, read=lc.Fp8(block_k=8, block_v=1))),
}


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.rand(*shape, dtype=dtype, device=DEVICE)


def same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit on a CPU."""
    return bool((x - y).norm() <= 1e-12 * x.norm()) if GPU else torch.equal(x, y)


def inputs(decay: str = "head", *, tokens: int = T, batch: int = B, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    """q, k, v, g, beta: the same on every rank."""
    q, k = (randn(batch, tokens, H, K, dtype=dtype) for _ in range(2))
    v = randn(batch, tokens, HV, V, dtype=dtype)
    g = -rand(batch, tokens, HV, *([K] if decay == "channel" else []), dtype=dtype)
    return [q, k, v, g, rand(batch, tokens, HV, dtype=dtype)]


def cut(x: Tensor, dim: int) -> DTensor:
    return distribute_tensor(x.detach(), MESH, [Shard(dim)], src_data_rank=None)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor; of a DTensor those of the whole one. (gloo cannot move fp8.)"""
    if not isinstance(x, DTensor):
        return x.detach().contiguous().view(torch.uint8)
    mine = x.to_local().detach().contiguous().view(torch.uint8)
    if x.placements[0].is_replicate():
        return mine
    parts = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(parts, mine)
    return torch.cat(parts, x.placements[0].dim)


def refused(call: Any, argument: str, *says: str) -> None:
    try:
        call()
    except LattnError as error:
        assert error.argument == argument, error
        assert all(text in str(error) for text in says), error
        return
    raise AssertionError(f"{argument} was not refused")


def _leaves(xs: list[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in xs]


def _both(
    policy: Any, xs: list[Tensor], state: Tensor, where: str, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """o and the gradients of one device, and of two ranks."""
    at, at_state = CUTS[where]
    found = []
    for tokens in (_leaves(xs), _leaves([cut(x, at) for x in xs])):
        start = _leaves([state if len(found) == 0 else cut(state, at_state)])[0]
        o, _ = lc.linear_attention(*tokens, initial_state=start, policy=policy, use_qk_l2norm_in_kernel=True, **options)
        weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=DEVICE).view(o.shape)
        (o * (weight if len(found) == 0 else cut(weight, at))).sum().backward()
        found.append([o, *(x.grad for x in (*tokens, start))])
    one, two = found
    for x, y in zip(one, two, strict=True):
        assert isinstance(y, DTensor) and y.shape == x.shape and y.placements[0].is_shard(), (y, x.shape)
    return one, [x.full_tensor() for x in two]


def check_every_op_cut_has_the_bits_of_one_device() -> None:
    for (name, policy), where, decay in itertools.product(POLICIES.items(), CUTS, ("head", "channel")):
        # The exact prefix runs as long as the longest of a batch: of unequal ones, half a batch sums in another order.
        prefix = [0, 3, 5, 11] if where == "heads" else 3
        one, two = _both(policy, inputs(decay), randn(B, HV, K, V), where, prefix_lengths=prefix)
        for label, x, y in zip(("o", "q", "k", "v", "g", "beta", "state"), one, two, strict=True):
            assert same(x, y), (name, where, decay, label, (x - y).abs().max())


def check_unequal_prefixes_of_a_cut_batch_are_right_in_float64() -> None:
    for name, policy in POLICIES.items():
        xs, state = inputs(dtype=torch.float64), randn(B, HV, K, V, dtype=torch.float64)
        one, two = _both(policy, xs, state, "sequences", prefix_lengths=[0, 3, 5, 11])
        for x, y in zip(one, two, strict=True):
            assert (x - y).norm() <= 1e-9 * x.norm(), (name, (x - y).norm() / x.norm())


def check_an_uneven_batch_is_cut_too() -> None:
    one, two = _both(POLICIES["token"], inputs(batch=3), randn(3, HV, K, V), "sequences", prefix_lengths=2)
    assert all(same(x, y) for x, y in zip(one, two, strict=True))


def check_both_cuts_at_once_on_a_two_dimensional_mesh() -> None:
    xs, state = inputs(), randn(B, HV, K, V)
    want, _ = lc.linear_attention(*xs, initial_state=state, policy="int8")
    for shape in ((2, 1), (1, 2)):
        mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("dp", "tp"))
        given = [distribute_tensor(x, mesh, [Shard(0), Shard(2)], src_data_rank=None) for x in xs]
        start = distribute_tensor(state, mesh, [Shard(0), Shard(1)], src_data_rank=None)
        o, _ = lc.linear_attention(*given, initial_state=start, policy="int8")
        assert tuple(o.placements) == (Shard(0), Shard(2)) and same(want, o.full_tensor())


def check_replicated_tensors_are_computed_by_every_rank() -> None:
    xs = inputs()
    whole = [distribute_tensor(x, MESH, [Replicate()], src_data_rank=None) for x in xs]
    o, _ = lc.linear_attention(*whole, policy="int8")
    assert o.placements == (Replicate(),) and same(o.to_local(), lc.linear_attention(*xs, policy="int8")[0])


def check_a_carried_state_goes_on_cut() -> None:
    for policy, where in itertools.product(POLICIES.values(), CUTS):
        at, xs = CUTS[where][0], inputs(tokens=6)
        state = carried = None
        for start, end in ((0, 4), (4, 6)):
            part = [x[:, start:end] for x in xs]
            o, state = lc.linear_attention(*part, policy=policy, initial_state=state, output_final_state=True)
            with implicit_replication():  # cursors are plain tensors, the same on every rank
                mine, carried = lc.linear_attention(
                    *(cut(x, at) for x in part), policy=policy, initial_state=carried, output_final_state=True
                )
            assert same(o, mine.full_tensor())


def check_stochastic_rounding_draws_the_bits_of_the_whole_batch() -> None:
    policy = lc.Policy(lc.Int8(block_v=8), rounding="stochastic", seed=7)
    one, two = _both(policy, inputs(), randn(B, HV, K, V), "sequences", sequence_ids=[5, 9, 2, 7], position=3)
    assert all(same(x, y) for x, y in zip(one, two, strict=True))
    other, _ = lc.linear_attention(*inputs(), policy=policy, sequence_ids=[0, 1, 2, 3])
    assert not torch.equal(other, one[0])  # the ids do decide


def check_stochastic_rounding_refuses_heads_that_would_be_renumbered() -> None:
    policy = lc.Policy(lc.Int8(block_v=8), rounding="stochastic")
    xs = [cut(x, 2) for x in inputs()]
    refused(lambda: lc.linear_attention(*xs, policy=policy), "q", "stochastic", "Shard(0)")
    state = cut(randn(B, HV, K, V), 1)
    refused(lambda: codec.qdq(state, "int8", rounding="stochastic"), "state", "stochastic")


def check_codecs_follow_their_state() -> None:
    state = randn(B, HV, K, V)
    for fmt, options, dim in itertools.product(
        ("int8/*x8", "fp8_e4m3/*x8", "nvfp4", "bf16"), ({}, {"feedback": "int4"}, {"rotation": "hadamard_v"}), (0, 1)
    ):
        if fmt == "bf16" and options:
            continue
        if fmt == "nvfp4":
            state = randn(B, HV, 16, 64)
        want = codec.encode_tensors(state, fmt, **options)
        mine = codec.encode_tensors(cut(state, dim), fmt, **options)
        for name, x in want.items():
            assert mine[name].placements == (Shard(dim),) and mine[name].shape == x.shape
            assert torch.equal(bits(mine[name]), bits(x)), (fmt, name)
        back = codec.decode_tensors(mine, fmt, tuple(state.shape[2:]), torch.float32, **options)
        assert torch.equal(
            back.full_tensor(), codec.decode_tensors(want, fmt, tuple(state.shape[2:]), torch.float32, **options)
        )
        assert torch.equal(codec.qdq(cut(state, dim), fmt, **options).full_tensor(), codec.qdq(state, fmt, **options))
        state = randn(B, HV, K, V)


def _packed(policy: lc.Policy, xs: list[Tensor], dim: int | None, indices: Tensor | None, slots: int) -> list[Tensor]:
    """Three steps in place and a flush, and all that is stored then."""
    call, heads = call_of(policy), Heads(H, HV, K, V, "head", True)
    stored = list(empty(call, heads, slots, DEVICE).values())
    cursor = torch.full((slots,), -1, dtype=torch.int32, device=DEVICE)
    if dim is not None:
        keys = names(call, has_decay=True, has_beta=True)
        at = [0 if dim == 0 else 2 if key.startswith("ring_") else 1 for key in keys]
        stored = [cut(x, d) for x, d in zip(stored, at, strict=True)]
        cursor = cut(cursor, 0) if dim == 0 else distribute_tensor(cursor, MESH, [Replicate()], src_data_rank=None)
        indices = cut(indices, 0) if dim == 0 and indices is not None else indices
    step = torch.ops.lattn.replay_ if call.window else torch.ops.lattn.decode_
    outputs = []
    for t in range(3):
        tokens = [x[:, t : t + 1] for x in xs]
        if dim is not None:
            tokens = [cut(x, 0 if dim == 0 else 2) for x in tokens]
        outputs.append(
            step(*tokens, stored, cursor, indices, None, None, None, None, None, scale=0.3, **call.op_options())
        )
    if call.window:
        options = {n: v for n, v in call.op_options().items() if n not in ("readout", "implementation", "gate")}
        torch.ops.lattn.flush_(
            stored, cursor, indices, None, None, heads=[H, HV, K, V], decay="head", has_beta=True, **options
        )
    return [bits(x) for x in (*outputs, *stored, cursor)]


def check_packed_states_are_written_where_they_lie() -> None:
    for name in ("token", "token residual", "replay", "two precision"):
        xs = inputs(tokens=3)
        for dim, indices in ((0, None), (1, None), (0, torch.tensor([1, 2, 5, -1])), (1, torch.tensor([5, 0, 3, 1]))):
            slots = B if indices is None else 6
            want, mine = (
                _packed(POLICIES[name], xs, None, indices, slots),
                _packed(POLICIES[name], xs, dim, indices, slots),
            )
            for x, y in zip(want, mine, strict=True):
                assert torch.equal(x, y), (name, dim, indices)


def check_raw_gates_are_cut_with_the_heads_they_are_of() -> None:
    call, heads = call_of(POLICIES["token"]), Heads(H, HV, K, V, "head", True)
    xs, a_log, dt_bias = inputs(tokens=1), randn(HV), randn(HV)
    outputs = []
    for by in (lambda x, dim: x, cut):
        stored = [by(x, 1) for x in empty(call, heads, B, DEVICE).values()]
        cursor = torch.full((B,), -1, dtype=torch.int32, device=DEVICE)
        raw = {"a_log": by(a_log, 0), "dt_bias": by(dt_bias, 0), "raw_gate": True, "raw_beta": True}
        tokens = [by(x, 2) for x in xs]
        outputs.append(
            torch.ops.lattn.decode_(*tokens, stored, cursor, *[None] * 6, scale=0.3, **call.op_options(), **raw)
        )
    assert torch.equal(*map(bits, outputs))


def check_every_op_takes_dtensors() -> None:
    ops = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("lattn::")}
    functional = "lattn::decode_packed"  # a compiled step of a state that has no DTensors
    assert ops - {f"lattn::{name}" for name in OPS} == {functional}


def check_a_slot_of_another_rank_is_refused() -> None:
    slots = torch.tensor([5, 0, 1, 2], device=DEVICE)
    refused(lambda: _packed(POLICIES["token"], inputs(tokens=3), 0, slots, 6), "state_indices", "slot")


def check_wrong_placements_are_refused_with_the_one_that_works() -> None:
    xs = inputs()
    by_batch, by_head = [cut(x, 0) for x in xs], [cut(x, 2) for x in xs]
    refused(lambda: lc.linear_attention(by_head[0], *by_batch[1:]), "k", "[Shard(2)]")
    refused(lambda: lc.linear_attention(*by_batch[:3], by_head[3], by_batch[4]), "g", "[Shard(0)]")
    refused(lambda: lc.linear_attention(*by_batch[:4], xs[4]), "beta", "plain tensor", "[Shard(0)]")
    refused(lambda: lc.linear_attention(xs[0], *by_batch[1:]), "q", "plain tensor")
    for dim, axis in ((1, "tokens"), (3, "channels")):
        cut_wrong = [cut(x, dim if x.dim() > dim else 0) for x in xs]
        refused(lambda c=cut_wrong: lc.linear_attention(*c), "q", "Shard(0), Shard(2) or Replicate()", axis)
    summed = DTensor.from_local(xs[0], MESH, [Partial()])
    refused(lambda: lc.linear_attention(summed, *by_batch[1:]), "q", "Partial", "summed")
    refused(
        lambda: lc.linear_attention(*by_head, initial_state=cut(randn(B, HV, K, V), 0)),
        "initial_state",
        "[Shard(1)]",
    )
    narrow = [x[:, :, :1] if i < 2 else x for i, x in enumerate(xs)]
    refused(lambda: lc.linear_attention(*(cut(x, 2) for x in narrow)), "k", "1 key heads over 2 ranks", "Shard(0)")
    packed = [cut(x.flatten(0, 1)[None], 0) for x in xs]
    cu = torch.tensor([0, 20, 44], device=DEVICE)
    refused(lambda: lc.linear_attention(*packed, cu_seqlens=cu), "cu_seqlens", "heads cut")
    heads = [cut(x.flatten(0, 1)[None], 2) for x in xs]
    o, _ = lc.linear_attention(*heads, cu_seqlens=cu, policy="int8")
    want, _ = lc.linear_attention(*(x.flatten(0, 1)[None] for x in xs), cu_seqlens=cu, policy="int8")
    assert same(want, o.full_tensor())


def check_gradients_that_come_in_otherwise_are_brought_to_the_call() -> None:
    xs = inputs()
    given = _leaves([cut(x, 2) for x in xs])
    o, _ = lc.linear_attention(*given, policy="int8")
    o.full_tensor().square().sum().backward()
    plain = _leaves(xs)
    lc.linear_attention(*plain, policy="int8")[0].square().sum().backward()
    assert all(same(y.grad, x.grad.full_tensor()) for x, y in zip(given, plain, strict=True))


def check_no_rank_asks_another_for_anything() -> None:
    from torch.distributed.tensor.debug import CommDebugMode

    given = _leaves([cut(x, 2) for x in inputs()])
    with CommDebugMode() as comm:
        o, _ = lc.linear_attention(*given, policy="int8")
        o.backward(o.detach())
    assert comm.get_total_counts() == 0, comm.get_comm_counts()


def check_an_op_compiles_with_dtensors() -> None:
    given = [cut(x, 2) for x in inputs()]

    def call(*xs: Tensor) -> Tensor:
        return lc.linear_attention(*xs, policy="int8")[0] * 2

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    one, two = _leaves(given), _leaves(given)
    a, b = call(*one), compiled(*two)
    assert same(a.full_tensor(), b.full_tensor())
    a.sum().backward()
    b.sum().backward()
    assert all(same(x.grad.full_tensor(), y.grad.full_tensor()) for x, y in zip(one, two, strict=True))


def check_the_error_is_a_placement_error() -> None:
    xs = [cut(x, 1) for x in inputs()]
    try:
        lc.linear_attention(*xs)
    except PlacementError as error:
        assert error.code == "placement"
    else:
        raise AssertionError
    dist.barrier()
