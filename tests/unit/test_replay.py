"""Where a movement op leaves the samples: the op runs on sample ids, at two numbers of samples."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from fxgrad.ops.calls import bind
from fxgrad.samples.layouts import SAMPLES, Kind, Layout, Samples
from fxgrad.samples.replay import Replay
from fxgrad.samples.symbols import Symbols

BATCHED, CONSTANT = Samples(Kind.BATCHED, Layout(0)), Samples(Kind.CONSTANT)


class Calls:
    """A graph over the size b, x [B, 4, 6], time [5, B, 4], integers ids [B], a parameter w [4], a constant c [4]."""

    def __init__(self) -> None:
        self.symbols, self.graph = Symbols(), fx.Graph()
        b = self.symbols.batch(2018)
        self.b = self.graph.placeholder("b")
        self.b.meta["fake"] = b
        SAMPLES.put(self.b, None)
        self.x = self.input("x", [b, 4, 6], BATCHED)
        self.time = self.input("time", [5, b, 4], Samples(Kind.BATCHED, Layout(1)))
        self.ids = self.input("ids", [b], BATCHED, torch.int64)
        self.w = self.input("w", [4], Samples(Kind.UNIFORM))
        self.c = self.input("c", [4], CONSTANT)
        self.replay = Replay(self.symbols)

    def input(self, name: str, shape: list[Any], samples: Samples, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.symbols.mode:
            node.meta["fake"] = torch.empty(shape, dtype=dtype)
        SAMPLES.put(node, samples)
        return node

    def call(self, target: Any, *args: Any, samples: Samples = CONSTANT, **kwargs: Any) -> fx.Node:
        """A call, run on its operands' fake values; what is known of its own is what the test says."""
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        fakes, named = fx.map_arg((node.args, dict(node.kwargs)), lambda arg: arg.meta["fake"])
        with self.symbols.mode, enable_python_dispatcher():
            run: Any = getattr(fakes[0], target) if isinstance(target, str) else target
            node.meta["fake"] = run(*fakes[isinstance(target, str) :], **named)
        assert not self.symbols.specialised()
        node.meta["call"] = bind(node)
        SAMPLES.put(node, samples)
        return node

    def found(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The layouts of a call's outputs as text."""
        node = self.call(target, *args, **kwargs)
        outputs = node.meta["fake"]
        if isinstance(outputs, tuple | list):
            return [str(layout) for layout in self.replay.layouts(node, outputs)]
        return str(self.replay.layouts(node, [outputs])[0])


def row(c: Calls) -> fx.Node:
    """``arange(B)``: an index made of sizes alone."""
    return c.call(torch.arange, c.b)


STAY: dict[str, tuple[Callable[[Calls], Any], Any]] = {
    "a permutation": (lambda c: c.found("permute", c.x, 1, 0, 2), "(1)"),
    "positions merged behind samples": (lambda c: c.found("reshape", c.x, -1, 6), "(0, 1, 4)"),
    "positions merged in front of samples": (lambda c: c.found("reshape", c.time, -1, 4), "(0, 5, 1)"),
    "pieces": (lambda c: c.found("chunk", c.x, 2, 1), ["(0)", "(0)"]),
    "repeated": (lambda c: c.found("repeat", c.x, 2, 1, 1), "(0, 2, 1)"),
    "repeated one by one": (lambda c: c.found("repeat_interleave", c.x, 3, 0), "(0, 1, 3)"),
    "put behind themselves": (lambda c: c.found(torch.cat, [c.x, c.x]), "(0, 2, 1)"),
    "a slice of positions": (lambda c: c.found("narrow", c.x, 1, 0, 2), "(0)"),
    "features padded": (lambda c: c.found(F.pad, c.x, (1, 1)), "(0)"),
    "features turned around": (lambda c: c.found("flip", c.x, [1, 2]), "(0)"),
    "rows in their order": (lambda c: c.found(getitem, c.x, row(c)), "(0)"),
    "one position of each": (lambda c: c.found(getitem, c.x, (row(c), 2)), "(0)"),
    "positions that a constant picks": (lambda c: c.found("index_select", c.x, 1, c.call(torch.arange, 2)), "(0)"),
    "rows of a table": (lambda c: c.found(getitem, c.c, c.ids), "(0)"),
    "own positions that the data picks": (lambda c: c.found(getitem, c.x, (row(c), c.ids)), "(0)"),
}  # fmt: skip
LOST: dict[str, Callable[[Calls], Any]] = {
    "turned around": lambda c: c.found("flip", c.x, [0]),
    "rolled": lambda c: c.found("roll", c.x, 1, 0),
    "rolled by their number": lambda c: c.found("roll", c.x, 6, 0),  # at two and at three samples: nothing happens
    "the first two": lambda c: c.found("narrow", c.x, 0, 0, 2),
    "padded with rows of no sample": lambda c: c.found(F.pad, c.x, (0, 0, 0, 0, 0, 1)),
    "a diagonal of positions and samples": lambda c: c.found("diagonal", c.time, 0, 0, 1),
    "rows in another order": lambda c: c.found(getitem, c.x, c.call("flip", row(c), [0])),
    "in groups of two": lambda c: c.found(getitem, c.x, c.call("remainder", row(c), 2)),
    "rows that the data picks": lambda c: c.found(getitem, c.x, c.ids),
    "half of them in front": lambda c: c.found("reshape", c.x, 2, -1, 4, 6),
}


@pytest.mark.parametrize("name", STAY)
def test_samples_that_are_followed(name: str) -> None:
    find, layout = STAY[name]
    assert find(Calls()) == layout


@pytest.mark.parametrize("name", LOST)
def test_samples_that_are_lost(name: str) -> None:
    assert LOST[name](Calls()) == "None"


@pytest.mark.parametrize(
    "copy, dim, layout",
    [
        (lambda c: c.call("expand", c.w, c.b, 4), 0, "(0)"),
        (lambda c: c.call("repeat", c.w, c.b), 0, "(0, 1, 4)"),
        (lambda c: c.call("repeat_interleave", c.w, c.b), 0, "(0, 4, 1)"),
        (lambda c: c.call("expand", c.w, 3, 4), 0, "None"),
    ],
)
def test_copies_of_a_parameter_for_each_sample(copy: Callable[[Calls], fx.Node], dim: int, layout: str) -> None:
    calls = Calls()
    node = copy(calls)
    assert str(calls.replay.copies(node, node.meta["fake"], dim)) == layout


def values(c: Calls, node: fx.Node) -> list[Any]:
    """A constant at two and at three samples."""
    return [c.replay.constant(node, batch).tolist() for batch in (2, 3)]


def test_constants_made_of_sizes_are_computed() -> None:
    c = Calls()
    assert values(c, c.call("mul", row(c), 4)) == [[0, 4], [0, 4, 8]]
    assert values(c, c.call("flip", row(c), [0])) == [[1, 0], [2, 1, 0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda c: c.call(torch.randperm, c.b),  # drawn
        lambda c: c.call("mul_", row(c), 4),  # written to
        lambda c: c.call("add", c.ids, 1),  # the data's
        lambda c: c.call("argsort", c.call("mul", row(c), 0)),  # ties: in which order, nobody says
    ],
)
def test_other_constants_are_not(make: Callable[[Calls], fx.Node]) -> None:
    c = Calls()
    assert values(c, make(c)) == [[0, 0], [0, 0, 0]]


def test_rows_kept_in_their_order() -> None:
    c = Calls()
    assert c.replay.keeps_rows(c.call("transpose", c.x, 0, 1), c.x)
    assert c.replay.keeps_rows(c.call("narrow", c.x, 1, 0, 2), c.x)
    assert not c.replay.keeps_rows(c.call("flip", c.x, [0]), c.x)
    assert not c.replay.keeps_rows(c.call("reshape", c.x, -1, 6), c.x)
