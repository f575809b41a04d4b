"""First-order autograd for an op whose gradient is an op of its own.

The backward is explicit, so a call contributes one autograd node however many tokens it has, and a compiled graph shows
it as one node too. Differentiating a backward op is refused: silence would be a wrong second derivative.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from lattn_compile.errors import UnsupportedError

__all__ = ["DIFFERENTIABLE", "register_first_order"]

DIFFERENTIABLE = 6
"""q, k, v, g, beta, initial_state lead the arguments of every op."""


def register_first_order(name: str, *, differentiable: int = DIFFERENTIABLE, outputs: int = 2) -> None:
    """Registers `<name>_backward` as the gradient of the op `<name>`.

    Args:
        differentiable: how many leading arguments have a gradient; the rest are integers.
        outputs: how many leading outputs have one: o, then the state (and what else is carried). The rest are saved.
    """
    namespace, op = name.split("::")
    forward_op = getattr(getattr(torch.ops, namespace), op).default
    backward_op = getattr(getattr(torch.ops, namespace), f"{op}_backward").default
    arity = sum(not a.kwarg_only for a in forward_op._schema.arguments)

    def setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
        saved = output[outputs:]
        # The dispatcher leaves out trailing arguments that have their default, and the saved ones come behind them.
        ctx.save_for_backward(*inputs, *(None,) * (arity - len(inputs)), *saved)
        constant = saved
        if not any(isinstance(x, Tensor) and x.requires_grad for x in inputs[1:differentiable]):
            constant = output[1:]  # queries alone do not reach the state
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.options = dict(keyword_only_inputs)
        ctx.count = len(inputs)

    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        grads_out = incoming[:outputs]
        if all(grad is None for grad in grads_out):
            return (None,) * ctx.count
        grads = backward_op(*grads_out, *ctx.saved_tensors, **ctx.options)
        needed = ctx.needs_input_grad[:differentiable]
        grads = tuple(grad if need else None for grad, need in zip(grads, needed, strict=True))
        return (*grads, *(None,) * (ctx.count - differentiable))

    torch.library.register_autograd(name, backward, setup_context=setup)

    def refuse(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise UnsupportedError(
            name,
            got="a second derivative (a backward through its backward)",
            want="first-order gradients",
            remedy="Detach the first gradient, or write the recurrence out in torch for higher orders.",
        )

    torch.library.register_autograd(f"{name}_backward", refuse)
