"""One wrong thing in a step: what turns a random spelling into a near miss.

Each takes (spelling, token, S), S the state before the token, and returns the state after it and what the token reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.passes.spelled import products

if TYPE_CHECKING:
    from tests.passes.spelled.generator import Spelling


@dataclass(frozen=True, kw_only=True)
class Token:
    """One token's inputs in the layout of the spelling, and what came before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor | float | None
    kb: Tensor | None  # k * beta, where it was formed ahead of the loop
    previous: Tensor | None  # state after the previous token
    older: Tensor | None  # and after the one before
    outs: list[Tensor]  # outputs so far
    live: Tensor | None = None  # booleans in the layout of the heads: tokens that are not skipped, or clear the state


Mutation = Callable[["Spelling", Token, Tensor], tuple[Tensor, Tensor]]
MUTATIONS: dict[str, Mutation] = {}
_DELTA: set[str] = set()
_NEEDS: dict[str, Callable[[Spelling], bool]] = {}


def _mutation(
    *, delta: bool = False, needs: Callable[[Spelling], bool] | None = None
) -> Callable[[Mutation], Mutation]:
    def register(fn: Mutation) -> Mutation:
        name = fn.__name__
        MUTATIONS[name] = fn
        if delta:
            _DELTA.add(name)
        if needs is not None:
            _NEEDS[name] = needs
        return fn

    return register


def applies(name: str, s: Spelling) -> bool:
    return (name not in _DELTA or s.rule == "delta") and (name not in _NEEDS or _NEEDS[name](s))


