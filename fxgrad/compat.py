"""The interface of PyTorch's private `torch.nn.utils._per_sample_grad`, compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fxgrad.api import transform
from fxgrad.capture.options import Inner
from fxgrad.errors import AlreadySet, BatchSizeError, OptionError, names_checked
from fxgrad.host import pytree
from fxgrad.samples.batch import tensors_in

_BATCH_SIZE = "Pass the number of samples, or leave batch_size out: it is then read from the inputs."
_VIEWS = "_fxgrad_views"  # on a module: its transformed views, by the arguments they were made with


class _Views(dict[Any, Any]):
    """Belongs to one module object: neither copied nor pickled with it."""

    def __deepcopy__(self, memo: Any) -> dict[Any, Any]:
        return {}

    def __reduce__(self) -> Any:
        return dict, ()


@names_checked
def call_for_per_sample_grads(
    module: nn.Module,
    *,
    batch_size: int | None = None,
    loss_reduction: str = "sum",
    batch_first: bool = True,
    backend: str | Inner = "inductor",
) -> Callable[..., Any]:
    """Return a function that calls ``module`` so that the backward fills ``grad_sample``, ``[B, *p.shape]``.

    The signature, defaults, checks and errors are those of
    ``torch.nn.utils._per_sample_grad.call_for_per_sample_grads``, for any model that `fxgrad.transform` takes. The
    compiled graph is kept on the module: call this in every step, as one does with PyTorch's. Several calls, and
    several backwards, add up until ``grad_sample`` is cleared, which has to be done before the next
    ``call_for_per_sample_grads``.

    Args:
        module: its trainable parameters get ``grad_sample``.
        batch_size: the number of samples; taken from the tensors in the arguments where None.
        loss_reduction: "sum", or "mean" where the loss is a mean over samples (multiplies by B).
        batch_first: whether samples are on dimension 0 of the inputs (else 1).
        backend: as in `fxgrad.transform`.

    Returns:
        A function with the signature of ``module.forward``.

    Raises:
        OptionError, AlreadySet: here, as PyTorch does.
        BatchSizeError: in the call, where the arguments disagree about the batch size or hold no tensor.

    Source: ``torch.nn.utils._per_sample_grad`` (PyTorch, private).

    >>> model = nn.Linear(4, 3)
    >>> import torch
    >>> call_for_per_sample_grads(model, backend="eager")(torch.randn(5, 4)).sum().backward()
    >>> tuple(model.weight.grad_sample.shape), model.weight.grad
    ((5, 3, 4), None)
    """
    _check(module, batch_size, loss_reduction)
    views = module.__dict__.get(_VIEWS)
    if not isinstance(views, _Views) or views.get("of") is not module:
        views = module.__dict__[_VIEWS] = _Views(of=module)
    key = (batch_size, loss_reduction, batch_first, backend)
    if key not in views:
        views[key] = transform(
            module,
            batch_size=batch_size,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
            accumulate="sum",
            backend=backend,
        )
    view = views[key]

    @functools.wraps(module.forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if batch_size is None:
            _check_batch(args, kwargs, batch_first)
        return view(*args, **kwargs)

    return wrapper


def _check(module: Any, batch_size: Any, loss_reduction: Any) -> None:
    if loss_reduction not in ("sum", "mean"):
        raise OptionError(
            f"Expected loss_reduction argument to be sum or mean, got {loss_reduction}",
            advice="Pass the reduction of the loss that you call backward on.",
        )
    if not isinstance(module, nn.Module):
        raise OptionError(
            f"Module passed must be nn.Module, got {type(module).__name__}",
            advice="Pass the module here, and its inputs to the returned function.",
        )
    if not (batch_size is None or isinstance(batch_size, int)):
        raise OptionError(
            f"Batch size passed must be None or an integer, got {type(batch_size).__name__}", advice=_BATCH_SIZE
        )
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"Batch size must be positive, got {batch_size}", advice=_BATCH_SIZE)
    for name, parameter in module.named_parameters():
        if getattr(parameter, "grad_sample", None) is not None:
            raise AlreadySet(
                "Current Expanded Weights accumulates the gradients, which will be incorrect for multiple calls "
                f"without clearing gradients: grad_sample of '{name}' is set",
                advice="Set grad_sample to None (fxgrad.zero_grad) before the next call_for_per_sample_grads.",
            )


def _check_batch(args: tuple[Any, ...], kwargs: dict[str, Any], batch_first: bool) -> None:
    """PyTorch's own sentences where the arguments say nothing of the batch size, or two things."""
    leaves = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
    sizes = [leaf.shape[0 if batch_first else 1] for leaf in leaves if leaf.dim() > (not batch_first)]
    for size in sizes:
        if size != sizes[0]:
            raise BatchSizeError(
                f"When computing batch size, found at least one input with batch size {sizes[0]} and one with batch "
                f"size {size}. Please specify it explicitly using the batch size kwarg in call_for_per_sample_grads",
                advice="Pass batch_size=. All samples then share the inputs of another size.",
            )
    if not sizes and not tensors_in((args, kwargs)):
        raise BatchSizeError(
            "Unable to find a tensor in the passed args and kwargs. They may not be pytree-able, so the batch size "
            "cannot be computed from the inputs. Please specify it explicitly",
            advice="Pass batch_size=, or inputs that are tensors in lists, tuples or dicts.",
        )
