"""Values under a mask: ``x[mask]`` has a size that the data decides, ``where(mask, x, 1)`` has x's own.

What is done to such values element by element, and written back under the same mask, is done to the whole of x:

    t = x[mask]; t *= 2; x[mask] = t.exp()    x.copy_(where(mask, exp(where(mask, x, 1) * 2), x))

Where the mask is off, a 1 stands: no gradient of such a place reaches x, whatever the op's derivative is there.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fxgrad.graph.context import Context, without_gradients
from fxgrad.graph.edit import is_inplace, make
from fxgrad.host.ops import OpOverload, OpOverloadPacket
from fxgrad.ops.calls import CALL, Call, alike, equal, map_nodes, op_name
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.families import MOVEMENT, RANDOM, Family, family_of
from fxgrad.ops.values import memory_of
from fxgrad.ops.written import tensors_written, writers_by_memory


@dataclass(frozen=True)
class Selection:
    """A value under a mask, and the same for all of x."""

    mask: fx.Node
    whole: fx.Node
    after: int  # dims of x that the mask does not have, behind those that it has


class Selections:
    """The selections of one graph, in its order.

    Values of selections that lie in one memory are one value under several names: no view of a part is followed.
    """

    def __init__(self, graph: fx.Graph, ctx: Context) -> None:
        self.graph, self.ctx = graph, ctx
        self.known: dict[fx.Node, Selection] = {}
        self.lost: set[int | None] = set()  # memory of selections that was written to in ways that are not followed
        self.stopped = without_gradients(graph)
        self.writers = writers_by_memory(graph)

    def visit(self, node: fx.Node, call: Call) -> None:
        """Follow a call that selects, or works element by element on what was selected, and forget what it spoils."""
        if call.op == "getitem":
            self._select(node)
        elif not any(arg in self.known for arg in node.all_input_nodes) or not self._follow(node, call):
            self.forget(node, call)

    def forget(self, node: fx.Node, call: Call) -> None:
        """Follow no selection any more that a call writes to."""
        if not self.known:
            return
        spoilt = tensors_written(node) if call.op not in RANDOM else node.all_input_nodes  # dropout may be its operand
        memories = {_memory(base) for base in spoilt} & {_memory(one) for one in self.known}
        self.lost |= memories
        self.known = {one: selection for one, selection in self.known.items() if _memory(one) not in memories}

    def written_back(self, node: fx.Node) -> fx.Node | None:
        """For ``x[mask] = v``: what v is for all of x, where it is a function of values under the same mask."""
        base, mask, value = node.args
        selection = self.known.get(value) if isinstance(value, fx.Node) else None
        if selection is None or not isinstance(mask, fx.Node) or not self._same(mask, selection.mask, node):
            return None
        return selection.whole if FAKE.of(base).dim() == FAKE.of(selection.whole).dim() else None

    def erase(self) -> None:
        """Drop what is left of selections that were written back, where no name of theirs is read."""
        gone = set(self.known)
        while True:
            read = self.lost | {_memory(node) for node in gone if _checks_of(node, gone) is None}
            if not any(_memory(node) in read for node in gone):
                break
            gone = {node for node in gone if _memory(node) not in read}
        gone |= {check for node in gone for check in _checks_of(node, gone) or ()}
        for node in sorted(gone, reverse=True):
            self.graph.erase_node(node)

    def _select(self, node: fx.Node) -> None:
        source, mask = node.args
        if not isinstance(source, fx.Node) or not isinstance(mask, fx.Node) or not _is_mask(mask):
            return
        after = FAKE.of(source).dim() - FAKE.of(mask).dim()
        whole = self._only(node, mask, source, after)
        TRACED.put(whole, TRACED.of(node))
        self.known[node] = Selection(mask, whole, after)

    def _follow(self, node: fx.Node, call: Call) -> bool:
        """Follow an op on values under one mask, each of its operands spread over all of x."""
        selections = [self.known[arg] for arg in node.all_input_nodes if arg in self.known]
        mask, after = selections[0].mask, selections[0].after
        others = [arg for arg in node.all_input_nodes if arg not in self.known and is_tensor(arg)]
        alike = all(one.after == after and self._same(one.mask, mask, node) for one in selections)
        small = all(FAKE.of(arg).dim() <= after for arg in others) or _is_product(call, selections, others)
        names = [one for one in self.known if _memory(one) == _memory(node)]  # the same tensor, before the call
        if not (alike and small and is_tensor(node)) or (names and not self._keeps_names(node, call, names)):
            return False
        if names and not call.inplace:
            self.known |= {node: self.known[names[0]]} if _one_by_one(call) else {}
            return _one_by_one(call)
        values = {arg: arg for arg in others} if _one_by_one(call) else {}
        if _by_row(call, after) or _is_product(call, selections, others) or _divides_integers(node, call):
            values |= {arg: self.known[arg].whole for arg in node.all_input_nodes if arg in self.known}
        elif not _one_by_one(call):
            return False
        whole = self._spread(node, call, {arg: self._only(node, mask, one, after) for arg, one in values.items()})
        if whole is None or (call.inplace and not names):
            return False
        TRACED.put(whole, TRACED.of(node))
        self.known |= dict.fromkeys([*names, node], Selection(mask, whole, after))
        return True

    def _keeps_names(self, node: fx.Node, call: Call, names: list[fx.Node]) -> bool:
        """Return whether the result of a call is one more name of a tensor, and not its conjugate or its real part.

        What a write without gradients leaves, autograd takes for the value before it.
        """
        alike = all(FAKE.of(one).dtype == FAKE.of(node).dtype for one in names)
        unseen = node in self.stopped and any(TRACED.of(one) for one in names)
        return alike and not unseen and _memory(node) is not None and (call.inplace or not FAKE.of(node).is_complex())

    def _spread(self, node: fx.Node, call: Call, wholes: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """Make of all of x what a call makes of values under a mask; return None where the op has no such form."""
        target, args, kwargs = _out_of_place(node, call)
        if target is None:
            return None
        wholes = {arg: one.whole for arg, one in self.known.items()} | wholes
        args, kwargs = map_nodes([args, kwargs], lambda arg: wholes.get(arg, arg))
        with self.graph.inserting_before(node):
            whole = make(self.graph, self.ctx, target, args, kwargs, beside=node)
            if FAKE.of(whole).dtype != FAKE.of(node).dtype:
                whole = make(self.graph, self.ctx, "to", [whole, FAKE.of(node).dtype], beside=node)
        return whole

    def _only(self, node: fx.Node, mask: fx.Node, value: fx.Node, after: int) -> fx.Node:
        """``where(mask, value, 1)``"""
        fill = True if FAKE.of(value).dtype == torch.bool else 1
        with self.graph.inserting_before(node):
            for _ in range(after):
                mask = make(self.graph, self.ctx, torch.unsqueeze, [mask, -1], beside=node)
            return make(self.graph, self.ctx, torch.where, [mask, value, fill], beside=node)

    def _same(self, mask: fx.Node, other: fx.Node, used: fx.Node) -> bool:
        """Whether two masks hold one value until they are used: the same calls on the same operands, and no write."""
        pairs: set[tuple[fx.Node, fx.Node]] = set()
        if not _one_value(mask, other, pairs):
            return False
        memories = {_memory(node) for pair in pairs for node in pair if is_tensor(node)}
        made = [node for one, two in pairs if one is not two for node in (one, two)]
        writers = [writer for memory in memories for writer in self.writers[memory]]
        return not any(not made or min(made) < writer < used for writer in writers)


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


def _checks_of(node: fx.Node, gone: Set[fx.Node]) -> set[fx.Node] | None:
    """Return what reads a value for its size alone, to assert that there is one; None where something else reads it."""
    checks: set[fx.Node] = set()
    stack = [user for user in node.users if user not in gone]
    while stack:
        user = stack.pop()
        asserted = op_name(user.target).startswith("_assert")
        if user.op != "call_function" or is_tensor(user) or not (user.users or asserted):
            return None
        checks.add(user)
        stack.extend(user.users)
    return checks


def _out_of_place(node: fx.Node, call: Call) -> tuple[Any, list[Any], dict[str, Any]]:
    """A call, or the call of the same op that writes nothing: its target, None where there is none, and arguments."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not call.inplace:
        return node.target, args, kwargs
    if not is_inplace(node):  # inplace=True
        place = list(call.arguments).index("inplace")
        if place < len(args):
            args[place] = False
        return node.target, args, {**kwargs, "inplace": False} if "inplace" in kwargs else kwargs
    if isinstance(node.target, OpOverload | OpOverloadPacket):
        return getattr(torch.ops.aten, call.op, None), args, kwargs
    method = callable(getattr(Tensor, call.op, None))
    return call.op if method else getattr(F, call.op, None), args, kwargs


