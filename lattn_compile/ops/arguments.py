"""What `lc.linear_attention` is given, refused by name before an op's schema sees it.

A schema refuses in its own words ("Expected a value of type 'Tensor' for argument 'k'"), which name no way out, and it
takes what converts without a word: a tensor for a number, bytes for a string. Shapes and dtypes are `validate.py`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lattn_compile.errors import UnsupportedError
from lattn_compile.refusal import refuse

__all__ = [
    "as_ids",
    "check_constants",
    "check_dense",
    "check_device",
    "check_identity",
    "check_tensors",
    "check_transforms",
    "query_scale",
    "refuse_position",
    "traced_transform",
    "transforms_refused",
]

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_LARGEST = torch.finfo(torch.float64).max

MAX_POSITION = 2**32
"""Random bits are keyed by 32 bits of a position."""


def check_tensors(**given: Any) -> None:
    """Whether they are tensors; what may be left out is None then.

    Raises:
        DtypeError: another kind of object, or a tensor that is not dense.
    """
    for name, x in given.items():
        if isinstance(x, Tensor):
            check_dense(name, x)
            continue
        if x is None and name not in ("q", "k", "v"):
            continue
        if name == "cu_seqlens":
            want, remedy = "an int32 or int64 tensor [N + 1], or None", "torch.tensor([0, ...], dtype=torch.int32)."
        else:
            want = "a tensor" if name in ("q", "k", "v") else "a tensor or None"
            remedy = "torch.as_tensor makes one of an array or of a list."
        refuse("dtype", name, type(x).__name__, want, remedy)


def check_dense(name: str, x: Tensor) -> None:
    """
    Raises:
        DtypeError: a sparse or a nested tensor.
    """
    if x.is_nested:
        remedy = "Pad it and give sequence_lengths, or pack it and give cu_seqlens."
        refuse("dtype", name, "a nested tensor", "a dense tensor", remedy)
    if x.layout is not torch.strided:
        refuse("dtype", name, str(x.layout), "a dense tensor", f"Pass {name}.to_dense().")


def check_transforms(given: Mapping[str, Tensor | None], carry: Sequence[Tensor | None] = ()) -> None:
    """What the ops' autograd would drop without a word, or refuse only later and in other words.

    Args:
        carry: the tensors of `initial_state`.

    Raises:
        UnsupportedError: a tangent of forward-mode AD. StateError: an inference tensor that a backward would need.
    """
    named = [*given.items(), *(("initial_state", x) for x in carry)]
    tensors = [(name, x) for name, x in named if x is not None]
    for name, x in tensors:
        if x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None:
            want = "first-order reverse mode: no jvp, jacfwd or dual numbers"
            refuse("unsupported", name, "a tensor with a tangent (forward-mode AD)", want, "Use torch.autograd.grad.")
    if not torch.is_grad_enabled() or not any(x.requires_grad for _, x in tensors):
        return
    for name, x in tensors:
        if x.is_inference():
            remedy = (
                f"Clone {name} outside of inference_mode (a state: copy.deepcopy), or make it under torch.no_grad()."
            )
            refuse("state", name, "a tensor made in inference mode", "one that a backward may keep", remedy)


def traced_transform() -> tuple[str, str, str] | None:
    """What a trace stands in that the ops have no rule for, for `refuse`: what it is, what is wanted, a way out.

    A trace has no tangents to look at: in forward mode every tensor may have one, and the ops would drop it.
    """
    interpreter = torch._C._functorch.peek_interpreter_stack()
    key = None if interpreter is None else interpreter.key()
    if key == torch._C._functorch.TransformType.Jvp or forward_ad._current_level >= 0:
        what = "forward-mode AD (jvp, jacfwd, dual numbers) around it in a compiled region"
        return what, "first-order reverse mode", "Use torch.autograd.grad, or keep it out of that region."
    if key == torch._C._functorch.TransformType.Grad:
        return "torch.func.grad, vjp or jacrev around it", _OUTSIDE, _BACKWARD
    return None


_OUTSIDE, _BACKWARD = "a call outside of torch.func", "Use backward() or torch.autograd.grad."


@contextlib.contextmanager
def transforms_refused() -> Iterator[None]:
    """Around eager calls of ops: transforms of torch.func that have no rule for them."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "functorch transforms" in said:
            what, remedy = "torch.func.grad, vjp or jacrev", _BACKWARD
        elif "Batching rule not implemented" in said:
            what, remedy = "torch.vmap of a call that returns its state", "Put the mapped axis into B or HV."
        else:
            raise
        raise UnsupportedError("lc.linear_attention", got=f"{what} around it", want=_OUTSIDE, remedy=remedy) from error


