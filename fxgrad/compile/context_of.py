"""The passes' context for one captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.capture.captured import Captured, no_samples
from fxgrad.capture.options import Options
from fxgrad.graph.context import Context, TrainableParameter
from fxgrad.kernels.sizes import hint
from fxgrad.samples.symbols import Symbols, expression

UNLIKELY = 7  # the length that a size is taken to have of which nothing is known: no other size should be


def make_context(captured: Captured, options: Options, dims: dict[int, int] | None) -> Context:
    """Return the passes' context: their own symbols, and the inputs as fake values in them; none where dims is None."""
    symbols = Symbols()
    nodes = [node.name for node in captured.placeholders]
    parameters = [
        TrainableParameter(nodes[i], name, tuple(captured.examples[i].shape), captured.examples[i].dtype)
        for name, i in captured.trainable.items()
    ]
    packed = {} if dims is None else captured.packed
    varying = options.varying
    if varying is not None:
        varying = frozenset(nodes[i] for i in captured.parameters if captured.names[i] in varying)
    device = captured.examples[captured.parameters[0]].device if captured.parameters else None
    return Context(
        symbols,
        {} if dims is None else _own_inputs(captured, symbols, dims),
        parameters,
        {nodes[i]: dim for i, dim in (dims or {}).items()},
        options.quantities,
        options.loss_scale,
        options.mixing,
        dict(zip(nodes, captured.names, strict=True)),
        {nodes[i]: None if rows is None else (nodes[rows[0]], nodes[rows[1]]) for i, rows in packed.items()},
        single=captured.single,
        varying=varying,
        may_mix=options.takes(mixing="allow"),
        planner=options.planner(device, captured.batch_size),
    )


def _own_inputs(captured: Captured, symbols: Symbols, dims: dict[int, int]) -> dict[str, Any]:
    """Fake inputs in which the sample dims, and they alone, carry B; of a batch of one, none do."""
    if not dims:
        raise no_samples()
    # A number of samples that no other size is mistaken for, with the real one's divisors.
    batch = symbols.batch(hint=captured.batch_size * 1009)
    known: dict[Any, Any] = {}
    for i, dim in dims.items():
        size = 1 if captured.single else captured.values[i].shape[dim]
        if isinstance(size, torch.SymInt):
            known[expression(size)] = batch
    known |= {expression(size): batch for i, size in enumerate(captured.values) if captured.counts(i)}

    def translate(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expr = expression(size)
        if expr not in known:
            likely = size.node.hint if size.node.hint is not None else UNLIKELY
            known[expr] = symbols.new(f"T{len(known)}", likely)
        return known[expr]

    for i, rows in captured.packed.items():
        if rows is not None:
            symbols.count_rows(translate(captured.values[i].shape[0]))
    at = {} if captured.single else dims
    return {
        node.name: _own_input(value, at.get(i), batch, translate, symbols, traced=i in dims and captured.traced(i))
        for i, (node, value) in enumerate(zip(captured.placeholders, captured.values, strict=True))
    }


def _own_input(value: Any, dim: int | None, batch: Any, translate: Any, symbols: Symbols, *, traced: bool) -> Any:
    if isinstance(value, torch.SymInt):
        return translate(value)
    if not isinstance(value, Tensor):
        return value
    sizes = [batch if d == dim else translate(size) for d, size in enumerate(value.shape)]
    parameter = isinstance(value, nn.Parameter) and value.requires_grad
    with symbols.mode, torch.enable_grad():
        order = sorted(range(len(sizes)), key=lambda d: hint(value.stride(d)), reverse=True)
        dense = torch.empty([sizes[d] for d in order], dtype=value.dtype, device=value.device)
        own = dense.permute([order.index(d) for d in range(len(sizes))])
        if traced:
            return own.requires_grad_().clone()  # no leaf: the graph may change it in place
        return nn.Parameter(own) if parameter else own
