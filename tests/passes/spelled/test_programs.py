"""Whole programs with spelled-out layers through the graph API, the backend and the command line.

The model is a small hybrid: a Gated DeltaNet layer and a Kimi Delta Attention layer, each a loop over tokens in its own
words, between an embedding, projections and gates.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lattn_compile as lc
from lattn_compile import backend, cli
from lattn_compile.passes.context import nodes_of
from lattn_compile.report import Report
from lattn_compile.testing.backend import recorded
from tests.passes.spelled.harness import worst_error

FULL = os.environ.get("LATTN_CORPUS") == "full"
ROOT = Path(__file__).parents[3]
B, T, WORDS, WIDTH, H, K, V = 2, 3, 11, 8, 2, 4, 6

# Tracers say what they do not like about buffers and .grad; none of it is about the rewrite.
pytestmark = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    """Projections and gates; `mix` is the recurrence. With `policy` it is the library's op instead, to compare with."""

    def __init__(self, decay: int) -> None:
        super().__init__()
        self.decay = decay
        self.qk, self.v, self.gates = nn.Linear(WIDTH, 2 * H * K), nn.Linear(WIDTH, H * V), nn.Linear(WIDTH, H * decay)
        self.A_log, self.beta = nn.Parameter(torch.linspace(-1, 0.5, H)), nn.Linear(WIDTH, H)
        self.out = nn.Linear(H * V, WIDTH, bias=False)
        self.policy: str | None = None

    def forward(self, x: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        q, k = F.normalize(self.qk(x).unflatten(-1, (2, H, K)), dim=-1).unbind(2)
        g = -self.A_log.exp()[:, None] * F.softplus(self.gates(x).unflatten(-1, (H, self.decay)))
        v, beta = self.v(x).unflatten(-1, (H, V)), self.beta(x).sigmoid()
        g = g.squeeze(-1) if self.decay == 1 else g
        if self.policy is None:
            o, S = self.mix(q, k, v, g, beta, S)
        else:
            o, state = lc.linear_attention(
                q, k, v, g, beta, initial_state=S, output_final_state=True, policy=self.policy, scale=self.scale
            )
            S = state.dense()
        return self.out(o.flatten(2)), S

    scale = 1.0

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Gdn(Layer):
    """One decay a head; state [B, H, K, V]."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        o = []
        for t in range(q.shape[1]):
            S = S * g[:, t, :, None, None].exp()
            u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
            S = S + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
            o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return torch.stack(o, 1), S


class Kda(Layer):
    """One decay a key channel; state kept as [B, H, V, K], handed in and out as [B, H, K, V]."""

    scale = K**-0.5

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        S, o = S.mT, []
        for t in range(q.shape[1]):
            S = S * g[:, t].exp().unsqueeze(-2)
            u = beta[:, t, :, None] * (v[:, t] - (S @ k[:, t].unsqueeze(-1)).squeeze(-1))
            S = S + u.unsqueeze(-1) @ k[:, t].unsqueeze(-2)
            o.append((S @ q[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(o, 1) * self.scale, S.mT


class Hybrid(nn.Module):
    """States are inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.gdn, self.kda = Gdn(1), Kda(K)

    def forward(self, ids: Tensor, S: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids)
        y, S = self.gdn(x, S)
        x = x + y
        y, R = self.kda(self.norm(x), R)
        return self.head(x + y), S, R


class Checkpointed(Hybrid):
    """Each layer's activations are computed again in the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, ids: Tensor, S: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids)
        y, S = checkpoint(self.gdn, x, S, use_reentrant=self.use_reentrant)
        x = x + y
        y, R = checkpoint(self.kda, self.norm(x), R, use_reentrant=self.use_reentrant)
        return self.head(x + y), S, R


class Stateful(nn.Module):
    """States are buffers, written to at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Hybrid()
        self.register_buffer("S", torch.zeros(B, H, K, V))
        self.register_buffer("R", torch.zeros(B, H, K, V))

    def forward(self, ids: Tensor) -> Tensor:
        logits, S, R = self.model(ids, self.S, self.R)
        self.S.copy_(S)
        self.R.copy_(R)
        return logits


SITES = [("gdn", "delta", "head"), ("kda", "delta", "channel")]


def model(policy: str | None = None, cls: Callable[[], nn.Module] = Hybrid) -> nn.Module:
    """The same weights at every call; with `policy`, the library's op in place of the loops."""
    torch.manual_seed(0)
    made = cls()
    for module in made.modules():
        if isinstance(module, Layer):
            module.policy = policy
    return made


def inputs(batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    state = lambda: torch.randn(batch, H, K, V, generator=draw)  # noqa: E731
    return torch.randint(0, WORDS, (batch, T), generator=draw), state(), state()


def loss(outputs: Sequence[Tensor]) -> Tensor:
    return sum((x.square().mean() for x in outputs), torch.zeros(()))


def step(run: Callable[..., Any], weights: dict[str, Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of the states and of the weights in the order of their names."""
    ids, *states = args
    states = [x.clone().requires_grad_() for x in states]
    outputs = run(ids, *states)
    found = torch.autograd.grad(loss(outputs), [*states, *(weights[n] for n in sorted(weights))])
    return [*(x.detach() for x in outputs), *found]


def eager(policy: str | None = None, batch: int = B) -> list[Tensor]:
    plain = model(policy)
    return step(plain, dict(plain.named_parameters()), inputs(batch))


def found(report: Report) -> list[tuple[str, str, str]]:
    return [(s.kind, s.rule, s.decay) for s in report.rewritten]


def lattn_ops(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in nodes_of(module) if str(n.target).startswith("lattn.")]


# --- what may be rewritten --------------------------------------------------------------------------------------------


@dataclass
class Traced:
    """A traced model. `step(rewritten, args)` is `step` above of what came of `target`."""

    target: fx.GraphModule | ExportedProgram
    step: Callable[[Any, Sequence[Tensor]], list[Tensor]]
    results: dict[str, lc.RewriteResult] = field(default_factory=dict)

    def rewrite(self, policy: str) -> lc.RewriteResult:
        if policy not in self.results:
            self.results[policy] = lc.rewrite(self.target, policy)
        return self.results[policy]


def graph_module_of(program: fx.GraphModule | ExportedProgram) -> fx.GraphModule:
    return program.graph_module if isinstance(program, ExportedProgram) else program


def export(strict: bool = False, dynamic: bool = False, cls: Callable[[], nn.Module] = Hybrid) -> ExportedProgram:
    torch._dynamo.reset()
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    return torch.export.export(
        model(cls=cls), inputs(), strict=strict, dynamic_shapes=(batch, batch, batch) if dynamic else None
    )


# A rewrite leaves a program as it was, so that tests can share one; they do not train it.
exported = functools.cache(export)


def _by_export(strict: bool, dynamic: bool) -> Traced:
    def run(program: ExportedProgram, args: Sequence[Tensor]) -> list[Tensor]:
        module = program.module()
        return step(module, dict(module.named_parameters()), args)

    return Traced(exported(strict, dynamic), run)


def _by_make_fx(mode: str) -> Traced:
    plain = model()
    weights = dict(plain.named_parameters())

    def call(weights: dict[str, Tensor], *args: Tensor) -> Any:
        return torch.func.functional_call(plain, weights, args)

    traced = make_fx(call, tracing_mode=mode, pre_dispatch=True)(weights, *inputs())
    return Traced(traced, lambda gm, args: step(lambda *xs: gm(weights, *xs), weights, args))


def _by_dynamo(dynamic: bool) -> Traced:
    torch._dynamo.reset()
    taken: list[fx.GraphModule] = []
    instead: list[Any] = []

    def take(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        taken.append(gm)
        return lambda *args: (instead or taken)[-1](*args)

    plain = model()
    compiled = torch.compile(plain, backend=take, fullgraph=True, dynamic=dynamic)

    def run(gm: Any, args: Sequence[Tensor]) -> list[Tensor]:
        instead[:] = [gm]
        return step(compiled, dict(plain.named_parameters()), args)

    ids, S, R = inputs()
    compiled(ids, S.requires_grad_(), R.requires_grad_())
    (gm,) = taken
    return Traced(gm, run)


TRACERS: dict[str, Callable[[], Traced]] = {
    "export": lambda: _by_export(strict=False, dynamic=False),
    "export-strict": lambda: _by_export(strict=True, dynamic=False),
    "export-dynamic": lambda: _by_export(strict=False, dynamic=True),
    "export-strict-dynamic": lambda: _by_export(strict=True, dynamic=True),
    "make_fx-real": lambda: _by_make_fx("real"),
    "make_fx-fake": lambda: _by_make_fx("fake"),
    "make_fx-symbolic": lambda: _by_make_fx("symbolic"),
    "dynamo": lambda: _by_dynamo(dynamic=False),
    "dynamo-dynamic": lambda: _by_dynamo(dynamic=True),
}


@pytest.fixture(scope="module", params=TRACERS)
def traced(request: pytest.FixtureRequest) -> Traced:
    return TRACERS[request.param]()


def _looks(program: fx.GraphModule | ExportedProgram) -> tuple[str, list[Any], list[int], list[list[str]]]:
    """All of a program that a rewrite must not touch: text, tensors, which those are, what a node carries."""
    gm = graph_module_of(program)
    tensors = list(gm.parameters()) + list(gm.buffers())
    if isinstance(program, ExportedProgram):
        tensors = list(program.state_dict.values())
    meta = [sorted(f"{key}: {n.meta[key]}" for key in ("custom", "val", "example_value") if key in n.meta)
            for n in gm.graph.nodes]  # fmt: skip
    return gm.code + str(gm.graph), [x.detach().clone() for x in tensors], [id(x) for x in tensors], meta


@pytest.mark.parametrize("policy", ["exact", "int8"])
def test_each_tracers_program_is_rewritten_and_left_as_it_was(traced: Traced, policy: str) -> None:
    text, tensors, which, meta = _looks(traced.target)
    result = traced.rewrite(policy)

    assert isinstance(result.module, ExportedProgram if isinstance(traced.target, ExportedProgram) else fx.GraphModule)
    assert found(result.report) == SITES
    assert {s.form for s in result.report.sites} == {"loop"}
    assert not result.report.unmatched
    after = graph_module_of(result.module)
    assert len(lattn_ops(after)) == 2
    assert not any("einsum" in str(n.target) or "matmul" in str(n.target) for n in nodes_of(after))
    assert worst_error(traced.step(result.module, inputs()), eager(None if policy == "exact" else policy)) < 1e-5

    again = _looks(traced.target)
    assert (again[0], again[2], again[3]) == (text, which, meta)
    assert all(torch.equal(a, b) for a, b in zip(again[1], tensors, strict=True))


def _told(report: Report) -> list[dict[str, Any]]:
    """What a report says of its sites, but for how each was found and what stood there before."""
    past = ("evidence", "graph_before", "graph_after", "source")
    return [{key: value for key, value in s.to_dict().items() if key not in past} for s in report.sites]


@pytest.mark.parametrize("policy", ["exact", "int8"] if FULL else ["int8"])
def test_a_second_rewrite_changes_nothing(traced: Traced, policy: str) -> None:
    once = traced.rewrite(policy)
    twice = lc.rewrite(once.module, policy)
    assert str(graph_module_of(twice.module).graph) == str(graph_module_of(once.module).graph)
    assert _told(twice.report) == _told(once.report)
    assert twice.report.unmatched == once.report.unmatched


@pytest.mark.parametrize("strict", [False, True])
def test_a_batch_that_was_dynamic_stays_so(strict: bool) -> None:
    module = lc.rewrite(exported(strict, dynamic=True), "exact").module.module()
    for batch in (2, 7):
        got = step(module, dict(module.named_parameters()), inputs(batch))
        assert worst_error(got, eager(batch=batch)) < 1e-5


@pytest.mark.parametrize("pre_dispatch", [True, False])
@pytest.mark.parametrize(("cls", "decay"), [(Gdn, 1), (Kda, K)], ids=["gdn", "kda"])
def test_a_layer_whose_every_size_is_a_symbol(cls: type[Layer], decay: int, pre_dispatch: bool) -> None:
    torch.manual_seed(0)
    plain, x, S = cls(decay), torch.randn(B, T, WIDTH), inputs()[1]
    weights = dict(plain.named_parameters())

    def call(weights: dict[str, Tensor], *args: Tensor) -> Any:
        return torch.func.functional_call(plain, weights, args)

    traced = make_fx(call, tracing_mode="symbolic", pre_dispatch=pre_dispatch)(weights, x, S)
    once = lc.rewrite(traced, "exact")
    for result in (once, lc.rewrite(once.module, "exact")):
        assert [(s.form, s.op) for s in result.report.rewritten] == [("loop", "lattn::decode")]
        assert not result.report.unmatched
        assert worst_error(result.module(weights, x, S), plain(x, S)) < 1e-5


class Builtins(nn.Module):
    """Names of arguments that are Python's own, as many layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Hybrid()

    def forward(self, input: Tensor, sum: Tensor, max: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.model(input, sum, max)


def test_inputs_may_be_called_as_they_like() -> None:
    named = dict(zip(("input", "sum", "max"), inputs(), strict=True))
    program = torch.export.export(model(cls=Builtins), (), named)
    result = lc.rewrite(program, "exact")
    assert found(result.report) == SITES
    assert worst_error(result.module.module()(**named), model()(*inputs())) < 1e-5
    assert worst_error(lc.rewrite(result.module, "exact").module.module()(**named), model()(*inputs())) < 1e-5


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_module_of_a_program_is_rewritten_too(dynamic: bool) -> None:
    """torch puts a call that checks the inputs at its head."""
    program = exported(dynamic=dynamic)
    result = lc.rewrite(program.module(), "exact")
    assert found(result.report) == SITES
    assert [s.path for s in result.report.sites] == ["gdn", "kda"]
    assert not result.report.unmatched
    assert worst_error(step(result.module, dict(result.module.named_parameters()), inputs()), eager()) < 1e-5
    ids, S, R = inputs()
    for module in (program.module(), result.module):
        with pytest.raises(AssertionError, match="Guard failed"):
            module(ids, S[:, :1], R)


@pytest.mark.parametrize("path", ["kda", "gdn.out", "norm"])
def test_an_unflattened_program_computes_the_same(path: str) -> None:
    """`preserve_module_call_signature` names nodes of the graph, which a rewrite replaces."""
    program = torch.export.export(model(), inputs(), preserve_module_call_signature=(path,))
    result = lc.rewrite(program, "exact")
    assert found(result.report) == SITES
    for module in (result.module.module(), torch.export.unflatten(result.module)):
        assert worst_error(module(*inputs()), model()(*inputs())) < 1e-5


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("policy", ["exact", "int8"])
def test_states_in_buffers_are_written_back(policy: str, strict: bool) -> None:
    ids = inputs()[0]
    plain = model(None if policy == "exact" else policy, Stateful)
    with torch.no_grad():
        program = torch.export.export(model(cls=Stateful), (ids,), strict=strict)
        result = lc.rewrite(program, policy)
        assert found(result.report) == SITES
        assert [s.path for s in result.report.sites] == ["model.gdn", "model.kda"]
        assert not result.report.unmatched
        module = result.module.module()
        for _ in range(3):
            assert worst_error([module(ids), module.S, module.R], [plain(ids), plain.S, plain.R]) < 1e-5
    assert plain.S.any()


LEFT = lc.Recipe(rules=[("gdn", None), ("*", lc.Policy(lc.Int8()))])
FIRST = lc.Recipe(rules=[("gdn/*", lc.Policy(lc.Int8())), ("*", lc.Policy(write=lc.Exact()))])


@pytest.mark.parametrize(
    ("policy", "formats", "codes"),
    [
        (None, [None, None], [None, None]),
        ("exact", [None, None], [None, None]),
        ("int8", ["int8/*x64", "int8/*x64"], [None, None]),
        (LEFT, ["int8/*x64"], ["RULE_NONE", None]),
        (FIRST, ["int8/*x64", None], [None, None]),
        (lc.Recipe(rules=[("*", None)]), [], ["RULE_NONE", "RULE_NONE"]),
        (lc.Recipe(rules=[("kda*", lc.Policy())]), ["fp8_e4m3/*x64"], ["NO_RULE", None]),
    ],
    ids=["none", "exact", "int8", "gdn-left", "gdn-int8", "all-left", "no-rule"],
)
def test_policies_go_by_path(policy: Any, formats: list[str | None], codes: list[str | None]) -> None:
    program = exported()
    result = lc.rewrite(program, policy)
    assert [s.path for s in result.report.sites] == ["gdn", "kda"]
    assert [s.reason and s.reason.code for s in result.report.sites] == codes
    ops = lattn_ops(result.module.graph_module)
    assert [n.kwargs.get("state_format") for n in ops] == formats
    if all(fmt is None for fmt in formats):
        module = result.module.module()
        assert worst_error(step(module, dict(module.named_parameters()), inputs()), eager()) < 1e-5


# --- what becomes of a rewritten program ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewritten() -> ExportedProgram:
    """Any batch, int8."""
    return lc.rewrite(exported(dynamic=True), "int8").module


def _fresh_process(code: str, *args: Any, **env: str) -> str:
    """What Python prints that knows only where the library is."""
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env=paths)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_LOAD = """
import sys
{imports}
args, want = torch.load(sys.argv[2])
with torch.no_grad():
    got = {load}(*args)
print([torch.equal(a, b) for a, b in zip(got, want, strict=True)])
"""


@pytest.mark.parametrize("imports", ["import torch, lattn_compile", "import lattn_compile, torch"])
def test_a_saved_program_runs_in_a_process_that_imports_the_library(
    rewritten: ExportedProgram, imports: str, tmp_path: Path
) -> None:
    args = inputs(5)
    torch.export.save(rewritten, tmp_path / "program.pt2")
    torch.save((args, tuple(x.detach() for x in rewritten.module()(*args))), tmp_path / "run.pt")
    code = _LOAD.format(imports=imports, load="torch.export.load(sys.argv[1]).module()")
    assert _fresh_process(code, tmp_path / "program.pt2", tmp_path / "run.pt").split("\n")[0] == "[True, True, True]"


def test_a_loaded_program_is_reported_as_the_saved_one(rewritten: ExportedProgram, tmp_path: Path) -> None:
    torch.export.save(rewritten, tmp_path / "program.pt2")
    (before, after) = (lc.inspect(x, policy="int8") for x in (rewritten, tmp_path / "program.pt2"))
    assert _told(after) == _told(before)
    assert found(after) == SITES


def test_decompositions_keep_the_ops(rewritten: ExportedProgram) -> None:
    decomposed = rewritten.run_decompositions()
    assert [n.kwargs for n in lattn_ops(decomposed.graph_module)] == [
        n.kwargs for n in lattn_ops(rewritten.graph_module)
    ]
    module = decomposed.module()
    assert worst_error(step(module, dict(module.named_parameters()), inputs()), eager("int8")) < 1e-5
    assert _told(lc.inspect(decomposed)) == _told(lc.inspect(rewritten))


def test_decompositions_before_a_rewrite_hide_nothing() -> None:
    """A program in core ATen: einsum and matmul are bmm, softplus and layer_norm are taken apart."""
    program = exported().run_decompositions()
    result = lc.rewrite(program, "int8")
    assert found(result.report) == SITES
    assert not result.report.unmatched
    module = result.module.module()
    assert worst_error(step(module, dict(module.named_parameters()), inputs()), eager("int8")) < 1e-5


@pytest.mark.parametrize("policy", ["exact", "int8"])
def test_a_rewritten_program_trains(policy: str) -> None:
    plain = model(None if policy == "exact" else policy)
    module = lc.rewrite(export(), policy).module.module()
    for trained in (plain, module):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss(trained(*inputs())).backward()
            optimizer.step()
    want = dict(plain.named_parameters())
    start = dict(model().named_parameters())
    for name, weight in module.named_parameters():
        assert worst_error([weight], [want[name]]) < 1e-5, name
        assert not torch.equal(weight, start[name]), name


def test_an_ahead_of_time_compiled_package_runs_in_a_fresh_process(tmp_path: Path) -> None:
    program = lc.rewrite(exported(), "int8").module
    args = inputs()
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    torch.save((args, tuple(x.detach() for x in program.module()(*args))), tmp_path / "run.pt")
    code = _LOAD.format(
        imports="import torch, lattn_compile", load="torch._inductor.aoti_load_package(sys.argv[1])"
    ).replace("torch.equal(a, b)", "torch.allclose(a, b, rtol=0, atol=1e-5)")
    assert _fresh_process(code, package, tmp_path / "run.pt").split("\n")[0] == "[True, True, True]"


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_SAID", set())
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_runs_it_for_any_batch() -> None:
    """Compiled for the first batch, once more for any other, and no more."""
    plain, quantized = model(), model("int8")
    compiled = torch.compile(plain, backend="lattn_compile", fullgraph=True, options={"policy": "int8"})
    before = len(lc.reports())
    with torch.no_grad():
        for batch in (5, 7, 9):
            assert worst_error(compiled(*inputs(batch)), quantized(*inputs(batch))) < 1e-5
    made = lc.reports()[before:]
    assert [found(r) for r in made] == [SITES, SITES]


_TRAIN = """
import json, torch
import lattn_compile as lc
from torch._dynamo.utils import counters
from tests.passes.spelled.test_programs import SITES, eager, found, inputs, model, step, worst_error
plain = model()
compiled = torch.compile(plain, backend="lattn_compile", fullgraph=True, options={"policy": "int8"})
got = step(compiled, dict(plain.named_parameters()), inputs())
assert found(lc.last_report()) == SITES, lc.last_report()
print(json.dumps({
    "error": worst_error(got, eager("int8")),
    "bits": [x.double().sum().item() for x in got],
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
}))
"""


def test_inductor_trains_it_and_a_second_process_finds_it_compiled(cold_cache: Path) -> None:
    first, second = (
        json.loads(_fresh_process(_TRAIN, TORCHINDUCTOR_CACHE_DIR=str(cold_cache)).splitlines()[-1]) for _ in range(2)
    )
    assert first["error"] < 1e-5
    assert first["misses"] > 0
    assert second["misses"] == 0
    assert second["hits"] > 0
    assert second["bits"] == first["bits"]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True, None])
def test_the_backend_finds_it_in_a_full_graph(dynamic: bool | None) -> None:
    plain = model()
    with recorded() as record:
        compiled = torch.compile(
            plain, backend="lattn_compile", fullgraph=True, dynamic=dynamic, options={"policy": "int8", "strict": True}
        )
        for batch in (5, 7, 9):  # none of them another dimension of the model
            got = step(compiled, dict(plain.named_parameters()), inputs(batch))
            assert worst_error(got, eager("int8", batch)) < 1e-5
    assert len(record.graphs) == {False: 3, True: 1, None: 2}[dynamic]
    assert {c.op for c in record.calls} == {"lattn::decode"}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("policy", ["exact", "int8"])
@pytest.mark.parametrize("own", [True, False], ids=["buffers", "arguments"])
def test_states_that_a_compiled_module_writes_to_are_written_to(own: bool, policy: str) -> None:
    written, plain = (model(p, Stateful) for p in (None, None if policy == "exact" else policy))
    ids = inputs()[0]

    def run(module: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
        out = call(ids) if own else call(ids, module.S, module.R)
        return [out, module.S, module.R]

    def forward(ids: Tensor, S: Tensor, R: Tensor) -> Tensor:
        logits, new, other = written.model(ids, S, R)
        S.copy_(new)
        R[:] = other
        return logits

    with recorded() as record, torch.no_grad():
        compiled = torch.compile(
            written if own else forward, backend="lattn_compile", fullgraph=True, options={"policy": policy}
        )
        for _ in range(3):
            want = [plain(ids), plain.S, plain.R]
            assert worst_error(run(written, compiled), want) < 1e-5
        assert len(record.graphs) == 1
        assert found(record.report) == SITES
    assert plain.S.any()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("policy", ["exact", "int8"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_is_rewritten_inside_its_region(use_reentrant: bool, policy: str) -> None:
    plain = model(cls=lambda: Checkpointed(use_reentrant))
    with recorded() as record:
        compiled = torch.compile(plain, backend="lattn_compile", fullgraph=True, options={"policy": policy})
        got = step(compiled, dict(plain.named_parameters()), inputs())
        assert found(record.report) == SITES
        assert not record.report.unmatched
    assert record.lattn_ops == 2
    assert worst_error(got, eager(None if policy == "exact" else policy)) < 1e-5


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_compiled_layer(use_reentrant: bool) -> None:
    plain = model()
    with recorded():
        compiled = torch.compile(plain, backend="lattn_compile", fullgraph=True, options={"policy": "int8"})

        def run(*args: Tensor) -> Any:
            return checkpoint(compiled, *args, use_reentrant=use_reentrant)

        got = step_by_backward(run, plain)
    want_model = model("int8")
    assert worst_error(got, step_by_backward(want_model, want_model)) < 1e-5


def step_by_backward(run: Callable[..., Any], trained: nn.Module) -> list[Tensor]:
    """As `step`, but with `.backward()`: the reentrant checkpoint knows no `autograd.grad`."""
    ids, *states = inputs()
    states = [x.requires_grad_() for x in states]
    outputs = run(ids, *states)
    loss(outputs).backward()
    grads = [p.grad for _, p in sorted(trained.named_parameters())]
    return [*(x.detach() for x in outputs), *(x for x in [*(s.grad for s in states), *grads] if x is not None)]


@pytest.mark.usefixtures("fresh_dynamo")
def test_verification_can_be_turned_off() -> None:
    checks = []
    for verify in (True, False):
        torch._dynamo.reset()
        plain = model()
        with recorded() as record:
            compiled = torch.compile(plain, backend="lattn_compile", options={"policy": "exact", "verify": verify})
            got = step(compiled, dict(plain.named_parameters()), inputs())
        assert found(record.report) == SITES
        assert worst_error(got, eager()) < 1e-5
        checks.append([s.evidence["self_check"] for s in record.report.sites])
    assert all(check["verified"] and check["max_error"] < 1e-9 for check in checks[0])
    assert checks[1] == [{"verified": False, "skipped": True}] * 2


class Forgetful(Hybrid):
    """The second layer squashes its state: no linear recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.kda = Squashed(K)


class Squashed(Layer):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        o = []
        for t in range(q.shape[1]):
            S = torch.tanh(S * g[:, t].exp()[..., None] + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2))
            o.append((q[:, t].unsqueeze(-2) @ S).squeeze(-2))
        return torch.stack(o, 1), S


@pytest.mark.usefixtures("fresh_dynamo")
def test_strict_raises_for_a_layer_that_is_no_recurrence() -> None:
    options = {"policy": "int8", "strict": True}
    with recorded():
        compiled = torch.compile(model(cls=Forgetful), backend="lattn_compile", fullgraph=True, options=options)
        with pytest.raises(lc.LattnError, match="strict"):
            compiled(*inputs())
        torch._dynamo.reset()
        plain = model(cls=Forgetful)
        compiled = torch.compile(plain, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})
        assert worst_error(compiled(*inputs()), plain(*inputs())) < 1e-5
        report = lc.last_report()
        assert report is not None
        assert [s.path for s in report.rewritten] == ["gdn"]
        assert [u.path for u in report.unmatched] == ["kda"]


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `hybrid.pt2`, `partly.pt2` (one of two layers is no recurrence) and `plain.pt2` (none at all)."""
    folder = tmp_path_factory.mktemp("programs")
    torch.export.save(exported(dynamic=True), folder / "hybrid.pt2")
    torch.export.save(exported(cls=Forgetful), folder / "partly.pt2")
    torch.export.save(torch.export.export(nn.Linear(3, 3), (torch.randn(2, 3),)), folder / "plain.pt2")
    return folder


def _run(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, str]:
    code = cli.main([str(a) for a in argv])
    return code, capsys.readouterr().out


def test_inspect_lists_spelled_out_layers(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = _run(capsys, "inspect", files / "hybrid.pt2")
    assert code == 0
    assert "gdn/gdn#0" in out and "kda/kda#0" in out
    code, out = _run(capsys, "inspect", files / "hybrid.pt2", "--json", "--policy", "int8")
    assert code == 0
    report = Report.from_json(out)
    assert found(report) == SITES
    assert all(s.evidence["self_check"]["verified"] for s in report.sites)
    assert report == Report.from_json(report.to_json())


def test_rewrite_writes_a_program_that_rewrites_to_itself(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.pt2"
    code, text = _run(capsys, "rewrite", files / "hybrid.pt2", out, "--policy", "int8", "--json")
    assert code == 0
    assert found(Report.from_json(text[: text.rindex("}") + 1])) == SITES
    module = torch.export.load(out).module()
    assert worst_error(step(module, dict(module.named_parameters()), inputs(4)), eager("int8", 4)) < 1e-5
    again = tmp_path / "again.pt2"
    assert _run(capsys, "rewrite", out, again, "--policy", "int8")[0] == 0
    assert str(torch.export.load(again).graph) == str(torch.export.load(out).graph)


def test_what_is_left_of_what_was_asked_is_exit_code_2(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.pt2"
    assert _run(capsys, "inspect", files / "partly.pt2")[0] == 0
    assert _run(capsys, "inspect", files / "partly.pt2", "--policy", "int8")[0] == 2
    code, text = _run(capsys, "rewrite", files / "partly.pt2", out, "--policy", "int8")
    assert code == 2 and out.exists() and "kda" in text
    code, _ = _run(capsys, "rewrite", files / "plain.pt2", tmp_path / "none.pt2", "--policy", "int8")
    assert code == 2 and not (tmp_path / "none.pt2").exists()
    assert _run(capsys, "inspect", tmp_path / "missing.pt2")[0] == 1
    assert _run(capsys, "rewrite", files / "hybrid.pt2", tmp_path / "x.pt2", "--policy", "int9")[0] == 1
