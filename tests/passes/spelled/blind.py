"""Token-by-token (BLIND), chunk-parallel (CHUNKED) and nearly-the-same (NEAR) spellings of the linear-attention
recurrence, written from the equation alone, without knowledge of the matcher."""

import math

import torch
import torch.nn.functional as F
from torch import nn

BLIND = {}  # name -> (function, rule, decay)
CHUNKED = {}  # name -> (function, rule, decay)
NEAR = {}  # name -> (function, rule, decay, what is different)


def blind(rule, decay):
    def register(function):
        BLIND[function.__name__] = (function, rule, decay)
        return function

    return register


def chunked(rule, decay):
    def register(function):
        CHUNKED[function.__name__] = (function, rule, decay)
        return function

    return register


def near(what, rule, decay):
    def register(function):
        NEAR[function.__name__] = (function, rule, decay, what)
        return function

    return register


# ---------------------------------------------------------------------------------------------------------------------
# token by token


@blind("delta", "head")
def naive_gated_delta_rule(q, k, v, g, beta, S):
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    beta, g = beta.transpose(1, 2), g.transpose(1, 2)
    batch_size, num_heads, seq_len, head_k_dim = k.shape
    scale = 1 / (head_k_dim**0.5)
    q = q * scale
    core_attn_out = torch.zeros(batch_size, num_heads, seq_len, v.shape[-1]).to(v)
    last_recurrent_state = S.clone()
    for i in range(seq_len):
        q_t = q[:, :, i]
        k_t = k[:, :, i]
        v_t = v[:, :, i]
        g_t = g[:, :, i].exp().unsqueeze(-1).unsqueeze(-1)
        beta_t = beta[:, :, i].unsqueeze(-1)

        last_recurrent_state = last_recurrent_state * g_t
        kv_mem = (last_recurrent_state * k_t.unsqueeze(-1)).sum(dim=-2)
        delta = (v_t - kv_mem) * beta_t
        last_recurrent_state = last_recurrent_state + k_t.unsqueeze(-1) * delta.unsqueeze(-2)
        core_attn_out[:, :, i] = (last_recurrent_state * q_t.unsqueeze(-1)).sum(dim=-2)
    return core_attn_out.transpose(1, 2), last_recurrent_state


def _scan(f, init, xs):
    carry, ys = init, []
    for x in zip(*xs, strict=True):
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


@blind("delta", "channel")
def scan_with_vmap(q, k, v, g, beta, S):
    def update(h, q, k, v, a, b):  # one batch element, one head
        h = a[:, None] * h
        err = b * (v - k @ h)
        h = h + torch.outer(k, err)
        return h, q @ h

    def step(carry, x):
        return torch.vmap(torch.vmap(update))(carry, *x)

    xs = tuple(torch.moveaxis(x, 1, 0) for x in (q / math.sqrt(q.shape[-1]), k, v, torch.exp(g), beta))
    final, ys = _scan(step, S, xs)
    return torch.moveaxis(ys, 0, 1), final


@blind("delta", "none")
def outer_product_loops(q, k, v, g, beta, S):
    B, T, H, V = v.shape
    out = torch.zeros((B, T, H, V), dtype=v.dtype, device=v.device)
    state = torch.zeros_like(S)
    for b in range(B):
        for h in range(H):
            W = S[b, h]
            for t in range(T):
                key = k[b, t, h]
                residual = v[b, t, h] - torch.mv(W.T, key)
                W = W + beta[b, t, h] * torch.outer(key, residual)
                out[b, t, h] = torch.mv(W.T, q[b, t, h])
            state[b, h] = W
    return out, state


_LOG2E = 1.4426950408889634074


