"""The loss that Opacus's mode "ghost" returns, as a plain tensor: with fxgrad one backward is enough."""

from __future__ import annotations

from typing import Any

from opacus.optimizers import DPOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from fxgrad.errors import OptionError


class Criterion(DPLossFastGradientClipping):  # type: ignore[misc]
    """A loss with Opacus's arguments, returned by `PrivacyEngine.make_private` for ``grad_sample_mode="ghost"``.

    Opacus returns an object whose ``backward()`` runs twice, with the losses weighted in between. Here the result is
    the mean or the sum of the samples' losses, a tensor.

    Args:
        module, optimizer: what make_private returns.
        criterion: the loss; nn.CrossEntropyLoss if None. Without an attribute ``reduction``, it is called as it is.
        loss_reduction: "mean" or "sum".

    >>> import torch
    >>> criterion = Criterion(nn.Linear(3, 2), None, nn.CrossEntropyLoss(), "mean")
    >>> x, y = torch.zeros(4, 5, 2), torch.zeros(4, 5, dtype=torch.long)
    >>> criterion(x.flatten(0, 1), y.flatten(), shape=x.shape)  # a mean over samples of means over tokens
    tensor(0.6931)
    """

    def __init__(self, module: nn.Module, optimizer: DPOptimizer, criterion: Any, loss_reduction: str) -> None:
        self.module, self.optimizer, self.loss_reduction = module, optimizer, loss_reduction
        self.criterion = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> Tensor:
        """Return the loss of a batch.

        Args:
            args, kwargs: the criterion's.
            shape: ``[samples, tokens, ..]`` before the tokens were put together; each sample's loss is then the mean or
                sum over its tokens, without those of the criterion's ``ignore_index``.
        """
        reduction = getattr(self.criterion, "reduction", None)
        if reduction is not None:
            try:
                losses = super().__call__(*args, shape=shape, **kwargs).loss_per_sample
            finally:
                self.criterion.reduction = reduction
        elif shape is None:
            losses = self.criterion(*args, **kwargs)
        else:
            raise OptionError(
                "shape= needs a criterion with an attribute `reduction`, to get the loss of each token",
                advice="Pass a loss of torch.nn to make_private, such as nn.CrossEntropyLoss().",
            )
        loss: Tensor = losses.mean() if self.loss_reduction == "mean" else losses.sum()
        return loss
