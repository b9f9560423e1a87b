"""How a use of parameters is differentiated: by its rule, as an elementwise op, or by the generic rule.

The decision is made once, when the graph is compiled. `Strategy.terms` runs while the backward is
traced: it turns the gradient of the op's output into terms, one for every parameter the op uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import SymBool, SymFloat, Tensor, fx

from fxgrad.errors import UnsupportedOp
from fxgrad.kernels.generic import SampleProgram
from fxgrad.kernels.partitioning import in_backward
from fxgrad.kernels.precision import WIDE
from fxgrad.ops.calls import Call, map_leaves
from fxgrad.ops.families import Family, draws, family_of
from fxgrad.ops.user_functions import UserFunction
from fxgrad.rules import OWN_BACKWARDS, RULES, OwnBackward, Rule
from fxgrad.rules.elementwise import ROUNDED_ONCE, elementwise
from fxgrad.rules.uses import Slot, Use, slots_of
from fxgrad.samples.control_flow import ControlFlow
from fxgrad.samples.layouts import Layout, samples_first
from fxgrad.terms import Part

Contributions = list[tuple[int, Part | Tensor]]  # slots with their parameters' gradients per sample


@dataclass(frozen=True)
class Strategy(ABC):
    """``terms(g, values, n)``: the per-sample gradients of one use."""

    use: Use

    name: ClassVar[str]

    @property
    def needs(self) -> frozenset[int]:
        """Return the slots that it looks at."""
        return frozenset(range(len(self.use.layouts)))

    @property
    def permutes(self) -> bool:
        """Return whether the op moves a parameter's elements, each to one place: a function that leaves norms alone."""
        return False

    @property
    def slices(self) -> bool:
        """Return whether the op takes a piece of a parameter, or joins several: nothing is added up on the way back."""
        return False

    @property
    def native(self) -> bool:
        """Return whether the op is PyTorch's own, which takes float64 where it takes float32."""
        return self.use.method or is_native(self.use.target)

    def loses(self, part: Part | Tensor) -> bool:
        """Whether a part may be off by more than its own rounding: nothing bounds what was lost on the way to it."""
        return True

    def at_hand(self, values: list[Any], g: Tensor) -> list[Any]:
        """Return the values as the op computed with them."""
        return matched(values, g)

    def terms(self, g: Tensor, values: Sequence[Any], n: int) -> Contributions:
        return self.terms_of_several([g], values, n)

    def terms_of_several(self, grads: Sequence[Tensor], values: Sequence[Any], n: int) -> Contributions:
        """Return the same of an op with several outputs, which has the generic rule alone."""
        use = self.use.widened() if self.native and grads[0].dtype in WIDE.values() else self.use
        layouts: list[Layout | None] = [layout for _, layout in use.several] or [use.output]
        rows = [
            g if layout is None else use.first(g, layout, values, n, gradient=True)
            for g, layout in zip(grads, layouts, strict=True)
        ]
        with in_backward():
            operands = use.sample_first(values, n)
        return self.contributions(use, rows, operands)

    @abstractmethod
    def contributions(self, use: Use, grads: Sequence[Tensor], values: list[Any]) -> Contributions:
        """Return the gradients from those of the outputs and the operands, all with samples first."""


@dataclass(frozen=True)
class ByRule(Strategy):
    """The op's own rule."""

    rule: Rule

    name = "rule"

    @property
    def needs(self) -> frozenset[int]:
        named = [self.use.arguments[name] for name in self.rule.arguments if name in self.use.arguments]
        return frozenset(slot.position for slot in slots_of(named))

    @property
    def permutes(self) -> bool:
        return self.use.output is None and self.rule.permutes

    @property
    def slices(self) -> bool:
        return self.use.output is None and self.rule.slices

    def loses(self, part: Part | Tensor) -> bool:
        """fxgrad's rules add nothing up by themselves: what they return as a tensor was moved, or rounded once."""
        return not self.rule.own and isinstance(part, Tensor)

    def contributions(self, use: Use, grads: Sequence[Tensor], values: list[Any]) -> Contributions:
        (g,) = grads
        if g.is_complex() and use.output is not None:  # rules are for real values: of what they multiply, conjugates
            values = [_conjugate(v, g.dtype) if isinstance(v, Tensor) else v for v in values]
        names = [name for name in self.rule.arguments if name in use.arguments]
        arguments = {name: use.fill(use.arguments[name], values) for name in names}
        if "use" in self.rule.arguments:
            arguments["use"] = use
        own = self.rule.own
        by_argument = self.rule.function(g if own else g.clone(), **arguments)  # g goes on to the layers below
        if not own:
            self.rule.check_returned(use.op, by_argument, g, {name: arguments.get(name) for name in use.differentiated})
        parts: Contributions = []
        for name, slots in use.differentiated.items():
            template, grad = use.arguments[name], by_argument[name]
            if isinstance(template, Slot):
                parts.append((slots[0], grad))
            else:  # a list of operands, in which one parameter may stand twice
                by_slot = zip(template, grad, strict=True)
                parts += [(slot.position, part) for slot, part in by_slot if slot.position in use.wrt]
        return parts


