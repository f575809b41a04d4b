"""`quantize_cache`: transformers' own models generate with recurrent states that are really stored in few bits."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.errors import LattnError, LattnWarning, PolicyError, StateError, UnsupportedError
from lattn_compile.packed.state import QuantizedState
from lattn_compile.testing.backend import recorded
from tests import tiny_models

pytest.importorskip("transformers")
from lattn_compile.integrations.transformers import cache_bytes, packed_cache, quantize_cache, unquantize_cache

ROOT = Path(__file__).parents[2]
NAMES = ("qwen3_next", "qwen3_5", "kimi_linear")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def _ids(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def _generate(model: Any, ids: torch.Tensor, tokens: int, **options: Any) -> Any:
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)


def _cache(out: Any) -> Any:
    return out["cache"] if out.get("cache") is not None else out["past_key_values"]


def _compiled(model: Any, ids: torch.Tensor, tokens: int, policy: Any = None) -> Any:
    options = None if policy is None else {"policy": policy}
    forward = torch.compile(model.forward, backend="lattn_compile", fullgraph=True, options=options)
    with mock.patch.object(model, "forward", forward):
        return _generate(model, ids, tokens)


def _error(a: Any, b: Any) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a.logits, b.logits, strict=True))


class _Steps:
    """Every step of packed states, and the same call of `lc.linear_attention` under the emulated policy beside it."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.states, self.count, self.same = policy, {}, 0, True  # type: ignore[var-annotated]

    def __enter__(self) -> _Steps:
        step, stage = QuantizedState.step, QuantizedState.stage

        def staged(state: QuantizedState, exact: torch.Tensor, **options: Any) -> Any:
            self.states[id(state)] = exact
            return stage(state, exact, **options)

        def both(state: QuantizedState, *tokens: Any, **options: Any) -> Any:
            start = self.states[id(state)]
            o = step(state, *tokens, **options)
            options = {name: x for name, x in options.items() if name != "state_indices"}
            want, after = lc.linear_attention(
                *tokens, policy=self.policy, initial_state=start, output_final_state=True, **options
            )
            self.states[id(state)] = after
            self.same, self.count = self.same and torch.equal(o, want), self.count + 1
            return o

        self.patch = mock.patch.multiple(QuantizedState, step=both, stage=staged)
        self.patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.stop()


def _alive() -> int:
    """Bytes of every storage that some tensor of this process holds, each counted once."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def _flips(packed: Any, dense: Any) -> tuple[int, int]:
    """Codes that differ between a packed cache and a dense one whose values were rounded to int8, and their number."""
    flips = total = 0
    for mine, other in zip(packed.layers, dense.layers, strict=True):
        if hasattr(mine, "recurrent_states"):
            codes = mine.recurrent_states[0].tensors["codes"]
            flips += (codes != lc.encode_state(other.recurrent_states[0], "int8").tensors["codes"]).sum().item()
            total += codes.numel()
    return flips, total


@pytest.mark.parametrize("name", NAMES)
def test_200_tokens_packed_are_200_tokens_emulated(name: str) -> None:
    """Outputs of the ops bit for bit, logits within 1e-5, codes that differ counted; the cache's memory is measured."""
    model, linear = tiny_models.build(name, layers=2)
    ids = _ids()
    dense = cache_bytes(_cache(_generate(model, ids, 200)))
    # The emulated run is compiled, which takes longer than all the rest; the others differ in what stands around it.
    compared = name == "qwen3_next" or "LATTN_COMPILE_ALL" in os.environ
    if compared:
        with recorded() as record:
            want = _compiled(model, ids, 200, "int8")
        assert sum(call.op == "lattn::decode" for call in record.calls) == 199 * linear
    quantize_cache(model, lc.Policy(lc.Int8(), storage="packed"))
    with _Steps("int8") as steps:
        got = _generate(model, ids, 200)
    assert steps.count == 199 * linear and steps.same
    if compared:
        flips, total = _flips(_cache(got), _cache(want))
        assert torch.equal(got.sequences, want.sequences) and _error(got, want) <= 1e-5, f"{flips} of {total} codes"
        assert flips == 0

    found = cache_bytes(_cache(got))
    states = [layer.recurrent_states[0] for layer in _cache(got).layers if hasattr(layer, "recurrent_states")]
    assert found["recurrent"] == sum(state.nbytes for state in states)
    assert {k: v for k, v in found.items() if k != "recurrent"} == {k: v for k, v in dense.items() if k != "recurrent"}
    assert found["recurrent"] <= 0.26 * dense["recurrent"]


