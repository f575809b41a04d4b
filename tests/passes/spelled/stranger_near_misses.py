"""What looks like a linear-attention recurrence and is none, or only in another notation: see stranger_layers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.spelled.stranger_layers import B, H, K, T, V, delta_inputs, layer, outer, rand, read, token_loop, unit

miss = layer("miss")


def gated_delta_chunks(wrong: str) -> Any:
    """Gated DeltaNet in two chunks of four with one fault: what `wrong` names."""
    C = 4

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        g, beta = -F.softplus(a), torch.sigmoid(b)[..., None]
        S = torch.zeros(B, H, K, V)
        outs = []
        for s in (0, C):
            qc, kc, vc, bc = (x[:, :, s : s + C] for x in (q, k, v, beta))
            gc = g[:, :, s : s + C].cumsum(-1)
            if wrong == "cumsum":
                gc = gc - g[:, :, s : s + C]
            D = torch.exp((gc[..., :, None] - gc[..., None, :]).tril()).tril()
            erase = (bc * kc) @ kc.mT
            A = torch.eye(C) + (erase if wrong == "pairs" else erase * D).tril(-1)
            inner = vc if wrong == "w" else vc - gc.exp()[..., None] * (kc @ S)
            U = torch.linalg.solve_triangular(A, bc * inner, upper=False, unitriangular=True)
            outs.append(gc.exp()[..., None] * (qc @ S) + (qc @ kc.mT * D) @ U)
            tail = kc if wrong == "tail" else kc * (gc[..., -1:] - gc).exp()[..., None]
            S = S * gc[..., -1, None, None].exp() + tail.mT @ U
        return torch.cat(outs, 2), S

    q, k, v, a, b = (x.transpose(1, 2) for x in delta_inputs(8))
    return forward, (q, k, v, a, b)


@miss
def writes_along_the_query() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(q, beta * (v - read(S, k)))
        return S, read(S, q)

    return token_loop(step)


@miss
def decays_after_the_erase() -> Any:
    """The erase reads the old state, whose decay is applied to the sum: alpha multiplies the write too."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * (S + outer(k, beta * (v - read(S, k))))
        return S, read(S, q)

    return token_loop(step)


@miss
def erases_the_undecayed_state() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S + outer(k, beta * (v - read(S, k)))
        return S, read(S, q)

    return token_loop(step)


@miss
def tanh_of_the_state() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = torch.tanh(alpha * S + outer(k, beta * v))
        return S, read(S, q)

    return token_loop(step)


@miss
def state_of_unit_norm() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(k, beta * (v - read(S, k)))
        S = S / (1.0 + S.norm(dim=(-2, -1), keepdim=True))
        return S, read(S, q)

    return token_loop(step)


@miss
def beta_on_the_write_only() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(k, beta * v - read(S, k))
        return S, read(S, q)

    return token_loop(step)


@miss
def beta_squared_on_the_erase() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S - outer(beta * k, read(S, beta * k)) + outer(k, beta * v)
        return S, read(S, q)

    return token_loop(step)


@miss
def reads_the_old_state() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        o = read(S, q)
        S = alpha * S
        S = S + outer(k, beta * (v - read(S, k)))
        return S, o

    return token_loop(step)


@miss
def reads_the_decayed_state_before_the_write() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        o = read(S, q)
        return S + outer(k, beta * (v - read(S, k))), o

    return token_loop(step)


@miss
def writes_two_keys() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S + outer(k, beta * v) + outer(q, v.flip(-1))
        return S, read(S, k)

    return token_loop(step)


@miss
def erases_a_neighbouring_head() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(k, beta * (v - read(S, k).roll(1, 1)))
        return S, read(S, q)

    return token_loop(step)


