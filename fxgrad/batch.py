"""Which inputs hold samples, on which dimension, and how many samples there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from fxgrad.errors import BatchSizeError, OptionError

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The batch of one call: its size, and the sample dimension of every tensor that holds samples."""

    size: int
    dims: Mapping[int, int]  # id(tensor) -> dim
    tensors: Sequence[Tensor]  # the tensors in dims, kept alive

    def marked(self) -> Iterator[tuple[Tensor, int]]:
        for tensor in self.tensors:
            yield tensor, self.dims[id(tensor)]


class Roles:
    """Decides every call's batch; what it once told apart it keeps.

    ``in_dims`` follows torch.vmap: an int or None for all inputs, or a tuple with one entry per
    positional argument, nested like it; a dict gives keyword arguments by name.
    """

    def __init__(self, batch_size: int | None, batch_first: bool, in_dims: Any) -> None:
        if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool)):
            raise OptionError(f"batch_size has to be an int or None, not {batch_size!r}")
        if batch_size is not None and batch_size < 0:
            raise OptionError(f"batch_size has to be 0 or more, not {batch_size}")
        self.batch_size, self.default_dim, self.in_dims = batch_size, 0 if batch_first else 1, in_dims
        self.shared: set[Path] = set()  # inputs that were once seen not to hold samples
        self.held: set[Path] = set()

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The batch of ``model(*args, **kwargs)``."""
        found = [(path, tensor, dim) for path, tensor, dim in self._candidates(args, kwargs)]
        sizes = {tensor.shape[dim] for _, tensor, dim in found}
        if self.batch_size is not None and self.batch_size in sizes | {None}:
            return self._explicit(found, self.batch_size)
        if self.batch_size is not None:
            raise BatchSizeError(
                f"no input has batch_size={self.batch_size} on its sample dimension",
                advice="Pass the batch_size of this call's inputs, or leave it out.",
            )
        if not found:
            raise BatchSizeError(
                "no tensor among the inputs holds samples, so the batch size is not known",
                advice="Pass the inputs as tensors, or name them with in_dims=.",
            )
        if len(sizes) > 1:
            (path, tensor, dim), (other, tensor2, dim2) = _disagreeing(found)
            raise BatchSizeError(
                f"inputs disagree about the batch size: {_show(path)} has {tensor.shape[dim]} on dimension "
                f"{dim}, {_show(other)} has {tensor2.shape[dim2]} on dimension {dim2}",
                advice="Pass in_dims= with None for inputs that all samples share, or batch_size=.",
            )
        return _batch(sizes.pop(), found)

    def _explicit(self, found: list[tuple[Path, Tensor, int]], size: int) -> Batch:
        """With an explicit batch_size, inputs of another size are shared by all samples."""
        self.shared |= {path for path, tensor, dim in found if tensor.shape[dim] != size}
        held = [item for item in found if item[1].shape[item[2]] == size and item[0] not in self.shared]
        return _batch(size, held or [item for item in found if item[1].shape[item[2]] == size])

    def _candidates(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Path, Tensor, int]]:
        in_dims = self.in_dims
        for i, arg in enumerate(args):
            spec = in_dims
            if isinstance(in_dims, tuple | list):
                spec = in_dims[i] if i < len(in_dims) else _DEFAULT
            elif isinstance(in_dims, dict):
                spec = in_dims.get(i, _DEFAULT)
            elif in_dims is None:
                spec = _DEFAULT
            yield from self._walk((i,), arg, spec)
        for name, arg in kwargs.items():
            spec = in_dims.get(name, _DEFAULT) if isinstance(in_dims, dict) else _DEFAULT
            yield from self._walk((name,), arg, in_dims if isinstance(in_dims, int) else spec)

    def _walk(self, path: Path, value: Any, spec: Any) -> Iterator[tuple[Path, Tensor, int]]:
        if isinstance(value, Tensor):
            if spec is None or value.dim() == 0:
                return
            dim = self.default_dim if spec is _DEFAULT else spec
            if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
                raise BatchSizeError(
                    f"{_show(path)} has {value.dim()} dimension(s), so no sample dimension {dim}",
                    advice="Pass in_dims= with this input's sample dimension, or None where all samples share it.",
                )
            yield path, value, dim % value.dim()
            return
        for key, item in _children(value):
            below = spec
            if isinstance(spec, tuple | list) and isinstance(key, int):
                below = spec[key]
            elif isinstance(spec, dict):
                below = spec.get(key, _DEFAULT)
            yield from self._walk((*path, key), item, below)


class _Default:
    """No word about this input: the default dimension."""


_DEFAULT = _Default()


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def _disagreeing(found: list[tuple[Path, Tensor, int]]) -> tuple[Any, Any]:
    first = found[0]
    return first, next(item for item in found if item[1].shape[item[2]] != first[1].shape[first[2]])


def _batch(size: int, held: list[tuple[Path, Tensor, int]]) -> Batch:
    dims: dict[int, int] = {}
    for path, tensor, dim in held:
        if dims.setdefault(id(tensor), dim) != dim:
            raise BatchSizeError(
                f"{_show(path)} is passed twice with samples on different dimensions",
                advice="Pass a copy of it.",
            )
    unique = {id(tensor): tensor for _, tensor, _ in held}
    return Batch(size, dims, list(unique.values()))


def _show(path: Path) -> str:
    head, *rest = path
    name = f"input {head}" if isinstance(head, int) else f"input {head!r}"
    return name + "".join(f"[{key!r}]" for key in rest)
