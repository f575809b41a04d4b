"""What Dynamo does with the frames of one compiled callable, and guards on values that are looked up anew.

Private interfaces of torch, tested on torch 2.11 to 2.13, apart from `_torch_private` because only reports need them.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from lattn_compile import phase
from lattn_compile.errors import LattnError, RewriteError
from lattn_compile.lowering._torch_private import _inner, _translator, as_also, options_of

__all__ = ["Frame", "Values", "at_reset", "current_frame", "ends_in_a_break", "guard_lookup", "watch_frames"]


class Frame:
    """One frame of a compiled callable that Dynamo compiles, or tries to.

    Attributes:
        owner: one object for each call of torch.compile, whatever it compiles by and by.
        code: the frame's.
        root: the code that this callable was first called with: the user's function, not one that it calls.
        breaks: why its graph broke, once for each time; filled when Dynamo is done.
        skipped: why Dynamo gave it up, so that it runs uncompiled; None if it did not.
    """

    def __init__(self, owner: object, code: CodeType) -> None:
        self.owner, self.code = owner, code
        self.root = _roots.setdefault(owner, code)
        self.breaks: list[str] = []
        self.skipped: str | None = None

    @property
    def name(self) -> str:
        return f"{self.code.co_qualname} ({self.code.co_filename}:{self.code.co_firstlineno})"

    @property
    def rest_of_root(self) -> bool:
        """Whether it is what follows a graph break in the user's function."""
        from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

        named = self.code.co_name.startswith(f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_{self.root.co_name}_at_")
        return named and self.code.co_filename == self.root.co_filename


_roots: WeakKeyDictionary[object, CodeType] = WeakKeyDictionary()
_local = threading.local()


def current_frame() -> Frame | None:
    """The frame that is being compiled on this thread, of a callable that is watched."""
    return getattr(_local, "frame", None)


def watch_frames(backend: object, done: Callable[[Frame], None]) -> None:
    """From now on `done` is told of every frame whose backend is `backend`, when Dynamo is done with it.

    What is wrong with a phase reaches the user from there as it is, and nothing is kept of the frame: a graph that
    broke for it, or code that runs uncompiled since, would outlive the mistake.

    (`torch._dynamo.convert_frame.ConvertFrameAssert`, of which every call of torch.compile has one)
    """
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.exc import BackendCompilerFailed, UncapturedHigherOrderOpError, Unsupported, UserError
    from torch._dynamo.utils import counters

    plain = ConvertFrameAssert.__call__

    @functools.wraps(plain)
    def watched(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["skip"] = kwargs.get("skip", 0) + 1  # of the frames on the stack that are not the user's
        if not _leads_to(backend, self):
            return plain(self, frame, *args, **kwargs)
        mine, outer, before = Frame(self, frame.f_code), current_frame(), Counter(counters["graph_break"])
        _local.frame = mine
        try:
            return plain(self, frame, *args, **kwargs)
        except (Unsupported, UserError, UncapturedHigherOrderOpError, BackendCompilerFailed) as error:
            if (mistake := _mistake_of_phase(error)) is not None:
                # One of the few that no setting of Dynamo's turns into a fallback.
                raise as_also(mistake, UncapturedHigherOrderOpError) from None
            if not isinstance(error, (Unsupported, UserError)):
                raise
            # Under fullgraph=True, and where it is ours, the user gets to see it.
            if not getattr(self, "_one_graph", False) and not isinstance(error, LattnError):
                mine.skipped = _in_short(str(error)) or type(error).__name__
                if _LIMIT in mine.skipped:
                    _beyond_the_limit(self, mine)
            raise
        finally:
            _local.frame = outer
            broke = (Counter(counters["graph_break"]) - before).elements()
            mine.breaks += [f"{mine.name}: {_in_short(why)}" for why in broke]
            done(mine)

    ConvertFrameAssert.__call__ = watched  # type: ignore[method-assign]


_LIMIT = "recompile limit exceeded"


def _beyond_the_limit(convert: Any, frame: Frame) -> None:
    """Dynamo compiles this code no more, for whoever asks, and does not even tell: the last time to say so.

    Raises:
        RewriteError: under the option `strict`.
    """
    from torch._dynamo.exc import UncapturedHigherOrderOpError

    remedy = (
        "Raise torch._dynamo.config.recompile_limit before it is compiled, or call torch.compiler.reset() before a "
        "model is compiled with another policy."
    )
    fn = getattr(convert, "_torchdynamo_orig_backend", None) or getattr(convert, "_torchdynamo_orig_callable", None)
    if ((options_of(fn) or {}).get("options") or {}).get("strict") is True:
        frame.skipped = None
        error = RewriteError(
            "options['strict']",
            got=f"{frame.name}, which would run uncompiled: Dynamo's {_LIMIT}",
            want="every site rewritten as asked",
            remedy=remedy,
        )
        raise as_also(error, UncapturedHigherOrderOpError) from None
    frame.skipped = f"{frame.skipped}. So does every later call of it, whatever compiles it. {remedy}"


def _mistake_of_phase(error: BaseException | None) -> LattnError | None:
    """What was wrong with a phase, where that is why Dynamo or the backend failed, however it was wrapped since."""
    for _ in range(8):
        if isinstance(error, LattnError) and error.argument in phase.NAMES:
            return error
        error = getattr(error, "inner_exception", None) or getattr(error, "__cause__", None)
    return None


def _in_short(why: str) -> str:
    """Dynamo's own words, without the hints and links."""
    said = [line.strip() for line in why.strip().splitlines()]
    context = [line for line in said[1:] if line.startswith("Developer debug context:")]
    return "; ".join([*said[:1], *(line.removeprefix("Developer debug context:").strip() for line in context)])


def _leads_to(backend: object, convert: Any) -> bool:
    """Whether `backend` is what a callable compiles with, below the layers that torch and partials put around it."""
    fn = getattr(convert, "_torchdynamo_orig_backend", None) or getattr(convert, "_torchdynamo_orig_callable", None)
    for _ in range(8):
        if fn is backend or fn is None:
            break
        fn = _inner(fn)
    return fn is backend


def ends_in_a_break() -> bool:
    """Whether the graph that the backend is being handed ends where it broke, and not where its function ends."""
    tx = _translator()
    why = None if tx is None else getattr(tx.output, "compile_subgraph_reason", None)
    return why is not None and bool(why.graph_break)


class _Clearing(list):  # type: ignore[type-arg]
    """Dynamo's list of end callbacks, which tells of `torch._dynamo.reset`."""

    def __init__(self, items: Any, cleared: Callable[[], None]) -> None:
        super().__init__(items)
        self._cleared = cleared

    def clear(self) -> None:
        super().clear()
        self._cleared()


def at_reset(callback: Callable[[], None]) -> None:
    """Run `callback` at every `torch._dynamo.reset` and `torch.compiler.reset`. (`torch._dynamo.callback`)"""
    from torch._dynamo.callback import callback_handler

    callback_handler.end_callbacks = _Clearing(callback_handler.end_callbacks, callback)


def guard_lookup(module: str, table: str, name: str) -> None:
    """Another value of the attribute `name` (a str) of the object `table` of a module of ours means another graph. It
    is looked up at every call, so it may be computed. Without a trace nothing is guarded."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    tx = _translator()
    if tx is not None:
        source = AttrSource(AttrSource(tx.import_source(module), table), name)
        install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


class Values:
    """An object whose attributes are computed when they are read, for `guard_lookup`."""

    def __init__(self) -> None:
        self._lookups: dict[str, Callable[[], str]] = {}

    def name_of(self, key: str, lookup: Callable[[], str]) -> str:
        """The attribute that `lookup` computes; the same for the same key."""
        found = f"v_{key}"
        self._lookups[found] = lookup
        return found

    def __getattr__(self, name: str) -> str:
        lookups = self.__dict__.get("_lookups", {})
        if name not in lookups:
            raise AttributeError(name)
        return lookups[name]()  # type: ignore[no-any-return]
