"""``h.requires_grad_()`` inside of a model: followed where it changes no parameter's gradient, and refused elsewhere.

transformers does so behind frozen embeddings, for checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.errors import GraphBreak, MixedSamples
from fxgrad.host.versions import at_least
from fxgrad.testing import assert_per_sample_grads


class Model(nn.Module):
    """A frozen layer ``e``, and two others, of which a program takes one."""

    def __init__(self, program: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.a, self.b = (nn.Linear(3, 3) for _ in range(3))
        self.e.requires_grad_(False)
        self.program, self.total = program, nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)

    def either(self, h: Tensor, asked: Tensor | None = None) -> Tensor:
        layer = self.a if (h if asked is None else asked).requires_grad else self.b
        return torch.sin(layer(h))


def called(m: Any, x: Tensor) -> Tensor:
    return m.either(m.e(x).requires_grad_())


def by_assignment(m: Any, x: Tensor) -> Tensor:
    h, bias = m.e(x), torch.zeros(1, 3, dtype=x.dtype)
    h.requires_grad = bias.requires_grad = True
    return m.either(h + bias)


def set_and_unset(m: Any, x: Tensor) -> Tensor:
    h = m.e(x).requires_grad_(True)
    k = h + 1
    return m.either(h.requires_grad_(False)) + m.either(k) + m.b(x.requires_grad_(False))


def later_names(m: Any, x: Tensor) -> Tensor:
    h = m.e(x).requires_grad_()
    return m.either(h.contiguous()) + m.either(h, F.dropout(h, 0.0, False))


def hooked(m: Any, x: Tensor) -> Tensor:
    h = m.e(x).requires_grad_()
    k = h * 2
    h.register_hook(lambda g: g * 2)
    k.register_hook(lambda g: g * 2)
    return m.either(k)


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x).requires_grad_()
    return m.either(h + m.b(x).detach().requires_grad_())


def before_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    h: Tensor = checkpoint(m.either, m.e(x).requires_grad_(), use_reentrant=False)
    return h


def inside_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    h: Tensor = checkpoint(lambda x: m.either(m.e(x).requires_grad_()), m.a(x), use_reentrant=False)
    return h


def into_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    h = m.e(x)
    y: Tensor = checkpoint(lambda h: m.either(h.requires_grad_()), h, use_reentrant=False)
    return y + m.either(h)


def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    """Dynamo's own record of a tensor's flag does not see the write."""
    h, z = torch.zeros_like(x), m.e(x).requires_grad_()
    h[:, :2].add_(z[:, :2])
    return m.either(h)


def written_through_a_view_by_a_layer(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, :2].add_(m.a(x)[:, :2])
    return m.either(h)


def of_no_effect(m: Any, x: Tensor) -> Tensor:
    h = F.dropout(m.e(x), 0.5, False)
    return m.either(h.requires_grad_(False)) + m.a(x).requires_grad_(True).sin()


FOLLOWED = [
    called,
    by_assignment,
    set_and_unset,
    later_names,
    hooked,
    without_gradients,
    before_a_checkpoint,
    inside_a_checkpoint,
    into_a_checkpoint,
    written_through_a_view,
    written_through_a_view_by_a_layer,
    of_no_effect,
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # hooks, before torch 2.13
@pytest.mark.parametrize("size", [4, 1, 3])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", FOLLOWED)
def test_followed(program: Any, backend: str, size: int) -> None:
    x = torch.randn(size, 3, dtype=torch.float64)
    assert_per_sample_grads(Model(program).double(), x, backend=backend)


# Behind a graph break the tensor itself is asked, so that Dynamo has to run the call


def asked_behind_a_break(m: Any, x: Tensor) -> Tensor:
    h = m.e(x).requires_grad_()
    torch._dynamo.graph_break()
    return m.either(h)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def outside(h: Tensor) -> float:
    return 1.0 if h.requires_grad else 0.0


def asked_outside(m: Any, x: Tensor) -> Tensor:
    h = m.e(x).requires_grad_()
    return torch.sin(m.a(h * outside(h)))


def hooked_behind_a_break(m: Any, x: Tensor) -> Tensor:
    h = m.e(x).requires_grad_()
    torch._dynamo.graph_break()
    h.register_hook(lambda g: g * 2)
    return m.either(h)


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("program", [asked_behind_a_break, asked_outside, hooked_behind_a_break])
def test_behind_a_graph_break(program: Any, size: int) -> None:
    x = torch.randn(size, 3, dtype=torch.float64)
    assert_per_sample_grads(Model(program).double(), x, backend="eager", options={"fullgraph": False})


# What requires a gradient by other names, or outside of the graph


def second_name(of: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.e(x)
        of(h).requires_grad_()
        return m.either(h)

    return program


def into_another(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    torch.mul(m.e(x), 2, out=h).requires_grad_()
    return m.either(h)


def dropped_before(m: Any, x: Tensor) -> Tensor:
    h = m.e(x)
    k = F.dropout(h, 0.5, False)
    h.requires_grad_()
    return m.either(h, k)


def dropped_in_between(m: Any, x: Tensor) -> Tensor:
    h = m.e(x).requires_grad_()
    k = F.dropout(h, 0.5, False)
    h.requires_grad_(False)
    return m.either(h, k)


def out_of_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    h = m.e(x)
    k = checkpoint(lambda h: F.dropout(h, 0.5, False), h, use_reentrant=False)
    k.requires_grad_()
    return m.either(h)


def dropped_in_a_checkpoint_before(m: Any, x: Tensor) -> Tensor:
    h = m.e(x)
    k = checkpoint(lambda h: F.dropout(h, 0.5, False), h, use_reentrant=False)
    h.requires_grad_()
    return m.either(h, k)


NAMED_TWICE = {
    "float": second_name(lambda h: h.float()),
    "contiguous": second_name(lambda h: h.contiguous()),
    "to": second_name(lambda h: h.to(h.dtype)),
    "dropout": second_name(lambda h: F.dropout(h, 0.0, False)),
    "mul_": second_name(lambda h: h.mul_(2)),
    "out": into_another,
    "dropped before": dropped_before,
    "dropped in between": dropped_in_between,
    "out of a checkpoint": out_of_a_checkpoint,
    "dropped in a checkpoint before": dropped_in_a_checkpoint_before,
}


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("program", NAMED_TWICE.values(), ids=NAMED_TWICE)
def test_a_tensor_with_another_name_is_refused(program: Any, size: int) -> None:
    with pytest.raises(GraphBreak, match=r"has another name|returning intermediate with|sets requires_grad") as caught:
        fxgrad.transform(Model(program), backend="eager")(torch.randn(size, 3))
    assert caught.value.advice


def kept(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "h"):
        m.h = m.e(x).requires_grad_()
    return m.either(x, m.h)


def written_to_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.total.copy_(m.e(x).requires_grad_().sum(0))
    return m.a(x)


LEAVING: dict[str, Callable[[Any, Tensor], Any]] = {
    "returned": lambda m, x: (h := m.e(x).requires_grad_(), m.a(h)),
    "made of it": lambda m, x: (h := m.e(x).requires_grad_(), m.a(h), h * 2)[1:],
    "kept": kept,
    "written to a buffer": written_to_a_buffer,
    "of a checkpoint": lambda m, x: checkpoint(
        lambda x: (h := m.e(x).requires_grad_(), m.a(h)), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("program", LEAVING.values(), ids=LEAVING)
def test_what_leaves_the_model_is_refused(program: Any, size: int) -> None:
    with pytest.raises(
        GraphBreak, match="returns or keeps a value that requires a gradient by requires_grad_"
    ) as caught:
        fxgrad.transform(Model(program), backend="eager")(torch.randn(size, 3))
    assert "h.detach()" in caught.value.advice and "test_leaves.py" in caught.value.where


def test_what_leaves_it_detached_or_with_a_parameter() -> None:
    def program(m: Any, x: Tensor) -> Any:
        h = m.e(x).requires_grad_()
        return m.a(h), h.detach(), h + m.b(x), h.argmax(-1)

    x = torch.randn(4, 3, dtype=torch.float64)
    assert_per_sample_grads(
        Model(program).double(), x, backend="eager", loss_fn=lambda out: out[0].sum() + out[2].sum()
    )


def test_a_flag_that_depends_on_the_batch() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.e(x)
        h.requires_grad = len(x) > 1
        return m.either(h)

    with pytest.raises(GraphBreak, match="forward sets requires_grad of a tensor"):
        fxgrad.transform(Model(program), backend="eager")(torch.randn(4, 3))
    x = torch.randn(1, 3, dtype=torch.float64)
    assert_per_sample_grads(Model(program).double(), x, backend="eager")


@pytest.mark.skipif(not at_least("2.13"), reason="Dynamo makes an autograd.Function of the hook, which runs")
def test_a_hook_where_nothing_requires_a_gradient_is_the_models_own_error() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.e(x)
        h.register_hook(lambda g: g * 2)
        return m.a(h)

    with pytest.raises(RuntimeError, match="cannot register a hook on a tensor that doesn't require gradient"):
        fxgrad.transform(Model(program), backend="eager")(torch.randn(1, 3))


def test_no_samples_are_mixed() -> None:
    model = Model(lambda m, x: m.a((x - x.mean(0)).requires_grad_()))
    with pytest.raises(MixedSamples, match="linear lets samples influence each other"):
        fxgrad.transform(model, backend="eager")(torch.randn(4, 3))
