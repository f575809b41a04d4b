"""Checkpoints of a model that is spread over ranks: torch's distributed checkpoints, whole or not there.

    lcd.save(model, "ckpt", optimizer=optimizer)
    lcd.load(model, "ckpt", optimizer=optimizer)          # on any number of ranks, cut in any way

`torch.distributed.checkpoint` writes every rank's part and reads it into whatever parts there are; the recipe of
`lc.attach` is one of the entries. What is added: the folder gets its name when it is complete, ranks with unlike
recipes do not save, and a failure is a `DistributedError` on every rank.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lattn_compile.distributed.ranks import SECONDS, check_same_recipe, meet
from lattn_compile.errors import DistributedError, FileFormatError, LattnError

__all__ = ["load", "save"]

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state by the names of parameters, so that any number of ranks can read it."""


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    seconds: float = SECONDS,
) -> None:
    """Write model (recipe included) and optimizer into `folder`; every rank has to call it.

    The parts are written into `folder` + ".partial", which takes the name at the end: a folder of that name is always a
    whole checkpoint, and one that was there before stays until then.

    Raises:
        DistributedError: on every rank that is left: unlike recipes, a rank that is gone or did not come within
            `seconds`, a part that could not be written. Nothing is left at `folder` but what was there.
    """
    target = Path(folder)
    partial, old = (target.with_name(target.name + suffix) for suffix in (".partial", ".old"))
    check_same_recipe(model, group=group, seconds=seconds)
    first = not dist.is_initialized() or dist.get_rank(group) == 0

    def write() -> None:
        dcp.save(_state(model, optimizer), checkpoint_id=partial, process_group=group)

    def rename() -> None:
        if not first:
            return
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    try:
        _everywhere("folder", lambda: shutil.rmtree(partial, ignore_errors=True) if first else None, group, seconds)
        _everywhere("folder", write, group, seconds)
        _everywhere("folder", rename, group, seconds)
    except LattnError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
    seconds: float = SECONDS,
) -> None:
    """Read what `save` wrote, on any number of ranks; every rank has to call it.

    An attached model takes the checkpoint's recipe, as `load_state_dict` does.

    Raises:
        DistributedError: on every rank: a rank that is gone, or one that could not read its part (no such folder, a
            file of another rank missing, an entry that the model has and the checkpoint has not).
    """
    source = Path(folder)

    def read() -> None:
        _check_complete(source)
        state = _state(model, optimizer)
        dcp.load(state, checkpoint_id=source, process_group=group)
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_BY_NAME)

    _everywhere("folder", lambda: _check_complete(source), group, seconds)
    _everywhere("folder", read, group, seconds)


def _state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    return state


def _check_complete(folder: Path) -> None:
    """Raises FileFormatError where there is no distributed checkpoint, or not all of it."""
    if not (folder / ".metadata").is_file():
        raise FileFormatError(
            "folder",
            got=f"{str(folder)!r}, which has no .metadata",
            want="a folder that lcd.save or torch.distributed.checkpoint.save wrote",
            remedy="A save that failed leaves nothing; look for an earlier checkpoint.",
        )
    storage = dcp.FileSystemReader(folder).read_metadata().storage_data or {}
    missing = sorted({info.relative_path for info in storage.values() if not (folder / info.relative_path).is_file()})
    if missing:
        raise FileFormatError(
            "folder",
            got=f"{str(folder)!r} without {', '.join(missing)}",
            want="the files of every rank that wrote it",
            remedy="Copy the folder from all hosts that wrote it, or have all ranks write to one file system.",
        )


def _everywhere(name: str, act: Callable[[], None], group: dist.ProcessGroup | None, seconds: float) -> None:
    """Runs `act` on every rank; if it fails on any, all of them raise."""
    failed = None
    try:
        act()
    except (Exception, dcp.CheckpointException) as error:  # a CheckpointException is no Exception
        failed = f"{type(error).__name__}: {str(error).strip()}"
        cause: BaseException | None = error
    else:
        cause = None
    said = meet(failed, group=group, seconds=seconds)
    if any(text is not None for text in said):
        raise DistributedError(
            name,
            got="; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None),
            want="every rank to write or read its part",
            remedy="No checkpoint was changed and no rank goes on alone: mend the cause and call it again.",
        ) from cause