@blind("delta", "channel")
def kernel_reference(q, k, v, g, beta, S):
    # one "program" per (batch, head); the state tile is held as [V, K] so that both reductions run along the last axis
    B, T, H, K = k.shape
    V = v.shape[-1]
    BH = B * H
    p_q = q.permute(0, 2, 1, 3).reshape(BH, T, K)
    p_k = k.permute(0, 2, 1, 3).reshape(BH, T, K)
    p_v = v.permute(0, 2, 1, 3).reshape(BH, T, V)
    p_g = g.permute(0, 2, 1, 3).reshape(BH, T, K) * _LOG2E
    p_beta = beta.permute(0, 2, 1).reshape(BH, T, 1)
    p_o = v.new_empty(BH, T, V)
    scale = K**-0.5

    b_h = S.reshape(BH, K, V).transpose(1, 2)
    for i_t in range(T):
        b_q = p_q[:, i_t, None, :] * scale
        b_k = p_k[:, i_t, None, :]
        b_v = p_v[:, i_t]
        b_h = b_h * torch.exp2(p_g[:, i_t, None, :])
        b_v = b_v - torch.sum(b_h * b_k, 2)
        b_v = b_v * p_beta[:, i_t]
        b_h = b_h + b_v[:, :, None] * b_k
        p_o[:, i_t] = torch.sum(b_h * b_q, 2)
    o = p_o.view(B, H, T, V).permute(0, 2, 1, 3)
    return o, b_h.transpose(1, 2).reshape(B, H, K, V)


class LinearAttentionCell:
    def __init__(self, key_dim):
        self.key_dim = key_dim

    def call(self, inputs, states):
        query, key, value = inputs
        memory = states[0]
        memory = memory + torch.einsum("bhk,bhv->bhkv", key, value)
        output = torch.einsum("bhk,bhkv->bhv", query, memory)
        output = torch.multiply(output, 1.0 / math.sqrt(float(self.key_dim)))
        return output, [memory]


class RNN:
    def __init__(self, cell, return_sequences=True, return_state=True):
        self.cell = cell
        self.return_sequences = return_sequences
        self.return_state = return_state

    def __call__(self, inputs, initial_state):
        states = [initial_state]
        outputs = []
        timesteps = inputs[0].shape[1]
        for t in range(timesteps):
            output, states = self.cell.call([x[:, t, ...] for x in inputs], states)
            outputs.append(torch.unsqueeze(output, dim=1))
        result = torch.cat(outputs, dim=1) if self.return_sequences else outputs[-1][:, 0]
        return (result, *states) if self.return_state else result


@blind("additive", "none")
def stateful_rnn_layer(q, k, v, g, beta, S):
    layer = RNN(LinearAttentionCell(key_dim=q.shape[-1]))
    sequence, state = layer([q, k, v], initial_state=S)
    return sequence, state


@blind("additive", "channel")
def rwkv_time_mix(q, k, v, g, beta, S):
    B, T, H, K = q.shape
    V = v.size(-1)
    r = q.transpose(1, 2)
    w = torch.exp(g).view(B, T, H, K, 1)
    k = k.reshape(B, T, H, K, 1)
    v = v.reshape(B, T, H, 1, V)
    out = torch.empty(B, H, T, V, dtype=r.dtype, device=r.device)
    state = S
    for t in range(T):
        at = k[:, t] @ v[:, t]
        state = at + w[:, t] * state
        out[:, :, t : t + 1] = r[:, :, t : t + 1] @ state
    return out.transpose(1, 2), state


@blind("additive", "head")
def retnet_recurrent(q, k, v, g, beta, S):
    bsz, tgt_len, num_heads, key_dim = k.size()
    head_dim = v.size(-1)
    scaling = key_dim**-0.5
    q = q * scaling
    incremental_state = {"prev_key_value": S}
    output = []
    for t in range(tgt_len):
        qr = q[:, t].view(bsz, num_heads, key_dim, 1)
        kr = k[:, t].view(bsz, num_heads, key_dim, 1)
        vr = v[:, t].view(bsz, num_heads, 1, head_dim)
        decay = g[:, t].exp().view(bsz, num_heads, 1, 1)
        kv = incremental_state["prev_key_value"] * decay + kr * vr
        incremental_state["prev_key_value"] = kv
        output.append(torch.sum(qr * kv, dim=2))
    return torch.stack(output, dim=1), incremental_state["prev_key_value"]


