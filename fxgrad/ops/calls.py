"""One name for an op and one form for its call, however the user's code spelled it.

``x + w``, ``torch.add(x, w)``, ``x.add(w)`` and ``aten.add.Tensor(x, w)`` are all
``Call("add", {"input": x, "other": w})``. Ops written in C++ get their argument names from ATen's
schemas, Python functions from their signatures.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from string import ascii_letters
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxgrad.host.ops import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    overload_of,
    qualified_name,
    schemas_of_name,
)
from fxgrad.ops.facts import FAKE, Fact
from fxgrad.ops.naming import distinct_name


@dataclass(frozen=True)
class Call:
    """An op's canonical name and all of its arguments, defaults included, by name."""

    op: str
    arguments: Mapping[str, Any]
    inplace: bool = False
    given: frozenset[str] = frozenset()  # arguments that differ from their default
    guessed: bool = False  # whether other arguments than the first have names by their place: no schema fits

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def moved(self, copies: Mapping[fx.Node, fx.Node]) -> Call:
        """Return the same call in a copy of its graph."""
        return replace(self, arguments=map_nodes(dict(self.arguments), copies.__getitem__))


CALL: Fact[Call] = Fact("call", "normalize_calls", Call)


def map_leaves(value: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """Return a nest of arguments in ordinary containers, with ``fn(leaf)`` in place of every leaf of this kind."""
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, slice):
        return slice(*(map_leaves(part, kind, fn) for part in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        return tuple(map_leaves(item, kind, fn) for item in value)
    if isinstance(value, list):
        return [map_leaves(item, kind, fn) for item in value]
    if isinstance(value, dict):
        return {key: map_leaves(item, kind, fn) for key, item in value.items()}
    return value


def map_nodes(value: Any, fn: Callable[[fx.Node], Any]) -> Any:
    """Return a nest of arguments with ``fn(node)`` in place of every node."""
    return map_leaves(value, fx.Node, fn)


def alike(one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether two nests of arguments have one form, and in each place the same of both."""
    if isinstance(one, slice) and isinstance(other, slice):
        return alike((one.start, one.stop, one.step), (other.start, other.stop, other.step), same)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key], same) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(alike(a, b, same) for a, b in zip(one, other, strict=True))
    return same(one, other)


def equal(one: Any, other: Any) -> bool:
    """Return whether two arguments that are no values of the graph are one constant."""
    return one is other or (type(one) is type(other) and bool(one == other))


def leaves(value: Any) -> Iterator[Any]:
    """Yield what a nest of arguments holds: nodes, numbers, and all else that is no container."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    elif isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from leaves(item)


# One name for ops with several: Python's operators, special methods of tensors, aliases of PyTorch.
_SPELLINGS = {
    "abs": "absolute",
    "add": "__add__ __radd__",
    "add_": "iadd",
    "atan2": "arctan2",
    "bitwise_and": "and_",
    "bitwise_and_": "iand",
    "bitwise_left_shift": "lshift",
    "bitwise_left_shift_": "ilshift",
    "bitwise_not": "invert",
    "bitwise_or": "or_",
    "bitwise_or_": "ior",
    "bitwise_right_shift": "rshift",
    "bitwise_right_shift_": "irshift",
    "bitwise_xor": "xor",
    "bitwise_xor_": "ixor",
    "cat": "concat concatenate",
    "clamp": "clip",
    "detach": "_get_data_attr",  # x.data
    "div": "divide true_divide truediv __truediv__ __div__",
    "div_": "itruediv __idiv__",  # which is what Tensor.__itruediv__ calls itself
    "floor_divide": "floordiv",
    "floor_divide_": "ifloordiv",
    "getitem": "__getitem__",
    "gt": "greater",
    "lt": "less",
    "matmul": "__matmul__ linalg_matmul imatmul",  # x @= w makes a new tensor
    "movedim": "moveaxis",
    "mul": "multiply __mul__ __rmul__",
    "mul_": "imul",
    "neg": "negative",
    "positive": "pos",
    "pow": "__pow__",
    "pow_": "ipow",
    "remainder": "mod",
    "remainder_": "imod",
    "rmatmul": "__rmatmul__",
    "rpow": "__rpow__",
    "rsub": "__rsub__",
    "setitem_": "__setitem__",
    "softmax": "_softmax special_softmax",
    "sub": "subtract __sub__",
    "sub_": "isub",
    "transpose": "swapaxes swapdims",
    "H": "matrix_H",  # how x.H and x.T are captured from torch 2.15 on
    "T": "numpy_T",
}
_ALIASES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}
# x.__iand__(y), which is how Dynamo writes x &= y where a function mode is on, such as a default device
_ALIASES |= {f"__{name.rstrip('_')}__": op for name, op in _ALIASES.items() if f"__{name.rstrip('_')}__" in dir(Tensor)}
_ALIASES |= {f"__{name}__": name for name in ("abs", "eq", "ge", "gt", "le", "lt", "ne", "neg")}

# Functions whose own name means another op, or no op in place.
_FUNCTIONS: dict[Callable[..., Any], str] = {F.unfold: "im2col", F.fold: "col2im", operator.setitem: "setitem_"}

_ARGUMENT_NAMES = {
    "transpose": {"axis0": "dim0", "axis1": "dim1"},  # of swapaxes
    "embedding": {"indices": "input"},
    "embedding_bag": {"indices": "input"},
    "rmatmul": {"arg1": "other"},
}


@cache
def op_name(target: Any) -> str:
    """Return the canonical name of an op; in-place spellings keep their trailing underscore.

    >>> op_name(torch.nn.functional.linear), op_name(operator.iadd), op_name("view")
    ('linear', 'add_', 'view')
    """
    name = _spelled(target)
    if name in _ALIASES:
        return _ALIASES[name]
    if name.endswith("_") and not name.endswith("__") and name[:-1] in _ALIASES:
        return _ALIASES[name[:-1]] + "_"
    return name


def _spelled(target: Any) -> str:
    if isinstance(target, str):
        return target
    target = overload_of(target)
    if isinstance(target, OpOverload | OpOverloadPacket):
        name = qualified_name(target)
        namespace, _, short = name.partition("::")
        return short if namespace == "aten" else name
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if target in _FUNCTIONS:
        return _FUNCTIONS[target]
    module = getattr(target, "__module__", None) or ""
    name = str(getattr(target, "__name__", type(target).__name__))
    of_torch = module == "torch" or module.startswith("torch.") or module == "builtins"
    if isinstance(target, BuiltinFunctionType) or type(target).__name__ == "method_descriptor" or of_torch:
        return name
    own = f"{module}.{getattr(target, '__qualname__', name)}"  # a function that makes functions gives all one name
    return distinct_name(target, own) if isinstance(target, FunctionType) else own


def bind(node: fx.Node) -> Call:
    """Return the call of a node, its arguments bound to the op's own names."""
    name = op_name(node.target)
    if node.target in _STRUCTURAL:
        return _bind_structural(name, node.args)
    inplace = name.endswith("_") and not name.endswith("__")
    op = name[:-1] if inplace else name
    args, kwargs = node.args, dict(node.kwargs)
    bound = _bind_signature(node.target, args, kwargs) or _bind_schema(op, name, args, kwargs)
    names_by_place = ["input", *(f"arg{i}" for i in range(1, len(args)))]
    arguments, defaults = bound or (dict(zip(names_by_place, args, strict=False)) | kwargs, {})
    names = {"self": "input", **_ARGUMENT_NAMES.get(op, {})}
    arguments = {names.get(key, key): value for key, value in arguments.items()}
    given = frozenset(key for key, value in arguments.items() if not (key in defaults and _same(value, defaults[key])))
    return Call(op, arguments, inplace or arguments.get("inplace") is True, given, bound is None and len(arguments) > 1)


_STRUCTURAL = (operator.getitem, operator.setitem, getattr, "__getitem__", "__setitem__")


def _bind_structural(name: str, args: Sequence[Any]) -> Call:
    """``x[i]``, ``x[i] = v`` and ``x.T``, which no schema describes."""
    if name == "getattr":
        attribute = str(args[1])
        return Call("detach" if attribute == "data" else attribute, {"input": args[0]})
    names = ("input", "index", "value")[: len(args)]
    op = name.removesuffix("_")
    return Call(op, dict(zip(names, args, strict=True)), op != name, frozenset(names))


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, fx.Node) or isinstance(default, fx.Node):
        return value is default
    if isinstance(value, tuple | list) and isinstance(default, tuple | list):
        return tuple(value) == tuple(default)
    return (type(value) is type(default) and bool(value == default)) or (value is default)


_Bound = tuple[dict[str, Any], dict[str, Any]]


@cache
def _signature(target: Callable[..., Any]) -> inspect.Signature | None:
    if isinstance(target, str | OpOverload | OpOverloadPacket | HigherOrderOperator | BuiltinFunctionType):
        return None
    try:
        return inspect.signature(target)
    except (TypeError, ValueError):
        return None


def _bind_signature(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Bound | None:
    if target is torch.einsum:
        return _einsum(*args), {}
    signature = _signature(target)
    if signature is None:
        return None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    arguments, parameters = dict(bound.arguments), signature.parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name))
    return arguments, {p.name: p.default for p in parameters if p.default is not p.empty}


