"""What Inductor writes for our kernels' launches, and the written kernels compiled for Hopper. Run by `test_gpu.py`."""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import pkgutil
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
import lattn_compile.kernels

pytest.importorskip("triton")

from lattn_compile.kernels.chunk_pairs import pairs_head
from lattn_compile.kernels.decode_forward import advance
from lattn_compile.lowering import gpu, gpu_attention
from lattn_compile.lowering._torch_triton import is_function, literal, self_contained
from lattn_compile.lowering.gpu_attention import say_causal
from lattn_compile.packed.layout import Heads
from lattn_compile.packed.state import QuantizedState
from tests.kernels.offline import build
from tests.lowering.cuda_codegen import fake_cuda, generated, kernels_in

LAYERS, BATCH, HEADS, VALUE_HEADS, DIM = 2, 2, 2, 4, 64


@pytest.fixture(autouse=True)
def _machine() -> Iterator[None]:
    with fake_cuda(), torch.no_grad():
        yield


def _layers(mixed: Tensor, ab: Tensor, A_log: Tensor, dt_bias: Tensor, *states: Tensor) -> Tensor:
    """Gated delta layers one behind the other, each on a projection as Qwen3-Next has it."""
    x = mixed
    for state in states:
        sizes = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM]
        q, k, v = (y.unflatten(-1, (-1, DIM)) for y in torch.nn.functional.silu(x).split(sizes, -1))
        a, b = ab.chunk(2, -1)
        g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
        o, new = torch.ops.lattn.decode(
            q, k, v, g, b.sigmoid(), state, None, None, None, None,
            scale=DIM**-0.5, qk_l2norm=True, implementation=_layers.kernel,
        )[:2]  # fmt: skip
        state.copy_(new)
        x = x + o.flatten(-2).repeat(1, 1, 2)
    return x


def _code(kernel: str) -> str:
    _layers.kernel = kernel
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    mixed = torch.empty(BATCH, 1, (2 * HEADS + VALUE_HEADS) * DIM, **new)
    gates = [
        torch.empty(BATCH, 1, 2 * VALUE_HEADS, **new),
        *(torch.empty(VALUE_HEADS, device="cuda") for _ in range(2)),
    ]
    states = [torch.empty(BATCH, VALUE_HEADS, DIM, DIM, device="cuda") for _ in range(LAYERS)]
    (code,) = generated(_layers, mixed, *gates, *states)
    return code


def test_a_step_launches_our_kernel_and_writes_the_state_where_it_lies() -> None:
    code = _code("auto")
    assert "torch.ops.lattn" not in code
    (step,) = [k for k in kernels_in(code) if k.is_ours]
    assert step.name.startswith("step") and len(step.launches) == LAYERS
    for arguments in step.launches:
        names = _memory(arguments)
        assert names[7] == names[9] and names[7].startswith("arg"), "source and final are the cache's own memory"
        assert names[3] == names[6] and names[3].startswith("arg"), "a and b are read where they lie"
        assert [x[:3] for x in names[4:6]] == ["arg", "arg"], "A_log and dt_bias are parameters"
    # A layer's silu and the sum behind it, which are one kernel between two layers.
    assert sum(len(k.launches) for k in kernels_in(code)) <= 2 * LAYERS + 1
    assert "'scale': 'fp32'" in step.source and "'enable_fp_fusion': False" in step.source
    built = build(step.launch(), "sm_90")
    assert built.stack == 0 and built.registers <= 255
    report = lc.last_report()
    assert report is not None
    for site in report.sites:
        assert site.kernel == "triton"
        around = ("q: l2norm", "k: l2norm", "g: exp, neg, cast, add, softplus, mul", "beta: sigmoid")
        assert site.folded == (*around, "final_state: written in place")


