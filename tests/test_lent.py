"""Quantities, rules and ops of users': what they get is theirs, what they read may not change, what they say counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import LostLayout, OptionError, RuleError
from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED

BACKENDS = [*TRACED, pytest.param("inductor", marks=pytest.mark.long)]
RATE = 1.0


class Own(fxgrad.Quantity):
    """One number for each sample and parameter."""

    function: Callable[[Any], Tensor] = staticmethod(lambda g: g.dense().flatten(1).sum(1))

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[fxgrad.Delivery]:
        return [fxgrad.Delivery("own", name, (n,), p.dtype, p.device) for name, p in parameters.items()]

    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [self.function(g) for g in grads]


class Dense(Own):
    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[fxgrad.Delivery]:
        return [fxgrad.Delivery("own", name, (n, *p.shape), p.dtype, p.device) for name, p in parameters.items()]

    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [g.dense() for g in grads]


class Rated(Own):
    rate = 1.0

    def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [g.norms()[0].to(g.dtype) * self.rate * RATE for g in grads]


class Places(Own):
    def __init__(self, place: str, name: str | None, shape: Callable[[Any], tuple[Any, ...]]) -> None:
        object.__setattr__(self, "asked", (place, name, shape))

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[fxgrad.Delivery]:
        place, name, shape = self.asked  # type: ignore[attr-defined]
        one = next(iter(parameters.values()))
        return [fxgrad.Delivery(place, name, shape(n), one.dtype, one.device)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        lambda g: g.dense().mul_(1000).flatten(1).amax(1),
        lambda g: g.norms().zero_()[0].to(g.dtype),
    ],
    ids=["dense", "norms"],
)
def test_a_quantity_that_writes_to_what_it_gets_changes_no_other(function: Any, backend: str) -> None:
    class Writes(Own):
        pass

    Writes.function = staticmethod(function)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    rows: list[list[Tensor]] = []
    for others in ([], [Writes()]):
        model: Any = net()
        quantities = [*others, fxgrad.ClippedGrad(0.37), fxgrad.GradSample()]
        fxgrad.transform(model, quantity=quantities, backend=backend)(x).sin().sum().backward()
        rows.append([each for p in model.parameters() for each in (p.grad, p.grad_sample)])
    for expected, actual in zip(*rows, strict=True):
        torch.testing.assert_close(actual, expected)


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def rated(x: Tensor, w: Tensor) -> Tensor:
    return x * w * RATE


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


class Behind(nn.Module):
    """An op of a user's behind a layer."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op, self.first, self.w = op, nn.Linear(4, 4), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.first(x), self.w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rule_that_writes_to_the_gradient_it_gets(backend: str) -> None:
    @fxgrad.implements_per_sample_grads(scaled, of=["w"], override=True)
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": g.mul_(x).flatten(1, -2).sum(1)}

    assert_per_sample_grads(Behind(scaled, 4).double(), torch.randn(3, 2, 4, dtype=torch.float64), backend=backend)