def check_constants(rule: Any, site_id: Any, **switches: Any) -> None:
    """The words and numbers of a call.

    Raises:
        PolicyError: another type, or a `site_id` that does not fit 64 bits. What `rule` may say is the ops' to check.
    """
    if not isinstance(rule, str):
        refuse("policy", "rule", repr(rule), "'delta' or 'additive'", "Choose one of these.")
    if isinstance(site_id, bool) or not isinstance(site_id, (int, torch.SymInt)) or not -(2**63) <= site_id < 2**63:
        refuse("policy", "site_id", repr(site_id), "an int of 64 bits", "It numbers this call among others.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            refuse("policy", name, repr(value), "True or False", f"Pass bool({name}) if that is what is meant.")


def query_scale(scale: Any, key_dim: Any) -> Any:
    """`scale`, or its default K ** -0.5.

    Raises:
        PolicyError: not a finite number.
    """
    if scale is None:
        return 1.0 if key_dim == 0 else key_dim**-0.5  # the op says what it wants of K = 0
    if isinstance(scale, bool) or not isinstance(scale, _NUMBERS) or not -_LARGEST <= scale <= _LARGEST:
        refuse("policy", "scale", repr(scale), "a finite number, or None for K ** -0.5", "float(x) makes one of x.")
    return scale


def check_identity(position: Any, sequence_ids: Any, sequences: int, device: torch.device) -> None:
    """What keys the random bits.

    Raises:
        DtypeError, SequenceError: not whole numbers, out of range, not one a sequence, or on another device.
    """
    for name, x in (("position", position), ("sequence_ids", sequence_ids)):
        scalar = name == "position"
        if x is None:
            continue
        if scalar and isinstance(x, int) and not isinstance(x, bool):
            if not 0 <= x < MAX_POSITION:
                refuse_position(str(x))
            continue
        if isinstance(x, Tensor):
            if x.dtype not in (torch.int32, torch.int64):
                refuse("dtype", name, str(x.dtype), "int32 or int64", "It is a count, not a value.")
            check_device(name, x, device)
            fits = (x.dim() == 0 and scalar) or (x.dim() == 1 and x.shape[0] == sequences)
            got = str(list(x.shape))
        elif isinstance(x, (list, tuple)) and not scalar:
            for i in x:
                if isinstance(i, bool) or not isinstance(i, int) or not -(2**63) <= i < 2**63:
                    refuse("dtype", name, repr(x), "ints of 64 bits", "One int a sequence.")
            fits = len(x) == sequences
            got = str(len(x))
        else:
            refuse("dtype", name, repr(x), "an int or an int tensor", "It is a count, not a value.")
        if not fits:
            refuse(
                "sequence",
                name,
                got,
                f"one a sequence, [N] = [{sequences}]",
                "N is the batch size, or len(cu_seqlens) - 1 for packed sequences.",
            )


def refuse_position(got: str) -> NoReturn:
    refuse("sequence", "position", got, "0 to 2**32 - 1", "Random bits are keyed by 32 bits of a position.")


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    """A tensor of counts lies where the tokens are, or on the CPU.

    Raises:
        DtypeError: it lies elsewhere.
    """
    if x.device != device and x.device.type != "cpu":
        refuse("dtype", name, str(x.device), f"q's device {device}, or the CPU", f"Move {name} there.")


def as_ids(x: int | Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Positions or sequence ids as a tensor."""
    return x.to(device) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.int64, device=device)
