"""What operators are on a GPU: as they are on CPU, for every number of samples, without a look at a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fxgrad
from fxgrad.kernels import in_parts, on_gpu, products
from fxgrad.kernels.norms import CHAIN
from fxgrad.kernels.settings import Settings
from fxgrad.testing import assert_per_sample_grads
from tests.quick import long_but

aten, ops = torch.ops.aten, torch.ops.fxgrad
N = 17  # samples: no other size is as large, nor as the 11 of a trace


def convolution(layer: Any, *shape: int, at: int = 1) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """What an operator gets of a layer: g and input with images ``[N, at, ..]``, the weight and the settings."""
    input = torch.randn(N * at, *shape)
    g = torch.randn_like(layer(input))
    settings = Settings(
        layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups
    )
    sides = [side.unflatten(0, (N, at)) for side in (g, input)]
    return sides[0], sides[1], list(layer.weight.shape), settings.numbers()


CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "padded": lambda: convolution(nn.Conv2d(3, 8, 3, padding=1), 3, 9, 8),
    "strided, dilated": lambda: convolution(nn.Conv2d(4, 6, (3, 2), (2, 3), (1, 0), (2, 1)), 4, 12, 10),
    "images of a sample": lambda: convolution(nn.Conv2d(3, 8, 3), 3, 9, 8, at=3),
    "groups": lambda: convolution(nn.Conv2d(6, 8, 3, groups=2, padding=2), 6, 7, 7),
    "depthwise": lambda: convolution(nn.Conv2d(6, 12, 3, groups=6, stride=2), 6, 9, 9),
    "one pixel": lambda: convolution(nn.Conv2d(4, 5, 1), 4, 3, 3),
    "one dimension": lambda: convolution(nn.Conv1d(4, 6, 5, padding=2), 4, 14),
    "three dimensions": lambda: convolution(nn.Conv3d(2, 3, 2, padding=1), 2, 4, 5, 4),
    "transposed": lambda: convolution(nn.ConvTranspose2d(3, 6, 3, 2, 1, output_padding=1), 3, 5, 6),
    "transposed, groups": lambda: convolution(nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2), 4, 5, 6),
    "large images": lambda: convolution(nn.Conv2d(2, 3, 3, padding=1), 2, 30, 30),
    "large images, depthwise": lambda: convolution(nn.Conv2d(2, 2, 3, groups=2), 2, 30, 30),
    "transposed, depthwise": lambda: convolution(nn.ConvTranspose1d(4, 4, 3, groups=4, stride=2), 4, 9),
}
PRODUCTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "one position": lambda: (torch.randn(N, 4), torch.randn(N, 3)),
    "positions": lambda: (torch.randn(N, 7, 4), torch.randn(N, 7, 3)),
    "more": lambda: (torch.randn(N, 2, 20, 4), torch.randn(N, 2, 20, 6)),
    "time first": lambda: (torch.randn(9, N, 4).transpose(0, 1), torch.randn(9, N, 3).transpose(0, 1)),
    "half": lambda: (torch.randn(N, 7, 4).bfloat16(), torch.randn(N, 7, 3).bfloat16()),
    "double": lambda: (torch.randn(N, 7, 4).double(), torch.randn(N, 7, 3).double()),
    "many features": lambda: (torch.randn(N, 5, 300), torch.randn(N, 5, 1201)),
    "a long sequence": lambda: (torch.randn(N, 900, 4), torch.randn(N, 900, 600)),
    "of odd length": lambda: (torch.randn(N, 515, 4), torch.randn(N, 515, 3)),
}
WEIGHTS = torch.tensor([0.5, 0, 1, 0.25, 2] * 4)[:N]


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each form, with arguments."""
    torch.manual_seed(0)
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for name, make in PRODUCTS.items():
        g, x = make()
        for gram in (False, True):
            found[f"product_norms, {name}{', gram' * gram}"] = on_gpu.product_norms, (g, x, gram)
        if g.dtype is not torch.bfloat16:
            found[f"product_rows, {name}"] = on_gpu.product_rows, (g, x)
        found[f"product_sum, {name}"] = on_gpu.product_sum, (g, x, WEIGHTS, False)
    for name, make in CONVOLUTIONS.items():
        g, input, kernel, numbers = make()
        found[f"window_norms, {name}"] = on_gpu.window_norms, (g, input, kernel, numbers, False)
        found[f"window_rows, {name}"] = on_gpu.window_rows, (g, input, kernel, numbers)
        found[f"conv_weight_grad, {name}"] = on_gpu.conv_weight_grad, (g, input, kernel, numbers)
        found[f"window_sum, {name}"] = on_gpu.window_sum, (g, input, WEIGHTS, kernel, numbers)
    found["dense_sum"] = on_gpu.dense_sum, (torch.randn(N, 3, 4), WEIGHTS)
    return found


