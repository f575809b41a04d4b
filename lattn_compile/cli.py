"""The command line, `lattn-compile`.

Exit codes: 0 done, 2 something that was asked for was left, 1 error. An error is one red line; a traceback means a bug.
Importing this file imports neither torch, Triton nor transformers; a command imports what it needs.
"""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lattn_compile.errors import REASONS, FileFormatError, LattnError, LattnWarning, nearest
from lattn_compile.render import columns
from lattn_compile.render.reasons import EXAMPLES

if TYPE_CHECKING:
    from lattn_compile.report import Report

try:
    import typer
except ImportError:  # the extra `cli` is not installed: main() says how to get it
    typer = None  # type: ignore[assignment]

__all__ = ["main"]

OK, ERROR, LEFT = 0, 1, 2

# Extras of this package that bring a module which a command may miss.
_EXTRAS = {"transformers": "hf", "fla": "fla", "typer": "cli", "rich": "cli"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (`sys.argv[1:]` by default) and return its exit code."""
    if typer is None:
        print(f"error: the command line needs typer. {_install('cli')}", file=sys.stderr)
        return ERROR
    # The command-line library's own exceptions have no stable public home over its versions; this base has.
    usage_error: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")  # type: ignore[assignment]
    try:
        # Not standalone: there, a mistyped option would exit with 2, which means something else here.
        code = _app()(args=None if argv is None else list(argv), prog_name="lattn-compile", standalone_mode=False)
    except LattnError as exc:
        return _error(str(exc))
    except ModuleNotFoundError as exc:
        extra = _EXTRAS.get((exc.name or "").partition(".")[0])
        if extra is None:
            raise
        return _error(f"this command needs {exc.name}. {_install(extra)}")
    except typer.Abort:
        return _error("aborted")
    except usage_error as exc:
        return _error(f"{exc.format_message()} (lattn-compile --help shows what there is)")  # type: ignore[attr-defined]
    return code if isinstance(code, int) else OK


def _app() -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_root)
    for command in (inspect, rewrite, formats, explain, doctor, bench, demo):
        app.command()(command)
    return app


def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Find linear-attention recurrences in graphs, quantize their state, and say what was done."""
    if version:
        typer.echo(f"lattn-compile {metadata.version('lattn-compile')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE.pt2", help="A program saved with torch.export.save.")],
    policy: Annotated[str | None, typer.Option(help="What would be asked: a preset or a recipe's JSON file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the report as an HTML page.")] = None,
    dot: Annotated[Path | None, typer.Option(metavar="OUT", help="Write the module tree as Graphviz source.")] = None,
) -> int:
    """Show the recurrences of an exported program. Changes nothing. With --policy, exit 2 if any would be left."""
    from lattn_compile import api

    for out in (html, dot):
        _check_writable(out)
    with _warnings_as_lines() as warned:
        report = api.inspect(file, policy=policy)
    if html is not None:
        _write(html, report.to_html())
    if dot is not None:
        _write(dot, report.to_dot())
    if json:
        typer.echo(report.to_json())
    elif html is None and dot is None:
        _print_report(report)
    # Without a policy nothing was asked for, so nothing can have been left.
    return OK if policy is None else _verdict(report, warned)


