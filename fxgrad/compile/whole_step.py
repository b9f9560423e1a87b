"""What `fxgrad.forward_backward` refuses of a graph that computes a loss, and what the errors say."""

from __future__ import annotations

from torch import Tensor, fx

from fxgrad.capture.captured import Captured
from fxgrad.compile.interface import Interface
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
