"""Prove that no gradient path from a trainable parameter was missed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.errors import UncoveredParameter
from fxgrad.graph.context import Context, source_line, without_gradients
from fxgrad.graph.edit import is_inplace
from fxgrad.host.dispatch import enable_python_dispatcher
from fxgrad.host.pytree import tree_map
from fxgrad.ops.calls import CALL, alike, equal, map_nodes, op_name
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.forms import HANDS_OUT
from fxgrad.ops.values import tensors_of
from fxgrad.rules.uses import Slot
from fxgrad.runtime.targets import TAPS, CollectTarget, DeriveTarget, TapSeveralTarget, TapTarget
from fxgrad.samples.layouts import SAMPLES, Kind, Samples
from fxgrad.samples.symbols import expression


def prove_coverage(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: taps are attached. After: the graph, unaltered, or an error naming the line.

    Follow every reader of every parameter. Where autograd could carry a gradient through a call, a tap behind it or
    a derive has to describe it: this call, its operands, its parameters' keys. Whether autograd could is asked of the
    op and its operands; the answers that earlier passes wrote down do not count.
    """
    coverage = _Coverage(gm.graph, ctx)
    for node in gm.graph.nodes:
        if node.op == "output":
            coverage.check_returned(node)
        elif isinstance(node.target, TapTarget | TapSeveralTarget):
            coverage.check_tap(node)
        elif node.op in ("call_function", "call_method") and not isinstance(node.target, DeriveTarget | CollectTarget):
            coverage.check(node)
    return gm


class _Coverage:
    """The values through which a parameter is reached, each with the tape's keys that a reader may name it by.

    A parameter's key is its place, that of a function of parameters is its derive's. What a tap stands behind has
    none, so nothing but the tap may read it.
    """

    def __init__(self, graph: fx.Graph, ctx: Context) -> None:
        self.ctx, self.stopped = ctx, without_gradients(graph)
        self.derives = [node for node in graph.nodes if isinstance(node.target, DeriveTarget)]
        collects = [node for node in graph.nodes if isinstance(node.target, CollectTarget)]
        parameters = ctx.trainable(graph)
        self.keys: dict[fx.Node, set[int]] = {_native(node): {key} for key, node in enumerate(parameters)}
        self.handles: dict[int, fx.Node] = dict.fromkeys(range(len(parameters)), *collects)
        self.handles |= {node.target.key: node for node in self.derives}

    def check(self, node: fx.Node) -> None:
        """Raise UncoveredParameter where a gradient could pass a call unseen."""
        source, select = _producer(node)
        reached = [arg for arg in source.all_input_nodes if arg in self.keys]
        if not reached or node in self.stopped:
            return
        if isinstance(source.target, TAPS):
            if node is source and not self._describes(node, node, 2):  # an op that is its own tap
                self._refuse(node, reached[0])
            return
        if not isinstance(FAKE.get(node), Tensor):
            if tensors_of(FAKE.get(node)):  # a gradient passes each output by itself
                self.keys[node] = set()
            return
        keys = self._keys_behind(node, source, select)
        if keys is not None:
            self.keys[node] = keys
            if keys and CALL.on(node) and CALL.of(node).inplace:  # none: a copy that attach_taps keeps
                self.keys[node.args[0]] = keys  # type: ignore[index]
        elif not _read_by_taps_alone(node) and self._carries(source, select):
            self._refuse(node, reached[0])

    def check_tap(self, tap: fx.Node) -> None:
        """Raise UncoveredParameter where a tap stands behind a value of parameters alone, which its readers miss."""
        for value in _behind(tap).values():
            if self.keys.get(value):
                self._refuse(tap, value)

    def check_returned(self, output: fx.Node) -> None:
        """Raise UncoveredParameter where a value is returned past its tap, or past the guard of `compile.outputs`."""
        for node in filter(self.keys.__contains__, output.all_input_nodes):
            samples = SAMPLES.get(node)
            guarded = isinstance(samples, Samples) and samples.kind is Kind.UNIFORM and TRACED.get(node, True)
            if not guarded and any(map(_differentiable, tensors_of(FAKE.of(node)))):
                self._refuse(output, node)

    def _keys_behind(self, node: fx.Node, source: fx.Node, select: int | None) -> set[int] | None:
        """Return the keys by which readers may name a value; None where no tap and no derive describes it."""
        taps = [user for user in node.users if node in _behind(user).values()]
        if taps:
            return set() if all(self._taps(tap, node, source, select) for tap in taps) else None
        derives = [one for one in self.derives if one.target.strategy.use.select == select]
        keys = {one.target.key for one in derives if self._describes(one, source, 2)}
        return keys or self._keys_of_copies(node) or None

    def _taps(self, tap: fx.Node, node: fx.Node, source: fx.Node, select: int | None) -> bool:
        """Return whether a tap describes the call behind whose value, or behind whose several outputs, it stands."""
        values = _behind(tap)
        call, place = (source, select) if isinstance(tap.target, TapSeveralTarget) else (node, None)
        return values.get(place) is node and self._describes(tap, call, 2 + len(values))

    def _describes(self, reader: fx.Node, source: fx.Node, start: int) -> bool:
        """Whether a tap or a derive is of this call: of its op and arguments, by its parameters' keys and handles."""
        target: Any = reader.target
        use, rest = target.strategy.use, reader.args[start:]
        handles, operands = rest[: target.handles], rest[target.handles :]
        template = use.args, dict(use.kwargs)
        arguments = source.args, dict(source.kwargs)
        if reader is source:  # a tap that is the op itself
            arguments = use.fill(template, operands)
        elif use.target != source.target:
            return False

        def same(arg: Any, recorded: Any) -> bool:
            if not isinstance(arg, fx.Node):
                return equal(arg, recorded)
            if not isinstance(recorded, Slot):  # one sample's size, as a number
                return arg not in self.keys
            key, operand = use.wrt.get(recorded.position), operands[recorded.position]
            if arg in self.keys and key not in self.keys[arg]:
                return False
            if operand is None:
                return recorded.position not in target.strategy.needs
            return any(value is arg or key in self.keys.get(value, ()) for value in _copied(operand, source))

        return set(handles) == {self.handles.get(key) for key in use.wrt.values()} and alike(arguments, template, same)

    def _keys_of_copies(self, node: fx.Node) -> set[int]:
        """Copies for all samples go by the keys of the one that each sample has: ``w.expand(1, 7, 3)``."""
        if op_name(node.target) not in HANDS_OUT:
            return set()
        value = node.args[0]
        shape = [expression(size) for size in FAKE.of(node).shape]
        keys: set[int] = set()
        for one in value.users if isinstance(value, fx.Node) else ():
            if one in self.keys and op_name(one.target) in HANDS_OUT and one.args[0] is value:
                sizes = [expression(size) for size in FAKE.of(one).shape]
                fits = len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))
                keys |= self.keys[one] if fits else set()
        return keys

    def _carries(self, source: fx.Node, select: int | None) -> bool:
        """Ask autograd whether the result of a call needs a gradient where the values that reach it do."""
        fake = FAKE.get(source) if select is None else FAKE.of(source)[select]
        if not isinstance(fake, Tensor) or not _differentiable(fake):
            return False

        def fresh(arg: fx.Node) -> Any:
            return tree_map(lambda value: _fresh(value, arg in self.keys), FAKE.of(arg))

        with torch.enable_grad(), self.ctx.symbols.mode, enable_python_dispatcher():
            args, kwargs = map_nodes([list(source.args), dict(source.kwargs)], fresh)
            call: Any = getattr(torch.Tensor, source.target) if isinstance(source.target, str) else source.target
            result = call(*args, **kwargs)
        return bool((result if select is None else result[select]).requires_grad)

    def _refuse(self, node: fx.Node, parameter: fx.Node) -> None:
        raise UncoveredParameter(
            f"{node.name} uses {parameter.name} where no tap sees it: a bug in fxgrad, please report it",
            where=source_line(node),
        )


