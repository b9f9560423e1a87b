"""Opacus's validator, without its objections to layers that fxgrad supports."""

from __future__ import annotations

from typing import Any

import opacus
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader

from fxgrad.errors import OptionError
from fxgrad.host.modules import BatchNorm
from fxgrad.opacus.fixers import class_of, fixer_of

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
COVERED = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
"""Layers that Opacus wants replaced by its own; fxgrad supports them directly."""
REPLACED = (
    "\n  Pass fix=True to make_private, or call fxgrad.opacus.fix(model) before you make the optimizer. Both use "
    "Opacus's ModuleValidator.fix, but leave the layers that fxgrad supports."
)

MADE_ANEW = "\n  Make it with track_running_stats=False: fix=True does not know this class."
OWN_FORWARD = "\n  Put another layer in its place, or call its eval(): fix=True does not know this class's forward."


def validate(module: nn.Module) -> None:
    """Validate a model as Opacus does, but accept the layers that fxgrad supports directly.

    These are nn.RNN, nn.LSTM, nn.GRU and nn.MultiheadAttention, and BatchNorm in eval mode. BatchNorm in training mode
    is validated even without trainable parameters, as its running statistics depend on the samples. An instance norm
    with running statistics is refused in every mode, as ``model.train()`` may come later. So are subclasses of both.

    Raises:
        opacus.validators.errors.UnsupportedModuleError: with every reason.

    >>> validate(nn.LSTM(3, 4))
    >>> validate(nn.BatchNorm1d(3, affine=False))
    Traceback (most recent call last):
        ...
    opacus.validators.errors.UnsupportedModuleError: ...
    """
    errors = [] if module.training else [IllegalModuleConfigurationError("Model needs to be in training mode")]
    for name, part in module.named_modules():
        errors += [
            type(reason)(f"{class_of(part).__name__} '{name}': {reason}{advice(part)}") for reason in objections(part)
        ]
    if errors:
        raise UnsupportedModuleError(errors)


def advice(part: nn.Module) -> str:
    """Return what to do about a layer with objections."""
    if fixer_of(part) is not None:
        return REPLACED
    return OWN_FORWARD if isinstance(part, BatchNorm) else MADE_ANEW


def objections(part: nn.Module) -> list[Any]:
    """Return Opacus's reasons against one layer that fxgrad shares."""
    kind = class_of(part)
    if isinstance(part, INSTANCE_NORMS):  # its validator looks at track_running_stats alone
        return [*ModuleValidator.VALIDATORS[nn.InstanceNorm1d](part)]
    if isinstance(part, BatchNorm) and part.training:
        return [*ModuleValidator.VALIDATORS[nn.BatchNorm1d](part)]
    if kind in COVERED or kind not in ModuleValidator.VALIDATORS or not _matters(part):
        return []
    return [*ModuleValidator.VALIDATORS[kind](part)]


def _matters(part: nn.Module) -> bool:
    return not isinstance(part, BatchNorm) and any(p.requires_grad for p in part.parameters(recurse=False))


def check_not_wrapped(module: nn.Module) -> None:
    """Raise for a model in Opacus's wrapper."""
    wrapper = next((part for part in module.modules() if isinstance(part, AbstractGradSampleModule)), None)
    if wrapper is not None:
        raise OptionError(
            f"the module is in Opacus's {type(wrapper).__name__}, whose hooks compute gradients beside fxgrad's",
            advice="Pass module.to_standard_module(): the module without the hooks, with the same parameters.",
        )


def prepared_by_opacus(engine: opacus.PrivacyEngine, **arguments: Any) -> tuple[DPOptimizer, DataLoader[Any]]:
    """Return Opacus's optimizer and loader for gradients computed elsewhere, with `validate` as the validator.

    Args:
        engine: Opacus's, or a subclass with another make_private, which this calls past.
        arguments: those of Opacus's make_private.
    """
    engine.validate = lambda *, module, optimizer, data_loader: validate(module)  # shadows the class's method
    try:
        _, private, loader = opacus.PrivacyEngine.make_private(
            engine, grad_sample_mode="no_op", wrap_model=False, **arguments
        )
    finally:
        del engine.validate
    return private, loader
