"""Functions of parameters: terms that are moved, and finished sums that are pulled back once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import fxgrad
from fxgrad.terms import product
from fxgrad.testing import default_loss, per_sample_grads, relative_error
from tests.programs import quick_dynamo
from tests.test_forward_untouched import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


class Of(nn.Module):
    """A function of parameters and of the input."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.randn(shape) / shape[-1] for shape in shapes])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *list(self.weights))  # Dynamo of 2.12 unpacks no ParameterList


def normal(v: Tensor, g: Tensor) -> Tensor:
    return g * v / v.norm(dim=1, keepdim=True)


def deep(w: Tensor) -> Tensor:
    """Four diamonds: every value is read twice."""
    for _ in range(4):
        w = w.sin() + w.cos()
    return w


MOVED: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "t": (lambda x, w: F.linear(x, w.t()), [(31, 37)]),
    "view": (lambda x, w: F.linear(x, w.view(37, 31)), [(31, 37)]),
    "permute, then contiguous": (lambda x, w: F.linear(x, w.permute(1, 0).contiguous()), [(31, 37)]),
    "unflatten and flatten": (lambda x, w: F.linear(x, w.unflatten(0, (1, 37)).flatten(0, 1)), [(37, 31)]),
    "half of a mirror": (lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()), [(37, 31)]),
    "permuted, then in another shape": (lambda x, w: F.linear(x, w.t().reshape(37, 31)), [(37, 31)]),
}
PIECES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "chunks": (lambda x, w: sum(F.linear(x, piece).sin() for piece in w.chunk(3)), [(39, 31)]),  # type: ignore
    "columns, transposed": (lambda x, w: F.linear(x, w.split([29, 8], 1)[0].t().narrow(0, 3, 20)), [(31, 37)]),
    "cat": (lambda x, v, w: F.linear(x, torch.cat([v, w])), [(17, 31), (20, 31)]),
    "cat of columns": (lambda x, v, w: F.linear(x, torch.cat([v, w], 1)), [(37, 11), (37, 20)]),
    "cat of pieces": (lambda x, w: F.linear(x, torch.cat([w.narrow(0, 9, 20), w.narrow(0, 2, 17)])), [(37, 31)]),
}
BENT: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "weight norm": (lambda x, v, g: F.linear(x, normal(v, g)), [(37, 31), (37, 1)]),
    "product": (lambda x, w, a, b: F.linear(x, w + a @ b), [(37, 31), (37, 2), (2, 31)]),
    "standardised convolution": (
        lambda x, w: F.conv1d(x.mT, (w - w.mean((1, 2), keepdim=True)) / w.std((1, 2), keepdim=True)),
        [(7, 31, 1)],
    ),
    "deep": (lambda x, w: F.linear(x, deep(w)), [(37, 31)]),
    "used twice": (lambda x, w: F.linear(F.linear(x, w.exp()).sin(), w.exp().t()), [(37, 31)]),
}
EVERY = MOVED | PIECES | BENT


def built(name: str, batch: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    function, shapes = EVERY[name]
    model = Of(function, *shapes).to(device, torch.float64)
    return model, torch.randn(batch, 3, 31, device=device, dtype=torch.float64)


def check(model: nn.Module, x: Tensor, quantities: Sequence[Any], groups: Any, backend: Any) -> None:
    """Norms, clipped sums and products with a direction, against the loop."""
    expected = per_sample_grads(model, default_loss, (x,))
    size = quantities[0].group_size
    expected = {name: g.unflatten(0, (-1, size)).sum(1) for name, g in expected.items()}
    own = {name: g.flatten(1).norm(dim=1) for name, g in expected.items()}
    total = torch.stack(list(own.values())).norm(dim=0)
    transformed = fxgrad.transform(model, quantity=quantities, backend=backend)
    default_loss(transformed(x)).backward()
    sums, wanted = {}, {}
    for name, p in model.named_parameters():
        c = (0.5 / ((own[name] if groups else total) + 1e-6)).clamp(max=1)
        sums[name], wanted[name] = p.grad, torch.einsum("n,n...->...", c, expected[name])
        if len(quantities) > 1:
            assert relative_error({"": p.norm_sample}, {"": own[name]}) <= 1e-10  # type: ignore[attr-defined]
    assert relative_error(sums, wanted) <= 1e-10  # type: ignore[arg-type]
    fxgrad.zero_grad(transformed)


@pytest.mark.parametrize("name", EVERY)
def test_against_the_loop(name: str, device: torch.device) -> None:
    model, x = built(name, 5, device)
    clipped = fxgrad.ClippedGrad(0.5, groups="per_parameter")
    check(model, x, [clipped, fxgrad.NormSample()], "per_parameter", "eager")


@pytest.mark.parametrize("name", ["t", "permuted, then in another shape", "weight norm"])
@pytest.mark.parametrize("kind", ["beside grad_sample", "groups of rows", "one sample"])
def test_in_company(name: str, kind: str, device: torch.device) -> None:
    model, x = built(name, 1 if kind == "one sample" else 6, device)
    size = 3 if kind == "groups of rows" else 1
    quantities: list[Any] = [fxgrad.ClippedGrad(0.5, group_size=size), fxgrad.NormSample(group_size=size)]
    if kind == "beside grad_sample":
        quantities.append(fxgrad.GradSample())
    check(model, x, quantities, None, "eager")


def test_products_with_a_direction(device: torch.device) -> None:
    for name in ("t", "permuted, then in another shape", "weight norm"):
        model, x = built(name, 5, device)
        expected = per_sample_grads(model, default_loss, (x,))
        dots = fxgrad.GradDot({name: torch.randn_like(g[0]) for name, g in expected.items()})
        transformed = fxgrad.transform(model, quantity=dots, backend="eager")
        default_loss(transformed(x)).backward()
        wanted = torch.stack([(g * dots.vectors[name]).flatten(1).sum(1) for name, g in expected.items()]).sum(0)
        assert relative_error({"": fxgrad.result(transformed, dots)}, {"": wanted}) <= 1e-10


def backward_of(model: nn.Module, x: Tensor, quantity: Any) -> fx.GraphModule:
    """The traced backward of a transformed model."""
    recorder = Recorder()
    default_loss(fxgrad.transform(model, quantity=quantity, backend=recorder)(x)).backward()
    return recorder.backward[-1]


def elements(gm: fx.GraphModule) -> list[int]:
    """The number of elements of every value, the batch at its first size."""
    leaves = [leaf for node in gm.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("val"))]
    sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
    return [int(size) if isinstance(size, int) else int(size.node.hint) for size in sizes]


@pytest.mark.parametrize("name", MOVED | PIECES)
def test_nothing_of_a_weights_size_times_b(name: str, device: torch.device) -> None:
    model, x = built(name, 5, device)
    gm = backward_of(model, x, fxgrad.ClippedGrad(0.5))
    assert max(elements(gm)) < 5 * 11 * 37  # the smallest of the weights is that of "cat of columns"


@pytest.mark.parametrize("name", ["weight norm", "product", "deep"])
def test_a_finished_sum_is_pulled_back_once(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "FEW_PRODUCTS", 0)  # an operator for every sum
    model, x = built(name, 5, device)
    gm = backward_of(model, x, fxgrad.ClippedGrad(0.5))
    names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    assert sum("product_sum" in target for target in names) == 1  # at the function's value
    assert not any("dense_sum" in target for target in names)  # and no rows of a parameter wait for it
    if name == "deep":  # one way through 4 diamonds; every path by itself would take 16
        assert len(names) < 300, len(names)
