"""The figures of docs/performance.md: one small JSON file per machine in benchmarks/results/.

A file that `python -m benchmarks --json` writes has every quartile of every run. `keep` takes from it what the page
shows, and puts it in the place of the machine's older figures.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.results import FXGRAD, PLAIN, STEP, Interval, Record, Results

FOLDER = Path(__file__).parent / "results"
QUANTITIES = ("C", "N", "G")
WHOLE = "S"  # C by `forward_backward`, which runs the whole step as one graph
VALID = (0.97, 1.03)  # the range of an A/A control


@dataclass(frozen=True)
class Ratio:
    """fxgrad's time / the plain step's: median, 95 % interval, and the A/A control where it is known."""

    ratio: float
    low: float
    high: float
    control: float | None = None

    @property
    def valid(self) -> bool:
        return self.control is None or VALID[0] < self.control < VALID[1]


@dataclass(frozen=True)
class Figures:
    """What was measured of one model on one machine."""

    model: str
    plain_ms: float
    plain: str = "compiled"  # or "eager": the faster one
    C: Ratio | None = None
    N: Ratio | None = None
    G: Ratio | None = None
    S: Ratio | None = None  # C by `forward_backward`
    peak_C: float | None = None  # of the plain step's
    peak_S: float | None = None
    target_C: float | None = None
    peak_G_mb: int | None = None
    allowed_G_mb: int | None = None  # plain + 1.1 B|P|
    counted_C: float | None = None  # in the mean, where the plain step itself takes one of two times

    def of(self, quantity: str) -> Ratio | None:
        ratio: Ratio | None = getattr(self, quantity)
        return ratio


@dataclass(frozen=True)
class Compile:
    """Seconds of a first step, in fresh processes without caches."""

    model: str
    quantity: str
    plain_s: float
    fxgrad_s: float
    passes_s: float


@dataclass
class Kept:
    """The figures of one machine, with where they come from."""

    machine: str
    torch: str
    source: str
    rates: dict[str, float] = field(default_factory=dict)
    models: list[Figures] = field(default_factory=list)
    compile: list[Compile] = field(default_factory=list)
    peers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # quantity: model, and ratios by peer

    def mean(self, quantity: str) -> float | None:
        """Return the geometric mean over the models, the single layers of c14 left out."""
        known = self._counted(quantity)
        return geometric_mean(known) if known else None

    def counts(self) -> dict[str, int]:
        """Return the number of models in the mean of each quantity."""
        return {quantity: len(self._counted(quantity)) for quantity in (WHOLE, *QUANTITIES)}

    def _counted(self, quantity: str) -> list[float]:
        return [_counted(m, quantity) for m in self.models if m.of(quantity) and not m.model.startswith("c14")]


def _counted(figures: Figures, quantity: str) -> float:
    ratio = figures.of(quantity)
    assert ratio is not None
    return figures.counted_C if quantity == "C" and figures.counted_C else ratio.ratio


def read(name: str) -> Kept:
    """Read ``benchmarks/results/name.json``."""
    entries = json.loads((FOLDER / f"{name}.json").read_text())
    models = [_figures(entry) for entry in entries.pop("models")]
    compiled = [Compile(**entry) for entry in entries.pop("compile")]
    return Kept(**entries, models=models, compile=compiled)


def _figures(entry: dict[str, Any]) -> Figures:
    ratios = {quantity: Ratio(**entry[quantity]) for quantity in (WHOLE, *QUANTITIES) if quantity in entry}
    return Figures(**{**entry, **ratios})


def write(name: str, kept: Kept) -> None:
    """Write the file with one line per model, so that changes are easy to read."""
    (FOLDER / f"{name}.json").write_text(_lines(_without_none(asdict(kept))) + "\n")


def _lines(value: Any, indent: str = "") -> str:
    inner = indent + " "
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(inner + json.dumps(each) for each in value) + f"\n{indent}]"
    if isinstance(value, dict) and any(isinstance(each, list) for each in value.values()):
        parts = [f"{inner}{json.dumps(key)}: {_lines(each, inner)}" for key, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return json.dumps(value)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def keep(name: str, results: Results, source: str) -> None:
    """Put new figures in the place of a machine's older ones; the targets stay."""
    new = summarise(results, source)
    older = read(name).models if (FOLDER / f"{name}.json").exists() else []
    targets = {figures.model: figures.target_C for figures in older}
    new.models = [replace(figures, target_C=targets.get(figures.model)) for figures in new.models]
    write(name, new)


