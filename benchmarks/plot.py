"""The ratios to the plain step as a picture: one panel per quantity."""

import importlib
from pathlib import Path
from typing import Any

from benchmarks.results import FXGRAD, Record, Results


def draw(results: Results, path: Path) -> None:
    """Every peer's ratio by model, on a logarithmic scale, with its interval and the roofline."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    timed = [record for record in results.records if record.ratio is not None]
    quantities = list(dict.fromkeys(record.quantity for record in timed)) or ["G"]
    models = list(dict.fromkeys(record.model for record in results.records))
    peers = list(dict.fromkeys(record.peer for record in results.records))
    size = (3 + 4 * len(quantities), 2 + 0.35 * len(models))
    figure, axes = pyplot.subplots(1, len(quantities), figsize=size, sharey=True, squeeze=False)
    for axis, quantity in zip(axes[0], quantities, strict=True):
        _panel(axis, [record for record in timed if record.quantity == quantity], models, peers)
        axis.set_title(f"{quantity}: time / plain step")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axis: Any, records: list[Record], models: list[str], peers: list[str]) -> None:
    for number, peer in enumerate(peers):
        shown = [(models.index(r.model), r.ratio) for r in records if r.peer == peer]
        points = [(place, ratio) for place, ratio in shown if ratio is not None]
        medians = [ratio.median for _, ratio in points]
        below = [ratio.median - ratio.low for _, ratio in points]
        above = [ratio.high - ratio.median for _, ratio in points]
        places = [place + 0.6 * ((number + 0.5) / len(peers) - 0.5) for place, _ in points]
        marker, color = ("D", "black") if peer == FXGRAD else ("os^"[number // 10], f"C{number % 10}")
        axis.errorbar(medians, places, xerr=(below, above), fmt=marker, color=color, markersize=4, label=peer)
    floors = {models.index(r.model): r.floor for r in records if r.floor and r.peer == FXGRAD}
    axis.plot(list(floors.values()), list(floors), "|", color="red", markersize=12, label="roofline")
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yticks(range(len(models)), models)
    axis.set_ylim(len(models) - 0.5, -0.5)
    axis.grid(axis="x", which="both", linewidth=0.3)
