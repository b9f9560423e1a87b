"""How fast this machine is: seven numbers, measured and kept, which decide between the strategies of `contractions`.

    mkl, onednn         flop/s of a product of large matrices, by PyTorch's own call (MKL, cuBLAS) and by oneDNN
    batched             flop/s of one product for each sample
    kernel              flop/s of the kernels that compute each sample's gradient, measured with products
    memory, cache       bytes/s of elementwise work on memory, and on what stays in the cache
    call                calls/s of an operator on next to nothing; on a GPU, launches of a kernel

The file lies in the user's cache folder (``$XDG_CACHE_HOME/fxgrad/machines.json``), with an entry for each device,
number of threads and version of PyTorch; what is not in it is measured. The machine may have been busy then, so later
processes measure again, up to `TIMES` in all, and the fastest counts. What other kernels of fxgrad's were measured with
counts no more (``kernels``). An entry without ``measured`` stays as the user wrote it. ``FXGRAD_MACHINE`` names another
file, or is ``reference``: then the numbers are `REFERENCE`'s, whatever machine this is, and a model is compiled in the
same way everywhere.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.kernels import product_kernel
from fxgrad.kernels.onednn import outer_products
from fxgrad.kernels.products import product_norms

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """Rates in float32, per second. float64 counts as half as fast."""

    mkl: float
    onednn: float
    batched: float
    kernel: float
    memory: float
    cache: float
    call: float
    name: str = ""
    gpu: bool = False

    @property
    def product(self) -> float:
        """Of a product of large matrices, by the faster library; on a busy machine small ones may seem faster."""
        return max(self.mkl, self.onednn, self.batched)

    def speed(self, work: str) -> float:
        """Return the speed of one kind of `Work`: a CPU takes no time to launch, and a GPU none to call."""
        if work == ("call" if self.gpu else "launch"):
            return math.inf
        return self.call if work == "launch" else float(getattr(self, work))

    def onednn_pays(self) -> bool:
        """Decide whether oneDNN saves more than the conversion of its operands costs."""
        return self.onednn > 1.15 * self.mkl


RATES = tuple(field.name for field in fields(Machine) if field.name not in ("name", "gpu"))

REFERENCE = Machine(
    mkl=55e9, onednn=90e9, batched=85e9, kernel=140e9, memory=16e9, cache=50e9, call=4e5, name="the reference machine"
)
"""One thread of a server's core of 2024 (AMD EPYC, AVX-512), rounded."""

VARIABLE = "FXGRAD_MACHINE"
_known: dict[tuple[str, str], Machine] = {}  # by file and entry
_pinned: list[Machine] = []


@contextlib.contextmanager
def pinned(machine: Machine) -> Iterator[None]:
    """Compile for this machine what is compiled in here."""
    _pinned.append(machine)
    try:
        yield
    finally:
        _pinned.remove(machine)


def machine_of(device: torch.device) -> Machine:
    """Return the machine that a device is part of: pinned, remembered, read, or measured and written."""
    if _pinned:
        return _pinned[-1]
    if os.environ.get(VARIABLE) == "reference" or device.type not in ("cpu", "cuda"):
        return REFERENCE
    path, entry = file(), entry_of(device)
    key = str(path), entry
    if key not in _known:
        _known[key] = _kept(path, entry, device)
    return _known[key]