@blind("additive", "head")
def mamba2_step(q, k, v, g, beta, S):
    C, B, x, dt = q, k, v, beta
    dA = torch.exp(g)
    ssm_state = S.transpose(-1, -2)  # (batch, nheads, headdim, dstate)
    ys = []
    for i in range(x.shape[1]):
        dBx = torch.einsum("bh,bhn,bhp->bhpn", dt[:, i], B[:, i], x[:, i])
        ssm_state = ssm_state * dA[:, i, :, None, None] + dBx
        y = torch.einsum("bhpn,bhn->bhp", ssm_state, C[:, i])
        ys.append(y)
    return torch.stack(ys, dim=1), ssm_state.transpose(-1, -2)


class GatedDeltaCell(nn.Module):
    def __init__(self, head_dim):
        super().__init__()
        self.scale = head_dim**-0.5

    def decay(self, state, log_decay):
        return state * log_decay.exp()[..., None, None]

    def read(self, state, x):
        return torch.matmul(x.unsqueeze(-2), state).squeeze(-2)

    def write(self, state, key, value):
        return state + torch.matmul(key.unsqueeze(-1), value.unsqueeze(-2))

    def forward(self, q, k, v, log_decay, beta, state):
        state = self.decay(state, log_decay)
        error = v - self.read(state, k)
        state = self.write(state, k, beta.unsqueeze(-1) * error)
        return self.scale * self.read(state, q), state


@blind("delta", "head")
def module_cell(q, k, v, g, beta, S):
    cell = GatedDeltaCell(q.size(-1))
    outputs = []
    for q_t, k_t, v_t, g_t, b_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), g.unbind(1), beta.unbind(1), strict=True):
        o_t, S = cell(q_t, k_t, v_t, g_t, b_t, S)
        outputs.append(o_t)
    return torch.stack(outputs, 1), S


@blind("additive", "channel")
def rearranged_bmm(q, k, v, g, beta, S):
    b, n, h, _ = q.shape
    q, k, g = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, g))  # b n h d -> (b h) n d
    v = (v * beta.unsqueeze(-1)).transpose(1, 2).flatten(0, 1)  # b n h e -> (b h) n e
    q = q * q.shape[-1] ** -0.5
    gates = g.exp().unsqueeze(-1)  # (b h) n d -> (b h) n d 1
    kv = S.flatten(0, 1)  # b h d e -> (b h) d e

    outs = []
    for i in range(n):
        qi, ki, vi = (x[:, i : i + 1] for x in (q, k, v))
        kv = torch.baddbmm(gates[:, i] * kv, ki.transpose(1, 2), vi)
        outs.append(torch.bmm(qi, kv))
    out = torch.cat(outs, dim=1)
    return out.unflatten(0, (b, h)).transpose(1, 2), kv.unflatten(0, (b, h))


