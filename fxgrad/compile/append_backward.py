"""Append the backward to a graph: of a loss, it then also returns what arrives at the gradient placeholders.

    def graph(x, weight, ..., gradient_placeholder):        def graph(x, weight, ..., gradient_placeholder):
        ...                                                     leaf = leaf(gradient_placeholder)
        return (loss,)                                          ...
                                                                gradients = gradients(loss, leaf)
                                                                return (detach(loss), gradients[0])

No input requires a gradient, so AOTAutograd traces it as one graph without autograd around it. It runs the backward of
every tap while it traces, as it does for a joint graph.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.capture.captured import Captured
from fxgrad.compile.interface import Interface, outputs_of
from fxgrad.errors import OptionError, UniformOutput
from fxgrad.graph.context import OF_A_CHECKPOINT, source_line
from fxgrad.ops.facts import EXAMPLE, FAKE
from fxgrad.runtime.targets import Target

BY_BACKWARD = "Or call backward() yourself: loss_fn(private, x, y).backward()."


class Leaf(Target):
    """``leaf(placeholder)``: what autograd takes the gradient by."""

    def __call__(self, like: Tensor) -> Tensor:
        return like.detach().requires_grad_()


class Gradients(Target):
    """``gradients(loss, *leaves)``: the gradient of the loss by each leaf; None where it does not depend on it."""

    def __call__(self, loss: Tensor, *leaves: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(loss.device.type, enabled=False):  # as in the user's backward
            return torch.autograd.grad(loss, leaves, allow_unused=True)


class Detached(Target):
    """``detached(loss)``: the loss as a number that nothing is differentiated by."""

    def __call__(self, loss: Tensor) -> Tensor:
        return loss.detach()


def append_backward(gm: fx.GraphModule, inputs: int, placeholders: int) -> None:
    """Let a graph return its loss and the gradients by its placeholders, the inputs behind the first ``inputs``."""
    nodes = list(gm.graph.find_nodes(op="placeholder"))
    (loss,) = outputs_of(gm)
    with gm.graph.inserting_after(nodes[-1]):
        leaves = [_call(gm, Leaf("leaf"), node) for node in reversed(nodes[inputs : inputs + placeholders])][::-1]
    for node, leaf in zip(nodes[inputs:], leaves, strict=False):
        node.replace_all_uses_with(leaf, lambda user, leaf=leaf: user is not leaf)
        leaf.meta[EXAMPLE.key] = FAKE.get(node)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        gradients = _call(gm, Gradients("gradients"), loss, *leaves)
        results = [gm.graph.call_function(getitem, (gradients, i)) for i in range(placeholders)]
        output.args = ((_call(gm, Detached("detached"), loss), *results),)
    gm.recompile()


def no_gradient() -> OptionError:
    return OptionError(
        "the loss depends on no trainable parameter of the model",
        advice="Let loss_fn call its first argument, and leave out no_grad() and detach().",
    )


def not_the_loss() -> OptionError:
    return OptionError(
        "what loss_fn returned is not the loss that its graph computed",
        advice="Return the loss itself: no number, no tuple, nothing made of it.",
    )


def requires_gradient(value: str) -> OptionError:
    return OptionError(
        f"{value} requires a gradient, and forward_backward computes gradients of the model's parameters alone",
        advice=f"Detach it. {BY_BACKWARD}",
    )


def _call(gm: fx.GraphModule, target: Callable[..., Any], *args: Any) -> fx.Node:
    return gm.graph.call_function(target, args)


def check_loss(captured: Captured, gm: fx.GraphModule, interface: Interface) -> None:
    """Refuse what ``loss.backward()`` would do beyond the parameters of the model, and what is no loss."""
    own = set(captured.trainable.values())
    for i, example in enumerate(captured.examples):
        if isinstance(example, Tensor) and example.requires_grad and i not in own:
            raise requires_gradient(captured.described(i))
    for node in gm.graph.nodes:
        if OF_A_CHECKPOINT & node.meta.keys():
            raise OptionError(
                "forward_backward would keep what this checkpoint computes: one graph computes nothing again",
                where=source_line(node),
                advice=BY_BACKWARD,
            )
    outputs = outputs_of(captured.gm)  # as Dynamo traced them: fxgrad's passes do not run a batch of one
    values = [EXAMPLE.of(one) if isinstance(one, fx.Node) else one for one in outputs]
    loss = values[0] if len(values) == 1 else None
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        shown = ", ".join(f"[{', '.join(map(str, v.shape))}]" if isinstance(v, Tensor) else repr(v) for v in values)
        raise OptionError(
            f"loss_fn has to compute one loss, a floating-point tensor without dimensions, not {shown or 'nothing'}",
            advice="Return the sum over samples of their losses. Tensors that loss_fn or the model keeps elsewhere, "
            "as attributes, count too.",
        )
    if interface.uniform:
        raise UniformOutput(
            "the loss depends on parameters alone: its gradient belongs to no sample",
            advice="Compute penalties on parameters outside of loss_fn.",
        )
    if not loss.requires_grad:
        raise no_gradient()
