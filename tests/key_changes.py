"""What decides a graph, one change each: every one has to change the key of AOTAutograd's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxgrad
from fxgrad.compile import warm_start
from fxgrad.costs import machines


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


@torch.library.custom_op("fxgrad_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, g: g * 3)


class Model(nn.Module):
    """A small model with a layer of each kind that the changes are about."""

    scale = 2.0

    def __init__(self, width: int = 6, p: float = 0.0, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, width, bias=bias, dtype=dtype)
        self.dropout, self.last = nn.Dropout(p), nn.Linear(width, 3, dtype=dtype)
        self.w = nn.Parameter(torch.ones(3, dtype=dtype))
        self.rates = torch.arange(3.0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.relu(self.first(x)))
        return self.tail(scaled(self.last(h), self.w) * self.scale)

    def tail(self, y: Tensor) -> Tensor:
        return y


class Tanh(Model):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.last(self.dropout(torch.tanh(self.first(x)))), self.w) * self.scale


class Doubled(Model):
    scale = 3.0


class Tripled(Model):
    def tail(self, y: Tensor) -> Tensor:
        return tripled(y)


class Rated(Model):
    def tail(self, y: Tensor) -> Tensor:
        return y * self.rates


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        h: Any = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        return scaled(self.last(torch.relu(h)), self.w) * self.scale


@dataclass(frozen=True, eq=False)
class Largest(fxgrad.Quantity):
    """A quantity of the user's."""

    factor: float

    def deliveries(self, n: Any, parameters: Any) -> list[fxgrad.Delivery]:
        return [fxgrad.Delivery("largest", name, (n,), p.dtype, p.device) for name, p in parameters.items()]

    def compute(self, grads: Any, n: int, given: Sequence[Tensor]) -> list[Tensor]:
        return [g.dense().flatten(1).amax(1) * self.factor for g in grads]


class Smallest(Largest):
    def compute(self, grads: Any, n: int, given: Sequence[Tensor]) -> list[Tensor]:
        return [g.dense().flatten(1).amin(1) * self.factor for g in grads]


def frozen() -> Model:
    model = Model()
    model.first.weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = Model(width=4)
    model.first.weight = nn.Parameter(torch.ones(4, 4))
    model.last = nn.Linear(4, 4)
    model.last.weight, model.w = model.first.weight, nn.Parameter(torch.ones(4))
    return model


