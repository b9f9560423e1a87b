"""TorchDynamo: its entry points, its configuration, its messages and its exceptions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch._C._dynamo.eval_frame as of_frames
import torch._dynamo
import torch.fx.experimental._config as _shapes
from torch import fx
from torch._dynamo import eval_frame, symbolic_convert
from torch._dynamo import exc as _exc
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxgrad.host.versions import at_least

_P = ParamSpec("_P")
_T = TypeVar("_T")
_ALONE = of_frames._FrameExecStrategy(of_frames._FrameAction.SKIP, of_frames._FrameAction.SKIP)

TorchDynamoException = _exc.TorchDynamoException
Unsupported = _exc.Unsupported
TorchRuntimeError = _exc.TorchRuntimeError
UserError = _exc.UserError
InternalTorchDynamoError = _exc.InternalTorchDynamoError
BackendCompilerFailed = _exc.BackendCompilerFailed
FailOnRecompileLimitHit = _exc.FailOnRecompileLimitHit
CaptureAgain = _exc.TensorifyScalarRestartAnalysis
"""What Dynamo raises, the base class first; and what a backend raises.

| class | raised |
|---|---|
| `Unsupported` | at a line that Dynamo cannot capture, with fullgraph=True |
| `TorchRuntimeError` | where an op fails on fake tensors: wrong shapes and wrong arguments are the user's |
| `UserError` | where a size that has to vary turned out to be fixed: fxgrad captures again, for one batch size |
| `InternalTorchDynamoError` | for a bug of Dynamo's |
| `BackendCompilerFailed` | around an exception of a backend, its ``inner_exception``: our refusals are raised there |
| `FailOnRecompileLimitHit` | where a function needs more graphs than ``recompile_limit`` |
| `CaptureAgain` | by a backend, to let Dynamo capture a frame once more |

Why: the user gets our own error, with the line and what to do, or what eager PyTorch says. A call is captured once more
where Dynamo failed before it was configured, and where torch.compile called us before inputs were marked as dynamic.
Without: users see Dynamo's sentences and stack, our refusals come wrapped in one of PyTorch's errors, models whose
shape rules fix the batch are refused, past the limit Dynamo would run the model uncompiled, and
``torch.compile(model, backend="fxgrad")`` needs dynamic=True.
"""

OptimizedModule = eval_frame.OptimizedModule
innermost_fn = eval_frame.innermost_fn
active_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""Around what Dynamo compiles: a module, a function below Dynamo's own wrappers; what it does with frames in a thread.

Outside of torch.compile, `active_callback` returns None.

Why: `transform` refuses a compiled module, and `result` finds its store by the quantity. Dynamo switches itself off
around our whole backend. Each step asks whether it has to be switched off, as doing so again costs more than asking.
Without: a compiled model is transformed as if it were the model, and steps are slower.
"""


mark_dynamic = torch._dynamo.mark_dynamic
maybe_mark_dynamic = torch._dynamo.maybe_mark_dynamic
"""Require a dim of a tensor to be a symbol; or ask for it, where that is possible.

Why: PyTorch documents them under this private path. Behind a graph break a size may be fixed by another value.
Without: each batch size needs a graph, or the batch is not recognised.
"""

graph_break = torch._dynamo.graph_break
"""End the graph here, with a message in the error of fullgraph=True.

Why: polyfills of packing break the graph as before in another's torch.compile, and say what to write in ours.
Without: torch.compile of other models would see our operators.
"""

compilation = torch._dynamo.callback.callback_handler
compile_lock = torch._dynamo.convert_frame.compile_lock
"""Dynamo's callbacks (``start_callbacks``, a list), and the lock it compiles under; a thread may take it several times.

A callback gets an object whose ``callback_trigger.name`` is "DYNAMO" where Dynamo captures.

Why: what a capture needs is configured where a compilation begins, and its clock starts there; each step only looks at
the list. Marks on tensors and settings of Dynamo are every thread's.
Without: each step would configure Dynamo, and two threads that capture at once would disturb each other.
"""

ConstantSource = torch._dynamo.source.ConstantSource
"""Where a symbolic size comes from, as ShapeEnv asks for it: a name.

Why: our symbols come from no input of Dynamo's.
Without: the passes have no symbol B.
"""

MARKS_OF_SAVED = ("_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices")
MARKS = (
    *MARKS_OF_SAVED,
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_specialize_on",
    "_has_dynamo_dim_marking",
)
"""The attributes by which a user, Dynamo or AOTAutograd marks dims of a tensor; and those of what AOTAutograd saves.

Why: they are taken away while a transformed model's call is captured, and put back. AOTAutograd leaves its own.
Since: of the two of AOTAutograd the first is from torch 2.13 on, the second up to 2.12.
Without: a user's marks contradict ours, ours stay on the user's tensors, and a second call compiles again.
"""


