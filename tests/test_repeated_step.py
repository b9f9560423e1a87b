"""A step like the one before it gives what the engine's way gives, and what has changed between two steps is seen."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxgrad
from fxgrad.engine import Engine
from fxgrad.errors import NonFinite, OptionError
from fxgrad.host.versions import at_least
from fxgrad.repeated_step import RepeatedStep

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.skipif(not at_least("2.13"), reason="older versions repeat no step"),
]

SCALE = 1.0


class Model(nn.Module):
    """Layers, a factor, and what the last call was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)
        self.power, self.rows = 2.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows = len(x)
        y: Tensor = self.second(self.drop(self.first(x).tanh()))
        return y * self.power


class Case:
    """A transformed model with its step, and inputs."""

    def __init__(self, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Model().eval()
        self.quantity = fxgrad.ClippedGrad(1.0, **options)
        self.private = fxgrad.transform(self.model, self.quantity)
        self.losses: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
        self.step = fxgrad.forward_backward(self.private, self._loss)
        self.inputs: tuple[Any, ...] = torch.randn(6, 4), torch.randn(6, 3), torch.randn(6)
        self.keywords: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.views = [self.private]

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor, unused: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x) * SCALE
        return self.losses(logits, y, reduction="none").sum(), logits.detach()  # type: ignore[call-arg]

    def call(self) -> Any:
        return self.step(*self.inputs, **self.keywords)

    def seen(self) -> list[Any]:
        """All that a step leaves."""
        attributes = [parameter.grad for parameter in self.model.parameters()]
        try:
            result = fxgrad.result(self.private, self.quantity)
        except OptionError:
            result = None
        return [*attributes, *(result or ()), self.model.rows]


Change = Callable[[Case], Any]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


@change
def nothing(case: Case) -> None:
    pass


@change
def numbers(case: Case) -> None:
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.mul_(1.5)


@change
def more_samples(case: Case) -> None:
    case.inputs = torch.randn(9, 4), torch.randn(9, 3), torch.randn(9)


@change
def one_sample(case: Case) -> None:
    case.inputs = tuple(x[:1] for x in case.inputs)


@change
def no_sample(case: Case) -> None:
    case.inputs = tuple(x[:0] for x in case.inputs)


@change
def an_unused_input_of_another_size(case: Case) -> None:
    case.inputs = *case.inputs[:2], torch.randn(5)


@change
def an_input_that_requires_a_gradient(case: Case) -> None:
    case.inputs[0].requires_grad_()


@change
def an_unused_input_with_a_graph(case: Case) -> None:
    case.inputs = *case.inputs[:2], case.model.first.weight.sum() * torch.ones(6)


@change
def an_unused_input_that_is_a_number(case: Case) -> None:
    case.inputs = *case.inputs[:2], 3


@change
def a_keyword(case: Case) -> None:
    case.keywords = {"unused": case.inputs[2]}
    case.inputs = case.inputs[:2]


@change
def an_input_in_another_layout(case: Case) -> None:
    case.inputs = torch.randn(4, 6).t(), *case.inputs[1:]


@change
def an_input_in_double(case: Case) -> None:
    case.inputs = case.inputs[0].double(), *case.inputs[1:]


@change
def training(case: Case) -> None:
    case.model.train()


@change
def an_attribute(case: Case) -> None:
    case.model.power = 0.5


@change
def what_the_loss_reads(case: Case) -> None:
    case.losses = F.smooth_l1_loss


@change
def a_global(case: Case) -> None:
    globals()["SCALE"] = 3.0


@change
def another_parameter(case: Case) -> None:
    case.model.first.weight = nn.Parameter(torch.ones(5, 4))


@change
def another_module(case: Case) -> None:
    case.model.second = nn.Linear(5, 3, bias=False)


@change
def a_frozen_parameter(case: Case) -> None:
    case.model.first.weight.requires_grad_(False)


@change
def a_gradient_that_is_set(case: Case) -> None:
    case.model.first.weight.grad = torch.ones(5, 4)


