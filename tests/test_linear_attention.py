from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lattn_compile.errors import DtypeError, PolicyError, SequenceError, ShapeError, StateError, UnsupportedError
from lattn_compile.formats import Bf16, Fp8, Int8, Nvfp4
from lattn_compile.functional import linear_attention
from lattn_compile.phase import training_phase
from lattn_compile.policy import Chunk, Exact, Policy, Prefill, Replay, Token, TwoPrecision
from lattn_compile.replay_state import ReplayState
from lattn_compile.state import EncodedState, encode_state
from lattn_compile.testing.oracle import oracle
from tests.ops.cases import assert_close, inputs, ints

TOKEN = Policy(Int8(8))
CHUNK = Policy(Int8(8), write=Chunk(5))
policies = pytest.mark.parametrize("policy", [TOKEN, CHUNK], ids=str)
any_policy = pytest.mark.parametrize("policy", [None, TOKEN, CHUNK], ids=str)


def run(tensors: list[Any], **kwargs: Any) -> tuple[Tensor, Any]:
    return linear_attention(*tensors[:5], initial_state=tensors[5], output_final_state=True, **kwargs)


def part(tensors: list[Any], first: int, last: int, state: Any) -> list[Any]:
    return [None if x is None else x[:, first:last] for x in tensors[:5]] + [state]


def op_kwargs(policy: Policy | None) -> dict[str, Any]:
    if policy is None:
        return {}
    kwargs = policy.op_kwargs()
    return {name: kwargs[name] for name in ("write", "state_format", "readout", "chunk_size") if name in kwargs}


# --- what it computes -------------------------------------------------------------------------------------------------


@any_policy
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("rule", ["delta", "additive"])
def test_equals_the_loop(policy: Policy | None, tokens: int, rule: str) -> None:
    tensors = inputs(tokens=tokens, grad=True)
    o, state = run(tensors, rule=rule, policy=policy, use_qk_l2norm_in_kernel=True)
    want = oracle(*tensors, rule=rule, qk_l2norm=True, **op_kwargs(policy))
    assert_close(o, want.o, "o")
    if policy is not None:
        assert state.cursor.tolist() == want.cursor.tolist()
    raw = state.raw() if isinstance(state, EncodedState) else state
    assert_close(raw, want.final_state, "final_state")
    weights = [torch.randn_like(o), torch.randn_like(raw)]
    ours = torch.autograd.grad([o, raw], tensors, weights)
    theirs = torch.autograd.grad([want.o, want.final_state], tensors, weights)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, "gradient")


def test_scale_defaults_to_the_root_of_the_key_dimension() -> None:
    tensors = inputs(key_dim=16)
    assert torch.equal(run(tensors)[0], run(tensors, scale=0.25)[0])
    assert not torch.equal(run(tensors)[0], run(tensors, scale=1.0)[0])


def test_a_readout_after_the_write_reads_what_was_stored() -> None:
    tensors = inputs()
    before, after = (run(tensors, policy=Policy(Int8(8), readout=r)) for r in ("before_write", "after_write"))
    assert torch.equal(before[1].dense(), after[1].dense()) and not torch.equal(before[0], after[0])


# --- what it returns --------------------------------------------------------------------------------------------------


def test_the_states_type_follows_the_policy_alone() -> None:
    tensors = inputs(dtype=torch.float32)
    for policy, kind in ((None, Tensor), ("exact", Tensor), (Policy(write=Exact()), Tensor), (TOKEN, EncodedState)):
        for lengths in ({}, {"prefix_lengths": 20}, {"sequence_lengths": [0, 3]}):
            assert type(run(tensors, policy=policy, **lengths)[1]) is kind
    assert type(run(tensors, policy=CHUNK)[1]) is EncodedState
    for write in (Replay(), Replay(1), TwoPrecision(4)):
        assert type(run(tensors, policy=Policy(Int8(8), write=write))[1]) is ReplayState
    assert linear_attention(*tensors[:5], policy=TOKEN)[1] is None


def test_packed_storage_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="storage"):
        run(inputs(), policy=Policy(Int8(8), storage="packed"))