def source_of(node: fx.Node) -> Any:
    """Where Dynamo got a graph's input from, an object with a name such as ``L['args'][0]``; None of other nodes.

    Why: errors name the user's argument, and parameters are known by their place in the model.
    Without: inputs have Dynamo's own names.
    """
    return getattr(node, "_dynamo_source", None)


def checkpoint_contexts(body: fx.GraphModule) -> Any:
    """Return what the user passed as ``context_fn`` to the checkpoint whose body this is; None without.

    Why: Dynamo leaves it there for AOTAutograd, which never sees a checkpoint that our passes have inlined.
    Without: selective checkpoints save everything or nothing.
    """
    return body.meta.get("_checkpoint_context_fn")


def recurrent_modules_allowed() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo trace nn.RNN, nn.LSTM and nn.GRU.

    Why: it breaks the graph there, except with this setting.
    Without: recurrent modules are refused.
    """
    allowed: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(allow_rnn=True)
    return allowed


def specialize_floats(inputs: Sequence[Any]) -> bool:
    """Let Dynamo's next capture of a frame take floats among a graph's inputs as constants; False if there is none.

    ``inputs`` are as Dynamo traced them: a float is a 0-dim tensor whose number was read.

    Why: a float that changed between calls becomes an input, and PyTorch asks of some ops' arguments what they are.
    Without: a model whose attention scale, or epsilon, is set anew before each call is refused in the second one.
    """
    state = symbolic_convert.TensorifyState
    read = [memo for value in inputs if isinstance(memo := getattr(value, "item_memo", None), torch.SymFloat)]
    names = [str(one.node._expr) for one in read]  # not `expr`: another trace may have replaced it
    fresh = [name for name in names if not state.should_specialize(name)]
    for name in fresh:
        state.specialize(name)
    _FORCED.update(fresh)
    return bool(fresh)


_FORCED: set[str] = set()  # names of floats, which those of other models may have, too


def release_floats() -> None:
    """Let other captures take such floats as inputs again.

    Why: Dynamo keeps the names for the process.
    Without: a float of another model that has the same name needs a graph for each value.
    """
    symbolic_convert.TensorifyState.force_specializations -= _FORCED
    _FORCED.clear()


def traces_backward() -> bool:
    """Return whether Dynamo writes ``backward()`` into graphs: a setting under trial, since torch 2.12.

    Why: what such a graph adds to p.grad passes no hook on a parameter.
    Without: a clipped p.grad may get gradients of the original model.
    """
    return bool(getattr(torch._dynamo.config, "trace_autograd_ops", False))


@contextlib.contextmanager
def sizes_apart() -> Iterator[None]:
    """Give equal sizes different symbols, and let PyTorch not log where it makes one a number, or where shapes differ.

    Why: a sequence may be as long as the batch by chance. A model called with wrong shapes raises its own error. Under
    the user's ``torch.compile(.., dynamic=True)`` each number would be a symbol, an epsilon of a norm among them.
    Without: sizes that equal the batch size by chance are taken for it, and 15 lines of log precede the model's error.
    """
    logs = torch._guards.log, torch._subclasses.fake_tensor.log
    duck, silent = _shapes.use_duck_shape, [log.disabled for log in logs]
    _shapes.use_duck_shape = False
    for log in logs:
        log.disabled = True
    try:
        with torch._dynamo.config.patch(assume_static_by_default=True):
            yield
    finally:
        _shapes.use_duck_shape = duck
        for log, before in zip(logs, silent, strict=True):
            log.disabled = before


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo write no calls into a compiled function that mark, for a profiler, what it does before its graph.

    Why: they are made without a profiler, too, around functions that Dynamo is to leave alone.
    Without: each step takes 20 to 30 us longer.
    """
    patched: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(record_runtime_overhead=False)
    return patched


@contextlib.contextmanager
def sizes_read_plainly() -> Iterator[None]:
    """Let compiled functions read a size by ``x.size(dim)``, and not by a helper that switches Dynamo off meanwhile.

    Why: each graph of a varying batch takes its size as an argument, and each step reads it.
    Without: each step takes some 3 us longer.
    """
    source = torch._dynamo.source.TensorPropertySource
    before = source.reconstruct

    def reconstruct(self: Any, codegen: Any) -> None:
        if self.prop is not torch._dynamo.source.TensorProperty.SIZE:
            before(self, codegen)
            return
        codegen(self.base)
        codegen.load_method("size")
        codegen.append_output(codegen.create_load_const(self.idx))
        codegen.call_method(1)

    source.reconstruct = reconstruct  # type: ignore[method-assign]
    try:
        yield
    finally:
        source.reconstruct = before  # type: ignore[method-assign]


