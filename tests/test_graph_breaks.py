"""Graph breaks: one graph by default; with fullgraph=False the gradients of several graphs add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import GraphBreak, LostLayout, MixedSamples, OutsideGraph
from fxgrad.testing import default_loss, per_sample_grads, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Two(nn.Module):
    """A graph break between two layers."""

    table: Tensor

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, width), nn.Linear(width, 2)
        self.register_buffer("table", torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(h)


class DataDependent(Two):
    """Its control flow looks at the data."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:
            h = h + 1
        return self.second(h)


class Shared(Two):
    """One parameter in both graphs, the input in both, and a buffer with a row per sample by chance."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) @ self.table
        torch._dynamo.graph_break()
        again = torch.tanh(self.first(x * h.mean(1, keepdim=True))) @ self.table
        return self.second(again + h)


class Three(Two):
    """Three graphs, with values carried over the one in the middle."""

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        torch._dynamo.graph_break()
        y = h.relu() * 2
        torch._dynamo.graph_break()
        return self.second(y + h), h


class Turned(Two):
    """The samples lie on dimension 1 at the break."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).transpose(0, 1).contiguous()
        torch._dynamo.graph_break()
        return self.second(h.transpose(0, 1))


class Sizes(Two):
    """Eager code between the graphs makes the value anew."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = untraced(h)
        return self.second(h)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def untraced(h: Tensor) -> Tensor:
    return h * 2


def view(model: nn.Module, backend: str = "eager", **options: Any) -> Any:
    return fxgrad.transform(model, backend=backend, fullgraph=False, **options)


def samples(size: int, like: nn.Module) -> Tensor:
    device = next(like.parameters()).device
    return torch.randn(size, 3, dtype=torch.float64, device=device)


def right(model: nn.Module, gs_model: nn.Module, x: Tensor) -> bool:
    fxgrad.zero_grad(model)
    output = gs_model(x)
    torch.testing.assert_close(output, model(x))
    default_loss(output).backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert all(p.grad is None for p in model.parameters())
    truth = per_sample_grads(model, default_loss, (x,))
    fxgrad.zero_grad(model)
    return relative_error(found, truth) <= 1e-10


# --- one graph ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "reason", "line"),
    [
        (Two(), "graph_break", r"torch\._dynamo\.graph_break\(\)"),
        (DataDependent(), "Data-dependent branching", r"if h\.sum\(\) > 0"),
    ],
)
def test_a_break_names_dynamos_reason_and_the_line(
    model: nn.Module, reason: str, line: str, device: torch.device
) -> None:
    model = model.to(device)
    with pytest.raises(GraphBreak, match=rf"(?s){reason}.*test_graph_breaks\.py:\d+   {line}.*fullgraph=False"):
        fxgrad.transform(model, backend="eager")(torch.randn(4, 3, device=device))
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in model.parameters())


# --- several graphs ------------------------------------------------------------------------------------


SEVERAL: list[tuple[type[Two], str]] = [
    *((kind, "eager") for kind in (Two, DataDependent, Shared, Three, Turned, Sizes)),
    *((kind, "aot_eager") for kind in (Shared, Three)),
]


@pytest.mark.parametrize(("kind", "backend"), SEVERAL)
def test_gradients_of_several_graphs_add_up(kind: type[Two], backend: str, device: torch.device) -> None:
    model = kind().double().to(device)
    gs_model = view(model, backend)
    for size in (5, 4, 1, 0):  # 4: as many samples as features
        assert right(model, gs_model, samples(size, model))


def test_a_model_without_breaks(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device)
    assert right(model, view(model), samples(5, model))


def test_the_outputs_carry_no_marks(device: torch.device) -> None:
    model = Three().double().to(device)
    for out in view(model)(samples(5, model)):
        assert not [name for name in out.__dict__ if "fxgrad" in name]


class Merged(Two):
    """Samples and steps in one dimension at the break."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 3)))
        torch._dynamo.graph_break()
        return self.second(h).view(-1, 2, 2).sum(1)


class MergedByHand(Merged):
    """The same, but eager code hands the value on."""

    def forward(self, x: Tensor) -> Tensor:
        h = untraced(torch.tanh(self.first(x.unsqueeze(1).expand(-1, 2, -1).reshape(-1, 3))))
        return self.second(h).view(-1, 2, 2).sum(1)


