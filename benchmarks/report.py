"""The gates on what was measured, and the tables."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import geometric_mean, median

from benchmarks.results import FXGRAD, PLAIN, STEP, CompileRecord, Interval, Record, Results

SLACK = 0.03
TIME_TARGETS = {("TF-4", "G"): 1.2, ("CNN-6", "G"): 2.0}  # against the plain step
COMPILE_TARGET = 1.5  # against the plain step's compile time
PASS_SHARE_TARGET = 0.1  # of the whole compile time


@dataclass(frozen=True)
class Gate:
    """One demand and whether it is met; None where it could not be measured."""

    model: str
    demand: str
    measured: str
    holds: bool | None


def find_gates(results: Results) -> list[Gate]:
    """Every demand that the records can decide."""
    gates: list[Gate] = []
    for record in (one for one in results.records if one.peer != STEP):
        gates += list(_own_gates(record) if record.peer == FXGRAD else _peer_gates(record))
    for model, quantity in dict.fromkeys((run.model, run.quantity) for run in results.compiles if run.peer == FXGRAD):
        gates += list(_compile_gates(model, quantity, results.compiles))
    return gates


def _own_gates(record: Record) -> Iterator[Gate]:
    """fxgrad's time against the plain step, and its peak memory."""
    if record.ratio is None:
        right = f"fxgrad runs and is right, {record.quantity}"
        yield Gate(record.model, right, record.failed or "", record.failed is None)
        return
    if target := TIME_TARGETS.get((record.model, record.quantity)):
        holds = record.ratio.high <= target + SLACK if record.control_valid else None
        yield Gate(record.model, f"{record.quantity} <= {target} x plain", show(record.ratio), holds)
    if record.quantity == "G":
        peak, allowed = record.peak_bytes[FXGRAD], record.allowed_bytes
        measured = f"{_mega(peak)} of {_mega(allowed)} MB"
        yield Gate(record.model, "peak <= plain + 1.1 B|P|", measured, peak <= allowed)


def _peer_gates(record: Record) -> Iterator[Gate]:
    """fxgrad against one peer, paired in the same rounds."""
    if record.rounds == 0 and record.failed is None:
        return
    demand = f"{record.quantity} no slower than {record.peer}"
    if record.failed:
        yield Gate(record.model, demand, "the peer failed", None)
    elif ratio := record.fxgrad_ratio:
        holds = ratio.high <= 1 + SLACK if record.control_valid else None
        yield Gate(record.model, demand, f"{show(ratio)} x {record.peer}", holds)
    else:
        yield Gate(record.model, demand, record.fxgrad_failed or "", None)


def _compile_gates(model: str, quantity: str, compiles: list[CompileRecord]) -> Iterator[Gate]:
    """Compile time against the plain step's, and the share of fxgrad's own passes."""
    plain = [run.seconds for run in compiles if (run.model, run.peer) == (model, PLAIN)]
    runs = [run for run in compiles if (run.model, run.peer, run.quantity) == (model, FXGRAD, quantity)]
    if not plain:
        yield Gate(model, "compile time", "the plain step failed", None)
        return
    base, own = median(plain), median(run.seconds for run in runs)
    measured = f"{own:.1f} s of {base:.1f} s: {own / base:.2f}"
    yield Gate(model, f"{quantity} compiles <= {COMPILE_TARGET} x plain", measured, own <= COMPILE_TARGET * base)
    shares = [run.pass_seconds / run.seconds for run in runs if run.pass_seconds is not None]
    share = median(shares) if shares else None
    holds = None if share is None else share <= PASS_SHARE_TARGET
    demand = f"{quantity} passes <= {PASS_SHARE_TARGET:.0%} of compile"
    yield Gate(model, demand, "not told" if share is None else f"{share:.1%}", holds)


HEADER = "model,peer,quantity,ratio to plain,A/A,ms,fxgrad/peer,error,peak MB,first step s,graphs,floor".split(",")


