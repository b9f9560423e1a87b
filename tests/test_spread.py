"""What is spread behind what is computed of it: shapes in traced graphs, the numbers, and the memory of a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

import fxgrad
from fxgrad.compile.spread import spread_late
from fxgrad.kernels.tables import row_norms, table_sum
from fxgrad.ops.tags import is_pointwise
from tests.allocations import peak

N, K, D, WORDS = 4, 6, 3, 24


def norms(g: Tensor) -> Tensor:
    return row_norms(torch.arange(N * K).view(N, K), g, WORDS, -1)


def norms_and_sum(g: Tensor) -> tuple[Tensor, Tensor]:
    return norms(g), table_sum(torch.zeros(N, K, dtype=torch.long), g, torch.ones(N), WORDS, -1)


def changed(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    spread_late(gm)
    gm.graph.lint()
    return gm


G, W = torch.randn(N, 1, D), torch.randn(D, 2)
ONCE, EACH, LAST = [N, 1, D], [N, K, D], torch.channels_last
CASES: dict[str, tuple[Callable[[Tensor], Any], list[list[int]]]] = {
    "a mean's gradient": (lambda g: norms(g.expand(N, K, D) / K), [ONCE]),
    "several ops": (lambda g: norms((g.expand(N, K, D) / K * 2).tanh()), [ONCE] * 3),
    "a copy": (lambda g: norms(g.expand(N, K, D).clone() / K), [ONCE]),
    "a copy in another layout": (lambda g: (g.expand(2, N, 1, D).clone(memory_format=LAST) / 2).sum(), [ONCE]),
    "a number that is a tensor": (lambda g: norms(g.expand(N, K, D) * g.sum()), [ONCE]),
    "a dimension in front": (lambda g: norms(g[0, 0].expand(N, K, D) / K), [[D]]),
    "two readers": (lambda g: norms_and_sum(g.expand(N, K, D) / K), [ONCE]),
    "a sum": (lambda g: (norms(h := g.expand(N, K, D) / K), h.sum(1)), [ONCE]),
    "added to another value": (lambda g: g.expand(N, K, D) / K + torch.ones(N, K, D), [ONCE, EACH]),
    "a result": (lambda g: g.expand(N, K, D) / K, [EACH]),
    "an operator, and a result": (lambda g: (norms(h := g.expand(N, K, D) / K), h), [ONCE, EACH]),
    "read by its strides": (lambda g: (g.expand(N, K, D) / K).as_strided((2, 2), (D, 1)).sum(), [EACH]),
    "another number at each place": (lambda g: norms(g.expand(N, K, D) * torch.ones(K, 1)), [EACH]),
    "beside a value in another layout": (
        lambda g: (g.expand(N, K, D) / K * torch.ones(N, D, K).transpose(1, 2)).as_strided((2, 2), (D, 1)),
        [EACH] * 2,
    ),
    "in another dtype": (lambda g: norms((g.expand(N, K, D) * 2).view(torch.int32).float()), [EACH]),
    "of two results": (lambda g: norms(torch.frexp(g.expand(N, K, D) * 2)[0]), [ONCE]),
    "one number": (lambda g: norms(g.sum().expand(N, K, D) / K), [EACH]),
    "written in place": (lambda g: norms(g.expand(N, K, D).clone().mul_(2)), [EACH, EACH]),
}
FLAT = [N * K, 2]
PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[list[int]]]] = {
    "all rows of a sample alike": (lambda g, w: g.expand(N, K, D).flatten(0, 1).mm(w).view(N, K, 2) + 1, [[N, 2]]),
    "behind a mean": (lambda g, w: (g.expand(N, K, D) / K).flatten(0, 1).mm(w).view(N, K, 2).tanh() * 2, [[N, 2]]),
    "two products": (
        lambda g, w: g.expand(N, K, D).flatten(0, 1).mm(w).view(N, K, 2).flatten(0, 1).mm(w.t()).view(N, K, D) + 1,
        [[N, 2], [N, D]],
    ),
    "two dimensions": (
        lambda g, w: g.view(N, 1, 1, D).expand(N, 2, K, D).flatten(0, 2).mm(w).view(N, 2, K, 2) + 1,
        [[N, 2]],
    ),
    "one of two": (
        lambda g, w: (
            g.expand(N, 2, D).clone().view(N, 2, 1, D).expand(N, 2, K, D).flatten(0, 2).mm(w).view(N, 2, K, 2) + 1
        ),
        [[2 * N, 2]],
    ),
    "a result": (lambda g, w: g.expand(N, K, D).flatten(0, 1).mm(w).view(N, K, 2), [FLAT]),
    "no rows": (lambda g, w: (g.expand(N, 0, D).flatten(0, 1) @ w).view(N, 0, 9) + 1, [[0, 2]]),
    "rows apart": (lambda g, w: g.expand(N, K, D).flatten(0, 1).mm(w) + 1, [FLAT]),
    "in other rows": (lambda g, w: g.expand(N, K, D).flatten(0, 1).mm(w).view(K, N, 2) + 1, [FLAT]),
    "columns": (lambda g, w: g[:, 0, :1, None].expand(N, K, D).flatten(0, 1).mm(w).view(N, K, 2) + 1, [FLAT]),
}


@pytest.mark.parametrize(("function", "shapes"), CASES.values(), ids=CASES)
def test_shapes_of_what_is_computed(function: Callable[[Tensor], Any], shapes: list[list[int]]) -> None:
    gm = changed(function, G)
    values = [node.meta["val"] for node in gm.graph.nodes if is_pointwise(node)]
    assert [list(value.shape) for value in values if isinstance(value, Tensor)] == shapes
    torch.testing.assert_close(gm(G), function(G))


@pytest.mark.parametrize(("function", "shapes"), PRODUCTS.values(), ids=PRODUCTS)
def test_products_of_rows_that_are_alike(function: Callable[[Tensor, Tensor], Any], shapes: list[list[int]]) -> None:
    gm = changed(function, G, W)
    products = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert [list(node.meta["val"].shape) for node in products] == shapes
    torch.testing.assert_close(gm(G, W), function(G, W))


def test_random_numbers_are_drawn_for_each_place() -> None:
    gm = changed(lambda g: norms(torch.bernoulli(g.sigmoid().expand(N, K, D)) * 2), G)
    drawn = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli.default)
    assert [list(node.meta["val"].shape) for node in drawn] == [EACH]


def test_the_samples_number_asks_for_no_guard() -> None:
    found: list[list[Any]] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        spread_late(gm)
        found.append([list(node.meta["val"].shape)[1:] for node in gm.graph.nodes if is_pointwise(node)])
        return gm

    def norms_of(ids: Tensor, g: Tensor) -> Tensor:
        return row_norms(ids, g.unsqueeze(1).expand(len(g), K, D) / K, WORDS, -1)

    step: Any = aot_autograd(fw_compiler=backend)
    compiled = torch.compile(norms_of, backend=step, dynamic=True, fullgraph=True)
    for size in (4, 9):
        ids, g = torch.randint(WORDS, (size, K)), torch.randn(size, D)
        torch.testing.assert_close(compiled(ids, g), norms_of(ids, g))
    assert found == [[[1, D]]]


class Averaged(nn.Module):
    """The mean of texts' embeddings, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(ids).mean(1))
        return logits


