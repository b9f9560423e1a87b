"""Under Opacus's optimizers, loaders and accountants: the same parameters as with its hooks, or a refusal."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from opacus.schedulers import ExponentialGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
import fxgrad.opacus as private
from fxgrad.errors import AlreadySet, MixedSamples, OptionError, UnaccountedGrad, UnclippedGrad, UnknownArgument
from fxgrad.opacus.checked_step import CheckedStep
from tests.opacus_settings import ADAPTIVE, WARNINGS

pytestmark = WARNINGS

STEPS, TOLERANCE = 20, 1e-5
Loss = Callable[[Tensor, Tensor], Tensor]


def data(n: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 5, 3, generator=generator), torch.randint(4, (n,), generator=generator))


class Words(nn.Module):
    """Layers whose parameters are used at every position, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))).mean(1))
        return out


class Recurrent(nn.Module):
    lstm: Any
    attention: Any

    def __init__(self, lstm: Any, attention: Any) -> None:
        super().__init__()
        self.lstm, self.attention, self.last = lstm, attention, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        out: Tensor = self.last(self.attention(h, h, h)[0].mean(1))
        return out


class WrittenOut(nn.Module):
    """nn.MultiheadAttention in linear layers; Opacus's own is another function where the batch comes first."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.heads, size = attention.num_heads, attention.embed_dim
        self.inputs = nn.ModuleList(nn.Linear(size, size) for _ in range(3))
        self.out = nn.Linear(size, size)
        self.out.load_state_dict(attention.out_proj.state_dict())
        with torch.no_grad():
            for i, part in enumerate(self.inputs):
                part.get_parameter("weight").copy_(attention.in_proj_weight.chunk(3)[i])
                part.get_parameter("bias").copy_(attention.in_proj_bias.chunk(3)[i])

    def together(self) -> list[Tensor]:
        """In the order of nn.MultiheadAttention's parameters."""
        parts: list[Any] = [*self.inputs]
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        return [weight, bias, self.out.weight, self.out.bias]

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        values = (part(x).unflatten(-1, (self.heads, -1)) for part, x in zip(self.inputs, inputs, strict=True))
        found = F.scaled_dot_product_attention(*(value.transpose(1, 2) for value in values))
        return (self.out(found.transpose(1, 2).flatten(-2)),)


def words(seed: int = 0) -> Words:
    torch.manual_seed(seed)
    return Words()


def fxgrads(engine: PrivacyEngine, model: nn.Module, **arguments: Any) -> tuple[Any, Any, Any]:
    arguments.setdefault("backend", "eager")
    return private.make_private(engine, module=model, **arguments)


def hooks(engine: PrivacyEngine, model: nn.Module, **arguments: Any) -> tuple[Any, Any, Any]:
    made: tuple[Any, Any, Any] = engine.make_private(module=model, **arguments)
    return made


def trained(
    make: Callable[..., tuple[Any, Any, Any]],
    model: nn.Module,
    *,
    batch: int = 8,
    physical: int | None = None,
    accumulated: int = 1,
    **arguments: Any,
) -> tuple[dict[str, Tensor], list[int], PrivacyEngine]:
    """The parameters after STEPS steps without noise, the sizes of the batches, and what counted them."""
    arguments = dict[str, Any](noise_multiplier=0.0, max_grad_norm=0.2, loss_reduction="mean") | arguments
    engine = PrivacyEngine(accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = DataLoader(data(), batch_size=batch, generator=torch.Generator().manual_seed(2))
    model, optimizer, loader = make(engine, model, optimizer=optimizer, data_loader=loader, **arguments)
    torch.manual_seed(3)  # the noise of what adaptive clipping counts
    sizes: list[int] = []
    while len(engine.accountant) == 0 or engine.accountant.history[-1][2] < STEPS:
        with physical_batches(loader, optimizer, physical) as batches:
            for x, y in batches:
                F.cross_entropy(model(x), y, reduction=arguments["loss_reduction"]).backward()
                sizes.append(len(x))
                if len(sizes) % accumulated == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if len(engine.accountant) and engine.accountant.history[-1][2] == STEPS:
                    break
    names = {name.removeprefix("_module."): p.detach() for name, p in model.named_parameters()}
    return names, sizes, engine


def physical_batches(loader: Any, optimizer: Any, physical: int | None) -> Any:
    if physical is None:
        return contextlib.nullcontext(loader)
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)


def without(arguments: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != key}


def is_long(value: Any) -> bool:
    return isinstance(value, list)


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - p).abs().max().item() for name, p in theirs.items())


