"""Rewritten programs compiled ahead of time: packages that run without this package, and what is refused instead."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.lowering.export import to_aten
from tests import tiny_models

ALL = bool(os.environ.get("LATTN_COMPILE_ALL"))


class _Layer(nn.Module):
    """A gated delta rule with raw gates and its state in a buffer; one token steps the state, more are a prefill."""

    def __init__(self, policy: Any = None) -> None:
        super().__init__()
        self.policy = policy
        self.A_log, self.dt_bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4))
        self.register_buffer("state", torch.randn(2, 4, 8, 12))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        g = -self.A_log.exp() * nn.functional.softplus(a + self.dt_bias)
        o, final = lc.linear_attention(
            q,
            k,
            v,
            g,
            b.sigmoid(),
            initial_state=self.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            policy=self.policy,
        )
        assert final is not None
        self.state.copy_(final if isinstance(final, Tensor) else final.dense())
        return o


def _draw(tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((2, tokens, 2, 8), (2, tokens, 2, 8), (2, tokens, 4, 12), (2, tokens, 4), (2, tokens, 4))
    return tuple(torch.randn(*s, generator=rng) for s in shapes)


_LOADED = """
import sys, torch
def package(path):
    return torch._inductor.aoti_load_package(path)
calls, where = torch.load(sys.argv[1]), sys.argv[2]
runs = {name: package(f"{where}/{name}.pt2") for name, _ in calls}
torch.save([runs[name](*args) for name, args in calls], sys.argv[3])
assert not any(name.split(".")[0] == "lattn_compile" for name in sys.modules)
"""


def _run_elsewhere(folder: Path, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Any]:
    """Outputs of the packages of a folder in a fresh process that never imports this package."""
    torch.save(calls, folder / "calls.pt")
    command = [sys.executable, "-c", _LOADED, str(folder / "calls.pt"), str(folder), str(folder / "out.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: list[Any] = torch.load(folder / "out.pt")
    return loaded


def _package(program: torch.export.ExportedProgram, file: Path) -> None:
    # torch 2.13 folds a count of dimension 0 that the program writes to: a StaticCache's length would stand still.
    folding = {"joint_graph_constant_folding": False}
    torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=folding)


def _close(got: Tensor, want: Tensor, bound: float = 1e-5) -> None:
    assert (got - want).abs().max() <= bound * want.abs().max()


class _Both(nn.Module):
    """A step and a prefill in one package: half of what a package costs to compile is the same for any."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.prefill = _Layer(lc.Policy(lc.Int8(block_v=8))), _Layer()

    def forward(self, token: tuple[Tensor, ...], tokens: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return self.step(*token), self.prefill(*tokens)


@torch.no_grad()
def test_a_step_and_a_prefill_run_where_this_package_is_not(tmp_path: Path) -> None:
    """Calls move the package's own states as they move eager's, and any number of tokens goes through one program."""
    module, tokens = _Both(), torch.export.Dim("tokens", min=2, max=4096)
    shapes = ((None,) * 5, ({1: tokens},) * 5)
    program = torch.export.export(module, (_draw(1), _draw(70)), dynamic_shapes=shapes, strict=False)
    _package(to_aten(program), tmp_path / "both.pt2")
    calls = [("both", (_draw(1, seed), _draw(n, seed))) for seed, n in enumerate((150, 2, 64))]
    for (_, args), outputs in zip(calls, _run_elsewhere(tmp_path, calls), strict=True):
        for got, want in zip(outputs, module(*args), strict=True):
            _close(got, want)


@pytest.mark.skipif(not ALL, reason="LATTN_COMPILE_ALL=1 compiles whole models ahead of time")
@torch.no_grad()
def test_a_models_step_and_prefill_run_where_this_package_is_not(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, _ = tiny_models.build("qwen3_next", layers=2)
    prompt = torch.randint(1, 90, (1, 70))

    class Prefill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits

    class Step(Prefill):
        """The cache's tensors are buffers, put in their places at every call: export knows buffers only."""

        def __init__(self) -> None:
            super().__init__()
            self.cache = transformers.StaticCache(config=model.config, max_cache_len=96)
            model(input_ids=prompt, past_key_values=self.cache, use_cache=True)
            self.places: list[tuple[dict[Any, Any], Any]] = []
            for layer in self.cache.layers:
                homes = [vars(layer), *(x for x in vars(layer).values() if isinstance(x, dict))]
                self.places += [(h, name) for h in homes for name, x in h.items() if isinstance(x, Tensor)]
            for i, (home, name) in enumerate(self.places):
                self.register_buffer(f"cache_{i}", home[name])

        def forward(self, input_ids: Tensor) -> Tensor:
            for i, (home, name) in enumerate(self.places):
                home[name] = getattr(self, f"cache_{i}")
            return self.model(input_ids=input_ids, past_key_values=self.cache, use_cache=True).logits

    eager = {"step": Step(), "prefill": Prefill()}
    for name, module, ids in (("step", Step(), prompt[:, :1]), ("prefill", Prefill(), prompt)):
        with lc.capture():
            program = torch.export.export(module, (ids,), strict=False)
        rewritten = lc.rewrite(program, "exact")
        assert len(rewritten.report.rewritten) == 1
        _package(to_aten(rewritten.module), tmp_path / f"{name}.pt2")
    calls = [*(("step", (prompt[:, i : i + 1],)) for i in range(5)), ("prefill", (prompt,))]
    got = _run_elsewhere(tmp_path, calls)
    for (name, args), logits in zip(calls, got, strict=True):
        _close(logits, eager[name](*args))


@pytest.mark.parametrize(
    ("policy", "tokens", "op"),
    [
        (lc.Policy(lc.Int8(), write=lc.Replay(window=4)), 1, "lattn.replay"),
        (lc.Policy(lc.Int8(), rounding="stochastic"), 1, "lattn.decode"),
        (lc.Policy(lc.Int8(), write=lc.Chunk(4)), 9, "lattn.chunk"),
        (lc.Policy(lc.Int8(), kernel="reference"), 1, "lattn.decode"),
    ],
)
@torch.no_grad()
def test_what_only_an_op_computes_is_refused_when_it_is_exported(policy: Any, tokens: int, op: str) -> None:
    program = torch.export.export(_Layer(policy), _draw(tokens), strict=False)
    with pytest.raises(lc.LattnError, match=rf"{op}.*import lattn_compile") as caught:
        to_aten(program)
    assert caught.value.code == "unsupported"
    assert any("lattn" in str(n.target) for n in program.graph.nodes)


def test_anything_but_a_program_is_refused_by_name() -> None:
    with pytest.raises(lc.LattnError, match="ExportedProgram"):
        to_aten(_Layer())  # type: ignore[arg-type]
