"""The ops as launches of our kernels in Inductor's module, on a machine without a GPU: values in Triton's interpreter,
code as it would be written for a GPU. LATTN_TEST_FLA names a folder that has Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lattn_compile.lowering import gpu
from tests.kernels.test_triton_decode import ROOT, run_with_triton
from tests.ops.cases import inputs, options

needs_triton = pytest.mark.skipif(
    "LATTN_TEST_FLA" not in os.environ, reason="set LATTN_TEST_FLA to a folder with Triton"
)


@needs_triton
def test_graphs_of_launches_compute_the_ops(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["LATTN_TEST_FLA"], str(ROOT)])}
    command = [sys.executable, "-m", "tests.lowering.gpu_graphs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    run_with_triton("tests/lowering/gpu_values.py", TRITON_INTERPRET="1", LATTN_GRAPHS=str(tmp_path))


@needs_triton
def test_the_code_that_is_written_for_a_gpu() -> None:
    run_with_triton("tests/lowering/gpu_codegen_cases.py")


@needs_triton
def test_a_decode_step_and_what_is_taken_into_its_kernels() -> None:
    run_with_triton("tests/kernels/step_cases.py", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("file", ["attend_cases.py", "conv_cases.py", "rotate_cases.py", "rows_cases.py"])
def test_what_stands_around_a_recurrence(file: str) -> None:
    run_with_triton(f"tests/kernels/{file}", TRITON_INTERPRET="1")


def test_a_call_on_a_cpu_is_never_taken() -> None:
    tensors = [*inputs(tokens=1, dtype=torch.float32), None, None, None, None]
    for _, spelled, *_ in gpu.LOWERINGS[:1]:
        assert spelled(*tensors, **options("decode")) is NotImplemented
