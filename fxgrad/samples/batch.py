"""The batch of a call: its size, and the sample dimension of each input."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fxgrad.errors import BatchSizeError, OptionError, nearest

Path = tuple[Any, ...]

_ONLY_TENSORS, _size, _ndim = {Tensor}, Tensor.size, Tensor.dim  # for `map`, which adds no Python frame


class Input(NamedTuple):
    """One tensor among the arguments of a call."""

    path: Path
    tensor: Tensor
    role: int  # its sample dimension, or one of the constants below
    named: bool = True  # whether in_dims= names it

    @property
    def size(self) -> int | None:
        """Return the number of samples; None if the role does not show it."""
        dim = counting_dim(self.role)
        return None if dim is None else self.tensor.shape[dim]

    def fits(self, size: int) -> bool:
        return self.size in (size, None)


# In place of a sample dimension:
SHARED = -1  # all samples share the value
LOST = -2  # a value between two graphs, with merged or mixed samples
RAGGED = "Pad samples that have different numbers of rows."
PACKED_DATA, PACKED_SIZES, PACKED_ORDER = -3, -4, -5  # the tensors of a PackedSequence


def dynamic_dim(role: int) -> int | None:
    """Return the dynamic dimension of a tensor with this role."""
    return role if role >= 0 else None if role in (SHARED, LOST) else 0


def counting_dim(role: int) -> int | None:
    """Return the dimension of a tensor with this role that has one entry per sample."""
    return role if role >= 0 else 0 if role == PACKED_ORDER else None


class Batch(NamedTuple):  # no dataclass, which takes 1 us to make
    """The batch of one call: its size, and the role of each input tensor."""

    size: int
    dims: Mapping[int, int]  # id(tensor) -> dim; SHARED for an input that all samples share
    tensors: Sequence[Tensor]  # the tensors in dims, kept alive
    supposed: frozenset[int] = frozenset()  # `id()` of inputs that fit only as states of recurrent layers
    disagreement: BatchSizeError | None = None  # the error to raise if they are no states

    def roles(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each input tensor with its sample dimension or SHARED."""
        for tensor in self.tensors:
            yield tensor, self.dims[id(tensor)]


# Note [States]
# ~~~~~~~~~~~~~
# The states of recurrent layers are [layers * directions, B, hidden], even if ``batch_first=True`` puts the samples of
# all other inputs on dimension 0. The graph shows which inputs are states (recurrent_states.py). PyTorch defines their
# sample dimension, and the passes prove it like any other. fxgrad captures a graph again if it shows states with
# another role. If inputs disagree about the batch size, fxgrad supposes that inputs of three dimensions which would
# agree as states are states, until the graph confirms it.


