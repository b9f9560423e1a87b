"""`fxgrad.delivered`: what a backward set on a parameter, with its type."""

from __future__ import annotations

from torch import Tensor

from fxgrad.errors import OptionError


def delivered(p: Tensor, name: str = "grad_sample") -> Tensor:
    """Return what the last backward of a transformed model set on a parameter.

    This is ``p.grad_sample``, for programs that a type checker reads: PyTorch's Parameter declares no such attribute.
    It is never None.

    Args:
        p: a parameter of the transformed model.
        name: the attribute: ``grad_sample``, ``norm_sample``, ``squared_grad_sum``, ``grad_variance``, or one of a
            quantity of your own.

    Returns:
        The tensor, such as ``[B, *p.shape]`` for ``grad_sample``.

    Raises:
        OptionError: there is none: no backward has run since zero_grad(), or the model is transformed for another
            quantity; or it is a list, by ``accumulate="append"``.

    >>> import torch, fxgrad
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2), backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> [tuple(fxgrad.delivered(p).shape) for p in model.parameters()]
    [(5, 2, 3), (5, 2)]
    """
    value = getattr(p, name, None)
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list):
        raise OptionError(
            f"{name} of the parameter is a list of {len(value)} tensors, not one",
            advice='Read the attribute itself, or leave accumulate="append" out.',
        )
    raise OptionError(
        f"nothing has set {name} of the parameter, of shape {list(p.shape)}",
        advice="Call it behind the backward and before zero_grad(), with a parameter of a model that is transformed "
        "for a quantity which delivers it.",
    )
