"""What a call of a model may change, put back at the end of a context."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxgrad.host.tensors import set_versions, version


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """Return the GPUs of a model's parameters."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(devices, key=str)


@contextmanager
def random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the random states of Python, of NumPy where it is loaded, of the CPU and of the model's GPUs."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numbers = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=cuda_devices(model)):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numbers)


@contextmanager
def modules_kept(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules, with what is in their dicts, lists and sets, and the values of buffers."""
    modules = [vars(module) for module in model.modules()]
    containers = [one for own in modules for one in (own, *own.values()) if type(one) in (dict, list, set)]
    held = [(one, one.copy()) for one in containers]
    buffers = [(buffer, buffer.detach().clone(), version(buffer)) for buffer in model.buffers()]
    try:
        yield
    finally:
        for one, before in held:
            _put_back(one, before)
        for buffer, value, count in buffers:
            if version(buffer) != count:
                buffer.detach().copy_(value)
                set_versions((buffer,), (count,))


def _put_back(one: Any, before: Any) -> None:
    """Let a dict, a list or a set hold what its copy holds; what has not changed is not written to."""
    if type(one) is list:
        if len(one) != len(before) or any(map(operator.is_not, one, before)):
            one[:] = before
        return
    same = one == before if type(one) is set else one.keys() == before.keys()
    if type(one) is dict:
        same = same and all(one[name] is value for name, value in before.items())
    if not same:
        one.clear()
        one.update(before)
