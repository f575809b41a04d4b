"""The README and the docs as a reader takes them: links lead somewhere, files and commands that are named are there,
and blocks of Python run."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile import demo
from lattn_compile.testing.backend import recorded
from tests import tiny_models

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FRAGMENTS = ("reasons.md",)
"""Pages whose blocks are a line or two of somebody's model: they are read, not run."""
APART = ("distributed.md",)
"""Pages whose blocks are each a thing to do to a model of one's own; elsewhere one follows the other."""

_BLOCK = re.compile(r"(?ms)^```(\w*)\n(.*?)^```\n")
_FOLDERS = "tests|docs|benchmarks|examples|lattn_compile|formats|kernels|passes|ops|lowering|integrations|packed"


def _prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"(?m)^#+ (.*)$", _prose(page))
    heads = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head.strip()).replace(" ", "-") for head in heads}


def _broken(page: Path) -> Iterator[str]:
    """Links without a target, and paths of this repository in backquotes that are no file."""
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link
    for code in re.findall(r"`([^`]+)`", _prose(page)):
        for path in re.findall(rf"(?<![\w/.*-])((?:{_FOLDERS})/[\w/.*<>-]+)", code):
            pattern = re.sub(r"<\w+>", "*", path)
            if not any(list(base.glob(pattern)) for base in (ROOT, ROOT / "lattn_compile")):
                yield path


def _unknown(page: Path) -> Iterator[str]:
    """Commands that name a script, a module, a target of make or a subcommand that is not there."""
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    subcommands = re.findall(r"(?m)^def (\w+)\(", (ROOT / "lattn_compile" / "cli.py").read_text(encoding="utf-8"))
    files = "".join(f"# {name}\n" for name in re.findall(r"(?m)^# (\w+\.py)$", text))  # a block to be saved as a file
    for script in re.findall(r"(?:^    |`)(?:python|torchrun)[^`\n]*? ([\w/]+\.py)\b", text, re.M):
        if not (ROOT / script).exists() and f"# {script}\n" not in files:
            yield script
    for module in re.findall(r"`python -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield module
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M):
        if target not in targets:
            yield f"make {target}"
    for name in re.findall(r"(?:^    |`)lattn-compile ([a-z]+)\b(?!:)", text, re.M):
        if name not in subcommands:
            yield f"lattn-compile {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_at_is_there(page: Path) -> None:
    assert [*_broken(page), *_unknown(page)] == []


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c\n[1](#a-b-c) [2](#a) [3](page.md#no) [4](none.md) `tests/none.py` `tests/test_docs.py`\n"
        "`make lunch` `make demo` `lattn-compile doctor` `lattn-compile cure` `python -m tests.none`\n\n"
        "    python examples/none.py\n    torchrun --nproc-per-node 2 examples/serve_tp.py\n"
    )
    assert [*_broken(page)] == ["#a", "page.md#no", "none.md", "tests/none.py"]
    assert [*_unknown(page)] == ["examples/none.py", "tests.none", "make lunch", "lattn-compile cure"]


def _blocks(page: Path) -> list[str]:
    """Blocks of Python, each at the line that it has on the page."""
    text = page.read_text(encoding="utf-8")
    found = [m for m in _BLOCK.finditer(text) if m[1] == "python"]
    return ["\n" * text[: m.start(2)].count("\n") + m[2] for m in found]


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p)], ids=lambda page: page.name)
def test_a_block_is_python_and_names_what_this_library_has(page: Path) -> None:
    for block in _blocks(page):
        for node in ast.walk(ast.parse(block, str(page))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lc":
                assert hasattr(lc, node.attr), f"{page.name}:{node.lineno} lc.{node.attr}"


# What the blocks of a page find: each begins where its page has said what these names are.


def _tensors() -> dict[str, Any]:
    """Arguments of `lc.linear_attention`, twice over."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    found = {}
    for end in ("", "2"):
        found |= {f"q{end}": draw(2, 9, 2, 8), f"k{end}": draw(2, 9, 2, 8), f"v{end}": draw(2, 9, 4, 8)}
        found |= {f"g{end}": -draw(2, 9, 4).exp(), f"beta{end}": draw(2, 9, 4).sigmoid()}
    return found


class _Net(torch.nn.Module):
    """A recurrence that is called, between nothing."""

    def forward(self, ids: Tensor) -> Tensor:
        x = ids.unsqueeze(-1).unsqueeze(-1).float().expand(-1, -1, 2, 8) / 97
        return lc.linear_attention(x, x, x, -x[..., 0], x[..., 0])[0]


class _Step(torch.nn.Module):
    """One token of a recurrence that is spelled out, its state in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 4, 8, 12))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state = self.state * g.exp().unsqueeze(-1).unsqueeze(-1)
        update = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
        state = state + k.unsqueeze(-1) * update.unsqueeze(-2)
        self.state.copy_(state)
        return (state * q.unsqueeze(-1)).sum(-2)


