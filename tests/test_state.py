"""Where results live and when: the rules of a transformed model's state, row by row."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.errors import AlreadySet, BatchSizeError, OptionError, UniformOutput
from fxgrad.testing import default_loss, per_sample_grads, relative_error

BATCH = 5
BACKENDS = ("eager", "aot_eager")

# Dynamo looks at its inputs' .grad, and turns warnings that are errors into crashes.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture
def retained() -> Iterator[None]:
    """What PyTorch asks of everyone who calls a compiled backward twice."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@pytest.fixture
def net(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device, torch.float64)


@pytest.fixture
def x(device: torch.device) -> Tensor:
    return torch.randn(BATCH, 3, dtype=torch.float64, device=device)


def view(model: nn.Module, backend: str = "eager", **options: Any) -> Any:
    return fxgrad.transform(model, backend=backend, **options)


def truth(model: nn.Module, x: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
    return per_sample_grads(model, lambda y: default_loss(y) * factor, (x,))


def found(model: nn.Module) -> dict[str, Any]:
    every = ((name, getattr(p, "grad_sample", None)) for name, p in model.named_parameters())
    return {name: g for name, g in every if g is not None}


def holds(model: nn.Module, expected: dict[str, Tensor]) -> bool:
    return relative_error(found(model), expected) <= 1e-10


def is_clear(model: nn.Module) -> bool:
    return not found(model) and all(p.grad is None for p in model.parameters())


# --- shape, dtype, place ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float32, "eager"), (torch.float64, "aot_eager"), (torch.bfloat16, "eager"), (torch.bfloat16, "aot_eager")],
)
def test_shape_dtype_and_memory(net: nn.Module, x: Tensor, backend: str, dtype: torch.dtype) -> None:
    net.to(dtype)
    default_loss(view(net, backend)(x.to(dtype))).backward()
    for p in net.parameters():
        g: Tensor = p.grad_sample  # type: ignore[attr-defined]
        assert g.shape == (BATCH, *p.shape) and g.dtype == p.dtype and g.device == p.device
        assert g.is_contiguous() and not g.requires_grad
        assert p.grad is None


def test_samples_come_first_even_if_not_in_the_inputs(net: nn.Module, x: Tensor) -> None:
    steps = torch.stack([x, x + 1, x - 1])  # [T, B, ...]
    default_loss(view(net, batch_first=False)(steps), sample_dim=1).backward()
    loss = lambda y: default_loss(y, sample_dim=1)  # noqa: E731
    assert holds(net, per_sample_grads(net, loss, (steps,), batch_first=False))


