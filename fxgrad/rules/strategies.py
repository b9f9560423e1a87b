"""How a use of parameters is differentiated: by its rule, as an elementwise op, or by the generic rule.

The decision is made once, when the graph is compiled. `Strategy.terms` runs while the backward is
traced: it turns the gradient of the op's output into terms, one for every parameter the op uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.errors import UnsupportedOp
from fxgrad.kernels.generic import per_sample_vjp, register_program
from fxgrad.kernels.partitioning import in_backward
from fxgrad.kernels.precision import WIDE
from fxgrad.ops.calls import Call, map_leaves
from fxgrad.ops.families import Family, draws, family_of
from fxgrad.ops.user_functions import UserFunction, fitted
from fxgrad.rules import OWN_BACKWARDS, RULES, OwnBackward, Rule
from fxgrad.rules.elementwise import ROUNDED_ONCE, elementwise
from fxgrad.rules.linear import einsum_applies, tensordot_applies
from fxgrad.rules.lookup import reads_by_tensors
from fxgrad.rules.uses import Slot, Use, slots_of
from fxgrad.samples.control_flow import ControlFlow
from fxgrad.samples.layouts import samples_first
from fxgrad.terms import Part

Contributions = list[tuple[int, Part | Tensor]]  # slots with their parameters' gradients per sample


@dataclass(frozen=True)
class Strategy:
    """``terms(g, values, n)``: the per-sample gradients of one use; ``needs`` are the slots it looks at."""

    name: str
    use: Use
    needs: frozenset[int]
    function: Callable[[Use, Tensor, list[Any]], Contributions]

    @property
    def permutes(self) -> bool:
        """Whether the op moves a parameter's elements, each to one place: a function that leaves norms alone."""
        return self.name == "rule" and self.use.output is None and RULES[self.use.op].permutes

    @property
    def slices(self) -> bool:
        """Whether the op takes a piece of a parameter, or joins several: nothing is added up on the way back."""
        return self.name == "rule" and self.use.output is None and RULES[self.use.op].slices

    @property
    def native(self) -> bool:
        """Whether the op is PyTorch's own, which takes float64 where it takes float32."""
        return self.use.method or is_native(self.use.target)

    def loses(self, part: Part | Tensor) -> bool:
        """Whether a part may be off by more than its own rounding: nothing bounds what was lost on the way to it.

        fxgrad's rules add nothing up by themselves: what they return as a tensor was moved, or rounded once.
        """
        if self.name == "rule" and RULES[self.use.op].own:
            return False
        if self.name == "elementwise" and self.use.op in ROUNDED_ONCE:
            return False
        return self.name != "rule" or isinstance(part, Tensor)

    def at_hand(self, values: list[Any], g: Tensor) -> list[Any]:
        """The values as the op computed with them. An elementwise one rounds none to the dtype of what it returns,
        which a wide number without dimensions, or a wide value that is added in place, does not change."""
        return matched(values, g, narrow=self.name != "elementwise")

    def terms(self, g: Tensor, values: Sequence[Any], n: int) -> Contributions:
        use = self.use.widened() if self.native and g.dtype in WIDE.values() else self.use
        if use.output is not None:
            g = use.first(g, use.output, values, n, gradient=True)
        return self.function(use, g, self._rows(values, n))

    def terms_of_several(self, grads: Sequence[Tensor], values: Sequence[Any], n: int) -> Contributions:
        """The same of an op with several outputs, which has the generic rule alone."""
        use = self.use.widened() if self.native and grads[0].dtype in WIDE.values() else self.use
        layouts = [layout for _, layout in use.several]
        pairs = zip(grads, layouts, strict=True)
        rows = [use.first(g, layout, values, n, gradient=True) for g, layout in pairs]
        return _by_vmap_of(use, rows, self._rows(values, n))

    def _rows(self, values: Sequence[Any], n: int) -> list[Any]:
        with in_backward():
            return self.use.sample_first(values, n)


