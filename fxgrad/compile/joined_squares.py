"""One operator for the squared lengths of many layers' rows.

A backward of many layers that clips takes a sum of squares of each layer's inputs and of its gradients, ``[n]``, and
then their total. Inductor allocates, loops and writes code for each of them, which takes as long as a layer's products
where layers are small:

    s_1 = sum_squares(g_1)  ..  s_m = sum_squares(g_m)   ->   s = squares_of_many([g_1 .. g_m]);  s_1 = s[0]  ..

What reads them goes behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxgrad.compile.nodes import call
from fxgrad.kernels import many_squares as many_squares  # its operator
from fxgrad.kernels.norms import FEW

aten, ours = torch.ops.aten, torch.ops.fxgrad
SQUARES = ours.sum_squares.default
_VIEWS = {aten.view.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
KEPT = (SQUARES,)  # what has to be there: opened after this


def join_squares(gm: fx.GraphModule) -> None:
    """Change a traced graph, of the forward or of the backward."""
    _unite(gm.graph)
    found, behind = _independent(gm.graph)
    joined = [node for node in found if _is_kept(_rows(node), behind)]
    if len(joined) > FEW and _moved(gm.graph, joined, behind):
        _join(gm.graph, joined)
    gm.recompile()


def _rows(node: fx.Node) -> fx.Node:
    """Return what a node is of: its first argument."""
    return cast("fx.Node", node.args[0])


def _unite(graph: fx.Graph) -> None:
    """A weight and a bias have one gradient of the layer's output: its squares are summed once."""
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=SQUARES):
        rows = _base(_rows(node))
        node.args = (rows,)
        known = first.setdefault(rows, node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _independent(graph: fx.Graph) -> tuple[list[fx.Node], dict[fx.Node, None]]:
    """Return sums of squares that need none of the others, and all that needs them, both in the graph's order."""
    joined: list[fx.Node] = []
    behind: dict[fx.Node, None] = {}
    n: Any = None
    for node in graph.nodes:
        if any(one in behind for one in node.all_input_nodes):
            behind[node] = None
        elif node.target is SQUARES and _lies_in_rows(rows := _rows(node).meta["val"]):
            n = rows.shape[0] if n is None else n
            if statically_known_true(rows.shape[0] == n):
                joined.append(node)
                behind[node] = None
    return joined, behind


def _base(rows: fx.Node) -> fx.Node:
    """Return what has the same rows in the same memory, past views ``[n, 1, d]`` of ``[n, d]``."""
    while rows.target in _VIEWS and _has_rows(rows.meta["val"], of=_rows(rows).meta["val"]):
        rows = _rows(rows)
    return rows


def _has_rows(view: Tensor, of: Tensor) -> bool:
    """Return whether a view has the same rows, in numbers that lie one behind the other."""
    whole = _lies_in_rows(view) and _lies_in_rows(of)
    return whole and all(statically_known_true(a == b) for a, b in zip(_places(view), _places(of), strict=True))


def _places(rows: Tensor) -> tuple[Any, Any]:
    return rows.shape[0], rows.stride(0)


def _lies_in_rows(rows: Tensor) -> bool:
    """Return whether the numbers of each row lie one behind the other."""
    if rows.dtype is not torch.float32 or rows.device.type != "cpu" or rows.dim() < 2:
        return False
    step: Any = 1
    for size, stride in zip(reversed(rows.shape[1:]), reversed(rows.stride()[1:]), strict=True):
        if not statically_known_true(stride == step):
            return False
        step = step * size
    return True


def _is_kept(rows: fx.Node, behind: Collection[fx.Node]) -> bool:
    """Return whether what follows the sums needs the rows again, as clipped sums do: no memory is held for this."""
    users = [user for user in rows.users if user.target is not SQUARES]
    return any(user in behind or (user.target in _VIEWS and _is_kept(user, behind)) for user in users)


def _moved(graph: fx.Graph, joined: Sequence[fx.Node], behind: Collection[fx.Node]) -> bool:
    """Put what needs sums of squares behind the last of their rows; return False, and do nothing, past a write."""
    last = max(map(_rows, joined))  # by their places in the graph
    between = [node for node in graph.nodes if joined[0] <= node < last]
    if any(node.is_impure() for node in between):
        return False
    for node in reversed([node for node in between if node in behind]):
        last.append(node)
    return True


def _join(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    matrices = [*map(_rows, nodes)]
    with graph.inserting_before(nodes[0]):
        squares = call(graph, ours.squares_of_many.default, matrices)
        rows = [call(graph, aten.select.int, squares, 0, i) for i in range(len(nodes))]
    for node, row in zip(nodes, rows, strict=True):
        node.replace_all_uses_with(row)
        graph.erase_node(node)