def test_a_prefill_in_triton_is_refused_where_there_is_no_gpu() -> None:
    policy = Policy(Int8(8), prefill=Prefill({"kk": "int8"}), kernel="triton")
    with pytest.raises(UnsupportedError, match="got 'triton'"):
        run(inputs(dtype=torch.float32), policy=policy)


@any_policy
def test_the_returned_state_is_the_callers_own(policy: Policy | None) -> None:
    tensors = inputs(tokens=3, dtype=torch.float32)
    before = tensors[5].clone()
    state = run(tensors, policy=policy)[1]
    (state if policy is None else state.raw()).add_(1.0)
    assert torch.equal(tensors[5], before)


# --- carrying a state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [Int8(), Fp8(), Bf16(), Nvfp4()], ids=str)
@pytest.mark.parametrize("readout", ["before_write", "after_write"])
def test_token_mode_one_by_one_is_bitwise_token_mode_together(fmt: Any, readout: str) -> None:
    tensors = inputs(tokens=9, dtype=torch.float32)
    policy = Policy(fmt, readout=readout)
    whole_o, whole = run(tensors, policy=policy)
    state, outs = tensors[5], []
    for first, last in ((0, 1), (1, 2), (2, 6), (6, 6), (6, 7), (7, 9)):
        o, state = run(part(tensors, first, last, state), policy=policy)
        outs.append(o)
    assert torch.equal(torch.cat(outs, 1), whole_o)
    assert torch.equal(state.dense(), whole.dense())
    assert all(torch.equal(state.tensors[n].float(), whole.tensors[n].float()) for n in whole.tensors)