class DeepSet(nn.Module):
    """The mean over a set of what a perceptron makes of each element."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down, self.head = (
            nn.Embedding(50, 6),
            nn.Linear(6, 9),
            nn.Linear(9, 4),
            nn.Linear(4, 2),
        )

    def forward(self, ids: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(self.table(ids))))
        logits: Tensor = self.head(h.mean(1))
        return logits


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids).square().sum()
    return loss


def clipped(model: nn.Module, ids: Tensor, bound: float) -> list[Tensor]:
    """Return the sum of clipped gradients, sample by sample in float64."""
    single = copy.deepcopy(model).double()
    parameters = list(single.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(len(ids)):
        grads = torch.autograd.grad(loss_of(single, ids[i : i + 1]), parameters)
        norm = torch.stack([g.norm() for g in grads]).norm()
        total = [one + g * (bound / norm).clamp(max=1) for one, g in zip(total, grads, strict=True)]
    return total


@pytest.mark.inductor
@pytest.mark.parametrize("whole", [False, True], ids=["two graphs", "one graph"])
@pytest.mark.parametrize("network", [Averaged, DeepSet])
def test_a_mean_is_clipped_as_the_loop_does(network: type[nn.Module], whole: bool) -> None:
    model = network()
    private = fxgrad.transform(model, fxgrad.ClippedGrad(1e-2))
    one_graph = fxgrad.forward_backward(private, loss_of)
    for size in (6, 3, 1, 8, 0):
        ids = torch.randint(50, (size, 7))
        fxgrad.zero_grad(private)
        one_graph(ids) if whole else loss_of(private, ids).backward()
        for p, expected in zip(model.parameters(), clipped(model, ids, 1e-2), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad, expected.float(), rtol=1e-4, atol=1e-8)


class Gated(nn.Module):
    """A gate made of means, times values whose features are first; and a view of the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x).transpose(1, 2)
        z = h.mean(2, keepdim=True).expand_as(h).sigmoid() * h
        return z, z.flatten(1)


class Strided(nn.Module):
    """A function of parameters, read by its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5, 4)), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w = (self.a.mean(0, keepdim=True).expand(4, 5) * 2) * self.b.t()
        y = self.out(x.flatten(1) * w.as_strided((20,), (1,)))
        return y, y


@pytest.mark.inductor
@pytest.mark.parametrize("network", [Gated, Strided])
def test_results_lie_in_memory_as_they_were_traced(network: type[nn.Module]) -> None:
    model, x = network(), torch.randn(6, 4, 5)
    expected = model(x)
    grads = torch.autograd.grad(expected[1].square().sum(), list(model.parameters()))
    found = fxgrad.transform(model, fxgrad.ClippedGrad(1e9))(x)
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)
    found[1].square().sum().backward()
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.inductor
@pytest.mark.parametrize("whole", [False, True], ids=["two graphs", "one graph"])
def test_a_mean_of_embeddings_holds_no_gradient_of_each(whole: bool) -> None:
    model, ids = Averaged(), torch.randint(50, (32, 256))
    private = fxgrad.transform(model, fxgrad.ClippedGrad(1e-2))
    one_graph = fxgrad.forward_backward(private, loss_of)

    def step() -> None:
        fxgrad.zero_grad(private)
        one_graph(ids) if whole else loss_of(private, ids).backward()

    step()
    assert peak(step) < 0.3 * ids.numel() * 16 * 4  # of what the gradients of the embeddings would be
