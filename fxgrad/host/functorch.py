"""torch.func's transforms, forward mode, and AOTAutograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch.autograd import forward_ad as _forward_ad

innermost_transform = torch._C._functorch.peek_interpreter_stack
is_batched = torch._C._functorch.is_batchedtensor
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
forward_level: Callable[[], int] = partial(getattr, _forward_ad, "_current_level")
"""The transform of torch.func that runs, or None; whether a tensor is vmap's, or any transform's; the forward level.

`unwrap_if_dead` takes away the wrapper that a finished transform left on a tensor, as `autograd.Function.apply` does.
The forward level is the number of open `dual_level`s, less one: -1 outside of forward mode. As each step asks for it,
it has no Python frame.

Why: a transformed model computes by one reverse pass of its own, which no transform may go through. A stand-in may be
kept after its vmap, and has no storage that could be compared.
Without: a transformed model inside of torch.func gives wrong gradients or an error of PyTorch's, dual inputs lose their
tangents without a word, and models that call torch.vmap inside fail in the search for shared memory.
"""


def aot_settings(**settings: Any) -> contextlib.AbstractContextManager[Any]:
    """Set AOTAutograd's settings for one compilation.

    Why: a compiled backward may write over what the user's outputs share memory with (``donated_buffer``).
    Without: an output of the model may change in the backward.
    """
    context: contextlib.AbstractContextManager[Any] = torch._functorch.config.patch(**settings)
    return context


def must_be_in_backward() -> contextlib.AbstractContextManager[None]:
    """Tell AOTAutograd's partitioner that what is traced meanwhile belongs into the backward.

    Why: the partitioner moves what the forward knows into the forward, and saves it.
    Since: torch 2.11 to 2.13, tested. An older PyTorch has no such tag, and gets an empty context.
    Without: a Gram matrix is computed and saved in the forward: right numbers, more memory.
    """
    try:
        from torch._functorch._aot_autograd.graph_capture_wrappers import (
            set_partitioner_tag_must_be_in_backward,
        )
    except ImportError:
        return contextlib.nullcontext()
    tagged: contextlib.AbstractContextManager[None] = set_partitioner_tag_must_be_in_backward()
    return tagged


def merge_equal_nodes(gm: torch.fx.GraphModule) -> None:
    """Replace nodes of a functional graph by earlier ones with the same op and arguments, but what the graph returns.

    Why: AOTAutograd does so before it parts a forward from its backward, and not for a graph that has both.
    Without: a step of `forward_backward` computes twice what rules compute again, such as a group norm's statistics.
    """
    from torch._functorch.compile_utils import fx_graph_cse

    gm.graph = fx_graph_cse(gm.graph)
    gm.recompile()
