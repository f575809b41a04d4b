"""transformers' assisted and prompt-lookup generation on a model whose caches are packed.

transformers refuses both for models with a recurrent state, which it cannot roll back. A packed cache can: it keeps the
inputs of a call that verifies drafts, and `crop` says how many of them to step over. What is left to mend is the first
call, which transformers makes of the prompt and drafts together: the prompt is exact prefill and drafts are not, so the
first call is made without drafts.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from lattn_compile.errors import UnsupportedError

__all__ = ["allow", "forbid"]

_MADE = "_get_candidate_generator"
_STATEFUL = "_is_stateful"


def allow(model: nn.Module) -> None:
    """Lets `model.generate` draft; for a model whose every recurrent layer is packed."""
    make = getattr(type(model), _MADE, None)
    if make is None:
        return

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        found = kwargs.get("model_kwargs", {})
        cache = found.get("cache", found.get("past_key_values"))
        for layer in getattr(cache, "layers", ()):
            if hasattr(layer, "prefills"):
                layer.prefills = True  # a new prompt for a cache with a past
        return _without_first(make(model, *args, **kwargs))

    model.__dict__[_MADE] = made
    model.__dict__[_STATEFUL] = False


def forbid(model: nn.Module) -> None:
    """Undoes `allow`."""
    for name in (_MADE, _STATEFUL):
        model.__dict__.pop(name, None)


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
