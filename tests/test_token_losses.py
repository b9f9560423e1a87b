"""The number of tokens in the batch as a divisor: each sample's share, or refused where samples are clipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import MixedSamples, OptionError

B, T, CLASSES = 4, 5, 6


class Tagger(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, CLASSES)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids)), labels)


def flattened(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1))


def by_mask(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum() / (labels != -100).sum()


def by_clamped_mask(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum() / (labels >= 0).float().sum().clamp(min=1)


def by_number(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum() / (labels != -100).sum().item()


def by_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, torch.arange(1.0, CLASSES + 1))


LOSSES = [flattened, by_mask, by_clamped_mask, by_number, by_classes]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(CLASSES, (B, T))
    labels[0, 2:] = labels[2, :4] = -100
    return torch.randint(7, (B, T)), labels


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_are_each_samples_share(loss: Any) -> None:
    model, (ids, labels) = Tagger(loss), batch()
    total = loss(model.head(model.embed(ids)), labels)
    expected = torch.autograd.grad(total, list(model.parameters()))
    view = fxgrad.transform(model, backend="eager")
    view(ids, labels).backward()
    for parameter, whole in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad_sample.sum(0), whole)  # type: ignore[attr-defined]
    weight = torch.arange(1.0, CLASSES + 1) if loss is by_classes else torch.ones(CLASSES)
    tokens = weight[labels[labels >= 0]].sum()
    for i in range(B):
        own = F.cross_entropy(model.head(model.embed(ids[i])), labels[i], weight, reduction="sum") / tokens
        (row,) = torch.autograd.grad(own, model.head.weight)
        torch.testing.assert_close(model.head.weight.grad_sample[i], row)  # type: ignore[attr-defined]


@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(1.0), fxgrad.NormSample()], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_clipping_and_norms_refuse_it(loss: Any, quantity: Any) -> None:
    """A norm would change with the labels of other samples."""
    view = fxgrad.transform(Tagger(loss), quantity=quantity, backend="eager")
    with pytest.raises(MixedSamples, match="the number of tokens in the whole batch") as raised:
        view(*batch())
    assert "token_mean(logits, labels)" in str(raised.value) and "test_token_losses.py" in str(raised.value)


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.ClippedGrad(1e6), fxgrad.NormSample()], ids=str)
def test_token_mean(quantity: Any) -> None:
    """A mean of each sample's own tokens: the loop over single samples gives the same."""
    model, (ids, labels) = Tagger(fxgrad.losses.token_mean), batch()
    labels[3] = -100
    view = fxgrad.transform(model, quantity=quantity, backend="eager")
    view(ids, labels).sum().backward()
    rows = []
    for i in range(B):
        kept = labels[i] != -100
        own = F.cross_entropy(model.head(model.embed(ids[i][kept])), labels[i][kept]) if kept.any() else None
        rows.append(torch.zeros_like(model.head.weight))
        if own is not None:
            (rows[-1],) = torch.autograd.grad(own, model.head.weight)
    found = model.head.weight
    if isinstance(quantity, fxgrad.GradSample):
        torch.testing.assert_close(found.grad_sample, torch.stack(rows))  # type: ignore[attr-defined]
    elif isinstance(quantity, fxgrad.NormSample):
        torch.testing.assert_close(found.norm_sample, torch.stack(rows).flatten(1).norm(dim=1))  # type: ignore[attr-defined]
    else:
        torch.testing.assert_close(found.grad, torch.stack(rows).sum(0))


def test_token_mean_of_other_shapes() -> None:
    with pytest.raises(OptionError, match=r"logits of shape \[4, 6\] and labels of shape \[4\] do not fit"):
        fxgrad.losses.token_mean(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("quantity", [fxgrad.ClippedGrad(1.0), fxgrad.NormSample()], ids=str)
def test_returned_mixtures(quantity: Any) -> None:
    """A loss outside may do anything with them."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[0]
            return (torch.eye(n) - 1 / n) @ self.layer(x)

    with pytest.raises(MixedSamples, match=r"returns values of shape \[B, 2\] in which samples have met"):
        fxgrad.transform(Centred(), quantity=[fxgrad.GradSample(), quantity], backend="eager")(torch.randn(4, 3))
    fxgrad.transform(Centred(), backend="eager")(torch.randn(4, 3)).sum().backward()