def _native(parameter: fx.Node) -> fx.Node:
    users = list(parameter.users)
    if len(users) != 1 or users[0].target != "detach":
        raise UncoveredParameter(f"the parameter {parameter.name} is used without its tap: a bug in fxgrad")
    return users[0]


def _read_by_taps_alone(node: fx.Node) -> bool:
    """Return whether a value is there for backwards to read, such as a copy of what is written to later."""
    saved = all(isinstance(user.target, _READERS) and node not in _behind(user).values() for user in node.users)
    return saved and bool(node.users) and not is_inplace(node)


_READERS = (TapTarget, TapSeveralTarget, DeriveTarget)


def _behind(tap: fx.Node) -> dict[int | None, Any]:
    """Return the outputs of an op, by their places, behind which a tap stands; the place of an only output is None."""
    if isinstance(tap.target, TapTarget):
        return {None: tap.args[2]}
    if isinstance(tap.target, TapSeveralTarget):
        return {place: tap.args[2 + i] for i, (place, _) in enumerate(tap.target.strategy.use.several)}
    return {}


def _producer(node: fx.Node) -> tuple[fx.Node, int | None]:
    """Return the op whose output this is: ``w.chunk(3)[1]`` is one function of w."""
    if op_name(node.target) == "getitem":
        source, index = node.args
        if isinstance(source, fx.Node) and isinstance(FAKE.get(source), tuple | list) and isinstance(index, int):
            return source, index
    return node, None


def _copied(operand: Any, before: fx.Node) -> list[fx.Node]:
    """An operand, and what it is a copy of: one that is made in front of a call because its memory is written later."""
    return [operand, operand.args[0]] if operand.target == "clone" and operand < before else [operand]


def _fresh(value: Any, needs_gradient: bool) -> Any:
    """Return a value like another one, which the op may write to."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(needs_gradient and _differentiable(value)).clone()


def _differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
