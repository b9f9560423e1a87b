"""`fxgrad.warm_up`: the steps after it compile nothing, and it leaves everything as it was."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import fxgrad
from fxgrad.api import engine_of
from fxgrad.engine import Engine
from fxgrad.errors import BatchSizeError, FxgradError, MixedSamples, OptionError
from fxgrad.host.tensors import version
from tests.quick import long_but

QUANTITIES: dict[str, Callable[[], Any]] = {
    "rows": fxgrad.GradSample,
    "norms": fxgrad.NormSample,
    "clipped": lambda: fxgrad.ClippedGrad(1.0),
    "ordinary": lambda: [fxgrad.Grad(), fxgrad.NormSample()],
    "squares": fxgrad.SquaredGrad,
    "variance": fxgrad.GradVariance,
    "gram": fxgrad.GradGram,
    "projection": lambda: fxgrad.GradProjection(4),
    "dots": lambda: fxgrad.GradDot({"first.weight": torch.ones(5, 3)}),
}


class Net(nn.Module):
    """Dropout, a batch norm, buffers that are written and replaced, a frozen parameter that is, and random numbers."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
            self.scale.mul_(1.01)
        h = self.drop(torch.tanh(self.first(x)) * self.scale)
        out: Tensor = self.last(self.norm(h) + torch.rand_like(h))
        return out


def net() -> Net:
    """In training mode, as a whole."""
    model = Net().train()
    model.norm.eval()
    return model


def state(model: nn.Module) -> list[Any]:
    """All that a step may change, by value and by identity, with the versions of tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    results = [getattr(p, name, None) for p in model.parameters() for name in ("grad", "grad_sample", "norm_sample")]
    every = [t for t in (*tensors, *results) if t is not None]
    return [
        [(id(t), version(t), t.detach().view(-1).view(torch.uint8).tolist()) for t in every],
        [module.training for module in model.modules()],
        [{k: v for k, v in vars(p).items() if not k.startswith("_dynamo")} for p in model.parameters()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
    ]


def compilations() -> int:
    """How often Dynamo, AOTAutograd and Inductor have compiled anything."""
    return sum(sum(counters[kind].values()) for kind in ("stats", "frames", "aot_autograd", "inductor"))


def backward(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    model(*args, **kwargs).square().sum().backward()


def in_both_modes(gs: nn.Module, sizes: Sequence[int], step: Callable[[int], Any]) -> None:
    """A `Net`'s steps at each size."""
    for training in (True, False):
        gs.train(training)
        gs.get_submodule("norm").eval()
        for size in sizes:
            fxgrad.zero_grad(gs)
            step(size)


def gradients(model: nn.Module) -> list[Tensor]:
    trainable: list[Any] = [p for p in model.parameters() if p.requires_grad]
    return [p.grad_sample for p in trainable]


@pytest.mark.parametrize(
    "quantity", long_but(lambda name: name in ("rows", "clipped", "ordinary", "projection"), QUANTITIES)
)
def test_steps_after_it_compile_nothing(quantity: str) -> None:
    """At every size and in both modes, with any quantity; and it leaves everything as it was."""
    model = net()
    gs = fxgrad.transform(model, quantity=QUANTITIES[quantity](), backend="aot_eager")
    before = state(model)
    fxgrad.warm_up(gs, torch.randn(4, 3))
    torch.set_rng_state(torch.tensor(before[3], dtype=torch.uint8))  # the example is random, too
    assert state(model) == before
    compiled = compilations()
    assert compiled
    in_both_modes(gs, (4, 7, 1, 0), lambda size: backward(gs, torch.randn(size, 3)))
    assert compilations() == compiled


@pytest.mark.inductor
@pytest.mark.parametrize("quantity", long_but(lambda quantity: quantity == "clipped", ["rows", "clipped"]))
def test_through_inductor(quantity: str, caplog: pytest.LogCaptureFixture) -> None:
    """Backwards that compile in their first run are warm, too."""
    model = net()
    gs = fxgrad.transform(model, quantity=QUANTITIES[quantity]())
    x, before = torch.randn(4, 3), None
    before = state(model)
    with caplog.at_level("INFO", "fxgrad"):
        fxgrad.warm_up(gs, x, modes="train")
        assert state(model) == before
        assert sum("Inductor compiled the backward" in message for message in caplog.messages) == 2
        caplog.clear()
        compiled = compilations()
        for size in (4, 7, 1):
            fxgrad.zero_grad(gs)
            backward(gs, torch.randn(size, 3))
    assert compilations() == compiled and not caplog.messages


