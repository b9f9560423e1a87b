"""Opacus's validator, without its objections to layers that fxgrad supports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import opacus
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import nn

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
        kind = _class_of(part)
        if kind in COVERED or kind not in ModuleValidator.VALIDATORS or not _matters(part):
            continue
        reasons = ModuleValidator.VALIDATORS[kind](part)
        errors += [type(reason)(f"{kind.__name__} '{name}': {reason}") for reason in reasons]
    if errors:
        raise UnsupportedModuleError(errors)


def _matters(part: nn.Module) -> bool:
    if isinstance(part, NormBase) and part.training:
        return True
    return not isinstance(part, BatchNorm) and any(p.requires_grad for p in part.parameters(recurse=False))


def _class_of(part: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module, also if it is transformed."""
    transformed = engine_of(part)
    return type(part if transformed is None else transformed.model)


@contextlib.contextmanager
def validating(engine: opacus.PrivacyEngine) -> Iterator[None]:
    """Replace the engine's validator by `validate` within the context."""

    def by_fxgrad(*, module: nn.Module, optimizer: Any, data_loader: Any) -> None:
        validate(module)

    engine.validate = by_fxgrad  # shadows the class's method
    try:
        yield
    finally:
        del engine.validate
