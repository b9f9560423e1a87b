"""What a user's function reads besides its arguments: a compiled graph has the numbers of when it was traced.

    c = 1.0
    ClippedGrad(1.0, weights=lambda norms: c / norms)        reads {"c": "1.0"}

Followed are names and chains of attributes in its code (``settings.rate``, ``self.schedule.c``), and the functions
and methods that they lead to, once each. What the code of PyTorch and of Python's library reads is not, nor what is
looked up by text.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, numbers.Number, enum.Enum)
_OTHERS = (sys.stdlib_module_names | {"torch", "fxgrad", "numpy"}) - {"__main__"}  # whose code is not followed
_DEEP = 2  # containers in containers
_LONG = 100  # elements of a container
_VARIABLES = frozenset("LOAD_GLOBAL LOAD_NAME LOAD_DEREF LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_CHECK".split())
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def read_by(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function reads, by name, as values that can be compared later."""
    found: dict[str, Any] = {}
    _follow(function, "", found, set())
    return found


def changed(before: Mapping[str, Any], function: Callable[..., Any]) -> str | None:
    """Return the name of something that a function reads and that is not what it was; None where all is the same."""
    now = read_by(function)
    return next((name for name in [*before, *now] if before.get(name) != now.get(name)), None)


def _follow(value: Any, name: str, found: dict[str, Any], seen: set[tuple[int, int]]) -> None:
    """Enter a value under its name, or what a function reads."""
    if isinstance(value, partial):
        _follow(value.func, name, found, seen)
        value = (value.args, value.keywords)
    if isinstance(value, FunctionType):
        _follow_code(value, None, found, seen)
    elif isinstance(value, MethodType):
        if isinstance(value.__func__, FunctionType):
            _follow_code(value.__func__, value.__self__, found, seen)
    elif isinstance(value, (*_PLAIN, dict, list, tuple, set, frozenset)):
        found[name] = _shown(value, _DEEP)
    elif not isinstance(value, type | Tensor):
        called = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
        if isinstance(called, FunctionType):
            _follow_code(called, value, found, seen)


def _follow_code(function: FunctionType, owner: Any, found: dict[str, Any], seen: set[tuple[int, int]]) -> None:
    code = function.__code__
    if (id(code), id(owner)) in seen or (function.__module__ or "").partition(".")[0] in _OTHERS:
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
        _follow(value, ".".join((variable, *attributes)), found, seen)
    _follow((function.__defaults__, function.__kwdefaults__), f"the defaults of {function.__name__}", found, seen)


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


def _shown(value: Any, deep: int) -> Any:
    """Return a value as texts and tuples: of other things than numbers, texts and containers their types alone."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if deep > 0 and isinstance(value, dict):
        return tuple((_shown(k, 0), _shown(v, deep - 1)) for k, v in islice(value.items(), _LONG))
    if deep > 0 and isinstance(value, list | tuple | set | frozenset):
        return tuple(_shown(one, deep - 1) for one in islice(value, _LONG) if not isinstance(one, Tensor))
    return type(value).__name__
