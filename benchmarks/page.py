"""Write docs/performance.md: the text of benchmarks/page.md with tables of the kept figures.

python -m benchmarks report            # writes docs/performance.md and docs/ratios.png
python -m benchmarks keep results.json intel --source "fxgrad 0.1, 100 rounds, nothing else on the machine"
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import kept
from benchmarks.kept import QUANTITIES, WHOLE, Figures, Kept, Ratio
from benchmarks.results import load

ROOT = Path(__file__).parents[1]
TEMPLATE = Path(__file__).with_name("page.md")
PAGE, PLOT = ROOT / "docs" / "performance.md", ROOT / "docs" / "ratios.png"
MACHINES = ("intel", "amd")
RATES = {
    "matmul_gflops": "GFLOP/s in matrix products",
    "stored_gb": "GB/s stored",
    "streamed_gb": "GB/s past the cache",
}
NOTICE = "<!-- Written by `python -m benchmarks report`: change benchmarks/page.md and benchmarks/results/. -->\n\n"


def text() -> str:
    """Return the page."""
    return NOTICE + re.sub(r"\{\{(\w+) (\w+)(?: (\w+))?\}\}", _filled, TEMPLATE.read_text())


def _filled(place: re.Match[str]) -> str:
    what, name, *rest = (group for group in place.groups() if group)
    return BLOCKS[what](kept.read(name), *rest)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def models(machine: Kept) -> str:
    """Return the table of one machine, with the geometric means as its last row."""
    names = {q: f"{q} / plain" for q in QUANTITIES}
    peaks = {"peak_C": "peak of C / plain"}
    if any(figures.S for figures in machine.models):
        names = {WHOLE: "C in one graph / plain"} | names
    if any(figures.peak_S for figures in machine.models):
        peaks["peak_S"] = "peak of C in one graph / plain"
    header = ["model", "plain, ms", *names.values(), "target of C", *peaks.values()]
    rows = [_model(figures, list(names), peaks) for figures in machine.models]
    counts = machine.counts()
    means = [f"{mean:.2f} of {counts[q]}" if (mean := machine.mean(q)) else "" for q in names]
    rows.append(["geometric mean without c14", "", *means, "", *[""] * len(peaks), ""])
    return table([*header, "peak of G, MB (allowed)"], rows)


def _model(figures: Figures, quantities: Iterable[str], peaks: Iterable[str]) -> list[str]:
    peak = f"{figures.peak_G_mb} ({figures.allowed_G_mb})" if figures.peak_G_mb is not None else ""
    shown = {quantity: _ratio(figures.of(quantity)) for quantity in quantities}
    if figures.counted_C:
        shown["C"] += f"; counted as {figures.counted_C}"
    target = f"{figures.target_C:g}" if figures.target_C else ""
    shares = [f"{share:.2f}" if (share := getattr(figures, peak)) else "" for peak in peaks]
    plain = f"{figures.plain_ms:.3g}" + (" (eager)" if figures.plain == "eager" else "")
    return [figures.model, plain, *shown.values(), target, *shares, peak]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    shown = f"{ratio.ratio:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    return shown if ratio.valid else f"{shown} (A/A {ratio.control:.2f})"


def peers(machine: Kept, quantity: str) -> str:
    """Return the ratios of fxgrad's time to each peer's, for one quantity."""
    rows = machine.peers[quantity]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "model"))
    return table(["model", *names], [[row["model"], *[_share(row.get(name)) for name in names]] for row in rows])


def _share(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def compiles(machine: Kept) -> str:
    """Return the table of compile times."""
    rows = [
        [c.model, c.quantity, f"{c.plain_s:g}", f"{c.fxgrad_s:g}", f"{c.fxgrad_s / c.plain_s:.2f}", f"{c.passes_s:g}"]
        for c in machine.compile
    ]
    return table(["model", "quantity", "plain, s", "fxgrad, s", "ratio", "of it the passes, s"], rows)


def about(machine: Kept) -> str:
    """Return a machine's name, speeds and the source of its figures."""
    rates = [[name, f"{machine.rates[key]:g}"] for key, name in RATES.items() if key in machine.rates]
    facts = [["machine", machine.machine], ["torch", machine.torch], *rates]
    return table(["", ""], facts) + "\n\n" + machine.source


BLOCKS: dict[str, Callable[..., str]] = {"models": models, "peers": peers, "compiles": compiles, "about": about}


def draw(path: Path) -> None:
    """Draw C, N and G of every model on every machine, as ratios to the plain step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    machines = [kept.read(name) for name in MACHINES]
    names = list(dict.fromkeys(figures.model for machine in machines for figures in machine.models))
    figure, axes = pyplot.subplots(1, len(QUANTITIES), figsize=(12, 2 + 0.25 * len(names)), sharey=True)
    for axis, quantity in zip(axes, QUANTITIES, strict=True):
        for number, machine in enumerate(machines):
            shown = [(names.index(m.model) + 0.3 * number, r) for m in machine.models if (r := m.of(quantity))]
            medians = [ratio.ratio for _, ratio in shown]
            ends = ([r.ratio - r.low for _, r in shown], [r.high - r.ratio for _, r in shown])
            places = [place for place, _ in shown]
            label = machine.machine.split(",")[0]
            axis.errorbar(medians, places, xerr=ends, fmt="Ds"[number], markersize=4, label=label)
        axis.set_title(f"{quantity}: time / plain step")
        axis.axvline(1, color="grey", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xticks(shown_ticks := [0.5, 1, 2, 5, 10], [f"{tick:g}" for tick in shown_ticks])
        axis.minorticks_off()
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="x", which="both", linewidth=0.3)
    axes[1].legend(loc="lower left", fontsize="small")  # where the single layers of c14 have no figures
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main(arguments: list[str]) -> None:
    """Run ``report`` or ``keep``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("report", help="write docs/performance.md and its plot")
    keep = commands.add_parser("keep", help="take a machine's figures from a file of --json")
    keep.add_argument("json", type=Path)
    keep.add_argument("name", help="of the file in benchmarks/results, without .json")
    keep.add_argument("--source", required=True, help="version, rounds, and what else ran")
    chosen = parser.parse_args(arguments)
    if chosen.command == "keep":
        kept.keep(chosen.name, load(chosen.json), chosen.source)
    else:
        PAGE.write_text(text())
        draw(PLOT)
