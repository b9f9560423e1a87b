"""What Opacus's own tests promise of a private training, for fxgrad's gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.schedulers import ExponentialNoise, StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fxgrad.errors import AlreadySet, OptionError
from fxgrad.opacus import PrivacyEngine
from tests.opacus_settings import ADAPTIVE, WARNINGS

pytestmark = WARNINGS

MODES = pytest.mark.parametrize("mode", ["hooks", "ghost"])
SAMPLES, BATCH, LR = 16, 4, 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.convolution(x.unflatten(1, (1, 2, 3)))).tanh()
        out: Tensor = self.last(h.flatten(1))
        return out


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(5, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words((x.abs() * 10).long() % 5)
        out: Tensor = self.last(self.attention(h, h, h)[0].mean(1))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(self.first(x).tanh()).tanh())
        return out


class Custom(nn.Module):
    """A layer that is no module of torch.nn, with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def frozen() -> Net:
    model = Net()
    model.first.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": Net, "images": Images, "text": Text, "tied": Tied, "custom": Custom, "frozen": frozen,
}  # fmt: skip


def seeded(make: Callable[[], nn.Module] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make().double()


def batches(generator: Any = None, **options: Any) -> DataLoader[Any]:
    fixed = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=fixed, dtype=torch.float64)
    y = torch.randint(3, (SAMPLES,), generator=fixed)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, generator=generator, **options)


class Training:
    """A private training without noise or clipping, unless the arguments say so."""

    def __init__(self, model: nn.Module, mode: str = "hooks", *, adam: bool = False, **arguments: Any) -> None:
        self.engine: Any = PrivacyEngine(accountant="rdp")
        kind: Any = torch.optim.Adam if adam else torch.optim.SGD
        arguments = dict(noise_multiplier=0.0, max_grad_norm=1e10, poisson_sampling=False) | arguments
        arguments.setdefault("optimizer", kind(model.parameters(), lr=LR))
        arguments.setdefault("data_loader", batches())
        made = self.engine.make_private(module=model, grad_sample_mode=mode, backend="eager", **arguments)
        self.given, self.model, self.optimizer, self.loader = model, made[0], made[1], made[-1]

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def step(self, batch: Any, closure: bool = False) -> None:
        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        if closure:
            self.optimizer.step(evaluate)
        else:
            evaluate()
            self.optimizer.step()

    def train(self, steps: int = 3, closure: bool = False) -> Training:
        for batch, _ in zip(self.loader, range(steps), strict=False):
            self.step(batch, closure)
        return self

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.given.named_parameters()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def plain(model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for (x, y), _ in zip(batches(), range(steps), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@MODES
class TestPlainSGD:
    @pytest.mark.parametrize("kind", MODELS)
    def test_without_noise_and_clipping_it_is_the_same(self, mode: str, kind: str) -> None:
        run = Training(seeded(MODELS[kind]), mode).train(closure=kind == "linear")
        before, expected = dict(seeded(MODELS[kind]).named_parameters()), plain(seeded(MODELS[kind]))
        assert difference(run.values(), expected) < 1e-6 < 1e-3 < difference(expected, before)

    @pytest.mark.parametrize("argument", [dict(noise_multiplier=1.0, max_grad_norm=1.0), dict(max_grad_norm=0.01)])
    def test_with_either_it_is_not(self, mode: str, argument: dict[str, Any]) -> None:
        found, expected = Training(seeded(), mode, **argument).train(1).values(), plain(seeded(), 1)
        assert all((found[name] - expected[name]).abs().max() > 1e-4 for name in found)

    def test_the_outputs_are_those_of_the_model(self, mode: str) -> None:
        model = seeded()
        run, (x, _) = Training(model, mode), next(iter(batches()))
        assert run.model(x).equal(model(x)) and run.model.first is model.first
        assert run.model.state_dict().keys() == model.state_dict().keys()


@MODES
class TestFrozenLayers:
    @pytest.mark.parametrize("in_optimizer", [False, True])
    def test_they_stay_as_they_were(self, mode: str, in_optimizer: bool) -> None:
        model = seeded(frozen)
        parameters = [p for p in model.parameters() if in_optimizer or p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=LR)
        run = Training(model, mode, optimizer=optimizer, noise_multiplier=1.0, max_grad_norm=1.0)
        before = run.values()
        run.train()
        moved = {name: not value.equal(before[name]) for name, value in run.values().items()}
        assert moved == {name: name.startswith("last") for name in before}
        assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in model.first.parameters())


class TestAccumulation:
    def test_p_grad_is_the_mean_of_the_rows(self) -> None:
        run = Training(seeded()).train(1)
        parameters: list[Any] = run.optimizer.params
        for p in parameters:
            torch.testing.assert_close(p.grad, p.grad_sample.sum(0) / BATCH)

    @MODES
    def test_backwards_without_poisson_sampling_add_up(self, mode: str) -> None:
        """The mean is over the samples of all, and the accountant's rate is theirs."""
        run, count = Training(seeded(), mode), SAMPLES // BATCH
        for batch in run.loader:
            run.loss(batch).backward()
        if mode == "hooks":
            assert [[len(rows) for rows in p.grad_sample] for p in run.optimizer.params] == [[BATCH] * count] * 4
            assert [len(rows) for rows in run.optimizer.grad_samples] == [SAMPLES] * 4
            assert run.optimizer.accumulated_iterations == count
        run.optimizer.step()
        assert run.engine.accountant.history == [(0.0, 1.0, 1)]
        model, data = seeded(), batches().dataset.tensors  # type: ignore[attr-defined]
        F.cross_entropy(model(data[0]), data[1]).backward()
        for p, expected in zip(run.given.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad)

    @MODES
    def test_a_second_forward_or_step_under_poisson_sampling(self, mode: str) -> None:
        run = Training(seeded(), mode, poisson_sampling=True)
        batch = next(iter(batches()))
        run.loss(batch).backward()
        said = {"hooks": "a forward while grad_sample", "ghost": "2 backwards have added to p.grad"}[mode]
        with pytest.raises(AlreadySet, match=said):
            run.loss(batch).backward()
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.step(batch)

    @MODES
    @pytest.mark.parametrize("set_to_none", [False, True])
    def test_zero_grad(self, mode: str, set_to_none: bool) -> None:
        run, batch = Training(seeded(), mode), next(iter(batches()))
        for _ in range(2):
            run.loss(batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none)
            for p in run.optimizer.params:
                assert p.grad is None if set_to_none else not p.grad.any()
                assert getattr(p, "grad_sample", None) is None and p.summed_grad is None
        assert difference(run.values(), self.twice(batch)) < 1e-6

    def twice(self, batch: Any) -> dict[str, Tensor]:
        model = seeded()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    def test_a_step_without_zero_grad_in_parts(self) -> None:
        run = Training(seeded())
        with pytest.raises(ValueError, match="haven't been cleared"), parts_of(run, 2) as parts:
            for batch in parts:
                run.loss(batch).backward()
                run.optimizer.step()


def parts_of(run: Training, size: int) -> Any:
    return BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer)


