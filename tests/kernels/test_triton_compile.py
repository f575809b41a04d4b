"""The Triton kernels compiled for GPUs that are not here."""

from __future__ import annotations

import os

import pytest

from tests.kernels.test_triton_decode import run_with_triton


@pytest.mark.skipif("LATTN_TEST_FLA" not in os.environ, reason="set LATTN_TEST_FLA to a folder with Triton")
def test_the_kernels_compiled_for_gpus_that_are_not_here() -> None:
    run_with_triton("tests/kernels/triton_compile_cases.py")
