"""fxgrad as a backend: ``torch.compile(model, backend="fxgrad", options={...})``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxgrad.capture.captured import SAMPLE_DIM, Captured, is_argument
from fxgrad.capture.dynamo import unmark
from fxgrad.capture.options import FREE, Options, check_strategy, loss_scale
from fxgrad.compile.compiler import compile_graph
from fxgrad.costs.choices import overrides_of
from fxgrad.errors import BatchSizeError, GraphBreak, OptionError, nearest
from fxgrad.host.dynamo import CaptureAgain, mark_dynamic
from fxgrad.ops.facts import EXAMPLE
from fxgrad.quantities import GradSample, Quantity, check_quantities
from fxgrad.runtime.graph_stores import STORES
from fxgrad.runtime.guard import guard_for
from fxgrad.runtime.store import Store

_AGAIN = "_fxgrad_again"  # an attribute of inputs while Dynamo captures a second time
_OPTIONS = (
    "quantity",
    "loss_reduction",
    "batch_first",
    "accumulate",
    "mixing",
    "backend",
    "strategy",
    "memory_limit",
    "on_result",
)


def fxgrad_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph; TorchDynamo calls this function with each one.

    ``options`` are `fxgrad.transform`'s: quantity, loss_reduction, batch_first, accumulate, mixing,
    strategy, memory_limit, on_result, and backend, the inner compiler. All inputs have to agree on the batch size.
    Where torch.compile breaks the model into several graphs, each calls on_result for its own parameters. Parameters
    go by Dynamo's names for them.

    >>> model = torch.compile(nn.Linear(3, 2), backend="fxgrad", options={"backend": "eager"})
    >>> model(torch.ones(4, 3)).sum().backward()
    >>> tuple(model.weight.grad_sample.shape)
    (4, 2, 3)
    """
    user_options = dict(options or {})
    unknown = sorted(user_options.keys() - set(_OPTIONS))
    if unknown:
        raise OptionError(
            f"the fxgrad backend has no option '{unknown[0]}'",
            advice=nearest(unknown[0], _OPTIONS, f"It has {', '.join(_OPTIONS)}."),
        )
    settings = Options(
        check_quantities(user_options.get("quantity", GradSample())),
        loss_scale(user_options.get("loss_reduction", "sum")),
        user_options.get("mixing", "error"),
        user_options.get("backend", "inductor"),
        fullgraph=False,  # torch.compile decides; later graphs read the sample dims from their inputs
        named=False,
        memory_limit=user_options.get("memory_limit", FREE),
    )
    settings.check(one_graph=False)
    strategy = user_options.get("strategy")
    check_strategy(strategy, settings.quantities)
    _check_whole(gm, settings.quantities)
    dim = 0 if user_options.get("batch_first", True) else 1
    placeholders = gm.graph.find_nodes(op="placeholder")
    batched = _held(placeholders, example_inputs, dim)
    size = _batch_size(batched)
    if size > 1:
        _recapture_where_static(batched, placeholders, example_inputs)
    fresh = [(tensor, sample_dim) for tensor, sample_dim in batched if getattr(tensor, SAMPLE_DIM, None) is None]
    for tensor, sample_dim in fresh:
        setattr(tensor, SAMPLE_DIM, sample_dim)
    whole = not all(quantity.adds for quantity in settings.quantities)  # otherwise this graph may be one of several
    try:
        captured = Captured(gm, example_inputs, size, {}, fullgraph=False)
        settings.overrides = overrides_of(strategy, captured.aliases(), whole=whole)
        return compile_graph(captured, settings, _store(user_options, settings.quantities))
    finally:
        for tensor, _ in fresh:
            _unmark(tensor)


def _store(options: Mapping[str, Any], quantities: tuple[Quantity, ...]) -> Store:
    guard = guard_for(quantities)
    store = Store(options.get("accumulate", "error"), quantities, guard, options.get("on_result"))
    STORES.add(store)
    if guard is not None:
        weakref.finalize(store, guard.release).atexit = False
    return store


def _check_whole(gm: fx.GraphModule, quantities: Sequence[Quantity]) -> None:
    """Raise at a graph break if a quantity needs the whole model; norms of parts do not give its norms."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    alone = next((quantity for quantity in quantities if not quantity.adds), None)
    if alone is not None and reason is not None and getattr(reason, "graph_break", False):
        stack = getattr(reason, "user_stack", None)
        raise GraphBreak(
            f"{alone} needs the whole model as one graph, and there is a graph break: {reason.reason}",
            where=f"{PurePath(stack[-1].filename).name}:{stack[-1].lineno}   {stack[-1].line or ''}" if stack else "",
            advice="Write that line in traceable PyTorch; torch.compile(.., fullgraph=True) says more.",
        )


def _held(placeholders: Sequence[fx.Node], examples: Sequence[Any], dim: int) -> list[tuple[Tensor, int]]:
    """Return the inputs with samples and their sample dimensions: arguments, and outputs of earlier graphs."""
    batched = []
    for node, example in zip(placeholders, examples, strict=True):
        if not isinstance(example, Tensor) or isinstance(example, nn.Parameter) or not is_argument(node):
            continue
        sample_dim = getattr(example, SAMPLE_DIM, dim)
        if 0 <= sample_dim < example.dim():
            batched.append((example, sample_dim))
    return batched


def _batch_size(batched: Sequence[tuple[Tensor, int]]) -> int:
    sizes = {tensor.shape[dim] for tensor, dim in batched}
    if len(sizes) != 1:
        raise BatchSizeError(
            f"the inputs do not agree on a batch size: {sorted(sizes)}",
            advice="Use fxgrad.transform with in_dims= or batch_size=.",
        )
    return int(sizes.pop())


# Note [Capturing again]
# ~~~~~~~~~~~~~~~~~~~~~~
# Dynamo captures a first call with static sizes, in which the batch size is a number. The backend cannot act earlier.
# So it marks the sample dims dynamic and makes Dynamo start over. It raises the one exception for a restart of Dynamo
# that a backend may raise.


def _recapture_where_static(
    batched: Sequence[tuple[Tensor, int]], placeholders: Sequence[fx.Node], examples: Sequence[Any]
) -> None:
    """Restart the capture if a sample dim is static. See Note [Capturing again]."""
    values = {id(e): EXAMPLE.of(node) for e, node in zip(examples, placeholders, strict=True)}
    static = [tensor for tensor, dim in batched if not isinstance(values[id(tensor)].shape[dim], torch.SymInt)]
    if not static:
        return
    if any(getattr(tensor, _AGAIN, False) for tensor in static):
        for tensor, _ in batched:
            _unmark(tensor)
        raise BatchSizeError(
            "the model fixes its batch size: it works for one number of samples only",
            advice="Write sizes in terms of x.shape[0].",
        )
    for tensor, dim in batched:
        mark_dynamic(tensor, dim)
        setattr(tensor, _AGAIN, True)
    raise CaptureAgain


def _unmark(tensor: Tensor) -> None:
    unmark(tensor)
    tensor.__dict__.pop(_AGAIN, None)
