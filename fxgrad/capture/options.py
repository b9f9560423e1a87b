"""What the user asked for, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxgrad.costs.choices import NAMES, Override, Planner
from fxgrad.costs.machines import Machine, machine_of
from fxgrad.errors import OptionError, nearest, refuse_choice
from fxgrad.graph.context import Mixing
from fxgrad.quantities import GradSample, Quantity

FREE = "free"  # memory_limit= where nothing is said: what is free on the device
Inner = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


@dataclass
class Options:
    """What the user asked for."""

    quantities: tuple[Quantity, ...] = (GradSample(),)
    loss_scale: float | str = 1
    mixing: Mixing = "error"
    backend: str | Inner = "inductor"
    fullgraph: bool = True
    overrides: Mapping[str, Override] = field(default_factory=dict)  # strategy=, by parameter
    named: bool = True  # whether the model is known, and with it its parameters' names and their order
    memory_limit: int | str | None = FREE  # bytes; FREE: what there is; None: not looked at
    varying: frozenset[str] | None = None  # tensor parallelism: parameters that differ between the processes
    machine: Machine | None = None  # whose speeds decide, where several processes have to decide alike
    settled: frozenset[str] = frozenset()  # options that cannot change: something else rests on them

    def takes(self, **changes: Any) -> bool:
        """Return whether other values of these options would pass: no error may advise what the next one refuses."""
        other = dataclasses.replace(self, **changes)
        try:
            other.check(one_graph=self.fullgraph or "fullgraph" in changes)
        except OptionError:
            return False
        return self.settled.isdisjoint(changes)

    def check(self, one_graph: bool = True) -> None:
        """Raise where an option has no such value, or options do not go together.

        With one_graph=False torch.compile decides about graph breaks, and not fullgraph=.
        """
        if self.mixing not in ("error", "allow"):
            refuse_choice("mixing", self.mixing, ("error", "allow"))
        limit = self.memory_limit
        number = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
        if limit is not None and limit != FREE and not number:
            raise OptionError(
                f"memory_limit has to be a positive number of bytes, None or 'free', not {limit!r}",
                advice="Pass an int such as 2 * 10**9.",
            )
        for quantity in self.quantities:
            quantity.check(self)
            size: Any = quantity.group_size
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise OptionError(
                    f"group_size has to be a positive int, not {quantity.group_size!r}",
                    advice="It is the number of consecutive rows that make one sample. If samples have different "
                    "numbers of rows, add rows whose losses are multiplied by 0.",
                )
            if one_graph and not self.fullgraph and not quantity.adds:
                raise OptionError(
                    f"{quantity} needs the whole model as one graph: what it makes of the parts does not add up",
                    advice="Pass fullgraph=True, which names the line of a graph break.",
                )

    def planner(self, device: torch.device | None, batch: int) -> Planner:
        """What chooses how terms are contracted; where everything is multiplied out nothing has to be measured."""
        if device is None or any(quantity.dense for quantity in self.quantities):
            return Planner()
        return Planner(
            self.machine or machine_of(device),
            self.overrides,
            batch,
            any(quantity.sums for quantity in self.quantities),
        )


def check_strategy(strategy: Any, quantities: Sequence[Quantity]) -> None:
    """Raise where strategy= is neither None, nor a way, nor a mapping to ways; or has nothing to choose."""
    given = dict(strategy) if isinstance(strategy, Mapping) else {} if strategy is None else {"": strategy}
    for name, way in given.items():
        if not isinstance(name, str) or way not in NAMES:
            of = f" for {name!r}" if name else ""
            raise OptionError(
                f"strategy has to be a way or a mapping from parameters to ways, not {way!r}{of}",
                advice=nearest(
                    way, NAMES, f"The ways are {', '.join(map(repr, NAMES))}; None lets the cost model choose."
                ),
            )
    dense = next((quantity for quantity in quantities if quantity.dense), None)
    if given and dense is not None:
        raise OptionError(
            f"strategy has nothing to choose: {dense} multiplies every gradient out",
            advice="Leave out strategy=, or ask for norms or sums alone, such as ClippedGrad.",
        )


def check_flags(**flags: Any) -> None:
    """Raise for an option that is neither True nor False: a text such as "no" counts as true in Python."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise OptionError(f"{name} has to be True or False, not {value!r}", advice="Pass a bool.")


def loss_scale(reduction: str | float) -> float | str:
    if reduction == "sum":
        return 1
    if reduction == "mean":
        return "mean"
    if isinstance(reduction, int | float) and not isinstance(reduction, bool) and reduction > 0:
        return reduction
    meaning = (
        "It says what the loss does over samples: pass 'sum' or 'mean', or the number that it divides by. A loss with "
        "reduction='none' is summed before backward()."
    )
    refuse_choice("loss_reduction", reduction, ("sum", "mean"), "a positive number", meaning)


def check_module(name: str, model: Any) -> None:
    """Raise where a function is given no module."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"{name} takes an nn.Module, not {_kind(model)}", advice=_module_for(model))


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shown = repr(value)
    return type(value).__name__ + (f" {shown}" if len(shown) <= 50 and "\n" not in shown else "")


def _module_for(value: Any) -> str:
    """Return advice for what is no module."""
    if isinstance(value, type):
        return f"Pass an object, {value.__name__}(..)."
    if callable(value):
        return "Put the function into the forward of a module that has its parameters."
    if isinstance(value, list | tuple | dict):
        return "Put several modules into one, such as nn.Sequential or nn.ModuleDict."
    return "Pass the model itself."
