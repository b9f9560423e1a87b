"""What PyTorch's autograd graph says: where a backward began, what uses a parameter, what depends on parameters alone.

A node is looked at by its name, its edges and the shapes of its outputs. What it saved is freed when it has run.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fxgrad.errors import OptionError
from fxgrad.host.autograd import (
    BACKWARD_CODE,
    adds_to_leaves,
    function_of,
    outputs_like,
    outputs_of_backward,
    will_execute,
    writes_over_saved,
)

DELIVERS = "_fxgrad_delivers"  # on the autograd functions that stand between a transformed model and its parameters
DELIVERED = ""  # in place of an op's name: fxgrad


def roots_of_backward() -> list[Any]:
    """Return the nodes from which the running backward call began; none where PyTorch does not show them.

    The engine does not name them. The frame that called the engine does: on CPU it is in this thread, on CUDA hooks
    run in a thread of the engine's own, and several threads may be in a backward.
    """
    roots_here = _roots_in(sys._getframe())
    if roots_here:
        return roots_here
    others = [_roots_in(frame) for frame in sys._current_frames().values()]
    return next((roots for roots in others if any(_is_running(root) for root in roots)), [])


def _roots_in(frame: FrameType | None) -> list[Any]:
    """Those of the innermost backward call among a frame and its callers; in each step, so without a generator."""
    while frame is not None and frame.f_code is not BACKWARD_CODE:
        frame = frame.f_back
    return [] if frame is None else [*map(_node_of, outputs_of_backward(frame.f_locals))]


def _is_running(root: Any) -> bool:
    """Return whether the running backward call goes through a root: PyTorch answers for what stands behind it."""
    return any(will_execute(child) for child in _children(root) if child is not None)


def accumulates(parameter: Tensor) -> bool:
    """Return whether the running backward call adds to p.grad; ``autograd.grad(loss, parameters)`` does not."""
    try:
        node = get_gradient_edge(parameter).node
        return bool(will_execute(node)) or _is_added_to(node)
    except RuntimeError:  # PyTorch's answer for a leaf under autograd.grad
        return False


def _is_added_to(leaf: Any) -> bool:
    """Return whether ``p.backward(g)`` was called on a leaf, in any thread: PyTorch does not count these."""
    frames = (frame for one in sys._current_frames().values() for frame in frames_from(one))
    calls = (frame for frame in frames if frame.f_code is BACKWARD_CODE)
    return any(adds_to_leaves(call.f_locals) and leaf in _roots_in(call) for call in calls)


def are_captured(leaves: Sequence[Any]) -> bool:
    """Return whether the running backward call is an ``autograd.grad`` by one of these nodes of parameters."""
    try:
        list(map(will_execute, leaves))  # of all: PyTorch says False of a leaf that is not asked for
    except RuntimeError:  # PyTorch's answer for such a leaf
        return True
    return False


def check_runs_again(roots: Sequence[Any]) -> None:
    """Refuse ``retain_graph=True`` for a compiled backward that can run once.

    PyTorch does not count the node that backward was called on among those that it will execute.
    """
    if any(writes_over_saved(node) and (node in roots or will_execute(node)) for node in _below(roots)):
        raise OptionError(
            "retain_graph=True: the compiled backward writes over what the forward saved for it, and runs once",
            advice='Call backward() once, on the sum of the losses; or pass backend="eager", or set '
            "torch._functorch.config.donated_buffer = False before the first call.",
        )


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, the last caller first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _node_of(output: Any) -> Any:
    """The node of a tensor or of an edge that backward was called on; of most tensors without PyTorch's search."""
    if not isinstance(output, Tensor):
        return output.node
    node = output.grad_fn
    return get_gradient_edge(output).node if node is None else node


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad" and not _is_users(node)


def _is_users(node: Any) -> bool:
    """Return whether a node is an autograd.Function's, which has any name and any attribute."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_nested() -> bool:
    """Return whether the running backward call was made inside of another one, as reentrant checkpoints do."""
    return sum(frame.f_code is BACKWARD_CODE for frame in frames_from(sys._getframe())) > 1


def _op(node: Any) -> str:
    """The op that made a node: ``addmm`` for AddmmBackward0; of a user's autograd.Function its name, as it is."""
    if _is_users(node):
        function = function_of(type(node))
        return DELIVERED if DELIVERS in vars(function) else f"autograd.Function {function.__name__}"
    return type(node).__name__.split("Backward")[0].lower()


def _children(node: Any) -> list[Any]:
    """Return the nodes that a node hands gradients to, None for a constant; a delivery is the end of a path."""
    return [] if _op(node) == DELIVERED else [child for child, _ in node.next_functions]


