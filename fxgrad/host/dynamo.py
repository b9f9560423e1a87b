"""TorchDynamo: its entry points, its configuration, its messages and its exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config as _shapes
from torch import fx
from torch._C._dynamo import eval_frame as _eval_frame_c
from torch._dynamo import exc as _exc
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import compile_lock as _compile_lock
from torch._dynamo.eval_frame import OptimizedModule as _OptimizedModule
from torch._dynamo.eval_frame import innermost_fn as _innermost_fn
from torch._dynamo.source import ConstantSource as _ConstantSource
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _LazyGraphModule

TorchDynamoException = _exc.TorchDynamoException
"""The base class of what Dynamo raises.

Why: a call is captured once more where Dynamo failed before it was configured.
Since: torch 2.11 to 2.13, tested.
Without: a call inside of another compilation may fail.
"""

Unsupported = _exc.Unsupported
"""What Dynamo raises at a line that it cannot capture, with fullgraph=True.

Why: the user gets our own error, with the line and what to do.
Since: torch 2.11 to 2.13, tested.
Without: graph breaks reach users as PyTorch's errors.
"""

TorchRuntimeError = _exc.TorchRuntimeError
"""What Dynamo raises where an op fails on fake tensors.

Why: wrong shapes and wrong arguments are the user's, and are shown as eager PyTorch shows them.
Since: torch 2.11 to 2.13, tested.
Without: users see Dynamo's sentence for their own mistakes.
"""

UserError = _exc.UserError
"""What Dynamo raises where a size that has to vary turned out to be fixed.

Why: the call is captured again, for one batch size.
Since: torch 2.11 to 2.13, tested.
Without: models whose shape rules fix the batch are refused.
"""

InternalTorchDynamoError = _exc.InternalTorchDynamoError
"""What Dynamo raises for a bug of its own.

Why: the user gets our own error, which says how to see whether torch.compile fails as well.
Since: torch 2.11 to 2.13, tested.
Without: Dynamo's own stack reaches the user.
"""

BackendCompilerFailed = _exc.BackendCompilerFailed
"""What Dynamo raises around an exception of a backend, which is its ``inner_exception``.

Why: our refusals are raised in a backend, and have to reach the user as they are.
Since: torch 2.11 to 2.13, tested.
Without: every error of fxgrad comes wrapped in one of PyTorch's.
"""

FailOnRecompileLimitHit = _exc.FailOnRecompileLimitHit
"""What Dynamo raises where a function needs more graphs than ``recompile_limit``.

Why: past it Dynamo would run the model uncompiled; we say what changes from call to call.
Since: torch 2.11 to 2.13, tested.
Without: PyTorch's error without our advice.
"""

CaptureAgain = _exc.TensorifyScalarRestartAnalysis
"""What lets Dynamo capture a frame once more, raised by a backend.

Why: inputs are marked as dynamic after the first capture, where torch.compile called us and not we Dynamo.
Since: torch 2.11 to 2.13, tested.
Without: ``torch.compile(model, backend="fxgrad")`` needs dynamic=True.
"""

OptimizedModule = _OptimizedModule
"""The class of what torch.compile makes of a module.

Why: `transform` refuses one, and `result` finds its store by the quantity.
Since: torch 2.11 to 2.13, tested.
Without: a compiled model is transformed as if it were the model.
"""

innermost_fn = _innermost_fn
"""The function below Dynamo's own wrappers.

Why: Dynamo switches itself off around our whole backend; doing so inside again costs time in every step.
Since: torch 2.11 to 2.13, tested.
Without: slower steps.
"""

mark_dynamic = torch._dynamo.mark_dynamic
"""Require a dim of a tensor to be a symbol.

Why: PyTorch documents it under this private path; `torch.compiler` has no such function.
Since: torch 2.11 to 2.13, tested.
Without: each batch size needs a graph, or the batch is not recognised.
"""

maybe_mark_dynamic = torch._dynamo.maybe_mark_dynamic
"""Ask for a dim of a tensor to be a symbol, where that is possible.

Why: behind a graph break a size may be fixed by another value.
Since: torch 2.11 to 2.13, tested.
Without: such models fail with PyTorch's error.
"""

graph_break = torch._dynamo.graph_break
"""End the graph here, with a message in the error of fullgraph=True.

Why: polyfills of packing break the graph as before in another's torch.compile, and say what to write in ours.
Since: torch 2.11 to 2.13, tested.
Without: torch.compile of other models would see our operators.
"""

active_callback = _eval_frame_c.get_eval_frame_callback
"""What Dynamo does with frames in this thread; None outside of torch.compile.

Why: each step asks whether Dynamo has to be switched off, which costs more than asking.
Since: torch 2.11 to 2.13, tested.
Without: every step switches it off.
"""

compilation = callback_handler
"""Dynamo's callbacks: ``start_callbacks``, a list, and ``register_start_callback(function)``.

Why: what a capture needs is configured where a compilation begins, and each step only looks at the list.
Since: torch 2.11 to 2.13, tested.
Without: each step would configure Dynamo.
"""

compile_lock = _compile_lock
"""The lock that Dynamo holds while it compiles; a thread may take it several times.

Why: marks on tensors and settings of Dynamo are every thread's.
Since: torch 2.11 to 2.13, tested.
Without: two threads that capture at once disturb each other.
"""

ConstantSource = _ConstantSource
"""Where a symbolic size comes from, as ShapeEnv asks for it: a name.

