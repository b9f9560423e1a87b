"""A private step moves by what was clipped, delivered and noised, or it raises and moves nothing."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
import fxgrad.opacus
from fxgrad.errors import AlreadySet, FxgradError, OptionError, UnaccountedGrad, UnclippedGrad
from tests.private_machine import DRAWN, MODES, OPERATIONS, Pair, Shared, recovered
from tests.processes import run_together

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
LENGTH = 12


def machine(shared: Shared, outcomes: Counter[str]) -> type[RuleBasedStateMachine]:
    """Operations in any order; at the end everything is put right, and a step has to be right."""

    class Machine(RuleBasedStateMachine):
        @initialize(seed=st.integers(0, 1000))
        def begin(self, seed: int) -> None:
            self.pair = Pair(shared, seed)

        @rule(name=st.sampled_from(DRAWN), choice=st.integers(0, 11))
        def operation(self, name: str, choice: int) -> None:
            self.pair.do(name, choice)

        def teardown(self) -> None:
            recovered(self.pair)
            outcomes.update(self.pair.outcomes)

    return Machine


def run(mode: str, sequences: int) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    options = settings(
        max_examples=sequences,
        stateful_step_count=LENGTH,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine(Shared(**MODES[mode]), outcomes), settings=options)
    return outcomes


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_that_of_the_reference_or_an_error(mode: str) -> None:
    outcomes = run(mode, 50)
    assert outcomes["real steps"] > 50 and outcomes["virtual steps"] > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_five_thousand_sequences(mode: str) -> None:
    outcomes = run(mode, 5000)
    print(mode, dict(outcomes))
    assert outcomes["real steps"] > 5000


@pytest.mark.parametrize("mode", MODES)
def test_what_the_operations_do_to_a_right_step(mode: str) -> None:
    """Each operation comes after a training step and before one, and after a backward and before its step."""
    shared = Shared(**MODES[mode])
    for choice, name in enumerate(OPERATIONS):
        for around in (["train", name, "train"], ["optimizer_zero_grad", "backward_of_a_batch", name, "step"]):
            pair = Pair(shared, choice)
            for i, each in enumerate(around):
                pair.do(each, choice if each == name else i + 1)
            recovered(pair)


@pytest.mark.parametrize("sequences", [10, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.timeout(7200)
def test_two_processes_step_as_the_reference_or_raise_alike(sequences: int, tmp_path: Path) -> None:
    each = [(rank, tmp_path, sequences) for rank in range(2)]
    said = run_together("tests.two_private_processes", each, timeout=900 if sequences < 100 else 7000)
    print(said[0])


def test_the_machine_finds_a_wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxgrad.opacus.ledger import Ledger

    monkeypatch.setattr(Ledger, "check", lambda ledger, groups: None)
    shared = Shared(**MODES["one backward"])
    with pytest.raises(AssertionError, match="a step that had to raise: changed in place"):
        pair = Pair(shared)
        for name in ("backward_of_a_batch", "scaled_grad", "step"):
            pair.do(name, 3)


# Each of these was once a silent step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)) * 10


def made_private(engine: PrivacyEngine, module: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Batches of four of sixteen samples, C = 1 and no noise."""
    return fxgrad.opacus.make_private(
        engine,
        module=module,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(16, 3)), 4),
        **{"noise_multiplier": 0.0, "max_grad_norm": 1.0, "loss_reduction": "sum", "backend": "eager", **options},
    )


class Private:
    """A private model of four samples a batch, C = 1 and no noise, and the parameters as they were."""

    def __init__(self, one_backward: bool = True, prepared: Callable[[Any], Any] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Net()
        given = prepared(self.model) if prepared is not None else None
        own = [p for p in self.model.parameters() if p.requires_grad] if given is None else given
        self.engine = PrivacyEngine(accountant="rdp")
        optimizer = torch.optim.SGD(own, lr=1.0)
        made = made_private(self.engine, self.model, optimizer, one_backward=one_backward, **options)
        self.view, self.optimizer, _ = made
        self.before = self.values()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def loss(self) -> Tensor:
        return self.view(X).square().sum()

    def refuses(self, error: type[Exception], match: str) -> None:
        """The step raises and moves nothing; after zero_grad a step is right again."""
        with pytest.raises(error, match=match):
            self.optimizer.step()
        assert self.unmoved()

    def unmoved(self) -> bool:
        return all(a.equal(b) for a, b in zip(self.values(), self.before, strict=True))

    def steps_right(self) -> None:
        """A step that moves every trainable parameter by a sum of four gradients of norm 1."""
        self.optimizer.zero_grad()
        self.before = self.values()
        expected = clipped(self.model)
        self.loss().backward()
        self.optimizer.step()
        for old, new, moved in zip(self.before, self.values(), expected, strict=True):
            torch.testing.assert_close(old - new, moved, rtol=1e-4, atol=1e-5)


def clipped(model: nn.Module) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x in X:
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(x[None]).square().sum().backward()
        own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in twin.parameters()]
        norm = torch.stack([g.square().sum() for g in own if g is not None]).sum().sqrt()
        for sums, g in zip(total, own, strict=True):
            assert g is not None
            sums += g * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    return total


