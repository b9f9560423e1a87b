"""What the user asked for, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxgrad.context import Mixing
from fxgrad.errors import OptionError
from fxgrad.quantities import GradSample, Quantity

Inner = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass
class Options:
    """What the user asked for."""

    quantities: tuple[Quantity, ...] = (GradSample(),)
    loss_scale: float | str = 1
    mixing: Mixing = "error"
    backend: str | Inner = "inductor"
    fullgraph: bool = True

    def check(self) -> None:
        """Raise where options do not go together."""
        for quantity in self.quantities:
            quantity.check(self)
            if not isinstance(quantity.group_size, int) or quantity.group_size < 1:
                raise OptionError(f"group_size has to be a positive int, not {quantity.group_size!r}")
            if not self.fullgraph and not quantity.adds:
                raise OptionError(
                    f"{quantity} needs the whole model as one graph: what it makes of the parts does not add up",
                    advice="Pass fullgraph=True, which names the line of a graph break.",
                )


def inner_compiler(backend: str | Inner) -> Inner:
    """The compiler behind: Inductor, AOTAutograd alone, nothing, or the user's own."""
    if callable(backend):
        return backend
    if backend == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx  # type: ignore[return-value]
    if backend == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    if backend == "eager":
        return lambda gm, example_inputs: gm.forward
    raise OptionError(
        f"backend has to be 'inductor', 'aot_eager', 'eager' or a callable, not {backend!r}"
    )


def loss_scale(reduction: str | float) -> float | str:
    if reduction == "sum":
        return 1
    if reduction == "mean":
        return "mean"
    if isinstance(reduction, int | float) and not isinstance(reduction, bool) and reduction > 0:
        return reduction
    raise OptionError(f"loss_reduction has to be 'sum', 'mean' or a positive number, not {reduction!r}")
