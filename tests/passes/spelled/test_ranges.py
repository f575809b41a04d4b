"""Interval analysis: what it proves of gates, what it must not, and that no computed value ever leaves its interval."""

import math
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from lattn_compile.passes.spelled.ranges import interval, is_decay, is_log_decay

INF = math.inf


def traced(f, *inputs):
    """The node that `f` returns."""
    gm = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    (out,) = gm.graph.output_node().all_input_nodes
    out.holder = gm  # a graph refers to its module weakly
    return out


x, y = torch.zeros(3, 4), torch.zeros(4)


@pytest.mark.parametrize(
    "gate",
    [
        lambda a, b: -F.softplus(a),
        lambda a, b: -torch.exp(b) * F.softplus(a + b),
        lambda a, b: F.softplus(a + b) * -b.float().exp(),
        lambda a, b: F.logsigmoid(a),
        lambda a, b: F.logsigmoid(a) / 16,
        lambda a, b: F.logsigmoid(a).clamp(min=-5),
        lambda a, b: torch.log(a.sigmoid()),
        lambda a, b: -5 * torch.sigmoid(a * b),
        lambda a, b: -torch.abs(a),
        lambda a, b: -(a**2),
        lambda a, b: -(a * a),
        lambda a, b: (-F.softplus(a)).cumsum(0),
        lambda a, b: (-F.softplus(a)).bfloat16().float().transpose(0, 1)[1:, None].expand(3, 2, 3),
        lambda a, b: torch.clamp(a, max=0.0),
        lambda a, b: torch.minimum(a, torch.zeros_like(a)),
        lambda a, b: torch.where(a > 0, -a.exp(), 0.0),
        lambda a, b: torch.stack([-a.exp(), -a.square()]),
        lambda a, b: F.pad(-a.exp(), (0, 2)),
        lambda a, b: torch.full((3,), -0.1) + 0 * torch.ones(3),
        lambda a, b: torch.zeros(3, 4),
        lambda a, b: (-a.exp()).max(0)[0],
        lambda a, b: -torch.exp(torch.zeros(4)) * (a.tanh() + 1),
        lambda a, b: a.sigmoid() - 1,
        lambda a, b: torch.log(1 - a.sigmoid() * b.sigmoid()),
        lambda a, b: -a.exp() * torch.arange(3)[:, None],
        lambda a, b: torch.log1p(-a.sigmoid()),
        lambda a, b: -torch.expm1(a.abs()),
        lambda a, b: -1 / (1 + torch.exp(a)),
        lambda a, b: torch.log(torch.rsqrt(a.square() + 1)),
    ],
)
def test_log_decays(gate):
    assert is_log_decay(traced(gate, x, y))


@pytest.mark.parametrize(
    "gate",
    [
        lambda a, b: a.sigmoid(),
        lambda a, b: torch.exp(-F.softplus(a)),
        lambda a, b: 1 - a.sigmoid(),
        lambda a, b: torch.exp(-torch.exp(a)),
        lambda a, b: a.sigmoid() ** 0.0625,
        lambda a, b: a.sigmoid() * b.sigmoid() + 0.0,
        lambda a, b: torch.exp2(-a.abs()),
        lambda a, b: torch.full((2,), 0.9),
        lambda a, b: 1 - 2.0 ** (-5 - torch.arange(4)),
        lambda a, b: a.clamp(0, 1),
        lambda a, b: torch.ones_like(a),
        lambda a, b: torch.reciprocal(1 + a.exp()),
        lambda a, b: torch.tanh(a.square()),
        lambda a, b: a.softmax(-1),
        lambda a, b: F.logsigmoid(a).exp().cumprod(0),
    ],
)
def test_decays(gate):
    assert is_decay(traced(gate, x, y))


