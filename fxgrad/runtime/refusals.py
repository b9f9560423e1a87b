"""Backward calls that have no per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fxgrad.errors import OptionError, OutsideGraph
from fxgrad.quantities import Quantity
from fxgrad.runtime.autograd_graph import are_captured


def differentiated_again() -> OptionError:
    return OptionError(
        "create_graph=True: per-sample gradients cannot be differentiated again",
        advice="Leave out create_graph=True.",
    )


def used_outside(names: Sequence[str]) -> OutsideGraph:
    return OutsideGraph(
        f"trainable parameters were used outside of every transformed graph: {', '.join(names)}",
        advice="Remove the graph break around their use (fullgraph=True names it), or freeze them.",
    )


def check_delivers_to_leaves(placeholders: Iterable[Any], quantities: Sequence[Quantity]) -> None:
    """`autograd.grad` returns what is for p.grad, and these quantities leave nothing there."""
    if any(are_captured([leaf for leaf, _ in node.next_functions]) for node in placeholders):
        raise OptionError(
            f"torch.autograd.grad by parameters: {' and '.join(map(str, quantities))} leaves no gradient to return",
            advice="Call backward() on the loss, and read the results on the parameters or with fxgrad.result. For "
            "the ordinary gradient, call the original model.",
        )
