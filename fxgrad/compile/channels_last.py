"""Values around convolutions keep their layout.

Forward, `keep_layout`: what is saved for the backward behind the last convolution. Backward, `write_once`: the
gradients of convolutions' outputs.

Inductor computes convolutions on CPU with channels last, and what comes before the last one, too. Behind it, it saves
each value as the traced graph has it, which is contiguous: a copy from one layout to the other in the forward, and one
back in the backward. A small network for images has its largest values there. Copies that Inductor does not carry out
tell it where the layout changes:

    h = conv(x)                 h = clone(conv(x), channels_last)
    y = relu(h)        ->       y = relu(h)
    z = y.mean((2, 3))          z = clone(y, contiguous).mean((2, 3))

What the user sees keeps its layout.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.graph.edit import outputs_of
from fxgrad.host.inductor import written_as
from fxgrad.host.ops import OpOverload
from fxgrad.ops.calls import op_name

aten = torch.ops.aten
_RESHAPES = frozenset("view _unsafe_view reshape".split())

# Ops whose backward reads no layout: it saves nothing of their operand, or Inductor has its own code for it.
_ANY_LAYOUT = frozenset(
    """view _unsafe_view reshape permute transpose select slice unsqueeze squeeze expand alias clone
    mean sum amax amin avg_pool2d _adaptive_avg_pool2d""".split()
)


def keep_layout(gm: fx.GraphModule) -> None:
    """Change a forward's traced graph on CPU."""
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    if not convolutions or not torch.backends.mkldnn.enabled or not torch.backends.mkldnn.is_available():
        return
    last = convolutions[-1]
    value = last.meta["val"]
    if value.dim() != 4 or any(one.args[0].meta["val"].device.type != "cpu" for one in convolutions):
        return
    output = gm.graph.output_node()
    visible = output.meta.get("user_visible_output_idxs")  # Inductor's own note of what the user sees
    if visible is None:
        return
    region = _region(convolutions)
    results = list(outputs_of(gm))
    for i in visible:
        if results[i] in region and isinstance(results[i].meta["val"], Tensor):
            results[i] = _copy_behind(results[i], _traced(results[i]))
    output.args = (tuple(results),)
    for node in region:
        outside = [user for user in node.users if user not in region and user is not output]
        if outside and isinstance(node.meta["val"], Tensor):
            copy = _copy_behind(node, _traced(node))
            if not all(op_name(user.target) in _ANY_LAYOUT for user in outside):
                outside.append(output)  # a backward gets what it was traced with
            node.replace_all_uses_with(copy, delete_user_cb=outside.__contains__)
    copy = _copy_behind(last, torch.channels_last)
    last.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    gm.recompile()


def write_once(gm: fx.GraphModule, examples: Sequence[Any]) -> None:
    """Change a backward's traced graph on CPU: gradients of convolutions' outputs are written with their channels last.

    A norm layer computes such a gradient for its groups, ``[n, groups, channels / groups, pixels]``. What two ops read,
    Inductor writes in the shape in which it was computed, contiguous, and copies it from there.
    """
    if not any(_is_channels_last(example) for example in examples):
        return
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    windows = gm.graph.find_nodes(op="call_function", target=torch.ops.fxgrad.window_rows.default)
    grads = [node.args[0] for node in convolutions] + [_viewed(node.args[0]) for node in windows]
    for grad in dict.fromkeys(grads):
        strides = _strides_of(grad.meta["val"])
        if strides and _is_reshape(grad):
            written = written_as(grad, strides)
            written.meta = {**grad.meta, "val": grad.meta["val"].clone(memory_format=torch.channels_last)}
            others = [user for user in grad.users if user is not written and user.op != "output"]
            grad.replace_all_uses_with(written, delete_user_cb=others.__contains__)
    gm.recompile()


def _viewed(grad: fx.Node) -> fx.Node:
    """Return what a kernel's operand, ``[n, k, channels, rows, columns]``, is a view of."""
    return grad.all_input_nodes[0] if _is_reshape(grad) else grad


def _is_reshape(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target) in _RESHAPES


def _is_channels_last(value: Any) -> bool:
    """Read ints alone: to ask a symbolic size would be a guard."""
    strides = _strides_of(value) if isinstance(value, Tensor) else ()
    steps = value.stride()[1:] if strides else ()
    return bool(strides) and all(isinstance(step, int) for step in steps) and steps == strides[1:]


def _strides_of(image: Tensor) -> tuple[int, ...]:
    """Return the steps of an image of known size with channels last; none of what is no image."""
    if image.dim() != 4 or not all(isinstance(size, int) for size in image.shape[1:]):
        return ()
    _, channels, rows, columns = image.shape
    return channels * rows * columns, 1, columns * channels, channels


def _region(convolutions: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return the last convolution, and what is computed of it element by element or by max pooling, in order.

    Values of other convolutions may take part, such as what a residual block adds: they are laid out alike.
    """
    alike, region = set(convolutions), {convolutions[-1]: None}
    for node in convolutions[0].graph.nodes:
        operands = [one for one in node.all_input_nodes if not _is_spread(one)]
        if node.op == "call_function" and operands and all(one in alike for one in operands) and _keeps(node):
            alike.add(node)
            if any(one in region for one in operands):
                region[node] = None
    return region


def _is_spread(operand: fx.Node) -> bool:
    """Return whether a value is smaller than what an op makes of it, as one number for each channel: it has no say."""
    value = operand.meta.get("val")  # the bodies of `torch.cond` have none
    if not isinstance(value, Tensor) or value.dim() > 4:
        return False
    return value.dim() < 4 or any(isinstance(size, int) and size == 1 for size in value.shape)


def _keeps(node: fx.Node) -> bool:
    """Return whether an op lays out its result as its operands are."""
    if node.target in (torch.ops.fxgrad.max_pool.default, operator.getitem):
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _traced(node: fx.Node) -> torch.memory_format:
    """Return the layout that a value was traced with."""
    value = node.meta["val"]
    if value.is_contiguous() or not value.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def _copy_behind(node: fx.Node, layout: torch.memory_format) -> fx.Node:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,), {"memory_format": layout})
    copy.meta = {**node.meta, "val": node.meta["val"].clone(memory_format=layout)}
    return copy
