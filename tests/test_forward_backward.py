"""`fxgrad.forward_backward`: one graph leaves what ``loss_fn(private, x, y).backward()`` leaves."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.api import engine_of
from fxgrad.errors import FxgradError, MixedSamples, OptionError, UnclippedGrad
from tests.quick import long_but

CLASSES = 3

QUANTITIES: dict[str, Callable[[], Any]] = {
    "rows": fxgrad.GradSample,
    "norms": fxgrad.NormSample,
    "clipped": lambda: fxgrad.ClippedGrad(0.5),
    "by layer": lambda: fxgrad.ClippedGrad(0.5, groups="per_parameter"),
    "ordinary": lambda: [fxgrad.Grad(), fxgrad.NormSample()],
    "squares": fxgrad.SquaredGrad,
    "variance": fxgrad.GradVariance,
    "gram": fxgrad.GradGram,
    "projection": lambda: fxgrad.GradProjection(4),
}


class Tied(nn.Module):
    """A padded table that is also the last layer, a norm between, and time in front of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(CLASSES, 6, padding_idx=0), nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.table(ids.t())).mean(0)
        return F.linear(h, self.table.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.lstm(x)[0].amax(1))
        return out


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def convolutional() -> nn.Module:
    first = nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.Tanh()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(4 * 3 * 3, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "perceptron": (perceptron, lambda n: torch.randn(n, 5)),
    "convolutional": (convolutional, lambda n: torch.randn(n, 2, 5, 5)),
    "tied": (Tied, lambda n: torch.randint(CLASSES, (n, 6))),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 7, 4)),
}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum")


