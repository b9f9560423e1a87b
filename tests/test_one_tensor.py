"""Values that are one tensor, or views of one memory: by other names, behind writes, and without gradients between."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import UnsupportedOp
from fxgrad.testing import assert_per_sample_grads, default_loss, per_sample_grads
from tests.quick import long_but

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of Dynamo itself
needs_hooks = pytest.mark.skipif(torch.__version__ < "2.13", reason="before 2.13 such a hook breaks the graph")
Body = Callable[["Model", Tensor], Tensor]
Name = Callable[[Tensor], Tensor]


class Model(nn.Module):
    k: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.w, self.v, self.body = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.randn(4)), body
        self.register_buffer("k", torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def check(body: Body, *shape: int, size: int, backend: str = "eager") -> None:
    """Compare gradients and norms with the loop: they have passes of their own at a batch of one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Model(body).double(), torch.randn(size, *shape, dtype=torch.double)
    rows = per_sample_grads(copy.deepcopy(model), default_loss, (x.clone(),))
    assert_per_sample_grads(copy.deepcopy(model), x.clone(), backend=backend)
    norms = fxgrad.NormSample()
    view = fxgrad.transform(model, quantity=norms, backend=backend)
    default_loss(view(x.clone())).backward()
    expected = sum(g.flatten(1).square().sum(1) for g in rows.values()).sqrt()  # type: ignore[union-attr]
    torch.testing.assert_close(fxgrad.result(view, norms), expected)


NAMES: dict[str, Name] = {
    "contiguous": lambda h: h.contiguous(),
    "to": lambda h: h.to(h.dtype),
    "positive": lambda h: +h,
    "flatten": lambda h: h.flatten(1, 1),
    "real": lambda h: h.real,
    "conj": lambda h: h.conj(),
    "atleast": lambda h: torch.atleast_2d(h),
    "dropout": lambda h: F.dropout(h, 0.5, False),
    "dropout of nothing": lambda h: torch.dropout(h, 0.0, True),
}
NAMED = pytest.mark.parametrize("same", NAMES.values(), ids=NAMES)


@needs_hooks
@NAMED
def test_a_hook_gets_what_arrives_by_any_name(same: Name) -> None:
    def hooked(m: Model, x: Tensor) -> Tensor:
        y = x @ m.w
        z, h = y.sin(), same(y)
        h.register_hook(lambda g: g.clamp(-0.3, 0.3))
        return h.relu() * m.v + y + z

    check(hooked, 4, size=5)


@NAMED
def test_a_shape_changes_under_every_name(same: Name) -> None:
    def of_samples(m: Model, x: Tensor) -> Tensor:
        h = x @ m.w
        r = same(h)
        h.transpose_(1, 2)
        return r @ m.w

    def of_parameters(m: Model, x: Tensor) -> Tensor:
        u = m.w * 2
        r = same(u)
        u.t_()
        return x @ r

    check(of_samples, 4, 4, size=5)
    check(of_parameters, 4, 4, size=5)


@NAMED
def test_a_write_shows_under_every_name(same: Name) -> None:
    def written(m: Model, x: Tensor) -> Tensor:
        h, u = x @ m.w, m.v * 2
        q, r = same(h), same(u[None])[0]
        F.leaky_relu(input=q, negative_slope=0.5, inplace=True)
        r.mul_(m.k)
        return h * m.v + x * u

    check(written, 4, size=5)


def clamped(g: Tensor) -> Tensor:
    return g.clamp(-0.1, 0.1)


