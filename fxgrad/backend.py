"""fxgrad as a backend: ``torch.compile(model, backend="fxgrad", options={...})``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import exc

from fxgrad.captured import SAMPLE_DIM, Captured, is_argument
from fxgrad.compiler import compile_graph
from fxgrad.costs.choices import wishes_of
from fxgrad.dynamo import MARKS
from fxgrad.errors import BatchSizeError, GraphBreak, OptionError
from fxgrad.guard import guard_for
from fxgrad.options import Options, check_strategy, loss_scale
from fxgrad.quantities import GradSample, Quantity, check_quantities
from fxgrad.room import FREE, check_limit
from fxgrad.store import Accumulate, Store

_AGAIN = "_fxgrad_again"  # on an input while Dynamo captures a second time
_OPTIONS = ("quantity", "loss_reduction", "batch_first", "accumulate", "mixing", "backend", "strategy", "memory_limit")


def fxgrad_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The compiler function that TorchDynamo calls with each graph.

    ``options`` are `fxgrad.transform`'s: quantity, loss_reduction, batch_first, accumulate, mixing,
    strategy, memory_limit, and backend, the compiler behind. All inputs have to agree on the batch size.

    >>> model = torch.compile(nn.Linear(3, 2), backend="fxgrad", options={"backend": "eager"})
    >>> model(torch.ones(4, 3)).sum().backward()
    >>> tuple(model.weight.grad_sample.shape)
    (4, 2, 3)
    """
    given = dict(options or {})
    unknown = sorted(given.keys() - set(_OPTIONS))
    if unknown:
        raise OptionError(f"the fxgrad backend has no option {', '.join(unknown)}", advice=f"It has {_OPTIONS}.")
    dim = 0 if given.get("batch_first", True) else 1
    placeholders = gm.graph.find_nodes(op="placeholder")
    held = _held(placeholders, example_inputs, dim)
    size = _batch_size(held)
    if size > 1:
        _recapture_where_static(held, placeholders, example_inputs)
    fresh = [(tensor, own) for tensor, own in held if getattr(tensor, SAMPLE_DIM, None) is None]
    for tensor, own in fresh:
        setattr(tensor, SAMPLE_DIM, own)
    made = Options(
        check_quantities(given.get("quantity", GradSample())),
        loss_scale(given.get("loss_reduction", "sum")),
        given.get("mixing", "error"),
        given.get("backend", "inductor"),
        fullgraph=False,  # the user's torch.compile decides; later graphs find the samples by their inputs' roles
        named=False,
        memory_limit=given.get("memory_limit", FREE),
    )
    check_limit(made.memory_limit)
    made.check_each()
    strategy = given.get("strategy")
    check_strategy(strategy, made.quantities)
    _check_whole(gm, made.quantities)
    whole = not all(quantity.adds for quantity in made.quantities)  # else this may be one graph of several
    try:
        captured = Captured(gm, example_inputs, size, {}, fullgraph=False)
        made.wishes = wishes_of(strategy, captured.parameter_names(), whole=whole)
        return compile_graph(captured, made, _store(given.get("accumulate", "error"), made.quantities))
    finally:
        _unmark([tensor for tensor, _ in fresh])


STORES: weakref.WeakSet[Store] = weakref.WeakSet()  # of the graphs that torch.compile handed over


def _store(policy: Accumulate, quantities: tuple[Quantity, ...]) -> Store:
    guard = guard_for(quantities)
    store = Store(policy, quantities, guard)
    STORES.add(store)
    if guard is not None:
        weakref.finalize(store, guard.release).atexit = False
    return store


def _check_whole(gm: fx.GraphModule, quantities: Sequence[Quantity]) -> None:
    """A part of a model has norms of its own: they say nothing of the whole's."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    alone = next((quantity for quantity in quantities if not quantity.adds), None)
    if alone is not None and reason is not None and getattr(reason, "graph_break", False):
        stack = getattr(reason, "user_stack", None)
        raise GraphBreak(
            f"{alone} needs the whole model as one graph, and there is a graph break: {reason.reason}",
            where=f"{PurePath(stack[-1].filename).name}:{stack[-1].lineno}   {stack[-1].line or ''}" if stack else "",
            advice="Write that line in traceable PyTorch; torch.compile(.., fullgraph=True) says more.",
        )


def _held(
    placeholders: Sequence[fx.Node], examples: Sequence[Any], dim: int
) -> list[tuple[Tensor, int]]:
    """The inputs that hold samples, with their sample dimension: arguments, and what an earlier graph made."""
    found = []
    for node, example in zip(placeholders, examples, strict=True):
        if not isinstance(example, Tensor) or isinstance(example, nn.Parameter) or not is_argument(node):
            continue
        own = getattr(example, SAMPLE_DIM, dim)
        if 0 <= own < example.dim():
            found.append((example, own))
    return found


def _batch_size(held: Sequence[tuple[Tensor, int]]) -> int:
    sizes = {tensor.shape[dim] for tensor, dim in held}
    if len(sizes) != 1:
        raise BatchSizeError(
            f"the inputs do not agree on a batch size: {sorted(sizes)}",
            advice="Use fxgrad.transform with in_dims= or batch_size=.",
        )
    return int(sizes.pop())


# Note [Capturing again]
# ~~~~~~~~~~~~~~~~~~~~~~
# A first call is captured with static sizes, in which the batch size has become a number like any other.
# A backend is not asked before, so it asks Dynamo to start over, this time with the sample dims marked
# dynamic. Of Dynamo's own reasons to start over, one may be raised by a backend; it is used here.


def _recapture_where_static(
    held: Sequence[tuple[Tensor, int]], placeholders: Sequence[fx.Node], examples: Sequence[Any]
) -> None:
    """See Note [Capturing again]."""
    values = {id(e): node.meta["example_value"] for e, node in zip(examples, placeholders, strict=True)}
    static = [tensor for tensor, dim in held if not isinstance(values[id(tensor)].shape[dim], torch.SymInt)]
    if not static:
        return
    if any(getattr(tensor, _AGAIN, False) for tensor in static):
        _unmark([tensor for tensor, _ in held])
        raise BatchSizeError(
            "the model fixes its batch size: it works for one number of samples only",
            advice="Write sizes in terms of x.shape[0].",
        )
    for tensor, dim in held:
        torch._dynamo.mark_dynamic(tensor, dim)
        setattr(tensor, _AGAIN, True)
    raise exc.TensorifyScalarRestartAnalysis


def _unmark(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        for mark in (*MARKS, _AGAIN):
            tensor.__dict__.pop(mark, None)