def _below(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield every node that gradients reach from these, past no delivery."""
    stack = list(dict.fromkeys(roots))
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for child in _children(node):
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def is_scaled(root: Any) -> bool:
    """Whether a loss is a product with a number or a tensor of one that needs no gradient, divided at the most."""
    if type(root).__name__[:3] not in ("Mul", "Div"):  # in each step, so first
        return False
    op = _op(root)
    while op == "div" and _is_linear(root):
        root = _children(root)[0]
        op = _op(root)
    return op == "mul" and _is_linear(root)


def is_divided(root: Any) -> bool:
    """Return whether a loss is a quotient by a number, and no product before."""
    if type(root).__name__[:3] != "Div" or not _is_linear(root):
        return False
    return not is_scaled(root)


def used_outside(outputs: Sequence[Tensor], names: Mapping[int, str]) -> tuple[str, ...]:
    """Return the parameters that values depend on past every delivery."""
    return tuple(names[id(leaf)] for leaf in leaves_behind(outputs) if id(leaf) in names)


def leaves_behind(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that values depend on past every delivery."""
    nodes = _below([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None])
    return [node.variable for node in nodes if _is_leaf(node)]


def ops_using(roots: Sequence[Any], parameter: Tensor) -> list[str]:
    """Return the ops through which a parameter gets gradients, DELIVERED among them."""
    accumulator = get_gradient_edge(parameter).node
    return [_op(node) for node in _below(roots) if any(child is accumulator for child, _ in node.next_functions)]


def deliveries_to(roots: Sequence[Any], parameters: Collection[int]) -> list[Any]:
    """Return the nodes through which fxgrad delivers to parameters; these are their ids."""
    nodes = (node for node in _below(roots) if _op(node) == DELIVERED)
    return [node for node in nodes if any(_is_leaf(c) and id(c.variable) in parameters for c, _ in node.next_functions)]


# Note [Parameters alone]
# ~~~~~~~~~~~~~~~~~~~~~~~
# A gradient by a parameter depends on parameters alone under two conditions: every node on its way is a known op, and
# a node that is not linear has functions of parameters as its operands. A tensor that needs no gradient leaves no
# edge, and may hold samples, so it is refused. The exception is a number, as in ``0.1 * penalty``: numbers count as
# constants. So no op is known that takes single elements: with a number for each, any function could be written.

_LINEAR = frozenset(
    """add sub rsub neg sum mean view reshapealias unsafeview clone t transpose permute expand squeeze unsqueeze
    cat stack trace tocopy""".split()
)
_OTHERS = frozenset(
    """mul div pow sqrt rsqrt abs exp log log1p square norm linalgvectornorm linalgmatrixnorm dot mm mv bmm addmm
    max min amax amin relu clamp clampmin clampmax sigmoid tanh softplus reciprocal prod
    logsumexp foreachnorm""".split()
)


_WITH_NUMBERS = frozenset("mul div add sub rsub".split())


def depends_on_parameters_alone(roots: Sequence[Any], parameters: Collection[int]) -> bool:
    """Return whether what reaches parameters past every delivery depends on parameters alone; these are their ids.

    See Note [Parameters alone].
    """
    pure: dict[Any, bool] = {}
    reaches: dict[Any, bool] = {}
    for node in _children_first(roots):
        children = _children(node)
        if _is_leaf(node):
            pure[node] = reaches[node] = id(node.variable) in parameters
            continue
        known = _op(node) in _LINEAR or _op(node) in _OTHERS
        constants = None in children and not (_is_number(node) and _op(node) in _WITH_NUMBERS)
        differentiated = [child for child in children if child is not None]
        pure[node] = known and not constants and all(pure[child] for child in differentiated)
        reaches[node] = any(reaches[child] for child in differentiated)
    way = [node for node in reaches if reaches[node] and not _is_leaf(node)]
    scalars = all(_is_number(root) for root in roots)  # a root of several elements has a gradient of the user's
    return bool(way) and scalars and all(pure[node] or _is_linear(node) for node in way)


def _is_linear(node: Any) -> bool:
    """Return whether a node hands its gradient on, times numbers at the most."""
    op, children = _op(node), _children(node)
    by_number = (op == "mul" and None in children) or (op == "div" and not any(children[1:]))
    return op in _LINEAR or (by_number and _is_number(node))


def _is_number(node: Any) -> bool:
    """Return whether a node's output has no dimensions: then what it was made with had none."""
    return all(len(one.shape) == 0 for one in outputs_like(node))


def _children_first(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield every node behind those it hands gradients to."""
    done: set[Any] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if node in done:
            continue
        if expanded:
            done.add(node)
            yield node
            continue
        stack.append((node, True))
        stack.extend((child, False) for child in _children(node) if child is not None and child not in done)
