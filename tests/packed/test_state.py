"""`QuantizedState`: staged, handed over, stepped, verified, moved, reordered and saved as one."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

import lattn_compile as lc
from lattn_compile.errors import (
    DtypeError,
    FileFormatError,
    LattnError,
    PolicyError,
    SequenceError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from lattn_compile.packed import layout
from lattn_compile.packed.files import load_states, save_states
from lattn_compile.packed.state import QuantizedState
from lattn_compile.policy import Exact, Policy, Replay, TwoPrecision
from tests.ops.cases import inputs
from tests.packed.cases import same

POLICIES = {
    "token": Policy(lc.Int8(8), storage="packed"),
    "token, stochastic": Policy(lc.Fp8(), rounding="stochastic", seed=3, feedback="int4", storage="packed"),
    "token, nvfp4, rotated": Policy(lc.Nvfp4(), rotation="hadamard_k"),
    "token, bf16": Policy(lc.Bf16()),
    "replay": Policy(lc.Int8(8), write=Replay(4, factors="int8"), storage="packed"),
    "replay, fp8 factors, after": Policy(lc.Fp8(), write=Replay(5, factors="fp8_e4m3"), readout="after_write"),
    "a window of 1": Policy(lc.Int8(8), write=Replay(1)),
    "two precisions": Policy(write=TwoPrecision(4)),
    "exact": Policy(write=Exact()),
}
any_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
IDS = [4, 5, 6]


def tokens(count: int, seed: int = 0) -> list[Tensor]:
    return inputs(3, count, key_dim=16, value_dim=24, dtype=torch.float32, seed=seed)[:5]


def prefilled(policy: Policy, count: int = 5) -> tuple[QuantizedState, Any]:
    """A staged state, and what `lc.linear_attention` carries after the same prefill."""
    emulated = Policy.from_dict({**policy.to_dict(), "storage": "emulated"})
    start = inputs(3, 1, key_dim=16, value_dim=24, dtype=torch.float32)[5]
    exact = lc.linear_attention(*tokens(count), initial_state=start, output_final_state=True)[1]
    _, carried = lc.linear_attention(
        *tokens(count), policy=emulated, initial_state=start, prefix_lengths=count, output_final_state=True,
        sequence_ids=IDS, site_id=2,
    )  # fmt: skip
    state = QuantizedState(policy, site_id=2)
    assert isinstance(exact, Tensor)
    state.stage(exact, seen=count)
    if state.sequence_ids is not None:
        state.sequence_ids = torch.tensor(IDS)
    return state, carried


def stepped(policy: Policy, counts: tuple[int, ...] = (1, 2)) -> QuantizedState:
    state, _ = prefilled(policy)
    for i, count in enumerate(counts):
        state.step(*tokens(count, seed=i + 1))
    return state


def equal(a: QuantizedState, b: QuantizedState) -> bool:
    mine, theirs = a.held(), b.held()
    return list(mine) == list(theirs) and all(same(x, theirs[name]) for name, x in mine.items())


@any_policy
def test_a_prefill_is_staged_exact_handed_over_at_the_first_suffix_token_and_released(policy: Policy) -> None:
    state, carried = prefilled(policy)
    assert state.exact is not None and state.exact.dtype is torch.float32
    staged = 3 * 4 * 16 * 24 * 4
    assert staged <= state.nbytes <= staged + 3 * 20
    assert torch.equal(state.dense(), state.exact)
    assert state.step(*[x[:, :0] for x in tokens(1)]).shape[1] == 0 and state.exact is not None
    emulated = Policy.from_dict({**policy.to_dict(), "storage": "emulated"})
    for seed, count in enumerate((1, 1, 3, 1, 6)):
        x = tokens(count, seed=seed + 1)
        if isinstance(policy.write, Exact):
            dense = carried if isinstance(carried, Tensor) else carried.dense()
            want, carried, _ = torch.ops.lattn.decode(*x, dense, None, None, None, None, scale=0.25)
        else:
            options: dict[str, Any] = {"sequence_ids": IDS, "site_id": 2, "output_final_state": True}
            want, carried = lc.linear_attention(*x, policy=emulated, initial_state=carried, **options)
        assert same(state.step(*x), want)
        assert state.exact is None
        assert same(state.dense(), carried if isinstance(carried, Tensor) else carried.dense())
    numbers = 3 * 16 if state.random else 0
    cursor = 0 if policy.write.mode in ("replay", "two_precision") else 3 * 4
    assert state.nbytes == 3 * policy.nbytes(2, 4, 16, 24) + numbers + cursor


def test_a_preset_is_a_policy_and_what_is_none_is_refused_by_name() -> None:
    assert QuantizedState("int8").policy == lc.PRESETS["int8"]
    with pytest.raises(PolicyError, match=r"policy: got 'int9'; want a preset: .*Did you mean 'int8'"):
        QuantizedState("int9")
    for other in (lc.Recipe(rules=[("*", lc.Policy())]), lc.Int8(), None):
        with pytest.raises(PolicyError, match=r"policy: got .*; want a Policy, or a preset's name"):
            QuantizedState(other)  # type: ignore[arg-type]


def test_a_state_that_is_staged_again_starts_anew() -> None:
    """At positions that may be its own, and for a site with other gates: nothing of before is left."""
    state = QuantizedState(POLICIES["token, stochastic"])
    exact = torch.randn(3, 4, 16, 24)
    state.stage(exact, seen=torch.tensor([5, 9, 2]))
    state.stage(exact, seen=state.position)
    assert state.position.tolist() == [5, 9, 2]
    q, k, v, _, beta = tokens(1)
    state.step(q, k, v, None, beta)
    fresh = QuantizedState(POLICIES["token, stochastic"])
    for x in (state, fresh):
        x.stage(exact, seen=7)
    assert torch.equal(state.step(*tokens(1)), fresh.step(*tokens(1))) and torch.equal(state.dense(), fresh.dense())
    with pytest.raises(StateError, match="sizes, gates and rule"):
        state.step(q, k, v, None, beta)


@any_policy
def test_a_staged_state_may_be_stored_ahead_and_steps_write_there(policy: Policy) -> None:
    """Nothing changes for a reader, a refused call leaves it staged, and what was stored once stays where it is."""
    (state, _), (plain, _) = prefilled(policy), prefilled(policy)
    exact = plain.dense().clone()
    state.encode(layout.Heads(2, 4, 16, 24, "head", True))
    state.encode(layout.Heads(2, 4, 16, 24, "head", True))
    places = {name: x.data_ptr() for name, x in state.held().items() if name != "exact"}
    assert torch.equal(state.dense(), exact) and torch.equal(state.clone().dense(), exact)
    assert state.nbytes >= exact.nbytes + 3 * policy.nbytes(2, 4, 16, 24)
    q, k, v, g, beta = tokens(1)
    with pytest.raises(LattnError):  # behind the hand-over
        state.step(q, k, v, g.abs() + 1, beta)
    assert torch.equal(state.dense(), exact) and state.exact is not None
    for seed in range(3):
        if seed == 2:  # another turn, staged in the same places
            for x in (state, plain):
                x.stage(exact * 0.5, seen=30)
            state.encode(layout.Heads(2, 4, 16, 24, "head", True))
        lengths = torch.tensor([2, 0, 1]) if seed == 0 else None
        x = tokens(2, seed=seed)
        assert same(state.step(*x, sequence_lengths=lengths), plain.step(*x, sequence_lengths=lengths))
        assert same(state.dense(), plain.dense()) and (state.exact is None) == (seed > 0)
    assert equal(state, plain)
    assert places == {name: x.data_ptr() for name, x in state.held().items()}


@any_policy
def test_only_sequences_with_a_suffix_token_are_handed_over(policy: Policy) -> None:
    state, _ = prefilled(policy)
    other, _ = prefilled(policy)
    exact = state.dense().clone()
    state.step(*tokens(2), sequence_lengths=torch.tensor([2, 0, 1]))
    assert state.cursor is not None and (state.cursor < 0).tolist() == [False, True, False]
    assert state.exact is not None and torch.equal(state.dense()[1], exact[1])
    state.step(*tokens(2, seed=1), sequence_lengths=torch.tensor([0, 2, 0]))
    assert state.exact is None
    other.step(*tokens(2, seed=1), sequence_lengths=torch.tensor([0, 2, 0]))
    assert same(state.dense()[1], other.dense()[1])


@any_policy
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "file", "clone", "pytree"])
def test_a_state_saved_in_mid_window_goes_on_as_if_never_stopped(policy: Policy, how: str, tmp_path: Path) -> None:
    state = stepped(policy)
    if how == "deepcopy":
        again = copy.deepcopy(state)
    elif how == "pickle":
        torch.save({"cache": [state]}, tmp_path / "state.pt")
        again = torch.load(tmp_path / "state.pt", weights_only=True)["cache"][0]
        assert equal(state, pickle.loads(pickle.dumps(state)))
    elif how == "file":
        save_states({"layer": state}, tmp_path / "states.safetensors")
        again = load_states(tmp_path / "states.safetensors")["layer"]
    elif how == "clone":
        again = state.clone()
    else:
        leaves, spec = pytree.tree_flatten(state)
        assert {x.shape[0] for x in leaves} == {3}
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        again = pytree.tree_unflatten([x.clone() for x in leaves], spec)
    assert equal(state, again) and again.policy == policy
    x = tokens(7, seed=9)
    assert same(state.step(*x), again.step(*x)) and equal(state, again)


def test_an_exact_state_is_saved_before_it_was_handed_over(tmp_path: Path) -> None:
    state, _ = prefilled(POLICIES["token"])
    save_states({"a": state, "b": stepped(POLICIES["replay"])}, tmp_path / "s.safetensors")
    again = load_states(tmp_path / "s.safetensors")
    assert equal(state, again["a"])
    assert same(state.step(*tokens(1)), again["a"].step(*tokens(1)))


@any_policy
def test_sequences_reorder_repeat_and_drop_with_everything_they_carry(policy: Policy) -> None:
    state = stepped(policy)
    x = tokens(4, seed=9)
    order = torch.tensor([2, 0, 2])
    moved = state.index_select(0, order)
    o = moved.step(*[y[order] for y in x])
    whole = state.clone()
    want = whole.step(*x)
    assert same(o, want[order]) and equal(moved, whole.index_select(0, order))
    twice = state.repeat_interleave(2)
    assert same(twice.step(*[y.repeat_interleave(2, 0) for y in x])[::2].contiguous(), want)
    with pytest.raises(ShapeError, match="0, the sequences"):
        state.index_select(1, order)


@any_policy
@pytest.mark.parametrize("drafts", [1, 4, 9])
def test_any_prefix_of_drafts_can_be_accepted(policy: Policy, drafts: int) -> None:
    """Accepting n of T is stepping over the first n, bit for bit, and dropping all is doing nothing."""
    x = tokens(drafts, seed=9)
    for accepted in sorted({0, 1, drafts // 2, drafts}):
        state, plain = stepped(policy), stepped(policy)
        before = state.clone()
        whole = plain.clone().step(*x)
        assert same(state.verify(*x), whole)
        assert equal(state, before) and state.nbytes > before.nbytes, "drafts are counted"
        state.accept(accepted)
        if accepted:
            plain.step(*[y[:, :accepted] for y in x])
        assert equal(state, plain) and state.draft is None


@any_policy
def test_each_sequence_accepts_its_own_number_of_drafts(policy: Policy) -> None:
    state, (x, more) = stepped(policy), (tokens(5, seed=9), tokens(2, seed=10))
    state.verify(*x)
    state.accept(torch.tensor([5, 0, 3]))
    for i, count in enumerate((5, 0, 3)):
        alone = stepped(policy).index_select(0, torch.tensor([i]))
        if count:
            alone.step(*[y[i : i + 1, :count] for y in x])
        assert same(alone.step(*[y[i : i + 1] for y in more])[0], state.clone().step(*more)[i])


@any_policy
def test_drafts_before_the_hand_over_leave_the_state_exact_if_none_was_right(policy: Policy) -> None:
    state, _ = prefilled(policy)
    exact = state.dense().clone()
    state.verify(*tokens(3))
    state.accept(0)
    assert state.exact is not None and torch.equal(state.dense(), exact)


def test_token_mode_drafts_have_the_bits_of_plain_decoding() -> None:
    state, plain = stepped(POLICIES["token"]), stepped(POLICIES["token"])
    x = tokens(6, seed=9)
    o = state.verify(*x)
    state.accept(4)
    one = torch.cat([plain.step(*[y[:, t : t + 1] for y in x]) for t in range(4)], 1)
    assert same(o[:, :4].contiguous(), one) and equal(state, plain)


MIXED = {
    "bf16 with fp32 gates": (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
    "fp16 and bf16": (torch.float16, torch.bfloat16, torch.float16, torch.bfloat16),
    "fp32 with fp64 gates": (torch.float32, torch.float32, torch.float64, torch.float32),
    "fp32 with fp64 beta": (torch.float32, torch.float32, torch.float32, torch.float64),
    "bf16 queries, fp64 values": (torch.bfloat16, torch.float64, torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED)
@any_policy
def test_mixed_dtypes_are_computed_as_linear_attention_computes_them(policy: Policy, dtypes: Any) -> None:
    """Whatever decides the arithmetic's dtype, from the first step on and after a prefill, staged in float64 too."""
    emulated = Policy.from_dict({**policy.to_dict(), "storage": "emulated"})
    double = torch.float64 in dtypes
    plain = emulated.op_kwargs()["state_format"] == "bf16"  # whose codes are 16 bits, whatever was rounded to them
    for staged in (None, torch.float32, torch.float64):
        if plain and (double or staged is torch.float64):
            continue
        state, carried = QuantizedState(policy, site_id=2), None
        if staged is not None:
            carried = inputs(3, 1, key_dim=16, value_dim=24, dtype=staged)[5]
            state.stage(carried)
        for seed, count in enumerate((1, 2)):
            q, k, v, g, beta = tokens(count, seed=seed)
            x = [q.to(dtypes[0]), k.to(dtypes[0]), v.to(dtypes[1]), g.to(dtypes[2]), beta.to(dtypes[3])]
            if isinstance(policy.write, Exact):
                want, carried, _ = torch.ops.lattn.decode(*x, carried, None, None, None, None, scale=0.25)
            else:
                options: dict[str, Any] = {"site_id": 2, "output_final_state": True, "position": None if seed else 0}
                want, carried = lc.linear_attention(*x, policy=emulated, initial_state=carried, **options)
            assert same(state.step(*x), want)
            assert state.dtype is (torch.float64 if double or staged is torch.float64 else torch.float32)
            assert same(state.dense(), carried if isinstance(carried, Tensor) else carried.dense())


