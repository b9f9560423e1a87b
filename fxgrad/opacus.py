"""Differentially private training: fxgrad's gradients under Opacus's optimizers, loaders and accountants.

Opacus's mode "no_op" leaves the gradients to somebody else: it validates the model, samples the batches, clips
``p.grad_sample``, adds noise and counts what privacy it costs. This module puts fxgrad into the empty place, and
refuses what would make the two disagree without a word.

Importing it needs Opacus (``pip install "fxgrad[opacus]"``); nothing else of fxgrad does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import nn, optim
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fxgrad.api import engine_of, transform
from fxgrad.capture import Engine
from fxgrad.errors import MissingPackage, OptionError
from fxgrad.options import Inner, loss_scale
from fxgrad.quantities import GradSample

try:
    import opacus
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.optimizers import DPOptimizer
    from opacus.validators.errors import IllegalModuleConfigurationError, UnsupportedModuleError
    from opacus.validators.module_validator import ModuleValidator
except ImportError as error:
    raise MissingPackage(
        "fxgrad.opacus needs Opacus, which is not installed",
        where=f"{type(error).__name__}: {error}",
        advice='Install it: pip install "fxgrad[opacus]".',
    ) from error

M = TypeVar("M", bound=nn.Module)

WRAPPERS = (DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel)
COVERED = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
"""Layers that Opacus would have replaced by its own: fxgrad takes them as they are."""


def make_private(
    engine: opacus.PrivacyEngine,
    *,
    module: M,
    optimizer: optim.Optimizer,
    data_loader: DataLoader[Any],
    noise_multiplier: float,
    max_grad_norm: float | Sequence[float],
    loss_reduction: str = "mean",
    criterion: nn.Module | None = None,
    poisson_sampling: bool = True,
    backend: str | Inner = "inductor",
    **arguments: Any,
) -> tuple[M, DPOptimizer, DataLoader[Any]]:
    """Opacus's ``engine.make_private``, with per-sample gradients by fxgrad: no hooks, no wrapped model.

    Train with what it returns, as with Opacus::

        model, optimizer, loader = fxgrad.opacus.make_private(PrivacyEngine(), module=model, ...)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()     # p.grad_sample: [B, *p.shape]
            optimizer.step()                            # clips each row, adds noise, counts the step

    The step is Opacus's own: ``p.grad`` becomes ``(Σ_i min(1, C / (|g_i| + 1e-6)) g_i + σ C N(0, 1)) / E`` with E
    the expected batch size, or without ``/ E`` where ``loss_reduction="sum"``; g_i is the gradient of sample i's own
    loss over all parameters of the optimizer, in p's units. Batches may be empty, and may be split with Opacus's
    ``BatchMemoryManager``.

    Args:
        engine: an ``opacus.PrivacyEngine``; its accountant is told of every step.
        module: the model, in training mode; or one that `fxgrad.transform` made, with options of its own, or either
            of them in DistributedDataParallel or in Opacus's class of that name, whose model is then replaced.
        optimizer: any optimizer over parameters of the model.
        data_loader: what Poisson sampling takes its dataset and mean batch size from.
        noise_multiplier: σ, the noise's standard deviation over max_grad_norm.
        max_grad_norm: C; for ``clipping="per_layer"`` a list, one number for each parameter.
        loss_reduction: "mean" or "sum": what the loss you call backward on does with the samples. Both sides learn it
            from here: were they told apart, gradients would be wrong by the batch size and nothing would say so.
        criterion: the loss, if it is a module: its ``reduction`` is compared with loss_reduction.
        poisson_sampling: whether to replace the loader by one that draws each sample on its own. Two batches for one
            step are then refused, as Opacus does; without it they add up (and the accountant counts them).
        backend: the compiler behind, as in `fxgrad.transform`; for a module that is not transformed yet.
        arguments: the rest of Opacus's: clipping ("flat", "per_layer", "adaptive", with its own), noise_generator,
            rand_on_empty.

    Returns:
        The transformed model (or its wrapper), Opacus's optimizer, and the loader to train with.

    Raises:
        OptionError: loss_reduction, criterion, and the options of a transformed module do not agree, or a
            transformed module allows samples to mix.
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
    _check_reduction(loss_reduction, criterion)
    accumulate = "error" if poisson_sampling else "append"
    plain, wrapper = _unwrapped(module)
    view = _transformed(plain, loss_reduction, accumulate, backend)
    with _validating(engine):
        _, private, loader = engine.make_private(
            module=_original(module),
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            grad_sample_mode="no_op",
            wrap_model=False,
            **arguments,
        )
    if wrapper is None:
        return view, private, loader
    wrapper.module = view
    return module, private, loader


