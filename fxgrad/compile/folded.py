"""One product for all rows of a batch that meet the same matrix.

``at::matmul`` folds ``x @ W``, for x of three dimensions, into one product of a matrix if W has gradients. fxgrad's W
is detached, so the traced graph multiplies with it for each index of the first dimension, a few rows at a time. In the
order in which x lies in memory its rows are one matrix, without a copy:

    bmm(x.transpose(0, 1), W.expand(t, ..))   ->   mm(x.view(n * t, ..), W).view(n, t, ..).transpose(0, 1)

What does not lie so, such as a convolution's output with its channels moved to the end, stays as it is: to copy it
takes longer than the batch does.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxgrad.compile import nodes

aten = torch.ops.aten


def fold_batches(gm: fx.GraphModule) -> None:
    """Change a traced graph, of the forward or of the backward."""
    for product in gm.graph.find_nodes(op="call_function", target=aten.bmm.default):
        x, w = cast("tuple[fx.Node, fx.Node]", product.args)
        swapped = _is_swapped(x.meta["val"])
        if swapped is not None and statically_known_true(w.meta["val"].stride(0) == 0):
            product.replace_all_uses_with(_folded(product, x, w, swapped))
            product.graph.erase_node(product)
    gm.recompile()


def _is_swapped(x: Tensor) -> bool | None:
    """Return whether rows ``[t, n, k]`` lie in memory as ``[n, t, k]`` does, or as they are: None if neither."""
    times, samples, k = x.shape
    if not all(
        statically_known_true(size > 0) for size in (times, k)
    ):  # no matrix to select; no number of rows to view
        return None
    for swapped, strides in ((False, (samples * k, k, 1)), (True, (k, times * k, 1))):
        if all(statically_known_true(a == b) for a, b in zip(x.stride(), strides, strict=True)):
            return swapped
    return None


def _folded(product: fx.Node, x: fx.Node, w: fx.Node, swapped: bool) -> fx.Node:
    graph = product.graph

    call = partial(nodes.call, graph)

    def size(of: fx.Node, dim: int) -> int | fx.Node:
        known = of.meta["val"].shape[dim]
        return known if isinstance(known, int) else call(aten.sym_size.int, of, dim)

    with graph.inserting_before(product):
        rows = call(aten.permute.default, x, [1, 0, 2]) if swapped else x
        matrix = call(aten.select.int, w, 0, 0)
        result = call(aten.mm.default, call(aten.view.default, rows, [-1, size(rows, 2)]), matrix)
        result = call(aten.view.default, result, [size(rows, 0), size(rows, 1), size(matrix, 1)])
        if swapped:  # the loop behind reads the rows in their order: the copy is for results that are returned or saved
            result = call(aten.permute.default, result, [1, 0, 2])
            result = call(aten.clone.default, result, memory_format=torch.contiguous_format)
    result.meta = product.meta
    return result