def _text_model() -> dict[str, Any]:
    ids = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    model = tiny_models.build("qwen3_next", layers=2)[0]
    return {"torch": torch, "lc": lc, "model": model, "input_ids": ids, "ids": ids, "labels": ids, "prefix_lengths": 4}


def _readme() -> dict[str, Any]:
    return _text_model() | _tensors() | {"module": _Net()}


def _training() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    return _text_model() | {
        "sequence_lengths": [9, 7],
        "tokens": 9,
        "prefix": 4,
        "recipe": lc.Recipe(rules=[("*", "fp8")]),
        "folder": "saved",
        "build_model": lambda: tiny_models.build("qwen3_next", layers=2)[0],
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "Trainer": Trainer,
        "args": TrainingArguments("out", report_to="none", use_cpu=True),
        "dataset": [{"input_ids": [2, 3], "labels": [2, 3]}],
    }


def _calibrate() -> dict[str, Any]:
    found = _text_model()
    return found | {"batches": [{"input_ids": found["ids"], "use_cache": False}], "path": "recipe.json"}


def _lowering() -> dict[str, Any]:
    args = torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.randn(2, 4, 12), -torch.rand(2, 4), torch.rand(2, 4)
    return {"model": _Step(), "args": args}


def _serving() -> dict[str, Any]:
    q, v, gate = torch.ones(2, 1, 16, 128), torch.ones(2, 1, 32, 128), torch.ones(2, 1, 32)
    return _text_model() | {
        "q": q,
        "k": q,
        "v": v,
        "g": -gate,
        "beta": gate,
        "path": "model.layers.0.linear_attn",
        "policy": "int8",
        "prompt": "abc",
        "exact_state": torch.zeros(32, 128, 128),
        "buffer": torch.empty(2, dtype=torch.int32),
    }


def _distributed() -> dict[str, Any]:
    found = _text_model() | _tensors()
    optimizer = torch.optim.SGD(found["model"].parameters(), lr=0.1)
    return found | {"recipe": lc.Recipe(rules=[("*", "int8")]), "lengths": 4, "x": found["v"], "optimizer": optimizer}


SMALLER = {"range(120)": "range(2)", '"cuda", (2,)': '"cpu", (1,)'}
"""What blocks have too many of for a test: steps, and devices."""

WORLDS = {
    "README.md": _readme,
    "calibrate.md": _calibrate,
    "distributed.md": _distributed,
    "lowering.md": _lowering,
    "prefill.md": _text_model,
    "recognition.md": _text_model,
    "serving.md": _serving,
    "training.md": _training,
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder to write to, graphs without Inductor, the demo's model at its smallest, and a process group of one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    sizes = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32}
    monkeypatch.setattr(demo, "SIZES", demo.SIZES | sizes | {"intermediate_size": 32})
    for name, value in {"BATCH": 2, "LENGTH": 24, "PREFIX": 8}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "load_text", lambda load=demo.load_text: load(batches=3))
    few = functools.partial(lc.calibrate, horizon=12, candidates=[lc.Policy(lc.Int8()), lc.Policy(lc.Nvfp4())])
    monkeypatch.setattr(lc, "calibrate", few)
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", mock.create_autospec(torch._inductor.aoti_compile_and_package)
    )
    torch._dynamo.reset()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    with recorded():
        yield
    torch.distributed.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "page", [p for p in PAGES if _blocks(p) and p.name not in FRAGMENTS], ids=lambda page: page.name
)
def test_the_blocks_of_a_page_run(page: Path, small: None) -> None:
    world = WORLDS[page.name]
    names = world()
    for i, block in enumerate(_blocks(page)):
        if i and page.name in APART:
            names |= world()
        for found, few in SMALLER.items():
            block = block.replace(found, few)
        exec(compile(block, str(page), "exec"), names)
    if "caches" in names:
        names["caches"].remove()
