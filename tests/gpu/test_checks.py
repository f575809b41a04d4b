"""The Triton kernels, and whole `generate()`, on a GPU: every check of `<form>_checks`. Skipped where there is none.

Not those of lowering, which want processes of their own (`python -m tests.gpu.run`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("triton")

from tests.gpu.run import FORMS, checks

_NEEDS_TRANSFORMERS = pytest.mark.skip(reason="generate() needs transformers")


def _all() -> Iterator[Any]:
    for form in FORMS:
        if form == "generate" and importlib.util.find_spec("transformers") is None:
            yield pytest.param(None, id=form, marks=_NEEDS_TRANSFORMERS)
        elif form != "lowering":
            yield from (pytest.param(check, id=name) for name, check in checks(form).items())


@pytest.mark.parametrize("check", _all())
def test_it_keeps_its_promise(check: Callable[[], list[tuple[str, float, float]]]) -> None:
    broken = [(what, measured, bound) for what, measured, bound in check() if not measured <= bound]
    assert broken == []
