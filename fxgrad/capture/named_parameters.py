"""The parameters of a model by name, as `named_parameters` has them: walked anew only where its modules changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from fxgrad.host.modules import held_by


class _Walk(NamedTuple):
    """What one walk through the modules met."""

    modules: list[nn.Module]
    content: list[Any]
    parameters: Mapping[str, nn.Parameter]


class NamedParameters:
    """A model's parameters, in every call: modules say nothing of a change, so all that they hold is compared.

    What was compared is held, so that no other object has its identity: a parameter that was replaced lives until the
    next call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.last = _walked(model)

    def now(self) -> Mapping[str, nn.Parameter]:
        """The same mapping as long as the same modules have the same parameters by the same names."""
        modules, content, parameters = self.last
        found = _content(modules)
        if len(found) == len(content) and all(map(is_, found, content)):
            return parameters
        self.last = _walked(self.model)
        return self.last.parameters


def _content(modules: Iterable[nn.Module]) -> list[Any]:
    """The names, the parameters and the inner modules of these modules."""
    found: list[Any] = []
    for module in modules:
        for own in held_by(module):
            if own:
                found += own
                found += own.values()
    return found


def _walked(model: nn.Module) -> _Walk:
    found: dict[int, tuple[str, nn.Parameter]] = {}
    met: dict[int, nn.Module] = {}
    _find(model, "", found, met)
    modules = list(met.values())
    return _Walk(modules, _content(modules), MappingProxyType(dict(found.values())))


def _find(
    module: nn.Module, prefix: str, found: dict[int, tuple[str, nn.Parameter]], met: dict[int, nn.Module]
) -> None:
    """Find each parameter once; not by the methods of nn.Module, which a model may override."""
    met[id(module)] = module
    parameters, modules = held_by(module)
    for name, parameter in parameters.items():
        if parameter is not None and id(parameter) not in found:
            found[id(parameter)] = prefix + name, parameter
    for name, inner in modules.items():
        if inner is not None and id(inner) not in met:
            _find(inner, f"{prefix}{name}.", found, met)
