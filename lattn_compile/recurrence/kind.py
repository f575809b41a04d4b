"""The vocabulary of this package: a recurrence kind, a normalised call of one, and a known library function.

S~_t = Γ_t ∘ S_{t-1}        Γ_t = exp(g_t)
u_t  = beta_t (v_t − S~_tᵀ k_t)   rule "delta"   |   beta_t v_t   rule "additive"
S_t  = S~_t + k_t u_tᵀ
o_t  = scale · S_tᵀ q_t
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Recurrence(NamedTuple):
    """One call of a recurrence in the field's names and layout (`[B, T, H, K]`, state `[N, HV, K, V]`).

    `state_v_first` says that `initial_state` came, and the final state must go, as `[N, HV, V, K]`;
    `z_state` is the running key sum of normalised linear attention (see `linear.py`), `normalize` asks for that
    division. Everything else is an argument of the op of the same name.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    qk_l2norm: bool = False
    cu_seqlens: Tensor | None = None
    state_v_first: bool = False
    normalize: bool = False
    z_state: Tensor | None = None


# An adapter maps the arguments of a library function, as that function names them, to a Recurrence; a string is a
# refusal in words, and the call is then left exactly as it was. Adapters are traced: plain torch only, no reads of
# values, and never an exception for what the library itself accepts.
Adapter = Callable[..., "Recurrence | str"]


@dataclass(frozen=True)
class KnownCall:
    """A function of a known library.

    `module` is a dotted name, `*` standing for one component; `name` is the attribute that holds the function there.
    `form` is the form the function is written in: "chunk" (prefix when no phase is active) or "recurrent" (suffix).
    """

    library: str
    module: str
    name: str
    form: str
    adapter: Adapter


@dataclass(frozen=True)
class Kind:
    """A recurrence kind: its rule, where its decay acts, and who is known to call it."""

    name: str
    rule: str  # "delta" | "additive"
    decay: str  # "none" | "head" | "channel"
    paper: str
    calls: tuple[KnownCall, ...] = field(default=())

    def step(
        self, state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """One token in plain torch, as the equations above say it.

        Args:
            state: `[N, HV, K, V]`. q, k: `[N, HV, K]` (heads already repeated). v: `[N, HV, V]`.
            g: `None`, `[N, HV]` or `[N, HV, K]`. beta: `None` or `[N, HV]`.
        Returns:
            `(o [N, HV, V], state [N, HV, K, V])`.
        """
        if g is not None:
            state = state * torch.exp(g)[(...,) + (None,) * (state.ndim - g.ndim)]
        u = v - torch.einsum("nhkv,nhk->nhv", state, k) if self.rule == "delta" else v
        if beta is not None:
            u = u * beta[..., None]
        state = state + k[..., :, None] * u[..., None, :]
        return scale * torch.einsum("nhkv,nhk->nhv", state, q), state
