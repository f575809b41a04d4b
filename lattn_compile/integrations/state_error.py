"""How far each layer's stored state is from the exact one, measured on a batch without touching the training around it.

The model runs once more in eager mode: nothing is compiled, so no compile cache and no recompile limit notices.
`lc.capture()` turns the known library calls into exact ops, and a dispatch mode stands where these ops are called: it
computes each under the policy that the recipe has for it, hands the result on, so that the next layer sees what it sees
in training, and computes its final state a second time from the same inputs, exactly.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lattn_compile.attach import attached_recipe
from lattn_compile.errors import LattnError
from lattn_compile.functional import linear_attention
from lattn_compile.passes.capture import capturing
from lattn_compile.policy import Exact, Policy, Recipe, resolve_recipe
from lattn_compile.recurrence import classify

__all__ = ["state_errors"]


def state_errors(
    model: nn.Module, inputs: Mapping[str, Any], recipe: Recipe | Policy | Mapping[str, Any] | str | None = None
) -> dict[str, float]:
    """Relative error of the final stored state of every quantized site, under the active `lc.training_phase`.

    Args:
        model: called as `model(**inputs)`, in eval mode and without gradients; a compiled one runs uncompiled. Its
            training flags, its gradients and the random generators are as before when this returns.
        inputs: a batch.
        recipe: which policy each site has, as `options={"policy": ...}` takes it; default: the attached one.
    Returns:
        `‖S_stored − S_exact‖ / ‖S_exact‖` (Frobenius, over the whole batch) by site id, in the order of the calls;
        both states come from the same inputs of the site, so that it is the error of that site alone. 0 where every
        token is prefix, and for two_precision with an fp32 anchor, whose error is in what is read. Sites that the
        recipe leaves alone or exact are not in it, nor are recurrences that the model spells out, which only a compile
        finds.
    Raises:
        LattnError: no model, batch or recipe. RecipeError, PolicyError: not a valid recipe.
    """
    if not isinstance(model, nn.Module):
        raise LattnError("model", got=type(model).__name__, want="a module", remedy="Pass the model itself.")
    if not isinstance(inputs, Mapping):
        raise LattnError("inputs", got=type(inputs).__name__, want="a batch", remedy='{"input_ids": ids}.')
    given = attached_recipe(model) if recipe is None else resolve_recipe(recipe, "recipe")
    if given is None:
        raise LattnError(
            "recipe", got="none, and none is attached to the model", want="a Recipe", remedy="Call lc.attach first."
        )
    model = getattr(model, "_orig_mod", model)
    probe = _Probe(given)
    with (
        _untouched(model),
        torch.compiler.set_stance("force_eager"),
        torch.no_grad(),
        _paths(model, probe.path),
        capturing(),
        probe,
    ):
        model(**inputs)
    return probe.errors


class _Probe(TorchDispatchMode):
    """Computes the `lattn::` ops that are called while it is active under a recipe's policies, and keeps the errors."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.errors: dict[str, float] = {}
        self.path = [""]  # of the modules that are running, innermost last
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "lattn" or func._schema.name.rpartition("::")[2] not in ("chunk", "decode"):
            return func(*args, **(kwargs or {}))
        names = [a.name for a in func._schema.arguments]
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        policy, site = self._policy(given)
        if policy is None or isinstance(policy.write, Exact):
            return func(*args, **(kwargs or {}))
        options = {
            "rule": given["rule"],
            "scale": given["scale"],
            "use_qk_l2norm_in_kernel": given["qk_l2norm"],
            "site_id": given["site_id"],
            "initial_state": given["initial_state"],
            "output_final_state": True,
            **{name: given[name] for name in ("cu_seqlens", "prefix_lengths", "sequence_lengths")},
            **{name: given[name] for name in ("position", "sequence_ids") if given.get(name) is not None},
        }
        inputs = [given[name] for name in ("q", "k", "v", "g", "beta")]
        o, stored = linear_attention(*inputs, policy=policy, **options)
        _, exact = linear_attention(*inputs, **options)
        assert isinstance(exact, Tensor) and stored is not None and not isinstance(stored, Tensor)
        final = stored.dense()
        # float64: norms of a whole batch, and an error that may be tiny beside the state.
        norm = exact.double().norm()
        self.errors[site] = (((final.double() - exact.double()).norm() / norm) if norm > 0 else norm).item()
        return (o, final, *(o.new_empty(0) for _ in func._schema.returns[2:]))

    def _policy(self, given: Mapping[str, Any]) -> tuple[Policy | None, str]:
        g = given["g"]
        kind = classify(given["rule"], "none" if g is None else "head" if g.dim() == 3 else "channel").name
        name = f"{self.path[-1]}/{kind}"
        site = f"{name}#{self._calls[name]}"
        self._calls[name] += 1
        if given["write"] != "exact":  # the model's own call of lc.linear_attention, with a policy of its own
            return Policy.from_op(given), site
        return self.recipe.resolve(site)[1], site


@contextlib.contextmanager
def _paths(model: nn.Module, stack: list[str]) -> Iterator[None]:
    """Inside, the paths of the modules that are running lie on `stack`."""
    handles = []
    try:
        for name, module in model.named_modules():
            path = module.__dict__.get("_lattn_path", name)
            handles.append(module.register_forward_pre_hook(lambda *_, path=path: stack.append(path)))
            handles.append(module.register_forward_hook(lambda *_: (stack.pop(), None)[1], always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in eval mode; afterwards, its training flags and all random generators are as before."""
    training = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            model.eval()
            yield
    finally:
        for module, was in training:
            module.training = was
