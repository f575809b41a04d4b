"""The Triton decode kernel in Triton's interpreter: what a machine without a GPU can tell of its values.

Triton is in no environment that the rest is tested in: LATTN_TEST_FLA names a folder that has it. `tests/gpu` holds the
kernel to its promises where it runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif("LATTN_TEST_FLA" not in os.environ, reason="set LATTN_TEST_FLA to a folder with Triton")


def run_with_triton(path: str, **more: str) -> None:
    """Runs a file of tests in a process that has Triton."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["LATTN_TEST_FLA"], str(ROOT)]), **more}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", "-p", "no:cacheprovider", path]
    if "TRITON_INTERPRET" in more:
        command += ["-p", "tests.kernels.interpreter"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_kernels_in_tritons_interpreter() -> None:
    run_with_triton("tests/kernels/triton_cases.py", TRITON_INTERPRET="1")


@pytest.mark.parametrize("largest", [127.0, 448.0])
def test_no_value_exceeds_the_largest_code(largest: float) -> None:
    """Why the Triton codec has no clamp: amax times the inverse scale rounds to the largest code, whatever amax is.

    All fp32 significands; a power of two changes nothing while neither the scale nor its inverse is subnormal.
    """
    amax = torch.arange(1 << 23, dtype=torch.int32).bitwise_or_(127 << 23).view(torch.float32)
    bits = (amax.double() / largest).float().view(torch.int32)
    scale = (bits + 0x7F + (bits >> 8).bitwise_and(1)).bitwise_and(-0x100).view(torch.float32)
    product = amax * scale.double().reciprocal().float()
    # int8 rounds to integers, E4M3 to multiples of 32 up there.
    assert product.max() < largest + (0.5 if largest == 127 else 16)
    assert product.min() > largest - (0.5 if largest == 127 else 16)
