"""What a compilation says: lines of the logger "fxgrad" at level INFO, and one line on a terminal after ten seconds.

    begin           the clock runs, and on a terminal a timer
    stage           a line of what is done, with the seconds since the line before
    end             compiled, or an error: the timer is cancelled

Each thread has a clock of its own. Without one, outside of a compilation, nothing here does anything.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

log = logging.getLogger("fxgrad")

AFTER = 10.0  # seconds
LINE = (
    f"fxgrad has been compiling the model for {AFTER:.0f} seconds; later steps do not wait for it. To see what takes "
    'time: logging.basicConfig(); logging.getLogger("fxgrad").setLevel(logging.INFO)'
)


@dataclass
class Clock:
    """The clock of one compilation."""

    began: float = field(default_factory=time.perf_counter)
    last: float = 0.0  # when the last stage ended
    traced: bool = False  # whether AOTAutograd's stage is over
    timer: threading.Timer | None = None


class _Running(threading.local):
    """The clock of this thread's compilation."""

    clock: Clock | None = None


_RUNNING = _Running()


def begin() -> None:
    """Start the clock of a compilation; one that ran stops."""
    end()
    clock = _RUNNING.clock = Clock(timer=_timer())
    clock.last = clock.began


def stage(done: str) -> None:
    """Log what the compilation has done since its last stage."""
    clock = _RUNNING.clock
    if clock is not None:
        now = time.perf_counter()
        log.info("%s in %.2f s", done, now - clock.last)
        clock.last = now


def end() -> None:
    """Stop the clock."""
    clock, _RUNNING.clock = _RUNNING.clock, None
    if clock is not None and clock.timer is not None:
        clock.timer.cancel()


@contextlib.contextmanager
def compilation() -> Iterator[None]:
    """End the running compilation here, with a line of all its seconds; begin one if none runs."""
    if _RUNNING.clock is None:
        begin()
    clock = _RUNNING.clock
    assert clock is not None
    try:
        yield
        log.info("compiled in %.2f s in all", time.perf_counter() - clock.began)
    finally:
        end()


@contextlib.contextmanager
def inductor(backward: bool) -> Iterator[None]:
    """Log Inductor's part of the running compilation; a backward is one by itself if it compiles in its first run."""
    clock = _RUNNING.clock
    if clock is None:
        begin()
    elif not clock.traced:
        stage("AOTAutograd traced forward and backward")
        clock.traced = True
    try:
        yield
        stage(f"Inductor compiled the {'backward' if backward else 'forward'}")
    finally:
        if clock is None:
            end()


def _timer() -> threading.Timer | None:
    """Return a running timer of the line on a terminal; None if nobody would see it, or has seen it."""
    if _SAID.is_set() or log.isEnabledFor(logging.INFO) or not _on_terminal():
        return None
    timer = threading.Timer(AFTER, _say)
    timer.daemon = True
    timer.start()
    return timer


_SAID = threading.Event()  # once in a process


def _on_terminal() -> bool:
    with contextlib.suppress(AttributeError, ValueError):  # stderr may be None, or closed
        return sys.stderr.isatty()
    return False


def _say() -> None:
    if not _SAID.is_set() and _on_terminal():
        _SAID.set()
        print(LINE, file=sys.stderr, flush=True)