@blind("delta", "head")
def inplace_buffers(q, k, v, g, beta, S):
    B, T, H, K = q.shape
    out = torch.empty_like(v)
    state = S.clone()
    err = torch.empty_like(v[:, 0])
    gate = g.exp()
    for t in range(T):
        kt = k[:, t]
        state.mul_(gate[:, t].view(B, H, 1, 1))
        err.copy_(v[:, t])
        err.sub_(torch.einsum("bhkv,bhk->bhv", state, kt))
        err.mul_(beta[:, t].unsqueeze(-1))
        state.addcmul_(kt.unsqueeze(-1), err.unsqueeze(-2))
        out[:, t].copy_(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    out.mul_(K**-0.5)
    return out, state


@blind("delta", "channel")
def low_memory_rank_one(q, k, v, g, beta, S):
    # never keeps a decayed copy of the state: the decay goes to the vectors that read it, and the newest token is
    # added to the output as (q.k) u
    T, K = q.shape[1], q.shape[3]
    S = S.clone()
    o = torch.zeros_like(v)
    for t in range(T):
        a = torch.exp(g[:, t])
        qt, kt = q[:, t] * (1.0 / K**0.5), k[:, t]
        reads = torch.stack((kt * a, qt * a), dim=-2) @ S
        u = beta[:, t, :, None] * (v[:, t] - reads[..., 0, :])
        o[:, t] = reads[..., 1, :] + (qt * kt).sum(-1, keepdim=True) * u
        S *= a[..., None]
        S += kt[..., :, None] * u[..., None, :]
        del reads, u, a
    return o, S


@blind("delta", "head")
def transition_matrix(q, k, v, g, beta, S):
    T, K = k.shape[1], k.shape[-1]
    eye = torch.eye(K, dtype=k.dtype, device=k.device)
    o = []
    for t in range(T):
        k_t, v_t, q_t = k[:, t].unsqueeze(-1), v[:, t].unsqueeze(-1), q[:, t].unsqueeze(-1)
        alpha_t, beta_t = g[:, t].exp()[..., None, None], beta[:, t][..., None, None]
        A_t = alpha_t * (eye - beta_t * k_t @ k_t.mT)
        S = A_t @ S + beta_t * k_t @ v_t.mT
        o.append((S.mT @ q_t).squeeze(-1))
    return torch.stack(o, dim=1), S


@blind("delta", "none")
def fast_weight_programmer(q, k, v, g, beta, S):
    scale = q.shape[-1] ** -0.5
    W = S
    outputs = torch.zeros_like(v)
    for t in range(v.shape[1]):
        k_t = k[:, t]
        b_t = beta[:, t, :, None]
        v_old = torch.einsum("bhij,bhi->bhj", W, k_t)
        v_new = b_t * v[:, t] + (1 - b_t) * v_old
        W = W - torch.einsum("bhi,bhj->bhij", k_t, v_old) + torch.einsum("bhi,bhj->bhij", k_t, v_new)
        outputs[:, t] = torch.einsum("bhij,bhi->bhj", W, q[:, t]) * scale
    return outputs, W


# ---------------------------------------------------------------------------------------------------------------------
# chunk-parallel


@chunked("delta", "head")
def chunk_gated_delta_rule(q, k, v, g, beta, S, chunk_size=16):
    q, k, v, beta, g = (x.transpose(1, 2).contiguous() for x in (q, k, v, beta, g))
    batch_size, num_heads, seq_len, k_dim = k.shape
    v_dim = v.shape[-1]
    pad = (chunk_size - seq_len % chunk_size) % chunk_size
    q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    beta, g = F.pad(beta, (0, pad)), F.pad(g, (0, pad))
    q = q * k_dim**-0.5
    v_beta = v * beta.unsqueeze(-1)
    k_beta = k * beta.unsqueeze(-1)
    q, k, k_beta = (x.reshape(batch_size, num_heads, -1, chunk_size, k_dim) for x in (q, k, k_beta))
    v_beta = v_beta.reshape(batch_size, num_heads, -1, chunk_size, v_dim)
    g = g.reshape(batch_size, num_heads, -1, chunk_size).cumsum(dim=-1)
    mask = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device), diagonal=0)

    decay_mask = (g.unsqueeze(-1) - g.unsqueeze(-2)).tril().exp().tril()
    attn = -((k_beta @ k.transpose(-1, -2)) * decay_mask).masked_fill(mask, 0)
    for i in range(1, chunk_size):
        row = attn[..., i, :i].clone()
        sub = attn[..., :i, :i].clone()
        attn[..., i, :i] = row + (row.unsqueeze(-1) * sub).sum(-2)
    attn = attn + torch.eye(chunk_size, dtype=attn.dtype, device=attn.device)
    value = attn @ v_beta
    k_cumdecay = attn @ (k_beta * g.exp().unsqueeze(-1))

    out = torch.zeros_like(value)
    mask = torch.triu(torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device), diagonal=1)
    for i in range(value.shape[2]):
        q_i, k_i, v_i, g_i = q[:, :, i], k[:, :, i], value[:, :, i], g[:, :, i]
        attn = (q_i @ k_i.transpose(-1, -2) * decay_mask[:, :, i]).masked_fill(mask, 0)
        v_new = v_i - k_cumdecay[:, :, i] @ S
        out[:, :, i] = (q_i * g_i[..., None].exp()) @ S + attn @ v_new
        g_last = g_i[..., -1, None]
        S = S * g_last[..., None].exp() + (k_i * (g_last - g_i).exp()[..., None]).transpose(-1, -2) @ v_new
    out = out.reshape(batch_size, num_heads, -1, v_dim)[:, :, :seq_len]
    return out.transpose(1, 2), S


