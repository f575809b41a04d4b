"""The `lattn::` ops on DTensors, on two processes: every check of `sharding_checks.py` is a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import ranks

MODULE = "tests.distributed.sharding_checks"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return ranks.run(MODULE, folder)


@pytest.mark.parametrize("name", ranks.names(MODULE))
def test_on_two_ranks(name: str, results: list[dict[str, str]]) -> None:
    ranks.require(results, name)