class Elementwise(Strategy):
    """The rule of the family: every sample has its own copy of the parameters."""

    name = "elementwise"

    def loses(self, part: Part | Tensor) -> bool:
        return self.use.op not in ROUNDED_ONCE

    def at_hand(self, values: list[Any], g: Tensor) -> list[Any]:
        """None is rounded to the dtype of what the op returns, which a wide number without dimensions, or a wide value
        that is added in place, does not change."""
        return matched(values, g, narrow=False)

    def contributions(self, use: Use, grads: Sequence[Tensor], values: list[Any]) -> Contributions:
        return list(elementwise(grads[0], use, values).items())


class Generic(Strategy):
    """dW_n = vjp of the op at sample n alone: the rule of every op that has none."""

    name = "generic"

    def programs(self, values: Sequence[Any]) -> list[SampleProgram]:
        """Return the programs that a compiled graph looks up for such values, in each dtype of gradients."""
        return [self._program(use, values) for use in (self.use, self.use.widened())]

    def contributions(self, use: Use, grads: Sequence[Tensor], values: list[Any]) -> Contributions:
        program = self._program(use, values)
        values = [_in_tensor(value) if i in program.scalars else value for i, value in enumerate(values)]
        return list(zip(use.wrt, program.vjp(values, list(use.wrt), grads), strict=True))

    def _program(self, use: Use, values: Sequence[Any]) -> SampleProgram:
        scalars = tuple(i for i, value in enumerate(values) if isinstance(value, float | bool | SymFloat | SymBool))
        operands = list(enumerate(zip(values, use.layouts, strict=True)))
        batched = tuple(i for i, (value, layout) in operands if layout is not None and value is not None)
        is_tensor = [isinstance(value, Tensor) or i in scalars for i, value in enumerate(values)]
        shared = tuple(i for i, _ in operands if is_tensor[i] and i not in batched)
        numbers = tuple(i for i, _ in operands if i not in (*batched, *shared))
        own_vjp = use.own_vjp if isinstance(use.target, UserFunction) else None
        return SampleProgram(use.key(), use.outputs, batched, shared, numbers, own_vjp, scalars)


def _in_tensor(number: Any) -> Tensor:
    """Return a number that was read of a tensor as one: the generic rule's operator takes integers alone."""
    boolean = isinstance(number, bool | SymBool)
    return torch.scalar_tensor(number, dtype=torch.bool if boolean else torch.float64)


@dataclass(frozen=True)
class OwnStrategy:
    """The strategy of an op with a backward of fxgrad's own: one call for its inputs and its parameters."""

    use: Use
    rule: OwnBackward
    name: str = "own backward"

    def gradients(
        self,
        grads: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        values: Sequence[Any],
        n: int,
        needed: Sequence[bool],
    ) -> tuple[list[Tensor | None], Contributions]:
        """Return the gradients of the operands that need one, and the parameters' per-sample gradients."""
        use, rule = self.use, self.rule
        rows = use.arguments[rule.rows]
        layout = use.layouts[rows.position]
        assert layout is not None

        def first(value: Tensor) -> Tensor:
            return samples_first(value, layout, n)

        arguments = {name: use.fill(use.arguments[name], values) for name in rule.arguments}
        by_input, by_parameter = rule.function(grads[: rule.outputs], outputs, first, **arguments)
        by_operand: list[Tensor | None] = [None] * len(values)
        for name, grad in by_input.items():
            slot = use.arguments[name]
            if isinstance(slot, Slot) and needed[slot.position]:
                by_operand[slot.position] = grad()
        parts: Contributions = []
        for name, slots in use.differentiated.items():
            if name in by_parameter:
                parts.append((slots[0], by_parameter[name]))
            else:  # an input of the one sample, made of parameters alone
                by_operand[slots[0]] = None
                parts.append((slots[0], by_input[name]().unsqueeze(0)))
        return by_operand, parts


