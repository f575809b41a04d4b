"""What a packed state or a pool is given, refused by name before anything is computed or allocated.

Shapes and dtypes of a step's tensors are the ops' to check (`packed/ops.py`), values of slots `packed/rows.py`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lattn_compile.ops.arguments import check_constants, check_tensors
from lattn_compile.ops.validate import INTEGERS
from lattn_compile.packed.layout import Heads
from lattn_compile.refusal import refuse

__all__ = ["check_heads", "check_rule", "check_seen", "check_step"]

RULES = ("delta", "additive")
DECAYS = ("none", "head", "channel")
MAX_SEEN = 2**32


def check_heads(name: str, heads: Any) -> None:
    """
    Raises:
        StateError: no `Heads`, or sizes that no recurrence has.
    """
    if not isinstance(heads, Heads):
        remedy = "lc.Heads(H, HV, K, V, decay, has_beta)."
        refuse("state", name, repr(heads), "the layer's Heads", remedy)
    for field in ("H", "HV", "K", "V"):
        n = getattr(heads, field)
        if not (isinstance(n, torch.SymInt) or (type(n) is int and n > 0)):
            refuse("state", f"{name}.{field}", repr(n), "an int of at least 1", "The sizes of the layer's q, k and v.")
    if heads.HV % heads.H:
        remedy = "Value head j reads key head j // (HV // H)."
        refuse("state", f"{name}.HV", f"{heads.HV} beside H = {heads.H}", "a multiple of H", remedy)
    if heads.decay not in DECAYS:
        refuse("state", f"{name}.decay", repr(heads.decay), "'none', 'head' or 'channel'", "What g is in a call.")
    if not isinstance(heads.has_beta, bool):
        refuse("state", f"{name}.has_beta", repr(heads.has_beta), "True or False", "Whether calls have beta.")


def check_rule(name: str, rule: Any) -> None:
    """
    Raises:
        StateError: no rule of a recurrence.
    """
    if rule not in RULES:
        refuse("state", name, repr(rule), "'delta' or 'additive'", "Choose one of these.")


def check_seen(seen: Any, slots: int) -> None:
    """How many tokens sequences have seen, which keys their stochastic rounding.

    Raises:
        SequenceError: no count, or not one for all or one a sequence.
    """
    want = "an int from 0 to 2**32 - 1, or an int32 or int64 tensor [] or [N]"
    if isinstance(seen, Tensor):
        if seen.dtype not in INTEGERS or seen.shape not in ((), (slots,)):
            refuse("sequence", "seen", f"{seen.dtype} {list(seen.shape)}", want, "It counts tokens.")
    elif not isinstance(seen, torch.SymInt) and (type(seen) is not int or not 0 <= seen < MAX_SEEN):
        refuse("sequence", "seen", repr(seen), want, "It counts tokens: int(x) makes one of a number of numpy.")


def check_step(
    tokens: dict[str, Any], numbers: dict[str, Any], *, rule: Any, padding_slot: Any, lower_bound: Any, **switches: Any
) -> None:
    """Kinds of a step's arguments.

    Args:
        tokens: q, k, v, g, beta, A_log, dt_bias. numbers: the tensors of counts and slots.

    Raises:
        DtypeError, ShapeError, PolicyError: naming the argument.
    """
    check_tensors(**tokens)
    check_constants(rule, 0, **switches)
    for name, x in numbers.items():
        if x is not None and not isinstance(x, Tensor):
            remedy = f"torch.tensor({name}) makes one of a list; state_indices come from pool.indices(slots)."
            refuse("dtype", name, repr(x), "a tensor [N], or None", remedy)
    if isinstance(padding_slot, bool) or not isinstance(padding_slot, (int, torch.SymInt)):
        refuse("policy", "padding_slot", repr(padding_slot), "an int", "-1 is padding whatever else is.")
    if lower_bound is not None and (isinstance(lower_bound, bool) or not isinstance(lower_bound, (int, float))):
        refuse("policy", "lower_bound", repr(lower_bound), "a number below 0, or None", "float(x) makes one of x.")
    for name in ("q", "v"):
        if tokens[name].dim() != 4:
            want = "[B, T, H, K]" if name == "q" else "[B, T, HV, V]"
            refuse("shape", name, str(list(tokens[name].shape)), want, "The token axis comes before the heads.")
