"""A private model and its optimizer beside DP-SGD written by hand: operations on both, and what may come of them.

    Reference     loops over samples with plain autograd; knows which steps are right, and which have no meaning
    Pair          runs an operation on both, and compares every parameter and the accountant's history

An operation that raises has contributed nothing to the reference and has moved no parameter. A step is right by the
reference, or it raises; it has to raise where the reference gives it no meaning, and must not where nothing is wrong.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad
import fxgrad.opacus
from fxgrad.errors import FxgradError

C, NOISE, LR, BATCH, DATA = 0.5, 0.7, 0.5, 4, 16
MODES = {
    "one backward, Poisson": dict(one_backward=True, poisson_sampling=True),
    "one backward": dict(one_backward=True, poisson_sampling=False),
    "rows, Poisson": dict(one_backward=False, poisson_sampling=True),
    "rows": dict(one_backward=False, poisson_sampling=False),
}
LOOSE = ("first.weight", "first.bias")  # what is frozen and unfrozen
EXTRA = "scale"  # frozen at first, and unknown to the optimizer
PYTORCH = (
    "modified by an inplace operation",
    "has been modified inplace",
    "backward through the graph a second time",
    "Expected to have finished reduction in the prior iteration",  # of DistributedDataParallel
    "Expected to mark a variable ready only once",  # the same
    "haven't been cleared",
)
Values = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * self.scale)


def loss_of(y: Tensor) -> Tensor:
    """A mean over the samples."""
    return (3 * y).square().sum() / max(len(y), 1)


class Stop(Exception):
    """A hook of the user's raises it."""


@dataclass
class Part:
    """One batch's gradients: the parameters that were trainable in its forward, and a row for each sample."""

    names: tuple[str, ...]
    rows: Values

    def clipped(self, names: list[str], bound: float) -> Values:
        """Σ_i min(1, C / (|g_i| + 1e-6)) g_i, with the norm over these parameters."""
        total = {name: torch.zeros_like(self.rows[name][:1].sum(0)) for name in names}
        for i in range(len(next(iter(self.rows.values())))):
            norm = sum(float(self.rows[name][i].square().sum()) for name in names) ** 0.5
            for name in names:
                total[name] += min(1.0, bound / (norm + 1e-6)) * self.rows[name][i]
        return total


