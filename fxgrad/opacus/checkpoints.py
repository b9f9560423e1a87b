"""Checkpoints of Opacus: its wrapper's prefix in state dicts, and the wrapped model's attribute `_module`."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from fxgrad.api import engine_of
from fxgrad.host.modules import VERSIONS

PREFIX = "_module."
"""Opacus's GradSampleModule holds the model in its attribute `_module`, which every key of its state dict names."""


def unwrapped(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict of Opacus's wrapper as one of the model itself; any other state dict as it is.

    Args:
        module: the model that the state dict is for; it may have a submodule `_module` of its own.
        state: the state dict; it is not changed.

    >>> import torch
    >>> list(unwrapped(nn.Linear(3, 2), {"_module.weight": torch.ones(2, 3), "_module.bias": torch.ones(2)}))
    ['weight', 'bias']
    """
    own = module.state_dict().keys()
    names = [key.removeprefix(PREFIX) for key in state]
    if not all(key.startswith(PREFIX) for key in state) or len(own & set(names)) <= len(own & set(state)):
        return state
    renamed: Any = OrderedDict(state)
    setattr(renamed, VERSIONS, OrderedDict(getattr(state, VERSIONS, {})))
    consume_prefix_in_state_dict_if_present(renamed, PREFIX)
    return renamed  # type: ignore[no-any-return]


def give_wrapper_names(view: nn.Module) -> None:
    """Let a transformed model have `_module`, the model itself, and load state dicts of Opacus's wrapper.

    A model that has an attribute `_module` of its own keeps it. The names are those of the transformed object's class;
    the model itself stays as it was.
    """
    kind: Any = type(view)
    engine = engine_of(view)
    if engine is None or kind in _GIVEN:
        return
    _GIVEN.add(kind)
    load = kind.load_state_dict

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return load(self, unwrapped(self, state_dict), *args, **kwargs)

    kind.load_state_dict = load_state_dict
    if not hasattr(view, "_module"):
        kind._module = property(lambda self: engine_of(self).model)  # type: ignore[union-attr]


_GIVEN: weakref.WeakSet[type] = weakref.WeakSet()  # the classes that have Opacus's names


class Loading:
    """A model for Opacus's load_checkpoint, with state dicts of Opacus's wrapper as the model's own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        return self.module.load_state_dict(unwrapped(self.module, state_dict), **kwargs)
