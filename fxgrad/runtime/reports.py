"""Report each quantity's result to the user's function, once for each backward call and behind all else in it.

A report is a callback of the engine, which hands it on to the end of the list of callbacks until those of the forwards
have run. A backward that raises drops its callbacks, and the report with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.host.autograd import autograd_engine
from fxgrad.host.dynamo import as_it_is
from fxgrad.quantities import GRAD, Quantity
from fxgrad.runtime.deliveries import Kinds

OnResult = Callable[[Quantity, Any], Any]
_ROUNDS = 2  # a forward's end waits for one round (`Store._end_at_last`), and what observers queue for one more


class Report:
    """What one backward call has delivered so far."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.kinds: Sequence[Kinds] = ()
        self.results: dict[int, list[Tensor]] = {}  # of the quantity at each place of the list


class Reports:
    """Calls a function of the user's with the results of each backward call."""

    def __init__(self, function: OnResult, quantities: Sequence[Quantity]) -> None:
        if not callable(function):
            raise OptionError(
                f"on_result has to be a function of a quantity and its result, not {function!r}",
                advice="Pass a function such as on_result=lambda quantity, result: print(result).",
            )
        self.function, self.quantities = function, tuple(quantities)
        self.running: weakref.WeakValueDictionary[int, Report] = weakref.WeakValueDictionary()

    def begin(self, task: int) -> None:
        """Queue the report of the running backward call, where none is."""
        if task not in self.running:
            report = self.running[task] = Report()
            autograd_engine.queue_callback(partial(self._later, report, _ROUNDS))

    def ended(
        self, task: int, parameters: Mapping[str, Tensor], kinds: Sequence[Kinds], results: Mapping[int, list[Tensor]]
    ) -> None:
        """Note what one forward has delivered in a backward call; the results are the sums over its forwards."""
        report = self.running[task]
        report.parameters.update(parameters)
        report.kinds, report.results = kinds, dict(results)

    @as_it_is
    def _later(self, report: Report, rounds: int) -> None:
        if rounds:
            autograd_engine.queue_callback(partial(self._later, report, rounds - 1))
        elif report.parameters:  # a forward that ran inside of this backward may have had none
            found = [self._found(place, quantity, report) for place, quantity in enumerate(self.quantities)]
            for quantity, result in zip(self.quantities, found, strict=True):
                self.function(quantity, result)

    def _found(self, place: int, quantity: Quantity, report: Report) -> Any:
        """Return the result of the whole model, or else what was left on parameters, by name."""
        kinds = report.kinds[place]
        if kinds.results:
            return packed(quantity, report.results[place])
        attributes = [(one.parameter or "", one.place) for _, one in kinds.attributes if one.place[0] != "_"]
        by_name: dict[str, list[Any]] = {}
        for name, attribute in [*((name, GRAD) for name in kinds.names), *attributes]:
            by_name.setdefault(name, []).append(getattr(report.parameters[name], attribute, None))
        return {name: values[0] if len(values) == 1 else tuple(values) for name, values in by_name.items()}


def packed(quantity: Quantity, results: list[Any]) -> Any:
    """Return a quantity's results of the whole model in the form that users get."""
    pack = getattr(quantity, "packed", None)
    return pack(results) if pack is not None else results[0] if len(results) == 1 else tuple(results)


def not_asked(quantity: Any, quantities: Sequence[Quantity]) -> OptionError:
    """Return the error of `fxgrad.result` for what is none of the model's quantities."""
    shown = f"the class {quantity.__name__}" if isinstance(quantity, type) else repr(quantity)
    return OptionError(
        f"the model is transformed for {' and '.join(map(str, quantities))}, not for {shown}",
        advice="Pass one of the quantities that fxgrad.transform was given: the object, not its class or name.",
    )


def no_result(quantity: Quantity, kinds: Sequence[Kinds]) -> OptionError:
    """Return the error of `fxgrad.result` where it has nothing of a quantity; these are its deliveries so far."""
    places = {one.place for each in kinds for _, one in each.attributes} | {GRAD for each in kinds if each.grads}
    if places and not any(each.results for each in kinds):
        return OptionError(
            f"{quantity} leaves its results on the parameters, and none for fxgrad.result",
            advice=f"Read {' and '.join(f'p.{place}' for place in sorted(places))} of each parameter p.",
        )
    return OptionError(
        f"there is no result of {quantity}: no backward has run since zero_grad()",
        advice="Call backward() on a loss of the transformed model's outputs first.",
    )