@dataclass(frozen=True)
class OwnStrategy:
    """The strategy of an op with a backward of fxgrad's own: one call for its inputs and its parameters."""

    use: Use
    rule: OwnBackward
    name: str = "own backward"

    def gradients(
        self, grads: Sequence[Tensor | None], outputs: Sequence[Tensor], values: Sequence[Any], n: int
    ) -> tuple[list[Tensor | None], Contributions]:
        """The gradient of every operand, None for a parameter's, and the parameters' per-sample gradients."""
        use, rule = self.use, self.rule
        rows = use.arguments[rule.rows]
        layout = use.layouts[rows.position]
        assert layout is not None

        def first(value: Tensor) -> Tensor:
            return samples_first(value, layout, n)

        arguments = {name: use.fill(use.arguments[name], values) for name in rule.arguments}
        by_input, by_parameter = rule.function(grads[: rule.outputs], outputs, first, **arguments)
        found: list[Tensor | None] = [None] * len(values)
        for name, grad in by_input.items():
            slot = use.arguments[name]
            if isinstance(slot, Slot):
                found[slot.position] = grad
        parts = [(slots[0], by_parameter[name]) for name, slots in use.differentiated.items()]
        return found, parts


def is_native(target: Any) -> bool:
    """Whether a function is PyTorch's own; of one with bodies, whether all that they call is."""
    if isinstance(target, UserFunction | ControlFlow):
        return all(_calls_native(body) for body in target.bodies)
    home = str(getattr(target, "__module__", None) or "torch")
    own = home in ("_operator", "builtins") or home.split(".")[0] == "torch"  # getattr(w, "T") is a builtin
    return own and (not home.startswith("torch._ops.") or home == "torch._ops.aten")


def _calls_native(body: fx.GraphModule) -> bool:
    """Whether a body runs in float64, too: all its calls are PyTorch's own, and none names a dtype."""
    dtypes: list[torch.dtype] = []
    for node in body.graph.nodes:
        if node.op == "call_module" or (node.op == "call_function" and not is_native(node.target)):
            return False
        map_leaves((node.args, dict(node.kwargs)), torch.dtype, dtypes.append)
        if node.op == "call_method" and node.target in _NAME_A_DTYPE:
            return False
    return not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


_NAME_A_DTYPE = frozenset({"float", "half", "bfloat16", "type", "type_as", "double", "cfloat"})


def choose_own(use: Use, *, where: str = "") -> OwnStrategy:
    """The strategy for a use of parameters by an op with a backward of fxgrad's own."""
    rule = OWN_BACKWARDS[use.op]
    wrong = sorted(use.differentiated.keys() - rule.of)
    if wrong:
        raise UnsupportedOp(
            f"{use.op} gets a parameter as {wrong[0]}, which all samples share",
            where=where,
            advice="Expand it to one row for each sample.",
        )
    return OwnStrategy(use, rule)


def choose_several(use: Use, call: Call, *, where: str = "") -> Strategy:
    """The strategy for a use with several outputs: the generic one."""
    _refuse_drawing(use, call, where)
    return Strategy("generic", use, frozenset(range(len(use.layouts))), _by_vmap)


def choose(use: Use, call: Call, shapes: Sequence[Any], *, where: str = "") -> Strategy:
    """The strategy for a use: its rule where that applies, else its family's, else the generic one."""
    every = frozenset(range(len(use.layouts)))
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
        if _applies(rule, use, call, shapes):
            named = {
                s.position for name in rule.arguments if name in use.arguments for s in slots_of(use.arguments[name])
            }
            needs = every if "values" in rule.arguments else frozenset(named)
            return Strategy("rule", use, needs, _by_rule)
    _refuse_drawing(use, call, where)
    tensors_line_up = use.op not in _SCALAR_ARGUMENTS
    if family_of(use.op) is Family.ELEMENTWISE and tensors_line_up:
        return Strategy("elementwise", use, every, _by_family)
    return Strategy("generic", use, every, _by_vmap)


_SCALAR_ARGUMENTS = frozenset({"masked_fill", "fill"})  # ops that take a parameter as a 0-dim number


def _refuse_drawing(use: Use, call: Call, where: str) -> None:
    if draws(call):
        raise UnsupportedOp(
            f"{use.op} draws random numbers for a parameter: the backward would have to draw them again",
            where=where,
            advice="Apply it to values that hold samples, or put the layer in eval mode.",
        )


