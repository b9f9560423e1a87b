"""Losses that keep samples apart, where the usual ones divide by a number that the whole batch decides."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fxgrad.errors import OptionError


def token_mean(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Compute each sample's mean cross entropy over its own tokens.

    ``cross_entropy(.., reduction="mean")`` divides by the number of tokens in the batch, so one sample's length scales
    the others' gradients, and `fxgrad.ClippedGrad` refuses it.

    Args:
        logits: ``[B, T, classes]``.
        labels: ``[B, T]``, class numbers. They are taken as they are: a language model shifts them first.
        ignore_index: tokens with this label do not count.

    Returns:
        The losses ``[B]`` in the logits' dtype, in nats; 0 for a sample without tokens.

    Raises:
        OptionError: the shapes do not fit.

    Source: `torch.nn.functional.cross_entropy`, its mean taken per sample.

    >>> import torch
    >>> labels = torch.tensor([[1, 2, -100], [0, -100, -100], [-100, -100, -100]])
    >>> token_mean(torch.zeros(3, 3, 4), labels)
    tensor([1.3863, 1.3863, 0.0000])
    """
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise OptionError(
            f"logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)} do not fit",
            advice="token_mean takes logits [B, T, classes] and labels [B, T].",
        )
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=ignore_index)
    return each.sum(1) / (labels != ignore_index).sum(1).clamp(min=1)