def left(model: nn.Module, quantity: Any) -> dict[str, Any]:
    """All that a backward has set."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        places = ("grad", "grad_sample", "norm_sample", "squared_grad_sum", "grad_variance")
        found |= {f"{name}.{at}": value for at in places if (value := getattr(p, at, None)) is not None}
    for i, one in enumerate(quantity if isinstance(quantity, list) else [quantity]):
        try:
            value = fxgrad.result(model, one)
        except OptionError:
            continue
        parts = value if isinstance(value, tuple) else (value,)
        found |= {f"{i}.{j}": part for j, part in enumerate(parts) if isinstance(part, Tensor)}
    return {name: value.clone() for name, value in found.items()}


def grad_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def agree(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one and one.keys() == other.keys()
    for name in one:
        exact: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}  # one sample has no variance
        torch.testing.assert_close(one[name], other[name], **exact, msg=partial("{}: {}".format, name))


def made(model: nn.Module | None = None, quantity: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    kind = fxgrad.ClippedGrad(0.5) if quantity is None else quantity
    return fxgrad.transform((perceptron() if model is None else model).double(), kind, backend="aot_eager", **options)


def batch(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, dtype=torch.float64), torch.randint(CLASSES, (n,))


PAIRS = [(model, quantity) for model in MODELS for quantity in QUANTITIES]


@pytest.mark.parametrize(
    ("model", "quantity"),
    long_but(lambda model, quantity: model == "perceptron" or (model, quantity) == ("tied", "clipped"), PAIRS),
)
def test_as_backward_does(model: str, quantity: str) -> None:
    """Several batches by the same graph: as long as the layers are wide, of one sample, of none."""
    build, inputs = MODELS[model]
    kind = QUANTITIES[quantity]()
    private = made(build(), kind)
    step = fxgrad.forward_backward(private, loss_of)
    for n in (5, 7, 1, 0, 3):
        x, y = inputs(n), torch.randint(CLASSES, (n,))
        x = x.double() if x.is_floating_point() else x
        results = []
        for by_step in (True, False):
            fxgrad.zero_grad(private)
            loss = step(x, y) if by_step else loss_of(private, x, y)
            if not by_step:
                loss.backward()
            results.append({**left(private, kind), "loss": loss.detach()})
        agree(*results)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", long_but(lambda row: row == "aot_eager", ["eager", "aot_eager", "inductor"]))
def test_rows_are_the_loops(model: str, backend: str) -> None:
    build, inputs = MODELS[model]
    torch.manual_seed(0)
    plain = build().double()
    private = fxgrad.transform(plain, backend=backend)
    x, y = inputs(5), torch.randint(CLASSES, (5,))
    x = x.double() if x.is_floating_point() else x
    fxgrad.forward_backward(private, loss_of)(x, y)
    rows = {name: fxgrad.delivered(p) for name, p in private.named_parameters()}
    assert all(p.grad is None for p in plain.parameters())
    for i in range(5):
        grads = torch.autograd.grad(loss_of(plain, x[i : i + 1], y[i : i + 1]), list(plain.parameters()))
        for (name, row), grad in zip(rows.items(), grads, strict=True):
            torch.testing.assert_close(row[i], grad, msg=partial("{}: {}".format, name))


@pytest.mark.inductor
def test_through_inductor() -> None:
    """Clipped sums of a model in float32, whose kernels are C++, beside the ordinary way."""
    private = fxgrad.transform(convolutional(), fxgrad.ClippedGrad(0.5))
    step = fxgrad.forward_backward(private, loss_of)
    x, y = torch.randn(16, 2, 5, 5), torch.randint(CLASSES, (16,))
    step(x, y)
    one = {name: grad_of(p).clone() for name, p in private.named_parameters()}
    fxgrad.zero_grad(private)
    loss_of(private, x, y).backward()
    for name, p in private.named_parameters():
        torch.testing.assert_close(one[name], p.grad, rtol=1e-5, atol=1e-6)


def test_one_graph_for_all_sizes() -> None:
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    step(*batch(4))
    fxgrad.zero_grad(private)
    before = counters["stats"]["unique_graphs"]
    for n in (9, 5, 3):
        step(*batch(n))
        fxgrad.zero_grad(private)
    assert counters["stats"]["unique_graphs"] == before


# What arrives at p.grad


def test_hooks_are_called() -> None:
    """A hook on a parameter that looks, one that runs behind, and the sum of two steps in the tensor that was there."""
    private = made(quantity=fxgrad.Grad())
    step = fxgrad.forward_backward(private, loss_of)
    x, y = batch()
    step(x, y)
    once = [p.grad for p in private.parameters()]
    values = [grad.clone() for grad in once]
    said: list[str] = []
    private[0].weight.register_hook(lambda grad: said.append("hook"))
    private[2].bias.register_post_accumulate_grad_hook(lambda p: said.append("behind"))
    private[2].weight.register_hook(lambda grad: 2 * grad)
    step(x, y)
    assert said == ["hook", "behind"] or said == ["behind", "hook"]
    for p, grad, value in zip(private.parameters(), once, values, strict=True):
        assert p.grad is grad
        torch.testing.assert_close(grad, value * (3 if p is private[2].weight else 2))


def test_a_changed_gradient_is_refused() -> None:
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    step(*batch())
    before = [grad_of(p).clone() for p in private.parameters()]
    handle = private[0].weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(UnclippedGrad, match="register_hook"):
        step(*batch())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(private.parameters(), before, strict=True))
    handle.remove()
    step(*batch())


def test_the_guard_stays() -> None:
    private = made()
    model = engine_of(private).model  # type: ignore[union-attr]
    fxgrad.forward_backward(private, loss_of)(*batch())
    before = [grad_of(p).clone() for p in model.parameters()]
    with pytest.raises(UnclippedGrad, match="outside of the transformed"):
        loss_of(model, *batch()).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_steps_add_up() -> None:
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    (x, y), (x2, y2) = batch(4), batch(7)
    for run in (step, step):
        run(x, y)
        run(x2, y2)
    one = [p.grad for p in private.parameters()]
    fxgrad.zero_grad(private)
    for _ in range(2):
        loss_of(private, x, y).backward()
        loss_of(private, x2, y2).backward()
    for p, grad in zip(private.parameters(), one, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_earlier_results_stay() -> None:
    quantity = fxgrad.NormSample()
    private = made(quantity=[quantity, fxgrad.Grad()], accumulate="overwrite")
    step = fxgrad.forward_backward(private, loss_of)
    step(*batch())
    norms, grads = fxgrad.result(private, quantity), [p.grad for p in private.parameters()]
    values = [one.clone() for one in (norms, *grads)]
    for p in private.parameters():
        p.grad = None
    step(*batch())
    assert all(torch.equal(one, value) for one, value in zip((norms, *grads), values, strict=True))


def test_each_gradient_has_its_own_memory() -> None:
    """Two biases have one gradient."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(x) + self.b(x)
            return out

    for backend in ("eager", "aot_eager"):
        private = fxgrad.transform(Sum(), fxgrad.ClippedGrad(1.0), backend=backend)
        fxgrad.forward_backward(private, loss_of)(torch.randn(4, 5), torch.randint(CLASSES, (4,)))
        grad_of(private.a.bias).zero_()
        assert grad_of(private.b.bias).abs().sum() > 0


