"""Mistakes that used to go through in silence: a phase that nothing reads, phases that take turns, another rule."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import lattn_compile as lc
from lattn_compile import phase
from lattn_compile.errors import LattnError, LattnWarning, StateError, UnsupportedError
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.inputs import make_inputs
from tests import tiny_models


def attend(tokens: int = 6, **options: Any) -> Any:
    x = make_inputs("gdn", batch=2, tokens=tokens, initial_state=False, key_dim=16, value_dim=16)
    return lc.linear_attention(x.q, x.k, x.v, x.g, x.beta, **options)


def loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Gated linear attention as somebody spells it, `[B, T, H, ...]`."""
    state, out = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(out, 1)


def spelled() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return (*(torch.randn(2, 3, 2, 4) for _ in range(3)), -torch.rand(2, 3, 2))


def test_a_phase_around_a_model_that_is_not_compiled_says_that_nothing_was_rounded() -> None:
    with pytest.warns(LattnWarning, match="nothing that ran in this phase read its lengths"), lc.training_phase(2):
        loop(*spelled())
    with pytest.warns(LattnWarning, match="nothing that ran"), lc.training_phase(2):
        torch.compile(loop, backend="eager")(*spelled())


@pytest.mark.parametrize("how", ["call", "compiled call", "another backend", "spelled out", "inner phase"])
def test_a_phase_that_is_read_says_nothing_also_the_second_time(how: str) -> None:
    torch._dynamo.reset()
    with recorded(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="lc.training_phase")
        compiled = {f: torch.compile(f, backend="lattn_compile", options={"policy": "int8"}) for f in (attend, loop)}
        calls = {
            "call": lambda: attend(policy="int8"),
            "compiled call": compiled[attend],
            "another backend": torch.compile(attend, backend="aot_eager"),
            "spelled out": lambda: compiled[loop](*spelled()),
        }
        for prefix in (2, 1):  # the second one meets code that is compiled already
            with lc.training_phase(prefix):
                if how == "inner phase":
                    with lc.training_phase(3):
                        calls["call"]()
                else:
                    calls[how]()


def test_an_error_inside_a_phase_is_not_talked_over() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError), lc.training_phase(2):
            raise KeyError


def test_phases_that_take_turns_are_refused_and_none_is_left_behind() -> None:
    seen = []

    async def step(prefix: int) -> None:
        with lc.training_phase(prefix):
            await asyncio.sleep(0.001 * prefix)
            seen.append(int(phase.current()[0]))  # type: ignore[arg-type]

    async def both() -> list[Any]:
        return await asyncio.gather(step(1), step(2), return_exceptions=True)

    errors = asyncio.run(both())
    assert seen[0] == 2, "the first one computed under the second one's lengths"
    assert isinstance(errors[0], UnsupportedError) and "reverse order" in str(errors[0])
    assert phase.current() == (None, None) and phase.kind() == ""
    with lc.training_phase(1):
        attend(policy="int8")


def test_a_two_precision_state_does_not_go_on_under_another_rule() -> None:
    for policy in ("fp8-two-precision", "int8-replay"):
        _, state = attend(policy=policy, output_final_state=True)
        if policy == "int8-replay":  # whose records are updates, of which rule does not matter
            attend(1, policy=policy, rule="additive", initial_state=state)
            continue
        with pytest.raises(StateError, match="rule: got 'additive' for a state of 'delta'"):
            attend(1, policy=policy, rule="additive", initial_state=state)
        attend(1, policy=policy, rule="additive", initial_state=state.dense())


@pytest.mark.parametrize("policy", [None, "int8", "int8-replay", lc.Policy(lc.Int8(), write=lc.Chunk(4))], ids=str)
@pytest.mark.parametrize("prefix", [3, [3, 2]], ids=str)
def test_a_default_device_says_nothing_of_lengths_and_states(policy: Any, prefix: Any) -> None:
    want, wanted = attend(policy=policy, prefix_lengths=prefix, output_final_state=True)
    x = make_inputs("gdn", batch=2, tokens=6, initial_state=False, key_dim=16, value_dim=16)
    with torch.device("meta"):
        given = (x.q, x.k, x.v, x.g, x.beta)
        o, state = lc.linear_attention(*given, policy=policy, prefix_lengths=prefix, output_final_state=True)
        with lc.training_phase(prefix, sequence_ids=[4, 5], position=1):
            again = lc.linear_attention(*given, policy=policy)[0]
    assert torch.equal(o, want) and torch.equal(again, want)
    dense = (state, wanted) if policy is None else (state.dense(), wanted.dense())
    assert torch.equal(*dense)


@pytest.mark.parametrize("backend", ["lattn_compile", "aot_eager"])
@pytest.mark.parametrize("how", ["jvp", "dual numbers", "grad"])
def test_transforms_inside_a_compiled_region_are_refused_and_no_tangent_of_zeros(how: str, backend: str) -> None:
    torch._dynamo.reset()
    x = make_inputs("gdn", batch=1, tokens=3, initial_state=False, key_dim=4, value_dim=4)

    def call(v: torch.Tensor) -> torch.Tensor:
        return lc.linear_attention(x.q, x.k, v, x.g, x.beta, policy="int8")[0]

    def transformed(v: torch.Tensor) -> Any:
        if how == "jvp":
            return torch.func.jvp(call, (v,), (v,))[1]
        if how == "grad":
            return torch.func.grad(lambda v: call(v).sum())(v)
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(v, v))).tangent

    with recorded(), pytest.raises(UnsupportedError, match=r"linear_attention: got .*(torch\.func\.grad|forward-mode)"):
        torch.compile(transformed, backend=backend, fullgraph=True)(x.v)


@pytest.mark.parametrize("how", ["jvp", "grad"])
def test_a_captured_call_is_refused_there_by_its_name(how: str) -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    model, _ = tiny_models.build("qwen3_next", layers=2)
    layer, x = model.get_submodule("model.layers.0.linear_attn").requires_grad_(False), torch.randn(1, 3, 48)

    def transformed(x: torch.Tensor) -> Any:
        if how == "grad":
            return torch.func.grad(lambda x: layer(x).sum())(x)
        return torch.func.jvp(lambda x: layer(x), (x,), (x,))[1]

    with recorded(), pytest.raises(UnsupportedError, match=r"got (forward-mode AD|torch\.func\.grad)"):
        torch.compile(transformed, backend="lattn_compile", options={"policy": "int8"}, fullgraph=True)(x)


def test_a_recipe_is_read_from_the_folder_that_it_was_written_to(tmp_path: Path) -> None:
    recipe = lc.Recipe(rules=[("*", "int8-replay")])
    recipe.save(tmp_path)
    assert lc.Recipe.load(tmp_path) == recipe
    for call in (lc.Recipe.load, recipe.save, lc.Recipe.from_pretrained, recipe.resolve):
        with pytest.raises(LattnError, match=r"(path|site): got None"):
            call(None)  # type: ignore[arg-type]


def test_a_module_of_torchscript_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        module = torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(LattnError, match=r"model: got .*TorchScript"):
        lc.attach(module, "int8")
    with pytest.raises(LattnError, match="target: got"):
        lc.inspect(module, (torch.zeros(1, 2),))
