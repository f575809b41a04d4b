"""The backend's options, what it says, and what it may reuse."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lattn_compile as lc
from lattn_compile import backend, sources
from lattn_compile.testing.backend import recorded

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(backend, "_SAID", set())


def _inputs(T: int = 5) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    return draw(1, T, 2, 4), draw(1, T, 2, 4), draw(1, T, 2, 4), -draw(1, T, 2).abs(), draw(1, T, 2).sigmoid()


def _layer(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    return lc.linear_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0] * 2


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@pytest.mark.parametrize(
    "policy",
    [
        "int8",
        lc.Policy(lc.Int8()),
        lc.Recipe(rules=[("*", lc.Policy(lc.Int8()))]),
        lc.Recipe(rules=[("*", lc.Policy(lc.Int8()))]).to_dict(),
        "file",
    ],
    ids=["preset", "policy", "recipe", "dict", "json"],
)
def test_a_policy_is_given_in_any_of_its_forms(policy: Any, tmp_path: Path) -> None:
    if policy == "file":
        policy = str(tmp_path / "recipe.json")
        lc.Recipe(rules=[("*", lc.Policy(lc.Int8()))]).save(policy)
    with recorded() as record:
        torch.compile(_layer, backend="lattn_compile", fullgraph=True, options={"policy": policy})(*_inputs())
    assert [c.arguments["state_format"] for c in record.calls] == ["int8/*x64"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "int9"}, "int8"),
        ({"policy": {"rules": [], "version": 99}}, "version"),
        ({"policy": "int8", "modes": "default"}, "Did you mean 'mode'"),
        ({"policy": "int8", "mode": "fastest"}, "max-autotune"),
        ({"policy": "int8", "strict": "yes"}, "True or False"),
        ({"policy": lc.Policy(storage="packed")}, "packed"),
        ({"policy": lc.Policy(prefill=lc.Prefill(inverse=lc.Neumann(4)), kernel="triton")}, "triton"),
        ({"policy": lc.Policy(kernel="triton")}, "triton"),
    ],
    ids=lambda x: str(x)[:50] if isinstance(x, dict) else "",
)
def test_a_mistake_or_an_unbuilt_part_raises_a_lattn_error_at_the_first_call(options: Any, message: str) -> None:
    compiled = torch.compile(_layer, backend="lattn_compile", fullgraph=True, options=options)
    for _ in range(2):  # a cached artifact keeps raising
        with pytest.raises(lc.LattnError, match=message):
            compiled(*_inputs())


def test_nothing_to_rewrite_warns_once_and_raises_under_strict() -> None:
    x = torch.randn(3)
    with recorded():
        with pytest.warns(lc.LattnWarning, match="nothing was rewritten"):
            torch.compile(_plain, backend="lattn_compile", options={"policy": "int8"})(x)
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.compile(_plain, backend="lattn_compile", options={"policy": "int8"})(x)
        torch._dynamo.reset()
        strict = torch.compile(_plain, backend="lattn_compile", options={"policy": "int8", "strict": True})
        with pytest.raises(lc.LattnError, match="nothing was rewritten"):
            strict(x)


def test_a_rule_that_hits_nothing_warns_and_raises_under_strict() -> None:
    recipe = lc.Recipe(rules=[("encoder.*", lc.Policy()), ("*", lc.Policy(lc.Int8()))])
    with recorded():
        with pytest.warns(lc.LattnWarning, match=r"rule 0 \('encoder.\*'\) matched no site"):
            torch.compile(_layer, backend="lattn_compile", options={"policy": recipe})(*_inputs())
        torch._dynamo.reset()
        strict = torch.compile(_layer, backend="lattn_compile", options={"policy": recipe, "strict": True})
        with pytest.raises(lc.LattnError, match="matched no site"):
            strict(*_inputs())


def test_without_any_recipe_the_site_is_exact_and_one_log_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(backend.log, "warning", lambda text, *a: said.append(text % a if a else text))
    with recorded() as record:
        torch.compile(_layer, backend="lattn_compile", fullgraph=True)(*_inputs())
        torch._dynamo.reset()
        torch.compile(_layer, backend="lattn_compile", fullgraph=True)(*_inputs(6))
    assert [c.arguments.get("write", "exact") for c in record.calls] == ["exact", "exact"]
    assert len([s for s in said if "no policy" in s]) == 1


def test_modes_and_inductor_options_reach_inductor() -> None:
    _, _, patches = backend.parse_options(None, {"mode": "max-autotune", "epilogue_fusion": False, "policy": "int8"})
    assert patches["max_autotune"] is True
    assert patches["epilogue_fusion"] is False
    assert "policy" not in patches
    _, _, patches = backend.parse_options("reduce-overhead", {})
    assert patches["triton.cudagraphs"] is True


def test_last_report_is_none_before_any_compile_and_says_why() -> None:
    code = "import lattn_compile as lc; print(lc.last_report())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "None", done.stderr
    assert "no graph has gone through" in done.stderr


_CHILD = """
import json, sys, torch
import lattn_compile as lc
from torch._dynamo.utils import counters
def f(q, k, v, g, beta):
    return lc.linear_attention(q, k, v, g, beta)[0].square().sum()
