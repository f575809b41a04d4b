"""The tests that are run first are there under the names that they are known by."""

from __future__ import annotations

import re

import pytest

from tests.conftest import LONG, ROOT


@pytest.mark.parametrize("file", LONG)
def test_long_tests_are_where_they_are_looked_for(file: str) -> None:
    found = set(re.findall(r"(?m)^def (test_\w+)\(", (ROOT / file).read_text(encoding="utf-8")))
    assert found >= set(LONG[file])