@pytest.mark.parametrize(
    "arguments",
    [
        dict(),
        dict(loss_reduction="sum", max_grad_norm=0.02),
        dict(batch=1),
        dict(physical=3),
        dict(clipping="per_layer", max_grad_norm=[0.1, 0.05, 0.2, 0.1, 0.2, 0.1]),
        dict(ADAPTIVE, batch=16),
        dict(poisson_sampling=False, accumulated=2),
        dict(backend="aot_eager"),
        dict(one_backward=True),
        dict(one_backward=True, loss_reduction="sum", max_grad_norm=0.02),
        dict(one_backward=True, batch=1),
        dict(one_backward=True, physical=3),
        dict(one_backward=True, poisson_sampling=False, accumulated=2),
    ],
    ids=lambda arguments: ", ".join(f"{name}={value}" for name, value in arguments.items() if not is_long(value)),
)
def test_the_parameters_after_twenty_steps_are_those_of_opacus_hooks(arguments: dict[str, Any]) -> None:
    ours, sizes, engine = trained(fxgrads, words(), **arguments)
    for ours_alone in ("backend", "one_backward"):
        arguments = without(arguments, ours_alone)
    theirs, their_sizes, their_engine = trained(hooks, words(), **arguments)
    assert sizes == their_sizes
    assert (0 in sizes) == (arguments.get("batch") == 1)
    if "physical" in arguments:
        assert max(sizes) == 3 and len(sizes) > STEPS
    assert engine.accountant.history == their_engine.accountant.history
    assert largest_difference(ours, dict(words().named_parameters())) > 1e-2
    assert largest_difference(ours, theirs) <= TOLERANCE


