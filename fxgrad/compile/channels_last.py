"""Values around convolutions on CPU have their channels last, from one end of a traced graph to the other.

Inductor computes convolutions on CPU with channels last, but plans their neighbours by the layouts that were traced,
which are contiguous: behind the last convolution of a forward each saved value is copied from one layout to the other,
and back in the backward. In one graph of a whole step, where no saved value tells the backward how the forward has laid
it out, each value that both read is written twice. A small network for images has its largest values there. A copy in
front of each convolution tells Inductor, which infers all layouts behind it before it plans, and leaves out the copies
that change nothing (`lay_out`):

    h = conv(x)           h = conv(clone(x, channels_last))
    y = conv(relu(h))     y = conv(clone(relu(h), channels_last))

A copy behind each weight is for the convolution and its backward. Gradients of images, as norm layers compute and read
them, have to be told by themselves (`write_once`). What the user sees keeps its layout.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxgrad.compile.nodes import call, is_view, unviewed
from fxgrad.graph.edit import outputs_of
from fxgrad.host.layouts import write_as_inferred, written_as
from fxgrad.host.ops import OpOverload
from fxgrad.ops.calls import op_name
from fxgrad.ops.tags import has_tag, is_pointwise

aten = torch.ops.aten
_RESHAPES = frozenset("view _unsafe_view reshape".split())

# Ops that take any layout, and whose backward does: it saves nothing of their operand, or Inductor has its own code for
# it. PyTorch's other kernels may return a layout that it does not expect.
_ANY_LAYOUT = frozenset(
    """view reshape permute transpose t select slice unsqueeze squeeze expand alias detach clone split split_with_sizes
    unbind cat constant_pad_nd flip index_put zeros_like ones_like full_like empty_like new_zeros new_full
    sym_size mean sum amax amin var_mean avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    convolution convolution_backward mm addmm bmm baddbmm""".split()
)


def lay_out(gm: fx.GraphModule) -> bool:
    """Change the traced graph of a forward, or of a whole step, on CPU: convolutions read images with channels last.

    A reader that may depend on the layout gets the one that was traced. Where that is not contiguous, images stay as
    they are; but what the user sees a part of is written as it was traced. Return whether images are laid out.
    """
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    if not convolutions or not torch.backends.mkldnn.enabled or not torch.backends.mkldnn.is_available():
        return False
    if any(not _is_image_on_cpu(operand) for one in convolutions for operand in one.args[:2]):
        return False
    output = gm.graph.output_node()
    visible = output.meta.get("user_visible_output_idxs")  # Inductor's own note of what the user sees
    if visible is None:
        return False
    parts = _keep_parts(gm, visible)
    results = list(outputs_of(gm))
    values = [node for node in _reached(convolutions) if isinstance(node.meta["val"], Tensor)]
    readers = {node: [user for user in node.users if _asks_for_layout(user)] for node in values}
    seen = {results[i] for i in visible} - parts
    bound = {node: users for node, users in readers.items() if users or node in seen}
    if not all(_is_contiguous(node.meta["val"]) for node in bound):
        return False
    for node, users in bound.items():
        copy = _copy_behind(node, torch.contiguous_format)
        node.replace_all_uses_with(copy, delete_user_cb=users.__contains__)
        kept = range(len(results)) if users else visible  # a backward gets what it was traced with
        results = [copy if one is node and i in kept else one for i, one in enumerate(results)]
    output.args = (tuple(results),)
    for node in values:
        if any(_is_operator(user) for user in node.users):  # which takes any layout
            write_as_inferred(node)
    for convolution in convolutions:
        image = convolution.args[0]
        copy = _copy_behind(image, torch.channels_last)
        image.replace_all_uses_with(copy, delete_user_cb=lambda user, to=convolution: user is to)
    _share_weights(gm, convolutions)
    gm.recompile()
    return True


def _keep_parts(gm: fx.GraphModule, visible: Sequence[int]) -> set[fx.Node]:
    """Write what the user sees a part of as it was traced; return the parts, such as ``h[:, :2]``.

    Inductor keeps no more than the order of their strides, where it lays out ``h`` as a convolution likes.
    """
    results = list(outputs_of(gm))
    parts = {one for one in (results[i] for i in visible) if isinstance(one, fx.Node) and _is_part(one)}
    for whole in dict.fromkeys(map(unviewed, parts)):
        if whole.op == "call_function":
            written, users = _as_traced(whole), [user for user in whole.users if is_view(user)]
            whole.replace_all_uses_with(written, delete_user_cb=users.__contains__)
            results = [written if one is whole and i in visible else one for i, one in enumerate(results)]
    gm.graph.output_node().args = (tuple(results),)
    gm.recompile()
    return parts


def _is_part(node: fx.Node) -> bool:
    return is_view(node) and not _is_contiguous(node.meta["val"])


def _share_weights(gm: fx.GraphModule, convolutions: Sequence[fx.Node]) -> None:
    """Let a convolution and its backward in one graph read one copy of their weight: Inductor makes one for each."""
    backwards = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    pairs: list[tuple[Any, fx.Node]] = [(one.args[1], one) for one in convolutions]
    pairs += [(one.args[2], one) for one in backwards]
    readers: dict[fx.Node, list[fx.Node]] = {}
    for weight, reader in pairs:
        readers.setdefault(weight, []).append(reader)
    for weight, several in readers.items():
        if len(several) > 1 and _has_pixels(weight.meta["val"]):
            copy = _copy_behind(weight, torch.channels_last)
            weight.replace_all_uses_with(copy, delete_user_cb=several.__contains__)


def write_once(gm: fx.GraphModule) -> None:
    """Change a backward's traced graph on CPU: gradients of images are written with their channels last, and once.

    A norm layer computes the gradient of a convolution's output for its groups, ``[n, groups, channels / groups,
    pixels]``. What two ops read, Inductor writes in the shape in which it was computed, contiguous, and copies it from
    there. Likewise what a norm layer reads in that shape, such as the gradient of a sum of two branches: a loop that
    reads one image contiguous and one with channels last turns tiles over, once for each sum that it takes.
    """
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    windows = gm.graph.find_nodes(op="call_function", target=torch.ops.fxgrad.window_rows.default)
    grads = [node.args[0] for node in convolutions] + [_viewed(node.args[0]) for node in windows]
    for grad in dict.fromkeys(grads):
        strides = _strides_of(grad.meta["val"])
        if strides and _is_reshape(grad):
            written = _written(grad, strides, torch.channels_last)
            others = [user for user in grad.users if user is not written and user.op != "output"]
            grad.replace_all_uses_with(written, delete_user_cb=others.__contains__)
    for node in gm.graph.nodes:
        shared = len(node.users) > 1 and any(map(_is_reshape, node.users))
        if shared and is_pointwise(node) and _has_pixels(node.meta["val"]):
            write_as_inferred(node)
    gm.recompile()


def return_contiguous(gm: fx.GraphModule) -> None:
    """Change a backward's traced graph on CPU: what was traced contiguous is returned so.

    Inductor reads off the layout of what a backward returns only when the images that it saved have their channels
    last: the gradient of one image's convolution would have them last, too. A copy that changes nothing is left out.
    """
    results = list(outputs_of(gm))
    for node in dict.fromkeys(results):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and value.dim() > 2 and _is_contiguous(value):
            copy = _copy_behind(node, torch.contiguous_format)
            results = [copy if one is node else one for one in results]
    gm.graph.output_node().args = (tuple(results),)
    gm.recompile()


def _viewed(grad: fx.Node) -> fx.Node:
    """Return what a kernel's operand, ``[n, k, channels, rows, columns]``, is a view of."""
    return grad.all_input_nodes[0] if _is_reshape(grad) else grad