def squares(model: nn.Module, x: Tensor, y: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The loss of a whole step, and what the model returned."""
    out = model(x)
    return (out - y).square().sum() * scale, out.detach()


@pytest.mark.parametrize("quantity", long_but(lambda name: name in ("rows", "clipped", "projection"), QUANTITIES))
def test_whole_steps_after_it_compile_nothing(quantity: str) -> None:
    """At every size and in both modes; and it leaves everything as it was, behind a step that the next one repeats."""
    model = net()
    gs = fxgrad.transform(model, quantity=QUANTITIES[quantity](), backend="aot_eager")
    step = fxgrad.forward_backward(gs, squares)
    before = state(model)
    fxgrad.warm_up(step, x := torch.randn(4, 3), y := torch.randn(4, 2))
    torch.set_rng_state(torch.tensor(before[3], dtype=torch.uint8))
    assert state(model) == before
    compiled = compilations()
    assert compiled
    in_both_modes(gs, (4, 7, 7, 1), lambda size: step(torch.randn(size, 3), torch.randn(size, 2)))
    assert compilations() == compiled
    gs.train()
    model.norm.eval()
    before = state(model)
    fxgrad.warm_up(step, x, y)
    assert state(model) == before and compilations() == compiled


@pytest.mark.inductor
def test_a_whole_step_through_inductor(caplog: pytest.LogCaptureFixture) -> None:
    """Its numbers are those of a step that was not warmed up."""
    x, y, results = torch.randn(4, 3), torch.randn(4, 2), []
    for warm in (False, True):
        torch.manual_seed(1)
        model = net()
        gs = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0))
        step = fxgrad.forward_backward(gs, squares)
        with caplog.at_level("INFO", "fxgrad"):
            if warm:
                fxgrad.warm_up(step, x, y, modes="train")
                caplog.clear()
            loss, out = step(x, y)
        results.append([loss, out, *(p.grad for p in gs.parameters() if p.grad is not None), *gs.buffers()])
        assert bool(caplog.messages) is not warm
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_a_whole_step_takes() -> None:
    """Numbers and keywords, weights of samples, inputs whose samples are elsewhere, and sizes of one's own."""
    quantity = fxgrad.ClippedGrad(1.0, sample_weight=True)
    gs = fxgrad.transform(nn.Linear(3, 2), quantity=quantity, backend="aot_eager")
    step = fxgrad.forward_backward(
        gs, lambda model, x, *, y, scale: squares(model, x.mT, y, scale), in_dims={"x": 1, "y": 0, "scale": None}
    )
    fxgrad.warm_up(step, torch.randn(3, 4), batch_sizes=[5, 1], y=torch.randn(4, 2), scale=2.0, sample_weight=None)
    compiled = compilations()
    for size in (3, 1):
        fxgrad.zero_grad(gs)
        step(torch.randn(3, size), y=torch.randn(size, 2), scale=2.0, sample_weight=torch.rand(size))
    assert compilations() == compiled


def test_a_whole_step_with_a_state_that_shares_the_samples() -> None:
    """Which graph has states is learned from the step's own graph, not the model's."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            out: Tensor = self.gru(x, h)[0][:, -1]
            return out

    gs = fxgrad.transform(Cell(), quantity=fxgrad.ClippedGrad(1.0), backend="aot_eager")
    step = fxgrad.forward_backward(gs, lambda model, y, h, x: (model(x, h) - y).square().sum())
    fxgrad.warm_up(step, torch.randn(3, 4), torch.randn(1, 3, 4), torch.randn(3, 5, 3), batch_sizes=(4, 1))
    compiled = compilations()
    for size in (3, 1):
        fxgrad.zero_grad(gs)
        step(torch.randn(size, 4), torch.randn(1, size, 4), torch.randn(size, 5, 3))
    assert compilations() == compiled


def test_numbers_are_the_same() -> None:
    """A model that was warmed up and one that was not make the same step."""
    x, results = torch.randn(4, 3), []
    for warm in (False, True):
        torch.manual_seed(1)
        gs = fxgrad.transform(net(), backend="aot_eager")
        if warm:
            fxgrad.warm_up(gs, torch.ones(2, 3))
        backward(gs, x)
        results.append([*gradients(gs), *gs.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_between_two_steps() -> None:
    """Gradients and results that are set stay, and so does a forward whose backward is to come."""
    norms = fxgrad.NormSample()
    model = net()
    gs = fxgrad.transform(model, quantity=[norms, fxgrad.GradSample(), fxgrad.Grad()], backend="aot_eager")
    backward(gs, torch.randn(4, 3))
    kept = fxgrad.result(gs, norms)
    results = gradients(gs)
    before = state(model)
    fxgrad.warm_up(gs, torch.ones(5, 3))
    assert state(model) == before
    assert fxgrad.result(gs, norms) is kept
    assert all(a is b for a, b in zip(gradients(gs), results, strict=True))
    fxgrad.zero_grad(gs)
    loss = gs(torch.randn(4, 3)).sum()
    fxgrad.warm_up(gs, torch.ones(5, 3), batch_sizes=(3, 1))
    loss.backward()
    assert fxgrad.result(gs, norms).shape == (4,)


def test_hooks_do_not_fire() -> None:
    fired: list[str] = []
    model = net()
    gs = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="aot_eager")
    model.register_forward_hook(lambda *_: fired.append("module"))
    model.first.weight.register_hook(lambda _: fired.append("parameter"))
    model.last.weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    fxgrad.warm_up(gs, torch.randn(4, 3))
    assert not fired


def test_a_released_guard_stays_released() -> None:
    model = nn.Linear(3, 2)
    gs = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="aot_eager")
    fxgrad.release(gs)
    fxgrad.warm_up(gs, torch.randn(4, 3))
    model(torch.randn(4, 3)).sum().backward()
    assert model.weight.grad is not None


def test_the_first_batch_is_still_checked() -> None:
    gs = fxgrad.transform(nn.Linear(3, 2), backend="aot_eager", check_first_batch=True)
    fxgrad.warm_up(gs, torch.randn(4, 3))
    engine = engine_of(gs)
    assert engine is not None and engine.first_batch is not None and not engine.first_batch.passed
    compiled = compilations()
    backward(gs, torch.randn(4, 3))
    assert engine.first_batch is None and compilations() == compiled


class Many(nn.Module):
    """Samples in several places of several inputs; an input that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, batch: dict[str, Tensor], shared: Tensor, *, mask: tuple[Tensor, float]) -> Tensor:
        h = self.table(batch["ids"]) * mask[0].mT.unsqueeze(-1) * mask[1] + shared
        return F.cross_entropy(self.head(h.sum(1)), batch["label"], reduction="sum")


