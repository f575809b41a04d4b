"""Keeps compiled graphs of another version of these ops out of torch's caches.

A cache key of Inductor or AOTAutograd names a custom op and its written-out arguments, not its schema: a backward that
an older version of this package wrote to disk would be loaded and called with arguments that are no longer there. The
backend puts its sources into its own keys; this is for every other compiler that meets an op, plain Inductor first.
"""

from __future__ import annotations

import torch.compiler.config

from lattn_compile.sources import digest

__all__ = ["install"]


_SOURCES = ("ops/*.py", "packed/*.py", "formats/**/*.py", "codec.py")
"""What decides an op's schema, fake and autograd graph, layouts of what is stored included; kernels are called by name,
never compiled in."""


def install() -> None:
    """Append this version's mark to `torch.compiler.config.cache_key_tag`, once; what a user put there stays."""
    config, mark = torch.compiler.config, f"lattn:{digest(*_SOURCES)}"
    if mark not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {mark}".strip()