def _wrong_step(
    s: Spelling,
    token: Token,
    S: Tensor,
    *,
    erase_key: Tensor | None = None,
    erase_beta: Tensor | None = None,
    write_beta: Tensor | None = None,
    sign: float = 1.0,
    source: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """decay, u = beta v − sign · beta Sᵀ(key), write; with what is given in place of what is right."""
    S = s.decayed(S, token.decay)
    prediction = s.erase_read(S if source is None else source, token.k if erase_key is None else erase_key)
    b_write = token.beta if write_beta is None else write_beta
    b_erase = token.beta if erase_beta is None else erase_beta
    if s.fold in ("erase_then_write", "mixture"):
        erased = S - sign * products.outer(s.write_product, token.k, b_erase[..., None] * prediction, s.values_first)
        S = s.add(erased, token.k, b_write[..., None] * token.v)
    else:
        S = s.add(S, token.k, b_write[..., None] * token.v - sign * b_erase[..., None] * prediction)
    return S, S


@_mutation(delta=True)
def no_beta_on_erase(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, erase_beta=torch.ones_like(token.beta))


@_mutation(delta=True)
def no_beta_on_write(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, write_beta=torch.ones_like(token.beta))


@_mutation(delta=True)
def beta_squared_on_erase(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, erase_beta=token.beta * token.beta)


@_mutation(delta=True)
def erased_along_a_rolled_key(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, erase_key=token.k.roll(1, -1))


@_mutation(delta=True)
def erased_along_the_query(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, erase_key=token.q)


@_mutation(delta=True)
def erased_along_a_normalised_key(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, erase_key=token.k / (1 + token.k.norm(dim=-1, keepdim=True)))


@_mutation(delta=True, needs=lambda s: s.heads > 1 and s.layout != "n")
def erased_along_another_heads_key(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, erase_key=token.k.flip(0 if s.layout == "hb" else 1))


@_mutation(delta=True)
def erase_sign(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, sign=-1.0)


@_mutation(delta=True)
def half_the_erase(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, sign=0.5)


@_mutation(delta=True, needs=lambda s: s.decay != "none")
def erase_sees_the_undecayed(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, source=S)


@_mutation(delta=True)
def erase_sees_the_older(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, source=S if token.older is None else s.decayed(token.older, token.decay))


@_mutation(delta=True)
def erase_sees_a_rounded_state(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return _wrong_step(s, token, S, source=s.decayed(S, token.decay).bfloat16().to(S.dtype))


@_mutation(delta=True)
def update_squashed(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.decayed(S, token.decay)
    S = s.add(S, token.k, torch.tanh(token.beta[..., None] * (token.v - s.erase_read(S, token.k))))
    return S, S


@_mutation(delta=True)
def transposed_erase(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.decayed(S, token.decay)
    wrong = products.read(s.erase_product, S, token.k, not s.values_first)
    S = s.add(S, token.k, token.beta[..., None] * (token.v - wrong))
    return S, S


@_mutation()
def transposed_read(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S)
    return S, S.mT


@_mutation()
def transposed_state(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S.mT)
    return S, S


@_mutation(needs=lambda s: s.decay != "none")
def decay_after_the_write(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.decayed(s.updated(replace(token, decay=None), S), token.decay)
    return S, S


@_mutation(delta=True, needs=lambda s: s.decay == "channel")
def decay_between_erase_and_write(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    erased = s.updated(replace(token, decay=None, v=torch.zeros_like(token.v)), S)
    S = s.add(s.decayed(erased, token.decay), token.k, token.beta[..., None] * token.v)
    return S, S


@_mutation(needs=lambda s: s.decay == "channel")
def transposed_decay(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(replace(token, decay=None), s.decayed(S.mT, token.decay).mT)
    return S, S


@_mutation()
def decay_of_every_element(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S * torch.sigmoid(products.outer("mul", token.k, token.v, s.values_first)))
    return S, S


@_mutation(needs=lambda s: s.decay != "none")
def decay_twice(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, s.decayed(S, token.decay))
    return S, S


@_mutation()
def growth(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S * torch.cosh(token.beta)[..., None, None])
    return S, S


@_mutation()
def sign_of_the_state(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, -S)
    return S, S


@_mutation()
def read_before_the_token(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return s.updated(token, S), S


@_mutation()
def read_before_the_write(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return s.updated(token, S), s.decayed(S, token.decay)


@_mutation()
def read_of_the_older(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    return s.updated(token, S), S if token.older is None else token.older


@_mutation()
def read_of_the_difference(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    new = s.updated(token, S)
    return new, new - S


@_mutation()
def read_of_a_squashed_state(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    new = s.updated(token, S)
    return new, new.tanh()


@_mutation()
def starts_from_the_older(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S if token.older is None else token.older)
    return S, S


@_mutation()
def squashed(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = torch.tanh(s.updated(token, S))
    return S, S


@_mutation()
def clamped(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S.clamp(-0.5, 0.5))
    return S, S


@_mutation()
def positive_part(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, torch.relu(s.decayed(S, token.decay)))
    return S, S


@_mutation()
def normalised(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S)
    S = S / (1 + S.norm(dim=(-2, -1), keepdim=True))
    return S, S


@_mutation()
def rounded_before_the_step(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    """As a state stored in 16 bits, but the final state is not."""
    S = s.updated(token, S.to(torch.float16).to(S.dtype))
    return S, S


@_mutation()
def rounded_before_the_write(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.decayed(S, token.decay).bfloat16().to(S.dtype)
    S = s.updated(replace(token, decay=None), S)
    return S, S


@_mutation()
def read_after_rounding_only(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S)
    return S, S.bfloat16().to(S.dtype)


@_mutation()
def constant_added(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S) + 0.01
    return S, S


@_mutation()
def second_write(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.add(s.updated(token, S), token.q, token.v)
    return S, S


@_mutation()
def square_of_the_state(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S) - 0.01 * S * S
    return S, S


@_mutation()
def first_state_added(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S)
    return S, S if token.older is None else S + 0.1 * token.older


@_mutation()
def rolled(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S.roll(1, -2))
    return S, S


@_mutation(needs=lambda s: s.heads > 1 and s.layout != "n")
def heads_mixed(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, 0.9 * S + 0.1 * S.flip(0 if s.layout == "hb" else 1))
    return S, S


@_mutation(needs=lambda s: s.batch * s.heads > 1)
def everything_averaged(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(token, S - 0.1 * S.mean(0, keepdim=True))
    return S, S


@_mutation()
def chosen_by_the_data(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = torch.where(S > 0, s.updated(token, S), S)
    return S, S


@_mutation(needs=lambda s: s.layout == "bh")
def key_from_the_last_output(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    if token.outs:
        token = replace(token, k=token.k + 0.1 * token.outs[-1].sum(-1, keepdim=True), kb=None)
    S = s.updated(token, S)
    return S, S


@_mutation()
def value_scaled_by_the_state(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    S = s.updated(replace(token, v=token.v * S.mean()), S)
    return S, S


@_mutation()
def detached(s: Spelling, token: Token, S: Tensor) -> tuple[Tensor, Tensor]:
    """Right in its values, not in its gradients."""
    S = s.updated(token, S.detach())
    return S, S