def rows_of(values: Values, names: tuple[str, ...], x: Tensor) -> Values:
    """Every sample's gradient of its own loss, by plain autograd."""
    own = {name: value.detach().clone().requires_grad_(name in names) for name, value in values.items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for sample in x:
        hidden = torch.tanh(own["first.weight"] @ sample + own["first.bias"]) * own["scale"]
        y = own["last.weight"] @ hidden + own["last.bias"]
        grads = torch.autograd.grad((3 * y).square().sum(), [own[name] for name in names], allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            rows[name].append(torch.zeros_like(own[name]) if grad is None else grad)
    return {
        name: torch.stack(found) if found else values[name].new_zeros(0, *values[name].shape)
        for name, found in rows.items()
    }


RIGHT, EITHER = "", "either"


class Reference:
    """DP-SGD by hand, over the same parameters by name."""

    def __init__(self, values: Values, one_backward: bool, poisson_sampling: bool, seed: int) -> None:
        self.values = {name: value.clone() for name, value in values.items()}
        self.one_backward, self.poisson = one_backward, poisson_sampling
        self.generator = torch.Generator().manual_seed(seed)
        self.owned = [name for name in values if name != EXTRA]  # the optimizer's
        self.trainable = set(self.owned)
        self.bound, self.noise = C, NOISE
        self.parts: list[Part] = []  # since the gradients were cleared
        self.queue: list[bool] = []  # the steps that are announced as virtual, or as not
        self.sums: Values | None = None  # what virtual steps have left of this logical batch
        self.sums_of: tuple[float, list[str]] = C, []
        self.broken = False  # the last step raised: what the virtual steps before it have left is dropped
        self.history: list[tuple[float, float]] = []
        self.foreign = False  # the optimizer has parameters that are not the model's
        self.shared = True  # the optimizer's parameters are the model's
        self.wrong = ""  # why the gradients that lie there have no meaning, until they are cleared
        self.doubt = False  # an error is no surprise, until they are cleared
        self.spent = False  # the last real step's gradients still lie there
        self.spent_sums = False  # and its sums, which the optimizer's own zero_grad clears

    def stepped(self) -> list[str]:
        return [name for name in self.owned if name in self.trainable]

    def delivered(self, part: Part) -> None:
        if self.one_backward and self.spent:
            self.wrong = self.wrong or "added to the last step's gradients"
        if self.one_backward and not self.trainable.issuperset(part.names):
            self.wrong = self.wrong or "frozen between forward and backward"
        if self.parts and self.parts[-1].names != part.names:
            self.doubt = True
        self.parts.append(part)

    def cleared(self, *, sums: bool) -> None:
        """The gradients are gone; the optimizer's own zero_grad ends what a real step left, too."""
        self.parts, self.wrong, self.spent = [], "", False
        if sums:
            self.spent_sums = False
            if self.broken:
                self.sums, self.broken, self.queue = None, False, []
        self.doubt = self.spent_sums or not self.trainable.issubset(self.owned)

    def continues(self) -> bool:
        return self.sums is None or self.sums_of == (self.bound, self.stepped())

    def verdict(self, frozen_moves: bool) -> str:
        """RIGHT, EITHER, or why a step has no meaning."""
        names, last = self.stepped(), set(self.parts[-1].names) if self.parts else set()
        reasons = {
            "foreign parameters": self.foreign,
            "not the model's parameters": not self.shared,
            "no backward": not self.parts,
            "several signals": len(self.queue) > 1,
            "another C": self.one_backward and self.bound != C,
            "several batches under Poisson sampling": self.poisson and len(self.parts) > 1,
            "other parameters than were clipped": self.one_backward and set(names) != last,
            "parameters without gradients": not last.issuperset(names),
            "a frozen parameter would move": frozen_moves,
            "parts of a batch over different parameters, or of another C": not self.continues(),
            "added to the last step's rows": self.spent,
            "added to the last step's sums": self.spent_sums,
            self.wrong: bool(self.wrong),
        }
        return next((reason for reason, holds in reasons.items() if holds), EITHER if self.doubt else RIGHT)

    def step(self, reduce: Callable[[Tensor], Tensor] = lambda total: total) -> bool:
        """Whether it was a real one."""
        names = self.stepped()
        totals = {name: torch.zeros_like(self.values[name]) for name in names}
        for part in self.parts:
            over = list(part.names) if self.one_backward else names
            clipped = part.clipped(over, self.bound)
            for name in set(over) & totals.keys():
                totals[name] += clipped[name]
        backwards, self.doubt = len(self.parts), False
        if self.one_backward:
            self.parts = []
        self.spent = not self.one_backward
        if self.sums is not None:
            totals = {name: total + self.sums[name] for name, total in totals.items()}
        if self.queue and self.queue.pop(0):
            self.sums, self.sums_of, self.broken = totals, (self.bound, names), False
            return False
        self.sums, self.broken, self.spent, self.spent_sums = None, False, True, True
        for name in names:
            std = self.noise * self.bound
            noise = torch.normal(0, std, totals[name].shape, generator=self.generator, dtype=torch.float64)
            self.values[name] = self.values[name] - LR * (reduce(totals[name]) + noise) / (BATCH * backwards)
        self.history.append((self.noise, BATCH / DATA * backwards))
        return True


class Shared:
    """A model and its transformed views, whose compiled graphs all sequences of a mode use."""

    def __init__(self, one_backward: bool, poisson_sampling: bool) -> None:
        self.options = dict(one_backward=one_backward, poisson_sampling=poisson_sampling)
        torch.manual_seed(0)
        self.model = Net().double()
        self.parameters = dict(self.model.named_parameters())
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        quantity = fxgrad.ClippedGrad(C) if one_backward else fxgrad.GradSample()
        accumulate: Any = "error" if poisson_sampling or one_backward else "append"
        options: Any = dict(quantity=quantity, loss_reduction="mean", backend="eager")
        self.view = fxgrad.transform(self.model, accumulate=accumulate, **options)
        self.other = fxgrad.transform(self.model, **options)  # a second view
        self.loader = DataLoader(TensorDataset(torch.zeros(DATA, 2)), BATCH)

    def reset(self) -> None:
        """The parameters as at the beginning, without gradients, hooks and guards."""
        fxgrad.release(self.model)
        for name, parameter in self.parameters.items():
            put(self.model, name, parameter)
            parameter.requires_grad_(name != EXTRA)
            parameter.grad = None
            parameter.data.copy_(self.start[name])
            for place in ("grad_sample", "summed_grad"):
                parameter.__dict__.pop(place, None)
        self.model.train()


def put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    prefix, _, last = name.rpartition(".")
    setattr(model.get_submodule(prefix), last, parameter)


class Pair:
    """One sequence of operations."""

    def __init__(
        self,
        shared: Shared,
        seed: int = 0,
        rank: int = 0,
        around: Callable[[Any], Any] = lambda view: view,
        reduce: Callable[[Tensor], Tensor] = lambda total: total,
    ) -> None:
        shared.reset()
        self.rank, self.reduce, self.around = rank, reduce, around
        self.shared, self.model = shared, shared.model
        self.one_backward = shared.options["one_backward"]
        self.engine = PrivacyEngine(accountant="rdp")
        initial = [p for name, p in shared.parameters.items() if name != EXTRA]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.view, self.optimizer, _ = fxgrad.opacus.make_private(
                self.engine,
                module=around(shared.view),
                optimizer=torch.optim.SGD(initial, lr=LR),
                data_loader=shared.loader,
                noise_multiplier=NOISE,
                max_grad_norm=C,
                noise_generator=torch.Generator().manual_seed(seed),
                **shared.options,  # type: ignore[arg-type]
            )
        self.reference = Reference(shared.start, **shared.options, seed=seed)
        self.reference.owned = [name for name in shared.start if name != EXTRA]
        self.inputs = torch.Generator().manual_seed(seed + 1_000_000 * rank)
        self.pending: tuple[Tensor, Part, Tensor] | None = None  # a forward that waits for its backward
        self.outcomes: Counter[str] = Counter()

    def do(self, name: str, choice: int) -> None:
        """Run one operation, and compare."""
        before = {key: p.detach().clone() for key, p in self.shared.parameters.items()}
        steps = len(self.reference.history)
        try:
            OPERATIONS[name](self, choice)
            self.outcomes[name] += 1
        except (FxgradError, ValueError, RuntimeError, Stop) as error:
            if not isinstance(error, FxgradError | Stop) and not any(text in str(error) for text in PYTORCH):
                raise
            self.outcomes[f"{name}: {type(error).__name__}"] += 1
            self.reference.doubt = True
            moved = [key for key, p in self.shared.parameters.items() if not p.equal(before[key])]
            assert not moved or len(self.reference.history) > steps, f"{name} raised and moved {moved}"
        self.check()

    def check(self) -> None:
        for name, p in self.model.named_parameters():
            torch.testing.assert_close(p.detach(), self.reference.values[name], rtol=1e-9, atol=1e-9, msg=name)
        found = [(noise, rate) for noise, rate, steps in self.engine.accountant.history for _ in range(steps)]
        assert found == self.reference.history

    def wrap_again(self) -> None:
        """What goes around the model may be of no use after an error."""
        self.view = self.around(self.shared.view)

    # parts of operations

    def has_gradients(self) -> bool:
        return any(p.grad is not None and bool(p.grad.any()) for p in self.model.parameters())

    def batch(self, choice: int) -> Tensor:
        return torch.randn(choice % (BATCH + 1), 2, generator=self.inputs, dtype=torch.float64)

    def part(self, x: Tensor) -> Part:
        names = tuple(name for name in self.reference.values if name in self.reference.trainable)
        return Part(names, rows_of(self.reference.values, names, x))

    def forward(self, choice: int) -> tuple[Tensor, Part]:
        x = self.batch(choice)
        return loss_of(self.view(x)), self.part(x)

    def parameter(self, choice: int) -> nn.Parameter:
        own = [p for p in self.model.parameters() if p.requires_grad]
        return own[choice % len(own)]

    def changed(self, choice: int) -> nn.Parameter:
        """One that has to be right: rows of a parameter that is frozen later count for nothing."""
        return self.parameter(choice) if self.one_backward else self.model.get_parameter("last.weight")

    def own(self) -> list[nn.Parameter]:
        return list(self.shared.parameters.values())

    def frozen_moves(self) -> bool:
        groups = self.optimizer.param_groups
        frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        return any(p.grad is not None and bool(p.grad.any()) for p in frozen)

    def step(self) -> None:
        verdict = self.reference.verdict(self.frozen_moves())
        try:
            self.optimizer.step()
        except (FxgradError, ValueError, RuntimeError) as error:
            assert verdict != RIGHT, f"a right step raised {error}"
            self.reference.broken = True
            raise
        assert verdict in (RIGHT, EITHER), f"a step that had to raise: {verdict}"
        real = self.reference.step(self.reduce)
        self.outcomes["real steps" if real else "virtual steps"] += 1


def recovered(pair: Pair) -> None:
    """Whatever happened: with everything put right and the optimizer's zero_grad, a step is right again."""
    reference = pair.reference
    pair.wrap_again()
    pair.do("unfreeze", 0)
    if reference.foreign:
        pair.do("foreign_group", 0)
    if not reference.shared:
        pair.do("assign_state", 0)
    if EXTRA in reference.trainable:
        pair.do("add_group", 0)
    pair.do("change_bound", 0)
    pair.do("optimizer_zero_grad", 0)
    for _ in range(len(reference.queue) + 1):
        if reference.queue or not reference.continues():
            pair.do("train", 3)
    assert not reference.queue, "a right step raised, again and again"
    steps = len(reference.history)
    pair.do("train", 3)
    assert len(reference.history) == steps + 1


def operation(weight: int = 1) -> Callable[[Callable[[Pair, int], None]], Callable[[Pair, int], None]]:
    """Register an operation, to be drawn so many times as often as others."""

    def register(run: Callable[[Pair, int], None]) -> Callable[[Pair, int], None]:
        OPERATIONS[run.__name__] = run
        DRAWN.extend([run.__name__] * weight)
        return run

    return register


OPERATIONS: dict[str, Callable[[Pair, int], None]] = {}
DRAWN: list[str] = []


# training


@operation(4)
def train(pair: Pair, choice: int) -> None:
    """What a training loop does."""
    optimizer_zero_grad(pair, choice)
    backward_of_a_batch(pair, choice)
    pair.step()


@operation(3)
def backward_of_a_batch(pair: Pair, choice: int) -> None:
    loss, part = pair.forward(choice + pair.rank)  # processes have batches of different sizes
    loss.backward()
    pair.reference.delivered(part)


@operation(2)
def forward(pair: Pair, choice: int) -> None:
    pair.pending = *pair.forward(choice), pair.model.last.weight


@operation(2)
def backward(pair: Pair, choice: int) -> None:
    """Of a forward that may be long ago, once or twice."""
    if pair.pending is None:
        return
    loss, part, weight = pair.pending
    if choice % 3:
        pair.pending = None
    loss.backward(retain_graph=choice % 3 == 0)
    if weight is pair.model.last.weight:  # else its gradients lie at parameters that were replaced
        pair.reference.delivered(part)


@operation(4)
def step(pair: Pair, choice: int) -> None:
    pair.step()


@operation(2)
def virtual_step(pair: Pair, choice: int) -> None:
    pair.optimizer.signal_skip_step(choice % 3 > 0)
    pair.reference.queue.append(choice % 3 > 0)
    pair.step()


@operation()
def logical_batch(pair: Pair, choice: int) -> None:
    """What Opacus's BatchMemoryManager does."""
    for last in (False, True):
        optimizer_zero_grad(pair, choice)
        backward_of_a_batch(pair, choice + last)
        virtual_step(pair, 0 if last else 1)


@operation(3)
def optimizer_zero_grad(pair: Pair, choice: int) -> None:
    pair.optimizer.zero_grad(set_to_none=choice % 2 == 1)
    pair.reference.cleared(sums=True)


@operation()
def private_zero_grad(pair: Pair, choice: int) -> None:
    pair.shared.view.zero_grad(set_to_none=choice % 2 == 1)
    pair.reference.cleared(sums=False)


@operation()
def original_zero_grad(pair: Pair, choice: int) -> None:
    """It knows nothing of rows."""
    pair.model.zero_grad(set_to_none=choice % 2 == 1)
    if pair.one_backward:
        pair.reference.cleared(sums=False)


@operation()
def fxgrad_zero_grad(pair: Pair, choice: int) -> None:
    fxgrad.zero_grad([pair.model, pair.shared.view][choice % 2])
    pair.reference.cleared(sums=False)


@operation()
def zero_grad_of_a_part(pair: Pair, choice: int) -> None:
    if pair.one_backward and pair.reduce(torch.tensor(float(not pair.has_gradients()))):
        return  # in one process at least, of empty batches: zeros are as good as nothing
    pair.model.last.zero_grad(set_to_none=choice % 2 == 1)
    if pair.one_backward and pair.reference.parts:
        pair.reference.wrong = "a part is cleared"
    elif pair.one_backward and not pair.has_gradients():
        pair.reference.wrong = ""  # it was all there was
    pair.reference.doubt = True


# evaluation


@operation()
def evaluate(pair: Pair, choice: int) -> None:
    model = [pair.model, pair.shared.view][choice % 2]
    model.eval()
    with torch.no_grad():
        model(pair.batch(choice))
    model.train()


@operation()
def autograd_grad(pair: Pair, choice: int) -> None:
    """It leaves p.grad alone."""
    x = pair.batch(choice % 4 + 1).requires_grad_()
    view = [pair.model, pair.shared.view][choice % 2]
    if choice % 4 < 2 or not pair.one_backward:
        torch.autograd.grad(loss_of(pair.model(x)), [x, pair.parameter(choice)])
    else:
        torch.autograd.grad(loss_of(view(x)), [x, pair.parameter(choice)])


@operation()
def forward_alone(pair: Pair, choice: int) -> None:
    pair.forward(choice)


# what is trained, and how


@operation()
def freeze(pair: Pair, choice: int) -> None:
    for name in LOOSE:
        pair.model.get_parameter(name).requires_grad_(False)
    pair.reference.trainable -= set(LOOSE)


@operation()
def unfreeze(pair: Pair, choice: int) -> None:
    for name in LOOSE:
        pair.model.get_parameter(name).requires_grad_(True)
    pair.reference.trainable |= set(LOOSE)


@operation()
def train_another(pair: Pair, choice: int) -> None:
    """A parameter that was frozen in make_private."""
    pair.model.scale.requires_grad_(True)
    pair.reference.trainable.add(EXTRA)
    if choice % 2:
        add_group(pair, choice)


@operation()
def add_group(pair: Pair, choice: int) -> None:
    if EXTRA not in pair.reference.owned:
        pair.optimizer.add_param_group({"params": [pair.shared.parameters[EXTRA]]})
        pair.reference.owned.append(EXTRA)


@operation()
def foreign_group(pair: Pair, choice: int) -> None:
    """Parameters of another model, and away with them."""
    groups = pair.optimizer.param_groups
    if pair.reference.foreign:
        groups[:] = [group for group in groups if any(p is own for p in group["params"] for own in pair.own())]
    else:
        pair.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
    pair.reference.foreign = not pair.reference.foreign


@operation()
def change_noise(pair: Pair, choice: int) -> None:
    pair.optimizer.noise_multiplier = pair.reference.noise = [NOISE, 1.1][choice % 2]


@operation()
def change_bound(pair: Pair, choice: int) -> None:
    pair.optimizer.max_grad_norm = pair.reference.bound = [C, C, 0.9][choice % 3]


@operation()
def load_state(pair: Pair, choice: int) -> None:
    """Other values in the same parameters."""
    state = {name: value + 0.1 * choice for name, value in pair.shared.start.items()}
    pair.model.load_state_dict(state)
    pair.reference.values = {name: value.clone() for name, value in state.items()}


@operation()
def assign_state(pair: Pair, choice: int) -> None:
    """Other parameters, and back."""
    if pair.reference.shared:
        state = {name: value.clone() for name, value in pair.reference.values.items()}
        pair.model.load_state_dict(state, assign=True)
    else:
        for name, parameter in pair.shared.parameters.items():
            put(pair.model, name, parameter)
            parameter.data.copy_(pair.reference.values[name])
            parameter.requires_grad_(name in pair.reference.trainable)
        optimizer_zero_grad(pair, 1)  # what was delivered meanwhile lies elsewhere
    pair.reference.shared = not pair.reference.shared
    pair.reference.doubt = True


# what has no meaning


@operation()
def original_backward(pair: Pair, choice: int) -> None:
    loss_of(pair.model(pair.batch(choice % BATCH + 1))).backward()
    if pair.one_backward:  # p.grad counts, and nothing guards it
        pair.reference.wrong = "a gradient of the original"


@operation()
def released_backward(pair: Pair, choice: int) -> None:
    fxgrad.release(pair.model)
    original_backward(pair, choice)


@operation()
def both_backward(pair: Pair, choice: int) -> None:
    """The original, a submodule or a weight, beside the private model."""
    x = pair.batch(choice % BATCH + 1)
    beside: list[Callable[[], Tensor]] = [
        lambda: loss_of(pair.model(x)),
        lambda: pair.shared.view.last(x).sum(),
        lambda: pair.model.last.weight.sum(),
    ]
    loss, part = loss_of(pair.view(x)), pair.part(x)
    (loss + beside[choice % 3]()).backward()
    pair.reference.delivered(part)
    if pair.one_backward:
        pair.reference.wrong = "a gradient from outside"


@operation()
def two_forwards(pair: Pair, choice: int) -> None:
    sizes = choice % BATCH + 1, (choice + 1) % BATCH + 1
    (pair.forward(sizes[0])[0] + pair.forward(sizes[1])[0]).backward()
    pair.reference.wrong = "two forwards in one backward"


@operation()
def two_views(pair: Pair, choice: int) -> None:
    x = pair.batch(choice % BATCH + 1)
    other = loss_of(pair.shared.other(x))
    if choice % 2:
        other = other + loss_of(pair.view(x))
    other.backward()
    pair.reference.wrong = "two views"


@operation()
def assigned_grad(pair: Pair, choice: int) -> None:
    p: Any = pair.changed(choice)
    place = "grad" if pair.one_backward else "grad_sample"
    found = getattr(p, place, None)
    found = found[-1] if isinstance(found, list) else found
    if found is not None and not found.numel():
        return  # rows of no samples
    setattr(p, place, torch.ones_like(p)[None if place == "grad_sample" else ...] if found is None else found + 1)
    pair.reference.wrong = "assigned"


@operation()
def scaled_grad(pair: Pair, choice: int) -> None:
    p: Any = pair.changed(choice)
    found = getattr(p, "grad" if pair.one_backward else "grad_sample", None)
    if found is not None and len(found) and (isinstance(found, list) or bool(found.any())):
        (found[-1] if isinstance(found, list) else found).mul_(0.5)
        if pair.reference.parts:
            pair.reference.wrong = "changed in place"
        pair.reference.doubt = True


@operation()
def partial_backward(pair: Pair, choice: int) -> None:
    """backward(inputs=..): of some parameters, or of the batch."""
    x = pair.batch(choice % 4 + 1).requires_grad_()
    loss, part = loss_of(pair.view(x)), pair.part(x)
    if choice % 2:
        loss.backward(inputs=[x])
        return
    loss.backward(inputs=[pair.parameter(choice)])
    pair.reference.delivered(part)
    if pair.one_backward and len(part.names) > 1:
        pair.reference.wrong = "some parameters only"
    pair.reference.doubt = True


@operation()
def failing_backward(pair: Pair, choice: int) -> None:
    """A hook raises, or changes what arrives."""
    p: Any = pair.parameter(choice)
    hooks: list[Callable[[], Any]] = [
        lambda: p.register_post_accumulate_grad_hook(_stop),
        lambda: p.register_hook(_stop),
        lambda: p.register_hook(lambda g: None if g is None else 2 * g),
        lambda: p.register_post_accumulate_grad_hook(_double),
    ]
    handle = hooks[choice // 2 % 4]()
    try:
        loss, part = pair.forward(choice % BATCH + 1)
        loss.backward()
    finally:
        handle.remove()
    pair.reference.delivered(part)
    if pair.one_backward:
        pair.reference.wrong = "a hook"


def _stop(_: Tensor) -> None:
    raise Stop


def _double(p: Tensor) -> None:
    if p.grad is not None:
        p.grad.mul_(2)


@operation()
def scaled_loss(pair: Pair, choice: int) -> None:
    scaler = torch.amp.GradScaler("cpu")
    loss, _ = pair.forward(choice % BATCH + 1)
    scaler.scale(loss).backward()
    pair.reference.wrong = "a scaled loss"


@operation()
def copied_optimizer(pair: Pair, choice: int) -> None:
    copy.deepcopy(pair.optimizer).step()
    raise AssertionError("a copy stepped")


@operation()
def copied_model(pair: Pair, choice: int) -> None:
    """A copy of the original is a model of its own."""
    loss_of(copy.deepcopy(pair.model)(pair.batch(choice))).backward()