def summarise(results: Results, source: str) -> Kept:
    """Return what the page shows of a file that ``--json`` wrote."""
    timed = (record for record in results.records if record.ratio is not None)
    own = [one for one in timed if one.peer == FXGRAD or (one.peer, one.quantity) == (STEP, "C")]
    models = [_summary([r for r in own if r.model == model]) for model in dict.fromkeys(r.model for r in own)]
    kept = Kept(str(results.machine.get("device")), str(results.machine.get("torch")), source, models=models)
    if results.rates is not None:
        kept.rates = {
            "matmul_gflops": round(results.rates.flops_per_second / 1e9),
            "stored_gb": round(results.rates.stored_bytes_per_second / 1e9),
        }
    for record in results.records:
        if record.peer not in (FXGRAD, STEP) and (record.failed or record.fxgrad_ratio):
            _keep_peer(kept.peers.setdefault(record.quantity, []), record, record.fxgrad_ratio)
            if record.quantity == "C":
                _keep_peer(kept.peers.setdefault(WHOLE, []), record, record.step_ratio)
    kept.compile = _compiled(results)
    return kept


def _keep_peer(rows: list[dict[str, Any]], record: Record, ratio: Interval | None) -> None:
    row = next((row for row in rows if row["model"] == record.model), None)
    if row is None:
        rows.append(row := {"model": record.model})
    row[record.peer] = "failed" if record.failed else round(_median(ratio), 3)


def _median(interval: Interval | None) -> float:
    assert interval is not None
    return interval.median


def _summary(records: list[Record]) -> Figures:
    by = {WHOLE if record.peer == STEP else record.quantity: record for record in records}
    entry: dict[str, Any] = {quantity: _ratio(record) for quantity, record in by.items()}
    for quantity in ("C", WHOLE):
        record = by.get(quantity)
        if record is not None and record.peak_bytes:
            entry[f"peak_{quantity}"] = round(record.peak_bytes[record.peer] / record.peak_bytes[PLAIN], 2)
    if "G" in by and by["G"].peak_bytes:
        entry["peak_G_mb"] = round(by["G"].peak_bytes[FXGRAD] / 1e6)
        entry["allowed_G_mb"] = round(by["G"].allowed_bytes / 1e6)
    return Figures(records[0].model, round(records[0].milliseconds[PLAIN][1], 3), records[0].plain, **entry)


def _ratio(record: Record) -> Ratio:
    assert record.ratio is not None
    ratio, low, high = (round(each, 3) for each in (record.ratio.median, record.ratio.low, record.ratio.high))
    return Ratio(ratio, low, high, round(record.control.median, 3) if record.control else None)


def _compiled(results: Results) -> list[Compile]:
    compiled = []
    for model, quantity in dict.fromkeys((run.model, run.quantity) for run in results.compiles if run.peer == FXGRAD):
        plain = [run.seconds for run in results.compiles if (run.model, run.peer) == (model, PLAIN)]
        runs = [r for r in results.compiles if (r.model, r.peer, r.quantity) == (model, FXGRAD, quantity)]
        if plain:
            own, passes = median(run.seconds for run in runs), median(run.pass_seconds or 0.0 for run in runs)
            compiled.append(Compile(model, quantity, round(median(plain), 2), round(own, 2), round(passes, 2)))
    return compiled
