"""What a compilation says, in the log and on a terminal."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.capture import progress
from fxgrad.costs import machines
from fxgrad.errors import MixedSamples


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Return a terminal in the place of stderr; a compilation is long after no time at all."""
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(progress, "_SAID", type(progress._SAID)())
    return screen


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The lines of the log since the last look at them, without their seconds."""
    with caplog.at_level(logging.INFO, "fxgrad"):

        def lines() -> list[str]:
            lines = [re.sub(r"\d+\.\d\d s", "_ s", message) for message in caplog.messages]
            caplog.clear()
            return [line for line in lines if "imported" not in line and "kernels" not in line]

        yield lines


def slow(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
    time.sleep(0.2)
    return gm.forward


def test_a_compilation_has_a_line_for_each_stage(said: Callable[[], list[str]]) -> None:
    gs = fxgrad.transform(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), backend="aot_eager")
    gs(torch.randn(5, 3)).sum().backward()
    lines = said()
    assert re.fullmatch(r"fxgrad's passes rewrote them to \d+ nodes, 2 taps, in _ s", lines.pop(1))
    assert lines == [
        "TorchDynamo captured 3 ops of Sequential, a batch of 5, in _ s",
        "the backend aot_eager finished in _ s",
        "compiled in _ s in all",
    ]
    for size in (5, 6):
        fxgrad.zero_grad(gs)
        gs(torch.randn(size, 3)).sum().backward()
    assert said() == []
    fxgrad.zero_grad(gs)
    gs(torch.randn(1, 3)).sum().backward()
    assert "a batch of 1" in said()[0]


@pytest.mark.inductor
def test_inductor_has_lines_of_its_own(said: Callable[[], list[str]]) -> None:
    """A backward that compiles in its first run has its line then: for a batch of one."""
    gs = fxgrad.transform(nn.Linear(3, 2), quantity=fxgrad.ClippedGrad(1.0))
    loss = gs(torch.randn(1, 3)).square().sum()
    lines = said()
    assert lines[2:] == [
        "AOTAutograd traced forward and backward in _ s",
        "Inductor compiled the forward in _ s",
        "the backend inductor finished in _ s",
        "compiled in _ s in all",
    ]
    loss.backward()
    assert said() == ["Inductor compiled the backward in _ s"]
    fxgrad.zero_grad(gs)
    gs(torch.randn(4, 3)).square().sum().backward()
    assert "Inductor compiled the backward in _ s" in said()


def test_the_backend_says_what_it_can(said: Callable[[], list[str]]) -> None:
    """It does not see when Dynamo begins."""
    model = torch.compile(nn.Linear(3, 2), backend="fxgrad", options={"backend": "aot_eager"})
    model(torch.randn(5, 3)).sum().backward()
    assert [line.split()[0] for line in said()] == ["fxgrad's", "the", "compiled"]


def test_measuring_a_machine_has_a_line(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv(machines.VARIABLE, f"{tmp_path}/machines.json")
    monkeypatch.setattr(machines, "_known", {})
    monkeypatch.setattr(machines, "measure", lambda device, name: replace(machines.REFERENCE, name=name))
    for _ in range(2):
        machines.machine_of(torch.device("cpu"))
    assert said() == [f"measured this machine in _ s, for {tmp_path}/machines.json"]


def test_nothing_is_printed_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    gs = fxgrad.transform(nn.Linear(3, 2), backend="aot_eager")
    gs(torch.randn(5, 3)).sum().backward()
    assert capfd.readouterr() == ("", "")


def test_a_long_compilation_has_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line in a process."""
    screen = terminal(monkeypatch)
    for _ in range(2):
        gs = fxgrad.transform(nn.Linear(3, 2), backend=slow)
        gs(torch.randn(5, 3)).sum().backward()
    assert screen.getvalue() == f"{progress.LINE}\n"
    assert "for 10 seconds" in progress.LINE


def test_no_line_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stderr is a file, closed, or None, and where the log says more, no timer starts."""
    screen = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_say", lambda: pytest.fail("a line"))
    closed = io.StringIO()
    closed.close()
    for stream in (io.StringIO(), closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        fxgrad.transform(nn.Linear(3, 2), backend=slow)(torch.randn(5, 3))
    monkeypatch.setattr(sys, "stderr", screen)
    logging.getLogger("fxgrad").setLevel(logging.INFO)
    try:
        fxgrad.transform(nn.Linear(3, 2), backend=slow)(torch.randn(5, 3))
    finally:
        logging.getLogger("fxgrad").setLevel(logging.NOTSET)
    assert not screen.getvalue()


@pytest.mark.parametrize("ends", ["compiled", "refused", "failed"])
def test_the_timer_ends_with_the_compilation(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr(progress, "AFTER", 100.0)
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(threading, "Timer", Timer)
    mixing = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) if ends == "refused" else nn.Linear(3, 2)
    gs = fxgrad.transform(mixing, backend="aot_eager")
    if ends == "compiled":
        gs(torch.randn(5, 3))
    else:
        error, says = (MixedSamples, "influence each other") if ends == "refused" else (RuntimeError, "shapes|size")
        with pytest.raises(error, match=says):
            gs(torch.randn(5, 3 if ends == "refused" else 2))
    assert timers
    for timer in timers:
        assert timer.daemon
        timer.join(5)
        assert not timer.is_alive()
    started = len(timers)
    if ends == "compiled":
        gs(torch.randn(6, 3))
    assert len(timers) == started and not screen.getvalue()