def test_layouts_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, CLASSES))
    model[0].weight = nn.Parameter(torch.randn(5, 7).t())
    private = made(model)
    fxgrad.forward_backward(private, loss_of)(*batch())
    assert private[0].weight.grad.stride() == private[0].weight.stride()


def test_unused_and_frozen_parameters() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(5, CLASSES), nn.Linear(2, 2), nn.Linear(CLASSES, CLASSES)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.frozen(self.used(x))
            return out

    private = made(Parts())
    step = fxgrad.forward_backward(private, loss_of)
    x, y = batch()
    for _ in range(2):
        found = []
        for by_step in (True, False):
            fxgrad.zero_grad(private)
            if by_step:
                step(x, y)
            else:
                loss_of(private, x, y).backward()
            found.append({name: None if p.grad is None else p.grad.clone() for name, p in private.named_parameters()})
        assert {name for name in found[0] if found[0][name] is None} == {n for n in found[1] if found[1][n] is None}
        agree(*({name: grad for name, grad in one.items() if grad is not None} for one in found))
        private.frozen.requires_grad_()


# How it is called


def test_where_nothing_has_gradients() -> None:
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    with torch.no_grad():
        loss = step(*batch())
        assert not torch.is_grad_enabled()
    assert not loss.requires_grad and private[0].weight.grad is not None
    with torch.inference_mode(), pytest.raises(OptionError, match="inference_mode"):
        step(*batch())


def test_inside_of_torch_compile() -> None:
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    x, y = batch()

    def train(x: Tensor, y: Tensor) -> Tensor:
        fxgrad.zero_grad(private)
        return step(x + 0.0, y) * 1

    expected = train(x, y)
    grads = [grad_of(p).clone() for p in private.parameters()]
    torch.testing.assert_close(torch.compile(train, backend="eager")(x, y), expected)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(private.parameters(), grads, strict=True))


class Losses:
    """A trainer whose method computes the loss."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * loss_of(model, x, y)

    __call__ = loss


def scaled(scale: float, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return scale * loss_of(model, x, y)


@pytest.mark.parametrize(
    "function",
    [Losses(2.0).loss, Losses(2.0), partial(scaled, 2.0), lambda model, x, y: 2.0 * loss_of(model, x, y)],
    ids=["method", "object", "partial", "lambda"],
)
def test_kinds_of_functions(function: Any) -> None:
    private = made()
    x, y = batch()
    fxgrad.forward_backward(private, function)(x, y=y)
    one = left(private, [])
    fxgrad.zero_grad(private)
    function(private, x, y).backward()
    agree(one, left(private, []))


def test_nested_inputs_and_other_roles() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, CLASSES)

        def forward(self, data: dict[str, Tensor], table: Tensor) -> dict[str, Tensor]:
            return {"logits": self.fc(data["x"]) + data["x"] @ table}

    def loss(model: nn.Module, data: dict[str, Tensor], table: Tensor) -> Tensor:
        return F.cross_entropy(model(data, table)["logits"], data["y"], reduction="sum")

    private = made(Head(), in_dims={"table": None})
    x, y = batch(5)
    table = torch.randn(5, CLASSES, dtype=torch.float64)
    step = fxgrad.forward_backward(private, loss, in_dims=(0, None))
    step({"x": x, "y": y}, table)
    one = left(private, [])
    fxgrad.zero_grad(private)
    loss(private, {"x": x, "y": y}, table).backward()
    agree(one, left(private, []))


def test_sample_weights() -> None:
    kind = fxgrad.ClippedGrad(0.5, sample_weight=True)
    private = made(quantity=kind)
    x, y = batch(5)
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    fxgrad.forward_backward(private, loss_of)(x, y, sample_weight=weight)
    one = left(private, kind)
    fxgrad.zero_grad(private)
    F.cross_entropy(private(x, sample_weight=weight), y, reduction="sum").backward()
    agree(one, left(private, kind))


def test_a_bound_that_changes() -> None:
    bound = torch.tensor(0.5)
    private = made(quantity=fxgrad.ClippedGrad(bound))
    step = fxgrad.forward_backward(private, loss_of)
    x, y = batch()
    step(x, y)
    fxgrad.zero_grad(private)
    bound.fill_(0.1)
    step(x, y)
    one = left(private, [])
    fxgrad.zero_grad(private)
    loss_of(private, x, y).backward()
    agree(one, left(private, []))


class Written(nn.Module):
    """Dropout, and a buffer that counts."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(5, CLASSES), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
        out: Tensor = self.fc(self.drop(x))
        return out


