"""`fxgrad.forward_backward`: forward, loss and backward of a transformed model as one compiled graph."""

from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxgrad.api import engine_of
from fxgrad.capture.dynamo import is_capturing, runs_as_originals
from fxgrad.capture.dynamo_errors import NO_LOSS
from fxgrad.capture.sharded import check_not_sharded
from fxgrad.engine import Engine
from fxgrad.errors import OptionError
from fxgrad.host.autograd import compiles_backward
from fxgrad.host.dynamo import graph_break
from fxgrad.runtime.refusals import not_ordinary
from fxgrad.samples.batch import Roles

_NUMBERS = itertools.count(1)
_AVAILABLE = torch.distributed.is_available()


def forward_backward(model: nn.Module, loss_fn: Callable[..., Any], *, in_dims: Any = None) -> Callable[..., Any]:
    """Return a function that runs forward, loss and backward of a transformed model as one compiled graph.

    ``step(x, y)`` leaves what ``loss_fn(model, x, y).backward()`` leaves: ``p.grad``, ``p.grad_sample`` and results,
    under the same guard, past the same hooks on parameters. Between forward and backward there is then no autograd, and
    the compiler sees both at once. The smaller the model, the more that saves.

    Create the function once: each has graphs of its own, as the code of ``loss_fn`` is part of them. Gradients are
    computed in ``torch.no_grad()``, too.

    Args:
        model: what `transform` returned.
        loss_fn: ``loss_fn(model, *args, **kwargs)`` returns the loss, a tensor without dimensions: the sum over samples
            of their losses, or their mean as ``loss_reduction=`` says. Or a tuple of the loss and other values that
            need no gradient, such as ``logits.detach()``. Its first argument is the model. Samples are found among the
            others.
        in_dims: of those other arguments, as in `transform`.

    Returns:
        A function of ``(*args, **kwargs)``, with ``sample_weight=`` where a quantity takes it. It returns what loss_fn
        returns; the loss needs no gradient.

    Raises:
        OptionError: the model is not transformed, is sharded or has graph breaks (fullgraph=False); several processes
            train it; it has checkpoints; an input requires a gradient; loss_fn returns something else than one loss.
            Calls raise the errors of a transformed model.

    >>> import torch, fxgrad
    >>> private = fxgrad.transform(torch.nn.Linear(3, 2), fxgrad.ClippedGrad(1.0), backend="eager")
    >>> step = fxgrad.forward_backward(private, lambda model, x, y: (model(x) - y).square().sum())
    >>> loss = step(torch.randn(8, 3), torch.randn(8, 2))
    >>> private.weight.grad.shape
    torch.Size([2, 3])
    """
    need = "the whole step as one graph, and fullgraph=False lets it be several"
    engine = engine_of_one_graph(model, "forward_backward", need)
    _check_one_process()
    if not callable(loss_fn):
        raise OptionError(
            f"loss_fn is called as loss_fn(model, x, y), and {type(loss_fn).__name__} cannot be called",
            advice="Pass a function whose first argument is the model.",
        )
    return ForwardBackward(model, engine, loss_fn, in_dims)


def engine_of_one_graph(model: Any, what: str, need: str) -> Engine:
    """Return the engine of a transformed model that is not sharded, and one graph."""
    engine = engine_of(model)
    if engine is None:
        raise OptionError(
            f"{what} takes a transformed model, not {type(model).__name__}",
            advice="Pass what fxgrad.transform returned, before it is wrapped.",
        )
    check_not_sharded(engine.model, what)
    if not engine.options.fullgraph:
        raise OptionError(
            f"{what} needs {need}",
            advice="Pass fullgraph=True to fxgrad.transform, which names the line of a graph break.",
        )
    return engine


class ForwardBackward:
    """What `forward_backward` returns: ``step(*args, **kwargs)`` computes the loss and the gradients."""

    def __init__(self, model: nn.Module, engine: Engine, loss_fn: Callable[..., Any], in_dims: Any) -> None:
        # The view, with which the guard on p.grad lives.
        self.model, self.engine, self.name = model, engine, f"forward_backward {next(_NUMBERS)}"
        step, roles = _bound(loss_fn, engine.model), engine.roles["forward"]
        engine.roles = {
            **engine.roles,
            self.name: Roles.of(step, roles.batch_size, roles.default_dim == 0, in_dims),
        }
        engine.originals[self.name] = step
        engine.steps.add(self.name)
        weakref.finalize(self, _forget, weakref.ref(engine), self.name).atexit = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runs_as_originals() or torch.is_inference_mode_enabled():
            raise OptionError(
                "forward_backward was called where nothing has gradients: in inference_mode, or inside of the forward "
                "of a transformed model",
                advice="Call it outside.",
            )
        if compiles_backward():
            raise not_ordinary()
        _check_one_process()
        if torch.is_grad_enabled():
            return self.engine.call(self.name, args, kwargs)
        with torch.enable_grad():
            return self(*args, **kwargs)

    def __reduce__(self) -> Any:
        raise OptionError(
            "a function of forward_backward cannot be copied or pickled: its graphs belong to one model",
            advice="Copy the model, and call forward_backward with the copy.",
        )


def _forget(reference: weakref.ref[Engine], name: str) -> None:
    """Forget a function and its graphs; whatever the function holds may hold the engine."""
    engine = reference()
    if engine is None:
        return
    engine.steps.discard(name)
    engine.roles = {one: roles for one, roles in engine.roles.items() if one != name}
    engine.originals.pop(name, None)
    engine.repeated.pop(name, None)
    engine.compiled = {key: compiled for key, compiled in engine.compiled.items() if key[0] != name}


def _bound(loss_fn: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Return the function of a model as a method of it, in which Dynamo looks at what is returned."""

    def called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        returned = loss_fn(model, *args, **kwargs)
        first = returned[0] if isinstance(returned, tuple) and returned else returned
        if is_capturing() and not (isinstance(first, Tensor) and first.requires_grad):
            graph_break(msg=NO_LOSS)  # which the error says
        return returned

    try:
        called.__signature__ = inspect.signature(loss_fn)  # type: ignore[attr-defined]
    except ValueError:
        raise OptionError(
            f"the arguments of {loss_fn!r} are not known, as it is no function of Python's",
            advice="Write one that calls it, such as lambda model, x, y: ..",
        ) from None
    return types.MethodType(called, model)


def _check_one_process() -> None:
    """Refuse several processes: nothing averages what each has computed."""
    if _AVAILABLE and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise OptionError(
            "forward_backward does not average over processes",
            advice="Call the model that DistributedDataParallel or fully_shard returned, and backward().",
        )
