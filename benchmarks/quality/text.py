"""Real text that is at hand wherever Python is: the sources and the manual pages of the running interpreter.

What is held out is whole modules and whole pages, chosen by a hash of their names, so that a rerun on any machine holds
out the same ones. Versions of Python differ in their text: `Corpus.about` names the version and has the bytes' SHA-256.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Corpus", "load_corpus"]

HELD_OUT = 12
"""One name in so many is held out."""

# Tests, demos and what installers or distributions add are not there everywhere; encodings are tables of numbers.
_LEFT_OUT = {
    "__pycache__", "test", "tests", "idlelib", "turtledemo", "tkinter", "encodings", "ensurepip", "lib2to3",
    "distutils", "pydoc_data", "site-packages", "dist-packages", "venv",
}  # fmt: skip
_LONGEST = 200_000
"""Bytes of one file that are taken."""


@dataclass(frozen=True)
class Corpus:
    """Bytes as uint8 tensors `[n]`, and where they are from."""

    train: Tensor
    heldout: Tensor
    about: dict[str, Any]


def _files() -> Iterator[tuple[str, bytes]]:
    """Name and content of every source file and manual page, in order of the names."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, bytes] = {f"topic {name}": text.encode() for name, text in topics.items()}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts[:-1]) and not parts[-1].startswith(("_sysconfigdata", "test_", "sitecustomize")):
            found["/".join(parts)] = path.read_bytes()
    yield from sorted(found.items())


def _held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT == 0


@functools.cache
def load_corpus(limit: int | None = None) -> Corpus:
    """The text, in ASCII: bytes below 8 and from 128 on are for the memory tasks, and become spaces and "?".

    Args:
        limit: bytes of training text, from the beginning; None: all.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    counts = {False: 0, True: 0}
    ascii_ = bytes.maketrans(bytes((*range(8), *range(128, 256))), b" " * 8 + b"?" * 128)
    for name, text in _files():
        where = _held_out(name)
        parts[where].append(text[:_LONGEST].replace(b"\r\n", b"\n").translate(ascii_))
        counts[where] += 1
    train, heldout = (b"\n\n".join(parts[where]) for where in (False, True))
    digest = hashlib.sha256(train + b"\0" + heldout).hexdigest()
    train = train[:limit]
    about = {
        "python": platform.python_version(),
        "train_bytes": len(train),
        "train_files": counts[False],
        "heldout_bytes": len(heldout),
        "heldout_files": counts[True],
        "sha256": digest,
    }
    first, second = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, heldout))
    return Corpus(first, second, about)