def test_recurrent_layers_and_attention_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM(3, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True))
    replaced = Recurrent(DPLSTM(3, 4, batch_first=True), WrittenOut(model.attention))
    replaced.lstm.load_state_dict(model.lstm.state_dict())
    replaced.last.load_state_dict(model.last.state_dict())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours, _, _ = trained(fxgrads, model)
    trained(hooks, replaced)
    assert largest_difference(ours, before) > 1e-2
    for part, theirs in (model.lstm, replaced.lstm), (model.last, replaced.last):
        assert largest_difference(part.state_dict(), theirs.state_dict()) <= TOLERANCE
    for p, theirs in zip(model.attention.parameters(), replaced.attention.together(), strict=True):
        assert (p - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("clipping", [DPOptimizer, DPPerLayerOptimizer, AdaClipDPOptimizer])
def test_the_optimizers_are_opacus_own(clipping: type) -> None:
    kinds: dict[type, dict[str, Any]] = {
        DPPerLayerOptimizer: dict(clipping="per_layer", max_grad_norm=[1.0] * 6),
        AdaClipDPOptimizer: ADAPTIVE,
    }
    model: Any = words()
    made, optimizer, _ = make(model, **kinds.get(clipping, {}))
    assert isinstance(optimizer, clipping)
    step: Any = super(CheckedStep, optimizer).step  # type: ignore[misc]
    assert step.__func__ is vars(DPOptimizer)["step"]
    assert isinstance(made, Words) and made.first is model.first
    made(torch.randn(7, 5, 3)).sum().backward()
    assert made.first.weight.grad_sample.shape == (7, 6, 3)
    assert made.first.weight.grad is None


def make(model: nn.Module, **arguments: Any) -> tuple[Any, Any, Any]:
    arguments = dict(noise_multiplier=1.0, max_grad_norm=1.0, data_loader=DataLoader(data(), 8)) | arguments
    arguments.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return fxgrads(PrivacyEngine(accountant="rdp"), model, **arguments)


class TestOneBackward:
    def test_no_gradient_per_sample_is_kept_and_the_norms_are_told(self) -> None:
        model = words()
        made, optimizer, _ = make(model, one_backward=True, max_grad_norm=0.1)
        assert isinstance(optimizer, DPOptimizerFastGradientClipping)
        made(torch.randn(7, 5, 3)).mean().backward()
        assert made.first.weight.grad_sample is None and made.first.weight.grad.shape == (6, 3)
        assert fxgrad.result(made, fxgrad.ClippedGrad(max_grad_norm=0.1)).norm_sample.shape == (7,)

    def test_a_forgotten_zero_grad_counts_nothing_twice(self) -> None:
        """Opacus's virtual steps leave p.grad as it is: the next backward would add to it."""
        model, other = words(), words()
        x = torch.randn(6, 5, 3)
        made, optimizer, _ = make(model, one_backward=True, noise_multiplier=0.0, max_grad_norm=0.1)
        for i, part in enumerate(x.split(3)):
            optimizer.signal_skip_step(i == 0)
            made(part).square().sum().div(3).backward()
            optimizer.step()
        whole, optimizer, _ = make(other, one_backward=True, noise_multiplier=0.0, max_grad_norm=0.1)
        whole(x).square().sum().div(6).backward()
        optimizer.step()
        assert largest_difference(dict(model.named_parameters()), dict(other.named_parameters())) <= TOLERANCE

    def test_noise_is_that_of_opacus(self) -> None:
        """The same generator gives the same noise."""
        models = {one_backward: words() for one_backward in (True, False)}
        for one_backward, model in models.items():
            generator = torch.Generator().manual_seed(5)
            made, optimizer, _ = make(model, one_backward=one_backward, noise_generator=generator)
            made(data()[:8][0]).square().sum().div(8).backward()
            optimizer.step()
        first, second = (dict(model.named_parameters()) for model in models.values())
        assert largest_difference(first, second) <= TOLERANCE
        assert largest_difference(first, dict(words().named_parameters())) > 1e-2

    def test_two_backwards_for_one_step_under_poisson_sampling(self) -> None:
        made, optimizer, _ = make(words(), one_backward=True)
        for _ in range(2):
            made(torch.randn(7, 5, 3)).mean().backward()
        with pytest.raises(AlreadySet, match=r"2 backwards have added to p.grad since the last step"):
            optimizer.step()
        optimizer.zero_grad()
        made(torch.randn(7, 5, 3)).mean().backward()
        optimizer.step()

    @pytest.mark.parametrize("before", [0, 1])
    def test_a_backward_that_did_not_clip(self, before: int) -> None:
        model = words()
        made, _, _ = make(model, one_backward=True, poisson_sampling=False)
        for _ in range(before):
            made(torch.randn(7, 5, 3)).mean().backward()
        left = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
        with pytest.raises(UnclippedGrad, match=r"arrived at parameter '.*': it was used outside"):
            model(torch.randn(7, 5, 3)).mean().backward()
        found = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
        assert all(a.equal(b) for a, b in zip(found, left, strict=True))

    def test_a_norm_that_changes_between_backward_and_step(self) -> None:
        made, optimizer, _ = make(words(), one_backward=True)
        scheduler = ExponentialGradClip(optimizer, gamma=0.5)
        made(torch.randn(7, 5, 3)).mean().backward()
        scheduler.step()
        with pytest.raises(
            OptionError, match=r"max_grad_norm is 0.5 and the backward clipped to 1.0.*\n  Change it bef"
        ):
            optimizer.step()
        optimizer.zero_grad()
        made(torch.randn(7, 5, 3)).mean().backward()
        optimizer.step()

    def test_a_norm_that_a_transformed_model_has_as_a_number(self) -> None:
        view = fxgrad.transform(words(), loss_reduction="mean", quantity=fxgrad.ClippedGrad(1.0), backend="eager")
        made, optimizer, _ = make(view, one_backward=True)
        optimizer.max_grad_norm = 0.5
        made(torch.randn(7, 5, 3)).mean().backward()
        with pytest.raises(OptionError, match=r"clipped to 1.0: .*\n  Give make_private the model itself"):
            optimizer.step()
        with pytest.raises(OptionError, match=r"clipping='adaptive' changes C, .* transformed for the number 0.5"):
            view = fxgrad.transform(words(), loss_reduction="mean", quantity=fxgrad.ClippedGrad(0.5), backend="eager")
            make(view, one_backward=True, **ADAPTIVE)

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
    def test_a_norm_that_comes_to_bound_nothing(self, value: float) -> None:
        bound = torch.tensor(1.0)
        made, optimizer, _ = make(words(), one_backward=True, max_grad_norm=bound)
        bound.fill_(value)
        made(torch.randn(7, 5, 3)).mean().backward()
        with pytest.raises(OptionError, match="max_grad_norm has to be a number, positive and finite"):
            optimizer.step()
        bound.fill_(1.0)
        if value < math.inf:
            with pytest.raises(OptionError, match="max_grad_norm has to be a number, positive"):
                optimizer.max_grad_norm = value
        assert optimizer.max_grad_norm == 1.0 == float(bound)

    @pytest.mark.parametrize(
        "bound", [torch.ones(1), torch.tensor(1), torch.ones((), requires_grad=True), torch.ones((), device="meta")]
    )
    def test_tensors_that_cannot_be_the_norm(self, bound: Tensor) -> None:
        with pytest.raises(OptionError, match=r"max_grad_norm is a tensor of shape .* it has to be 0-dim"):
            make(words(), one_backward=True, max_grad_norm=bound)

    def test_a_tensor_that_the_model_is_not_transformed_for(self) -> None:
        quantity = fxgrad.ClippedGrad(torch.tensor(1.0))
        view = fxgrad.transform(words(), loss_reduction="mean", quantity=quantity, backend="eager")
        with pytest.raises(OptionError, match="transformed for another one: writes to it would do nothing"):
            make(view, one_backward=True, max_grad_norm=torch.tensor(1.0))
        _, optimizer, _ = make(view, one_backward=True, max_grad_norm=0.5)
        assert optimizer.max_grad_norm == 0.5 == float(quantity.max_grad_norm)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "quantity",
        [
            fxgrad.GradSample(),
            fxgrad.ClippedGrad(max_grad_norm=2.0),
            fxgrad.ClippedGrad(max_grad_norm=1.0, weights=lambda n: 1 / n),
            fxgrad.ClippedGrad(max_grad_norm=1.0, sample_weight=True),
            fxgrad.ClippedGrad(max_grad_norm=1.0, groups="per_parameter"),
            fxgrad.ClippedGrad(max_grad_norm=1.0, group_size=2),
        ],
        ids=str,
    )
    def test_a_model_transformed_for_something_else(self, quantity: Any) -> None:
        view = fxgrad.transform(words(), loss_reduction="mean", quantity=quantity)
        with pytest.raises(OptionError, match="and Opacus's optimizer needs ClippedGrad"):
            make(view, one_backward=True)

    def test_a_model_that_reports_its_results(self) -> None:
        """Once for each backward, also of an empty batch; nothing in the check of the first batch or in a step."""
        reports: list[Any] = []
        clipped = fxgrad.ClippedGrad(max_grad_norm=1.0)
        view = fxgrad.transform(
            words(),
            quantity=clipped,
            loss_reduction="mean",
            backend="eager",
            check_first_batch=True,
            on_result=lambda *report: reports.append(report),
        )
        made, optimizer, _ = make(view, one_backward=True)
        for n in (7, 0, 3):
            optimizer.zero_grad()
            made(torch.randn(n, 5, 3)).mean(1).sum().backward()
            optimizer.step()
        assert [(of, len(result.norm_sample)) for of, result in reports] == [(clipped, 7), (clipped, 0), (clipped, 3)]

    @pytest.mark.parametrize("weights", ["clip", "automatic"])
    def test_a_model_transformed_for_it(self, weights: Any) -> None:
        quantities = [fxgrad.NormSample(), fxgrad.ClippedGrad(max_grad_norm=1.0, weights=weights)]
        view = fxgrad.transform(words(), loss_reduction="mean", quantity=quantities, backend="eager")
        made, optimizer, _ = make(view, one_backward=True)
        assert made is view
        made(torch.randn(7, 5, 3)).mean().backward()
        optimizer.step()


