"""Shape rules in symbolic sizes for ops whose own make the batch size a number.

PyTorch defines some ops in C++ by the integers of their shapes. A trace then holds for one number of samples. While
fxgrad captures, such an op has a definition in Python, by other ops, which keeps symbols.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fxgrad.host.ops import defined_in_python


def take_along_dim(self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """``gather`` of both tensors, broadcast against each other along all dims but ``dim``."""
    if dim is None:
        return self.reshape(-1).gather(0, indices.reshape(-1))
    if self.dim() != indices.dim():
        raise RuntimeError(
            "torch.take_along_dim(): input and indices should have the same number of dimensions, but got "
            f"{self.dim()} dimensions for input, and {indices.dim()} dimensions for indices"
        )
    dim = dim % self.dim()
    before, after = (torch.broadcast_shapes(self.shape[part], indices.shape[part]) for part in _around(dim))
    source = self.expand(*before, self.shape[dim], *after)
    return source.gather(dim, indices.expand(*before, indices.shape[dim], *after))


def _around(dim: int) -> tuple[slice, slice]:
    return slice(dim), slice(dim + 1, None)


_DEFINITIONS: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.take_along_dim.default: take_along_dim}


@contextlib.contextmanager
def symbolic_shape_rules() -> Iterator[None]:
    """The definitions above in the place of PyTorch's, for whatever is traced meanwhile."""
    with defined_in_python(_DEFINITIONS):
        yield