def is_native(target: Any) -> bool:
    """Return whether a function is PyTorch's own; of one with bodies, whether all that they call is."""
    if isinstance(target, UserFunction | ControlFlow):
        return all(_calls_native(body) for body in target.bodies)
    home = str(getattr(target, "__module__", None) or "torch")
    own = home in ("_operator", "builtins") or home.split(".")[0] == "torch"  # getattr(w, "T") is a builtin
    return own and (not home.startswith("torch._ops.") or home == "torch._ops.aten")


def _calls_native(body: fx.GraphModule) -> bool:
    """Return whether a body runs in float64, too: all its calls are PyTorch's own, and none names a dtype."""
    dtypes: list[torch.dtype] = []
    for node in body.graph.nodes:
        if node.op == "call_module" or (node.op == "call_function" and not is_native(node.target)):
            return False
        map_leaves((node.args, dict(node.kwargs)), torch.dtype, dtypes.append)
        if node.op == "call_method" and node.target in _NAME_A_DTYPE:
            return False
    return not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


_NAME_A_DTYPE = frozenset({"float", "half", "bfloat16", "type", "type_as", "double", "cfloat"})


def choose_own(use: Use, *, single: bool = False, where: str = "") -> OwnStrategy:
    """Return the strategy for a use of parameters by an op with a backward of fxgrad's own.

    ``single``: of one sample, which may be made of parameters.
    """
    rule = OWN_BACKWARDS[use.op]
    wrong = sorted(use.differentiated.keys() - rule.of)
    if wrong and not single:
        raise UnsupportedOp(
            f"{use.op} gets a parameter as {wrong[0]}, which all samples share",
            where=where,
            advice="Expand it to one row for each sample.",
        )
    return OwnStrategy(use, rule)


def choose_several(use: Use, call: Call, *, where: str = "") -> Strategy:
    """Return the strategy for a use with several outputs: the generic one."""
    _refuse_drawing(use, call, where)
    return Generic(use)


def choose(use: Use, call: Call, shapes: Sequence[Any], *, where: str = "") -> Strategy:
    """Return the strategy for a use: its rule where that applies, else its family's, else the generic one."""
    rule = RULES.get(use.op)
    if rule is not None:
        refused = rule.refused(call)
        if refused is not None:
            name, reason = refused
            raise UnsupportedOp(
                f"{use.op} with {name}= has no per-sample gradient: {reason}",
                where=where,
                advice=f"Leave out {name}=, or freeze the parameter.",
            )
        if rule.takes(use, call, shapes):
            return ByRule(use, rule)
    _refuse_drawing(use, call, where)
    if family_of(use.op) is Family.ELEMENTWISE and use.op not in _NO_BROADCASTING:
        return Elementwise(use)
    return Generic(use)


_NO_BROADCASTING = frozenset({"masked_fill", "fill", "prelu"})
"""Ops whose parameter is a 0-dim number, or one number for each channel."""


def _refuse_drawing(use: Use, call: Call, where: str) -> None:
    if draws(call):
        raise UnsupportedOp(
            f"{use.op} draws random numbers for a parameter: the backward would have to draw them again",
            where=where,
            advice="Apply it to values that hold samples, or put the layer in eval mode.",
        )


def _conjugate(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the conjugate of a floating or complex value, in the dtype of a complex gradient."""
    if value.is_complex():
        return value.conj().resolve_conj()
    return value.to(dtype) if value.is_floating_point() else value


def matched(values: list[Any], g: Tensor, narrow: bool = True) -> list[Any]:
    """Floating values in g's dtype, as native backwards have them under autocast; complex ones in that precision.

    Without ``narrow`` wider ones stay as they are.
    """
    if not (g.is_floating_point() or g.is_complex()):
        return values
    real = g.dtype.to_real()

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        wanted = real.to_complex() if value.is_complex() else real
        wanted = wanted if narrow else torch.promote_types(wanted, value.dtype)
        return value if value.dtype == wanted else value.to(wanted)

    return [cast(value) for value in values]