def test_a_privacy_budget_decides_about_the_noise() -> None:
    model, engine = words(), PrivacyEngine(accountant="rdp")
    budget = dict(target_epsilon=5.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0)
    made, optimizer, loader = private.make_private_with_epsilon(
        engine,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), 8),
        backend="eager",
        **budget,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(made(x), y).backward()
        optimizer.step()
    assert optimizer.noise_multiplier > 0.5
    assert 4.0 < engine.get_epsilon(1e-3) <= 5.0


BUDGET: dict[str, Any] = dict(target_epsilon=5.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0, backend="eager")


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning")
class TestBudget:
    def noise(self, accountant: str = "rdp", **arguments: Any) -> float:
        return float(self.prepared(private.make_private_with_epsilon, accountant, **BUDGET | arguments))

    def opacus_noise(self, accountant: str = "rdp", **arguments: Any) -> float:
        def make(engine: PrivacyEngine, **arguments: Any) -> Any:
            return engine.make_private_with_epsilon(**arguments)

        return float(self.prepared(make, accountant, **without(BUDGET, "backend") | arguments))

    def prepared(self, make: Callable[..., Any], accountant: str, **arguments: Any) -> Any:
        model, engine = words(), PrivacyEngine(accountant=accountant)
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), 8)
        return make(engine, module=model, optimizer=optimizer, data_loader=loader, **arguments)[1].noise_multiplier

    @pytest.mark.filterwarnings("ignore:Optimal order is the (smallest|largest) alpha:UserWarning")
    @pytest.mark.parametrize(
        "accountant, arguments",
        [
            ("rdp", dict(epsilon_tolerance=1.0)),
            ("rdp", dict(alphas=[2.0, 3.0])),
            ("rdp", dict(epsilon_tolerance=1e-3, alphas=[4.0, 5.0])),
            ("gdp", dict(poisson=False, target_delta=1e-6)),
            ("prv", dict(eps_error=0.5, delta_error=1e-4)),
        ],
        ids=str,
    )
    def test_what_it_is_computed_with_is_passed_on(self, accountant: str, arguments: dict[str, Any]) -> None:
        noise = self.noise(accountant, **arguments)
        assert noise == self.opacus_noise(accountant, **arguments)
        assert noise != self.noise(accountant, target_delta=arguments.get("target_delta", 1e-3))

    @pytest.mark.parametrize("accountant, name", [("gdp", "alphas"), ("prv", "alphas"), ("rdp", "poisson")])
    def test_an_argument_of_another_accountant(self, accountant: str, name: str) -> None:
        with pytest.raises(TypeError, match=f"make_private_with_epsilon got an unexpected argument '{name}'"):
            self.noise(accountant, **{name: [2.0]})

    def test_misspelt_arguments(self) -> None:
        with pytest.raises(TypeError, match=r"unexpected argument 'alpha'\n  Did you mean 'alphas'\?"):
            self.noise(alpha=[2.0])
        with pytest.raises(TypeError, match=r"unexpected argument 'onebackward'\n  Did you mean 'one_backward'\?"):
            self.noise(onebackward=True)
        with pytest.raises(TypeError, match=r"unexpected argument 'noise_multiplier'"):
            self.noise(noise_multiplier=1.0)

    @pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan"), "0.1"])
    def test_a_tolerance_that_ends_no_search(self, tolerance: Any) -> None:
        with pytest.raises(OptionError, match="epsilon_tolerance has to be a number, positive and finite"):
            self.noise(epsilon_tolerance=tolerance)

    def test_a_budget_of_which_some_is_spent(self) -> None:
        model, engine = words(), PrivacyEngine(accountant="rdp")
        engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), 8)
        with pytest.warns(UserWarning, match="non-zero privacy budget already spent"):
            private.make_private_with_epsilon(engine, module=model, optimizer=optimizer, data_loader=loader, **BUDGET)