BESIDE: dict[str, Callable[[Private], Tensor]] = {
    "the original": lambda run: run.loss() + run.model(X).square().sum(),
    "a submodule of the view": lambda run: run.loss() + run.view.body(X).square().sum(),
    "a weight used on the output": lambda run: (run.view(X) @ run.model.head.weight).square().sum(),
    "a second view": lambda run: run.loss() + second_view(run)(X).square().sum(),
}


def second_view(run: Private) -> Any:
    run.other = fxgrad.transform(run.model, quantity=fxgrad.ClippedGrad(1.0), backend="eager")  # type: ignore[attr-defined]
    return run.other  # type: ignore[attr-defined]


@pytest.mark.parametrize("beside", BESIDE)
def test_beside_the_private_model(beside: str) -> None:
    run = Private()
    with pytest.raises(UnclippedGrad, match=r"a gradient that is not clipped arrived at parameter"):
        BESIDE[beside](run).backward()
    run.refuses(UnaccountedGrad, "raised before its end|no backward of the private model since the last step")
    run.steps_right()


@pytest.mark.parametrize("one_backward", [True, False])
class TestParameters:
    def test_unfrozen_ones_that_the_optimizer_has(self, one_backward: bool) -> None:
        def prepared(model: Any) -> Any:
            model.body.requires_grad_(False)
            return model.parameters()

        run = Private(one_backward, prepared)
        run.model.body.requires_grad_(True)
        run.steps_right()

    def test_unfrozen_ones_that_it_has_not(self, one_backward: bool) -> None:
        run = Private(one_backward, lambda model: model.body.requires_grad_(False) and model.head.parameters())
        run.model.body.requires_grad_(True)
        run.loss().backward()
        if one_backward:
            run.refuses(UnaccountedGrad, "the clipped norm is over 'body.weight', too, which")
        run.optimizer.add_param_group({"params": list(run.model.body.parameters())})
        run.steps_right()

    def test_added_ones_of_another_model(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        run.loss().backward()
        run.refuses(UnaccountedGrad, r"of shape \[3\], is not the private model's")

    def test_assigned_state(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.loss().backward()
        run.model.load_state_dict(copy.deepcopy(run.model).state_dict(), assign=True)
        run.refuses(UnaccountedGrad, "is not the private model's: it would move by noise")
        run.optimizer.zero_grad()
        run.loss().backward()
        run.refuses(UnaccountedGrad, "is not the private model's: it would move by noise")

    def test_frozen_between_backward_and_step(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.loss().backward()
        run.model.body.requires_grad_(False)
        if one_backward:
            run.refuses(UnaccountedGrad, "a frozen parameter of shape .* holds p.grad")
            run.optimizer.zero_grad()
        else:  # Opacus clips over what is left
            run.optimizer.step()
        run.steps_right()

    def test_frozen_between_forward_and_backward(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.optimizer.zero_grad()
        loss = run.loss()
        run.model.body.requires_grad_(False)
        loss.backward()
        run.model.body.requires_grad_(True)
        if one_backward:
            run.refuses(UnaccountedGrad, "'body.weight' did not get its part .* frozen between forward and backward")
        run.steps_right()

    def test_frozen_after_zero_grad_which_left_zeros(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.steps_right()
        run.optimizer.zero_grad(set_to_none=False)
        run.model.body.requires_grad_(False)
        run.steps_right()
        run.model.body.requires_grad_(True)
        run.steps_right()

    def test_p_grad_of_a_frozen_one(self, one_backward: bool) -> None:
        run = Private(one_backward, lambda model: list(model.parameters()))
        run.model.body.requires_grad_(False)
        run.model.body.weight.grad = torch.ones(4, 3)
        run.loss().backward()
        run.refuses(UnaccountedGrad, r"a frozen parameter of shape \[4, 3\] holds p.grad")
        run.steps_right()


class TestGradients:
    def test_some_by_inputs_then_all(self) -> None:
        run = Private(poisson_sampling=False)
        run.loss().backward(inputs=[run.model.body.weight])
        run.loss().backward()
        run.refuses(UnaccountedGrad, r"did not get its part of the last backward, as with backward\(inputs=..\)")
        run.steps_right()

    def test_left_from_before_make_private(self) -> None:
        def prepared(model: Any) -> Any:
            model(X).sum().backward()

        run = Private(prepared=prepared)
        run.loss().backward()
        run.refuses(UnaccountedGrad, "held something else than fxgrad delivered when a backward began")
        run.steps_right()

    @pytest.mark.parametrize("one_backward", [True, False])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_assigned(self, when: str, one_backward: bool) -> None:
        run = Private(one_backward, poisson_sampling=False)
        place = "grad" if one_backward else "grad_sample"
        if when == "after":
            run.loss().backward()
        rows = () if one_backward else (4,)
        setattr(run.model.body.weight, place, torch.ones(*rows, 4, 3))
        if when == "before":
            run.loss().backward()
        run.refuses(UnaccountedGrad, "held something else|is not what the last backward of the private model left")
        run.steps_right()

    @pytest.mark.parametrize("one_backward", [True, False])
    def test_scaled_in_place(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.loss().backward()
        p = run.model.head.bias
        (p.grad if one_backward else p.grad_sample).mul_(3)
        run.refuses(UnaccountedGrad, "'head.bias' is not what the last backward of the private model left")
        run.steps_right()

    def test_a_backward_that_raised_half_way(self) -> None:
        run = Private(poisson_sampling=False)
        handle = run.model.head.weight.register_hook(stop)
        with pytest.raises(ZeroDivisionError, match="a hook"):
            run.loss().backward()
        handle.remove()
        run.refuses(UnaccountedGrad, "a backward of the private model raised before its end")
        run.loss().backward()
        if any(p.grad is not None for p in run.model.parameters()):
            run.refuses(UnaccountedGrad, "held something else than fxgrad delivered")
        run.steps_right()

    def test_a_hook_behind_the_accumulation(self) -> None:
        run = Private()
        handle = run.model.head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
        with pytest.raises(UnaccountedGrad, match=r"'head.weight' has a hook \(register_post_accumulate_grad_hook\)"):
            run.loss().backward()
        assert all(p.grad is None for p in run.model.parameters())
        handle.remove()
        run.steps_right()

    @pytest.mark.parametrize("one_backward", [True, False])
    def test_scaler(self, one_backward: bool) -> None:
        run, scaler = Private(one_backward), torch.amp.GradScaler("cpu")
        with pytest.raises(OptionError, match="the loss is scaled by a GradScaler"):
            scaler.scale(run.loss()).backward()
        run.refuses(UnaccountedGrad, "no backward of the private model since the last step")
        run.steps_right()

    def test_unscaled_by_a_scaler(self) -> None:
        run, scaler = Private(), torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        run.loss().backward()
        for p in run.model.parameters():
            p.grad.mul_(1 / 1024)  # what unscale_ does
        run.refuses(UnaccountedGrad, "no GradScaler")
        run.steps_right()

    def test_of_a_released_model(self) -> None:
        run = Private(poisson_sampling=False)
        run.loss().backward()
        fxgrad.release(run.model)
        run.model(X).sum().backward()
        run.refuses(UnaccountedGrad, "or another backward added to it")
        run.steps_right()

    def test_of_a_second_view_alone(self) -> None:
        run = Private(poisson_sampling=False)
        run.loss().backward()
        second_view(run)(X).sum().backward()
        run.refuses(UnaccountedGrad, "or another backward added to it")
        run.steps_right()


@pytest.mark.parametrize("one_backward", [True, False])
class TestOptimizers:
    def test_over_some_of_the_trainable_parameters(self, one_backward: bool) -> None:
        run = Private(one_backward, lambda model: list(model.head.parameters()))
        run.loss().backward()
        if one_backward:
            run.refuses(UnaccountedGrad, "the clipped norm is over 'body.weight', too, which")
            return
        run.optimizer.step()
        frozen = copy.deepcopy(Private(False).model)
        frozen.body.requires_grad_(False)
        for old, new, moved in zip(run.before, run.values(), clipped(frozen), strict=True):
            torch.testing.assert_close(old - new, moved, rtol=1e-4, atol=1e-5)

    def test_a_copy(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.loss().backward()
        with pytest.raises(OptionError, match="a private optimizer cannot be copied"):
            copy.deepcopy(run.optimizer)
        run.steps_right()

    def test_two_of_one_model(self, one_backward: bool) -> None:
        """Each follows the same backward; what one clears the other does not step with."""
        run = Private(one_backward)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
        other = made_private(PrivacyEngine(accountant="rdp"), run.view, optimizer, one_backward=one_backward)[1]
        run.steps_right()
        run.before = run.values()
        with pytest.raises((FxgradError, ValueError), match=r"no backward|not what the last|haven't been cleared"):
            other.step()
        assert run.unmoved()

    def test_virtual_steps_between_which_something_changes(self, one_backward: bool) -> None:
        run = Private(one_backward)
        run.optimizer.signal_skip_step(True)
        run.loss().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.model.body.requires_grad_(False)
        run.loss().backward()
        run.refuses(UnaccountedGrad, "p.summed_grad is not what the virtual steps of this batch left")
        run.model.body.requires_grad_(True)
        run.steps_right()

    def test_two_forwards_in_one_backward(self, one_backward: bool) -> None:
        run = Private(one_backward)
        with pytest.raises(AlreadySet, match="two forwards of the model meet in one backward"):
            (run.loss() + run.view(X.flip(0)).square().sum()).backward()
        run.refuses(UnaccountedGrad, "raised before its end|no backward of the private model since the last step")
        run.steps_right()


@pytest.mark.parametrize("first", [True, False])
def test_rows_of_two_views_in_one_backward(first: bool) -> None:
    run = Private(False)
    other: Any = fxgrad.transform(run.model, backend="eager")
    losses = [lambda: other(X).sum(), run.loss]
    made = [loss() for loss in (losses if first else losses[::-1])]
    (made[0] + made[1]).backward()
    run.refuses(UnaccountedGrad, "two transformed models added to grad_sample of 'body.weight'|held something else")
    run.steps_right()


def test_virtual_steps_of_two_norms() -> None:
    run = Private(False)
    run.optimizer.signal_skip_step(True)
    run.loss().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.optimizer.max_grad_norm = 0.1  # the noise would be for this one
    run.loss().backward()
    run.refuses(UnaccountedGrad, "max_grad_norm was changed")
    run.optimizer.max_grad_norm = 1.0
    run.steps_right()


def test_a_changed_norm_in_one_backward() -> None:
    run = Private()
    run.optimizer.max_grad_norm = 0.1
    run.loss().backward()
    run.optimizer.max_grad_norm = 1.0
    run.refuses(OptionError, "max_grad_norm is 1.0 and the backward clipped to 0.1")
    run.steps_right()


def stop(_: Tensor) -> None:
    raise ZeroDivisionError("a hook")


def test_the_step_of_the_optimizer_inside() -> None:
    run = Private(True)
    run.loss().backward()
    with pytest.raises(UnaccountedGrad, match="the optimizer that make_private was given steps by itself"):
        run.optimizer.original_optimizer.step()
    run.optimizer.step()
    with pytest.raises(UnaccountedGrad, match="steps by itself"):
        run.optimizer.original_optimizer.step()


def scaled(model: nn.Module) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(100)

    return hook


def replaced(model: nn.Module) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    return hook


def of_the_inner(run: Private, hook: Callable[..., None]) -> Any:
    return run.optimizer.original_optimizer.register_step_pre_hook(hook)


def of_the_private(run: Private, hook: Callable[..., None]) -> Any:
    return run.optimizer.register_step_pre_hook(hook)


def of_all(run: Private, hook: Callable[..., None]) -> Any:
    return register_optimizer_step_pre_hook(hook)


@pytest.mark.parametrize("one_backward", [True, False])
@pytest.mark.parametrize("changes", [scaled, replaced])
@pytest.mark.parametrize("register", [of_the_inner, of_the_private, of_all])
def test_a_hook_of_the_optimizer_that_changes_p_grad(register: Any, changes: Any, one_backward: bool) -> None:
    """It runs behind the noise: what it writes has none."""
    run = Private(one_backward)
    handle = register(run, changes(run.model))
    run.loss().backward()
    run.refuses(UnaccountedGrad, "p.grad was changed between the noise and the step")
    handle.remove()
    run.steps_right()


@pytest.mark.parametrize("one_backward", [True, False])
def test_hooks_of_the_optimizer_that_look(one_backward: bool) -> None:
    run = Private(one_backward, poisson_sampling=False)
    calls: list[str] = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run.steps_right()
    assert calls == ["before", "after"]
    run.optimizer.signal_skip_step(True)
    run.optimizer.zero_grad()
    run.loss().backward()
    run.optimizer.step()
    assert calls == ["before", "after"]  # a virtual step is none


@pytest.mark.parametrize("one_backward", [True, False])
@pytest.mark.parametrize("given", ["what it returned", "what it was given"])
def test_made_private_again(given: str, one_backward: bool) -> None:
    """As when a cell of a notebook runs twice."""
    run = Private(one_backward)
    again = given == "what it returned"
    engine = PrivacyEngine(accountant="rdp")
    old = run.optimizer
    module, optimizer = (run.view, old) if again else (run.model, old.original_optimizer)
    run.view, run.optimizer, _ = made_private(engine, module, optimizer, one_backward=one_backward)
    run.steps_right()
    assert len(engine.accountant) == 1
    run.optimizer.zero_grad()
    run.before = run.values()
    run.loss().backward()
    with pytest.raises(UnaccountedGrad, match="steps by itself, without noise"):
        old.original_optimizer.step()
    assert run.unmoved()


@pytest.mark.parametrize("one_backward", [True, False])
def test_a_compiled_step(one_backward: bool) -> None:
    run = Private(one_backward)
    step = torch.compile(lambda: run.optimizer.step(), backend="eager")
    for _ in range(2):
        run.optimizer.zero_grad()
        run.before, expected = run.values(), clipped(run.model)
        run.loss().backward()
        step()
        for old, new, moved in zip(run.before, run.values(), expected, strict=True):
            torch.testing.assert_close(old - new, moved, rtol=1e-4, atol=1e-5)
    run.optimizer.zero_grad()
    run.before = run.values()
    run.loss().backward()
    p = run.model.head.bias
    (p.grad if one_backward else p.grad_sample).mul_(3)
    with pytest.raises(UnaccountedGrad, match=r"'head.bias' is not what the last backward"):
        step()
    assert run.unmoved()


def test_an_optimizer_that_evaluates_the_loss_itself() -> None:
    model = Net()
    with pytest.raises(OptionError, match=r"LBFGS.step\(\) needs a closure"):
        made_private(PrivacyEngine(accountant="rdp"), model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("one_backward", [True, False])
def test_a_step_hook_beside_the_accountant_s(one_backward: bool) -> None:
    """Opacus's attach_step_hook puts one in the accountant's place: steps would not be counted."""
    run = Private(one_backward, poisson_sampling=False)
    calls: list[Any] = []
    counted = run.engine.accountant
    run.optimizer.attach_step_hook(calls.append)
    run.steps_right()
    assert len(counted) == len(calls) == 1
    run.optimizer.attach_step_hook(lambda optimizer: scaled(run.model)())
    run.optimizer.zero_grad()
    run.before = run.values()
    run.loss().backward()
    run.refuses(UnaccountedGrad, r"p.grad was changed between the noise and the step, .*attach_step_hook")


@pytest.mark.parametrize("one_backward", [True, False])
def test_a_parameter_that_the_model_does_not_use(one_backward: bool) -> None:
    def prepared(model: Any) -> list[nn.Parameter]:
        model.idle = nn.Linear(2, 2)
        return list(model.parameters())

    run = Private(one_backward, prepared)
    for _ in range(2):
        run.steps_right()
    if one_backward:
        run.optimizer.zero_grad(set_to_none=True)
        run.before = run.values()
        run.loss().backward(inputs=[run.model.body.weight])
        assert run.model.idle.weight.grad is None
        run.refuses(UnaccountedGrad, "did not get its part of the last backward")


@pytest.mark.parametrize("foreign", [False, True])
def test_a_guard_that_is_released_between_forward_and_backward(foreign: bool) -> None:
    run = Private()
    loss = run.loss()
    fxgrad.release(run.view)
    (loss + run.model(X).square().sum() if foreign else loss).backward()
    run.refuses(UnaccountedGrad, "did not get its part of the last backward, .*after fxgrad.release")
    run.steps_right()
