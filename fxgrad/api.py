"""The public interface."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fxgrad.capture.checks import check_parameters
from fxgrad.capture.distributed import check_distribution, replicated
from fxgrad.capture.options import FREE, Inner, Options, check_flags, check_module, check_strategy, loss_scale
from fxgrad.capture.parallel import is_parallel
from fxgrad.capture.sharded import check_not_sharded, units_of
from fxgrad.compile.inductor import inner_compiler
from fxgrad.costs.choices import Strategy, overrides_of
from fxgrad.engine import Engine
from fxgrad.errors import OptionError, names_checked, nearest
from fxgrad.first_batch.check import FirstBatch, check_comparable
from fxgrad.graph.context import Mixing
from fxgrad.host.dynamo import OptimizedModule
from fxgrad.host.modules import is_compiled_in_place, is_filled, refuse_replicas
from fxgrad.quantities import GradSample, Quantity, check_quantities
from fxgrad.runtime.graph_stores import clear_results, latest_with
from fxgrad.runtime.guard import guard_for
from fxgrad.runtime.guard import release as release_parameters
from fxgrad.runtime.policies import Accumulate
from fxgrad.runtime.reports import OnResult
from fxgrad.runtime.store import Store, clear
from fxgrad.samples.batch import Roles

M = TypeVar("M", bound=nn.Module)


@names_checked
def transform(
    model: M,
    quantity: Quantity | Sequence[Quantity] | None = None,
    *,
    loss_reduction: str | float = "sum",
    batch_size: int | None = None,
    batch_first: bool = True,
    in_dims: Any = None,
    accumulate: Accumulate = "error",
    mixing: Mixing = "error",
    backend: str | Inner = "inductor",
    fullgraph: bool = True,
    strategy: Strategy | None = None,
    methods: Sequence[str] = (),
    check_first_batch: bool = False,
    memory_limit: int | str | None = FREE,
    on_result: OnResult | None = None,
) -> M:
    """Return a view of ``model`` whose backward leaves every sample's own gradient on the parameters.

    After ``loss.backward()``, ``p.grad_sample`` is ``[B, *p.shape]`` for every trainable parameter, in
    p's dtype: row i is the gradient of the loss by sample i's own copy of p. ``p.grad`` stays None.

    The view is a drop-in for the model: of its class, with the same Parameter, buffer and submodule
    objects, the same ``state_dict`` and the same ``training`` flag. The model passed in goes on working
    untransformed.

    Args:
        model: the model, not compiled.
        quantity: what to compute, ``fxgrad.GradSample()`` where None; or a list of quantities.
        loss_reduction: "sum", or "mean" where the loss is a mean over samples (multiplies by B), or the
            number the loss was divided by.
        batch_size: the number of samples; taken from the inputs where None. Inputs of another size are
            then shared by all samples.
        batch_first: whether samples are on dimension 0 of the inputs (else 1). An input from which a recurrent layer
            starts, [layers * directions, B, hidden], has them on dimension 1 either way.
        in_dims: as in ``torch.vmap``, one entry per positional argument; a dict names arguments.
            None for an input that all samples share.
        accumulate: what a backward does while results on parameters are still set: "error", "append", "sum" or
            "overwrite". Norms and variances of several backwards do not add up: "sum" is refused with them.
        mixing: "error" refuses ops that let samples influence each other; "allow" computes dL/dW(i).
        backend: the compiler behind: "inductor", "aot_eager", "eager" or a callable.
        fullgraph: whether the model has to be one graph. Between two graphs fxgrad does not see Python numbers, or
            branches, that are made of samples.
        strategy: how gradients are contracted where they are not asked for themselves (norms, clipped sums). None: the
            cost model chooses, use by use, for this machine; `fxgrad.explain` shows the choice and the reason. Or one
            of "rank_one" (one position per sample), "gram", "recompute" (materialised a few samples at a time, twice),
            "materialise" (materialised once, and kept until the end of the backward) and "rows" (tables), for every
            use that can have it; or a mapping from names of parameters, or patterns as in ``fnmatch``, to one each. A
            parameter named in full has to be able to. `GradSample` materialises every gradient, so beside it
            strategy= is an error.
        methods: names of further methods that a call may enter by, such as ("encode", "training_step"); in_dims may
            then be a dict by method. What one of them calls is part of its graph. `forward` always is an entrance;
            everything else of the model runs untransformed.
        check_first_batch: whether to look for samples that influence each other on the first batch with gradients and
            more than one sample (group), in two more steps of the compiled graph: with two samples changed, the
            results of the others must not move beyond rounding. The call returns what it would return without the
            check. An influence below rounding (of bfloat16, 5 %), or one that this batch and these weights do not
            show, goes unnoticed: `fxgrad.verify` is the full proof. In DistributedDataParallel the processes agree,
            so all of them have to call the model equally often until the check has passed.
        memory_limit: how many bytes the results of a batch, and the gradients kept on the way to them, may take: "free"
            for what is free on the device (in a container, of its limit), or a number, or None for no check. fxgrad
            checks before a batch runs that is larger than those before, and does not wait for the device.
        on_result: a function ``f(quantity, result)`` for training loops that call zero_grad() before you can read
            results. Each backward that reaches the parameters calls it once for each quantity, in their order, when
            everything is delivered; a backward that raises does not. ``result`` is that of `result`, or a dict
            ``{name: p.grad_sample}`` for a quantity that leaves results on parameters alone; where it leaves several,
            a tuple for each name. f runs in the thread of autograd that ends the backward, without a wait for the
            device. It may zero. Its exceptions leave ``backward()``, and everything delivered stays; results of
            further quantities are then not reported. Copies and pickles of the model hold f as Python copies and
            pickles it.

    Returns:
        An object of the model's class over the model's own state.

    Raises:
        OptionError: at once, where arguments do not fit; in the first call, where a strategy fits no use.
        MixedSamples: in the first call, where check_first_batch sees another sample's result move.
        MixedSamples, UnsupportedOp, LostLayout, BatchSizeError, GraphBreak, OutsideGraph: in the first call, naming
            the line of the model.
        NotEnoughMemory: before a batch runs that will not fit.
        UnclippedGrad: in the backward, naming the parameter.

    Guarantees:
        A model whose samples meet is refused, or computes dL/dW(i) under mixing="allow"; docs/guarantees.md lists the
        assumptions. While a quantity clips (`ClippedGrad`), p.grad is guarded: a gradient that arrives at a parameter
        past the transformed calls raises UnclippedGrad in ``backward()``. The guard ends with the returned object, or
        with `release`.

    Source: the definition of dL/dW(i) is that of ``torch.func.vmap(torch.func.grad(...))`` over single samples.

    >>> model = transform(nn.Linear(3, 2), backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> tuple(model.weight.grad_sample.shape)
    (5, 2, 3)
    """
    arguments = {name: value for name, value in locals().items() if name != "model"}  # the view is pickled as a call
    _check_model(model)
    quantities = check_quantities(GradSample() if quantity is None else quantity)
    inner_compiler(backend)
    check_strategy(strategy, quantities)
    overrides = overrides_of(strategy, _parameter_names(model))
    options = Options(
        quantities, loss_scale(loss_reduction), mixing, backend, fullgraph, overrides, memory_limit=memory_limit
    )
    options.check()
    entrances = _entrances(model, methods)
    store = Store(accumulate, quantities, guard_for(quantities, type(model).__name__, entrances[1:]), on_result)
    check_flags(batch_first=batch_first, fullgraph=fullgraph, check_first_batch=check_first_batch)
    by_method = _by_method(in_dims, entrances) if methods else dict.fromkeys(entrances, in_dims)
    roles = {name: Roles.of(getattr(model, name), batch_size, batch_first, by_method[name]) for name in entrances}
    first_batch = None
    if check_first_batch:
        check_not_sharded(model, "check_first_batch")
        first_batch = _first_batch(model, options)
        options.settled = frozenset({"mixing", "fullgraph"})
    engine = Engine(model, options, roles | {"__call__": roles["forward"]}, store, first_batch)
    return _view(model, engine, arguments)


def _entrances(model: nn.Module, methods: Sequence[str]) -> list[str]:
    """Return the methods that a call may enter by, forward first."""
    names = [methods] if isinstance(methods, str) else list(methods)
    for name in names:
        if not isinstance(name, str) or not callable(inspect.getattr_static(type(model), str(name), None)):
            raise OptionError(
                f"methods names {name!r}, which is no method of {type(model).__name__}",
                advice=nearest(
                    name,
                    _methods_of(type(model)),
                    "Name methods of the model's class that take samples, such as methods=('encode',).",
                ),
            )
    return list(dict.fromkeys(["forward", *(name for name in names if name != "__call__")]))


def _methods_of(kind: type) -> list[str]:
    """Return the methods that a class has beyond those of nn.Module, and forward."""
    own = (name for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name))
    return ["forward", *(name for name in own if callable(inspect.getattr_static(kind, name)))]


def _by_method(in_dims: Any, entrances: Sequence[str]) -> dict[str, Any]:
    """in_dims for each entrance: the same for all, or a dict whose keys are their names."""
    if isinstance(in_dims, dict) and in_dims and in_dims.keys() <= set(entrances):
        return {name: in_dims.get(name) for name in entrances}
    return dict.fromkeys(entrances, in_dims)


def _first_batch(model: nn.Module, options: Options) -> FirstBatch:
    """Return the check of the first batch, where the other options leave something to check."""
    if options.mixing != "error":
        raise OptionError("check_first_batch looks for what mixing='allow' allows", advice="Leave out one of them.")
    if not options.fullgraph:
        raise OptionError(
            "check_first_batch needs the whole model as one graph: it does not see what runs between two graphs",
            advice="Pass fullgraph=True, which names the line of a graph break.",
        )
    check_comparable(options.quantities, {name: p for name, p in model.named_parameters() if p.requires_grad})
    return FirstBatch(options.quantities)


def _check_model(model: Any) -> None:
    check_module("transform", model)
    if isinstance(model, OptimizedModule):
        raise OptionError(
            "transform takes the model itself, not a compiled one",
            advice="Transform the model before compiling: fxgrad compiles it.",
        )
    if is_compiled_in_place(model):
        raise OptionError(
            "the model is compiled in place by model.compile()",
            advice="Transform it without compiling: fxgrad compiles it.",
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if units_of(model) is None:  # FSDP2's shards are whole in a call, and looked at there
        parallel = is_parallel(model)  # so are the local parts of its DTensors
        check_distribution(model, {} if parallel else trainable)
        if not parallel:
            check_parameters(trainable)
    if engine_of(model) is not None:
        raise OptionError("the model is already transformed", advice="Transform the original model.")


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """Return every name of each parameter, and the first, which it goes by."""
    first = {id(p): name for name, p in model.named_parameters()}
    return {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def engine_of(model: Any) -> Engine | None:
    """Return the engine of a transformed model; None for any other."""
    return getattr(type(model), "_fxgrad_engine", None)


def _view(model: M, engine: Engine, arguments: dict[str, Any]) -> M:
    """Another object over the model's own state, whose class runs calls through the engine."""
    original = type(model)

    class View(original):  # type: ignore[misc, valid-type]
        _fxgrad_engine = engine
        _fxgrad_arguments = arguments

        def zero_grad(self, set_to_none: bool = True) -> None:
            engine.model.zero_grad(set_to_none)
            _clear_results(list(engine.model.parameters()), engine)

        def compile(self, *_: Any, **__: Any) -> None:
            raise OptionError(
                "compile() of a transformed model: it would compile the original, which shares its state",
                advice="Leave it out: fxgrad compiles each call, with the compiler that backend= names.",
            )

        def __reduce__(self) -> Any:
            return _rebuild, (engine.model, arguments)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(View, name, getattr(original, name))
    refuse_replicas(View, replicated)
    for name in engine.roles:
        setattr(View, name, _entrance(engine, name, getattr(original, name)))
    view = original.__new__(View) if original.__new__ is object.__new__ else object.__new__(View)
    object.__setattr__(view, "__dict__", model.__dict__)
    if engine.units is not None:
        engine.units.known_as(view)
    guard = engine.store.guard
    if guard is not None:
        guard.view = weakref.ref(view)
        guard.modules[view] = ""
        weakref.finalize(view, guard.release).atexit = False
    return view


def _entrance(engine: Engine, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method whose calls run through the engine."""

    @functools.wraps(original, updated=())  # not what decorators left on it: Dynamo reads its own marks there
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return engine.call(name, args, kwargs)

    return method


def _rebuild(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    if not is_filled(model):
        raise OptionError(
            "a transformed model cannot be copied while the model refers to it, as accelerator.prepare makes it do",
            advice="Copy the model before that, such as AveragedModel(model) of the original, or save a state_dict().",
        )
    return transform(model, **arguments)


def zero_grad(model: nn.Module) -> None:
    """Clear ``.grad`` and every per-sample attribute of a model's parameters.

    Args:
        model: what `transform` returned, or any other module.

    >>> model = transform(nn.Linear(3, 2), backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> zero_grad(model)
    >>> getattr(model.weight, "grad_sample", None)
    """
    (_zero_undisturbed if torch.compiler.is_dynamo_compiling() else _zero)(model)


def _zero(model: nn.Module) -> None:
    engine = engine_of(model)
    if engine is None:
        check_module("zero_grad", model)
    parameters = list(model.parameters() if engine is None else engine.parameters().values())
    for parameter in parameters:
        parameter.grad = None
    _clear(parameters, engine)


_zero_undisturbed = torch.compiler.disable(_zero, reason="fxgrad's results are no part of a graph")


def _clear_results(parameters: Sequence[nn.Parameter], engine: Engine | None) -> None:
    (_clear_undisturbed if torch.compiler.is_dynamo_compiling() else _clear)(parameters, engine)


def _clear(parameters: Sequence[nn.Parameter], engine: Engine | None) -> None:
    clear(parameters)
    if engine is None:
        clear_results(parameters)
    else:
        engine.clear_results(parameters)


_clear_undisturbed = torch.compiler.disable(_clear, reason="fxgrad's results are no part of a graph")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def release(model: nn.Module) -> None:
    """End the guard on a model's p.grad that clipping quantities set up; the next transformed call sets it up again.

    The guard also ends when the transformed object is deleted.

    Args:
        model: what `transform` returned, or the model that was transformed.

    >>> import torch, fxgrad
    >>> model = torch.nn.Linear(3, 2)
    >>> private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    Traceback (most recent call last):
        ...
    fxgrad.errors.UnclippedGrad: ...
    >>> release(private)
    >>> model(torch.ones(5, 3)).sum().backward()
    """
    check_module("release", model)
    engine = engine_of(model)
    if engine is not None and engine.store.guard is not None:
        engine.store.guard.release()
    elif engine is None:
        release_parameters(model.parameters())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def result(model: nn.Module | Callable[..., Any], quantity: Quantity) -> Any:
    """Return what the last backward of a transformed model computed of a quantity, over all parameters.

    Args:
        model: the transformed model.
        quantity: the one passed to `transform`, or one equal to it.

    Returns:
        For `NormSample` the norms ``[B]``; for `ClippedGrad` a `Clipping`; for `GradDot` ``[B]`` or ``[B, K]``; for
        `GradGram` ``[B, B]``; for `GradProjection` ``[B, dim]``.

    Raises:
        OptionError: the model is not transformed for this quantity, or no backward has run since zero_grad().

    >>> norms = NormSample()
    >>> model = transform(nn.Linear(3, 2), quantity=norms, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> tuple(result(model, norms).shape)
    (5,)
    """
    engine = engine_of(model)
    if engine is not None:
        return engine.store.result(quantity)
    if isinstance(model, OptimizedModule):
        store = latest_with(quantity, model.parameters())
        if store is None:
            raise OptionError(
                "result has nothing of this model: no backward has run since zero_grad(), or another model has used "
                "its graph since",
                advice="Pass the very quantity that options= has, and read its result before another model's step.",
            )
        return store.result(quantity)
    raise OptionError("result takes a transformed model", advice="Pass what fxgrad.transform returned.")