@miss
def rwkv7_two_keys() -> Any:
    """RWKV-7's transition: it removes along the key times a vector a in [0, 1], and reads along the key."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        a = torch.sigmoid(q)
        S = alpha * S - outer(k * a, read(S, k)) + outer(k, v)
        return S, read(S, q)

    return token_loop(step)


@miss
def momentum_on_the_write() -> Any:
    """Titans-like: the write is a running mean of writes, a second state."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        eta, theta = torch.sigmoid(a), torch.sigmoid(b)
        S = M = torch.zeros(B, H, K, V)
        outs = []
        for t in range(T):
            surprise = outer(k[:, t], v[:, t] - read(S, k[:, t]))
            M = eta[:, t, :, None, None] * M + theta[:, t, :, None, None] * surprise
            S = S + M
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1)

    return forward, delta_inputs()


@miss
def normalised_linear_attention() -> Any:
    """A write and a decay that depend on a running sum of keys, and a mean of the state mixed in."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.softmax(-1), k.exp()
        S, z = torch.zeros(B, H, K, V), torch.zeros(B, H, K)
        outs = []
        for t in range(T):
            S = S + outer(k[:, t], v[:, t]) / (1 + z.sum(-1)[..., None, None])
            z = z + k[:, t]
            S = S * (z.sum(-1) / (1 + z.sum(-1)))[..., None, None] ** 0.5 + 0.1 * S.mean(-1, keepdim=True)
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1)

    return forward, delta_inputs()[:3]


@miss
def ttt_linear_with_layer_norm() -> Any:
    """TTT-linear: the reconstruction passes through a layer norm before the error is taken."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        err = F.layer_norm(read(S, k), (V,)) - v
        S = S - outer(k, beta * err)
        return S, read(S, q)

    return token_loop(step)


@miss
def exponential_moving_average() -> Any:
    def forward(x: Tensor, a: Tensor) -> Tensor:
        alpha = torch.sigmoid(a)
        s = torch.zeros(B, 8)
        outs = []
        for t in range(T):
            s = alpha * s + (1 - alpha) * x[:, t]
            outs.append(s)
        return torch.stack(outs, 1)

    return forward, (rand(B, T, 8), rand(8))


@miss
def softmax_attention() -> Any:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        scores = (q @ k.mT * K**-0.5).masked_fill(~torch.ones(n, n).tril().bool(), float("-inf"))
        return scores.softmax(-1) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@miss
def linear_attention_of_both_sides() -> Any:
    """Not causal: every token reads all."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@miss
def anti_causal_chunks() -> Any:
    """The decayed parallel form with its mask the wrong way round (triu)."""

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        cum = F.logsigmoid(f).cumsum(-1)
        D = torch.exp((cum[..., None, :] - cum[..., :, None]).triu()).triu()
        return (q @ k.mT * D) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V), rand(B, H, 8))


@miss
def strictly_causal_parallel() -> Any:
    """tril(-1): a token's own write is not read."""

    def forward(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
        cum = F.logsigmoid(f).cumsum(-1)
        D = torch.exp((cum[..., :, None] - cum[..., None, :]).tril()).tril(-1)
        return (q @ k.mT * D) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V), rand(B, H, 8))


@miss
def chunks_decay_cumsum_off_by_one() -> Any:
    """The cumulative decay excludes a token's own: its last decay never reaches the state."""
    return gated_delta_chunks(wrong="cumsum")


@miss
def chunks_erase_without_decay() -> Any:
    return gated_delta_chunks(wrong="pairs")


@miss
def chunks_that_forget_to_erase_the_carried_state() -> Any:
    return gated_delta_chunks(wrong="w")


@miss
def chunks_that_write_without_the_tail_decay() -> Any:
    return gated_delta_chunks(wrong="tail")


