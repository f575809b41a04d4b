"""The numeric self-check: what it accepts, what it refuses and in which words, and that it leaves no trace."""

import sys
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lattn_compile.passes.spelled import verify as module
from lattn_compile.passes.spelled.analytic import vet
from lattn_compile.passes.spelled.proposal import Proposal
from lattn_compile.passes.spelled.scaled import real
from lattn_compile.passes.spelled.subgraph import Rejected, extract, run
from lattn_compile.passes.spelled.verify import TOLERANCE, verify
from lattn_compile.passes.spelled.writer import Writer

aten = torch.ops.aten
DEFAULT = {"B": 2, "T": 3, "H": 2, "K": 4, "V": 6}


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch):
    monkeypatch.setattr(module, "_VERDICTS", type(module._VERDICTS)())


def loop(q, k, v, g, beta, S, *, decay=lambda g: g.exp(), write=lambda k: k, state=lambda S: S, out=lambda o: o):
    """The delta rule, with a hook at every place where a spelling may differ."""
    o = []
    for t in range(q.shape[1]):
        S = state(S) * decay(g[:, t])[..., None, None]
        u = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        S = S + write(k[:, t])[..., None] * u[:, :, None, :]
        o.append((S * q[:, t, :, :, None]).sum(-2))
    return out(torch.stack(o, 1)), S