def _memory(arguments: str) -> list[str]:
    """The buffers of a launch, views and all."""
    return re.sub(r"reinterpret_tensor\((\w+),[^()]*\([^()]*\)[^()]*\([^()]*\)[^()]*\)", r"\1", arguments).split(", ")


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut by heads"])
def test_a_short_convolution_moves_its_inputs_on_where_they_lie_and_takes_a_product_along(cut: bool) -> None:
    """Of keys, queries and values that one projection leaves in groups; the convolution's weight is `[C, 1, taps]`, and
    of a layer that is cut by heads lies by head, and is put in order in the graph."""
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    channels = (2 * HEADS + VALUE_HEADS) * DIM
    x, matrix, small = (torch.empty(n, 32, **new) for n in (BATCH, HEADS * 4 * DIM, 2 * VALUE_HEADS))
    past, weight = torch.empty(BATCH, channels, 4, **new), torch.empty(channels, 1, 4, **new)
    state = torch.empty(BATCH, VALUE_HEADS, DIM, DIM, device="cuda")

    def layer(x: Tensor, matrix: Tensor, small: Tensor, past: Tensor, weight: Tensor, state: Tensor) -> Tensor:
        b = torch.nn.functional.linear(x, small).view(BATCH, 1, -1)[..., VALUE_HEADS:]
        projected = torch.nn.functional.linear(x, matrix).view(BATCH, 1, HEADS, -1)
        parts = [x.reshape(BATCH, 1, -1) for x in projected.split([DIM, DIM, 2 * DIM], -1)]
        joined = torch.cat([past, torch.cat(parts, -1).transpose(1, 2)], -1)
        past.copy_(joined[..., -4:])
        if cut:
            by_head = weight.unflatten(0, (HEADS, -1)).split([DIM, DIM, 2 * DIM], 1)
            weight = torch.cat([x.flatten(0, 1) for x in by_head])
        mixed = torch.nn.functional.conv1d(joined, weight, groups=channels)[..., -1:]
        mixed = torch.nn.functional.silu(mixed).transpose(1, 2)
        sizes = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM]
        q, k, v = (y.unflatten(-1, (-1, DIM)) for y in mixed.split(sizes, -1))
        o, new = torch.ops.lattn.decode(
            q, k, v, None, b.sigmoid(), state, None, None, None, None,
            scale=DIM**-0.5, qk_l2norm=True, implementation="triton",
        )[:2]  # fmt: skip
        state.copy_(new)
        return o

    (code,) = generated(layer, x, matrix, small, past, weight, state, shape_padding=False)
    *ordering, convolve, step = kernels_in(code)
    assert len(ordering) == cut and convolve.is_ours and step.is_ours
    assert re.findall(r"extern_kernels\.(\w+)\(", code) == ["mm"], "the product that gates come from is taken along"
    (arguments,) = convolve.launches
    names = _memory(arguments)
    assert names[0] == names[1] == names[2], "read where the product left it"
    assert [names[i][:3] for i in (3, 4, 7, 8)] == ["arg", "buf" if cut else "arg", "arg", "arg"], (
        "moved on where it lies"
    )
    assert "'SILU': True" in convolve.source
    assert build(convolve.launch(), "sm_90").stack == 0


