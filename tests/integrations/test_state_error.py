"""The error of every layer's stored state: the right numbers, and a training that never notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.errors import LattnError
from lattn_compile.integrations.state_error import state_errors
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.oracle import oracle
from tests import tiny_models

pytest.importorskip("transformers")


def _ids(tokens: int = 24) -> Tensor:
    return torch.randint(2, 97, (2, tokens), generator=torch.Generator().manual_seed(0))


def _model(name: str = "qwen3_next", recipe: Any = "int8", layers: int = 3) -> Any:
    torch._dynamo.reset()
    model, _ = tiny_models.build(name, layers=layers)
    model.config.use_cache = False  # type: ignore[union-attr]
    return lc.attach(model, recipe).train()


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_it_is_the_distance_that_the_oracle_finds_between_the_final_states_of_the_compiled_sites(name: str) -> None:
    model = _model(name)
    with recorded() as record, torch.no_grad(), lc.training_phase([9, 20], [24, 22]):
        torch.compile(model.eval(), backend="lattn_compile", fullgraph=True)(_ids())
        found = state_errors(model, {"input_ids": _ids()})
    assert list(found) == [site.id for site in lc.Report.merge([record.report]).rewritten]
    for error, call in zip(found.values(), record.calls, strict=True):
        stored, exact = (oracle(**{**call.arguments, "write": w}).final_state for w in ("token", "exact"))
        want = ((stored - exact).norm() / exact.norm()).item()
        # Free-running int8 in fp32 and in float64 differ in some codes (semantics §8: a tenth of the effect).
        assert error == pytest.approx(want, rel=0.1) and error > 1e-3


def test_a_layer_is_measured_on_what_the_quantized_layers_before_it_hand_on() -> None:
    model, logits = _model(recipe=lc.Policy(lc.Nvfp4())).eval(), []
    with recorded(), torch.no_grad(), lc.training_phase(4):
        want = torch.compile(model, backend="lattn_compile", fullgraph=True)(_ids()).logits
        handle = model.register_forward_hook(lambda m, a, out: logits.append(out.logits))
        state_errors(model, {"input_ids": _ids()})
    handle.remove()
    exact = model(_ids()).logits
    assert (logits[0] - want).abs().max() < 1e-4 < 1e-2 < (exact - want).abs().max()


def test_a_batch_that_is_all_prefix_has_no_error_and_sites_without_rounding_are_not_listed() -> None:
    rules = [("model.layers.0.*", None), ("model.layers.1.*", "exact"), ("*", "fp8")]
    model = _model(recipe=lc.Recipe(rules=rules), layers=4)
    with lc.training_phase(24):
        assert state_errors(model, {"input_ids": _ids()}) == {"model.layers.2.linear_attn/gdn#0": 0.0}
    with lc.training_phase(10):
        assert list(state_errors(model, {"input_ids": _ids()}, lc.Recipe(rules=[("*.1.*", "int8")]))) == [
            "model.layers.1.linear_attn/gdn#0"
        ], "a recipe that is given wins"


def test_coarser_states_have_larger_errors() -> None:
    errors = []
    for policy in (lc.Policy(lc.Fp16()), lc.Policy(lc.Int8()), lc.Policy(lc.Nvfp4())):
        with lc.training_phase(4):
            errors.append(next(iter(state_errors(_model(recipe=policy, layers=2), {"input_ids": _ids()}).values())))
    assert 0 < errors[0] < errors[1] / 5 < errors[2]


class Own(nn.Module):
    """A model that calls `lc.linear_attention` itself."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.mix, self.drop = policy, nn.Linear(8, 24), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.drop(self.mix(x)).unflatten(-1, (3, 1, 8)).unbind(-3)
        for _ in range(2):
            v, _ = lc.linear_attention(q, k, v, policy=self.policy, use_qk_l2norm_in_kernel=True)
        return v


def test_own_calls_are_numbered_and_an_own_policy_is_measured_whatever_the_recipe_says() -> None:
    x, own = {"x": torch.randn(1, 12, 8)}, lc.Policy(lc.Int8())
    ids = ["/delta#0", "/delta#1"]
    assert list(state_errors(lc.attach(Own(None), "int8"), x)) == ids
    assert list(state_errors(lc.attach(Own(own), "exact"), x)) == ids
    assert state_errors(lc.attach(Own(None), "exact"), x) == {}
    with pytest.raises(lc.LattnError, match=r"recipe: got none.*lc\.attach"):
        state_errors(Own(None), x)


def test_the_measurement_is_without_dropout() -> None:
    model, x = lc.attach(Own(None), "int8").train(), {"x": torch.randn(1, 12, 8)}
    first = state_errors(model, x)
    torch.rand(7)
    assert state_errors(model, x) == first


def test_flags_generators_gradients_hooks_and_compiled_code_are_as_before() -> None:
    model = _model()
    model.model.layers[0].eval()
    flags = [m.training for m in model.modules()]
    with recorded() as record:
        model.compile(backend="lattn_compile", fullgraph=True)
        with lc.training_phase(8):
            model(_ids(), labels=_ids()).loss.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            generator = torch.get_rng_state()
            assert len(state_errors(model, {"input_ids": _ids()})) == 2
            assert torch.equal(torch.get_rng_state(), generator)
            assert [m.training for m in model.modules()] == flags
            again = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
            model.zero_grad()
            model(_ids(), labels=_ids()).loss.backward()
        assert len(record.graphs) == 1, "nothing was compiled for the measurement, nor because of it"
    again = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_on_the_way_leaves_nothing_behind() -> None:
    model = lc.attach(Own(None), "int8").train()
    with pytest.raises(RuntimeError):
        state_errors(model, {"x": torch.randn(1, 12, 9)})
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert list(state_errors(model, {"x": torch.randn(1, 12, 8)})) == ["/delta#0", "/delta#1"]


def test_a_recipe_may_be_whatever_a_policy_option_may_be_and_mistakes_are_named() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    batch = {"input_ids": torch.arange(5, 13)[None], "use_cache": False}
    with lc.training_phase(3):
        by_name = state_errors(model, batch, "int8")
        assert by_name == state_errors(model, batch, lc.Recipe(rules=[("*", "int8")])) and by_name
    for name, arguments in {
        "recipe": (model, batch, "int9"),
        "inputs": (model, batch["input_ids"], "int8"),
        "model": (None, batch, "int8"),
    }.items():
        with pytest.raises(LattnError, match=f"{name}: got"):
            state_errors(*arguments)  # type: ignore[arg-type]