class Plus(nn.Module):
    """Parameters of one shape whose gradients are all dL/dy itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_share_no_memory(x: Tensor, backend: str) -> None:
    """Optimizers scale and clip grad_sample in place."""
    model = Plus().to(x)
    x.requires_grad_()
    y = view(model, backend)(x)
    y.retain_grad()
    y.sin().sum().backward()
    tensors = [*found(model).values(), x.grad, y.grad]
    for p in found(model).values():
        p.mul_(0)
    assert torch.equal(y.grad, y.detach().cos()) and torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert len({t.untyped_storage().data_ptr() for t in tensors[:2]}) == 2


# --- several backwards -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("retained")
def test_a_second_backward_is_refused_before_it_computes(net: nn.Module, x: Tensor, backend: str) -> None:
    x.requires_grad_()
    loss = default_loss(view(net, backend)(x))
    loss.backward(retain_graph=True)
    before = {name: (g, g.clone()) for name, g in found(net).items()}
    x.grad = None
    with pytest.raises(AlreadySet, match=r"a backward while grad_sample of '0\.weight' is still set"):
        loss.backward()
    assert x.grad is None
    assert all(found(net)[name] is g and torch.equal(g, value) for name, (g, value) in before.items())


def test_a_forward_is_refused_while_grad_sample_is_set(net: nn.Module, x: Tensor) -> None:
    gs = view(net)
    default_loss(gs(x)).backward()
    with pytest.raises(AlreadySet, match=r"a forward while grad_sample of '0\.weight' is still set"):
        gs(x)
    with torch.no_grad():
        assert torch.equal(gs(x), net(x))
    gs.zero_grad()
    default_loss(gs(x)).backward()
    assert holds(net, truth(net, x))


@pytest.mark.parametrize("policy", ["append", "sum", "overwrite"])
def test_accumulate(net: nn.Module, x: Tensor, policy: Any) -> None:
    gs = view(net, accumulate=policy)
    inputs = [x, x * 2, x - 1]
    for each in inputs:
        default_loss(gs(each)).backward()
    truths = [truth(net, each) for each in inputs]
    if policy == "append":
        lists = found(net)
        assert all(isinstance(g, list) and len(g) == 3 for g in lists.values())
        for i, expected in enumerate(truths):
            assert relative_error({name: g[i] for name, g in lists.items()}, expected) <= 1e-10
    elif policy == "sum":
        assert holds(net, {name: sum(t[name] for t in truths) for name in truths[0]})  # type: ignore[misc]
    else:
        assert holds(net, truths[-1])
    gs.zero_grad()
    assert is_clear(net)


def test_append_takes_batches_of_any_size_and_sum_does_not(net: nn.Module, x: Tensor) -> None:
    gs = view(net, accumulate="append")
    for size in (5, 2):
        default_loss(gs(x[:size])).backward()
    assert [len(g) for g in found(net)["0.bias"]] == [5, 2]
    fxgrad.zero_grad(net)
    gs = view(net, accumulate="sum")
    default_loss(gs(x)).backward()
    loss = default_loss(gs(x[:2]))
    before = {name: g.clone() for name, g in found(net).items()}
    with pytest.raises(AlreadySet, match="5 and of 2 samples cannot be added"):
        loss.backward()
    assert holds(net, before)


@pytest.mark.parametrize(
    ("policy", "backend"),
    [("error", "eager"), ("append", "eager"), ("sum", "eager"), ("overwrite", "eager"), ("error", "aot_eager")],
)
def test_two_forwards_of_one_backward_add_up(net: nn.Module, x: Tensor, policy: Any, backend: str) -> None:
    gs = view(net, backend, accumulate=policy)
    (default_loss(gs(x)) + default_loss(gs(x * 2)) + default_loss(gs(x - 1))).backward()
    truths = [truth(net, each) for each in (x, x * 2, x - 1)]
    assert holds(net, {name: sum(t[name] for t in truths) for name in truths[0]})  # type: ignore[misc]


def test_two_forwards_of_one_backward_need_the_same_samples(net: nn.Module, x: Tensor) -> None:
    gs = view(net)
    loss = default_loss(gs(x)) + default_loss(gs(x[:2]))
    with pytest.raises(AlreadySet, match="samples cannot be added"):
        loss.backward()


def test_chained_forwards(x: Tensor) -> None:
    model = nn.Linear(3, 3).to(x)
    gs = view(model)
    default_loss(gs(torch.tanh(gs(x)))).backward()
    chained = per_sample_grads(nn.Sequential(model, nn.Tanh(), model), default_loss, (x,))
    assert holds(model, {name.removeprefix("0."): g for name, g in chained.items()})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("retained")
def test_retain_graph(net: nn.Module, x: Tensor, backend: str) -> None:
    gs = view(net, backend)
    loss = default_loss(gs(x))
    for _ in range(3):
        gs.zero_grad()
        loss.backward(retain_graph=True)
        assert holds(net, truth(net, x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_without_backward_leaves_nothing_behind(net: nn.Module, x: Tensor, backend: str) -> None:
    gs = view(net, backend)
    kept = gs(x * 3)
    gs(x * 2)
    assert is_clear(net)
    default_loss(gs(x)).backward()
    assert holds(net, truth(net, x))
    gs.zero_grad()
    default_loss(kept).backward()
    assert holds(net, truth(net, x * 3))


def test_each_backward_sets_fresh_objects(net: nn.Module, x: Tensor) -> None:
    gs = view(net, accumulate="overwrite")
    seen: list[Any] = []
    for _ in range(3):
        default_loss(gs(x)).backward()
        now = list(found(net).values())
        assert not any(a is b or a.data_ptr() == b.data_ptr() for a in now for b in seen)
        seen.extend(now)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_the_model(net: nn.Module, x: Tensor, reentrant: bool) -> None:
    """Forwards recomputed within a backward, and the graph tasks nested in it, belong to that backward."""
    gs = view(net, "aot_eager")
    x.requires_grad_()
    first, second = (checkpoint(gs, each, use_reentrant=reentrant) for each in (x, x * 2))
    (default_loss(first) + default_loss(second)).backward()
    truths = [truth(net, x), truth(net, x * 2)]
    assert holds(net, {name: sum(t[name] for t in truths) for name in truths[0]})  # type: ignore[misc]


# --- which parameters --------------------------------------------------------------------------------


class Heads(nn.Module):
    """Two outputs, a parameter that nothing uses, and one used in a dead end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)
        self.unused, self.dead = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _ = x * self.dead
        return self.left(x), self.right(x)