@miss
def diagonal_ssm_convolution() -> Any:
    """An S4-like layer: a kernel from powers of a decay, applied by FFT."""

    def forward(x: Tensor, a: Tensor, c: Tensor) -> Tensor:
        n = x.shape[-1]
        decay = torch.exp(-F.softplus(a))
        kernel = (c[..., None] * decay[..., None] ** torch.arange(n)).sum(-2)
        y = torch.fft.irfft(torch.fft.rfft(x, 2 * n) * torch.fft.rfft(kernel, 2 * n), 2 * n)
        return y[..., :n]

    return forward, (rand(B, 5, 8), rand(5, K), rand(5, K))


@miss
def mamba1_selective_scan() -> Any:
    """Mamba-1: the decay depends on both channel and state dimension, exp(dt A) with A [D, N]."""

    def forward(x: Tensor, dt: Tensor, A_log: Tensor, Bm: Tensor, C: Tensor) -> Tensor:
        dt, A = F.softplus(dt), -A_log.exp()
        h = torch.zeros(B, 5, K)
        ys = []
        for t in range(T):
            h = torch.exp(dt[:, t, :, None] * A) * h + dt[:, t, :, None] * Bm[:, t, None, :] * x[:, t, :, None]
            ys.append((h * C[:, t, None, :]).sum(-1))
        return torch.stack(ys, 1)

    return forward, (rand(B, T, 5), rand(B, T, 5), rand(5, K), rand(B, T, K), rand(B, T, K))


@miss
def decays_that_change_within_a_read() -> Any:
    """The output reads the state before its decay but after its write: another order."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = S + outer(k, beta * (v - read(S, k)))
        o = read(S, q)
        return alpha * S, o

    return token_loop(step)


@miss
def query_gates_the_state() -> Any:
    """The read's result feeds the next token's key: nothing is known before the loop."""

    def forward(k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        S, o = torch.zeros(B, H, K, K), torch.zeros(B, H, K)
        outs = []
        for t in range(T):
            S = torch.exp(-F.softplus(a[:, t, :, None, None])) * S * (1 + 0.1 * S) + outer(k[:, t] + o, v[:, t])
            o = read(S, k[:, t])
            outs.append(o)
        return torch.stack(outs, 1), S

    return forward, (rand(B, T, H, K), rand(B, T, H, K), rand(B, T, H))


@miss
def state_detached_between_tokens() -> Any:
    """Truncated backpropagation: values are those of gated delta, gradients are not."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S.detach()
        S = S + outer(k, beta * (v - read(S, k)))
        return S, read(S, q)

    return token_loop(step)


@miss
def erase_detached() -> Any:
    """No gradient through the read of the erase."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(k, beta * (v - read(S, k).detach()))
        return S, read(S, q)

    return token_loop(step)


@miss
def erase_key_detached() -> Any:
    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(k, beta * (v - read(S, k.detach())))
        return S, read(S, q)

    return token_loop(step)


@miss
def chunk_state_detached() -> Any:
    """Chunks of retention whose state is detached from chunk to chunk."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        g, C = -F.softplus(a), 4
        S, outs = torch.zeros(B, H, K, V), []
        for qc, kc, vc, gc in zip(*(x.split(C, dim=2) for x in (q, k, v, g)), strict=True):
            cum = gc.cumsum(-1)
            D = torch.exp((cum[..., :, None] - cum[..., None, :]).tril()).tril()
            outs.append((qc @ kc.mT * D) @ vc + cum.exp()[..., None] * (qc @ S))
            S = (cum[..., -1, None, None].exp() * S + (kc * (cum[..., -1:] - cum).exp()[..., None]).mT @ vc).detach()
        return torch.cat(outs, 2)

    return forward, (rand(B, H, 12, K), rand(B, H, 12, K), rand(B, H, 12, V), rand(B, H, 12))


