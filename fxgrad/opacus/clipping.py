"""The quantity that clips in the backward, for each of make_private's ways of clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers.utils import params
from torch import Tensor, nn, optim

from fxgrad.errors import OptionError
from fxgrad.opacus.ledger import numbers_of
from fxgrad.quantities import ClippedGrad, GradSample, Quantity


def quantity_for(
    clipping: Any, max_grad_norm: Any, one_backward: bool, model: nn.Module, optimizer: optim.Optimizer
) -> Quantity:
    """Return what the backward has to compute.

    C is a tensor on the CPU, so that schedules and adaptive clipping write to it and compile nothing. Opacus's list of
    "per_layer" follows the optimizer's parameters.
    """
    if not one_backward:
        return GradSample()
    bounds = max_grad_norm
    if not isinstance(bounds, Tensor):
        several = isinstance(bounds, Sequence)
        bounds = torch.tensor([*map(float, bounds)] if several else float(bounds), dtype=torch.float64)
    if clipping == "per_layer":
        return ClippedGrad(bounds, groups=[[name] for name in _names(model, optimizer)])
    if clipping == "automatic" or callable(clipping):
        return ClippedGrad(bounds, weights=clipping, bounded=callable(clipping))
    return ClippedGrad(bounds)


def check_optimizer(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Raise unless all parameters of the optimizer are the model's: a changed model may have others."""
    own = set(map(id, model.parameters()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise OptionError(
                    f"a parameter of the optimizer, of shape {list(parameter.shape)}, is not the model's",
                    advice="Make the optimizer after everything that replaces parameters, such as a validator's fix: "
                    "SGD(model.parameters(), lr=..). Or pass fix=True and the model as it was.",
                )


def _names(model: nn.Module, optimizer: optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's trainable parameters, in its order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in params(optimizer)]


def serves(quantity: Quantity, wanted: Quantity, parameters: Mapping[str, Tensor]) -> bool:
    """Decide whether a quantity of a transformed model serves for clipping in place of the wanted one.

    Rows grouped into one sample are several samples for Opacus.

    Args:
        quantity: one of the transformed model's.
        wanted: what make_private would have transformed it for.
        parameters: the model's, by name.
    """
    if quantity.group_size != 1:
        return False
    if isinstance(quantity, ClippedGrad) and isinstance(wanted, ClippedGrad):
        alike = _weighs_alike(quantity, wanted) and _groups_alike(quantity, wanted, parameters)
        return alike and _bounds_serve(quantity.max_grad_norm, wanted.max_grad_norm)
    return type(quantity) is type(wanted)


def _weighs_alike(quantity: ClippedGrad, wanted: ClippedGrad) -> bool:
    """Weights of "automatic" are below those of "clip"; a user's function may return any, unless it is bounded."""
    if quantity.sample_weight or quantity.outside != "error":
        return False
    if wanted.weights == "clip":
        return quantity.weights in ("clip", "automatic")
    return quantity.weights == wanted.weights and (quantity.bounded or not callable(wanted.weights))


def _groups_alike(quantity: ClippedGrad, wanted: ClippedGrad, parameters: Mapping[str, Tensor]) -> bool:
    groups: Any = quantity.groups
    if groups == "per_parameter":
        groups = [[name] for name, parameter in parameters.items() if parameter.requires_grad]
    return groups == wanted.groups or (
        not isinstance(groups, str)
        and not isinstance(wanted.groups, str)
        and [list(group) for group in groups] == [list(group) for group in wanted.groups]
    )


def _bounds_serve(own: Any, wanted: Any) -> bool:
    """A tensor of the same size can be written to, if the optimizer can read it without waiting for a device."""
    if isinstance(own, Tensor):
        return own.numel() == wanted.numel() and own.device.type == "cpu"
    return numbers_of(own) == numbers_of(wanted)


def check_written(quantity: Quantity, clipping: Any, max_grad_norm: Any) -> None:
    """Raise if C of a model that was transformed before is not what will be written to."""
    if not isinstance(quantity, ClippedGrad):
        return
    own = quantity.max_grad_norm
    if clipping == "adaptive" and not isinstance(own, Tensor):
        raise OptionError(
            f"clipping='adaptive' changes C, and the model is transformed for the number {own}",
            advice="Transform it with max_grad_norm=torch.tensor(C), or give make_private the model itself.",
        )
    if isinstance(max_grad_norm, Tensor) and own is not max_grad_norm:
        raise OptionError(
            "max_grad_norm is a tensor, and the model is transformed for another one: writes to it would do nothing",
            advice="Transform the model with this tensor, or give make_private the model itself.",
        )


def set_bounds(quantity: Quantity, max_grad_norm: Any) -> None:
    """Write make_private's max_grad_norm into the tensor of a model that was transformed before."""
    own = quantity.max_grad_norm if isinstance(quantity, ClippedGrad) else None
    if isinstance(own, Tensor) and own is not max_grad_norm:
        with torch.no_grad():
            own.copy_(torch.tensor(max_grad_norm, dtype=torch.float64).reshape(own.shape))
