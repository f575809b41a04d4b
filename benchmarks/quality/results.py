"""One JSON file of all parts of a run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.config import RULE, Settings
from benchmarks.quality.text import load_corpus

__all__ = ["collect", "restore"]

_KINDS = {"base": "bases", "trained": "trained", "recipe": "recipes", "slopes": "slopes", "failed": "failed"}
"""What a part is that is no row: its key, and the list that it goes to."""


def collect(
    folder: Path, out: Path, settings: Settings, *, command: str, commit: str, spent: dict[str, float], device: str
) -> dict[str, Any]:
    """Puts together what is there and writes `out`; returns it.

    Args:
        spent: seconds of each part. commit: where this is not a git checkout, or to be believed more than git.
    """
    import transformers

    found: dict[str, Any] = {
        "rows": [],
        "bases": [],
        "trained": [],
        "recipes": [],
        "slopes": [],
        "failed": [],
        "smoke": None,
    }
    for path in sorted((folder / "parts").glob("*.json")):
        part = json.loads(path.read_text())
        if path.stem == "smoke":
            found["smoke"] = part
        for key, where in _KINDS.items():
            if key in part and "policy" not in part:
                found[where].append(part)
                break
        else:
            if "policy" in part:
                found["rows"].append(part)
    about = {
        "command": command,
        "commit": commit or _commit(),
        "hardware": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "triton": _version("triton") if device == "cuda" else None,
        "transformers": transformers.__version__,
        "corpus": load_corpus(settings.text).about,
        "settings": json.loads(json.dumps(dataclasses.asdict(settings), default=str)),
        "rule": RULE,
        "seconds": spent,
    }
    before = folder / "before.json"
    if before.exists():
        about["before"] = json.loads(before.read_text())
    result = {"about": about, **{key: x for key, x in found.items() if x}}
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = out.with_suffix(".tmp")
    whole.write_text(_spread(result))
    whole.replace(out)
    return result


def restore(out: Path, folder: Path, settings: Settings) -> int:
    """Parts of `folder` made from a file that `collect` wrote, so that a run goes on with them. Returns how many.

    Raises:
        ValueError: its text is another one: what is measured from here on would compare with nothing there.
    """
    result = json.loads(out.read_text())
    there, here = (x["sha256"] for x in (result["about"]["corpus"], load_corpus(settings.text).about))
    if there != here:
        raise ValueError(
            f"{out} was measured on other text (SHA-256 {there[:12]}, here {here[:12]}): resume it with the Python "
            f"that made it, {result['about']['corpus']['python']}, or measure everything anew without --resume"
        )
    parts: dict[str, Any] = {}
    for row in result.get("rows", ()):
        on = "" if row["on"] == "all" else f"{row['on']} "
        parts[f"{row['model']} {row['seed']} {row['weights']} {on}{row['policy']}"] = row
    for x in result.get("bases", ()):
        parts[f"base {x['base']} {x['seed']}"] = x
    for x in result.get("trained", ()):
        method = "exact exact" if x["trained"] == "control" else x["trained"]  # as stages._label has it
        parts[f"trained {x['model']} {x['seed']} {method}"] = x
    for x in result.get("slopes", ()):
        parts[f"slopes {x['model']} {x['slopes']}"] = x
    for x in result.get("recipes", ()):
        parts[f"recipe {x['model']}"] = x
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"recipe_{x['model']}.json").write_text(json.dumps(x["recipe"]))
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    kept = ("command", "commit", "hardware", "torch", "triton", "transformers", "seconds")
    earlier = result["about"].get("before", [])
    (folder / "before.json").write_text(json.dumps([*earlier, {key: result["about"].get(key) for key in kept}]))
    for name, part in parts.items():
        (folder / "parts" / f"{name}.json").write_text(json.dumps(part))
    return len(parts)


def _spread(result: dict[str, Any]) -> str:
    """JSON with a line for each entry of a list: rows of numbers are data, not prose."""
    parts = []
    for key, value in result.items():
        if isinstance(value, list):
            lines = ",\n  ".join(json.dumps(_short(x)) for x in value)
            parts.append(f' "{key}": [\n  {lines}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value, indent=1)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _short(x: Any) -> Any:
    """Numbers with six significant digits; null for one that is none."""
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    if isinstance(x, dict):
        return {key: _short(value) for key, value in x.items()}
    return [_short(value) for value in x] if isinstance(x, list) else x


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