@miss
def state_clamped_far_away() -> Any:
    """A clamp that no ordinary input reaches is a clamp."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = (alpha * S + outer(k, beta * v)).clamp(-1e4, 1e4)
        return S, read(S, q)

    return token_loop(step)


@miss
def chunk_decay_differences_floored() -> Any:
    """Differences of log decays floored at -20: another function for strong decays only."""

    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        cum = (-F.softplus(a)).cumsum(-1)
        D = torch.exp((cum[..., :, None] - cum[..., None, :]).clamp(-20, 0)).tril()
        return (q @ k.mT * D) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V), 9 * rand(B, H, 8).abs())


@miss
def beta_of_every_value_channel() -> Any:
    def forward(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        S, outs = torch.zeros(B, H, K, V), []
        for t in range(T):
            S = S * torch.sigmoid(a[:, t])[..., None, None]
            S = S + outer(k[:, t], torch.sigmoid(b[:, t]) * (v[:, t] - read(S, k[:, t])))
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1), S

    return forward, (rand(B, T, H, K), unit(B, T, H, K), rand(B, T, H, V), rand(B, T, H), rand(B, T, H, V))


@miss
def signed_decay() -> Any:
    """A decay in (-1, 1) by tanh."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = torch.tanh(alpha.log() + 1) * S
        S = S + outer(k, beta * (v - read(S, k)))
        return S, read(S, q)

    return token_loop(step)


@miss
def preconditioned_write() -> Any:
    """Writes along D k and erases along k, D a diagonal."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = alpha * S
        S = S + outer(torch.linspace(0.5, 1.0, K) * k, beta * (v - read(S, k)))
        return S, read(S, q)

    return token_loop(step)


@miss
def channel_decay_erases_the_undecayed_state() -> Any:
    def forward(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        w, b = torch.sigmoid(w), torch.sigmoid(b)
        S, outs = torch.zeros(B, H, K, V), []
        for t in range(T):
            S = w[:, t, :, :, None] * S + outer(k[:, t], b[:, t, :, None] * (v[:, t] - read(S, k[:, t])))
            outs.append(read(S, q[:, t]))
        return torch.stack(outs, 1)

    return forward, (rand(B, T, H, K), unit(B, T, H, K), rand(B, T, H, V), rand(B, T, H, K), rand(B, T, H))


@miss
def sliding_window() -> Any:
    """Causal linear attention over the last four tokens only."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        band = torch.ones(n, n).tril().triu(-3)
        return (q @ k.mT * band) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@miss
def symmetric_distance_decay() -> Any:
    """gamma^|i - j|: both sides."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(8.0)
        gamma = 1 - 2.0 ** (-2 - torch.arange(H, dtype=torch.float32))
        D = gamma[:, None, None] ** (i[:, None] - i[None, :]).abs()
        return (q @ k.mT * D) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@miss
def polynomial_decay() -> Any:
    """1 / (1 + i - j): causal, and no recurrence has it."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(8.0)
        D = torch.tril(1 / (1 + (i[:, None] - i[None, :]).abs()))
        return (q @ k.mT * D) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@miss
def bonus_on_the_diagonal() -> Any:
    """The own token counts twice."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        D = torch.ones(8, 8).tril() + torch.eye(8)
        return (q @ k.mT * D) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V))


@miss
def documents_in_the_mask() -> Any:
    """Causal within a document: the mask depends on data."""

    def forward(q: Tensor, k: Tensor, v: Tensor, doc: Tensor) -> Tensor:
        same = (doc[:, :, None] == doc[:, None, :]).unsqueeze(1) & torch.ones(8, 8).tril().bool()
        return ((q @ k.mT) * same) @ v

    return forward, (rand(B, H, 8, K), rand(B, H, 8, K), rand(B, H, 8, V), torch.tensor([[0] * 3 + [1] * 5, [0] * 8]))


@miss
def state_rounded_by_itself() -> Any:
    """The model fake-quantizes its state."""

    def step(S, q, k, v, alpha, beta):  # type: ignore[no-untyped-def]
        S = torch.round((alpha * S + outer(k, beta * v)) * 64) / 64
        return S, read(S, q)

    return token_loop(step)
