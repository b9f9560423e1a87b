"""A script written for Opacus runs after a change of its import, and trains to the same parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
import torch.nn.functional as F
from opacus.optimizers import DPOptimizer
from opacus.schedulers import (
    ExponentialGradClip,
    ExponentialNoise,
    LambdaGradClip,
    LambdaNoise,
    StepGradClip,
    StepNoise,
)
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
import fxgrad.opacus
from fxgrad.compile.inductor import inner_compiler
from fxgrad.errors import OptionError, UnknownArgument
from fxgrad.opacus import PrivacyEngine
from tests.opacus_settings import ADAPTIVE, WARNINGS

pytestmark = WARNINGS

STEPS, TOLERANCE = 20, 1e-5
BOUNDS = [0.1, 0.05, 0.2, 0.1]
Change = Callable[[DPOptimizer], Any]


class Net(nn.Module):
    """Layers whose parameters are used at every token."""

    def __init__(self, per_token: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)
        self.per_token = per_token

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out: Tensor = self.last(h if self.per_token else h.mean(1))
        return out


def net(seed: int = 0, **arguments: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**arguments).double()


def loader_of(batch: int = 8, per_token: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 5, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (64, 5) if per_token else (64,), generator=generator)
    if per_token:
        y[:, 3:] = torch.where(torch.rand(64, 2, generator=generator) < 0.5, -100, y[:, 3:])
    return DataLoader(TensorDataset(x, y), batch_size=batch, generator=torch.Generator().manual_seed(2))


class Counted:
    """An inner compiler that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: Any, inputs: Any) -> Any:
        self.graphs += 1
        return inner_compiler("eager")(gm, inputs)


class Run:
    """STEPS steps of a user's script, with one of the two engines."""

    def __init__(self, engine: Any, model: nn.Module | None = None, **arguments: Any) -> None:
        self.engine, self.model = engine, model if model is not None else net()
        self.batch, self.physical = arguments.pop("batch", 8), arguments.pop("physical", None)
        self.change: Change = arguments.pop("change", lambda optimizer: None)
        arguments = dict(noise_multiplier=0.0, max_grad_norm=0.2) | arguments
        self.reduction = arguments.get("loss_reduction", "mean")
        per_token = getattr(self.model, "per_token", False)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        loader = loader_of(self.batch, per_token)
        made = engine.make_private(module=self.model, optimizer=optimizer, data_loader=loader, **arguments)
        self.trained, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if len(made) == 4 else None
        self.sizes: list[int] = []

    def loss(self, x: Tensor, y: Tensor) -> Any:
        outputs = self.trained(x)
        if self.criterion is None:
            return F.cross_entropy(outputs, y, reduction=self.reduction)
        if y.dim() == 1:
            return self.criterion(outputs, y)
        return self.criterion(outputs.flatten(0, 1), y.flatten(), shape=outputs.shape)

    def steps(self) -> int:
        return sum(steps for _, _, steps in self.engine.accountant.history)

    def train(self, steps: int = STEPS) -> Run:
        torch.manual_seed(3)  # the noise of what adaptive clipping counts
        changed = self.change(self.optimizer)
        while True:
            for x, y in self.batches():
                before = self.steps()
                self.optimizer.zero_grad()
                self.loss(x, y).backward()
                self.optimizer.step()
                self.sizes.append(len(x))
                if changed is not None and self.steps() > before:
                    changed.step()
                if self.steps() == steps:
                    return self

    def batches(self) -> Any:
        if self.physical is None:
            yield from self.loader
            return
        manager = BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=self.physical, optimizer=self.optimizer
        )
        with manager as loader:
            yield from loader

    def parameters(self) -> dict[str, Tensor]:
        return {name.removeprefix("_module."): p.detach() for name, p in self.trained.named_parameters()}


def theirs(**arguments: Any) -> Run:
    return Run(opacus.PrivacyEngine(accountant="rdp"), **arguments).train()


def ours(**arguments: Any) -> Run:
    """With one graph for every size of a batch but 0 and 1, whatever C does."""
    counted = Counted()
    run = Run(PrivacyEngine(accountant="rdp"), backend=counted, **arguments).train()
    assert counted.graphs == (2 if 1 in run.sizes else 1)
    return run


def assert_same(one: Run, other: Run) -> None:
    assert one.sizes == other.sizes and one.steps() == STEPS
    assert one.engine.accountant.history == other.engine.accountant.history
    start = {name: p.detach() for name, p in net().named_parameters()}
    first, second = one.parameters(), other.parameters()
    assert first.keys() == second.keys() == start.keys()
    assert max(float((first[name] - start[name]).abs().max()) for name in first) > 1e-2
    for name, p in first.items():
        torch.testing.assert_close(p, second[name], rtol=0, atol=TOLERANCE, msg=name)


