"""The text of a function or a class: what it computes, in words that are equal in every process.

fxgrad and PyTorch stand in the key by their versions, so the text of what can be imported from them is its name. The
text of a user's code is its bytecode, with the values that it closes over. Bytecode is what runs, also where the file
has changed since.
"""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from types import CodeType, FunctionType, ModuleType
from typing import Any

TRUSTED = frozenset({"fxgrad", "torch", "math", "operator", "_operator", "builtins", "cmath", "functools", "typing"})
_REACH_OUT = frozenset(  # builtins that reach what no text shows
    "__build_class__ __import__ breakpoint compile eval exec globals id hash input locals open vars".split()
)
_OPEN = frozenset({"ops", "library", "random", "environ", "modules"})  # attributes of PyTorch that the user may change
_OF_EVERY_CLASS = frozenset(
    """__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __abstractmethods__ _abc_impl
    __dataclass_fields__ __dataclass_params__ __match_args__ __static_attributes__ __firstlineno__ __parameters__
    __orig_bases__ __init__ __repr__ __str__ __eq__ __hash__ __setattr__ __delattr__ __post_init__ __replace__
    __annotate__ __annotate_func__ __annotations_cache__""".split()
)

Text = Callable[[Any], str]  # of a value; raises Unreadable


class Unreadable(Exception):
    """Raised for a value without a text; the message says which value and why."""


def imported_name(value: Any) -> str | None:
    """Return the name by which fxgrad, PyTorch or Python has exactly this value; None for any other."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, ModuleType):
        return value.__name__ if _root(value.__name__) in TRUSTED and value is sys.modules[value.__name__] else None
    if not isinstance(module, str) or not isinstance(name, str) or _root(module) not in TRUSTED:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value else None


def _root(module: str) -> str:
    return module.split(".")[0]


def text_of_function(function: FunctionType, text: Text) -> str:
    """Return the text of a function that has no name to be imported by."""
    name, code = function.__qualname__, function.__code__
    own = _root(function.__module__ or "") == "fxgrad"
    parts = [_text_of_code(code), text(function.__defaults__), text(function.__kwdefaults__)]
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            parts.append(f"{variable}={text(cell.cell_contents)}")
        except (Unreadable, ValueError) as error:
            raise Unreadable(f"{name} closes over {variable!r}: {error}") from None
    if not own:  # fxgrad's globals are in the hash of its source
        parts += [_text_of_global(function, variable) for variable in sorted(_globals_of(code))]
    return f"{name}({'; '.join(parts)})"


def _text_of_code(code: CodeType) -> str:
    """Return bytecode with all that it refers to, but no place in a file."""
    constants = [_text_of_code(one) if isinstance(one, CodeType) else _text_of_constant(one) for one in code.co_consts]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    exceptions = getattr(code, "co_exceptiontable", b"")
    return f"{code.co_code.hex()} {exceptions.hex()} {counts} {names} [{', '.join(constants)}]"


def _text_of_constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text_of_constant, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_text_of_constant, value))})"
    return f"{type(value).__name__} {value!r}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _globals_of(code: CodeType) -> set[str]:
    """Return the names that code reads from its module or imports; raise where it writes to one."""
    names: set[str] = set()
    for one in _codes(code):
        for step in dis.get_instructions(one):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(step.argval)
            elif step.opname.startswith(("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_")):
                raise Unreadable(f"{code.co_name} imports or writes to {step.argval!r}")
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in _OPEN:
                raise Unreadable(f"{code.co_name} reads .{step.argval}")
    return names


def _text_of_global(function: FunctionType, name: str) -> str:
    """Return a global's name if it is PyTorch's, fxgrad's or Python's own, which cannot change unseen."""
    missing = object()
    value = function.__globals__.get(name, missing)
    if value is missing and hasattr(builtins, name) and name not in _REACH_OUT:
        return f"builtins.{name}"
    known = None if value is missing else imported_name(value)
    if known is None:
        raise Unreadable(f"{function.__qualname__} uses the global {name!r}")
    return f"{name}={known}"


def text_of_class(cls: type, text: Text) -> str:
    """Return a class's name, and for a user's class its methods and values, with those of its bases."""
    known = imported_name(cls)
    if known is not None:
        return known
    if type(cls).__module__ not in ("builtins", "abc"):
        raise Unreadable(f"the class {cls.__qualname__} has a metaclass of its own")
    members = []
    for name, member in sorted(vars(cls).items()):
        if name in _OF_EVERY_CLASS:
            continue
        try:
            members += [f"{name}={text(one)}" for one in _functions_of(member)]
        except Unreadable as error:
            raise Unreadable(f"{cls.__qualname__}.{name}: {error}") from None
    bases = [text_of_class(base, text) for base in cls.__bases__]
    return f"class {cls.__qualname__}({', '.join(bases)}; {'; '.join(members)})"


def _functions_of(member: Any) -> list[Any]:
    """Return the functions in a class's member; the member itself where it is none of Python's descriptors."""
    if isinstance(member, property):
        return [member.fget, member.fset, member.fdel]
    if isinstance(member, staticmethod | classmethod):
        return [type(member).__name__, member.__func__]
    if isinstance(member, cached_property):
        return [member.func]
    return [member]


def text_of_builtin(value: Any) -> str:
    """Return the name of a function in C that PyTorch or Python has, or of such a method of a class."""
    home: Any = getattr(value, "__objclass__", None) or sys.modules.get(value.__module__ or "")
    own, name = value.__name__, str(getattr(home, "__name__", ""))
    place = str(getattr(home, "__module__", None) or name)
    if _root(place) not in TRUSTED or getattr(home, own, None) is not value:
        raise Unreadable(f"{own}, which is neither PyTorch's nor Python's")
    return f"{place}.{name}.{own}"