@pytest.mark.parametrize("window", [None, 8], ids=["token", "replay"])
def test_a_step_of_a_packed_state_has_its_gates_made_beside_the_convolution(window: int | None) -> None:
    """One kernel in front of the op: convolution, product and gates. Keys repeated for value heads are read once."""
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    channels = (2 * HEADS + VALUE_HEADS) * DIM
    x, matrix, small = (torch.empty(n, 512, **new) for n in (BATCH, HEADS * 4 * DIM, 2 * VALUE_HEADS))
    past, weight = torch.empty(BATCH, channels, 4, **new), torch.empty(channels, 1, 4, **new)
    rate, bias = (torch.empty(VALUE_HEADS, **new) for _ in range(2))
    policy = lc.Policy(lc.Int8(), write=lc.Token() if window is None else lc.Replay(window))
    state = QuantizedState(policy)
    state.repeats = VALUE_HEADS // HEADS
    state.allocate(Heads(HEADS, VALUE_HEADS, DIM, DIM, "head", True), BATCH, device="cuda")

    def layer(
        x: Tensor, matrix: Tensor, small: Tensor, past: Tensor, weight: Tensor, rate: Tensor, bias: Tensor
    ) -> Tensor:
        both = torch.nn.functional.linear(x, small).view(BATCH, 1, HEADS, -1)
        b, a = (y.reshape(BATCH, 1, VALUE_HEADS) for y in both.chunk(2, -1))
        projected = torch.nn.functional.linear(x, matrix).view(BATCH, 1, HEADS, -1)
        parts = [x.reshape(BATCH, 1, -1) for x in projected.split([DIM, DIM, 2 * DIM], -1)]
        joined = torch.cat([past, torch.cat(parts, -1).transpose(1, 2)], -1)
        past.copy_(joined[..., -4:])
        mixed = torch.nn.functional.conv1d(joined, weight, groups=channels)[..., -1:]
        mixed = torch.nn.functional.silu(mixed).transpose(1, 2)
        sizes = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM]
        q, k, v = (y.unflatten(-1, (-1, DIM)) for y in mixed.split(sizes, -1))
        q, k = state.once(*(y.repeat_interleave(VALUE_HEADS // HEADS, dim=2) for y in (q, k)), v)
        g = -rate.float().exp() * torch.nn.functional.softplus(a.float() + bias)
        return state.step(q, k, v, g, b.sigmoid(), use_qk_l2norm_in_kernel=True)

    (code,) = generated(layer, x, matrix, small, past, weight, rate, bias, shape_padding=False)
    (call,) = re.findall(rf"torch.ops.lattn.{'replay' if window else 'decode'}_device_.default\((.*)\)", code)
    assert call.count(f"({BATCH}, 1, {HEADS}, {DIM})") == 2
    ours, others = ([k for k in kernels_in(code) if k.is_ours is own] for own in (True, False))
    assert [k.name.rstrip("_0123456789") for k in ours] == ["multiply", "convolve"]
    assert not others and "extern_kernels" not in code.partition("def call(")[2]
    convolve = ours[1]
    assert "'GATES': True" in convolve.source
    built = build(convolve.launch(), "sm_90")
    assert built.stack == 0


def test_a_sequence_is_convolved_as_its_projection_lies() -> None:
    """Into a prefill's keys, queries and values, `silu` and all, in one kernel; and channels stay neighbours."""
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    channels, tokens, dim = (2 * HEADS + VALUE_HEADS) * 128, 100, 128
    x, matrix, weight = (
        torch.empty(BATCH * tokens, 64, **new),
        torch.empty(HEADS * 4 * dim, 64, **new),
        torch.empty(channels, 1, 4, **new),
    )

    def layer(x: Tensor, matrix: Tensor, weight: Tensor) -> Tensor:
        projected = torch.nn.functional.linear(x, matrix).view(BATCH, tokens, HEADS, -1)
        parts = [y.reshape(BATCH, tokens, -1) for y in projected.split([dim, dim, 2 * dim], -1)]
        mixed = torch.nn.functional.conv1d(torch.cat(parts, -1).transpose(1, 2), weight, padding=3, groups=channels)
        mixed = torch.nn.functional.silu(mixed[..., :tokens]).transpose(1, 2)
        q, k, v = (y.unflatten(-1, (-1, dim)) for y in mixed.split([HEADS * dim, HEADS * dim, VALUE_HEADS * dim], -1))
        keywords: dict[str, Any] = {"scale": 1.0, "qk_l2norm": True, "implementation": "triton", "chunk_size": 64}
        o, _ = torch.ops.lattn.chunk(q, k, v, None, None, None, None, None, None, None, **keywords)
        return o

    (code,) = generated(layer, x, matrix, weight)
    assert "extern_kernels.convolution" not in code
    ours = [k for k in kernels_in(code) if k.is_ours]
    convolve = next(k for k in ours if k.name.startswith("convolve_sequence"))
    assert "'SILU': True" in convolve.source
    names = _memory(convolve.launches[0])
    assert names[0] == names[1] == names[2], "read where the product left it"
    built = build(convolve.launch(), "sm_90")
    assert built.stack == 0 and built.text.count("ld.global.v4") == 16, "four taps of a tile, sixteen bytes a read"


def test_the_gradients_of_a_convolution_are_kernels() -> None:
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, grad, weight = torch.empty(2, 40, 256, **new), torch.empty(2, 43, 256, **new), torch.empty(256, 1, 4, **new)

    def backward(grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        given = (grad.transpose(1, 2), x.transpose(1, 2), weight, None, [1], [3], [1], False, [0], 256)
        return [y for y in torch.ops.aten.convolution_backward(*given, [True, True, False])[:2] if y is not None]

    (code,) = generated(backward, grad, x, weight)
    assert "convolution_backward.default(" not in code
    assert sorted(k.name.rstrip("_0123456789") for k in kernels_in(code) if k.is_ours) == [
        "_weights",
        "convolve_sequence",
    ]


def test_attention_of_one_token_reads_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (
        torch.empty(BATCH, 8, 1, 64, **new),
        torch.empty(BATCH, 2, 32, 64, **new),
        torch.empty(BATCH, 2, 32, 64, **new),
    )
    mask = torch.empty(BATCH, 1, 1, 32, **new)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, 4, -1, -1).reshape(BATCH, 8, 32, 64) for x in (k, v))
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        return attention(q, k, v, mask, False, 0.0, attend.causal, False, scale=0.1)[0]

    attend.causal = False  # type: ignore[attr-defined]
    (code,) = generated(attend, q, k, v, mask)
    assert "cudnn_attention" not in code
    (kernel,) = [x for x in kernels_in(code) if x.is_ours]
    (launch,) = kernel.launches
    views = re.sub(r"reinterpret_tensor\((arg\d+_1), .*?\), \d+\)", r"\1", launch)
    assert re.match(r"(arg\d+_1, ){4}buf0, ", views), "all is read where the caller has it"
    assert build(kernel.launch(), "sm_90").stack == 0
    monkeypatch.setattr(gpu, "PROVEN", gpu.PROVEN - {"attend"})
    (code,) = generated(attend, q, k, v, mask)
    (call,) = re.findall(r"_scaled_dot_product_cudnn_attention\.default\((.*)\)", code)
    assert re.search(r", arg\d+_1, arg\d+_1, ", call), "keys and values are the caller's own"
    (code,) = generated(attend, q, k, v, mask[..., :1])
    assert not re.search(r"cudnn_attention\.default\(.*, arg\d+_1, arg\d+_1, ", code), (
        "a mask of one number for all keys"
    )
    attend.causal = True  # type: ignore[attr-defined]
    (code,) = generated(attend, q, k, v, mask)
    assert not re.search(r"cudnn_attention\.default\(.*, arg\d+_1, arg\d+_1, ", code), "of a group, heads are no tokens"


@pytest.mark.parametrize(
    ("change", "shut"),
    [
        ("", -torch.inf),
        ("", -65504.0),
        ("", -9.0),
        ("one more", -65504.0),
        ("an input", -torch.inf),
        ("shorter", -65504.0),
    ],
)
def test_a_mask_that_is_causal_is_said_to_be(change: str, shut: float) -> None:
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.empty(BATCH, 4, 32, 64, **new) for _ in range(3))
    first = torch.empty(1, device="cuda", dtype=torch.long)

    def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor) -> Tensor:
        at = torch.arange(32, device="cuda")
        seen = at[None, :] <= at[:, None] + (change == "one more") + (first if change == "an input" else 0)
        packed = (torch.diff(at, prepend=at[:1] - 1) != 1).cumsum(0)
        seen = seen & (packed[None, :] == packed[:, None])
        if change == "moved":
            seen = torch.ones(32, 32, dtype=torch.bool).tril().to("cuda")
        if change == "shorter":
            seen = seen & (at[None, :] > 0)
        mask = torch.where(seen, 0.0, shut).to(torch.bfloat16)[None, None]
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False, scale=0.1)[0]

    (code,) = generated(attend, q, k, v, first)
    (call,) = re.findall(r"_scaled_dot_product_cudnn_attention\.default\((.*)\)", code)
    assert ("None, False, 0.0, True" in call) == (change in ("", "moved") and shut != -9.0)


