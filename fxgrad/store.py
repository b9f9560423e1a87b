"""Where results go: ghosts carry them out of the compiled graph, and grad_sample is set.

A ghost is a free input of shape ``[B, *p.shape]`` (stride 0, one element of memory). The compiled
backward returns per-sample gradients as the ghosts' gradients, and one small autograd function outside
of the compiled region, over all parameters, stores them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxgrad.errors import AlreadySet, OptionError, OutsideGraph

Accumulate = Literal["error", "append", "sum", "overwrite"]
POLICIES: tuple[Accumulate, ...] = ("error", "append", "sum", "overwrite")
_TASK = "_fxgrad_task"  # on a grad_sample tensor: the backward call that set it


class Forward:
    """One forward with gradients: its samples, its trainable parameters, and the ghosts its graphs left."""

    def __init__(self, size: int, parameters: Mapping[str, Tensor]) -> None:
        self.size, self.parameters = size, parameters
        self.ghosts: list[Any] = []  # autograd nodes
        self.outside: tuple[str, ...] = ()  # parameters seen in use where no transformed graph was
        # Reentrant checkpointing runs a forward and a graph task of its own inside of a backward call:
        # what it finds belongs to that call.
        self.enclosing = torch._C._current_graph_task_id()
        self.checked: int | None = None

    def task(self) -> int:
        """The backward call that is running: calls are told apart by their graph tasks' ids."""
        return torch._C._current_graph_task_id() if self.enclosing == -1 else self.enclosing

    def delivers(self) -> bool:
        """Whether the running backward call reaches the parameters; ``autograd.grad(loss, x)`` does not."""
        return bool(self.outside) or any(torch._C._will_engine_execute_node(ghost) for ghost in self.ghosts)


class _Current(threading.local):
    """The forward this thread is in: the backend runs inside of Dynamo, which tells it nothing."""

    forward: Forward | None = None


class Store:
    """Sets grad_sample, by the `accumulate` policy."""

    def __init__(self, policy: Accumulate) -> None:
        if policy not in POLICIES:
            raise OptionError(f"accumulate has to be one of {', '.join(POLICIES)}, not {policy!r}")
        self.policy = policy
        self.current = _Current()

    @contextlib.contextmanager
    def during(self, forward: Forward) -> Iterator[None]:
        """Graphs that run in here belong to this forward."""
        before = self.current.forward
        self.current.forward = forward
        try:
            yield
        finally:
            self.current.forward = before

    def check_clear(self, parameters: Mapping[str, Tensor], task: int, what: str) -> None:
        """Raise before anything is computed, where a result would have no place."""
        if self.policy != "error":
            return
        for name, parameter in parameters.items():
            found = getattr(parameter, "grad_sample", None)
            if found is not None and (task == -1 or _task_of(found) != task):
                raise AlreadySet(
                    f"{what} while grad_sample of '{name}' is still set from an earlier backward",
                    advice='Call zero_grad() first, or pass accumulate="append", "sum" or "overwrite".',
                )

    def begin_backward(self, forward: Forward) -> None:
        """Everything that would make this backward call's results wrong, before it runs."""
        if torch.is_grad_enabled():
            raise OptionError(
                "create_graph=True: per-sample gradients cannot be differentiated again",
                advice="Leave out create_graph=True.",
            )
        task = torch._C._current_graph_task_id()
        if forward.checked == task or not forward.delivers():
            return
        if forward.outside:
            names = ", ".join(forward.outside)
            raise OutsideGraph(
                f"trainable parameters were used outside of every transformed graph: {names}",
                advice="Remove the graph break around their use (fullgraph=True names it), or freeze them.",
            )
        self.check_clear(forward.parameters, forward.task(), "a backward")
        self._check_sizes(forward)
        forward.checked = task
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._end_backward(forward))

    def _check_sizes(self, forward: Forward) -> None:
        """Results of one backward, or of several under "sum", are added: they need the same samples."""
        for parameter in forward.parameters.values():
            found = getattr(parameter, "grad_sample", None)
            adds = self.policy == "sum" or _task_of(found) == forward.task()
            if isinstance(found, Tensor) and adds and len(found) != forward.size:
                raise AlreadySet(
                    f"gradients of {len(found)} and of {forward.size} samples cannot be added",
                    advice="Run every forward on the same samples, or call backward and zero_grad() between them.",
                )

    def _end_backward(self, forward: Forward) -> None:
        """Zeros for the trainable parameters that no gradient reached."""
        for parameter in forward.parameters.values():
            if _task_of(getattr(parameter, "grad_sample", None)) != forward.task():
                self.put(parameter, parameter.detach().new_zeros(forward.size, *parameter.shape), forward)

    def put(self, parameter: Tensor, grad: Tensor, forward: Forward) -> None:
        """One parameter's gradients of one forward; several forwards of one backward add up."""
        task = forward.task()
        found: Any = getattr(parameter, "grad_sample", None)
        earlier: list[Tensor] = []
        if self.policy == "append" and found is not None:
            earlier = list(found) if isinstance(found, list) else [found]
            found = earlier.pop() if _task_of(earlier[-1]) == task else None
        if isinstance(found, Tensor) and (self.policy == "sum" or _task_of(found) == task):
            grad = found + grad
        setattr(grad, _TASK, task)
        appended = self.policy == "append" and bool(earlier)
        parameter.grad_sample = [*earlier, grad] if appended else grad  # type: ignore[attr-defined]


def _task_of(found: Any) -> int | None:
    """The backward call that set a grad_sample."""
    return getattr(found[-1] if isinstance(found, list) else found, _TASK, None)


class Ghosts(torch.autograd.Function):
    """parameters -> ghosts; its backward stores what arrives and leaves p.grad alone."""

    @staticmethod
    def forward(store: Store, forward: Forward, n: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.new_empty(()).expand(n, *p.shape) for p in parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.store, ctx.of, _, *ctx.parameters = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        for parameter, grad in zip(ctx.parameters, grads, strict=True):
            if grad is not None:
                ctx.store.put(parameter, grad.detach(), ctx.of)
        return (None, None, None, *[None] * len(grads))


class Unseen(torch.autograd.Function):
    """The parameters of a model run as it is, on no samples: there are no gradients to deliver."""

    @staticmethod
    def forward(*parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.parameters = len(inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None,) * ctx.parameters


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Set grad_sample to None wherever it was set."""
    for parameter in parameters:
        if getattr(parameter, "grad_sample", None) is not None:
            parameter.grad_sample = None  # type: ignore[attr-defined]


def watch(outputs: Sequence[Tensor], store: Store, forward: Forward) -> None:
    """Check each backward call through these outputs before it computes anything."""
    nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda grads: store.begin_backward(forward))
