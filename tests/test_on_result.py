"""`transform(.., on_result=f)`: f gets each quantity's result behind each backward, before a framework zeroes it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.errors import OptionError, UnclippedGrad
from fxgrad.testing import per_sample_grads, relative_error

BATCH, C = 5, 0.5
NORMS = fxgrad.NormSample()

# Dynamo looks at its inputs' .grad, and turns warnings that are errors into crashes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def samples(n: int = BATCH, seed: int = 1) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(y: Tensor) -> Tensor:
    return y.square().sum()


def rows(x: Tensor) -> dict[str, Tensor]:
    """The loop over single samples."""
    return per_sample_grads(net(), loss_of, (x,))


def norms_of(x: Tensor) -> Tensor:
    return torch.cat([g.flatten(1) for g in rows(x).values()], 1).norm(dim=1)


class Reports:
    """What a function was called with; its bound method is what transform gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def note(self, quantity: Any, result: Any) -> None:
        self.calls.append((quantity, result))

    @property
    def results(self) -> list[Any]:
        return [result for _, result in self.calls]


def view(model: nn.Module, reports: Reports, quantity: Any = NORMS, **options: Any) -> Any:
    return fxgrad.transform(model, quantity=quantity, on_result=reports.note, **{"backend": "eager", **options})


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("n", [BATCH, 1, 0])
def test_once_for_each_backward(backend: str, n: int) -> None:
    reports = Reports()
    gs = view(net(), reports, backend=backend)
    for step in range(2):
        loss = loss_of(gs(samples(n, step)))
        assert len(reports.calls) == step
        loss.backward()
        gs.zero_grad()
    assert [quantity for quantity, _ in reports.calls] == [NORMS, NORMS]
    for step, result in enumerate(reports.results):
        torch.testing.assert_close(result, norms_of(samples(n, step)) if n else torch.zeros(0).double())
        assert not result.requires_grad


class Largest(fxgrad.Quantity):
    """Two attributes of each parameter."""

    adds = True

    def deliveries(self, n: Any, parameters: Any) -> list[fxgrad.Delivery]:
        places = "largest", "least"
        return [fxgrad.Delivery(at, name, (n,), p.dtype, p.device) for name, p in parameters.items() for at in places]

    def compute(self, grads: Any, n: int, given: Any) -> list[Tensor]:
        every = [g.dense().flatten(1) for g in grads]
        return [made for g in every for made in (g.amax(1), g.amin(1))]


DIRECTION = {name: torch.ones_like(p) for name, p in net().named_parameters()}
WHAT: dict[str, tuple[fxgrad.Quantity, Callable[[Any], Any]]] = {
    "norms": (NORMS, lambda _: norms_of(samples())),
    "rows": (fxgrad.GradSample(), lambda rows: rows),
    "sums": (fxgrad.SquaredGrad(), lambda rows: {name: g.square().sum(0) for name, g in rows.items()}),
    "p.grad": (fxgrad.Grad(), lambda rows: {name: g.sum(0) for name, g in rows.items()}),
    "products": (fxgrad.GradDot(DIRECTION), lambda rows: sum(g.flatten(1).sum(1) for g in rows.values())),
    "two attributes": (
        Largest(),
        lambda rows: {name: (g.flatten(1).amax(1), g.flatten(1).amin(1)) for name, g in rows.items()},
    ),
}


@pytest.mark.parametrize("name", WHAT)
def test_the_results_of_every_kind_of_quantity(name: str) -> None:
    quantity, truth = WHAT[name]
    reports = Reports()
    loss_of(view(net(), reports, quantity)(samples())).backward()
    [(of, result)] = reports.calls
    assert of is quantity
    torch.testing.assert_close(result, truth(rows(samples())))


def test_several_quantities_in_their_order() -> None:
    quantities = [fxgrad.SquaredGrad(), fxgrad.ClippedGrad(C), fxgrad.NormSample()]
    reports = Reports()
    gs = view(net(), reports, quantities)
    loss_of(gs(samples())).backward()
    assert [quantity for quantity, _ in reports.calls] == quantities
    squares, clipping, norms = reports.results
    assert isinstance(clipping, fxgrad.Clipping)
    torch.testing.assert_close([clipping.norm_sample, norms], [norms_of(samples())] * 2)
    torch.testing.assert_close(squares["0.weight"], rows(samples())["0.weight"].square().sum(0))
    assert norms is fxgrad.result(gs, quantities[2])


