"""A batch of one: the ordinary gradient is the sample's, so no samples have to be found."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import fx

from fxgrad.errors import UnsupportedOp
from fxgrad.graph.context import Context, source_line, without_gradients
from fxgrad.graph.edit import HOOKED, add_placeholders, function_of, open_tape
from fxgrad.ops.calls import bind, op_name
from fxgrad.ops.facts import EXAMPLE
from fxgrad.ops.values import memory
from fxgrad.ops.written import writers_by_memory
from fxgrad.rules.lookup import OVER_THE_BATCH
from fxgrad.runtime.targets import SingleTarget, hook_if_required


def take_whole_gradient(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it, at batch size 1. After: each parameter stands behind ``single``.

    ``f(w)`` -> ``f(single(tape, handle, w))``, whose backward writes w's gradient on the tape as the one sample's.
    """
    graph = gm.graph
    _make_dense(graph)
    _loosen_hooks(graph)
    placeholders, given = add_placeholders(graph, ctx)
    tape, cursor = open_tape(graph, ctx, (placeholders + given)[-1], 1, placeholders, given)
    handle = cursor
    stopped = without_gradients(graph)
    writers = writers_by_memory(graph)
    for key, node in enumerate(ctx.trainable(graph)):
        _check_renormalised(node, stopped)
        versions = _Versions(node, stopped, writers[memory(node)])
        with graph.inserting_after(cursor):
            cursor = graph.call_function(SingleTarget(key), (tape, handle, node))
        versions.read_from(cursor)
    return gm


class _Versions:
    """A parameter and its views. Those that are read behind a write without gradients are made again there.

    Such a write goes to the parameter itself, and autograd refuses what was a view of ``single`` before it.
    """

    def __init__(self, parameter: fx.Node, stopped: set[fx.Node], writes: list[fx.Node]) -> None:
        self.parameter, self.graph, self.stopped = parameter, parameter.graph, stopped
        self.writes = writes  # without gradients, or PyTorch refuses them
        self.views = _views(parameter, stopped.union(writes))
        self.reads = [(view, user) for view in self.views for user in sorted(view.users) if user not in stopped]
        self.first = {self._behind(user): user for user in sorted({user for _, user in self.reads}, reverse=True)}
        self.made = {(view, self._behind(view)): view for view in self.views[1:]}

    def read_from(self, single: fx.Node) -> None:
        """Let the parameter be read behind ``single``, and another one behind each write."""
        self.made[self.parameter, 0] = single
        for view, user, now in [(view, user, self._now(view, self._behind(user))) for view, user in self.reads]:
            user.replace_input_with(view, now)
        for view in self.views[1:]:
            for user in [user for user in view.users if user in self.stopped]:
                with self.graph.inserting_before(user):
                    user.replace_input_with(view, self._raw(view))

    def _raw(self, view: fx.Node) -> fx.Node:
        """Return a view of the parameter itself, for what has no gradients."""
        singles = {now for (of, _), now in self.made.items() if of is self.parameter}
        if view is self.parameter or view in singles:
            return self.parameter
        views = {*self.views, *self.made.values()}
        return self.graph.node_copy(view, lambda arg: self._raw(arg) if arg in views else arg)

    def _behind(self, node: fx.Node) -> int:
        """Return how many writes stand before a node."""
        return sum(write < node for write in self.writes)

    def _now(self, view: fx.Node, writes: int) -> fx.Node:
        """Return what shows a view's memory behind a number of writes."""
        if (view, writes) not in self.made:
            sources = {source: self._now(source, writes) for source in view.all_input_nodes if source in self.views}
            with self.graph.inserting_before(self.first[writes]):
                if view is self.parameter:
                    single = self.made[self.parameter, 0]
                    new = self.graph.call_function(single.target, single.args)  # type: ignore[arg-type]
                else:
                    new = self.graph.node_copy(view, lambda arg: sources.get(arg, arg))
            self.made[view, writes] = new
        return self.made[view, writes]


def _check_renormalised(parameter: fx.Node, stopped: set[fx.Node]) -> None:
    """Refuse a lookup that writes to the parameter whose rows it reads, as for more samples."""
    for node in parameter.graph.nodes:
        if op_name(node.target) not in ("embedding", "embedding_bag") or node in stopped:
            continue
        call = bind(node)
        weight: Any = call.get("weight")
        traced = getattr(EXAMPLE.get(weight), "requires_grad", True)
        if call.get("max_norm") is not None and traced and memory(weight) == memory(parameter):
            raise UnsupportedOp(
                f"{call.op} with max_norm= has no per-sample gradient: {OVER_THE_BATCH['max_norm']}",
                where=source_line(node),
                advice="Leave out max_norm=, or freeze the parameter.",
            )


def _make_dense(graph: fx.Graph) -> None:
    """Let the gradients of lookups be dense, as for more samples."""
    for node in graph.nodes:
        if op_name(node.target) not in ("embedding", "embedding_bag") or not bind(node).get("sparse"):
            continue
        if "sparse" in node.kwargs:
            node.kwargs = {**node.kwargs, "sparse": False}
        else:
            place = _SPARSE.get(node.target) or _SPARSE_IN_ATEN[op_name(node.target)]
            node.args = (*node.args[:place], False, *node.args[place + 1 :])


_SPARSE: dict[Any, int] = {F.embedding: 6, F.embedding_bag: 7}
_SPARSE_IN_ATEN = {"embedding": 4, "embedding_bag": 5}  # by every spelling
"""Where lookups have the argument ``sparse``."""


def _loosen_hooks(graph: fx.Graph) -> None:
    """Let hooks (register_hook) be where a gradient flows: none does where ``requires_grad_()`` made a leaf of h."""
    for node in graph.nodes:
        if function_of(node) == HOOKED and EXAMPLE.of(node.args[0]).requires_grad:
            node.target = hook_if_required


def _views(parameter: fx.Node, stopped: set[fx.Node]) -> list[fx.Node]:
    """Return a parameter, and the views of it that gradients flow through, each behind what it is a view of."""
    place, views = memory(parameter), [parameter]
    for node in parameter.graph.nodes:
        view = node not in stopped and not set(views).isdisjoint(node.all_input_nodes)
        if view and place is not None and memory(node) == place and getattr(EXAMPLE.get(node), "requires_grad", True):
            views.append(node)
    return views
