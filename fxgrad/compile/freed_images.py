"""Large images are freed early in a backward on CPU: what is needed of them there is a mask of one byte a number.

A ReLU's backward reads the ReLU's output, to see where it is above zero. PyTorch's op for the gradient of the next
convolution gets that image, too, though it reads no more of it than its sizes. So in the plain step the image, the
gradient by it, and that of the convolution's output are in memory together. In a private step, there are also what the
layers above have left to be summed by the samples' weights, and the convolution's own per-sample gradients:

    g_x = convolution_backward(g, x, w)           rows = window_rows(g, x)
    rows = window_rows(g, x)                      mask = at_most(x, 0)          x is freed
    g_h = relu_backward(g_x, x, 0)                g_x = convolution(g, w, transposed=True)
                                                  g_h = kept_where(g_x, mask)

An image that only the ReLU's backward reads, such as one that is pooled next, is freed in the forward. A mask takes a
pass over its image. So this is for images that are a large part of all: those of the first layers of a small network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from fxgrad.compile.nodes import call
from fxgrad.kernels.sizes import hint

aten = torch.ops.aten
_OTHER_NAMES = aten.detach.default, aten.alias.default
LARGE = 5  # a large image is a fifth of all that have a ReLU's backward, or more


def mask_images(graph: fx.Graph) -> None:
    """Change a traced graph of a forward with its backward: ReLUs' backwards read masks of large images."""
    backwards = [node for node in _calls(graph, torch.ops.fxgrad.relu_backward.default) if _is_image(node)]
    images = {node: _image(node) for node in backwards}
    sizes = {image: _bytes(image) for image in images.values()}
    total = sum(sizes.values())
    for node, image in images.items():
        kept = image.op == "call_function" and "recompute" not in image.meta  # which a checkpoint would compute again
        if kept and LARGE * sizes[image] >= total:
            mask = _mask_of(image, node)
            with graph.inserting_before(node):
                node.replace_all_uses_with(call(graph, torch.ops.fxgrad.kept_where.default, node.args[0], mask))
            graph.erase_node(node)


def _mask_of(image: fx.Node, backward: fx.Node) -> fx.Node:
    """Insert a mask where the image can be freed: in front of the gradient by it, or else in the forward."""
    graph, threshold = image.graph, backward.args[2]
    readers = [node for node in _gradients_by_images(graph) if node.args[1] is image]
    with graph.inserting_before(min([backward, *readers]) if readers else image.next):
        mask = call(graph, torch.ops.fxgrad.at_most.default, image, threshold)
    if readers:
        mask.meta["partitioner_tag"] = "must_be_in_backward"  # PyTorch's name
    else:
        mask.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return mask


def free_images(gm: fx.GraphModule) -> None:
    """Change the traced graph of a backward, or of a whole step: gradients by masked images do without the image."""
    graph = gm.graph
    masked = {node.args[0] for node in _calls(graph, torch.ops.fxgrad.at_most.default)}
    for node in _gradients_by_images(graph):
        args: tuple[Any, ...] = node.args
        g, image, weight, _, stride, padding, dilation, _, _, groups, _ = args
        rest = _rest(image, g, weight, stride, padding, dilation) if image in masked else None
        if rest is None:
            continue
        with graph.inserting_before(node):
            given = (g, weight, None, stride, padding, dilation, True, rest, groups)
            gradient = call(graph, aten.convolution.default, *given)
        for taken in list(node.users):
            taken.replace_all_uses_with(gradient)
            graph.erase_node(taken)
        graph.erase_node(node)
    gm.recompile()


def _rest(image: fx.Node, g: fx.Node, weight: fx.Node, *numbers: Sequence[int]) -> list[int] | None:
    """Return the rows and columns behind the last window's start that no window reads; none where sizes are symbols."""
    sizes = (node.meta["val"].shape[2:] for node in (image, g, weight))
    rest = [
        size - ((windows - 1) * step - 2 * padding + apart * (kernel - 1) + 1)
        for size, windows, kernel, step, padding, apart in zip(*sizes, *numbers, strict=True)
    ]
    return rest if all(isinstance(one, int) for one in rest) else None


def _gradients_by_images(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls that compute the gradient by a convolution's input alone, of no transposed convolution."""

    def is_one(args: tuple[Any, ...]) -> bool:
        transposed, wanted = args[7], args[10]
        return not transposed and list(wanted) == [True, False, False]

    return [node for node in _calls(graph, aten.convolution_backward.default) if is_one(node.args)]


def _calls(graph: fx.Graph, op: Any) -> Sequence[fx.Node]:
    nodes: Sequence[fx.Node] = graph.find_nodes(op="call_function", target=op)
    return nodes


def _is_image(node: fx.Node) -> bool:
    """Return whether it is one on CPU, in the dtype for which oneDNN computes both forms of the gradient."""
    value = node.meta["val"]
    on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
    return on_cpu and value.dim() == 4 and value.dtype == torch.float32


def _image(backward: fx.Node) -> fx.Node:
    """Return the value that a ReLU's backward reads; autograd saves it under another name."""
    image = cast("fx.Node", backward.args[1])
    while image.target in _OTHER_NAMES:  # and no other view: a square image turned over has the same sizes
        image = cast("fx.Node", image.args[0])
    return image


def _bytes(image: fx.Node) -> int:
    value: Tensor = image.meta["val"]
    return hint(value.numel()) * value.element_size()
