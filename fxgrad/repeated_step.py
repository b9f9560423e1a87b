"""A step of `forward_backward` that is like the one before it.

To find the batch and the graph, and to learn who follows a backward, takes longer than a small model's products. While
nothing has changed, the answers are those of the step before. All that they depend on is looked at before anything is
computed:

| what may have changed | seen by |
|---|---|
| the model's parameters: which they are, and each | the engine, before it asks here |
| the inputs' shapes, and what else tensors may be | `shapes`, `are_ordinary` |
| what the model reads: attributes, globals, closures; modes of PyTorch | Dynamo's guards, by `FoundGraph` |
| the graph: rules of fxgrad, a stance of torch.compile, `torch._dynamo.reset` | `changes`, `is_usual`, `FoundGraph` |
| p.grad, and the hooks on parameters, the guard's among them | `nothing_follows`, `stand_where_they_were` |
| a forward or a backward around this step, an optimizer that follows backwards | `_is_outermost` |

Where something is not as it was, the engine runs the step, and refuses what there is to refuse.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from fxgrad.capture.checks import are_ordinary
from fxgrad.host.autograd import current_task
from fxgrad.host.dispatch import any_mode
from fxgrad.host.lookup import FoundGraph, is_usual
from fxgrad.host.modules import wrapped_by_ddp
from fxgrad.ops.families import CHANGES
from fxgrad.runtime.computed import nothing_follows, number_of_no_backward, stepped
from fxgrad.runtime.deliveries import Kinds, dtype_of_grad, fit
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.slot import stand_where_they_were
from fxgrad.runtime.store import Store

MISSED = object()  # in place of what a step returns: nothing was computed, or nothing that is left

_shape, _stride, _data_ptr = attrgetter("shape"), Tensor.stride, Tensor.data_ptr  # for `map`, without Python frames


class RepeatedStep:
    """What one step found out, for the next."""

    def __init__(
        self, store: Store, forward: Forward, kinds: Kinds, inputs: tuple[Tensor, ...], graph: FoundGraph
    ) -> None:
        self.store, self.kinds, self.graph = store, kinds, graph
        self.forward = Forward(forward.size, forward.parameters, method=forward.method, state=forward.state)
        self.forward.repeats = True
        self.parameters = [*forward.parameters.values()]
        self.shapes, self.dtypes = [*map(_shape, inputs)], [*map(dtype_of_grad, self.parameters)]
        self.changes = len(CHANGES)
        self.spent = False  # whether its forward, and so all of it, may not be used again

    @classmethod
    def of(cls, store: Store, forward: Forward, inputs: tuple[Any, ...], outputs: Any) -> RepeatedStep | None:
        """Return how to repeat a step that has just been delivered; None where the next may deliver otherwise."""
        computed = forward.computed
        if computed is None or forward.stands_for is None or not computed.steady:
            return None
        tensors = inputs if type(outputs) is Tensor else (*inputs, *outputs)
        if {*map(type, tensors)} != {Tensor}:
            return None
        kinds, *others = store.asked_of(forward).by_quantity
        grads: list[Any] = [*map(computed.grads.__getitem__, kinds.grads)]
        if others or kinds.attributes or kinds.names != forward.names:
            return None
        graph = FoundGraph.of(forward.compiled) if _are_kept(grads, forward.parameters.values()) else None
        return None if graph is None else cls(store, forward, kinds, inputs, graph)

    def run(self, inputs: tuple[Any, ...]) -> Any:
        """Run and deliver the step, and return what it returns; `MISSED` where it is unlike the one before."""
        if not (self._looks_alike(inputs) and self._is_outermost() and self._nothing_follows()):
            return MISSED
        store, forward = self.store, self.forward
        store.current.forward = forward
        try:
            outputs = self.graph.call(*inputs)
        except Exception:
            return MISSED  # the engine's call raises it again, in its own words; the graph has changed nothing
        finally:
            store.current.forward = None
        loss = outputs if type(outputs) is Tensor else outputs[0]
        if forward.at_backward or forward.computed is None or loss is not forward.computed.loss:
            self.spent = True
            return stepped(store, forward, outputs)
        found, forward.computed = forward.computed.grads, None
        self._deliver(found)
        return outputs

    def _looks_alike(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether Dynamo would find the same graph, for as many samples."""
        if not are_ordinary(inputs) or [*map(_shape, inputs)] != self.shapes or len(CHANGES) != self.changes:
            return False
        return not any_mode() and is_usual(self.graph.compiled) and self.graph.fits(inputs)

    def _is_outermost(self) -> bool:
        """Return whether the step is in no forward and no backward, and no one follows its backward."""
        store = self.store
        if store.current.forward is not None or current_task() != -1 or wrapped_by_ddp() is not None:
            return False
        return not store.observers

    def _nothing_follows(self) -> bool:
        """Return whether p.grad may be set: it is None, no hook would see it, and the guard has nothing to do."""
        guard, parameters = self.store.guard, self.parameters
        if not nothing_follows(self.store, self.forward.names, parameters):
            return False
        if guard is not None and not (guard.all and stand_where_they_were(guard.all.slots, guard.all.parameters)):
            return False
        return [*map(dtype_of_grad, parameters)] == self.dtypes

    def _deliver(self, found: Sequence[Tensor | None]) -> None:
        """Set the results of the quantity and p.grad; for several forwards in a backward, see `Store.deliver`."""
        store, (quantity,), task = self.store, self.store.quantities, number_of_no_backward()
        results: Any = [found[i] for i, _ in self.kinds.results]
        quantity.arrived(results)
        store.last = task, self.forward.number
        if results:
            store.results.report(0, quantity, results, task)
            store.results.replaced.clear()
        for parameter, grad in zip(self.parameters, map(found.__getitem__, self.kinds.grads), strict=True):
            parameter.grad = grad


def _are_kept(grads: Sequence[Tensor], parameters: Collection[Tensor]) -> bool:
    """Return whether p.grad may be these very tensors: in its dtype and layout, each in memory of its own."""
    alike = fit(grads, parameters) and [*map(_stride, grads)] == [*map(_stride, parameters)]
    return alike and len({*map(_data_ptr, grads)}) == len(grads)