@MODES
class TestParts:
    def test_they_are_one_batch(self, mode: str) -> None:
        view = Training(seeded(), mode).model
        found: list[dict[str, Tensor]] = []
        for size in (3, BATCH):
            view.load_state_dict(seeded().state_dict())
            run = Training(view, mode, noise_multiplier=1.0, max_grad_norm=0.1)
            torch.manual_seed(5)
            with parts_of(run, size) as parts:
                for batch in parts:
                    run.step(batch)
            found.append(run.values())
            assert run.engine.accountant.history == [(1.0, 0.25, 4)]
        assert difference(*found) < 1e-9 < 1e-2 < difference(found[0], dict(seeded().named_parameters()))

    def test_an_empty_batch_moves_nothing(self, mode: str) -> None:
        torch.manual_seed(4)
        run = Training(seeded(), mode, poisson_sampling=True, data_loader=batches_of_one())
        sizes = []
        with parts_of(run, 10) as parts:
            for batch in parts:
                before = run.values()
                run.step(batch)
                sizes.append(len(batch[0]))
                assert (difference(run.values(), before) == 0) == (not sizes[-1])
        assert 0 in sizes and max(sizes) > 0


def batches_of_one() -> DataLoader[Any]:
    return DataLoader(batches().dataset, batch_size=1, generator=torch.Generator().manual_seed(2))


@MODES
class TestSeeds:
    """Each run begins with the same parameters, and with what is compiled for the first."""

    def trained(self, view: Any, mode: str, seed: int, generator: int | None = None) -> dict[str, Tensor]:
        view.load_state_dict(seeded().state_dict())
        noise = None if generator is None else torch.Generator().manual_seed(generator)
        run = Training(view, mode, noise_multiplier=1.0, max_grad_norm=1.0, noise_generator=noise)
        torch.manual_seed(seed)
        return run.train(2).values()

    def test_they_decide_about_the_noise(self, mode: str) -> None:
        view = Training(seeded(), mode).model
        first = self.trained(view, mode, 1)
        assert difference(first, self.trained(view, mode, 1)) == 0 < difference(first, self.trained(view, mode, 2))
        seven = self.trained(view, mode, 1, generator=7)
        assert difference(seven, self.trained(view, mode, 2, generator=7)) == 0
        assert all(value.ne(seven[name]).all() for name, value in self.trained(view, mode, 1, generator=8).items())

    def test_poisson_batches_follow_the_loader_s_generator(self, mode: str) -> None:
        view = Training(seeded(), mode, poisson_sampling=True).model
        found: list[dict[str, Tensor]] = []
        for seed in (3, 3, 4):
            torch.manual_seed(len(found))
            view.load_state_dict(seeded().state_dict())
            loader = batches(torch.Generator().manual_seed(seed))
            found.append(Training(view, mode, poisson_sampling=True, data_loader=loader).train().values())
        assert difference(found[0], found[1]) == 0 < difference(found[0], found[2])


