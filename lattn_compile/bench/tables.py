"""What `bench` found, as Markdown and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["markdown", "plot"]


def markdown(found: dict[str, Any]) -> str:
    """The report of one run of `decode.measure`."""
    fla = found["fla_fused_recurrent_gdn_forward_ms"]

    def ratio(row: dict[str, Any], what: str) -> str:
        return "-" if fla is None or row["kind"] != "gdn" else f"{row[what] / fla:.2f}"

    lines = [
        f"# Decode kernels on {found['gpu']}",
        "",
        f"`lattn-compile bench`, torch {found['torch']}, Triton {found['triton']}; "
        + ", ".join(f"{name} = {value}" for name, value in found["shape"].items())
        + f", bf16 inputs. A copy moves {found['copy_bytes_per_second'] / 1e12:.2f} TB/s. "
        "Memory: the most bytes that forward and backward hold beside their tensors, gradients and end states, over "
        "the bytes of q, k, v, g, beta and o.",
        "",
        "FLA fused_recurrent GDN forward, unquantized: " + ("not installed." if fla is None else f"{fla:.2f} ms."),
        "",
        "| | state | forward ms | µs a token | / FLA | forward + backward ms | / FLA forward | memory | bandwidth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found["rows"]:
        lines.append(
            f"| {r['kind']} | {r['format']} | {r['forward_ms']:.2f} | {r['token_us']:.2f} | {ratio(r, 'forward_ms')} "
            f"| {r['train_ms']:.2f} | {ratio(r, 'train_ms')} | {r['memory']:.2f} "
            f"| {100 * r['forward_bandwidth']:.0f} % |"
        )
    lines += ["", "Forward + backward by kernel, ms:", ""]
    for r in found["rows"]:
        ours = {name: ms for name, ms in r["kernels_ms"].items() if not name.startswith(("void ", "Mem"))}
        parts = [f"{name.partition('(')[0]} {ms:.2f}" for name, ms in ours.items()]
        rest = sum(r["kernels_ms"].values()) - sum(ours.values())
        lines.append(f"* {r['kind']} {r['format']}: {', '.join(parts)}; torch's {rest:.2f}")
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any], path: Path) -> bool:
    """Bars of forward and backward beside FLA's forward, as a PNG; False, said in a line, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {path.name}: matplotlib is not installed")
        return False
    rows, fla = found["rows"], found["fla_fused_recurrent_gdn_forward_ms"]
    figure = Figure(figsize=(8, 0.45 * len(rows) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [f"{r['kind']} {r['format']}" for r in rows]
    forward = [r["forward_ms"] for r in rows]
    axes.barh(names, forward, label="forward", color="#33658a")
    rest = [r["train_ms"] - r["forward_ms"] for r in rows]
    axes.barh(names, rest, left=forward, label="backward", color="#86bbd8")
    if fla is not None:
        axes.axvline(fla, color="#444", linewidth=1, label="FLA fused_recurrent GDN forward")
        axes.axvline(4 * fla, color="#444", linewidth=1, linestyle=":", label="four times that")
    shape = found["shape"]
    axes.set_title(f"{found['gpu']}, B = {shape['B']}, T = {shape['T']}, a state rounded after every token")
    axes.set_xlabel("ms")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=150)
    return True
