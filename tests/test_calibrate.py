"""`lc.calibrate`: what it measures is what the recipe then does, what it chooses is the best that there is, and nothing
of it stays with the model."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import math
import warnings
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.calibration.report import CalibratedSite, CalibrationReport, Measurement
from lattn_compile.testing.backend import OpCall, recorded
from tests import tiny_models
from tests.calibrate_nets import HV, H, K, Layer, Net, V
from tests.test_calibrate_measure import deviation

INT8, FP8, NVFP4 = lc.Policy(lc.Int8()), lc.Policy(lc.Fp8()), lc.Policy(lc.Nvfp4())
FEEDBACK, REPLAY = lc.Policy(lc.Int8(), feedback="int4"), lc.Policy(lc.Int8(), write=lc.Replay(4))
EXACT = lc.Policy(lc.Fp32(), write=lc.Exact())


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def _x(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(seed))


def _calibrate(model: nn.Module, batches: Any = None, **options: Any) -> tuple[lc.Recipe, CalibrationReport]:
    kept: list[CalibrationReport] = []
    if "budget_bytes" not in options:
        options.setdefault("max_error", 0.02)
    options = {"horizon": 12, "candidates": [INT8, FP8, NVFP4], **options}
    recipe = lc.calibrate(model, [_x(2, 12)] if batches is None else batches, show=kept.append, **options)
    return recipe, kept[0]


def _by_id(report: CalibrationReport) -> dict[str, CalibratedSite]:
    return {site.id: site for site in report.sites}


def _error(site: CalibratedSite, policy: lc.Policy) -> float:
    return next(m.error for m in site.measured if m.policy == policy)


def _exact_output(call: OpCall) -> Tensor:
    a = call.arguments
    options = {"scale": a["scale"], "use_qk_l2norm_in_kernel": a.get("qk_l2norm", False)}
    return lc.linear_attention(*(a[name] for name in ("q", "k", "v", "g", "beta")), **options, prefix_lengths=0)[0]


# Real models.


def _hybrid(name: str) -> tuple[nn.Module, dict[str, Any], list[str]]:
    pytest.importorskip("transformers")
    model, linear = tiny_models.build(name, layers=3)
    ids = torch.randint(2, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    attention, kind = {"qwen3_next": ("linear_attn", "gdn"), "kimi_linear": ("self_attn", "kda")}[name]
    sites = [f"model.layers.{i}.{attention}/{kind}#0" for i in range(linear)]
    return model, {"input_ids": ids, "use_cache": False}, sites


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_the_recipe_applied_to_the_model_gives_the_errors_that_the_table_promised(name: str) -> None:
    model, batch, sites = _hybrid(name)
    # A budget that the smallest policy meets in one layer only: two policies in one recipe.
    budget = 2 * INT8.nbytes(4, 4, 16, 24) if name == "qwen3_next" else 2 * INT8.nbytes(4, 4, 16, 16)
    budget -= 100
    recipe, report = _calibrate(model, [batch], budget_bytes=budget, horizon=40)
    assert [site.id for site in report.sites] == sites
    assert report.nbytes <= budget and len({site.chosen.policy for site in report.sites}) == 2

    with recorded() as record, torch.no_grad(), lc.training_phase(0):
        compiled = torch.compile(model, backend="lattn_compile", options={"policy": recipe, "strict": True})
        compiled(**batch)
    assert [s.id for s in record.report.rewritten] == sites
    for site, call, done in zip(report.sites, record.calls, record.report.sites, strict=True):
        assert lc.Policy.from_dict(done.policy) == site.chosen.policy
        assert done.state_bytes_after == site.chosen.nbytes
        got = deviation(call.outputs[0], _exact_output(call))
        assert got == pytest.approx(site.chosen.error, rel=0.05)


def test_a_model_whose_states_travel_in_a_cache_gets_only_policies_that_a_dense_cache_can_carry() -> None:
    model, batch, _ = _hybrid("qwen3_next")
    options: dict[str, Any] = {"candidates": [INT8, FEEDBACK, REPLAY], "max_error": 1e-9}
    _, cached = _calibrate(model, [batch | {"use_cache": True}], **options)
    _, free = _calibrate(model, [batch | {"use_cache": True}], dense_cache=False, **options)
    for site in cached.sites:
        assert [m.policy for m in site.measured] == [INT8, EXACT]
        assert [(policy, code) for policy, code, _ in site.excluded] == [
            (FEEDBACK, "DENSE_CACHE"),
            (REPLAY, "DENSE_CACHE"),
        ]
    assert "dense_cache=False" in str(cached)
    for site in free.sites:
        assert [m.policy for m in site.measured] == [INT8, FEEDBACK, REPLAY, EXACT]


# What is measured.


class Outliers(nn.Module):
    """Additive attention; with outliers, one key channel is written a hundred times as strongly and never read."""

    def __init__(self, outliers: bool) -> None:
        super().__init__()
        self.outliers = outliers

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (1, 16)).repeat(1, 1, 2, 1), x.roll(1, -1)[:, :, None], x.roll(5, -1)[:, :, None]
        q = q[:, :, :1]
        if self.outliers:
            scale = torch.ones(16)
            scale[0] = 100.0
            q, k = q * (scale < 2), k * scale
        g = torch.full((*x.shape[:2], 1), -0.05)
        return x + lc.linear_attention(q, k, v, g, rule="additive")[0].flatten(2) / 100


def test_int8_loses_where_a_channel_is_an_outlier_and_fp8_where_none_is() -> None:
    model = Net(Outliers(True), Outliers(False))
    both = INT8.nbytes(1, 1, 16, 16)
    assert both == FP8.nbytes(1, 1, 16, 16)
    recipe, report = _calibrate(model, [_x(2, 64)], budget_bytes=2 * both, horizon=64, candidates=["int8", "fp8"])
    first, second = report.sites
    assert _error(first, INT8) > 5 * _error(first, FP8)
    assert _error(second, FP8) > 2 * _error(second, INT8)
    assert recipe.resolve(first.id)[1] == FP8 and recipe.resolve(second.id)[1] == INT8
    assert _error(first, INT8) > 1 > 10 * report.total_error


def test_a_policy_that_overflows_is_never_chosen_and_an_exact_overflow_is_an_error() -> None:
    class Loud(Layer):
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            return super().forward(x * 1e6)

    half = lc.Policy(lc.Fp16())
    _, report = _calibrate(Net(Loud()), candidates=[half, INT8], max_error=1e6)
    site = report.sites[0]
    assert site.chosen.policy == INT8
    assert [m.finite for m in site.measured] == [False, True, True]
    assert "not finite" in report.full()
    with pytest.raises(lc.LattnError, match="at least 1,536"):  # exact is the smallest that is finite
        _calibrate(Net(Loud()), candidates=[half], budget_bytes=half.nbytes(H, HV, K, V))
    with pytest.raises(lc.LattnError, match=r"layers\.0/gdn#0 gives infinite or NaN"):
        _calibrate(Net(Layer()), [_x(2, 12) * math.inf])


# Which sites are found.


def _three(**options: Any) -> Net:
    return Net(Layer(), Layer(1, spelled=True), Layer(2), **options)


@functools.cache
def _found_in_three() -> CalibrationReport:
    return _calibrate(_three())[1]


@pytest.mark.parametrize("how", ["checkpoint", "broken", "attached", "compiled"])
def test_every_site_is_found_whatever_stands_around_it(how: str) -> None:
    want = _found_in_three()
    assert [site.id for site in want.sites] == [f"layers.{i}/gdn#0" for i in range(3)]
    model: Any = _three(checkpoint=how == "checkpoint", broken=how == "broken").train()
    if how == "attached":
        lc.attach(nn.Sequential(model), lc.Recipe(rules=[("0.layers.0", None), ("*", "int8")]))
    if how == "compiled":  # and called from frames that are not
        model.broken = True
        model.layers[1].compile(backend="lattn_compile")
        model.layers[2] = torch.compile(model.layers[2], backend="lattn_compile")
        model = torch.compile(model, backend="lattn_compile")
    torch._dynamo.utils.counters["frames"]["total"] += 1
    counted = copy.deepcopy(torch._dynamo.utils.counters)
    recipe, got = _calibrate(model)
    assert torch._dynamo.utils.counters == counted
    assert [(s.id, s.chosen.policy) for s in got.sites] == [(s.id, s.chosen.policy) for s in want.sites]
    for a, b in zip(got.sites, want.sites, strict=True):
        assert a.chosen.error == pytest.approx(b.chosen.error, rel=1e-3)
    assert ("graph breaks" in str(got)) == (how in ("broken", "compiled"))
    assert all(recipe.resolve(site.id)[1] == site.chosen.policy for site in got.sites)


def test_a_phase_around_it_says_which_tokens_are_suffix() -> None:
    def batches() -> Iterator[Tensor]:
        yield _x(2, 12)
        with lc.training_phase([3, 5], [12, 10]):
            yield _x(2, 12)

    for spelled in (False, True):
        _, report = _calibrate(Net(Layer(spelled=spelled)), batches())
        assert report.recorded == (5, 12)


def test_a_layer_with_a_policy_of_its_own_keeps_it_and_its_bytes_count() -> None:
    model = Net(Layer(), Layer(1, policy=FP8))
    recipe, report = _calibrate(model)
    own = report.sites[1]
    assert own.own and own.chosen == Measurement(policy=FP8, nbytes=FP8.nbytes(H, HV, K, V))
    assert report.nbytes == INT8.nbytes(H, HV, K, V) + FP8.nbytes(H, HV, K, V)
    assert recipe.resolve(own.id)[1] == FP8
    assert "a policy of its own" in str(report)


def test_candidates_that_a_site_cannot_hold_are_left_out_with_a_reason() -> None:
    rotated, large = lc.Policy(lc.Int8(), rotation="hadamard_v"), lc.Policy(lc.Int8(), write=lc.Replay(16))
    with mock.patch.object(importlib.import_module("lattn_compile.calibrate"), "CANDIDATES", (INT8, rotated, large)):
        _, report = _calibrate(Net(Layer()), candidates=None)
    site = report.sites[0]
    assert [m.policy for m in site.measured] == [INT8, EXACT]
    assert [(p, code) for p, code, _ in site.excluded] == [(rotated, "FORMAT_SHAPE"), (large, "NO_GAIN")]
    assert f"{large}: [NO_GAIN] it takes as many bytes as exact" in str(report)

    asked = [large, lc.PRESETS["fp8-two-precision"], lc.Policy(write=lc.Exact(), gate="bf16")]
    _, report = _calibrate(Net(Layer()), candidates=[*asked, "exact"], horizon=40)
    site = report.sites[0]
    assert [m.policy for m in site.measured] == [*asked, EXACT]
    assert site.chosen.policy == EXACT and all(0 < m.error < 0.1 for m in site.measured[:-1])


def test_layers_that_share_one_region_get_one_policy_and_all_their_bytes_count() -> None:
    class Region(Layer):
        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    recipe, report = _calibrate(Net(*(Region(i) for i in range(3))))
    (site,) = report.sites
    assert site.layers == 3 and site.chosen.nbytes == 3 * INT8.nbytes(H, HV, K, V)
    assert report.total_error == pytest.approx(math.sqrt(3) * site.chosen.error)
    assert all(recipe.resolve(f"layers.{i}/gdn#0")[1] == INT8 for i in range(3))


def test_a_model_without_a_recurrence_is_an_error_that_says_what_looked_like_one() -> None:
    class Near(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            S = torch.zeros(2, 4, 4)
            for t in range(x.shape[1]):
                S = torch.tanh(S) + x[:, t, :4, None] * x[:, t, None, 4:8]
            return torch.einsum("bkv,bk->bv", S, x[:, 0, 8:12])

    with pytest.raises(lc.LattnError, match="no recurrence was found"):
        _calibrate(nn.Linear(16, 16))
    with pytest.raises(lc.LattnError, match=r"no recurrence was found; .*\[\w+\]"):
        _calibrate(Near())


# What is chosen.


def test_an_impossible_budget_names_the_least_possible_one_and_its_recipe() -> None:
    model = Net(Layer(), Layer(1))
    need = 2 * NVFP4.nbytes(H, HV, K, V)
    with pytest.raises(lc.LattnError) as caught:
        _calibrate(model, budget_bytes=need - 1)
    recipe, report = _calibrate(model, budget_bytes=need)
    assert f"at least {need:,}" in str(caught.value) and repr(recipe) in str(caught.value)
    assert report.nbytes == need and {s.chosen.policy for s in report.sites} == {NVFP4}


def test_a_large_budget_or_a_tiny_error_keep_every_site_exact() -> None:
    model = Net(Layer())
    for options in ({"budget_bytes": 10**9}, {"max_error": 1e-12}):
        recipe, report = _calibrate(model, **options)
        assert report.sites[0].chosen == Measurement(policy=EXACT, nbytes=HV * K * V * 4)
        assert report.total_error == 0 and recipe.resolve("layers.0/gdn#0")[1] == EXACT


def test_layers_of_one_policy_share_one_rule_and_the_recipe_matches_nothing_else() -> None:
    class Block(nn.Module):
        def __init__(self, seed: int, **options: Any) -> None:
            super().__init__()
            self.attn = Layer(seed, **options)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x)

    model = Net(*(Block(i) for i in range(3)), Block(3, policy=FP8))
    recipe, _ = _calibrate(model)
    assert recipe == lc.Recipe(rules=[("layers.3.attn", FP8), ("layers.*.attn", INT8), ("*", "exact")])
    with warnings.catch_warnings():
        warnings.simplefilter("error", lc.LattnWarning)
        lc.attach(model, recipe)

    model.layers[3].attn = nn.Identity()  # not measured, and no rule may speak of it
    recipe, _ = _calibrate(model)
    assert recipe == lc.Recipe(rules=[*((f"layers.{i}.attn", INT8) for i in range(3)), ("*", "exact")])


# Determinism, and what stays.


def test_the_same_inputs_give_the_same_recipe_and_the_same_text_and_no_random_number_is_drawn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Noisy(Net):
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            return super().forward(x + 0.1 * torch.randn_like(x))

    model, texts, recipes = Noisy(Layer(), Layer(1, spelled=True)), [], []
    stochastic = lc.Policy(lc.Int8(), rounding="stochastic", seed=3)
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        batches = (_x(2, 12, seed=i) for i in range(2))
        recipes.append(lc.calibrate(model, batches, max_error=0.02, horizon=20, candidates=[FP8, INT8, stochastic]))
        assert torch.equal(torch.get_rng_state(), before)
        texts.append(capsys.readouterr().out)
    assert recipes[0] == recipes[1]
    assert texts[0] == texts[1] and texts[0].startswith(
        "lattn-compile calibrate: 2 sites, 2 batches, 20 tokens decoded"
    )


def test_the_model_is_left_as_it_was() -> None:
    class Counting(Net):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.register_buffer("calls", torch.tensor([0.0, math.nan]))
            self.seen: Tensor | None = None

        def forward(self, x: Tensor, **given: Any) -> Tensor:
            self.calls += 1
            self.seen = x
            return super().forward(x)

    model = Counting(Layer(), nn.Dropout(0.5), Layer(1))
    model.layers[0].eval()
    model.layers[2].inner.weight.requires_grad_(False)
    hook = model.register_forward_hook(lambda *_: None)
    lc.attach(model, "int8")
    modules = list(model.modules())
    before = [dict(m.__dict__) for m in modules]
    state = {n: x.clone() for n, x in model.state_dict().items()}
    calls = model.calls

    _calibrate(model)
    with pytest.raises(lc.LattnError):
        _calibrate(model, [_x(2, 12), "no batch"])

    for module, was in zip(modules, before, strict=True):
        assert module.__dict__.keys() == was.keys()
        assert all(module.__dict__[name] is was[name] for name in was)
    assert model.calls is calls and hook.id in model._forward_hooks and model.seen is None
    for name, x in model.state_dict().items():
        assert torch.equal(x.nan_to_num(9.0), state[name].nan_to_num(9.0)), name
    assert all(p.grad is None for p in model.parameters())
    assert [m.training for m in (model, *model.layers)] == [True, False, True, True]


def test_compiled_code_of_the_user_is_still_there_and_none_of_ours_is() -> None:
    model, x = Net(Layer(), Layer(1)), _x(2, 12)
    compiled = torch.compile(model, backend="eager")
    want = compiled(x)
    _calibrate(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x), want)

    broken = Net(*(Layer(i) for i in range(3)), broken=True)
    for _ in range(3):
        _calibrate(broken)
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        torch.compile(broken, backend="eager")(x)

    gone = weakref.ref(broken)
    del broken
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


# Bad input.


@pytest.mark.parametrize(
    "options, said",
    [
        ({"budget_bytes": None, "max_error": None}, "got neither"),
        ({"budget_bytes": 1000, "max_error": 0.1}, "got both"),
        ({"budget_bytes": 0}, "budget_bytes"),
        ({"budget_bytes": 1e6}, "budget_bytes"),
        ({"budget_bytes": True}, "budget_bytes"),
        ({"max_error": 0}, "max_error: got 0"),
        ({"max_error": math.nan}, "max_error: got nan"),
        ({"max_error": "1%"}, "max_error: got '1%'"),
        ({"horizon": 3}, "horizon"),
        ({"dense_cache": "no"}, "dense_cache"),
        ({"candidates": "int8"}, "Put a single one into a list"),
        ({"candidates": ["in8"]}, "Did you mean 'int8'"),
        ({"candidates": [lc.Int8()]}, r"candidates\[0\]"),
        ({"candidates": [lc.Policy(storage="packed")]}, r"candidates\[0\]: got storage='packed'"),
    ],
)
def test_bad_options_are_refused_before_the_model_runs(options: dict[str, Any], said: str) -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model ran")

    with pytest.raises(lc.LattnError, match=said):
        _calibrate(Never(), **options)


@pytest.mark.parametrize(
    "batches, said",
    [
        ([], "batches: got none"),
        (_x(2, 12), "Put a single batch into a list"),
        ({"x": _x(2, 12)}, "Put a single batch into a list"),
        (7, "batches: got int"),
        (["text"], r"batches\[0\]: got str"),
        ([{1: 2}], r"batches\[0\]: got dict"),
        ([_x(2, 0)], "no token to decode at layers.0/gdn#0"),
    ],
)
def test_bad_batches_are_refused_by_name(batches: Any, said: str) -> None:
    with pytest.raises(lc.LattnError, match=said):
        _calibrate(Net(Layer()), batches)


def test_what_is_no_module_or_no_function_is_refused() -> None:
    with pytest.raises(lc.LattnError, match="model: got function"):
        lc.calibrate(lambda x: x, [], max_error=0.1)  # type: ignore[arg-type]
    with pytest.raises(lc.LattnError, match="show: got False"):
        lc.calibrate(Net(Layer()), [_x(2, 12)], max_error=0.1, show=False)  # type: ignore[arg-type]


def test_batches_are_tensors_dicts_or_tuples_of_any_length() -> None:
    x = [_x(2, tokens, seed=tokens) for tokens in (12, 20, 5)]
    _, want = _calibrate(Net(Layer()), x)
    _, got = _calibrate(Net(Layer()), iter([(x[0],), {"x": x[1]}, [x[2]]]))
    assert got.batches == 3 and got.recorded == (5, 20)
    assert _by_id(got) == _by_id(want)