def make_private_with_epsilon(
    engine: opacus.PrivacyEngine,
    *,
    data_loader: DataLoader[Any],
    target_epsilon: float,
    target_delta: float,
    epochs: float,
    **arguments: Any,
) -> tuple[Any, DPOptimizer, DataLoader[Any]]:
    """`make_private` with as much noise as keeps ``epochs`` epochs within ``(target_epsilon, target_delta)``.

    Args:
        engine, data_loader, arguments: as in `make_private`, all but noise_multiplier.
        target_epsilon, target_delta: the privacy budget (pure numbers).
        epochs: how many passes over the loader it has to last for.

    Returns, raises: as `make_private`; ValueError where no noise is enough.

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
    noise_multiplier = get_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=1 / len(data_loader),
        epochs=epochs,
        accountant=engine.accountant.mechanism(),
    )
    return make_private(engine, data_loader=data_loader, noise_multiplier=noise_multiplier, **arguments)


def validate(module: nn.Module) -> None:
    """Opacus's validator, which lets the layers pass that fxgrad takes as they are.

    These are nn.RNN, nn.LSTM, nn.GRU and nn.MultiheadAttention, and BatchNorm in eval mode. A norm layer in training
    mode is looked at even if nothing of it is trainable: its running statistics are made of the samples, too.

    Raises:
        opacus.validators.errors.UnsupportedModuleError: with every reason.

    >>> validate(nn.LSTM(3, 4))
    >>> validate(nn.BatchNorm1d(3, affine=False))
    Traceback (most recent call last):
        ...
    opacus.validators.errors.UnsupportedModuleError: ...
    """
    found = [] if module.training else [IllegalModuleConfigurationError("Model needs to be in training mode")]
    for name, part in module.named_modules():
        kind = _class_of(part)
        if kind in COVERED or kind not in ModuleValidator.VALIDATORS or not _matters(part):
            continue
        reasons = ModuleValidator.VALIDATORS[kind](part)
        found += [type(reason)(f"{kind.__name__} '{name}': {reason}") for reason in reasons]
    if found:
        raise UnsupportedModuleError(found)


def _matters(part: nn.Module) -> bool:
    if isinstance(part, _NormBase) and part.training:
        return True
    return not isinstance(part, _BatchNorm) and any(p.requires_grad for p in part.parameters(recurse=False))


def _class_of(part: nn.Module) -> type[nn.Module]:
    """The user's own class also where the module is transformed."""
    transformed = engine_of(part)
    return type(part if transformed is None else transformed.model)


@contextlib.contextmanager
def _validating(engine: opacus.PrivacyEngine) -> Iterator[None]:
    """Let this engine validate as `validate` does, for as long as it lasts."""

    def own(*, module: nn.Module, optimizer: Any, data_loader: Any) -> None:
        validate(module)

    engine.validate = own  # in front of the class's method
    try:
        yield
    finally:
        del engine.validate


def _unwrapped(module: nn.Module) -> tuple[Any, nn.Module | None]:
    """The model, and what distributes it."""
    return (module.module, module) if isinstance(module, WRAPPERS) else (module, None)


def _original(module: nn.Module) -> nn.Module:
    transformed = engine_of(module)
    return module if transformed is None else transformed.model


def _transformed(model: Any, loss_reduction: str, accumulate: Any, backend: str | Inner) -> Any:
    """The model as fxgrad's: transformed here, or found to be transformed in the same sense."""
    engine = engine_of(model)
    if engine is None:
        return transform(model, loss_reduction=loss_reduction, accumulate=accumulate, backend=backend)
    _check_options(engine, loss_reduction, accumulate)
    return model


def _check_reduction(loss_reduction: str, criterion: nn.Module | None) -> None:
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


def _check_options(engine: Engine, loss_reduction: str, accumulate: str) -> None:
    """A model transformed before: everything on which the clipping rests has to be as here."""
    options = engine.options
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
    if not isinstance(options.quantity, GradSample):
        raise OptionError(
            f"the model computes {options.quantity}, and Opacus's optimizer clips grad_sample",
            advice="Transform it with quantity=fxgrad.GradSample().",
        )
    if engine.store.policy not in ("error", accumulate):
        raise OptionError(
            f"the model is transformed with accumulate={engine.store.policy!r}: rows would not belong to one batch",
            advice=f"Transform it with accumulate={accumulate!r}.",
        )