def test_chunk_mode_cut_on_its_grid_is_bitwise_the_uncut_run() -> None:
    tensors = inputs(tokens=30, dtype=torch.float32)
    whole_o, whole = run(tensors, policy=CHUNK)
    first_o, state = run(part(tensors, 0, 10, tensors[5]), policy=CHUNK)
    assert state.cursor.tolist() == [0, 0]
    last_o, state = run(part(tensors, 10, 30, state), policy=CHUNK)
    assert torch.equal(torch.cat([first_o, last_o], 1), whole_o)
    assert torch.equal(state.dense(), whole.dense())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cuts_anywhere_equal_the_uncut_call(data: st.DataObject) -> None:
    # values, cursors and gradients, through prefix, hand-over and ragged ends, in float64
    policy = data.draw(st.sampled_from([TOKEN, CHUNK]))
    total = 14
    ends = [data.draw(st.integers(0, total)) for _ in range(2)]
    prefixes = [data.draw(st.integers(0, n)) for n in ends]
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))})
    tensors = inputs(tokens=total, grad=True)
    want = oracle(*tensors, None, ints(*prefixes), ints(*ends), None, **op_kwargs(policy))

    state, outs = tensors[5], []
    for first, last in itertools.pairwise(cuts):
        lengths = [min(max(n - first, 0), last - first) for n in ends]
        before = [min(max(p - first, 0), n) for p, n in zip(prefixes, lengths, strict=True)]
        o, state = run(
            part(tensors, first, last, state), policy=policy, prefix_lengths=before, sequence_lengths=lengths
        )
        outs.append(o)
    o = torch.cat(outs, 1)
    assert_close(o, want.o, "o")
    assert_close(state.raw(), want.final_state, "state")
    assert state.cursor.tolist() == want.cursor.tolist()
    weights = [torch.ones_like(o), torch.ones_like(want.final_state)]
    ours = torch.autograd.grad([o, state.raw()], tensors, weights, allow_unused=True)
    zero = sum(0 * x.sum() for x in tensors)  # the loop's outputs may depend on no input at all
    theirs = torch.autograd.grad([want.o + zero, want.final_state + zero], tensors, weights, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        zero = torch.zeros(())
        assert_close(zero if a is None else a, zero if b is None else b, "gradient")


@policies
def test_a_prefix_after_a_carried_state_starts_from_its_dense_value(policy: Policy) -> None:
    tensors = inputs(tokens=8)
    _, state = run(part(tensors, 0, 3, tensors[5]), policy=policy)
    o, _ = run(part(tensors, 3, 8, state), policy=policy, prefix_lengths=5)
    exact, _ = run(part(tensors, 3, 8, state.dense()))
    assert_close(o, exact, "o")


@policies
def test_gradients_flow_through_values_and_dense(policy: Policy) -> None:
    for read in (lambda s: s.values, lambda s: s.dense(), lambda s: s.raw()):
        tensors = inputs(tokens=7, grad=True)
        state = run(tensors, policy=policy)[1]
        got = torch.autograd.grad(read(state).sum(), tensors)
        want = torch.autograd.grad(oracle(*tensors, **op_kwargs(policy)).final_state.sum(), tensors, allow_unused=True)
        for a, b in zip(got[1:], want[1:], strict=True):
            assert_close(a, b, "gradient")


def test_an_encoded_state_starts_any_mode_but_another_grid() -> None:
    tensors = inputs(dtype=torch.float32)
    encoded = encode_state(tensors[5], Int8(8))
    with_encoded = [*tensors[:5], encoded]
    assert torch.equal(run(with_encoded, policy="exact")[0], run([*tensors[:5], encoded.dense()])[0])
    # handing the dense state over rounds it to the same values
    assert torch.equal(run(with_encoded, policy=TOKEN)[0], run(tensors, policy=TOKEN)[0])
    assert torch.equal(run(with_encoded, policy=CHUNK)[0], run(tensors, policy=CHUNK)[0])
    off_grid = [*tensors[:5], run(part(tensors, 0, 3, tensors[5]), policy=CHUNK)[1]]
    for policy in (Policy(Fp8()), TOKEN, Policy(Int8(8), write=Chunk(6))):
        with pytest.raises(
            StateError, match=r"initial_state: got EncodedState\(int8/\*x8, chunk\(5\), \[2, 4, 8, 12\]"
        ):
            run(off_grid, policy=policy)
    with pytest.raises(StateError, match=r"want a state of the policy's own mode, token fp8_e4m3/\*x64"):
        run(with_encoded, policy=Policy(Fp8()))
    with pytest.raises(StateError, match="initial_state: got dict; want a Tensor"):
        run([*tensors[:5], {}], policy=TOKEN)


def test_a_loaded_state_of_codes_only_continues_bitwise() -> None:
    tensors = inputs(tokens=8, dtype=torch.float32)
    _, state = run(part(tensors, 0, 5, tensors[5]), policy=TOKEN)
    stored = EncodedState(state.state_format, state.tensors, state.cursor, shape=state.shape)
    a, b = (run(part(tensors, 5, 8, s), policy=TOKEN) for s in (state, stored))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1].dense(), b[1].dense())


def test_reordered_sequences_continue_as_themselves() -> None:
    tensors = inputs(3, tokens=8, dtype=torch.float64)
    _, state = run(part(tensors, 0, 5, tensors[5]), policy=CHUNK, prefix_lengths=[5, 2, 0])
    whole = run(part(tensors, 5, 8, state), policy=CHUNK)[0]
    order = torch.tensor([2, 0])
    some = run([x[order, 5:8] for x in tensors[:5]] + [state.index_select(order)], policy=CHUNK)[0]
    assert_close(some, whole[order], "o")


# --- lengths ----------------------------------------------------------------------------------------------------------


@any_policy
def test_packed_sequences_do_not_leak_into_each_other(policy: Policy | None) -> None:
    tensors = inputs(1, 96, sequences=2)
    o, state = run(tensors, policy=policy, cu_seqlens=torch.tensor([0, 40, 96]))
    for i, (first, last) in enumerate(((0, 40), (40, 96))):
        alone_o, alone = run(part(tensors, first, last, tensors[5][i : i + 1]), policy=policy)
        assert_close(o[:, first:last], alone_o, "o")
        dense = (state, alone) if policy is None else (state.dense(), alone.dense())
        assert_close(dense[0][i : i + 1], dense[1], "state")


