"""Write an assignment into a part of a tensor as an in-place op on a view of that part."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import guard_or_false

from fxgrad.errors import FxgradError, LostLayout
from fxgrad.graph.context import Context, source_line, without_gradients
from fxgrad.graph.edit import bind_again, make
from fxgrad.graph.selections import Selections, is_tensor
from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.values import memory, memory_of
from fxgrad.ops.written import tensors_written


def lower_assignments(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every call has ``call``. After: the same; ``setitem`` is left only where nothing says what it does.

    ``x[:, 0] = v`` -> ``x[:, 0].copy_(v)``, with a boolean mask ``x.copy_(where(mask, v, x))``, with integer
    tensors ``x.index_put_(indices, v)``. ``x[mask] *= 2``, which reads what it writes, is such a ``where`` as well.
    ``x.pow_(w)`` -> ``x.copy_(x.clone().pow(w))``: see Note [Saved results].
    """
    traced: set[int | None] = set()  # memory that gradients flow through by now
    stopped = without_gradients(gm.graph)
    selections = Selections(gm.graph, ctx)
    for node in list(gm.graph.nodes):
        call = CALL.get(node)
        if call is None:
            continue
        assignment = _Assignment(gm.graph, node, ctx, traced, node in stopped)
        if call.op == "setitem":
            whole = selections.written_back(node)
            selections.forget(node, call)
            assignment.lower(whole)
            continue
        selections.visit(node, call)
        if call.op == "index_put":
            assignment.spread(call)
        elif call.inplace and call.op in _SAVED and any(map(_flows, [*node.args[1:], *node.kwargs.values()])):
            assignment.keep_result(call)
        elif _flows(node):
            traced.update(map(memory, tensors_written(node)))
    selections.erase()
    return gm


# Note [Saved results]
# ~~~~~~~~~~~~~~~~~~~~
# The backward of some ops looks at their result. The tap of an op in place says that it changed that result, which
# it did not; so autograd would refuse it. So they work out of place, on a copy, and what they give is written back.
_SAVED = frozenset({"copysign", "float_power", "hypot", "pow"})


def _flows(value: Any) -> bool:
    return isinstance(value, fx.Node) and TRACED.of(value) is True


