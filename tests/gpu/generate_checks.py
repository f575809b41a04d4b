"""Whole `model.generate()` under torch.compile on a GPU, beside eager code with the same caches.

Needs transformers; flash-linear-attention is kept out, whose kernels would be tuned for minutes. A check's name says
the cache, who compiles, the mode and the policy:

    forward     model.forward = torch.compile(model.forward, backend="lattn_compile"): prefill and steps
    module      model.compile(backend="lattn_compile"): the same
    auto        CompileConfig(backend="lattn_compile") of generate(): the steps
    plain       what generate() does by itself with a static cache: the steps, by Inductor alone

Rows `(what, measured, bound)`, as everywhere in this folder. The first call compiles, the second records, later ones
replay. They have caches of their own, and caches of calls before them stay alive.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import lattn_compile as lc
from lattn_compile.policy import Policy, Replay, TwoPrecision
from tests.gpu.checks import Checks, Row

__all__ = ["CHECKS", "Row"]

POLICIES = {
    "exact": Policy(write=lc.Exact()),
    "int8": Policy(lc.Int8()),
    "int8 8": Policy(lc.Int8(), write=Replay(8)),
    "two precision 16": Policy(write=TwoPrecision(16)),
}
TOKENS = 40
"""Decoded tokens: over the ends of windows."""
CALLS = 4

CHECKS = Checks()
_check, _each = CHECKS.check, CHECKS.each


def _model() -> Any:
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
    from tests import tiny_models

    torch._dynamo.reset()
    counters.clear()
    model, _ = tiny_models.build("qwen3_next", layers=3)
    return model.cuda().requires_grad_(False)


def _ids(length: int = 20) -> Tensor:
    return torch.randint(2, 97, (2, length), generator=torch.Generator().manual_seed(1)).cuda()


def _generate(model: Any, ids: Tensor, tokens: int = TOKENS, **options: Any) -> Any:
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)


def _compile(model: Any, how: str, mode: str, policy: Policy) -> dict[str, Any]:
    """Compiles, and returns the options of `generate()` that say so."""
    options = {"policy": policy, "mode": mode}
    if how == "forward":
        model.forward = torch.compile(model.forward, backend="lattn_compile", options=options)
    elif how == "module":
        model.compile(backend="lattn_compile", options=options)
    elif how == "auto":
        from transformers import CompileConfig

        chosen = CompileConfig(backend="lattn_compile", mode=None, fullgraph=True, options=options)  # type: ignore[arg-type]
        return {"compile_config": chosen}
    return {} if how == "plain" else {"disable_compile": True}


def _cache(out: Any) -> Any:
    return out["cache"] if out.get("cache") is not None else out["past_key_values"]


def _compare(what: str, got: Any, want: Any, policy: Policy) -> list[Row]:
    """A code that flips is seen in the logits; without one, fp32 sums in another order."""
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(got.logits, want.logits, strict=True))
    unlike = float((got.sequences != want.sequences).sum())
    bound = 1e-3 if policy.write.mode == "exact" else 0.1
    return [(f"{what} logits", worst, bound), (f"{what} tokens", unlike, 0.0)]


def _bytes(cache: Any, policy: Policy) -> list[Row]:
    """What the states really take beyond what the policy promises, and whether anything exact is left."""
    states = [x for layer in cache.layers for x in getattr(layer, "recurrent_states", {}).values()]
    left = sum(x.exact is not None for x in states)
    more = sum(x.nbytes - x.slots * (4 + policy.nbytes(*x.heads[:4])) for x in states)
    return [("exact states left", float(left), 0.0), ("bytes beyond the promise", float(more), 0.0)]


def _recorded() -> bool:
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_container(torch.cuda.current_device()).tree_manager
    return manager is not None and manager.new_graph_id().id > 0


def _graphs(cache: str, mode: str) -> list[Row]:
    if mode not in ("reduce-overhead", "max-autotune"):
        return []
    skipped = float(counters["inductor"]["cudagraph_skips"])
    # A cache that grows is another size at every step: nothing of it is recorded, and nothing is lost by it.
    unlike = float(_recorded() != (cache == "static"))
    return [("graphs skipped", skipped, 0.0), ("recorded, or not", unlike, 0.0)]


def _run(cache: str, how: str, mode: str, name: str, packed: bool = True) -> list[Row]:
    from lattn_compile.integrations.transformers import quantize_cache

    policy, model, ids = POLICIES[name], _model(), _ids()
    options: dict[str, Any] = {"cache_implementation": "static"} if cache == "static" else {}
    caches = quantize_cache(model, policy)
    with torch.no_grad():
        want = _generate(model, ids, **options, disable_compile=True)
        if not packed:  # the emulation has the numbers of what is stored
            caches.remove()
        options |= _compile(model, how, mode, policy)
        outs = [_generate(model, ids, **options) for _ in range(CALLS)]
    found = []
    for i, out in enumerate(outs):
        found += _compare(f"call {i}", out, want, policy)
    if packed:
        found += [row for out in outs for row in _bytes(_cache(out), policy)]
    return [*found, *_graphs(cache, mode)]


@_each("static auto reduce-overhead", POLICIES)
def _static_auto(name: str) -> list[Row]:
    return _run("static", "auto", "reduce-overhead", name)


@_each("static forward reduce-overhead", POLICIES)
def _static_forward(name: str) -> list[Row]:
    return _run("static", "forward", "reduce-overhead", name)


@_each("dynamic forward reduce-overhead", POLICIES)
def _dynamic_forward(name: str) -> list[Row]:
    return _run("dynamic", "forward", "reduce-overhead", name)


@_each("static plain reduce-overhead", ("int8", "int8 8", "two precision 16"))
def _static_plain(name: str) -> list[Row]:
    return _run("static", "plain", "reduce-overhead", name)


@_each("static module", ("reduce-overhead", "max-autotune", "default"))
def _static_module(mode: str) -> list[Row]:
    return _run("static", "module", mode, "int8 8")


@_each("dynamic module", ("max-autotune", "default"))
def _dynamic_module(mode: str) -> list[Row]:
    return _run("dynamic", "module", mode, "int8")


@_each("emulated static forward reduce-overhead", ("exact", "int8"))
def _emulated_static(name: str) -> list[Row]:
    return _run("static", "forward", "reduce-overhead", name, packed=False)


@_each("emulated dynamic forward reduce-overhead", ("exact", "int8"))
def _emulated_dynamic(name: str) -> list[Row]:
    return _run("dynamic", "forward", "reduce-overhead", name, packed=False)


@_each("one call", ("auto", "forward", "plain"))
def _one_call(how: str) -> list[Row]:
    """`packed_cache` for one call: nothing was done to the model."""
    from lattn_compile.integrations.transformers import packed_cache

    policy, model, ids = POLICIES["int8 8"], _model(), _ids()

    def run(**options: Any) -> Any:
        cache = packed_cache(model, policy, max_cache_len=ids.shape[1] + TOKENS)
        return _generate(model, ids, past_key_values=cache, **options)

    with torch.no_grad():
        want = run(disable_compile=True)
        options = _compile(model, how, "reduce-overhead", policy)
        outs = [run(**options) for _ in range(CALLS)]
    found = [row for i, out in enumerate(outs) for row in _compare(f"call {i}", out, want, policy)]
    return [*found, *_bytes(_cache(outs[-1]), policy), *_graphs("static", "reduce-overhead")]


@_each("turns", ("auto", "forward"))
def _turns(how: str) -> list[Row]:
    """Several turns over one static cache, then `reset()` and the first again: what is stored stays where it is."""
    from transformers import StaticCache

    from lattn_compile.integrations.transformers import quantize_cache

    policy, model, ids = POLICIES["int8 8"], _model(), _ids()
    quantize_cache(model, policy)

    def run(**options: Any) -> tuple[list[Any], set[tuple[int, ...]]]:
        cache, outs, places = StaticCache(model.config, 256), [], set()
        for turn in range(4):
            if turn == 3:
                cache.reset()
            given = ids if turn in (0, 3) else torch.cat([outs[-1].sequences, _ids(7)], 1)
            outs.append(_generate(model, given, 20, past_key_values=cache, **options))
            states = [x for layer in cache.layers for x in getattr(layer, "recurrent_states", {}).values()]
            places.add(tuple(y.data_ptr() for x in states for y in x.held().values()))
        return outs, places

    with torch.no_grad():
        want, _ = run(disable_compile=True)
        got, places = run(**_compile(model, how, "reduce-overhead", policy))
    found = [row for i, (a, b) in enumerate(zip(got, want, strict=True)) for row in _compare(f"turn {i}", a, b, policy)]
    return [*found, ("places of what is stored", float(len(places)), 1.0), *_graphs("static", "reduce-overhead")]


@_each("searched", ("beams", "prompt lookup"))
def _searched(what: str) -> list[Row]:
    """Beams, which move the states, and drafts, which are verified."""
    from lattn_compile.integrations.transformers import quantize_cache

    policy, model = POLICIES["int8"], _model()
    quantize_cache(model, policy)
    ids = _ids() if what == "beams" else _ids()[:1, :5].repeat(1, 4)
    more = {"num_beams": 3} if what == "beams" else {"prompt_lookup_num_tokens": 4}
    with torch.no_grad():
        want = _generate(model, ids, 24, output_logits=False, **more)
        _compile(model, "forward", "reduce-overhead", policy)
        outs = [_generate(model, ids, 24, output_logits=False, **more) for _ in range(2)]
    return [(f"call {i} tokens", float((out.sequences != want.sequences).sum()), 0.0) for i, out in enumerate(outs)]
