"""How values lie in memory in the graphs that Inductor compiles."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from fxgrad.host.patches import set_meanwhile
from fxgrad.host.versions import at_least

_AS_TRACED: ContextVar[bool] = ContextVar("_AS_TRACED", default=False)


def read_as_traced() -> AbstractContextManager[object]:
    """Let PyTorch's kernels, which Inductor calls for ops that it has no code for, read what lies as it was traced.

    This is for the graphs that this thread compiles meanwhile.
    Why: some return what they compute laid out as an operand is, where Inductor expects what was traced; some take no
    other layout. Inductor says so of a few, and gives others what a convolution has computed, its channels last.
    Since: torch 2.13, tested; an older one is left as it is.
    Without: replication padding behind a convolution ends in an AssertionError about strides, `matrix_exp` in an error.
    """
    if not at_least("2.13"):
        return contextlib.nullcontext()
    _constrain()
    return set_meanwhile(_AS_TRACED, True)


@functools.lru_cache(maxsize=1)
def _constrain() -> None:
    """Let Inductor ask for the layout of what such kernels read, once."""
    from torch._inductor import lowering

    def constraint(node: torch.fx.Node, *args: Any, **kwargs: Any) -> Any:
        return lowering.constrain_to_fx_strides(node, *args, **kwargs) if _AS_TRACED.get() else (args, kwargs)

    for op in [*lowering.fallbacks]:
        if lowering.maybe_layout_constraints(op) is None:
            lowering.add_layout_constraint(op, constraint)


def written_as(node: torch.fx.Node, strides: Sequence[int | torch.fx.Node]) -> torch.fx.Node:
    """Insert Inductor's own op behind a node, which says in what order a value lies in memory; return its node.

    Why: a copy with another layout says so as well, but Inductor removes one that has the layout that was traced.
    Without: what two ops read is laid out as the loop that computes it, and copied from there.
    """
    with node.graph.inserting_after(max([node, *(one for one in strides if isinstance(one, torch.fx.Node))])):
        return node.graph.call_function(torch.ops.prims.inductor_force_stride_order.default, (node, tuple(strides)))


def write_as_inferred(node: torch.fx.Node) -> None:
    """Let a value be written to memory, in the layout that Inductor infers for it from those of the graph's inputs.

    Why: where nothing says so, it is written contiguous, or computed again for each of its readers.
    Without: max pooling in one graph with its backward takes eight times as long.
    """
    node.meta["inductor_realize_to_strides"] = True
