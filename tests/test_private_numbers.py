"""Numbers of a private step beside a float64 loop over single samples: adaptive C, bounds, E, losses and norms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.schedulers import ExponentialGradClip
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad.opacus
from fxgrad.errors import OptionError
from fxgrad.opacus import PrivacyEngine
from fxgrad.opacus.criterion import Criterion
from tests.opacus_settings import ADAPTIVE, WARNINGS

pytestmark = WARNINGS
MODES = pytest.mark.parametrize("mode", ["hooks", "ghost"])


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def samples(count: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64) * 10
    return x, torch.randint(2, (count,), generator=generator)


def make(model: nn.Module, mode: str, count: int = 16, batch: int = 8, **arguments: Any) -> tuple[Any, Any]:
    arguments = (
        dict[str, Any](noise_multiplier=0.0, max_grad_norm=1.0, loss_reduction="sum", poisson_sampling=False)
        | arguments
    )
    engine: Any = PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        criterion=nn.CrossEntropyLoss(reduction=arguments["loss_reduction"]),
        data_loader=DataLoader(TensorDataset(*samples(count)), batch_size=batch),
        grad_sample_mode=mode,
        backend="eager",
        **arguments,
    )
    return made[0], made[1]


def loop(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Return each sample's gradients of the trainable parameters, by plain autograd."""
    trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for sample, target in zip(x.split(1), y.split(1), strict=True):
        outputs = torch.func.functional_call(model, trained, (sample,))
        grads = torch.autograd.grad(F.cross_entropy(outputs, target), [*trained.values()])
        rows.append(dict(zip(trained, grads, strict=True)))
    return rows


