"""Where results go: ghosts carry them out of the compiled graph, and grad_sample is set.

A ghost is a free input of shape ``[B, *p.shape]`` (stride 0, one element of memory). The compiled
backward returns per-sample gradients as the ghosts' gradients, and one small autograd function outside
of the compiled region, over all parameters, stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fxgrad.errors import AlreadySet, OptionError, OutsideGraph

Accumulate = Literal["error", "append", "sum", "overwrite"]
POLICIES: tuple[Accumulate, ...] = ("error", "append", "sum", "overwrite")
_TASK = "_fxgrad_task"  # on a grad_sample tensor: the backward call that set it


class Store:
    """Sets grad_sample, by the `accumulate` policy."""

    def __init__(self, policy: Accumulate) -> None:
        if policy not in POLICIES:
            raise OptionError(f"accumulate has to be one of {', '.join(POLICIES)}, not {policy!r}")
        self.policy = policy
        self.outside: tuple[str, ...] = ()  # parameters seen in use where no transformed graph was

    def check_clear(self, parameters: Iterable[Tensor], what: str) -> None:
        """Raise before anything is computed, where a result would have no place."""
        if self.policy != "error":
            return
        task = torch._C._current_graph_task_id()
        for parameter in parameters:
            found = getattr(parameter, "grad_sample", None)
            if found is not None and (task == -1 or getattr(found, _TASK, None) != task):
                raise AlreadySet(
                    f"{what} while grad_sample is still set from an earlier backward",
                    advice='Call zero_grad() first, or pass accumulate="append", "sum" or "overwrite".',
                )

    def check_backward(self, parameters: Iterable[Tensor]) -> None:
        """Everything that would make this backward call's results wrong, before it runs."""
        if torch.is_grad_enabled():
            raise OptionError(
                "create_graph=True: per-sample gradients cannot be differentiated again",
                advice="Leave out create_graph=True.",
            )
        if self.outside:
            names = ", ".join(self.outside)
            raise OutsideGraph(
                f"trainable parameters were used outside of every transformed graph: {names}",
                advice="Remove the graph break around their use (fullgraph=True names it), or freeze them.",
            )
        self.check_clear(parameters, "a backward")

    def put(self, parameter: Tensor, grad: Tensor) -> None:
        """One parameter's gradients of one forward; several forwards of one backward add up."""
        task = torch._C._current_graph_task_id()
        found: Any = getattr(parameter, "grad_sample", None)
        if self.policy == "append" and found is not None:
            self._append(parameter, grad, found if isinstance(found, list) else [found], task)
            return
        if isinstance(found, Tensor) and (self.policy == "sum" or getattr(found, _TASK, None) == task):
            grad = found + _same_batch(parameter, grad, found)
        setattr(grad, _TASK, task)
        parameter.grad_sample = grad  # type: ignore[attr-defined]

    def _append(self, parameter: Tensor, grad: Tensor, found: list[Tensor], task: int) -> None:
        if getattr(found[-1], _TASK, None) == task:
            grad = found[-1] + _same_batch(parameter, grad, found[-1])
            found = found[:-1]
        setattr(grad, _TASK, task)
        parameter.grad_sample = [*found, grad]  # type: ignore[attr-defined]


def _same_batch(parameter: Tensor, grad: Tensor, found: Tensor) -> Tensor:
    if grad.shape != found.shape:
        raise AlreadySet(
            f"two forwards of one backward have different batch sizes: {found.shape[0]} and {grad.shape[0]}",
            advice="Run them with the same samples, or call backward between them.",
        )
    return grad


class Ghosts(torch.autograd.Function):
    """parameters -> ghosts; its backward stores what arrives and leaves p.grad alone."""

    @staticmethod
    def forward(store: Store, n: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.new_empty(()).expand(n, *p.shape) for p in parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.store, _, *ctx.parameters = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        for parameter, grad in zip(ctx.parameters, grads, strict=True):
            if grad is not None:
                ctx.store.put(parameter, grad.detach())
        return (None, None, *[None] * len(grads))


class Unseen(torch.autograd.Function):
    """A ghost for a model run as it is on no samples: its gradient is ``[0, *p.shape]``."""

    @staticmethod
    def forward(store: Store, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.store, ctx.parameter = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parameter = ctx.parameter
        if getattr(parameter, "grad_sample", None) is None:
            ctx.store.put(parameter, parameter.detach().new_zeros(0, *parameter.shape))
        return None, None


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Set grad_sample to None wherever it was set."""
    for parameter in parameters:
        if getattr(parameter, "grad_sample", None) is not None:
            parameter.grad_sample = None  # type: ignore[attr-defined]


def watch(outputs: Sequence[Tensor], store: Store, parameters: Sequence[Tensor]) -> None:
    """Check each backward call through these outputs before it computes anything."""
    nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda grads: store.check_backward(parameters))
