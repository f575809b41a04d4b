"""Hashes of this package's own source files, for the keys of caches that outlive a process."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

__all__ = ["digest"]

_ROOT = Path(__file__).parent


def digest(*patterns: str) -> str:
    """Hash (16 hexadecimal digits) of names and contents of the files that any of the globs finds below the package.

    Where a glob finds no file (a zip, a torch.package), nobody can tell what was run, so no other call gets the same.
    """
    found = [sorted(_ROOT.glob(pattern)) for pattern in patterns]
    if not all(found):
        return secrets.token_hex(8)
    hashed = hashlib.sha256()
    for file in dict.fromkeys(file for files in found for file in files):
        hashed.update(str(file.relative_to(_ROOT)).encode() + b"\0")
        hashed.update(file.read_bytes() + b"\0")
    return hashed.hexdigest()[:16]
