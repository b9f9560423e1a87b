"""The dispatcher: modes, and which of its keys are on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dispatch import python as _python
from torch.utils import _python_dispatch

TorchDispatchMode = _python_dispatch.TorchDispatchMode
disable_current_modes = _python_dispatch._disable_current_modes
"""The base class of modes that see each op; and how to run ops on plain tensors, out of sight of every mode.

Why: the proof follows samples through every ATen op, and `verify` counts them. Ids, trial values and timings are
computed while a fake mode or a tracer is on.
Without: nothing is proved, as fake tensors have no values.
"""

any_mode = torch._C._len_torch_dispatch_stack
"""The number of modes of this thread that are on, PyTorch's own among them.

Why: each call asks.
Without: as `mode_of_the_user`.
"""


def is_profiled() -> bool:
    """Return whether a profiler of PyTorch's is on.

    Why: what goes past the dispatcher has no name in a profile.
    Without: a profile of a transformed model does not say what its kernels compute.
    """
    return torch.autograd.profiler._is_profiler_enabled


def mode_of_the_user() -> TorchDispatchMode | None:
    """Return a mode that is on and is not PyTorch's own machinery, such as a FlopCounterMode; None without.

    Why: under one, Dynamo compiles nothing, and skips the function from then on.
    Without: a call inside of a FlopCounterMode, and all later calls, end in a RuntimeError of PyTorch's.
    """
    for i in range(any_mode()):
        mode: TorchDispatchMode = torch._C._get_dispatch_stack_at(i)
        if not mode.is_infra_mode() and not mode.ignore_compile_internals():
            return mode
    return None


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device.

Why: AOTAutograd switches it off around a graph that was traced in it.
Without: a graph called without AOTAutograd would have its products in bfloat16.
"""

enable_python_dispatcher = _python.enable_python_dispatcher
"""Let Python's definitions of composite ops run, which keep symbolic sizes.

Why: C++ definitions turn symbolic sizes into numbers, or fail on them.
Without: shapes of many models (attention, interpolation) are not found with a symbolic batch.
"""

tracer: Callable[[], Any] = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)
"""The mode by which make_fx, AOTAutograd's tracer, records ops; None where nothing is traced.

Why: a selective checkpoint's policy is asked once for each traced op, and not when the graph runs.
Without: policies are asked twice, and those that count ops answer wrongly.
"""

BELOW_AUTOGRAD, BELOW_VIEWS = torch._C._after_autograd_keyset, torch._C._after_ADInplaceOrView_keyset
DEVICES = {torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA}
"""The dispatcher's keys that come after autograd's, and after those of views; and the keys of devices' own kernels.

Among the keys that a call at autograd's key has below views, the highest is a device's where no mode, no tracer and no
other class of tensors comes in between.

Why: a kernel at the key of autograd refuses gradients that an operator has not. Right before a device's it is also what
computes, and elsewhere it goes on with the keys below.
Without: the dispatcher warns for such operators, and the gradient is missing.
"""

KeySet = torch._C.DispatchKeySet
without_keys = torch._C._ExcludeDispatchKeyGuard
"""A context in which the dispatcher passes over a set of keys, and such a set; no function, as each step uses it.

Why: an operator's autocast kernel calls the operator again, below autocast.
Without: fxgrad::recurrence calls itself without end under autocast.
"""


def autocast_keys(device_type: str) -> KeySet:
    """Return the key of autocast for ``"cpu"`` or ``"cuda"``, as a set, to be passed over by `without_keys`.

    Why, without: as `without_keys`.
    """
    return KeySet(getattr(torch._C.DispatchKey, autocast_key(device_type)))


def autocast_key(device_type: str) -> str:
    """The name of autocast's key for a device: ``AutocastCPU``, under which a `torch.library.Library` has a kernel.

    Why: PyTorch documents how a Library takes such a name, and not the names.
    Without: fxgrad::recurrence computes in float32 under autocast.
    """
    return f"Autocast{device_type.upper()}"


def with_autograd() -> contextlib.AbstractContextManager[None]:
    """Let autograd record again inside of the body of an operator, where the dispatcher has switched it off.

    Why: the body of our operator computes a vjp; `torch.enable_grad` alone does not bring the key back.
    Without: custom ops that torch.func cannot differentiate have no per-sample gradients.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    below = torch._C.DispatchKey.AutogradFunctionality
    included = torch._C._dispatch_tls_local_include_set()
    guard: contextlib.AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(included, excluded.remove(below))
    return guard
