"""transformers' caches with packed recurrent states: `quantize_cache` for a model, `packed_cache` for one cache.

A cache of transformers (`DynamicCache`, `StaticCache`) is a list of layers, and a layer of linear attention holds its
recurrent state as one tensor that the model's code fetches, passes to a library function, and puts back. Here it is a
`QuantizedState` instead. The library functions take one (`passes.capture`), under every compiler, and in eager code
while a quantized model or a packed cache is there. A hook on each layer of the model swaps the cache's layer before the
layer runs, so it does not matter who made the cache.

What a prefill leaves is staged exact. The first decode step hands it over and releases it. A later call of several
tokens is a prefill again, from what a reader sees, unless the cache is recording its past: then it verifies drafts.

An eager prefill, which is what `generate()` makes for a static cache, also stores what will be handed over, so that
every compiled step finds its tensors where the next one does: CUDA graphs may record them, whoever compiles them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionLayer, StaticCache

from lattn_compile.attach import attached_recipe
from lattn_compile.carry import Call
from lattn_compile.errors import LattnError, LattnWarning, StateError, UnsupportedError, reason
from lattn_compile.integrations import assisted
from lattn_compile.lowering._torch_kept import fix_address
from lattn_compile.packed import serving
from lattn_compile.packed.layout import call_of
from lattn_compile.packed.state import QuantizedState
from lattn_compile.passes import capture
from lattn_compile.passes.recognize import heads_cut
from lattn_compile.policy import Policy, Recipe, resolve_recipe
from lattn_compile.recurrence import KINDS

__all__ = ["PackedCaches", "PackedLayer", "cache_bytes", "packed_cache", "quantize_cache", "unquantize_cache"]

_SITE = "_lattn_packed_site"
_CACHES = "_lattn_packed_caches"  # of a model: its `PackedCaches`, of which the last is in force
_PREPARE = "prepare_inputs_for_generation"
# By name, because Dynamo of torch 2.11 does not trace through an object's `__dict__`.
_OF_A_LAYER = tuple(name for name in vars(LinearAttentionLayer()) if name != "recurrent_states")


@dataclasses.dataclass(frozen=True)
class Site:
    """What the cache of one layer of the model is to do.

    `serving` is kept as long as a cache layer, or a copy of one, can be passed to a model. `repeats`: how often a key
    head stands in a call's queries and keys.
    """

    id: str
    policy: Policy
    call: Call
    number: int
    serving: capture.Serving
    repeats: int = 1


class PackedLayer(LinearAttentionLayer):
    """A cache layer of transformers whose recurrent states are `QuantizedState`s."""

    def __init__(self, site: Site, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.site = site
        self.seen = 0  # tokens of the calls that went through `update_conv_state`
        self.prefills = False  # the next call is prefill, though the cache has a past and records it

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        before = self.seen if self.has_previous_state[state_idx] else 0
        self.seen = before + conv_states.shape[-1]
        out: Tensor = super().update_conv_state(conv_states, state_idx, *args, **kwargs)
        return out

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Stages what a prefill left; a packed state was written in place already."""
        if isinstance(recurrent_states, QuantizedState):
            return recurrent_states
        states = self._states()
        state = states[state_idx]
        if state is None:
            state = QuantizedState(self.site.policy, site_id=self.site.number, call=self.site.call)
            state.repeats = self.site.repeats
            states[state_idx] = state
            self.is_recurrent_states_initialized[state_idx] = True
        state.stage(recurrent_states, seen=self.seen)
        if not torch.compiler.is_compiling():
            _settle(state, recurrent_states)
        return state

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """What a layer of attention asks of its cache.

        Raises:
            StateError: always: the cache was made for another model.
        """
        raise StateError(
            "cache",
            got=f"one whose layer here is packed for {self.site.id}, from a layer that keeps keys and values",
            want="a cache made for this model",
            remedy="Make it with packed_cache(model, recipe) of the model that is called.",
        )

    def _states(self) -> dict[int, Any]:
        return self.recurrent_states

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` undoes what the last call did: it does where that verified drafts."""
        return self.record_past and not self.prefills

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens of the call before, which verified drafts."""
        super().crop(tokens_to_remove)
        self.prefills = False
        for state in self._states().values():
            if state is None:
                continue
            if state.draft is not None:
                state.accept(state.draft.tokens[0].shape[1] + tokens_to_remove)
            elif tokens_to_remove:
                raise StateError(
                    "tokens_to_remove",
                    got=f"{tokens_to_remove} after a call that was no draft",
                    want="0, or a call that verified drafts before",
                    remedy="Call cache.activate_past_recording() after the prefill, and crop after every call.",
                )

    def ready(self) -> None:
        """Before the model's layer runs: says whether its tokens are drafts."""
        drafts = self.record_past and not self.prefills
        for i, state in self._states().items():
            if state is not None and state.verifies != (drafts and self.has_previous_state[i]):
                state.verifies = drafts and self.has_previous_state[i]

    def begin(self, tokens: int) -> None:
        """Before a call of that many tokens, in eager code: a suffix releases what the prefill left exact."""
        if tokens != 1 and (not self.record_past or self.prefills):
            return
        for i, state in self._states().items():
            if state is not None and state.encoded and self.has_previous_state[i]:
                state.hand_over(state.heads, state.rule)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x.index_select(0, indices.to(x.device)))

    def _each(self, fn: Any) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for i, x in states.items():
                if x is not None:
                    states[i] = fn(x)


def _settle(state: QuantizedState, final: Tensor) -> None:
    """Stores what is staged, and marks the tensors as having a place of their own: a CUDA graph may write to them."""
    made = serving.noted(final)
    if made is not None and made[2] and state.exact is not None:
        state.exact = state.exact.double()
    if made is not None or state.heads is not None:
        heads, rule = (state.heads, state.rule) if made is None else made[:2]
        assert heads is not None
        if made is not None and heads.H == heads.HV:
            heads = heads._replace(H=heads.H // state.repeats)
        state.encode(heads, rule)
        for name, x in state.held().items():
            if name != "exact":
                fix_address(x)


class PackedCaches:
    """What `quantize_cache` did to a model, until `remove()`; as a context, until its end.

    Attributes:
        model: the model. sites: path of each quantized layer's recurrence -> its policy.
    """

    def __init__(self, model: nn.Module, sites: list[tuple[nn.Module, Site | None]]) -> None:
        self.model = model
        self.sites = {site.id: site.policy for _, site in sites if site is not None}
        self._layers = sites
        self._hooks: list[tuple[nn.Module, Any]] = []
        self._begins: types.MethodType | None = None
        stack: list[PackedCaches] = model.__dict__.setdefault(_CACHES, [])
        if stack:
            stack[-1]._rest()
        stack.append(self)
        self._serve()

    def _serve(self) -> None:
        for module, site in self._layers:
            if site is not None:
                object.__setattr__(module, _SITE, site)
                self._hooks.append((module, module.register_forward_pre_hook(_before, with_kwargs=True)))
        if all(site is not None for _, site in self._layers):
            assisted.allow(self.model)
        assisted.mark_assistants(self.model)
        self._begins = _begin_between_calls(self.model)
        # Dynamo guards no hook that was added since: code compiled before would go on without it.
        torch.compiler.reset()

    def _rest(self) -> None:
        assisted.forbid(self.model)
        if self._begins is not None and self.model.__dict__.get(_PREPARE) == self._begins:
            self.model.__dict__.pop(_PREPARE)
        for module, hook in self._hooks:
            hook.remove()
            module.__dict__.pop(_SITE)
        self._hooks = []

    def remove(self) -> None:
        """Caches that are made from now on are as they were before: tensors, or what an earlier `quantize_cache` made
        of them, unless that was removed meanwhile. A packed cache that is there already goes on as it is.

        Removing twice does nothing.
        """
        stack: list[PackedCaches] = self.model.__dict__.get(_CACHES, [])
        if self not in stack:
            return
        in_force = stack[-1] is self
        stack.remove(self)
        if not stack:
            self.model.__dict__.pop(_CACHES)
        if in_force:
            self._rest()
            if stack:
                stack[-1]._serve()
            else:
                torch.compiler.reset()

    def __enter__(self) -> PackedCaches:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        stack = self.model.__dict__.get(_CACHES, [])
        state = f"{len(self.sites)} layers" if self in stack else "removed"
        if self in stack[:-1]:
            state += ", behind a later one"
        return f"PackedCaches({type(self.model).__name__}, {state})"


def quantize_cache(model: nn.Module, recipe: Recipe | Policy | Mapping[str, Any] | str | None = None) -> PackedCaches:
    """From now on, every cache that `model` is called with stores its recurrent states as the recipe says.

        caches = quantize_cache(model, "int8")           # until caches.remove()
        with quantize_cache(model, "int8"):              # or for a while
            model.generate(...)

    `generate()`, Dynamic and Static caches, beams, and a cache that the caller made work as before, in eager code and
    under `torch.compile`. Calls without a cache (training) are not touched. Called again, the later recipe counts, and
    the earlier one again when that is removed ("exact" stores fp32); `unquantize_cache(model)` removes them all.

    Args:
        model: a model of transformers with layers of linear attention.
        recipe: what `options={"policy": ...}` takes; default: the attached one. Its policies' `storage` says nothing
            here: a recipe that was trained emulated is served packed, with the same numbers. A layer for which it has
            no policy keeps its tensor.

    Raises:
        LattnError: no recipe, or no layer of linear attention. RecipeError, PolicyError: not a valid recipe, or one
        with a `Chunk` policy. UnsupportedError: a part that is not built for packed states.
    """
    return PackedCaches(_uncompiled(model), _sites(model, recipe))


def unquantize_cache(model: nn.Module) -> nn.Module:
    """Undoes every `quantize_cache`, whoever holds what that returned. Returns `model`."""
    for caches in list(_uncompiled(model).__dict__.get(_CACHES, ())):
        caches.remove()
    return model


def packed_cache(
    model: nn.Module,
    recipe: Recipe | Policy | Mapping[str, Any] | str | None = None,
    *,
    max_cache_len: int | None = None,
) -> Cache:
    """One packed cache, for one call: `model.generate(ids, past_key_values=packed_cache(model, "int8"))`.

    The argument is called `cache` in newer versions of transformers. Nothing is done to the model, so its other calls
    are as they were. Drafts (prompt lookup, an assistant model) need `quantize_cache`.

    Args:
        model, recipe: as of `quantize_cache`. max_cache_len: tokens of a static cache; None: a dynamic one.

    Raises:
        LattnError: as `quantize_cache`, or a model without a config.
    """
    sites = _sites(model, recipe)
    config = getattr(_uncompiled(model), "config", None)
    if config is None:
        raise LattnError(
            "model",
            got=f"{type(model).__name__} without a config",
            want="a model of transformers",
            remedy="Pass the whole model, not one of its layers.",
        )
    config = config.get_text_config(decoder=True)
    cache: Cache = DynamicCache(config=config) if max_cache_len is None else StaticCache(config, max_cache_len)
    for module, site in sites:
        if site is not None:
            index: Any = module.layer_idx
            cache.layers[index] = _packed(cache.layers[index], site)
    return cache


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(model)` wraps, whose paths recipes speak of and whose `generate` runs."""
    if not isinstance(model, nn.Module):
        raise LattnError(
            "model",
            got=type(model).__name__,
            want="a model of transformers",
            remedy="Pass the model itself, not its config or its cache.",
        )
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def _sites(
    model: nn.Module, recipe: Recipe | Policy | Mapping[str, Any] | str | None
) -> list[tuple[nn.Module, Site | None]]:
    """Every layer of linear attention of the model and what its cache is to do; None: to hold a tensor."""
    given = attached_recipe(model) if recipe is None else resolve_recipe(recipe, "recipe")
    if given is None:
        raise LattnError(
            "recipe",
            got="none, and none is attached to the model",
            want="a Recipe",
            remedy="Pass recipe, or lc.attach.",
        )
    found = list(_linear_layers(_uncompiled(model)))
    if not found:
        raise LattnError(
            "model",
            got=f"{type(model).__name__}, in which no layer calls a recurrence that is known here",
            want="a model of transformers with layers of linear attention",
            remedy="lc.inspect(model, args) shows what is recognised.",
        )
    sites: list[tuple[nn.Module, Site | None]] = []
    for number, (path, module, kind) in enumerate(found):
        name = f"{path}/{kind}#0"
        policy = given.resolve(name)[1]
        if policy is not None and policy.rounding == "stochastic" and (ranks := heads_cut(module)) > 1:
            raise UnsupportedError(
                "recipe",
                got=f"a policy with rounding='stochastic' at {path}, whose heads are cut over {ranks} ranks",
                want="rounding='nearest' where heads are cut",
                remedy=reason("HEADS_CUT").remedy,
            )
        sites.append((module, None if policy is None else _site(name, policy, number, _repeats(module))))
    if all(site is None for _, site in sites):
        warnings.warn(
            f"the recipe has no policy for any layer of this model ({found[0][0]}/{found[0][2]}#0, ...): its caches "
            "hold tensors as before",
            LattnWarning,
            stacklevel=3,
        )
    return sites


def _site(name: str, policy: Policy, number: int, repeats: int) -> Site:
    if policy.gate is not None:
        raise UnsupportedError(
            "recipe",
            got=f"gate={policy.gate!r} for {name}",
            want="gate=None: a prefill in eager code is the library's own, and rounds no gate",
            remedy="Drop gate; this version does nothing in its place.",
        )
    return Site(name, policy, call_of(policy), number, capture.serve_eagerly(), repeats)


def _repeats(module: nn.Module) -> int:
    """How often the module's own code repeats a key head, one behind the other, before it calls the library: up to
    transformers 5.17 Qwen3-Next's does, which a state that holds keys need not. 1 of code that is not the library's,
    whose `repeat_interleave` may be for something else."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    keys, values = (getattr(module, name, None) for name in ("num_k_heads", "num_v_heads"))
    if code is None or "repeat_interleave" not in code.co_names or not forward.__module__.startswith("transformers."):
        return 1
    if isinstance(keys, int) and isinstance(values, int) and keys > 0 and values % keys == 0:
        return values // keys
    return 1


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, module and kind of each module whose own forward calls a known library function and reads a cache."""
    names = {call.name: kind.name for kind in KINDS for call in kind.calls if call.library == "transformers"}
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "layer_idx", None), int):
            continue
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        kinds = {names[name] for name in (() if code is None else code.co_names) if name in names}
        if len(kinds) == 1:
            yield module.__dict__.get("_lattn_path", path), module, kinds.pop()


def _begin_between_calls(model: nn.Module) -> types.MethodType | None:
    """`generate()` prepares every call in eager code. There the exact state can be released, and the first decoded
    token is then a step like all others: for compilers one graph, not two. None where it cannot be done."""
    prepare = getattr(type(model), _PREPARE, None)
    if prepare is None or _PREPARE in model.__dict__:
        return None
    # A bound method: copies of the model prepare their own calls.
    made = model.__dict__[_PREPARE] = types.MethodType(_prepared(prepare), model)
    return made


@functools.cache
def _prepared(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(prepare)
    def prepared(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(model, *args, **kwargs)
        cache = inputs.get("cache", inputs.get("past_key_values"))
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        for layer in getattr(cache, "layers", ()):
            if isinstance(layer, PackedLayer) and tokens is not None:
                layer.begin(tokens.shape[1])
        return inputs

    return prepared


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a layer runs: its cache layer is a packed one."""
    cache = kwargs.get("cache", kwargs.get("cache_params"))
    if cache is None:
        cache = next((x for x in args if hasattr(x, "layers")), None)
    if cache is None or assisted.is_assistants(cache):
        return
    layers, index = cache.layers, module.layer_idx
    if not isinstance(layers[index], PackedLayer):
        layers[index] = _packed(layers[index], module.__dict__[_SITE])
    layers[index].ready()


