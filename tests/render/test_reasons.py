from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lattn_compile import inspect
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


def test_the_guide_names_codes_that_exist() -> None:
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", DOCUMENT.with_name("recognition.md").read_text(encoding="utf-8")))
    assert named and named <= set(REASONS)


def one_token(code: str) -> torch.fx.GraphModule:
    """A traced function of one token, whose body is an example; it returns the output and, unless the example makes
    none, the new state."""
    lines = ["decay, beta = g.exp()[..., None, None], beta[..., None]", *code.splitlines()]
    if "o = " not in code:
        lines.append('o = torch.einsum("bhkv,bhk->bhv", S, q)')
    body = textwrap.indent("\n".join([*lines, "return (o, S)" if "S = " in code else "return o"]), "    ")
    names: dict = {"torch": torch}
    exec(f"def token(q, k, v, k2, v2, g, beta, a, W, S):\n{body}\n", names)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 2, 4)] * 5 + [(1, 2)] * 3 + [(4, 4), (1, 2, 4, 4)]
    return make_fx(names["token"], pre_dispatch=True)(*(torch.rand(*s, generator=generator) for s in shapes))


@pytest.mark.parametrize("code", [code for code, text in EXAMPLES.items() if "[..., None, :]" in text])
def test_an_example_of_a_spelled_out_token_ends_in_its_code(code: str) -> None:
    report = inspect(one_token(EXAMPLES[code]))
    assert ([s.id for s in report.sites], {u.reason.code for u in report.unmatched}) == ([], {code})


def test_the_plain_token_around_the_examples_is_recognised() -> None:
    report = inspect(one_token("S = (-g.abs()).exp()[..., None, None] * S + k[..., :, None] * v[..., None, :]"))
    assert [(s.kind, s.form) for s in report.sites] == [("retention", "step")]
