"""One token of `lattn::decode` on a CPU becomes loops of Inductor's: the same numbers, the state written in place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import lattn_compile as lc
from lattn_compile.formats import parse
from lattn_compile.lowering.step import decode_step
from tests.ops.cases import OPS, assert_close, inputs, ints, options

FORMATS = ("fp32", "bf16", "fp16", "int8/*x5", "int8/4x8", "fp8_e4m3/*x8", "nvfp4")
NONE = (None,) * 4


def _step(tensors: list[Any], *lengths: Any, **kwargs: Any) -> Any:
    return decode_step(*tensors, *(lengths or NONE), **kwargs)


@pytest.mark.parametrize("readout", ["before_write", "after_write"])
@pytest.mark.parametrize("write", ["exact", *FORMATS])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"decay": "channel", "value_heads": 2},
        {"decay": None, "value_heads": 6, "value_dim": 1},
        {"beta": False, "state": False, "key_dim": 1},
    ],
    ids=["gdn", "kda", "delta", "no state"],
)
@pytest.mark.parametrize("rule", ["delta", "additive"])
def test_the_spelling_is_the_op(shape: dict[str, Any], write: str, readout: str, rule: str) -> None:
    tensors = inputs(tokens=1, **shape)
    quantized = {} if write == "exact" else {"state_format": write}
    kwargs = options("decode", "exact" if write == "exact" else "token", readout=readout, rule=rule, **quantized)
    for a, b in zip(_step(tensors, **kwargs), OPS["decode"](*tensors, *NONE, **kwargs), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, "output")


@pytest.mark.parametrize("extra", [{"qk_l2norm": True}, {"checkpoint_every": 16}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_inputs_of_every_dtype_and_option(dtype: torch.dtype, extra: dict[str, Any]) -> None:
    tensors = inputs(batch=3, tokens=1, dtype=dtype)
    tensors[5] = tensors[5].float()
    kwargs = options("decode", **extra)
    got, want = _step(tensors, **kwargs), OPS["decode"](*tensors, *NONE, **kwargs)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert [x.shape for x in got] == [x.shape for x in want]
    # One unit in the last place of the output; states are float32.
    assert_close(got[0].double(), want[0].double(), "o", max(torch.finfo(dtype).eps, 1e-6))
    assert_close(got[1], want[1], "final_state", 1e-6)
    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("half", [("q", "k"), ("v",), ()])
def test_outputs_have_the_ops_dtypes_and_strides(half: tuple[str, ...]) -> None:
    """What follows was traced with them: o in q's dtype, both contiguous, also for a state that is a transpose."""
    tensors = inputs(tokens=1, heads=4, key_dim=8, value_dim=8, dtype=torch.float32)
    tensors = [x.bfloat16() if name in half else x for name, x in zip("qkvgbs", tensors, strict=True)]
    tensors[5] = tensors[5].transpose(-1, -2)
    kwargs = options("decode")
    got, want = _step(tensors, **kwargs), OPS["decode"](*tensors, *NONE, **kwargs)
    assert [(x.dtype, x.stride()) for x in got] == [(x.dtype, x.stride()) for x in want]


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({}, 2),
        ({}, 0),
        ({"lengths": (None, ints(0, 1), None, None), "write": "token"}, 1),
        ({"lengths": (ints(0, 1, 2), None, None, None)}, 1),
        ({"lengths": (None, None, ints(1, 0), None)}, 1),
        ({"lengths": (None, None, None, ints(-1, 0)), "write": "token"}, 1),
        ({"write": "token", "rounding": "stochastic"}, 1),
        ({"write": "token", "feedback": "int8"}, 1),
        ({"write": "token", "rotation": "hadamard"}, 1),
        ({"implementation": "reference"}, 1),
        ({"gate": "bf16"}, 1),
    ],
)
def test_what_is_not_one_plain_token_stays_the_op(change: dict[str, Any], tokens: int) -> None:
    change = dict(change)
    lengths = change.pop("lengths", NONE)
    tensors = inputs(tokens=tokens, key_dim=8, value_dim=8)
    assert _step(tensors, *lengths, **options("decode", **change)) is NotImplemented


@pytest.mark.parametrize("growth", [False, True])
def test_a_positive_decay_is_nan_in_its_head_and_nowhere_else(growth: bool) -> None:
    """The op raises where it can look; generated code shows it. Under growth the decay means what it says."""
    tensors = inputs(tokens=1)
    kwargs = options("decode", growth=growth)
    want = _step(tensors, **kwargs)
    tensors[3][1, 0, 2] = 1e-3
    o, final, _ = _step(tensors, **kwargs)
    if growth:
        for a, b in zip((o, final), OPS["decode"](*tensors, *NONE, **kwargs), strict=False):
            assert_close(a, b, "output")
        return
    with pytest.raises(lc.LattnError, match="log decay"):
        OPS["decode"](*tensors, *NONE, **kwargs)
    assert o[1, 0, 2].isnan().all()
    assert final[1, 2].isnan().all()
    o[1, 0, 2], final[1, 2] = want[0][1, 0, 2], want[1][1, 2]
    assert torch.equal(o, want[0])
    assert torch.equal(final, want[1])