def flat(q, k, v, g, beta, S):
    """Heads in the batch: reshapes merge and split what is scaled."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    S = S.reshape(B * H, K, V)
    o = []
    for t in range(T):
        kt = k[:, t].reshape(B * H, K, 1)
        S = g[:, t].exp().reshape(B * H, 1, 1) * S
        d = v[:, t].reshape(B * H, 1, V) - torch.bmm(kt.transpose(1, 2), S)
        S = torch.baddbmm(S, kt, d * beta[:, t].reshape(B * H, 1, 1))
        o.append(torch.bmm(q[:, t].reshape(B * H, 1, K), S).reshape(B, H, V))
    return torch.stack(o, 1), S.reshape(B, H, K, V)


def trace(f, *, tracing="fake", dtype=torch.float32, device="cpu", **dims):
    d = {**DEFAULT, **dims}
    B, T, H, K, V = (d[x] for x in "BTHKV")
    shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H), (B, H, K, V)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(s, dtype=dtype, device=device) for s in shapes]
    if tracing == "symbolic":
        inputs, tracing = [torch.zeros(s, dtype=dtype) for s in shapes], "symbolic"
    else:
        tracing = "real"
    return make_fx(torch.func.functionalize(lambda q, k, v, g, beta, S: f(q, k, v, g, beta, S)), None, tracing)(*inputs)


def claim(f, *, rule="delta", scale=1.0, args=lambda w, a: a, new=lambda w, o, s: (o, s), domains=True, **how):
    """A proposal that `f` is `lattn::decode`; `args` and `new` change what it is given and what is made of it."""
    gm = trace(f, **how)
    out = gm.graph.output_node()
    old = list(out.args[0])
    inputs = gm.graph.find_nodes(op="placeholder")
    w = Writer(out, old[0])
    q, k, v, g, beta, state = args(w, list(inputs))
    op = w.call(torch.ops.lattn.decode.default, q, k, v, g, beta, state, None, None, None, None, rule=rule, scale=scale)
    made = list(new(w, w.getitem(op, 0), w.getitem(op, 1)))
    kinds = {inputs[1]: "key", inputs[3]: "log_decay", inputs[4]: "beta"} if domains else {}
    p = Proposal("loop", rule, "head", op, op, list(inputs), old, made, w.inserted, domains=kinds)
    p.module = gm  # the graph holds it by a weak reference only
    return p


def refused(p, *words):
    result = verify(p)
    assert not result.ok and result.detail
    for word in words:
        assert word in result.detail, result.detail
    return result


class TestAccepts:
    @pytest.mark.parametrize("tracing", ["fake", "symbolic"])
    @pytest.mark.parametrize("f", [loop, flat])
    def test_right_rewrite(self, f, tracing):
        result = verify(claim(f, tracing=tracing))
        assert result.ok, result.detail
        errors = result.evidence["max_relative_error"]
        assert 0 < errors["gradient"] < TOLERANCE and errors["value"] < TOLERANCE
        assert result.evidence.get("other_sizes", False) == (tracing == "symbolic")
        assert result.evidence["shapes"] == "real" and result.evidence["trials"] == ["gentle", "strong", "wide"]

    def test_low_precision_is_the_identity(self):
        def f(*a):
            return loop(*a, state=lambda S: S.bfloat16().float(), decay=lambda g: g.half().exp().float())

        assert verify(claim(f)).ok

    def test_low_precision_graph(self):
        def new(w, o, s):
            return o, w.to(s, torch.bfloat16)

        assert verify(claim(loop, dtype=torch.bfloat16, new=new)).ok

    def test_what_is_proven_of_a_value_counts(self):
        """The claim takes a logarithm of a value that no word is said about; it is never negative."""

        def f(q, k, v, g, beta, S):
            return loop(q, k, v, g.sigmoid(), beta, S, decay=lambda p: p)

        def args(w, a):
            p = next(n for n in a[3].users if n.target is aten.sigmoid.default)
            return [*a[:3], w.call(aten.log.default, p), *a[4:]]

        p = claim(f, args=args, domains=False)
        p.frontier[3] = next(iter(p.frontier[3].users))
        assert verify(p).ok, verify(p).detail

    def test_masks_of_ranges_and_a_preallocated_output(self):
        def f(q, k, v, g, beta, S):
            o = torch.empty_like(v)
            keep = torch.arange(q.shape[1]) >= 0
            for t in range(q.shape[1]):
                S = S * g[:, t].exp()[..., None, None]
                u = (v[:, t] - (S * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
                S = torch.where(keep[t], S + k[:, t, :, :, None] * u[:, :, None, :], S)
                o[:, t] = (S * q[:, t, :, :, None]).sum(-2)
            return o, S

        p = claim(f)
        assert verify(p).ok, verify(p).detail

    def test_output_that_is_never_written_is_noticed(self):
        def f(q, k, v, g, beta, S):
            o, S = loop(q, k, v, g, beta, S)
            held = torch.empty_like(v)
            held[:, 1:] = o[:, 1:]
            return held, S

        refused(claim(f), "not finite")

    def test_graph_for_another_device(self):
        """Nothing may be put there: it may not exist here."""
        p = claim(lambda *a: loop(*a, out=lambda o: o + torch.zeros(o.shape, device=o.device)), device="meta")
        assert p.frontier[0].meta["val"].device.type == "meta"
        assert verify(p).ok, verify(p).detail

    def test_integers_divided(self):
        """In the graph it is a float32; here it must not be rounded to one."""
        p = claim(lambda *a: loop(*a, out=lambda o: o * (torch.arange(1, 2) / 3)), scale=1 / 3)
        assert verify(p).ok, verify(p).detail


class TestRefuses:
    def test_beta_on_one_side_only(self):
        def f(q, k, v, g, beta, S):
            o = []
            for t in range(q.shape[1]):
                S = S * g[:, t].exp()[..., None, None]
                u = v[:, t] * beta[:, t, :, None] - (S * k[:, t, :, :, None]).sum(-2)
                S = S + k[:, t, :, :, None] * u[:, :, None, :]
                o.append((S * q[:, t, :, :, None]).sum(-2))
            return torch.stack(o, 1), S

        refused(claim(f), "value", "differs by")

    def test_scale(self):
        refused(claim(loop, scale=0.5), "differs")

    def test_swapped_key_heads(self):
        refused(claim(loop, args=lambda w, a: [a[0], w.call(aten.flip.default, a[1], [2]), *a[2:]]), "differs")

    def test_decay_taken_for_its_logarithm(self):
        refused(claim(lambda *a: loop(*a, decay=lambda g: g)), "differs")

    def test_write_along_another_key(self):
        refused(claim(lambda *a: loop(*a, write=lambda k: k.roll(1, -1))), "differs")

    def test_first_token_only(self):
        """Gentle decays: an initial state that is forgotten slowly still counts at the end."""
        zeros = lambda w, a: [*a[:5], w.call(aten.zeros_like.default, a[5])]  # noqa: E731
        refused(claim(loop, T=24, args=zeros), "differs")

    def test_a_millionth(self):
        refused(claim(lambda *a: loop(*a, out=lambda o: o * (1 + 1e-6))), "differs by")

    def test_another_gradient(self):
        """Values agree to the bit: x - x is nothing, but not to a gradient that is cut."""

        def new(w, o, s):
            cut = w.call(aten.detach.default, o)
            return w.call(aten.add.Tensor, w.call(aten.sub.Tensor, o, o), cut), s

        refused(claim(loop, new=new), "detach")

    def test_equal_for_the_drawn_signs_only(self):
        """A beta is drawn from (0, 1), where sqrt(beta * beta) is beta."""
        refused(claim(lambda q, k, v, g, beta, S: loop(q, k, v, g, (beta * beta).sqrt(), S)), "value")

    def test_equal_for_the_traced_size_only(self):
        """At two tokens the inverse of 1 + A has two terms, and a series may end there."""

        def f(q, k, v, g, beta, S):
            g, k, v, beta, q = g.cumsum(1), *(x.transpose(1, 2) for x in (k, v, beta[..., None], q))
            g = g.transpose(1, 2)
            decay = torch.exp(g[..., :, None] - g[..., None, :])
            A = (beta * (k @ k.mT) * decay).tril(-1)
            S_k = g.exp()[..., None] * (k @ S)
            u = beta * (v - S_k)
            u = u - A @ u
            o = g.exp()[..., None] * (q @ S) + ((q @ k.mT) * decay).tril() @ u
            last = g[..., -1:]
            S = last.exp()[..., None] * S + (k * (last - g).exp()[..., None]).mT @ u
            return o.transpose(1, 2), S

        assert verify(claim(f, T=2)).ok
        refused(claim(f, T=2, tracing="symbolic"), "differs")
        refused(claim(f, T=3), "differs")

    def test_dtype(self):
        refused(claim(loop, new=lambda w, o, s: (o, w.to(s, torch.bfloat16))), "torch.float32", "torch.bfloat16")

    @pytest.mark.parametrize(
        ("out", "word"),
        [
            (lambda o: o.detach(), "detach cuts the gradient"),
            (lambda o: o.clamp(-1e9, 1e9), "differs"),
            (lambda o: o.relu(), "differs"),
            (lambda o: o.abs(), "differs"),
            (lambda o: o.maximum(o), "maximum"),
            (lambda o: o.sort(-1)[0], "sort"),
            (lambda o: o.topk(o.shape[-1], -1)[0], "topk"),
            (lambda o: o.round(), "round"),
            (lambda o: torch.where(o > 1e9, o + 1, o), "gt"),
            (lambda o: o * (o < 1e9), "lt"),
            (lambda o: o.int().float(), "integers of floating data"),
            (lambda o: torch.div(o, 1, rounding_mode="floor"), "rounds"),
            (lambda o: torch.nn.functional.softplus(o, threshold=0.1), "threshold"),
            (lambda o: o / torch.linalg.vector_norm(o, 1, -1, True), "order"),
            (lambda o: torch.nn.functional.dropout(o, 0.5), "random"),
            (lambda o: o + torch.rand(1), "random"),
            (lambda o: torch.fft.ifft(torch.fft.fft(o)).real, "fft"),
            (lambda o: o.view(torch.int32).view(torch.float32), "view as another dtype"),
        ],
    )
    def test_what_random_numbers_do_not_prove(self, out, word):
        refused(claim(lambda *a: loop(*a, out=out)), word)

    def test_no_grad_region(self):
        p = claim(loop)
        graph = p.old[0].graph
        middle = list(graph.nodes)[9]
        with graph.inserting_before(middle):
            graph.call_function(torch._C._set_grad_enabled, (False,))
        with graph.inserting_after(middle):
            graph.call_function(torch._C._set_grad_enabled, (True,))
        refused(p, "without gradients", str(middle))

    def test_all_in_a_no_grad_region(self):
        p = claim(loop)
        graph = p.old[0].graph
        with graph.inserting_before(graph.find_nodes(op="placeholder")[0]):
            graph.call_function(torch._C._set_grad_enabled, (False,))
        result = verify(p)
        assert result.ok and result.evidence["gradients"].startswith("none")

    def test_missing_frontier_entry(self):
        p = claim(loop)
        beta = p.frontier.pop(4)
        refused(p, f"graph input {beta}")

    def test_shape_of_what_is_not_on_the_frontier(self):
        """Only its shape is read, so it need not be."""
        p = claim(lambda q, k, v, g, beta, S: loop(q, k, v, g, beta, torch.zeros_like(S) + S.new_zeros(1) + S * 0))
        assert verify(p).ok is False  # decode still starts at S
        p = claim(
            lambda q, k, v, g, beta, S: loop(q, k, v, g, beta, torch.zeros_like(S)),
            args=lambda w, a: [*a[:5], None],
        )
        del p.frontier[5]
        assert verify(p).ok, verify(p).detail

    def test_unknown_operator(self):
        def new(w, o, s):
            return o, w.call(torch.ops.lattn.qdq_state.default, s, state_format="int8")

        refused(claim(loop, new=new), "qdq_state")

    def test_rounding_op(self):
        p = claim(loop)
        p.op.kwargs = {**p.op.kwargs, "write": "token", "state_format": "int8"}
        refused(p, "rounds its state")

    def test_a_run_that_raises(self, monkeypatch):
        def fails(*a):
            raise RuntimeError("no memory\nand more")

        monkeypatch.setattr(module, "run", fails)
        refused(claim(loop), "raised RuntimeError: no memory")
        assert not module._VERDICTS  # may well succeed the next time


class TestLoops:
    def claim_scan(self, body_scale=1.0):
        from torch._higher_order_ops.scan import scan

        def f(q, k, v, g, beta, S):
            def step(S, x):
                q, k, v, g, beta = x
                S = S * g.exp()[..., None, None]
                u = (v - (S * k[..., None]).sum(-2)) * beta[..., None]
                S = S + body_scale * k[..., None] * u[:, :, None, :]
                return S, (S * q[..., None]).sum(-2)

            S, o = scan(step, S, tuple(x.transpose(0, 1) for x in (q, k, v, g, beta)), dim=0)
            return o.transpose(0, 1), S

        B, T, H, K, V = DEFAULT.values()
        shapes = [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, T, H), (B, H, K, V)]
        gm = make_fx(f, tracing_mode="fake")(*(torch.zeros(s) for s in shapes))
        out = gm.graph.output_node()
        inputs = gm.graph.find_nodes(op="placeholder")
        w = Writer(out, out.args[0][0])
        op = w.call(torch.ops.lattn.decode.default, *inputs, None, None, None, None, rule="delta", scale=1.0)
        kinds = {inputs[1]: "key", inputs[3]: "log_decay", inputs[4]: "beta"}
        new = [w.getitem(op, 0), w.getitem(op, 1)]
        p = Proposal("scan", "delta", "head", op, op, list(inputs), list(out.args[0]), new, w.inserted, domains=kinds)
        p.module = gm
        return p

    def test_scan(self):
        p = self.claim_scan()
        assert verify(p).ok, verify(p).detail
        assert verify(p).evidence["cached"]

    def test_scan_with_a_wrong_body(self):
        refused(self.claim_scan(body_scale=1.001), "differs")

    @staticmethod
    def while_region(condition):
        def f(k, S):
            def body(i, S, k):
                return i + 1, S * 0.9 + torch.index_select(k, 0, i)[0][..., None]

            start = (torch.zeros(1, dtype=torch.long), S)
            return torch.ops.higher_order.while_loop(condition, body, start, (k,))[1]

        gm = make_fx(f, tracing_mode="fake")(torch.zeros(5, 2, 3), torch.zeros(2, 3, 4))
        return gm, extract(gm.graph.output_node().all_input_nodes, gm.graph.find_nodes(op="placeholder"))

    def test_while_loop(self):
        _gm, region = self.while_region(lambda i, S, k: (i < 5)[0])
        vet(region, region.inputs)
        k, S = torch.randn(5, 2, 3).double(), torch.randn(2, 3, 4).double()
        (found,) = run(region, [k, S], real, {})
        for t in range(5):
            S = S * 0.9 + k[t][..., None]
        assert torch.allclose(found, S, rtol=1e-12)

    def test_while_data_say_so(self):
        _gm, region = self.while_region(lambda i, S, k: S.sum() < 5)
        with pytest.raises(Rejected, match="lt of data"):
            vet(region, region.inputs)


class TestLeavesNoTrace:
    def test_random_state(self):
        before = torch.get_rng_state()
        verify(claim(loop))
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize(
        "around",
        [
            lambda: FakeTensorMode(),
            lambda: torch.device("meta"),
            lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            lambda: torch.no_grad(),
            lambda: torch.inference_mode(),
            lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: 1 / 0, lambda x: 1 / 0),
        ],
        ids=["fake", "device", "autocast", "no_grad", "inference_mode", "hooks"],
    )
    def test_inside(self, around):
        p = claim(loop)
        with around():
            result = verify(p)
        assert result.ok, result.detail
        assert result.evidence["max_relative_error"]["gradient"] < TOLERANCE

    def test_inside_a_trace(self):
        p = claim(loop)
        found = []
        gm = make_fx(lambda x: (found.append(verify(p)), x + 1)[1], tracing_mode="fake")(torch.zeros(2))
        assert found[0].ok, found[0].detail
        assert len(gm.graph.nodes) == 3

    def test_inside_functorch(self):
        p = claim(loop)
        found = []
        torch.func.grad(lambda x: (found.append(verify(p)), x.sum())[1])(torch.zeros(2))
        assert found[0].ok, found[0].detail

    def test_inside_a_backend(self):
        p = claim(loop)
        found = []

        def backend(gm, inputs):
            found.append(verify(p))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
        assert found[0].ok, found[0].detail

    def test_the_graph(self):
        p = claim(loop)
        before = str(p.old[0].graph)
        verify(p)
        assert str(p.old[0].graph) == before

    def test_default_dtype(self):
        torch.set_default_dtype(torch.float16)
        try:
            assert verify(claim(lambda *a: loop(*a, out=lambda o: o * torch.full((1,), 1.0)))).ok
        finally:
            torch.set_default_dtype(torch.float32)


class TestCost:
    def test_equal_claims_are_run_once(self, monkeypatch):
        runs = Counter()
        monkeypatch.setattr(module, "run", lambda *a: runs.update(n=1) or run(*a))
        first, second = verify(claim(loop)), verify(claim(loop))
        assert first.ok and second.ok and runs["n"] == 6  # old and new, three trials
        assert "cached" not in first.evidence and second.evidence["cached"]
        assert second.evidence["max_relative_error"] == first.evidence["max_relative_error"]

    @pytest.mark.parametrize(
        "other",
        [{"scale": 0.5}, {"T": 4}, {"dtype": torch.bfloat16}, {"domains": False}],
        ids=lambda x: next(iter(x)),
    )
    def test_other_claims_are_not_taken_for_equal(self, other):
        verify(claim(loop))
        assert "cached" not in verify(claim(loop, **other)).evidence

    def test_constants_count(self):
        def f(x):
            return lambda *a: loop(*a, out=lambda o: o * torch.tensor([x]))

        assert verify(claim(f(2.0), scale=2.0)).ok
        refused(claim(f(2.5), scale=2.0), "differs")

    def test_bounded(self, monkeypatch):
        monkeypatch.setattr(module, "_KEPT", 2)
        for T in (1, 2, 3):
            verify(claim(loop, T=T))
        assert len(module._VERDICTS) == 2

    @pytest.mark.parametrize("f", [loop, flat])
    @pytest.mark.parametrize("tracing", ["fake", "symbolic"])
    def test_large_sizes_are_scaled(self, f, tracing, monkeypatch):
        monkeypatch.setattr(module, "_GRADIENT_BYTES", 200_000)
        dims = {"B": 16, "H": 8, "K": 16, "V": 16, "tracing": tracing}
        result = verify(claim(f, **dims))
        assert result.ok and result.evidence["shapes"] == "scaled", result
        assert result.evidence["max_relative_error"]["gradient"] < TOLERANCE
        refused(claim(f, scale=0.99, **dims), "differs")

    def test_large_and_not_to_be_scaled(self, monkeypatch):
        """Sequences one by one: the batch is cut, so values only."""
        monkeypatch.setattr(module, "_GRADIENT_BYTES", 100_000)

        def f(*a):
            o, S = zip(*(loop(*(x[b : b + 1] for x in a)) for b in range(a[0].shape[0])), strict=True)
            return torch.cat(o), torch.cat(S)

        result = verify(claim(f, B=8, H=2, K=8, V=8))
        assert result.ok, result.detail
        assert result.evidence["shapes"] == "real" and result.evidence["gradients"] == "not run: size"

    def test_too_large(self, monkeypatch):
        monkeypatch.setattr(module, "_GRADIENT_BYTES", 100)
        monkeypatch.setattr(module, "_VALUE_BYTES", 100)
        refused(claim(loop), "too large")

    def test_the_size_is_not_guarded(self):
        p = claim(loop, tracing="symbolic")
        env = p.frontier[0].meta["val"].fake_mode.shape_env
        before = len(env.guards)
        verify(p)
        assert len(env.guards) == before


class TestParameters:
    def test_other_values_of_a_parameter_count(self):
        """A parameter that is zero now adds nothing now."""
        bias = torch.nn.Parameter(torch.zeros(1))
        refused(claim(lambda *a: loop(*a, out=lambda o: o + bias)), "differs")


def test_deep_graphs_do_not_recurse():
    def f(*a):
        o, S = loop(*a)
        for _ in range(sys.getrecursionlimit() + 100):
            o = o + 0
        return o, S

    assert verify(claim(f, T=1)).ok
