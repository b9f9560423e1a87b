"""Compiled graphs as Dynamo calls them: what is checked at each call, and what goes in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fxgrad.capture.captured import SAMPLE_DIM
from fxgrad.compile.interface import Interface, Uniform
from fxgrad.compile.memory_limit import Room
from fxgrad.compile.unwrapped import called_to_see
from fxgrad.compile.whole_step import requires_gradient
from fxgrad.errors import GraphBreak, LostLayout, OptionError
from fxgrad.host.inductor import run_without_gradients
from fxgrad.quantities.read import Reading
from fxgrad.runtime.autograd_graph import leaves_behind
from fxgrad.runtime.forward import Forward, WholeResults
from fxgrad.runtime.placeholders import Placeholders, watch
from fxgrad.runtime.refusals import before_the_graph
from fxgrad.runtime.store import Store

_shape, _requires_grad = map(attrgetter, ("shape", "requires_grad"))  # for `map`, which adds no Python frame


def check_frozen(frozen: Mapping[int, str], args: Sequence[Any], now_frozen: Sequence[str] = ()) -> None:
    """Behind a graph break Dynamo of torch 2.11 does not look at requires_grad, and uses the same graph again."""
    changed = [name for i, name in frozen.items() if args[i].requires_grad] + list(now_frozen)
    if changed:
        raise GraphBreak(
            f"behind a graph break, what is trainable has changed since the first call: {', '.join(changed)}",
            advice="Call torch._dynamo.reset() after freezing or unfreezing, or remove the graph break.",
        )


def with_roles(outputs: Any, roles: Mapping[int, int]) -> Any:
    """Return a graph's outputs, marked for the graph behind a graph break."""
    for i, role in roles.items():
        setattr(outputs[i], SAMPLE_DIM, role)
    return outputs


def _named(function: Callable[..., Any]) -> str:
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return "a function of norms" if "<lambda>" in name else name.rpartition("<locals>.")[2]


def _fits(size: int, made_for: int | None) -> bool:
    return made_for in (size, None)


def _spread(compiled: Callable[..., Sequence[Any]], inputs: list[Any]) -> Sequence[Any]:
    return compiled(*inputs)