OPTIONS: dict[str, dict[str, Any]] = {
    "hooks": dict(grad_sample_mode="hooks"),
    "functorch": dict(grad_sample_mode="functorch"),
    "ghost": dict(grad_sample_mode="ghost"),
    "ghost, sum": dict(
        grad_sample_mode="ghost",
        loss_reduction="sum",
        max_grad_norm=0.02,
        criterion=nn.CrossEntropyLoss(reduction="sum"),
    ),
    "ghost, in parts": dict(grad_sample_mode="ghost", physical=3),
    "sum": dict(loss_reduction="sum", max_grad_norm=0.02),
    "in parts": dict(physical=3),
    "without sampling": dict(poisson_sampling=False),
    "per_layer": dict(clipping="per_layer", max_grad_norm=BOUNDS),
    "adaptive": dict(ADAPTIVE, batch=16),
    "noise_generator": dict(noise_multiplier=0.3),
    "ghost, noise_generator": dict(noise_multiplier=0.3, grad_sample_mode="ghost"),
    "per_layer, noise_generator": dict(noise_multiplier=0.3, clipping="per_layer", max_grad_norm=BOUNDS),
    "adaptive, noise_generator": dict(ADAPTIVE, batch=16, noise_multiplier=0.3),
}


def drawn(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with a noise generator of their own."""
    noise = arguments.get("noise_multiplier", 0.0) > 0
    return arguments | (dict(noise_generator=torch.Generator().manual_seed(5)) if noise else {})


@pytest.mark.parametrize("arguments", OPTIONS.values(), ids=OPTIONS)
def test_the_parameters_are_those_of_opacus(arguments: dict[str, Any]) -> None:
    assert_same(ours(**drawn(arguments)), theirs(**drawn(arguments)))


def test_expanded_weights_are_those_of_hooks() -> None:
    """Opacus's mode "ew" needs float32 and batches that are not empty; its own result is that of its hooks."""
    assert_same(ours(grad_sample_mode="ew"), theirs())


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_empty_batches(mode: str) -> None:
    """Opacus's ghost clipping fails on them; its hooks do not."""
    run = ours(batch=1, grad_sample_mode=mode)
    assert 0 in run.sizes
    assert_same(run, theirs(batch=1))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_random_samples_for_empty_batches(mode: str) -> None:
    run = ours(batch=1, grad_sample_mode=mode, rand_on_empty=True)
    assert 0 not in run.sizes
    assert_same(run, theirs(batch=1, rand_on_empty=True))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_tokens_of_a_sample_are_one_loss(reduction: str) -> None:
    arguments = dict[str, Any](grad_sample_mode="ghost", loss_reduction=reduction, max_grad_norm=0.1)
    runs = [
        make(model=net(per_token=True), criterion=nn.CrossEntropyLoss(reduction=reduction), **arguments)
        for make in (ours, theirs)
    ]
    assert_same(*runs)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(clipping="per_layer", max_grad_norm=BOUNDS),
        dict(clipping="per_layer", max_grad_norm=BOUNDS, physical=3),
        dict(ADAPTIVE, batch=16),
        dict(ADAPTIVE, batch=16, noise_multiplier=0.3),
    ],
    ids=["per_layer", "per_layer, in parts", "adaptive", "adaptive, noise"],
)
def test_what_opacus_clips_with_hooks_alone(arguments: dict[str, Any]) -> None:
    """Opacus's ghost clipping has one constant norm over all parameters."""
    assert_same(ours(**drawn(arguments), grad_sample_mode="ghost"), theirs(**drawn(arguments)))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_adaptive_clipping_in_parts_is_opacus_of_whole_batches(mode: str) -> None:
    """Opacus itself forgets between the parts how many samples it clipped."""
    run, whole = ours(**ADAPTIVE, batch=16, physical=7, grad_sample_mode=mode), theirs(**ADAPTIVE, batch=16)
    assert len(run.sizes) > len(whole.sizes)
    run.sizes = whole.sizes
    assert_same(run, whole)


@pytest.mark.parametrize(
    "arguments",
    [dict(clipping="per_layer", max_grad_norm=BOUNDS), dict(ADAPTIVE, batch=16, noise_multiplier=0.3)],
    ids=["per_layer", "adaptive"],
)
def test_one_backward_with_a_loss_of_the_user_s(arguments: dict[str, Any]) -> None:
    run = ours(**drawn(arguments), one_backward=True)
    assert run.criterion is None
    assert_same(run, theirs(**drawn(arguments)))