@pytest.mark.parametrize("policy", ["int8", "int8-replay"])
def test_a_packed_cache_takes_the_memory_that_it_says(policy: str) -> None:
    """Bytes of all tensors alive with the cache and without it; a finished prefill's exact state is not among them."""
    model, _ = tiny_models.build("qwen3_next", layers=3)
    with quantize_cache(model, policy):
        cache = _cache(_generate(model, _ids(), 3, output_logits=False))
    held = _alive()
    said = sum(cache_bytes(cache).values())
    del cache
    assert held - _alive() == said


def _functions() -> dict[str, Any]:
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    return {name: getattr(modeling, name).__code__ for name in names if hasattr(modeling, name)}


def test_what_quantize_cache_did_is_undone_when_nobody_needs_it() -> None:
    gc.collect()  # caches of other tests
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids, before, hooks = _ids(), _functions(), [len(m._forward_pre_hooks) for m in model.modules()]
    assert before
    want = _generate(model, ids, 4)
    with quantize_cache(model, "int8") as caches:
        assert [*caches.sites.values()] == [lc.PRESETS["int8"]] and _functions() != before
        cache = _cache(_generate(model, ids, 4))
        state = cache.layers[0].recurrent_states[0]
        assert isinstance(state, QuantizedState) and state.heads is not None
        assert model.config.linear_num_key_heads == state.heads.H, "the model of some versions repeats them"
        del state
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any("_lattn_packed" in name for m in model.modules() for name in m.__dict__)
    got = _generate(model, ids, 4)
    assert _error(got, want) == 0 and isinstance(_cache(got).layers[0].recurrent_states[0], torch.Tensor)
    # A packed cache that is still there goes on, and so does a copy of it.
    key = "cache" if got.get("cache") is not None else "past_key_values"
    twin = copy.deepcopy(cache)
    outs = [model(ids[:, :1], use_cache=True, **{key: c}).logits for c in (cache, twin)]
    assert torch.equal(*outs) and _functions() != before
    del cache, twin, outs, caches
    gc.collect()
    assert _functions() == before, "the library's own code again"


def test_a_copy_of_a_model_with_packed_caches_prepares_its_own_calls() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = _ids()
    with quantize_cache(model, "int8"):
        want = _generate(model, ids, 4)
        twin = copy.deepcopy(model)
        assert twin.prepare_inputs_for_generation.__self__ is twin
        got = _generate(twin, ids, 4)
        assert _error(got, want) == 0 and isinstance(_cache(got).layers[0].recurrent_states[0], QuantizedState)


def test_removing_what_was_replaced_removes_nothing() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    first = quantize_cache(model, "int8")
    second = quantize_cache(model, "fp8")
    first.remove()
    state = _cache(model(_ids(), use_cache=True)).layers[0].recurrent_states[0]
    assert state.policy == lc.PRESETS["fp8"] and "removed" in repr(first)
    second.remove()
    second.remove()
    assert isinstance(_cache(model(_ids(), use_cache=True)).layers[0].recurrent_states[0], torch.Tensor)


def test_a_recipe_that_was_set_aside_counts_again() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]

    def stored() -> Any:
        state = _cache(model(_ids(), use_cache=True)).layers[0].recurrent_states[0]
        return state.policy if isinstance(state, QuantizedState) else None

    with quantize_cache(model, "int8") as outer:
        with quantize_cache(model, "fp8"):
            assert stored() == lc.PRESETS["fp8"] and "behind a later one" in repr(outer)
            with quantize_cache(model, lc.Recipe(rules=[("*", lc.Policy(write=lc.Exact()))])):
                assert stored().write == lc.Exact()
            assert stored() == lc.PRESETS["fp8"]
        assert stored() == lc.PRESETS["int8"] and "behind" not in repr(outer)
        cache = _cache(_generate(model, _ids(), 4))
        assert cache.layers[0].recurrent_states[0].policy == lc.PRESETS["int8"]
        quantize_cache(model, "fp8")
        quantize_cache(model, "nvfp4")
        unquantize_cache(model)
        assert stored() is None and "removed" in repr(outer)
    assert stored() is None
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any("_lattn_packed" in name for m in model.modules() for name in m.__dict__)


def test_a_packed_cache_of_another_model_is_refused() -> None:
    (model, _), (other, _) = (tiny_models.build("qwen3_next", layers=n) for n in (2, 3))
    key = "cache" if _generate(model, _ids(), 1).get("cache") is not None else "past_key_values"
    with pytest.raises(
        StateError, match=r"cache: got .*layers\.1\.linear_attn.* want .* packed_cache\(model, recipe\)"
    ):
        _generate(model, _ids(), 4, **{key: packed_cache(other, "int8")})