def calls_ignored(functions: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo leave calls of these functions out of the graph, besides those that the user named.

    Why: print, warnings and loggers would break the graph.
    Since: torch 2.11 to 2.13, tested; the setting had another name before, for methods of loggers alone.
    Without: a model that logs in its forward is refused.
    """
    config = torch._dynamo.config
    setting = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
    names = set if at_least("2.13") else _LoggedByName
    ignored: contextlib.AbstractContextManager[Any] = config.patch(
        {setting: names(getattr(config, setting)).union(functions)}
    )
    return ignored


class _LoggedByName(set[Any]):
    """Functions of which a loop, such as the one that logs the setting, sees the names.

    Why: up to torch 2.12 Dynamo logs all settings, sorts the elements of sets, and cannot sort functions.
    Without: twenty lines of an error in PyTorch's log for each graph.
    """

    def __iter__(self) -> Iterator[Any]:
        functions = super().__iter__()
        return iter(sorted(str(getattr(one, "__qualname__", one)) for one in functions))

    def union(self, *others: Any) -> _LoggedByName:
        joined = _LoggedByName(self)
        joined.update(*others)
        return joined


def as_it_is(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let Dynamo leave a function alone, with all that it calls.

    Why: while a compiled function of the user's calls ``backward()``, Dynamo looks at every frame: hooks, callbacks.
    Without: ``torch.compile(train)``, where train calls ``backward()``, ends in an internal error of Dynamo.
    """
    of_frames.set_code_exec_strategy(function.__code__, _ALONE)
    return function


def find_main(namespace: dict[str, Any]) -> None:
    """Let Dynamo look names up in ``__main__`` as it is now, for code whose globals are ``namespace``.

    Why: Dynamo keeps the first module of each name, and IPython's ``%run`` and sphinx-gallery replace ``__main__``.
    Without: a function that the new ``__main__`` passed to `register_op` has "no attribute" there, an AttributeError.
    """
    main, alias = sys.modules["__main__"], "__import___main__"
    if symbolic_convert._import_module("__main__") is not main:
        symbolic_convert._import_module.cache_clear()
    if namespace.get(alias, main) is not main:
        del namespace[alias]


def failed_guards(compiled: Callable[..., Any]) -> list[str]:
    """Why each graph of a compiled function was not used again, as Dynamo says it; empty where it says nothing.

    Why: "too many graphs" names what changes from call to call.
    Without: the error does not say what changes.
    """
    function = getattr(compiled, "_torchdynamo_orig_callable", None)
    return torch._dynamo.utils.guard_failures.get(getattr(function, "__code__", None), [])


def recompile_limit() -> int:
    """Return how many graphs a function may have.

    Why: "too many graphs" says how many there are.
    Without: the error does not say the number.
    """
    return torch._dynamo.config.recompile_limit


def substitute(original: Callable[..., Any], polyfill: Callable[..., Any]) -> None:
    """Let Dynamo trace another function in the place of one that it skips by a rule of its own; for good.

    Why: `torch.compiler.substitute_in_graph` refuses functions that have a rule.
    Without: packing and padding of sequences break the graph.
    """
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map().pop(original, None)
    torch.compiler.substitute_in_graph(original, skip_signature_check=True)(polyfill)


def traced_in(mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Let what PyTorch traces meanwhile have fake tensors of this mode, not those of Dynamo's capture.

    Why: the passes run inside of a backend, and their symbols are not Dynamo's.
    Without: "fake tensors of different modes" where a pass traces a decomposition.
    """
    return tracing(TracingContext(mode))


def lazy_graph_module(root: Any, graph: fx.Graph, name: str) -> fx.GraphModule:
    """Return a GraphModule that writes its Python code when that is first asked for.

    Why: each pass makes a graph of its own, of which the last alone is run.
    Without: `fx.GraphModule` writes code after each pass, which takes as long as the pass.
    """
    return _LazyGraphModule(root, graph, name)


def written_now(gm: fx.GraphModule) -> None:
    """Let a GraphModule write its Python code now.

    Why: until then the ``forward`` of a lazy one is its ``__call__``, which prints its generated code with an error.
    Without: forty lines precede the model's own error under backend="eager".
    """
    _LazyGraphModule.force_recompile(gm)
