"""What all tests share: their order, what the garbage collector looks at, and a folder for compiled code."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

# First, so that none of them is the last to start when two processes take what the other has left. By file; no names
# are all tests of a file.
LONG: dict[str, tuple[str, ...]] = {
    **{f"kernels/test_triton_{x}.py": () for x in ("chunk", "compile", "decode", "packed", "prefill", "replay")},
    "distributed/test_on_ranks.py": ("test_every_check_passes_on_every_rank",),
    "distributed/test_torchrun.py": ("test_torchrun_trains_resumes_and_serves",),
    "formats/test_base.py": ("test_inductor_keeps_every_rounding_of_the_quantized_codecs",),
    "integrations/test_transformers.py": ("test_the_oldest_supported_transformers_does_the_same",),
    "lowering/test_export.py": ("test_a_step_and_a_prefill_run_where_this_package_is_not",),
    "lowering/test_gpu.py": ("test_graphs_of_launches_compute_the_ops",),
    "packed/test_state.py": ("test_inductor_compiles_a_hand_over_into_what_is_stored",),
    "passes/spelled/test_programs.py": (
        "test_inductor_runs_it_for_any_batch",
        "test_inductor_trains_it_and_a_second_process_finds_it_compiled",
    ),
    "passes/spelled/test_property.py": ("test_random_spellings_are_recognised_and_no_rewrite_is_wrong",),
    "passes/test_capture.py": ("test_fla_entry_points_models_batches_and_field_reports_with_fla_installed",),
    "test_backend.py": ("test_a_changed_policy_or_source_never_hits_a_stale_artifact",),
    "test_demo.py": ("test_the_whole_demo_in_small",),
    "test_field_reports_compile.py": ("test_inductor_reads_slices_of_a_fused_projection",),
    "test_models.py": (
        "test_inductor_generates_what_eager_generates",
        "test_inductor_trains_as_eager_trains",
        "test_inductor_runs_the_phase_without_recompiling_for_other_lengths",
    ),
    "test_phase_programs.py": ("test_inductor_trains_a_spelled_out_layer_in_a_phase_without_recompiling",),
    "test_recompute.py": ("test_inductor_recomputes_with_the_lengths_of_its_forward",),
}
ROOT = Path(__file__).parent

# What Dynamo does behind every compile and nobody here reads: it looks for garbage, and times its guards from a flushed
# cache. Set before Dynamo is imported, which processes that run kernels do without.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def _is_long(item: pytest.Item) -> bool:
    names = LONG.get(item.path.relative_to(ROOT).as_posix())
    return names is not None and (not names or getattr(item, "originalname", item.name) in names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _is_long(item))


def pytest_collection_finish() -> None:
    """Looking for garbage through half a million objects of modules, at every few hundred new ones, would take a tenth
    of the time of tests that trace."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def cold_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TORCHINDUCTOR_CACHE_DIR of processes in which nothing is found that another test has compiled, unless it compiles
    the same. What torch tries out of the C++ compiler and the headers that it compiles are found: ten seconds."""
    return tmp_path_factory.mktemp("inductor")
