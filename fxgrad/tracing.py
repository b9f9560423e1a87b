"""`fxgrad.trace`: the graph of a model after the passes, without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxgrad.api import engine_of, transform
from fxgrad.capture.captured import Captured
from fxgrad.capture.dynamo import CapturedCall, check_configured, fresh_function
from fxgrad.capture.dynamo_errors import (
    captured_nothing,
    fails_without_dynamo,
    moves_states,
    not_captured,
    translated,
)
from fxgrad.capture.sharded import check_not_sharded
from fxgrad.compile.context_of import make_context
from fxgrad.compile.pipeline import ONE, Pass, passes_of, run_passes
from fxgrad.engine import Engine
from fxgrad.errors import BatchSizeError, FxgradError
from fxgrad.graph.context import Context
from fxgrad.graph.printing import graph_text
from fxgrad.host.dynamo import BackendCompilerFailed
from fxgrad.samples.batch import Batch
from fxgrad.untouched import modules_kept, random_numbers_kept


@dataclass(frozen=True)
class Trace:
    """A rewritten graph, as `fxgrad.trace` returns it; ``str()`` of it is stable, fit for a snapshot.

    Attributes:
        graph_module: the graph after all passes, before the inner compiler.
        context: the facts of the passes besides the graph: sizes, parameters, inputs.

    >>> "tap_linear" in str(trace(nn.Linear(3, 2), torch.ones(4, 3)))
    True
    """

    graph_module: fx.GraphModule
    context: Context

    def __str__(self) -> str:
        return graph_text(self.graph_module, self.context)

    __repr__ = __str__


class _Captured(Exception):
    """Raised to carry the graph out of Dynamo, so that it neither compiles nor runs."""

    def __init__(self, trace: Trace) -> None:
        super().__init__("captured")
        self.trace = trace


def trace(model: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    """Return the rewritten graph of ``model(*args, **kwargs)``, printable and stable.

    trace draws no random numbers, changes no buffers, and computes nothing unless the model fails on the inputs. The
    text has no addresses or paths.

    Args:
        model: a model, or a transformed one, whose options then apply.
        args: as the model takes them.
        kwargs: as the model takes them.

    Returns:
        A `Trace`.

    Raises:
        FxgradError: any error of the transformed model's first call, such as `MixedSamples`; also if the model uses no
            trainable parameter.
        RuntimeError, TypeError, ..: the model's own, for inputs of a wrong shape or number. To raise it, trace calls
            the model, and puts its buffers, attributes and random numbers back.

    Source: the passes of ``fxgrad.compile.pipeline``, on the graph that TorchDynamo captures.

    >>> print(trace(nn.Linear(3, 2, bias=False), torch.ones(4, 3)))
    inputs:
      weight: f32[2, 3]                                               trainable
      input: f32[B, 3]                                                batched(0)
    gradient placeholders:
      grad_placeholder(weight)
    graph:
      tape = new_tape[GradSample]()
      handle = collect(tape, B, grad_placeholder(weight))
      linear = linear(input, weight.detach(), None)                   f32[B, 2] batched(0)
      linear' = tap_linear(tape, B, linear, handle, input, weight.detach())  rule
    return (linear',)
    <BLANKLINE>
    """
    engine = engine_of(model) or engine_of(transform(model))
    assert engine is not None
    return capture(engine, args, kwargs)


def capture(
    engine: Engine,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    passes: Sequence[Pass] | None = None,
    method: str = "__call__",
) -> Trace:
    """Trace a call of a method by Dynamo, run the passes (all, or these) on its graph, and stop there."""
    if engine.units is not None:
        check_not_sharded(engine.model, "trace")
    kwargs = dict(kwargs)
    engine.pop_sample_weight(method, kwargs)  # no graph has it
    batch = engine.roles[method].find(args, kwargs)
    if batch.size == 0:
        raise BatchSizeError("the batch is empty: a graph needs samples", advice="Pass a batch of one or more.")

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        check_configured()
        chosen = passes if passes is not None else passes_of(batch.size, engine.options.quantities)
        raise _Captured(_rewritten(engine, engine.captured(gm, examples, batch.size, method), chosen))

    compiled = torch.compile(fresh_function(engine.original(method)), backend=backend, fullgraph=True)
    try:
        CapturedCall(batch, args, kwargs).run(compiled)
    except FxgradError:
        raise
    except Exception as error:
        if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, _Captured):
            return error.inner_exception.trace
        if moves_states(error):
            return capture(engine, args, kwargs, passes, method)
        if captured_nothing(error):
            raise not_captured(name for name, p in engine.parameters().items() if p.requires_grad) from None
        if fails_without_dynamo(error):
            _raise_own_error(engine, args, kwargs, method)
        raise translated(error, engine.options, engine.model) from error
    raise FxgradError(
        "the model has no graph: it uses no trainable parameter in any tensor op",
        advice="Pass a model whose forward computes with its parameters.",
    )


def _rewritten(engine: Engine, captured: Captured, passes: Sequence[Pass]) -> Trace:
    """Run these passes on a graph from Dynamo."""
    dims = captured.held() if passes is ONE else captured.sample_dims()
    ctx = make_context(captured, engine.options, dims)
    return Trace(run_passes(captured.gm, ctx, passes), ctx)


def _raise_own_error(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], method: str) -> None:
    """Let the model raise what it raises without Dynamo, of wrong shapes or arguments; it stays as it is."""
    with torch.no_grad(), random_numbers_kept(engine.model), modules_kept(engine.model):
        engine.original(method)(*args, **kwargs)


def settled_batch(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "__call__") -> Batch:
    """Return the batch of a call, after its graph showed the states. See Note [States] in fxgrad.samples.batch."""
    roles = engine.roles[method]
    batch = roles.find(args, kwargs)
    if not batch.size or not roles.tied(args, kwargs, batch.size):
        return batch
    with contextlib.suppress(Exception):  # the run raises the same error
        capture(engine, args, kwargs, (), method)
    return roles.find(args, kwargs)
