"""A form's checks by name, as `run.py` and the tests call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Check", "Checks", "Row"]

Row = tuple[str, float, float]
"""What was measured, the number, and its bound; broken where the number exceeds it or is NaN."""

Check = Callable[..., list[Row]]


class Checks(dict[str, Callable[[], list[Row]]]):
    """Name -> check without arguments. `prefix` stands before every name."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix

    def check(self, name: str, *arguments: Any) -> Callable[[Check], Check]:
        """Registers `name` for a function, called with `arguments`."""

        def register(function: Check) -> Check:
            self[self._prefix + name] = lambda: function(*arguments)
            return function

        return register

    def each(self, prefix: str, values: Iterable[Any]) -> Callable[[Check], Check]:
        """Registers a function once for each of `values`."""

        def register(function: Check) -> Check:
            for value in values:
                self.check(f"{prefix} {value}", value)(function)
            return function

        return register
