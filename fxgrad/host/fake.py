"""Tensors without values: fake and functional ones."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake
from torch._subclasses import functional_tensor as _functional

FakeTensor = _fake.FakeTensor
"""A tensor that has a shape, a dtype and a device, and no values.

Why: shapes are propagated on fake tensors, and a graph is traced with them.
Since: torch 2.11 to 2.13, tested.
Without: no graph is analysed.
"""

FakeTensorMode = _fake.FakeTensorMode
"""The mode in which ops on fake tensors work.

Why: the passes have a mode of their own, with symbolic sizes of their own.
Since: torch 2.11 to 2.13, tested.
Without: no graph is analysed.
"""

uncached = _fake.disable_fake_tensor_cache
"""Keep a mode from looking up each op's result in PyTorch's cache, and from writing it there.

Why: the proof of independence runs each call once, and writing an entry with symbolic sizes costs as much as the op.
Since: torch 2.11 to 2.13, tested.
Without: the proof is a quarter slower.
"""

FunctionalTensor = _functional.FunctionalTensor
"""A tensor in which ops in place, and views, are followed as ops that make new ones.

Why: the proof of independence follows samples through writes into views.
Since: torch 2.11 to 2.13, tested.
Without: models that write in place are not proved.
"""

FunctionalTensorMode = _functional.FunctionalTensorMode
"""The mode in which ops on functional tensors work.

Why: as `FunctionalTensor`.
Since: torch 2.11 to 2.13, tested.
Without: as `FunctionalTensor`.
"""


def functional(plain: Any) -> Any:
    """A functional tensor around another one.

    Why: as `FunctionalTensor`.
    Since: torch 2.11 to 2.13, tested.
    Without: as `FunctionalTensor`.
    """
    return FunctionalTensor.to_functional(plain)


def settled(value: FunctionalTensor) -> Any:
    """What a functional tensor stands for now, after all that was written into it.

    Why: the ids of samples are noted for the tensor inside.
    Since: torch 2.11 to 2.13, tested.
    Without: what was written in place is overlooked.
    """
    torch._functionalize_sync(value.elem)
    return torch._from_functional_tensor(value.elem)


def writes_into(value: FunctionalTensor) -> int:
    """How often a functional tensor's storage was written to.

    Why: values of equal kind are walked once, unless one was written to.
    Since: torch 2.11 to 2.13, tested.
    Without: results of the proof cannot be shared, which makes it slower.
    """
    return int(torch._functionalize_mutation_counter(value.elem))
