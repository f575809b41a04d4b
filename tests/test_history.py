"""A report speaks of the function it is about.

Compiles, graph breaks and skipped frames are counted a compiled callable, and strictness judges a function that broke
into pieces by all of them.
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lattn_compile as lc
from lattn_compile import backend, history
from lattn_compile.errors import FileFormatError, RewriteError
from lattn_compile.testing.backend import Record, recorded


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_SAID", set())
    with recorded() as found:
        yield found


def inputs(T: int = 5) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, generator=rng)  # noqa: E731
    return draw(1, T, 2, 4), draw(1, T, 2, 4), draw(1, T, 2, 4), -draw(1, T, 2).abs(), draw(1, T, 2).sigmoid()


def layer(q: Tensor, *rest: Tensor) -> Tensor:
    return lc.linear_attention(q, *rest, use_qk_l2norm_in_kernel=True)[0] * 2


def broken(q: Tensor, *rest: Tensor) -> Tensor:
    q = q.sin()
    torch._dynamo.graph_break()
    o = layer(q, *rest)
    torch._dynamo.graph_break()
    return o.cos()


def breaks_below(q: Tensor, *rest: Tensor) -> Tensor:
    return layer(helper(q), *rest)


def helper(q: Tensor) -> Tensor:
    q = q.sin()
    torch._dynamo.graph_break()
    return q + 1


def given_up(q: Tensor, *rest: Tensor) -> Tensor:
    for _ in range(2):  # no frame can be resumed in the middle of a loop
        q = lc.linear_attention(helper(q), *rest, use_qk_l2norm_in_kernel=True)[0]
    return q


def without(q: Tensor, *_: Tensor) -> Tensor:
    q = q.sin()
    torch._dynamo.graph_break()
    return q.cos()


def compiled(function: Callable[..., Any], *, policy: Any = "int8", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="lattn_compile", options={"policy": policy, **options})


def report() -> lc.Report:
    found = lc.last_report()
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore::lattn_compile.LattnWarning")
def test_a_report_counts_what_became_of_its_own_function() -> None:
    torch.compile(without, backend="eager")(*inputs())
    compiled(given_up)(*inputs())
    function = compiled(layer)
    function(*inputs())
    mine = report()
    assert (mine.compiles, len(mine.rewritten)) == (1, 1)
    assert mine.graph_breaks == [] and mine.skipped_frames == []
    compiled(broken)(*inputs())
    other = report()
    assert other.compiles == 3 and len(other.graph_breaks) == 2 and other.skipped_frames == []
    function(*inputs(6))
    assert report().compiles == 2, "the same function again, for another shape"
    assert report().graph_breaks == [] and report().seconds > 0


@pytest.mark.filterwarnings("ignore::lattn_compile.LattnWarning")
def test_breaks_and_skipped_frames_say_where_and_why() -> None:
    compiled(given_up)(*inputs())
    (skipped,) = report().skipped_frames
    assert skipped.startswith(f"given_up ({__file__}:") and "graph_break()" in skipped
    (broke,) = report().graph_breaks
    assert broke.startswith(f"helper ({__file__}:") and "\n" not in broke


def test_a_function_that_dynamo_gives_up_is_said_at_once() -> None:
    with pytest.warns(lc.LattnWarning, match=r"Dynamo gave up on given_up .*, which runs uncompiled"):
        compiled(given_up)(*inputs())


@pytest.mark.filterwarnings("ignore::lattn_compile.LattnWarning")
def test_one_table_of_all_reports_has_every_break_once() -> None:
    compiled(broken)(*inputs())
    compiled(given_up)(*inputs())
    merged = lc.Report.merge(lc.reports())
    assert (len(merged.graph_breaks), len(merged.skipped_frames)) == (3, 1)
    assert merged.compiles == len(lc.reports()) == 6


@pytest.mark.filterwarnings("ignore::lattn_compile.LattnWarning")
def test_a_function_of_which_nothing_reached_the_backend_has_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of whatever was compiled before it."""

    def hopeless(q: Tensor, *_: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
        return q

    compiled(layer)(*inputs())
    compiled(hopeless)(*inputs())
    said: list[str] = []
    monkeypatch.setattr(history.log, "warning", lambda text, *a: said.append(text % a))
    assert lc.last_report() is None
    assert "hopeless" in said[0]


def test_a_reset_of_dynamo_forgets_reports_too() -> None:
    compiled(layer)(*inputs())
    assert lc.reports()
    torch.compiler.reset()
    assert lc.last_report() is None and lc.reports() == []
    compiled(layer)(*inputs())
    assert report().compiles == 1


def test_a_recompile_beyond_dynamos_limit_is_reported_as_skipped() -> None:
    function = compiled(layer)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        function(*inputs())
        with pytest.warns(lc.LattnWarning, match="recompile limit exceeded"):
            function(*inputs(7))
    assert len(report().skipped_frames) == 1
    assert "recompile_limit before it is compiled, or call torch.compiler.reset()" in report().skipped_frames[0]


def test_strict_refuses_to_run_uncompiled_beyond_dynamos_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        for policy in ("int8", "fp8"):
            torch.compile(layer, backend="lattn_compile", options={"policy": policy, "strict": True})(*inputs())
        last = torch.compile(layer, backend="lattn_compile", options={"policy": "nvfp4", "strict": True})
        for _ in range(2):  # and again: nothing is kept of it
            with pytest.raises(RewriteError, match=r"would run uncompiled.*torch\.compiler\.reset\(\)"):
                last(*inputs())
        torch.compiler.reset()
        last(*inputs())


def test_reports_are_told_apart_between_threads() -> None:
    function, other = compiled(layer), compiled(broken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lc.LattnWarning)
        thread = threading.Thread(target=lambda: other(*inputs()))
        thread.start()
        thread.join()
        function(*inputs())
    assert report().graph_breaks == [] and report().compiles == 1


def test_a_report_can_be_copied_and_pickled() -> None:
    compiled(layer)(*inputs())
    found = report()
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert again == found


# --- strict -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [broken, breaks_below])
def test_strict_accepts_pieces_without_a_recurrence_beside_one_that_has_it(function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lc.LattnWarning)
        compiled(function, strict=True)(*inputs())
    assert len(lc.Report.merge(lc.reports()).rewritten) == 1


def test_strict_refuses_a_function_that_broke_into_pieces_without_any_and_names_it() -> None:
    with pytest.raises(RewriteError, match=r"nothing was rewritten.*nor in the graphs before it, into which without"):
        compiled(without, strict=True)(*inputs())


def test_strict_judges_a_rule_by_all_pieces() -> None:
    kinds = [("*/gdn#*", "int8"), ("*/linear#*", "fp8")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lc.LattnWarning)
        compiled(two_kinds, policy=lc.Recipe(rules=kinds), strict=True)(*inputs())
        torch._dynamo.reset()
        with pytest.raises(RewriteError, match=r"'nothing.like.it'.*into which two_kinds"):
            compiled(two_kinds, policy=lc.Recipe(rules=[("nothing.like.it", "fp8"), *kinds]), strict=True)(*inputs())


def two_kinds(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    o, _ = lc.linear_attention(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    torch._dynamo.graph_break()
    return o + lc.linear_attention(q, k, v, rule="additive")[0]


# --- a recipe that is a file ------------------------------------------------------------------------------------------


def formats(record: Record) -> list[str]:
    found = [c.arguments["state_format"] for c in record.calls]
    record.calls.clear()
    return found


@pytest.mark.parametrize("folder", [False, True])
def test_a_recipe_that_is_a_file_is_read_again_when_it_has_changed(
    folder: bool, tmp_path: Path, record: Record
) -> None:
    file = tmp_path / "lattn_recipe.json"
    given = tmp_path if folder else str(file)
    lc.Recipe(rules=[("*", "int8")]).save(file)
    function = compiled(layer, policy=given)
    function(*inputs())
    function(*inputs())
    assert formats(record) == ["int8/*x64"] * 2 and report().compiles == 1
    lc.Recipe(rules=[("*", "fp8")]).save(file)
    function(*inputs())
    compiled(layer, policy=given)(*inputs())
    assert formats(record) == ["fp8_e4m3/*x64"] * 2
    file.write_text("{")
    with pytest.raises(FileFormatError, match="not JSON"):
        function(*inputs())
    lc.Recipe(rules=[("*", "fp8"), ("*", None)]).save(file)
    function(*inputs())
    file.unlink()
    function(*inputs())
    assert formats(record) == ["fp8_e4m3/*x64"] * 2, "what was compiled goes on without the file"


def test_a_file_that_comes_later_is_read(tmp_path: Path, record: Record) -> None:
    file = tmp_path / "recipe.json"
    function = compiled(layer, policy=file)
    with pytest.raises(FileFormatError):
        function(*inputs())
    lc.Recipe(rules=[("*", "int8")]).save(file)
    function(*inputs())
    assert formats(record) == ["int8/*x64"]
