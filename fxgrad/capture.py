"""Capture: let TorchDynamo trace a model with a symbolic batch, and run what the passes make of it."""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fxgrad.batch import Batch, Roles
from fxgrad.compiler import SAMPLE_DIM, Captured, Options, compile_graph
from fxgrad.errors import BatchSizeError, FxgradError, GraphBreak
from fxgrad.store import Store, Unseen, watch

_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_specialize_on",
    "_has_dynamo_dim_marking",
    SAMPLE_DIM,
)


class _Current(threading.local):
    """The batch size of the call this thread is in: the backend runs inside of Dynamo, which tells it nothing."""

    batch_size: int | None = None


@dataclass
class Engine:
    """Runs one model's transformed calls."""

    model: nn.Module
    options: Options
    roles: Roles
    store: Store
    current: _Current = field(default_factory=_Current)
    compiled: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``model(*args)`` or ``model.forward(*args)``, so that backward fills grad_sample."""
        original = self._original(method)
        parameters = self.trainable()
        if not torch.is_grad_enabled() or not parameters or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        self.store.check_clear(parameters, "a forward")
        batch = self.roles.find(args, kwargs)
        if batch.size == 0:
            outputs = self._on_no_samples(method, parameters, args, kwargs)
        else:
            outputs = self._run(method, batch, args, kwargs)
        tensors = [leaf for leaf in _leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        watch(tensors, self.store, parameters)
        if not self.options.fullgraph:
            self.store.outside = used_outside(tensors, self._names())
        return outputs

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def _original(self, method: str) -> Callable[..., Any]:
        return self.model if method == "__call__" else self.model.forward

    def _run(
        self, method: str, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if method not in self.compiled:
            self.compiled[method] = self._compile(method)
        before = self.current.batch_size
        self.current.batch_size = batch.size
        try:
            with marked(batch), _no_duck_shapes():
                return self.compiled[method](*args, **kwargs)
        except FxgradError:
            raise
        except Exception as error:
            raise translated(error) from error
        finally:
            self.current.batch_size = before

    def _compile(self, method: str) -> Callable[..., Any]:
        return torch.compile(
            fresh_function(self._original(method)), backend=self._backend, fullgraph=self.options.fullgraph
        )

    def _backend(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        size = self.current.batch_size
        assert size is not None
        return compile_graph(Captured(gm, examples, size, self._names()), self.options, self.store)

    def _on_no_samples(
        self,
        method: str,
        parameters: Sequence[nn.Parameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """An empty batch runs as it is: there is nothing to compile and nothing to add up."""
        stand_ins = {
            name: Unseen.apply(self.store, parameter)  # type: ignore[no-untyped-call]
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        with _swapped(self.model, stand_ins):
            return self._original(method)(*args, **kwargs)


@contextlib.contextmanager
def _swapped(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run a model on other tensors in its parameters' places."""
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(model, dict(values), tie_weights=True):
        yield


def fresh_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` as a function with a code object of its own: Dynamo keeps its graphs per code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    code = call.__code__.replace(co_name="call")
    return types.FunctionType(code, call.__globals__, "call", None, call.__closure__)


@contextlib.contextmanager
def marked(batch: Batch) -> Iterator[None]:
    """The user's tensors, marked dynamic on their sample dims for as long as the call lasts."""
    kept: list[tuple[weakref.ref[Tensor], dict[str, Any]]] = []
    try:
        for tensor, dim in batch.marked():
            attributes = tensor.__dict__
            kept.append((weakref.ref(tensor), {k: attributes[k] for k in _MARKS if k in attributes}))
            for mark in _MARKS:
                attributes.pop(mark, None)
            setattr(tensor, SAMPLE_DIM, dim)
            if batch.size > 1:
                torch._dynamo.mark_dynamic(tensor, dim)
        yield
    finally:
        for reference, before in kept:
            found = reference()
            if found is not None:
                for mark in _MARKS:
                    found.__dict__.pop(mark, None)
                found.__dict__.update(before)


@contextlib.contextmanager
def _no_duck_shapes() -> Iterator[None]:
    """Equal sizes are no reason for one symbol: a sequence may be as long as the batch by chance."""
    import torch.fx.experimental._config as config

    with config.patch(use_duck_shape=False):
        yield


def _leaves(outputs: Any) -> list[Any]:
    found = []
    for leaf in tree_leaves(outputs):
        if hasattr(leaf, "__dataclass_fields__"):
            found.extend(_leaves([getattr(leaf, name) for name in leaf.__dataclass_fields__]))
        else:
            found.append(leaf)
    return found


def used_outside(outputs: Sequence[Tensor], names: Mapping[int, str]) -> tuple[str, ...]:
    """Parameters that eager code between the graphs used: autograd reaches them past every ghost."""
    found: dict[str, None] = {}
    stack = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node is None or type(node).__name__ == "GhostsBackward":
            continue
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found[names[id(variable)]] = None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return tuple(found)


def translated(error: Exception) -> Exception:
    """Dynamo's exceptions as fxgrad's: the reason and the user's line, without the tracer's own stack."""
    from torch._dynamo import exc

    if isinstance(error, exc.BackendCompilerFailed):
        inner = error.inner_exception
        return inner if isinstance(inner, Exception) else error
    text = str(error)
    if isinstance(error, exc.Unsupported):
        return GraphBreak(
            f"the model does not capture as one graph: {_reason(text)}",
            where=_user_line(error),
            advice="Write that line in traceable PyTorch, or pass fullgraph=False.",
        )
    if isinstance(error, exc.UserError) or "ConstraintViolation" in type(error).__name__:
        if "mark_dynamic" in text or "Constraints violated" in text:
            return BatchSizeError(
                "the model fixes its batch size: it works for one number of samples only",
                where=_user_line(error),
                advice="Write sizes in terms of x.shape[0], or pass in_dims= if this is not the sample dimension.",
            )
    return error


def _reason(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown reason")


def _user_line(error: Exception) -> str:
    from pathlib import PurePath

    for frame in reversed(getattr(error, "real_stack", None) or []):
        if "torch/" not in frame.filename and not frame.filename.endswith("fxgrad/capture.py"):
            return f"{PurePath(frame.filename).name}:{frame.lineno}   {(frame.line or '').strip()}"
    return ""