def norms(rows: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([torch.stack([g.norm() for g in row.values()]).norm() for row in rows])


def step(trained: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(trained(x), y, reduction="sum").backward()
    optimizer.step()


@MODES
@pytest.mark.parametrize("cuts", [[16], [12, 4], [4, 12], [0, 16], [16, 0], [5, 0, 11]], ids=str)
def test_adaptive_clipping_counts_all_parts(mode: str, cuts: list[int]) -> None:
    """C becomes C exp(-η (share of unclipped samples - quantile)), in each of two logical batches."""
    x, y = samples()
    each = norms(loop(net(), x, y))
    order = each.argsort()
    bound = float(each[order[11:13]].mean())
    trained, optimizer = make(net(), mode, **ADAPTIVE | dict(unclipped_num_std=1e-9, max_grad_norm=bound))
    for _ in range(2):
        share = float((each < bound).double().mean())
        bound *= math.exp(-0.2 * (share - 0.5))
        for index, part in enumerate(order.split(cuts)):
            optimizer.signal_skip_step(index + 1 < len(cuts))
            step(trained, optimizer, x[part], y[part])
        assert float(optimizer.max_grad_norm) == pytest.approx(bound, rel=1e-6)


@MODES
def test_each_bound_stays_with_its_parameter(mode: str) -> None:
    model, bounds, (x, y) = net(), [0.1, 10.0, 0.2, 5.0], samples()
    by_name = {name: bound for (name, _), bound in zip(model.named_parameters(), bounds, strict=True)}
    trained, optimizer = make(model, mode, clipping="per_layer", max_grad_norm=bounds)
    for frozen in (None, "0.weight", "2.weight"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name != frozen)
        step(trained, optimizer, x, y)
        rows = loop(model, x, y)
        for name in rows[0]:
            clipped = [row[name] * min(1.0, by_name[name] / (float(row[name].norm()) + 1e-6)) for row in rows]
            torch.testing.assert_close(model.get_parameter(name).grad, sum(clipped))


def test_a_parameter_without_a_bound() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    trained, optimizer = make(model, "hooks", clipping="per_layer", max_grad_norm=[1.0] * 3)
    model[0].weight.requires_grad_(True)
    with pytest.raises(OptionError, match=r"of shape \[8, 3\], has no bound: clipping='per_layer' has one for each"):
        step(trained, optimizer, *samples())


@MODES
def test_a_bound_of_a_single_number(mode: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.layer(x)

    model, (x, y) = Scaled().double(), samples()
    trained, optimizer = make(model, mode, clipping="per_layer", max_grad_norm=[0.1] * 3)
    step(trained, optimizer, x, y)
    each = torch.stack([row["scale"] for row in loop(model, x, y)])
    torch.testing.assert_close(model.scale.grad, (each * (0.1 / (each.abs() + 1e-6)).clamp(max=1)).sum())


@MODES
@pytest.mark.parametrize("count, batch, expected", [(49, 1, 1), (98, 2, 2), (196, 4, 4), (64, 8, 8), (50, 8, 7)])
def test_the_expected_batch_size(mode: str, count: int, batch: int, expected: int) -> None:
    for poisson in (False, True):
        _, optimizer = make(net(), mode, count, batch, loss_reduction="mean", poisson_sampling=poisson)
        assert optimizer.expected_batch_size == expected


@MODES
@pytest.mark.parametrize("how", ["scheduler", "assign"])
def test_a_tensor_is_written_to_after_an_assignment(mode: str, how: str) -> None:
    bound, model, (x, y) = torch.tensor(1.0), net(), samples(1)
    trained, optimizer = make(model, mode, max_grad_norm=bound)
    if how == "scheduler":
        ExponentialGradClip(optimizer, gamma=0.5).step()
    else:
        optimizer.max_grad_norm = 0.5
    assert optimizer.max_grad_norm == float(bound) == 0.5
    bound.fill_(0.1)
    step(trained, optimizer, x, y)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert float(torch.stack([g.norm() for g in grads]).norm()) == pytest.approx(0.1, rel=1e-4)
    bound.fill_(-1.0)
    with pytest.raises(OptionError, match=r"max_grad_norm has to be a number, positive and finite, not -1\.0"):
        step(trained, optimizer, x, y)


@MODES
def test_a_step_inside_autocast(mode: str) -> None:
    sums = []
    for inside in (False, True):
        model, (x, y) = net().float(), samples()
        trained, optimizer = make(model, mode)
        optimizer.zero_grad()
        F.cross_entropy(trained(x.float()), y, reduction="sum").backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            optimizer.step()
        sums.append([p.grad for p in model.parameters()])
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("named", [0, 1, 2], ids=["", "target", "both"])
def test_ignored_tokens_are_not_counted(reduction: str, named: int) -> None:
    outputs, target = torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(5, (4, 6))
    target[0, 3:] = target[1] = -100
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    args = dict(input=outputs.flatten(0, 1), target=target.flatten())
    positional = [*args.values()][: 2 - named]
    kwargs = dict([*args.items()][2 - named :])
    each = [F.cross_entropy(o, t, reduction=reduction) for o, t in zip(outputs, target, strict=True)]
    wanted = getattr(torch.stack(each).nan_to_num(), reduction)()
    loss: Any = Criterion(nn.Linear(1, 1), None, criterion, reduction)
    torch.testing.assert_close(loss(*positional, shape=outputs.shape, **kwargs), wanted)
    assert criterion.reduction == reduction


@pytest.mark.parametrize("shape", [(2, 2, 6, 5), (4, 7, 5), (24,), (3,)])
def test_a_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    loss: Any = Criterion(nn.Linear(1, 1), None, nn.CrossEntropyLoss(), "mean")
    outputs, target = torch.randn(24, 5), torch.randint(5, (24,))
    if shape == (24,):
        torch.testing.assert_close(loss(outputs, target, shape=shape), F.cross_entropy(outputs, target))
        return
    with pytest.raises(OptionError, match=r"shape=\[.*\] means .* and the criterion returned losses of shape \[24\]"):
        loss(outputs, target, shape=shape)


def test_targets_that_cannot_be_seen() -> None:
    class Loss(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return super().forward(outputs, labels)

    loss: Any = Criterion(nn.Linear(1, 1), None, Loss(), "mean")
    outputs, labels = torch.randn(24, 5), torch.randint(5, (24,))
    with pytest.raises(OptionError, match="the mean leaves out targets of ignore_index=-100, and the criterion got no"):
        loss(outputs, labels=labels, shape=(4, 6, 5))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_sequences_is_that_of_the_criterion(reduction: str) -> None:
    args = torch.randn(20, 4, 5).log_softmax(2), torch.randint(1, 5, (4, 6)), torch.full((4,), 20)
    lengths, criterion = torch.tensor([6, 3, 2, 4]), nn.CTCLoss(reduction=reduction)
    loss: Any = Criterion(nn.Linear(1, 1), None, criterion, reduction)
    torch.testing.assert_close(loss(*args, lengths), criterion(*args, lengths))
    torch.testing.assert_close(loss(*args, target_lengths=lengths), criterion(*args, lengths))


def test_class_weights_divide_by_the_samples() -> None:
    weight, outputs, target = torch.rand(5), torch.randn(4, 5), torch.randint(5, (4,))
    loss: Any = Criterion(nn.Linear(1, 1), None, nn.CrossEntropyLoss(weight=weight), "mean")
    each = [weight[t] * F.cross_entropy(o, t) for o, t in zip(outputs, target, strict=True)]
    torch.testing.assert_close(loss(outputs, target), torch.stack(each).mean())


class OwnNorm(nn.InstanceNorm1d):
    pass


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, OwnNorm])
def test_norms_with_running_statistics(kind: Any, training: bool, affine: bool) -> None:
    norm = kind(2, track_running_stats=True, affine=affine).requires_grad_(not training).train(training)
    advice = "Make it with track_running_stats=False" if kind is OwnNorm else "Pass fix=True"
    with pytest.raises(UnsupportedModuleError, match=rf"(?s){kind.__name__} '0': We do not support.*{advice}"):
        fxgrad.opacus.validate(nn.Sequential(norm))
    fxgrad.opacus.validate(nn.Sequential(kind(2, affine=affine).train(training)))