@dataclass
class Step:
    """One call of a transformed model, up to the graph that AOTAutograd gets."""

    model: Callable[[], nn.Module] = Model
    x: Callable[[], Tensor] = lambda: torch.ones(5, 4)
    quantity: Callable[[], Any] = lambda: fxgrad.ClippedGrad(1.0)
    options: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    call: dict[str, Any] = field(default_factory=dict)

    def key(self) -> str | None:
        """Return the key that the graph gets; None if the cache does not store it."""
        keys: list[str | None] = []
        original = warm_start._key_or_none

        def noted(gm: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
            keys.append(original(gm, inputs))
            return keys[-1]

        compiler = mock.patch("fxgrad.compile.compiler.inner_compiler", lambda backend: lambda gm, inputs: gm.forward)
        torch._dynamo.reset()
        torch.manual_seed(0)
        with self.around(), compiler, mock.patch.object(warm_start, "_key_or_none", noted):
            fxgrad.transform(self.model(), quantity=self.quantity(), **self.options)(self.x(), **self.call)
        (key,) = keys
        return key


def clipped(**options: Any) -> Step:
    return Step(quantity=lambda: fxgrad.ClippedGrad(**{"max_grad_norm": 1.0, **options}))


def quantity(make: Callable[[], Any]) -> Step:
    return Step(quantity=make)


def closure(power: float) -> Callable[[Tensor], Tensor]:
    return lambda norms: 1 / (1 + norms**power)


@contextlib.contextmanager
def setting(set_to: Callable[[Any], Any], before: Any, now: Any) -> Iterator[None]:
    set_to(now)
    try:
        yield
    finally:
        set_to(before)


@contextlib.contextmanager
def rule(factor: float, double: bool = False) -> Iterator[None]:
    """Register a rule of the user's for `scaled`, with a number that it closes over."""

    def of_scaled(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": (g * x).flatten(1, -2).sum(1) * factor}

    def of_scaled_doubled(g: Tensor, x: Tensor, w: Tensor) -> dict[str, Tensor]:
        return {"w": (g * x + 0 * x).flatten(1, -2).sum(1) * factor}

    fxgrad.implements_per_sample_grads(scaled, of=["w"], override=True)(of_scaled_doubled if double else of_scaled)
    yield


@contextlib.contextmanager
def other_source() -> Iterator[None]:
    warm_start._versions.cache_clear()
    with mock.patch.object(warm_start, "hash_of_source", lambda: "another"):
        yield
    warm_start._versions.cache_clear()


def faster() -> AbstractContextManager[None]:
    from dataclasses import replace

    return machines.pinned(replace(machines.REFERENCE, memory=17e9))


CHANGES: dict[str, Step] = {
    "nothing": Step(),
    "GradSample": quantity(fxgrad.GradSample),
    "NormSample": quantity(fxgrad.NormSample),
    "Grad": quantity(fxgrad.Grad),
    "two quantities": quantity(lambda: [fxgrad.ClippedGrad(1.0), fxgrad.NormSample()]),
    "SquaredGrad": quantity(fxgrad.SquaredGrad),
    "GradProjection": quantity(lambda: fxgrad.GradProjection(4)),
    "its seed": quantity(lambda: fxgrad.GradProjection(4, seed=1)),
    "its dim": quantity(lambda: fxgrad.GradProjection(5)),
    "a bound on a function": clipped(weights=closure(1.0), bounded=True),
    "per_parameter": clipped(groups="per_parameter"),
    "automatic": clipped(weights="automatic"),
    "gamma": clipped(weights="automatic", gamma=0.02),
    "a part of a function": clipped(weights=partial(torch.rsub, other=2)),
    "its argument": clipped(weights=partial(torch.rsub, other=3)),
    "GradDot": quantity(lambda: fxgrad.GradDot({"w": torch.ones(3)})),
    "a direction more": quantity(lambda: fxgrad.GradDot({"w": torch.ones(2, 3)})),
    "a quantity of the user's": quantity(lambda: Largest(1.0)),
    "its option": quantity(lambda: Largest(2.0)),
    "its code": quantity(lambda: Smallest(1.0)),
    "a function of norms": clipped(weights=closure(1.0)),
    "a value it closes over": clipped(weights=closure(2.0)),
    "another function": clipped(weights=lambda norms: 1 / (2 + norms**1.0)),
    "sample_weight": clipped(sample_weight=True),
    "nonfinite": clipped(nonfinite="raise"),
    "group_size": Step(quantity=lambda: fxgrad.ClippedGrad(1.0, group_size=5)),
    "loss_reduction": Step(options={"loss_reduction": "mean"}),
    "a number as loss_reduction": Step(options={"loss_reduction": 2.0}),
    "in_dims=0": Step(x=lambda: torch.ones(5, 5, 4), options={"in_dims": 0}),
    "in_dims=1": Step(x=lambda: torch.ones(5, 5, 4), options={"in_dims": 1}),
    "strategy": Step(options={"strategy": {"first.weight": "materialise"}}),
    "a batch of one": Step(x=lambda: torch.ones(1, 4)),
    "the first batch's size": Step(x=lambda: torch.ones(6, 4)),
    "a dimension more": Step(x=lambda: torch.ones(5, 2, 4)),
    "strides": Step(x=lambda: torch.ones(4, 5).t()),
    "an input's dtype": Step(x=lambda: torch.ones(5, 4).double(), model=lambda: Model(dtype=torch.float64)),
    "an input's gradient": Step(x=lambda: torch.ones(5, 4, requires_grad=True)),
    "width": Step(model=lambda: Model(width=7)),
    "no bias": Step(model=lambda: Model(bias=False)),
    "requires_grad": Step(model=frozen),
    "tied weights": Step(model=tied),
    "the model's code": Step(model=Tanh),
    "a number in the model": Step(model=Doubled),
    "a tensor in the model": Step(model=Rated),
    "dropout": Step(model=lambda: Model(p=0.5)),
    "dropout's p": Step(model=lambda: Model(p=0.25)),
    "a checkpoint": Step(model=Checkpointed),
    "a rule": Step(around=lambda: rule(1.0)),
    "a value the rule closes over": Step(around=lambda: rule(2.0)),
    "the rule's code": Step(around=lambda: rule(1.0, double=True)),
    "machine speeds": Step(around=faster),
    "fxgrad's source": Step(around=other_source),
    "threads": Step(around=lambda: setting(torch.set_num_threads, torch.get_num_threads(), 7)),
    "float32 precision": Step(around=lambda: setting(torch.set_float32_matmul_precision, "highest", "medium")),
    "deterministic": Step(around=lambda: setting(torch.use_deterministic_algorithms, False, True)),
    "autocast": Step(around=lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast's cache": Step(around=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)),
    "mkldnn": Step(around=lambda: setting(torch._C._set_mkldnn_enabled, True, False)),
    "an operator's family": Step(around=lambda: mock.patch.dict(
        "fxgrad.ops.families._REGISTERED", {"mine": fxgrad.Family.ELEMENTWISE})),
}  # fmt: skip
# What leaves the graph as it is: a dropout in eval mode, and what only the call around the graph looks at.
SAME: dict[str, tuple[str, Step]] = {
    "eval": ("nothing", Step(model=lambda: Model(p=0.5).eval())),
    "memory_limit": ("nothing", Step(options={"memory_limit": 1 << 40})),
    "the numbers": ("nothing", Step(x=lambda: torch.zeros(5, 4))),
    "max_grad_norm": ("nothing", clipped(max_grad_norm=0.5)),
    "a tensor as max_grad_norm": ("nothing", clipped(max_grad_norm=torch.tensor(0.5))),
    "several bounds": ("per_parameter", clipped(groups="per_parameter", max_grad_norm=[1.0, 1.0, 1.0, 1.0, 2.0])),
    "a direction's numbers": ("GradDot", quantity(lambda: fxgrad.GradDot({"w": torch.zeros(3)}))),
}


class Global:
    """A value that may change under a function that reads it."""

    def __call__(self, norms: Tensor) -> Tensor:
        return 1 / (1 + norms)


FACTOR = 2.0
UNREADABLE: dict[str, tuple[Step, str]] = {}


def unreadable(name: str, sentence: str) -> Callable[[Callable[[], Step]], Callable[[], Step]]:
    def register(make: Callable[[], Step]) -> Callable[[], Step]:
        UNREADABLE[name] = make(), sentence
        return make

    return register


@unreadable("a global", r"<lambda> uses the global 'FACTOR'")
def _() -> Step:
    return clipped(weights=lambda norms: FACTOR / (1 + norms))


@unreadable("a tensor in a closure", "<lambda> closes over 'table': a tensor, whose numbers may change")
def _() -> Step:
    table = torch.ones(1)
    return clipped(weights=lambda norms: table[0] / (1 + norms))


@unreadable("an object in a closure", "closes over 'state': a value of the type tests.key_changes.Global")
def _() -> Step:
    state = Global()
    return clipped(weights=lambda norms: 1 / (1 + norms) if state else norms)


@unreadable("an import", "imports or writes to 'fxgrad.costs'")
def _() -> Step:
    def weights(norms: Tensor) -> Tensor:
        from fxgrad.costs import machines

        return norms / machines.ROUNDS

    return clipped(weights=weights)


@unreadable("operators of PyTorch", "reads .ops")
def _() -> Step:
    known = False
    return clipped(weights=lambda norms: torch.ops.mine.weights(norms) if known else 1 / (1 + F.relu(norms)))


@unreadable("a callable object", "a value of the type tests.key_changes.Global")
def _() -> Step:
    return clipped(weights=Global())


@unreadable("a bound method of an object", "a value of the type tests.key_changes.Global")
def _() -> Step:
    return clipped(weights=Global().__call__)


fxgrad.register_op(torch.ops.fxgrad_tests.tripled.default)


@unreadable("an operator of the user's", "the operator fxgrad_tests.tripled.* has a backward that no key shows")
def _() -> Step:
    return Step(model=Tripled)
