"""Ops over matrices, over dims that they name, and over complex values: right for every layout, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxgrad import transform
from fxgrad.errors import BatchSizeError, MixedSamples
from fxgrad.ops.families import family_of
from fxgrad.ops.worked_dims import OVER_LAST, OVER_NAMED
from fxgrad.samples.tracking import HANDLERS
from fxgrad.testing import assert_per_sample_grads

Function = Callable[[Tensor, Tensor], Any]


class Model(nn.Module):
    """f(x, w), with x [.., 4, 4] far from singular."""

    def __init__(self, f: Function, *size: int) -> None:
        super().__init__()
        self.f = f
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(0.3 * torch.randn(size or (4, 4), generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.f(x, self.w)


def batch(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


EYE = 3 * torch.eye(4, dtype=torch.float64)

RIGHT: dict[str, Function] = {
    "inv": lambda x, w: torch.linalg.inv(x * w + EYE),
    "a parameter's own inverse": lambda x, w: x @ torch.linalg.inv(w + EYE),
    "solve with a parameter": lambda x, w: torch.linalg.solve(w + EYE, x),
    "solve with vectors": lambda x, w: torch.linalg.solve(x * w + EYE, x[..., 0]),
    "one matrix, many right sides": lambda x, w: torch.linalg.solve(w + EYE, x, left=False),
    "positions merged with samples": lambda x, w: torch.linalg.det((x * w + EYE).reshape(-1, 4, 4)).reshape(-1, 2, 3),
    "samples behind": lambda x, w: torch.linalg.eigvalsh((x * w + EYE).movedim(0, 2)).movedim(2, 0),
    "svd": lambda x, w: torch.linalg.svd(x * w + EYE)[1],
    "cholesky": lambda x, w: torch.linalg.cholesky((y := x * w) @ y.mT + EYE),
    "fft over the last dim": lambda x, w: torch.fft.rfft(x * w).abs(),
    "fft over others than the samples": lambda x, w: torch.fft.fftn(x * w, dim=(1, 3)),
    "a filter": lambda x, w: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w), n=4),
    "complex weights": lambda x, w: torch.fft.fft(x) @ torch.complex(w, w.sin()),
    "complex einsum": lambda x, w: torch.einsum("...i,ij->...j", torch.fft.fft(x), torch.polar(w, w.cos())),
    "a cast to complex": lambda x, w: torch.fft.fft(x) @ w.exp().to(torch.complex128),
    "norms along samples": lambda x, w: torch.renorm(x * w, 2, 0, 0.5),
    "distances": lambda x, w: F.pairwise_distance(x, w),
    "two outputs, one of a parameter": lambda x, w: torch.broadcast_tensors(w, x),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    x = batch(5, 2, 3, 4, 4).requires_grad_()
    assert_per_sample_grads(Model(RIGHT[name]), x, backend="eager")


REFUSED: dict[str, Function] = {
    "matrices of samples": lambda x, w: torch.linalg.pinv(x * w),
    "fft over all dims": lambda x, w: torch.fft.fftn(x * w),
    "fft over the samples": lambda x, w: torch.fft.fft(x * w, dim=0),
    "shifted samples": lambda x, w: torch.fft.fftshift(x * w),
    "norms over samples": lambda x, w: torch.renorm(x * w, 2, 1, 0.5),
    "distances of one vector of samples": lambda x, w: F.pairwise_distance((x * w).T, x.T),
    "into the first sample": lambda x, w: (x * 1).scatter_add(1, torch.arange(4)[None], w[None]),
    "into the first sample in place": lambda x, w: (x * 1).scatter_(1, torch.arange(4)[None], w[None]),
    "a place on the dim of the samples": lambda x, w: torch.select_scatter(x * w, w.sum(0), 0, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(MixedSamples, match=r"along the sample dimension|to the first samples|cannot be followed"):
        transform(Model(REFUSED[name], 4), backend="eager")(batch(5, 4))


SUMS: dict[str, Function] = {
    "dot": lambda x, w: torch.dot(x @ w, x[:, 0].sin()),
    "vdot": lambda x, w: torch.vdot(x[:, 0].sin(), x @ w),
    "matmul": lambda x, w: ((x @ w) @ x).sum(),
    "einsum": lambda x, w: torch.einsum("n,ni->", x @ w, x),
}


@pytest.mark.parametrize("name", SUMS)
def test_products_summed_over_samples(name: str) -> None:
    """Σ_n a_n b_n is a loss: linear in what each sample gives, it may be returned and scaled."""
    assert_per_sample_grads(Model(SUMS[name], 4), batch(5, 4), backend="eager")


def test_product_summed_over_samples_then_bent() -> None:
    with pytest.raises(MixedSamples, match=r"exp lets samples influence each other: .* may only be summed"):
        transform(Model(lambda x, w: torch.dot(x @ w, x[:, 0]).exp(), 4), backend="eager")(batch(5, 4))


LOSSES: dict[str, Function] = {
    "mse_loss": lambda x, w: F.mse_loss(w.expand_as(x), x, reduction="sum"),
    "smooth_l1_loss": lambda x, w: F.smooth_l1_loss(x, w.expand_as(x), reduction="sum"),
    "kl_div": lambda x, w: F.kl_div(w.expand_as(x), x.sigmoid(), reduction="sum"),
    "none": lambda x, w: F.triplet_margin_loss(x * w, x.sin(), x.cos(), reduction="none"),
    "cosine": lambda x, w: F.cosine_embedding_loss(x * w, x.sin(), x[:, 0].sign(), reduction="none"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_a_parameter_itself(name: str) -> None:
    assert_per_sample_grads(Model(LOSSES[name], 4), batch(5, 4), backend="eager")


OVER_CLASSES: dict[str, Function] = {
    "samples as classes": lambda x, w: F.cross_entropy((x * w).T, torch.zeros(4, dtype=torch.int64), reduction="sum"),
    "one row of scores": lambda x, w: F.cross_entropy(x @ w, torch.tensor(1)),
    "probabilities": lambda x, w: F.cross_entropy((x * w).T, x.T.softmax(0)),
    "samples as features": lambda x, w: F.triplet_margin_loss((x * w).T, x.T, x.T.sin()),
    "another order": lambda x, w: F.mse_loss((x * w).reshape(-1), x.T.reshape(-1)),
}


@pytest.mark.parametrize("name", OVER_CLASSES)
def test_reduced_losses_that_compare_samples(name: str) -> None:
    """The sum over samples is the loss of rows; one row of all samples is none."""
    fixed = name == "probabilities" and torch.__version__ < "2.13"  # by PyTorch's own shape rule
    said = "fixes the batch size" if fixed else r"works along the sample dimension|hold the samples in different places"
    with pytest.raises(BatchSizeError if fixed else MixedSamples, match=said):
        transform(Model(OVER_CLASSES[name], 4), backend="eager")(batch(5, 4))


def test_kernels_of_samples() -> None:
    """A convolution of one image, a parameter, with a kernel of each sample."""
    model = Model(lambda x, w: F.conv1d(w[None], x).movedim(1, 0), 3, 7)
    assert_per_sample_grads(model, batch(5, 3, 2), backend="eager")
    with pytest.raises(MixedSamples, match="its weight holds samples"):
        transform(Model(lambda x, w: F.conv1d(w[None], x, groups=3), 3, 7), backend="eager")(batch(6, 1, 2))


def test_every_op_has_a_family_and_its_handler() -> None:
    for op in (*OVER_LAST, *OVER_NAMED):
        family = family_of(op)
        assert family is not None and family in HANDLERS, op
