"""The three products of a step, each in every way that people write it.

Vectors are [*, K] or [*, V] and states [*, K, V], or [*, V, K] with `values_first`; * is one or two axes.
"""

from __future__ import annotations

import torch
from torch import Tensor

READS = (
    "mul_sum",
    "einsum",
    "einsum_swapped",
    "ellipsis",
    "row_matmul",
    "column_matmul",
    "bmm",
    "mul_sum_keepdim",
    "vecdot",
)
WRITES = (
    "mul",
    "einsum",
    "einsum_swapped",
    "ellipsis",
    "matmul",
    "bmm",
    "expand",
    "addcmul",
    "baddbmm",
    "in_place",
    "mul_first",
)


def read(how: str, S: Tensor, x: Tensor, values_first: bool) -> Tensor:
    """Sᵀx: [*, V]."""
    state, lead = ("vk" if values_first else "kv"), "bh"[: x.ndim - 1]
    axis = -1 if values_first else -2
    wide = x.unsqueeze(-2 if values_first else -1)
    rows = S.transpose(-1, -2) if values_first else S
    match how:
        case "mul_sum":
            return (S * wide).sum(axis)
        case "mul_sum_keepdim":
            return (wide * S).sum(dim=axis, keepdim=True).squeeze(axis)
        case "einsum":
            return torch.einsum(f"{lead}{state},{lead}k->{lead}v", S, x)
        case "einsum_swapped":
            return torch.einsum(f"{lead}k,{lead}{state}->{lead}v".translate(_OTHER_LETTERS), x, S)
        case "ellipsis":
            return torch.einsum(f"...k,...{state}->...v", x, S)
        case "row_matmul":
            return (x.unsqueeze(-2) @ rows).squeeze(-2)
        case "column_matmul":
            return torch.matmul(rows.mT, x[..., None])[..., 0]
        case "bmm":
            flat = torch.bmm(x.reshape(-1, 1, x.shape[-1]), rows.reshape(-1, *rows.shape[-2:]))
            return flat.reshape(*x.shape[:-1], rows.shape[-1])
        case "vecdot":
            return torch.linalg.vecdot(S, wide.expand_as(S), dim=axis)
    raise AssertionError(how)


_OTHER_LETTERS = str.maketrans("bhkv", "zaji")


def outer(how: str, k: Tensor, u: Tensor, values_first: bool) -> Tensor:
    """k uᵀ in the layout of the state; a way that only `add_outer` knows is a plain product here."""
    a, b = (u, k) if values_first else (k, u)
    lead = "bh"[: a.ndim - 1]
    match how:
        case "einsum":
            return torch.einsum(f"{lead}i,{lead}j->{lead}ij", a, b)
        case "einsum_swapped":
            return torch.einsum(f"{lead}j,{lead}i->{lead}ij", b, a)
        case "ellipsis":
            return torch.einsum("...x,...y->...xy", a, b)
        case "matmul":
            return a.unsqueeze(-1) @ b.unsqueeze(-2)
        case "bmm":
            flat = torch.bmm(a.reshape(-1, a.shape[-1], 1), b.reshape(-1, 1, b.shape[-1]))
            return flat.view(*a.shape, b.shape[-1])
        case "expand":
            wide = a[..., None].expand(*a.shape, b.shape[-1])
            return wide * b.unsqueeze(-2).expand_as(wide)
        case "mul_first":
            return b[..., None, :] * a[..., :, None]
    return a.unsqueeze(-1) * b.unsqueeze(-2)


def add_outer(how: str, S: Tensor, k: Tensor, u: Tensor, values_first: bool) -> Tensor:
    """S + k uᵀ."""
    a, b = (u, k) if values_first else (k, u)
    match how:
        case "addcmul":
            return torch.addcmul(S, a.unsqueeze(-1), b.unsqueeze(-2))
        case "baddbmm":
            flat = torch.baddbmm(
                S.reshape(-1, *S.shape[-2:]), a.reshape(-1, a.shape[-1], 1), b.reshape(-1, 1, b.shape[-1])
            )
            return flat.reshape(S.shape)
        case "in_place":
            return S.clone().add_(outer(how, k, u, values_first))
        case "mul_first" | "ellipsis":
            return outer(how, k, u, values_first) + S
    return S + outer(how, k, u, values_first)
