"""The codec ops: what they compute, in eager and compiled code, and what they refuse while tracing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lattn_compile import codec
from lattn_compile.errors import DtypeError, LattnError, PolicyError, ShapeError
from lattn_compile.formats import REGISTRY, Fp32, parse
from lattn_compile.formats.quantizer import ROUNDINGS, Identity, Quantizer
from lattn_compile.formats.residual import FEEDBACKS
from lattn_compile.formats.rotation import ROTATIONS
from tests.formats.states import randn, rough, same

FORMATS = [str(cls()) for cls in REGISTRY]
every = pytest.mark.parametrize("spec", FORMATS)
BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("c++") else [])]
WHO = {"position": torch.tensor([5, 6], dtype=torch.int32), "sequence_ids": torch.tensor([7, 2**33])}
FULL: dict[str, Any] = {
    "rounding": "stochastic",
    "feedback": "int4",
    "rotation": "hadamard_k",
    "seed": 2**63 - 1,
    "site_id": 12,
}
STATE = rough(2, 3, 16, 70)


def options(spec: str) -> list[dict[str, Any]]:
    """Nothing, each option alone, and all of them, as far as the format has them."""
    plain = parse(spec).is_plain
    each: list[dict[str, Any]] = [{}, {"rotation": "hadamard_k"}]
    each += [] if parse(spec) == Fp32() else [{"rounding": "stochastic", "seed": 3}]
    each += [] if plain else [{"feedback": "int4"}, {"feedback": "bf16"}, FULL]
    return each


def reading(chosen: dict[str, Any]) -> dict[str, Any]:
    return {key: chosen[key] for key in ("feedback", "rotation") if key in chosen}


@every
def test_the_ops_are_the_quantizer(spec: str) -> None:
    identity = Identity(WHO["position"].long(), WHO["sequence_ids"])
    for chosen in options(spec):
        q = Quantizer(parse(spec), **chosen)
        want, out = q.encode(STATE, identity), q.qdq(STATE, identity)
        enc = codec.encode_tensors(STATE, spec, **WHO, **chosen)
        assert tuple(enc) == q.keys == codec.keys(spec, feedback=chosen.get("feedback"))
        assert all(same(t, want[key]) for key, t in enc.items())
        assert same(codec.qdq(STATE, spec, **WHO, **chosen), out)
        assert same(codec.decode_tensors(enc, spec, (16, 70), torch.float32, **reading(chosen)), out)


@every
def test_without_options_the_ops_round_to_nearest(spec: str) -> None:
    fmt = parse(spec)
    assert same(codec.qdq(STATE, spec), fmt.qdq(STATE))
    enc = codec.encode_tensors(STATE, spec)
    assert all(same(t, fmt.encode(STATE)[key]) for key, t in enc.items())
    assert same(codec.decode_tensors(enc, spec, (16, 70), torch.float64), fmt.qdq(STATE).double())
    assert same(codec.qdq(STATE[0, 0], spec), fmt.qdq(STATE[0, 0]))  # any leading dimensions


def test_one_number_stands_for_all_states_and_none_for_zero() -> None:
    def draw(**who: Tensor) -> Tensor:
        return codec.qdq(STATE, "fp8_e4m3", rounding="stochastic", **who)

    zero, three = torch.tensor(0), torch.tensor(3, dtype=torch.int32)
    assert same(draw(), draw(position=zero, sequence_ids=zero))
    assert same(draw(position=three), draw(position=torch.tensor([3, 3]), sequence_ids=torch.zeros(2).int()))
    assert not same(draw(), draw(position=three))
    assert not same(draw(position=three), draw(sequence_ids=three))


@every
def test_outputs_are_contiguous_and_own_their_memory(spec: str) -> None:
    S = randn(2, 3, 16, 16)
    for state in (S, S.mT.contiguous().mT, S.transpose(0, 1).contiguous().transpose(0, 1)):
        for chosen in options(spec):
            for out in (codec.qdq(state, spec, **WHO, **chosen), *codec.encode_tensors(state, spec, **chosen).values()):
                assert out.is_contiguous()
                assert out.untyped_storage().data_ptr() != state.untyped_storage().data_ptr()


@every
def test_the_gradient_is_the_identity(spec: str) -> None:
    weights = randn(2, 3, 16, 70, seed=1)
    for chosen in options(spec):
        S = STATE.clone().requires_grad_()
        (codec.qdq(S, spec, **WHO, **chosen) * weights).sum().backward()
        assert S.grad is not None and same(S.grad, weights)
        assert not any(t.requires_grad for t in codec.encode_tensors(S, spec, **WHO, **chosen).values())


@pytest.mark.parametrize("spec", ["bf16", "int8", "nvfp4"])
def test_opcheck_with_all_options(spec: str) -> None:
    ops, who = torch.ops.lattn, (WHO["position"], WHO["sequence_ids"])
    S = randn(2, 3, 16, 70)
    for chosen in options(spec)[-1:]:
        kwargs = {"state_format": spec, **chosen}
        tensors = ops.encode_state(S, *who, **kwargs)
        tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if any("float8" in str(x.dtype) for x in tensors):
            tests.remove("test_schema")  # torch compares what it passes in with allclose, which has no float8
        torch.library.opcheck(ops.encode_state.default, (S, *who), kwargs, test_utils=tests)
        torch.library.opcheck(ops.qdq_state.default, (S.clone().requires_grad_(), *who), kwargs)
        read = {"state_format": spec, "shape": [16, 70], "dtype": torch.float32, **reading(chosen)}
        torch.library.opcheck(ops.decode_state.default, (tensors,), read, test_utils=tests)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_gives_the_same_bits(backend: str) -> None:
    cases = [(spec, chosen) for spec in FORMATS for chosen in options(spec)]

    def everything(S: Tensor, position: Tensor, sequence_ids: Tensor) -> list[Tensor]:
        out = []
        for spec, chosen in cases:
            who = {"position": position, "sequence_ids": sequence_ids}
            enc = codec.encode_tensors(S, spec, **who, **chosen)
            out += [*enc.values(), codec.qdq(S, spec, **who, **chosen)]
            out.append(codec.decode_tensors(enc, spec, (16, 70), torch.float32, **reading(chosen)))
        return out

    torch._dynamo.reset()
    compiled = torch.compile(everything, backend=backend, fullgraph=True)
    for shift in range(2):
        who = [x + shift for x in WHO.values()]
        for got, want in zip(compiled(STATE, *who), everything(STATE, *who), strict=True):
            assert same(got, want)


def test_another_position_or_batch_is_no_other_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda S, p: codec.qdq(S, "int8", position=p, rounding="stochastic"),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for n in (3, 5, 7):
        for p in (0, 7):
            S, position = randn(n, 2, 8, 9), torch.full((n,), p)
            assert same(compiled(S, position), codec.qdq(S, "int8", position=position, rounding="stochastic"))
    assert counter.frame_count == 1


def test_recomputation_under_checkpoint_draws_the_same_numbers() -> None:
    from torch.utils.checkpoint import checkpoint

    weights = randn(2, 3, 16, 70, seed=1)

    def layer(S: Tensor) -> Tensor:
        stored = codec.qdq(S * 2, "int8", rounding="stochastic", **WHO)
        return (stored * stored * weights).sum()

    grads = []
    for again in (False, True):
        S = randn(2, 3, 16, 70).requires_grad_()
        out = checkpoint(layer, S, use_reentrant=False, preserve_rng_state=False) if again else layer(S)
        out.backward()
        grads.append(S.grad)
    assert grads[0] is not None and grads[1] is not None and same(grads[0], grads[1])


MISUSE: dict[str, tuple[type[LattnError], str, Callable[[Tensor], Tensor]]] = {
    "rounding": (PolicyError, "rounding: got 'random'", lambda S: codec.qdq(S, "int8", rounding="random")),
    "feedback": (PolicyError, "feedback: got 'int4' on the plain", lambda S: codec.qdq(S, "bf16", feedback="int4")),
    "axis": (PolicyError, "V = 12", lambda S: codec.qdq(S, "int8", rotation="hadamard_v")),
    "dtype": (
        DtypeError,
        "position: got torch.float32; want an integer",
        lambda S: codec.qdq(S, "int8", rounding="stochastic", position=torch.zeros(2)),
    ),
    "count": (
        ShapeError,
        r"sequence_ids: got \[3\]; want \[\] or \[2\]",
        lambda S: codec.qdq(S, "int8", rounding="stochastic", sequence_ids=torch.zeros(3, dtype=torch.int64)),
    ),
    "dims": (
        ShapeError,
        r"want \[n, HV, K, V\]",
        lambda S: codec.qdq(S[0], "int8", rounding="stochastic"),
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_by_name(case: str) -> None:
    error, text, call = MISUSE[case]
    S = randn(2, 3, 16, 12)
    with pytest.raises(error, match=text):
        call(S)
    # And while a graph is traced, where Dynamo may wrap it but shows its text.
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(call, backend="eager", fullgraph=True)(S)


def test_every_option_of_the_quantizer_is_an_argument_of_the_ops() -> None:
    for name in ("encode_state", "qdq_state"):
        schema = getattr(torch.ops.lattn, name).default._schema
        defaults = {a.name: a.default_value for a in schema.arguments if a.kwarg_only and a.name != "state_format"}
        assert defaults == {"rounding": "nearest", "feedback": None, "rotation": None, "seed": 0, "site_id": 0}
    assert ROUNDINGS[0] == "nearest" and FEEDBACKS[0] is None and ROTATIONS[0] is None