def rewrite(
    source: Annotated[Path, typer.Argument(metavar="IN.pt2", help="A program saved with torch.export.save.")],
    target: Annotated[Path, typer.Argument(metavar="OUT.pt2", help="Where the rewritten program goes.")],
    policy: Annotated[str, typer.Option(help="A preset or a recipe's JSON file.")],
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    """Rewrite an exported program. Exit 2 if any recurrence was left; if nothing was rewritten, nothing is written."""
    from lattn_compile import api

    _check_writable(target)
    if source.exists() and target.exists() and source.samefile(target):
        raise FileFormatError(
            "OUT.pt2", got=f"{str(target)!r}, which is IN.pt2", want="another file", remedy="Name a new output file."
        )
    with _warnings_as_lines() as warned:
        result = api.rewrite(api.load_program(source), policy)
    report = result.report
    if json:
        typer.echo(report.to_json())
    else:
        _print_report(report)
    if not report.rewritten:
        _line(f"nothing was rewritten, so {target} was not written", "yellow")
        return LEFT
    _save_program(result.module, target)
    _line(f"wrote {target}")
    return _verdict(report, warned)


def formats() -> int:
    """List the state formats: bytes a value, default tile, what is stored and how it is rounded."""
    from lattn_compile.formats import REGISTRY, TiledFormat

    rows = []
    for cls in REGISTRY:
        fmt = cls()
        tile = f"{fmt.block_k or '*'}x{fmt.block_v or '*'}" if isinstance(fmt, TiledFormat) else "-"
        rows.append((fmt.name, str(fmt), f"{fmt.nbytes(128, 128) / 128**2:.5g}", tile, fmt.summary))
    _print_columns(("format", "spec", "bytes/value", "default tile", "what is stored"), rows)
    typer.echo(
        "\nbytes/value: of one head's 128 x 128 state, scales included. A tile is key channels x value columns, * all."
        "\nRounding is to nearest, ties to even, after a clamp to the code's range. An fp32 scale has 16 significant"
        "\nbits, so that code x scale is exact."
    )
    return OK


def explain(
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="As printed in a report or an error.")] = None,
) -> int:
    """Say what a reason or error code means and what to do. Without a code, list them all."""
    kinds: tuple[type[LattnError], ...] = (LattnError, *LattnError.__subclasses__())
    errors = {kind.code: " ".join((kind.__doc__ or "").partition("\n\n")[0].split()) for kind in kinds}
    if code is None:
        _print_columns(("code", "meaning"), [(r.code, r.text) for r in REASONS.values()])
        typer.echo("")
        _print_columns(("error", "meaning"), list(errors.items()))
        typer.echo("\nlattn-compile explain CODE says what to do about one.")
        return OK
    if (found := REASONS.get(code.upper())) is not None:
        typer.echo(f"{found.code}: {found.text}.\n{found.remedy}")
        if (example := EXAMPLES.get(found.code)) is not None:
            typer.echo("\nFor example:\n\n" + textwrap.indent(example, "    "))
    elif code.lower() in errors:
        typer.echo(f"{code.lower()}: {errors[code.lower()]}")
    else:
        known = [*REASONS, *errors]
        hint = nearest(code.upper(), REASONS) or nearest(code.lower(), errors)
        raise LattnError(
            "CODE", got=repr(code), want=", ".join(known), remedy=f"lattn-compile explain lists all codes.{hint}"
        )
    return OK


def doctor() -> int:
    """Check versions, the C++ compiler and the GPU. Exit 1 if the main job cannot run here."""
    from lattn_compile.doctor import checks

    found = checks()
    _print_columns(("part", "found", "state"), [(c.name, c.found, c.state) for c in found])
    remarks = [c for c in found if c.remark]
    if remarks:
        typer.echo("")
    for check in remarks:
        color = {"problem": "red", "warning": "yellow"}.get(check.state)
        typer.secho(f"{check.state}: {check.name}: {check.remark}", fg=color)
    return ERROR if any(c.state == "problem" for c in found) else OK


def bench(
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 4096,
    only: Annotated[str, typer.Option(help="A regular expression that is found in names of cases.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for the table, JSON and plot.")] = None,
    seconds: Annotated[float, typer.Option(help="No case is begun after that.")] = 3600.0,
) -> int:
    """Check the kernels on this machine's GPU against float64, then time them, beside flash-linear-attention."""
    from lattn_compile.bench import run

    return run(batch=batch, tokens=tokens, out=out, only=only, seconds=seconds)


