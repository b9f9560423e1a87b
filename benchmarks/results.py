"""What was measured, as records that are kept in a JSON file."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MODELS
from benchmarks.peers import PEERS
from benchmarks.roofline import Rates
from benchmarks.tasks import QUANTITIES

# The plain step is the faster one of eager and compiled. It runs twice in each round; the second against the first is
# the A/A control.
PLAIN, CONTROL, FXGRAD = "plain", "plain again", "fxgrad"
STEP = "forward_backward"  # fxgrad's whole step as one graph
CONTROL_RANGE = (0.97, 1.03)


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Record:
    """What was measured of one peer on one model for one quantity, or why it failed."""

    model: str
    peer: str
    quantity: str
    failed: str | None = None
    rounds: int = 0  # 0: only checked
    plain: str = "compiled"  # or "eager": the faster one, which the ratios are over
    milliseconds: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # quartiles
    ratio: Interval | None = None  # peer / plain
    control: Interval | None = None  # plain / plain
    fxgrad_ratio: Interval | None = None  # fxgrad / peer, paired in the same rounds
    step_ratio: Interval | None = None  # fxgrad's whole step as one graph / peer, in the same rounds
    fxgrad_failed: str | None = None
    error: float | None = None  # largest difference from the loop over samples
    peak_bytes: dict[str, int] = field(default_factory=dict)
    allowed_bytes: int = 0
    first_step_seconds: float = 0.0  # with whatever the compiler's caches held
    graphs: int = 0  # that torch.compile made for the peer
    floor: float | None = None  # the roofline's ratio to the plain step

    @property
    def control_valid(self) -> bool:
        """Whether the plain step took as long as itself: else this machine was too noisy."""
        low, high = CONTROL_RANGE
        return self.control is not None and low <= self.control.median <= high


@dataclass(frozen=True)
class CompileRecord:
    """The first step of a fresh process: its seconds, fxgrad's share and the number of graphs."""

    model: str
    peer: str
    quantity: str
    seconds: float
    pass_seconds: float | None
    graphs: int


@dataclass
class Results:
    """Everything measured, with what it was measured on."""

    machine: dict[str, Any] = field(default_factory=dict)
    rates: Rates | None = None
    records: list[Record] = field(default_factory=list)
    compiles: list[CompileRecord] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Keep this one, in place of an older one, in the suite's order."""
        kept = {(r.model, r.peer, r.quantity): r for r in [*self.records, record]}
        self.records = sorted(kept.values(), key=_place)

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def load(path: Path | None) -> Results:
    """What an earlier run left in this file; nothing where there is none."""
    if path is None or not path.exists():
        return Results(describe_machine())
    kept = json.loads(path.read_text())
    return Results(
        kept["machine"],
        Rates(**kept["rates"]) if kept["rates"] else None,
        [_record(entry) for entry in kept["records"]],
        [CompileRecord(**entry) for entry in kept["compiles"]],
    )


def describe_machine() -> dict[str, Any]:
    """Versions, threads and the device."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
    }


def _processor() -> str:
    """The CPU's name where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _place(record: Record) -> tuple[int, ...]:
    """By model, then by peer, then by quantity; what the suite does not have comes first."""
    orders: list[list[str]] = [list(MODELS), list(PEERS), list(QUANTITIES)]
    names = (record.model, record.peer, record.quantity)
    return tuple(order.index(name) if name in order else -1 for order, name in zip(orders, names, strict=True))


def _record(entry: dict[str, Any]) -> Record:
    for name in ("ratio", "control", "fxgrad_ratio", "step_ratio"):
        if entry.get(name) is not None:
            entry[name] = Interval(**entry[name])
    entry["milliseconds"] = {name: tuple(values) for name, values in entry["milliseconds"].items()}
    return Record(**entry)
