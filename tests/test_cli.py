from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import lattn_compile
from lattn_compile import cli, doctor
from lattn_compile.errors import REASONS, FileFormatError, LattnWarning, reason
from lattn_compile.formats import REGISTRY
from lattn_compile.render.reasons import EXAMPLES
from lattn_compile.report import Report
from tests.render.samples import full_report, left, site


class Api:
    """Stands in for `lattn_compile.api`: answers with `report`, records what it was called with."""

    def __init__(self) -> None:
        self.report = Report(sites=[site(0)])
        self.calls: list[tuple[Any, ...]] = []
        self.warning: str | None = None
        self.error: Exception | None = None

    def inspect(self, target: Any, *, policy: Any = None) -> Report:
        self.calls.append(("inspect", target, policy))
        return self._answer()

    def load_program(self, path: Any) -> str:
        return f"the program of {path}"

    def rewrite(self, target: Any, policy: Any) -> Any:
        self.calls.append(("rewrite", target, policy))
        return types.SimpleNamespace(module="a program", report=self._answer())

    def _answer(self) -> Report:
        if self.error is not None:
            raise self.error
        if self.warning is not None:
            for _ in range(2):
                warnings.warn(self.warning, LattnWarning, stacklevel=1)
        return self.report


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    module = types.ModuleType(f"lattn_compile.{name}")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(lattn_compile, name, module, raising=False)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api()
    replace_module(monkeypatch, "api", inspect=api.inspect, rewrite=api.rewrite, load_program=api.load_program)
    return api


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path]]:
    calls: list[tuple[Any, Path]] = []
    monkeypatch.setattr(torch.export, "save", lambda program, path: calls.append((program, path)))
    return calls


# inspect


def test_inspect_prints_the_table(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "model.pt2"]) == 0
    assert capsys.readouterr().out == f"{api.report}\n"
    assert api.calls == [("inspect", Path("model.pt2"), None)]


