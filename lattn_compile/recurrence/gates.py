"""Gates and norms as torch ops: what turns a layer's raw projections into `g`, `beta`, `q` and `k`.

Library kernels take some of these raw (`use_gate_in_kernel`, `use_beta_sigmoid_in_kernel`, `safe_gate`); here they are
ordinary differentiable torch, so that autograd and Inductor see them and the recurrence ops never do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lattn_compile.errors import ShapeError

L2NORM_EPS = 1e-6


def softplus_gate(g_raw: Tensor, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """`g = −exp(A_log) · softplus(g_raw + dt_bias)`, in fp32 (Mamba-2; Gated DeltaNet eq. 10; KDA).

    Args:
        g_raw: `[..., HV]` (per head) or `[..., HV, K]` (per channel), any float dtype.
        A_log: `HV` elements, any shape (KDA checkpoints store `[1, 1, HV, 1]`).
        dt_bias: `HV` elements per head, `HV·K` per channel.
    Returns:
        Log decay, float32, the shape of `g_raw`, `<= 0`.
    """
    x = _biased(g_raw, A_log, dt_bias)
    return -_per_head(A_log, x).exp() * F.softplus(x)


def lower_bound_gate(g_raw: Tensor, A_log: Tensor | None, lower_bound: float, dt_bias: Tensor | None = None) -> Tensor:
    """`g = lower_bound · sigmoid(exp(A_log) · (g_raw + dt_bias))`, in fp32, in `[lower_bound, 0)` (KDA's safe gate).

    Args as `softplus_gate`; `A_log=None` leaves its factor out. `lower_bound` is a natural-log decay, `< 0`.
    """
    x = _biased(g_raw, A_log, dt_bias)
    return lower_bound * torch.sigmoid(x if A_log is None else _per_head(A_log, x).exp() * x)


def write_strength(beta_raw: Tensor, *, allow_neg_eigval: bool = False) -> Tensor:
    """`beta = sigmoid(beta_raw)` in fp32, doubled to `[0, 2)` where negative eigenvalues are allowed."""
    beta = torch.sigmoid(beta_raw.float())
    return 2.0 * beta if allow_neg_eigval else beta


def retention_decay(q: Tensor) -> Tensor:
    """RetNet's constant log decay `ln(1 − 2^(−5−h))` of head h, as `[B, T, H]` float32 for `q [B, T, H, K]`."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    return (1 - 2.0 ** (-5.0 - heads)).log().expand(q.shape[0], q.shape[1], q.shape[2])


def l2norm(x: Tensor) -> Tensor:
    """`x / sqrt(Σx² + 1e-6)` over the last axis: eps inside the root, so a zero row has a finite gradient."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def _per_head(A_log: Tensor, x: Tensor) -> Tensor:
    """`A_log` as one number a head, broadcast against `x`, whose head axis is last or before K."""
    flat = A_log.float().reshape(-1)
    return flat if flat.shape[0] == x.shape[-1] and x.ndim == 3 else flat[:, None]


def _biased(g_raw: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    x = g_raw.float()
    if dt_bias is None:
        return x
    heads = (x.shape[-1],) if x.ndim == 3 else (x.shape[-2], x.shape[-1])
    count = 1
    for n in heads:
        count *= n
    if dt_bias.numel() != count:
        raise ShapeError(
            "dt_bias",
            got=f"{dt_bias.numel()} elements",
            want=f"{count} elements for g_raw of shape {list(g_raw.shape)}",
            remedy="Pass one bias per head (per-head gate) or per head and key channel (per-channel gate).",
        )
    return x + dt_bias.float().reshape(heads)