def many(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids, label = torch.randint(7, (size, 5)), torch.randint(3, (size,))
    return ({"ids": ids, "label": label}, torch.randn(4)), {"mask": (torch.rand(5, size), 0.5)}


def test_nested_inputs() -> None:
    in_dims = {"batch": 0, "shared": None, "mask": (1, None)}
    gs = fxgrad.transform(Many(), in_dims=in_dims, backend="aot_eager")
    args, kwargs = many(4)
    fxgrad.warm_up(gs, *args, batch_sizes=(6, 2, 1), **kwargs)
    compiled = compilations()
    for size in (4, 1):
        fxgrad.zero_grad(gs)
        args, kwargs = many(size)
        gs(*args, **kwargs).backward()
    assert compilations() == compiled


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: PackedSequence, h: Tensor) -> Tensor:
        out: Tensor = self.lstm(x, (h, h))[1][0][0]
        return out


def packed(size: int, enforce_sorted: bool) -> tuple[PackedSequence, Tensor]:
    samples = [torch.randn(4 - i % 2, 3) for i in range(size)]
    samples.sort(key=len, reverse=enforce_sorted)
    return pack_sequence(samples, enforce_sorted), torch.zeros(1, size, 4)


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_and_states(enforce_sorted: bool) -> None:
    gs = fxgrad.transform(Packed(), backend="aot_eager")
    fxgrad.warm_up(gs, *packed(3, enforce_sorted), batch_sizes=(5, 1))
    compiled = compilations()
    for size in (4, 3, 1):
        fxgrad.zero_grad(gs)
        backward(gs, *packed(size, enforce_sorted))
    assert compilations() == compiled