@pytest.mark.parametrize(("backend", "size"), [("eager", 0), ("eager", 1), ("eager", BATCH), ("aot_eager", BATCH)])
def test_unused_parameters_get_zeros(x: Tensor, backend: str, size: int) -> None:
    model = Heads().to(x)
    default_loss(view(model, backend)(x[:size])[0]).backward()
    assert holds(model, per_sample_grads(model, lambda y: default_loss(y[0]), (x[:size],)))
    assert model.unused.grad_sample.shape == (size, 4)  # type: ignore[attr-defined]


def test_zeros_do_not_disturb_another_forward(x: Tensor) -> None:
    model = Heads().to(x)
    gs = view(model)
    (default_loss(gs(x)[0]) + default_loss(gs(x * 2)[1])).backward()
    left = per_sample_grads(model, lambda y: default_loss(y[0]), (x,))
    right = per_sample_grads(model, lambda y: default_loss(y[1]), (x * 2,))
    assert holds(model, {name: left[name] + right[name] for name in left})


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_and_unfrozen_later(net: nn.Sequential, x: Tensor, backend: str) -> None:
    gs = view(net, backend)
    net[0].requires_grad_(False)
    for trainable in ({"2.weight", "2.bias"}, {"0.weight", "0.bias", "2.weight", "2.bias"}, {"0.bias"}):
        for name, p in net.named_parameters():
            p.requires_grad_(name in trainable)
        default_loss(gs(x)).backward()
        assert set(found(net)) == trainable
        assert holds(net, truth(net, x))
        gs.zero_grad()


def test_a_frozen_parameter_is_not_touched(net: nn.Sequential, x: Tensor) -> None:
    net[0].requires_grad_(False)
    default_loss(view(net)(x)).backward()
    assert not hasattr(net[0].weight, "grad_sample")


# --- clearing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["view", "fxgrad on the model", "fxgrad on the view"])
def test_zero_grad(net: nn.Module, x: Tensor, how: str) -> None:
    gs = view(net)
    default_loss(gs(x)).backward()
    default_loss(net(x)).backward()
    if how == "view":
        gs.zero_grad()
    else:
        fxgrad.zero_grad(net if how.endswith("model") else gs)
    assert is_clear(net)
    assert all(p.grad_sample is None for p in net.parameters())  # type: ignore[attr-defined]


def test_the_models_own_zero_grad_clears_grad_alone(net: nn.Module, x: Tensor) -> None:
    default_loss(view(net)(x)).backward()
    net.zero_grad()
    assert found(net)


# --- what is no per-sample gradient --------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "size"), [("eager", 1), ("eager", BATCH), ("aot_eager", BATCH)])
def test_create_graph(net: nn.Module, x: Tensor, backend: str, size: int) -> None:
    x.requires_grad_()
    loss = default_loss(view(net, backend)(x[:size]))
    for backward in (
        lambda: loss.backward(create_graph=True),
        lambda: torch.autograd.grad(loss, x, create_graph=True),
    ):
        with pytest.raises(OptionError, match="create_graph=True"):
            backward()
    assert is_clear(net) and x.grad is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [0, 1, BATCH])