def test_a_causal_mask_is_said_to_be_in_the_backward_too() -> None:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    query, key, value, grad, out, total, seed, offset = (graph.placeholder(x) for x in "qkvdoltf")
    at = graph.call_function(aten.arange.default, (32,))
    seen = graph.call_function(aten.le.Tensor, (at, graph.call_function(aten.unsqueeze.default, (at, 1))))
    numbers = [graph.call_function(aten.full.default, ([], x)) for x in (0.0, -65504.0)]
    mask = graph.call_function(aten.where.self, (seen, *numbers))
    mask = graph.call_function(aten.view.default, (mask, [1, 1, 32, 32]))
    mask.meta["val"] = torch.empty(1, 1, 32, 32, device="meta")
    forward = graph.call_function(
        aten._scaled_dot_product_cudnn_attention.default, (query, key, value, mask, True), {"scale": 0.1}
    )
    backward = graph.call_function(
        aten._scaled_dot_product_cudnn_attention_backward.default,
        (grad, query, key, value, out, total, seed, offset, mask, None, None, 32, 32, 0.0, False),
        {"scale": 0.1},
    )
    graph.output((forward, backward))
    assert say_causal(graph) == 2
    assert forward.args == (query, key, value, None, True, 0.0, True, False)
    assert backward.args == (grad, query, key, value, out, total, seed, offset, None, None, None, 32, 32, 0.0, True)
    assert forward.kwargs == backward.kwargs == {"scale": 0.1}