@change
def gradients_that_are_not_cleared(case: Case) -> None:
    case.call()


@change
def a_hook(case: Case) -> None:
    case.model.first.weight.register_hook(lambda grad: case.kept.append(grad.clone()))


@change
def a_hook_that_changes_what_it_gets(case: Case) -> None:
    case.model.first.weight.register_hook(lambda grad: 2 * grad)


@change
def a_hook_behind_p_grad(case: Case) -> None:
    case.model.second.bias.register_post_accumulate_grad_hook(lambda p: case.kept.append(p.grad.clone()))


@change
def a_hook_on_the_node(case: Case) -> None:
    bias = case.model.second.bias
    behind: Any = bias.view_as(bias).grad_fn
    node = behind.next_functions[0][0]
    node.register_hook(lambda *_: case.kept.append(len(case.kept)))
    case.kept.append(node)


@change
def the_guard_is_released(case: Case) -> None:
    fxgrad.release(case.private)


@change
def another_bound(case: Case) -> None:
    object.__setattr__(case.quantity, "max_grad_norm", 0.25)


@change
def a_bound_in_a_tensor(case: Case) -> None:
    object.__setattr__(case.quantity, "max_grad_norm", torch.tensor(0.25))


@change
def a_bound_that_is_none(case: Case) -> None:
    object.__setattr__(case.quantity, "max_grad_norm", -1.0)


@change
def dynamo_is_reset(case: Case) -> None:
    torch._dynamo.reset()


@change
def a_backward_between(case: Case) -> None:
    case.private(case.inputs[0]).sum().backward()
    fxgrad.zero_grad(case.private)


@change
def another_view(case: Case) -> None:
    case.views.append(fxgrad.transform(case.model, fxgrad.ClippedGrad(2.0), backend="eager"))


@change
def nan(case: Case) -> None:
    case.inputs[0][2] = float("nan")


@change
def a_mark_for_dynamo(case: Case) -> None:
    torch._dynamo.mark_static(case.inputs[0], 0)


def _around(context: Callable[[], Any]) -> Change:
    def changed(case: Case) -> Any:
        return context()

    return changed