def _serve(policy: str | lc.Policy | None, rule: str = "delta") -> Any:
    def serve(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> Tensor:
        o, final = lc.linear_attention(
            q, k, v, g, beta, rule=rule, initial_state=state, output_final_state=True, policy=policy
        )
        assert final is not None
        state.copy_(final if isinstance(final, Tensor) else final.dense())
        return o

    return serve


def _compiled(function: Any, **kwargs: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="lattn_compile", fullgraph=True, **kwargs)


@pytest.mark.parametrize(("policy", "write"), [(None, "exact"), (lc.Policy(lc.Int8(block_v=8)), "int8/*x8")])
def test_a_decode_step_is_one_kernel_and_writes_the_state_in_place(policy: Any, write: str) -> None:
    """No call of the op, no second buffer of the state's size: the loop writes where the cache lies."""
    q, k, v, g, beta, state = inputs(tokens=1, dtype=torch.float32)
    compiled, theirs, ours = _compiled(_serve(policy)), state.clone(), state.clone()
    with torch.no_grad():
        o, (code,) = run_and_get_code(compiled, ours, q, k, v, g, beta)
        want = _serve(policy)(theirs, q, k, v, g, beta)
    assert "torch.ops.lattn" not in code
    calls = [line for line in code.splitlines() if line.strip().startswith("cpp_fused") and "=" not in line]
    assert len(calls) == 1, calls
    assert_close(o, want, "o", 1e-6)
    if write == "exact":
        assert_close(ours, theirs, "state", 1e-6)
    else:
        _assert_codes_alike(ours, theirs, write)


def _assert_codes_alike(ours: Tensor, theirs: Tensor, spec: str) -> None:
    """Semantics §8, one step from the same stored state: 1e-5 of the codes differ, by 1 (here: none of so few)."""
    a, b = (parse(spec).encode(x) for x in (ours, theirs))
    assert (a["codes"].int() - b["codes"].int()).abs().max() <= 1
    assert (a["codes"] != b["codes"]).float().mean() <= 1e-3
    assert_close(a["state_scale"], b["state_scale"], "scales", 2 * 2**-16)


def test_a_compiled_rounding_is_the_codec_bit_for_bit() -> None:
    """Nothing but the rounding happens to the states (k = 0, no decay): every code and edge rule must come out alike.
    All formats in one graph, which is compiled once."""
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(2, 64, 16, 24, generator=generator) * torch.logspace(-44, 30, 64)[:, None, None]
    state[0, 0, 0, 0], state[0, 1, 2, 3], state[0, 2, 1, 1] = math.nan, math.inf, -math.inf
    state[0, 3], state[0, 4], state[1, 5, :, 3] = 0.0, -0.0, 2.0**-126
    halves = torch.arange(-8.0, 8.0)[:, None] + 0.5
    state[1, 6], state[1, 7] = 127.0, halves.expand(16, 24).contiguous()
    state[1, 7, 0] = 127.0
    zero = torch.zeros(2, 1, 64, 16)
    v = torch.zeros(2, 1, 64, 24)
    steps = [_serve(lc.Policy(parse(spec)), "additive") for spec in FORMATS]

    def serve(states: list[Tensor]) -> list[Tensor]:
        return [step(ours, zero, zero, v, None, None) for step, ours in zip(steps, states, strict=True)]

    states = [state.clone() for _ in FORMATS]
    with torch.no_grad():
        _, (code,) = run_and_get_code(_compiled(serve), states)
    assert "torch.ops.lattn" not in code
    for spec, ours in zip(FORMATS, states, strict=True):
        want = parse(spec).qdq(state)
        assert torch.equal(ours.nan_to_num(1e30), want.nan_to_num(1e30)), spec
        assert torch.equal(ours.isnan(), want.isnan()), spec


def test_any_batch_and_gradients_go_through_one_graph() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        o, final = lc.linear_attention(q, k, v, g, beta, initial_state=state, output_final_state=True)
        assert isinstance(final, Tensor)
        return o.square().sum() + final.square().sum()

    compiled = _compiled(loss, dynamic=True)
    for batch in (2, 3, 5):
        tensors = inputs(batch=batch, tokens=1, dtype=torch.float32, grad=True, seed=batch)
        got = torch.autograd.grad(compiled(*tensors), tensors)
        want = torch.autograd.grad(loss(*tensors), tensors)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, "gradient", 1e-5)


def test_the_report_says_what_runs_it() -> None:
    q, k, v, g, beta, state = inputs(tokens=1, dtype=torch.float32)
    with torch.no_grad():
        _compiled(_serve(None))(state.clone(), q, k, v, g, beta)
        report = lc.last_report()
        assert report is not None and [s.kernel for s in report.sites] == ["inductor"]
        reference = {"policy": lc.Policy(write=lc.Exact(), kernel="reference")}
        _compiled(_serve(None), options=reference)(state.clone(), q, k, v, g, beta)
        report = lc.last_report()
        assert report is not None and [s.kernel for s in report.sites] == ["reference"]
