"""Opacus's validator, without its objections to what fxgrad takes as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import opacus
from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fxgrad.api import engine_of

COVERED = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
"""Layers that Opacus would have replaced by its own: fxgrad takes them as they are."""


def validate(module: nn.Module) -> None:
    """Opacus's validator, which lets the layers pass that fxgrad takes as they are.

    These are nn.RNN, nn.LSTM, nn.GRU and nn.MultiheadAttention, and BatchNorm in eval mode. A norm layer in training
    mode is looked at even if nothing of it is trainable: its running statistics are made of the samples, too.

    Raises:
        opacus.validators.errors.UnsupportedModuleError: with every reason.

    >>> validate(nn.LSTM(3, 4))
    >>> validate(nn.BatchNorm1d(3, affine=False))
    Traceback (most recent call last):
        ...
    opacus.validators.errors.UnsupportedModuleError: ...
    """
    found = [] if module.training else [IllegalModuleConfigurationError("Model needs to be in training mode")]
    for name, part in module.named_modules():
        kind = _class_of(part)
        if kind in COVERED or kind not in ModuleValidator.VALIDATORS or not _matters(part):
            continue
        reasons = ModuleValidator.VALIDATORS[kind](part)
        found += [type(reason)(f"{kind.__name__} '{name}': {reason}") for reason in reasons]
    if found:
        raise UnsupportedModuleError(found)


def _matters(part: nn.Module) -> bool:
    if isinstance(part, _NormBase) and part.training:
        return True
    return not isinstance(part, _BatchNorm) and any(p.requires_grad for p in part.parameters(recurse=False))


def _class_of(part: nn.Module) -> type[nn.Module]:
    """The user's own class also where the module is transformed."""
    transformed = engine_of(part)
    return type(part if transformed is None else transformed.model)


@contextlib.contextmanager
def validating(engine: opacus.PrivacyEngine) -> Iterator[None]:
    """Let this engine validate as `validate` does, for as long as it lasts."""

    def own(*, module: nn.Module, optimizer: Any, data_loader: Any) -> None:
        validate(module)

    engine.validate = own  # in front of the class's method
    try:
        yield
    finally:
        del engine.validate