def test_random_numbers_and_buffers() -> None:
    """The backward has the forward's mask: a row of the gradient is an outer product with what was not dropped."""
    private = made(Written(), fxgrad.GradSample())
    step = fxgrad.forward_backward(private, lambda model, x, y: model(x).sum())
    x, y = torch.ones(8, 5, dtype=torch.float64), torch.zeros(8)
    masks = []
    for _ in range(2):
        fxgrad.zero_grad(private)
        loss = step(x, y)
        rows = private.fc.weight.grad_sample
        total = (rows * private.fc.weight.detach()).sum() + 8 * private.fc.bias.detach().sum()
        torch.testing.assert_close(total, loss)
        masks.append(rows[:, 0])
    assert not torch.equal(*masks) and set(masks[0].unique().tolist()) == {0.0, 2.0}
    assert private.count == 2


def test_autocast() -> None:
    private = fxgrad.transform(perceptron(), fxgrad.ClippedGrad(0.5), backend="aot_eager")
    step = fxgrad.forward_backward(private, loss_of)
    x, y = torch.randn(6, 5), torch.randint(CLASSES, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        step(x, y)
    one = left(private, [])
    fxgrad.zero_grad(private)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(private, x, y)
    loss.backward()
    agree(one, left(private, []))


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Optimal order")
def test_opacus_sees_the_step() -> None:
    """An optimizer that follows backwards is told of it: noise is added to what was clipped."""
    import fxgrad.opacus as opacus

    torch.manual_seed(0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, 5), torch.randint(CLASSES, (20,)))
    engine = opacus.PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, batch_size=5),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    step = fxgrad.forward_backward(private, loss_of)
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in loader:
        optimizer.zero_grad()
        step(x, y)
        optimizer.step()
    assert all(not torch.equal(p, earlier) for p, earlier in zip(model.parameters(), before, strict=True))
    assert engine.get_epsilon(1e-5) > 0