NOISES: dict[str, tuple[dict[str, Any], float]] = {
    "flat": (dict(max_grad_norm=2.0), 2.0),
    "per_layer": (dict(clipping="per_layer", max_grad_norm=[1.0, 2.0]), math.hypot(1.0, 2.0)),
    "adaptive": (ADAPTIVE | dict(clipbound_learning_rate=0.0), 0.5 / math.sqrt(1 - 0.6**2 / 4)),
    "sum": (dict(max_grad_norm=2.0, loss_reduction="sum"), 2.0 * BATCH),
}


@MODES
@pytest.mark.parametrize("kind", NOISES)
def test_the_level_of_the_noise(mode: str, kind: str) -> None:
    """Gradients are zero: the parameters are the sum of the steps' noise, of deviation LR σ C / E each."""
    arguments, bound = NOISES[kind]
    torch.manual_seed(0)
    run = Training(nn.Linear(99, 50), mode, noise_multiplier=0.6, data_loader=wide(), **arguments)
    for p in run.given.parameters():
        nn.init.zeros_(p)
    steps = 0
    for (x,) in run.loader:
        run.optimizer.zero_grad()
        (run.model(x) * 0).sum().backward()
        run.optimizer.step()
        steps += 1
    values = torch.cat([p.detach().flatten() for p in run.given.parameters()])
    expected = LR * 0.6 * bound / BATCH * math.sqrt(steps)
    assert steps == 4 and values.numel() == 5000
    assert float(values.std()) == pytest.approx(expected, rel=0.05)  # five deviations of this estimate
    assert abs(float(values.mean())) < 5 * expected / math.sqrt(5000)


def wide() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(SAMPLES, 99)), batch_size=BATCH)


class TestMismatches:
    @MODES
    def test_an_optimizer_of_another_model_with_equal_values(self, mode: str) -> None:
        model = seeded()
        optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=LR)
        with pytest.raises(OptionError, match="is not the model's"):
            Training(model, mode, optimizer=optimizer)
        Training(model, mode).train(1)

    def test_an_optimizer_made_before_opacus_fixed_the_model(self) -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
        fixed = ModuleValidator.fix(model).double()
        with pytest.raises(OptionError, match="is not the model's"):
            Training(fixed, optimizer=torch.optim.SGD(model.parameters(), lr=LR))
        Training(fixed).train(1)


@MODES
class TestState:
    def test_the_optimizer_s_is_that_of_a_plain_one(self, mode: str) -> None:
        run = Training(seeded(), mode, adam=True, noise_multiplier=1.0, max_grad_norm=1.0).train()
        state = run.optimizer.state_dict()
        bare = torch.optim.Adam(seeded().parameters())
        bare.load_state_dict(copy.deepcopy(state))
        assert [int(one["step"]) for one in bare.state.values()] == [3] * 4 and bare.param_groups[0]["lr"] == LR
        other = Training(seeded(), mode, adam=True)
        other.optimizer.load_state_dict(bare.state_dict())
        for key, one in other.optimizer.state_dict()["state"].items():
            assert all(value.equal(state["state"][key][name]) for name, value in one.items())

    def test_a_checkpoint_has_the_budget_and_the_schedules(self, mode: str, tmp_path: Path) -> None:
        def prepared() -> tuple[Training, dict[str, Any]]:
            run = Training(seeded(), mode, noise_multiplier=1.0, max_grad_norm=1.0)
            noise, bound = ExponentialNoise(run.optimizer, gamma=0.9), StepGradClip(run.optimizer, step_size=2, gamma=2)
            return run, dict(noise_scheduler=noise, grad_clip_scheduler=bound)

        def trained(run: Training, schedules: dict[str, Any]) -> Iterator[tuple[float, float]]:
            for batch, _ in zip(run.loader, range(3), strict=False):
                run.step(batch)
                for schedule in schedules.values():
                    schedule.step()
                yield run.optimizer.noise_multiplier, run.optimizer.max_grad_norm

        first, schedules = prepared()
        numbers = [*trained(first, schedules)]
        assert list(numbers[-1]) == pytest.approx([0.9**3, 2.0])
        first.engine.save_checkpoint(
            path=tmp_path / "point",
            module=first.model,
            optimizer=first.optimizer,
            **schedules,
            checkpoint_dict={"a": 1},
        )
        second, others = prepared()
        assert second.engine.accountant.history == []
        found = second.engine.load_checkpoint(
            path=tmp_path / "point", module=second.model, optimizer=second.optimizer, **others
        )
        assert found["a"] == 1 and second.engine.get_epsilon(1e-3) == first.engine.get_epsilon(1e-3) > 0
        assert difference(second.values(), first.values()) == 0
        assert [vars(one)["last_epoch"] for one in others.values()] == [3, 3]
        for run, schedule in (first, schedules), (second, others):
            torch.manual_seed(1)
            run.optimizer.noise_multiplier, run.optimizer.max_grad_norm = numbers[-1]
            numbers_after = [*trained(run, schedule)]
            assert list(numbers_after[-1]) == pytest.approx([0.9**6, 8.0])
        assert difference(second.values(), first.values()) == 0
        assert second.engine.accountant.history == first.engine.accountant.history
