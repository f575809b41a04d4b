"""Keeps compiled graphs of another version of these ops out of torch's caches.

A cache key of Inductor or AOTAutograd names a custom op and its written-out arguments, not its schema: a backward that
an older version of this package wrote to disk would be loaded and called with arguments that are no longer there. The
backend puts its sources into its own keys; this is for every other compiler that meets an op, plain Inductor first.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import torch.compiler.config

__all__ = ["install"]


def _digest() -> str:
    """Hash of what decides an op's schema, fake and autograd graph, layouts of what is stored included; kernels are
    called by name, never compiled in.

    Where the files cannot be seen (a zip, a torch.package), no other process gets the same.
    """
    root = Path(__file__).parents[1]
    folders = ("ops/*.py", "packed/*.py", "formats/**/*.py")
    files = [*(file for folder in folders for file in sorted(root.glob(folder))), root / "codec.py"]
    if not all(file.is_file() for file in files):
        return secrets.token_hex(6)
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def install() -> None:
    """Append this version's mark to `torch.compiler.config.cache_key_tag`, once; what a user put there stays."""
    config, mark = torch.compiler.config, f"lattn:{_digest()}"
    if mark not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {mark}".strip()