def test_one_bound_for_each_parameter_follows_the_optimizer() -> None:
    model, other = net(), net()
    order = [model.last.weight, model.first.weight, model.last.bias]
    norms = {}
    for each in (model, other):
        each.first.bias.requires_grad_(False)
    named = {id(p): name for name, p in model.named_parameters()}
    for mode, each in {"ghost": model, "hooks": other}.items():
        parameters = [each.get_parameter(named[id(p)]) for p in order]
        engine: Any = PrivacyEngine(accountant="rdp")
        made = engine.make_private(
            module=each,
            optimizer=torch.optim.SGD(parameters, lr=1.0),
            data_loader=loader_of(),
            noise_multiplier=0.0,
            max_grad_norm=[0.1, 0.2, 0.3],
            clipping="per_layer",
            grad_sample_mode=mode,
            backend="eager",
        )
        x, y = next(iter(loader_of()))
        F.cross_entropy(made[0](x), y).backward()
        made[1].step()
        norms[mode] = each.state_dict()
    for name, value in norms["ghost"].items():
        torch.testing.assert_close(value, norms["hooks"][name], rtol=0, atol=1e-9, msg=name)


class Weighted(DPOptimizer):  # type: ignore[misc]
    """Opacus's per-sample gradients, weighted by a function of their norms."""

    weights: Callable[[Tensor], Tensor]

    def clip_and_accumulate(self) -> None:
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in self.grad_samples], 1).norm(dim=1)
        for p in self.params:
            part = torch.einsum("i,i...->...", self.weights(norms), p.grad_sample)
            p.summed_grad = part if p.summed_grad is None else p.summed_grad + part


def cut(norms: Tensor) -> Tensor:
    return (0.2 / (norms + 1e-6)).clamp(max=1.0)


def soft(norms: Tensor) -> Tensor:
    return 0.1 / (norms + 0.5)


def automatic(norms: Tensor) -> Tensor:
    return 0.2 / (norms + 0.01)


def test_a_function_that_clips_is_clipping() -> None:
    assert_same(ours(clipping=cut, grad_sample_mode="ghost"), theirs())


@pytest.mark.parametrize("clipping, weights", [("automatic", automatic), (soft, soft)], ids=["automatic", "soft"])
@pytest.mark.parametrize("physical", [None, 3])
def test_other_weights(clipping: Any, weights: Any, physical: int | None) -> None:
    reference = Run(opacus.PrivacyEngine(accountant="rdp"), physical=physical)
    reference.optimizer.__class__, reference.optimizer.weights = Weighted, weights
    assert_same(ours(clipping=clipping, grad_sample_mode="ghost", physical=physical), reference.train())


def test_a_function_s_weights_are_limited() -> None:
    run = ours(clipping=lambda norms: torch.full_like(norms, 1e6), grad_sample_mode="ghost")
    clipping = fxgrad.result(run.trained, run.optimizer.quantity)
    assert (clipping.weight * clipping.norm_sample).max() <= 0.2 * (1 + 1e-5)


def of_factors(optimizer: DPOptimizer) -> Any:
    return LambdaGradClip(optimizer, scheduler_function=lambda i: [1.0, 0.5, 2.0][i % 3])


SCHEDULES: dict[str, Change] = {
    "exponential": lambda optimizer: ExponentialGradClip(optimizer, gamma=0.9),
    "steps": lambda optimizer: StepGradClip(optimizer, step_size=3, gamma=0.5),
    "factors": of_factors,
}


@pytest.mark.parametrize("schedule, physical", [*((one, None) for one in SCHEDULES), ("factors", 3)])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_schedules_of_opacus(mode: str, schedule: str, physical: int | None) -> None:
    change = SCHEDULES[schedule]
    run = ours(grad_sample_mode=mode, change=change, physical=physical)
    assert_same(run, theirs(change=change, physical=physical))


NOISES: dict[str, Change] = {
    "exponential": lambda optimizer: ExponentialNoise(optimizer, gamma=0.9),
    "steps": lambda optimizer: StepNoise(optimizer, step_size=3, gamma=0.5),
    "factors": lambda optimizer: LambdaNoise(optimizer, noise_lambda=lambda i: [1.0, 0.5, 2.0][i % 3]),
}


