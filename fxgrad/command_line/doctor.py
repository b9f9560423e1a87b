"""``doctor``: a look at everything that fxgrad needs, with advice on what is wrong."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from fxgrad.capture.progress import AFTER
from fxgrad.costs.machines import RATES, VARIABLE, Machine, file, measure_again, remembered
from fxgrad.host.inductor import cache_folder, find_compiler
from fxgrad.host.versions import at_least
from fxgrad.kernels import gram_kernel, many_squares, product_kernel, tables, window_gram_kernel, window_kernel
from fxgrad.kernels.recurrent import lstm_kernel

OLDEST_TORCH = "2.11"
OPACUS = "1.6", "1.7"  # from, and before
_ROOMS = product_kernel, gram_kernel, window_kernel, window_gram_kernel, tables, many_squares, lstm_kernel
KERNELS = [room.KERNELS for room in _ROOMS]
INSTALL = "Install a C++ compiler, such as g++, or name one in the environment variable CXX."


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: such as ``torch``.
        value: what there is.
        fault: what is wrong; empty if nothing is.
        advice: what to do about it.
    """

    subject: str
    value: str
    fault: str = ""
    advice: str = ""


def examine(version: str, measure: bool = False) -> list[Finding]:
    """Look at everything; ``measure`` the speed of the machine anew."""
    if measure:
        for device in _devices():
            measure_again(device)
    return [
        Finding("fxgrad", f"{version}, {Path(__file__).parents[1]}"),
        *_packages(),
        *_compiler_and_kernels(),
        *_caches(),
        *map(_speeds, _devices()),
        *_hardware(),
        _terminal(),
    ]


def report(findings: Sequence[Finding]) -> str:
    """Return the lines of the findings, and the faults with advice behind them."""
    width = max(len(finding.subject) for finding in findings)
    lines = [f"{finding.subject:{width}}  {finding.value}" for finding in findings]
    faults = [finding for finding in findings if finding.fault]
    for finding in faults:
        lines += ["", f"wrong: {finding.fault}", f"  {finding.advice}"]
    return "\n".join(lines if faults else [*lines, "", "Nothing is wrong."])


def _packages() -> Iterator[Finding]:
    old = not at_least(OLDEST_TORCH)
    fault = f"fxgrad needs torch {OLDEST_TORCH} or later, and this is {torch.__version__}" if old else ""
    yield Finding("torch", str(torch.__version__), fault, f'pip install "torch>={OLDEST_TORCH}"')
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("sympy", importlib.metadata.version("sympy"))
    try:
        opacus = importlib.metadata.version("opacus")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("opacus", 'not installed; fxgrad.opacus needs it: pip install "fxgrad[opacus]"')
        return
    fits = OPACUS[0] <= TorchVersion(opacus) < OPACUS[1]
    fault = "" if fits else f"fxgrad.opacus needs opacus {OPACUS[0]}, and this is {opacus}"
    yield Finding("opacus", opacus, fault, f'pip install "opacus>={OPACUS[0]},<{OPACUS[1]}"')


def _compiler_and_kernels() -> Iterator[Finding]:
    """Compile the kernels, unless they are in Inductor's cache: each on a thread of its own."""
    try:
        compiler = find_compiler()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        fault = f'without a C++ compiler backend="inductor", the default, fails on CPU: {said}'
        yield Finding("C++ compiler", "none", fault, f'{INSTALL} backend="aot_eager" works without.')
        yield Finding("kernels", "off: no C++ compiler; PyTorch's ops compute the same, and take longer")
        return
    yield Finding("C++ compiler", f"{compiler}: {_first_line(compiler)}")
    like = {library: torch.empty(0, dtype=library.dtypes[0], device="cpu") for library in KERNELS}
    for library in KERNELS:
        library.start(like[library])
    off = {library.computes: reason for library in KERNELS if (reason := library.why_off())}
    if off:
        names, reason = ", ".join(off), next(iter(off.values()))
        yield Finding(
            "kernels", f"off for {names}", f"the kernels in C++ for {names} do not compile: {reason}", INSTALL
        )
    else:
        yield Finding("kernels", f"on: {', '.join(library.computes for library in KERNELS)}")


