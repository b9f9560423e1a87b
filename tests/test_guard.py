"""Nothing reaches p.grad past the clipping: each way is refused, by name, and leaves every p.grad as it was."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.errors import AlreadySet, FxgradError, OptionError, OutsideGraph, UnclippedGrad

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
CLIPPED = fxgrad.ClippedGrad(max_grad_norm=1.0)
B = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y, reduction="sum")

    def step_by_parts(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu()).sum()


def inputs(n: int = B) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(1))


def private(model: nn.Module, quantity: Any = CLIPPED, **options: Any) -> Any:
    return fxgrad.transform(model, quantity=quantity, backend="eager", **options)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def length(model: nn.Module) -> float:
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5


def equal(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in pairs)


WAYS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "another method": lambda view, model, x: view.features(x).sum(),
    "a method that calls submodules": lambda view, model, x: view.step_by_parts(x),
    "a submodule": lambda view, model, x: view.body(x).sum(),
    "a submodule of the original": lambda view, model, x: model.body(x).sum(),
    "the original": lambda view, model, x: model(x).sum(),
    "a weight used again": lambda view, model, x: (view(x) @ model.head.weight).sum(),
    "the weight alone": lambda view, model, x: model.head.weight.square().sum(),
    "a call, then a submodule": lambda view, model, x: view(x).sum() + view.body(x).sum(),
    "a submodule, then a call": lambda view, model, x: view.body(x).sum() + view(x).sum(),
    "a call and the original": lambda view, model, x: view(x).sum() + model(x).sum(),
    "a call and a penalty": lambda view, model, x: view(x).sum() + 0.1 * model.body.weight.square().sum(),
    "a gradient of no size": lambda view, model, x: view(x).sum() + 0 * model.body.weight.sum(),
    "by way of a function of one's own": lambda view, model, x: Twice.apply(model.body.weight).sum() + view(x).sum(),
}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


class Pow(torch.autograd.Function):
    """Its node has nearly the name of PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return w * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.saved_tensors[0], None


@pytest.mark.parametrize("before", ["nothing", "a gradient", "zeros"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_past_the_clipping(way: str, before: str) -> None:
    model = Net()
    view = private(model)
    if before != "nothing":
        view(inputs()).sum().backward()
    if before == "zeros":
        model.zero_grad(set_to_none=False)
    left, objects = grads(model), [p.grad for p in model.parameters()]
    with pytest.raises(UnclippedGrad, match=r"arrived at parameter '(body|head)\.\w+': it was used outside"):
        WAYS[way](view, model, inputs()).backward()
    assert equal(grads(model), left)
    assert all(p.grad is one for p, one in zip(model.parameters(), objects, strict=True))
    model.zero_grad()
    view(inputs()).sum().backward()
    assert length(model) <= B * (1 + 1e-5)


def test_what_the_error_says() -> None:
    model = Net()
    view = private(model, methods=["features"])
    with pytest.raises(UnclippedGrad) as raised:
        view.body(inputs()).sum().backward()
    assert str(raised.value).split("\n") == [
        "a gradient that is not clipped arrived at parameter 'body.bias': it was used outside of the transformed Net, "
        "by addmm",
        "  Only what runs in forward(), features() of the object that fxgrad.transform returned is clipped: not a "
        "submodule, another method (methods= adds it), the original model, or the parameter itself. For penalties: "
        'ClippedGrad(.., outside="allow"). fxgrad.release(model) ends this guard.',
    ]


HOOKS = {"scaled": lambda g: 2 * g, "in place": lambda g: g.mul_(2), "and back": lambda g: (g * 2).mul_(0.5)}


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_changes_what_was_delivered(hook: Any, registered: str) -> None:
    model = Net()
    if registered == "before":
        model.body.weight.register_hook(hook)
    view = private(model)
    if registered == "after":
        model.body.weight.register_hook(hook)
    with pytest.raises(UnclippedGrad, match=r"'body.weight': a hook on it \(register_hook\) changed"):
        view(inputs()).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_hook_that_looks() -> None:
    model, seen = Net(), []
    view = private(model)
    model.body.weight.register_hook(lambda g: seen.append(g.clone()))
    view(inputs()).sum().backward()
    assert len(seen) == 1 and seen[0].equal(model.body.weight.grad)


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.NormSample()], ids=str)
def test_a_hook_where_there_is_no_gradient_for_it(quantity: Any) -> None:
    model = Net()
    model.body.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(OptionError, match=r"'body.weight' has a hook \(register_hook\), and there is no gradient"):
        private(model, quantity)(inputs())
    fxgrad.transform(model, quantity=[quantity, fxgrad.Grad()], backend="eager")(inputs()).sum().backward()