Why: our symbols come from no input of Dynamo's.
Since: torch 2.11 to 2.13, tested.
Without: the passes have no symbol B.
"""

MARKS_OF_SAVED = ("_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices")
"""The attributes by which AOTAutograd marks dims of what it saves: from torch 2.13 on, and before.

Why: they are left on the user's tensors, and change the guards of later calls.
Since: torch 2.13, and up to 2.12.
Without: a second call compiles again.
"""

MARKS = (
    *MARKS_OF_SAVED,
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_specialize_on",
    "_has_dynamo_dim_marking",
)
"""The attributes by which a user, Dynamo or AOTAutograd marks dims of a tensor.

Why: they are taken away while a transformed model's call is captured, and put back.
Since: torch 2.11 to 2.13, tested.
Without: a user's marks contradict ours, and ours stay on the user's tensors.
"""


def source_of(node: fx.Node) -> Any:
    """Where Dynamo got a graph's input from, an object with a name such as ``L['args'][0]``; None of other nodes.

    Why: errors name the user's argument, and parameters are known by their place in the model.
    Since: torch 2.11 to 2.13, tested.
    Without: inputs have Dynamo's own names.
    """
    return getattr(node, "_dynamo_source", None)


def checkpoint_contexts(body: fx.GraphModule) -> Any:
    """What the user passed as ``context_fn`` to the checkpoint whose body this is; None without.

    Why: Dynamo leaves it there for AOTAutograd, which never sees a checkpoint that our passes have inlined.
    Since: torch 2.11 to 2.13, tested.
    Without: selective checkpoints save everything or nothing.
    """
    return body.meta.get("_checkpoint_context_fn")


@contextlib.contextmanager
def recurrent_modules_allowed() -> Iterator[None]:
    """Let Dynamo trace nn.RNN, nn.LSTM and nn.GRU.

    Why: it breaks the graph there, except with this setting.
    Since: torch 2.11 to 2.13, tested.
    Without: recurrent modules are refused.
    """
    config = torch._dynamo.config
    before, config.allow_rnn = config.allow_rnn, True
    try:
        yield
    finally:
        config.allow_rnn = before


@contextlib.contextmanager
def sizes_apart() -> Iterator[None]:
    """Give equal sizes different symbols, and let PyTorch not log where it makes one a number.

    Why: a sequence may be as long as the batch by chance.
    Since: torch 2.11 to 2.13, tested.
    Without: sizes that equal the batch size by chance are taken for it.
    """
    log = torch._guards.log
    duck, silent = _shapes.use_duck_shape, log.disabled
    _shapes.use_duck_shape, log.disabled = False, True
    try:
        yield
    finally:
        _shapes.use_duck_shape, log.disabled = duck, silent


@contextlib.contextmanager
def calls_ignored(functions: Sequence[Any]) -> Iterator[None]:
    """Let Dynamo leave calls of these functions out of the graph, besides those that the user named.

    Why: print, warnings and loggers would break the graph.
    Since: torch 2.11 to 2.13, tested; the setting had another name before, for methods of loggers alone.
    Without: a model that logs in its forward is refused.
    """
    with torch._dynamo.config.patch({_IGNORED: {*getattr(torch._dynamo.config, _IGNORED), *functions}}):
        yield


_IGNORED = next(
    name for name in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(torch._dynamo.config, name)
)


def failed_guards(compiled: Callable[..., Any]) -> list[str]:
    """Why each graph of a compiled function was not used again, as Dynamo says it; empty where it says nothing.

    Why: "too many graphs" names what changes from call to call.
    Since: torch 2.11 to 2.13, tested.
    Without: the error does not say what changes.
    """
    function = getattr(compiled, "_torchdynamo_orig_callable", None)
    code = getattr(function, "__code__", None)
    reasons: list[str] = torch._dynamo.utils.guard_failures.get(code, [])
    return reasons


def recompile_limit() -> int:
    """How many graphs a function may have.

    Why: "too many graphs" says how many there are.
    Since: torch 2.11 to 2.13, tested.
    Without: the error does not say the number.
    """
    return torch._dynamo.config.recompile_limit


def substitute(original: Callable[..., Any], polyfill: Callable[..., Any]) -> None:
    """Let Dynamo trace another function in the place of one that it skips by a rule of its own; for good.

    Why: `torch.compiler.substitute_in_graph` refuses functions that have a rule.
    Since: torch 2.11 to 2.13, tested.
    Without: packing and padding of sequences break the graph.
    """
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map().pop(original, None)
    torch.compiler.substitute_in_graph(original, skip_signature_check=True)(polyfill)


def traced_in(mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Let what PyTorch traces meanwhile have fake tensors of this mode, not those of Dynamo's capture.

    Why: the passes run inside of a backend, and their symbols are not Dynamo's.
    Since: torch 2.11 to 2.13, tested.
    Without: "fake tensors of different modes" where a pass traces a decomposition.
    """
    return tracing(TracingContext(mode))


def lazy_graph_module(root: Any, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A GraphModule that writes its Python code when that is first asked for.

    Why: each pass makes a graph of its own, of which the last alone is run.
    Since: torch 2.11 to 2.13, tested.
    Without: `fx.GraphModule` writes code after each pass, which takes as long as the pass.
    """
    return _LazyGraphModule(root, graph, name)
