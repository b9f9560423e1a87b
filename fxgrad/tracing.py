"""`fxgrad.trace`: the graph of a model after the passes, without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxgrad.api import engine_of, transform
from fxgrad.capture.dynamo import CapturedCall, check_configured, fresh_function
from fxgrad.capture.dynamo_errors import translated
from fxgrad.capture.parallel import Layers, check_not_parallel
from fxgrad.capture.simple_fsdp import Properties
from fxgrad.compile.context_of import make_context
from fxgrad.compile.pipeline import ONE, Pass, passes_of, run_passes
from fxgrad.engine import Engine, moves_states
from fxgrad.errors import FxgradError
from fxgrad.graph.context import Context
from fxgrad.graph.printing import graph_text
from fxgrad.host.dynamo import BackendCompilerFailed
from fxgrad.samples.batch import Batch


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

    trace runs no computation: it draws no random numbers and changes no buffers. The text has no addresses or paths.

    Args:
        model: a model, or a transformed one, whose options then apply.
        args: as the model takes them.
        kwargs: as the model takes them.

    Returns:
        A `Trace`.

    Raises:
        FxgradError: any error of the transformed model's first call, such as `MixedSamples`; also if the model uses no
            trainable parameter.

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
    engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], passes: Sequence[Pass] | None = None
) -> Trace:
    """Trace a call by Dynamo, run the passes (all, or these) on its graph, and stop there."""
    if isinstance(engine.units, Layers | Properties):
        check_not_parallel(engine.model, "trace")
    kwargs = dict(kwargs)
    engine.pop_sample_weight("forward", kwargs)  # no graph has it
    batch = engine.roles["forward"].find(args, kwargs)

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        check_configured()
        captured = engine.captured(gm, examples, batch.size)
        passes_to_run = passes if passes is not None else passes_of(batch.size, engine.options.quantities)
        dims = captured.held() if passes_to_run is ONE else captured.sample_dims()
        ctx = make_context(captured, engine.options, dims)
        rewritten = run_passes(gm, ctx, passes_to_run)
        raise _Captured(Trace(rewritten, ctx))

    compiled = torch.compile(fresh_function(engine.model), backend=backend, fullgraph=True)
    try:
        CapturedCall(batch, args, kwargs).run(compiled)
    except FxgradError:
        raise
    except Exception as error:
        if isinstance(error, BackendCompilerFailed) and isinstance(error.inner_exception, _Captured):
            return error.inner_exception.trace
        if moves_states(error):
            return capture(engine, args, kwargs, passes)
        raise translated(error, engine.options, engine.model) from error
    raise FxgradError(
        "the model has no graph: it uses no trainable parameter in any tensor op",
        advice="Pass a model whose forward computes with its parameters.",
    )


def settled_batch(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """Return the batch of a call, after its graph showed the states. See Note [States] in fxgrad.samples.batch."""
    roles = engine.roles["forward"]
    batch = roles.find(args, kwargs)
    if not batch.size or not roles.tied(args, kwargs, batch.size):
        return batch
    with contextlib.suppress(Exception):  # the run raises the same error
        capture(engine, args, kwargs, ())
    return roles.find(args, kwargs)