class Summed(Two):
    """A sum over samples meets a nonlinear function behind the break."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)).sum(0)
        torch._dynamo.graph_break()
        return self.second(x @ self.first.weight.t() + h.square())


@pytest.mark.parametrize("kind", [Merged, MergedByHand, Summed])
def test_a_layout_lost_at_a_break(kind: type[Two], device: torch.device) -> None:
    model = kind().double().to(device)
    with pytest.raises(LostLayout, match=r"(?s)graph break.*test_graph_breaks\.py:\d+   .*self\.second"):
        view(model)(samples(5, model))


class MixedBehind(Two):
    """Mixes samples in a graph that holds no parameter."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        h = h - h.mean(0)
        torch._dynamo.graph_break()
        return self.second(h)


def test_mixing_behind_a_break(device: torch.device) -> None:
    model = MixedBehind().double().to(device)
    with pytest.raises(MixedSamples, match=r"(?s)test_graph_breaks\.py:\d+   h = h - h\.mean\(0\)"):
        view(model)(samples(5, model))


class Coincidence(Two):
    """Rows that are as many as the samples at the first call, and never again."""

    def forward(self, x: Tensor) -> Tensor:
        h = untraced(torch.tanh(self.first(x[:4])))
        return self.second(h) + self.second(x @ self.first.weight.t())


def test_a_size_that_agreed_by_chance(device: torch.device) -> None:
    model = Coincidence().double().to(device)
    with pytest.raises(fxgrad.FxgradError, match="getitem takes samples out of the batch by their places"):
        gs_model = view(model)
        gs_model(samples(4, model))
        gs_model(samples(6, model))


# --- parameters outside of the graphs --------------------------------------------------------------------


class Outside(Two):
    """Uses a parameter where no graph sees it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(scaled(torch.tanh(self.first(x)), self.second.weight))


class OnlyOutside(nn.Module):
    """All of its parameters are used where no graph sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x, self.weight)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.sum()


@pytest.mark.parametrize(
    ("kind", "name", "backend"),
    [(Outside, "second.weight", "eager"), (Outside, "second.weight", "aot_eager"), (OnlyOutside, "weight", "eager")],
)
def test_parameters_used_outside(kind: Any, name: str, backend: str, device: torch.device) -> None:
    model = kind().double().to(device)
    out = view(model, backend)(samples(5, model))
    with pytest.raises(OutsideGraph, match=f"outside of every transformed graph: {name}"):
        out.sum().backward()
    assert clear(list(model.parameters()))


def clear(parameters: Sequence[nn.Parameter]) -> bool:
    return all(p.grad is None and getattr(p, "grad_sample", None) is None for p in parameters)


def test_two_forwards_one_of_them_outside(device: torch.device) -> None:
    """What one forward used outside is not forgotten by the next."""
    model = Outside().double().to(device)
    gs_model = view(model)
    x = samples(5, model)
    loss = gs_model(x).sum()
    model.second.weight.requires_grad_(False)
    if torch.__version__ < "2.12":  # Dynamo uses the old graph again
        with pytest.raises(GraphBreak, match=r"second\.weight"):
            gs_model(x)
        return
    loss = loss + gs_model(x).sum()
    with pytest.raises(OutsideGraph, match=r"second\.weight"):
        loss.backward()


@pytest.mark.parametrize("first", [True, False])
def test_freezing_behind_a_graph_break(first: bool, device: torch.device) -> None:
    """A new graph, or an error where Dynamo uses the old one (2.11): never a gradient missing in silence."""
    model = Two().double().to(device)
    model.second.requires_grad_(first)
    gs_model, x = view(model), samples(5, model)
    default_loss(gs_model(x)).backward()
    fxgrad.zero_grad(model)
    model.second.requires_grad_(not first)
    try:
        default_loss(gs_model(x)).backward()
    except GraphBreak as error:
        assert torch.__version__ < "2.12" and "second.weight" in str(error)
        return
    truth = per_sample_grads(model, default_loss, (x,))
    found = {name: p.grad_sample for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[attr-defined]
    assert relative_error(found, truth) <= 1e-10


def test_frozen_parameters_may_be_outside(device: torch.device) -> None:
    model = Outside().double().to(device)
    model.second.requires_grad_(False)
    x = samples(5, model)
    default_loss(view(model)(x)).backward()
    truth = per_sample_grads(model, default_loss, (x,))
    found = {name: p.grad_sample for name, p in model.first.named_parameters("first")}  # type: ignore[attr-defined]
    assert relative_error(found, truth) <= 1e-10