def _einsum(equation: Any, *operands: Any) -> dict[str, Any]:
    """``einsum(x, [0, 1], w, [2, 1], [0, 2])`` is ``einsum("ab,cb->ac", x, w)``."""
    if isinstance(equation, str):
        several = len(operands) == 1 and isinstance(operands[0], tuple | list)
        return {"equation": equation, "operands": tuple(operands[0] if several else operands)}

    def letters(numbers: Sequence[Any]) -> str:
        return "".join("..." if i is Ellipsis else ascii_letters[i] for i in numbers)

    parts = [equation, *operands]
    result = f"->{letters(parts.pop())}" if len(parts) % 2 else ""
    return {"equation": ",".join(map(letters, parts[1::2])) + result, "operands": tuple(parts[::2])}


@dataclass(frozen=True)
class _Argument:
    name: str
    type: str
    default: Any
    required: bool
    kwarg_only: bool


@cache
def _schemas(op: str) -> tuple[tuple[_Argument, ...], ...]:
    schemas = schemas_of_name(op if "::" in op else f"aten::{op}")
    return tuple(
        tuple(
            _Argument(a.name, str(a.type), a.default_value, not a.has_default_value(), a.kwarg_only)
            for a in schema.arguments
            if not a.is_out
        )
        for schema in schemas
    )


