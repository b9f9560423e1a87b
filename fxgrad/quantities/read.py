"""What a user's function reads besides its arguments: a compiled graph has the numbers of when it was traced.

    c = 1.0
    ClippedGrad(1.0, weights=lambda norms: c / norms)        reads {"c": "1.0"}

Followed are names and chains of attributes in its code (``settings.rate``, ``self.schedule.c``), and the functions
and methods that they lead to, once each. What the code of PyTorch and of Python's library reads is not, nor what is
looked up by text. Containers are read whole, with the attributes of objects in them; a tensor by its version.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import numbers
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fxgrad.host.tensors import version

_PLAIN = (type(None), bool, int, float, complex, str, bytes, numbers.Number, enum.Enum)
_OTHERS = (sys.stdlib_module_names | {"torch", "fxgrad", "numpy"}) - {"__main__"}  # whose code is not followed
_CONTAINERS = (dict, list, tuple, set, frozenset)
_VARIABLES = frozenset("LOAD_GLOBAL LOAD_NAME LOAD_DEREF LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_CHECK".split())
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


class Reading:
    """What a function of the user's reads by name, to be compared later.

    ``plain``: numbers and texts alone; containers may be caches, and take long to read.
    """

    def __init__(self, function: Callable[..., Any], *, plain: bool = False) -> None:
        self.function, self.plain = function, plain
        self.values = self._now()

    def _now(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        _follow(self.function, "", found, set(), self.plain)
        return found

    def settle(self) -> None:
        """The function was traced: a cache that it filled is as it is now, a number as it was before."""
        before, after = self.values, self._now()
        number = {name for name, value in before.items() if isinstance(value, str) and value != "None"}
        self.values = {name: before[name] if name in number else value for name, value in after.items()}

    def changed(self) -> str | None:
        """Return the name of something that is not what it was; None where all is the same."""
        before, now = self.values, self._now()
        names = before.keys() & now.keys() if self.plain else [*before, *now]
        return next((name for name in names if before.get(name) != now.get(name)), None)


def is_users(function: FunctionType) -> bool:
    """Return whether a function's code is followed: it is not of PyTorch, nor of Python's library."""
    return (function.__module__ or "").partition(".")[0] not in _OTHERS


def _follow(value: Any, name: str, found: dict[str, Any], seen: set[tuple[int, int]], plain: bool) -> None:
    """Enter a value under its name, or what a function reads."""
    if isinstance(value, partial):
        _follow(value.func, name, found, seen, plain)
        value = (value.args, value.keywords)
    if isinstance(value, BuiltinMethodType) and _is_array(value.__self__):  # ``rates.item()``
        value = value.__self__
    if isinstance(value, FunctionType):
        _follow_code(value, None, found, seen, plain)
    elif isinstance(value, MethodType):
        if isinstance(value.__func__, FunctionType):
            _follow_code(value.__func__, value.__self__, found, seen, plain)
    elif isinstance(value, (*_PLAIN, *_CONTAINERS)) or _is_array(value):
        if not plain or isinstance(value, _PLAIN):
            found[name] = _shown(value, frozenset())
    elif not isinstance(value, type):
        called = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
        if isinstance(called, FunctionType):
            _follow_code(called, value, found, seen, plain)


def _follow_code(
    function: FunctionType, owner: Any, found: dict[str, Any], seen: set[tuple[int, int]], plain: bool
) -> None:
    code = function.__code__
    if (id(code), id(owner)) in seen or not is_users(function):
        return
    if plain and "site-packages" in code.co_filename:  # a library's own tables
        return
    seen.add((id(code), id(owner)))
    roots = dict(_cells(function)) if owner is None else {**_cells(function), code.co_varnames[0]: owner}
    for variable, *attributes in _chains(code):
        value = roots.get(variable, function.__globals__.get(variable, roots))
        if value is roots:  # an argument, a variable of its own, or one of Python's
            continue
        try:
            for attribute in attributes:
                value = getattr(value, attribute)
        except Exception:  # not there now: whoever reads it gets the error
            continue
        _follow(value, ".".join((variable, *attributes)), found, seen, plain)
    _follow(
        (function.__defaults__, function.__kwdefaults__), f"the defaults of {function.__name__}", found, seen, plain
    )


def _cells(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            found[name] = cell.cell_contents
    return found


@lru_cache(maxsize=1024)
def _chains(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return each variable that code reads, with the attributes that it reads of it: ``("self", "schedule", "c")``."""
    return tuple(dict.fromkeys(_chains_in(code)))


def _chains_in(code: CodeType) -> Iterator[tuple[str, ...]]:
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in _ATTRIBUTES and chain:
            chain = (*chain, step.argval)
            continue
        if chain:
            yield chain
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # LOAD_FAST_LOAD_FAST has two
        reads = step.opname in _VARIABLES or step.opname.startswith("LOAD_FAST")
        yield from ((name,) for name in names[:-1] if reads)
        chain = (names[-1],) if reads else ()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _chains_in(constant)


def _is_array(value: Any) -> bool:
    """Return whether a value is a tensor, or an array of NumPy."""
    return isinstance(value, Tensor) or hasattr(type(value), "__array_interface__")


def _shown(value: Any, around: frozenset[int]) -> Any:
    """Return a value as texts and tuples, all that is in it included; ``around``: what it is in, which it may hold."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):  # whose numbers nobody has to wait for; norms that a container keeps are not read
        return type(value).__name__ if around else (id(value), 0 if value.is_inference() else version(value))
    if _is_array(value):
        return str(value.dtype), value.shape, value.tobytes()
    inside = around | {id(value)}
    if id(value) in around or isinstance(value, type | ModuleType | FunctionType):
        return type(value).__name__
    if isinstance(value, dict):
        return tuple((_shown(key, inside), _shown(one, inside)) for key, one in value.items())
    if isinstance(value, _CONTAINERS):
        return tuple(_shown(one, inside) for one in value if not isinstance(one, Tensor))
    return type(value).__name__, _shown(getattr(value, "__dict__", {}), inside)
