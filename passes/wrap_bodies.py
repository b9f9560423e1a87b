"""Make a user's autograd.Function, or an op of control flow, one call whose arguments are values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from fxgrad.errors import UnsupportedOp
from fxgrad.graph.context import Context, place_beside, source_line, without_gradients
from fxgrad.graph.edit import HOOKED, function_of
from fxgrad.host.pytree import tree_leaves
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.user_functions import HOOK, UserFunction
from fxgrad.ops.values import memory, names_of
from fxgrad.ops.written import tensors_written, writers_by_memory
from fxgrad.samples.control_flow import CONTROL_FLOW, Cond


def wrap_bodies(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no call has graphs among its arguments.

    ``autograd_function_apply(fwd, bwd, x, w)`` -> ``autograd_function(x, w)``
    ``scan(body, [h], [x], [w])`` -> ``scan(h, x, w)``
    ``register_hook(h, body)`` -> ``autograd_function(h)``, whose backward is the hook, in h's place
    """
    for node in list(gm.graph.nodes):
        name = function_of(node)
        if name == "higher_order::autograd_function_apply":
            _wrap_function(gm, node)
        elif name == HOOKED:  # the value itself, as PyTorch returns it: a second hook is on that, too
            node.replace_all_uses_with(node.args[0])
        elif name in CONTROL_FLOW:
            _wrap_control_flow(gm, node, CONTROL_FLOW[name])
    hooks = [node for node in gm.graph.nodes if function_of(node) == HOOKED]
    writers = writers_by_memory(gm.graph) if hooks else {}
    for node in hooks:
        _wrap_hook(gm, node, writers)
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
    if "dirty_idx" not in node.kwargs:  # PyTorch's own gradients are wrong where the input is read again
        said = "an autograd.Function writes over an input, and the captured graph does not say so"
        advice = "Call ctx.mark_dirty, with torch 2.13 or later, or write to a copy."
        _refuse_writes(forward.graph, said, source_line(node), advice)
    said = "an autograd.Function's backward writes over a gradient that it gets, or over what it saved"
    _refuse_writes(backward.graph, said, source_line(node), "Write to a copy.")
    node.target = UserFunction(forward, backward, node.kwargs)
    node.args, node.kwargs = tuple(args), {}
    _drop(gm, bodies)


def _refuse_writes(body: fx.Graph, what: str, where: str, advice: str) -> None:
    """Refuse a body that writes into memory from outside of it."""
    outside = {memory(node) for node in body.nodes if node.op in ("placeholder", "get_attr")} - {None}
    if any(memory(place) in outside for node in body.nodes for place in tensors_written(node)):
        raise UnsupportedOp(what, where=where, advice=advice)


def _wrap_hook(gm: fx.GraphModule, node: fx.Node, writers: Mapping[int | None, list[fx.Node]]) -> None:
    """``h.register_hook(f)`` is an identity behind h whose backward is f: of a whole batch's gradient, as f is."""
    value, body, *given = node.args
    assert isinstance(value, fx.Node) and isinstance(body, fx.Node)
    hook = getattr(gm, str(body.target))
    said = "a hook (register_hook) writes over the gradient that it gets, or over a value from outside of it"
    _refuse_writes(hook.graph, said, source_line(node), "Return the new gradient.")
    (result,) = tree_leaves(hook.graph.output_node().args) or [None]
    hooked = _Hooked(node, value, writers.get(memory(value), []))
    if result is not None and hooked.first is not None:
        hooked.check(given)
        _hook_behind(node, hooked, hook, given)
    gm.graph.erase_node(node)
    _drop(gm, [body])


class _Hooked:
    """A tensor with a hook, which gets the gradient of all that reads the tensor, by any name, since its last write."""

    def __init__(self, node: fx.Node, value: fx.Node, writes: list[fx.Node]) -> None:
        self.node, self.memory = node, memory(value)
        self.names = [name for name in names_of(value) if op_name(name.target) != HOOKED]
        stopped = without_gradients(node.graph)
        writes = [write for write in writes if write > self.names[0]]
        self.start = max([self.names[0], *(write for write in writes if write < node and write not in stopped)])
        self.later = [write for write in writes if write > self.start]
        readers = {user for name in self.names for user in name.users if user > self.start}
        self.hooks = [reader for reader in readers if op_name(reader.target) == HOOKED]
        heard = [reader for reader in readers - stopped if reader in self.later or reader not in self.names]
        self.first: Any = min((reader for reader in heard if reader not in self.hooks), default=None)

    def check(self, given: list[Any]) -> None:
        """Refuse a hook that other views of a written memory bypass, or that needs values from behind a reader."""
        late = any(isinstance(arg, fx.Node) and not arg < self.first for arg in given)
        if late or self._bypassed():
            raise UnsupportedOp(
                "a hook (register_hook) that reads what is computed after the value was used"
                if late
                else "a hook (register_hook) on a value that is written over in place",
                where=source_line(self.node),
                advice="Register the hook right behind the op that makes the value, or write an autograd.Function.",
            )

    def _bypassed(self) -> bool:
        """Return whether a view from before the hook shows a write: the hook's place is not the only way there."""
        if self.start is self.names[0] and not self.later:
            return False
        views = [node for node in self.node.graph.nodes if memory(node) == self.memory and node < self.first]
        others = [view for view in views if view not in self.names]
        inputs = any(view.op in ("placeholder", "get_attr") for view in views)
        hidden = len(self.hooks) > 1 or any(write < self.first for write in self.later) or inputs
        return (bool(self.later) and hidden) or any(not user < self.first for view in others for user in view.users)


def _hook_behind(node: fx.Node, hooked: _Hooked, hook: fx.GraphModule, given: list[Any]) -> None:
    """Let what reads a tensor read an identity, in whose backward the hook runs: of memory of its own for a write."""
    graph, first, copies = node.graph, hooked.first, bool(hooked.later)
    names = [name for name in hooked.names if name < first]
    with graph.inserting_before(first):
        identity = UserFunction(_identity(len(given), copies), _backward(hook, len(given)), _SETTINGS, HOOK)
        outs = graph.call_function(identity, (names[-1], *given))
        out = graph.call_function(operator.getitem, (outs, 0))
    for made in (outs, out):
        place_beside(node, made)
    example = EXAMPLE.get(names[-1])
    EXAMPLE.put(out, example if copies or example is None else example.view_as(example))  # another tensor
    for name in names:
        name.replace_all_uses_with(out, delete_user_cb=lambda user: not user < first and user not in hooked.hooks)


_SETTINGS: dict[str, Any] = {"non_differentiable_idx": [], "saved_for_backward_idx": []}


def _identity(given: int, copies: bool) -> fx.GraphModule:
    """``(h, *given) -> ((h,), given)``: what an autograd.Function's forward returns, and what it keeps."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    kept = tuple(graph.placeholder(f"given_{i}") for i in range(given))
    result = graph.call_method("clone", (value,)) if copies else graph.call_method("view_as", (value, value))
    graph.output(((result,), kept))
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
