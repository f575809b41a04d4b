"""The Triton prefill kernels on a GPU: every check of `prefill_checks`. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from tests.gpu.prefill_checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_keep_their_promise(name: str) -> None:
    broken = [(what, measured, bound) for what, measured, bound in CHECKS[name]() if not measured <= bound]
    assert broken == []
