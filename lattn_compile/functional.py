"""`lc.linear_attention`: one call for every recurrence, form and policy; eager, compiled or exported.

It turns a policy into op arguments, carried states into tensors and cursors, and back. The computing is in the ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lattn_compile import phase
from lattn_compile.carry import Call, carried, to_carry
from lattn_compile.errors import PolicyError, nearest, surfacing
from lattn_compile.ops.arguments import (
    as_ids,
    check_constants,
    check_identity,
    check_tensors,
    check_transforms,
    query_scale,
    traced_transform,
    transforms_refused,
)
from lattn_compile.ops.decode import CHECKPOINT_EVERY, checkpoint_interval
from lattn_compile.ops.segments import split
from lattn_compile.phase import Lengths, as_lengths
from lattn_compile.policy import PRESETS, Policy
from lattn_compile.refusal import refuse
from lattn_compile.replay_state import ReplayState
from lattn_compile.state import EncodedState

__all__ = ["linear_attention"]

own_call_tag: Callable[[], str] = str
"""Says, while Dynamo traces a call here, what `lc.attach` knows about it (set by `passes.capture`); "" is nothing."""

_AS_IT_IS = contextlib.nullcontext()
_EXACT = ("exact", "fp32", "before_write", "auto")


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    rule: str = "delta",
    scale: float | None = None,
    initial_state: Tensor | EncodedState | ReplayState | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Lengths | None = None,
    sequence_lengths: Lengths | None = None,
    policy: Policy | str | None = None,
    position: int | Tensor | None = None,
    sequence_ids: Sequence[int] | Tensor | None = None,
    site_id: int = 0,
) -> tuple[Tensor, Tensor | EncodedState | ReplayState | None]:
    """Linear attention with an optional decay and an optionally quantized state (semantics §1-5).

        S~_t = exp(g_t) ∘ S_{t-1};  u_t = beta_t (v_t - S~_tᵀ k_t)  ["delta"]  or  beta_t v_t  ["additive"]
        S_t = S~_t + k_t u_tᵀ;      o_t = scale · S_tᵀ q_t

    Args:
        q, k: `[B, T, H, K]`, bf16, fp16 or fp32 (fp64 on the reference kernels). Any strides, T >= 0.
        v: `[B, T, HV, V]`, HV = R · H; value head j uses key head j // R.
        g: log decay of one step (natural log, not cumulative, <= 0, -inf clears the state): `[B, T, HV]`, per key
            channel `[B, T, HV, K]`, or None.
        beta: write strength `[B, T, HV]` after its activation, [0, 2) is legal; None is 1.
        rule: "delta" (DeltaNet, GDN, KDA) or "additive" (linear attention, RetNet, GLA, Lightning).
        scale: of the queries, default K ** -0.5.
        initial_state: `[N, HV, K, V]`, N = B or the number of packed sequences, or what an earlier call returned: an
            `EncodedState` or `ReplayState` under the policy that made it, or under "exact" from its `dense()` on.
        output_final_state: whether to return the state; else the second value is None.
        use_qk_l2norm_in_kernel: x / sqrt(sum(x²) + 1e-6) on q and k first.
        cu_seqlens: int32 or int64 `[N + 1]`, sequence boundaries of a packed batch with B = 1.
        prefix_lengths: tokens before this are exact prefill. An int (clamped to each sequence), a list or an int
            tensor, one a sequence (not clamped); default: that of the active `lc.training_phase`, else 0.
        sequence_lengths: tokens at or beyond it vanish: output and gradient 0, whatever they hold. Default: the
            phase's, else T.
        policy: a `Policy` (made outside a compiled region) or a preset's name; None computes exactly.
        position: absolute position of the first token, an int or an int tensor `[]` or `[N]` (in a compiled region an
            int is a constant: pass a tensor). Default: where the carried state stands, else the phase's, else 0.
        sequence_ids: int `[N]`, a caller's name for each sequence, default the phase's, else 0. Both key the stochastic
            rounding only; nearest rounding ignores them.
        site_id: key of this call site, likewise.

    Returns:
        o `[B, T, HV, V]` in q's dtype, and the final state or None: a float32 Tensor `[N, HV, K, V]` (float64 for
        float64 inputs) without a policy and under `Exact`, an `EncodedState` under `Token` and `Chunk`, a `ReplayState`
        under `Replay` and `TwoPrecision`.

    Raises:
        ShapeError, DtypeError, SequenceError, StateError, PolicyError, FormatError: bad input, before any computation.
        UnsupportedError: a part of the policy that is not built, or a transform of torch.func that is not supported.
    """
    check_tensors(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    check_constants(
        rule, site_id, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel
    )
    call = Call(*(_EXACT if policy is None else _options(policy)))
    if policy is None and isinstance(initial_state, (EncodedState, ReplayState)):
        refuse(
            "state",
            "initial_state",
            f"{_named(initial_state)}, and no policy",
            "the policy that made it",
            'Pass policy=... to go on as it began, or policy="exact" (or initial_state.dense()) to go on exactly.',
        )
    start = carried(initial_state, call)
    if isinstance(start.before, ReplayState) and start.before.mode == "two_precision" and start.before.rule != rule:
        # Its ring holds inputs, which another rule would make another state of.
        refuse(
            "state",
            "rule",
            f"{rule!r} for a state of {start.before.rule!r}",
            f"{start.before.rule!r}, by which its pending inputs are replayed",
            "Go on under the rule that made it, or from initial_state.dense().",
        )
    eager = not torch.compiler.is_compiling()
    if eager:
        carry = (start.state, start.cursor, start.read, *start.ring)
        check_transforms({"q": q, "k": k, "v": v, "g": g, "beta": beta}, carry)
    elif said := refused_transform():
        refuse("unsupported", "lc.linear_attention", *said)

    ambient_prefix, ambient_sequence = phase.current()
    prefix = as_lengths("prefix_lengths", prefix_lengths) if prefix_lengths is not None else ambient_prefix
    sequence = as_lengths("sequence_lengths", sequence_lengths) if sequence_lengths is not None else ambient_sequence
    if prefix is None and (policy is None or (call.write == "exact" and call.rounds_prefill)):
        # No phase means p = 0, where the op alone would take every token for prefix. Without a policy nothing is
        # rounded here, but a recipe may put one on this op later.
        prefix = torch.zeros((), dtype=torch.int32, device=q.device)

    if q.dim() < 2:  # the op says what it wants of other shapes
        refuse("shape", "q", str(list(q.shape)), "[B, T, H, K]", "The token axis comes before the heads.")
    batch, tokens = q.shape[0], q.shape[1]
    sequences = cu_seqlens.shape[0] - 1 if cu_seqlens is not None and cu_seqlens.dim() else batch
    check_identity(position, sequence_ids, sequences, q.device)
    where, who = None, None
    if call.rounding == "stochastic" or policy is None:  # without one, a recipe may put one on this op later
        ambient_where, ambient_who = phase.current_identity()
        where = start.position if position is None else as_ids(position, q.device)
        where = ambient_where if where is None else where  # a carried state knows where it stands
        who = ambient_who if sequence_ids is None else as_ids(sequence_ids, q.device)

    lengths = (cu_seqlens, prefix, sequence, start.cursor)
    identity = () if where is None and who is None else (where, who)
    common = {
        **call.op_options(),
        "rule": rule,
        "scale": query_scale(scale, q.shape[-1]),
        "qk_l2norm": use_qk_l2norm_in_kernel,
        "site_id": site_id,
    }
    tag = "" if eager else _own_call_tag()
    ring: list[Tensor] = []
    with torch.fx.traceback.annotate({"lattn": tag}) if tag else transforms_refused() if eager else _AS_IT_IS:
        if call.window is not None:
            inputs = (q, k, v, g, beta, start.state, start.read, *start.ring)
            o, final, *ring = torch.ops.lattn.replay(
                *inputs, *lengths, *identity, **common, keep_ring=output_final_state
            )
        elif call.write == "token" or (call.write == "exact" and tokens == 1):
            every = _checkpoint_every((q, k, v, g, beta, start.state), tokens)
            inputs = (q, k, v, g, beta, start.state)
            o, final, _ = torch.ops.lattn.decode(*inputs, *lengths, *identity, **common, checkpoint_every=every)
        else:
            o, final = torch.ops.lattn.chunk(q, k, v, g, beta, start.state, *lengths, *identity, **common)
    if not output_final_state:
        return o, None
    if call.write == "exact":
        return o, final
    segments = split(batch, tokens, cu_seqlens, prefix, sequence, q.device)
    # A call in which every sequence has a suffix token leaves no exact state, but inside a chunk.
    ragged = prefix is not None or sequence is not None or cu_seqlens is not None
    exact = call.write == "chunk" or ragged or tokens == 0
    with transforms_refused() if eager else _AS_IT_IS:
        return o, to_carry(
            final,
            ring,
            call,
            start,
            segments,
            rule=rule,
            site_id=site_id,
            keep_exact=exact,
            position=where,
            sequence_ids=who,
            has_decay=g is not None,
            has_beta=beta is not None,
        )


def _named(state: EncodedState | ReplayState) -> str:
    if isinstance(state, EncodedState):
        return f"an EncodedState of {state.state_format}"
    return f"a ReplayState of {state.anchor.state_format}, {state.mode} over {state.window} tokens"


@torch.compiler.assume_constant_result
def refused_transform() -> tuple[str, str, str] | None:
    """`ops.arguments.traced_transform` of the trace now running, evaluated while tracing and never guarded."""
    return traced_transform()


@torch.compiler.assume_constant_result
def _own_call_tag() -> str:
    return own_call_tag()


def _options(policy: Policy | str) -> tuple[Any, ...]:
    """The fields of a policy's `Call`: plain constants."""
    if isinstance(policy, str) and policy in PRESETS:
        policy = PRESETS[policy]
    if not isinstance(policy, Policy):
        raise PolicyError(
            "policy",
            got=repr(policy),
            want=f"a Policy, None, or a preset: {', '.join(PRESETS)}",
            remedy="A Recipe chooses by path; one call takes one policy."
            + (nearest(policy, PRESETS) if isinstance(policy, str) else ""),
        )
    options = policy.op_kwargs()
    return tuple(options.get(name, default) for name, default in Call._field_defaults.items())


torch.compiler.assume_constant_result(refuse)

if torch.__version__ >= "2.13":  # a TorchVersion, which compares as a version
    # Dynamo need not trace through a policy: it takes the result as a constant and guards on the object itself. Before
    # 2.13 it does not take a dataclass as an argument here, and traces.
    _options = torch.compiler.assume_constant_result(surfacing()(_options))


def _checkpoint_every(tensors: tuple[Tensor | None, ...], tokens: int) -> int:
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors):
        return 0
    # A graph serves many T: an interval that follows T would be a new constant, and a recompile, for each.
    return CHECKPOINT_EVERY if torch.compiler.is_compiling() else checkpoint_interval(tokens)