def _applies(rule: Rule, use: Use, call: Call, shapes: Sequence[Any]) -> bool:
    if not use.differentiated.keys() <= rule.differentiates or rule.unhandled(call):
        return False
    if use.output is None:
        return rule.shared and _APPLIES.get(use.op, _always)(use, shapes)
    for name in rule.batched:
        slot = use.arguments.get(name)
        if not isinstance(slot, Slot) or use.layouts[slot.position] is None:
            return False
    return _APPLIES.get(use.op, _always)(use, shapes)


def _always(use: Use, shapes: Sequence[Any]) -> bool:
    return True


def _product_applies(*pairs: tuple[str, str]) -> Callable[[Use, Sequence[Any]], bool]:
    """A product's rule needs samples on the side that is not the parameter."""

    def applies(use: Use, shapes: Sequence[Any]) -> bool:
        for name, other in (*pairs, *((b, a) for a, b in pairs)):
            slot = use.arguments.get(other)
            held = isinstance(slot, Slot) and use.layouts[slot.position] is not None
            if name in use.differentiated and not held:
                return False
        return True

    return applies


def _bags_apply(use: Use, shapes: Sequence[Any]) -> bool:
    """Bags are rows of ids, and their weights, where there are any, are the samples' own."""
    weights = use.arguments.get("per_sample_weights")
    held = weights is None or (isinstance(weights, Slot) and use.layouts[weights.position] is not None)
    return held and use.arguments.get("offsets") is None


def _einsum_applies(use: Use, shapes: Sequence[Any]) -> bool:
    slots = use.arguments["operands"]
    equation = use.arguments["equation"]
    return isinstance(equation, str) and einsum_applies(equation, [shapes[s.position] for s in slots])


def _tensordot_applies(use: Use, shapes: Sequence[Any]) -> bool:
    """Of tensors without a dimension of one, which PyTorch repeats."""
    sides = [use.arguments[name] for name in ("a", "b")]
    if not all(isinstance(side, Slot) for side in sides):
        return False
    a, b = (shapes[side.position] for side in sides)
    return 1 not in (*a, *b) and tensordot_applies(use.arguments["dims"], len(a), len(b))


def _getitem_applies(use: Use, shapes: Sequence[Any]) -> bool:
    index = use.arguments.get("index")
    tensors = [slot for slot in slots_of(index) if shapes[slot.position] is not None]
    if use.output is None:
        return not tensors
    items = index if isinstance(index, tuple) else (index,)
    plain = not any(item is None or isinstance(item, bool) for item in items)  # None is a new dim here
    return plain and _index_applies(use, shapes, index)


def _index_applies(use: Use, shapes: Sequence[Any], index: Any = None) -> bool:
    index = use.arguments["indices"] if index is None else index
    read = use.arguments["input"]
    batched = any(use.layouts[slot.position] is not None for slot in slots_of(index))
    return reads_by_tensors(index) and batched and isinstance(read, Slot) and use.layouts[read.position] is None


def _gather_applies(use: Use, shapes: Sequence[Any]) -> bool:
    """Of a vector or more, which all samples share."""
    read = use.arguments["input"]
    return isinstance(read, Slot) and use.layouts[read.position] is None and len(shapes[read.position]) > 0


def _gather_of_its_rank(use: Use, shapes: Sequence[Any]) -> bool:
    """An empty index may have any number of dims."""
    index = use.arguments["index"]
    own = isinstance(index, Slot) and _gather_applies(use, shapes)
    return own and len(shapes[index.position]) == len(shapes[use.arguments["input"].position])


def _windows_apply(use: Use, shapes: Sequence[Any]) -> bool:
    """A convolution's rule needs the images in a dimension of their own, which may be missing in a batch of one."""
    input, weight = use.arguments["input"], use.arguments["weight"]
    return len(shapes[input.position]) == len(shapes[weight.position])