@dataclass
class Transformed:
    """A compiled graph with its gradient placeholders."""

    compiled: Callable[..., Any]
    interface: Interface
    store: Store
    batch_size: int
    room: Room
    read: Sequence[Reading]  # by functions of the user's
    shapes: Sequence[tuple[int | None, ...]]  # of what the quantities are given; None for sizes that vary

    whole: ClassVar[bool] = False  # whether it returns what arrives at the placeholders

    def __post_init__(self) -> None:
        self.names, self.positions = tuple(self.interface.trainable), tuple(self.interface.trainable.values())
        self.detached: Sequence[int] = self.positions  # inputs that go in without their gradients
        self.last_shapes: list[torch.Size] = []

    def __call__(self, *args: Any) -> Any:
        forward, parameters = self._checked(args)
        interface = self.interface
        placeholders = Placeholders.of(self.store, forward, self.names, parameters.values())
        inputs, given = self._inputs(forward, parameters, args)
        outputs = list(self.compiled(*inputs, *placeholders, *given))
        for i in interface.uniform:
            outputs[i] = Uniform.apply(outputs[i], placeholders[0])  # type: ignore[no-untyped-call]
        if interface.roles:
            with_roles(outputs, interface.roles)
        if torch.is_grad_enabled():
            self.store.began(forward, placeholders[0].grad_fn)
            watch(outputs, self.store, forward)
        return outputs

    def _checked(self, args: Sequence[Any]) -> tuple[Forward, dict[str, Tensor]]:
        """Return the running forward and the parameters of this graph, after a look at both."""
        n = self.size_of(args)
        interface, names = self.interface, self.names
        parameters = dict(zip(names, map(args.__getitem__, self.positions), strict=True))
        forward = self.store.current.forward or self._own_forward(n, parameters, args)
        if n != forward.size:
            raise self._other_size(n, forward.size)
        if self.read:
            self._check_read()
        if n > self.room.largest:
            self.room.check(n)
        if interface.frozen or names != forward.names:
            check_frozen(interface.frozen, args, sorted(parameters.keys() - forward.parameters.keys()))
        return forward, parameters

    def _inputs(
        self, forward: Forward, parameters: Mapping[str, Tensor], args: Sequence[Any]
    ) -> tuple[list[Any], list[Tensor]]:
        """Return the inputs with detached parameters, and what the quantities give; check what is written to."""
        given = [value for q in self.store.quantities for value in q.values(forward, parameters)]
        shapes = [*map(_shape, given)]
        if shapes != self.last_shapes:
            self._check_given(shapes)
        if self.interface.writes is not None:
            self.interface.writes.check((*args, *given))
        if forward.first_batch is not None:
            forward.first_batch.check(self, args, parameters, given)
        inputs = list(args)
        for i in self.detached:
            inputs[i] = args[i].detach()
        return inputs, given

    def _check_given(self, shapes: list[torch.Size]) -> None:
        """Raise where a quantity gives other tensors than its graph was made for, as when directions were added."""
        fits = [map(_fits, shape, sizes) for shape, sizes in zip(shapes, self.shapes, strict=False)]
        if [*map(len, shapes)] != [*map(len, self.shapes)] or not all(map(all, fits)):
            raise OptionError(
                f"{' and '.join(map(str, self.store.quantities))}: given are tensors of the shapes "
                f"{[*map(list, shapes)]}, and the graph was made for {[*map(list, self.shapes)]}",
                advice="Keep the names and shapes of vectors, or transform the model again.",
            )
        self.last_shapes = shapes

    def _check_read(self) -> None:
        """Raise where a function of the user's, which is traced once, would read something else by now."""
        for one in self.read:
            name = one.changed()
            if name is not None:
                raise OptionError(
                    f"{name!r}, which {_named(one.function)} reads, is not what it was when its graph was made",
                    advice="For a bound that changes pass a tensor as max_grad_norm, and write to it; for other "
                    "numbers transform the model again.",
                )

    def _own_forward(self, n: int, parameters: dict[str, Tensor], args: Sequence[Any]) -> Forward:
        """Begin a forward if torch.compile called the backend: this graph is all of it, or follows others of ours."""
        made = [arg for arg in args if isinstance(arg, Tensor) and arg.grad_fn is not None]
        if used := [leaf for leaf in leaves_behind(made) if isinstance(leaf, nn.Parameter)]:
            raise before_the_graph(used)
        forward = Forward(n, parameters)
        self.store.owned = frozenset(map(id, parameters.values()))
        if torch.is_grad_enabled():
            if self.store.guard is not None:
                self.store.guard.watch(parameters)
            self.store.check_clear(forward, forward.enclosing, "a forward")
        return forward

    def _other_size(self, n: int, size: int) -> LostLayout:
        """What was batched by its size at a graph break has to go on being so."""
        return LostLayout(
            f"a value that held the samples before has {n} rows for {size} samples now",
            advice="Pass in_dims= to say which inputs hold samples, and remove graph breaks between them.",
        )

    def size_of(self, args: Sequence[Any]) -> int:
        """Return the number of samples in the graph's inputs."""
        if self.batch_size == 1:
            return 1
        sizes = {args[i].shape[dim] for i, dim in self.interface.dims.items()}
        if len(sizes) != 1:
            raise LostLayout(
                f"values that held the same samples now have different sizes: {sorted(sizes)}",
                advice="Pass in_dims= to say which inputs hold samples.",
            )
        return int(sizes.pop())


@dataclass
class WholeStep(Transformed):
    """A compiled graph with its backward in it: what that found waits on the forward, for `deliver_computed`."""

    whole = True
    loss: int = 0  # outputs: the loss
    others: Sequence[int] = ()  # inputs: tensors that are no trainable parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run: Callable[[list[Any]], Sequence[Any]] = self._run_first

    def _run_first(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph, and see how later calls can run it."""
        outputs, graph = called_to_see(self.compiled, inputs)
        if graph is None:
            self.run = partial(_spread, self.compiled)
        else:  # nothing in it looks at gradients
            self.run, self.detached = partial(run_without_gradients, graph), ()
        return outputs

    def __call__(self, *args: Any) -> Any:
        forward = self.store.current.forward
        if forward is not None and forward.repeats:
            parameters = forward.parameters
            if self.read:
                self._check_read()
        else:
            forward, parameters = self._checked(args)
            if any(map(_requires_grad, map(args.__getitem__, self.others))):
                raise requires_gradient("an input")
        inputs, given = self._inputs(forward, parameters, args)
        placeholders = self.store.asked_of(forward, self.names).placeholders
        found = self.run([*inputs, *placeholders, *given])
        outputs = found[: len(found) - len(placeholders)]
        forward.computed = WholeResults(self.names, found[len(outputs) :], outputs[self.loss], not self.detached)
        return outputs