def test_other_values_beside_the_loss() -> None:
    """Logits, and a number that is no tensor; of no samples, too."""

    def both(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
        logits = model(x)
        return F.cross_entropy(logits, y, reduction="sum"), logits.detach(), 3

    private = made()
    step = fxgrad.forward_backward(private, both)
    for n in (6, 1, 0):
        x, y = batch(n)
        fxgrad.zero_grad(private)
        loss, logits, number = step(x, y)
        assert not loss.requires_grad and not logits.requires_grad and number == 3
        torch.testing.assert_close(logits, private(x).detach())
        torch.testing.assert_close(loss, F.cross_entropy(logits, y, reduction="sum"))
        one = left(private, [])
        fxgrad.zero_grad(private)
        loss_of(private, x, y).backward()
        agree(one, left(private, []))


# What is refused


def checkpointed(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y, reduction="sum")


OTHER = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

SCALER = torch.amp.GradScaler("cpu")

REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "mean": (lambda m, x, y: F.cross_entropy(m(x), y), MixedSamples, "cross_entropy"),
    "several": (lambda m, x, y: (loss_of(m, x, y), m(x)), OptionError, r"shapes \[\] and \["),
    "not summed": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), OptionError, "one loss"),
    "number": (lambda m, x, y: loss_of(m, x, y).item(), FxgradError, "returns no loss"),
    "in a list": (lambda m, x, y: [loss_of(m, x, y)], FxgradError, "returns no loss"),
    "at the end": (lambda m, x, y: (m(x).detach(), loss_of(m, x, y)), FxgradError, "returns no loss"),
    "detached": (lambda m, x, y: loss_of(m, x, y).detach(), FxgradError, "returns no loss"),
    "without the model": (lambda m, x, y: x.sum(), FxgradError, "returns no loss"),
    "penalty alone": (lambda m, x, y: m[0].weight.square().sum(), FxgradError, "parameters alone|no input"),
    "penalty": (lambda m, x, y: loss_of(m, x, y) + m[0].weight.square().sum(), FxgradError, "sample|parameters"),
    "scaler": (lambda m, x, y: SCALER.scale(loss_of(m, x, y)), FxgradError, "GradScaler.scale"),
    "checkpoint": (checkpointed, OptionError, "checkpoint"),
    "another's parameter": (lambda m, x, y: (m(x) * OTHER).sum(), FxgradError, "model.parameters"),
    "input": (lambda m, x, y: loss_of(m, x.requires_grad_(), y), FxgradError, "require"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_functions(what: str) -> None:
    function, error, said = REFUSED[what]
    private = made()
    step = fxgrad.forward_backward(private, function)
    x, y = batch()
    with pytest.raises(error, match=said):
        step(x, y)
    assert all(p.grad is None for p in private.parameters())
    fxgrad.forward_backward(private, loss_of)(x.detach(), y)


def test_inputs_that_require_a_gradient() -> None:
    """At the first call, and behind calls whose inputs did not."""
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    x, y = batch()
    for _ in range(2):
        with pytest.raises(OptionError, match="'x' requires a gradient"):
            step(x.clone().requires_grad_(), y)
        step(x, y)
        fxgrad.zero_grad(private)


def test_attributes_that_keep_values() -> None:
    def keeps(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.last = model(x)
        return F.cross_entropy(model.last, y, reduction="sum")

    private = made()
    with pytest.raises(OptionError, match="one loss"):
        fxgrad.forward_backward(private, keeps)(*batch())


def test_refused_options() -> None:
    with pytest.raises(OptionError, match="fullgraph"):
        fxgrad.forward_backward(made(quantity=fxgrad.GradSample(), fullgraph=False), loss_of)


def test_the_first_batch_is_checked() -> None:
    private = made(quantity=fxgrad.GradSample(), check_first_batch=True)
    step = fxgrad.forward_backward(private, loss_of)
    engine = engine_of(private)
    assert engine is not None and engine.first_batch is not None
    x, y = batch()
    step(x, y)
    assert engine.first_batch is None
    one = left(private, [])
    fxgrad.zero_grad(private)
    loss_of(private, x, y).backward()
    agree(one, left(private, []))


def test_refused_arguments() -> None:
    with pytest.raises(OptionError, match="transformed model, not Sequential"):
        fxgrad.forward_backward(perceptron(), loss_of)
    with pytest.raises(OptionError, match="int cannot be called"):
        fxgrad.forward_backward(made(), 3)  # type: ignore[arg-type]


def test_a_model_without_trainable_parameters() -> None:
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    private.requires_grad_(False)
    with pytest.raises(OptionError, match="no trainable parameter"):
        step(*batch())
    private.requires_grad_()
    step(*batch())


def test_results_that_are_still_set() -> None:
    private = made(quantity=fxgrad.GradSample())
    step = fxgrad.forward_backward(private, loss_of)
    step(*batch())
    with pytest.raises(FxgradError, match="still set"):
        step(*batch())
    with pytest.raises(FxgradError, match="still set"):
        loss_of(private, *batch()).backward()
    fxgrad.zero_grad(private)
    loss_of(private, *batch()).backward()


def test_nothing_is_kept_alive() -> None:
    private = made()
    step: Any = fxgrad.forward_backward(private, loss_of)
    step(*batch())
    engine = engine_of(private)
    assert engine is not None and engine.steps and any(key[0] in engine.steps for key in engine.compiled)
    name = next(iter(engine.steps))
    del step
    gc.collect()
    assert not engine.steps and name not in engine.roles and not any(key[0] == name for key in engine.compiled)
    model = weakref.ref(engine.model)
    step = fxgrad.forward_backward(private, loss_of)
    step(*batch())
    del step, private, engine
    torch._dynamo.reset()
    gc.collect()
    assert model() is None


def test_a_copy_of_the_model() -> None:
    private = made()
    fxgrad.forward_backward(private, loss_of)(*batch())
    fxgrad.zero_grad(private)
    other = copy.deepcopy(private)
    x, y = batch()
    fxgrad.forward_backward(other, loss_of)(x, y)
    assert all(p.grad is None for p in private.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_non_finite_samples_leave_nothing() -> None:
    private = made(quantity=fxgrad.ClippedGrad(0.5, nonfinite="raise"))
    step = fxgrad.forward_backward(private, loss_of)
    x, y = batch()
    x[2, 1] = float("inf")
    with pytest.raises(FxgradError, match="Inf or NaN"):
        step(x, y)
    assert all(p.grad is None for p in private.parameters())
    step(*batch())


def test_nodes_that_somebody_holds() -> None:
    """Hooks on a node live as long as it does: a node of AccumulateGrad that is held may have some."""
    private = made()
    step = fxgrad.forward_backward(private, loss_of)
    x, y = batch()
    step(x, y)
    fxgrad.zero_grad(private)
    weight, said = private[0].weight, list[str]()
    node: Any = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: said.append("node"))
    step(x, y)
    assert said == ["node"]
    fxgrad.zero_grad(private)
    node.register_prehook(lambda grads: tuple(2 * grad for grad in grads))
    with pytest.raises(UnclippedGrad, match="changed while it was delivered"):
        step(x, y)
    assert all(p.grad is None for p in private.parameters())


def test_an_error_behind_a_step_leaves_its_result() -> None:
    kind = fxgrad.ClippedGrad(0.5)
    private = made(quantity=kind)
    step = fxgrad.forward_backward(private, loss_of)
    for _ in range(3):
        fxgrad.zero_grad(private)
        step(*batch())
    norms = fxgrad.result(private, kind).norm_sample
    with pytest.raises(OptionError, match="create_graph"):
        loss_of(private, *batch()).backward(create_graph=True)
    assert fxgrad.result(private, kind).norm_sample is norms
    store = engine_of(private).store  # type: ignore[union-attr]
    assert not store.results.replaced


def test_refused_functions_write_nothing() -> None:
    private = made(Written(), fxgrad.GradSample())
    step = fxgrad.forward_backward(private, lambda m, x, y: {"loss": m(x).sum()})
    for _ in range(2):
        with pytest.raises(FxgradError, match="returns no loss"):
            step(*batch())
    assert private.count == 0


def test_a_trainer_is_freed() -> None:
    """What loss_fn is a method of holds the function, and the model."""

    class Trainer:
        def __init__(self) -> None:
            self.private = made()
            self.step = fxgrad.forward_backward(self.private, self.loss)

        def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(model, x, y)

    trainer = Trainer()
    trainer.step(*batch())
    alive = weakref.ref(trainer)
    del trainer
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def test_copies_and_builtins_are_refused() -> None:
    step = fxgrad.forward_backward(made(), loss_of)
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(OptionError, match="copied or pickled"):
            copied(step)
    with pytest.raises(OptionError, match="no function of Python's"):
        fxgrad.forward_backward(made(), torch.dot)


@pytest.mark.parametrize("quantity", ["rows", "norms", "clipped"])
def test_a_penalty_beside_the_loss_of_one_sample(quantity: str) -> None:
    """Of several samples it is refused as well: it is no sample's."""
    private = made(quantity=QUANTITIES[quantity]())
    step = fxgrad.forward_backward(private, lambda m, x, y: loss_of(m, x, y) + 0.1 * m[0].weight.square().sum())
    with pytest.raises(FxgradError, match="parameters alone"):
        step(*batch(1))
    with pytest.raises(MixedSamples, match="add"):
        step(*batch(4))
    scaled = fxgrad.forward_backward(private, lambda m, x, y: 2 * loss_of(m, x, y) / 3 + m(x).square().sum())
    scaled(*batch(1))


def test_uniform_losses_of_one_sample() -> None:
    private = made()
    step = fxgrad.forward_backward(private, lambda m, x, y: m[0].weight.square().sum())
    with pytest.raises(FxgradError, match="no input that holds samples"):
        step(*batch(1))
