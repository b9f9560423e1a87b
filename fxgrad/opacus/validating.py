"""Opacus's validator, without its objections to layers that fxgrad supports."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import opacus
from opacus.optimizers import DPOptimizer
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader

from fxgrad.api import engine_of
from fxgrad.host.modules import BatchNorm, NormBase

COVERED = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
"""Layers that Opacus wants replaced by its own; fxgrad supports them directly."""


def validate(module: nn.Module) -> None:
    """Validate a model as Opacus does, but accept the layers that fxgrad supports directly.

    These are nn.RNN, nn.LSTM, nn.GRU and nn.MultiheadAttention, and BatchNorm in eval mode. A norm layer in training
    mode is validated even without trainable parameters, as its running statistics depend on the samples.

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
        errors += [type(reason)(f"{_kind(part).__name__} '{name}': {reason}") for reason in _objections(part)]
    if errors:
        raise UnsupportedModuleError(errors)


def _kind(part: nn.Module) -> type:
    transformed = engine_of(part)
    return type(part if transformed is None else transformed.model)  # the user's class


def _objections(part: nn.Module) -> list[Any]:
    """Return Opacus's reasons against one layer."""
    kind = _kind(part)
    if kind in COVERED or kind not in ModuleValidator.VALIDATORS or not _matters(part):
        return []
    return [*ModuleValidator.VALIDATORS[kind](part)]


def _matters(part: nn.Module) -> bool:
    if isinstance(part, NormBase) and part.training:
        return True
    return not isinstance(part, BatchNorm) and any(p.requires_grad for p in part.parameters(recurse=False))


def fix(module: nn.Module) -> nn.Module:
    """Return a copy of a model that `validate` accepts: Opacus's fixers replace the layers that it refuses.

    BatchNorm becomes GroupNorm, and InstanceNorm tracks no running statistics. Layers that fxgrad supports directly
    stay. Make the optimizer of the copy's parameters.

    >>> [type(layer).__name__ for layer in fix(nn.Sequential(nn.LSTM(3, 4), nn.BatchNorm1d(8)))]
    ['LSTM', 'GroupNorm']
    """
    fixed = copy.deepcopy(module)
    replaced: dict[nn.Module, nn.Module] = {}  # a layer may have several names
    for name, part in list(fixed.named_modules(remove_duplicate=False)):
        if type(part) not in ModuleValidator.FIXERS or not _objections(part):
            continue
        if part not in replaced:
            new: nn.Module = ModuleValidator.FIXERS[type(part)](part)
            like = next(chain(part.parameters(), part.buffers()), None)
            replaced[part] = new if like is None else new.to(like.device, like.dtype)
        if not name:
            return replaced[part]
        fixed.set_submodule(name, replaced[part])
    return fixed


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
