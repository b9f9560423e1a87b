"""The compiler of docs/from_scratch.md: its program runs, the page quotes it, and it refuses what it does not know."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.examples import FOLDER, load

scratch = load("from_scratch")
PROGRAM = (FOLDER / "from_scratch.py").read_text()
PAGE = (Path(__file__).parents[1] / "docs" / "from_scratch.md").read_text()


def test_it_agrees_with_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert scratch.main() == 0
    assert capsys.readouterr().out.endswith("good\n")


def test_it_has_300_lines_at_most() -> None:
    assert len(PROGRAM.splitlines()) <= 300


def test_the_page_quotes_the_program() -> None:
    excerpts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(excerpts) == 6
    assert [excerpt for excerpt in excerpts if excerpt not in PROGRAM] == []


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = scratch.Term.weighted
    monkeypatch.setattr(scratch.Term, "weighted", lambda term, c: 1.001 * right(term, c))
    assert scratch.main() == 1


def test_the_graph_of_a_step_has_no_gradient_of_a_sample() -> None:
    model, x = scratch.Example().double(), torch.randn(5, 4, 6, dtype=torch.float64)
    graph = scratch.step_graph(model, x, dim=1)
    norms, clipped = graph(2 * x)
    truth = scratch.loop(model, 2 * x, 1)
    wanted = torch.stack([rows.flatten(1).square().sum(1) for rows in truth.values()]).sum(0).sqrt()

    assert torch.allclose(norms, wanted, rtol=0, atol=1e-10)
    assert clipped.keys() == truth.keys()
    shapes = {tuple(node.meta["val"].shape) for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    assert (5, 4, 6) in shapes
    assert not shapes & {(4, 6, 6), (4, 3, 6)}


class Model(nn.Module):
    def __init__(self, function: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda m, x: m.layer(x) - m.layer(x).mean(0), "reduces over the samples"),
        (lambda m, x: m.layer(x + x.transpose(0, 1)), "meets other samples"),
        (lambda m, x: m.layer(x.transpose(0, 1)), "the features of this linear layer are the samples"),
        (lambda m, x: m.layer(x).sum(), "x.mean(dim) and x.sum(dim) of samples only"),
        (lambda m, x: m.layer(x).softmax(0), "nothing is known about softmax"),
        (lambda m, x: m.layer(x) * m.layer.weight, "uses 'layer.weight', and there is no rule"),
        (lambda m, x: nn.functional.linear(x, m.layer.weight * 2), "linear(samples, parameter, parameter) only"),
        (lambda m, x: m.layer.weight * 2, "does not depend on the samples"),
        (lambda m, x: nn.functional.linear(x, x), "a weight that depends on samples"),
    ],
)
def test_refused(function: Callable[[Model, Tensor], Tensor], text: str) -> None:
    with pytest.raises(scratch.Refused, match=re.escape(text)):
        scratch.transform(Model(function), {"x": scratch.Batched(0, 2)})