@any_policy
@pytest.mark.parametrize("how", ["eager", "compile", "export", "export strict"])
def test_cu_seqlens_is_honoured_however_the_call_is_traced(policy: Policy | None, how: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu: Tensor) -> Tensor:
            return linear_attention(q, k, v, g, cu_seqlens=cu, policy=policy)[0]

    q, k, v, g = inputs(1, 9, dtype=torch.float32)[:4]
    arguments = (q, k, v, g, torch.tensor([0, 5, 9]))
    layer: Any = Layer()
    if how == "compile":
        torch._dynamo.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    elif how.startswith("export"):
        layer = torch.export.export(layer, arguments, strict="strict" in how).module()
    o = layer(*arguments)
    alone = torch.cat(
        [linear_attention(*(x[:, a:b] for x in arguments[:4]), policy=policy)[0] for a, b in ((0, 5), (5, 9))], 1
    )
    torch.testing.assert_close(o, alone, rtol=1e-5, atol=1e-6)


def test_int_list_and_tensor_lengths_are_the_same() -> None:
    tensors = inputs(dtype=torch.float32)
    want = run(tensors, policy=TOKEN, prefix_lengths=4, sequence_lengths=11)[0]
    for p, n in (([4, 4], [11, 11]), (torch.tensor(4), torch.tensor(11)), (ints(4, 4), ints(11, 11))):
        assert torch.equal(run(tensors, policy=TOKEN, prefix_lengths=p, sequence_lengths=n)[0], want)


def test_the_phase_is_the_default_and_arguments_win() -> None:
    tensors = inputs(dtype=torch.float32)
    want = run(tensors, policy=TOKEN, prefix_lengths=4, sequence_lengths=[11, 5])[0]
    other = run(tensors, policy=TOKEN, prefix_lengths=[0, 2], sequence_lengths=[11, 5])[0]
    with training_phase(4, [11, 5]):
        assert torch.equal(run(tensors, policy=TOKEN)[0], want)
        assert torch.equal(run(tensors, policy=TOKEN, prefix_lengths=[0, 2])[0], other)
        exact = run(tensors)[0]
    assert not exact[1, 5:].any() and torch.equal(exact, run(tensors, sequence_lengths=[11, 5])[0])


def test_a_one_token_training_step_from_a_bf16_state() -> None:
    for policy in (None, TOKEN):
        tensors = inputs(tokens=1, dtype=torch.float32)
        tensors[5] = tensors[5].bfloat16()
        tensors = [x.requires_grad_() for x in tensors]
        o, _ = run(tensors, policy=policy)
        got = torch.autograd.grad(o.sum(), tensors)
        want = torch.autograd.grad(oracle(*tensors, **op_kwargs(policy)).o.sum(), tensors)
        assert got[5].dtype == torch.bfloat16
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-6)


# --- compiled ---------------------------------------------------------------------------------------------------------