class Roles:
    """The roles of a model's inputs, from which each call gets its `Batch`; roles once learned stay.

    ``in_dims`` follows torch.vmap: an int or None for all inputs, or a tuple with one entry per
    positional argument, nested like it; a dict gives keyword arguments by name.
    """

    def __init__(self, batch_size: int | None, batch_first: bool, in_dims: Any, names: Sequence[str] = ()) -> None:
        is_int = isinstance(batch_size, int) and not isinstance(batch_size, bool)
        if batch_size is not None and not (is_int and batch_size > 0):
            raise OptionError(
                f"batch_size has to be a positive int or None, not {batch_size!r}",
                advice="Leave it out: fxgrad reads it from the inputs.",
            )
        _check_in_dims(in_dims)
        self.batch_size, self.default_dim, self.in_dims = batch_size, 0 if batch_first else 1, in_dims
        self.names = names  # of the positional arguments
        self.shared: set[Path] = set()  # inputs without samples in an earlier call
        self.states: set[Path] = set()  # states of recurrent layers: see Note [States]

    @classmethod
    def of(cls, method: Callable[..., Any], batch_size: int | None, batch_first: bool, in_dims: Any) -> Roles:
        """Return the roles of a method's inputs; raise where ``in_dims`` names arguments that it does not have."""
        _check_named(in_dims, method)
        return cls(batch_size, batch_first, in_dims, _positional(method))

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """Return the batch of ``model(*args, **kwargs)``."""
        known = self._of_tensors(args) if not kwargs else None
        if known is not None:
            return known
        inputs = list(self._inputs(args, kwargs))
        sizes = list(dict.fromkeys(item.size for item in inputs if item.size is not None))
        if self.batch_size is not None:
            return self._explicit(inputs, self.batch_size)
        if not sizes:
            raise self._no_samples(args, kwargs)
        return _batch(sizes[0], inputs) if len(sizes) == 1 else self._suppose(inputs, sizes)

    def _no_samples(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchSizeError:
        """Return the error of a call without samples, which shows its first input."""
        inputs = [
            *zip([*self.names, *map(str, range(len(self.names), len(args)))], args, strict=False),
            *kwargs.items(),
        ]
        shown = "the call has no inputs"
        advice = "Pass the batch as tensors (torch.as_tensor), with the samples on dimension 0."
        if inputs:
            name, value = inputs[0]
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            shown = f"input '{name}' is of type {type(value).__name__}{shape}"
        if any(isinstance(value, Tensor) and value.dim() for _, value in inputs):
            advice = "Name the sample dimension of an input in in_dims=, which says that all samples share them."
        return BatchSizeError(
            f"no tensor among the inputs holds samples, so the batch size is not known: {shown}", advice=advice
        )

    def _suppose(self, inputs: list[Input], sizes: list[int]) -> Batch:
        """Resolve a disagreement by taking inputs of three dimensions for states. See Note [States]."""
        error = _disagreement(inputs)
        for size in sizes:
            moved = [item if item.fits(size) else self._as_state(item, size) for item in inputs]
            if all(item.fits(size) for item in moved):
                supposed = frozenset(id(item.tensor) for item in inputs if not item.fits(size))
                return _batch(size, moved)._replace(supposed=supposed, disagreement=error)
        raise error

    def _as_state(self, item: Input, size: int) -> Input:
        """Return the input with samples on dimension 1 if it may be a state of a recurrent layer."""
        shape = item.tensor.shape
        may_be = not item.named and self.default_dim == 0 and len(shape) == 3 and shape[1] == size
        return item._replace(role=1) if may_be else item

    def tied(self, args: Sequence[Any], kwargs: Mapping[str, Any], size: int) -> bool:
        """Decide whether an input fits both as samples and as a state."""
        return any(self._as_state(item, size).role != item.role for item in self._inputs(args, kwargs))

    def learn_states(self, args: Sequence[Any], kwargs: Mapping[str, Any], size: int, states: Set[int]) -> bool:
        """Record the inputs whose `id()` is in ``states``; return whether one of them had another role before."""
        inputs = [item for item in self._inputs(args, kwargs) if id(item.tensor) in states]
        moved = {item.path for item in inputs if self._as_state(item, size).role != item.role}
        self.states |= moved
        self.shared -= moved
        return bool(moved)

    def _of_tensors(self, args: Sequence[Any]) -> Batch | None:
        """Return the batch of plain tensors that agree, without in_dims or batch_size; the fast path of each step."""
        dim = self.default_dim
        if self.in_dims is not None or self.batch_size is not None or self.states:
            return None
        if {*map(type, args)} != _ONLY_TENSORS or min(map(_ndim, args)) <= dim:
            return None
        sizes, dims = {*map(_size, args, repeat(dim))}, dict.fromkeys(map(id, args), dim)
        return Batch(sizes.pop(), dims, args) if len(sizes) == 1 and len(dims) == len(args) else None

    def _explicit(self, inputs: list[Input], size: int) -> Batch:
        """Return the batch of an explicit batch_size; inputs of another size are shared, in later calls too."""
        shared = {item.path for item in inputs if not item.fits(size) or item.role == SHARED}
        if all(item.path in shared | self.shared for item in inputs):
            raise BatchSizeError(
                f"no input has batch_size={size} on its sample dimension",
                advice=f"Pass the batch_size of this call's inputs, or leave it out. {RAGGED}",
            )
        self.shared |= shared
        return _batch(size, [item._replace(role=SHARED) if item.path in self.shared else item for item in inputs])

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Input]:
        for i, arg in enumerate(args):
            name = self.names[i] if i < len(self.names) else i
            yield from self._walk((name,), arg, self._spec(i, name))
        for name, arg in kwargs.items():
            yield from self._walk((name,), arg, self._spec(name))

    def _spec(self, *keys: Any) -> Any:
        """Return the part of ``in_dims`` for an argument with this position or name."""
        if isinstance(self.in_dims, int):
            return self.in_dims
        specs = (_below(self.in_dims, key) for key in keys)
        return next((spec for spec in specs if spec is not _DEFAULT), _DEFAULT)

    def _walk(self, path: Path, value: Any, spec: Any) -> Iterator[Input]:
        if isinstance(value, Tensor):
            if spec is None or value.dim() == 0:
                yield Input(path, value, SHARED)
                return
            if spec is _DEFAULT and path in self.states and value.dim() == 3:
                yield Input(path, value, 1)
                return
            dim = self.default_dim if spec is _DEFAULT else spec
            if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
                raise BatchSizeError(
                    f"{_show(path)} has {value.dim()} dimension(s), so no sample dimension {dim}",
                    advice="Pass in_dims= with this input's sample dimension, or None where all samples share it.",
                )
            yield Input(path, value, dim % value.dim(), named=spec is not _DEFAULT)
            return
        if isinstance(value, PackedSequence):
            for name, role in _PACKED:
                yield Input((*path, name), getattr(value, name), role)
            return
        if isinstance(spec, tuple | list) and isinstance(value, tuple | list) and len(spec) != len(value):
            raise OptionError(
                f"in_dims has {len(spec)} entries for the {len(value)} of {_show(path)}",
                advice="Give one for each, or a single one for all of them.",
            )
        for key, item in _children(value):
            below = _below(spec, key) if isinstance(spec, tuple | list | dict) else spec
            yield from self._walk((*path, key), item, below)


