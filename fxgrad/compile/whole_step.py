"""What `fxgrad.forward_backward` refuses of a graph that computes a loss, and what the errors say."""

from __future__ import annotations

from torch import Tensor, fx

from fxgrad.capture.captured import Captured
from fxgrad.compile.interface import Interface, adds_parameters
from fxgrad.errors import OptionError, UniformOutput
from fxgrad.graph.context import OF_A_CHECKPOINT, source_line
from fxgrad.graph.edit import outputs_of
from fxgrad.ops.facts import EXAMPLE

BY_BACKWARD = "Or call backward() yourself: loss_fn(private, x, y).backward()."


def no_gradient() -> OptionError:
    return OptionError(
        "the loss depends on no trainable parameter of the model",
        advice="Let loss_fn call its first argument, and leave out no_grad() and detach().",
    )


def requires_gradient(value: str) -> OptionError:
    return OptionError(
        f"{value} requires a gradient, and forward_backward computes gradients of the model's parameters alone",
        advice=f"Detach it. {BY_BACKWARD}",
    )


def loss_among(captured: Captured, gm: fx.GraphModule, interface: Interface, single: fx.GraphModule | None) -> int:
    """Return which output of a graph is the loss.

    Refuse what ``loss.backward()`` would do beyond the parameters of the model, and what is no loss.
    """
    for i in captured.other_tensors:
        if captured.examples[i].requires_grad:
            raise requires_gradient(captured.described(i))
    for node in gm.graph.nodes:
        if OF_A_CHECKPOINT & node.meta.keys():
            raise OptionError(
                "forward_backward would keep what this checkpoint computes: one graph computes nothing again",
                where=source_line(node),
                advice=BY_BACKWARD,
            )
    outputs = outputs_of(captured.gm)  # as Dynamo traced them: fxgrad's passes do not run a batch of one
    values = {i: EXAMPLE.of(one) for i, one in enumerate(outputs) if isinstance(one, fx.Node)}
    losses = {i: value for i, value in values.items() if isinstance(value, Tensor) and value.requires_grad}
    if not losses:
        raise no_gradient()
    place, loss = next(iter(losses.items()))
    if len(losses) > 1 or loss.dim() or not loss.is_floating_point():
        shapes = " and ".join(f"[{', '.join(map(str, value.shape))}]" for value in losses.values())
        raise OptionError(
            f"loss_fn has to compute one loss, a floating-point tensor without dimensions, and not tensors of the "
            f"shapes {shapes}",
            advice="Return the sum over samples of their losses, and detach() what else loss_fn returns. Tensors that "
            "loss_fn or the model keeps elsewhere, as attributes, count too.",
        )
    term = None if single is None else adds_parameters(captured, single, place)
    if place in interface.uniform or term is not None:
        raise UniformOutput(
            "the loss, or a term of it, depends on parameters alone: its gradient belongs to no sample",
            where="" if term is None else source_line(term),
            advice="Compute penalties on parameters outside of loss_fn.",
        )
    return place
