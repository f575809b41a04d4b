"""Frozen dataclasses and JSON files that refuse what they do not know, by name.

A misspelt keyword of a plain dataclass is a `TypeError` that names the keyword and nothing else. Policies are written
by hand, in Python and in JSON, so here both doors give the same error: the key, the known keys, and the nearest one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lattn_compile.errors import FileFormatError, LattnError, nearest

__all__ = ["as_path", "check_choice", "check_int", "check_keys", "init_names", "read_json", "strict", "write_json"]

T = TypeVar("T")


def init_names(cls: type[Any]) -> list[str]:
    """The names of a dataclass's fields that its constructor takes, in order."""
    return [f.name for f in dataclasses.fields(cls) if f.init]


def check_keys(error: type[LattnError], where: str, keys: Iterable[object], known: Sequence[str]) -> None:
    """Raise `error` for the first of `keys` that is not `known`; `where` is what the caller was building."""
    for key in keys:
        if key not in known:
            raise error(
                str(key),
                got=f"an unknown key of {where}",
                want=f"one of {', '.join(known)}" if known else f"no keys at all: {where} has none",
                remedy=f"Remove it or correct its name.{nearest(str(key), known)}",
            )


def check_choice(error: type[LattnError], where: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise `error` unless `value` is one of `allowed` (strings and None)."""
    # A list or a dict has no hash and a tensor no truth value: only an exact type match is compared.
    if any(type(value) is type(a) and value == a for a in allowed):
        return
    hint = nearest(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else ""
    raise error(
        name,
        got=f"{where}({name}={value!r})",
        want=" or ".join(repr(a) for a in allowed),
        remedy=f"Choose one of these.{hint}",
    )


def check_int(
    error: type[LattnError], where: str, name: str, value: object, *, low: int, high: int | None = None
) -> None:
    """Raise `error` unless `value` is an int (no bool) with `low <= value <= high`."""
    if type(value) is int and value >= low and (high is None or value <= high):
        return
    raise error(
        name,
        got=f"{where}({name}={value!r})",
        want=f"an int from {low} to {high}" if high is not None else f"an int of at least {low}",
        remedy=f"Give {name} such a number.",
    )


def strict(error: type[LattnError]) -> Callable[[type[T]], type[T]]:
    """Class decorator, outside `@dataclass`: a wrong call of the constructor raises `error` instead of `TypeError`.

    At most the first field may be given by position. `dataclasses.replace` goes through the constructor, so it is
    covered too.
    """

    def decorate(cls: type[T]) -> type[T]:
        names = init_names(cls)
        required = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        plain: Callable[..., None] = cls.__init__

        @functools.wraps(plain)
        def __init__(self: T, *args: object, **kwargs: object) -> None:
            check_keys(error, cls.__name__, kwargs, names)
            limit = min(1, len(names))
            if len(args) > limit:
                raise error(
                    cls.__name__,
                    got=f"{len(args)} positional arguments",
                    want=f"only {names[0]} by position" if limit else "no arguments",
                    remedy="Name the others, as in "
                    + (f"{cls.__name__}({names[-1]}=...)." if names else f"{cls.__name__}()."),
                )
            if args and names[0] in kwargs:
                raise error(
                    names[0],
                    got=f"{cls.__name__} with {names[0]} by position and by name",
                    want="it once",
                    remedy="Drop one of the two.",
                )
            given = {*names[: len(args)], *kwargs}
            missing = [n for n in required if n not in given]
            if missing:
                raise error(
                    missing[0],
                    got=f"{cls.__name__} without it",
                    want="a value: it has no default",
                    remedy=f"Write {cls.__name__}({missing[0]}=...).",
                )
            plain(self, *args, **kwargs)

        cls.__init__ = __init__  # type: ignore[method-assign,assignment]
        return cls

    return decorate


def as_path(argument: str, path: object) -> Path:
    """`path` as a Path.

    Raises:
        FileFormatError: not a str or a PathLike of one.
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(given, str):
        return Path(given)
    raise FileFormatError(
        argument, got=repr(path), want="a path, as a str or a Path", remedy="Name a file or a folder."
    )


def write_json(path: Path, data: object) -> None:
    """Write `data` as indented JSON, whole or not at all: a reader never finds half a file."""
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FileFormatError(
            "path", got=repr(str(path)), want="a path that can be written", remedy=f"{error.strerror}."
        ) from error


def read_json(path: Path) -> Any:
    """The data of a JSON file, without JSON's silent habits: a key given twice and NaN are refused.

    Raises:
        FileFormatError: no such file, not text, or not JSON.
    """

    def refuse(got: str, remedy: str) -> NoReturn:
        raise FileFormatError("path", got=f"{str(path)!r}, {got}", want="a JSON file", remedy=remedy)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [k for k, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                refuse(f"in which {name!r} stands twice", "Keep one of the two.")
        return dict(pairs)

    def constant(name: str) -> NoReturn:
        refuse(f"in which {name} stands", "JSON has no such number.")

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once, parse_constant=constant)
    except OSError as error:
        refuse("which cannot be read", f"{error.strerror}.")
    except (ValueError, RecursionError) as error:
        refuse("which is not JSON", f"{error}.".replace("..", "."))
