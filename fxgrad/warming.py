"""`fxgrad.warm_up`: compile a transformed model, or a whole step, before its first step.

A call compiles as a step would. In the place of the check of the first batch, the compiled graph runs forward and
backward on copies of its inputs (`Step`). The call ends there, before the model's own forward.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from fxgrad.capture.checks import check_sample_weight
from fxgrad.engine import Engine
from fxgrad.errors import BatchSizeError, OptionError, nearest
from fxgrad.first_batch.check import FirstBatch
from fxgrad.first_batch.step import Step
from fxgrad.forward_backward import ForwardBackward, engine_of_one_graph
from fxgrad.kernels.recurrent.packed import map_packs, with_indices
from fxgrad.quantities import Quantity
from fxgrad.samples.batch import SHARED, map_tensors
from fxgrad.tracing import settled_batch
from fxgrad.untouched import modules_kept, random_numbers_kept

MODES = ("train", "eval")


def warm_up(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    batch_sizes: Sequence[int] | None = None,
    modes: Sequence[str] = MODES,
    **kwargs: Any,
) -> None:
    """Compile forward and backward of a transformed model for ``model(*args, **kwargs)``, before the first step.

    A step at a size and in a mode that were warmed up compiles nothing. warm_up runs each compiled graph once, forward
    and backward, on copies of the inputs and buffers. Parameters, ``p.grad``, results, buffers, modes and random states
    stay as they are. Dynamo traces the model's Python code and the user's hooks; neither runs. No loss is needed: the
    compiled backward is the same for every loss. A function of `forward_backward` has its loss, and graphs of its own:
    for ``step(x, y)``, call ``warm_up(step, x, y)``.

    One graph serves all batches of two or more samples, and one serves batches of one. An empty batch needs none. The
    cost model uses the sizes of the first batch that is compiled, so pass one of the usual size.

    A graph also depends on the inputs' other sizes and dtypes, on frozen parameters and on autocast. Call warm_up for
    each case that occurs, under the same autocast as the step.

    Args:
        model: what `transform` or `forward_backward` returned.
        args: an example batch, as the model or the function takes it.
        batch_sizes: the numbers of samples. For each, the example is cut or its samples are repeated; inputs that all
            samples share stay as they are. None: the example's own size, and one where the model's options allow it.
        modes: "train", "eval" or both. If the model is in that mode already, its modules keep their own flags, such as
            a batch norm in eval mode. For the other mode, warm_up calls ``model.train()`` or ``model.eval()``.
        kwargs: more of the example batch, as the model takes it.

    Raises:
        FxgradError: any error of the model's first call, such as `MixedSamples`.
        OptionError: the model is not transformed, or has graph breaks (fullgraph=False); a size or a mode is unknown;
            another thread runs warm_up with the model.
        BatchSizeError: the example batch is empty.
        Exception: any error of the model itself.

    >>> model = transform(nn.Linear(3, 2), backend="eager")
    >>> warm_up(model, torch.randn(8, 3))
    >>> hasattr(model.weight, "grad_sample")
    False
    """
    called = _Called.of(model)
    engine = called.engine
    modes = _checked(batch_sizes, [modes] if isinstance(modes, str) else modes)
    weight = kwargs.pop("sample_weight", None) if engine.weighted is not None else None
    if not called.whole and not any(p.requires_grad for p in engine.model.parameters()):
        return  # runs as it is
    with _as_before(engine):
        for mode in modes:
            with modules_kept(called.view):
                if called.view.training != (mode == "train"):  # otherwise its modules may have modes of their own
                    called.view.train(mode == "train")
                _compile(called, batch_sizes, args, kwargs, weight)


@dataclass
class _Called:
    """What is warmed up: a model, by its call, or a function of `forward_backward`."""

    view: nn.Module
    engine: Engine
    method: str  # as the engine knows it
    run: Callable[..., Any]

    @classmethod
    def of(cls, model: nn.Module | Callable[..., Any]) -> _Called:
        need = "the whole model as one graph: what is behind a graph break is compiled in a step only"
        if isinstance(model, ForwardBackward):
            engine = engine_of_one_graph(model.model, "warm_up", need)
            return cls(model.model, engine, model.name, model)
        engine = engine_of_one_graph(model, "warm_up", need)
        assert isinstance(model, nn.Module)
        return cls(model, engine, "__call__", lambda *args, **kwargs: engine.call("__call__", args, kwargs))

    @property
    def whole(self) -> bool:
        return self.method in self.engine.steps


def _checked(sizes: Sequence[int] | None, modes: Sequence[str]) -> Sequence[str]:
    """Return the modes, after a look at them and at the sizes."""
    if not isinstance(sizes, Sequence | None):
        raise _no_sizes(sizes)
    for size in sizes or ():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise _no_sizes(size)
    for mode in modes:
        if mode not in MODES:
            raise OptionError(
                f"modes holds 'train' and 'eval', not {mode!r}",
                advice=nearest(mode, MODES, "Pass one of them, or both."),
            )
    return modes


def _no_sizes(given: Any) -> OptionError:
    return OptionError(f"batch_sizes has numbers of samples, not {given!r}", advice="Pass ints, such as (32, 1).")


class _Warm(BaseException):
    """Raised in the place of the user's forward, once all is compiled; no ``except Exception`` may stop it."""


