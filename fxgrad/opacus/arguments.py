"""Checks of the arguments of `make_private`: their names, and values that would give no privacy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from opacus.accountants import IAccountant
from opacus.optimizers.utils import params
from torch import Tensor, optim

from fxgrad.api import transform
from fxgrad.errors import OptionError, UnknownArgument, nearest, refuse_choice

OPTIONAL = ("batch_first", "noise_generator", "rand_on_empty")
ADAPTIVE = (
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "max_clipbound",
    "min_clipbound",
    "unclipped_num_std",
)
GRADIENTS = ("grad_sample_mode", "wrap_model")
"""Arguments of Opacus that fxgrad sets itself: the computation of the gradients."""
OF_TRANSFORM = frozenset(inspect.signature(transform).parameters) - {"model"}
CLIPPINGS = ("flat", "per_layer", "adaptive")
"""Those of Opacus; in one backward also "automatic" and functions of the norms."""
MEANINGS = {
    "noise_multiplier": "It is the noise's standard deviation over max_grad_norm.",
    "max_grad_norm": "The noise's standard deviation is noise_multiplier times max_grad_norm.",
    "epsilon_tolerance": "It is how far below target_epsilon the result may stay.",
}


def check_names(function: Callable[..., Any], arguments: Mapping[str, Any], further: Sequence[str]) -> None:
    """Raise if a function that passes arguments on got an unknown one.

    Args:
        function: the function, with the keyword arguments of its signature.
        arguments: its further arguments.
        further: the names that are allowed for them.
    """
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY] + [*further]
    for name in arguments:
        if name in further:
            continue
        advice = nearest(name, known, f"It takes {', '.join(known)}.")
        if name in GRADIENTS:
            advice = (
                "Leave it out: fxgrad computes the gradients, in the backward with one_backward=True. "
                "fxgrad.opacus.PrivacyEngine takes Opacus's names of its modes."
            )
        elif name in OF_TRANSFORM:
            advice = (
                "It is an option of fxgrad.transform. Pass make_private the model that "
                f"fxgrad.transform(module, {name}=.., loss_reduction=..) returns; for one_backward=True also with "
                "quantity=fxgrad.ClippedGrad(max_grad_norm)."
            )
        elif name == "group_size":
            advice = (
                "Opacus's accountants count rows, not groups of rows. fxgrad.ClippedGrad(.., group_size=) clips groups "
                "without an accountant."
            )
        raise UnknownArgument(f"{function.__name__} got an unexpected argument '{name}'", advice=advice)


def names_of_accountant(accountant: IAccountant) -> list[str]:
    """Return the arguments of ``accountant.get_epsilon`` besides delta: ``alphas`` of RDP, ``eps_error`` of PRV."""
    parameters = inspect.signature(accountant.get_epsilon).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != "delta"]


def check_values(
    optimizer: optim.Optimizer,
    noise_multiplier: Any,
    max_grad_norm: Any,
    clipping: Any,
    one_backward: bool,
    arguments: Mapping[str, Any],
) -> None:
    """Raise if noise, bounds and clipping do not match, or bound nothing."""
    _check_clipping(clipping, one_backward)
    _check_takes_hooks(optimizer)
    _check_takes_one_gradient(optimizer)
    check_number("noise_multiplier", noise_multiplier, zero=True)
    _check_bounds(optimizer, max_grad_norm, clipping)
    _check_adaptive(noise_multiplier, clipping, arguments)
    if not arguments.get("batch_first", True):
        raise OptionError(
            "batch_first=False is not an argument of Opacus's mode for gradients that are computed elsewhere",
            advice="Pass a model that fxgrad.transform made with it (batch_first=False, or in_dims=), and let the "
            "loader's batches have their samples first.",
        )


def _check_clipping(clipping: Any, one_backward: bool) -> None:
    if not callable(clipping) and clipping not in (*CLIPPINGS, "automatic"):
        refuse_choice(
            "clipping",
            clipping,
            (*CLIPPINGS, "automatic"),
            "a function of the norms",
            "'flat' is DP-SGD's: one norm over all parameters.",
        )
    if not one_backward and clipping not in CLIPPINGS:
        raise OptionError(
            f"clipping={clipping!r} is computed in the backward: Opacus's optimizers do not have it",
            advice="Pass one_backward=True, or grad_sample_mode='ghost' to fxgrad.opacus.PrivacyEngine.",
        )


def _check_takes_hooks(optimizer: optim.Optimizer) -> None:
    """Raise for a wrapper of another library's: the hook of the private step would have no place."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        wrapped = isinstance(getattr(optimizer, "optimizer", None), optim.Optimizer)
        raise OptionError(
            f"the optimizer is of {type(optimizer)}, which takes no hooks (register_step_pre_hook): the last of them "
            "sees that a private step releases what was clipped, and nothing else",
            advice="Pass the one that it wraps, as in make_private(.., optimizer=optimizer.optimizer), and train with "
            "the one that make_private returns."
            if wrapped
            else "Pass an object of torch.optim.Optimizer.",
        ) from None