@pytest.mark.parametrize("schedule, mode", [*((one, "ghost") for one in NOISES), ("factors", "hooks")])
def test_schedules_of_the_noise(schedule: str, mode: str) -> None:
    """The accountant counts each step with its own noise."""
    arguments = dict[str, Any](noise_multiplier=0.3, change=NOISES[schedule])
    run = ours(**drawn(arguments), grad_sample_mode=mode)
    assert_same(run, theirs(**drawn(arguments)))
    assert len({noise for noise, _, _ in run.engine.accountant.history}) >= 3


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_tensor_that_the_user_writes_to(mode: str) -> None:
    class Writes:
        def __init__(self, bound: Tensor) -> None:
            self.bound = bound

        def step(self) -> None:
            self.bound.mul_(0.9)

    bound = torch.tensor(0.2, dtype=torch.float64)
    run = ours(grad_sample_mode=mode, max_grad_norm=bound, change=lambda optimizer: Writes(bound))
    assert run.optimizer.max_grad_norm == float(bound) == pytest.approx(0.2 * 0.9**STEPS)
    assert_same(run, theirs(change=lambda optimizer: ExponentialGradClip(optimizer, gamma=0.9)))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_bounds_of_single_parameters_change_together_with_the_noise(mode: str) -> None:
    """Opacus's schedulers would scale the noise of "per_layer" alone, and leave its clipping as it is."""
    run = Run(PrivacyEngine(), grad_sample_mode=mode, clipping="per_layer", max_grad_norm=BOUNDS, backend="eager")
    optimizer = run.optimizer
    assert optimizer.max_grad_norms == BOUNDS
    assert optimizer.max_grad_norm == pytest.approx(float(torch.tensor(BOUNDS).norm()))
    scheduler = ExponentialGradClip(optimizer, gamma=0.5)
    with pytest.raises(OptionError, match=r"the noise would not fit the clipping\n  Assign optimizer.max_grad_norms"):
        scheduler.step()
    optimizer.max_grad_norms = [0.5 * bound for bound in BOUNDS]
    assert optimizer.max_grad_norm == pytest.approx(0.5 * float(torch.tensor(BOUNDS).norm()))
    with pytest.raises(OptionError, match="max_grad_norms has 1 numbers for 4"):
        optimizer.max_grad_norms = [1.0]
    run.loss(*next(iter(loader_of()))).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_checkpoint_continues(mode: str, tmp_path: Path) -> None:
    arguments = dict[str, Any](grad_sample_mode=mode, poisson_sampling=False, backend="eager", batch=32)
    first = Run(PrivacyEngine(accountant="rdp"), **arguments).train(2)
    first.engine.save_checkpoint(path=tmp_path / "point", module=first.trained, optimizer=first.optimizer)
    second = Run(PrivacyEngine(accountant="rdp"), model=net(seed=7), **arguments)
    second.engine.load_checkpoint(path=tmp_path / "point", module=second.trained, optimizer=second.optimizer)
    assert second.engine.accountant.history == first.engine.accountant.history != []
    second.train(4)
    whole = Run(opacus.PrivacyEngine(accountant="rdp"), poisson_sampling=False, batch=32).train(4)
    for name, p in whole.parameters().items():
        torch.testing.assert_close(second.parameters()[name], p, rtol=0, atol=TOLERANCE, msg=name)


class TestCriterion:
    def criterion(self, criterion: Any, **arguments: Any) -> Any:
        arguments = dict(grad_sample_mode="ghost", criterion=criterion, backend="eager") | arguments
        return Run(PrivacyEngine(), **arguments).criterion

    def test_it_is_a_tensor_and_leaves_the_loss_as_it_was(self) -> None:
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        criterion = self.criterion(loss)
        x, y = torch.randn(7, 4), torch.randint(4, (7,))
        torch.testing.assert_close(criterion(x, y), loss(x, y))
        with pytest.raises(IndexError, match="out of bounds"):
            criterion(x, y + 4)
        assert loss.reduction == "mean"

    def test_a_function(self) -> None:
        x, y = torch.randn(7, 4), torch.randint(4, (7,))
        for reduction in ("mean", "none"):
            criterion = self.criterion(lambda x, y, reduction=reduction: F.cross_entropy(x, y, reduction=reduction))
            torch.testing.assert_close(criterion(x, y), F.cross_entropy(x, y))
        with pytest.raises(OptionError, match="shape= needs a criterion with an attribute `reduction`"):
            criterion(x, y, shape=(7, 1, 4))
        assert not hasattr(F.cross_entropy, "reduction")

    def test_another_reduction(self) -> None:
        with pytest.raises(OptionError, match="the criterion's reduction is 'sum' and loss_reduction is 'mean'"):
            self.criterion(nn.CrossEntropyLoss(reduction="sum"))

    def test_the_default_follows_the_reduction(self) -> None:
        criterion = self.criterion(None, loss_reduction="sum")
        x, y = torch.randn(7, 4), torch.randint(4, (7,))
        torch.testing.assert_close(criterion(x, y), F.cross_entropy(x, y, reduction="sum"))


