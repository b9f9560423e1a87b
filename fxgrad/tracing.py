"""`fxgrad.trace`: what the passes make of a model, without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import exc

from fxgrad.api import engine_of, transform
from fxgrad.batch import Batch
from fxgrad.capture import Engine, moves_states
from fxgrad.captured import make_context
from fxgrad.context import Context
from fxgrad.dynamo import CapturedCall, check_told, fresh_function
from fxgrad.dynamo_errors import translated
from fxgrad.errors import FxgradError
from fxgrad.pipeline import ONE, Pass, passes_of, run_passes
from fxgrad.printing import graph_text


@dataclass(frozen=True)
class Trace:
    """A rewritten graph; ``str()`` of it is stable, fit for a snapshot."""

    graph_module: fx.GraphModule
    context: Context

    def __str__(self) -> str:
        return graph_text(self.graph_module, self.context)

    __repr__ = __str__


class _Captured(Exception):
    """Carries the graph out of Dynamo: nothing is compiled and nothing runs."""

    def __init__(self, trace: Trace) -> None:
        super().__init__("captured")
        self.trace = trace


def trace(model: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    """The rewritten graph of ``model(*args, **kwargs)``, printable and stable.

    ``model`` may be transformed already; its options then apply. Nothing is computed: no random numbers
    are drawn and no buffers move. The text names no addresses and no paths.

    >>> print(trace(nn.Linear(3, 2, bias=False), torch.ones(4, 3)))
    inputs:
      weight: f32[2, 3]                                               trainable
      input: f32[B, 3]                                                batched(0)
    ghosts:
      ghost(weight)
    graph:
      tape = new_tape[GradSample]()
      handle = collect(tape, B, ghost(weight))
      linear = linear(input, weight.detach(), None)                   f32[B, 2] batched(0)
      linear' = tap_linear(tape, B, linear, handle, input, weight.detach())  rule
    return (linear',)
    <BLANKLINE>
    """
    engine = engine_of(model)
    if engine is None:
        engine = engine_of(transform(model))
    assert engine is not None
    return capture(engine, args, kwargs)


def capture(
    engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], passes: Sequence[Pass] | None = None
) -> Trace:
    """Let Dynamo trace a call and run the passes (all, or these) on its graph, and stop there."""
    batch = engine.roles["forward"].find(args, kwargs)

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        check_told()
        captured = engine.captured(gm, examples, batch.size)
        own = passes if passes is not None else passes_of(batch.size, engine.options.quantities)
        dims = captured.held() if own is ONE else captured.sample_dims()
        ctx = make_context(captured, engine.options, dims, single=batch.size == 1)
        made = run_passes(gm, ctx, own)
        raise _Captured(Trace(made, ctx))

    compiled = torch.compile(fresh_function(engine.model), backend=backend, fullgraph=True)
    try:
        CapturedCall(batch, args, kwargs).run(compiled)
    except exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, _Captured):
            return error.inner_exception.trace
        if moves_states(error):
            return capture(engine, args, kwargs, passes)
        raise translated(error, engine.options, engine.model) from error
    except FxgradError:
        raise
    except Exception as error:
        raise translated(error, engine.options, engine.model) from error
    raise FxgradError("the model has no graph: it uses no trainable parameter in any tensor op")


def settled_batch(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """The batch of a call, once its graph said which inputs are states: see Note [States] in fxgrad.batch."""
    roles = engine.roles["forward"]
    batch = roles.find(args, kwargs)
    if not batch.size or not roles.tied(args, kwargs, batch.size):
        return batch
    with contextlib.suppress(Exception):  # what cannot be captured says so where it runs
        capture(engine, args, kwargs, ())
    return roles.find(args, kwargs)