class TestTwoViews:
    def test_in_one_backward(self) -> None:
        model = Net()
        one, other = private(model), private(model)
        with pytest.raises(UnclippedGrad, match="two transformed models delivered it in one backward"):
            (one(inputs()).sum() + other(inputs()).sum()).backward()
        assert all(p.grad is None for p in model.parameters())

    def test_one_after_the_other(self) -> None:
        model = Net()
        one, other = private(model), private(model)
        one(inputs()).sum().backward()
        other(inputs()).sum().backward()
        assert length(model) <= 2 * B * (1 + 1e-5)

    def test_of_a_part(self) -> None:
        model = Net()
        one, other = private(model), private(model.body)
        with pytest.raises(UnclippedGrad, match="two transformed models delivered it"):
            (one(inputs()).sum() + other(inputs()).sum()).backward()
        assert all(p.grad is None for p in model.parameters())

    def test_one_of_which_does_not_clip(self) -> None:
        model = Net()
        view, plain = private(model), private(model, fxgrad.Grad())
        with pytest.raises(UnclippedGrad, match="came from a quantity that does not clip"):
            plain(inputs()).sum().backward()
        del view
        plain(inputs()).sum().backward()

    def test_one_of_which_leaves_p_grad_alone(self) -> None:
        model = Net()
        view, rows = private(model), private(model, fxgrad.GradSample())
        (view(inputs()).sum() + rows(inputs()).sum()).backward()
        assert getattr(model.body.weight, "grad_sample").shape == (B, 4, 3)  # noqa: B009


def test_two_forwards_in_one_backward() -> None:
    view = private(Net())
    with pytest.raises(AlreadySet, match="two forwards of the model meet in one backward"):
        (view(inputs()).sum() + view(inputs()).sum()).backward()


class Bounded(fxgrad.ClippedGrad):
    """A quantity of the user's that guards p.grad."""


def test_a_quantity_of_the_users() -> None:
    assert Bounded.guards_grad
    view = private(model := Net(), Bounded(1.0))
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        view.body(inputs()).sum().backward()
    assert all(p.grad is None for p in model.parameters())


class TestStays:
    """What may be done with a guarded model."""

    def test_autograd_grad(self) -> None:
        model = Net()
        view = private(model)
        own = list(model.parameters())
        found = torch.autograd.grad(view.body(inputs()).sum(), own, allow_unused=True)
        expected = torch.autograd.grad(copy.deepcopy(model).body(inputs()).sum(), own, allow_unused=True)
        assert found[0] is not None and expected[0] is None
        torch.autograd.grad(view(inputs()).sum() + model(inputs()).sum(), own)
        assert all(p.grad is None for p in own)

    def test_gradients_of_inputs(self) -> None:
        view = private(Net())
        x = inputs().requires_grad_()
        view.body(x).sum().backward(inputs=[x])
        assert x.grad is not None

    def test_a_step_by_step_training(self) -> None:
        model = Net()
        view = private(model)
        optimizer = torch.optim.Adam(model.parameters())
        for clear in (True, False, True):
            view(inputs()).sum().backward()
            view(inputs()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=clear)

    def test_retained_graphs(self) -> None:
        model = Net()
        loss = private(model)(inputs()).sum()
        loss.backward(retain_graph=True)
        once = grads(model)
        loss.backward()
        assert equal(grads(model), [2 * g for g in once if g is not None])

    def test_some_of_the_parameters(self) -> None:
        model = Net()
        private(model)(inputs()).sum().backward(inputs=[model.body.weight])
        assert [p.grad is None for p in model.parameters()] == [False, True, True, True]

    @pytest.mark.parametrize("n", [0, 1])
    def test_batches(self, n: int) -> None:
        model = Net()
        view = private(model)
        view(inputs(n)).sum().backward()
        model.zero_grad()
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            (view(inputs(n)).sum() + view.body(inputs(n)).sum()).backward()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "deepcopy": lambda view, model: copy.deepcopy(view),
    "pickle": lambda view, model: pickle.loads(pickle.dumps(view)),
    "dtype": lambda view, model: view.double(),
    "dtype of the original": lambda view, model: model.double() and view,
    "a new Parameter": lambda view, model: setattr(model.body, "bias", nn.Parameter(torch.ones(4))),
    "a new module": lambda view, model: setattr(model, "body", nn.Linear(3, 4)),
    "an assigned state": lambda view, model: model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True),
    "an assigned state of a part": lambda view, model: model.body.load_state_dict(
        copy.deepcopy(model.body).state_dict(), assign=True
    ),
    "frozen and unfrozen": lambda view, model: model.requires_grad_(False).requires_grad_(True) and view,
    "zero_grad": lambda view, model: view.zero_grad(),
    "fxgrad.zero_grad": lambda view, model: fxgrad.zero_grad(view),
}


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_guard_survives(change: str, calls: bool) -> None:
    model = Net()
    view = private(model)
    found = CHANGES[change](view, model)
    view = found if isinstance(found, Net) else view
    x = inputs().to(view.body.weight.dtype)
    if calls:
        view(x).sum().backward()
        view.zero_grad()
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        view.body(x).sum().backward()
    assert all(p.grad is None for p in view.parameters())
    view(x).sum().backward()


