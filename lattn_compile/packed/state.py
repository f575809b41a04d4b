"""`QuantizedState`: the states of one site as they are really stored, what a cache holds in place of a dense tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lattn_compile.carry import Call
from lattn_compile.errors import SequenceError, StateError
from lattn_compile.ops.arguments import query_scale
from lattn_compile.ops.segments import split
from lattn_compile.ops.validate import INTEGERS, Tensors, check_call
from lattn_compile.packed import flush, ops  # noqa: F401 - registers the op
from lattn_compile.packed.given import check_step
from lattn_compile.packed.layout import Heads, compute_dtype, heads_of
from lattn_compile.packed.rows import Rows, check_rows
from lattn_compile.packed.step import is_one_step
from lattn_compile.packed.stored import StoredState, no_gradient
from lattn_compile.policy import as_policy
from lattn_compile.site_policy import Policy
from lattn_compile.state import as_bytes, from_bytes, nbytes

__all__ = ["Draft", "QuantizedState"]


@dataclasses.dataclass(frozen=True)
class Draft:
    """The inputs of a call that was verified and not accepted yet: what `accept` steps over.

    `tokens` are k, v, g, beta (a query writes nothing); the rest are arguments of `QuantizedState.step`.
    """

    tokens: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
    options: dict[str, Any]


class QuantizedState(StoredState):
    """The recurrent states of one site, stored in the policy's format, written in place by `step`.

    A slot holds one sequence. It goes through: nothing (the sequence starts at zero), optionally exact (`stage`: a
    prefill left its state here, in float32), stored (from its first suffix token on).

        state = QuantizedState(lc.Policy(lc.Int8()))
        state.stage(prefill_state)                       # [N, HV, K, V]
        o = state.step(q, k, v, g, beta)                 # hands over, releases the exact state; any number of tokens
        o = state.verify(q, k, v, g, beta)               # drafts: what step would return; nothing is written
        state.accept(2)                                  # the first two were right

    Args:
        policy: `Token`, `Replay`, `TwoPrecision` or `Exact`, or a preset's name; its `storage` says nothing here.
        site_id: key of the site's stochastic rounding.

    Attributes:
        tensors: the stored tensors by name, in the order of `layout.names`; empty until something is stored.
        cursor: int32 `[slots]`, see `lattn::decode_`; None until there are slots.
        exact: float32 `[slots, HV, K, V]`, the states of the slots with cursor -1; None where there are none.
        position, sequence_ids: int64 `[slots]`; where the rounding is stochastic, else None.
        heads, rule: of the recurrence, known from the first step on.
        verifies: set by a cache whose next calls of several tokens are drafts.
        repeats: set by a cache whose model repeats each key head for its value heads before it calls: how often.
        draft: what was verified and not accepted yet.
        check_named: set by a pool: refuses the slots that a call names (`state_indices`, None for all; `padding_slot`)
            and that are nobody's, or wait for a state that was staged. Asked in eager code, of indices on a CPU.

    Raises:
        PolicyError: no policy, or a `Chunk` policy. UnsupportedError: a part of the policy that is not built.
    """

    def __init__(self, policy: Policy | str, *, site_id: int = 0, call: Call | None = None) -> None:
        super().__init__(as_policy(policy, "policy"), site_id=site_id, call=call)
        self.verifies = False
        self.repeats = 1
        self.draft: Draft | None = None
        self.check_named: Callable[[Tensor | None, int], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held: codes, scales, rings, cursors; the exact state and drafts while they are
        there."""
        return super().nbytes + (0 if self.draft is None else nbytes(*self.draft.tokens))

    def like(self, held: dict[str, Tensor]) -> QuantizedState:
        other = super().like(held)
        other.verifies, other.repeats = self.verifies, self.repeats
        return other

    def once(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q and k without what the model repeated."""
        if self.repeats == 1 or q.shape[2] != v.shape[2]:
            return q, k
        return q[:, :, :: self.repeats], k[:, :, :: self.repeats]

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        *,
        rule: str = "delta",
        scale: float | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        sequence_lengths: Tensor | None = None,
        state_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        padding_slot: int = -1,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        lower_bound: float | None = None,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
    ) -> Tensor:
        """Suffix tokens, any number of them, into the stored states in place; returns o `[B, T, HV, V]`.

        Arguments as `lc.linear_attention` and `lattn::decode_` have them; raw gates, as projections leave them, by the
        names and in the shapes that libraries have for them (`recurrence/gates.py` says what is made of them). A
        sequence without a state of its own (cursor -1, nothing staged) starts at zero.

        The arithmetic is that of `lc.linear_attention`: float32, or float64 if any input or the state is. A call that
        is refused leaves the state as it was.

        Raises:
            UnsupportedError: an input requires a gradient. StateError: drafts wait to be accepted, or other sizes or
            gates than before. ShapeError, DtypeError, SequenceError: bad input, float64 for a float32 state included.
        """
        check_step(
            {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias},
            {
                "cu_seqlens": cu_seqlens,
                "sequence_lengths": sequence_lengths,
                "state_indices": state_indices,
                "has_initial_state": has_initial_state,
            },
            rule=rule,
            padding_slot=padding_slot,
            lower_bound=lower_bound,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
        )
        self._ready(q, k, v, g, beta, A_log, dt_bias)
        self._named(state_indices, padding_slot)
        tokens, numbers = (q, k, v, g, beta), (cu_seqlens, sequence_lengths, state_indices, has_initial_state)
        options = {
            "rule": rule,
            "scale": query_scale(scale, q.shape[-1]),
            "qk_l2norm": use_qk_l2norm_in_kernel,
            "padding_slot": padding_slot,
        }
        if A_log is not None:  # KDA's checkpoints hold [1, 1, HV, 1], and one flat bias
            A_log = A_log.reshape(-1)
        if dt_bias is not None and g is not None and dt_bias.numel() == g.shape[2:].numel():
            dt_bias = dt_bias.reshape(g.shape[2:])
        raw = {
            "a_log": A_log,
            "dt_bias": dt_bias,
            "lower_bound": lower_bound,
            "raw_gate": use_gate_in_kernel,
            "raw_beta": use_beta_sigmoid_in_kernel,
            "allow_neg_eigval": allow_neg_eigval,
        }
        if any(value is not None and value is not False for value in raw.values()):
            options |= raw
        if torch.compiler.is_compiling():  # attributes change when the whole graph has run
            return self._step(tokens, numbers, options)
        before = dict(self.__dict__)
        cursor = None if self.exact is None or self.cursor is None else self.cursor.clone()
        try:
            return self._step(tokens, numbers, options)
        except BaseException:
            # Slots that were made on the way are of tensors of their own; of a hand-over, only cursors are read.
            self.__dict__.update(before)
            if cursor is not None and self.cursor is not None:
                self.cursor.copy_(cursor)
            raise

    def _step(
        self,
        tokens: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
        numbers: tuple[Tensor | None, ...],
        options: dict[str, Any],
    ) -> Tensor:
        o: Tensor
        (q, k, v, g, beta), rule = tokens, options["rule"]
        cu_seqlens, sequence_lengths, state_indices, has_initial_state = numbers
        heads = heads_of(q, v, g, beta)
        # As the ops have it: float64 if anything is.
        double = any(x is not None and x.dtype is torch.float64 for x in (*tokens, self.exact))
        dtype = torch.float64 if double else torch.float32
        if self.cursor is None:
            sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            self.allocate(heads, sequences, device=q.device, dtype=dtype, rule=rule)
        if self.exact is not None and self.whole and (heads, rule) != (self.heads, self.rule):
            self.tensors, self.encoded = {}, False  # of what was there before
        if self.tensors and (heads, rule) != (self.heads, self.rule):
            raise StateError(
                "state",
                got=f"a step with {heads}, {rule}",
                want=f"{self.heads}, {self.rule}, for which it was made",
                remedy="Every call of a site has the same sizes, gates and rule.",
            )
        assert self.cursor is not None
        if self.exact is not None:
            if q.shape[1] == 0:
                return q.new_empty(v.shape)
            geometry = check_call(Tensors(*tokens, None, cu_seqlens, None, sequence_lengths, None))
            check_rows(q.device, self.cursor, state_indices, has_initial_state, geometry.sequences)
            if self.exact.dtype is not dtype:  # a library's prefill may have been float32 all the same
                self.exact, self.encoded = self.exact.to(dtype), False
            self._hand_over(heads, rule, q, cu_seqlens, sequence_lengths, state_indices)
        self.heads, self.rule = heads, rule
        raw = "raw_gate" in options
        if torch.compiler.is_compiling() and not raw and is_one_step(self.call, q, numbers):
            options = {**options, **self.call.op_options(), "site_id": self.site_id}
            o, stored, cursor = torch.ops.lattn.decode_packed.default(
                *tokens, list(self.tensors.values()), self.cursor, **options
            )
            for old, new in zip(self.tensors.values(), stored, strict=True):
                old.copy_(new)
            self.cursor.copy_(cursor)
            return o
        op: Any = getattr(torch.ops.lattn, self._op(ops.OPS[self.call.write], heads, dtype, q.dtype))
        o = op(
            q,
            k,
            v,
            g,
            beta,
            list(self.tensors.values()),
            self.cursor,
            state_indices,
            has_initial_state,
            cu_seqlens,
            sequence_lengths,
            self.position,
            self._ids(state_indices),
            site_id=self.site_id,
            **options,
            **self.call.op_options(),
        )
        return o

    def _op(self, name: str, heads: Heads, dtype: torch.dtype, inputs: torch.dtype) -> str:
        """The op of that name, or the one that Triton kernels serve, which a CUDA graph may record."""
        asked = self.call.implementation == "triton" or (self.device.type == "cuda" and not self.random)
        in_order = ops.is_proven(self.call, self.tensors) or self.call.implementation == "triton"
        if asked and in_order and ops.in_pieces(self.tensors) is None:  # noqa: SIM102 - is_served imports Triton
            if ops.is_served(self.call, self.device, dtype, heads.K, heads.V, inputs):
                return f"{name}device_"
        return name

    def _ready(self, *inputs: Tensor | None) -> None:
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
            raise no_gradient("step")
        self._no_drafts()

    def _named(self, state_indices: Tensor | None, padding_slot: int) -> None:
        if self.check_named is None or torch.compiler.is_compiling():
            return
        if state_indices is None or state_indices.device.type == "cpu":
            self.check_named(state_indices, padding_slot)

    def drop_drafts(self, slot: int) -> None:
        """The drafts of the sequence in `slot`, if any wait, are no longer accepted: it has ended, or was replaced."""
        if self.draft is None or self.cursor is None:
            return
        options = self.draft.options
        named = options.get("state_indices")
        if named is None:
            named = torch.arange(self.slots, dtype=torch.int32, device=self.device)
        named = torch.where(named == slot, -1, named)
        self.draft = dataclasses.replace(self.draft, options={**options, "state_indices": named})

    def _no_drafts(self) -> None:
        if self.draft is not None:
            raise StateError(
                "state",
                got="another call while drafts wait",
                want="accept() after every verify()",
                remedy="accept(0) drops them all.",
            )

    def stage(self, exact: Tensor, *, seen: int | Tensor = 0) -> Self:
        self._no_drafts()
        return super().stage(exact, seen=seen)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        self._no_drafts()  # a copy would be without them
        return super()._map(fn)

    def _ids(self, state_indices: Tensor | None) -> Tensor | None:
        if self.sequence_ids is None or state_indices is None:
            return self.sequence_ids
        # What padding names is looked at by nobody.
        return self.sequence_ids[state_indices.to(torch.int64).clamp(0, self.slots - 1)]

    def _hand_over(
        self,
        heads: Heads,
        rule: str,
        q: Tensor,
        cu_seqlens: Tensor | None,
        sequence_lengths: Tensor | None,
        state_indices: Tensor | None,
    ) -> None:
        """Hands over the states of the sequences that have a token in this call."""
        if cu_seqlens is None and sequence_lengths is None and state_indices is None:
            self.hand_over(heads, rule)
            return
        rows = split(q.shape[0], q.shape[1], cu_seqlens, None, sequence_lengths, q.device).total > 0
        if state_indices is not None:
            named = rows & (state_indices >= 0) & (state_indices < self.slots)
            slot = torch.where(named, state_indices, 0).to(torch.int64)
            count = torch.zeros(self.slots, dtype=torch.int64, device=q.device).index_add_(0, slot, named.long())
            rows = count > 0
        self.hand_over(heads, rule, rows)

    def flush(self, state_indices: Tensor | None = None, *, padding_slot: int = -1) -> None:
        """Writes the pending records of the slots (all by default) into their anchors, as a window's end does.

        Only replay and two_precision have records; other modes, and slots without any, keep their bits.

        Raises:
            StateError: drafts wait to be accepted.
        """
        self._ready()
        if self.call.window is None or self.cursor is None or not self.tensors:
            return
        h = self._known()
        unused = ("readout", "gate")
        options = {name: x for name, x in self.call.op_options().items() if name not in unused}
        getattr(torch.ops.lattn, self._op("flush_", h, compute_dtype(self.tensors), torch.float32))(
            list(self.tensors.values()),
            self.cursor,
            state_indices,
            self.position,
            self._ids(state_indices),
            heads=list(h[:4]),
            decay=h.decay,
            has_beta=h.has_beta,
            rule=self.rule,
            site_id=self.site_id,
            padding_slot=padding_slot,
            **options,
        )

    def zero_(self) -> Self:
        """Every sequence starts at zero again; exact states and waiting drafts are released."""
        self.draft = None
        return super().zero_()

    def verify(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None = None,
        beta: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """What `step` would return of drafted tokens, flushes included; nothing is written until `accept`.

        Their inputs are kept. So the state is never ahead of what was accepted, and there is nothing to roll back.
        Arguments and errors as of `step`.
        """
        self._ready()
        indices, here = options.get("state_indices"), options
        if indices is None or isinstance(indices, Tensor):
            self._named(indices, options.get("padding_slot", -1))
        if indices is None or self.cursor is None:
            shadow = self.clone()
        else:  # of a pool, the sequences' own rows are enough
            cu = options.get("cu_seqlens")
            sequences = q.shape[0] if cu is None else cu.shape[0] - 1
            check_rows(q.device, self.cursor, indices, options.get("has_initial_state"), sequences)
            rows = Rows.of(self.cursor, indices, None, indices.shape[0], options.get("padding_slot", -1))
            shadow = self.index_select(0, rows.slot)
            number = torch.arange(rows.slot.shape[0], device=rows.slot.device)
            own = torch.where(rows.live, number, torch.where(rows.lost, rows.slot.shape[0], -1))
            here = {**options, "state_indices": own, "padding_slot": -1}
        o = shadow.step(q, k, v, g, beta, **here)
        # An engine may fill the buffer of its slots anew before it accepts.
        kept = {name: x.clone() if isinstance(x, Tensor) else x for name, x in options.items()}
        self.draft = Draft((k, v, g, beta), kept)
        return o

    def accept(self, accepted: int | Tensor) -> None:
        """Keeps the first `accepted` drafts of each sequence (an int, or int `[N]`; 0 is legal) and drops the others.

        The state is then that of `step` on the accepted tokens, bit for bit.

        Raises:
            StateError: nothing was verified. SequenceError: more than were drafted, where that lies on a CPU (elsewhere
            it is clamped), or no number of them.
        """
        draft = self.draft
        if draft is None:
            raise StateError(
                "accepted", got=str(accepted), want="a verify() before", remedy="step() needs no accept()."
            )
        k, v, g, beta = draft.tokens
        cu, lengths = draft.options.get("cu_seqlens"), draft.options.get("sequence_lengths")
        drafted = split(k.shape[0], k.shape[1], cu, None, lengths, k.device).total
        if type(accepted) is int:
            kept = torch.full_like(drafted, accepted)
        elif isinstance(accepted, Tensor) and accepted.dtype in INTEGERS and accepted.shape in ((), drafted.shape):
            kept = accepted.to(drafted).expand_as(drafted)
        else:
            said = f"{accepted.dtype} {list(accepted.shape)}" if isinstance(accepted, Tensor) else repr(accepted)
            raise SequenceError(
                "accepted",
                got=said,
                want=f"an int, or an int32 or int64 tensor [N] = [{len(drafted)}]",
                remedy="It counts drafts.",
            )
        if kept.device.type == "cpu" and bool(((kept < 0) | (kept > drafted)).any()):
            raise SequenceError(
                "accepted",
                got=str(kept.tolist()),
                want=f"0 to the drafted {drafted.tolist()}",
                remedy="Count the drafts that were right, from the first one on.",
            )
        self.draft = None
        try:
            # A query writes nothing; any will do.
            self.step(k, k, v, g, beta, **{**draft.options, "sequence_lengths": kept})
        except BaseException:
            self.draft = draft
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        children, context = _flatten(self)
        return (_load, (_dump(context), *as_bytes(dict(zip(context[0], children, strict=True)))))


def _load(context: list[Any], held: dict[str, Tensor], narrow: dict[str, torch.dtype]) -> QuantizedState:
    held = from_bytes(held, narrow)
    return _unflatten([held[name] for name in context[0]], _undump(context))


# `torch.load(weights_only=True)` calls nothing that is not listed.
torch.serialization.add_safe_globals([_load])


def _flatten(state: QuantizedState) -> tuple[list[Tensor], tuple[Any, ...]]:
    if state.draft is not None:
        raise StateError("state", got="drafts that wait", want="accept() first", remedy="accept(0) drops them all.")
    held = state.held()
    return list(held.values()), (tuple(held), state.policy, state.site_id, state.heads, state.rule, state.repeats)


def _unflatten(children: Any, context: tuple[Any, ...]) -> QuantizedState:
    keys, policy, site_id, heads, rule, repeats = context
    state = QuantizedState(policy, site_id=site_id)
    state.heads, state.rule, state.repeats = heads, rule, repeats
    return state.like(dict(zip(keys, children, strict=True)))


def _flatten_with_keys(state: QuantizedState) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    children, context = _flatten(state)
    return [(pytree.MappingKey(name), x) for name, x in zip(context[0], children, strict=True)], context


def _dump(context: tuple[Any, ...]) -> list[Any]:
    keys, policy, site_id, heads, rule, repeats = context
    return [list(keys), policy.to_dict(), site_id, None if heads is None else list(heads), rule, repeats]


def _undump(context: list[Any]) -> tuple[Any, ...]:
    keys, policy, site_id, heads, rule, *more = context
    repeats = more[0] if more else 1  # written before there was such a number
    return (tuple(keys), Policy.from_dict(policy), site_id, None if heads is None else Heads(*heads), rule, repeats)


pytree.register_pytree_node(
    QuantizedState,
    _flatten,
    _unflatten,
    serialized_type_name="lattn_compile.QuantizedState",
    to_dumpable_context=_dump,
    from_dumpable_context=_undump,
    flatten_with_keys_fn=_flatten_with_keys,
)
