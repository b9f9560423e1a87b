"""What quantities deliver: one result for each place, of the shape that they said, and of as many samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import AlreadySet, OptionError
from fxgrad.quantities import GRAD
from tests.quick import TRACED

BACKENDS = [*TRACED, pytest.param("inductor", marks=pytest.mark.long)]


class Sums(fxgrad.Quantity):
    """The sum of the samples' gradients at a place."""

    place = "summed"

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[fxgrad.Delivery]:
        return [fxgrad.Delivery(self.place, name, tuple(p.shape), p.dtype, p.device) for name, p in parameters.items()]

    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [g.dense().sum(0) for g in grads]


class ToGrad(Sums):
    place = GRAD


class ToData(Sums):
    place = "data"


class TooFew(Sums):
    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [grads[0].dense().sum(0)]


class TooLarge(Sums):
    """Autograd would sum such a result to the shape that was said."""

    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [g.dense() for g in grads]


class NoTensor(Sums):
    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [1.0 for _ in grads]  # type: ignore[misc]


class NoneOfFirst(Sums):
    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [None, *(g.dense().sum(0) for g in grads[1:])]


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


TWICE: dict[str, Callable[[], list[fxgrad.Quantity]]] = {
    "p.grad, behind a clipped sum": lambda: [fxgrad.ClippedGrad(1e-3), ToGrad()],
    "p.grad, before a clipped sum": lambda: [ToGrad(), fxgrad.ClippedGrad(1e-3)],
    "p.grad, twice": lambda: [ToGrad(), fxgrad.Grad()],
    "grad_sample": lambda: [fxgrad.GradSample(), fxgrad.GradSample(group_size=4)],
    "norm_sample": lambda: [fxgrad.NormSample(), fxgrad.NormSample(group_size=2)],
    "grad_variance": lambda: [fxgrad.GradVariance(), fxgrad.GradVariance(group_size=2)],
    "of a user": lambda: [Sums(), Sums(group_size=2)],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for name in TWICE for size in (4, 1, 0) if all(size % one.group_size == 0 for one in TWICE[name]())],
)
def test_two_results_for_one_place_are_refused(name: str, size: int, backend: str) -> None:
    model = linear()
    transformed = fxgrad.transform(model, quantity=TWICE[name](), backend=backend, accumulate="overwrite")
    with pytest.raises(OptionError, match=r"p\.\w+ of 'weight' is delivered twice, by .* and by "):
        transformed(torch.randn(size, 3)).sum().backward()
    assert model.weight.grad is None


def test_both_under_torch_compile_are_refused() -> None:
    options: Any = {"quantity": [fxgrad.ClippedGrad(1e-3), ToGrad()], "backend": "eager"}
    compiled = torch.compile(linear(), backend="fxgrad", options=options)
    with pytest.raises(Exception, match="is delivered twice"):
        compiled(torch.randn(4, 3))


@pytest.mark.parametrize("place", ["data", "requires_grad", "shape", "not a name", ""])
def test_a_place_that_a_parameter_needs_is_refused(place: str) -> None:
    class Anywhere(Sums):
        pass

    Anywhere.place = place
    model = linear()
    before = model.weight.detach().clone()
    transformed = fxgrad.transform(model, quantity=Anywhere(), backend="eager")
    with pytest.raises(OptionError, match="no free attribute"):
        transformed(torch.randn(4, 3)).sum().backward()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("kind", [TooFew, TooLarge, NoTensor])
def test_results_that_were_not_said_are_refused(kind: type[Sums], backend: str) -> None:
    model = linear()
    transformed = fxgrad.transform(model, quantity=[kind(), fxgrad.NormSample()], backend=backend)
    with pytest.raises(OptionError, match=rf"{kind.__name__}\.compute returned"):
        transformed(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_none_stands_for_zeros(backend: str) -> None:
    model: Any = linear()
    x = torch.randn(4, 3)
    fxgrad.transform(model, quantity=NoneOfFirst(), backend=backend)(x).sum().backward()
    assert torch.equal(model.weight.summed, torch.zeros(2, 3))
    assert torch.equal(model.bias.summed, torch.full((2,), 4.0))


# Several forwards in one backward

ADDED: dict[str, Callable[[], fxgrad.Quantity]] = {
    "dots": lambda: fxgrad.GradDot({"weight": torch.ones(2, 3)}),
    "projection": lambda: fxgrad.GradProjection(5),
}


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (4, 3)])
@pytest.mark.parametrize("name", ADDED)
def test_results_of_other_sizes_are_not_added(name: str, sizes: tuple[int, int]) -> None:
    quantity = ADDED[name]()
    transformed = fxgrad.transform(linear(), quantity=quantity, backend="eager")
    x = torch.randn(4, 3)
    transformed(x).sum().backward()
    before = fxgrad.result(transformed, quantity).clone()
    with pytest.raises(AlreadySet, match=r"of shapes \[\d.* and \[\d.* meet in one backward"):
        sum(transformed(torch.randn(size, 3)).sum() for size in sizes).backward()
    assert torch.equal(fxgrad.result(transformed, quantity), before), "a refused backward leaves the result"
    transformed(2 * x).sum().backward()
    assert not torch.equal(fxgrad.result(transformed, quantity), before)


