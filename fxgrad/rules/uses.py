"""One use of parameters by one op: what a tap has to know to differentiate it, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fxgrad.kernels.precision import WIDE
from fxgrad.ops.calls import map_leaves
from fxgrad.ops.facts import Fact
from fxgrad.ops.user_functions import fitted
from fxgrad.samples.layouts import Layout, samples_first


@dataclass(frozen=True)
class Slot:
    """Stands in an op's arguments for the operand at this position."""

    position: int

    def __repr__(self) -> str:
        return f"${self.position}"


@dataclass(frozen=True)
class Use:
    """``op(*args, **kwargs)`` with slots for its operands, and where the samples are in them.

    ``layouts[i]`` is None for an operand that all samples share; ``wrt`` maps the slots that hold
    parameters to their keys on the tape. ``output`` is None where the op's value is itself shared by
    all samples (a function of parameters), and ``select`` picks one of several outputs. ``packed`` are
    the slots of batch_sizes and sorted_indices where values are rows of packed data. Of an op with several
    outputs, those with a gradient are in ``several``, with their layouts. ``is_complex`` is what its value is.
    """

    op: str
    target: Any
    method: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    arguments: Mapping[str, Any]
    layouts: tuple[Layout | None, ...]
    wrt: Mapping[int, int]
    output: Layout | None
    select: int | None = None
    inplace: bool = False
    packed: tuple[int, int] | None = None
    several: tuple[tuple[int, Layout], ...] = ()
    is_complex: bool = False

    @property
    def differentiated(self) -> dict[str, list[int]]:
        """Argument name -> the slots in it that hold parameters."""
        by_name = {name: [slot.position for slot in slots_of(of)] for name, of in self.arguments.items()}
        by_name = {name: [i for i in positions if i in self.wrt] for name, positions in by_name.items()}
        return {name: positions for name, positions in by_name.items() if positions}

    def has_samples(self, name: str) -> bool:
        """Return whether an argument is an operand with samples."""
        slot = self.arguments.get(name)
        return isinstance(slot, Slot) and self.layouts[slot.position] is not None

    def is_shared(self, name: str) -> bool:
        """Return whether an argument is an operand that all samples share."""
        slot = self.arguments.get(name)
        return isinstance(slot, Slot) and self.layouts[slot.position] is None

    def fill(self, template: Any, values: Sequence[Any]) -> Any:
        """Return a template with the operands' values in place of its slots."""
        return map_leaves(template, Slot, lambda slot: values[slot.position])

    def rerun(self, values: Sequence[Any]) -> Any:
        """Return the op's own call on these values."""
        args, kwargs = self.fill(self.args, values), self.fill(dict(self.kwargs), values)
        if self.inplace:
            args = (args[0].clone(), *args[1:])
        call: Callable[..., Any] = getattr(self.target, "alone", self.target)
        if self.method:
            call, args = getattr(args[0], self.target), args[1:]
        result = call(*args, **kwargs)
        return result if self.select is None else result[self.select]

    def outputs(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """Those of the op's outputs on these values that have a gradient."""
        result = self.rerun(values)
        return tuple(result[i] for i, _ in self.several) if self.several else (result,)

    def as_value(self, g: Tensor) -> Tensor:
        """Return gradients as the op's value has them: complex ones, or their real parts."""
        if self.is_complex == g.is_complex():
            return g
        return g.to(g.dtype.to_complex()) if self.is_complex else g.real

    def own_vjp(self, values: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters' gradients as the user's own backward gives them, in the order of ``wrt``."""
        by_slot = {slot: torch.zeros_like(values[slot]) for slot in self.wrt}
        by_argument = self.target.vjp(self.fill(self.args, values), self.by_output(grads))
        for template, grad in zip(self.args, by_argument, strict=True):
            if isinstance(template, Slot) and template.position in by_slot:
                slot = template.position
                by_slot[slot] = by_slot[slot] + fitted(grad, values[slot])
        return list(by_slot.values())

    def widened(self) -> Use:
        """Return this use with gradients in float64; an explicit dtype, as in ``sum(dtype=)``, becomes float64."""
        kwargs = {name: _widened(value) for name, value in self.kwargs.items()}
        return replace(self, args=tuple(map(_widened, self.args)), kwargs=kwargs)

    def by_output(self, grads: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the gradients, by the position of the output that each of them is of."""
        positions = [i for i, _ in self.several] or [self.select or 0]
        return dict(zip(positions, grads, strict=True))

    def sample_first(self, values: Sequence[Any], n: int) -> list[Any]:
        """The operands as a rule sees them: batched ones ``[n, .., outer*inner, ..]``, shared ones as they are."""
        return [
            self.first(value, layout, values, n) if isinstance(value, Tensor) and layout is not None else value
            for value, layout in zip(values, self.layouts, strict=True)
        ]

    def first(self, value: Tensor, layout: Layout, values: Sequence[Any], n: int, *, gradient: bool = False) -> Tensor:
        """Return one value ``[n, .., outer*inner, ..]``; rows of packed data are padded first (`rows_of_samples`)."""
        if layout.rows is None:
            return samples_first(value, layout, n)
        assert self.packed is not None
        batch_sizes, order = (values[slot] for slot in self.packed)
        rows = value.movedim(layout.dim, 0)
        padded = torch.ops.fxgrad.rows_of_samples(rows, batch_sizes, order, gradient)
        of_samples = samples_first(padded, Layout(1, layout.outer, layout.inner), n)
        return of_samples.flatten(1, 2).movedim(1, 1 + layout.dim)

    def key(self) -> str:
        """Return the computation in words: in a process, different ones have different words."""
        target = self.target if self.method else f"{getattr(self.target, '__module__', '')}.{self.op}"
        inplace = "in place" if self.inplace else ""
        batched = [i for i, layout in enumerate(self.layouts) if layout is not None]
        text = getattr(self.target, "text", None)
        if text is not None:
            target = f"{target}{text()}"
        outputs = f" outputs={[i for i, _ in self.several]}" if self.several else ""
        return f"{target}{inplace}{outputs}{self.args!r}{dict(self.kwargs)!r}[{self.select}] batched={batched}"


USE: Fact[Use] = Fact("use", "attach_taps", Use)


def slots_of(template: Any) -> list[Slot]:
    """Return the slots in a template, slices included."""
    slots: list[Slot] = []
    map_leaves(template, Slot, slots.append)
    return slots


def _widened(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value
