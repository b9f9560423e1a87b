"""Make a user's autograd.Function, or an op of control flow, one call whose arguments are values."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxgrad.errors import UnsupportedOp
from fxgrad.graph.context import Context, place_beside, source_line
from fxgrad.graph.edit import function_of, is_inplace
from fxgrad.host.pytree import tree_leaves
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.user_functions import HOOK, UserFunction
from fxgrad.ops.values import memory_of
from fxgrad.samples.control_flow import CONTROL_FLOW, Cond


def wrap_bodies(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no call has graphs among its arguments.

    ``autograd_function_apply(fwd, bwd, x, w)`` -> ``autograd_function(x, w)``
    ``scan(body, [h], [x], [w])`` -> ``scan(h, x, w)``
    ``register_hook(h, body)`` -> ``autograd_function(h)``, whose backward is the hook, in h's place
    """
    for node in gm.graph.nodes:
        if op_name(node.target) == _HOOKED:  # the value itself, as PyTorch returns it: a second hook is on that, too
            node.replace_all_uses_with(node.args[0])
    for node in list(gm.graph.nodes):
        name = function_of(node)
        if name == "higher_order::autograd_function_apply":
            _wrap_function(gm, node)
        elif name == _HOOKED:
            _wrap_hook(gm, node)
        elif name in CONTROL_FLOW:
            _wrap_control_flow(gm, node, CONTROL_FLOW[name])
    return gm


def _wrap_function(gm: fx.GraphModule, node: fx.Node) -> None:
    if "saved_for_backward_idx" not in node.kwargs:
        raise UnsupportedOp(
            "this version of PyTorch hands over an autograd.Function in a form that is not known here",
            where=source_line(node),
            advice="Use torch 2.13 or later.",
        )
    fwd, bwd, *args = node.args
    bodies = [fwd, bwd]
    forward, backward = _graphs(gm, bodies)
    if "dirty_idx" not in node.kwargs:
        _refuse_writes(forward.graph, source_line(node))
    node.target = UserFunction(forward, backward, node.kwargs)
    node.args, node.kwargs = tuple(args), {}
    _drop(gm, bodies)


def _refuse_writes(forward: fx.Graph, where: str) -> None:
    """A written input that ``dirty_idx`` does not name: PyTorch's own gradients are wrong where it is read again."""
    inputs = {_memory(node) for node in forward.find_nodes(op="placeholder")} - {None}
    for node in forward.nodes:
        if _written(node) in inputs:
            raise UnsupportedOp(
                "an autograd.Function writes over an input, and the captured graph does not say so",
                where=where,
                advice="Call ctx.mark_dirty, with torch 2.13 or later, or write to a copy.",
            )


def _memory(node: object) -> int | None:
    return memory_of(EXAMPLE.get(node)) if isinstance(node, fx.Node) else None


def _written(node: fx.Node) -> int | None:
    """The memory that an op in place writes to."""
    return _memory(node.args[0]) if is_inplace(node) and node.args else None


def _wrap_hook(gm: fx.GraphModule, node: fx.Node) -> None:
    """``h.register_hook(f)`` is an identity behind h whose backward is f: of a whole batch's gradient, as f is."""
    value, body, *given = node.args
    assert isinstance(value, fx.Node) and isinstance(body, fx.Node)
    hook = getattr(gm, str(body.target))
    (result,) = tree_leaves(hook.graph.output_node().args) or [None]
    if result is not None:
        _hook_behind(gm, node, value, hook, given)
    gm.graph.erase_node(node)
    _drop(gm, [body])


def _hook_behind(gm: fx.GraphModule, node: fx.Node, value: fx.Node, hook: fx.GraphModule, given: list[Any]) -> None:
    """Let all readers of a value read an identity, in whose backward the hook runs."""
    memory, readers = _memory(value), [user for user in value.users if op_name(user.target) != _HOOKED]
    written = memory is not None and memory in map(_written, gm.graph.nodes)
    early = any(reader < arg for reader in readers for arg in given if isinstance(arg, fx.Node))
    if written or early:
        raise UnsupportedOp(
            "a hook (register_hook) on a value that is written over in place"
            if written
            else "a hook (register_hook) that reads what is computed after the value was used",
            where=source_line(node),
            advice="Register the hook right behind the op that makes the value, or write an autograd.Function.",
        )
    if not readers:
        return
    with gm.graph.inserting_before(min(readers)):
        identity = UserFunction(_identity(len(given)), _backward(hook, len(given)), _SETTINGS, HOOK)
        outs = gm.graph.call_function(identity, (value, *given))
        out = gm.graph.call_function(operator.getitem, (outs, 0))
    for made in (outs, out):
        place_beside(node, made)
    EXAMPLE.put(out, EXAMPLE.get(value))
    for reader in readers:
        reader.replace_input_with(value, out)


_HOOKED = "higher_order::register_hook"
_SETTINGS: dict[str, Any] = {"non_differentiable_idx": [], "saved_for_backward_idx": []}


def _identity(given: int) -> fx.GraphModule:
    """``(h, *given) -> ((h,), given)``: what an autograd.Function's forward returns, and what it keeps."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    kept = tuple(graph.placeholder(f"given_{i}") for i in range(given))
    graph.output(((graph.call_method("view_as", (value, value)),), kept))
    return fx.GraphModule({}, graph)


def _backward(hook: fx.GraphModule, given: int) -> fx.GraphModule:
    """``(g, *given) -> (hook(g, *given), None, ..)``"""
    graph = fx.Graph()
    result = graph.graph_copy(hook.graph, {})
    graph.output((*tree_leaves(result), *[None] * given))
    return fx.GraphModule(hook, graph)


def _wrap_control_flow(gm: fx.GraphModule, node: fx.Node, kind: Any) -> None:
    args = [*node.args, *node.kwargs.values()]
    bodies = [arg for arg in args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    bodies = [body for body in bodies if isinstance(getattr(gm, str(body.target)), fx.GraphModule)]
    groups = [list(arg) if isinstance(arg, tuple | list) else [arg] for arg in args if arg not in bodies]
    sizes = [1, len(groups[1])] if kind is Cond else [len(group) for group in groups]
    node.target = kind(_graphs(gm, bodies), sizes)
    node.args, node.kwargs = tuple(arg for group in groups for arg in group), {}
    _drop(gm, bodies)


def _graphs(gm: fx.GraphModule, bodies: Any) -> list[fx.GraphModule]:
    return [getattr(gm, str(body.target)) for body in bodies]


def _drop(gm: fx.GraphModule, bodies: Any) -> None:
    for body in bodies:
        if not body.users:
            gm.graph.erase_node(body)