def test_parameters_that_are_unfrozen_after_the_transform() -> None:
    model = Net()
    model.body.requires_grad_(False)
    private(model)
    view = private(model)
    model.body.requires_grad_(True)
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        model.body(inputs()).sum().backward()
    del view


class TestEnd:
    def test_with_the_transformed_object(self) -> None:
        model = Net()
        view = private(model)
        del view
        model(inputs()).sum().backward()
        assert not model.body.weight._backward_hooks

    def test_one_of_two(self) -> None:
        model = Net()
        one, other = private(model), private(model)
        del one
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            model(inputs()).sum().backward()
        del other
        model(inputs()).sum().backward()

    @pytest.mark.parametrize("of", ["view", "model"])
    def test_release(self, of: str) -> None:
        model = Net()
        view = private(model)
        fxgrad.release(view if of == "view" else model)
        model(inputs()).sum().backward()
        model.zero_grad()
        view(inputs()).sum().backward()  # guards again
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            model(inputs()).sum().backward()

    def test_the_model_can_be_freed(self) -> None:
        import weakref

        model = Net()
        view = private(model)
        view(inputs()).sum().backward()
        gone = weakref.ref(model.body)
        del model, view
        gc.collect()
        torch._dynamo.reset()
        gc.collect()
        assert gone() is None


class TestOutside:
    PENALTIES: tuple[Callable[[Any], Tensor], ...] = (
        lambda model: sum(p.square().sum() for p in model.parameters()),
        lambda model: 0.1 * model.body.weight.norm() / 3,
        lambda model: torch.stack([p.norm() for p in model.parameters()]).norm(),
        lambda model: (model.body.weight @ model.body.weight.t()).trace(),
        lambda model: model.body.weight.abs().mean() + model.head.bias.exp().sum(),
    )

    @pytest.mark.parametrize("penalty", PENALTIES, ids=range(len(PENALTIES)))
    @pytest.mark.parametrize("scale", [1.0, 0.25])
    def test_penalties(self, penalty: Any, scale: float) -> None:
        model = Net()
        x = inputs()
        view = private(model)
        view(x).sum().mul(scale).backward()
        (penalty(twin := copy.deepcopy(model)) * scale).backward()
        of_penalty = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]
        expected = [p.grad + g for p, g in zip(model.parameters(), of_penalty, strict=True) if p.grad is not None]
        del view
        model.zero_grad()
        view = private(model, fxgrad.ClippedGrad(1.0, outside="allow"))
        ((view(x).sum() + penalty(model)) * scale).backward()
        torch.testing.assert_close(grads(model), expected)

    NONE: tuple[Callable[[Any, Any, Tensor], Tensor], ...] = (
        lambda view, model, x: view(x).sum() + (model.body.weight * x[0]).sum(),
        lambda view, model, x: view(x).sum() + (model.body.weight - x[0]).square().sum(),
        lambda view, model, x: view(x).sum() * model.body.weight.square().sum(),
        lambda view, model, x: view(x).sum() + model.body(x).sum(),
        lambda view, model, x: model(x).sum(),
        lambda view, model, x: (view(x).sum() + model.body.weight.sum()).square(),
        lambda view, model, x: view(x).sum() + model.body.weight[x[:, 0].long() * 0].square().sum(),
        lambda view, model, x: view(x).sum() + torch.dot(model.head.bias, x[0, :2]),
        lambda view, model, x: view(x).sum() + Twice.apply(model.body.weight).sum(),
        lambda view, model, x: view(x).sum() + (model.body.weight.sum() * x.requires_grad_().sum()),
        lambda view, model, x: view(x).sum() + Pow.apply(model.body.weight, x[0]).sum(),
        lambda view, model, x: view(x).sum() + torch.where(x[:1] > 0, model.body.weight, 0).sum(),
    )

    @pytest.mark.parametrize("loss", NONE, ids=range(len(NONE)))
    def test_what_samples_reach(self, loss: Any) -> None:
        model = Net()
        view = private(model, fxgrad.ClippedGrad(1.0, outside="allow"))
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            loss(view, model, inputs()).backward()
        assert all(p.grad is None for p in model.parameters())

    def test_unchecked(self) -> None:
        model = Net()
        view = private(model, fxgrad.ClippedGrad(1.0, outside="unchecked"))
        (view(inputs()).sum() + model(inputs()).sum()).backward()
        assert model.body.weight.grad is not None

    def test_the_strictest_of_two(self) -> None:
        model = Net()
        views = private(model, fxgrad.ClippedGrad(1.0, outside="unchecked")), private(model)
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            model(inputs()).sum().backward()
        del views

    def test_an_unknown_word(self) -> None:
        with pytest.raises(OptionError, match="outside has to be 'error', 'allow' or 'unchecked', not 'ignore'"):
            fxgrad.ClippedGrad(1.0, outside="ignore")  # type: ignore[arg-type]


