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
        """Return the same mapping as long as the same modules have the same parameters by the same names."""
        content = _content(self.last.modules)
        if len(content) != len(self.last.content) or not all(map(is_, content, self.last.content)):
            self.last = _walked(self.model)
        return self.last.parameters


def _content(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the names, the parameters and the inner modules of these modules."""
    content: list[Any] = []
    for module in modules:
        for members in held_by(module):
            if members:
                content += members
                content += members.values()
    return content


def _walked(model: nn.Module) -> _Walk:
    """Meet each module and each parameter once; not by the methods of nn.Module, which a model may override."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    met: dict[int, nn.Module] = {}

    def walk(module: nn.Module, prefix: str) -> None:
        met[id(module)] = module
        parameters, modules = held_by(module)
        for name, parameter in parameters.items():
            if parameter is not None:
                named.setdefault(id(parameter), (prefix + name, parameter))
        for name, inner in modules.items():
            if inner is not None and id(inner) not in met:
                walk(inner, f"{prefix}{name}.")

    walk(model, "")
    modules = list(met.values())
    return _Walk(modules, _content(modules), MappingProxyType(dict(named.values())))
