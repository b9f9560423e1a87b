"""Which inputs hold samples, on which dimension, and how many samples there are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fxgrad.errors import BatchSizeError, OptionError

Path = tuple[Any, ...]
Input = tuple[Path, Tensor, int]  # where it was found, the tensor, its sample dimension or SHARED
# In place of a sample dimension:
SHARED = -1  # all samples share the value
LOST = -2  # a value between two graphs: it holds samples, merged or mixed
PACKED_DATA, PACKED_SIZES, PACKED_ORDER = -3, -4, -5  # the tensors of a PackedSequence


def dynamic_dim(role: int) -> int | None:
    """The dimension of a tensor with this role that changes from batch to batch."""
    return role if role >= 0 else None if role in (SHARED, LOST) else 0


def counting_dim(role: int) -> int | None:
    """The dimension of a tensor with this role that has one entry for each sample."""
    return role if role >= 0 else 0 if role == PACKED_ORDER else None


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch of one call: its size, and the sample dimension of every tensor that holds samples."""

    size: int
    dims: Mapping[int, int]  # id(tensor) -> dim; SHARED for an input that all samples share
    tensors: Sequence[Tensor]  # the tensors in dims, kept alive

    def roles(self) -> Iterator[tuple[Tensor, int]]:
        """Every input tensor with its sample dimension or SHARED."""
        for tensor in self.tensors:
            yield tensor, self.dims[id(tensor)]