class TestArguments:
    """Every one of these is refused before anything is prepared."""

    @pytest.mark.parametrize(
        "name, meant",
        [
            ("onebackward", "one_backward"),
            ("poison_sampling", "poisson_sampling"),
            ("noise_multipliers", "noise_multiplier"),
            ("rand_on_emtpy", "rand_on_empty"),
            ("target_unclipped_quantiles", "target_unclipped_quantile"),
        ],
    )
    def test_a_misspelt_name(self, name: str, meant: str) -> None:
        model = words()
        sentence = rf"make_private got an unexpected argument '{name}'\n  Did you mean"
        with pytest.raises(UnknownArgument, match=sentence) as raised:
            make(model, **{name: 1.0})
        assert isinstance(raised.value, TypeError) and f"'{meant}'" in raised.value.advice
        assert not any(hasattr(p, "summed_grad") for p in model.parameters())

    def test_a_name_that_is_like_no_other(self) -> None:
        with pytest.raises(TypeError, match=r"argument 'xyz'\n  It takes module, optimizer, .*rand_on_empty"):
            make(words(), xyz=1)

    @pytest.mark.parametrize("name", ["on_result", "in_dims", "batch_size", "strategy", "memory_limit", "quantity"])
    def test_an_option_of_transform(self, name: str) -> None:
        advice = rf"It is an option of fxgrad\.transform\. Pass make_private .* fxgrad\.transform\(module, {name}=\.\."
        with pytest.raises(UnknownArgument, match=rf"unexpected argument '{name}'\n  {advice}"):
            make(words(), **{name: print})

    @pytest.mark.parametrize("name", ["grad_sample_mode", "wrap_model"])
    def test_what_opacus_would_compute_gradients_with(self, name: str) -> None:
        with pytest.raises(TypeError, match=rf"unexpected argument '{name}'\n  Leave it out: fxgrad computes"):
            make(words(), **{name: "hooks"})

    def test_groups_of_rows(self) -> None:
        with pytest.raises(UnknownArgument, match=r"argument 'group_size'\n  Opacus's accountants count rows"):
            make(words(), group_size=2)

    @pytest.mark.parametrize("one_backward", [False, True])
    def test_an_optimizer_made_before_the_model_was_replaced(self, one_backward: bool) -> None:
        optimizer = torch.optim.SGD(words().parameters(), lr=0.1)
        with pytest.raises(
            OptionError, match=r"of the optimizer, of shape \[.*\], is not the model's\n  Make the optim"
        ):
            make(words(), optimizer=optimizer, one_backward=one_backward)

    @pytest.mark.parametrize("clipping", ["flat", "per_layer"])
    def test_an_argument_of_another_clipping(self, clipping: str) -> None:
        bound = [1.0] * 6 if clipping == "per_layer" else 1.0
        with pytest.raises(OptionError, match="max_clipbound is an argument of clipping='adaptive'"):
            make(words(), clipping=clipping, max_grad_norm=bound, max_clipbound=1.0)

    def test_an_argument_that_adaptive_clipping_needs(self) -> None:
        with pytest.raises(OptionError, match="clipping='adaptive' needs max_clipbound"):
            make(words(), **without(ADAPTIVE, "max_clipbound"))

    def test_another_clipping(self) -> None:
        known = r"clipping has to be 'flat', 'per_layer', 'adaptive', 'automatic' or a function of the norms"
        for one_backward in (False, True):
            with pytest.raises(OptionError, match=known + r", not 'per_layers'\n  Did you mean 'per_layer'\?"):
                make(words(), clipping="per_layers", one_backward=one_backward)
            with pytest.raises(OptionError, match=known + ", not 'banana'\n  'flat' is DP-SGD's"):
                make(words(), clipping="banana", one_backward=one_backward)

    @pytest.mark.parametrize("clipping", ["automatic", torch.ones_like])
    def test_clipping_that_opacus_does_not_have(self, clipping: Any) -> None:
        with pytest.raises(OptionError, match=r"is computed in the backward.*\n  Pass one_backward=True, or"):
            make(words(), clipping=clipping)

    @pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf, True, "1", None])
    def test_a_noise_multiplier_that_is_none(self, noise: Any) -> None:
        with pytest.raises(OptionError, match="noise_multiplier has to be a number, 0 or more and finite"):
            make(words(), noise_multiplier=noise)

    @pytest.mark.parametrize("one_backward", [False, True])
    @pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, True, "1", None])
    def test_a_norm_that_bounds_nothing(self, bound: Any, one_backward: bool) -> None:
        with pytest.raises(OptionError, match="max_grad_norm has to be a number, positive and finite"):
            make(words(), max_grad_norm=bound, one_backward=one_backward)

    @pytest.mark.parametrize("one_backward", [False, True])
    def test_numbers_of_numpy(self, one_backward: bool) -> None:
        made, optimizer, _ = make(
            words(), noise_multiplier=np.float64(1), max_grad_norm=np.float32(1), one_backward=one_backward
        )
        made(torch.randn(7, 5, 3)).mean().backward()
        optimizer.step()

    @pytest.mark.parametrize("bound", [math.inf, math.nan, 0.0, True])
    def test_a_norm_among_others_that_bounds_nothing(self, bound: Any) -> None:
        with pytest.raises(OptionError, match="max_grad_norm has to be a number, positive and finite"):
            make(words(), clipping="per_layer", max_grad_norm=[1.0] * 5 + [bound])

    def test_norms_for_other_parameters(self) -> None:
        with pytest.raises(OptionError, match=r"clipping='per_layer' needs 6 numbers .*, not 5"):
            make(words(), clipping="per_layer", max_grad_norm=[1.0] * 5)
        with pytest.raises(OptionError, match=r"clipping='per_layer' needs 6 numbers .*, not 1.0"):
            make(words(), clipping="per_layer", max_grad_norm=1.0)
        with pytest.raises(OptionError, match="clipping='flat' needs one number as max_grad_norm"):
            make(words(), max_grad_norm=[1.0] * 6)

    @pytest.mark.parametrize("name", [name for name in ADAPTIVE if name not in ("clipping", "max_grad_norm")])
    def test_numbers_of_adaptive_clipping(self, name: str) -> None:
        for value in math.nan, -1.0:
            with pytest.raises(OptionError, match=f"{name} has to be a number"):
                make(words(), **ADAPTIVE | {name: value})

    @pytest.mark.parametrize("max_clipbound, std", [(1e-2, 1.0), (1.0, 0.5)])
    def test_numbers_of_adaptive_clipping_together(self, max_clipbound: float, std: float) -> None:
        arguments = ADAPTIVE | dict(max_clipbound=max_clipbound, unclipped_num_std=std)
        with pytest.raises(OptionError, match=r"max_clipbound has to be above|noise_multiplier has to be below"):
            make(words(), noise_multiplier=1.0, **arguments)

    def test_samples_on_another_dimension(self) -> None:
        make(words(), batch_first=True)
        with pytest.raises(OptionError, match=r"batch_first=False .*\n  Pass a model that fxgrad.transform made"):
            make(words(), batch_first=False)

    @pytest.mark.parametrize("one_backward", [False, True])
    def test_a_fixed_batch_size_under_poisson_sampling(self, one_backward: bool) -> None:
        quantity = fxgrad.ClippedGrad(1.0) if one_backward else fxgrad.GradSample()
        view = fxgrad.transform(words(), quantity=quantity, loss_reduction="mean", backend="eager", batch_size=7)
        with pytest.raises(OptionError, match="batch_size=7, and Poisson sampling draws batches of every size"):
            make(view, one_backward=one_backward)
        make(view, one_backward=one_backward, poisson_sampling=False)