class _Warming(FirstBatch):
    """A step of the compiled graph in the place of the check of the first batch; the backward compiles in it."""

    def __init__(self, quantities: Sequence[Quantity]) -> None:
        super().__init__(quantities)
        self.thread = threading.get_ident()

    def due(self, size: int, parameters: Mapping[str, Tensor]) -> bool:
        if threading.get_ident() != self.thread:
            raise _elsewhere()
        return True

    def check(
        self, graph: Any, args: Sequence[Any], parameters: Mapping[str, Tensor], weights: Sequence[Tensor]
    ) -> NoReturn:
        step = Step(graph, args, self.quantities, parameters, weights)
        step.results(step.inputs())
        raise _Warm


def _elsewhere() -> OptionError:
    return OptionError(
        "another thread runs warm_up with this model", advice="Call warm_up, and the model, in one thread."
    )


_ENTERING = threading.Lock()


@contextlib.contextmanager
def _as_before(engine: Engine) -> Iterator[None]:
    """Let calls end where they are compiled, whatever results are set; restore the engine behind them."""
    store, guard = engine.store, engine.store.guard
    with _ENTERING:
        if isinstance(engine.first_batch, _Warming):
            raise _elsewhere()
        first_batch, engine.first_batch = engine.first_batch, _Warming(engine.options.quantities)
    exchanges, store.exchanges = store.exchanges, {}  # other processes may warm up elsewhere, or not at all
    repeated, engine.repeated = engine.repeated, {}  # which would run no check of the first batch
    policy, released = store.policy, guard is not None and not guard.ids
    store.policy = "overwrite"
    try:
        with random_numbers_kept(engine.model), torch.enable_grad():
            yield
    finally:
        store.policy, engine.first_batch, store.exchanges = policy, first_batch, exchanges
        engine.repeated = repeated
        for exchange in exchanges.values():
            exchange.own.clear()
        if guard is not None and released:
            guard.release()


def _compile(
    called: _Called, sizes: Sequence[int] | None, args: tuple[Any, ...], kwargs: dict[str, Any], weight: Any
) -> None:
    """Compile for each size what the model's mode needs; every step has weights, which are ones by default."""
    indexed_args, indexed_kwargs = with_indices((args, kwargs), {})
    batch = settled_batch(called.engine, indexed_args, indexed_kwargs, called.method)
    if not batch.size:
        raise BatchSizeError("warm_up needs samples: the batch is empty", advice="Pass a batch of one or more.")
    if weight is not None and called.engine.weighted is not None:
        check_sample_weight(weight, called.engine.weighted.units(batch.size))
    for size in _default_sizes(called, batch.size) if sizes is None else sizes:
        if size:
            args_of_size, kwargs_of_size = _resized((args, kwargs), batch.dims, batch.size, size)
            with contextlib.suppress(_Warm), _saying_which(size, batch.size):
                called.run(*args_of_size, **kwargs_of_size)


@contextlib.contextmanager
def _saying_which(size: int, of_example: int) -> Iterator[None]:
    """Say of an error that it came at another size than the example's, from Python 3.11 on."""
    try:
        yield
    except Exception as error:
        if size != of_example and hasattr(error, "add_note"):
            error.add_note(
                f"This was raised in warm_up at a batch of {size}: pass batch_sizes=({of_example},) if none has {size}."
            )
        raise


def _default_sizes(called: _Called, size: int) -> list[int]:
    """Return the example's size, and one if the model takes single samples."""
    grouped = any(quantity.group_size > 1 for quantity in called.engine.options.quantities)
    fixed = called.engine.roles[called.method].batch_size is not None
    return [size] if size == 1 or grouped or fixed else [size, 1]


def _resized(nest: Any, dims: Mapping[int, int], old: int, new: int) -> Any:
    """Return a nest of inputs with its samples cut or repeated; what is passed twice stays one tensor."""
    made: dict[int, Tensor] = {}

    def packed(value: PackedSequence) -> PackedSequence:
        with torch.no_grad():
            samples = unpack_sequence(value)
            chosen = [samples[i % old] for i in range(new)]
            if value.sorted_indices is None:
                chosen.sort(key=len, reverse=True)
            result = pack_sequence(chosen, enforce_sorted=value.sorted_indices is None)
        result.data.requires_grad_(value.data.requires_grad)
        return result

    def tensor(x: Tensor) -> Tensor:
        if id(x) not in made:
            made[id(x)] = _repeated(x, dims.get(id(x), SHARED), new)
        return made[id(x)]

    return nest if old == new else map_tensors(map_packs(nest, packed), tensor)


def _repeated(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x with so many samples on a dimension, in the order of dimensions in memory that x has."""
    if dim < 0:
        return x
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])
    places = torch.arange(size, device=x.device) % x.shape[dim]
    rows = x.detach().permute(order).index_select(order.index(dim), places)
    return rows.permute([order.index(d) for d in range(x.dim())]).requires_grad_(x.requires_grad)
