"""Backward calls that have no per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fxgrad.errors import AlreadySet, OptionError, OutsideGraph
from fxgrad.host.autograd import compiles_backward
from fxgrad.quantities import Delivery, Quantity
from fxgrad.runtime.autograd_graph import are_captured


def not_ordinary() -> OptionError:
    """The running backward call is compiled as a whole, or differentiated again."""
    if compiles_backward():
        return OptionError(
            "compiled autograd: hooks run in another order there, so what reaches p.grad cannot be guarded",
            advice="Leave it off (torch._dynamo.config.compiled_autograd): fxgrad compiles the backward by itself.",
        )
    return OptionError(
        "create_graph=True: per-sample gradients cannot be differentiated again",
        advice="Leave out create_graph=True.",
    )


TWO_CALLS = (
    "Transform a module whose forward calls the model twice (return self.model(a), self.model(b)), as docs/recipes.md "
    "shows, or call backward() for each."
)


def two_forwards(quantity: Quantity) -> AlreadySet:
    return AlreadySet(
        f"two forwards of the model meet in one backward: {quantity} of each does not add up", advice=TWO_CALLS
    )


def two_norms(delivery: Delivery) -> AlreadySet:
    return AlreadySet(
        f"two transformed models deliver {delivery.place} of '{delivery.parameter}' in one backward, which does not "
        "add up",
        advice="Call backward() for each, or transform a module that calls both.",
    )


def two_sizes(earlier: int, later: int) -> AlreadySet:
    return AlreadySet(
        f"gradients of {earlier} and of {later} samples cannot be added",
        advice="Run every forward on the same samples, or call backward and zero_grad() between them.",
    )


def two_shapes(quantity: Quantity, earlier: Tensor, later: Tensor) -> AlreadySet:
    return AlreadySet(
        f"results of {quantity} of shapes {list(earlier.shape)} and {list(later.shape)} meet in one backward, and "
        "cannot be added",
        advice="Run every forward on as many samples, or call backward for each.",
    )


def used_outside(names: Sequence[str]) -> OutsideGraph:
    return OutsideGraph(
        f"trainable parameters were used outside of every transformed graph: {', '.join(names)}",
        advice="Remove the graph break around their use (fullgraph=True names it), or freeze them.",
    )


def before_the_graph(parameters: Sequence[Tensor]) -> OutsideGraph:
    shapes = ", ".join(str(list(parameter.shape)) for parameter in parameters)
    return OutsideGraph(
        f"trainable parameters were used before the graph that torch.compile captured: of shape {shapes}",
        advice="Remove the graph break behind their use (fullgraph=True names it), freeze them, or detach the input. "
        "fxgrad.transform of a part of a model does not look at what its input is made of.",
    )


def check_delivers_to_leaves(placeholders: Iterable[Any], quantities: Sequence[Quantity]) -> None:
    """`autograd.grad` returns what is for p.grad, and these quantities leave nothing there."""
    if any(are_captured([leaf for leaf, _ in node.next_functions]) for node in placeholders):
        raise OptionError(
            f"torch.autograd.grad by parameters: {' and '.join(map(str, quantities))} leaves no gradient to return",
            advice="Call backward() on the loss, and read the results on the parameters or with fxgrad.result. For "
            "the ordinary gradient, call the original model.",
        )