def _is_reshape(node: fx.Node) -> bool:
    return node.op == "call_function" and op_name(node.target) in _RESHAPES


def is_channels_last(value: Any) -> bool:
    """Return whether an image is, by ints alone: to ask a symbolic size would be a guard."""
    strides = _strides_of(value) if isinstance(value, Tensor) else ()
    steps = value.stride()[1:] if strides else ()
    return bool(strides) and all(isinstance(step, int) for step in steps) and steps == strides[1:]


def _has_pixels(value: Any) -> bool:
    """Return whether it makes a difference for an image whether its channels are last."""
    return isinstance(value, Tensor) and bool(_strides_of(value)) and value.shape[2:].numel() > 1


def _strides_of(image: Tensor) -> tuple[int, ...]:
    """Return the steps of an image of known size with channels last; none of what is no image."""
    if image.dim() != 4 or not all(isinstance(size, int) for size in image.shape[1:]):
        return ()
    _, channels, rows, columns = image.shape
    return channels * rows * columns, 1, columns * channels, channels


def _reached(convolutions: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return what is computed of convolutions' results, and these, in order."""
    reached = dict.fromkeys(convolutions)
    for node in convolutions[0].graph.nodes:
        if "val" in node.meta and any(one in reached for one in node.all_input_nodes):
            reached[node] = None
    return reached


def _is_operator(user: fx.Node) -> bool:
    return str(user.target).startswith("fxgrad.")


def _asks_for_layout(user: fx.Node) -> bool:
    """Return whether a node may depend on the layout of its operands: any that is not known not to."""
    if user.op == "output" or user.target is operator.getitem:
        return False
    if not isinstance(user.target, OpOverload) or user.target.namespace not in ("aten", "prims"):
        return not has_tag(user, torch.Tag.flexible_layout)
    if user.target is aten.view.dtype:
        return True
    return op_name(user.target) not in _ANY_LAYOUT and not is_pointwise(user)


def _is_image_on_cpu(operand: fx.Node) -> bool:
    value = operand.meta["val"]
    return isinstance(value, Tensor) and value.dim() == 4 and value.device.type == "cpu"


def _is_contiguous(value: Tensor) -> bool:
    """Return whether a value is known to be, which asks symbolic sizes for nothing."""
    expected: Any = 1
    for size, step in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(step == expected):
            return False
        expected = step * size
    return True


def _as_traced(node: fx.Node) -> fx.Node:
    """Insert what Inductor keeps as it was traced; a copy alone is written as the loop likes that computes it."""
    strides: Sequence[Any] = node.meta["val"].stride()
    if not all(isinstance(step, int) for step in strides):
        if not _is_contiguous(node.meta["val"]):
            return node
        strides = _steps(node)
    return _written(node, strides, torch.preserve_format)


def _steps(node: fx.Node) -> list[Any]:
    """Insert the steps of a contiguous value whose sizes are not known, behind it."""
    graph, shape = node.graph, node.meta["val"].shape
    steps: list[Any] = [1]
    with graph.inserting_before(node.next):
        for dim in range(len(shape) - 1, 0, -1):
            size = shape[dim] if isinstance(shape[dim], int) else call(graph, aten.sym_size.int, node, dim)
            known = isinstance(size, int) and isinstance(steps[0], int)
            steps.insert(0, size * steps[0] if known else call(graph, operator.mul, size, steps[0]))
    return steps


def _written(node: fx.Node, strides: Sequence[int | fx.Node], layout: torch.memory_format) -> fx.Node:
    written = written_as(node, strides)
    written.meta = {**node.meta, "val": node.meta["val"].clone(memory_format=layout)}
    return written


def _copy_behind(node: fx.Node, layout: torch.memory_format) -> fx.Node:
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(aten.clone.default, (node,), {"memory_format": layout})
    copy.meta = {**node.meta, "val": node.meta["val"].clone(memory_format=layout)}
    return copy
