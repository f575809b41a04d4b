"""Whole `generate()` on a GPU under every compile mode: every check of `generate_checks`. Skipped without one."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("transformers")

from tests.gpu.generate_checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_generate_is_what_eager_code_generates(name: str) -> None:
    broken = [(what, measured, bound) for what, measured, bound in CHECKS[name]() if not measured <= bound]
    assert broken == []
