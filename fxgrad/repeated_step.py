"""A step of `forward_backward` that is like the one before it.

To find the batch and the graph, and to learn who follows a backward, takes longer than a small model's products. While
nothing has changed, the answers are those of the step before. What they depend on is looked at before the graph runs:

| what may have changed | seen by |
|---|---|
| the model's parameters: which they are, and each; the guard on p.grad | the engine |
| the inputs' shapes, and what else tensors may be | `_counts`, which looks for the samples anew; `are_ordinary` |
| what the model reads: attributes, globals, closures; modes of PyTorch | Dynamo's guards, by `FoundGraph` |
| the graph: rules of fxgrad, a stance of torch.compile, `torch._dynamo.reset` | `changes`, `is_usual`, `FoundGraph` |
| whether a forward or a backward is around this step, or an optimizer follows backwards | `fits` |

p.grad and the hooks on parameters are looked at behind the graph, as for any whole step. Where something is not as it
was, the engine goes its own way, and refuses what there is to refuse.
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
from fxgrad.runtime.computed import nothing_follows, number_of_no_backward
from fxgrad.runtime.deliveries import Kinds, dtype_of_grad, fit
from fxgrad.runtime.forward import Forward
from fxgrad.runtime.store import Store
from fxgrad.samples.batch import Roles

MISSED = object()  # in place of what a step returns: nothing was computed

_shape, _stride, _data_ptr = attrgetter("shape"), Tensor.stride, Tensor.data_ptr  # for `map`, without Python frames


class RepeatedStep:
    """What one step found out, for the next."""

    def __init__(
        self, store: Store, forward: Forward, kinds: Kinds, inputs: tuple[Tensor, ...], graph: FoundGraph
    ) -> None:
        self.store, self.kinds, self.graph = store, kinds, graph
        self.forward = Forward(forward.size, forward.parameters, method=forward.method, state=forward.state)
        self.parameters = [*forward.parameters.values()]
        self.shapes, self.dtypes = [*map(_shape, inputs)], [*map(dtype_of_grad, self.parameters)]
        self.changes = len(CHANGES)

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

    def fits(self, inputs: tuple[Any, ...], roles: Roles) -> bool:
        """Return whether a step is like the one before it, as far as can be known before it is computed."""
        if not are_ordinary(inputs) or len(CHANGES) != self.changes:
            return False
        if any_mode() or not is_usual(self.graph.compiled) or not self.graph.fits(inputs):
            return False
        around = self.store.current.forward is not None or current_task() != -1 or wrapped_by_ddp() is not None
        return not (around or self.store.observers) and self._counts(inputs, roles)

    def _counts(self, inputs: tuple[Any, ...], roles: Roles) -> bool:
        """Count the samples where shapes are others; return False where that takes the engine."""
        shapes, before = [*map(_shape, inputs)], self.forward
        if shapes == self.shapes:
            before.repeats = True
            return True
        batch = roles.find(inputs, {})
        if not batch.size or batch.supposed or any(one.group_size != 1 for one in self.store.quantities):
            return False
        self.shapes = shapes
        self.forward = Forward(batch.size, before.parameters, method=before.method, state=before.state)
        return True

    def computed(self, inputs: tuple[Any, ...]) -> Any:
        """Run the graph, and return what the step returns."""
        current = self.store.current
        current.forward = self.forward
        try:
            return self.graph.call(*inputs)
        finally:
            current.forward = None

    def delivered(self, outputs: Any) -> bool:
        """Set p.grad and the results, if nobody else sees it; return False, and set nothing, where `stepped` has to."""
        forward, found = self.forward, self.forward.computed
        loss = outputs if type(outputs) is Tensor else outputs[0]
        if forward.at_backward or found is None or loss is not found.loss:
            return False
        if not nothing_follows(self.store, forward.names, self.parameters):
            return False
        if [*map(dtype_of_grad, self.parameters)] != self.dtypes:
            return False
        forward.computed = None
        self._deliver(found.grads)
        return True

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
