"""Values under a mask: ``x[mask]`` has a size that the data decides, ``where(mask, x, 1)`` has x's own.

What is done to such values element by element, and written back under the same mask, is done to the whole of x:

    t = x[mask]; t *= 2; x[mask] = t.exp()    x.copy_(where(mask, exp(where(mask, x, 1) * 2), x))

Where the mask is off, a 1 stands: no gradient of such a place reaches x, whatever the op's derivative is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from fxgrad.graph.context import Context
from fxgrad.graph.edit import make
from fxgrad.ops.calls import CALL, Call, alike, equal, map_nodes, op_name
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.families import MOVEMENT, RANDOM, Family, family_of
from fxgrad.ops.values import memory_of
from fxgrad.ops.written import written_to


@dataclass(frozen=True)
class Selection:
    """A value under a mask, and the same for all of x."""

    mask: fx.Node
    whole: fx.Node
    after: int  # dims of x that the mask does not have, behind those that it has


class Selections:
    """The selections of one graph, in its order."""

    def __init__(self, graph: fx.Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        self.known: dict[fx.Node, Selection] = {}
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        calls = [(node, CALL.of(node)) for node in graph.nodes if CALL.on(node)]
        self.writes = [
            (self.places[node], memory_of(FAKE.of(base))) for node, call in calls for base in written_to(node, call)
        ]

    def visit(self, node: fx.Node, call: Call) -> None:
        """Follow a call that selects, or works element by element on what was selected."""
        if call.op == "getitem":
            self._select(node)
        elif any(arg in self.known for arg in node.all_input_nodes):
            self._follow(node, call)

    def written_back(self, node: fx.Node) -> fx.Node | None:
        """For ``x[mask] = v``: what v is for all of x, where it is a function of values under the same mask."""
        base, mask, value = node.args
        selection = self.known.get(value) if isinstance(value, fx.Node) else None
        if selection is None or not isinstance(mask, fx.Node) or not self._same(mask, selection.mask):
            return None
        return selection.whole if FAKE.of(base).dim() == FAKE.of(selection.whole).dim() else None

    def erase(self) -> None:
        """Drop what is left of selections that were written back."""
        for node in sorted(self.known, reverse=True):
            checks = _checks_of(node)
            if checks is not None:
                for one in [*sorted(checks, reverse=True), node]:
                    self.graph.erase_node(one)

    def _select(self, node: fx.Node) -> None:
        source, mask = node.args
        if not isinstance(source, fx.Node) or not isinstance(mask, fx.Node) or not _is_mask(mask):
            return
        after = FAKE.of(source).dim() - FAKE.of(mask).dim()
        with self.graph.inserting_before(node):
            whole = self._only(node, mask, source, after)
        TRACED.put(whole, TRACED.of(node))
        self.known[node] = Selection(mask, whole, after)

    def _follow(self, node: fx.Node, call: Call) -> None:
        """An op on values under one mask, each of its operands spread over all of x."""
        selections = [self.known[arg] for arg in node.all_input_nodes if arg in self.known]
        mask, after = selections[0].mask, selections[0].after
        others = [arg for arg in node.all_input_nodes if arg not in self.known and is_tensor(arg)]
        alike = all(one.after == after and self._same(one.mask, mask) for one in selections)
        small = all(FAKE.of(arg).dim() <= after for arg in others)
        written = node.args[0] if call.inplace else None
        if not (alike and small and _one_by_one(call) and is_tensor(node)) or (written in others):
            return
        with self.graph.inserting_before(node):
            wholes = {arg: self._only(node, mask, arg, after) for arg in others}
            wholes |= {arg: self.known[arg].whole for arg in node.all_input_nodes if arg in self.known}
            args, kwargs = map_nodes([list(node.args), dict(node.kwargs)], lambda arg: wholes.get(arg, arg))
            target: Any = call.op if call.inplace else node.target
            whole = make(self.graph, self.ctx, target, args, kwargs, beside=node)
            if FAKE.of(whole).dtype != FAKE.of(node).dtype:
                whole = make(self.graph, self.ctx, "to", [whole, FAKE.of(node).dtype], beside=node)
        TRACED.put(whole, TRACED.of(node))
        self.known[node] = Selection(mask, whole, after)
        if isinstance(written, fx.Node):
            self.known[written] = self.known[node]

    def _only(self, node: fx.Node, mask: fx.Node, value: fx.Node, after: int) -> fx.Node:
        """``where(mask, value, 1)``"""
        for _ in range(after):
            mask = make(self.graph, self.ctx, torch.unsqueeze, [mask, -1], beside=node)
        fill = True if FAKE.of(value).dtype == torch.bool else 1
        return make(self.graph, self.ctx, torch.where, [mask, value, fill], beside=node)

    def _same(self, mask: fx.Node, other: fx.Node) -> bool:
        """Whether two masks hold one value: the same calls on the same operands, and nothing written in between."""
        pairs: set[tuple[fx.Node, fx.Node]] = set()
        if not _one_value(mask, other, pairs):
            return False
        memories = {memory_of(FAKE.of(node)) for pair in pairs for node in pair if is_tensor(node)}
        made = [self.places[node] for one, two in pairs if one is not two for node in (one, two)]
        first, last = (min(made), max(made)) if made else (-1, len(self.places))
        return memories.isdisjoint(memory for place, memory in self.writes if first < place < last)


def _one_value(one: Any, other: Any, pairs: set[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether two arguments are one, or made by the same calls; ``pairs`` collects the values that have to agree."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return equal(one, other)
    pairs.add((one, other))
    if one is other:
        return True
    ours, theirs = CALL.get(one), CALL.get(other)
    if ours is None or theirs is None or ours.op != theirs.op or ours.inplace or theirs.inplace:
        return False
    followed = _one_by_one(ours) or ours.op in MOVEMENT
    return followed and alike(dict(ours.arguments), dict(theirs.arguments), partial(_one_value, pairs=pairs))


def _checks_of(node: fx.Node) -> set[fx.Node] | None:
    """What reads a value for its size alone, to assert that there is one; None where something else reads it."""
    checks: set[fx.Node] = set()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        asserted = op_name(user.target).startswith("_assert")
        if user.op != "call_function" or is_tensor(user) or not (user.users or asserted):
            return None
        checks.add(user)
        stack.extend(user.users)
    return checks


def is_tensor(arg: Any) -> TypeGuard[fx.Node]:
    """Whether an argument is a value that is one tensor."""
    return isinstance(arg, fx.Node) and isinstance(FAKE.get(arg), Tensor)


def _is_mask(node: fx.Node) -> bool:
    return is_tensor(node) and FAKE.of(node).dtype == torch.bool and FAKE.of(node).dim() > 0


def _one_by_one(call: Call) -> bool:
    """Whether each element of the result is a function of the elements at its place: no draws, no dims."""
    return family_of(call.op) is Family.ELEMENTWISE and call.op not in RANDOM and "out" not in call.given
