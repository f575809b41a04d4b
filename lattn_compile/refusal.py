"""One way to refuse in code that Dynamo may be tracing."""

from __future__ import annotations

from typing import NoReturn

from lattn_compile.errors import LattnError, surfacing

__all__ = ["refuse"]

_ALL: list[type[LattnError]] = [LattnError, *LattnError.__subclasses__()]
_KINDS = {kind.code: kind for kind in _ALL}


@surfacing()
def refuse(code: str, argument: str, got: str, want: str, remedy: str) -> NoReturn:
    """Raise the error whose `code` that is.

    A call of strings, so that Dynamo can make it while it traces (`functional` tells it to, this file must not import
    it): then the error itself reaches the user, where a `raise` that is traced would reach him wrapped in Dynamo's.
    """
    raise _KINDS[code](argument, got=got, want=want, remedy=remedy)
