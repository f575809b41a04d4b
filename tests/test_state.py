from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lattn_compile.errors import DtypeError, FormatError, ShapeError, StateError
from lattn_compile.formats import REGISTRY, Int8, parse
from lattn_compile.functional import linear_attention
from lattn_compile.policy import Chunk, Policy
from lattn_compile.state import EncodedState, decode_state, encode_state
from tests.ops.cases import inputs

FORMATS = [str(fmt()) for fmt in REGISTRY] + ["int8/4x8", "fp8_e4m3/128x1"]
# K odd: nvfp4's packed codes do not tell it
STATE = inputs(3, 1, key_dim=15, value_dim=70, dtype=torch.float32)[5]


def _carried(policy: Policy, **kwargs: Any) -> EncodedState:
    q, k, v, g, beta, state = inputs(3, 7, key_dim=15, value_dim=70, dtype=torch.float32)
    final = linear_attention(q, k, v, g, beta, initial_state=state, output_final_state=True, policy=policy, **kwargs)[1]
    assert isinstance(final, EncodedState)
    return final


def _equal(a: EncodedState, b: EncodedState) -> bool:
    pairs = [*zip(a.tensors.values(), b.tensors.values(), strict=True), (a.cursor, b.cursor), (a.dense(), b.dense())]
    return (a.state_format, a.chunk_size, a.shape) == (b.state_format, b.chunk_size, b.shape) and all(
        torch.equal(
            x.view(torch.uint8) if x.dtype.itemsize == 1 else x, y.view(torch.uint8) if y.dtype.itemsize == 1 else y
        )
        for x, y in pairs
    )


@pytest.mark.parametrize("spec", FORMATS)
def test_encode_then_decode_is_the_formats_own_rounding(spec: str) -> None:
    encoded = encode_state(STATE, spec)
    assert encoded.fmt == parse(spec)
    assert torch.equal(decode_state(encoded), parse(spec).qdq(STATE))
    want = parse(spec).encode(STATE)
    assert list(encoded.tensors) == list(want)
    assert encoded.cursor.tolist() == [0, 0, 0] and encoded.cursor.dtype == torch.int32


@pytest.mark.parametrize("spec", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codes_alone_give_the_values_back(spec: str, dtype: torch.dtype) -> None:
    # what a saved state is restarted from: rounding twice is rounding once
    q, k, v, g, beta, state = inputs(3, 7, key_dim=15, value_dim=70, dtype=dtype)
    final = linear_attention(q, k, v, g, beta, initial_state=state, output_final_state=True, policy=Policy(spec))[1]
    assert isinstance(final, EncodedState) and final.exact is None
    stored = pickle.loads(pickle.dumps(final))
    assert stored.values is None and stored.dtype == dtype
    assert torch.equal(stored.dense(), final.dense())


def test_bytes_are_those_of_what_is_stored() -> None:
    fmt = Int8()
    encoded = encode_state(STATE, fmt)
    assert encoded.nbytes == 3 * 4 * fmt.nbytes(15, 70) + 3 * 4
    prefilled = _carried(Policy(fmt), prefix_lengths=3)
    assert prefilled.nbytes == encoded.nbytes + 3 * 4 * 15 * 70 * 4


def test_gradients_pass_straight_through() -> None:
    state = STATE.clone().requires_grad_()
    weights = torch.randn_like(state)
    (encode_state(state, "int8").dense() * weights).sum().backward()
    assert state.grad is not None and torch.equal(state.grad, weights)


def test_dense_reads_exact_rows_before_their_hand_over() -> None:
    final = _carried(Policy(Int8()), prefix_lengths=[7, 3, 0])
    assert final.cursor.tolist() == [-1, 0, 0] and final.exact is not None
    assert torch.equal(final.dense()[0], final.exact[0])
    rounded = final.fmt.qdq(final.exact)
    assert torch.equal(final.dense()[1:], rounded[1:]) and torch.equal(rounded[1:], final.exact[1:])


def test_dense_of_a_chunk_state_off_its_grid_is_rounded() -> None:
    final = _carried(Policy(Int8(), write=Chunk(4)))
    assert final.cursor.tolist() == [3, 3, 3] and final.exact is not None
    assert torch.equal(final.dense(), final.fmt.qdq(final.exact)) and not torch.equal(final.dense(), final.exact)


@pytest.mark.parametrize("policy", [Policy(Int8()), Policy("nvfp4"), Policy(Int8(), write=Chunk(4))], ids=str)
@pytest.mark.parametrize("how", ["copy", "pickle", "file", "state_dict"])
def test_a_saved_state_continues_as_if_never_stopped(policy: Policy, how: str, tmp_path: Path) -> None:
    final = _carried(policy, prefix_lengths=[7, 3, 0])
    if how == "copy":
        again = copy.deepcopy(final)
    elif how == "pickle":
        again = pickle.loads(pickle.dumps(final))
    else:
        saved = {"cache": [final]} if how == "state_dict" else final
        torch.save(saved, tmp_path / "state.pt")
        again = torch.load(tmp_path / "state.pt", weights_only=True)
        again = again["cache"][0] if how == "state_dict" else again
    assert _equal(final, again)
    more = inputs(3, 9, key_dim=15, value_dim=70, dtype=torch.float32, seed=1)[:5]
    results = [linear_attention(*more, initial_state=s, output_final_state=True, policy=policy) for s in (final, again)]
    assert torch.equal(results[0][0], results[1][0]) and _equal(results[0][1], results[1][1])


def test_a_state_is_a_pytree_and_moves_as_one() -> None:
    final = _carried(Policy(Int8()), prefix_lengths=[7, 3, 0])
    leaves, spec = pytree.tree_flatten(final)
    assert {x.shape[0] for x in leaves} == {3}, "every part is per sequence"
    assert _equal(pytree.tree_unflatten(leaves, spec), final)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(final)[0]]
    assert paths == ["['codes']", "['state_scale']", "['cursor']", "['exact']", "['values']"]