class _Assignment:
    """One ``base[index] = value``."""

    def __init__(self, graph: fx.Graph, node: fx.Node, ctx: Context, traced: set[int | None], stopped: bool) -> None:
        self.graph, self.node, self.ctx, self.traced, self.stopped = graph, node, ctx, traced, stopped
        self.base: Any = node.args[0] if node.args else None

    def lower(self, whole: fx.Node | None = None) -> None:
        """``whole``: the value that is written under a mask, for the places where the mask is off as well."""
        assert isinstance(self.base, fx.Node)
        _, index, self.value = self.node.args
        parts = _parts(index, FAKE.of(self.base).dim())
        if parts is None:
            return
        basic, advanced = parts
        with self.graph.inserting_before(self.node):
            view = self._call(operator.getitem, self.base, basic)
            empty = any(guard_or_false(size == 0) for size in FAKE.of(view).shape)
            if empty or [] in advanced.values():  # nothing is written
                self.graph.erase_node(view)
            elif not advanced:
                self._write(view)
            elif len(advanced) == 1 and _is_mask(*advanced.values()):
                self._write_masked(view, *next(iter(advanced.items())), whole)
            elif not any(_is_mask(index) for index in advanced.values()):
                self._write_at(view, advanced)
            else:
                self.graph.erase_node(view)
                return
        self.graph.erase_node(self.node)

    def keep_result(self, call: Call) -> None:
        """See Note [Saved results]."""
        with self.graph.inserting_before(self.node):
            before = self._call("clone", self.base)
            result = self._call(call.op, before, *self.node.args[1:], **self.node.kwargs)
            written = self._inplace("copy_", self.base, result)
        self.node.replace_all_uses_with(written)
        self.graph.erase_node(self.node)
        bind_again(written.users)

    def spread(self, call: Call) -> None:
        """``x.index_put_(indices, v)``: the values are one for each place."""
        value, indices = call.get("values"), call.get("indices")
        masks = any(_is_mask(index) for index in indices)
        if masks or not _flows(value) or self.ctx.symbols.batch_dims(FAKE.of(value).shape):
            return
        with self.graph.inserting_before(self.node):
            spread = self._spread(self.base, list(indices), value)
        self.node.replace_input_with(value, spread)
        bind_again([self.node])

    def _spread(self, view: Any, indices: list[Any], value: fx.Node) -> fx.Node:
        """Give a parameter's value to every sample first: alone, a sample has other places than in the batch."""
        return self._call("expand_as", value, self._call(torch.ops.aten.index.Tensor, view, indices))

    def _write(self, view: fx.Node) -> None:
        if is_tensor(self.value):
            self._inplace("copy_", view, self._without_ones(self.value, FAKE.of(view).dim()))
        else:
            self._inplace("fill_", view, self.value)

    def _write_masked(self, view: fx.Node, dim: int, mask: fx.Node, whole: fx.Node | None) -> None:
        """``x[mask] = v``: v has no row for each place (that is refused later), so it is the same for all."""
        after = FAKE.of(view).dim() - dim - FAKE.of(mask).dim()
        if FAKE.of(mask).dtype != torch.bool:
            mask = self._call("to", mask, torch.bool)
        for _ in range(after):
            mask = self._call(torch.unsqueeze, mask, -1)
        value = self.value if whole is None else whole
        if not is_tensor(value):
            self._inplace("masked_fill_", view, mask, value)
            return
        value = value if value is whole else self._without_ones(value, after)
        if value is not whole and FAKE.of(value).dim() > after:
            positions = [None] * dim + [mask]
            self._inplace(torch.ops.aten.index_put_.default, view, positions, value)
            return
        if FAKE.of(value).dtype != FAKE.of(view).dtype:
            value = self._call("to", value, FAKE.of(view).dtype)
        self._inplace("copy_", view, self._call(torch.where, mask, value, view))

    def _write_at(self, view: fx.Node, advanced: dict[int, Any]) -> None:
        fake = FAKE.of(view)
        indices: list[fx.Node | None] = [None] * (max(advanced) + 1)
        for dim, index in advanced.items():
            node = isinstance(index, fx.Node)
            indices[dim] = index if node else self._call(torch.tensor, index, device=fake.device)
        value = self.value
        if not is_tensor(value):
            value = self._call(torch.full, (), value, dtype=fake.dtype, device=fake.device)
        elif FAKE.of(value).dtype != fake.dtype:
            value = self._call("to", value, fake.dtype)
        if _flows(value) and not self.ctx.symbols.batch_dims(FAKE.of(value).shape):
            value = self._spread(view, indices, value)
        self._inplace(torch.ops.aten.index_put_.default, view, indices, value)

    def _without_ones(self, value: fx.Node, rank: int) -> fx.Node:
        """Drop leading dimensions of size 1, as an assignment does."""
        shape = FAKE.of(value).shape
        extra = 0
        while len(shape) - extra > rank and isinstance(shape[extra], int) and shape[extra] == 1:
            extra += 1
        return self._call(operator.getitem, value, (0,) * extra) if extra else value

    def _inplace(self, target: Callable[..., Any] | str, view: Any, *args: Any) -> fx.Node:
        written = self._call(target, view, *args)
        if _flows(written):
            self.traced.add(memory_of(FAKE.of(self.base)))
        return written

    def _call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a new node; a gradient arrives through written memory as well."""
        try:
            made = make(self.graph, self.ctx, target, args, kwargs, beside=self.node, inplace=target in _INPLACE)
        except FxgradError:
            raise
        except Exception as error:  # at the user's own number of samples, PyTorch has run this assignment
            said = str(error).splitlines()[0].replace(str(self.ctx.symbols.symbol), "B")
            raise LostLayout(
                f"an assignment does not work for every number of samples: {said}",
                where=source_line(self.node),
                advice="Write sizes in terms of x.shape[0].",
            ) from error
        fake = FAKE.of(made)
        carries = isinstance(fake, Tensor) and fake.is_floating_point() and not self.stopped
        TRACED.put(made, carries and any(map(self._arrives, made.all_input_nodes)))
        return made

    def _arrives(self, arg: fx.Node) -> bool:
        return _flows(arg) or (memory_of(FAKE.of(arg)) in self.traced and not _detached(arg))


def _detached(view: fx.Node) -> bool:
    """Return whether a view's memory was reached through ``detach``: what is written there, autograd does not see."""
    memory = memory_of(FAKE.of(view))
    while CALL.on(view) and CALL.of(view).op != "detach":
        source = view.args[0] if view.args else None
        if not isinstance(source, fx.Node) or memory_of(FAKE.of(source)) != memory:
            return False
        view = source
    return CALL.on(view)


_INPLACE = ("copy_", "fill_", "masked_fill_", torch.ops.aten.index_put_.default)


def _is_mask(index: Any) -> bool:
    return is_tensor(index) and FAKE.of(index).dtype in (torch.bool, torch.uint8)


def _parts(index: Any, rank: int) -> tuple[tuple[Any, ...], dict[int, Any]] | None:
    """A basic index, and the tensors (or lists) that index the dimensions of what it gives; None: some other index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, bool) for item in items):
        return None
    used = sum(_rank_of(item) for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    basic: list[Any] = []
    advanced: dict[int, Any] = {}
    dim = 0  # of what the basic index gives
    for item in items:
        if item is Ellipsis:
            basic += [slice(None)] * (rank - used)
            dim += rank - used
        elif is_tensor(item) or isinstance(item, list):
            advanced[dim] = item
            basic += [slice(None)] * _rank_of(item)
            dim += _rank_of(item)
        else:
            basic.append(item)
            dim += item is None or isinstance(item, slice)
    return tuple(basic), advanced


def _rank_of(item: Any) -> int:
    """Return how many dimensions an item of an index takes."""
    if item is None or item is Ellipsis:
        return 0
    return int(FAKE.of(item).dim()) if _is_mask(item) else 1