def demo(
    model: Annotated[str | None, typer.Option(help="qwen3_next, qwen3_5 or kimi.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of the small language model.")] = None,
    policy: Annotated[str | None, typer.Option(help="A preset or a recipe's JSON file.")] = None,
    all_formats: Annotated[bool, typer.Option("--all", help="Measure every state format.")] = False,
) -> int:
    """Train a small hybrid model, quantize its state, and print what that costs and what training wins back."""
    from lattn_compile.demo import run

    # Only what was given is passed on: the defaults live in one place, the demo.
    given: dict[str, Any] = {k: v for k, v in (("model", model), ("steps", steps), ("policy", policy)) if v is not None}
    code = run(**given, all_formats=all_formats)
    return code if isinstance(code, int) else OK


def _verdict(report: Report, warned: list[str]) -> int:
    return LEFT if report.left_though_asked or warned or not report.sites else OK


@contextmanager
def _warnings_as_lines() -> Iterator[list[str]]:
    """Inside, each `LattnWarning` becomes one yellow line instead of a source excerpt; yields their texts.

    Other libraries' warnings are shown as ever.
    """
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", LattnWarning)
        usual = warnings.showwarning

        def show(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
            if not issubclass(category, LattnWarning):
                usual(message, category, *rest, **named)
            elif str(message) not in said:
                said.append(str(message))
                _line(f"warning: {' '.join(str(message).split())}", "yellow")

        warnings.showwarning = show
        yield said


def _print_report(report: Report) -> None:
    """In colour and fitted to the window where a person looks at it; elsewhere the plain table, never cut."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        typer.echo(str(report))
        return
    if not sys.stdout.isatty():
        typer.echo(str(report))
        return
    from lattn_compile.render.table import COLUMNS, details, site_groups

    data = report.to_dict()
    console = Console()
    table = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False)
    for label, members, cells in site_groups(data):
        style = "green" if members[0]["verdict"] == "rewritten" else "yellow"
        # Text, not str: a folded id holds brackets, which rich would read as markup.
        table.add_row(*map(Text, (label, str(len(members)), *cells[:-1])), Text(cells[-1], style=style))
    console.print(Text(report.summary(), style="bold"))
    if data["sites"]:
        console.print(table)
    for heading, text in details(data):
        console.print(Text.assemble((heading, "yellow"), ": ", text))


def _print_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for line in columns(header, rows):
        typer.echo(line)


def _check_writable(out: Path | None) -> None:
    """Refuse an output path before any work is done, not after."""
    if out is None:
        return
    try:
        why = "which is a folder" if out.is_dir() else "" if out.parent.is_dir() else "whose folder does not exist"
    except OSError as exc:
        why = f"which is no path ({exc.strerror})"
    if why:
        got = f"{str(out)!r}, {why}"
        raise FileFormatError("OUT", got=got, want="a file path", remedy="Create the folder, or name another file.")


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise FileFormatError(
            "OUT", got=f"{str(out)!r} ({exc.strerror})", want="a writable file", remedy="Name another file."
        ) from exc
    _line(f"wrote {out}")


def _save_program(program: Any, out: Path) -> None:
    import torch

    try:
        torch.export.save(program, out)
    except (OSError, RuntimeError) as exc:  # torch's own writer raises the latter
        if os.access(out, os.W_OK):
            raise
        said = (str(exc) or type(exc).__name__).splitlines()[0]
        raise FileFormatError(
            "OUT.pt2", got=f"{str(out)!r} ({said})", want="a writable file", remedy="Name another file."
        ) from exc


def _line(text: str, color: str | None = None) -> None:
    """To stderr, so that stdout stays what was asked for (JSON, a table)."""
    typer.secho(text, fg=color, err=True)


def _error(message: str) -> int:
    _line(f"error: {' '.join(message.split())}", "red")
    return ERROR


def _install(extra: str) -> str:
    return f"Install it with: pip install 'lattn-compile[{extra}]'"


if __name__ == "__main__":
    raise SystemExit(main())
