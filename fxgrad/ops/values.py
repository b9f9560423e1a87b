"""What a value of a graph is made of: its tensors, and the memory they lie in."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fxgrad.host.functorch import is_wrapped
from fxgrad.host.tensors import identity


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of an op's output, one or several."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [item for item in value if isinstance(item, Tensor)]
    return []


def memory_of(fake: Any) -> int | None:
    """What tells a value's memory from other memory; None for a value that has none, as inside of ``torch.vmap``."""
    if not isinstance(fake, Tensor) or is_wrapped(fake):
        return None
    memory: int = identity(fake.untyped_storage())
    return memory
