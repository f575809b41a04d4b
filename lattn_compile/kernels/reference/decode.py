"""The recurrence token by token: the reference for `lattn::decode`, forward and backward.

Forward is semantics §2 literally: decay, update, write, read, and in token mode QDQ. Backward is the adjoint of that
loop written out. It keeps a state every C tokens, runs each stretch of C forward again with the states of that stretch
alone in memory, and walks it back; a rounding passes its cotangent on unchanged.

Ragged sequences become *runs*: tokens [first, first + count) of the sequences still alive, always in their original
order, so that inside a run nothing is ragged and a sequence that has ended is not touched at all.

Bits. T calls of one token must equal one call of T tokens. A matrix product's last bits depend on its shape and, in
MKL, on the alignment of its operands; `exp` may differ between a vector body and its tail. So whatever is not a plain
IEEE add, multiply or row sum is done a token at a time, on slices laid out exactly as a one-token call lays them out
(`_slab`), and backward reruns the forward on the same layout.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.reference.padding import l2norm, l2norm_backward

__all__ = ["backward", "forward"]

_BLOCK = 64
"""Tokens made ready at a time when no checkpoint asks for less: bounds the memory for repeated and normalised keys."""


def _interval(tokens: int) -> int:
    """C that minimises `tokens / C` checkpoints plus `C` states of one stretch; short sequences are one stretch."""
    return max(16, math.isqrt(max(tokens - 1, 0)) + 1)


def _slots(starts: Tensor, j: int, every: int) -> Tensor:
    """Rows of the flat checkpoint buffer `[M // every + N, HV, K, V]` that hold each sequence's j-th checkpoint.

    Distinct for all (sequence, j) because sequences lie one after another in the flat tokens.
    """
    order = torch.arange(starts.shape[0], device=starts.device)
    return torch.div(starts, every, rounding_mode="floor") + order + j


class _Run(NamedTuple):
    """Tokens [first, first + tokens) of the sequences `who` (None: all of them): a rectangle without holes.

    `rows` finds them in the flat tokens, token-major: a slice where they are consecutive, else int64 `[tokens * n]`.
    """

    first: int
    tokens: int
    who: Tensor | None
    rows: slice | Tensor

    def pick(self, x: Tensor) -> Tensor:
        """The run's sequences of `x [N, ...]`: `x` itself if that is all of them."""
        return x if self.who is None else x.index_select(0, self.who)

    def place(self, x: Tensor, values: Tensor) -> Tensor:
        """`x [N, ...]` with the run's sequences replaced; may share storage with `values`, never with `x`."""
        return values if self.who is None else x.index_copy(0, self.who, values)

    def take(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The run's rows of `x [M, ...]` as `[tokens, n, ...]`; may be a view."""
        rows = x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)
        return rows.to(dtype).view(self.tokens, rows.shape[0] // self.tokens, *x.shape[1:])

    def put(self, x: Tensor, values: Tensor) -> None:
        """Writes `values [tokens, n, ...]` to the run's rows of `x [M, ...]`, and to no other row."""
        values = values.flatten(0, 1)
        if isinstance(self.rows, slice):
            x[self.rows] = values
        else:
            x.index_copy_(0, self.rows, values.to(x.dtype))


def _stretches(starts: Tensor, lengths: Tensor, every: int) -> list[list[_Run]]:
    """The runs of every stretch of `every` tokens, a new run wherever a sequence ends."""
    begin, length = starts.tolist(), lengths.tolist()
    longest = max(length, default=0)
    cuts = sorted({*range(0, longest, every), *length, longest})
    stretches: list[list[_Run]] = []
    for first, stop in itertools.pairwise(cuts):
        alive = [i for i, n in enumerate(length) if n > first]
        at, tokens, n = [begin[i] + first for i in alive], stop - first, len(alive)
        rows: slice | Tensor
        if n == 1 or (tokens == 1 and at == list(range(at[0], at[0] + n))):
            rows = slice(at[0], at[0] + tokens * n)
        else:
            time = torch.arange(tokens, device=starts.device)
            rows = (time[:, None] + torch.tensor(at, device=starts.device)).flatten()
        who = None if n == len(length) else torch.tensor(alive, device=starts.device)
        if first % every == 0:
            stretches.append([])
        stretches[-1].append(_Run(first, tokens, who, rows))
    return stretches


def _slab(count: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Empty `[count, *shape]` whose slices along the first axis each start where a fresh allocation starts (64 bytes),
    so that a product on token t's slice takes the same path as in a call of that token alone."""
    size = math.prod(shape)
    if count == 1 or size % 16 == 0:
        return torch.empty(count, *shape, dtype=dtype, device=device)
    return torch.empty(count, size + -size % 16, dtype=dtype, device=device)[:, :size].view(count, *shape)


class _Tokens(NamedTuple):
    """A run's inputs, ready for the loop. L tokens, G = n * HV heads of all sequences; `heads` is (n, H, R).

    `kq [L, 2, G, K]` holds the (normalised, head-repeated) key and the scaled query, `v [L, G, 1, V]`,
    `decay [L, G, 1 | K, 1]` = exp(g), `beta [L, G, 1, 1]`. `unit [L, 2, n, H, K]` and `rstd` are
    the l2norm's results for its backward, None where q and k came as they are.
    """

    heads: tuple[int, int, int]
    kq: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    unit: Tensor | None
    rstd: Tensor | None


class _Trace(NamedTuple):
    """What the way back needs of the way there, filled by `_advance`.

    `states [L + 1, G, K, V]`: before each token, as that token found it. `error [L, G, 1, V]` = v - S~^T k (delta; v
    otherwise), `update` = beta * error. `grad_q [L, G, 1, K]` = S do for `grad_o [L, G, 1, V]` and the S that was read.
    """

    states: Tensor
    error: Tensor
    update: Tensor
    grad_o: Tensor
    grad_q: Tensor


def _load(
    run: _Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    dtype: torch.dtype,
    scale: float,
    qk_l2norm: bool,
) -> _Tokens:
    pair, values = torch.stack((run.take(k, dtype), run.take(q, dtype)), 1), run.take(v, dtype)
    unit, rstd = l2norm(pair) if qk_l2norm else (None, None)
    tokens, _, n, key_heads, key_dim = pair.shape
    value_heads, value_dim = values.shape[2:]
    heads, size = (n, key_heads, value_heads // key_heads), n * value_heads
    kq = _slab(2 * tokens, (*heads, key_dim), k.device, dtype)
    kq.view(tokens, 2, *heads, key_dim).copy_((pair if unit is None else unit).unsqueeze(4))
    kq = kq.view(tokens, 2, size, key_dim)
    kq[:, 1].mul_(scale)
    decay = None
    if g is not None:
        decay = _slab(tokens, (size, key_dim if g.dim() == 3 else 1, 1), g.device, dtype)
        decay.copy_(run.take(g, dtype).reshape(decay.shape))
        for factor in decay.unbind(0):
            factor.exp_()
    strength = run.take(beta, dtype).reshape(tokens, size, 1, 1) if beta is not None else None
    return _Tokens(heads, kq, values.reshape(tokens, size, 1, value_dim), decay, strength, unit, rstd)


def _advance(
    state: Tensor,
    x: _Tokens,
    *,
    rule: str,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None,
    o: Tensor | None = None,
    trace: _Trace | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the tokens of `x` from `state [G, K, V]`; returns the state after the last, as written and before that.

    Overwrites `state` unless traced; fills `o [L, G, 1, V]` or `trace` where given. `identity` is the first token's.
    """
    count, delta, after = x.v.shape[0], rule == "delta", readout == "after_write"
    k, q = x.kq.unsqueeze(3).unbind(1)
    keys, columns, queries, values = k.unbind(0), k.mT.unbind(0), q.unbind(0), x.v.unbind(0)
    decays = x.decay.unbind(0) if x.decay is not None else None
    betas = x.beta.unbind(0) if x.beta is not None and delta else None
    outs = o.unbind(0) if o is not None else None
    scratch = None
    if trace is not None:
        states, grad_o, grad_q = trace.states.unbind(0), trace.grad_o.unbind(0), trace.grad_q.unbind(0)
        errors, updates = trace.error.unbind(0), trace.update.unbind(0)
        states[0].copy_(state)
        # Rounding makes a tensor of its own, so only an unrounded token is computed where its result is kept.
        scratch = torch.empty_like(states[0]) if quantize is not None else None
    elif delta:
        errors = updates = (torch.empty_like(values[0]),) * count
    if not delta:
        updates = (x.v if x.beta is None else x.v * x.beta).unbind(0) if trace is None else trace.update.unbind(0)

    unwritten, by_head = state, (x.heads[0], x.heads[1] * x.heads[2], *state.shape[1:])
    for t in range(count):
        if trace is not None:
            before, state = states[t], states[t + 1] if scratch is None else scratch
            if decays is not None:
                torch.mul(before, decays[t], out=state)
            else:
                state.copy_(before)
        elif decays is not None:
            state.mul_(decays[t])
        if delta:
            torch.baddbmm(values[t], keys[t], state, alpha=-1, out=errors[t])
            if betas is not None:
                torch.mul(errors[t], betas[t], out=updates[t])
        state.addcmul_(columns[t], updates[t])
        unwritten = written = state
        if quantize is not None:
            now = None if identity is None else identity._replace(position=identity.position + t)
            # Contiguous, as the next one-token call would find it: a codec may return a slice of a padded tensor.
            written = quantize.qdq(state.view(by_head), now).contiguous().view(state.shape)
        read = written if after else state
        if outs is not None:
            torch.bmm(queries[t], read, out=outs[t])
        if trace is not None:
            torch.bmm(grad_o[t], read.mT, out=grad_q[t])
            if scratch is not None:
                states[t + 1].copy_(written)
        state = written
    return state, unwritten


def _retreat(cotangent: Tensor, x: _Tokens, trace: _Trace, *, rule: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The adjoint of `_advance`: takes and overwrites the cotangent of the run's last state, `[G, K, V]`.

    With dS the cotangent of S_t and dS~ that of S~_t = Γ_t S_{t-1}:

        dS  += scale q do^T           du = dS^T k        dk = dS u + S~ dw
        dw   = -beta du  (delta)      dS~ = dS + k dw^T
        dS_{t-1} = Γ dS~              dg = sum(dS_{t-1} * S_{t-1})   over V, and over K for a decay per head

    `dS^T k` is formed from dS before the token's own rank-one term, which is why `(scale q.k) do` appears.
    Returns the cotangent of the run's first state, and gradients of the loop's inputs: `q k [L, G, 1, K]` (of the
    unscaled query), `v [L, G, 1, V]`, `g [L, G(, K)]`, `beta [L, G, 1, 1]`.
    """
    count, delta = x.v.shape[0], rule == "delta"
    size, key_dim, value_dim = cotangent.shape
    grad_o, device, dtype = trace.grad_o, cotangent.device, cotangent.dtype
    k, q = x.kq.unsqueeze(3).unbind(1)
    key_query = (k * q).sum(-1, keepdim=True)
    grad_u = grad_o * key_query
    grad_k = torch.empty_like(trace.grad_q)
    erased = torch.empty_like(grad_k) if delta else None
    # Rows (dw, do) against columns (k, q): one rank-two update a token instead of two rank-one updates.
    rows = torch.empty(count, 2, size, value_dim, dtype=dtype, device=device)
    rows[:, 1] = grad_o.squeeze(2)
    grad_g = None
    if x.decay is not None:
        per_head = x.decay.shape[2] == 1
        grad_g = torch.empty((count, size) if per_head else (count, size, key_dim), dtype=dtype, device=device)
        product = torch.empty_like(cotangent)
        terms = product.view(size, -1) if per_head else product

    keys, updates, states = k.unbind(0), trace.update.unbind(0), trace.states.unbind(0)
    decays = x.decay.unbind(0) if x.decay is not None else None
    columns, pairs = x.kq.permute(0, 2, 3, 1).unbind(0), rows.permute(0, 2, 1, 3).unbind(0)
    minus_beta = (-x.beta if x.beta is not None else -torch.ones_like(key_query)).unbind(0)
    erasures = rows[:, 0].unsqueeze(2).unbind(0)
    grads_u, grads_k = grad_u.unbind(0), grad_k.unbind(0)
    grads_g = grad_g.unbind(0) if grad_g is not None else ()
    erases = erased.unbind(0) if erased is not None else ()

    for t in reversed(range(count)):
        grads_u[t].baddbmm_(keys[t], cotangent)
        torch.bmm(updates[t], cotangent.mT, out=grads_k[t])
        if delta:
            torch.mul(grads_u[t], minus_beta[t], out=erasures[t])
            torch.bmm(erasures[t], states[t].mT, out=erases[t])
            cotangent.baddbmm_(columns[t], pairs[t])
        else:
            cotangent.baddbmm_(columns[t][..., 1:], pairs[t][:, 1:])
        if decays is not None:
            cotangent.mul_(decays[t])
            torch.mul(cotangent, states[t], out=product)
            torch.sum(terms, -1, out=grads_g[t])

    grad_k += q * (grad_o * trace.update).sum(-1, keepdim=True)
    if erased is not None:
        grad_k += erased if x.decay is None else erased * x.decay.mT
    grads = {"q": trace.grad_q, "k": grad_k, "v": grad_u if x.beta is None else grad_u * x.beta}
    if grad_g is not None:
        grads["g"] = grad_g
    if x.beta is not None:
        grads["beta"] = (grad_u * trace.error).sum(-1, keepdim=True)
    return cotangent, grads


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    o: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_every: int,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
) -> Tensor:
    """Every sequence's tokens in order, one by one.

    Args:
        q, k: `[M, H, K]`, v: `[M, HV, V]`, g: None | `[M, HV]` | `[M, HV, K]`, beta: None | `[M, HV]`: flat tokens.
        state: `[N, HV, K, V]` in the dtype of the arithmetic, already handed over. Never written.
        starts, lengths: int64 `[N]`; sequence i is the tokens `starts[i] : starts[i] + lengths[i]`, in order of i.
        o: `[M, HV, V]`; rows of these tokens are written, others left. None: only states are wanted.
        checkpoints: `[M // checkpoint_every + N, HV, K, V]` or None; `_slots` says which slots are filled.
        checkpoint_every: C, in tokens of a sequence; ignored without `checkpoints`.
        rule: "delta" | "additive". quantize: rounds the state after every token (token mode); None is exact.
        readout: "before_write" reads the output from the state before that rounding, "after_write" from after.
        identity: of the write after each sequence's first token, where `quantize` draws random bits.

    Returns:
        The final states `[N, HV, K, V]`, a new tensor; a sequence without tokens gets its initial state's bits. Where
        writing twice is not writing once (`quantize.idempotent`), the states before their last write.
    """
    final = state.clone(memory_format=torch.contiguous_format)
    unwritten = final
    every = checkpoint_every if checkpoints is not None else _BLOCK
    for stretch in _stretches(starts, lengths, every):
        if checkpoints is not None:
            slots = _slots(starts, stretch[0].first // every, every)
            checkpoints.index_copy_(0, stretch[0].pick(slots), stretch[0].pick(final))
        for run in stretch:
            x = _load(run, q, k, v, g, beta, dtype=state.dtype, scale=scale, qk_l2norm=qk_l2norm)
            run_o = _slab(run.tokens, tuple(x.v.shape[1:]), v.device, state.dtype) if o is not None else None
            current = run.pick(final)
            now = _identity(run, identity)
            last, before = _advance(
                current.flatten(0, 1), x, rule=rule, quantize=quantize, readout=readout, identity=now, o=run_o
            )
            if quantize is not None and not quantize.idempotent:
                unwritten = run.place(unwritten, before.view(current.shape))
            final = run.place(final, last.view(current.shape))
            if o is not None and run_o is not None:
                run.put(o, run_o.view(run.tokens, -1, *o.shape[1:]))
    return final if quantize is None or quantize.idempotent else unwritten


def _identity(run: _Run, identity: Identity | None) -> Identity | None:
    """The identity of the run's first token, of the run's sequences."""
    if identity is None:
        return None
    return Identity(run.pick(identity.position) + run.first, run.pick(identity.sequence))


@torch.no_grad()
def backward(
    grad_o: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    checkpoints: Tensor | None,
    checkpoint_every: int,
    grads: dict[str, Tensor],
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
    longest: int | None = None,
) -> Tensor:
    """The adjoint of `forward`, first order; a rounding is differentiated as the identity (semantics §7).

    Args:
        grad_o: `[M, HV, V]`, read at these sequences' tokens only. grad_final: `[N, HV, K, V]`, None is zero.
        q ... lengths and the options: as given to `forward`.
        checkpoints, checkpoint_every: as `forward` filled them; None: one more forward pass makes them here.
        longest: no sequence has more tokens; for kernels that launch by shapes, here the lengths are read.
        grads: tensors to write these tokens' rows into, under the names present of "dq" `[M, H, K]`, "dk", "dv"
            `[M, HV, V]`, "dg" (as `g`), "dbeta" `[M, HV]`; other rows are left.

    Returns:
        The cotangent of `state`, `[N, HV, K, V]`, a new tensor.
    """
    if checkpoints is None:
        checkpoint_every = _interval(int(lengths.max()) if lengths.numel() else 0)
    stretches = _stretches(starts, lengths, checkpoint_every)
    if checkpoints is None and len(stretches) > 1:
        checkpoints = state.new_empty(q.shape[0] // checkpoint_every + starts.shape[0], *state.shape[1:])
        forward(
            q, k, v, g, beta, state, starts, lengths, None, checkpoints, checkpoint_every,
            rule=rule, scale=scale, qk_l2norm=qk_l2norm, quantize=quantize, readout=readout, identity=identity,
        )  # fmt: skip

    cotangent = torch.zeros_like(state, memory_format=torch.contiguous_format)
    if grad_final is not None:
        cotangent.copy_(grad_final)
    for j, stretch in reversed(list(enumerate(stretches))):
        entering = state
        if j > 0 and checkpoints is not None:
            slots = stretch[0].pick(_slots(starts, j, checkpoint_every))
            entering = stretch[0].place(state, checkpoints.index_select(0, slots).to(state.dtype))
        steps: list[tuple[_Run, _Tokens, _Trace]] = []
        for run in stretch:
            x = _load(run, q, k, v, g, beta, dtype=state.dtype, scale=scale, qk_l2norm=qk_l2norm)
            trace = _trace(x, run.take(grad_o, state.dtype), rule=rule)
            current = run.pick(entering)
            now = _identity(run, identity)
            last, _ = _advance(
                current.flatten(0, 1), x, rule=rule, quantize=quantize, readout=readout, identity=now, trace=trace
            )
            if run is not stretch[-1]:
                entering = run.place(entering, last.view(current.shape))
            steps.append((run, x, trace))
        while steps:
            run, x, trace = steps.pop()
            current = run.pick(cotangent)
            first, run_grads = _retreat(current.flatten(0, 1), x, trace, rule=rule)
            cotangent = run.place(cotangent, first.view(current.shape))
            _deliver(run, x, run_grads, grads, scale=scale)
    return cotangent


def _trace(x: _Tokens, grad_o: Tensor, *, rule: str) -> _Trace:
    """An empty `_Trace` for the tokens `x` and the output's cotangent `[L, n, HV, V]`."""
    length, size, _, value_dim = x.v.shape
    key_dim, device, dtype = x.kq.shape[-1], x.v.device, x.v.dtype
    if rule == "delta":
        error = _slab(length, (size, 1, value_dim), device, dtype)
        update = error if x.beta is None else torch.empty_like(x.v)
    else:
        error, update = x.v, x.v if x.beta is None else x.v * x.beta
    return _Trace(
        states=_slab(length + 1, (size, key_dim, value_dim), device, dtype),
        error=error,
        update=update,
        grad_o=grad_o.reshape(x.v.shape),
        grad_q=torch.empty(length, size, 1, key_dim, dtype=dtype, device=device),
    )


def _deliver(run: _Run, x: _Tokens, run_grads: dict[str, Tensor], grads: dict[str, Tensor], *, scale: float) -> None:
    """Carries a run's gradients through head sharing, scale and l2norm to the rows of `grads`."""
    tokens, (n, key_heads, group) = run.tokens, x.heads
    pair = torch.stack((run_grads["k"], run_grads["q"] * scale), 1).view(tokens, 2, n, key_heads, group, -1)
    pair = pair.squeeze(4) if group == 1 else pair.sum(4)
    if x.unit is not None and x.rstd is not None:
        pair = l2norm_backward(pair, x.unit, x.rstd)
    for name, grad in (run_grads | {"k": pair[:, 0], "q": pair[:, 1]}).items():
        if f"d{name}" in grads:
            rows = grads[f"d{name}"]
            run.put(rows, grad.reshape(tokens, n, *rows.shape[1:]))