CALLS = calls()


def agree(found: Any, expected: Any, atol: float = 1e-5) -> None:
    """Compare results; of norms and bounds ``[2, n]`` the bound may be larger where it counts more."""
    for own, other in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        is_bound = own.dtype is torch.float64 and own.shape == (2, len(WEIGHTS))
        pair = (own[:1], other[:1]) if is_bound else (own, other)
        torch.testing.assert_close(*pair, rtol=1e-5, atol=atol)
        if is_bound:
            assert (own[1] >= own[0]).all() and (own[1] <= 1.001 * other[1] + 1e-6).all()


@pytest.mark.parametrize("name", CALLS)
def test_as_the_operator(name: str) -> None:
    function, args = CALLS[name]
    assert on_gpu.FORMS[getattr(ops, function.__name__).default].fits(*args)
    is_long = "long" in name or "large" in name  # entries of some thirty, added in another order
    agree(function(*args), getattr(ops, function.__name__)(*args), 1e-4 if is_long else 1e-5)


class Rows(TorchDispatchMode):
    """Notes how many products each product of matrices adds up in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmm.default):
            length, columns = args[-1].shape[-2:]
            self.lengths += [length] * (columns > 1)  # of a matrix and a vector: a bound itself, of numbers above 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in CALLS if not name.partition(",")[0].endswith("_sum")])
def test_no_product_is_longer_than_bounds_count(name: str) -> None:
    function, args = CALLS[name]
    with Rows() as rows:
        function(*args)
    assert all(length <= CHAIN for length in rows.lengths)


def test_long_rows_on_a_gpu_outside_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes too much memory for a graph, and other backends than Inductor."""
    for module in (products, in_parts):
        monkeypatch.setattr(module, "is_readable", lambda value: False)
    g, x = torch.randn(3, 1100, 4), torch.randn(3, 1100, 700)
    for gram in (False, True):
        agree_on_norms(products.product_norms(g, x, gram), g, x)
    rows, norms = products.product_rows(g, x)
    torch.testing.assert_close(rows, g.mT @ x, rtol=1e-4, atol=1e-4)
    agree_on_norms(norms, g, x)


def test_a_gram_matrix_on_a_gpu_copies_its_factors_once() -> None:
    """Each has two products, with no copy of its own for the other side."""
    g, x = torch.randn(4, 6, 300), torch.randn(4, 6, 500)
    gm = make_fx(partial(on_gpu.product_norms, gram=True), _allow_non_fake_inputs=True)(g, x)
    products = gm.graph.find_nodes(op="call_function", target=aten.bmm.default)
    assert len(products) == 2 and all(len(_sources(node)) == 1 for node in products)


def _sources(product: fx.Node) -> set[fx.Node]:
    """What the two sides of a product are views of."""

    def source(node: fx.Node) -> fx.Node:
        while node.target in (aten.transpose.int, aten.expand.default, aten.view.default):
            node = node.all_input_nodes[0]
        return node

    return {source(side) for side in product.all_input_nodes}


def agree_on_norms(found: Tensor, g: Tensor, x: Tensor) -> None:
    true = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(found[0], true, rtol=1e-5, atol=0)
    assert (found[1] >= true).all() and (found[1] <= 1.01 * true).all()


OFTEN = (
    "positions",
    "positions, gram",
    "many features, gram",
    "a long sequence",
    "time first",
    "strided, dilated",
    "groups",
    "depthwise",
    "transposed",
)