def test_inspect_on_a_terminal_is_in_colour_and_reads_no_id_as_markup(
    api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.report = full_report()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    assert cli.main(["inspect", "model.pt2"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.[0-2].linear_attn/gdn#0" in out and "[DENSE_CACHE]" in out
    assert "\x1b[" in out


def test_inspect_json_is_the_report_and_nothing_else(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.report, api.warning = full_report(), "a rule hit nothing"
    assert cli.main(["inspect", "model.pt2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert Report.from_dict(json.loads(out)) == full_report()
    assert err == "warning: a rule hit nothing\n"


def test_inspect_writes_the_page_and_the_drawing(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", "model.pt2", "--html", "r.html", "--dot", "r.dot"]) == 0
    assert Path("r.html").read_text() == api.report.to_html()
    assert Path("r.dot").read_text() == api.report.to_dot()
    assert capsys.readouterr() == ("", "wrote r.html\nwrote r.dot\n")


def test_inspect_without_a_policy_asks_for_nothing_and_exits_0(api: Api) -> None:
    api.report = full_report()
    assert cli.main(["inspect", "model.pt2"]) == 0


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (Report(sites=[site(0)]), 0),
        (Report(sites=[site(0), left(1, reason("RULE_NONE"))]), 0),
        (Report(sites=[site(0), left(1)]), 2),
        (full_report(), 2),
        (Report(), 2),
    ],
)
def test_inspect_with_a_policy_exits_2_where_something_would_be_left(api: Api, report: Report, code: int) -> None:
    api.report = report
    assert cli.main(["inspect", "model.pt2", "--policy", "int8"]) == code
    assert api.calls == [("inspect", Path("model.pt2"), "int8")]


def test_a_rule_that_hit_nothing_is_one_line_and_exit_2(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.warning = "rule 'model.layer.*' hit nothing"
    assert cli.main(["inspect", "model.pt2", "--policy", "r.json"]) == 2
    assert capsys.readouterr().err == "warning: rule 'model.layer.*' hit nothing\n"


def test_an_output_path_is_refused_before_any_work(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", "model.pt2", "--html", "no/such/r.html"]) == 1
    assert cli.main(["inspect", "model.pt2", "--dot", "."]) == 1
    assert api.calls == []
    assert_expected_inline(
        capsys.readouterr().err,
        """\
error: [file] OUT: got 'no/such/r.html', whose folder does not exist; want a file path. Create the folder, or name another file.
error: [file] OUT: got '.', which is a folder; want a file path. Create the folder, or name another file.
""",  # noqa: E501
    )


# rewrite


def test_rewrite_saves_the_program(
    api: Api, saved: list[tuple[Any, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.pt2"
    assert cli.main(["rewrite", "in.pt2", str(out), "--policy", "int8"]) == 0
    assert api.calls == [("rewrite", "the program of in.pt2", "int8")]
    assert saved == [("a program", out)]
    assert capsys.readouterr() == (f"{api.report}\n", f"wrote {out}\n")


def test_rewrite_that_left_something_saves_and_exits_2(api: Api, saved: list[tuple[Any, Path]], tmp_path: Path) -> None:
    api.report = full_report()
    assert cli.main(["rewrite", "in.pt2", str(tmp_path / "out.pt2"), "--policy", "int8"]) == 2
    assert len(saved) == 1


def test_rewrite_that_did_nothing_saves_nothing(
    api: Api, saved: list[tuple[Any, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.report = Report()
    assert cli.main(["rewrite", "in.pt2", str(tmp_path / "out.pt2"), "--policy", "int8"]) == 2
    assert saved == []
    assert "nothing was rewritten" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_line(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = tmp_path / ("x" * 300)
    assert cli.main(["rewrite", "in.pt2", str(too_long), "--policy", "int8"]) == 1
    assert cli.main(["inspect", "in.pt2", "--html", str(too_long)]) == 1

    def full_disk(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:747] . open file failed")

    monkeypatch.setattr(torch.export, "save", full_disk)
    assert cli.main(["rewrite", "in.pt2", str(tmp_path / "out.pt2"), "--policy", "int8"]) == 1
    said = capsys.readouterr().err
    assert said.count("error: [file] OUT") == 3 and "open file failed" in said and "Traceback" not in said


def test_rewrite_never_overwrites_its_input(api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.pt2"
    file.touch()
    assert cli.main(["rewrite", str(file), str(tmp_path / "." / "m.pt2"), "--policy", "int8"]) == 1
    assert api.calls == []
    assert "which is IN.pt2" in capsys.readouterr().err


def test_rewrite_needs_a_policy(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rewrite", "in.pt2", "out.pt2"]) == 1
    assert "--policy" in capsys.readouterr().err


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return lattn_compile.linear_attention(q, q, q, g, beta)[0]


def test_a_real_program_is_rewritten_saved_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    args = (torch.randn(1, 6, 2, 16), -torch.rand(1, 6, 2), torch.rand(1, 6, 2))
    with lattn_compile.capture(), torch.no_grad():
        program = torch.export.export(Layer(), args, strict=False)
    source, target = tmp_path / "in.pt2", tmp_path / "out.pt2"
    torch.export.save(program, source)
    assert cli.main(["rewrite", str(source), str(target), "--policy", "exact", "--json"]) == 0
    report = Report.from_json(capsys.readouterr().out)
    assert [(s.kind, s.verdict) for s in report.sites] == [("gdn", "rewritten")]
    torch.testing.assert_close(torch.export.load(target).module()(*args), Layer()(*args))


# errors


def test_an_error_of_the_library_is_one_line_without_a_traceback(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.error = FileFormatError(
        "model.pt2",
        got="a zip file without\na program",
        want="a program saved by torch.export.save",
        remedy="Export the model.",
    )
    assert cli.main(["inspect", "model.pt2"]) == 1
    assert_expected_inline(
        capsys.readouterr().err,
        """\
error: [file] model.pt2: got a zip file without a program; want a program saved by torch.export.save. Export the model.
""",
    )


def test_a_bug_keeps_its_traceback(api: Api) -> None:
    api.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect", "model.pt2"])


@pytest.mark.parametrize(
    "argv", [["inspekt", "m.pt2"], ["inspect"], ["inspect", "m.pt2", "--jsn"], ["demo", "--steps", "x"]]
)
def test_a_mistyped_command_line_is_an_error_not_something_left(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    for command in ("inspect", "rewrite", "formats", "explain", "doctor", "bench", "demo"):
        assert command in out


def test_without_typer_it_says_how_to_install_it() -> None:
    code = "import sys; sys.modules['typer'] = None; from lattn_compile.cli import main; sys.exit(main([]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == ("error: the command line needs typer. Install it with: pip install 'lattn-compile[cli]'\n")


def test_a_command_that_misses_an_extra_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**_: Any) -> None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers.models")

    replace_module(monkeypatch, "demo", run=run)
    assert cli.main(["demo"]) == 1
    assert "pip install 'lattn-compile[hf]'" in capsys.readouterr().err


# explain, doctor, bench, demo, formats


@pytest.mark.parametrize("code", sorted(REASONS))
def test_explain_gives_meaning_and_remedy(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", code.lower()]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{code}: {REASONS[code].text}.\n{REASONS[code].remedy}\n")
    assert ("\nFor example:\n\n    " in out) == (code in EXAMPLES)


def test_explain_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "RULE_NONE"]) == 0
    assert_expected_inline(
        capsys.readouterr().out,
        """\
RULE_NONE: the recipe's first matching rule says to leave this site alone.
Change the rule's policy, or put a more specific rule before it.

For example:

    lc.Recipe(rules=[("model.layers.0.*", None), ("*", lc.Policy())])   # layer 0 is left alone
""",
    )


def test_explain_lists_every_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == 0
    out = capsys.readouterr().out
    for code in [*REASONS, "shape", "policy", "unsupported", "misuse"]:
        assert f"\n{code} " in out


def test_explain_knows_error_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "shape"]) == 0
    assert capsys.readouterr().out == "shape: A tensor's shape contradicts the others.\n"


def test_explain_of_an_unknown_code_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "dense_cash"]) == 1
    assert capsys.readouterr().err.endswith("Did you mean 'DENSE_CACHE'?\n")


def test_doctor_shows_parts_and_remarks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        doctor.Check("torch", "2.13.0", "ok"),
        doctor.Check("C++ compiler", "g++ not found", "problem", "Install one."),
        doctor.Check("fla", "not installed", "missing", "pip install 'lattn-compile[fla]'"),
    ]
    monkeypatch.setattr(doctor, "checks", lambda: found)
    assert cli.main(["doctor"]) == 1
    assert_expected_inline(
        capsys.readouterr().out,
        """\
part          found          state
------------  -------------  -------
torch         2.13.0         ok
C++ compiler  g++ not found  problem
fla           not installed  missing

problem: C++ compiler: Install one.
missing: fla: pip install 'lattn-compile[fla]'
""",
    )
    found.pop(1)
    assert cli.main(["doctor"]) == 0


def test_bench_says_that_it_wants_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench"]) == 1
    assert "got a machine without a CUDA device" in capsys.readouterr().err


def test_demo_passes_on_what_was_given_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    replace_module(monkeypatch, "demo", run=lambda **given: calls.append(given))
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--model", "kimi", "--steps", "3", "--policy", "fp8", "--all"]) == 0
    assert calls == [{"all_formats": False}, {"model": "kimi", "steps": 3, "policy": "fp8", "all_formats": True}]


def test_formats_lists_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["formats"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    sizes = {row[0].strip(): [c.strip() for c in row[1:] if c.strip()][:3] for row in rows if len(row) > 3}
    assert [sizes[n] for n in ("fp32", "bf16", "fp16")] == [["fp32", "4", "-"], ["bf16", "2", "-"], ["fp16", "2", "-"]]
    assert sizes["int8"] == ["int8/*x64", "1.0005", "*x64"]
    assert sizes["fp8_e4m3"] == ["fp8_e4m3/*x64", "1.0005", "*x64"]
    assert sizes["nvfp4"][:2] == ["nvfp4", "0.56299"]
    assert set(sizes) - {"format", "------", "--------"} == {f.name for f in REGISTRY}


def test_a_missing_program_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "none.pt2"
    assert cli.main(["inspect", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"error: [file] path: got {file} (no such file); want a .pt2 ")


def test_the_exit_code_of_the_demo_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_module(monkeypatch, "demo", run=lambda **given: 2)
    assert cli.main(["demo"]) == 2


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lattn_compile", "explain", "FOO"], capture_output=True, text=True)
    assert done.returncode == 1 and "lattn-compile explain lists all codes" in done.stderr


def test_the_console_script_points_at_main() -> None:
    entry = next(e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "lattn-compile")
    assert entry.load() is cli.main
