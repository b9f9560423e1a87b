"""mixing="allow": dL/dW(i) as defined, every sample with its own copy of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.testing import relative_error

Mix = Callable[[Tensor], Tensor]


class Mixing(nn.Module):
    """A linear map of every sample, what the samples do to each other, a scale."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.s = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x @ self.w) * self.s


def own_copies(model: Mixing, x: Tensor) -> dict[str, Tensor]:
    """The gradients by hand-made copies W(i), one for each sample."""
    w = model.w.detach().expand(len(x), 3, 4).clone().requires_grad_()
    s = model.s.detach().expand(len(x), 4).clone().requires_grad_()
    out = model.mix(torch.einsum("ni,nio->no", x, w)) * s
    out.sin().sum().backward()
    assert w.grad is not None and s.grad is not None
    return {"w": w.grad, "s": s.grad}


@pytest.mark.parametrize(
    "mix",
    [lambda h: h - h.mean(0), lambda h: h.softmax(0), lambda h: h.cumsum(0), lambda h: h / h.norm()],
    ids=["centred", "softmax", "cumsum", "normalised"],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_sample_has_its_own_copy(mix: Mix, backend: str) -> None:
    model, x = Mixing(mix), torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(fxgrad.errors.MixedSamples, match=r"(sub|softmax|cumsum|norm) lets samples influence"):
        fxgrad.transform(model, backend=backend)(x)
    fxgrad.transform(model, backend=backend, mixing="allow")(x).sin().sum().backward()
    found = {name: p.grad_sample for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert relative_error(found, own_copies(model, x)) <= 1e-10


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.Grad()], ids=str)
def test_batch_norm_in_training(quantity: fxgrad.Quantity, shape: tuple[int, ...], statistics: bool) -> None:
    kind = (nn.BatchNorm1d, nn.BatchNorm2d)[len(shape) == 4]
    model = nn.Sequential(kind(3, track_running_stats=statistics), nn.Tanh()).double()
    assert isinstance(model[0].weight, Tensor)
    nn.init.normal_(model[0].weight)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    expected = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    view = fxgrad.transform(model, quantity=quantity, mixing="allow", backend="eager")
    view(x).sin().sum().backward()
    for p, whole in zip(model.parameters(), expected, strict=True):
        found = p.grad if isinstance(quantity, fxgrad.Grad) else p.grad_sample.sum(0)  # type: ignore[attr-defined]
        torch.testing.assert_close(found, whole)


class Before(nn.Module):
    """Differences between samples, with a parameter before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.diff(x, prepend=self.w, dim=0)


def test_a_parameter_in_an_op_where_samples_meet_is_refused() -> None:
    """The generic rule calls the op on one sample alone, where it does something else."""
    with pytest.raises(fxgrad.errors.UncoveredParameter, match="diff brings a parameter into a value that"):
        fxgrad.transform(Before(), mixing="allow", backend="eager")(torch.randn(4, 3))


def test_explain_says_where_samples_meet() -> None:
    class Meets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * x.softmax(0))

    transformed = fxgrad.transform(Meets(), mixing="allow", backend="eager")
    (note,) = fxgrad.explain(transformed, torch.randn(4, 3)).notes
    assert note.startswith("softmax lets samples influence each other (test_mixing_allowed.py")