_APPLIES: dict[str, Callable[[Use, Sequence[Any]], bool]] = {
    "matmul": _product_applies(("input", "other")),
    "rmatmul": _product_applies(("input", "other")),
    "mm": _product_applies(("input", "mat2")),
    "bmm": _product_applies(("input", "mat2")),
    "mv": _product_applies(("input", "vec")),
    "addmm": _product_applies(("mat1", "mat2")),
    "baddbmm": _product_applies(("batch1", "batch2")),
    "einsum": _einsum_applies,
    "tensordot": _tensordot_applies,
    **dict.fromkeys((f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3)), _windows_apply),
    "embedding_bag": _bags_apply,
    "getitem": _getitem_applies,
    "index": _index_applies,
    "gather": _gather_of_its_rank,
    **dict.fromkeys(("take_along_dim", "index_select"), _gather_applies),
}


def _by_rule(use: Use, g: Tensor, values: list[Any]) -> Contributions:
    rule = RULES[use.op]
    if g.is_complex() and use.output is not None:  # rules are for real values: of what they multiply, the conjugates
        values = [_conjugate(v, g.dtype) if isinstance(v, Tensor) else v for v in values]
    special = {"use": use, "values": values}
    arguments = {
        name: special[name] if name in special else use.fill(use.arguments[name], values)
        for name in rule.arguments
        if name in special or name in use.arguments
    }
    grads = rule.function(g, **arguments)
    found: Contributions = []
    for name, slots in use.differentiated.items():
        template, grad = use.arguments[name], grads[name]
        if isinstance(template, Slot):
            found.append((slots[0], grad))
        else:  # a list of operands, in which one parameter may stand twice
            by_slot = zip(template, grad, strict=True)
            found += [(slot.position, part) for slot, part in by_slot if slot.position in use.wrt]
    return found


def _conjugate(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The conjugate of a floating or complex value, in the dtype of a complex gradient."""
    if value.is_complex():
        return value.conj().resolve_conj()
    return value.to(dtype) if value.is_floating_point() else value


def _by_family(use: Use, g: Tensor, values: list[Any]) -> Contributions:
    return list(elementwise(g, use, values).items())


def _by_vmap(use: Use, g: Tensor, values: list[Any]) -> Contributions:
    """dW_n = vjp of the op at sample n alone: the rule of every op that has none."""
    return _by_vmap_of(use, [g], values)


def _by_vmap_of(use: Use, grads: Sequence[Tensor], values: list[Any]) -> Contributions:
    rows = [i for i, layout in enumerate(use.layouts) if layout is not None and values[i] is not None]
    tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor) and i not in rows]
    sizes = [i for i in range(len(values)) if i not in rows and i not in tensors]

    def arguments(batched: Sequence[Tensor], shared: Sequence[Tensor], numbers: Sequence[int]) -> list[Any]:
        filled: dict[int, Any] = dict(zip(rows, batched, strict=True))
        filled |= dict(zip(tensors, shared, strict=True)) | dict(zip(sizes, numbers, strict=True))
        return [filled[i] for i in range(len(values))]

    def program(*given: Any) -> tuple[Tensor, ...]:
        result = use.rerun(arguments(*given))
        return tuple(result[i] for i, _ in use.several) if use.several else (result,)

    def backward(
        batched: Sequence[Tensor], shared: Sequence[Tensor], numbers: Sequence[int], wrt: Sequence[int], grads: Any
    ) -> list[Tensor]:
        filled = arguments(batched, shared, numbers)
        args = use.fill(use.args, filled)
        by_argument = use.target.vjp(args, use.by_output(grads))
        found = {i: torch.zeros_like(shared[i]) for i in wrt}
        for template, grad in zip(use.args, by_argument, strict=True):
            if isinstance(template, Slot) and template.position in tensors:
                i = tensors.index(template.position)
                if i in found:
                    found[i] = found[i] + fitted(grad, shared[i])
        return [found[i] for i in wrt]

    key = use.key()
    register_program(key, program, backward if isinstance(use.target, UserFunction) else None)
    wrt = [tensors.index(slot) for slot in use.wrt]
    found = per_sample_vjp(
        key,
        [g.contiguous() for g in grads],
        [values[i] for i in rows],
        [values[i] for i in tensors],
        wrt,
        [values[i] for i in sizes],
    )
    return list(zip(use.wrt, found, strict=True))


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