class TestEngine:
    def make(self, **arguments: Any) -> Any:
        return Run(PrivacyEngine(), **arguments)

    def test_it_takes_every_argument_of_opacus(self) -> None:
        theirs, ours = (
            inspect.signature(kind.make_private).parameters for kind in (opacus.PrivacyEngine, PrivacyEngine)
        )
        assert theirs.keys() == ours.keys()
        known = {name: p.default for name, p in ours.items() if name != "criterion"}
        assert known == {name: p.default for name, p in theirs.items() if name != "criterion"}
        for name, member in inspect.getmembers(opacus.PrivacyEngine, inspect.isfunction):
            if not name.startswith("_"):
                inspect.signature(getattr(PrivacyEngine, name)).bind(
                    None, **{key: None for key in list(inspect.signature(member).parameters)[1:] if key != "kwargs"}
                )

    @pytest.mark.parametrize("mode", ["no_op", "ghost_fsdp", "ghost_tp"])
    def test_modes_that_it_does_not_have(self, mode: str) -> None:
        with pytest.raises(OptionError, match=rf"grad_sample_mode='{mode}' (leaves|shards|is Opacus's mode)"):
            self.make(grad_sample_mode=mode)

    @pytest.mark.parametrize("mode, advice", [("gost", "Did you mean 'ghost'"), (None, "'hooks' stores p.grad_sample")])
    def test_an_unknown_mode(self, mode: Any, advice: str) -> None:
        sentence = rf"grad_sample_mode has to be 'hooks', 'functorch', 'ew', 'ghost', not {mode!r}\n  {advice}"
        with pytest.raises(OptionError, match=sentence):
            self.make(grad_sample_mode=mode)

    def test_a_model_that_is_not_wrapped(self) -> None:
        with pytest.raises(OptionError, match=r"wrap_model=False: .*\n  Leave it out, and train with the model that"):
            self.make(wrap_model=False)

    def test_a_misspelt_argument(self) -> None:
        with pytest.raises(UnknownArgument, match=r"argument 'max_clipbond'\n  Did you mean 'max_clipbound'\?"):
            self.make(max_clipbond=1.0)

    @pytest.mark.parametrize("mode", ["hooks", "ghost"])
    def test_a_budget(self, mode: str) -> None:
        noise = []
        for engine in (PrivacyEngine(accountant="rdp"), opacus.PrivacyEngine(accountant="rdp")):
            model = net()
            own: dict[str, Any] = dict(backend="eager") if isinstance(engine, PrivacyEngine) else {}
            made = engine.make_private_with_epsilon(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=loader_of(),
                target_epsilon=3.0,
                target_delta=1e-3,
                epochs=4,
                alphas=[1.1, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 64.0],
                max_grad_norm=1.0,
                grad_sample_mode=mode,
                **own,
            )
            assert len(made) == (4 if mode == "ghost" else 3)
            noise.append(made[1].noise_multiplier)
        assert noise[0] == noise[1] > 0.5
        with pytest.raises(UnknownArgument, match=r"argument 'target_epsilons'\n  Did you mean"):
            PrivacyEngine().make_private_with_epsilon(
                data_loader=loader_of(), target_epsilon=3.0, target_delta=1e-3, epochs=1, target_epsilons=1
            )

    def test_models_that_fit_and_others(self) -> None:
        engine = PrivacyEngine()
        layer = nn.BatchNorm2d(6)
        model: Any = nn.Sequential(nn.LSTM(3, 6), nn.Sequential(layer, nn.ReLU()), layer)
        assert not engine.is_compatible(module=model, optimizer=None, data_loader=None)
        with pytest.raises(UnsupportedModuleError, match=r"BatchNorm2d '1\.0'"):
            engine.validate(module=model, optimizer=None, data_loader=None)
        fixed: Any = engine.get_compatible_module(model)
        assert engine.is_compatible(module=fixed) and isinstance(model[1][0], nn.BatchNorm2d)
        assert isinstance(fixed[0], nn.LSTM) and isinstance(fixed[1][0], nn.GroupNorm) and fixed[2] is fixed[1][0]
        assert isinstance(fxgrad.opacus.fix(layer), nn.GroupNorm)