@chunked("additive", "channel")
def chunk_gla(q, k, v, g, beta, S):
    C = 16
    B, T, H, K = q.shape
    n = (T + C - 1) // C
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, n * C - T)) for x in (q, k, v, g))
    q, k, v, g = (x.reshape(B, n, C, H, -1).permute(1, 0, 3, 2, 4) for x in (q, k, v, g))  # [N, B, H, C, D]
    causal = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    scale = K**-0.5
    outs = []
    for q_c, k_c, v_c, g_c in zip(q, k, v, g, strict=True):
        b = g_c.cumsum(-2)  # [B, H, C, K]
        # pairwise differences, so that nothing is ever divided by a vanishing decay
        diff = b.unsqueeze(-2) - b.unsqueeze(-3)
        diff = diff.masked_fill(~causal[:, :, None], float("-inf"))
        A = torch.einsum("bhik,bhjk,bhijk->bhij", q_c, k_c, diff.exp())
        o = A @ v_c + (q_c * b.exp()) @ S
        outs.append(o * scale)
        b_last = b[..., -1:, :]
        S = b_last.exp().mT * S + (k_c * (b_last - b).exp()).mT @ v_c
    o = torch.stack(outs, 1).transpose(2, 3).reshape(B, n * C, H, -1)
    return o[:, :T], S


@chunked("additive", "head")
def chunk_retention(q, k, v, g, beta, S):
    chunk_len = 16
    bsz, slen, num_heads, key_dim = q.shape
    num_chunks = math.ceil(slen / chunk_len)
    padding = num_chunks * chunk_len - slen

    def to_chunks(x):  # b t h d -> b n h c d
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
        return x.reshape(bsz, num_chunks, chunk_len, num_heads, -1).transpose(2, 3)

    qr, kr, vr = to_chunks(q * key_dim**-0.5), to_chunks(k), to_chunks(v)
    cum = to_chunks(g.unsqueeze(-1)).cumsum(-2)  # b n h c 1
    total = cum[..., -1:, :]
    inner_mask = (cum - cum.transpose(-1, -2)).masked_fill(
        torch.ones(chunk_len, chunk_len, dtype=torch.bool, device=q.device).triu(1), float("-inf")
    )
    inner_output = (qr @ kr.transpose(-1, -2) * inner_mask.exp()) @ vr

    kv = (kr * torch.exp(total - cum)).transpose(-1, -2) @ vr
    cross_decay = total.exp()
    kv_recurrent = []
    kv_state = S
    for i in range(num_chunks):
        kv_recurrent.append(kv_state)
        kv_state = kv_state * cross_decay[:, i] + kv[:, i]
    cross_output = (qr * cum.exp()) @ torch.stack(kv_recurrent, dim=1)

    output = (inner_output + cross_output).transpose(2, 3).flatten(1, 2)
    return output[:, :slen], kv_state


