"""Is this machine fit for the job? Versions, compiler, GPU, and combinations known to give wrong results.

Nothing but torch is imported, and torch only to ask for its GPUs: a doctor must not fall ill from what it examines.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata

__all__ = ["Check", "checks", "cxx_compiler"]

# Triton on Hopper (sm_90) between these versions, both included: FLA refuses to train GDN in chunk form there
# ("produces incorrect results for gated chunk_bwd_dqkwg").
_BAD_ON_HOPPER = ((3, 4, 0), (3, 7, 0))


@dataclass(frozen=True)
class Check:
    """One line of `lattn-compile doctor`.

    Attributes:
        name: what was looked at.
        found: version, path or device.
        state: ok | missing (an optional part) | warning | problem (the main job does not run).
        remark: what to do, empty when there is nothing to do.
    """

    name: str
    found: str
    state: str
    remark: str = ""


def checks() -> list[Check]:
    """All checks, in the order in which they should be repaired."""
    python = ".".join(map(str, sys.version_info[:3]))
    out = [
        Check("python", python, "ok")
        if sys.version_info >= (3, 11)
        else Check("python", python, "problem", "Use Python 3.11 or newer."),
        _package("torch", ("torch",), (2, 11), required=True, remark="pip install 'torch>=2.11'"),
        _compiler(),
        _package("triton", ("triton",), (3, 6), remark="Needed for GPU kernels only; torch's CUDA builds bring it."),
        _package("transformers", ("transformers",), (5, 17), remark="pip install 'lattn-compile[hf]'"),
        _package("fla", ("fla-core", "flash-linear-attention"), (0, 6), remark="pip install 'lattn-compile[fla]'"),
    ]
    gpus = _gpus()
    if not gpus:
        out.append(Check("gpu", "none visible to torch", "missing", "The reference kernels run on the CPU."))
    for index, (name, (major, minor)) in enumerate(gpus):
        out.append(Check(f"gpu {index}", f"{name} (sm_{major}{minor})", "ok"))
    triton = _version("triton")
    if triton and any(capability[0] == 9 for _, capability in gpus) and _known_bad(triton):
        out.append(
            Check(
                "triton on Hopper",
                triton,
                "warning",
                "FLA refuses to train GDN in chunk form on Hopper with Triton 3.4 to 3.7.0 (its gated chunk backward "
                "gives incorrect results there). Install Triton 3.7.1 or newer.",
            )
        )
    return out


def cxx_compiler() -> str | None:
    """Path of the C++ compiler that Inductor will call ($CXX, else the platform's usual one), None if there is none."""
    default = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX") or default)


def _compiler() -> Check:
    path = cxx_compiler()
    wanted = os.environ.get("CXX") or "g++"
    if path is None:
        return Check(
            "C++ compiler",
            f"{wanted} not found",
            "problem",
            "Inductor compiles CPU code with it. Debian and Ubuntu: apt-get install g++; or set CXX to a compiler.",
        )
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return Check("C++ compiler", f"{path}: {exc}", "problem", "Set CXX to a compiler that runs.")
    first = next(iter((run.stdout or run.stderr).splitlines()), "")
    return Check("C++ compiler", f"{path} ({first})" if first else path, "ok")


def _package(
    name: str, distributions: tuple[str, ...], minimum: tuple[int, ...], *, remark: str, required: bool = False
) -> Check:
    version = next((v for d in distributions if (v := _version(d))), None)
    if version is None:
        return Check(name, "not installed", "problem" if required else "missing", remark)
    if _numbers(version) < minimum:
        wanted = ".".join(map(str, minimum))
        return Check(name, version, "problem" if required else "warning", f"{name} {wanted} or newer is supported.")
    return Check(name, version, "ok")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def _known_bad(triton: str) -> bool:
    low, high = _BAD_ON_HOPPER
    return low <= (*_numbers(triton), 0, 0)[:3] <= high


def _gpus() -> list[tuple[str, tuple[int, int]]]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    return [
        (torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())
    ]
