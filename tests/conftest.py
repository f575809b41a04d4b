"""What all tests share: their order, and a folder for compiled code."""

from __future__ import annotations

from pathlib import Path

import pytest

# First, so that none of them is the last to start when two processes take what the other has left.
LONG = (
    "tests/kernels/test_triton_",
    *("test_every_check_passes_on_every_rank", "test_the_oldest_supported_transformers", "test_inductor_"),
    *("test_random_spellings_are_recognised", "test_a_changed_policy_or_source", "test_graphs_of_launches"),
    *(
        "test_the_whole_demo_in_small",
        "test_a_step_and_a_prefill_run_where",
        "with_fla_installed",
        "test_torchrun_trains",
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))


@pytest.fixture(scope="session")
def cold_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TORCHINDUCTOR_CACHE_DIR of processes in which nothing is found that another test has compiled, unless it compiles
    the same. What torch tries out of the C++ compiler and the headers that it compiles are found: ten seconds."""
    return tmp_path_factory.mktemp("inductor")
