"""transformers' assisted and prompt-lookup generation on a model whose caches are packed.

transformers refuses both for models with a recurrent state, which it cannot roll back. A packed cache can: it keeps the
inputs of a call that verifies drafts, and `crop` says how many of them to step over. What is left to mend is the first
call, which transformers makes of the prompt and drafts together: the prompt is exact prefill and drafts are not, so the
first call is made without drafts.

An assistant's own cache is another matter: transformers crops the last token of its prompt from it, which a recurrent
state that was made of the whole prompt cannot undo. So the caches that `generate` makes for an assistant hold tensors,
whether or not the assistant is quantized itself: its drafts may be others, what is generated from them is not.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from lattn_compile.errors import UnsupportedError

__all__ = ["allow", "forbid", "is_assistants", "mark_assistants"]

_ASSISTANTS = "_lattn_assistants"  # of a cache
_PREPARE = "_prepare_cache_for_generation"
_MADE = "_get_candidate_generator"
_STATEFUL = "_is_stateful"


def allow(model: nn.Module) -> None:
    """Lets `model.generate` draft; for a model whose every recurrent layer is packed."""
    if _instead(model, _MADE, _made):
        model.__dict__[_STATEFUL] = False


def mark_assistants(model: nn.Module) -> None:
    """From now on `is_assistants` knows the caches that `model.generate` makes to draft for another model."""
    _instead(model, _PREPARE, _prepared)


def forbid(model: nn.Module) -> None:
    """Undoes `allow` and `mark_assistants`."""
    for name in (_MADE, _STATEFUL, _PREPARE):
        model.__dict__.pop(name, None)


def is_assistants(cache: Any) -> bool:
    """Whether `generate` made the cache for a model that drafts for another one."""
    return getattr(cache, _ASSISTANTS, False)


def _instead(model: nn.Module, name: str, of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Puts `of(method)` before the class's method `name`, bound as that is: a copy of the model has its own."""
    method = getattr(type(model), name, None)
    if method is not None:
        model.__dict__[name] = types.MethodType(of(method), model)
    return method is not None


@functools.cache
def _made(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for layer in getattr(_cache_in(kwargs.get("model_kwargs", {})), "layers", ()):
            if hasattr(layer, "prefills"):
                layer.prefills = True  # a new prompt for a cache with a past
        return _without_first(make(model, *args, **kwargs))

    return made


@functools.cache
def _prepared(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepared(model: nn.Module, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        out = prepare(model, generation_config, model_kwargs, *args, **kwargs)
        cache = _cache_in(model_kwargs)
        if cache is not None and getattr(generation_config, "is_assistant", False):
            setattr(cache, _ASSISTANTS, True)
        return out

    return prepared


def _cache_in(model_kwargs: Any) -> Any:
    return model_kwargs.get("cache", model_kwargs.get("past_key_values"))


def _without_first(generator: Any) -> Any:
    """`generator`, whose first proposal is dropped."""
    if getattr(generator, "requires_model_outputs", False):
        raise UnsupportedError(
            "generate",
            got=f"{type(generator).__name__}, which drafts from the model's own outputs",
            want="an assistant model or prompt lookup",
            remedy="This version does not build more for packed caches.",
        )
    propose, first = generator.get_candidates, True

    @functools.wraps(propose)
    def get_candidates(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal first
        proposed = propose(input_ids, *args, **kwargs)  # also the first time: an assistant model has its own prefill
        if first:
            first, proposed = False, (input_ids, None)
        return proposed

    generator.get_candidates = get_candidates
    return generator