@pytest.mark.parametrize(
    "gate",
    [
        lambda a, b: a,
        lambda a, b: F.softplus(a),
        lambda a, b: -a.sigmoid() + b,
        lambda a, b: a * b,
        lambda a, b: a.exp() * 1.5,
        lambda a, b: 2 * a.sigmoid(),
        lambda a, b: a.sigmoid() + 1e-6,
        lambda a, b: a.sigmoid() * 1.0000001,
        lambda a, b: torch.log(a.exp()),
        lambda a, b: (a @ a.T).exp(),
        lambda a, b: torch.full((2,), 1.1),
        lambda a, b: torch.clamp(a, max=1.5),
        lambda a, b: torch.where(a > 0, a.sigmoid(), a),
        lambda a, b: F.pad(-a.exp(), (0, 2), value=2.0),
        lambda a, b: 1 / a.abs(),
        lambda a, b: a.sigmoid().cumsum(0),
        lambda a, b: F.softplus(a, threshold=-5.0) * -1,
        lambda a, b: torch.rsqrt(a),
        lambda a, b: (-a.exp()).logcumsumexp(0),
        lambda a, b: torch.fmax(a.sigmoid(), b),
        lambda a, b: torch.max(a.sigmoid(), b),
        lambda a, b: a**3,
        lambda a, b: torch.div(a.sigmoid(), -0.5, rounding_mode="floor").neg(),
    ],
)
def test_neither(gate):
    node = traced(gate, x, y)
    assert not is_log_decay(node) and not is_decay(node)


class TestConstants:
    def test_a_literal_is_read(self):
        assert interval(traced(lambda a: torch.tensor([-0.5, -0.25]) * torch.ones(2), x)) == (-0.5, -0.25)

    def test_a_buffer_or_what_was_closed_over_is_not(self):
        """Anyone may write to it."""
        slopes = torch.tensor([-0.5, -0.25])
        assert interval(traced(lambda a: slopes * torch.ones(2), x)) == (-INF, INF)

    def test_a_parameter_is_not(self):
        slopes = torch.nn.Parameter(-torch.ones(2))
        assert interval(traced(lambda a: slopes * torch.ones(2), x)) == (-INF, INF)

    def test_nor_is_what_the_graph_writes_to(self):
        node = traced(lambda a: torch.tensor([-0.5]) * a.sigmoid(), x)
        constant = next(n for n in node.graph.nodes if n.op == "get_attr")
        assert is_log_decay(node)
        with node.graph.inserting_after(node):
            node.graph.call_function(torch.ops.aten.copy_.default, (constant, node))
        assert not is_log_decay(node)

    @pytest.mark.parametrize("bad", [float("nan"), INF])
    def test_of_odd_values(self, bad):
        assert interval(traced(lambda a: torch.tensor([-1.0, bad]) * torch.ones(2), x))[1] == INF

    def test_under_a_fake_mode(self):
        node = traced(lambda a: torch.tensor([-0.5]) * torch.ones(1), x)
        with torch._subclasses.FakeTensorMode():
            assert interval(node) == (-0.5, -0.5)

    def test_in_a_dtype_that_rounds_it_up(self):
        """0.1 is more than 0.1 in bfloat16."""
        low, high = interval(traced(lambda a: torch.full((1,), 0.1, dtype=torch.bfloat16), x))
        assert low <= 0.1 < torch.tensor(0.1, dtype=torch.bfloat16).item() <= high


class TestIntegers:
    def test_wrap_around(self):
        n = torch.zeros(3, dtype=torch.int32)
        assert interval(traced(lambda n: n.abs(), n)) == (-(2.0**31), 2.0**31 - 1)
        assert interval(traced(lambda n: n * n, n)) == (-(2.0**31), 2.0**31 - 1)

    def test_bounded(self):
        assert interval(traced(lambda a: torch.arange(5) * 2 + 1, x))[0] == 1

    def test_booleans(self):
        assert interval(traced(lambda a: a > 0, x)) == (0, 1)

    def test_nan_becomes_some_integer(self):
        assert interval(traced(lambda a: a.sigmoid().int(), x)) == (-(2.0**31), 2.0**31 - 1)

    def test_cast_of_what_does_not_fit(self):
        assert interval(traced(lambda a: a.exp().int(), x)) == (-(2.0**31), 2.0**31 - 1)


def test_known_bounds_are_kept_and_used():
    node = traced(lambda a, b: -torch.exp(b) * F.softplus(a), x, y)
    known = {}
    assert is_log_decay(node, known) and node in known
    known[node] = (1.0, 2.0)
    assert not is_log_decay(node, known)


def test_without_known_bounds_a_changed_graph_is_seen():
    node = traced(lambda a: -a.exp(), x)
    assert is_log_decay(node)
    node.args = (node.args[0].args[0],)
    assert not is_log_decay(node)


def test_what_has_no_bounds_is_not_looked_into():
    node = traced(lambda a: (a.exp() @ a.T).sigmoid(), x)
    known = {}
    interval(node, known)
    assert len(known) == 2


