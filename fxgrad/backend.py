"""fxgrad as a backend: ``torch.compile(model, backend="fxgrad", options={...})``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import exc

from fxgrad.compiler import SAMPLE_DIM, Captured, Options, compile_graph
from fxgrad.errors import BatchSizeError, OptionError
from fxgrad.api import loss_scale
from fxgrad.quantities import GradSample, check_quantities
from fxgrad.store import Store

_OPTIONS = ("quantity", "loss_reduction", "batch_first", "accumulate", "mixing", "backend")


def fxgrad_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The compiler function that TorchDynamo calls with each graph.

    ``options`` are `fxgrad.transform`'s: quantity, loss_reduction, batch_first, accumulate, mixing, and
    backend, the compiler behind. All inputs have to agree on the batch size.

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
    inputs = [
        example
        for example in example_inputs
        if isinstance(example, Tensor) and not isinstance(example, nn.Parameter) and example.dim() > dim
    ]
    placeholders = gm.graph.find_nodes(op="placeholder")
    user_inputs = [
        example
        for example, node in zip(example_inputs, placeholders, strict=True)
        if any(example is tensor for tensor in inputs) and _is_argument(node)
    ]
    size = _batch_size(user_inputs, dim)
    if size > 1:
        _recapture_where_static(user_inputs, placeholders, example_inputs, dim)
    for tensor in user_inputs:
        setattr(tensor, SAMPLE_DIM, dim)
    try:
        made = Options(
            check_quantities(given.get("quantity", GradSample())),
            loss_scale(given.get("loss_reduction", "sum")),
            given.get("mixing", "error"),
            given.get("backend", "inductor"),
        )
        names: dict[int, str] = {}
        return compile_graph(
            Captured(gm, example_inputs, size, names), made, Store(given.get("accumulate", "error"))
        )
    finally:
        _unmark(user_inputs)


def _is_argument(node: fx.Node) -> bool:
    """Whether a graph input is one of the call's arguments, and no buffer or global."""
    source = getattr(node, "_dynamo_source", None)
    while source is not None and hasattr(source, "base"):
        source = source.base
    return bool(getattr(source, "is_input", False))


def _batch_size(inputs: Sequence[Tensor], dim: int) -> int:
    sizes = {tensor.shape[dim] for tensor in inputs}
    if len(sizes) != 1:
        raise BatchSizeError(
            f"the inputs' sizes on dimension {dim} do not agree on a batch size: {sorted(sizes)}",
            advice="Use fxgrad.transform with in_dims= or batch_size=.",
        )
    return int(sizes.pop())


# Note [Capturing again]
# ~~~~~~~~~~~~~~~~~~~~~~
# A first call is captured with static sizes, in which the batch size has become a number like any other.
# A backend is not asked before, so it asks Dynamo to start over, this time with the sample dims marked
# dynamic. Of Dynamo's own reasons to start over, one may be raised by a backend; it is used here.


def _recapture_where_static(
    inputs: Sequence[Tensor], placeholders: Sequence[fx.Node], examples: Sequence[Any], dim: int
) -> None:
    """See Note [Capturing again]."""
    values = {id(e): node.meta["example_value"] for e, node in zip(examples, placeholders, strict=True)}
    static = [tensor for tensor in inputs if not isinstance(values[id(tensor)].shape[dim], torch.SymInt)]
    if not static:
        return
    if any(getattr(tensor, "_fxgrad_again", False) for tensor in static):
        _unmark(inputs)
        raise BatchSizeError(
            "the model fixes its batch size: it works for one number of samples only",
            advice="Write sizes in terms of x.shape[0].",
        )
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, dim)
        setattr(tensor, "_fxgrad_again", True)
    raise exc.TensorifyScalarRestartAnalysis


def _unmark(inputs: Sequence[Tensor]) -> None:
    from fxgrad.capture import MARKS

    for tensor in inputs:
        for mark in (*MARKS, "_fxgrad_again"):
            tensor.__dict__.pop(mark, None)