class TestAdaptive:
    """An empty batch is a step like others: noise, and a share of unclipped samples that is noise."""

    def stepped(self, size: int, noise: float = 0.0) -> tuple[Words, Any]:
        model = words()
        generator = torch.Generator().manual_seed(5)
        arguments = dict(ADAPTIVE, noise_multiplier=noise, noise_generator=generator)
        made, optimizer, _ = make(model, **arguments)
        made(torch.randn(size, 5, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    def test_the_bound_after_an_empty_batch(self) -> None:
        model, optimizer = self.stepped(0)
        drawn = torch.normal(0.0, 1.0, (), generator=torch.Generator().manual_seed(5))
        share = drawn / optimizer.expected_batch_size
        assert float(optimizer.max_grad_norm) == pytest.approx(0.5 * float(torch.exp(-0.2 * (share - 0.5))))
        assert largest_difference(dict(model.named_parameters()), dict(words().named_parameters())) == 0

    def test_the_noise_of_an_empty_batch(self) -> None:
        model, optimizer = self.stepped(0, noise=1.0)
        assert math.isfinite(optimizer.max_grad_norm)
        assert 0 < largest_difference(dict(model.named_parameters()), dict(words().named_parameters())) < 1
        assert all(p.isfinite().all() for p in model.parameters())

    def test_batches_some_of_which_are_empty(self) -> None:
        ours, sizes, engine = trained(fxgrads, words(), batch=1, **ADAPTIVE)
        assert 0 in sizes and engine.accountant.history[-1][2] == STEPS
        assert all(p.isfinite().all() for p in ours.values())


@pytest.mark.parametrize(
    "arguments",
    [dict(), dict(one_backward=True), ADAPTIVE, dict(clipping="per_layer", max_grad_norm=[1.0] * 6)],
    ids=["flat", "one_backward", "adaptive", "per_layer"],
)
class TestCopies:
    """A copy would be of the parameters too, of which no model knows; PyTorch's changes the class."""

    def step(self, made: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        made(torch.randn(7, 5, 3)).mean().backward()
        optimizer.step()

    @pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
    def test_a_copy_is_refused_and_changes_nothing(self, arguments: dict[str, Any], copied: Callable[..., Any]) -> None:
        prepared = [make(words(), **arguments) for _ in range(2)]
        with pytest.raises(OptionError, match=r"cannot be copied.*\n  .*state_dict\(\)"):
            copied(prepared[0][1])
        for made, optimizer, _ in prepared:
            self.step(made, optimizer)

    def test_a_copy_of_opacus_own_changes_nothing(self, arguments: dict[str, Any]) -> None:
        made, optimizer, _ = make(words(), **arguments)
        kind: Any = DPOptimizer
        step = kind.step
        model = words()
        plain = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), 8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )[1]
        try:
            with pytest.raises(AttributeError, match="'DPOptimizer' object has no attribute 'original_optimizer'"):
                copy.deepcopy(plain)
            assert kind.step is not step  # PyTorch has put another in its place
            self.step(made, optimizer)
        finally:
            kind.step = step

    def test_its_state_is_saved_and_loaded(self, arguments: dict[str, Any]) -> None:
        made, optimizer, _ = make(words(), **arguments)
        self.step(made, optimizer)
        other, second, _ = make(words(), **arguments)
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.step(other, second)


class TestSeveralProcesses:
    """What one process can see of it; tests/test_distributed.py has two."""

    @pytest.fixture()
    def two(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        def begin() -> None:
            monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
            monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)  # for Dynamo's log

        return begin

    @pytest.mark.parametrize("one_backward", [False, True])
    def test_a_model_that_is_not_wrapped(self, two: Callable[[], None], one_backward: bool) -> None:
        two()
        recipe = r"\n  Pass make_private the wrapped model, module=DistributedDataParallel\(model\).*independent=True"
        with pytest.raises(OptionError, match="2 processes train, and the model is not wrapped.*" + recipe):
            make(words(), one_backward=one_backward)

    @pytest.mark.parametrize("one_backward", [False, True])
    def test_processes_that_begin_later(self, two: Callable[[], None], one_backward: bool) -> None:
        model = words()
        made, optimizer, _ = make(model, one_backward=one_backward)
        made(torch.randn(7, 5, 3)).mean().backward()
        two()
        with pytest.raises(OptionError, match="2 processes train, and the model is not wrapped"):
            optimizer.step()
        assert largest_difference(dict(model.named_parameters()), dict(words().named_parameters())) == 0

    @pytest.mark.parametrize("one_backward", [False, True])
    def test_processes_that_train_models_of_their_own(self, two: Callable[[], None], one_backward: bool) -> None:
        two()
        made, optimizer, _ = make(words(), one_backward=one_backward, independent=True)
        made(torch.randn(7, 5, 3)).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("one_backward", [False, True])
def test_a_static_graph_of_distributed_data_parallel(one_backward: bool, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(words(), static_graph=True)
        with pytest.raises(OptionError, match=r"static_graph=True\) averages in every backward"):
            make(wrapped, one_backward=one_backward)
    finally:
        torch.distributed.destroy_process_group()


class TestValidator:
    @pytest.mark.parametrize("layer", [nn.RNN(3, 4), nn.LSTM(3, 4), nn.GRU(3, 4), nn.MultiheadAttention(4, 2)], ids=str)
    def test_what_fxgrad_takes_passes(self, layer: nn.Module) -> None:
        private.validate(nn.Sequential(layer))
        private.validate(layer)

    @pytest.mark.parametrize("norm", [nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False), nn.SyncBatchNorm(5)], ids=str)
    def test_batch_norm_in_training_mode_is_refused(self, norm: nn.Module) -> None:
        with pytest.raises(UnsupportedModuleError, match=r"BatchNorm.*'1'.*cannot support training"):
            make(nn.Sequential(nn.Linear(3, 3), norm))

    def test_nothing_trainable_is_no_excuse_for_batch_statistics(self) -> None:
        with pytest.raises(UnsupportedModuleError, match="BatchNorm1d '1'"):
            make(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(5).requires_grad_(False)))

    def test_batch_norm_with_fixed_statistics_trains_until_they_are_not(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(5))
        model[1].eval()
        made, optimizer, _ = make(model)
        made(torch.randn(7, 5, 3)).sum().backward()
        assert made[1].weight.grad_sample.shape == (7, 5)
        optimizer.zero_grad()
        model.train()
        with pytest.raises(MixedSamples, match="batch_norm in training mode"):
            made(torch.randn(7, 5, 3))

    def test_running_statistics_of_instance_norm_are_refused(self) -> None:
        with pytest.raises(UnsupportedModuleError, match="tracking running stats"):
            make(nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(5, track_running_stats=True)))

    def test_eval_mode_is_refused(self) -> None:
        with pytest.raises(UnsupportedModuleError, match="training mode"):
            make(words().eval())

    def test_the_engine_is_left_as_it_was(self) -> None:
        engine = PrivacyEngine(accountant="rdp")
        model = nn.Sequential(nn.LSTM(3, 4))
        arguments: dict[str, Any] = dict(
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data(), 8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        fxgrads(engine, model, **arguments)
        with pytest.raises(UnsupportedModuleError, match=r"We do not support nn\.LSTM"):
            engine.make_private(module=model, **arguments)


class TestRefusals:
    @pytest.mark.parametrize("transformed, given", [("sum", "mean"), ("mean", "sum"), (8, "mean")])
    def test_a_model_transformed_for_another_loss(self, transformed: Any, given: str) -> None:
        model = words()
        view = fxgrad.transform(model, loss_reduction=transformed)
        with pytest.raises(OptionError, match=f"another loss than loss_reduction='{given}'.*\n  Transform it with"):
            make(view, loss_reduction=given)

    @pytest.mark.parametrize("given", ["mean", "sum"])
    def test_a_criterion_of_another_reduction(self, given: str) -> None:
        other = {"mean": "sum", "sum": "mean"}[given]
        with pytest.raises(OptionError, match=f"reduction is '{other}' and loss_reduction is '{given}'"):
            make(words(), loss_reduction=given, criterion=nn.CrossEntropyLoss(reduction=other))
        make(words(), loss_reduction=given, criterion=nn.CrossEntropyLoss(reduction=given))

    @pytest.mark.parametrize("given", ["none", 8, None])
    def test_a_reduction_that_opacus_does_not_know(self, given: Any) -> None:
        with pytest.raises(OptionError, match="loss_reduction has to be 'mean' or 'sum'"):
            make(words(), loss_reduction=given)

    @pytest.mark.parametrize(
        "quantity", [fxgrad.ClippedGrad(max_grad_norm=1.0), fxgrad.GradSample(group_size=2)], ids=str
    )
    def test_a_model_transformed_for_another_quantity(self, quantity: Any) -> None:
        view = fxgrad.transform(words(), loss_reduction="mean", quantity=quantity)
        with pytest.raises(OptionError, match=r"computes (ClippedGrad|GradSample).*needs GradSample"):
            make(view)

    def test_a_model_that_may_mix_samples(self) -> None:
        view = fxgrad.transform(words(), loss_reduction="mean", mixing="allow")
        with pytest.raises(OptionError, match="mixing='allow': clipping rows does not bound"):
            make(view)

    @pytest.mark.parametrize("policy, poisson", [("sum", False), ("overwrite", True), ("append", True)])
    def test_rows_that_are_not_one_sample_s(self, policy: Any, poisson: bool) -> None:
        view = fxgrad.transform(words(), loss_reduction="mean", accumulate=policy)
        with pytest.raises(OptionError, match=f"accumulate='{policy}'"):
            make(view, poisson_sampling=poisson)

    def test_a_transformed_model_keeps_its_options(self) -> None:
        view = fxgrad.transform(words(), loss_reduction="mean", backend="eager", in_dims=(1,))
        made, _, _ = make(view)
        assert made is view

    def test_two_batches_for_one_step_under_poisson_sampling(self) -> None:
        made, _optimizer, _ = make(words())  # the error speaks of it while it exists
        made(torch.randn(7, 5, 3)).mean().backward()
        with pytest.raises(AlreadySet, match=r"a forward while grad_sample.*\n  Call zero_grad\(\) of make_private's"):
            made(torch.randn(7, 5, 3))

    def test_a_step_after_a_backward_of_the_model_that_was_given(self) -> None:
        model = words()
        _, optimizer, _ = make(model)
        model(torch.randn(7, 5, 3)).mean().backward()
        with pytest.raises(UnaccountedGrad, match=r"no backward .*\n  Call the model that make_private returned"):
            optimizer.step()

    def test_a_step_without_zero_grad(self) -> None:
        made, optimizer, _ = make(words(), poisson_sampling=False)
        for _ in range(2):
            made(torch.randn(7, 5, 3)).mean().backward()
            if _ == 0:
                optimizer.step()
        with pytest.raises(ValueError, match="haven't been cleared"):
            optimizer.step()


def test_opacus_is_imported_when_asked_for_and_its_absence_is_explained() -> None:
    program = """
        import sys
        import fxgrad
        print("opacus" in sys.modules)
        sys.modules["opacus"] = None
        try:
            import fxgrad.opacus
        except ImportError as error:
            print(type(error).__name__, isinstance(error, fxgrad.FxgradError), error, sep="|")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("False\nMissingPackage|True|fxgrad.opacus needs Opacus, which is not installed\n")
    assert 'Install it: pip install "fxgrad[opacus]".' in said
