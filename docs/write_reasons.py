"""Writes `reasons.md`, beside this file, from the reason codes of the library. Run it after changing one."""

from pathlib import Path

from lattn_compile.render.reasons import reasons_markdown

Path(__file__).with_name("reasons.md").write_text(reasons_markdown(), encoding="utf-8")