def test_masks_that_calls_make_alike_are_one() -> None:
    """Of two calls over keys that are repeated; of a third call's mask, which is of other sizes, there is another."""
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    query, keys, length = (graph.placeholder(x) for x in ("query", "keys", "length"))
    query.meta["val"], keys.meta["val"] = (torch.empty(*n, device="meta") for n in ((2, 8, 1, 32), (2, 2, 48, 32)))
    one = graph.call_function(aten.unsqueeze.default, (keys, 2))
    wide = graph.call_function(aten.expand.default, (one, [2, 2, 4, 48, 32]))
    copy = graph.call_function(aten.clone.default, (wide,))
    repeated = graph.call_function(aten.view.default, (copy, [2, 8, 48, 32]))
    one.meta["val"], wide.meta["val"] = keys.meta["val"].unsqueeze(2), torch.empty(2, 2, 4, 48, 32, device="meta")
    repeated.meta["val"] = torch.empty(2, 8, 48, 32, device="meta")
    at = graph.call_function(aten.arange.default, (48,))
    seen = graph.call_function(aten.le.Tensor, (at, length))
    calls = []
    for shut in (-1e4, -1e4, -2e4):
        numbers = [graph.call_function(aten.full.default, ([], x)) for x in (0.0, shut)]
        mask = graph.call_function(aten.where.self, (seen, *numbers))
        mask = graph.call_function(aten.view.default, (mask, [1, 1, 1, 48]))
        given = (query, repeated, repeated, mask, False)
        call = graph.call_function(aten._scaled_dot_product_cudnn_attention.default, given, {"scale": 0.1})
        calls.append(graph.call_function(operator.getitem, (call, 0)))
        one.meta["val"], wide.meta["val"] = keys.meta["val"].unsqueeze(2), torch.empty(2, 2, 4, 48, 32, device="meta")
        repeated.meta["val"], mask.meta["val"] = (
            torch.empty(*n, device="meta") for n in ((2, 8, 48, 32), (1, 1, 1, 48))
        )
    graph.output(calls)
    with mock.patch.object(gpu_attention, "_replace"):
        assert gpu_attention.share_keys(graph, launched=True) == 3
    masks = [x.args[3] for x in graph.find_nodes(op="call_function", target=gpu_attention._ATTENTION)]
    assert masks[0] is masks[1] is not masks[2]