def _check_takes_one_gradient(optimizer: optim.Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise OptionError(
            f"{type(optimizer).__name__}.step() needs a closure: it evaluates the loss as often as it likes, and a "
            "private step has one gradient",
            advice="Use an optimizer that takes one gradient for each step, such as SGD or Adam.",
        )


def check_number(name: str, value: Any, *, zero: bool = False, infinite: bool = False) -> None:
    """Raise if a value is no number, negative or NaN; also for 0 and inf, unless ``zero`` or ``infinite``."""
    value = value.item() if is_scalar(value) else value
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and (float(value) > 0 or (zero and value == 0)) and (infinite or value != math.inf):
        return
    kind = ("0 or more" if zero else "positive") + ("" if infinite else " and finite")
    raise OptionError(
        f"{name} has to be a number, {kind}, not {value!r}",
        advice=MEANINGS.get(name, "Pass what Opacus's AdaClipDPOptimizer describes (Andrew et al. 2019)."),
    )


def is_scalar(value: Any) -> bool:
    """Decide whether a value is one number as a tensor that a step may read without waiting for a device."""
    return isinstance(value, Tensor) and not value.dim() and value.is_floating_point() and value.device.type == "cpu"


def _check_bounds(optimizer: optim.Optimizer, max_grad_norm: Any, clipping: Any) -> None:
    if isinstance(max_grad_norm, Tensor) and (not is_scalar(max_grad_norm) or max_grad_norm.requires_grad):
        raise OptionError(
            f"max_grad_norm is a tensor of shape {list(max_grad_norm.shape)} and {max_grad_norm.dtype} on "
            f"{max_grad_norm.device}: it has to be 0-dim and of floating point, on the CPU, without requires_grad",
            advice="Pass torch.tensor(1.0), and write to it between steps.",
        )
    several = isinstance(max_grad_norm, Sequence) and not isinstance(max_grad_norm, str)
    bounds = max_grad_norm if several else [max_grad_norm]
    count = len(params(optimizer))
    if clipping == "per_layer" and not (several and len(bounds) == count):
        raise OptionError(
            f"clipping='per_layer' needs {count} numbers as max_grad_norm, one for each trainable parameter of the "
            f"optimizer, not {len(bounds) if several else max_grad_norm!r}",
            advice=f"Pass a list, such as max_grad_norm=[0.1] * {count}.",
        )
    if several and clipping != "per_layer":
        raise OptionError(
            f"clipping={clipping!r} needs one number as max_grad_norm, not {max_grad_norm!r}",
            advice="Pass clipping='per_layer' for one number for each parameter.",
        )
    for bound in bounds:
        check_number("max_grad_norm", bound)


def _check_adaptive(noise_multiplier: float, clipping: str, arguments: Mapping[str, Any]) -> None:
    known = [name for name in ADAPTIVE if name in arguments]
    if clipping != "adaptive" and known:
        raise OptionError(
            f"{known[0]} is an argument of clipping='adaptive', and clipping is {clipping!r}",
            advice=f"Pass clipping='adaptive', or leave out {known[0]}=.",
        )
    if clipping != "adaptive":
        return
    missing = [name for name in ADAPTIVE if name not in arguments]
    if missing:
        raise OptionError(
            f"clipping='adaptive' needs {', '.join(missing)}",
            advice="Pass them as Opacus's AdaClipDPOptimizer describes them (Andrew et al. 2019).",
        )
    for name in ADAPTIVE:
        zero = name in ("target_unclipped_quantile", "clipbound_learning_rate")
        check_number(name, arguments[name], zero=zero, infinite=name == "max_clipbound")
    if arguments["max_clipbound"] <= arguments["min_clipbound"]:
        raise OptionError(
            f"max_clipbound has to be above min_clipbound={arguments['min_clipbound']}, "
            f"not {arguments['max_clipbound']}",
            advice="The bound is kept between the two.",
        )
    if noise_multiplier >= 2 * arguments["unclipped_num_std"]:
        raise OptionError(
            f"noise_multiplier has to be below 2 * unclipped_num_std={2 * arguments['unclipped_num_std']}, "
            f"not {noise_multiplier}",
            advice="The noise is shared between the gradients and the count of unclipped samples (Andrew et al. 2019).",
        )
