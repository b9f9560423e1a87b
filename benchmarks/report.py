"""The gates on what was measured, and the printed table."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.measure import FXGRAD, PLAIN, CompileRecord, Interval, Record

SLACK = 0.03
TIME_TARGETS = {"TF-4": 1.2, "CNN-6": 2.0}  # against the plain step
COMPILE_TARGET = 1.5  # against the plain step's compile time
PASS_SHARE_TARGET = 0.1  # of the whole compile time

Compiles = dict[str, dict[str, list[CompileRecord]]]  # model -> plain or fxgrad -> repetitions


@dataclass(frozen=True)
class Gate:
    """One demand and whether it is met; None where it could not be measured."""

    model: str
    demand: str
    measured: str
    holds: bool | None


def find_gates(records: list[Record], compiles: Compiles) -> list[Gate]:
    """Every demand that the records can decide."""
    gates = []
    for record in records:
        gates += list(_own_gates(record) if record.peer == FXGRAD else _peer_gates(record))
    for model, runs in compiles.items():
        gates += list(_compile_gates(model, runs))
    return gates


def _own_gates(record: Record) -> Iterator[Gate]:
    """fxgrad's time against the plain step, and its peak memory."""
    if record.ratio is None:
        yield Gate(record.model, "fxgrad runs and is right", record.failed or "", False)
        return
    if target := TIME_TARGETS.get(record.model):
        holds = record.ratio.high <= target + SLACK if record.control_valid else None
        yield Gate(record.model, f"time <= {target} x plain", _show(record.ratio), holds)
    peak, allowed = record.peak_bytes[FXGRAD], record.allowed_bytes
    measured = f"{_mega(peak)} of {_mega(allowed)} MB"
    yield Gate(record.model, "peak <= plain + 1.1 B|P|", measured, peak <= allowed)


def _peer_gates(record: Record) -> Iterator[Gate]:
    """fxgrad against one peer, paired in the same rounds."""
    demand = f"no slower than {record.peer}"
    if record.failed:
        yield Gate(record.model, demand, "the peer failed", None)
    elif ratio := record.fxgrad_ratio:
        holds = ratio.high <= 1 + SLACK if record.control_valid else None
        yield Gate(record.model, demand, f"{_show(ratio)} x {record.peer}", holds)
    else:
        yield Gate(record.model, demand, record.fxgrad_failed or "", None)


def _compile_gates(model: str, runs: dict[str, list[CompileRecord]]) -> Iterator[Gate]:
    """Compile time against the plain step's, and the share of fxgrad's own passes."""
    if not any(runs.values()):
        return
    if not runs[PLAIN] or not runs[FXGRAD]:
        yield Gate(model, "compile time", "the step failed", None)
        return
    base = median(run.seconds for run in runs[PLAIN])
    ours = median(run.seconds for run in runs[FXGRAD])
    measured = f"{ours:.1f} s of {base:.1f} s: {ours / base:.2f}"
    demand = f"compile <= {COMPILE_TARGET} x plain"
    yield Gate(model, demand, measured, ours <= COMPILE_TARGET * base)
    shares = [r.pass_seconds / r.seconds for r in runs[FXGRAD] if r.pass_seconds is not None]
    share = median(shares) if shares else None
    holds = None if share is None else share <= PASS_SHARE_TARGET
    demand = f"passes <= {PASS_SHARE_TARGET:.0%} of compile"
    yield Gate(model, demand, "not told" if share is None else f"{share:.1%}", holds)


def format_table(records: list[Record]) -> str:
    """One line per model and peer."""
    rows: list[tuple[str, ...]] = [
        ("model", "peer", "ratio to plain", "A/A", "ms", "fxgrad/peer", "error", "peak MB")
    ]
    rows += [_row(record) for record in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    failures = [f"{r.model} {r.peer} FAILED: {r.failed}" for r in records if r.failed]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + failures)


def format_gates(gates: list[Gate]) -> str:
    """One line per demand: holds, MISSED, or unknown."""
    words = {True: "holds", False: "MISSED", None: "unknown"}
    return "\n".join(f"{words[g.holds]:8}{g.model}: {g.demand}: {g.measured}" for g in gates)


def _row(record: Record) -> tuple[str, ...]:
    if record.ratio is None or record.control is None:
        return (record.model, record.peer, "failed", "", "", "", "", "")
    control = f"{record.control.median:.3f}" + ("" if record.control_valid else " INVALID")
    against = _show(record.fxgrad_ratio) if record.fxgrad_ratio else ""
    milliseconds = [f"{record.milliseconds[name][1]:.1f}" for name in (record.peer, PLAIN)]
    peaks = [_mega(record.peak_bytes[name]) for name in (record.peer, PLAIN)]
    return (
        record.model,
        record.peer,
        _show(record.ratio),
        control,
        " / ".join(milliseconds),
        against,
        f"{record.error:.0e}",
        " / ".join(peaks),
    )


def _show(interval: Interval) -> str:
    return f"{interval.median:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _mega(count: int) -> str:
    return f"{count / 1e6:.0f}"