for text in sys.argv[2:]:
    torch._dynamo.reset()
    counters.clear()
    g = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=g)
    k = torch.nn.functional.normalize(r(1, 9, 2, 8), dim=-1)
    args = (r(1, 9, 2, 8), k, r(1, 9, 2, 8), -r(1, 9, 2).abs(), r(1, 9, 2).sigmoid())
    args = tuple(a.requires_grad_() for a in args)
    chosen = {"options": {"policy": eval(text, {"lc": lc})}} if sys.argv[1] == "lattn_compile" else {}
    loss = torch.compile(f, backend=sys.argv[1], fullgraph=True, **chosen)(*args)
    loss.backward()
    print(json.dumps({
        "loss": loss.item(),
        "grad": args[2].grad.double().sum().item(),
        "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
    }))
"""


def _child(
    policies: list[str], cache: Path, package: Path = ROOT, backend: str = "lattn_compile"
) -> list[dict[str, Any]]:
    """What one process finds that compiles the same function under each policy."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", _CHILD, backend, *policies]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=package)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(policies) :]]


def test_a_changed_policy_or_source_never_hits_a_stale_artifact(tmp_path: Path, cold_cache: Path) -> None:
    """Fresh processes over one cache folder: the same again hits, and any change misses and gives other numbers."""
    (first,) = _child(["'int8'"], cold_cache)
    assert first["misses"] > 0
    again, *others = _child(["'int8'", "'fp8'", "lc.Policy(lc.Int8(), readout='after_write')", "'exact'"], cold_cache)
    assert again["misses"] == 0
    assert again["hits"] > 0
    assert (again["loss"], again["grad"]) == (first["loss"], first["grad"])
    for result in others:
        assert result["misses"] > 0
        assert result["loss"] != first["loss"]

    # The same policy with another source file: the copy differs in a comment only.
    (changed,) = _child(["'int8'"], cold_cache, _changed_copy(tmp_path, "lowering/step.py"))
    assert changed["misses"] > 0
    assert changed["loss"] == first["loss"]


def test_every_source_file_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_ROOT", _changed_copy(tmp_path, "backend.py") / "lattn_compile")
    files = [path for path in sources._ROOT.rglob("*.py") if path.name != "__init__.py"]
    assert len({path.parent for path in files}) > 5
    seen = {backend.source_hash.__wrapped__()}
    for file in files:
        file.write_text(file.read_text() + "\n# another version\n")
        seen.add(backend.source_hash.__wrapped__())
    assert len(seen) == len(files) + 1


def test_plain_inductor_never_calls_an_op_by_an_older_schema(tmp_path: Path, cold_cache: Path) -> None:
    """torch's cache keys hold an op's name only: a backward compiled by another version would miss arguments."""
    first, again = _child(["'int8'", "'int8'"], cold_cache, backend="inductor")
    assert first["misses"] > 0
    assert again["misses"] == 0
    (changed,) = _child(["'int8'"], cold_cache, _changed_copy(tmp_path, "ops/options.py"), backend="inductor")
    assert changed["misses"] > 0
    assert changed["loss"] == again["loss"] == first["loss"]


def _changed_copy(folder: Path, source: str) -> Path:
    package = folder / source.replace("/", "_")
    shutil.copytree(
        ROOT / "lattn_compile", package / "lattn_compile", ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    file = package / "lattn_compile" / source
    file.write_text(file.read_text() + "\n# another version\n")
    return package