def format_table(records: list[Record]) -> str:
    """One line per model, peer and quantity; then the errors of those that failed."""
    rows = [tuple(HEADER), *map(_row, records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    failures = [format_line(record) for record in records if record.failed]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + failures)


def format_line(record: Record) -> str:
    """One record, in a word or two."""
    name = f"{record.model} {record.peer} {record.quantity}"
    if record.failed:
        return f"{name} FAILED: {record.failed}"
    return f"{name} {show(record.ratio) if record.ratio else 'is right'}"


def format_gates(gates: list[Gate]) -> str:
    """One line per demand: holds, MISSED, or unknown."""
    words = {True: "holds", False: "MISSED", None: "unknown"}
    return "\n".join(f"{words[g.holds]:8}{g.model}: {g.demand}: {g.measured}" for g in gates)


def format_rates(results: Results) -> str:
    """What the roofline was made of."""
    if results.rates is None:
        return "no rates measured"
    flops, stored = results.rates.flops_per_second, results.rates.stored_bytes_per_second
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    return f"matmul {flops / 1e9:.0f} Gflop/s, stores {stored / 1e9:.1f} GB/s; {machine}"


def format_markdown(results: Results) -> str:
    """For each quantity a table: fxgrad's ratio, roofline and memory, and each peer's ratio to plain."""
    parts = [format_rates(results), ""]
    for quantity in dict.fromkeys(record.quantity for record in results.records):
        records = [record for record in results.records if record.quantity == quantity]
        parts += [f"## {quantity}", "", *_markdown_table(records), ""]
    return "\n".join(parts)


def _markdown_table(records: list[Record]) -> Iterator[str]:
    peers = list(dict.fromkeys(record.peer for record in records))
    found = {(record.model, record.peer): record for record in records}
    models = list(dict.fromkeys(record.model for record in records))
    header = ["model", "plain ms", *peers, "floor", "fxgrad's peak, MB (plain)"]
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for model in models:
        own = found.get((model, FXGRAD))
        timed = next((found[model, p] for p in peers if (model, p) in found and found[model, p].ratio), None)
        cells = [model, f"{timed.milliseconds[PLAIN][1]:.1f}" if timed else ""]
        cells += [_cell(found.get((model, peer))) for peer in peers]
        cells.append(f"{own.floor:.2f}" if own and own.floor else "")
        peaks = own.peak_bytes if own else {}
        cells.append(f"{_mega(peaks[FXGRAD])} ({_mega(peaks[PLAIN])})" if peaks else "")
        yield f"| {' | '.join(cells)} |"
    means = [_mean([found[m, peer].ratio for m in models if (m, peer) in found]) for peer in peers]
    yield f"| {' | '.join(['geometric mean', '', *means, '', ''])} |"


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    if record.failed:
        return "failed"
    if record.ratio is None:
        return "right"
    return show(record.ratio) + ("" if record.control_valid else " (A/A invalid)")


def _mean(ratios: list[Interval | None]) -> str:
    known = [ratio.median for ratio in ratios if ratio is not None]
    return f"{geometric_mean(known):.2f} of {len(known)}" if known else ""


def _row(record: Record) -> tuple[str, ...]:
    error = "" if record.error is None else f"{record.error:.0e}"
    first = (record.model, record.peer, record.quantity)
    compiled = (f"{record.first_step_seconds:.1f}", str(record.graphs))
    if record.failed:
        return (*first, "failed", *[""] * (len(HEADER) - 4))
    if record.ratio is None or record.control is None:
        return (*first, "", "", "", "", error, "", *compiled, "")
    control = f"{record.control.median:.3f}" + ("" if record.control_valid else " INVALID")
    milliseconds = [f"{record.milliseconds[name][1]:.1f}" for name in (record.peer, PLAIN)]
    return (
        *first,
        show(record.ratio),
        control,
        " / ".join(milliseconds),
        show(record.fxgrad_ratio) if record.fxgrad_ratio else "",
        error,
        " / ".join(_mega(record.peak_bytes[name]) for name in (record.peer, PLAIN)),
        *compiled,
        f"{record.floor:.2f}" if record.floor else "",
    )


def show(interval: Interval) -> str:
    return f"{interval.median:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _mega(count: int) -> str:
    return f"{count / 1e6:.0f}"