class Roles:
    """Decides every call's batch; what it once told apart it keeps.

    ``in_dims`` follows torch.vmap: an int or None for all inputs, or a tuple with one entry per
    positional argument, nested like it; a dict gives keyword arguments by name.
    """

    def __init__(
        self, batch_size: int | None, batch_first: bool, in_dims: Any, names: Sequence[str] = ()
    ) -> None:
        is_int = isinstance(batch_size, int) and not isinstance(batch_size, bool)
        if batch_size is not None and not (is_int and batch_size > 0):
            raise OptionError(f"batch_size has to be a positive int or None, not {batch_size!r}")
        _check_in_dims(in_dims)
        self.batch_size, self.default_dim, self.in_dims = batch_size, 0 if batch_first else 1, in_dims
        self.names = names  # of the positional arguments
        self.shared: set[Path] = set()  # inputs that were once seen not to hold samples

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The batch of ``model(*args, **kwargs)``."""
        known = self._of_tensors(args) if not kwargs else None
        if known is not None:
            return known
        found = list(self._inputs(args, kwargs))
        held = [item for item in found if counting_dim(item[2]) is not None]
        sizes = {size for _, tensor, role in held if (size := _size(tensor, role)) is not None}
        if self.batch_size is not None:
            return self._explicit(found, self.batch_size)
        if not held:
            raise BatchSizeError(
                "no tensor among the inputs holds samples, so the batch size is not known",
                advice="Pass the inputs as tensors, or name them with in_dims=.",
            )
        if len(sizes) > 1:
            (path, tensor, dim), (other, tensor2, dim2) = _disagreeing(held)
            raise BatchSizeError(
                f"inputs disagree about the batch size: {_show(path)} has {_size(tensor, dim)} on dimension "
                f"{counting_dim(dim)}, {_show(other)} has {_size(tensor2, dim2)} on dimension {counting_dim(dim2)}",
                advice="Pass in_dims= with None for inputs that all samples share, or batch_size=.",
            )
        return _batch(sizes.pop(), found)

    def _of_tensors(self, args: Sequence[Any]) -> Batch | None:
        """The batch of tensors of which nothing was said and which agree: of most calls, and in every step."""
        dim = self.default_dim
        if self.in_dims is not None or self.batch_size is not None:
            return None
        sizes: set[int] = set()
        unique: dict[int, Tensor] = {}
        for arg in args:
            if type(arg) is not Tensor or arg.dim() <= dim:
                return None
            sizes.add(arg.shape[dim])
            unique[id(arg)] = arg
        if len(sizes) != 1:
            return None
        return Batch(sizes.pop(), dict.fromkeys(unique, dim), list(unique.values()))

    def _explicit(self, found: list[Input], size: int) -> Batch:
        """With an explicit batch_size, inputs of another size are shared by all samples, and stay so."""
        shared = {path for path, tensor, role in found if _size(tensor, role) not in (size, None)}
        shared |= {path for path, _, role in found if role == SHARED}
        if all(path in shared | self.shared for path, _, _ in found):
            raise BatchSizeError(
                f"no input has batch_size={size} on its sample dimension",
                advice="Pass the batch_size of this call's inputs, or leave it out.",
            )
        self.shared |= shared
        return _batch(size, [(p, t, SHARED if p in self.shared else dim) for p, t, dim in found])

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Input]:
        in_dims = self.in_dims
        for i, arg in enumerate(args):
            name = self.names[i] if i < len(self.names) else i
            if isinstance(in_dims, tuple | list):
                spec = in_dims[i] if i < len(in_dims) else _DEFAULT
            else:
                spec = in_dims.get(i, self._named(name)) if isinstance(in_dims, dict) else self._named(name)
            yield from self._walk((name,), arg, spec)
        for name, arg in kwargs.items():
            yield from self._walk((name,), arg, self._named(name))

    def _named(self, name: Any) -> Any:
        if isinstance(self.in_dims, dict):
            return self.in_dims.get(name, _DEFAULT)
        return self.in_dims if isinstance(self.in_dims, int) else _DEFAULT

    def _walk(self, path: Path, value: Any, spec: Any) -> Iterator[Input]:
        if isinstance(value, Tensor):
            if spec is None or value.dim() == 0:
                yield path, value, SHARED
                return
            dim = self.default_dim if spec is _DEFAULT else spec
            if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
                raise BatchSizeError(
                    f"{_show(path)} has {value.dim()} dimension(s), so no sample dimension {dim}",
                    advice="Pass in_dims= with this input's sample dimension, or None where all samples share it.",
                )
            yield path, value, dim % value.dim()
            return
        if isinstance(value, PackedSequence):
            for name, role in _PACKED:
                yield (*path, name), getattr(value, name), role
            return
        if isinstance(spec, tuple | list) and isinstance(value, tuple | list) and len(spec) != len(value):
            raise OptionError(f"in_dims has {len(spec)} entries for the {len(value)} of {_show(path)}")
        for key, item in _children(value):
            below = spec
            if isinstance(spec, tuple | list):
                below = spec[key] if isinstance(key, int) else _DEFAULT
            elif isinstance(spec, dict):
                below = spec.get(key, _DEFAULT)
            yield from self._walk((*path, key), item, below)


def _check_in_dims(in_dims: Any) -> None:
    if isinstance(in_dims, bool | float | str):
        raise OptionError(f"in_dims holds ints, None, tuples, lists and dicts, not {in_dims!r}")
    below = in_dims.values() if isinstance(in_dims, dict) else in_dims if isinstance(in_dims, tuple | list) else ()
    for item in below:
        _check_in_dims(item)


class _Default:
    """No word about this input: the default dimension."""


_DEFAULT = _Default()


_PACKED = (
    ("data", PACKED_DATA),
    ("batch_sizes", PACKED_SIZES),
    ("sorted_indices", PACKED_ORDER),
    ("unsorted_indices", PACKED_ORDER),
)


def _size(tensor: Tensor, role: int) -> int | None:
    dim = counting_dim(role)
    return None if dim is None else tensor.shape[dim]


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a nest of inputs, those of dataclasses included."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for _, item in _children(value) for tensor in tensors_in(item)]


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same nest of inputs with ``function(tensor)`` in every tensor's place."""
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


def _disagreeing(found: list[Input]) -> tuple[Any, Any]:
    first = found[0]
    return first, next(item for item in found if _size(*item[1:]) != _size(*first[1:]))


def _batch(size: int, found: list[Input]) -> Batch:
    dims: dict[int, int] = {}
    for path, tensor, dim in found:
        if dims.setdefault(id(tensor), dim) != dim:
            raise BatchSizeError(
                f"{_show(path)} is passed twice, with its samples in different places",
                advice="Pass a copy of it.",
            )
    unique = {id(tensor): tensor for _, tensor, _ in found}
    return Batch(size, dims, list(unique.values()))


def _show(path: Path) -> str:
    head, *rest = path
    name = f"input {head}" if isinstance(head, int) else f"input {head!r}"
    return name + "".join(f"[{key!r}]" for key in rest)