def _positional(method: Callable[..., Any]) -> list[str]:
    """Return the names of a method's positional arguments: an input has one role, by position or by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(method).parameters.items() if p.kind in kinds]


def _check_named(in_dims: Any, method: Callable[..., Any]) -> None:
    """Raise where ``in_dims`` names arguments that a method does not have."""
    takes, names = inspect.signature(method).parameters, _positional(method)
    kinds = {parameter.kind for parameter in takes.values()}
    if isinstance(in_dims, dict) and inspect.Parameter.VAR_KEYWORD not in kinds:
        for name in in_dims:
            if isinstance(name, str) and name not in takes:
                raise OptionError(
                    f"in_dims names '{name}', which {method.__name__} does not take",
                    advice=nearest(name, takes, f"It takes {', '.join(takes)}."),
                )
    one_each = isinstance(in_dims, tuple | list) and inspect.Parameter.VAR_POSITIONAL not in kinds
    if one_each and len(in_dims) > len(names):
        raise OptionError(
            f"in_dims has {len(in_dims)} entries, and {method.__name__} takes {len(names)}: {', '.join(names)}",
            advice="Give one for each positional argument, or a dict by name.",
        )


def _check_in_dims(in_dims: Any) -> None:
    if isinstance(in_dims, bool | float | str):
        raise OptionError(
            f"in_dims holds ints, None, tuples, lists and dicts, not {in_dims!r}",
            advice="Give each positional argument's sample dimension, such as in_dims=(0, None), or a dict by name.",
        )
    below = in_dims.values() if isinstance(in_dims, dict) else in_dims if isinstance(in_dims, tuple | list) else ()
    for item in below:
        _check_in_dims(item)


_DEFAULT = object()  # in place of a dimension: an input that in_dims does not name takes the default dimension


def _below(spec: Any, key: Any) -> Any:
    """Return the entry of a part of ``in_dims`` for an argument, an item or a field; None or a number has none."""
    if isinstance(spec, tuple | list):
        return spec[key] if isinstance(key, int) and key < len(spec) else _DEFAULT
    return spec.get(key, _DEFAULT) if isinstance(spec, dict) else _DEFAULT


_PACKED = (
    ("data", PACKED_DATA),
    ("batch_sizes", PACKED_SIZES),
    ("sorted_indices", PACKED_ORDER),
    ("unsorted_indices", PACKED_ORDER),
)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested inputs, dataclasses included."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, item in _children(value) for tensor in tensors_in(item)]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Replace each tensor in nested inputs by ``function(tensor)``."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(item, function)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: map_tensors(item, function) for name, item in _children(value)}
        return dataclasses.replace(value, **fields)
    return value


def _disagreement(inputs: list[Input]) -> BatchSizeError:
    first, *others = (item for item in inputs if item.size is not None)
    other = next(item for item in others if item.size != first.size)
    return BatchSizeError(
        f"inputs disagree about the batch size: {_show(first.path)} has {first.size} on dimension "
        f"{counting_dim(first.role)}, {_show(other.path)} has {other.size} on dimension {counting_dim(other.role)}",
        advice=f"Pass in_dims= with None for inputs that all samples share, or batch_size=. {RAGGED}",
    )


def _batch(size: int, inputs: list[Input]) -> Batch:
    dims: dict[int, int] = {}
    for path, tensor, dim, _ in inputs:
        if dims.setdefault(id(tensor), dim) != dim:
            raise BatchSizeError(
                f"{_show(path)} is passed twice, with its samples in different places",
                advice="Pass a copy of it.",
            )
    unique = {id(item.tensor): item.tensor for item in inputs}
    return Batch(size, dims, list(unique.values()))


def _show(path: Path) -> str:
    head, *rest = path
    name = f"input {head}" if isinstance(head, int) else f"input {head!r}"
    return name + "".join(f"[{key!r}]" for key in rest)