class Attribute(Net):
    def __init__(self, made: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.ones(2))
        object.__setattr__(self, "t", made(self.u))

    def forward(self, x: Tensor) -> Tensor:
        t: Any = self.t
        t = t[0] if isinstance(t, list) else t
        return super().forward(x) * t


LEAVES = {
    "computed before the forward": (torch.exp, "'t' requires a gradient and is neither a parameter nor an argument"),
    "a tensor": (lambda u: torch.ones(2, requires_grad=True), "'t' requires a gradient and is neither"),
    "in a list": (lambda u: [torch.exp(u)], r"'t\[0\]' requires a gradient and is neither"),
    "an unregistered parameter": (lambda u: [nn.Parameter(torch.ones(2))], r"'t\[0\]' is a Parameter that model.param"),
}


@pytest.mark.parametrize("n", [B, 1])
@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), CLIPPED], ids=str)
@pytest.mark.parametrize("kind", LEAVES)
def test_tensors_that_require_grad_and_are_no_parameters(kind: str, quantity: Any, n: int) -> None:
    made, sentence = LEAVES[kind]
    with pytest.raises(OutsideGraph, match=sentence) as raised:
        private(Attribute(made), quantity)(inputs(n))
    assert "test_guard.py" in str(raised.value)


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), CLIPPED], ids=str)
def test_an_input_that_was_computed_from_parameters(quantity: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    view = private(model, quantity)
    with pytest.raises(OutsideGraph, match=r"computed from the model's own parameters.*: 0.weight, 0.bias"):
        view(view[0](inputs()))
    with torch.no_grad():
        x = view[0](inputs())
    view(x).sum().backward()


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), CLIPPED], ids=str)
def test_plain_tensors_in_parameters_places(quantity: Any) -> None:
    model = Net()
    view = private(model, quantity)
    plain = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(OptionError, match=r"'body.weight' is a plain tensor that stands in a Parameter's place"):
        functional_call(view, plain, (inputs(),))


