"""Autograd's engine and its graph, while a backward runs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import compiled_autograd as _compiled_autograd
from torch.autograd import graph as _graph

current_task = torch._C._current_graph_task_id
will_execute = torch._C._will_engine_execute_node
autograd_engine = torch.autograd.Variable._execution_engine
"""The running backward call: its number, -1 outside of one; whether it goes through a node; a callback at its end.

`will_execute` raises for a leaf under `autograd.grad`. ``autograd_engine.queue_callback(function)`` adds a callback;
the name is the object's, not the method's, as Dynamo knows the object.

Why: deliveries of one backward are not another's, `autograd.grad` runs a part of the graph and leaves p.grad alone, and
PyTorch has no public hook for the end of a backward.
Without: two backwards through one forward are mixed up, gradients are stored for calls of `autograd.grad`, and p.grad
is not checked when all hooks have run.
"""

retains_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward call was given ``retain_graph=True``.

Why: a backward that AOTAutograd compiled may write over what the forward saved for it, and then runs once.
Without: PyTorch's error about donated buffers, which names no argument of the user's.
"""


compiles_backward: Callable[[], bool] = partial(getattr, _compiled_autograd, "in_compiled_autograd_region")
"""Whether the running backward call was traced and compiled as a whole; each step asks, so without a Python frame.

Why: compiled autograd runs the hooks that fxgrad guards p.grad with before those of the user's, whatever their order.
Without: what a hook makes of a clipped gradient reaches p.grad.
"""


def writes_over_saved(node: Any) -> bool:
    """Return whether a node is a compiled backward that may write over what the forward saved for it.

    Why: as `retains_graph`.
    Without: as `retains_graph`.
    """
    function = getattr(type(node), "_forward_cls", None)
    if getattr(function, "compiled_bw", None) is None:  # not compiled yet: it will be for what is asked of it
        return False
    donated = getattr(getattr(function, "metadata", None), "bw_donated_idxs", None)
    return bool(donated) and torch._functorch.config.donated_buffer


run_backward = _graph._engine_run_backward
"""Call the engine as `torch.autograd.backward` does, with as many gradients as there are outputs.

Why: a step that has computed its gradients already runs a backward to deliver them, and each step waits for it.
Without: each step of `forward_backward` looks at its own arguments once more, in twenty calls.
"""


def held_by_others(leaves: Sequence[Tensor]) -> bool:
    """Return whether somebody holds a node that adds to a leaf's gradient; gradients have to be enabled.

    Such a node holds its leaf. So most steps only count references to the leaves, which makes no nodes.

    Since: from torch 2.13 on a graph or C++ may be who holds it; in 2.11, tested, only holders in Python are seen.
    Why: hooks on that node are in no list, and live as long as it does; who sets some keeps the node.
    Without: optimizers that run in hooks (`_apply_optimizer_in_backward`) do nothing in a step of `forward_backward`.
    """
    if [*map(_uses, leaves)].count(_fewest_uses()) == len(leaves):
        return False
    return _references(leaves) > _fewest_references()


_uses: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
# C++ counts all of Python's references as one.


@functools.cache
def _fewest_uses() -> int:
    """Count the references to a leaf that nothing in C++ holds."""
    return _uses(torch.ones(1, requires_grad=True))


def _references(leaves: Sequence[Tensor]) -> int:
    """Count the references to the node that has most; without a Python frame for each leaf."""
    views = map(Tensor.view_as, leaves, leaves)
    nodes = [edges[0][0] for edges in map(_behind, views)]
    return max(map(sys.getrefcount, nodes))


_behind = attrgetter("grad_fn.next_functions")


@functools.cache
def _fewest_references() -> int:
    """Count the references to a node that nobody holds: versions of Python count differently."""
    return _references([torch.ones(1, requires_grad=True)])


BACKWARD_CODE: CodeType = run_backward.__code__
outputs_of_backward: Callable[[Mapping[str, Any]], Iterable[Any]] = itemgetter("t_outputs")

"""The code of the function that calls the engine; and what backward was called on, from that frame's variables.

Why: the engine does not name the outputs that backward began from; its caller's variables do.
Without: a loss that does not go through the model, or one that a GradScaler scaled, is not noticed.
"""


def adds_to_leaves(variables: Mapping[str, Any]) -> bool:
    """Return whether that call is ``backward``, and not ``autograd.grad``.

    Why: as `outputs_of_backward`; for a leaf that the call began with, `will_execute` says False in both.
    Without: ``p.backward(g)`` adds a gradient to p.grad that is not clipped.
    """
    return bool(variables["kwargs"].get("accumulate_grad", True))


function_of: Callable[[type], type] = attrgetter("_forward_cls")
outputs_like: Callable[[Any], Sequence[Any]] = attrgetter("_input_metadata")
"""The autograd.Function of a class of nodes; and what a node's outputs were like in the forward (``shape``).

Why: our own functions stand between a model and its parameters, where paths end; a shape distinguishes a number times
a penalty on parameters from a tensor of samples.
Without: what fxgrad delivers, or a penalty ``0.1 * w.square().sum()``, looks like another use of the parameter.
"""


@contextlib.contextmanager
def saved_tensors_hooks_aside() -> Iterator[None]:
    """Take away all hooks on saved tensors, and put them back in their order.

    Why: fxgrad's first check runs forwards inside of the user's, and a checkpoint around it counts saved tensors.
    Without: a checkpoint around a transformed model fails in the first batch.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def are_saved_tensors_hooked() -> bool:
    """Return whether hooks on saved tensors are set, which may keep copies of them.

    Why: a backward reads a tensor that it was given in the forward, and hooks (offloading) may have copied it by then.
    Without: a bound that changes between forward and backward counts for the noise and not for the clipping.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