def _first_line(compiler: str) -> str:
    """Return what a compiler says of its version."""
    run = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    return (run.stdout.splitlines() or [""])[0]


def _caches() -> Iterator[Finding]:
    try:
        inductor = Path(cache_folder())
    except OSError as error:
        inductor = Path(error.filename)
    yield _cache("Inductor's cache", inductor, "nothing compiles", "TORCHINDUCTOR_CACHE_DIR")
    if os.environ.get(VARIABLE) != "reference":
        variable = VARIABLE if os.environ.get(VARIABLE) else "XDG_CACHE_HOME"
        yield _cache("fxgrad's cache", file().parent, "each process measures the machine anew", variable)


def _cache(subject: str, folder: Path, consequence: str, variable: str) -> Finding:
    if _is_writable(folder):
        return Finding(subject, f"{folder}, writable")
    return Finding(
        subject,
        f"{folder}, not writable",
        f"{folder} cannot be written, so {consequence}",
        f"Name another place in the environment variable {variable}.",
    )


def _is_writable(folder: Path) -> bool:
    """Return whether files can be made in a folder, which may not exist yet; this makes nothing."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _devices() -> list[torch.device]:
    """Return the devices whose speed decides about strategies: one of each kind of GPU."""
    names = {torch.cuda.get_device_name(index): index for index in reversed(range(torch.cuda.device_count()))}
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in sorted(names.values()))]


def _speeds(device: torch.device) -> Finding:
    """Report the speeds that the cost model uses for a device."""
    subject = f"speed of {device.type}"
    if os.environ.get(VARIABLE) == "reference":
        return Finding(subject, f"of the reference machine, whatever this one is ({VARIABLE}=reference)")
    entry = remembered(device)
    if entry is None:
        return Finding(subject, "not measured yet; the first model with norms or clipping does it, or --measure")
    if not entry.measured:
        return Finding(subject, f"{_rates(entry.machine)} (written by hand in {file()})")
    last = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.measured[-1]))
    return Finding(subject, f"{_rates(entry.machine)} (measured {len(entry.measured)}x, last on {last})")


def _rates(machine: Machine) -> str:
    """``mkl 55 Gflop/s, .., memory 16 GB/s, .., call 400 k/s``."""
    units = {"memory": (1e9, "GB/s"), "cache": (1e9, "GB/s"), "call": (1e3, "k/s")}
    parts = []
    for rate in RATES:
        scale, unit = units.get(rate, (1e9, "Gflop/s"))
        parts.append(f"{rate} {getattr(machine, rate) / scale:.3g} {unit}")
    return ", ".join(parts)


def _hardware() -> Iterator[Finding]:
    yield Finding("device cpu", f"{platform.machine()}, vectors {torch.backends.cpu.get_cpu_capability()}")
    for index in range(torch.cuda.device_count()):
        found = importlib.util.find_spec("triton") is not None
        fault = "" if found else 'without triton backend="inductor", the default, fails on CUDA'
        advice = 'pip install triton, or pass backend="aot_eager".'
        yield Finding(f"device cuda:{index}", torch.cuda.get_device_name(index), fault if not index else "", advice)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = os.environ.get("OMP_NUM_THREADS")
    variable = f" (OMP_NUM_THREADS={said})" if said else ""
    yield Finding("threads", f"{torch.get_num_threads()} on {allowed} processors{variable}")


def _terminal() -> Finding:
    if sys.stderr is not None and sys.stderr.isatty():
        return Finding("terminal", f"stderr is one: a compilation of more than {AFTER:.0f} s says so there")
    return Finding(
        "terminal", 'stderr is none: a long compilation is silent, unless the logger "fxgrad" has level INFO'
    )