def test_float64_inputs_to_a_float32_state_are_refused_by_name() -> None:
    state = stepped(POLICIES["token"])
    x = tokens(1)
    before = state.clone()
    with pytest.raises(DtypeError, match="float64, in which float64 inputs are computed"):
        state.step(*x[:3], x[3].double(), x[4])
    assert equal(state, before)


BAD_CALLS: dict[str, Any] = {
    "sizes": lambda x: ((x[0], x[1], x[2][..., :-1], *x[3:]), {}),
    "keys": lambda x: ((x[0][..., :-1], x[1], *x[2:]), {}),
    "a growing gate": lambda x: ((*x[:3], x[3] + 99, x[4]), {}),
    "a gate too few": lambda x: ((*x[:4], None), {}),
    "too long": lambda x: (x, {"sequence_lengths": torch.tensor([1, 9, 1])}),
    "no such slot": lambda x: (x, {"state_indices": torch.tensor([0, 1, 3])}),
    "a slot twice": lambda x: (x, {"state_indices": torch.tensor([0, 1, 1])}),
    "fewer slots": lambda x: (x, {"state_indices": torch.tensor([0, 1])}),
    "a word": lambda x: (x, {"rule": "gamma"}),
    "no scale": lambda x: (x, {"scale": float("nan")}),
    "ints": lambda x: ((x[0], x[1].int(), *x[2:]), {}),
    "elsewhere": lambda x: ((x[0], x[1].to("meta"), *x[2:]), {}),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("policy", [POLICIES["token"], POLICIES["replay"]], ids=["token", "replay"])
def test_a_refused_call_leaves_the_state_as_it_was(policy: Policy, name: str) -> None:
    """Before the first step, staged, in mid-window, and while drafts are accepted."""
    for make in (lambda: QuantizedState(policy), lambda: prefilled(policy)[0], lambda: stepped(policy)):
        state = make()
        if name in ("a gate too few", "sizes", "a word") and state.heads is None:
            continue  # a call of another kind of layer, as far as anyone knows by then
        before, attributes = {n: x.clone() for n, x in state.held().items()}, dict(state.__dict__)
        x, options = BAD_CALLS[name](tokens(2, seed=4))
        for call in (state.step, state.verify):
            with pytest.raises(lc.LattnError):
                call(*x, **options)
            assert state.__dict__ == attributes
            assert all(same(x, before[n]) for n, x in state.held().items()) and list(before) == list(state.held())
        fresh, again = make(), tokens(2, seed=5)
        assert same(state.step(*again), fresh.step(*again)) and equal(state, fresh)


def test_drafts_that_could_not_be_accepted_still_wait() -> None:
    state, plain = stepped(POLICIES["replay"]), stepped(POLICIES["replay"])
    x = tokens(3, seed=4)
    state.verify(*x)
    for wrong in (4, -1, True, 1.0, [1, 1, 1], torch.tensor([1.0]), torch.tensor([1, 2]), torch.tensor([[1, 1, 1]])):
        with pytest.raises(SequenceError, match="accepted"):
            state.accept(wrong)  # type: ignore[arg-type]
        assert state.draft is not None
    broken = x[1].clone()
    x[1].mul_(torch.inf)  # whoever fills a draft's buffer anew gets what he filled it with
    x[1].copy_(broken)
    with (
        mock.patch.object(torch.ops.lattn, "replay_", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError),
    ):
        state.accept(2)
    assert state.draft is not None
    state.accept(2)
    plain.step(*[y[:, :2] for y in x])
    assert equal(state, plain)


def test_the_slots_of_drafts_are_those_of_their_call() -> None:
    """An engine fills its buffer of slots anew before it accepts."""
    state = lc.QuantizedState(POLICIES["token"]).allocate(layout.Heads(2, 4, 16, 24, "head", True), 6)
    plain = state.clone()
    x, buffer = tokens(3, seed=4), torch.tensor([5, 0, 3])
    state.verify(*x, state_indices=buffer)
    buffer.fill_(-1)
    state.accept(1)
    plain.step(*[y[:, :1] for y in x], state_indices=torch.tensor([5, 0, 3]))
    assert equal(state, plain)


def test_waiting_drafts_are_not_forgotten() -> None:
    state = stepped(POLICIES["replay"])
    state.verify(*tokens(3))
    waiting = (
        lambda: state.step(*tokens(1)),
        state.flush,
        lambda: state.verify(*tokens(1)),
        state.clone,
        lambda: state.index_select(0, torch.tensor([0])),
        lambda: state.stage(torch.zeros(3, 4, 16, 24)),
        lambda: copy.deepcopy(state),
    )
    for refused in waiting:
        with pytest.raises(StateError, match="accept"):
            refused()
    with pytest.raises(StateError, match="drafts"):
        save_states({"a": state}, "nowhere")
    with pytest.raises(SequenceError, match=r"0 to the drafted \[3, 3, 3\]"):
        state.accept(4)
    state.accept(3)
    with pytest.raises(StateError, match="verify"):
        state.accept(0)


def test_inductor_compiles_a_hand_over_into_what_is_stored() -> None:
    """A second turn, for all sequences and for some: 8-bit floats, which Inductor sees as bytes only here and there."""
    for lengths in (None, torch.tensor([1, 0, 1])):
        torch._dynamo.reset()
        state = stepped(Policy(lc.Fp8()))
        plain, exact = state.clone(), torch.ones(3, 4, 16, 24)
        for x in (state, plain):
            x.stage(exact)
        compiled = torch.compile(lambda x, state=state, n=lengths: state.step(*x, sequence_lengths=n), fullgraph=True)
        assert torch.allclose(compiled(tokens(1)), plain.step(*tokens(1), sequence_lengths=lengths), atol=1e-6)
        assert torch.allclose(state.dense(), plain.dense(), atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "backend"),
    [
        (POLICIES["token"], "inductor"),
        (POLICIES["replay"], "aot_eager"),
        (POLICIES["two precisions"], "aot_eager"),
    ],
    ids=["token", "replay", "two precisions"],
)
def test_one_graph_steps_in_place(policy: Policy, backend: str) -> None:
    """Hand-over and steps are traced; the tensors that a graph writes to are the state's own, step after step."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda x, s: s.step(*x), fullgraph=True, backend=counter, dynamic=False)
    state, plain = prefilled(policy)[0], prefilled(policy)[0]
    where = None
    for seed in range(6):
        x = tokens(1, seed=seed)
        assert same(compiled(x, state), plain.step(*x))
        now = [y.data_ptr() for y in (*state.tensors.values(), state.cursor)]  # type: ignore[union-attr]
        assert where in (None, now)
        where = now
        assert equal(state, plain) and state.exact is None
    assert counter.frame_count == 2, "the hand-over is a graph of its own"


@pytest.mark.parametrize("policy", [POLICIES["token"], POLICIES["replay"]], ids=["token", "replay"])
def test_an_exported_step_writes_the_state_it_is_given(policy: Policy, tmp_path: Path) -> None:
    class Step(torch.nn.Module):
        def forward(self, x: list[Tensor], state: QuantizedState) -> Tensor:
            return state.step(*x)

    state, plain, x = stepped(policy), stepped(policy), tokens(1, seed=9)
    torch.export.save(torch.export.export(Step(), (x, state.clone()), strict=False), tmp_path / "step.pt2")
    program = torch.export.load(tmp_path / "step.pt2").module()
    for seed in (9, 10):
        x = tokens(1, seed=seed)
        assert same(program(x, state), plain.step(*x)) and equal(state, plain)


def test_a_chunk_policy_and_unbuilt_parts_are_refused_when_the_state_is_made() -> None:
    with pytest.raises(PolicyError, match="Inside a chunk"):
        QuantizedState(Policy(lc.Int8(), write=lc.Chunk(8)))
    with pytest.raises(UnsupportedError, match="prefill"):
        QuantizedState(Policy(prefill=lc.Prefill(inverse=lc.Neumann(4))))
    with pytest.raises(UnsupportedError, match="QuantizedState"):
        lc.linear_attention(*tokens(2), policy=POLICIES["token"])


def test_misuse_is_named() -> None:
    state = stepped(POLICIES["token"])
    with pytest.raises(StateError, match="same sizes, gates and rule"):
        state.step(*tokens(1)[:4])
    with pytest.raises(DtypeError, match="codes have the dtype of their format"):
        state.to(torch.bfloat16)
    assert state.to(torch.float32) is state and state.to("cpu", non_blocking=True) is state
    with pytest.raises(UnsupportedError, match="no_grad"):
        state.step(*[x.requires_grad_() for x in tokens(1)])
    with pytest.raises(UnsupportedError, match="no_grad"):
        state.stage(torch.zeros(3, 4, 16, 24, requires_grad=True))
    with pytest.raises(ShapeError, match=r"\[N, HV, K, V\]"):
        state.stage(torch.zeros(4, 16, 24))
    with pytest.raises(ShapeError, match="as before"):
        state.stage(torch.zeros(3, 4, 24, 16))
    with pytest.raises(DtypeError, match="not codes"):
        state.stage(torch.zeros(3, 4, 16, 24, dtype=torch.int8))
    with pytest.raises(StateError, match="not known yet"):
        _ = QuantizedState(POLICIES["token"]).shape
    with pytest.raises(TypeError):
        _ = state * 2  # type: ignore[operator]  # no silent decode


def test_a_file_without_states_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "weights.safetensors")
    (tmp_path / "text").write_text("text")
    for name, why in (("weights.safetensors", "without states"), ("text", "cannot be read|no safetensors"), ("no", "")):
        with pytest.raises(FileFormatError, match=f"path: got .*{why}"):
            load_states(tmp_path / name)


def test_resident_bytes_of_a_real_layer_are_within_the_promised_shares() -> None:
    """GDN, H = 16, HV = 32, K = V = 128, everything counted, measured on the tensors."""
    heads = layout.Heads(16, 32, 128, 128, "head", True)
    fp32 = 32 * 128 * 128 * 4
    for policy, share in (
        (Policy(lc.Int8()), 0.26),
        (Policy(lc.Int8(), write=Replay(8)), 0.35),
        (Policy(lc.Int8(), write=Replay(8, factors="fp8_e4m3")), 0.28),
        (Policy(lc.Nvfp4()), 0.15),
    ):
        state = QuantizedState(policy).allocate(heads, 2)
        assert sum(x.untyped_storage().nbytes() for x in state.held().values()) == state.nbytes <= 2 * share * fp32
    kda = layout.Heads(32, 32, 128, 128, "channel", True)
    for policy, share in (
        (Policy(lc.Int8(), write=Replay(8)), 0.42),
        (Policy(lc.Int8(), write=Replay(8, factors="fp8_e4m3")), 0.34),
    ):
        assert QuantizedState(policy).allocate(kda, 1).nbytes <= share * fp32