def hook_before_relu(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    h.register_hook(clamped)
    F.relu(h, inplace=True)
    return h * m.v


def hook_behind_relu(m: Model, x: Tensor) -> Tensor:
    h = F.relu(x @ m.w, inplace=True)
    h.register_hook(clamped)
    return h * m.v + h


def hook_behind_a_product(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    y = h * 2
    h.mul_(m.v)
    h.register_hook(clamped)
    return h * h + y


def hook_before_a_write_to_a_view(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    h.register_hook(clamped)
    h[:, :2].mul_(2)
    return h * h


def hooks_by_two_names(m: Model, x: Tensor) -> Tensor:
    y = x @ m.w
    h = y.to(y.dtype)
    h.register_hook(lambda g: g * 2)
    y.register_hook(clamped)
    return h.relu() + y.sin()


def hook_behind_statistics(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    with torch.no_grad():
        size = h.abs()
    h.register_hook(lambda g: g * size)
    return h * h + size


def hook_on_a_name_without_gradients(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    with torch.no_grad():
        c = h.contiguous()
    c.register_hook(clamped)
    return h * h + c


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * 2


def hook_before_a_dirty_function(m: Model, x: Tensor) -> Tensor:
    h = (x @ m.w) * 1
    h.register_hook(clamped)
    y: Tensor = Doubled.apply(h)
    return y * y + h


HOOKS = [
    *(hook_before_relu, hook_behind_relu, hook_behind_a_product, hook_before_a_write_to_a_view, hooks_by_two_names),
    *(hook_behind_statistics, hook_on_a_name_without_gradients, hook_before_a_dirty_function),
]


@needs_hooks
@pytest.mark.parametrize("size", [5, 1])
@pytest.mark.parametrize("body", HOOKS)
def test_hooks_and_writes(body: Body, size: int) -> None:
    check(body, 4, size=size)


def views_before_no_grad(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    with torch.no_grad():
        a = h.view(-1, 2, 2).transpose(1, 2)
    return h * a.transpose(1, 2).reshape(-1, 4)


def views_around_no_grad(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    a = h.view(-1, 2, 2)
    with torch.no_grad():
        a = a.transpose(1, 2)
    return h * a.transpose(1, 2).reshape(-1, 4)


def views_of_other_numbers(m: Model, x: Tensor) -> Tensor:
    q = m.k.outer(m.k).view(torch.int64) + 0
    d = q.view(torch.float64).view(4, 2, 2).transpose(1, 2)
    return x @ (m.w * d.reshape(4, 4))


def shape_behind_detach(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    r = h.relu()
    h.detach_()
    return h * m.v + r


def view_read_without_gradients_first(m: Model, x: Tensor) -> Tensor:
    u = m.v * 2
    a = u[:2]
    u.mul_(m.k)
    with torch.no_grad():
        s = a.sum()
    return x * u + F.pad(x[:, :2] * a, (0, 2)) * s


def transpose_read_without_gradients_first(m: Model, x: Tensor) -> Tensor:
    u = m.w * 2
    a = u.t()
    u.mul_(3)
    with torch.no_grad():
        s = a.abs().max()
    return x @ a / s


def detached_before_a_write(m: Model, x: Tensor) -> Tensor:
    u = m.v * 2
    a = u.detach()
    u.mul_(m.k)
    return x * u * a


def names_without_gradients(m: Model, x: Tensor) -> Tensor:
    u, h = m.v * 2, x @ m.w
    with torch.no_grad():
        a, b, c = u.to(u.dtype), m.w.contiguous(), +h
    return x * a + x @ b + c


def of_inference(m: Model, x: Tensor) -> Tensor:
    u = m.w * 2
    with torch.inference_mode():
        s = u.sum()
    return x @ u + s


def power_by_name(m: Model, x: Tensor) -> Tensor:
    h = (x @ m.w).abs() + 1
    h.pow_(exponent=m.v)
    return h


def weight_written_by_leaky_relu(m: Model, x: Tensor) -> Tensor:
    u = m.w.t()
    with torch.no_grad():
        F.leaky_relu(m.w, 1.0, inplace=True)
    return x @ u


def weight_written_through_detach(m: Model, x: Tensor) -> Tensor:
    u = m.w.t()
    m.w.detach().clamp_(-9, 9)
    return x @ u


def weight_written_in_a_list(m: Model, x: Tensor) -> Tensor:
    u = torch.transpose(input=m.w, dim0=0, dim1=1)
    with torch.no_grad():
        torch._foreach_clamp_max_([m.w], 9)
    return x @ u


MEMORY = [
    *(views_before_no_grad, views_around_no_grad, views_of_other_numbers, shape_behind_detach),
    *(view_read_without_gradients_first, transpose_read_without_gradients_first, detached_before_a_write),
    *(names_without_gradients, of_inference, power_by_name),
    *(weight_written_by_leaky_relu, weight_written_through_detach, weight_written_in_a_list),
]


@pytest.mark.parametrize("size", [5, 1])
@pytest.mark.parametrize("body", MEMORY)
def test_memory(body: Body, size: int) -> None:
    check(body, 4, size=size)


@pytest.mark.parametrize(
    ("body", "backend"),
    long_but(
        lambda body, backend: backend == "aot_eager" or body is views_before_no_grad,
        itertools.product(
            (views_before_no_grad, detached_before_a_write, power_by_name, weight_written_through_detach),
            ("aot_eager", "inductor"),
        ),
    ),
)
def test_compiled(body: Body, backend: str) -> None:
    check(body, 4, size=5, backend=backend)


def hook_past_a_view(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    a = h[:, :2]
    h.mul_(m.v)
    h.register_hook(clamped)
    return h * h + F.pad(a, (0, 2))


def writes(write: Callable[[Tensor], object], m: Model, x: Tensor) -> Tensor:
    def hook(g: Tensor) -> None:
        write(g)

    h = x @ m.w
    h.register_hook(hook)
    return h * h


class WritesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 1

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g.mul_(2)


def function_that_writes(m: Model, x: Tensor) -> Tensor:
    h = x @ m.w
    y: Tensor = WritesItsGradient.apply(h)
    return y + h


def turned_without_gradients(m: Model, x: Tensor) -> Tensor:
    u = m.w * 2
    with torch.no_grad():
        u.t_()
    return x @ u


def conjugate_of_a_written_value(m: Model, x: Tensor) -> Tensor:
    u = torch.complex(m.v, m.v * 2)
    a = u.conj()
    u.mul_(2)
    return x * (u * a).real


WRITES_OVER = "a hook .* writes over the gradient that it gets"


@needs_hooks
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (hook_past_a_view, r"a hook \(register_hook\) on a value that is written over in place"),
        (lambda m, x: writes(lambda g: g.mul_(2), m, x), WRITES_OVER),
        (lambda m, x: writes(lambda g: g[:, 0].zero_(), m, x), WRITES_OVER),
        (lambda m, x: writes(lambda g: F.relu(g, inplace=True), m, x), WRITES_OVER),
        (lambda m, x: writes(lambda g: m.k.add_(1), m, x), "or over a value from outside of it"),
        (function_that_writes, "an autograd.Function's backward writes over a gradient that it gets"),
        (turned_without_gradients, "t_ changes the shape of a value without its gradient's, under torch.no_grad"),
        (conjugate_of_a_written_value, "seen through a view of other numbers"),
    ],
)
def test_what_is_refused(body: Body, text: str) -> None:
    with pytest.raises(UnsupportedOp, match=text) as caught:
        fxgrad.transform(Model(body).double(), backend="eager")(torch.randn(5, 4, dtype=torch.double))
    assert "test_one_tensor.py" in caught.value.where
    assert caught.value.advice