@pytest.mark.parametrize("longest", [None, 40], ids=["dynamic", "static"])
def test_one_argument_packs_one_call(longest: int | None) -> None:
    model, linear = tiny_models.build("qwen3_next", layers=3)
    ids = _ids()
    plain = _generate(model, ids, 12)
    key = "cache" if plain.get("cache") is not None else "past_key_values"
    with quantize_cache(model, "int8"):
        want = _generate(model, ids, 12)
    cache = packed_cache(model, "int8", max_cache_len=longest)
    got = _generate(model, ids, 12, **{key: cache})
    assert torch.equal(got.sequences, want.sequences) and _error(got, want) <= 1e-5
    states = [layer.recurrent_states[0] for layer in cache.layers if hasattr(layer, "recurrent_states")]
    assert len(states) == linear and all(isinstance(state, QuantizedState) for state in states)
    again = _generate(model, ids, 12)
    assert _error(again, plain) == 0 and isinstance(_cache(again).layers[0].recurrent_states[0], torch.Tensor)
    with pytest.raises(LattnError, match="none is attached"):
        packed_cache(model)
    with pytest.raises(LattnError, match="without a config"):
        packed_cache(torch.nn.Sequential(model.model.layers[0]), "int8")


def test_three_graphs_serve_prefill_hand_over_and_steps_and_the_report_says_packed() -> None:
    model, linear = tiny_models.build("qwen3_next", layers=2)
    policy = lc.Policy(lc.Int8(), write=lc.Replay(8), storage="packed")
    quantize_cache(model, policy)
    with recorded() as record:
        before = backend.compile_count()
        got = _compiled(model, _ids(), 20, policy)
        assert backend.compile_count() - before == 3
    assert all(report.left == [] for report in lc.reports()[-3:])
    assert [call.op for call in record.calls if call.op.endswith("_")] == ["lattn::replay_"] * linear * 19
    assert torch.equal(got.sequences, _generate(model, _ids(), 20).sequences)
    report = record.report
    assert [site.op for site in report.rewritten] == ["lattn::replay_"] * linear and report.left == []
    site = report.sites[0]
    assert site.policy is not None and lc.Policy.from_dict(site.policy) == policy
    # transformers 5.17 repeats the key heads before the call, so the ring keeps each key twice.
    want = policy.nbytes(int(site.shapes["H"]), 4, 16, 24)
    assert site.state_bytes_after == want == _cache(got).layers[0].recurrent_states[0].nbytes / 2
    assert "once packed" not in report.summary()


def _steps_of(model: Any, forward: Any, tokens: int) -> torch.Tensor:
    """Logits of decode steps that `forward` makes, after a prefill that the model makes."""
    ids = _ids()
    out = model(ids[:, :6], use_cache=True)
    key, cache, logits = ("cache" if "cache" in out else "past_key_values"), _cache(out), []
    for t in range(6, 6 + tokens):
        logits.append(forward(ids[:, t : t + 1], use_cache=True, **{key: cache}).logits)
    return torch.cat(logits, 1)


def test_a_recipe_that_asks_for_another_policy_is_told_that_the_cache_has_its_own() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    quantize_cache(model, "int8")
    forward = torch.compile(model.forward, backend="lattn_compile", options={"policy": "fp8"})
    with recorded() as record, pytest.warns(lc.LattnWarning, match="PACKED_STATE"):
        _steps_of(model, forward, 1)
    assert {site.reason.code for site in record.report.sites if site.reason} == {"PACKED_STATE"}


def test_a_packed_policy_over_a_dense_cache_is_refused_where_it_would_have_to_be_stored() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    policy = lc.Policy(lc.Int8(), storage="packed")
    forward = torch.compile(model.forward, backend="lattn_compile", options={"policy": policy})
    with recorded(), pytest.raises(UnsupportedError, match="caches that quantize_cache made"):
        _steps_of(model, forward, 1)
    report = lc.inspect(model, (_ids(1, 8),), {"use_cache": False}, policy=policy)
    assert report.sites[0].state_bytes_after == policy.nbytes(2, 4, 16, 24)


REPLAY = lc.Policy(lc.Int8(), write=lc.Replay(4, factors="int8"), readout="after_write")


