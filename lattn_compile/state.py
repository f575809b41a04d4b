"""A recurrent state that travels: `EncodedState`, what token and chunk modes carry from call to call (semantics §3, 5).

`replay_state.py` has that of the replay and two-precision modes.

One pytree holds codes, scales and cursors together, so that a copy, a reordering or a save cannot take one without the
others. A carried encoded state is decoded, never encoded again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lattn_compile import codec
from lattn_compile.errors import DtypeError, ShapeError, StateError
from lattn_compile.formats import Format, parse
from lattn_compile.refusal import refuse

__all__ = [
    "EncodedState",
    "Written",
    "as_bytes",
    "check_index",
    "decode_state",
    "device_of",
    "encode_state",
    "from_bytes",
    "from_raw",
    "kept",
    "nbytes",
]


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedState:
    """A state `[N, HV, K, V]` as it is stored, with what continues it bit for bit.

    Made by `lc.linear_attention` (policies `Token` and `Chunk`) and `lc.encode_state`; legal as `initial_state` of the
    next call under the same policy, and as a dense start (`dense()`) of an exact one.

    Attributes:
        state_format: the format's spec, e.g. "int8/*x64"; `fmt` is the format itself.
        tensors: codes and scales by name, as `fmt.encode` makes them.
        cursor: int32 `[N]`. -1: this sequence is exact, its hand-over (rounding) is still to come. Otherwise, token
            mode: 0; chunk mode: tokens since the last rounding, 0 <= cursor < chunk_size.
        exact: float32 `[N, HV, K, V]`, the state of the sequences that are not (only) what `tensors` say: at cursor -1,
            and inside a chunk. None where no sequence can be there. Float64 if the inputs were.
        values: the decoded values, `[N, HV, K, V]`; they carry the gradient. None in a loaded state.
        chunk_size: of the chunk mode; None in token mode.
        shape: (K, V). dtype: what `dense()` returns.
        feedback, rotation: as in the policy; a residual and a rotated basis change what `tensors` mean.
        position: int64 `[N]`, tokens that each sequence has seen; where the rounding is stochastic, else None.
    """

    state_format: str
    tensors: dict[str, Tensor]
    cursor: Tensor
    exact: Tensor | None = None
    values: Tensor | None = None
    chunk_size: int | None = None
    shape: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float32
    feedback: str | None = None
    rotation: str | None = None
    position: Tensor | None = None

    @property
    def fmt(self) -> Format:
        """The format of the stored tensors."""
        return parse(self.state_format)

    @property
    def nbytes(self) -> int:
        """Bytes of what has to be stored: codes, scales, cursors and `exact`; `values` only emulate."""
        return nbytes(*self.tensors.values(), self.cursor, self.exact, self.position)

    def decoded(self) -> Tensor:
        """What codes and scales say, `[N, HV, K, V]`."""
        if self.values is not None:
            return self.values
        return codec.decode_tensors(
            self.tensors,
            self.state_format,
            self.shape,
            self.dtype,
            **kept(feedback=self.feedback, rotation=self.rotation),
        )

    def dense(self) -> Tensor:
        """The state as a reader sees it, `[N, HV, K, V]`: exact where it was not handed over yet, else decoded."""
        values = self.decoded()
        return values if self.exact is None else self._exact_where(self.cursor < 0, values)

    def raw(self) -> Tensor:
        """What the ops continue from: exact also inside a chunk."""
        values = self.decoded()
        if self.exact is None:
            return values
        return self._exact_where(self.cursor != 0 if self.chunk_size is not None else self.cursor < 0, values)

    def _exact_where(self, rows: Tensor, values: Tensor) -> Tensor:
        exact = self.exact
        assert exact is not None
        if exact.shape != values.shape or rows.shape != values.shape[:1]:
            raise StateError(
                "exact, cursor",
                got=f"{list(exact.shape)}, {list(rows.shape)} beside values of shape {list(values.shape)}",
                want="[N, HV, K, V] and [N]",
                remedy="Keep the parts of a state together: index_select, to, detach and pytrees take all of them.",
            )
        return torch.where(rows.view(-1, 1, 1, 1), exact, values)

    def index_select(self, index: Tensor) -> EncodedState:
        """The sequences `index` (int `[M]`), for reordering beams or dropping finished ones.

        Raises:
            DtypeError, StateError: not such a tensor, or (on CPUs) sequences that there are none of.
        """
        check_index(index, self.cursor)
        return self._map(lambda x: x.index_select(0, index))

    def detach(self) -> EncodedState:
        """Cuts the gradient, for truncated back-propagation."""
        return self._map(lambda x: x.detach())

    def to(self, device: torch.device | str) -> EncodedState:
        """All parts on another device.

        Raises:
            DtypeError: not a device: a state keeps its format, and a dtype is `dense()`'s business.
        """
        where = device_of(device)
        return self._map(lambda x: x.to(where))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> EncodedState:
        return dataclasses.replace(
            self,
            tensors={name: fn(x) for name, x in self.tensors.items()},
            cursor=fn(self.cursor),
            exact=None if self.exact is None else fn(self.exact),
            values=None if self.values is None else fn(self.values),
            position=None if self.position is None else fn(self.position),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A file holds what would be stored. `values` is left out: it equals the decoded codes (rounding is idempotent).
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "values"}
        if self.exact is not None:
            fields["exact"] = self.exact.detach()
        fields["tensors"], narrow = as_bytes(self.tensors)
        return (_load, (fields, narrow))

    def __repr__(self) -> str:
        mode = "token" if self.chunk_size is None else f"chunk({self.chunk_size})"
        size = list(next(iter(self.tensors.values())).shape[:-2])
        extra = "".join(f", {n}={x!r}" for n, x in (("feedback", self.feedback), ("rotation", self.rotation)) if x)
        return f"EncodedState({self.state_format}, {mode}{extra}, {[*size, *self.shape]}, {self.nbytes} bytes)"


def check_index(index: Any, state: Tensor) -> None:
    """`index` of a state's `index_select`; `state` is `[N, ...]`.

    Raises:
        DtypeError: no int32 or int64 tensor, or one on another device. StateError: not `[M]`, or (looked at on CPUs
            only) sequences that there are none of.
    """
    size = state.shape[0]
    if not isinstance(index, Tensor):
        remedy = "torch.tensor(index) makes one of a list."
        refuse("dtype", "index", repr(index), "an int32 or int64 tensor [M]", remedy)
    if index.dtype not in (torch.int32, torch.int64):
        remedy = "mask.nonzero().flatten() makes one of a mask." if index.dtype is torch.bool else "index.long()."
        refuse("dtype", "index", str(index.dtype), "int32 or int64", remedy)
    if index.device != state.device:
        refuse("dtype", "index", str(index.device), f"the state's device {state.device}", "Move index there.")
    if index.dim() != 1:
        refuse("state", "index", f"shape {list(index.shape)}", "[M], numbers of sequences", "index.flatten().")
    if torch.compiler.is_compiling() or index.device.type != "cpu":
        return  # reading values would wait for the device
    if bool(((index < 0) | (index >= size)).any()):
        refuse("state", "index", str(index.tolist()), f"0 to {size - 1}", f"The state has {size} sequences.")


def device_of(device: Any) -> torch.device:
    """The device that `device` names.

    Raises:
        DtypeError: it names none.
    """
    if isinstance(device, (str, int, torch.device)) and not isinstance(device, bool):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise DtypeError(
        "device", got=repr(device), want="a torch.device or its name", remedy="A state's dtype is its format's."
    )


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of the tensors that are there."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def kept(**options: Any) -> dict[str, Any]:
    """The options that are not None: a codec's op names only what it was asked for, so that equal calls look equal."""
    return {name: x for name, x in options.items() if x is not None}