@pytest.mark.usefixtures("retained")
def test_a_gradient_by_the_input_sets_nothing(net: nn.Module, x: Tensor, backend: str, size: int) -> None:
    x = x[:size].clone().requires_grad_()
    gs = view(net, backend)
    loss, plain = default_loss(gs(x)), default_loss(net(x))
    for _ in range(2):
        (g,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(g, *torch.autograd.grad(plain, x, retain_graph=True))
        assert is_clear(net)
    loss.backward(retain_graph=True)
    assert holds(net, truth(net, x.detach()))
    torch.autograd.grad(loss, x)  # not refused: it would set nothing
    assert holds(net, truth(net, x.detach()))


class Regularised(nn.Module):
    """Returns a penalty on its parameters beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), self.fc.weight.square().sum()


@pytest.mark.parametrize(("backend", "size"), [("eager", 1), ("eager", BATCH), ("aot_eager", BATCH)])
def test_uniform_outputs(x: Tensor, backend: str, size: int) -> None:
    model, x = Regularised().to(x), x[:size]
    gs = view(model, backend)
    y, penalty = gs(x)
    torch.testing.assert_close(penalty, model(x)[1])
    default_loss(y).backward()
    assert holds(model, per_sample_grads(model, lambda out: default_loss(out[0]), (x,)))
    gs.zero_grad()
    y, penalty = gs(x)
    with pytest.raises(UniformOutput, match="depends on parameters alone"):
        (default_loss(y) + penalty).backward()


def test_a_penalty_outside_of_the_model_reaches_grad(x: Tensor) -> None:
    model = nn.Linear(3, 2).to(x)
    (default_loss(view(model)(x)) + model.weight.square().sum()).backward()
    assert torch.equal(model.weight.grad, 2 * model.weight.detach())  # type: ignore[arg-type]
    assert model.bias.grad is None
    assert holds(model, truth(model, x))


# --- the loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduction", "factor"), [("sum", 1.0), ("mean", 1 / BATCH), (8, 1 / 8), (0.5, 2.0)])
def test_loss_reduction(net: nn.Module, x: Tensor, reduction: Any, factor: float) -> None:
    gs = view(net, loss_reduction=reduction)
    (default_loss(gs(x)) * factor).backward()
    assert holds(net, truth(net, x))


@pytest.mark.parametrize("size", [0, 1, 3])
def test_mean_of_other_batch_sizes(net: nn.Module, x: Tensor, size: int) -> None:
    gs = view(net, loss_reduction="mean")
    gs(x)
    gs(x[:size]).sin().sum(1).sum().div(max(size, 1)).backward()
    assert holds(net, per_sample_grads(net, lambda y: y.sin().sum(), (x[:size],)))


# --- threads and bad input -----------------------------------------------------------------------------


def test_two_models_in_two_threads(device: torch.device) -> None:
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(device) for _ in range(2)]
    inputs = [torch.randn(size, 3, dtype=torch.float64, device=device) for size in (4, 7)]
    failures: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(model: nn.Module, x: Tensor) -> None:
        try:
            gs = view(model, accumulate="sum")
            loss = default_loss(gs(x))
            for _ in range(5):
                barrier.wait(60)
                loss = loss + default_loss(gs(x))
            barrier.wait(60)
            loss.backward()
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(models, inputs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for model, x in zip(models, inputs, strict=True):
        assert holds(model, truth(model, x, 6.0))


class Two(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x * y)


def test_bad_input_changes_nothing(x: Tensor) -> None:
    model = Two().to(x)
    gs = view(model)
    with pytest.raises(BatchSizeError, match="inputs disagree about the batch size"):
        gs(x, x[:2])
    assert is_clear(model)
    gs_loss = gs(x, x).sin().sum()
    with pytest.raises(BatchSizeError, match="inputs disagree about the batch size"):
        gs(x, x[:2])
    gs_loss.backward()
    assert holds(model, per_sample_grads(model, lambda y: y.sin().sum(), (x, x)))


def test_norms_of_two_models_that_share_a_parameter() -> None:
    table = nn.Embedding(5, 3)
    views = [
        fxgrad.transform(nn.Sequential(table, nn.Linear(3, 2)), quantity=fxgrad.NormSample(), backend="eager")
        for _ in range(2)
    ]
    x = torch.arange(4)
    with pytest.raises(AlreadySet, match=r"two transformed models deliver norm_sample of '0\.weight' in one backward"):
        sum(view(x).sum() for view in views).backward()
    for view in views:
        fxgrad.zero_grad(view)
        view(x).sum().backward()
