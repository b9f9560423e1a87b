"""The fixer of each layer that Opacus's validator refuses: what makes the layer in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from opacus.validators.module_validator import ModuleValidator
from torch import nn

from fxgrad.api import engine_of
from fxgrad.host.modules import BatchNorm


def class_of(part: nn.Module) -> type:
    """Return a layer's class as the user wrote it."""
    transformed = engine_of(part)
    return type(part if transformed is None else transformed.model)


def fixer_of(part: nn.Module) -> Callable[[Any], nn.Module] | None:
    """Return what makes the layer that takes another one's place; None for a class that no fixer knows.

    That of a batch norm is also its subclasses', if they compute the same, and that of timm's, if they add what timm's
    group norm adds, too.
    """
    kind: Any = class_of(part)
    base = next((one for one in kind.__mro__ if one in ModuleValidator.FIXERS), None)
    inherits = base is not None and issubclass(base, BatchNorm) and kind.forward is base.forward
    added = {name for name, _ in part.named_parameters()} - {"weight", "bias"}
    if base is kind or (inherits and not added):
        fixer: Callable[[Any], nn.Module] = ModuleValidator.FIXERS[base]
        return fixer
    return _group_norm_of_timm if _is_of_timm(kind) else None


def _is_of_timm(kind: Any) -> bool:
    if not any(one.__module__.startswith("timm.") for one in kind.__mro__):
        return False
    from timm.layers import BatchNormAct2d

    return issubclass(kind, BatchNormAct2d) and kind.forward is BatchNormAct2d.forward


def _group_norm_of_timm(old: Any) -> nn.Module:
    """``BatchNormAct2d`` as ``GroupNormAct``, with the groups that Opacus gives to nn.BatchNorm2d."""
    from timm.layers import GroupNormAct

    new: nn.Module = GroupNormAct(old.num_features, math.gcd(32, old.num_features), affine=old.affine)
    new.drop, new.act = old.drop, old.act
    return new