def test_teacher_forced_decoding_is_what_training_saw() -> None:
    """A model trained under a recipe, served packed, token by token: the same function where no code flips."""
    model, _ = tiny_models.build("qwen3_next", layers=2)
    model = lc.attach(model.double(), REPLAY)
    ids, prefix = _ids(2, 36), 24
    with recorded():
        compiled = torch.compile(model.forward, backend="lattn_compile")
        with lc.training_phase(prefix):
            want = compiled(ids, use_cache=False).logits
        exact = compiled(ids, use_cache=False).logits
        quantize_cache(model)  # the recipe comes with the model
        out = compiled(ids[:, :prefix], use_cache=True)
        logits, cache = [out.logits], _cache(out)
        key = "cache" if "cache" in out else "past_key_values"
        for t in range(prefix, ids.shape[1]):
            logits.append(compiled(ids[:, t : t + 1], use_cache=True, **{key: cache}).logits)
    got = torch.cat(logits, 1)
    assert (got - want).abs().max() <= 1e-9
    assert (got - exact).abs().max() > 1e-5, "quantization must be visible"


@pytest.mark.parametrize("name", NAMES)
def test_an_exact_recipe_generates_what_a_dense_cache_generates(name: str) -> None:
    model, _ = tiny_models.build(name, layers=3)
    want = _generate(model, _ids(), 20)
    quantize_cache(model, "exact")
    got = _generate(model, _ids(), 20)
    assert torch.equal(got.sequences, want.sequences) and _error(got, want) <= 1e-5
    unquantize_cache(model)
    again = _generate(model, _ids(), 20)
    assert _error(again, want) == 0 and isinstance(_cache(again).layers[0].recurrent_states[0], torch.Tensor)


def test_static_caches_beams_and_reset_work_as_before() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    ids = _ids()
    dense = model.generate(ids, max_new_tokens=12, num_beams=3, do_sample=False)
    quantize_cache(model, "exact")
    assert torch.equal(model.generate(ids, max_new_tokens=12, num_beams=3, do_sample=False), dense)
    quantize_cache(model, "int8")
    want = _generate(model, ids, 12)
    static = _generate(model, ids, 12, cache_implementation="static")
    assert torch.equal(static.sequences, want.sequences) and _error(static, want) <= 1e-5
    cache = _cache(static)
    key = "cache" if static.get("cache") is not None else "past_key_values"
    cache.reset()
    assert _error(_generate(model, ids, 12, **{key: cache}), want) <= 1e-5
    # A prompt that is computed once and used often.
    first = model(ids[:, :12], use_cache=True)
    for _ in range(2):
        again = _generate(model, ids, 12, **{key: copy.deepcopy(_cache(first))})
        assert torch.equal(again.sequences, want.sequences)


def test_a_prompt_in_pieces_stays_exact_and_a_second_turn_starts_from_what_a_reader_sees() -> None:
    model, _ = tiny_models.build("kimi_linear", layers=3)
    ids = _ids(2, 30)
    whole = model(ids).logits
    quantize_cache(model, "int8")
    first = model(ids[:, :10], use_cache=True)
    key = "cache" if "cache" in first else "past_key_values"
    cache = _cache(first)
    state = cache.layers[0].recurrent_states[0]
    second = model(ids[:, 10:29], use_cache=True, **{key: cache})
    assert (torch.cat([first.logits, second.logits], 1) - whole[:, :29]).abs().max() <= 1e-5
    assert state.exact is not None and (state.cursor < 0).all(), "stored ahead, and exact to every reader"
    model(ids[:, 29:], use_cache=True, **{key: cache})
    assert state.exact is None and state.tensors
    seen = state.dense().clone()
    model(ids[:, :5], use_cache=True, **{key: cache})
    assert state.exact is not None and not torch.equal(state.exact, seen)


def _oracle(sequence: torch.Tensor, start: int) -> Any:
    """Proposes what will be right, and every third time something wrong behind one or two right tokens."""
    calls = [0]

    def get_candidates(self: Any, input_ids: torch.Tensor) -> Any:
        calls[0] += 1
        at = input_ids.shape[1]
        drafts = sequence[:, at : at + 4].clone()
        if calls[0] % 3 == 0 and drafts.shape[1] > 2:
            drafts[:, 1 + calls[0] % 2 :] = 1
        return torch.cat([input_ids, drafts], 1), None

    return get_candidates