@any_policy
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_compiled_with_states_in_and_out(policy: Policy | None, backend: str) -> None:
    def step(tensors: list[Tensor], state: Any, p: Tensor) -> tuple[Tensor, Any]:
        o, state = linear_attention(
            *tensors, initial_state=state, output_final_state=True, prefix_lengths=p, policy=policy,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return o * 2, state

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    gradients = []
    for call in (compiled, step):
        tensors = inputs(dtype=torch.float32, grad=True)
        first, state = call([x[:, :8] for x in tensors[:5]], tensors[5], ints(3, 8))
        second, state = call([x[:, 8:] for x in tensors[:5]], state, ints(0, 2))
        dense = state if policy is None else state.dense()
        if policy is not None:
            assert type(state) is EncodedState and state.cursor.tolist() == ([0, 0] if policy is TOKEN else [2, 0])
        gradients.append(
            (first, second, dense, *torch.autograd.grad([first.sum(), second.sum(), dense.sum()], tensors))
        )
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@any_policy
def test_new_lengths_and_new_token_counts_do_not_recompile(policy: Policy | None) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def step(tensors: list[Tensor], state: Any, p: Tensor, n: Tensor) -> tuple[Tensor, Any]:
        return linear_attention(
            *tensors, initial_state=state, output_final_state=True, prefix_lengths=p, sequence_lengths=n, policy=policy
        )

    for batch, tokens in ((5, 11), (5, 20), (7, 33), (6, 10)):  # no two sizes alike: Dynamo would tie them together
        tensors = inputs(batch, tokens, dtype=torch.float32)
        p, n = torch.arange(batch), torch.arange(batch) + 5
        o = step(tensors[:5], tensors[5], p, n)[0]
        want = run(tensors, policy=policy, prefix_lengths=p, sequence_lengths=n)[0]
        torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_another_policy_is_another_graph() -> None:
    torch._dynamo.reset()

    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True)
    def step(tensors: list[Tensor], policy: Policy | str | None) -> Tensor:
        return linear_attention(*tensors, policy=policy)[0]

    tensors = inputs(dtype=torch.float32)[:5]
    chosen = [None, TOKEN, CHUNK, Policy(Fp8(4)), Policy(Fp8(4), readout="after_write"), Policy(Int8(4)), "int8", "fp8"]
    for policy in (*chosen, *chosen):
        assert torch.equal(step(tensors, policy), linear_attention(*tensors, policy=policy)[0])
    assert counter.frame_count == len(chosen)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_policies_are_policies_or_presets() -> None:
    with pytest.raises(PolicyError, match=r"policy: got 'int7'; want a Policy, None, or a preset: exact, int8"):
        run(inputs(), policy="int7")
    with pytest.raises(PolicyError, match="A Recipe chooses by path; one call takes one policy"):
        run(inputs(), policy=[TOKEN])


def test_positions_and_sequence_ids_are_checked_and_change_nothing_under_nearest_rounding() -> None:
    tensors = inputs(dtype=torch.float32)
    want = run(tensors, policy=TOKEN)[0]
    for position, ids in ((7, [3, 4]), (torch.tensor(7), torch.tensor([3, 4])), (ints(7, 9), None)):
        assert torch.equal(run(tensors, policy=TOKEN, position=position, sequence_ids=ids)[0], want)
    with pytest.raises(DtypeError, match=r"position: got 1.5"):
        run(tensors, position=1.5)
    with pytest.raises(DtypeError, match=r"position: got torch.float32"):
        run(tensors, position=torch.tensor(1.5))
    with pytest.raises(SequenceError, match=r"position: got \[3\]; want one a sequence, \[N\] = \[2\]"):
        run(tensors, position=ints(1, 2, 3))
    with pytest.raises(SequenceError, match=r"sequence_ids: got 3; want one a sequence"):
        run(tensors, sequence_ids=[1, 2, 3])
    with pytest.raises(DtypeError, match="sequence_ids"):
        run(tensors, sequence_ids=[0.5, 1])


def test_shapes_are_refused_by_name() -> None:
    tensors = inputs()
    with pytest.raises(ShapeError, match=r"q: got \[20, 2, 8\]; want \[B, T, H, K\]"):
        run([tensors[0][0], *tensors[1:]])
    with pytest.raises(ShapeError, match=r"v: got HV = 3 value heads; want a multiple of q's H = 2 key heads"):
        run([*tensors[:2], tensors[2][:, :, :3], None, None, None], policy=TOKEN)
    with pytest.raises(SequenceError, match=r"cu_seqlens: got a batch of 2 sequences"):
        run(tensors, cu_seqlens=torch.tensor([0, 20, 40]), policy=TOKEN)
    with pytest.raises(SequenceError, match=r"prefix_lengths: got -1"):
        run(tensors, prefix_lengths=-1, policy=Policy(write=Token()))


@pytest.mark.parametrize("position", [-1, 2**32, 2**63])
def test_a_position_whose_random_bits_would_be_anothers_is_refused(position: int) -> None:
    with pytest.raises(SequenceError, match=rf"position: got {position}; want 0 to 2\*\*32 - 1"):
        run(inputs(), policy=Policy(Int8(8), rounding="stochastic"), position=position)
