"""A user's autograd.Function in a captured graph: a leaf, whose own backward decides.

Dynamo hands over two graphs: the forward, which also returns what it saved, and the backward. A tap inside of
them would put PyTorch's derivative in the place of the user's (of a straight-through estimator, of a gradient
reversal). So they stay whole: a parameter's gradient for sample n is what the two return for sample n alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.naming import distinct_name
from fxgrad.ops.values import attribute

AUTOGRAD_FUNCTION = "fxgrad.ops.user_functions.autograd_function"  # the canonical name of such an op

FUNCTION, HOOK = "an autograd.Function", "a hook (register_hook)"  # what the user wrote


class UserFunction:
    """The call target that stands for ``autograd_function_apply(fwd, bwd, *args)``; its bodies are closed over."""

    __module__ = "fxgrad.ops.user_functions"
    __name__ = __qualname__ = "autograd_function"

    def __init__(
        self, fwd: fx.GraphModule, bwd: fx.GraphModule, settings: Mapping[str, Any], what: str = FUNCTION
    ) -> None:
        self.fwd, self.bwd, self.settings, self.what = fwd, bwd, dict(settings), what

    @property
    def bodies(self) -> list[fx.GraphModule]:
        return [self.fwd, self.bwd]

    def __call__(self, *args: Any) -> Any:
        return torch.ops.higher_order.autograd_function_apply(self.fwd, self.bwd, *args, **self.settings)

    def __repr__(self) -> str:
        return "autograd_function"

    def vjp(self, args: Sequence[Any], grads: Mapping[int, Tensor]) -> list[Tensor | None]:
        """What the user's backward returns for each argument of the forward, from the gradients of some outputs."""
        with torch.no_grad():  # the bodies switch gradients off, and on again
            outs, saved = fx.Interpreter(self.fwd).run(*args)
        with torch.no_grad():
            of_outputs = [
                torch.zeros_like(out) if isinstance(out, Tensor) and i not in grads else grads.get(i)
                for i, out in enumerate(outs)
            ]
            return list(fx.Interpreter(self.bwd).run(*of_outputs, *saved))

    @cached_property
    def dirty(self) -> list[int]:
        """Return the places of the arguments that the forward writes into and returns."""
        inputs = [EXAMPLE.get(node) for node in self.fwd.graph.find_nodes(op="placeholder")]
        outputs: Any = self.fwd.graph.output_node().args[0]
        returned = [EXAMPLE.get(outputs[0][i]) for i in self.settings.get("dirty_idx", ())]
        return [i for i, value in enumerate(inputs) if any(value is one for one in returned)]

    @cached_property
    def linear(self) -> bool:
        """Return whether the user's backward is seen to be linear in the gradients that it gets."""
        inputs = self.bwd.graph.find_nodes(op="placeholder")
        saved = self.fwd.graph.output_node().args[0][1]  # type: ignore[index]
        dependent = set(inputs[: len(inputs) - len(saved)])  # type: ignore[arg-type]
        for node in self.bwd.graph.nodes:
            if dependent.isdisjoint(node.all_input_nodes) or node.op == "output":
                continue
            if not _is_linear(node, dependent):
                return False
            dependent.add(node)
        results = self.bwd.graph.output_node().all_input_nodes
        return dependent.issuperset(results)

    def text(self) -> str:
        """Return the computation in words."""
        return f"{text_of_body(self.fwd)}{text_of_body(self.bwd)}{sorted(self.settings.items())}"


_ONE_BY_ONE = frozenset(
    """neg clone to sum mean view reshape permute transpose expand unsqueeze squeeze flatten unflatten t T mT
    contiguous detach getitem cat stack chunk narrow select flip view_as reshape_as""".split()
)


def _is_linear(node: fx.Node, dependent: set[fx.Node]) -> bool:
    """Whether an op is linear in its operands that depend on the gradients, as ``g * mask`` is and ``g * g`` is not."""
    name, operands = op_name(node.target), list(node.args)
    depends = [isinstance(arg, fx.Node) and arg in dependent for arg in operands]
    if node.kwargs.keys() & {"out", "alpha", "rounding_mode", "value"} or name.endswith("_"):
        return False
    if name in _ONE_BY_ONE:
        others = (arg for arg in node.all_input_nodes if arg not in dependent)
        return not any(isinstance(EXAMPLE.get(arg), Tensor) for arg in others)
    if name in ("add", "sub"):
        return all(depends)
    if name in ("mul", "matmul", "mm", "bmm", "rmatmul"):
        return sum(depends) == 1
    if name == "div":
        return depends == [True, False]
    if name == "where":
        fixed = [arg for arg, one in zip(operands, depends, strict=True) if not one]
        return not depends[0] and all(arg in (0, 0.0) for arg in fixed[1:])
    return name == "masked_fill" and depends[0] and not any(depends[1:]) and operands[-1] in (0, 0.0)


def fitted(grad: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient as autograd takes it for an input: summed where it is larger, expanded where it is smaller."""
    if grad is None:
        return torch.zeros_like(like)
    if grad.shape != like.shape:
        larger = grad.dim() > like.dim() or grad.numel() > like.numel()
        grad = grad.sum_to_size(like.shape) if larger else grad.expand(like.shape)
    return grad.to(like.dtype)


_SMALL = 1000  # elements of a constant that is named by its numbers


def text_of_body(gm: fx.GraphModule) -> str:
    """Return the computation of a graph in words, with all that its code only names."""
    return "".join([gm.code, *(_named_by(gm, node) for node in gm.graph.nodes)])


def _named_by(gm: fx.GraphModule, node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "get_attr":
        value = attribute(gm, node)
        if isinstance(value, fx.GraphModule):
            return text_of_body(value)
        small = isinstance(value, Tensor) and value.numel() <= _SMALL
        return f"{value.dtype}{value.tolist()}" if small else distinct_name(value, target)
    if hasattr(target, "text"):
        return str(target.text())
    return op_name(target) if isinstance(target, FunctionType) else ""
