"""Draws a graph before and after one pass of the pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

import fxgrad
from fxgrad.compile.pipeline import LAST, WHOLE, Pass, copy_graph, run_passes
from fxgrad.graph.context import Context
from fxgrad.graph.printing import graph_text

Note = Callable[[fx.Node], str | None]
_UNSTABLE = (
    (re.compile(r"\bs\d+\b"), "s"),  # Dynamo's own symbols: each version of PyTorch numbers them in its own way
    (re.compile(r"\.py:\d+"), ".py:#"),  # a line of the test that is printed
)


class Program(nn.Module):
    """A function of its inputs and of the parameters ``m.w [4, 4]`` and ``m.b [4]``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class Small(nn.Module):
    """A linear layer on merged samples, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, channels = x.shape
        hidden = self.fc(x.view(samples * length, channels))
        pooled: Tensor = (hidden * self.scale).view(samples, length, -1).mean(1)
        return pooled


X = torch.randn(5, 5, 3)
"""An input of `Small`, with as many positions as samples."""


def around(run: Pass, model: nn.Module, *args: Any, note: Note | None = None) -> str:
    """Print the graph that a pass gets in the pipeline and the graph that it leaves.

    ``note`` says of a node what a pass writes on it and a printed graph does not show.
    """
    pictures: list[str] = []
    notes: list[str] = []

    def watched(gm: fx.GraphModule, ctx: Context, passes: Sequence[Pass]) -> fx.GraphModule:
        every = (*passes, *LAST, *WHOLE)
        earlier = run_passes(gm, ctx, every[: every.index(run)])
        pictures.append(picture(earlier, ctx))
        later = run_passes(earlier, ctx, (run,))
        pictures.append(picture(later, ctx))
        notes.extend(_notes(later.graph, note))
        return later

    with mock.patch("fxgrad.tracing.run_passes", watched):
        fxgrad.trace(model, *args)
    before, after = pictures[-2:]  # PyTorch may have the model traced twice
    return "\n".join([f"before:\n{before}", f"after {run.__name__}:", *_news(before, after), *notes, ""])


def spoilt(run: Pass, spoil: Callable[[fx.Graph], None], model: nn.Module, *args: Any) -> None:
    """Trace a model whose graph is changed right before a pass, which then finds what it is there to find."""

    def changed(gm: fx.GraphModule, ctx: Context, passes: Sequence[Pass]) -> fx.GraphModule:
        gm = copy_graph(run_passes(gm, ctx, passes[: passes.index(run)]))
        spoil(gm.graph)
        return run_passes(gm, ctx, (run,))

    with mock.patch("fxgrad.tracing.run_passes", changed):
        fxgrad.trace(model, *args)


def picture(gm: fx.GraphModule, ctx: Context) -> str:
    """Print a graph and the bodies that its ops have among their arguments."""
    text = graph_text(gm, ctx)
    for pattern, stable in _UNSTABLE:
        text = pattern.sub(stable, text)
    attributes = {str(node.target): getattr(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr")}
    bodies = {name: body for name, body in attributes.items() if isinstance(body, fx.GraphModule)}
    return "".join([text, *(f"{name}:\n{picture(body, ctx)}" for name, body in bodies.items())])


def _news(before: str, after: str) -> list[str]:
    """The lines after a pass, without those of an input list that is the one before."""
    if after == before:
        return ["the same graph"]
    return after.removeprefix(before[: before.index("graph:")]).splitlines()


def _notes(graph: fx.Graph, note: Note | None) -> list[str]:
    found = [note(node) for node in graph.nodes] if note else []
    lines = [f"  {line}" for line in found if line]
    return ["notes:", *lines] if lines else []
