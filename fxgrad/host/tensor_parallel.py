"""Tensor parallelism: what ``parallelize_module`` has done to a module.

The modules of PyTorch are looked at only where the user has imported them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fxgrad.host.fsdp import forward_hooks

_STYLES = "torch.distributed.tensor.parallel.style"
_PREPARING = {
    "PrepareModuleInput": (
        "input_layouts desired_input_layouts with_kwargs input_kwarg_layouts desired_input_kwarg_layouts "
        "use_local_output"
    ).split(),
    "PrepareModuleOutput": "output_layouts desired_output_layouts use_local_output".split(),
}
"""The styles whose hooks are closures of the style itself, and what those were made with."""


@dataclass(frozen=True)
class StyleHook:
    """A hook of a ParallelStyle: the name of its class, and what it was made with, besides the mesh.

    Why: see `style_hook`.
    Without: see `style_hook`.
    """

    style: str  # "" for the hook of another function
    arguments: tuple[Any, ...]
    mesh: Any


def style_hook(hook: Any) -> StyleHook | None:
    """Return what a hook before or after a forward does for tensor parallelism; None for any other hook.

    Why: ``parallelize_module`` leaves nothing on a module but such hooks, which are closures.
    Without: a model that ``parallelize_module`` divided is refused as one of DTensors.
    """
    if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor"):
        return None
    cells = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
    function = cells.get("input_fn", cells.get("output_fn"))
    styles = sys.modules.get(_STYLES)
    style = cells.get("self")
    for name, fields in _PREPARING.items():
        if style is not None and type(style) is getattr(styles, name, None):
            return StyleHook(name, tuple(getattr(style, field) for field in fields), cells["device_mesh"])
    if isinstance(function, partial) and styles is not None and not function.keywords:
        for name in styles.__all__:
            kind = getattr(styles, name)
            prepares = [getattr(kind, part, None) for part in ("_prepare_input_fn", "_prepare_output_fn")]
            if any(function.func is one for one in prepares if one is not None):
                return StyleHook(name, function.args, cells["device_mesh"])
    return StyleHook("", (), cells.get("device_mesh"))


def style_hooks(
    module: nn.Module, is_ours: Callable[[Any], bool] = lambda hook: False
) -> tuple[list[StyleHook], list[StyleHook], bool]:
    """Return a module's hooks of tensor parallelism before and after its forward, and whether it has others.

    ``is_ours``: whether a hook is of fxgrad's own, and counts as none.

    Why: see `style_hook`.
    Without: see `style_hook`.
    """
    before, after = (
        [style_hook(hook) for hook in hooks.values() if not is_ours(hook)] for hooks in forward_hooks(module)
    )
    others = any(hook is None for hook in [*before, *after])
    return [hook for hook in before if hook], [hook for hook in after if hook], others


def is_distributed(module: nn.Module) -> bool:
    """Return whether a module went through ``distribute_module``.

    Why: of a style that leaves no hooks nothing else tells.
    Without: such a module is taken for an ordinary one.
    """
    return bool(getattr(module, "_distribute_module_applied", False))
