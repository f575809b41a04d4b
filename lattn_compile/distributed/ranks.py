"""What the ranks of a job say to one another before they compute together, and what they hear when one fails.

from lattn_compile import distributed as lcd

lcd.check_same_recipe(model)             # before the first step: raises on every rank
with lcd.together():                     # around the steps: what one rank raises is an error on all, within seconds
    train(...)
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from lattn_compile.attach import attached_recipe
from lattn_compile.errors import DistributedError, LattnError
from lattn_compile.lowering._torch_distributed import default_store

__all__ = ["SECONDS", "check_same_recipe", "meet", "together"]

SECONDS = 30.0
"""How long a rank waits for the others where they only say something."""

_FAILED = "lattn_compile/failed"
_talking: dict[str, dist.ProcessGroup] = {}
_talking_in: list[dist.Store] = []  # where the ranks met that those groups are of; another one after another init


def _alone() -> bool:
    """Without a process group there is one rank."""
    return not dist.is_available() or not dist.is_initialized()


def _talk(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A gloo group of the same ranks, used for nothing else: what is said never meets another collective half way, and
    NCCL would wait ten minutes for a rank that is gone."""
    of = dist.group.WORLD if group is None else group
    assert of is not None
    store = default_store()
    if not _talking_in or _talking_in[0] is not store:
        _talking.clear()
        _talking_in[:] = [store]
    if of.group_name not in _talking:
        ranks = dist.get_process_group_ranks(of)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _talking[of.group_name] = made
    return _talking[of.group_name]


def meet(value: Any, *, group: dist.ProcessGroup | None = None, seconds: float = SECONDS) -> list[Any]:
    """Every rank's `value` (anything that pickles), in the order of ranks.

    Raises:
        DistributedError: a rank did not come within `seconds`, or is gone.
    """
    if _alone():
        return [value]
    try:
        talk = _talk(group)
        found: list[Any] = [None] * dist.get_world_size(talk)
        dist.monitored_barrier(talk, datetime.timedelta(seconds=seconds), wait_all_ranks=True)
        dist.all_gather_object(found, value, group=talk)
    except RuntimeError as error:
        raise _gone(error) from error
    return found


def check_same_recipe(model: nn.Module, *, group: dist.ProcessGroup | None = None, seconds: float = SECONDS) -> None:
    """Whether `lc.attach` gave every rank the same recipe. Ranks that round unlike each other do not hang, they train
    something that nobody asked for.

    Raises:
        DistributedError: on every rank, if the recipes differ; or a rank did not come within `seconds`.
    """
    recipe = attached_recipe(model)
    said = meet(
        (None, "no recipe") if recipe is None else (recipe.fingerprint(), repr(recipe)), group=group, seconds=seconds
    )
    if len({fingerprint for fingerprint, _ in said}) == 1:
        return
    ranks: dict[str, list[str]] = {}
    for rank, (_, text) in enumerate(said):
        ranks.setdefault(text, []).append(str(rank))
    raise DistributedError(
        "model",
        got="; ".join(f"{text} on rank {', '.join(of)}" for text, of in ranks.items()),
        want="the same recipe on every rank",
        remedy="Attach the same one everywhere: a file that all ranks read, or lc.attach before the model is copied.",
    )


@contextlib.contextmanager
def together(*, seconds: float = 5.0) -> Iterator[None]:
    """Inside, a rank that raises says so to the others, and whoever waits for it in a collective of gloo raises too.

    An error of a rank's own passes through as it is. A collective that fails because another rank failed becomes a
    `DistributedError` which names that rank and what it said; it waits up to `seconds` for that word. With NCCL a
    collective does not fail when a rank is gone: there torchrun ends the others.
    """
    if _alone():
        yield
        return
    try:
        yield
    except RuntimeError as error:  # a LattnError is none
        if not _lost(error):
            _announce(error)
            raise
        said = _heard(seconds)
        _announce(error)
        raise _gone(error, said) from error
    except Exception as error:
        _announce(error)
        raise


# gloo has no class of its own for it.
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Rr]ead error|[Ww]rite error|monitoredBarrier|"
    r"NCCL|[Ss]ocket|peer"
)


def _lost(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


def _announce(error: BaseException) -> None:
    """The first rank that fails has the word."""
    text = str(error).strip().split("\n")[0]
    with contextlib.suppress(RuntimeError):  # the store's own rank may be the one that is gone
        default_store().compare_set(_FAILED, "", f"rank {dist.get_rank()}: {type(error).__name__}: {text}")


def _heard(seconds: float) -> str | None:
    try:
        store = default_store()
        store.wait([_FAILED], datetime.timedelta(seconds=seconds))
        return store.get(_FAILED).decode()
    except RuntimeError:
        return None


def _gone(error: BaseException, said: str | None = None) -> LattnError:
    first = (str(error).strip() or repr(error)).split("\n")[0]
    return DistributedError(
        "process group",
        got=said if said is not None else f"a rank that is gone or does not answer ({first})",
        want="every rank at the same call",
        remedy="Look at the first error of that rank; start again from the last checkpoint."
        if said is not None
        else "Look at the output of the other ranks; start again from the last checkpoint.",
    )
