"""What a stranger relies on: the two commands, the licence, the entry points, and no trace of anyone's machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_licence_is_the_one_that_the_metadata_names() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n" in text and "Version 2.0, January 2004" in text and "9. Accepting Warranty" in text


def test_ci_runs_the_test_command_of_the_readme_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]


def _dry_run(target: str, venv: Path) -> str:
    if shutil.which("make") is None:
        pytest.skip("no make here")
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_command_sets_up_from_nothing_and_only_once(target: str, tmp_path: Path) -> None:
    first = _dry_run(target, tmp_path)
    assert "-m venv" in first and "torch==" in first and "--editable" in first
    for stamp in (".python", ".demo", ".dev"):
        (tmp_path / stamp).touch()
    second = _dry_run(target, tmp_path)
    assert " install " not in second and "-m venv" not in second
    assert {"demo": "lattn-compile demo", "test": "-m pytest"}[target] in second


def test_the_pinned_versions_are_supported_ones() -> None:
    pins = dict(re.findall(r"([a-z-]+)==([0-9.]+)", (ROOT / "Makefile").read_text()))
    floors = dict(re.findall(r'"([a-z-]+)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text()))

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    for name in ("torch", "transformers", "fla-core"):
        assert numbers(pins[name]) >= numbers(floors[name]), name
    # Two transformers are tested, the older one being the oldest that is supported.
    assert "transformers==5.17.0" in (ROOT / "Makefile").read_text() and floors["transformers"] == "5.17"


def test_no_file_names_a_package_index_or_a_machine() -> None:
    # Spelled in pieces, or this file would find itself.
    words = [
        "--index" + "-url",
        "--extra-index" + "-url",
        "--find" + "-links",
        "py" + "pi.org",
        "download.py" + "torch",
    ]
    words += ["/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/", "file:" + "///"]
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or path.suffix not in ("", ".py", ".md", ".toml", ".yml", ".txt", ".json"):
            continue
        # Folders that begin with a dot are environments and caches, but for CI's; .git is a file in a worktree.
        if path.name == ".git" or any(
            (p.startswith(".") and p != ".ci") or p.endswith(".egg-info") or p == "build" for p in parts[:-1]
        ):
            continue
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not found


def test_the_installed_package_has_its_entry_points_and_types() -> None:
    (backend,) = metadata.entry_points(group="torch_dynamo_backends", name="lattn_compile")
    assert callable(backend.load())
    (script,) = metadata.entry_points(group="console_scripts", name="lattn-compile")
    assert callable(script.load())
    import lattn_compile

    assert lattn_compile.__file__ is not None and (Path(lattn_compile.__file__).parent / "py.typed").is_file()
    assert metadata.version("lattn-compile") == PROJECT["version"]


def test_every_module_imports_with_torch_alone() -> None:
    """In a process where every optional library is as good as not installed."""
    code = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "transformers", "fla", "einops", "typer", "rich"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import lattn_compile
for module in pkgutil.walk_packages(lattn_compile.__path__, "lattn_compile."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        # Device code is imported when it is called, an integration by those who have what it integrates.
        device = module.name.endswith(".triton") or module.name.startswith("lattn_compile.kernels.")
        kernel = missing.name == "triton" and device and ".reference" not in module.name
        integration = module.name in {"lattn_compile.integrations." + n for n in ("transformers", "packed_cache")}
        if not kernel and not (integration and missing.name == "transformers"):
            raise
print(sorted(m for m in ("triton", "transformers", "fla") if m in sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