def test_the_memory_of_inputs_keeps_its_order() -> None:
    gs = fxgrad.transform(nn.Conv2d(3, 2, 3), backend="aot_eager")
    last = torch.channels_last
    fxgrad.warm_up(gs, torch.randn(4, 3, 5, 5).to(memory_format=last), batch_sizes=(2, 1))
    compiled = compilations()
    backward(gs, torch.randn(4, 3, 5, 5).to(memory_format=last))
    assert compilations() == compiled


def test_sizes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """One where a model takes single samples."""
    original, seen = Engine.call, []

    def call(engine: Engine, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(len(args[0]))
        return original(engine, method, args, kwargs)

    monkeypatch.setattr(Engine, "call", call)
    options: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [4, 1]),
        ({"batch_size": 4}, [4]),
        ({"quantity": fxgrad.NormSample(group_size=2)}, [4]),
    ]
    for option, sizes in options:
        fxgrad.warm_up(fxgrad.transform(nn.Linear(3, 2), backend="eager", **option), torch.randn(4, 3), modes="train")
        assert seen == sizes
        seen.clear()


def test_weights_of_samples() -> None:
    gs = fxgrad.transform(nn.Linear(3, 2), quantity=fxgrad.ClippedGrad(1.0, sample_weight=True), backend="aot_eager")
    fxgrad.warm_up(gs, torch.randn(4, 3), sample_weight=torch.ones(4))
    compiled = compilations()
    backward(gs, torch.randn(3, 3), sample_weight=torch.tensor([0.0, 1.0, 2.0]))
    assert compilations() == compiled


def test_it_raises_what_a_call_raises() -> None:
    """And leaves the model as it was."""
    model = Net().eval()  # its batch norm mixes samples in training mode alone
    gs = fxgrad.transform(model, backend="aot_eager")
    before = state(model)
    with pytest.raises(MixedSamples, match="batch_norm in training mode"):
        fxgrad.warm_up(gs, torch.zeros(4, 3))
    with pytest.raises(BatchSizeError, match="no tensor among the inputs"):
        fxgrad.warm_up(gs, torch.zeros(()), modes=["eval"])
    with pytest.raises(RuntimeError, match="must match the size"):
        fxgrad.warm_up(gs, torch.zeros(4, 2), modes=["eval"])
    assert state(model) == before
    step = fxgrad.forward_backward(gs, squares)
    with pytest.raises(MixedSamples, match="batch_norm in training mode"):
        fxgrad.warm_up(step, torch.zeros(4, 3), torch.zeros(4, 2))
    with pytest.raises(RuntimeError, match="must match the size"):
        fxgrad.warm_up(step, torch.zeros(4, 2), torch.zeros(4, 2), modes=["eval"])
    assert state(model) == before
    fxgrad.warm_up(gs, torch.zeros(4, 3), modes=["eval"])
    assert state(model) == before


def test_threads() -> None:
    """While one warms up, others are refused, and the model works as before."""
    gs = fxgrad.transform(nn.Linear(3, 2), fxgrad.ClippedGrad(1.0), backend="aot_eager")
    refused: list[str] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            other()
        out: Tensor = model(x).square().sum()
        return out

    def beside() -> None:
        for call in (lambda: gs(torch.ones(4, 3)), lambda: fxgrad.warm_up(gs, torch.ones(4, 3))):
            try:
                call()
            except OptionError as error:
                refused.append(str(error))

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    def other() -> int:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return 1

    step = fxgrad.forward_backward(gs, loss)
    fxgrad.warm_up(step, torch.randn(4, 3), batch_sizes=(4,), modes="train")
    assert len(refused) == 2 and all("another thread runs warm_up" in message for message in refused)
    step(torch.randn(4, 3))
    fxgrad.zero_grad(gs)
    backward(gs, torch.randn(4, 3))


