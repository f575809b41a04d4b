"""What the ranks of a job say to one another before they compute together, and what they hear when one fails.

from lattn_compile import distributed as lcd

lcd.check_same_recipe(model)             # before the first step: raises on every rank
with lcd.together():                     # around the steps: what one rank raises is an error on all, within seconds
    train(...)
"""

from __future__ import annotations

import contextlib
import datetime
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lattn_compile.attach import attached_recipe
from lattn_compile.distributed.watch import Watch
from lattn_compile.errors import DistributedError, LattnError
from lattn_compile.lowering._torch_distributed import Gloo, default_store, gloo_of, uses_nccl

__all__ = ["SECONDS", "check_same_recipe", "meet", "together"]

SECONDS = 30.0
"""How long a rank waits for the others where they only say something."""

_ENTERS = 1800.0
"""The same where they begin to compute: one may have read its weights long before another."""

_talking: dict[tuple[int, ...], Gloo] = {}
_met = 0  # how many process groups they met in
_talking_in: Callable[[], Any] = bool  # the last of these, while there is one


def _alone() -> bool:
    """Without a process group there is one rank."""
    return not dist.is_available() or not dist.is_initialized()


def _name() -> str:
    """Of what ranks tell one another in the present process group. torchrun's store outlives one, and would have the
    words and addresses of one before it. Any other must not: our groups hold it, and while they do, the next process
    group at its address gets it again, with all that is in it."""
    global _met, _talking_in
    world = dist.group.WORLD
    if _talking_in() is not world:
        _talking.clear()
        _met += 1
        _talking_in = weakref.ref(world, lambda _: _talking.clear())
    return f"lattn_compile/{_met}"


def _talk(group: dist.ProcessGroup | None, seconds: float = SECONDS) -> Gloo:
    """A gloo group of the same ranks, used for nothing else: what is said never meets another collective half way, and
    NCCL would wait ten minutes for a rank that is gone."""
    of = dist.group.WORLD if group is None else group
    assert of is not None
    name, ranks = _name(), tuple(dist.get_process_group_ranks(of))
    if ranks not in _talking:
        _talking[ranks] = gloo_of(ranks, name, datetime.timedelta(seconds=seconds))
    return _talking[ranks]


def meet(value: Any, *, group: dist.ProcessGroup | None = None, seconds: float = SECONDS) -> list[Any]:
    """Every rank's `value` (anything that pickles), in the order of ranks.

    Raises:
        DistributedError: a rank did not come within `seconds`, or is gone.
    """
    if _alone():
        return [value]
    try:
        talk = _talk(group, seconds)
        talk.monitored_barrier(datetime.timedelta(seconds=seconds), True)
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(n) for n in _of_every_rank(torch.tensor([len(mine)], device="cpu"), talk)]
        every = _of_every_rank(torch.nn.functional.pad(mine, (0, max(sizes) - len(mine))), talk)
        return [pickle.loads(x[:n].numpy().tobytes()) for x, n in zip(every, sizes, strict=True)]
    except RuntimeError as error:
        raise _gone(error) from error


def _of_every_rank(x: torch.Tensor, talk: Gloo) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(talk.size())]
    talk.allgather([found], [x]).wait()
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
def together(*, seconds: float = 5.0, watch: bool | None = None) -> Iterator[None]:
    """Inside, a rank that raises says so to the others, and whoever waits for it in a collective raises too.

    An error of a rank's own passes through as it is. A collective that fails because another rank failed becomes a
    `DistributedError` which names that rank and what it said; it waits up to `seconds` for that word. gloo breaks a
    collective at once. NCCL does not, so there a thread listens to the neighbouring ranks: it says on stderr what it
    heard and ends NCCL's collectives in this process. Its groups are of no use from then on.

    Args:
        watch: whether there is such a thread; on every rank the same. Default: where there is a group of NCCL.
    """
    if _alone():
        yield
        return
    _name()  # on every rank, whether or not something is said
    watching = _watch(seconds) if (uses_nccl() if watch is None else watch) else None
    failed = True
    try:
        yield
        failed = False
    except RuntimeError as error:  # a LattnError is none
        said = watching.heard if watching is not None else None
        if said is None and not _lost(error):
            _announce(error)
            raise
        said = said or _heard(seconds)
        _announce(error)
        raise _gone(error, said) from error
    except Exception as error:
        _announce(error)
        raise
    finally:
        if watching is not None:
            watching.leave(failed)
    if watching is not None and watching.heard is not None:
        raise _gone(None, watching.heard)


def _watch(seconds: float) -> Watch:
    try:
        group = _talk(None, _ENTERS)
    except RuntimeError as error:
        raise _gone(error) from error
    return Watch(group, _say, lambda: _heard(seconds))


# gloo has no class of its own for it.
_LOST = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed out|[Rr]ead error|[Ww]rite error|monitoredBarrier|"
    r"NCCL|[Ss]ocket|peer"
)


def _lost(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


def _announce(error: BaseException) -> None:
    text = str(error).strip().split("\n")[0]
    _say(f"rank {dist.get_rank()}: {type(error).__name__}: {text}")


def _failed() -> str:
    return f"{_name()}/failed"


def _say(text: str) -> None:
    """The first rank that fails has the word."""
    with contextlib.suppress(RuntimeError):  # the store's own rank may be the one that is gone
        default_store().compare_set(_failed(), "", text)


def _heard(seconds: float) -> str | None:
    try:
        store = default_store()
        store.wait([_failed()], datetime.timedelta(seconds=seconds))
        return store.get(_failed()).decode()
    except RuntimeError:
        return None


def _gone(error: BaseException | None, said: str | None = None) -> LattnError:
    first = (str(error).strip() or repr(error)).split("\n")[0]
    return DistributedError(
        "process group",
        got=said if said is not None else f"a rank that is gone or does not answer ({first})",
        want="every rank at the same call",
        remedy="Look at the first error of that rank; start again from the last checkpoint."
        if said is not None
        else "Look at the output of the other ranks; start again from the last checkpoint.",
    )