def test_everything_is_delivered_by_then() -> None:
    """f may read every parameter, and zero."""
    model, quantity = net(), fxgrad.ClippedGrad(C)
    seen: list[dict[str, Any]] = []

    def read(_: Any, clipping: fxgrad.Clipping) -> None:
        seen.append({name: p.grad for name, p in model.named_parameters()})
        gs.zero_grad()

    gs = fxgrad.transform(model, quantity=quantity, backend="eager", on_result=read)
    weights = (C / norms_of(samples())).clamp(max=1)
    expected = {name: torch.einsum("n,n...->...", weights, g) for name, g in rows(samples()).items()}
    for step in range(2):
        loss_of(gs(samples())).backward()
        assert relative_error(seen[step], expected) < 1e-5
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(OptionError, match="no backward has run since"):
        fxgrad.result(gs, quantity)


def test_two_forwards_of_one_backward() -> None:
    """Their results add up, and are reported once."""
    reports = Reports()
    gs = view(net(), reports, fxgrad.GradSample())
    first, second = samples(seed=1), samples(seed=2)
    (loss_of(gs(first)) + loss_of(gs(second))).backward()
    [result] = reports.results
    one, other = rows(first), rows(second)
    torch.testing.assert_close(result, {name: one[name] + other[name] for name in one})


