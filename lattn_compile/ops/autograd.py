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
"""q, k, v, g, beta, initial_state lead the arguments; the rest are integers."""


def register_first_order(name: str) -> None:
    """Registers `<name>_backward` as the gradient of the op `<name>`, whose outputs are (o, final_state, *saved)."""
    namespace, op = name.split("::")
    backward_op = getattr(getattr(torch.ops, namespace), f"{op}_backward").default

    def setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Any, ...]) -> None:
        saved = output[2:]
        ctx.save_for_backward(*inputs, *saved)
        constant = saved
        if not any(isinstance(x, Tensor) and x.requires_grad for x in inputs[1:DIFFERENTIABLE]):
            constant = (output[1], *saved)  # queries alone do not reach the state
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        ctx.options = dict(keyword_only_inputs)
        ctx.count = len(inputs)

    def backward(ctx: Any, grad_o: Tensor | None, grad_state: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
        if grad_o is None and grad_state is None:
            return (None,) * ctx.count
        grads = backward_op(grad_o, grad_state, *ctx.saved_tensors, **ctx.options)
        needed = ctx.needs_input_grad[:DIFFERENTIABLE]
        grads = tuple(grad if need else None for grad, need in zip(grads, needed, strict=True))
        return (*grads, *(None,) * (ctx.count - DIFFERENTIABLE))

    torch.library.register_autograd(name, backward, setup_context=setup)

    def refuse(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise UnsupportedError(
            name,
            got="a second derivative (a backward through its backward)",
            want="first-order gradients",
            remedy="Detach the first gradient, or write the recurrence out in torch for higher orders.",
        )

    torch.library.register_autograd(f"{name}_backward", refuse)
