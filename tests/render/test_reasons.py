from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lattn_compile.errors import REASONS
from lattn_compile.render.reasons import EXAMPLES, reasons_markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "reasons.md"


def test_the_document_lists_every_code_as_the_library_has_it() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == reasons_markdown(), (
        "docs/reasons.md is behind errors.REASONS: python docs/write_reasons.py"
    )


def test_every_code_has_a_section_with_its_remedy() -> None:
    text = reasons_markdown()
    for code, reason in REASONS.items():
        section = " ".join(text.partition(f"\n## {code}\n")[2].partition("\n## ")[0].split())
        assert reason.text[1:] in section and reason.remedy in section
        assert f"[{code}](#{code.lower()})" in text


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_is_python_and_its_code_exists(code: str) -> None:
    assert code in REASONS
    ast.parse(EXAMPLES[code])
