"""C of ClippedGrad as an input of the compiled graph: schedules compile nothing, and no step waits for a device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.compile.inductor import inner_compiler
from fxgrad.errors import OptionError
from fxgrad.testing import default_loss, per_sample_grads, relative_error
from tests.programs import quick_dynamo

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def expected(model: nn.Module, x: Tensor, bounds: Any, groups: list[list[str]] | None = None) -> dict[str, Tensor]:
    """The loop: Σ_i min(1, C / (|g_i| + 1e-6)) g_i, for each group by itself."""
    rows = per_sample_grads(model, default_loss, (x,))
    found: dict[str, Tensor] = {}
    for group, bound in zip(groups or [list(rows)], torch.as_tensor(bounds).reshape(-1), strict=True):
        norms = torch.cat([rows[name].flatten(1) for name in group], 1).norm(dim=1)
        c = (bound / (norms + 1e-6)).clamp(max=1)
        found |= {name: torch.einsum("n,n...->...", c, rows[name]) for name in group}
    return found


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def x() -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_each_backward_reads_it_and_nothing_compiles_again(backend: str) -> None:
    compiled: list[Any] = []

    def counted(gm: Any, inputs: Any) -> Any:
        compiled.append(gm)
        return inner_compiler(backend)(gm, inputs)

    model, bound = net(), torch.tensor(0.3)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bound), backend=counted)
    for c in (0.3, 0.05, 10.0):
        bound.fill_(7.0)
        loss = default_loss(private(x()))
        bound.fill_(c)
        fxgrad.zero_grad(private)
        loss.backward()
        assert relative_error(grads(model), expected(model, x(), bound)) <= 1e-10
    assert len(compiled) == 1


@pytest.mark.parametrize("groups", ["per_parameter", [["0.weight", "2.bias"], ["2.weight", "0.bias"]]])
def test_one_number_for_each_group(groups: Any) -> None:
    model = net()
    names = [[name] for name, _ in model.named_parameters()] if groups == "per_parameter" else groups
    bounds = torch.full((len(names),), 0.3)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bounds, groups=groups), backend="aot_eager")
    for factor in (1.0, 0.2):
        bounds.copy_(factor * torch.linspace(0.1, 0.4, len(names)))
        fxgrad.zero_grad(private)
        default_loss(private(x())).backward()
        assert relative_error(grads(model), expected(model, x(), bounds, names)) <= 1e-10


def test_a_retained_graph_reads_it_again() -> None:
    model, bound = net(), torch.tensor(0.3)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bound), backend="eager")
    loss = default_loss(private(x()))
    for c in (0.3, 0.1):
        bound.fill_(c)
        fxgrad.zero_grad(private)
        loss.backward(retain_graph=True)
        assert relative_error(grads(model), expected(model, x(), bound)) <= 1e-10


@pytest.mark.parametrize("reentrant", [False, True])
def test_around_a_checkpoint(reentrant: bool) -> None:
    model, bound = net(), torch.tensor(0.3)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bound), backend="aot_eager")
    for c in (0.3, 0.1):
        bound.fill_(c)
        fxgrad.zero_grad(private)
        default_loss(checkpoint(private, x().requires_grad_(), use_reentrant=reentrant)).backward()
        assert relative_error(grads(model), expected(model, x(), bound)) <= 1e-10


def test_hooks_that_may_copy_it() -> None:
    model, bound = net(), torch.tensor(0.3)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bound), backend="aot_eager")
    for change in (False, True):
        fxgrad.zero_grad(private)
        with save_on_cpu():
            loss = default_loss(private(x()))
        if not change:
            loss.backward()
            assert relative_error(grads(model), expected(model, x(), bound)) <= 1e-10
            continue
        bound.fill_(0.1)
        with pytest.raises(OptionError, match="max_grad_norm changed between forward and backward under saved_tensors"):
            loss.backward()
        assert not grads(model)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_what_bounds_nothing_weighs_nothing(value: float) -> None:
    model = net()
    clipped = fxgrad.ClippedGrad(torch.tensor(value))
    private = fxgrad.transform(model, quantity=clipped, backend="eager")
    default_loss(private(x())).backward()
    assert int(fxgrad.result(private, clipped).nonfinite) == 5
    assert not any(grad.any() for grad in grads(model).values())


@pytest.mark.parametrize(
    "weights", [lambda n: n * 0 + 3, lambda n: n * 0 - 3, lambda n: 0.05 / n], ids=["3", "-3", "/"]
)
def test_a_function_s_weights_are_limited_if_asked_for(weights: Callable[[Tensor], Tensor]) -> None:
    model, bound = net(), torch.tensor(0.3)
    clipped = fxgrad.ClippedGrad(bound, weights=weights, bounded=True)
    private = fxgrad.transform(model, quantity=clipped, backend="aot_eager")
    for c in (0.3, 0.1):
        bound.fill_(c)
        fxgrad.zero_grad(private)
        default_loss(private(x())).backward()
        norms, weight, _ = fxgrad.result(private, clipped)
        limit = bound.double() / (norms + 1e-6)
        torch.testing.assert_close(weight, weights(norms).clamp(-limit, limit), rtol=1e-10, atol=0)


def test_nothing_waits_for_the_device() -> None:
    model, bound = net(), torch.tensor(0.3)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bound), backend="eager")
    default_loss(private(x())).backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for c in (0.2, 0.1):
            fxgrad.zero_grad(private)
            bound.mul_(c)
            default_loss(private(x())).backward()
    ops = {event.key for event in seen.key_averages()}
    assert "aten::mul_" in ops and not ops & {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}


def test_equal_by_the_numbers_now() -> None:
    bound = torch.tensor(0.5)
    clipped = fxgrad.ClippedGrad(bound)
    assert clipped == fxgrad.ClippedGrad(0.5) and hash(clipped) == hash(fxgrad.ClippedGrad(0.5))
    assert copy.deepcopy(clipped) == clipped
    bound.fill_(0.25)
    assert clipped == fxgrad.ClippedGrad(0.25) != fxgrad.ClippedGrad(0.5)
    assert fxgrad.ClippedGrad([0.5, 0.25]) == fxgrad.ClippedGrad(torch.tensor([0.5, 0.25]))
    assert fxgrad.ClippedGrad(1.0) != fxgrad.NormSample()


@pytest.mark.parametrize("bound", [torch.ones(2, 2), torch.ones(0), torch.tensor(1)], ids=str)
def test_a_tensor_that_is_no_bound(bound: Tensor) -> None:
    with pytest.raises(OptionError, match=r"it has to be of floating point, 0-dim or .*\n  Pass torch.tensor\(1.0\)"):
        fxgrad.ClippedGrad(bound)


def test_numbers_for_other_groups() -> None:
    for bounds in ([0.1, 0.2], torch.tensor([0.1, 0.2])):
        quantity = fxgrad.ClippedGrad(bounds, groups="per_parameter")
        with pytest.raises(OptionError, match="max_grad_norm has 2 numbers for 4 groups"):
            fxgrad.transform(net(), quantity=quantity, backend="eager")(x())


@pytest.mark.parametrize(
    "quantity, shown",
    [
        (fxgrad.ClippedGrad(1.0), "ClippedGrad(1.0)"),
        (fxgrad.ClippedGrad(1.0, group_size=2), "ClippedGrad(1.0, group_size=2)"),
        (fxgrad.ClippedGrad([1.0, 2.0], groups="per_parameter"), "ClippedGrad([1.0, 2.0], groups='per_parameter')"),
        (fxgrad.ClippedGrad(torch.tensor(0.5)), "ClippedGrad(0.5)"),
        (fxgrad.ClippedGrad(1.0, weights=torch.exp, bounded=True), "ClippedGrad(1.0, weights=exp, bounded=True)"),
        (fxgrad.ClippedGrad(1.0, weights="automatic", gamma=0.1), "ClippedGrad(1.0, weights='automatic', gamma=0.1)"),
        (fxgrad.GradSample(), "GradSample"),
        (fxgrad.GradSample(group_size=3), "GradSample(group_size=3)"),
        (fxgrad.GradProjection(8), "GradProjection(8)"),
        (fxgrad.GradDot({"w": torch.ones(1)}), "GradDot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_the_default_is_shown(quantity: fxgrad.Quantity, shown: str) -> None:
    assert repr(quantity) == str(quantity) == shown