def _memory(node: fx.Node) -> int | None:
    return memory_of(FAKE.get(node))


def is_tensor(arg: Any) -> TypeGuard[fx.Node]:
    """Return whether an argument is a value that is one tensor."""
    return isinstance(arg, fx.Node) and isinstance(FAKE.get(arg), Tensor)


def _is_mask(node: fx.Node) -> bool:
    return is_tensor(node) and FAKE.of(node).dtype == torch.bool and FAKE.of(node).dim() > 0


def _one_by_one(call: Call) -> bool:
    """Return whether each element of the result is a function of the elements at its place: no draws, no dims."""
    return family_of(call.op) is Family.ELEMENTWISE and call.op not in RANDOM and "out" not in call.given


def _divides_integers(node: fx.Node, call: Call) -> bool:
    """Return whether an op raises where its divisor is zero; in places that a mask leaves out it divides by one."""
    return call.op in ("div", "floor_divide", "fmod", "remainder") and not FAKE.of(node).is_floating_point()


def _is_product(call: Call, selections: list[Selection], others: list[fx.Node]) -> bool:
    """Return whether a call multiplies rows under a mask by one matrix for all."""
    matrix = call.get("weight") if call.op == "linear" else call.get("other") if call.op == "matmul" else None
    rows = len(selections) == 1 and selections[0].after > 0 and call.get("input") not in others
    return rows and matrix in others and FAKE.of(matrix).dim() == 2


def _by_row(call: Call, after: int) -> bool:
    """Return whether an op treats each row under a mask alone, and has derivatives where a row is all ones."""
    dim = call.get("dim")
    if call.op in ("softmax", "log_softmax") and isinstance(dim, int):
        return -after <= dim < 0
    shape = call.get("normalized_shape")
    rows = call.op in ("layer_norm", "rms_norm") and isinstance(shape, tuple | list) and len(shape) <= after
    return rows and call.get("eps") != 0
