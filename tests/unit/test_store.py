"""What arrives at the gradient placeholders of a forward is stored on the parameters, in p.grad, or for the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import AlreadySet, OptionError, OutsideGraph
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.placeholders import Placeholders, watch
from fxgrad.runtime.policies import Accumulate
from fxgrad.runtime.store import Store, clear

N = 3
PLAIN = fxgrad.GradSample()


class Model:
    """Two parameters, and a graph whose backward sends numbers to their placeholders, as a compiled one would."""

    w: Any  # what holds results
    b: Any

    def __init__(self, policy: Accumulate = "error", quantity: fxgrad.Quantity = PLAIN) -> None:
        self.w, self.b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2))
        self.store = Store(policy, [quantity])

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return {"w": self.w, "b": self.b}

    def forward(self, factor: float, n: int = N) -> tuple[Tensor, Forward]:
        """A loss whose gradient by each gradient placeholder is filled with a factor."""
        forward = Forward(n, self.parameters)
        before = self.store.enter(forward)
        placeholders = Placeholders.apply(self.store, forward, forward.names, *self.parameters.values())
        self.store.began(forward, placeholders[0].grad_fn)
        loss = factor * sum(placeholder.sum() for placeholder in placeholders)
        watch([loss], self.store, forward)
        self.store.leave(forward, before)
        return loss, forward

    def step(self, factor: float, n: int = N) -> None:
        self.forward(factor, n)[0].backward()


def factors(found: Any) -> Any:
    """The factor that fills a result, or those of a list of results."""
    return [factors(one) for one in found] if isinstance(found, list) else found.unique().item()


def test_results_on_parameters() -> None:
    model = Model()
    model.step(2.0)
    assert model.w.grad_sample.shape == (N, 2, 4) and model.b.grad_sample.shape == (N, 2)
    assert factors(model.w.grad_sample) == factors(model.b.grad_sample) == 2
    assert model.w.grad is None and model.b.grad is None


@pytest.mark.parametrize(
    "policy, expected",
    [("append", [2, 3]), ("sum", 5), ("overwrite", 3)],
)
def test_a_second_backward(policy: Accumulate, expected: Any) -> None:
    model = Model(policy)
    model.step(2.0)
    model.step(3.0)
    assert factors(model.w.grad_sample) == expected


def test_a_second_backward_is_an_error() -> None:
    model = Model()
    model.step(2.0)
    with pytest.raises(AlreadySet, match="a backward while grad_sample of 'w' is still set"):
        model.step(3.0)
    assert factors(model.w.grad_sample) == 2
    clear([model.w, model.b])
    assert model.w.grad_sample is None
    model.step(3.0)
    assert factors(model.w.grad_sample) == 3


@pytest.mark.parametrize(
    "policy, expected",
    [("error", 5), ("append", [1, 5]), ("sum", 6), ("overwrite", 5)],
)
def test_two_forwards_of_one_backward_add_up(policy: Accumulate, expected: Any) -> None:
    model = Model(policy)
    if policy != "error":
        model.step(1.0)
    (model.forward(2.0)[0] + model.forward(3.0)[0]).backward()
    assert factors(model.w.grad_sample) == expected


def test_gradients_of_other_samples_are_not_added() -> None:
    model = Model("sum")
    model.step(2.0)
    with pytest.raises(AlreadySet, match="gradients of 3 and of 4 samples cannot be added"):
        model.step(2.0, n=4)
    model = Model()
    with pytest.raises(AlreadySet, match=r"gradients of . and of . samples cannot be added"):
        (model.forward(2.0)[0] + model.forward(3.0, n=4)[0]).backward()


def test_results_of_the_model() -> None:
    norms = fxgrad.NormSample()
    model = Model(quantity=norms)
    with pytest.raises(OptionError, match="no backward has run"):
        model.store.result(norms)
    with pytest.raises(OptionError, match="transformed for NormSample, not for GradSample"):
        model.store.result(PLAIN)
    model.step(2.0)
    assert factors(model.store.result(norms)) == factors(model.w.norm_sample) == 2
    assert model.store.result(norms).shape == model.w.norm_sample.shape == (N,)


def test_what_is_for_p_grad_is_autograds_to_add() -> None:
    model = Model(quantity=fxgrad.Grad())
    model.step(2.0)
    model.step(3.0)
    assert model.w.grad is not None and model.w.grad.shape == (2, 4) and factors(model.w.grad) == 5
    assert not hasattr(model.w, "grad_sample")


def test_norms_of_two_forwards_do_not_add_up() -> None:
    model = Model(quantity=fxgrad.NormSample())
    with pytest.raises(AlreadySet, match="two forwards of the model meet in one backward"):
        (model.forward(2.0)[0] + model.forward(3.0)[0]).backward()


def test_a_backward_that_reaches_no_parameter_delivers_nothing() -> None:
    model = Model()
    x = torch.ones(N, requires_grad=True)
    loss, _ = model.forward(2.0)
    torch.autograd.grad(loss + x.sum(), x)
    assert not hasattr(model.w, "grad_sample")


def test_what_would_make_results_wrong_is_an_error() -> None:
    model = Model()
    with pytest.raises(OptionError, match="create_graph=True"):
        model.forward(2.0)[0].backward(create_graph=True)
    loss, forward = model.forward(2.0)
    forward.outside = ("w",)
    with pytest.raises(OutsideGraph, match="used outside of every transformed graph: w"):
        loss.backward()
    assert not hasattr(model.w, "grad_sample")
    with pytest.raises(OptionError, match="accumulate has to be one of error, append, sum, overwrite, not 'add'"):
        Store("add", [PLAIN])  # type: ignore[arg-type]


def test_placeholders_take_no_memory() -> None:
    asked = Model().store.asked_of(Forward(1000, Model().parameters))
    assert [placeholder.shape for placeholder in asked.placeholders] == [(1000, 2, 4), (1000, 2)]
    assert all(
        placeholder.untyped_storage().nbytes() == placeholder.element_size() for placeholder in asked.placeholders
    )


def test_what_is_asked_is_remembered() -> None:
    model = Model()
    first, other = (model.store.asked_of(Forward(n, model.parameters)) for n in (3, 4))
    assert model.store.asked_of(Forward(3, model.parameters)) is first is not other


def test_observers_hear_of_each_backward_call() -> None:
    heard: list[str] = []

    class Observer:
        shards = False

        def began(self, forward: Forward) -> None:
            heard.append("began")

        def ended(self, forward: Forward) -> None:
            heard.append("ended")

        def cleared(self, parameters: Any) -> None:
            heard.append(f"cleared {len(list(parameters))}")

    model, observer = Model(), Observer()
    model.store.observers.add(observer)
    model.step(2.0)
    model.store.cleared([model.w])
    assert heard == ["began", "ended", "cleared 1"]
