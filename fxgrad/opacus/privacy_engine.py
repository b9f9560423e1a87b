"""`PrivacyEngine`: an Opacus script runs with fxgrad's gradients after a change of one import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import opacus
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from fxgrad.errors import OptionError, nearest
from fxgrad.opacus.checked_step import optimizers_of
from fxgrad.opacus.checkpoints import Continuing, Loading, draw_anew
from fxgrad.opacus.criterion import Criterion
from fxgrad.opacus.fixing import fix
from fxgrad.opacus.preparing import arguments_within, make_private
from fxgrad.opacus.validating import validate

MODES = {"hooks": False, "functorch": False, "ew": False, "ghost": True}  # whether the backward clips
REFUSED = {
    "no_op": (
        "leaves p.grad_sample to your own code, and fxgrad's backward sets it",
        "Leave out grad_sample_mode= and the code that sets p.grad_sample.",
    ),
    "ghost_fsdp": (
        "is Opacus's mode for models that FSDP2 shards, and fxgrad sees by itself that a model is sharded",
        "Pass the sharded model with grad_sample_mode='ghost'; docs/devices.md says what is supported.",
    ),
    "ghost_tp": (
        "shards layers over processes (tensor parallel), and fxgrad transforms models whose parameters are whole",
        "Put the model into DistributedDataParallel, and pass grad_sample_mode='ghost'.",
    ),
}


class PrivacyEngine(opacus.PrivacyEngine):  # type: ignore[misc]
    """Opacus's PrivacyEngine with fxgrad's gradients: change the import, and an Opacus script runs.

    ::

        from fxgrad.opacus import PrivacyEngine                     # was: from opacus import PrivacyEngine

    Sampling, noise, accounting and checkpoints are Opacus's. What differs:

    - The returned model is of the module's own class, with its attributes and its state_dict. Its ``_module`` is the
      module itself. State dicts of Opacus's wrapper, whose names begin with ``_module.``, load into it, too; also
      those with the names of DistributedDataParallel, ``_module.module.``.
    - nn.RNN, nn.LSTM, nn.GRU and nn.MultiheadAttention need no replacement.
    - With ``grad_sample_mode="ghost"``, the criterion returns a tensor, and clipping may be any of `make_private`.

    Args:
        accountant: "prv", "rdp" or "gdp".
        secure_mode: whether noise and samples come from a secure random generator, which needs torchcsprng.

    >>> import torch, warnings
    >>> warnings.simplefilter("ignore")                     # Opacus reminds of its secure random numbers
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randint(2, (32,)))
    >>> model, engine = nn.Linear(3, 2), PrivacyEngine(accountant="rdp")
    >>> model, optimizer, criterion, loader = engine.make_private(
    ...     module=model, optimizer=optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(data, 8),
    ...     noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost", backend="eager")
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     criterion(model(x), y).backward()
    ...     optimizer.step()
    >>> engine.get_epsilon(delta=1e-3) > 0
    True
    """

    accountant: Any

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float] | Tensor,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str | Callable[[Tensor], Tensor] = "flat",
        noise_generator: Any = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Prepare private training as Opacus's method of this name.

        Args:
            module, optimizer, data_loader, noise_multiplier, max_grad_norm, loss_reduction, poisson_sampling, clipping:
                as in `fxgrad.opacus.make_private`.
            criterion: the loss; its ``reduction`` is compared with loss_reduction. nn.CrossEntropyLoss by default.
            batch_first: True; a transformed model may have its samples on another dimension.
            noise_generator: a torch.Generator for the noise.
            grad_sample_mode: "hooks", "functorch" and "ew" mean p.grad_sample, by fxgrad; "ghost" means that the
                backward clips (one_backward=True).
            wrap_model: True; the returned model is not wrapped in any case.
            rand_on_empty: whether an empty batch becomes random numbers.
            kwargs: the further arguments of `fxgrad.opacus.make_private`, such as backend, one_backward and fix,
                and those of adaptive clipping.

        Returns:
            ``(model, optimizer, data_loader)``, or ``(model, optimizer, criterion, data_loader)`` for "ghost".

        Raises:
            OptionError: a mode that fxgrad does not have; and as `fxgrad.opacus.make_private`.
        """
        is_ghost = _clips_in_backward(grad_sample_mode, wrap_model)
        model, private, loader = make_private(
            self,
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            rand_on_empty=rand_on_empty,
            **{"one_backward": is_ghost, **kwargs},
        )
        if not is_ghost:
            return model, private, loader
        return model, private, Criterion(model, private, criterion, loss_reduction), loader

    def make_private_with_epsilon(
        self,
        *,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        epsilon_tolerance: float = 0.01,
        **kwargs: Any,
    ) -> Any:
        """Call `make_private` with the noise that keeps ``epochs`` epochs within ``(target_epsilon, target_delta)``.

        Args:
            data_loader, target_epsilon, target_delta, epochs, epsilon_tolerance: as in
                `fxgrad.opacus.make_private_with_epsilon`.
            kwargs: the other arguments of `make_private`, and those of the accountant, such as ``alphas``.
        """
        arguments = arguments_within(
            self,
            self.make_private,
            kwargs,
            data_loader=data_loader,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            epochs=epochs,
            epsilon_tolerance=epsilon_tolerance,
        )
        return self.make_private(data_loader=data_loader, **arguments)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Return whether `validate` accepts the module."""
        try:
            validate(module)
        except UnsupportedModuleError:
            return False
        return True

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise Opacus's UnsupportedModuleError for a module that cannot be trained privately."""
        validate(module)

    def load_checkpoint(self, *, path: Any, module: nn.Module, **kwargs: Any) -> Any:
        """Load what `save_checkpoint` saved, here or in Opacus, whose wrapper puts ``_module.`` before every name.

        Args:
            path: a path or a binary file.
            module: the model, prepared or not, or its wrapper for several processes.
            kwargs: those of Opacus's method: the optimizer, schedulers, and arguments of ``load_state_dict`` and
                ``torch.load``.

        An accountant that has counted the checkpoint's steps and more keeps all of them. If the checkpoint has steps,
        the generators that make_private got for noise and batches are seeded from the operating system, so that later
        steps do not draw the same noise again.

        Raises:
            OptionError: the accountant has counted other steps than the checkpoint's training; nothing is loaded then.
        """
        loading, accountant = Loading(module), self.accountant
        self.accountant = Continuing(accountant)
        try:
            checkpoint = super().load_checkpoint(path=path, module=loading, **kwargs)
        finally:
            self.accountant = accountant
        loading.finish()
        for private in optimizers_of(self) if len(accountant) else ():
            draw_anew(private, private.loader())
        return checkpoint

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy that `validate` accepts, with GroupNorm for BatchNorm; `fxgrad.opacus.fix`."""
        module = fix(module)
        validate(module)
        return module


def _clips_in_backward(grad_sample_mode: str, wrap_model: bool) -> bool:
    """Return whether the backward clips in a mode; raise for those that fxgrad does not have."""
    _check_wrap(wrap_model)
    if grad_sample_mode in MODES:
        return MODES[grad_sample_mode]
    if grad_sample_mode in REFUSED:
        sentence, advice = REFUSED[grad_sample_mode]
        raise OptionError(f"grad_sample_mode={grad_sample_mode!r} {sentence}", advice=advice)
    names = ", ".join(map(repr, MODES))
    raise OptionError(
        f"grad_sample_mode has to be {names}, not {grad_sample_mode!r}",
        advice=nearest(grad_sample_mode, MODES, "'hooks' stores p.grad_sample; 'ghost' clips in the backward."),
    )


def _check_wrap(wrap_model: bool) -> None:
    if not wrap_model:
        raise OptionError(
            "wrap_model=False: Opacus then puts hooks on your module, and fxgrad sets no hooks",
            advice="Leave it out, and train with the model that make_private returns: it is not wrapped, is of the "
            "module's class, and has its attributes.",
        )
