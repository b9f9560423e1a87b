"""Store what a backward delivers: on the parameters, in p.grad, or for `fxgrad.result`.

The results leave the compiled graph as gradients of placeholders (deliveries.py, placeholders.py). One autograd
function over all parameters, outside of the compiled region, hands them to the store.

A forward goes through these states (forward.py has the fields of each):

| in state | on | the store | goes to |
|---|---|---|---|
| - | `enter` | makes it the thread's current forward | open |
| open | `began`, once for each graph | keeps the graph's autograd node | open |
| open | `leave` | makes the forward around it current again | waiting |
| waiting | `begin_backward`, if the call reaches parameters | refuses wrong calls; queues a callback | running |
| running | `deliver`, once for each graph | sets results; returns p.grad's to autograd | delivered |
| running, delivered | `_end_backward`, the last callback | fills in zeros; exchanges; ends the guard's notes | ended |
| ended | `begin_backward`, of a retained graph | as for a waiting one | running |

A refusal raises in the state where it is; `undone` then puts every p.grad back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxgrad.errors import AlreadySet
from fxgrad.host.autograd import autograd_engine, compiles_backward, current_task, retains_graph
from fxgrad.host.dynamo import as_it_is
from fxgrad.host.tensors import identity
from fxgrad.quantities import Delivery, Quantity
from fxgrad.quantities.base import check_deliveries
from fxgrad.runtime import refusals
from fxgrad.runtime.accumulation import check_undivided
from fxgrad.runtime.autograd_graph import accumulates, check_runs_again, roots_of_backward
from fxgrad.runtime.deliveries import Asked, apart, ask, for_grad
from fxgrad.runtime.exchange import exchanges_of
from fxgrad.runtime.forward import CurrentForward, Forward
from fxgrad.runtime.grad_scaler import check_unscaled
from fxgrad.runtime.guard import Guard, undone
from fxgrad.runtime.idle_steps import watch_steps
from fxgrad.runtime.model_results import TASK, ModelResults, task_of
from fxgrad.runtime.policies import Accumulate, check_policy, how_to_clear
from fxgrad.runtime.reports import OnResult, Reports, no_result, not_asked, packed

_KINDS = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")  # of a tensor; for `map`, without frames


class Observer(Protocol):
    """Follows backward calls; an optimizer that has to know what p.grad is made of."""

    shards: bool  # whether it knows models that FSDP2 has sharded

    def began(self, forward: Forward) -> None: ...

    def ended(self, forward: Forward) -> None: ...

    def cleared(self, parameters: Iterable[Tensor]) -> None: ...


class Store:
    """Stores what a backward delivers, by the `accumulate` policy."""

    def __init__(
        self,
        policy: Accumulate,
        quantities: Sequence[Quantity],
        guard: Guard | None = None,
        on_result: OnResult | None = None,
    ) -> None:
        check_policy(policy, quantities)
        self.policy, self.quantities, self.guard = policy, tuple(quantities), guard
        self.exchanges, self.computed = exchanges_of(self.quantities)  # with other processes, by place; their own parts
        self.delivered = self.computed  # what a backward computes: other ones on a sharded model
        self.alone = next((q for q in self.quantities if not q.adds or q.guards_grad), None)  # of one forward each
        self.only_norms = all(q.alone for q in self.quantities)
        self.reports = None if on_result is None else Reports(on_result, self.quantities)
        self.observers: weakref.WeakSet[Observer] = weakref.WeakSet()
        self.current = CurrentForward()
        self.results = ModelResults()
        self.asked: dict[Any, Asked] = {}
        self.last_asked: tuple[Any, Asked] | None = None  # most steps ask for the same, and hashes take time
        self.last_forward: tuple[Any, Asked] | None = None  # by size and state, without a look at the parameters
        self.forwards: dict[int, weakref.ref[Forward]] = {}  # by number: those that wait for a backward, or run
        self.last: tuple[int, int] | None = None  # the backward call that a delivery was made in last, and its forward
        self.owned: frozenset[int] = frozenset()  # ids of its parameters: graph_stores.py

    def deliver_instead(self, quantities: Sequence[Quantity]) -> None:
        """Let backwards compute other quantities than were asked for, as many."""
        self.delivered, self.last_asked, self.last_forward = tuple(quantities), None, None
        self.asked.clear()

    def enter(self, forward: Forward) -> Forward | None:
        """Graphs that run from here on belong to this forward; returns the one around it, for `leave`."""
        before = self.current.forward
        self.current.forward = forward
        forward.watched = set()
        for exchange in self.exchanges.values():
            exchange.entered(forward)
        if self.reports is not None and forward.enclosing != -1:  # its own backward ends before the one around it
            self.reports.begin(forward.enclosing)
        return before

    def leave(self, forward: Forward, before: Forward | None) -> None:
        forward.watched = None  # nodes hold forwards, which hold no nodes with saved tensors in turn
        self.current.forward = before

    def began(self, forward: Forward, placeholder: Any) -> None:
        """One more graph of a forward has run."""
        forward.placeholders.append(placeholder)
        self._add(forward)

    def _add(self, forward: Forward) -> None:
        number = forward.number
        self.forwards[number] = weakref.ref(forward, partial(self.forwards.pop, number))

    def result(self, quantity: Quantity) -> Any:
        """Return what the last backward found of a quantity; see `fxgrad.result`."""
        asked = enumerate(zip(self.quantities, self.delivered, strict=True))
        place = next((i for i, (one, own) in asked if quantity in (one, own)), None)
        if place is None:
            raise not_asked(quantity, self.quantities)
        if place not in self.results:
            raise no_result(quantity, [asked.by_quantity[place] for asked in self.asked.values()])
        return packed(quantity, self.results[place])

    def check_clear(self, forward: Forward, task: int, what: str) -> None:
        """Raise before anything is computed, where a result would have no place."""
        if self.policy != "error":
            return
        for place in self.asked_of(forward).attributes:
            for name, parameter in forward.parameters.items():
                result = getattr(parameter, place, None)
                if result is not None and (task == -1 or task_of(result) != task):
                    raise AlreadySet(
                        f"{what} while {place} of '{name}' is still set from an earlier backward",
                        advice=how_to_clear(self.quantities, bool(self.observers)),
                    )

    def asked_of(self, forward: Forward, names: tuple[str, ...] | None = None) -> Asked:
        """Return what the quantities deliver of a forward, or of the parameters of one of its graphs."""
        if names is None or names == forward.names:
            asked = forward.asked
            if asked is None:
                last, key = self.last_forward, (forward.size, forward.state)
                known = last is not None and forward.state is not None and last[0] == key
                asked = last[1] if last is not None and known else self._ask(forward.size, forward.parameters)
                self.last_forward, forward.asked = (key, asked), asked
            return asked
        if names not in forward.asked_by_graph:
            used = {name: forward.parameters[name] for name in names}
            forward.asked_by_graph[names] = self._ask(forward.size, used)
        return forward.asked_by_graph[names]

    def cleared(self, parameters: Iterable[Tensor]) -> None:
        """Say that zero_grad() has run."""
        if self.observers:
            cleared = list(parameters)
            for observer in self.observers:
                observer.cleared(cleared)

    def adds_to_grad(self, forward: Forward) -> bool:
        """Return whether a backward adds to p.grad."""
        return self.asked_of(forward).adds_to_grad

    def _ask(self, n: int, parameters: Mapping[str, Tensor]) -> Asked:
        """Return the quantities' own answers; remembered, since every step asks for the same."""
        tensors = parameters.values()
        key = n, tuple(parameters), *[tuple(map(kind, tensors)) for kind in _KINDS]
        last = self.last_asked
        if last is not None and last[0] == key:
            return last[1]
        asked = self.asked.get(key)
        if asked is None:
            if not self.asked:  # what is asked of other sizes has the same places
                check_deliveries(self.delivered, n, parameters)
            if len(self.asked) >= 64:
                self.asked.clear()
            asked = self.asked[key] = ask(self.delivered, n, parameters)
            if asked.attributes and not asked.adds_to_grad:
                watch_steps(asked.attributes)
        self.last_asked = key, asked
        return asked

    @undone
    def begin_backward(self, forward: Forward) -> None:
        """Everything that would make this backward call's results wrong, before it runs."""
        if torch.is_grad_enabled() or compiles_backward():
            raise refusals.not_ordinary()
        if forward.units is not None:
            forward.units.gather(forward.weights, forward.gathered)
        task = current_task()
        if forward.checked == task:
            return
        if retains_graph():
            check_runs_again(roots_of_backward())
        if forward.computed is None and not forward.delivers():
            return
        if forward.outside:
            raise refusals.used_outside(forward.outside)
        self._check_alone(forward)
        asked = self.asked_of(forward)
        if not asked.adds_to_grad:
            refusals.check_delivers_to_leaves(forward.placeholders, self.quantities)
        if asked.attributes:
            self.check_clear(forward, forward.task(), "a backward")
            self._check_sizes(forward)
        guarded = self.guard is not None or bool(self.observers)
        if forward.computed is None and (guarded or self.only_norms):
            roots = roots_of_backward()
            check_undivided(roots)
            if guarded:
                check_unscaled(roots)
        if forward.at_backward or forward.units is not None or self.exchanges:
            self._act(forward)
        forward.checked = task
        forward.sent.clear()
        forward.stored.clear()
        forward.met = False
        if self.observers:  # asked first: a WeakSet's iterator costs a microsecond
            for observer in self.observers:
                observer.began(forward)
        self._add(forward)  # again, where an earlier backward retained the graph
        autograd_engine.queue_callback(partial(self._end_at_last, forward))
        if self.reports is not None and forward.enclosing == -1:
            self.reports.begin(task)

    def _act(self, forward: Forward) -> None:
        """Do what a forward has put off until its backward."""
        for act in forward.at_backward:
            act()
        if forward.units is not None:
            forward.units.begin(forward, self.guard is not None and bool(self.guard.watched))
        for exchange in self.exchanges.values():
            exchange.begin(forward)

    def _check_alone(self, forward: Forward) -> None:
        """Norms of two forwards are not the norms of their sum."""
        # A reentrant checkpoint's forward runs when another one's backward may have ended in the same call.
        met = self.last is not None and self.last[0] == forward.task() and self.last[1] != forward.number
        is_only_one = self.forwards.keys() == {forward.number} and not met
        if is_only_one or self.alone is None:
            return
        forwards = [reference() for reference in list(self.forwards.values())]
        others = [other for other in forwards if other is not None and other is not forward]
        if met or any(other.delivered == forward.task() or other.delivers() for other in others):
            raise refusals.two_forwards(self.alone)

    def _check_sizes(self, forward: Forward) -> None:
        """Results of one backward, or of several under "sum", are added: they need the same samples."""
        asked = self.asked_of(forward)
        if "grad_sample" not in asked.attributes:
            return
        for delivery in (one for one in asked.every if one.place == "grad_sample"):
            earlier = getattr(forward.parameters[delivery.parameter or ""], "grad_sample", None)
            adds = self.policy == "sum" or task_of(earlier) == forward.task()
            if isinstance(earlier, Tensor) and adds and len(earlier) != delivery.shape[0]:
                raise refusals.two_sizes(len(earlier), delivery.shape[0])

    def _unused(self, forward: Forward) -> set[str]:
        """The parameters that no graph uses, where an optimizer adds noise to all, and the backward is for all."""
        used = {
            name for placeholder in forward.placeholders for name in getattr(placeholder, "names", forward.parameters)
        }
        if not self.observers or not all(accumulates(forward.parameters[name]) for name in used):
            return set()
        return forward.parameters.keys() - used

    @as_it_is
    def _end_at_last(self, forward: Forward) -> None:
        """Behind callbacks that hooks have queued in this backward: they may change p.grad."""
        if forward.averaged or forward.enclosing != -1:
            self._end_backward(forward)
        else:
            autograd_engine.queue_callback(partial(self._end_backward, forward))

    @undone
    def _end_backward(self, forward: Forward) -> None:
        """Zeros where no gradient reached."""
        task = forward.task()
        self.forwards.pop(forward.number, None)
        if self.guard is not None:
            self.guard.check_held(task, forward.averaged)
        for place, (quantity, kinds) in enumerate(zip(self.delivered, self.asked_of(forward).by_quantity, strict=True)):
            unreached = partial(_unreached, quantity, forward.size)
            if not forward.sent.issuperset(kinds.names) and not forward.reduces_at_once():
                self._fill(forward, [name for name in kinds.names if name not in forward.sent])
            if kinds.results and not self.results.has(place, task):
                self.results.report(place, quantity, [unreached(delivery) for _, delivery in kinds.results], task)
            for _, delivery in kinds.attributes:
                parameter = forward.parameters[delivery.parameter or ""]
                if task_of(getattr(parameter, delivery.place, None)) != task:
                    self.put(parameter, delivery.place, unreached(delivery), forward)
        for place, exchange in self.exchanges.items():
            (own,) = self.results.pop(place)  # an exchange that raises leaves none
            quantity = self.quantities[place]
            self.results.report(place, quantity, [exchange.end(own, forward, quantity.group_size)], task)
        if forward.units is not None:  # queued first: observers look at p.grad of the shards
            forward.units.reduce(task, self.adds_to_grad(forward), forward.parameters, forward.size)
        if self.observers:
            for observer in self.observers:
                observer.ended(forward)
        if self.reports is not None:
            stepped = forward.parameters if forward.units is None else forward.units.shards(forward.parameters)
            self.reports.ended(task, stepped, self.asked_of(forward).by_quantity, self.results)
        if self.guard is not None and forward.enclosing == -1:
            self.guard.ended()
        self.results.replaced.clear()
        forward.view = None  # autograd's nodes and a forward hold each other

    def withdraw(self) -> None:
        """Let results be as before the running backward call."""
        self.results.withdraw()

    def _fill(self, forward: Forward, names: Sequence[str]) -> None:
        """Zeros as p.grad of parameters that nothing was sent to."""
        if forward.in_buckets:  # DistributedDataParallel sets p.grad to a view of its bucket, and takes no other
            return
        missed = [name for name in names if forward.parameters[name].grad is None]
        unused = self._unused(forward) if missed else set()
        for name in missed:
            parameter = forward.parameters[name]
            if accumulates(parameter) or name in unused:
                kept = getattr(parameter, "grad_dtype", None)  # of p.grad; None: any, and that of the parameter will do
                parameter.grad = torch.zeros_like(parameter, dtype=kept)

    @undone
    def deliver(
        self, grads: Sequence[Tensor | None], forward: Forward, names: tuple[str, ...], node: Any
    ) -> list[Tensor | None]:
        """Store what one graph's backward returned to a node; the gradients for p.grad are left to autograd.

        Without a node nothing is on its way: the caller sets p.grad.
        """
        forward.delivered = forward.task()
        self.last = forward.delivered, forward.number
        by_quantity = self.asked_of(forward, names).by_quantity
        for quantity, kinds in zip(self.quantities, by_quantity, strict=True):
            quantity.arrived([grads[i] for i, _ in kinds.results])
        sent: dict[str, Tensor] = {}
        memories: set[int] = set()
        for place, kinds in enumerate(by_quantity):
            if kinds.grads:
                if forward.sums is not None:
                    grads = forward.sums.with_left(kinds, grads, forward.parameters)
                sent.update(for_grad(kinds, grads, forward.parameters))
            for i, delivery in kinds.attributes:
                grad = grads[i]
                if grad is not None:
                    parameter = forward.parameters[delivery.parameter or ""]
                    earlier = getattr(parameter, delivery.place, None)
                    if not self.quantities[place].adds and task_of(earlier) == forward.delivered:
                        raise refusals.two_norms(delivery)
                    self.put(parameter, delivery.place, apart(grad.detach(), memories), forward)
            results = [grad for i, _ in kinds.results if (grad := grads[i]) is not None]
            if results:
                self.results.report(place, self.quantities[place], results, forward.delivered)
        forward.sent.update(sent)
        if self.guard is not None and node is not None:
            self.guard.deliver(forward.parameters, sent, forward.delivered, node)
        return [*map(sent.get, names)]

    def put(self, parameter: Tensor, place: str, grad: Tensor, forward: Forward) -> None:
        """One parameter's results of one forward; several forwards of one backward add up."""
        task = forward.task()
        last: Any = getattr(parameter, place, None)
        earlier: list[Tensor] = []
        if self.policy == "append" and last is not None:
            earlier = list(last) if isinstance(last, list) else [last]
            last = earlier.pop() if task_of(earlier[-1]) == task else None
        if isinstance(last, Tensor) and (self.policy == "sum" or task_of(last) == task):
            forward.met = forward.met or forward.stored.get((id(parameter), place)) != identity(last)
            if last.shape != grad.shape:
                raise refusals.two_sizes(len(last), len(grad))
            grad = last + grad
        setattr(grad, TASK, task)
        setattr(parameter, place, [*earlier, grad] if earlier else grad)
        forward.stored[id(parameter), place] = identity(grad)
        _PLACES.add(place)


def _unreached(quantity: Quantity, rows: int, delivery: Delivery) -> Tensor:
    """Return what a backward that reached no parameter delivers."""
    return quantity.unreached(delivery, quantity.units(rows))


_PLACES = {"grad_sample"}  # attributes that were ever set


def clear(parameters: Iterable[nn.Parameter]) -> None:
    """Set every result on a parameter to None."""
    for parameter in parameters:
        for place in _PLACES & parameter.__dict__.keys():
            setattr(parameter, place, None)
