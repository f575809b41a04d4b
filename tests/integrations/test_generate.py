"""Whole `generate()` under CUDA graphs, on a machine without any.

A stand-in for Inductor does what torch does with recorded graphs: what one returned is taken back (here: overwritten)
when the next one runs, and none may write to an input that is not known to stay where it is.
`tests/gpu/generate_checks` has the same on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.lowering import _torch_kept as kept
from lattn_compile.policy import Policy, Replay, TwoPrecision
from tests import tiny_models

pytest.importorskip("transformers")
from transformers import CompileConfig, StaticCache

from lattn_compile.integrations.transformers import cache_bytes, packed_cache, quantize_cache

POLICIES = {
    "int8": Policy(lc.Int8()),
    "replay": Policy(lc.Int8(), write=Replay(4)),
    "two precisions": Policy(write=TwoPrecision(4)),
    "stochastic": Policy(lc.Int8(), rounding="stochastic", feedback="int8"),
}


class Recorder:
    """Stands where Inductor does. `graphs`: for each compiled one, whether it is recorded, and the places of the inputs
    that it writes to, once for each recording."""

    def __init__(self) -> None:
        self.graphs: list[tuple[bool, list[tuple[int, ...]]]] = []
        self.returned: list[Any] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any, patches: dict[str, Any], *rest: Any) -> Callable[..., Any]:
        return self.compile(gm, kept.records(patches))

    def foreign(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """As a backend of torch.compile that is not ours and records everything."""
        return self.compile(gm, True)

    def compile(self, gm: fx.GraphModule, records: bool) -> Callable[..., Any]:
        nodes = gm.graph.find_nodes(op="placeholder")
        fixed = [bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")) for node in nodes]
        places: list[tuple[int, ...]] = []
        self.graphs.append((records, places))

        def run(*args: Any) -> Any:
            if not records:
                return gm(*args)
            tensors = [x for x in args if isinstance(x, Tensor)]
            mine = {x.untyped_storage().data_ptr() for x in tensors}
            for old in (y for ref in self.returned if (y := ref()) is not None):
                assert old.untyped_storage().data_ptr() not in mine, "a graph reads what another one has taken back"
                old.fill_(float("nan") if old.is_floating_point() and old.dtype.itemsize > 1 else 1)
            before = [x._version if isinstance(x, Tensor) else 0 for x in args]
            out = gm(*args)
            written = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x._version != before[i]]
            assert all(fixed[i] for i in written), [nodes[i].name for i in written if not fixed[i]]
            now = tuple(args[i].data_ptr() for i in written)
            if now not in places:
                places.append(now)
            made = [x for x in out if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in mine]
            self.returned = [weakref.ref(x) for x in made]
            return out

        return run

    @property
    def recorded(self) -> list[list[tuple[int, ...]]]:
        return [places for records, places in self.graphs if records]


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    torch._dynamo.reset()
    made = Recorder()
    monkeypatch.setattr(backend.private, "compile_with_inductor", made)
    with torch.no_grad():
        yield made


def _ids(batch: int = 2, length: int = 20) -> Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def _generate(model: Any, ids: Tensor, tokens: int = 9, **options: Any) -> Any:
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)


def _cache(out: Any) -> Any:
    return out["cache"] if out.get("cache") is not None else out["past_key_values"]


def _compile(model: Any, how: str, policy: Any, recorder: Recorder, mode: str = "reduce-overhead") -> dict[str, Any]:
    """Compiles, and returns the options of `generate()` that say so."""
    options = {"mode": mode} | ({} if policy is None else {"policy": policy})
    if how == "forward":
        model.forward = torch.compile(model.forward, backend="lattn_compile", options=options, fullgraph=True)
        return {}
    if how == "module":
        model.compile(backend="lattn_compile", options=options, fullgraph=True)
        return {}
    chosen: dict[str, Any] = {"backend": "lattn_compile", "options": options}
    if how == "foreign":
        # generate() copies its config, and a function is its own copy.
        chosen = {"backend": lambda gm, inputs: recorder.foreign(gm, inputs), "options": None}
    config = CompileConfig(mode=None, fullgraph=True, **chosen)
    config._compile_all_devices = True
    return {"compile_config": config}


def _same(got: Any, want: Any) -> None:
    """Both are the reference's operations one by one: where nothing was taken back, the numbers are the same but for
    the prefill, which is another algorithm where it is compiled."""
    assert torch.equal(got.sequences, want.sequences)
    assert max(float((a - b).abs().max()) for a, b in zip(got.logits, want.logits, strict=True)) <= 1e-4


@pytest.mark.parametrize(
    ("how", "cache", "name"),
    [
        ("auto", "static", "stochastic"),
        ("foreign", "static", "replay"),
        ("foreign", "static", "two precisions"),
        ("forward", "static", "replay"),
        ("module", "dynamic", "int8"),
    ],
)
def test_nothing_that_is_taken_back_stays_in_a_packed_cache(
    how: str, cache: str, name: str, recorder: Recorder
) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    policy, options = POLICIES[name], {"cache_implementation": "static"} if cache == "static" else {}
    quantize_cache(model, policy)
    want = _generate(model, _ids(), **options)
    options |= _compile(model, how, policy, recorder)
    for _ in range(2):
        got = _generate(model, _ids(), **options)
        _same(got, want)
        states = [x for layer in _cache(got).layers for x in getattr(layer, "recurrent_states", {}).values()]
        assert states and all(x.exact is None for x in states)
        assert cache_bytes(_cache(got))["recurrent"] == sum(x.nbytes for x in states)
    if cache == "dynamic":
        assert recorder.recorded == [], "a cache that grows is another size at every step"
        return
    # Eager code prefills and hands over: one graph, of all steps. Else prefill and hand-over are graphs of their own.
    assert len(recorder.graphs) == (1 if how in ("auto", "foreign") else 3)
    (places,) = recorder.recorded
    assert len(places) == 2, "once for each of the two caches"


@pytest.mark.parametrize(("cache", "policy"), [("static", "int8"), ("dynamic", "exact")])
def test_nothing_that_is_taken_back_stays_in_a_cache_of_tensors(cache: str, policy: str, recorder: Recorder) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    options = {"cache_implementation": "static"} if cache == "static" else {}
    with quantize_cache(model, policy):
        want = _generate(model, _ids(), **options)
    _compile(model, "forward", policy, recorder)
    for _ in range(2):
        _same(_generate(model, _ids(), **options), want)
    assert len(recorder.recorded) == (cache == "static")


@pytest.mark.parametrize("mode", ["max-autotune", "default"])
@pytest.mark.filterwarnings("ignore:nothing was rewritten")
def test_a_graph_is_recorded_where_the_mode_says_so_and_nothing_stays(mode: str, recorder: Recorder) -> None:
    class Box:
        held: Any = None

    box = Box()

    def step(x: Tensor, keeps: bool) -> Tensor:
        y = x.sin()
        box.held = [y] if keeps else None
        return y + 1

    options = {"policy": "int8", "mode": mode}
    compiled = torch.compile(step, backend="lattn_compile", options=options, fullgraph=True)
    compiled(torch.ones(3), True)
    compiled(torch.ones(3), False)
    assert [records for records, _ in recorder.graphs] == [False, mode == "max-autotune"]


def test_one_cache_over_turns_and_resets_is_recorded_once(recorder: Recorder) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    policy = POLICIES["replay"]
    quantize_cache(model, policy)

    def turns(**options: Any) -> list[Any]:
        cache, outs = StaticCache(model.config, 128), list[Any]()
        for turn in range(3):
            if turn == 2:
                cache.reset()
            given = torch.cat([outs[-1].sequences, _ids(2, 7)], 1) if turn == 1 else _ids()
            outs.append(_generate(model, given, past_key_values=cache, **options))
        return outs

    want = turns()
    got = turns(**_compile(model, "foreign", policy, recorder))
    for a, b in zip(got, want, strict=True):
        _same(a, b)
    assert [len(places) for places in recorder.recorded] == [1]


def test_a_cache_for_one_call_needs_nothing_of_the_model(recorder: Recorder) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    ids = _ids()
    want = _generate(model, ids, past_key_values=packed_cache(model, "int8-replay", max_cache_len=40))
    options = _compile(model, "foreign", None, recorder)
    for _ in range(2):
        _same(
            _generate(model, ids, past_key_values=packed_cache(model, "int8-replay", max_cache_len=40), **options), want
        )
    # The first step releases the exact state, and writes where the others do.
    assert [len(places) for places in recorder.recorded] == [2, 2]


def test_drafts_lose_nothing(recorder: Recorder) -> None:
    model, _ = tiny_models.build("qwen3_next", layers=2)
    quantize_cache(model, "int8")
    ids, more = _ids(1, 5).repeat(1, 4), {"prompt_lookup_num_tokens": 4, "output_logits": False}
    want = _generate(model, ids, **more)
    options = {"policy": "int8", "mode": "reduce-overhead"}
    model.forward = torch.compile(model.forward, backend="lattn_compile", options=options)
    assert torch.equal(_generate(model, ids, **more).sequences, want.sequences)


def test_a_loop_of_ones_own_keeps_what_a_compiled_prefill_made(recorder: Recorder) -> None:
    """Also a cache that is made inside of the compiled call."""
    model, _ = tiny_models.build("qwen3_next", layers=2)
    quantize_cache(model, "int8")

    def logits(forward: Any) -> Tensor:
        out, found = forward(_ids(), use_cache=True), []
        key, cache = ("cache" if "cache" in out else "past_key_values"), _cache(out)
        for t in range(6):
            found.append(forward(_ids()[:, t : t + 1], use_cache=True, **{key: cache}).logits.clone())
        return torch.cat(found, 1)

    want = logits(model)
    options = {"policy": "int8", "mode": "reduce-overhead"}
    got = logits(torch.compile(model.forward, backend="lattn_compile", options=options, fullgraph=True))
    assert (got - want).abs().max() <= 1e-4
    assert recorder.recorded == []
