"""`make_private`: Opacus's preparation of a training, with fxgrad in place of Opacus's hooks."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import opacus
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from fxgrad.api import engine_of, transform
from fxgrad.capture.options import Inner, loss_scale
from fxgrad.capture.parallel import check_not_parallel
from fxgrad.engine import Engine
from fxgrad.errors import OptionError
from fxgrad.opacus.arguments import ADAPTIVE, OPTIONAL, check_names, check_number, check_values, names_of_accountant
from fxgrad.opacus.checked_step import optimizers_of
from fxgrad.opacus.checkpoints import draw_anew, give_wrapper_names, load_names_of_opacus
from fxgrad.opacus.clipping import check_optimizer, check_written, quantity_for, serves, set_bounds
from fxgrad.opacus.fixing import FIRST, fix_in_place
from fxgrad.opacus.ledger import numbers_of
from fxgrad.opacus.optimizers import check_steps
from fxgrad.opacus.processes import WRAPPERS, check_processes, communicate_in_steps, draw_every_batch, processes
from fxgrad.opacus.shards import noise_of_shards, unit_of
from fxgrad.opacus.validating import check_not_wrapped, prepared_by_opacus
from fxgrad.quantities import ClippedGrad, Quantity

M = TypeVar("M", bound=nn.Module)

SPENT = (
    "make_private_with_epsilon with a non-zero privacy budget already spent: the noise is that of a budget of which "
    "nothing is spent, so the whole will cost more than target_epsilon"
)


def make_private(
    engine: opacus.PrivacyEngine,
    *,
    module: M,
    optimizer: optim.Optimizer,
    data_loader: DataLoader[Any],
    noise_multiplier: float,
    max_grad_norm: float | Sequence[float] | Tensor,
    loss_reduction: str = "mean",
    criterion: nn.Module | None = None,
    poisson_sampling: bool = True,
    clipping: str | Callable[[Tensor], Tensor] = "flat",
    one_backward: bool = False,
    independent: bool = False,
    fix: bool = False,
    backend: str | Inner = "inductor",
    check_first_batch: bool = True,
    **arguments: Any,
) -> tuple[M, DPOptimizer, DataLoader[Any]]:
    """Prepare private training as Opacus's ``engine.make_private``, with fxgrad's gradients: no hooks, no wrapper.

    Train with the returned objects, as with Opacus::

        model, optimizer, loader = fxgrad.opacus.make_private(PrivacyEngine(), module=model, ...)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()     # p.grad_sample: [B, *p.shape]
            optimizer.step()                            # clips each row, adds noise, counts the step

    The step is Opacus's: ``p.grad`` becomes ``(Σ_i min(1, C / (|g_i| + 1e-6)) g_i + σ C N(0, 1)) / E``. E is the
    expected batch size; for ``loss_reduction="sum"`` there is no division. g_i is the gradient of sample i's loss over
    all parameters of the optimizer, in p's units. Batches may be empty. Opacus's ``BatchMemoryManager`` may split them.

    Args:
        engine: an ``opacus.PrivacyEngine``; its accountant counts every step.
        module: the model, in training mode, or one that `fxgrad.transform` made with options. Either may be wrapped in
            DistributedDataParallel or Opacus's class of that name, whose model is then replaced. The processes then
            communicate only in steps: the averaging of DistributedDataParallel is turned off. Or one that FSDP2's
            ``fully_shard`` divided, with one_backward=True and check_first_batch=False: each process adds the noise of
            its own shards, from a secret seed; noise_generator, if given, is used once, for seeds.
        optimizer: any optimizer over parameters of the model.
        data_loader: the loader whose dataset and mean batch size Poisson sampling uses.
        noise_multiplier: σ, the noise's standard deviation over max_grad_norm: 0 or more, and finite.
        max_grad_norm: C, positive and finite; for ``clipping="per_layer"`` a list, one number for each parameter of the
            optimizer. C may change between steps, by Opacus's schedulers, by assigning ``optimizer.max_grad_norm``, or,
            if it is a 0-dim tensor on the CPU, by writing to that: nothing compiles again.
        loss_reduction: "mean" or "sum", as in the loss that you call backward on. fxgrad and Opacus both use this
            value; with two different values the gradients would silently be wrong by a factor of the batch size.
        criterion: the loss, if it is a module: its ``reduction`` is compared with loss_reduction.
        poisson_sampling: whether to replace the loader by one that draws each sample independently. Two batches for
            one step are then refused, as in Opacus. Without it they add up, and the accountant counts them.
        clipping: "flat", one norm over all parameters; "per_layer"; or "adaptive", with further arguments. With
            one_backward=True also "automatic", ``C / (n + 0.01)`` of the norm n (Bu et al. 2022), or a function that
            maps the norms ``[B]`` to weights ``[B]``, limited to ``±C / n``.
        one_backward: whether the backward itself clips, by `fxgrad.ClippedGrad`. No per-sample gradient is stored, and
            p.grad is the clipped sum. ``fxgrad.result(model, optimizer.quantity)`` has the norms.
        independent: whether each of several processes trains a separate model; otherwise a module without a wrapper is
            refused there.
        fix: whether to replace layers inside the module that the validator refuses, such as BatchNorm in training mode,
            and Opacus's own layers, as `fxgrad.opacus.fix` does. The optimizer's parameters stay those of the module:
            GroupNorm gets BatchNorm's Parameter objects, with the values 1 and 0.
        backend: the inner compiler, as in `fxgrad.transform`; for a module that is not transformed yet.
        check_first_batch: whether the first batch is checked for samples that influence each other, as in
            `fxgrad.transform`; for a module that is not transformed yet. Each of several processes checks its batch.
            They agree in the step, which raises in all of them.
        arguments: Opacus's further arguments: noise_generator and rand_on_empty; and for ``clipping="adaptive"``
            target_unclipped_quantile, clipbound_learning_rate, max_clipbound, min_clipbound and unclipped_num_std.

    Returns:
        The transformed model (or its wrapper), Opacus's optimizer (a `OneBackwardOptimizer` or an
        `AdaptiveOptimizer` if requested), and the loader to train with. The optimizer cannot be copied.

    Raises:
        OptionError: loss_reduction, criterion, and the options of a transformed module do not agree; a transformed
            module allows samples to mix, or fixes the batch size under Poisson sampling; noise and bounds are not
            positive and finite; several processes train, and the module is not wrapped; FSDP2 divided it, and an
            argument is not supported for that; ``parallelize_module`` divided it.
        OptionError: for fix=True, the optimizer holds parameters that the fixed module does not have, or has stepped
            those of a BatchNorm; the module is wrapped, or is itself to be replaced.
        UnknownArgument (a TypeError): the name of an argument is misspelt or unknown.
        MixedSamples: in a call of the model, if one sample influences another in the check of the first batch.
        opacus.validators.errors.UnsupportedModuleError: Opacus's validator refuses the model (`validate`).

    Source: Abadi et al., Deep Learning with Differential Privacy (2016), https://arxiv.org/abs/1607.00133.

    >>> import torch, warnings
    >>> warnings.simplefilter("ignore")                     # Opacus reminds of its secure random numbers
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randint(2, (32,)))
    >>> model, engine = nn.Linear(3, 2), opacus.PrivacyEngine(accountant="rdp")
    >>> model, optimizer, loader = make_private(
    ...     engine, module=model, optimizer=optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, 8),
    ...     noise_multiplier=1.0, max_grad_norm=1.0, backend="eager")
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    >>> engine.get_epsilon(delta=1e-3) > 0
    True
    """
    check_names(make_private, arguments, (*OPTIONAL, *ADAPTIVE))
    check_values(optimizer, noise_multiplier, max_grad_norm, clipping, one_backward, arguments)
    check_reduction(loss_reduction, criterion)
    wrapper = module if isinstance(module, WRAPPERS) else None
    inner: Any = module if wrapper is None else wrapper.module
    if isinstance(inner, nn.Module):
        check_not_wrapped(inner)
    unit = unit_of(
        inner,
        engine,
        wrapped=wrapper is not None,
        one_backward=one_backward,
        clipping=clipping,
        poisson_sampling=poisson_sampling,
        independent=independent,
        fix=fix,
        check_first_batch=check_first_batch,
    )
    if unit is None and isinstance(inner, nn.Module):
        check_not_parallel(inner, "make_private")
    check_processes(wrapper, independent or unit is not None, clipping)
    if fix:
        _fix(module, optimizer)
    if isinstance(inner, nn.Module):
        check_optimizer(inner, optimizer)
    view, transformed, quantity = _transformed(
        inner,
        poisson_sampling,
        quantity=quantity_for(clipping, max_grad_norm, one_backward, inner, optimizer),
        loss_reduction=loss_reduction,
        accumulate="error" if poisson_sampling or one_backward else "append",
        backend=backend,
        check_first_batch=check_first_batch,
    )
    check_written(quantity, clipping, max_grad_norm)
    bound = math.hypot(*numbers_of(max_grad_norm)) if one_backward else max_grad_norm
    private, loader = prepared_by_opacus(
        engine,
        module=next(one for one in (unit, wrapper, transformed.model) if one is not None),
        optimizer=optimizer,
        data_loader=data_loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=bound,
        loss_reduction=loss_reduction,
        poisson_sampling=poisson_sampling,
        clipping="flat" if one_backward and clipping != "adaptive" else clipping,
        **arguments,
    )
    _set_expected_batch_size(private, loader)
    transformed.store.alone = quantity  # two batches in one backward would add up their rows
    clipped = quantity if isinstance(quantity, ClippedGrad) else None
    noise = None if unit is None else noise_of_shards(transformed, arguments.get("noise_generator"))
    check_steps(private, transformed, clipped, poisson_sampling=poisson_sampling, noise=noise)
    if len(engine.accountant) and not optimizers_of(engine):  # steps of a checkpoint
        draw_anew(private, loader)
    private.remember(engine, loader)
    set_bounds(quantity, max_grad_norm)
    give_wrapper_names(view)
    private.in_one_process = wrapper is None and unit is None and not independent
    if unit is not None:
        draw_every_batch(loader)
    if wrapper is None:
        return view, private, loader
    wrapper.module = view
    load_names_of_opacus(wrapper)
    communicate_in_steps(wrapper, loader, private, transformed.first_batch)
    return module, private, loader


def make_private_with_epsilon(
    engine: opacus.PrivacyEngine,
    *,
    data_loader: DataLoader[Any],
    target_epsilon: float,
    target_delta: float,
    epochs: float,
    epsilon_tolerance: float = 0.01,
    **arguments: Any,
) -> tuple[Any, DPOptimizer, DataLoader[Any]]:
    """Call `make_private` with the noise that keeps ``epochs`` epochs within ``(target_epsilon, target_delta)``.

    Args:
        engine, data_loader: as in `make_private`.
        target_epsilon, target_delta: the privacy budget (pure numbers).
        epochs: the number of passes over the loader that the budget has to cover.
        epsilon_tolerance: how far below target_epsilon the result may stay.
        arguments: those of `make_private`, and those of the engine's accountant: ``alphas`` of "rdp", ``eps_error`` and
            ``delta_error`` of "prv", ``poisson`` of "gdp".

    Returns, raises: as `make_private`; ValueError if no noise is enough. Like Opacus, it warns if the accountant has
    counted steps before: the noise accounts only for later steps.

    >>> import torch, warnings
    >>> warnings.simplefilter("ignore")
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3))
    >>> model, engine = nn.Linear(3, 2), opacus.PrivacyEngine(accountant="rdp")
    >>> model, optimizer, loader = make_private_with_epsilon(
    ...     engine, module=model, optimizer=optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, 8),
    ...     target_epsilon=2.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0)
    >>> round(optimizer.noise_multiplier, 1)
    1.8
    """
    within = arguments_within(
        engine,
        make_private,
        arguments,
        data_loader=data_loader,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        epochs=epochs,
        epsilon_tolerance=epsilon_tolerance,
    )
    return make_private(engine, data_loader=data_loader, **within)


def arguments_within(
    engine: opacus.PrivacyEngine,
    prepare: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    data_loader: DataLoader[Any],
    target_epsilon: float,
    target_delta: float,
    epochs: float,
    epsilon_tolerance: float,
) -> dict[str, Any]:
    """Return the arguments for make_private, with the noise that keeps to a budget.

    Args:
        engine: its accountant computes the noise; and may have arguments of its own.
        prepare: the function or method that gets the arguments.
        arguments: the user's, of both.
        data_loader, target_epsilon, target_delta, epochs, epsilon_tolerance: as in `make_private_with_epsilon`.
    """
    accountants = names_of_accountant(engine.accountant)
    own = inspect.signature(prepare).parameters.keys() | inspect.signature(make_private).parameters.keys()
    passed_on = own - {"engine", "noise_multiplier", "arguments", "kwargs"}
    check_names(make_private_with_epsilon, arguments, (*accountants, *sorted(passed_on), *OPTIONAL, *ADAPTIVE))
    check_number("epsilon_tolerance", epsilon_tolerance)
    if len(engine.accountant):
        warnings.warn(SPENT, stacklevel=3)
    noise_multiplier = get_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=1 / len(data_loader),
        epochs=epochs,
        accountant=engine.accountant.mechanism(),
        epsilon_tolerance=epsilon_tolerance,
        **{name: arguments[name] for name in accountants if name in arguments},
    )
    rest = {name: value for name, value in arguments.items() if name not in accountants}
    return {"noise_multiplier": noise_multiplier, **rest}


def _set_expected_batch_size(private: DPOptimizer, loader: DataLoader[Any]) -> None:
    """Set E to ``len(dataset) / len(loader)``, rounded down, and at least 1; Opacus's is of one process.

    Opacus computes ``int(N * (1 / batches))``, whose product may fall just below an integer: 49 * (1 / 49) gives 0.
    """
    expected = max(1, len(loader.dataset) // len(loader))  # type: ignore[arg-type]  # Opacus has taken its length, too
    private.expected_batch_size = expected / processes() if isinstance(private, DistributedDPOptimizer) else expected


def _fix(module: nn.Module, optimizer: optim.Optimizer) -> None:
    if isinstance(module, WRAPPERS):
        raise OptionError(
            f"fix=True replaces layers, and {type(module).__name__} has taken note of those that the model has",
            advice=f"Do it before the model is wrapped. {FIRST}",
        )
    fix_in_place(module, optimizer)


def _transformed(model: Any, poisson_sampling: bool, **options: Any) -> tuple[Any, Engine, Quantity]:
    """Transform the model with these options, or check that it is already transformed with matching ones."""
    model = transform(model, **options) if engine_of(model) is None else model
    engine = engine_of(model)
    assert engine is not None
    quantity = _check_options(engine, poisson_sampling, options)
    engine.options.settled |= {"mixing"}
    return model, engine, quantity


def check_reduction(loss_reduction: str, criterion: Any) -> None:
    """Raise if the loss reduces the samples in another way than loss_reduction says."""
    if loss_reduction not in ("mean", "sum"):
        raise OptionError(
            f"loss_reduction has to be 'mean' or 'sum' for Opacus, not {loss_reduction!r}",
            advice="Say what the loss you call backward on does with the samples.",
        )
    reduction = getattr(criterion, "reduction", loss_reduction)
    if reduction != loss_reduction:
        raise OptionError(
            f"the criterion's reduction is {reduction!r} and loss_reduction is {loss_reduction!r}: "
            "gradients would be wrong by the batch size",
            advice=f"Pass loss_reduction={reduction!r}, or a criterion with reduction={loss_reduction!r}.",
        )


def _check_options(engine: Engine, poisson_sampling: bool, needed: Mapping[str, Any]) -> Quantity:
    """Check that a transformed model has all options that the clipping relies on; return its quantity for it."""
    options, loss_reduction, accumulate = engine.options, needed["loss_reduction"], needed["accumulate"]
    if options.loss_scale != loss_scale(loss_reduction):
        raise OptionError(
            f"the model is transformed for another loss than loss_reduction={loss_reduction!r}: "
            "gradients would be wrong by the batch size",
            advice=f"Transform it with loss_reduction={loss_reduction!r}, or pass the one it was transformed with.",
        )
    if options.mixing != "error":
        raise OptionError(
            "the model is transformed with mixing='allow': clipping rows does not bound what one sample changes",
            advice="Transform it without mixing=.",
        )
    found = [q for q in options.quantities if serves(q, needed["quantity"], engine.parameters())]
    if not found:
        raise OptionError(
            f"the model computes {', '.join(map(str, options.quantities))}, and Opacus's optimizer needs "
            f"{needed['quantity']}",
            advice="Transform it for that, or pass the model itself, which make_private transforms.",
        )
    if engine.store.policy not in ("error", accumulate):
        raise OptionError(
            f"the model is transformed with accumulate={engine.store.policy!r}: rows would not belong to one batch",
            advice=f"Transform it with accumulate={accumulate!r}.",
        )
    size = engine.roles["forward"].batch_size
    if poisson_sampling and size is not None:
        raise OptionError(
            f"the model is transformed with batch_size={size}, and Poisson sampling draws batches of every size: "
            "inputs of another size would be shared by all samples",
            advice="Transform it without batch_size=, with in_dims= for inputs that all samples share.",
        )
    return found[0]