def test_an_error_of_another_size_says_which() -> None:
    """By default a batch of one is compiled, which the user may never use."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("one sample has no variance")
        out: Tensor = model(x).square().sum()
        return out

    gs = fxgrad.transform(nn.Linear(3, 2), fxgrad.ClippedGrad(1.0), backend="aot_eager")
    step = fxgrad.forward_backward(gs, loss)
    with pytest.raises(ValueError, match="one sample has no variance") as error:
        fxgrad.warm_up(step, torch.randn(4, 3))
    if sys.version_info >= (3, 11):
        assert error.value.__notes__ == [
            "This was raised in warm_up at a batch of 1: pass batch_sizes=(4,) if none has 1."
        ]
    fxgrad.warm_up(step, torch.randn(4, 3), batch_sizes=(4,))


def test_numpy_s_random_numbers_where_the_model_fails() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        np.random.rand(3)
        out: Tensor = (model(x) @ x.new_zeros(5, 2)).sum()
        return out

    step = fxgrad.forward_backward(fxgrad.transform(nn.Linear(3, 2), backend="aot_eager"), loss)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        fxgrad.warm_up(step, torch.randn(4, 3))
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a plain model": (lambda: fxgrad.warm_up(nn.Linear(3, 2), torch.ones(2, 3)), "takes a transformed model"),
    "a compiled model": (
        lambda: fxgrad.warm_up(compiled(), torch.ones(2, 3)),
        "takes a transformed model, not OptimizedModule",
    ),
    "graph breaks": (
        lambda: fxgrad.warm_up(fxgrad.transform(nn.Linear(3, 2), fullgraph=False), torch.ones(2, 3)),
        "needs the whole model as one graph",
    ),
    "a whole step of a frozen model": (
        lambda: fxgrad.warm_up(frozen_step(), torch.ones(2, 3)),
        "no trainable parameter",
    ),
    "a mode": (lambda: fxgrad.warm_up(linear(), torch.ones(2, 3), modes=["test"]), "not 'test'"),
    "a size": (lambda: fxgrad.warm_up(linear(), torch.ones(2, 3), batch_sizes=(2.0,)), r"not 2\.0"),  # type: ignore[arg-type]
    "a negative size": (lambda: fxgrad.warm_up(linear(), torch.ones(2, 3), batch_sizes=(-1,)), "not -1"),
    "one size": (lambda: fxgrad.warm_up(linear(), torch.ones(2, 3), batch_sizes=3), "not 3"),  # type: ignore[arg-type]
    "weights of other samples": (
        lambda: fxgrad.warm_up(weighted(), torch.ones(2, 3), sample_weight=torch.ones(5)),
        "sample_weight",
    ),
    "no samples": (lambda: fxgrad.warm_up(linear(), torch.ones(0, 3)), "the batch is empty"),
}


def compiled() -> Any:
    return torch.compile(nn.Linear(3, 2), backend="fxgrad")


def weighted() -> nn.Module:
    return fxgrad.transform(nn.Linear(3, 2), fxgrad.ClippedGrad(1.0, sample_weight=True), backend="eager")


def frozen_step() -> Any:
    model = linear()
    step = fxgrad.forward_backward(model, lambda model, x: model(x).sum())
    model.requires_grad_(False)
    return step


def linear() -> nn.Module:
    return fxgrad.transform(nn.Linear(3, 2), backend="eager")


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    run, words = REFUSED[case]
    with pytest.raises((OptionError, BatchSizeError), match=words) as error:
        run()
    assert isinstance(error.value, FxgradError) and error.value.advice


def test_a_frozen_model_has_nothing_to_compile() -> None:
    model = net().requires_grad_(False)
    gs = fxgrad.transform(model, backend="aot_eager")
    before, compiled = state(model), compilations()
    fxgrad.warm_up(gs, torch.zeros(4, 3))
    assert state(model) == before and compilations() == compiled


class Counting(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), {"calls": 0}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["calls"] += 1
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("features", [3, 2])
def test_python_code_does_not_run(features: int) -> None:
    """Where the input is wrong it runs, up to PyTorch's error; and is undone."""
    model = Counting()
    gs = fxgrad.transform(model, backend="aot_eager")
    before = state(model)
    with contextlib.ExitStack() as stack:
        if features == 2:
            stack.enter_context(pytest.raises(RuntimeError, match="shapes"))
        fxgrad.warm_up(gs, torch.zeros(4, features))
    assert state(model) == before and (model.calls, model.seen) == (0, {"calls": 0})
