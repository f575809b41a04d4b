"""Context parallelism: one sequence, its tokens cut across ranks, the state handed on from rank to rank.

A rank's tokens act on the state that comes in as an affine map: S_out = A S_in + B, where A is the product of their
transitions and B is what they write to a state of zeros. For the additive rule A is a decay, diag(exp(sum of g)); for
the delta rule it is a K x K matrix for each head. Both are had by running the recurrence itself, with K more value
columns that write nothing and start from the identity:

    [v | 0] from [0 | I]   gives   outputs [o_0 | o_A]  and the state  [B | A],     o = o_0 + o_A S_in

So every rank runs its tokens at once, the pairs are all-gathered, and each rank folds those before it:
S <- A_r S + B_r.
docs/distributed.md compares this with a ring.

Of packed sequences only one reaches from a rank into the next: its state is what is handed on. A rank in which another
one begins has A = 0, and what is read of the incoming state ends where its sequence does.

The last rank may go on in a policy's write mode: its suffix needs the true state, so it waits for the pairs and then
runs its tokens as one device would, from S_in. All ranks before it are exact prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lattn_compile.errors import DistributedError, PolicyError, SequenceError
from lattn_compile.functional import linear_attention
from lattn_compile.lowering._torch_distributed import gathered
from lattn_compile.phase import Lengths, as_lengths
from lattn_compile.policy import Policy
from lattn_compile.replay_state import ReplayState
from lattn_compile.state import EncodedState

__all__ = ["before", "context_parallel"]

_MOST_COLUMNS = 256
"""Value channels of one call; more are two calls."""


@torch.compiler.disable(reason="the ranks tell one another how many tokens they have, which a graph cannot know")
def context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    rule: str = "delta",
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Lengths | None = None,
    policy: Policy | str | None = None,
    sequence_ids: Tensor | None = None,
    site_id: int = 0,
) -> tuple[Tensor, Tensor | EncodedState | ReplayState | None]:
    """`lc.linear_attention` of sequences whose tokens are cut across the ranks of `group`, in the order of ranks.

    Every rank has to call it, and to run the backward of what it returned: gradients are handed back in the same way.
    `torch.compile` breaks the graph around it.

    Args:
        q, k, v, g, beta: this rank's tokens, `[B, T_r, ...]` as `lc.linear_attention` has them; T_r may differ.
        group: default the whole world.
        initial_state: `[B, HV, K, V]`, what the whole sequence starts from; only the first rank's counts. With
            `cu_seqlens` `[N, HV, K, V]`, on every rank.
        cu_seqlens: `[N + 1]`, boundaries of packed sequences (B = 1) in the tokens of all ranks; on every rank the
            same. Exact only: `policy` is refused, for each sequence would have a suffix of its own, wherever it lies.
        prefix_lengths: tokens of the whole sequence that are exact, an int or one a sequence; on every rank the same.
            With a policy they have to reach the last rank. Default: all tokens before the last rank's.
        policy: of the tokens behind. None: all tokens are exact.
        Others as in `lc.linear_attention`.

    Returns:
        o `[B, T_r, HV, V]` of this rank's tokens; the final state on the last rank, None on the others. With
        `cu_seqlens` every rank has the states of the sequences that end in its tokens, in their order, `[n, HV, K, V]`.

    Raises:
        SequenceError: on every rank, where a suffix token lies before the last rank's, or boundaries are not those of
            all tokens. PolicyError: a policy with `cu_seqlens`. DistributedError: no process group. As
            `lc.linear_attention` for the rest.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise DistributedError(
            "group",
            got="no process group",
            want="torch.distributed.init_process_group() before",
            remedy="On one device call lc.linear_attention.",
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    common: dict[str, Any] = {"rule": rule, "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    sizes = _sizes(q, group)
    if cu_seqlens is not None:
        return _packed((q, k, v, g, beta), common, cu_seqlens, sizes, group, initial_state, output_final_state, policy)
    begin = sum(sizes[:-1])
    suffix: dict[str, Any] = {"policy": policy, "site_id": site_id, "sequence_ids": sequence_ids, "position": begin}
    suffix["prefix_lengths"] = _of_the_last(prefix_lengths, begin, sizes[-1], policy)
    tokens = (q, k, v, g, beta)
    if ranks == 1:
        return linear_attention(  # type: ignore[misc]
            *tokens, **common, **suffix, initial_state=initial_state, output_final_state=output_final_state
        )

    waits = rank == ranks - 1 and policy is not None
    if waits:
        part = _Part.waiting(tokens)
    else:
        part = _Part.of(tokens, common, initial_state if rank == 0 else None, q.shape[0] if rank > 0 else 0)
    pairs = gathered(part.pair(rule), group)
    state = _folded(pairs[:rank], k.shape[-1], rule)
    final: Any = None
    if waits:
        o, final = linear_attention(  # type: ignore[misc]
            *tokens, **common, **suffix, initial_state=state, output_final_state=output_final_state
        )
    else:
        o = part.outputs(state).to(q.dtype)
        if output_final_state and rank == ranks - 1:
            final = _folded(torch.cat([pairs[:rank], part.pair(rule)[None]]), k.shape[-1], rule)
    return _Tie.apply(o, pairs), final  # type: ignore[no-untyped-call]


def _packed(
    tokens: tuple[Tensor | None, ...],
    common: dict[str, Any],
    cu_seqlens: Tensor,
    sizes: list[int],
    group: dist.ProcessGroup,
    initial_state: Tensor | None,
    output_final_state: bool,
    policy: Policy | str | None,
) -> tuple[Tensor, Tensor | None]:
    """Of packed sequences, all tokens exact."""
    q, k = tokens[0], tokens[1]
    assert q is not None and k is not None
    if policy is not None:
        raise PolicyError(
            "policy",
            got=f"{policy!r} with cu_seqlens",
            want="None, all tokens exact",
            remedy="A suffix runs token by token behind all tokens before it: cut one sequence, not a packed batch.",
        )
    ends = [int(n) for n in cu_seqlens]
    if q.shape[0] != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != sum(sizes) or sorted(ends) != ends:
        raise SequenceError(
            "cu_seqlens",
            got=f"{ends} of {q.shape[0]} x {sum(sizes)} tokens on {len(sizes)} ranks",
            want=f"boundaries from 0 to {sum(sizes)} in ascending order, of a batch of one",
            remedy="They count the tokens of all ranks, and every rank is given all of them.",
        )
    rank = dist.get_rank(group)
    begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
    # Empty sequences are where they begin, and the one at the very end is on the last rank that has tokens.
    here = [i for i, (a, b) in enumerate(itertools.pairwise(ends)) if a < end and (b > begin or a >= begin)]
    here += [i for i in range(len(ends) - 1) if ends[i] == end == ends[-1] and begin < end]
    rows = here or [0]  # without a token of its own a rank hands on what comes
    goes_in, goes_out = not here or ends[here[0]] < begin, not here or ends[here[-1] + 1] > end
    bounds = torch.tensor([*(max(ends[i], begin) - begin for i in here), end - begin] if here else [0, 0]).to(
        cu_seqlens
    )
    start = None
    if initial_state is not None:
        start = initial_state[rows]
        if goes_in:
            start = torch.cat([torch.zeros_like(start[:1]), start[1:]])
    part = _Part.of(tokens, {**common, "cu_seqlens": bounds}, start, int(goes_in))
    pairs = gathered(part.pair(common["rule"])[-1:], group)
    state = _folded(pairs[:rank], k.shape[-1], common["rule"])
    o = _Tie.apply(part.outputs(state).to(q.dtype), pairs)  # type: ignore[no-untyped-call]
    if not output_final_state:
        return o, None
    final = part.written
    if part.transition is not None and state is not None:
        final = torch.cat([final[:1] + part.transition[:1] @ state, final[1:]])
    return o, final[: len(here) - int(goes_out)] if here else final[:0]


@torch.compiler.disable(reason="another rank has the tokens before")
def before(x: Tensor, tokens: int, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """The last `tokens` tokens of the rank before, `[B, tokens, ...]` of `x [B, T_r, ...]`; zeros on the first rank.

    What a short convolution in front of a recurrence needs of the tokens before its own. Differentiable; every rank has
    to call it and to run its backward.

    Raises:
        SequenceError: this rank has fewer tokens.
    """
    if x.shape[1] < tokens:
        raise SequenceError(
            "x",
            got=f"{x.shape[1]} tokens on a rank",
            want=f"at least {tokens}",
            remedy="Cut the sequence into longer parts: a rank hands on tokens of its own only.",
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None
    rank = dist.get_rank(group)
    every = gathered(x[:, x.shape[1] - tokens :], group)
    # An index that every rank takes from what was gathered: so each of them has a backward to run.
    return every[rank - 1] * (1 if rank else 0)


@dataclass(frozen=True)
class _Part:
    """What a rank's tokens do: to a state of zeros (or the one that the sequence starts from), and to one that
    comes in.

    Attributes:
        o: outputs `[B, T, HV, V]`. written: the state `[B, HV, K, V]`.
        read: `[B, T, HV, K]`, what outputs take of an incoming state. transition: `[B, HV, K, K]`. None: none comes in.
    """

    o: Tensor
    written: Tensor
    read: Tensor | None
    transition: Tensor | None

    @classmethod
    def of(
        cls, tokens: Sequence[Tensor | None], common: dict[str, Any], initial_state: Tensor | None, comes_in: int
    ) -> _Part:
        """`comes_in`: how many sequences have a state that comes in, the first ones; `initial_state` of the others."""
        dtype = _dtype(tokens)
        q, k, v, g, beta = (None if x is None else x.to(dtype) for x in tokens)
        assert q is not None and k is not None and v is not None
        B, T, HV, V = v.shape
        K = k.shape[-1]
        # Said here, for an active phase speaks of whole sequences.
        cu_seqlens = common.get("cu_seqlens")
        every = T if cu_seqlens is None else cu_seqlens.diff()
        exact = {**common, "prefix_lengths": every, "sequence_lengths": every, "output_final_state": True}

        def run(values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            o, final = linear_attention(q, k, values, g, beta, **exact, initial_state=state)
            assert isinstance(final, Tensor)
            return o, final

        if not comes_in:
            return cls(*run(v, initial_state), None, None)
        rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        identity = torch.zeros(rows, HV, K, K, dtype=dtype, device=v.device)
        identity[:comes_in] = torch.eye(K, dtype=dtype, device=v.device)
        nothing = v.new_zeros(B, T, HV, K)
        if V + K > _MOST_COLUMNS:
            (o, written), (read, transition) = run(v, initial_state), run(nothing, identity)
            return cls(o, written, read, transition)
        zeros = v.new_zeros(rows, HV, K, V) if initial_state is None else initial_state.to(dtype)
        both, state = run(torch.cat([v, nothing], -1), torch.cat([zeros, identity], -1))
        (o, read), (written, transition) = both.split([V, K], -1), state.split([V, K], -1)
        return cls(o, written, read, transition)

    @classmethod
    def waiting(cls, tokens: Sequence[Tensor | None]) -> _Part:
        """Of a rank that nobody waits for. It has a part in the gradient of the gather all the same."""
        _, k, v, _, _ = tokens
        assert k is not None and v is not None
        needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tokens)
        nothing = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=_dtype(tokens))
        return cls(v, nothing.requires_grad_(needed), None, None)

    def pair(self, rule: str) -> Tensor:
        """What is handed on, `[B, HV, K, A + V]`: transition and state; of the additive rule's transition
        the diagonal."""
        width = 1 if rule == "additive" else self.written.shape[-2]
        if self.transition is None:
            first = self.written.new_zeros(*self.written.shape[:-1], width)
        else:
            first = self.transition.diagonal(0, -2, -1)[..., None] if rule == "additive" else self.transition
        return torch.cat([first, self.written], -1)

    def outputs(self, state: Tensor | None) -> Tensor:
        if self.read is None or state is None:
            return self.o
        return self.o + (self.read.transpose(1, 2) @ state).transpose(1, 2)


class _Tie(torch.autograd.Function):
    """`o` as it is. Its gradient reaches what was gathered too, as zeros: a collective's backward has to run on every
    rank, also on one whose outputs took nothing from it."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, gathered: Tensor) -> Tensor:
        ctx.save_for_backward(gathered)
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(x)


def _dtype(tokens: Sequence[Tensor | None]) -> torch.dtype:
    return torch.float64 if any(x is not None and x.dtype is torch.float64 for x in tokens) else torch.float32


def _folded(pairs: Tensor, K: int, rule: str) -> Tensor | None:
    """The state behind those ranks; None behind none."""
    state: Tensor | None = None
    for pair in pairs.unbind(0):
        width = 1 if rule == "additive" else K
        transition, written = pair[..., :width], pair[..., width:]
        if state is None:
            state = written
        else:
            state = written + (transition * state if rule == "additive" else transition @ state)
    return state


def _sizes(q: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Tokens of every rank."""
    mine = torch.tensor([q.shape[1]], device=q.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return [int(n) for n in found]


def _of_the_last(prefix_lengths: Lengths | None, begin: int, tokens: int, policy: Policy | str | None) -> Tensor | int:
    """Prefix lengths as the last rank counts them, whose tokens begin at `begin`.

    Raises:
        SequenceError: a suffix token lies before that.
    """
    if policy is None:
        return tokens
    prefix = as_lengths("prefix_lengths", prefix_lengths)
    if prefix is None:
        return 0
    if bool((prefix < begin).any()):
        raise SequenceError(
            "prefix_lengths",
            got=str(prefix.tolist()),
            want=f"at least {begin}, where the last rank's tokens begin",
            remedy="A quantized suffix runs token by token on one rank: give the last rank more of the tokens.",
        )
    return (prefix - begin).clamp(max=tokens)