def test_a_rule_in_another_s_place_counts_from_the_next_call_on() -> None:
    @fxgrad.implements_per_sample_grads(scaled, of=["w"], override=True)
    def wrong(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": 10 * (g * x).flatten(1, -2).sum(1)}

    model: Any = Behind(scaled, 4)
    x = torch.randn(3, 1, 4)
    transformed = fxgrad.transform(model, backend="aot_eager")
    transformed(x).sum().backward()
    before = model.w.grad_sample.clone()
    fxgrad.zero_grad(model)

    @fxgrad.implements_per_sample_grads(scaled, of=["w"], override=True)
    def right(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": (g * x).flatten(1, -2).sum(1)}

    transformed(x).sum().backward()
    torch.testing.assert_close(10 * model.w.grad_sample, before)


def test_a_rule_s_gradient_has_the_parameter_s_shape() -> None:
    @fxgrad.implements_per_sample_grads(transposed, of=["w"], override=True)
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": torch.einsum("n...o,n...i->noi", g, x)}

    transformed = fxgrad.transform(Behind(transposed, 4, 2), backend="aot_eager")
    with pytest.raises(RuleError, match=r"of shape \[.*, 2, 4\]: it has to be \[.*, 4, 2\]"):
        transformed(torch.randn(3, 1, 4)).sum().backward()


# What they read


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_a_quantity_reads_may_not_change(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = net()
    x = torch.ones(3, 4, dtype=torch.float64)
    quantity = Rated()
    transformed = fxgrad.transform(model, quantity=quantity, backend=backend)
    for _ in range(2):
        transformed(x).sum().backward()
        fxgrad.zero_grad(model)
    object.__setattr__(quantity, "rate", 5.0)
    with pytest.raises(OptionError, match=r"'self\.rate', which Rated\.compute reads, is not what it was"):
        transformed(x)
    object.__setattr__(quantity, "rate", 1.0)
    transformed(x).sum().backward()
    fxgrad.zero_grad(model)
    monkeypatch.setitem(globals(), "RATE", 7.0)
    with pytest.raises(OptionError, match=r"'RATE', which Rated\.compute reads"):
        transformed(x)


def test_a_number_that_a_rule_and_its_op_read_may_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    @fxgrad.implements_per_sample_grads(rated, of=["w"], override=True)
    def rule(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": (g * x * RATE).flatten(1, -2).sum(1)}

    model: Any = Behind(rated, 4)
    transformed = fxgrad.transform(model, backend="aot_eager")
    transformed(torch.randn(3, 1, 4)).sum().backward()
    fxgrad.zero_grad(model)
    monkeypatch.setitem(globals(), "RATE", 7.0)
    with pytest.raises(OptionError, match=r"'RATE', which (rule|rated) reads, is not what it was"):
        transformed(torch.randn(3, 1, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantity_may_keep_a_cache(backend: str) -> None:
    class Cached(Own):
        dims: Any = None
        plans: ClassVar[dict[Any, Any]] = {}

        def compute(self, grads: Sequence[Any], n: int, given: Sequence[Tensor]) -> Sequence[Tensor | None]:
            if self.dims is None:
                object.__setattr__(self, "dims", {g.name: tuple(range(1, len(g.shape) + 1)) for g in grads})
            self.plans.setdefault("plan", len(grads))
            return [g.dense().sum(self.dims[g.name]) for g in grads]

    model: Any = net()
    transformed = fxgrad.transform(model, quantity=Cached(), backend=backend)
    for size in (3, 2, 3):
        transformed(torch.ones(size, 4, dtype=torch.float64)).sum().backward()
        assert model[2].bias.own.tolist() == [2.0] * size
        fxgrad.zero_grad(model)


# Where results are


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kinds", [[fxgrad.GradSample], [fxgrad.GradSample, Dense], [Dense, fxgrad.GradSample]])
def test_results_have_memory_of_their_own(kinds: list[Any], backend: str) -> None:
    model: Any = Sum()
    transformed = fxgrad.transform(model, quantity=[kind() for kind in kinds], backend=backend)
    transformed(torch.randn(3, 4)).sin().sum().backward()
    places = ["grad_sample", "own"][: len(kinds)]
    results = [getattr(p, place) for p in model.parameters() for place in places]
    before = [result.clone() for result in results]
    for result in results:
        result.mul_(10)
    for result, one in zip(results, before, strict=True):
        assert torch.equal(result, 10 * one)


@pytest.mark.parametrize(
    ("place", "name", "shape", "message"),
    [
        ("grad", "0.weight", lambda n: (n, 3, 4), r"p\.grad of '0\.weight' as \[.*, 3, 4\], and p has the shape"),
        ("largest", "nope", lambda n: (n,), "of 'nope', which is no trainable parameter"),
        ("largest", None, lambda n: (n,), "of None, which is no trainable parameter"),
    ],
)
def test_what_is_delivered_has_a_place(place: str, name: str | None, shape: Any, message: str) -> None:
    transformed = fxgrad.transform(net(), quantity=Places(place, name, shape), backend="aot_eager")
    with pytest.raises(OptionError, match=message):
        transformed(torch.randn(5, 4, dtype=torch.float64)).sum().backward()


# What arguments hold


class Reads(nn.Module):
    def __init__(self, of: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(4, 4), of

    def forward(self, x: Tensor, held: Any) -> Tensor:
        return self.linear(x) * self.of(held)


@pytest.mark.parametrize("of", [lambda held: held.k.mean(0), lambda held: held.k[0], lambda held: held.k.sum()])
def test_a_field_as_long_as_the_batch_is_refused(of: Callable[[Any], Tensor]) -> None:
    transformed = fxgrad.transform(Reads(of), backend="eager")
    with pytest.raises(LostLayout, match=r"input 'held\.k' is as long as the batch, and in an object"):
        transformed(torch.randn(3, 4), SimpleNamespace(k=torch.randn(3, 4)))


def test_a_deque_is_an_object_as_well() -> None:
    transformed = fxgrad.transform(Reads(lambda held: held[0].mean(0)), backend="eager")
    with pytest.raises(LostLayout, match=r"input 'held\[0\]' is as long as the batch, and in an object"):
        transformed(torch.randn(3, 4), deque([torch.randn(3, 4)]))


@dataclass
class Table:
    k: Tensor


def test_in_dims_says_what_a_dataclass_holds() -> None:
    model: Any = Reads(lambda held: held.k)
    transformed = fxgrad.transform(model, backend="eager", in_dims=(0, None))
    for size in (3, 4, 5):
        transformed(torch.ones(size, 4), Table(torch.arange(4.0))).sum().backward()
        assert model.linear.bias.grad_sample.tolist() == [[0.0, 1.0, 2.0, 3.0]] * size
        fxgrad.zero_grad(model)


def test_a_field_of_another_length_is_one_value_for_all() -> None:
    model: Any = Reads(lambda held: held.k.mean(0))
    k, x = torch.randn(7, 4), torch.randn(3, 4)
    fxgrad.transform(model, backend="eager")(x, SimpleNamespace(k=k)).sum().backward()
    for i, sample in enumerate(x.split(1)):
        (expected,) = torch.autograd.grad((model.linear(sample) * k.mean(0)).sum(), model.linear.weight)
        torch.testing.assert_close(model.linear.weight.grad_sample[i], expected)
