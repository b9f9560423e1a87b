"""What a user's function reads besides its arguments: a compiled graph has the numbers of when it was traced.

c = 1.0
ClippedGrad(1.0, weights=lambda norms: c / norms)        reads {"c": 1.0}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DEEP = 6  # containers in containers


def read_by(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function reads, by name, as values that can be compared later."""
    if isinstance(function, FunctionType):
        return _variables(function, _DEEP)
    return {"self": _shown(function, _DEEP)}


def changed(before: Mapping[str, Any], function: Callable[..., Any]) -> str | None:
    """Return the name of something that a function reads and that is not what it was; None where all is the same."""
    now = read_by(function)
    return next((name for name in before.keys() | now.keys() if before.get(name) != now.get(name)), None)


def _variables(function: FunctionType, deep: int) -> dict[str, Any]:
    code = function.__code__
    found = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    found["the default of an argument"] = (function.__defaults__, function.__kwdefaults__)
    return {name: _shown(value, deep - 1) for name, value in found.items()}


def _shown(value: Any, deep: int) -> Any:
    """Return a value as text and tuples; what has neither is itself as long as it is the same object.

    Of a tensor no more is asked: tracing refuses it.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if deep <= 0:
        return id(value)
    if isinstance(value, FunctionType):
        own = value.__module__.partition(".")[0] not in ("torch", "fxgrad")
        return id(value.__code__), tuple(_variables(value, deep).items()) if own else ()
    if isinstance(value, MethodType):
        return _shown(value.__func__, deep), _shown(value.__self__, deep - 1)
    if isinstance(value, partial):
        return tuple(_shown(one, deep - 1) for one in (value.func, value.args, value.keywords))
    if isinstance(value, Mapping):
        return tuple((_shown(key, deep - 1), _shown(one, deep - 1)) for key, one in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_shown(one, deep - 1) for one in value if not isinstance(one, Tensor))
    attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
    module = type(value).__module__.partition(".")[0]
    return id(value), _shown(attributes, deep - 1) if module not in ("torch", "builtins") else ()