def test_shared_and_deep_graphs_are_linear():
    def f(a):
        for _ in range(sys.getrecursionlimit() + 50):
            a = a + a
        return a

    assert interval(traced(f, x)) == (-INF, INF)


UNARY = [
    torch.exp, torch.sigmoid, F.softplus, torch.neg, F.logsigmoid, torch.abs, torch.square, torch.reciprocal,
    torch.rsqrt, torch.sqrt, torch.tanh, torch.log, torch.log1p, torch.expm1, torch.exp2, torch.relu, torch.erf,
    torch.sin, torch.trunc, lambda a: a.logcumsumexp(0), lambda a: a.max(0, keepdim=True)[0],
    lambda a: a**2, lambda a: a**3, lambda a: a**-1, lambda a: a**0.5, lambda a: 2.0**a, lambda a: 0.3**a,
    lambda a: 1 - a, lambda a: 1 / a, lambda a: a / 3, lambda a: a * 0.1, lambda a: -0.7 * a, lambda a: a + 0.1,
    lambda a: a - 1e-3, lambda a: torch.sub(1.5, a, alpha=2), lambda a: a * a, lambda a: a - a,
    lambda a: a.clamp(-1, 0.3), lambda a: a.clamp(max=0), lambda a: a.clamp_min(0.1), lambda a: a.cumsum(0),
    lambda a: a.mean(0, keepdim=True), lambda a: a.sum(-1, keepdim=True), lambda a: a.tril(), lambda a: a.cumprod(-1),
    lambda a: a.softmax(-1), lambda a: F.pad(a, (1, 0), value=-0.3)[..., 1:], lambda a: a.flip(0), lambda a: a[:, 1:2],
    lambda a: a.bfloat16(), lambda a: a.half().float(), lambda a: a.double(), lambda a: a.transpose(0, 1),
    lambda a: a.int(), lambda a: (a * 3).to(torch.int8), lambda a: a > 0, lambda a: a.amax(0, keepdim=True),
    lambda a: torch.full_like(a, 0.1), lambda a: a.masked_fill(a > 0, -0.2), lambda a: a.log_softmax(0),
    lambda a: torch.linalg.vector_norm(a, dim=-1, keepdim=True), lambda a: F.softplus(a, 2.0, 0.5), torch.silu
    if hasattr(torch, "silu") else F.silu,
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum,
    lambda a, b: torch.where(a > b, a, b), lambda a, b: torch.cat([a, b])[:1], lambda a, b: torch.add(a, b, alpha=-0.5),
    lambda a, b: torch.clamp(a, max=b), lambda a, b: torch.clamp(a, min=b), lambda a, b: torch.rsub(a, b),
]  # fmt: skip


@st.composite
def trees(draw):
    """A program on a stack of values: (position of the function, operands from the end)."""
    steps = draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 999), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=7
        )
    )
    return steps


def evaluate(steps, inputs):
    values = list(inputs)
    for binary, which, i, j in steps:
        a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
        try:
            values.append(BINARY[which % len(BINARY)](a, b) if binary else UNARY[which % len(UNARY)](a))
        except (RuntimeError, IndexError):  # shapes that do not fit, integers where floats are wanted
            continue
    return values


class Recorder(fx.Interpreter):
    def __init__(self, gm):
        super().__init__(gm)
        self.known, self.outside = {}, []

    def run_node(self, n):
        try:
            result = super().run_node(n)
        except (RuntimeError, IndexError):  # failed when traced too, so nothing reads it
            assert not n.users
            return None
        if isinstance(result, torch.Tensor) and not result.is_complex():
            low, high = interval(n, self.known)
            values = result.double()
            values = values[~values.isnan()]
            if values.numel() and not (low <= values.min() and values.max() <= high):
                self.outside.append(f"{n} in [{values.min()}, {values.max()}], not in [{low}, {high}]\n{n.graph}")
        return result


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees(), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
def test_no_value_leaves_its_interval(steps, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(2, 2, generator=generator) * torch.tensor([[1, 30], [1e-4, 1e3]])
    b = torch.randn(2, 2, generator=generator).exp()
    b[0, 0] = 0.0
    inputs = [a.to(dtype), -b.to(dtype), torch.randint(-5, 6, (2, 2), generator=generator)]
    gm = make_fx(lambda *xs: evaluate(steps, xs), tracing_mode="real")(*inputs)
    recorder = Recorder(gm)
    recorder.run(*inputs)
    assert not recorder.outside, recorder.outside[0]