@pytest.mark.parametrize(("name", "policy"), [("qwen3_next", "int8"), ("qwen3_next", "exact"), ("kimi_linear", REPLAY)])
def test_drafted_generation_generates_what_plain_generation_generates(name: str, policy: Any) -> None:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    model, _ = tiny_models.build(name, layers=3)
    ids = _ids(1)
    with pytest.raises(ValueError, match="stateful"):
        _generate(model, ids, 4, prompt_lookup_num_tokens=4, output_logits=False)
    quantize_cache(model, policy)
    plain = _generate(model, ids, 40, output_logits=False)
    calls = []
    hook = model.register_forward_pre_hook(lambda _, a, k: calls.append(k["input_ids"].shape[1]), with_kwargs=True)
    with mock.patch.object(PromptLookupCandidateGenerator, "get_candidates", _oracle(plain.sequences, ids.shape[1])):
        drafted = _generate(model, ids, 40, prompt_lookup_num_tokens=4, output_logits=False)
    hook.remove()
    assert torch.equal(drafted.sequences, plain.sequences)
    assert calls[0] == 20 and max(calls[1:]) == 5 and len(calls) < 20, "the prompt alone, then drafts"
    if policy == "int8":
        a, b = (_cache(x).layers[0].recurrent_states[0] for x in (plain, drafted))
        for key, x in a.tensors.items():
            assert torch.equal(x, b.tensors[key]), f"{key}: token mode promises the bits"


def test_an_assistant_model_drafts_for_a_packed_one() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model, _ = tiny_models.build("qwen3_next", layers=2)
    torch.manual_seed(3)
    sizes = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    assistant = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None, pad_token_id=0)).eval()
    quantize_cache(model, "int8")
    plain = _generate(model, _ids(1), 12, output_logits=False)
    drafted = _generate(model, _ids(1), 12, assistant_model=assistant, output_logits=False)
    assert torch.equal(drafted.sequences, plain.sequences)


def test_recipes_by_path_leave_other_layers_as_they_are() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=3)
    quantize_cache(model, lc.Recipe(rules=[("model.layers.0.linear_attn", "int8"), ("*", None)]))
    out = model(_ids(), use_cache=True)
    first, second = _cache(out).layers[:2]
    assert isinstance(first.recurrent_states[0], lc.QuantizedState)
    assert isinstance(second.recurrent_states[0], torch.Tensor)


def test_a_cache_that_has_a_past_is_taken_over_exact() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = _ids()
    out = model(ids, use_cache=True)
    key, cache = ("cache" if "cache" in out else "past_key_values"), _cache(out)
    twin = copy.deepcopy(cache)
    quantize_cache(model, "exact")
    got = model(ids[:, :1], use_cache=True, **{key: cache}).logits
    assert isinstance(cache.layers[0].recurrent_states[0], lc.QuantizedState)
    unquantize_cache(model)
    assert (got - model(ids[:, :1], use_cache=True, **{key: twin}).logits).abs().max() <= 1e-5


def test_misuse_is_refused_by_name() -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    with pytest.raises(LattnError, match="none is attached"):
        quantize_cache(model)
    with pytest.raises(LattnError, match="no layer calls a recurrence"):
        quantize_cache(torch.nn.Linear(2, 2), "int8")
    with pytest.raises(LattnError, match="got Qwen3NextConfig; want a model"):
        packed_cache(model.config, "int8")
    with pytest.warns(LattnWarning, match="no policy for any layer of this model"):
        quantize_cache(model, lc.Recipe([("nothing", "int8")])).remove()
    with pytest.raises(PolicyError, match="Inside a chunk"):
        quantize_cache(model, lc.Policy(write=lc.Chunk(8)))
    with pytest.raises(UnsupportedError, match="gate"):
        quantize_cache(model, lc.Policy(gate="bf16"))
    quantize_cache(model, "int8")
    with torch.enable_grad(), pytest.raises(UnsupportedError, match="no_grad"):
        model(_ids(), use_cache=True)
    with pytest.raises(StateError, match="was no draft"):
        out = model(_ids(), use_cache=True)
        _cache(out).activate_past_recording()
        _cache(out).crop(-1)


@pytest.mark.parametrize("who", ["both", "part of the assistant", "itself"])
def test_an_assistant_may_be_quantized_too(who: str) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    assistant = model if who == "itself" else tiny_models.build("qwen3_next", seed=1, layers=3)[0]
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    part = lc.Recipe(rules=[("model.layers.0.*", "int8"), ("*", None)])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad(), quantize_cache(model, "int8-replay"):
        want = model.generate(ids, **options)
        if who == "itself":
            got = model.generate(ids, assistant_model=assistant, **options)
        else:
            with quantize_cache(assistant, part if who.startswith("part") else "int8"):
                got = model.generate(ids, assistant_model=assistant, **options)
        copied = copy.deepcopy(model)
    assert torch.equal(got, want)
    assert "_prepare_cache_for_generation" not in vars(model)
    assert copied._prepare_cache_for_generation.__self__ is copied