def as_bytes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, torch.dtype]]:
    """Tensors that pickle can take: it does not know torch's 8-bit floats. With the dtypes to view them as again."""
    narrow = {name: x.dtype for name, x in tensors.items() if x.dtype.itemsize == 1}
    return {name: x.view(torch.uint8) if name in narrow else x for name, x in tensors.items()}, narrow


def from_bytes(tensors: dict[str, Tensor], narrow: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Inverse of `as_bytes`."""
    return {name: x.view(narrow[name]) if name in narrow else x for name, x in tensors.items()}


def _load(fields: dict[str, Any], narrow: dict[str, torch.dtype]) -> EncodedState:
    return EncodedState(**fields | {"tensors": from_bytes(fields["tensors"], narrow)})


# `torch.load(weights_only=True)` calls nothing that is not listed.
torch.serialization.add_safe_globals([_load])


@dataclasses.dataclass(frozen=True)
class Written:
    """How and when the states of one call were last written.

    Attributes:
        rounding: options of the codec's ops beside the format: rounding, feedback, rotation, seed, site_id; without
            those that have their default.
        idempotent: whether writing a written state again changes nothing. The op's raw state is then the stored value,
            else the value before it was stored.
        changed: bool `[N]`, states that this call wrote; the others are those of `before`.
        position, sequence_ids: int `[N]`, of those writes, where random bits are drawn.
    """

    rounding: dict[str, Any]
    idempotent: bool
    changed: Tensor
    position: Tensor | None = None
    sequence_ids: Tensor | None = None


def from_raw(
    raw: Tensor,
    cursor: Tensor,
    state_format: str,
    *,
    chunk_size: int | None,
    keep_exact: bool,
    written: Written | None = None,
    before: EncodedState | None = None,
    seen: Tensor | None = None,
) -> EncodedState:
    """The `EncodedState` of an op's raw final state.

    Args:
        raw: `[N, HV, K, V]`: the stored value (see `Written`) where the cursor says that it was just rounded, exact
            elsewhere. Encoding a decoded value gives back its codes (idempotence, semantics §3).
        keep_exact: whether any sequence may be exact; its bytes are kept then.
        written: None is nearest rounding of everything. before: the state that the call continued, if any.
        seen: int64 `[N]`, tokens that each sequence has seen, where the rounding is stochastic.
    """
    options: dict[str, Any] = {}
    if written is not None:
        options = {**written.rounding, **kept(position=written.position, sequence_ids=written.sequence_ids)}
    tensors = codec.encode_tensors(raw, state_format, **options)
    if keep_exact or (written is not None and not written.idempotent):
        values = codec.qdq(raw, state_format, **options)
    else:
        values = raw
    if written is not None and not written.idempotent and before is not None:
        # Codes that did not change are kept, not made again: another rounding of them would be another value.
        tensors = {name: _where(written.changed, x, before.tensors[name]) for name, x in tensors.items()}
        values = _where(written.changed, values, before.decoded())
    return EncodedState(
        state_format,
        tensors,
        cursor,
        exact=raw if keep_exact else None,
        values=values,
        chunk_size=chunk_size,
        shape=(raw.shape[-2], raw.shape[-1]),
        dtype=raw.dtype,
        feedback=options.get("feedback"),
        rotation=options.get("rotation"),
        position=seen,
    )


def _where(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the rows (bool `[N]`) that are set; through bytes where torch cannot select among 8-bit floats."""
    mask = rows.view(-1, *(1,) * (new.dim() - 1))
    if new.dtype.itemsize == 1:
        return torch.where(mask, new.view(torch.uint8), old.view(torch.uint8)).view(new.dtype)
    return torch.where(mask, new, old)


def encode_state(S: Tensor, fmt: Format | str) -> EncodedState:
    """Rounds a dense state to `fmt` and returns it as it is stored; gradients pass straight through the rounding.

    Args:
        S: `[N, HV, K, V]` (any leading dimensions), float32; float64 is rounded in float64, bf16 and fp16 are upcast.
        fmt: a format, or its spec such as "int8" or "fp8_e4m3/128x1".

    Returns:
        An `EncodedState` whose cursor is 0: handed over already.

    Raises:
        DtypeError: not a floating-point state. ShapeError: fewer than two dimensions.
        FormatError: an unknown format, or one that does not fit K and V.
    """
    if not isinstance(S, Tensor):
        refuse("dtype", "S", type(S).__name__, "a tensor [..., K, V]", "torch.as_tensor makes one of an array.")
    if S.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise DtypeError("S", got=str(S.dtype), want="a floating-point state", remedy="Pass decoded values.")
    if S.dim() < 2:
        raise ShapeError("S", got=str(list(S.shape)), want="[..., K, V]", remedy="Key axis before value axis.")
    chosen = parse(fmt)
    chosen.check(S.shape[-2], S.shape[-1])
    raw = S if S.dtype is torch.float64 else S.float()
    return EncodedState(
        str(chosen),
        codec.encode_tensors(raw, str(chosen)),
        cursor=torch.zeros(S.shape[0] if S.dim() > 2 else 1, dtype=torch.int32, device=S.device),
        values=codec.qdq(raw, str(chosen)),
        shape=(raw.shape[-2], raw.shape[-1]),
        dtype=raw.dtype,
    )


def decode_state(state: EncodedState) -> Tensor:
    """The dense state `[..., K, V]` of `encode_state`, or of a carried state: `state.dense()`.

    Raises:
        StateError: not an `EncodedState`.
    """
    if not isinstance(state, EncodedState):
        raise StateError(
            "state",
            got=type(state).__name__,
            want="an EncodedState",
            remedy="A dense tensor needs no decoding; raw codes are decoded by their format, fmt.decode(...).",
        )
    return state.dense()


_OWN = ("cursor", "exact", "values", "position")


def _flatten(state: EncodedState) -> tuple[list[Any], tuple[Any, ...]]:
    own = [name for name in _OWN if getattr(state, name) is not None]
    children = [*state.tensors.values(), *(getattr(state, name) for name in own)]
    spec = (state.state_format, tuple(state.tensors), tuple(own), state.chunk_size, state.shape, state.dtype)
    return children, (*spec, state.feedback, state.rotation)


def _unflatten(children: Any, context: tuple[Any, ...]) -> EncodedState:
    state_format, names, own, chunk_size, shape, dtype, feedback, rotation = context
    children = list(children)
    tensors = dict(zip(names, children[: len(names)], strict=True))
    return EncodedState(
        state_format,
        tensors,
        **dict(zip(own, children[len(names) :], strict=True)),
        chunk_size=chunk_size,
        shape=shape,
        dtype=dtype,
        feedback=feedback,
        rotation=rotation,
    )


def _flatten_with_keys(state: EncodedState) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    children, context = _flatten(state)
    names = [*context[1], *context[2]]
    return [(pytree.MappingKey(name), child) for name, child in zip(names, children, strict=True)], context


def _dump(context: tuple[Any, ...]) -> list[Any]:
    state_format, names, own, chunk_size, shape, dtype, *rest = context
    spelled = str(dtype).removeprefix("torch.")
    return [state_format, list(names), list(own), chunk_size, list(shape), spelled, *rest]


def _undump(context: list[Any]) -> tuple[Any, ...]:
    state_format, names, own, chunk_size, shape, dtype, *rest = context
    return (state_format, tuple(names), tuple(own), chunk_size, tuple(shape), getattr(torch, dtype), *rest)


pytree.register_pytree_node(
    EncodedState,
    _flatten,
    _unflatten,
    serialized_type_name="lattn_compile.EncodedState",
    to_dumpable_context=_dump,
    from_dumpable_context=_undump,
    flatten_with_keys_fn=_flatten_with_keys,
)