@chunked("delta", "none")
def chunk_deltanet(q, k, v, g, beta, S):
    BT = 16
    T = q.shape[1]
    L = -(-T // BT) * BT

    def split(x):  # [B, T, H, D] -> [B, H, N, BT, D]
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, L - T)).transpose(1, 2).unflatten(2, (-1, BT))

    q, k, v, beta = split(q), split(k), split(v), split(beta[..., None])
    # T = (I + tril(diag(beta) K K^T, -1))^{-1} diag(beta); W = T K; U = T V
    M = torch.tril(beta * (k @ k.mT), -1) + torch.eye(BT, dtype=k.dtype, device=k.device)
    WU = torch.linalg.solve_triangular(M, torch.cat((beta * k, beta * v), -1), upper=False, unitriangular=True)
    W, U = WU.split((k.shape[-1], v.shape[-1]), -1)
    A = torch.tril(q @ k.mT)
    out = torch.empty_like(v)
    for i in range(L // BT):
        u_i = U[:, :, i] - W[:, :, i] @ S
        out[:, :, i] = q[:, :, i] @ S + A[:, :, i] @ u_i
        S = S + k[:, :, i].mT @ u_i
    return out.flatten(2, 3)[:, :, :T].transpose(1, 2), S


# ---------------------------------------------------------------------------------------------------------------------
# nearly the same


@near("the prediction error is taken against the state before its decay", "delta", "head")
def near_undecayed_error(q, k, v, g, beta, S):
    scale = q.shape[-1] ** -0.5
    o = []
    for t in range(q.shape[1]):
        pred = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        u = beta[:, t, :, None] * (v[:, t] - pred)
        S = torch.exp(g[:, t])[..., None, None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        o.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(o, dim=1), S


@near("the query reads the state before the token is written", "additive", "channel")
def near_read_then_write(q, k, v, g, beta, S):
    out = torch.zeros_like(v)
    q = q * q.shape[-1] ** -0.5
    for t in range(q.shape[1]):
        S = S * g[:, t].exp().unsqueeze(-1)
        out[:, t] = (q[:, t].unsqueeze(-2) @ S).squeeze(-2)
        S = S + k[:, t].unsqueeze(-1) * (beta[:, t, :, None] * v[:, t]).unsqueeze(-2)
    return out, S


@near("beta scales the value but not the prediction that is subtracted from it", "delta", "none")
def near_beta_on_value_only(q, k, v, g, beta, S):
    scale = 1.0 / math.sqrt(q.shape[-1])
    v = v * beta.unsqueeze(-1)
    outs = []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        v_t = v_t - (S * k_t.unsqueeze(-1)).sum(-2)
        S = S + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outs.append((S * q_t.unsqueeze(-1)).sum(-2) * scale)
    return torch.stack(outs, 1), S


@near("the decay also hits the token that was just written", "delta", "head")
def near_decay_after_write(q, k, v, g, beta, S):
    B, T, H, K = q.shape
    out = torch.empty_like(v)
    state = S.clone()
    for t in range(T):
        delta = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        state = state * g[:, t].exp().view(B, H, 1, 1)
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], state) * K**-0.5
    return out, state


@near("the output takes the old state undecayed and weighs the current token by a bonus", "additive", "channel")
def near_bonus_for_current_token(q, k, v, g, beta, S):
    T, K = q.shape[1], q.shape[-1]
    u = torch.linspace(0.2, 0.8, K, dtype=q.dtype, device=q.device).view(1, 1, K, 1)
    w = g.exp().unsqueeze(-1)
    r, v = q * K**-0.5, v * beta[..., None]
    ys = []
    for t in range(T):
        kv = k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
        ys.append((r[:, t].unsqueeze(-2) @ (S + u * kv)).squeeze(-2))
        S = w[:, t] * S + kv
    return torch.stack(ys, dim=1), S


@near("the output is divided by the running sum of keys against the query", "additive", "none")
def near_normalised_output(q, k, v, g, beta, S):
    z = torch.zeros_like(k[:, 0])
    eps = 1e-6
    out = []
    for t in range(q.shape[1]):
        z = z + k[:, t]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t] * beta[:, t].unsqueeze(-1))
        num = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
        den = torch.einsum("bhk,bhk->bh", q[:, t], z).abs().clamp(min=eps)
        out.append(num / den.unsqueeze(-1))
    return torch.stack(out, dim=1), S


@near("the writes pass through an exponential moving average before they reach the state", "delta", "head")
def near_momentum(q, k, v, g, beta, S):
    momentum, scale = 0.9, q.shape[-1] ** -0.5
    m = torch.zeros_like(S)
    outputs = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        surprise = v[:, t] - (k[:, t, :, :, None] * S).sum(-2)
        grad = k[:, t, :, :, None] * (beta[:, t, :, None] * surprise)[:, :, None, :]
        m = momentum * m + (1 - momentum) * grad
        S = S + m
        outputs.append(scale * (q[:, t, :, None] @ S).squeeze(-2))
    return torch.stack(outputs, dim=1), S


@near("the error is in the keys: the value is decoded back to a key and the residual is written (Oja)", "delta", "head")
def near_oja(q, k, v, g, beta, S):
    scale = q.shape[-1] ** -0.5
    o = torch.zeros_like(v)
    for t in range(v.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        k_hat = torch.einsum("bhkv,bhv->bhk", S, v[:, t])
        e = (k[:, t] - k_hat) * beta[:, t, :, None]
        S = S + torch.einsum("bhk,bhv->bhkv", e, v[:, t])
        o[:, t] = torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * scale
    return o, S
