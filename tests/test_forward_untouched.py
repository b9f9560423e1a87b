"""The forward is the plain model's, and no backward computes a gradient summed over samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils import _pytree as pytree

import fxgrad
from fxgrad.testing import default_loss

aten = torch.ops.aten
FREE = """t detach view permute transpose unsqueeze squeeze expand alias _unsafe_view select slice clone""".split()
"""Views, and the copy behind a tap, which compilers remove."""


@dataclass
class Recorder:
    """A backend that keeps AOTAutograd's graphs and runs them as they are."""

    partition: Callable[..., Any] = default_partition
    joint: list[fx.GraphModule] = field(default_factory=list)
    forward: list[fx.GraphModule] = field(default_factory=list)
    backward: list[fx.GraphModule] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=self._partition,
        )(gm, inputs)
        return compiled

    def _keep(self, graphs: list[fx.GraphModule]) -> Callable[..., Any]:
        def compile_(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            graphs.append(gm)
            boxed: Callable[..., Any] = make_boxed_func(gm.forward)
            return boxed

        return compile_

    def _partition(self, joint: fx.GraphModule, inputs: Any, **settings: Any) -> Any:
        self.joint.append(joint)
        return self.partition(joint, inputs, **settings)


def computations(gm: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """The operators of a graph by name, without those that are free or compute sizes."""
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            name = node.target._overloadpacket.__name__
            if name not in FREE and not name.startswith("sym_"):
                yield name, node


def calls(gm: fx.GraphModule) -> list[str]:
    return sorted(name for name, _ in computations(gm))


def sizes(value: Any) -> list[int]:
    """A tensor's sizes in whatever order, without ones; empty where one of them is symbolic."""
    if not isinstance(value, Tensor) or not all(type(size) is int for size in value.shape):
        return []
    return sorted(size for size in value.shape if size != 1)


def summed_gradients(gm: fx.GraphModule, model: nn.Module) -> list[str]:
    """Operators that compute something of a parameter's plain shape, transposed or not."""
    plain = [sizes(p) for p in model.parameters()]
    found = []
    for name, node in computations(gm):
        found += [name for leaf in pytree.tree_leaves(node.meta.get("val")) if sizes(leaf) and sizes(leaf) in plain]
    return found


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 11)
        self.norm = nn.LayerNorm(11)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(self.table(ids)), self.table.weight)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = nn.Parameter(torch.randn(11, 13)), nn.Parameter(torch.randn(3, 13, 17))
        self.scale = nn.Parameter(torch.randn(19, 17))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bti,io->bto", x, self.v).tanh()
        return (h.unsqueeze(1) @ self.w) * self.scale


# No activation has the shape of a parameter.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(11, 13), nn.ReLU(inplace=True), nn.Linear(13, 17)),
        lambda: torch.randn(7, 11),
    ),
    "mlp on sequences": (
        lambda: nn.Sequential(nn.Linear(11, 13), nn.PReLU(13), nn.Linear(13, 17)),
        lambda: torch.randn(7, 13, 11),
    ),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(3, 12, 5), nn.GroupNorm(4, 12), nn.ConvTranspose2d(12, 11, 3)),
        lambda: torch.randn(7, 3, 9, 9),
    ),
    "tied embedding": (Tied, lambda: torch.randint(13, (7, 19))),
    "products": (Products, lambda: torch.randn(7, 19, 11)),
}


def run(model: Callable[..., Any], inputs: Tensor) -> None:
    if inputs.is_floating_point():
        inputs.requires_grad_()
    default_loss(model(inputs)).backward()


def test_a_linear_layer_s_forward_is_one_addmm(device: torch.device) -> None:
    recorder = Recorder()
    run(fxgrad.transform(nn.Linear(3, 2).to(device), backend=recorder), torch.randn(5, 3, device=device))
    assert calls(recorder.forward[0]) == ["addmm"]


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_is_the_plain_models(name: str, device: torch.device) -> None:
    build, inputs = MODELS[name]
    model, x = build().to(device), inputs().to(device)
    own, plain = Recorder(), Recorder()
    run(torch.compile(model, backend=plain, dynamic=True), x)
    model.zero_grad()
    run(fxgrad.transform(model, backend=own), x)
    assert calls(own.forward[0]) == calls(plain.forward[0])


def test_the_forward_saves_its_input_and_no_view_of_it(device: torch.device) -> None:
    """Of an input that is saved Inductor knows so, and lays it out for a convolution."""
    recorder = Recorder(partition=min_cut_rematerialization_partition)
    model, quantity = nn.Conv2d(1, 3, 5).to(device), fxgrad.ClippedGrad(max_grad_norm=1.0)
    own = fxgrad.transform(model, quantity=quantity, backend=recorder)
    default_loss(own(torch.randn(7, 1, 9, 9, device=device))).backward()
    graph = recorder.forward[0].graph
    saved = set(graph.output_node().all_input_nodes)
    x = graph.find_nodes(op="call_function", target=aten.convolution.default)[0].args[0]
    assert x in saved and saved.isdisjoint(x.users)


@pytest.mark.parametrize("name", MODELS)
def test_no_summed_gradient(name: str, device: torch.device) -> None:
    build, inputs = MODELS[name]
    model, recorder = build().to(device), Recorder()
    run(fxgrad.transform(model, backend=recorder), inputs().to(device))
    assert summed_gradients(recorder.joint[0], model) == []
    assert summed_gradients(recorder.backward[0], model) == []


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_backward_sums(name: str, device: torch.device) -> None:
    """What the test above looks for is there to be found."""
    build, inputs = MODELS[name]
    model, recorder = build().to(device), Recorder()
    run(torch.compile(model, backend=recorder), inputs().to(device))
    assert len(summed_gradients(recorder.joint[0], model)) >= len(list(model.parameters()))