AROUND: dict[str, Change] = {
    "autocast": _around(lambda: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": _around(torch.no_grad),
    "inference_mode": _around(torch.inference_mode),
    "a_dispatch_mode": _around(lambda: FlopCounterMode(display=False)),
    "forward_mode": _around(torch.autograd.forward_ad.dual_level),
    "a_stance": _around(lambda: torch.compiler.set_stance("force_eager")),
    "a_default_device": _around(lambda: torch.device("meta")),
    "hooks_on_saved": _around(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
}


class Backward(torch.autograd.Function):
    """Makes a call in a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], Any]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            ctx.call()
        return grads[0], None


def outcome(case: Case, call: Callable[[], Any]) -> list[Any]:
    """What a call returns and leaves, or its error."""
    try:
        return [call(), *case.seen()]
    except Exception as error:
        return [type(error), str(error), *case.seen()]


def history(change: Change, wait: bool = False, **options: Any) -> list[Any]:
    """What steps leave before and after a change, and whether the guard stands in the end."""
    globals()["SCALE"] = 1.0
    case = Case(**options)
    kept: list[Any] = []
    for _ in range(3):
        case.private.zero_grad()
        kept += outcome(case, case.call)
    case.private.zero_grad()
    torch.manual_seed(1)
    for i in range(3):
        with (change(case) if i == 0 or change in AROUND.values() else None) or contextlib.nullcontext():
            kept += outcome(case, case.call)
        case.private.zero_grad()
    kept += outcome(case, lambda: case.model(torch.ones(2, 4)).sum().backward())
    return [*kept, *case.kept]


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple | list):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        same = ours.dtype == theirs.dtype and ours.stride() == theirs.stride() and ours.shape == theirs.shape
        return same and torch.equal(ours.detach().nan_to_num(7e7), theirs.detach().nan_to_num(7e7))
    return type(ours) is type(theirs) and (not isinstance(ours, str | int | type) or ours == theirs)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that could be like the one before it, whether it was."""
    seen: list[bool] = []
    fits, delivered = RepeatedStep.fits, RepeatedStep.delivered

    def fitting(self: RepeatedStep, inputs: tuple[Any, ...], roles: Any) -> bool:
        fit = fits(self, inputs, roles)
        if not fit:
            seen.append(False)
        return fit

    def delivering(self: RepeatedStep, outputs: Any) -> bool:
        seen.append(delivered(self, outputs))
        return seen[-1]

    monkeypatch.setattr(RepeatedStep, "fits", fitting)
    monkeypatch.setattr(RepeatedStep, "delivered", delivering)
    return seen


@pytest.mark.parametrize("name", [*CHANGES, *AROUND])
def test_a_change_is_seen(name: str, counts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    change = {**CHANGES, **AROUND}[name]
    ours = history(change)
    assert counts[:2] == [True, True]
    monkeypatch.setattr(RepeatedStep, "of", lambda *_: None)
    counts.clear()
    theirs = history(change)
    assert not counts and equal(ours, theirs), (ours, theirs)


def varying() -> list[Any]:
    """Batches as Poisson sampling draws them, an empty one among them."""
    case = Case()
    whole, seen = case.inputs, []
    for size in 6, 4, 4, 5, 0, 3, 6, 1:  # one sample has a graph of its own
        case.inputs = tuple(x[:size] for x in whole)
        case.private.zero_grad()
        seen.append([*case.call(), *case.seen()])
    return seen


def test_a_step_of_another_size_is_repeated(counts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = varying()
    assert counts == [True, True, True, False, True, False]  # the step behind the empty one learns anew
    monkeypatch.setattr(RepeatedStep, "of", lambda *_: None)
    counts.clear()
    assert equal(ours, varying()) and not counts


def test_samples_that_are_not_finite_raise(counts: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = history(nan, nonfinite="raise")
    assert True in counts and NonFinite in ours
    monkeypatch.setattr(RepeatedStep, "of", lambda *_: None)
    assert equal(ours, history(nan, nonfinite="raise"))


def test_in_a_backward(counts: list[bool]) -> None:
    case = Case()
    for _ in range(3):
        case.private.zero_grad()
        expected = case.call()[0], *case.seen()
    case.private.zero_grad()
    x = torch.ones(2, requires_grad=True)
    Backward.apply(x, case.call).sum().backward()
    assert counts == [True, True, False] and equal(case.seen()[:4], [*expected[1:5]])


def test_an_optimizer_follows(counts: list[bool]) -> None:
    """The ledger of fxgrad's Opacus knows what p.grad is made of."""
    case = Case()
    for _ in range(2):
        case.private.zero_grad()
        case.call()

    class Follower:
        shards = False
        began = ended = cleared = lambda self, *_: followed.append(1)

    followed: list[int] = []
    follower = Follower()
    engine: Engine = case.step.engine  # type: ignore[attr-defined]
    engine.store.observers.add(follower)
    case.private.zero_grad()
    case.call()
    assert counts == [True, False] and len(followed) >= 2


def test_what_a_step_found_is_not_kept(counts: list[bool]) -> None:
    """Neither its gradients, nor the model behind the function."""
    case = Case()
    for _ in range(3):
        case.private.zero_grad()
        loss, _ = case.call()
    grads = [weakref.ref(parameter.grad) for parameter in case.model.parameters()]
    case.private.zero_grad()
    assert counts == [True, True] and not any(grad() is not None for grad in grads)
    view, model = weakref.ref(case.private), weakref.ref(case.model)
    del case, loss
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert view() is None and model() is None


def test_what_a_step_found_is_used_by_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward in it is that of one thread."""
    case = Case()
    case.call()
    repeated: dict[str, RepeatedStep] = case.step.engine.repeated  # type: ignore[attr-defined]
    (one,) = repeated.values()
    graph, meanwhile = one.graph.call, []

    def call(*inputs: Any) -> Any:
        meanwhile.append(dict(repeated))
        return graph(*inputs)

    monkeypatch.setattr(one.graph, "call", call)
    case.private.zero_grad()
    case.call()
    assert meanwhile == [{}] and [*repeated.values()] == [one]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_may_differ_in_the_next_call_is_not_repeated(backend: str, counts: list[bool]) -> None:
    private = fxgrad.transform(nn.Linear(4, 3), fxgrad.ClippedGrad(1.0), backend=backend)
    step = fxgrad.forward_backward(private, lambda model, x: model(x).sum())
    for _ in range(3):
        private.zero_grad()
        step(torch.ones(5, 4))
    assert not counts


@pytest.mark.parametrize(
    "quantity",
    [
        fxgrad.GradSample(),
        fxgrad.NormSample(),
        fxgrad.ClippedGrad(torch.tensor(1.0)),
        [fxgrad.ClippedGrad(1.0), fxgrad.NormSample()],
    ],
)
def test_other_quantities_go_the_engines_way(quantity: Any, counts: list[bool]) -> None:
    private = fxgrad.transform(nn.Linear(4, 3), quantity)
    step = fxgrad.forward_backward(private, lambda model, x: model(x).sum())
    for _ in range(3):
        fxgrad.zero_grad(private)
        step(torch.ones(5, 4))
    assert True not in counts


OPS = torch.library.Library("test_repeated_step", "DEF")
OPS.define("act(Tensor x) -> Tensor")
ACTS: list[Callable[[], Any]] = []


def act_and_copy(x: Tensor) -> Tensor:
    for act in ACTS:
        act()
    return x.clone()


OPS.impl("act", act_and_copy, "CPU")
torch.library.register_fake("test_repeated_step::act", torch.empty_like, lib=OPS)
fxgrad.register_op(torch.ops.test_repeated_step.act.default)


def acting() -> tuple[nn.Module, Callable[[], Any]]:
    """A model with a step, in whose graph an op acts."""
    torch._dynamo.reset()
    ACTS.clear()
    private = fxgrad.transform(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), fxgrad.ClippedGrad(1.0))
    act = torch.ops.test_repeated_step.act
    step = fxgrad.forward_backward(private, lambda model, x, y: (model(x) - act(y)).square().sum())
    x, y = torch.ones(5, 4), torch.ones(5, 3)

    def call() -> Any:
        private.zero_grad()
        return step(x, y)

    return private, call


def test_a_graph_that_raises_runs_once(counts: list[bool]) -> None:
    """A time limit may be raised anywhere, and is not raised again."""
    _, call = acting()
    call()
    call()
    calls: list[int] = []

    def late() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise TimeoutError("late")

    ACTS.append(late)
    with pytest.raises(TimeoutError, match="late"):
        call()
    assert counts == [True] and calls == [1]
    ACTS.clear()
    call()


def test_what_happens_meanwhile_is_seen(counts: list[bool]) -> None:
    """Another thread, or an op of the user's, may set p.grad while the graph runs, or register a hook."""
    private, call = acting()
    weight = next(private.parameters())
    kept: list[Any] = []
    torch.manual_seed(0)
    call()
    expected = weight.grad
    hooks = [weight.register_hook, weight.register_post_accumulate_grad_hook]
    for register in hooks:
        handles: list[Any] = []
        call()
        ACTS.append(lambda register=register, handles=handles: handles.append(register(kept.append)))  # type: ignore[misc]
        torch.manual_seed(0)
        call()
        ACTS.clear()
        assert len(kept) == 1 and torch.equal(weight.grad, expected)  # type: ignore[arg-type]
        handles[0].remove()
        kept.clear()
    assert counts == [True, False, False]  # a step behind a backward is one of its own


def test_a_step_behind_a_backward_is_repeated(counts: list[bool]) -> None:
    """What adds to p.grad is freed with its graph, not when Python collects garbage."""
    private, call = acting()
    gc.disable()
    try:
        call()
        hook = next(private.parameters()).register_hook(lambda grad: None)
        call()
        hook.remove()
        counts.clear()
        for _ in range(3):
            call()
        assert counts == [True, True]
    finally:
        gc.enable()
