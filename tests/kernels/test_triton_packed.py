"""The in-place Triton kernels: in Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os

import pytest

from tests.kernels.test_triton_decode import run_with_triton

pytestmark = pytest.mark.skipif("LATTN_TEST_FLA" not in os.environ, reason="set LATTN_TEST_FLA to a folder with Triton")


def test_the_kernels_in_tritons_interpreter() -> None:
    run_with_triton("tests/kernels/triton_packed_cases.py", TRITON_INTERPRET="1")


def test_the_kernels_compiled_for_gpus_that_are_not_here() -> None:
    run_with_triton("tests/kernels/triton_packed_compile_cases.py")


def test_the_kernels_of_whole_lines_in_tritons_interpreter() -> None:
    run_with_triton("tests/kernels/triton_packed_lines_cases.py", TRITON_INTERPRET="1")