def _gated(x: Tensor, state: Tensor, qkv: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A decode step and the products around it."""
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    q, k, v = (y.unflatten(-1, (4, 128)) for y in linear(x, qkv).chunk(3, -1))
    o, new = torch.ops.lattn.decode(q, k, v, None, None, state, *[None] * 4, scale=1.0, qk_l2norm=True)[:2]
    state.copy_(new)
    x = torch.nn.functional.rms_norm(x + o.flatten(-2), x.shape[-1:])
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def _of_gated(rows: int, hidden: int, wide: int) -> list[Tensor]:
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(3 * hidden, hidden), (wide, hidden), (wide, hidden), (hidden, wide)]
    state = torch.empty(rows, 4, 128, 128, device="cuda")
    return [torch.empty(rows, 1, hidden, **new), state, *(torch.empty(*s, **new) for s in shapes)]


@pytest.mark.parametrize("rows", [8, 64])
def test_products_of_few_rows_are_kernels_and_a_gated_pair_is_one(rows: int) -> None:
    """Of some dozens, pieces of a sum are added up by a kernel of Inductor's, where it computes what follows."""
    (code,) = generated(_gated, *_of_gated(rows, 512, 1024))
    assert "extern_kernels.mm(" not in code
    products = [k for k in kernels_in(code) if k.name.startswith("multiply")]
    assert sum(len(k.launches) for k in products) == 3
    assert sum("'PAIR': True" in k.source for k in products) == 1
    for product in products:
        built = build(product.launch(), "sm_90")
        assert built.stack == 0 and ("wgmma" in built.text) == (rows == 64)
        # Both sides lie in shared memory: registers might be used again before they are read (docs/kernels.md, Hopper).
        assert not re.search(r"wgmma\.mma_async[^;]*\}\s*,\s*\{", built.text)


def _turning(x: Tensor, state: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, *own: Tensor, how: str = "") -> Any:
    """A decode step, and queries and keys of attention as Qwen3-Next has them, gates beside the queries; or `how`."""
    linear = torch.nn.functional.linear
    q, k, v = (y.unflatten(-1, (4, 128)) for y in linear(x, qkv).chunk(3, -1))
    o, new = torch.ops.lattn.decode(q, k, v, None, None, state, *[None] * 4, scale=1.0)[:2]
    state.copy_(new)

    def turned(y: Tensor, weight: Tensor) -> Tensor:
        wide = y.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        scale = weight.float() if how == "weights alone" else 1.0 + (weight if how == "one in bf16" else weight.float())
        y = (wide * scale).type_as(y).transpose(1, 2)
        part, rest = y[..., :32], y[..., 32:]
        low, high = part[..., :16], part[..., 16:]
        turns = torch.cat([high, -low] if how == "the other way" else [-high, low], -1)
        turns = torch.cat([part[:3], part[3:]]) if how == "sequences joined" else turns
        part = part * cos.unsqueeze(1) + turns * sin.unsqueeze(1)
        return torch.cat([rest, part] if how == "behind the rest" else [part, rest], -1)

    query, keys = linear(x, own[0]).unflatten(-1, (4, 256)), linear(x, own[1]).unflatten(-1, (4, 128))
    return o, turned(query[..., :128], own[2]), turned(keys, own[3])


_OTHERWISE = ("weights alone", "one in bf16", "the other way", "sequences joined", "behind the rest")


@pytest.mark.parametrize(("rows", "how"), [(8, ""), (64, ""), *((8, how) for how in _OTHERWISE)])
def test_norm_and_rotation_of_queries_and_keys_are_one_launch(rows: int, how: str) -> None:
    """Spelled as said, and otherwise not."""
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, qkv, *own = (
        torch.empty(*s, **new) for s in ((rows, 1, 512), (1536, 512), (1024, 512), (512, 512), (128,), (128,))
    )
    state, turns = torch.empty(rows, 4, 128, 128, device="cuda"), [torch.empty(1, 1, 32, **new) for _ in range(2)]
    (code,) = generated(functools.partial(_turning, how=how), x, state, qkv, *turns, *own)
    if how:
        assert not [k for k in kernels_in(code) if k.name.startswith("rotate")]
        return
    (launch,) = [k for k in kernels_in(code) if k.name.startswith("rotate")]
    assert len(launch.launches) == 1 and build(launch.launch(), "sm_90").stack == 0
    assert not [k for k in kernels_in(code) if "rsqrt" in k.name]


def test_products_of_one_input_in_two_shapes_are_two_launches() -> None:
    """All channels of a token by one matrix, and each head's by another."""

    def call(x: Tensor, state: Tensor, qkv: Tensor, mixed: Tensor) -> Any:
        q, k, v = (y.unflatten(-1, (4, 128)) for y in torch.nn.functional.linear(x, qkv).chunk(3, -1))
        o, new = torch.ops.lattn.decode(q, k, v, None, None, state, *[None] * 4, scale=1.0)[:2]
        state.copy_(new)
        return o, torch.nn.functional.linear(x.view(-1, 512), mixed)

    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, qkv, mixed = (torch.empty(*shape, **new) for shape in ((1, 1, 1024), (1536, 1024), (512, 512)))
    (code,) = generated(call, x, torch.empty(1, 4, 128, 128, device="cuda"), qkv, mixed, shape_padding=False)
    products = [k for k in kernels_in(code) if k.name.startswith("multiply")]
    assert sum(len(k.launches) for k in products) == 2


@pytest.mark.parametrize("rows", [8, 64])
def test_kernels_that_begin_early_wait_before_they_read(rows: int) -> None:
    (code,) = generated(_gated, *_of_gated(rows, 512, 1024), **{"triton.enable_pdl": True})
    kernels = kernels_in(code)
    products = "multiply" if rows <= 16 else "multiply_some"
    assert {k.name.rstrip("_0123456789") for k in kernels if k.is_ours} == {products, "step"}
    for kernel in kernels:
        assert "'launch_pdl': True" in kernel.source
        if kernel.is_ours:
            built = build(kernel.launch(), "sm_90")
            waits = built.text.index("griddepcontrol.wait")
            assert "ld.global" not in built.text[:waits] and "cp.async" not in built.text[:waits]
            assert waits < built.text.index("griddepcontrol.launch_dependents"), "who begins behind counts on the wait"
            assert "prefetch.global.L2" in built.text[:waits], "weights and states are on their way before"
            assert built.stack == 0
        else:
            body = kernel.source[kernel.source.index("@triton.jit") :]
            assert body.index("gdc_wait") < body.index("tl.load")


def test_a_step_of_any_batch_is_launched_and_one_of_all_sizes_unknown_calls_the_op() -> None:
    def call(*given: Tensor) -> Any:
        return torch.ops.lattn.decode(*given, *[None] * 4, scale=1.0)[:2]

    new: dict[str, Any] = {"device": "cuda"}
    q, k = (torch.empty(3, 1, HEADS, 128, **new) for _ in range(2))
    v, gates = torch.empty(3, 1, VALUE_HEADS, 128, **new), [torch.empty(3, 1, VALUE_HEADS, **new) for _ in range(2)]
    given = [q, k, v, *gates, torch.empty(3, VALUE_HEADS, 128, 128, **new)]
    with torch._dynamo.config.patch(assume_static_by_default=False):
        (code,) = generated(call, *given)
    assert "torch.ops.lattn.decode" in code and not [x for x in kernels_in(code) if x.is_ours]
    for x in given:
        torch._dynamo.mark_dynamic(x, 0)
    (code,) = generated(call, *given)
    assert [x.name for x in kernels_in(code) if x.is_ours] == ["step_0"]


@pytest.mark.parametrize(
    "policy", ["int8", lc.Policy(lc.Int8(), write=lc.Replay(8), kernel="triton")], ids=["token", "replay"]
)
def test_lengths_on_a_cpu_are_looked_at_by_the_op(policy: Any) -> None:
    """What a phase was given as a list lies there, and has no values yet when a graph is made."""

    def call(*given: Tensor) -> Tensor:
        return lc.linear_attention(*given[:5], policy=policy, prefix_lengths=given[5])[0]

    new: dict[str, Any] = {"device": "cuda"}
    q, k = (torch.empty(2, 10, HEADS, DIM, **new) for _ in range(2))
    v, gates = torch.empty(2, 10, VALUE_HEADS, DIM, **new), [torch.empty(2, 10, VALUE_HEADS, **new) for _ in range(2)]
    name = "decode" if policy == "int8" else "replay"
    for device, called in (("cpu", True), ("cuda", False)):
        (code,) = generated(call, q, k, v, *gates, torch.tensor([3, 9], device=device))
        assert (f"torch.ops.lattn.{name}" in code, not [x for x in kernels_in(code) if x.is_ours]) == (called, called)


def test_nothing_unproven_is_launched_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PROVEN", frozenset())
    code = _code("auto")
    assert code.count("torch.ops.lattn.decode_recorded.default(") == LAYERS
    assert not [k for k in kernels_in(code) if k.is_ours]


def test_every_name_in_a_written_kernel_is_its_own() -> None:
    """Codecs of three formats have functions and constants of one name, and other names where they are called."""
    source = self_contained(advance)
    defined = re.findall(r"^(?:def )?(\w+)(?:\(| = )", source, re.MULTILINE)
    assert len(defined) == len(set(defined))
    assert source.startswith("def advance(") and "round_int8" not in source


def test_every_kernel_can_be_written_into_a_module_of_any_torch() -> None:
    """torch 2.11 puts a kernel's source between quotes as it is, where an escaped newline becomes a newline."""
    modules = [m.name for m in pkgutil.walk_packages(lattn_compile.kernels.__path__, "lattn_compile.kernels.")]
    functions = {f.fn: f for name in modules for f in vars(importlib.import_module(name)).values() if is_function(f)}
    assert len(functions) > 300
    for function in functions.values():
        source = self_contained(function)
        compile(ast.literal_eval(f"'''{source}'''"), function.fn.__name__, "exec")


def test_texts_of_several_lines_stay_as_they_are() -> None:
    text = "\n{ add.u32 $0, $1, 'x'; }\n"
    assert eval(literal(text)) == text and "\\" not in literal(text)


def test_a_process_that_compiles_a_kernel_asks_no_device() -> None:
    """Inductor compiles in forked processes, which may not."""
    assert "is_hip" not in self_contained(pairs_head)
