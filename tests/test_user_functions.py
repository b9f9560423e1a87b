"""A user's autograd.Function inside the model: a leaf, whose own backward decides, sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import fxgrad
from fxgrad.errors import FxgradError, GraphBreak, MixedSamples, OptionError, UnsupportedOp
from fxgrad.testing import assert_per_sample_grads, per_sample_grads

# of Dynamo itself, which makes one to trace it
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

B, N = 4, 3


class Rounded(Function):
    """A straight-through estimator: the gradient of x * w, the values of x * round(w)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, (g * x).flatten(0, -2).sum(0)


class RoundedBySetup(Function):
    """The same with setup_context."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, (g * x).flatten(0, -2).sum(0)


class WithVmapRule(RoundedBySetup):
    generate_vmap_rule = True


class WithVmap(RoundedBySetup):
    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> Any:
        raise NotImplementedError("nobody vmaps this function as a whole")


class WithBoth(WithVmap):
    """PyTorch refuses this under vmap, and there alone."""

    generate_vmap_rule = True


class Unsummed(RoundedBySetup):
    """Its gradient is larger than w: autograd sums what broadcasting repeated."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w, g * x


class Reversed(Function):
    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.scale * g, None


class SplitBySign(Function):
    """Two outputs with a gradient and one without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        ctx.set_materialize_grads(False)
        sign = x > 0
        ctx.mark_non_differentiable(sign)
        return x * w, x - w, sign

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None, _: Any) -> Any:
        x, w = ctx.saved_tensors
        by_x, by_w = torch.zeros_like(x), torch.zeros_like(w)
        if g is not None:
            by_x, by_w = by_x + 2 * g * w, by_w + (3 * g * x).sum(0)
        if h is not None:
            by_x, by_w = by_x + h, by_w - 5 * h.sum(0)
        return by_x, by_w


class AsNeeded(Rounded):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w if ctx.needs_input_grad[0] else None, (g * x).sum(0) if ctx.needs_input_grad[1] else None


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        ctx.mark_dirty(x)
        x.add_(w)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g, 3 * g.sum(0)


class WithNumber(Function):
    """One of its outputs is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * w, 2.5

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return g, (7 * g * x).sum(0)


class Quantised(Function):
    """A function of a parameter alone."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return (w * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 1.5


class Halves(Function):
    """Two outputs, of a parameter alone."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        return w.round(), w - w.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return 2 * g - 3 * h


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.w, self.body = nn.Linear(N, N), nn.Parameter(torch.randn(N) * 2), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.layer(x), self.w)


def numbered(x: Tensor, w: Tensor) -> Tensor:
    y, number = WithNumber.apply(x, w)
    return y * number


def split(x: Tensor, w: Tensor) -> Any:
    a, b, sign = SplitBySign.apply(x, w)
    return torch.where(sign, a, b.sin())


def one_of_two(x: Tensor, w: Tensor) -> Tensor:
    return SplitBySign.apply(x, w)[1].sin()


def written(x: Tensor, w: Tensor) -> Tensor:
    h = x.clone()
    y = InPlace.apply(h, w)
    return y * h.sin()


def twice(x: Tensor, w: Tensor) -> Tensor:
    return Rounded.apply(Rounded.apply(x, w).sin(), w)


def quantised_layer(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, Quantised.apply(w.outer(w))) + Quantised.apply(w)


def halved(x: Tensor, w: Tensor) -> Tensor:
    whole, rest = Halves.apply(w)
    return x * whole + rest.sin()


def applied(function: type[Function]) -> Callable[..., Any]:
    def body(*inputs: Tensor) -> Any:
        return function.apply(*inputs)

    return body


BODIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "straight through": applied(Rounded),
    "setup_context": applied(RoundedBySetup),
    "generate_vmap_rule": applied(WithVmapRule),
    "vmap staticmethod": applied(WithVmap),
    "both": applied(WithBoth),
    "a larger gradient": applied(Unsummed),
    "gradient reversal": lambda x, w: Reversed.apply(x * w, 0.5),
    "several outputs": split,
    "one of several outputs": one_of_two,
    "needs_input_grad": applied(AsNeeded),
    "mark_dirty": written,
    "an output that is no tensor": numbered,
    "twice": twice,
    "of a parameter alone": quantised_layer,
    "several outputs of a parameter alone": halved,
    "one of several outputs of a parameter alone": lambda x, w: x * Halves.apply(w)[1],
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.xfail(
                name == "mark_dirty" and torch.__version__ < "2.13",
                raises=UnsupportedOp,
                reason="before 2.13 the graph does not say what was marked, and torch.compile is wrong itself",
            ),
        )
        for name in BODIES
    ],
)
def test_its_own_backward_decides(name: str, backend: str, device: torch.device) -> None:
    x = torch.randn(B, N, dtype=torch.float64, device=device, requires_grad=True)
    assert_per_sample_grads(Model(BODIES[name]).double().to(device), x, backend=backend)


@pytest.mark.inductor
def test_through_inductor(device: torch.device) -> None:
    assert_per_sample_grads(Model(twice).to(device), torch.randn(B, N, device=device), backend="inductor")


class Normalised(Function):
    """A backward that is not linear: the gradient's direction."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()


class Coupled(Function):
    """A backward that multiplies the gradients of two outputs."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * w, 3 * w

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        return g * h


def of_a_function(x: Tensor, w: Tensor) -> Tensor:
    u = 2 * Normalised.apply(w * w)
    return (x * u).sin() + u


@pytest.mark.parametrize("body", [lambda x, w: x * Normalised.apply(w), of_a_function, quantised_layer])
def test_what_is_clipped_goes_through_the_backward_one_by_one(body: Callable[[Tensor, Tensor], Any]) -> None:
    """Of a backward that is not linear, the sum over samples is no other's than that of what it gives for each."""
    model, x = Model(body).double(), torch.randn(B, N, dtype=torch.float64)
    rows = per_sample_grads(model, lambda y: y.square().sum(), (x,))
    norms = sum(g.flatten(1).square().sum(1) for g in rows.values()).sqrt()  # type: ignore[union-attr]
    bound = float(norms.median())
    view = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(bound), backend="eager")
    view(x).square().sum().backward()
    for name, p in model.named_parameters():
        expected = torch.einsum("n,n...->...", (bound / norms).clamp(max=1), rows[name])
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-8)


def test_a_backward_that_couples_outputs_of_a_parameter_is_refused() -> None:
    def coupled(x: Tensor, w: Tensor) -> Tensor:
        a, b = Coupled.apply(w)
        return x * a + (x * b).sin()

    with pytest.raises(UnsupportedOp, match="its backward is not seen to be linear in their gradients"):
        fxgrad.transform(Model(coupled), backend="eager")(torch.randn(B, N))
    one = Model(lambda x, w: x * Coupled.apply(w)[1]).double()
    assert_per_sample_grads(one, torch.randn(B, N, dtype=torch.float64), backend="eager")


# Hooks on values inside the model