class Broken(nn.Module):
    """Three graphs: the first layer is in the first and the last, and a graph break calls nothing of the model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        y = self.second(h)
        torch._dynamo.graph_break()
        return torch.cat([y, torch.tanh(self.first(h))], 1)


BROKEN = {name: torch.ones_like(p) for name, p in Broken().named_parameters()}
IN_SEVERAL_GRAPHS: dict[str, tuple[fxgrad.Quantity, Callable[[Any], Any]]] = {
    "rows": (fxgrad.GradSample(), lambda rows: rows),
    "products": (fxgrad.GradDot(BROKEN), lambda rows: sum(g.flatten(1).sum(1) for g in rows.values())),
}


@pytest.mark.parametrize("n", [BATCH, 1])
@pytest.mark.parametrize("name", IN_SEVERAL_GRAPHS)
def test_graph_breaks(name: str, n: int) -> None:
    """One report for each backward, with what all graphs give together."""
    quantity, truth = IN_SEVERAL_GRAPHS[name]
    reports = Reports()
    gs = view(Broken(), reports, quantity, fullgraph=False)
    for seed in (1, 2):
        gs.zero_grad()
        x = samples(n, seed)
        loss_of(gs(x)).backward()
        assert len(reports.calls) == seed and reports.calls[-1][0] is quantity
        torch.testing.assert_close(reports.results[-1], truth(per_sample_grads(Broken(), loss_of, (x,))))


def test_quantities_in_several_graphs() -> None:
    """In the order of the list, each once."""
    quantities = [quantity for quantity, _ in IN_SEVERAL_GRAPHS.values()]
    reports = Reports()
    loss_of(view(Broken(), reports, quantities, fullgraph=False)(samples())).backward()
    assert [quantity for quantity, _ in reports.calls] == quantities
    expected = per_sample_grads(Broken(), loss_of, (samples(),))
    torch.testing.assert_close(reports.results, [truth(expected) for _, truth in IN_SEVERAL_GRAPHS.values()])


def test_a_graph_whose_output_the_loss_ignores() -> None:
    """The report has its parameters, with zeros."""
    reports = Reports()
    gs = view(Broken(), reports, fxgrad.GradSample(), fullgraph=False)
    loss_of(gs(samples())[:, 2:]).backward()
    [result] = reports.results
    torch.testing.assert_close(result, per_sample_grads(Broken(), lambda y: loss_of(y[:, 2:]), (samples(),)))
    assert not result["second.weight"].any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_the_model(reentrant: bool) -> None:
    """Reentrant ones run a backward of their own for each call, inside of the one that the user called."""
    reports = Reports()
    gs = view(net(), reports, fxgrad.GradSample())
    inputs = [samples(seed=seed).requires_grad_() for seed in (1, 2)]
    outputs = [checkpoint(gs, x, use_reentrant=reentrant) for x in inputs]
    (loss_of(outputs[0]) + loss_of(outputs[1])).backward()
    [result] = reports.results
    one, other = (rows(x.detach()) for x in inputs)
    torch.testing.assert_close(result, {name: one[name] + other[name] for name in one})


def test_a_checkpoint_beside_a_call() -> None:
    reports = Reports()
    gs = view(net(), reports, fxgrad.GradSample())
    inputs = [samples(seed=seed).requires_grad_() for seed in (1, 2)]
    outputs = [gs(inputs[0]), checkpoint(gs, inputs[1], use_reentrant=True)]
    (loss_of(outputs[0]) + loss_of(outputs[1])).backward()
    [result] = reports.results
    one, other = (rows(x.detach()) for x in inputs)
    torch.testing.assert_close(result, {name: one[name] + other[name] for name in one})


def test_no_backward_to_parameters_no_report() -> None:
    reports = Reports()
    gs = view(net(), reports)
    x = samples().requires_grad_()
    torch.autograd.grad(loss_of(gs(x)), x)
    with torch.no_grad():
        gs(x)
    assert not reports.calls


def test_a_backward_that_raises_reports_nothing() -> None:
    reports, model = Reports(), net()
    gs = view(model, reports, fxgrad.ClippedGrad(C))
    with pytest.raises(UnclippedGrad, match="not clipped"):
        (loss_of(gs(samples())) + model.get_parameter("0.weight").sum()).backward()
    assert not reports.calls
    loss_of(gs(samples())).backward()
    assert len(reports.calls) == 1


def test_an_exception_leaves_backward_and_what_is_delivered_stays() -> None:
    def fail(quantity: Any, _: Any) -> None:
        called.append(quantity)
        if len(called) == 1:
            raise ValueError("the disk is full")

    called: list[Any] = []
    model, quantities = net(), [fxgrad.ClippedGrad(C), fxgrad.NormSample()]
    gs = fxgrad.transform(model, quantity=quantities, backend="eager", on_result=fail)
    with pytest.raises(ValueError, match="the disk is full"):
        loss_of(gs(samples())).backward()
    assert called == quantities[:1]  # the second is not reported
    torch.testing.assert_close(fxgrad.result(gs, quantities[1]), norms_of(samples()))
    first = {name: p.grad for name, p in model.named_parameters()}
    gs.zero_grad()
    loss_of(gs(samples())).backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, first)
    assert called[1:] == quantities


def test_checks_ahead_of_the_first_step_report_nothing() -> None:
    reports = Reports()
    gs = view(net(), reports, check_first_batch=True)
    fxgrad.warm_up(gs, samples())
    assert fxgrad.verify(gs, samples()).ok
    outputs = gs(samples())
    assert not reports.calls
    loss_of(outputs).backward()
    assert len(reports.calls) == 1


def test_a_copy_reports_to_a_copy() -> None:
    """As Python copies a bound method; a plain function is shared."""
    reports = Reports()
    gs, kept = copy.deepcopy((view(net(), reports), reports))
    loss_of(gs(samples())).backward()
    assert len(kept.calls) == 1 and not reports.calls
    shared: list[Any] = []
    gs = copy.deepcopy(
        fxgrad.transform(net(), quantity=NORMS, backend="eager", on_result=lambda *one: shared.append(one))
    )
    loss_of(gs(samples())).backward()
    assert len(shared) == 1


SEEN: list[Any] = []


def note(quantity: Any, result: Any) -> None:
    SEEN.append(result)


def test_pickling() -> None:
    """The function is pickled as functions are: by its name."""
    SEEN.clear()
    gs = pickle.loads(pickle.dumps(fxgrad.transform(net(), quantity=NORMS, backend="eager", on_result=note)))
    loss_of(gs(samples())).backward()
    torch.testing.assert_close(SEEN, [norms_of(samples())])


def test_as_a_backend() -> None:
    reports = Reports()
    options: Any = {"backend": "eager", "quantity": NORMS, "on_result": reports.note}
    model = net()
    compiled = torch.compile(model, backend="fxgrad", options=options, fullgraph=True)
    for seed in (1, 2):
        fxgrad.zero_grad(model)
        loss_of(compiled(samples(seed=seed))).backward()
    torch.testing.assert_close(reports.results, [norms_of(samples(seed=seed)) for seed in (1, 2)])


@pytest.mark.parametrize("value", [NORMS, "print"])
def test_what_is_no_function(value: Any) -> None:
    for transformed in (
        lambda: fxgrad.transform(net(), on_result=value),
        lambda: torch.compile(net(), backend="fxgrad", options={"on_result": value})(samples()),
    ):
        with pytest.raises(Exception, match="on_result has to be a function of a quantity and its result, not"):
            transformed()


def test_distributed(tmp_path: Path) -> None:
    """Behind the averaging of p.grad, which is a callback of the backward, too."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, reports = net(), Reports()
        wrapped = DistributedDataParallel(view(model, reports, [fxgrad.Grad(), fxgrad.NormSample()]))
        loss_of(wrapped(samples())).backward()
        grads, norms = reports.results
        assert all(grads[name] is p.grad for name, p in model.named_parameters())
        torch.testing.assert_close(grads, {name: g.sum(0) for name, g in rows(samples()).items()})
        torch.testing.assert_close(norms, norms_of(samples()))
    finally:
        dist.destroy_process_group()


def test_a_step_of_the_kind_that_zeroes_at_once() -> None:
    """Hugging Face's Trainer calls model.zero_grad() before any callback of the user's."""
    reports, model = Reports(), net()
    gs = view(model, reports, fxgrad.ClippedGrad(C))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (1, 2):
        F.mse_loss(gs(samples(seed=seed)), torch.zeros(BATCH, 2).double(), reduction="sum").backward()
        optimizer.step()
        gs.zero_grad()
    assert [len(clipping.norm_sample) for clipping in reports.results] == [BATCH, BATCH]