class TestGradScaler:
    def test_a_scaler_nearby(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        view = private(model := Net())
        with pytest.raises(OptionError, match="the loss is scaled by a GradScaler"):
            scaler.scale(view(inputs()).sum()).backward()
        assert all(p.grad is None for p in model.parameters())

    def test_one_that_is_off_and_losses_that_are_scaled_by_hand(self) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        view = private(Net())
        scaler.scale(view(inputs()).sum() * 0.5).backward()

    def test_the_recipe(self) -> None:
        model = Net()
        x = inputs()
        private(model)(x).sum().backward()
        expected = grads(model)
        model.zero_grad()
        (private(model, loss_reduction=1 / 1024)(x).sum() * 1024).backward()
        torch.testing.assert_close(grads(model), expected)


class TestMethods:
    def test_the_same_as_forward(self) -> None:
        model = Net()
        view = private(model, methods=("features", "training_step"))
        x, y = inputs(), torch.zeros(B, dtype=torch.long)
        view.training_step((x, y), 0).backward()
        found = grads(model)
        model.zero_grad()
        nn.functional.cross_entropy(view(x), y, reduction="sum").backward()
        torch.testing.assert_close(found, grads(model))

    def test_alone(self) -> None:
        model = Net()
        view = private(model, methods="features")
        view.features(inputs()).sum().backward()
        norms = fxgrad.result(view, CLIPPED).norm_sample
        assert norms.shape == (B,)
        for i in range(B):
            twin = copy.deepcopy(model)
            twin.features(inputs()[i : i + 1]).sum().backward()
            assert length(twin.body) == pytest.approx(float(norms[i]), rel=1e-5)

    def test_keeps_names_and_survives_copies(self) -> None:
        view = private(Net(), methods=("features",))
        assert view.features.__name__ == "features"
        for other in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
            other.features(inputs()).sum().backward()

    def test_in_dims_by_method(self) -> None:
        class Two(Net):
            def encode(self, scale: Tensor, x: Tensor) -> Tensor:
                return self.body(x) * scale

        view = private(Two(), methods=("encode",), in_dims={"forward": (0,), "encode": (None, 0)})
        view.encode(torch.ones(4), inputs()).sum().backward()
        view.zero_grad()
        view(inputs()).sum().backward()

    @pytest.mark.parametrize("name", ["encode", "body", "training", 3])
    def test_unknown_names(self, name: Any) -> None:
        with pytest.raises(OptionError, match=f"methods names {name!r}, which is no method of Net"):
            private(Net(), methods=(name,))

    def test_a_trainer_that_calls_training_step(self) -> None:
        """The step runs on the view: what it calls by the view's own call is clipped, what it calls by parts is not."""
        model = Net()
        view = private(model)
        view.training_step((inputs(), torch.zeros(B, dtype=torch.long)), 0).backward()
        model.zero_grad()
        with pytest.raises(UnclippedGrad, match=r"not a submodule, another method \(methods= adds it\)"):
            view.step_by_parts(inputs()).backward()
        private(model, methods=("step_by_parts",)).step_by_parts(inputs()).backward()


@pytest.mark.parametrize("way", ["the original", "a submodule"])
def test_the_backend(way: str) -> None:
    model = Net()
    options: Any = {"quantity": CLIPPED, "backend": "eager"}
    compiled = torch.compile(model, backend="fxgrad", options=options, fullgraph=True)
    compiled(inputs()).sum().backward()
    model.zero_grad()
    part = model if way == "the original" else model.body
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed model"):
        (compiled(inputs()).sum() + part(inputs()).sum()).backward()
    assert all(p.grad is None for p in model.parameters())
    fxgrad.release(model)
    torch._dynamo.reset()


def test_every_error_has_a_name() -> None:
    assert issubclass(UnclippedGrad, FxgradError)


def node_of(parameter: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(parameter).node


def scaled(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1000)


def assigned(parameter: Tensor) -> None:
    parameter.grad = torch.ones_like(parameter)


def assigned_as_view(parameter: Tensor) -> None:
    parameter.grad = torch.ones_like(parameter).view_as(parameter)


def looked_at_and_assigned(model: Net) -> None:
    """With a hook that looks the engine may keep a copy, which is as new as what was assigned."""
    model.body.weight.register_hook(lambda g: None)
    model.body.weight.register_post_accumulate_grad_hook(assigned)


def late(model: Net) -> None:
    """As hand-written data parallelism does: at the very end of the backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    model.body.bias.register_hook(lambda g: engine.queue_callback(lambda: scaled(model.body.weight)))


BEHIND: dict[str, Callable[[Net], Any]] = {
    "before AccumulateGrad": lambda model: node_of(model.body.weight).register_prehook(lambda g: (g[0] * 1000,)),
    "before AccumulateGrad, in place": lambda model: node_of(model.body.weight).register_prehook(
        lambda g: (g[0].mul_(1000),)
    ),
    "behind it": lambda model: model.body.weight.register_post_accumulate_grad_hook(scaled),
    "assigned behind it": lambda model: model.body.weight.register_post_accumulate_grad_hook(assigned),
    "a view assigned behind it": lambda model: model.body.weight.register_post_accumulate_grad_hook(assigned_as_view),
    "assigned behind it, and looked at": looked_at_and_assigned,
    "of its node, and looked at": lambda model: [
        model.body.weight.register_hook(lambda g: None),
        node_of(model.body.weight).register_hook(lambda *_: assigned(model.body.weight)),
    ],
    "by a callback": late,
    "registered in the backward": lambda model: [
        p.register_hook(lambda g: [q.register_hook(lambda g: g * 1000) for q in model.parameters()] and None)
        for p in [model.body.weight]
    ],
}


@pytest.mark.parametrize(
    "way, before",
    [(way, "nothing") for way in BEHIND] + [(way, "a gradient") for way in BEHIND if "before" not in way],
)
def test_what_hooks_change_behind_the_comparison(way: str, before: str) -> None:
    model = Net()
    view = private(model)
    if before == "a gradient":
        view(inputs()).sum().backward()
    left, node = grads(model), node_of(model.body.weight)  # the model's parameters do not hold their nodes
    BEHIND[way](model)
    with pytest.raises(UnclippedGrad, match=r"'\w+\.\w+' was changed while|'\w+\.\w+': a hook on it"):
        view(inputs()).sum().backward()
    assert equal(grads(model), left)
    del node


def test_what_a_hook_assigns_in_place_of_a_gradient_in_another_layout() -> None:
    model: Any = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    view = private(model)
    model.weight.register_post_accumulate_grad_hook(assigned)
    with pytest.raises(UnclippedGrad, match="'weight' was changed while it was delivered"):
        view(torch.randn(B, 2, 5, 5)).sum().backward()
    assert model.weight.grad is None and model.bias.grad is None


def test_gradients_that_are_parts_of_one_tensor() -> None:
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    sizes = [p.numel() for p in model.parameters()]
    for p, part in zip(model.parameters(), torch.zeros(sum(sizes)).split(sizes), strict=True):
        p.grad = part.view_as(p)
    for one in (model, other):
        private(one)(inputs()).sum().backward()
    torch.testing.assert_close(grads(model), grads(other))
    assert all(p.grad is not None and p.grad._is_view() for p in model.parameters())


def test_gradients_in_the_buckets_of_distributed_data_parallel(tmp_path: Path) -> None:
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        around = nn.parallel.DistributedDataParallel(private(model), gradient_as_bucket_view=True)
        around(inputs()).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    private(other)(inputs()).sum().backward()
    torch.testing.assert_close(grads(model), grads(other))


@pytest.mark.parametrize("kept", [False, True])
def test_p_grad_of_another_dtype(kept: bool) -> None:
    model, other = Net(), Net()
    other.load_state_dict(model.state_dict())
    for p in model.parameters():
        p.grad_dtype = torch.float64
    views = [private(model), private(other)]
    for _ in range(1 + kept):
        for view in views:
            view(inputs()).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    torch.testing.assert_close(grads(model), grads(other), check_dtype=False)
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        (views[0](inputs()).sum() + model(inputs()).sum()).backward()


def test_a_complex_parameter_that_is_unfrozen() -> None:
    model: Any = Net()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
    view = private(model)
    view(inputs()).sum().backward()
    model.phase.requires_grad_()
    with pytest.raises(UnclippedGrad, match="'phase'"):
        model.phase.abs().sum().backward()
    assert model.phase.grad is None


def test_a_gradient_in_another_layout_than_its_parameter_s() -> None:
    """The engine copies it: p.grad is another tensor than what was delivered."""
    model: Any = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    view = private(model)
    for _ in range(2):
        view(torch.randn(B, 2, 5, 5)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.is_contiguous(memory_format=torch.channels_last)


class TestNested:
    """Reentrant checkpoints run a backward inside of a backward."""

    @pytest.mark.parametrize("first", [0, 1])
    @pytest.mark.parametrize("before", ["nothing", "a gradient"])
    def test_p_grad_is_put_back(self, first: int, before: str) -> None:
        model = Net()
        view = private(model)
        if before == "a gradient":
            view(inputs()).sum().backward()
        left = grads(model)
        x = inputs().requires_grad_()
        makers: list[Callable[[], Tensor]] = [
            lambda: checkpoint(model.body, x, use_reentrant=True).sum(),
            lambda: view(inputs()).sum(),
        ]
        parts = [makers[i]() for i in (first, 1 - first)]
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            (parts[0] + parts[1]).backward()
        assert equal(grads(model), left)

    @pytest.mark.parametrize("first", [0, 1])
    def test_behind_a_checkpoint_around_the_transformed(self, first: int) -> None:
        model = Net()
        view = private(model)
        x = inputs().requires_grad_()
        makers: list[Callable[[], Tensor]] = [
            lambda: checkpoint(view, x, use_reentrant=True).sum(),
            lambda: model.body(inputs()).sum(),
        ]
        parts = [makers[i]() for i in (first, 1 - first)]
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            (parts[0] + parts[1]).backward()
        assert all(p.grad is None for p in model.parameters())

    def test_two_checkpoints_around_the_transformed(self) -> None:
        """Each runs its forward when the other's has been delivered, in one and the same backward."""
        model = Net()
        view = private(model)
        x = inputs().requires_grad_()
        parts = [checkpoint(view, x, use_reentrant=True).sum() for _ in range(2)]
        with pytest.raises(AlreadySet, match="two forwards of the model meet in one backward"):
            (parts[0] + parts[1]).backward()
        assert all(p.grad is None for p in model.parameters())
        for part in [checkpoint(view, x, use_reentrant=True).sum() for _ in range(2)]:
            part.backward()

    def test_alone_it_is_right(self) -> None:
        model = Net()
        view = private(model)
        view(inputs()).sum().backward()
        expected = grads(model)
        model.zero_grad()
        checkpoint(view, inputs().requires_grad_(), use_reentrant=True).sum().backward()
        torch.testing.assert_close(grads(model), expected)


ASSIGNED: dict[str, Callable[[Any, Any], Any]] = {
    "a parameter": lambda view, model: setattr(view.body, "weight", nn.Parameter(torch.ones(4, 3))),
    "a module of the view": lambda view, model: setattr(view, "body", nn.Linear(3, 4)),
    "a state of the view": lambda view, model: view.load_state_dict(copy.deepcopy(model).state_dict(), assign=True),
    "others for one call": lambda view, model: functional_call(
        view, {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}, (inputs(),)
    ),
}


@pytest.mark.parametrize("way", ASSIGNED)
def test_what_is_assigned_through_the_view(way: str) -> None:
    model = Net()
    view = private(model)
    ASSIGNED[way](view, model)
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        model.body(inputs()).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_swapped_tensors_are_guarded_from_the_next_call_on() -> None:
    model = Net()
    view, twin = private(model), Net()
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.utils.swap_tensors(own, other)
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        (view(inputs()).sum() + model(inputs()).sum()).backward()


def test_a_view_that_is_gone_before_the_backward() -> None:
    def loss(model: nn.Module) -> Tensor:
        view = private(model)
        return view(inputs()).sum() + model(inputs()).sum()

    model = Net()
    total = loss(model)
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        total.backward()


def test_a_lazy_module() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    view = private(model)
    with torch.no_grad():
        model(inputs())
    view(inputs()).sum().backward()
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Sequential"):
        model(inputs()).sum().backward()


class TestAllowAlone:
    """outside="allow" lets penalties pass and nothing that merely stands beside them."""

    @staticmethod
    def made() -> tuple[Any, Any]:
        model = Net()
        return model, private(model, fxgrad.ClippedGrad(1.0, outside="allow"))

    @pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
    def test_hooks(self, hook: Any) -> None:
        model, view = self.made()
        model.body.weight.register_hook(hook)
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            (view(inputs()).sum() + model.body.weight.square().sum()).backward()

    @pytest.mark.parametrize("quantity", [fxgrad.Grad(), fxgrad.ClippedGrad(1000.0, outside="allow")], ids=str)
    @pytest.mark.parametrize("both", [True, False])
    def test_other_views(self, quantity: Any, both: bool) -> None:
        model, view = self.made()
        other = private(model, quantity)
        if isinstance(quantity, fxgrad.ClippedGrad) and not both:
            return other(inputs()).sum().backward()  # it is clipped, by its own bound
        with pytest.raises(UnclippedGrad, match=r"two transformed models delivered it|changed on its way"):
            (other(inputs()).sum() + (view(inputs()).sum() if both else 0)).backward()

    @pytest.mark.parametrize(
        "penalty",
        [
            lambda w, x: (lambda t: (t[0].mul_(x[0]), t)[1])(w.clone()).sum(),
            lambda w, x: (lambda t: (t.view(-1)[:3].masked_fill_(x[0] > 0, 0), t)[1])(w.clone()).sum(),
            lambda w, x: sum(w[0][j] * x[0][j] for j in range(3)),
            lambda w, x: w.sum().clamp(min=x.sum()),
            lambda w, x: w.sum().abs().pow(x.sum().abs()),
            lambda w, x: checkpoint(lambda a: a.square(), w, use_reentrant=True).sum(),
        ],
        ids=range(6),
    )
    def test_samples_in_disguise(self, penalty: Any) -> None:
        model, view = self.made()
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            (view(inputs()).sum() + penalty(model.body.weight, inputs())).backward()

    def test_gradients_of_roots(self) -> None:
        model, view = self.made()
        with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
            torch.autograd.backward([view(inputs()).sum(), model.body.weight.sum(0)], [None, inputs()[0]])


def test_a_loss_that_the_model_keeps() -> None:
    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.loss = y.sum()
            return y

    model = Keeps()
    view = private(model)
    view(inputs())
    model.loss.backward()
    found = grads(model)
    plain = private(twin := copy.deepcopy(Net()))
    twin.load_state_dict(model.state_dict())
    plain(inputs()).sum().backward()
    torch.testing.assert_close(found, grads(twin))


def test_put_back_is_put_back_whole() -> None:
    """Its version, too: what counts p.grad's changes sees none."""
    model = Net()
    view = private(model)
    view(inputs()).sum().backward()
    before = [(p.grad, p.grad._version) for p in model.parameters() if p.grad is not None]
    with pytest.raises(UnclippedGrad, match="it was used outside of the transformed Net"):
        (view(inputs()).sum() + view.body(inputs()).sum()).backward()
    after = [(p.grad, p.grad._version) for p in model.parameters() if p.grad is not None]
    assert all(a is b and m == n for (a, m), (b, n) in zip(before, after, strict=True))


def test_a_backward_that_raised_before_its_parameters_were_replaced() -> None:
    model = Net()
    view = private(model)
    handle = model.body.weight.register_post_accumulate_grad_hook(_stop)
    with pytest.raises(KeyError, match="a hook"):
        view(inputs()).sum().backward()
    handle.remove()
    old = list(model.parameters())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for p in old:
        p.grad = torch.zeros_like(p)
    view(inputs()).sum().backward()
    assert 0 < length(model) <= B * (1 + 1e-5)


def _stop(_: Tensor) -> None:
    raise KeyError("a hook")


class Sliced(nn.Module):
    """Its forward makes a module list of its layers, as language models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x).tanh()
        return x


def test_a_graph_does_not_depend_on_the_guards_of_other_models() -> None:
    """Dynamo traces what runs where a module gets parts. When guards come and go, nothing compiles again or fails."""
    graphs: list[Any] = []

    def compiler(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    plain, model = Sliced(), Sliced()
    view, other = fxgrad.transform(model, quantity=CLIPPED, backend=compiler), private(Sliced())
    compiled = torch.compile(plain, backend=compiler)
    x = inputs()

    def call() -> None:
        view(x).sum().backward()
        model.zero_grad()
        compiled(x)

    call()
    count = len(graphs)
    other(x)
    call()
    del other
    gc.collect()
    another = private(Sliced())
    another(x)
    call()
    assert len(graphs) == count
    with pytest.raises(UnclippedGrad, match="outside of the transformed Sliced"):
        (view(x).sum() + model.layers[0](x).sum()).backward()


def test_backward_of_a_parameter_itself() -> None:
    """PyTorch does not count what backward was called on among what it runs."""
    model = Net()
    view = private(model)
    view(inputs()).sum().backward()
    before = grads(model)
    for call in (
        lambda: model.head.bias.backward(torch.full((2,), 100.0)),
        lambda: torch.autograd.backward([*model.parameters()], [torch.ones_like(p) for p in model.parameters()]),
    ):
        with pytest.raises(UnclippedGrad, match="used outside of the transformed"):
            call()
        for one, other in zip(grads(model), before, strict=True):
            assert one is not None and other is not None and one.equal(other)
    assert torch.autograd.grad(model.head.bias, [model.head.bias], torch.ones(2))[0].equal(torch.ones(2))