def hooked(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    h.register_hook(lambda g: g / g.norm(dim=1, keepdim=True) + x)
    return (h.sin() * w).sin()


def hooked_late(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    y = h.sin()
    h.register_hook(lambda g: 2 * g)
    return y + h.view(-1, N)


def hooked_twice(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    h.register_hook(lambda g: 2 * g)
    h.register_hook(lambda g: g + h.detach())
    return h.sin()


def looked_at(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    h.register_hook(lambda g: print(g.norm()))
    return h.sin()


def hooked_weight(x: Tensor, w: Tensor) -> Tensor:
    u = w * w
    u.register_hook(lambda g: g / g.norm())
    return (x * u).sin() + u


def hook_before_a_write(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    h.register_hook(lambda g: 2 * g)
    return h.mul_(3).sin()


HOOKED = [hooked, hooked_late, hooked_twice, looked_at, hooked_weight, hook_before_a_write]
needs_hooks = pytest.mark.xfail(
    torch.__version__ < "2.13", raises=(GraphBreak, AssertionError), reason="before 2.13 such a hook breaks the graph"
)


@needs_hooks
@pytest.mark.parametrize("size", [B, 1])
@pytest.mark.parametrize("body", HOOKED)
def test_hooks(body: Callable[[Tensor, Tensor], Any], size: int) -> None:
    x = torch.randn(size, N, dtype=torch.float64)
    linear = body is not hooked_weight  # what one hook of a whole batch's gradient gives is no sum
    assert_per_sample_grads(Model(body).double(), x, backend="eager", check_sum=linear)


@needs_hooks
@pytest.mark.inductor
def test_hooks_through_inductor() -> None:
    assert_per_sample_grads(Model(hooked), torch.randn(B, N), backend="inductor")


def mixing_hook(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    h.register_hook(lambda g: g / g.norm())
    return h.sin()


def hook_past_a_view(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    row = h[:, 0]
    h.mul_(3)
    h.register_hook(lambda g: 2 * g)
    return h.sin() + row[:, None]


def hook_of_a_later_value(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    y = h.sin()
    later = y.exp().detach()
    h.register_hook(lambda g: g * later)
    return y


SEEN: list[Tensor] = []


def hook_with_an_effect(x: Tensor, w: Tensor) -> Tensor:
    h = x * w
    h.register_hook(lambda g: SEEN.append(g))
    return h.sin()


@needs_hooks
@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (mixing_hook, MixedSamples, r"a hook \(register_hook\) lets samples influence each other in its backward"),
        (hook_past_a_view, UnsupportedOp, r"a hook \(register_hook\) on a value that is written over in place"),
        (hook_of_a_later_value, UnsupportedOp, "that reads what is computed after the value was used"),
        (hook_with_an_effect, GraphBreak, "does what one graph cannot hold"),
    ],
)
def test_hooks_that_are_refused(body: Callable[[Tensor, Tensor], Any], kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        fxgrad.transform(Model(body), backend="eager")(torch.randn(B, N))
    assert "register_hook" in caught.value.where
    assert caught.value.advice


def test_over_merged_rows() -> None:
    def merged(x: Tensor, w: Tensor) -> Tensor:
        return Rounded.apply(x.flatten(0, 1), w).unflatten(0, x.shape[:2])

    assert_per_sample_grads(Model(merged).double(), torch.randn(B, 5, N, dtype=torch.float64), backend="eager")


def test_one_sample_and_none() -> None:
    for size in (1, 0):
        x = torch.randn(size, N, dtype=torch.float64)
        assert_per_sample_grads(Model(applied(Rounded)).double(), x, backend="eager", check_sum=size > 0)


class MeanForward(Rounded):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w - x.mean(0)


class MeanBackward(Rounded):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g - g.mean(0), None


@pytest.mark.parametrize(("function", "where"), [(MeanForward, "forward"), (MeanBackward, "backward")])
def test_what_mixes_samples_is_refused(function: type[Function], where: str) -> None:
    gs = fxgrad.transform(Model(applied(function)), backend="eager")
    with pytest.raises(MixedSamples, match=f"lets samples influence each other in its {where}"):
        gs(torch.randn(B, N))


class Unmarked(InPlace):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        x[:, 0].add_(w[0])
        return x


def test_a_write_that_the_graph_does_not_tell_of_is_refused() -> None:
    gs = fxgrad.transform(Model(lambda x, w: Unmarked.apply(x.clone(), w)), backend="eager")
    with pytest.raises(UnsupportedOp, match="writes over an input, and the captured graph does not say so"):
        gs(torch.randn(B, N))


class WithJvp(RoundedBySetup):
    @staticmethod
    def jvp(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        return x + w


def test_a_jvp_staticmethod_is_right_or_refused() -> None:
    """Where Dynamo does not take the function, it says so."""
    x = torch.randn(B, N, dtype=torch.float64)
    try:
        assert_per_sample_grads(Model(applied(WithJvp)).double(), x, backend="eager")
    except FxgradError as error:
        assert "jvp" in str(error)


def test_vmap_over_a_transformed_model() -> None:
    gs = fxgrad.transform(Model(applied(Rounded)), backend="eager")
    with pytest.raises(OptionError, match=r"does not run inside of torch\.func's transforms"):
        torch.func.vmap(gs)(torch.randn(2, B, N))
