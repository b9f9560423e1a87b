"""Attributes of tensors. Each is an `attrgetter`: every step reads them, and a Python function would add a frame."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

identity: Callable[[Any], int] = attrgetter("_cdata")
is_view: Callable[[Tensor], bool] = torch.Tensor._is_view
"""The address of the C++ object behind a tensor or a storage; and whether a tensor is a view of another.

Why: PyTorch makes new Python objects for one tensor, and `data_ptr` of a fake storage is nothing. A write into p.grad
that is a view changes what it is a view of.
Without: fxgrad cannot distinguish a delivered gradient from another one, nor shared memory from other memory.
"""

has_no_memory: Callable[[Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is one of zeros that PyTorch holds without memory, as the backward of ``sgn`` returns.

Why: it has no address, and cannot be written to. A clone of it has memory.
Without: gradients that are zero everywhere may end a backward with a RuntimeError.
"""

hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
post_accumulate_hooks: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_hook` and of `register_post_accumulate_grad_hook`, by their keys, in their order; or None.

Why: the guard's hook stands behind the user's, and a user's hook may replace the gradient, or p.grad behind it.
Without: a hook that changes a clipped gradient goes unnoticed, and Opacus's ledger does not refuse it.
"""

version: Callable[[Tensor], int] = attrgetter("_version")
set_versions = torch._C._autograd._unsafe_set_version_counter
"""How often a tensor's memory was written to, its views included; and set these numbers for a tuple of tensors.

Why: a change since the delivery, or another gradient that lies where the delivered one lay, is seen without its values.
Without: the guard on p.grad, and Opacus's ledger, would miss what others added in place.
"""

assert_on_device: Callable[[Tensor, str], None] = torch._assert_async
"""Raise unless a 0-dim tensor is true. On CUDA the device itself stops, and the host does not wait for it.

Why: whether a shard's gradient was changed is known on the device alone, and a step waits for no device.
Without: each private step of a model that FSDP2 divided waits for the device.
"""


def attach_hooks(tensor: Tensor) -> None:
    """Let the hooks in the dict of a tensor's Python object be those of the C++ object behind it.

    Why: `torch.utils.swap_tensors` gives the Python object another C++ object, which has no hooks.
    Without: after ``model.to`` with swapped tensors the guard on p.grad sees nothing.
    """
    tensor._backward_hooks = tensor._backward_hooks


def unchanged_since(tensors: Iterable[Tensor]) -> Callable[..., bool]:
    """Return a function that says of tensors, each given once, whether they are as these are now, and the modes, too.

    It compares class, dtype, device, sizes, strides, requires_grad, and to what PyTorch dispatches under the modes:
    functorch's, autocast and inference. It keeps none of them alive.

    Why: checks of each parameter hold until one of these has changed, and reading them in Python takes as long as a
    small layer's products.
    Without: each step of a small model takes some 5 % longer.
    """
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