def test_a_refused_first_backward_leaves_no_result() -> None:
    quantity = ADDED["dots"]()
    transformed = fxgrad.transform(linear(), quantity=quantity, backend="eager")
    with pytest.raises(AlreadySet, match="meet in one backward"):
        (transformed(torch.randn(4, 3)).sum() + transformed(torch.randn(3, 3)).sum()).backward()
    with pytest.raises(OptionError, match="there is no result"):
        fxgrad.result(transformed, quantity)


def test_rows_appended_to_a_list_are_not_broadcast() -> None:
    transformed = fxgrad.transform(linear(), backend="eager", accumulate="append")
    transformed(torch.randn(2, 3)).sum().backward()
    with pytest.raises(AlreadySet, match="cannot be added"):
        (transformed(torch.randn(4, 3)).sum() + transformed(torch.randn(1, 3)).sum()).backward()


# Directions of some parameters


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        torch._dynamo.graph_break()
        return self.b(h)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo, at a graph break
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["a.weight", "b.weight", "unused"])
@pytest.mark.parametrize(("directions", "size"), [((), 4), ((1,), 4), ((2,), 4), ((4,), 4), ((2,), 1)])
def test_directions_of_one_graph_of_several(name: str, directions: tuple[int, ...], size: int, backend: str) -> None:
    model = Two().double()
    vectors = torch.randn(*directions, *dict(model.named_parameters())[name].shape, dtype=torch.float64)
    dots = fxgrad.GradDot({name: vectors})
    x = torch.randn(size, 3, dtype=torch.float64)
    transformed = fxgrad.transform(model, quantity=dots, backend=backend, fullgraph=False)
    transformed(x).sum().backward()
    rows = []
    for sample in x.split(1):
        loss = model.b(model.a(sample)).sum()
        (grad,) = torch.autograd.grad(loss, [dict(model.named_parameters())[name]], materialize_grads=True)
        rows.append((vectors * grad).flatten(len(directions)).sum(-1))
    torch.testing.assert_close(fxgrad.result(transformed, dots), torch.stack(rows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_directions_are_read_in_each_step_and_keep_their_shapes(backend: str) -> None:
    vectors = {"weight": torch.ones(2, 3)}
    dots = fxgrad.GradDot(vectors)
    transformed = fxgrad.transform(linear(), quantity=dots, backend=backend)

    def step(size: int) -> list[float]:
        transformed(torch.ones(size, 3)).sum().backward()
        rows: list[float] = fxgrad.result(transformed, dots).tolist()
        return rows

    assert step(4) == [6.0] * 4
    vectors["weight"].fill_(2.0)
    assert step(2) == [12.0] * 2
    vectors["weight"] = torch.full((2, 3), 3.0)
    assert step(4) == [18.0] * 4
    vectors["weight"] = torch.ones(5, 2, 3)
    with pytest.raises(OptionError, match="the graph was made for"):
        step(4)
    vectors.update(weight=torch.ones(2, 3), bias=torch.ones(2))
    with pytest.raises(OptionError, match="vectors are of bias, weight, and were of weight"):
        step(4)


# Arguments

BAD: dict[str, Callable[[], fxgrad.Quantity]] = {
    "seed has to be an int from 0": lambda: fxgrad.GradProjection(4, seed=2**32),
    "seed has to be an int from": lambda: fxgrad.GradProjection(4, seed=-1),
    "seed has to be an int": lambda: fxgrad.GradProjection(4, seed=1.5),  # type: ignore[arg-type]
    "seed has to be": lambda: fxgrad.GradProjection(4, seed="a"),  # type: ignore[arg-type]
    "has dtype torch.complex64": lambda: fxgrad.GradDot({"weight": torch.ones(2, 3, dtype=torch.complex64)}),
    "has dtype torch.int64": lambda: fxgrad.GradDot({"weight": torch.ones(2, 3, dtype=torch.int64)}),
    "max_grad_norm has to be a positive number": lambda: fxgrad.ClippedGrad(10**400),
    "bounded has to be": lambda: fxgrad.ClippedGrad(1.0, bounded="no"),  # type: ignore[arg-type]
    "sample_weight has to be": lambda: fxgrad.ClippedGrad(1.0, sample_weight="no"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", BAD)
def test_arguments_are_checked_at_once(message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BAD[message]()


def test_a_group_size_is_an_int() -> None:
    with pytest.raises(OptionError, match="group_size has to be a positive int, not True"):
        fxgrad.transform(linear(), quantity=fxgrad.GradSample(group_size=True))


def test_no_directions_are_refused() -> None:
    transformed = fxgrad.transform(linear(), quantity=fxgrad.GradDot({"weight": torch.ones(0, 2, 3)}), backend="eager")
    with pytest.raises(OptionError, match="there are no directions for 'weight'"):
        transformed(torch.randn(4, 3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_the_variance_of_fewer_than_two_samples_is_none(size: int, backend: str) -> None:
    model: Any = Two()
    model.forward = lambda x: model.b(model.a(x))
    transformed = fxgrad.transform(model, quantity=fxgrad.GradVariance(), backend=backend)
    transformed(torch.randn(size, 3)).sum().backward()
    for parameter in model.parameters():
        assert bool(parameter.grad_variance.isnan().all()) == (size < 2)


def test_a_deep_copy_is_asked_for_the_same() -> None:
    bound, dots = torch.tensor(1.0), fxgrad.GradDot({"weight": torch.ones(2, 3)})
    x = torch.ones(4, 3)
    transformed = fxgrad.transform(linear(), quantity=[fxgrad.ClippedGrad(bound), dots], backend="eager")
    copied = copy.deepcopy(transformed)
    bound.fill_(1e-3)
    copied(x).sum().backward()
    assert fxgrad.result(copied, dots).tolist() == [6.0] * 4
    grads = [p.grad.flatten() for p in copied.parameters() if p.grad is not None]
    assert float(torch.cat(grads).norm()) == pytest.approx(4e-3, rel=1e-2)
    assert transformed.weight.grad is None


# Functions of norms


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        lambda norms: norms.div_(10.0).reciprocal(),
        lambda norms: norms.clamp_(max=0.1),
        lambda norms: norms.fill_(1.0),
        lambda norms: torch.mul(norms, 0, out=norms) + 1,
    ],
    ids=["div_", "clamp_", "fill_", "out"],
)
def test_a_function_that_writes_to_the_norms_is_bounded(function: Callable[[Tensor], Tensor], backend: str) -> None:
    quantity = fxgrad.ClippedGrad(1.0, weights=function, bounded=True)
    model = linear()
    x = 100 * torch.randn(4, 3)
    transformed = fxgrad.transform(model, quantity=quantity, backend=backend)
    transformed(x).sum().backward()
    clipping = fxgrad.result(transformed, quantity)
    norms = ((x.square().sum(1) + 1) * 2).sqrt()
    torch.testing.assert_close(clipping.norm_sample, norms)
    assert bool((clipping.weight.abs() * norms <= 1 + 1e-5).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_function_that_changes_what_it_reads_is_refused(backend: str) -> None:
    class Schedule:
        step = 0

        def __call__(self, norms: Tensor) -> Tensor:
            self.step += 1
            return torch.full_like(norms, float(self.step))

    quantity = fxgrad.ClippedGrad(1.0, weights=Schedule())
    transformed = fxgrad.transform(linear(), quantity=quantity, backend=backend)
    with pytest.raises(OptionError, match=r"'self\.step', which [a-zA-Z_. ]+ reads"):
        for _ in range(2):
            transformed(torch.ones(4, 3)).sum().backward()
            transformed.zero_grad()


def test_a_function_that_decides_by_the_norms_is_told_how() -> None:
    quantity = fxgrad.ClippedGrad(1.0, weights=lambda norms: 1 / norms if norms.max() > 1 else norms)
    transformed = fxgrad.transform(linear(), quantity=quantity, backend="aot_eager")
    with pytest.raises(OptionError, match=r"decides by the numbers of the norms.*\n.*torch\.where"):
        transformed(torch.ones(4, 3)).sum().backward()


def test_a_list_of_bounds_is_read_and_checked_in_each_step() -> None:
    bounds = [1.0, 2.0]
    model = linear()
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bounds, groups="per_parameter"), backend="eager")
    x = 100 * torch.ones(4, 3)

    def step() -> list[float]:
        model.zero_grad()
        transformed(x).sum().backward()
        return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]

    assert step() == pytest.approx([4.0, 4 * 2**0.5], rel=1e-3)
    bounds[0] = 0.5
    assert step() == pytest.approx([2.0, 4 * 2**0.5], rel=1e-3)
    bounds[1] = -2.0
    with pytest.raises(OptionError, match="positive number"):
        step()
    bounds[1:] = [1.0, 3.0]
    with pytest.raises(OptionError, match="has 3 numbers for 2 groups"):
        step()


class Sign(nn.Module):
    """Its gradient is zero everywhere; PyTorch holds it without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1, 20))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sgn(x * self.p)


@pytest.mark.parametrize(
    ("quantity", "place", "shape"),
    [
        (fxgrad.GradSample(), "grad_sample", (3, 1, 20)),
        (fxgrad.NormSample(), "norm_sample", (3,)),
        (fxgrad.ClippedGrad(1.0), "grad", (1, 20)),
    ],
    ids=str,
)
def test_a_gradient_of_zeros_without_memory(quantity: Any, place: str, shape: tuple[int, ...]) -> None:
    view = fxgrad.transform(Sign(), quantity, backend="eager")
    view(torch.randn(3, 20)).sum().backward()
    found = getattr(view.p, place)
    assert found.shape == shape and not found.any()
    found.add_(1)  # it has memory of its own
    assert found.all()
