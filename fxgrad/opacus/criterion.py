"""The loss that Opacus's mode "ghost" returns, as a plain tensor: with fxgrad one backward is enough."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from fxgrad.errors import OptionError


class Criterion(DPLossFastGradientClipping):  # type: ignore[misc]
    """A loss with Opacus's arguments, returned by `PrivacyEngine.make_private` for ``grad_sample_mode="ghost"``.

    Opacus returns an object whose ``backward()`` runs twice, with the losses weighted in between. Here the result is
    the mean or the sum of the samples' losses, a tensor.

    The mean divides by the number of samples, also for class weights and ignored targets. PyTorch divides by the sum of
    the weights, which depends on the other samples. nn.CTCLoss divides each sample's loss by its target's length.

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

        Raises:
            OptionError: the losses are not one for each token of ``shape``, or each sample; or ``ignore_index`` needs
                the targets, and they are neither the second argument nor ``target=``.
        """
        reduction = getattr(self.criterion, "reduction", None)
        if reduction is None and shape is not None:
            raise OptionError(
                "shape= needs a criterion with an attribute `reduction`, to get the loss of each token",
                advice="Pass a loss of torch.nn to make_private, such as nn.CrossEntropyLoss().",
            )
        losses = self.criterion(*args, **kwargs) if reduction is None else self._losses(reduction, args, kwargs)
        if shape is not None:
            losses = self._of_samples(losses, shape, args, kwargs)
        loss: Tensor = losses.mean() if self.loss_reduction == "mean" else losses.sum()
        return loss

    def _losses(self, reduction: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the losses that the criterion would reduce."""
        try:
            self.criterion.reduction = "none"
            losses: Tensor = self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = reduction
        if isinstance(self.criterion, nn.CTCLoss) and self.loss_reduction == "mean":
            lengths = torch.as_tensor(kwargs["target_lengths"] if "target_lengths" in kwargs else args[3])
            losses = losses / lengths.to(losses.device).clamp(min=1)
        return losses

    def _of_samples(self, losses: Tensor, shape: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the mean or the sum of each sample's tokens."""
        samples, tokens = map(int, (*shape, 1, 1)[:2])
        if tuple(losses.shape) == (samples,):
            return losses
        if tuple(losses.shape) not in ((samples * tokens,), (samples, tokens)):
            raise OptionError(
                f"shape={list(shape)} means {samples} samples of {tokens} tokens, and the criterion returned losses of "
                f"shape {list(losses.shape)}",
                advice="Pass shape=[samples, tokens, ..] of the outputs as they were before the tokens were put "
                "together. With more dimensions, put all tokens of a sample into the second one.",
            )
        sums: Tensor = losses.reshape(samples, tokens).sum(1)
        if self.loss_reduction == "sum":
            return sums
        ignored = getattr(self.criterion, "ignore_index", None)
        if ignored is None:
            return sums / tokens
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        if not isinstance(target, Tensor) or (target.shape != losses.shape and not target.is_floating_point()):
            raise OptionError(
                f"the mean leaves out targets of ignore_index={ignored}, and the criterion got no target for each loss",
                advice="Pass the targets as the second argument, or as target=.",
            )
        if target.is_floating_point():  # probabilities of classes, none of which is ignored
            return sums / tokens
        counts: Tensor = (target.reshape(samples, tokens) != ignored).sum(1)
        return sums / counts.clamp(min=1)
