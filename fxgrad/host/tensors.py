"""Attributes of tensors. Each is an `attrgetter`: every step reads them, and a Python function would add a frame."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

identity: Callable[[Any], int] = attrgetter("_cdata")
"""The address of the C++ object behind a tensor or a storage.

Why: PyTorch makes new Python objects for one tensor, and `data_ptr` of a fake storage is nothing.
Since: torch 2.11 to 2.13, tested.
Without: fxgrad cannot distinguish a delivered gradient from another one, nor shared memory from other memory.
"""

version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor's memory was written to, its views included.

Why: what has changed since it was delivered is seen without a look at its values.
Since: torch 2.11 to 2.13, tested.
Without: the guard on p.grad, and Opacus's ledger, would miss what others added in place.
"""

hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""The hooks of `Tensor.register_hook` by their keys, in their order; None before the first.

Why: the guard's hook stands behind the user's, and a user's hook may replace the gradient.
Since: torch 2.11 to 2.13, tested.
Without: a hook that changes a clipped gradient goes unnoticed.
"""

post_accumulate_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_post_accumulate_grad_hook`; None, or nothing, where there are none.

Why: such a hook may change p.grad behind the clipping.
Since: torch 2.11 to 2.13, tested.
Without: Opacus's ledger does not refuse such hooks.
"""

is_view: Callable[[Tensor], bool] = torch.Tensor._is_view
"""Whether a tensor is a view of another.

Why: a write into p.grad that is a view of something changes that too.
Since: torch 2.11 to 2.13, tested.
Without: p.grad that shares memory is put back wrongly after a refusal.
"""

set_versions = torch._C._autograd._unsafe_set_version_counter
"""Set the version numbers of a tuple of tensors.

Why: a stamp of its own tells a delivered gradient from one that lies where it lay.
Since: torch 2.11 to 2.13, tested.
Without: the guard on p.grad cannot know that something was added.
"""


def attach_hooks(tensor: Tensor) -> None:
    """Let the hooks in the dict of a tensor's Python object be those of the C++ object behind it.

    Why: `torch.utils.swap_tensors` gives the Python object another C++ object, which has no hooks.
    Since: torch 2.11 to 2.13, tested.
    Without: after ``model.to`` with swapped tensors the guard on p.grad sees nothing.
    """
    tensor._backward_hooks = tensor._backward_hooks
