"""The named call targets of a rewritten graph.

Python objects stay out of call arguments: fx prints a graph as code, and AOTAutograd runs that; so what a tap
needs besides tensors is closed over here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxgrad.costs.choices import Planner
from fxgrad.quantities import Quantity
from fxgrad.rules.strategies import OwnStrategy, Strategy
from fxgrad.runtime.tape import Like, Tape, tape_for
from fxgrad.runtime.taps import Collect, Derive, OwnTap, Single, Tap, TapSeveral


class Target:
    """A callable with a name of its own."""

    __module__ = "fxgrad.runtime.targets"

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __repr__(self) -> str:
        return self.__name__


class NewTape(Target):
    def __init__(
        self,
        quantities: Sequence[Quantity],
        loss_scale: float | str,
        likes: Sequence[Like],
        given: Sequence[int],
        planner: Planner,
    ) -> None:
        super().__init__("new_tape")
        self.quantities, self.loss_scale, self.likes, self.given = quantities, loss_scale, likes, given
        self.planner, self.tape = planner, tape_for(quantities)

    def __call__(self) -> Tape:
        return self.tape(self.quantities, self.loss_scale, self.likes, self.given, self.planner)


class CollectTarget(Target):
    """``collect(tape, n, ghosts.., given..)``"""

    def __init__(self, ghosts: int) -> None:
        super().__init__("collect")
        self.ghosts = ghosts

    def __call__(self, tape: Tape, n: int, *rest: Tensor) -> Any:
        return Collect.apply(tape, n, self.ghosts, *rest)  # type: ignore[no-untyped-call]


class TapTarget(Target):
    """``tap_linear(tape, n, y, handles.., operands..)``"""

    def __init__(self, strategy: Strategy, handles: int, dirty: bool) -> None:
        super().__init__(f"tap_{strategy.use.op.replace('::', '_').replace('.', '_')}")
        self.strategy, self.handles, self.dirty = strategy, handles, dirty

    def __call__(self, tape: Tape, n: int, y: Tensor, *rest: Any) -> Any:
        return Tap.apply(tape, self.strategy, self.dirty, n, y, self.handles, *rest)  # type: ignore[no-untyped-call]


class TapSeveralTarget(Target):
    """``tap_autograd_function(tape, n, outputs.., handles.., operands..)``"""

    def __init__(self, strategy: Strategy, handles: int) -> None:
        super().__init__(f"tap_{strategy.use.op.replace('::', '_').split('.')[-1]}")
        self.strategy, self.handles = strategy, handles

    def __call__(self, tape: Tape, n: int, *rest: Any) -> Any:
        return TapSeveral.apply(tape, self.strategy, n, self.handles, *rest)  # type: ignore[no-untyped-call]


class OwnTapTarget(Target):
    """``tap_recurrence(tape, n, handles.., operands..)``"""

    def __init__(self, strategy: OwnStrategy, handles: int) -> None:
        super().__init__(f"tap_{strategy.use.op.split('::')[-1]}")
        self.strategy, self.handles = strategy, handles

    def __call__(self, tape: Tape, n: int, *rest: Any) -> Any:
        return OwnTap.apply(tape, self.strategy, n, self.handles, *rest)  # type: ignore[no-untyped-call]


class DeriveTarget(Target):
    """``derive_transpose(tape, n, handles.., operands..)``"""

    def __init__(self, strategy: Strategy, key: int, handles: int) -> None:
        super().__init__(f"derive_{strategy.use.op.replace('::', '_').replace('.', '_')}")
        self.strategy, self.key, self.handles = strategy, key, handles

    def __call__(self, tape: Tape, n: int, *rest: Any) -> Any:
        return Derive.apply(tape, self.strategy, self.key, n, self.handles, *rest)  # type: ignore[no-untyped-call]


class SingleTarget(Target):
    """``single(tape, handle, parameter)``"""

    def __init__(self, key: int) -> None:
        super().__init__("single")
        self.key = key

    def __call__(self, tape: Tape, handle: Tensor, parameter: Tensor) -> Any:
        return Single.apply(tape, self.key, handle, parameter)  # type: ignore[no-untyped-call]


TAPS = (TapTarget, TapSeveralTarget, OwnTapTarget)