@pytest.mark.parametrize("name", long_but(lambda name: name.partition(", ")[2] in OFTEN, CALLS))
def test_one_graph_for_every_number_of_samples(name: str) -> None:
    function, args = CALLS[name]
    values = [arg for arg in args if isinstance(arg, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        return function(*(next(rest) if isinstance(arg, Tensor) else arg for arg in args))

    gm = make_fx(of_tensors, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*(value[:11] for value in values))
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and hasattr(node.target, "_schema")]
    assert not [node for node in calls if node.target._schema.is_mutable]
    agree(gm(*values), function(*args))


def test_what_takes_too_much_memory_stays_an_operator() -> None:
    few, many = (torch.empty(n, 8, 1024, device="meta") for n in (4, 1024))
    image = torch.empty(1024, 1, 64, 64, 64, device="meta")
    settings = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), 1).numbers()

    def fits(op: Any, *args: Any) -> bool:
        return on_gpu.FORMS[op.default].fits(*args)

    assert fits(ops.product_norms, few, few, False) and not fits(ops.product_norms, many, many, False)
    narrow, vocabulary = torch.empty(1024, 8, 64, device="meta"), torch.empty(1024, 8, 30_000, device="meta")
    assert fits(ops.product_norms, many, many, True)  # by Gram matrices of 8 positions
    assert not fits(ops.product_norms, vocabulary, narrow, True)  # of factors that are copied
    assert not fits(ops.window_norms, image, image, [64, 64, 3, 3], settings, False)


SMALL = torch.tensor([1.0, 1e-20, 1e-30, 1e-38, 0.0])


@pytest.mark.parametrize("gram", [False, True])
def test_a_bound_counts_what_underflows(gram: bool) -> None:
    torch.manual_seed(0)
    g, x = torch.randn(5, 6, 3) * SMALL.view(-1, 1, 1), torch.randn(5, 6, 4) * 1e-12
    true = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    assert (on_gpu.product_norms(g, x, gram)[1] >= true).all()


def test_what_overflows_counts_for_nothing_in_a_sum() -> None:
    g, x = torch.full((2, 3, 2), 1e30), torch.full((2, 3, 2), 1.0)
    x[1] = 1e30
    norms, bounds = on_gpu.product_norms(g, x, False)
    assert norms[0].isfinite() and bounds[1] == torch.inf
    weights = (1e30 / bounds).clamp(max=1).float()
    assert torch.equal(on_gpu.product_sum(g, x, weights, False), weights[0] * g[0].mT @ x[0])


class Both(nn.Module):
    """Convolutions, and products of many positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, groups=16)
        self.up, self.down = nn.Linear(16, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).flatten(2).mT
        out: Tensor = self.down(self.up(h).tanh()).sum(1)
        return out


@pytest.mark.inductor
@pytest.mark.parametrize("strategy", long_but(lambda how: how == "recompute", ["recompute", "materialise", None]))
def test_through_inductor(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Any] = []
    monkeypatch.setattr(on_gpu, "is_on_gpu", lambda value: True)
    forms = {op: form._replace(function=_noting(met, form.function)) for op, form in on_gpu.FORMS.items()}
    monkeypatch.setattr(on_gpu, "FORMS", forms)
    model = Both()
    view = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(max_grad_norm=1.0), strategy=strategy)
    for size in (5, 3):
        x, y = torch.randn(size, 3, 6, 6), torch.randint(64, (size,))
        expected = clipped_by_the_loop(model, x, y)
        fxgrad.zero_grad(model)
        F.cross_entropy(view(x), y, reduction="sum").backward()
        for p, sum_ in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, sum_.float(), rtol=1e-3, atol=1e-5)
    assert met


def _noting(met: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any) -> Any:
        met.append(function)
        return function(*args)

    return noting


def clipped_by_the_loop(model: nn.Module, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """Sum each sample's gradients in float64, divided by their norm where it is above 1."""
    double = Both().double()
    double.load_state_dict(model.state_dict())
    sums = [torch.zeros_like(p) for p in double.parameters()]
    for i in range(len(x)):
        loss = F.cross_entropy(double(x[i : i + 1].double()), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(double.parameters()))
        norm = torch.stack([g.norm() for g in grads]).norm()
        sums = [total + g / norm.clamp(min=1) for total, g in zip(sums, grads, strict=True)]
    return sums


@pytest.mark.inductor
@pytest.mark.long
def test_gradients_through_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_gpu, "is_on_gpu", lambda value: True)
    assert_per_sample_grads(Both(), torch.randn(5, 3, 6, 6), backend="inductor", tolerance=1e-4)
