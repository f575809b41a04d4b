"""Wrong kinds of things at `lc.linear_attention` and at states: each a `LattnError` that names the argument, before any
computation, the same eager and inside a compiled region. (`test_bad_input.py` has shapes, policies and files.)"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import lattn_compile as lc
from lattn_compile import backend
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
from lattn_compile.ops import dispatch
from lattn_compile.strict import as_path
from lattn_compile.testing.inputs import make_inputs
from tests.test_bad_input import HV, B, H, K, T, V, arguments, message

STOCHASTIC = lc.Policy(lc.Int8(), rounding="stochastic")
POLICIES: tuple[Any, ...] = ("int8", lc.Policy(write=lc.Chunk(4)), "int8-replay", "fp8-two-precision")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(dispatch, "load", load)


def state(policy: Any, **changes: Any) -> Any:
    return lc.linear_attention(**arguments(**changes), policy=policy, output_final_state=True)[1]


def cases() -> Iterator[tuple[str, type[LattnError], str, dict[str, Any]]]:
    """Name, error, argument that the error names, and what is changed in a good call."""
    for name in ("q", "k", "v", "g", "beta"):
        x = arguments()[name]
        for what, bad in {
            "array": x.numpy(),
            "list": x.tolist(),
            "number": 3,
            "ints": x.int(),
            "bools": x.bool(),
            "complex": x.to(torch.complex64),
            "float8": x.to(torch.float8_e4m3fn),
            "sparse": x.to_sparse(),
            "nested": torch.nested.nested_tensor(list(x), layout=torch.jagged),
        }.items():
            yield f"{name} as {what}", DtypeError, name, {name: bad}
        yield f"{name} of one axis", ShapeError, name, {name: x.flatten()}
        if name in ("q", "k", "v"):
            yield f"{name} missing", DtypeError, name, {name: None}
        if name != "q":
            yield f"{name} elsewhere", DtypeError, name, {name: x.to("meta")}
    empty = {"K": {"q": torch.ones(B, T, H, 0), "k": torch.ones(B, T, H, 0)}, "V": {"v": torch.ones(B, T, HV, 0)}}
    yield "K = 0", ShapeError, "q", empty["K"]
    yield "V = 0", ShapeError, "v", empty["V"]
    for bad in ("x", math.nan, math.inf, -math.inf, True, torch.tensor(0.5), np.float32(0.5), 1j, 10**400, [1.0]):
        yield f"scale {bad!r}"[:24], PolicyError, "scale", {"scale": bad}
    for bad in ("a", 1.5, True, 2**63, torch.tensor(1), None):
        yield f"site_id {bad!r}", PolicyError, "site_id", {"site_id": bad}
    for bad in (1, None, b"delta", "Delta"):
        yield f"rule {bad!r}", PolicyError, "rule", {"rule": bad}
    for name in ("use_qk_l2norm_in_kernel", "output_final_state"):
        for bad in (1, "yes", None, torch.tensor(True)):
            yield f"{name} {bad!r}", PolicyError, name, {name: bad}
    ends = torch.tensor([0, T])
    for what, bad, error in (
        ("list", [0, T], DtypeError),
        ("array", np.array([0, T]), DtypeError),
        ("number", T, DtypeError),
        ("floats", ends.float(), DtypeError),
        ("scalar", torch.tensor(0), SequenceError),
        ("elsewhere", ends.to("meta"), DtypeError),
        ("from 1", torch.tensor([1, T]), SequenceError),
    ):
        yield f"cu_seqlens {what}", error, "cu_seqlens", {"batch": 1, "cu_seqlens": bad}
    for name in ("prefix_lengths", "sequence_lengths"):
        for what, bad, error in (
            ("bool", True, DtypeError),
            ("float", 2.0, DtypeError),
            ("array", np.array([1, 2]), DtypeError),
            ("negative", -1, SequenceError),
            ("three", [1, 2, 3], SequenceError),
            ("beyond T", [1, T + 1], SequenceError),
            ("elsewhere", torch.tensor([1, 2]).to("meta"), DtypeError),
        ):
            yield f"{name} {what}", error, name, {name: bad, "policy": "int8"}
    for what, name, bad, error in (
        ("negative", "position", torch.tensor([1, -2]), SequenceError),
        ("elsewhere", "position", torch.tensor([1, 2]).to("meta"), DtypeError),
        ("elsewhere", "sequence_ids", torch.tensor([1, 2]).to("meta"), DtypeError),
        ("past 64 bits", "sequence_ids", [1, 2**80], DtypeError),
    ):
        yield f"{name} {what}", error, name, {name: bad, "policy": STOCHASTIC}
    for bad in (np.zeros(3), [1.0], (torch.zeros(2), torch.zeros(2))):
        yield f"state {type(bad).__name__}", StateError, "initial_state", {"initial_state": bad}


CASES = {name: (error, argument, changes) for name, error, argument, changes in cases()}


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_kind_of_argument_is_refused_by_name(name: str) -> None:
    error, argument, changes = CASES[name]
    args = arguments(**changes)
    with pytest.raises(error) as caught:
        lc.linear_attention(**args)
    assert caught.value.argument == argument
    for part in (caught.value.got, caught.value.want, caught.value.remedy):
        assert part and part in str(caught.value)


REGION = (
    "q as array",
    "K = 0",
    "scale nan",
    "scale 'x'",
    "site_id 'a'",
    "rule None",
    "output_final_state 1",
    "cu_seqlens list",
    "prefix_lengths float",
    "prefix_lengths three",
    "sequence_ids past 64 bits",
)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("backend", ["lattn_compile", "aot_eager"])
def test_a_wrong_kind_of_argument_in_a_compiled_region_is_the_same_error(backend: str) -> None:
    for name in REGION:
        torch._dynamo.reset()
        error, _, changes = CASES[name]
        args = arguments(**changes)
        eager = message(lambda: lc.linear_attention(**args), error)  # noqa: B023
        compiled = torch.compile(lambda: lc.linear_attention(**args)[0], backend=backend, fullgraph=True)  # noqa: B023
        with pytest.raises(error) as caught:
            compiled()
        assert eager in str(caught.value), name


def test_the_ops_themselves_refuse_a_scale_that_is_not_finite() -> None:
    x = arguments()
    tensors = (x["q"], x["k"], x["v"], x["g"], x["beta"], *(None,) * 5)
    for op in (torch.ops.lattn.chunk, torch.ops.lattn.decode):
        assert "scale" in message(lambda op=op: op(*tensors, scale=math.nan), PolicyError)  # type: ignore[misc]


def test_a_list_of_lengths_is_not_clamped_and_the_message_says_what_is() -> None:
    said = message(lambda: lc.linear_attention(**arguments(), policy="int8", prefix_lengths=[1, T + 1]), SequenceError)
    assert f"at most the sequence's own length n, {T}" in said
    assert "not clamped. One int for all is" in said
    whole = lc.linear_attention(**arguments(), policy="int8", prefix_lengths=T)[0]
    assert torch.equal(lc.linear_attention(**arguments(), policy="int8", prefix_lengths=T + 100)[0], whole)
    with pytest.raises(SequenceError, match="Lists are not clamped; one int for all is"):
        lc.training_phase([3, 5], [3, 4]).__enter__()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_carried_state_without_a_policy_is_refused_and_told_the_ways_out(policy: Any) -> None:
    """It would go on exactly, and round nothing from then on, without a word."""
    carried, more = state(policy), arguments()
    for call in (
        lambda: lc.linear_attention(**more, initial_state=carried),
        lambda: torch.compile(lc.linear_attention, backend="aot_eager", fullgraph=True)(**more, initial_state=carried),
    ):
        said = message(call, StateError)
        assert "initial_state" in said and 'policy="exact"' in said and "initial_state.dense()" in said
    lc.linear_attention(**more, initial_state=carried, policy=policy)
    exact = lc.linear_attention(**more, initial_state=carried, policy="exact", output_final_state=True)
    dense = lc.linear_attention(**more, initial_state=carried.dense(), output_final_state=True)
    assert all(torch.equal(a, b) for a, b in zip(exact, dense, strict=True))


OBJECTS: tuple[Any, ...] = (None, 3, 2.5, "x", b"x", [1], {"a": 1}, np.ones(2), object)


@pytest.mark.parametrize("junk", OBJECTS, ids=repr)
def test_no_object_of_another_kind_raises_anything_but_our_errors(junk: Any) -> None:
    layer = torch.nn.Linear(2, 2)
    for call in (
        lambda: lc.detach(junk),
        lambda: lc.rewrite(junk, "int8"),
        lambda: lc.calibrate(junk, [torch.ones(1, 2)], max_error=0.1),
        lambda: lc.calibrate(layer, junk, max_error=0.1),
        lambda: lc.Report.from_dict(junk),
        lambda: lc.Report.from_json(junk),
        lambda: lc.Report.merge([junk]),
        lambda: lc.Recipe.from_dict(junk),
        lambda: lc.Recipe.from_modelopt(junk),
        lambda: lc.Policy.from_dict({"state": junk, "write": junk, "no such": junk}),
        lambda: lc.decode_state(junk),
        lambda: backend.parse_options(None, {"strict": junk}),
        lambda: backend.parse_options(None, {"mode": "" if junk is None else junk}),
    ):
        message(call)
    if junk is not None:
        message(lambda: lc.attach(layer, junk))
    if not isinstance(junk, str):
        message(lambda: as_path("path", junk), FileFormatError)


def test_a_chunk_size_fits_the_cursor_that_counts_it() -> None:
    assert lc.Chunk(2**31 - 1).chunk_size == 2**31 - 1
    assert "2147483647" in message(lambda: lc.Chunk(2**31), PolicyError)


INDICES: dict[str, tuple[type[LattnError], Any]] = {
    "list": (DtypeError, [0, 1]),
    "int": (DtypeError, 1),
    "array": (DtypeError, np.array([0])),
    "floats": (DtypeError, torch.tensor([0.0])),
    "mask": (DtypeError, torch.tensor([True, False])),
    "int16": (DtypeError, torch.tensor([0], dtype=torch.int16)),
    "elsewhere": (DtypeError, torch.tensor([0]).to("meta")),
    "scalar": (StateError, torch.tensor(0)),
    "two axes": (StateError, torch.tensor([[0]])),
    "beyond": (StateError, torch.tensor([0, B])),
    "negative": (StateError, torch.tensor([-1])),
}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_state_refuses_an_index_or_a_device_that_is_none(policy: Any) -> None:
    carried = state(policy)
    for error, index in INDICES.values():
        assert "index" in message(lambda index=index: carried.index_select(index), error)  # type: ignore[misc]
    for device in ("nosuch", None, torch.float16, True, 1.0):
        assert "device" in message(lambda device=device: carried.to(device), DtypeError)  # type: ignore[misc]
    assert carried.index_select(torch.tensor([1, 0, 1])).dense().shape == (3, HV, K, V)
    assert carried.index_select(torch.empty(0, dtype=torch.int32)).dense().shape == (0, HV, K, V)
    assert torch.equal(carried.to("cpu").dense(), carried.dense())


def test_encode_state_takes_tensors_only() -> None:
    for bad in (None, [1.0], np.zeros((1, 1, 4, 4)), "state"):
        assert "S" in message(lambda bad=bad: lc.encode_state(bad, "int8"), DtypeError)  # type: ignore[misc]


def test_lengths_of_counts_may_lie_on_the_cpu_beside_tokens_elsewhere() -> None:
    """meta stands in for a device: only what lies on a third one is refused."""
    args = {n: x.to("meta") for n, x in arguments().items()}
    o, _ = lc.linear_attention(**args, policy="int8", prefix_lengths=[1, 2], sequence_lengths=torch.tensor([3, 4]))
    assert o.device.type == "meta" and o.shape == (B, T, HV, V)


def test_a_scale_of_zero_or_below_is_a_number_like_others() -> None:
    x = make_inputs("gdn", batch=1, tokens=3)
    at = lambda scale: lc.linear_attention(x.q, x.k, x.v, x.g, x.beta, scale=scale)[0]  # noqa: E731
    assert torch.equal(at(-2), -at(2.0)) and not at(0).any()


def test_sequence_ids_may_be_any_int_of_64_bits() -> None:
    def ids(*numbers: int) -> Tensor:
        return lc.linear_attention(**arguments(), policy=STOCHASTIC, sequence_ids=list(numbers))[0]

    assert torch.equal(ids(-1, 2**62), ids(-1, 2**62)) and not torch.equal(ids(-1, 2**62), ids(1, 2**61))


@pytest.mark.parametrize("policy", [None, *POLICIES], ids=str)
def test_forward_mode_is_refused_and_never_a_tangent_of_zeros(policy: Any) -> None:
    x = arguments()
    attend = lambda q: lc.linear_attention(**{**x, "q": q}, policy=policy)[0]  # noqa: E731
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x["q"], torch.ones_like(x["q"]))
        assert "forward-mode" in message(lambda: attend(dual), UnsupportedError)
        op = lambda: torch.ops.lattn.chunk(dual, x["k"], x["v"], *(None,) * 7, scale=1.0)  # noqa: E731
        assert "forward-mode" in message(op, UnsupportedError)
    for transform in (lambda f: torch.func.jvp(f, (x["q"],), (x["q"],)), lambda f: torch.func.jacfwd(f)(x["q"])):
        assert "forward-mode" in message(lambda t=transform: t(attend), UnsupportedError)  # type: ignore[misc]


@pytest.mark.parametrize("policy", [None, "int8"])
def test_transforms_of_torch_func_are_right_or_refused(policy: Any) -> None:
    x = arguments()
    attend = lambda q: lc.linear_attention(**{**x, "q": q}, policy=policy)[0]  # noqa: E731
    assert "torch.func.grad" in message(lambda: torch.func.grad(lambda q: attend(q).sum())(x["q"]), UnsupportedError)
    two = torch.stack([x["q"], -x["q"]])
    assert torch.equal(torch.vmap(attend)(two), torch.stack([attend(q) for q in two]))
    carry = lambda q: lc.linear_attention(**{**x, "q": q}, policy="int8", output_final_state=True)  # noqa: E731
    with pytest.raises(UnsupportedError, match=r"torch\.vmap of a call that returns its state"):
        torch.vmap(lambda q: carry(q)[1].dense())(two)


@pytest.mark.parametrize("policy", [None, *POLICIES], ids=str)
def test_a_state_made_in_inference_mode_serves_and_is_refused_in_training(policy: Any) -> None:
    with torch.inference_mode():
        carried = state(policy)
    x = arguments()
    with torch.no_grad():
        want = lc.linear_attention(**x, policy=policy, initial_state=carried)[0]
    trained = {name: t.requires_grad_() for name, t in x.items()}
    said = message(lambda: lc.linear_attention(**trained, policy=policy, initial_state=carried), StateError)
    assert "initial_state" in said and "inference mode" in said and "copy.deepcopy" in said
    o, _ = lc.linear_attention(**trained, policy=policy, initial_state=copy.deepcopy(carried))
    o.sum().backward()
    assert torch.equal(o, want)


class Attend(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lc.linear_attention(q, k, v)[0]


def test_inspect_refuses_a_call_that_its_module_does_not_take() -> None:
    x = arguments()
    for args, kwargs in ((3, None), (x["q"], None), ((), None), ((x["q"],), {"z": 1}), ((), 3), (None, None)):
        said = message(lambda: lc.inspect(Attend(), args, kwargs))  # type: ignore[arg-type]  # noqa: B023
        assert "args, kwargs" in said
    assert len(lc.inspect(Attend(), [x["q"], x["k"]], {"v": x["v"]}).sites) == 1  # type: ignore[arg-type]


def test_parts_of_two_states_are_refused() -> None:
    carried = state(lc.Policy(write=lc.Chunk(4)))
    other = dataclasses.replace(carried, exact=torch.ones(B, HV, K, V + 1))
    for call in (
        other.dense,
        other.raw,
        lambda: lc.linear_attention(**arguments(), initial_state=other, policy="exact"),
    ):
        assert "exact" in message(call, StateError)
    assert "cursor" in message(dataclasses.replace(carried, cursor=carried.cursor[:1]).dense, StateError)


def test_a_broken_distributed_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"junk")
    assert ".metadata" in message(lambda: lc.attach(torch.nn.Linear(2, 2), tmp_path), FileFormatError)