def test_sequences_can_be_reordered_and_dropped() -> None:
    final = _carried(Policy(Int8()), prefix_lengths=[7, 3, 0])
    chosen = final.index_select(torch.tensor([2, 0, 0]))
    assert chosen.cursor.tolist() == [0, -1, -1]
    assert torch.equal(chosen.dense(), final.dense()[[2, 0, 0]])


def test_detach_cuts_the_gradient_and_changes_no_value() -> None:
    state = STATE.clone().requires_grad_()
    encoded = encode_state(state, "int8")
    assert encoded.dense().requires_grad and not encoded.detach().dense().requires_grad
    assert _equal(encoded, encoded.detach())


def test_states_of_any_rank_and_dtype_are_encoded() -> None:
    assert encode_state(STATE[0, 0], "int8").dense().shape == (15, 70)
    low = STATE.bfloat16()
    assert torch.equal(encode_state(low, "int8").dense(), parse("int8").qdq(low.float()))
    assert encode_state(STATE.double(), "fp8").dense().dtype == torch.float64


def test_bad_states_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"S: got torch.int8; want a floating-point state"):
        encode_state(torch.zeros(2, 3, dtype=torch.int8), "int8")
    with pytest.raises(ShapeError, match=r"S: got \[3\]"):
        encode_state(torch.zeros(3), "int8")
    with pytest.raises(FormatError, match="int9"):
        encode_state(STATE, "int9")
    with pytest.raises(StateError, match="state: got Tensor; want an EncodedState"):
        decode_state(STATE)  # type: ignore[arg-type]


def test_repr_tells_format_mode_size_and_bytes() -> None:
    assert repr(encode_state(STATE, "int8")) == "EncodedState(int8/*x64, token, [3, 4, 15, 70], 12708 bytes)"


@pytest.mark.parametrize("spec", FORMATS)
def test_opcheck_of_the_codec_ops(spec: str) -> None:
    ops, state = torch.ops.lattn, STATE[:1]
    tensors = ops.encode_state(state, state_format=spec)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any("float8" in str(x.dtype) for x in tensors):
        tests.remove("test_schema")  # torch compares what it passes in with allclose, which has no float8
    torch.library.opcheck(ops.encode_state.default, (state,), {"state_format": spec}, test_utils=tests)
    torch.library.opcheck(ops.qdq_state.default, (state.clone().requires_grad_(),), {"state_format": spec})
    options = {"state_format": spec, "shape": [15, 70], "dtype": torch.float32}
    torch.library.opcheck(ops.decode_state.default, (tensors,), options, test_utils=tests)