def _packed(layer: Any, site: Site) -> PackedLayer:
    """A packed layer in the place of `layer`, with what that holds."""
    if type(layer) is not LinearAttentionLayer:
        raise UnsupportedError(
            "cache",
            got=f"{type(layer).__name__} for {site.id}",
            want="LinearAttentionLayer: this version packs no other kind of layer",
            remedy="Leave this layer out of the recipe of quantize_cache.",
        )
    made = PackedLayer(site, layer.number_of_states)
    dense = dict(layer.recurrent_states)
    for name in _OF_A_LAYER:
        setattr(made, name, getattr(layer, name))
    for i in dense:
        made.is_recurrent_states_initialized[i] = False
    for i, state in dense.items():
        if state is not None:
            made.update_recurrent_state(state, i)
    return made


def cache_bytes(cache: Any) -> dict[str, int]:
    """Bytes that the cache's tensors really take, by what they are: "recurrent", "conv", "attention".

    Measured: the storages behind the tensors, each counted once.
    """
    seen: set[int] = set()
    total = {"recurrent": 0, "conv": 0, "attention": 0}

    def add(what: str, x: Any) -> None:
        if isinstance(x, QuantizedState):
            for y in x.held().values():
                add(what, y)
        elif isinstance(x, Tensor):
            storage = x.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total[what] += storage.nbytes()

    for layer in cache.layers:
        for what, name in (("recurrent", "recurrent_states"), ("conv", "conv_states")):
            for x in getattr(layer, name, {}).values():
                add(what, x)
        for name in ("keys", "values"):
            add("attention", getattr(layer, name, None))
    return total