def _bind_schema(op: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> _Bound | None:
    schemas = _schemas(name) + _schemas(op)
    for strict in (True, False):
        for schema in schemas:
            bound = _match(schema, args, kwargs, strict)
            if bound is not None:
                return _as_in_python(op, *bound)
    return None


def _as_in_python(op: str, arguments: dict[str, Any], defaults: dict[str, Any]) -> _Bound:
    """Return a schema's arguments as the function of the same name in `torch.nn.functional` means them.

    There ``padding_idx=-1`` is the last row of a table; in ATen it is the default, and none.
    """
    if op == "embedding" and isinstance(arguments.get("padding_idx"), int) and arguments["padding_idx"] < 0:
        arguments, defaults = {**arguments, "padding_idx": None}, {**defaults, "padding_idx": None}
    return arguments, defaults


def _match(schema: Sequence[_Argument], args: Sequence[Any], kwargs: dict[str, Any], strict: bool) -> _Bound | None:
    positional = [a for a in schema if not a.kwarg_only]
    args = _pack_varargs(positional, args)
    if len(args) > len(positional):
        return None
    arguments = {a.name: value for a, value in zip(positional, args, strict=False)}
    if arguments.keys() & kwargs.keys():
        return None
    names = {a.name for a in schema}
    renamed = {"input": "self", "axis": "dim", "keepdims": "keepdim"}
    arguments |= {key if key in names else renamed.get(key, key): value for key, value in kwargs.items()}
    if not arguments.keys() <= names:
        return None
    for a in schema:
        if a.name not in arguments and a.required:
            return None
        if strict and a.name in arguments and not _fits(arguments[a.name], a.type):
            return None
    defaults = {a.name: a.default for a in schema if not a.required}
    return {a.name: arguments.get(a.name, a.default) for a in schema}, defaults


def _pack_varargs(positional: Sequence[_Argument], args: Sequence[Any]) -> Sequence[Any]:
    """``x.view(2, 3)`` is ``x.view((2, 3))``: several ints where the schema has one list of ints."""
    last = len(positional) - 1
    if not 0 <= last < len(args) or "List[int]" not in positional[last].type:
        return args
    rest = tuple(args[last:])
    return [*args[:last], rest] if all(_is_int(_value(arg)) for arg in rest) else args


def _value(arg: Any) -> Any:
    """Return a node's fake value, or the argument itself."""
    return FAKE.get(arg) if isinstance(arg, fx.Node) else arg


def _is_int(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


# The types of a schema that a value of each kind fits, besides "Any".
_FITTING: tuple[tuple[Any, str], ...] = (
    (Tensor, "Tensor"),
    (bool, "bool number Scalar"),
    (int | torch.SymInt, "int number float List[int]"),
    (float | torch.SymFloat | complex, "float number complex"),
    (str, "str Device"),
    (torch.dtype | torch.layout | torch.memory_format, "int"),
    (torch.device, "Device"),
)


def _fits(arg: Any, type_: str) -> bool:
    value = _value(arg)
    optional = type_.startswith("Optional[")
    if value is None:
        return optional or type_ == "NoneType"
    type_ = type_[len("Optional[") : -1] if optional else type_
    if type_ == "Any":
        return True
    for kind, types in _FITTING:
        if isinstance(value, kind):
            return type_ in types.split()
    if isinstance(value, tuple | list):
        return type_.startswith("List[") and all(_fits(item, type_[len("List[") : -1]) for item in value)
    return True
