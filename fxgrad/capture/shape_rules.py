"""Shape rules in symbolic sizes for ops whose own make the batch size a number.

PyTorch defines some ops in C++ by the integers of their shapes. A trace then holds for one number of samples. While
fxgrad captures, such an op has a definition in Python, by other ops, which keeps symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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
    around = (slice(dim), slice(dim + 1, None))
    before, after = (torch.broadcast_shapes(self.shape[part], indices.shape[part]) for part in around)
    source = self.expand(*before, self.shape[dim], *after)
    return source.gather(dim, indices.expand(*before, indices.shape[dim], *after))


_DEFINITIONS: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.take_along_dim.default: take_along_dim}


def symbolic_shape_rules() -> AbstractContextManager[None]:
    """Put the definitions above in the place of PyTorch's, for whatever is traced meanwhile."""
    return defined_in_python(_DEFINITIONS)
