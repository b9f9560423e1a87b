"""What a user's function reads besides its arguments: a compiled graph has the numbers of when it was traced.

    c = 1.0
    ClippedGrad(1.0, weights=lambda norms: c / norms)        reads {"c": 1.0}

Read are variables of the module and of functions around it, and of objects those attributes that its code names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LOOKED_AT = (bool, int, float, complex, str, bytes, Mapping, list, tuple, set, frozenset, FunctionType)
_DEEP = 6  # containers in containers
_LONG = 100  # elements of a container


def read_by(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function reads, by name, as values that can be compared later."""
    if isinstance(function, FunctionType):
        return _variables(function, _DEEP)
    if not isinstance(function, MethodType | partial):
        function = MethodType(type(function).__call__, function)
    return {"self": _shown(function, (), _DEEP)}


def changed(before: Mapping[str, Any], function: Callable[..., Any]) -> str | None:
    """Return the name of something that a function reads and that is not what it was; None where all is the same."""
    now = read_by(function)
    return next((name for name in [*before, *now] if before.get(name) != now.get(name)), None)


def _variables(function: FunctionType, deep: int) -> dict[str, Any]:
    code, names = function.__code__, frozenset(_names(function.__code__))
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not set yet
            continue
    found["the default of an argument"] = (function.__defaults__, function.__kwdefaults__)
    return {name: _shown(value, names, deep - 1) for name, value in found.items()}


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of variables and of attributes in code, and in the functions that it makes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _shown(value: Any, names: Collection[str], deep: int) -> Any:
    """Return a value as texts and tuples, of objects the attributes with these names.

    Of a tensor nothing is asked: tracing refuses it.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return "a tensor"
    if deep <= 0:
        return id(value)
    if isinstance(value, FunctionType):
        return id(value.__code__), () if _is_pytorchs(value) else tuple(_variables(value, deep).items())
    if isinstance(value, MethodType):
        code = getattr(value.__func__, "__code__", None)
        of_self = _shown(value.__self__, () if code is None else frozenset(_names(code)), deep - 1)
        return _shown(value.__func__, names, deep), of_self
    if isinstance(value, partial):
        return tuple(_shown(one, names, deep - 1) for one in (value.func, value.args, value.keywords))
    if isinstance(value, Mapping):
        return tuple((_shown(k, (), 1), _shown(v, names, deep - 1)) for k, v in islice(value.items(), _LONG))
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_shown(one, names, deep - 1) for one in islice(value, _LONG) if not isinstance(one, Tensor))
    attributes = _attributes(value, names)
    return id(value), tuple((name, _shown(one, attributes, deep - 1)) for name, one in attributes.items())


def _attributes(value: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the attributes of an object with these names, and those that its own methods among them name."""
    found: dict[str, Any] = {}
    waiting = [*names, "__call__", "forward"]
    while waiting:
        name = waiting.pop()
        one = inspect.getattr_static(value, name, None)
        if name in found or not isinstance(one, _LOOKED_AT) or _is_pytorchs(one):
            continue
        found[name] = one
        if isinstance(one, FunctionType):
            waiting += _names(one.__code__)
    return found


def _is_pytorchs(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__.partition(".")[0] in ("torch", "fxgrad")