def file() -> Path:
    """Return where machines are kept."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "fxgrad" / "machines.json"


def entry_of(device: torch.device) -> str:
    """Return what the numbers depend on: ``cpu x86_64, 2 threads, torch 2.13.0``."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"cpu {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


TIMES = 4  # that a machine is measured: what is compiled for it changes no more after that
APART = 3600.0  # seconds between two of them, at least


class Entry(NamedTuple):
    """What the file holds of one machine."""

    machine: Machine
    measured: Sequence[float]  # when, in seconds since 1970; none where the user wrote the numbers

    def may_be_slow(self) -> bool:
        """Return whether it is worth measuring again."""
        return 0 < len(self.measured) < TIMES and time.time() - self.measured[-1] > APART


def _kept(path: Path, entry: str, device: torch.device) -> Machine:
    """Return the machine of the file, after another measurement where one is due."""
    known = _read(path).get(entry)
    if known is not None and not known.may_be_slow():
        return known.machine
    return _measured(path, entry, device, known)


def remembered(device: torch.device) -> Entry | None:
    """Return what the file holds of a device's machine, without measuring; None if that is nothing."""
    return _read(file()).get(entry_of(device))


def measure_again(device: torch.device) -> None:
    """Measure a device's machine now, and keep the better of each speed; what the user wrote stays."""
    known = remembered(device)
    if known is None or known.measured:
        _measured(file(), entry_of(device), device, known)


def _measured(path: Path, entry: str, device: torch.device, known: Entry | None) -> Machine:
    """Measure, write the better of each speed, and return it."""
    start = time.perf_counter()
    machine = measure(device, name=entry)
    log.info("measured this machine in %.2f s, for %s", time.perf_counter() - start, path)
    if machine is REFERENCE:  # it could not be measured
        return known.machine if known is not None else machine
    measured = [*(known.measured if known is not None else ()), time.time()]
    machine = machine if known is None else _faster(machine, known.machine)
    _write(path, entry, Entry(machine, measured))
    return machine


def _faster(one: Machine, other: Machine) -> Machine:
    """Return the better of each speed."""
    return replace(one, **{rate: max(getattr(one, rate), getattr(other, rate)) for rate in RATES})


def _read(path: Path) -> dict[str, Entry]:
    """Return what the file holds; nothing where it cannot be read or is not ours."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {
            entry: Entry(
                Machine(**{rate: float(numbers[rate]) for rate in RATES}, name=entry, gpu=bool(numbers.get("gpu"))),
                [float(moment) for moment in numbers.get("measured", [])],
            )
            for entry, numbers in entries.items()
            if numbers.keys() >= set(RATES) and all(float(numbers[rate]) > 0 for rate in RATES)
            if not numbers.get("measured") or numbers.get("kernels") == _kernels()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@functools.lru_cache(maxsize=1)
def _kernels() -> str:
    """Return what tells the kernels that ``kernel`` is measured with from those of other versions."""
    return hashlib.sha256(product_kernel.KERNELS.text.encode()).hexdigest()[:16]


def _write(path: Path, name: str, entry: Entry) -> None:
    """Add an entry, or replace it; what cannot be written is measured again by the next process."""
    entries = {**_read(path), name: entry}
    own = {"kernels": _kernels()}
    numbers = {name: {**asdict(of.machine), "measured": of.measured, **own} for name, of in entries.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(numbers, stream, indent=1, sort_keys=True)
        os.replace(written, path)  # another process sees the old file or the new one, never half of it
    except OSError:
        pass


# Note [Measuring]
# ~~~~~~~~~~~~~~~~
# A first call compiles for seconds; this takes some tenths of one, on shapes of the size that layers have. What else
# runs on a machine only slows it down, so each is run in turn, for a few rounds, and its fastest counts. Nothing random
# is drawn, and no mode that is on (fake tensors, a flop counter, autocast) sees it.

ROUNDS = 12
ENOUGH = 0.3  # seconds, on a machine too busy for that many rounds


def measure(device: torch.device, name: str = "") -> Machine:
    """Return a machine's speeds; see Note [Measuring]. `REFERENCE`'s where it cannot be measured."""
    try:
        with disable_current_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
            rates = {what: float(f"{rate:.2g}") for what, rate in _rates(device).items()}
            return Machine(**rates, name=name, gpu=device.type == "cuda")
    except RuntimeError:  # no memory, no kernel
        return REFERENCE


Probe = tuple[Callable[[], object], int, float]  # what to run, how often, and what one run of it does


def _probes(device: torch.device) -> dict[str, Probe]:
    """Return what is run for each of a machine's speeds."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.float32, device=device)

    if device.type == "cuda":
        return _probes_of_gpu(ones)
    long, g, wide = ones(1024, 512), ones(16, 64, 256), ones(8, 256, 256)
    column, row, vector, number = ones(24, 512, 1), ones(24, 1, 512), ones(1 << 15), ones(1)
    held = torch.empty((24, 512, 512), device=device)
    doubled, same = torch.empty_like(vector), torch.empty_like(number)

    def gradients() -> Tensor:
        """Memory that is there, written and read once."""
        return torch.mul(column, row, out=held).sum()

    return {
        "mkl": (lambda: long.mT @ long, 1, 2 * 512 * 512 * 1024),
        "onednn": (lambda: outer_products(long, long), 1, 2 * 512 * 512 * 1024),
        "batched": (lambda: g.mT @ g, 2, 2 * 16 * 64 * 256 * 256),
        "kernel": (lambda: product_norms(wide, wide, False), 1, 2 * 8 * 256 * 256 * 256),
        "memory": (gradients, 1, 2 * 4 * 24 * 512 * 512),
        "cache": (lambda: torch.mul(vector, 2, out=doubled), 50, 2 * 4 * (1 << 15)),
        "call": (lambda: torch.mul(number, 2, out=same), 100, 1),
    }


def _probes_of_gpu(ones: Callable[..., Tensor]) -> dict[str, Probe]:
    """Return the same for a GPU: larger, as a launch takes longer than such shapes, and without kernels of our own."""
    long, g, wide = ones(8192, 2048), ones(64, 256, 1024), ones(64, 1, 1024)
    vector, number, held = ones(1 << 22), ones(1), ones(64, 1024, 1024)
    doubled, same = torch.empty_like(vector), torch.empty_like(number)
    product: Probe = (lambda: long.mT @ long, 1, 2 * 2048 * 2048 * 8192)
    batched: Probe = (lambda: g.mT @ g, 1, 2 * 64 * 256 * 1024 * 1024)
    return {
        "mkl": product,
        "onednn": product,
        "batched": batched,
        "kernel": batched,
        "memory": (lambda: torch.mul(wide.mT, wide, out=held).sum(), 1, 2 * 4 * 64 * 1024 * 1024),
        "cache": (lambda: torch.mul(vector, 2, out=doubled), 10, 2 * 4 * (1 << 22)),
        "call": (lambda: torch.mul(number, 2, out=same), 100, 1),
    }


def _rates(device: torch.device) -> dict[str, float]:
    probes = _probes(device)
    for run, times, _ in probes.values():  # a warm-up, which loads kernels and takes memory
        _seconds(run, times, device)
    best = dict.fromkeys(probes, 0.0)
    start = time.perf_counter()
    for round_ in range(ROUNDS):
        for what, (run, times, done) in probes.items():
            best[what] = max(best[what], times * done / _seconds(run, times, device))
        if round_ and time.perf_counter() - start > ENOUGH:
            break
    return best


def _seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
