"""Tensors without values: fake and functional ones."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor as _fake
from torch._subclasses import functional_tensor as _functional

FakeTensor = _fake.FakeTensor
FakeTensorMode = _fake.FakeTensorMode
"""Tensors that have a shape, a dtype and a device, and no values; and the mode in which ops on them work.

Why: shapes are propagated on fake tensors in a mode of the passes' own, with symbolic sizes of their own.
Without: no graph is analysed.
"""

uncached = _fake.disable_fake_tensor_cache
"""Keep a mode from looking up each op's result in PyTorch's cache, and from writing it there.

Why: the proof of independence runs each call once, and writing an entry with symbolic sizes costs as much as the op.
Since: torch 2.11 to 2.13, tested.
Without: the proof is a quarter slower.
"""

FunctionalTensor = _functional.FunctionalTensor
FunctionalTensorMode = _functional.FunctionalTensorMode
"""Tensors in which ops in place, and views, are followed as ops that make new ones; and the mode for such ops.

Why: the proof of independence follows samples through writes into views.
Without: models that write in place are not proved.
"""


def functional(plain: Any) -> Any:
    """Return a functional tensor around another one.

    Why, without: as `FunctionalTensor`.
    """
    return FunctionalTensor.to_functional(plain)


def settled(value: FunctionalTensor) -> Any:
    """Return what a functional tensor stands for now, after all that was written into it.

    Why: the ids of samples are noted for the tensor inside.
    Without: what was written in place is overlooked.
    """
    torch._functionalize_sync(value.elem)
    return torch._from_functional_tensor(value.elem)


def writes_into(value: FunctionalTensor) -> int:
    """Return how often a functional tensor's storage was written to.

    Why: values of equal kind are walked once, unless one was written to.
    Without: results of the proof cannot be shared, which makes it slower.
    """
    return int(torch._functionalize_mutation_counter(value.elem))
