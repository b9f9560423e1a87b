"""`TrainerCallback`: Hugging Face's Trainer takes private steps, with what `make_private` returns."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator
from itertools import pairwise
from numbers import Real
from typing import Any, NoReturn

import opacus
from opacus.optimizers import AdaClipDPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader, Sampler

from fxgrad.api import engine_of
from fxgrad.errors import MissingPackage, OptionError
from fxgrad.opacus.checked_step import CheckedStep
from fxgrad.opacus.checkpoints import History, continues, draw_anew
from fxgrad.opacus.processes import processes

try:
    import transformers
except ImportError as error:
    raise MissingPackage(
        "fxgrad.opacus.TrainerCallback needs transformers, which is not installed",
        where=f"{type(error).__name__}: {error}",
        advice="Install it: pip install transformers accelerate.",
    ) from error

KEY = "fxgrad.opacus"
"""The entry of the accountant in ``stateful_callbacks`` of trainer_state.json."""

# Note [Parts of a Poisson batch]
# The Trainer accumulates over a fixed number of batches. Each of them drawn alone would put a sample into several, and
# the accountant would count another mechanism. So one Poisson batch is split into that number of parts, of which some
# may be empty. Each part but the last ends in a virtual step, as in Opacus's BatchMemoryManager.


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback with which Hugging Face's Trainer trains privately.

    ::

        model, optimizer, loader = fxgrad.opacus.make_private(engine, module=model, ..., one_backward=True)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(max_grad_norm=0.0, ...),
            compute_loss_func=loss,                         # loss(outputs, labels, num_items_in_batch=None)
            optimizers=(optimizer, None),
        )
        fxgrad.opacus.TrainerCallback(engine, loader, delta=1e-5).attach(trainer)
        trainer.train()

    The Trainer draws its batches from ``loader`` and takes the steps of a plain loop. Parameters, noise and epsilon are
    those of the loop.

    - **Gradient accumulation.** A Poisson batch is split into ``gradient_accumulation_steps`` parts. The expected size
      of a logical batch stays that of the loader. Other loaders' batches add up, and the accountant counts them.
    - **Logs.** Each log has ``epsilon``, the privacy spent so far at ``delta``; so has ``trainer.state.log_history``.
      There is no ``grad_norm``: the norm of the sum without noise is not private. Neither is ``loss``, which epsilon
      does not cover.
    - **Checkpoints.** trainer_state.json holds the accountant's history. A resumed training continues it.
    - **Seeds.** The Trainer seeds PyTorch's generator with ``args.seed``, and a reader of the seed can compute the
      noise. Pass make_private a noise_generator whose seed is secret. A resumed training seeds it, and the generator of
      the loader, from the operating system, so that no noise is drawn twice. No checkpoint holds their states.

    The loss must reduce the samples as ``loss_reduction`` of make_private says, and must not use num_items_in_batch:
    that number depends on other samples. `fxgrad.losses.token_mean` gives a language model's losses.

    The Trainer has to run in one process: in several it averages gradients in the backward.

    Args:
        engine: the engine of make_private; its accountant counts the steps.
        loader: the loader that make_private returned.
        delta: the δ of the logged epsilon, between 0 and 1.

    Raises:
        OptionError: delta is no number between 0 and 1; in `attach` and in ``trainer.train()``, if the Trainer would
            not take private steps, or if a checkpoint's history does not fit the accountant's.
        MissingPackage: transformers is not installed.

    Source: `transformers.Trainer`; `opacus.utils.batch_memory_manager.BatchMemoryManager` for parts of a batch.

    >>> import torch, warnings
    >>> from torch import nn
    >>> from transformers import Trainer, TrainingArguments
    >>> warnings.simplefilter("ignore")
    >>> class Classifier(nn.Linear):
    ...     def forward(self, x):
    ...         return {"logits": super().forward(x)}
    >>> rows = [{"x": x, "labels": i % 2} for i, x in enumerate(torch.randn(32, 3))]
    >>> model, engine = Classifier(3, 2), opacus.PrivacyEngine(accountant="rdp")
    >>> import fxgrad.opacus
    >>> model, optimizer, loader = fxgrad.opacus.make_private(
    ...     engine, module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data_loader=DataLoader(rows, 8), noise_multiplier=1.0, max_grad_norm=1.0, one_backward=True,
    ...     backend="eager")
    >>> def loss(outputs, labels, num_items_in_batch=None):
    ...     return nn.functional.cross_entropy(outputs["logits"], labels)
    >>> trainer = Trainer(
    ...     model=model, compute_loss_func=loss, optimizers=(optimizer, None),
    ...     args=TrainingArguments(max_grad_norm=0.0, num_train_epochs=1, use_cpu=True, report_to=[],
    ...                            save_strategy="no", disable_tqdm=True))
    >>> callback = fxgrad.opacus.TrainerCallback(engine, loader, delta=1e-3).attach(trainer)
    >>> _ = trainer.train()                                                             # doctest: +ELLIPSIS
    {...'epsilon': ...}
    >>> trainer.state.log_history[-1]["epsilon"] == engine.get_epsilon(delta=1e-3)
    True
    """

    engine: opacus.PrivacyEngine
    loader: DataLoader[Any]
    delta: float
    _is_poisson: bool

    def __init__(self, engine: opacus.PrivacyEngine, loader: DataLoader[Any], *, delta: float) -> None:
        if not isinstance(delta, Real) or not 0 < float(delta) < 1:
            raise OptionError(
                f"delta has to be a number between 0 and 1, not {delta!r}",
                advice="Pass less than one over the number of samples, such as delta=1e-5.",
            )
        self.engine, self.loader, self.delta = engine, loader, float(delta)
        self._is_poisson = isinstance(loader.batch_sampler, UniformWithReplacementSampler)
        self._trainer: Any = None
        self._spent: tuple[History, float] | None = None  # the last epsilon, and the history behind it
        self._batches: DataLoader[Any] | None = None  # those of the training in progress

    def attach(self, trainer: Any) -> TrainerCallback:
        """Add the callback to a Trainer, and give it the private loader.

        Args:
            trainer: a `transformers.Trainer` with the private model and optimizer.

        Returns:
            The callback.

        Raises:
            OptionError: the Trainer would not take private steps.
        """
        self._trainer = weakref.proxy(trainer)  # it owns the callback
        self._check_arguments(trainer.args)
        self._check_objects(trainer.model, trainer.optimizer)
        _check_loss(trainer)
        trainer.get_train_dataloader = self._make_batches
        trainer.add_callback(self)
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())  # reports of the Trainer's other callbacks then have the epsilon
        return self

    @property
    def optimizer(self) -> CheckedStep:
        """Return the private optimizer, without Accelerate's wrapper."""
        optimizer = self._trainer.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]

    def _make_batches(self) -> DataLoader[Any]:
        """Return the loader of a training: the private one, or one of parts of its batches."""
        parts = self._trainer.args.gradient_accumulation_steps
        loader = self.loader
        loader.collate_fn([loader.dataset[0]])  # Opacus's empty batches need to have seen one that is not
        self._batches = loader if parts == 1 or not self._is_poisson else split(loader, parts)
        return self._batches

    # what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that this training is private; continue the history of a checkpoint."""
        if self._trainer is None:
            raise OptionError(
                "TrainerCallback is not attached: the Trainer would draw its batches from a loader of its own",
                where="Trainer(callbacks=[TrainerCallback(..)])",
                path="Trainer.train -> get_train_dataloader -> not the private loader",
                advice="Leave it out of callbacks=, and call TrainerCallback(..).attach(trainer).",
            )
        self._check_arguments(args)
        optimizer = kwargs["optimizer"]
        self._check_objects(kwargs["model"], getattr(optimizer, "optimizer", optimizer))
        if kwargs["train_dataloader"] is not self._batches:
            _refuse(
                "the Trainer draws its batches from another loader than make_private returned",
                where="Trainer.get_train_dataloader",
                path="get_train_dataloader -> batches that the accountant does not know",
                advice="Leave get_train_dataloader as attach sets it, and call attach once.",
            )
        if state.global_step:
            self._resume(state)
        self._trainer.accelerator.clip_grad_norm_ = _leave_gradients
        self._note(state)
        self.optimizer.start_over()  # a training before may have ended between the parts of a batch

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a virtual step behind each part of a Poisson batch but the last."""
        if self._is_poisson:
            self.optimizer.signal_skip_step(True)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the next step be a real one."""
        if self._is_poisson:
            self.optimizer.signal_skip_step(False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clear what the optimizer keeps: the Trainer itself zeroes the model alone."""
        self.optimizer.zero_grad()
        self._note(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the epsilon spent so far."""
        if logs is None or not len(self.engine.accountant):
            return
        history = [*self.engine.accountant.history]
        if self._spent is None or self._spent[0] != history:
            noisy = all(sigma for sigma, *_ in history)  # some accountants fail without noise
            self._spent = history, float(self.engine.get_epsilon(delta=self.delta)) if noisy else math.inf
        logs["epsilon"] = self._spent[1]
        if state.log_history:  # the Trainer has made this entry from a copy of the logs
            state.log_history[-1]["epsilon"] = self._spent[1]

    # checkpoints

    def _note(self, state: Any) -> None:
        """Write the accountant's history to what the next checkpoint holds."""
        kept = {"accountant": copy.deepcopy(self.engine.accountant.state_dict())}
        if isinstance(self.optimizer, AdaClipDPOptimizer):
            kept["max_grad_norm"] = float(self.optimizer.max_grad_norm)
        state.stateful_callbacks[KEY] = kept

    def _resume(self, state: Any) -> None:
        """Continue a checkpoint's history.

        An accountant that has counted these steps and more keeps all of them: those behind the checkpoint have used
        the samples, too.
        """
        kept = state.stateful_callbacks.get(KEY)
        if kept is None:
            _refuse(
                f"the checkpoint of step {state.global_step} has no accountant's history: epsilon would be too small",
                where=f"trainer_state.json, stateful_callbacks[{KEY!r}]",
                path="Trainer.train(resume_from_checkpoint=..) -> an accountant that starts anew",
                advice="Resume from a checkpoint of a training with this callback.",
            )
        accountant = self.engine.accountant
        history = [(sigma, rate, steps) for sigma, rate, steps in kept["accountant"]["history"]]
        if not len(accountant):
            accountant.load_state_dict({**kept["accountant"], "history": history})
        elif not continues(accountant.history, history):
            _refuse(
                "the accountant has counted other steps than the checkpoint's training",
                where=f"counted: {accountant.history}; checkpoint: {history}",
                path="Trainer.train(resume_from_checkpoint=..) -> two histories for one model",
                advice="Call make_private with a new PrivacyEngine, and resume with that.",
            )
        if "max_grad_norm" in kept:
            self.optimizer.max_grad_norm = kept["max_grad_norm"]
        draw_anew(self.optimizer, self.loader)

    # what would not be private

    def _check_arguments(self, args: Any) -> None:
        count = max(processes(), args.world_size)
        if count > 1:
            _refuse(
                f"the Trainer trains in {count} processes, and averages what each of them clipped: the noise and the "
                "accountant are those of one process",
                where=f"torch.distributed or Accelerate, {count} processes",
                path="Trainer.train -> DistributedDataParallel(private model) -> p.grad averaged in each backward",
                advice="Start one process, with python instead of torchrun or accelerate launch. For several, write "
                "the loop yourself, with make_private(engine, module=DistributedDataParallel(model), ..).",
            )
        if args.max_grad_norm:
            _refuse_clipping(args.max_grad_norm)

    def _check_objects(self, model: Any, optimizer: Any) -> None:
        if not isinstance(optimizer, CheckedStep):
            _refuse(
                f"the Trainer steps with {type(optimizer).__name__}, which adds no noise",
                where="Trainer(optimizers=..)",
                path="backward -> Trainer.optimizer.step",
                advice="Pass optimizers=(optimizer, None) with the optimizer of make_private, and no model_init=.",
            )
        if engine_of(model) is not optimizer.ledger.engine:
            _refuse(
                f"the Trainer's {type(model).__name__} is not the model that make_private returned with the optimizer",
                where="Trainer(model=..)",
                path="Trainer.model -> backward -> gradients of another model",
                advice="Pass model= the model of make_private. Transform a PEFT model as a whole.",
            )
        if optimizer.accountant is not self.engine.accountant:
            _refuse(
                "the callback's engine does not count the optimizer's steps: epsilon would be that of another training",
                where="TrainerCallback(engine, ..)",
                path="optimizer.step -> the accountant of make_private's engine -> not this engine",
                advice="Pass the engine that was given to make_private with this optimizer.",
            )
        if optimizer.loader() is not self.loader:
            _refuse(
                "the callback's loader is not the one that make_private returned with the optimizer: epsilon is that "
                "of the returned one's batches",
                where="TrainerCallback(.., loader)",
                path="Trainer.get_train_dataloader -> batches that the accountant does not know",
                advice="Pass the loader that make_private returned with this optimizer, not the one it was given.",
            )


def _check_loss(trainer: Any) -> None:
    if trainer.compute_loss_func is None and type(trainer).compute_loss is transformers.Trainer.compute_loss:
        _refuse(
            "the Trainer would take the model's own loss, and divide it by the number of tokens or labels in the "
            "batch: one sample's length would scale the gradients of the others",
            where="Trainer(compute_loss_func=None)",
            path="model(labels=..) -> loss / num_items_in_batch -> backward",
            advice="Pass compute_loss_func=, a mean over samples of their own losses, or a sum where make_private has "
            "loss_reduction='sum'. fxgrad.losses.token_mean gives a language model's losses.",
        )


def _leave_gradients(parameters: Any, max_norm: float, norm_type: float = 2) -> None:
    """Replace `accelerate.Accelerator.clip_grad_norm_`.

    The Trainer calls it with Inf to log a norm. That multiplies p.grad by 1, and the norm is one without noise.
    """
    if max_norm != math.inf:
        _refuse_clipping(max_norm)


def _refuse_clipping(max_norm: float) -> NoReturn:
    _refuse(
        f"the Trainer clips the gradient of the whole batch to {max_norm}: it is not what the private backward "
        "delivered then",
        where=f"TrainingArguments(max_grad_norm={max_norm})",
        path="backward (clips each sample) -> clip_grad_norm_ (scales their sum) -> optimizer.step",
        advice="Pass TrainingArguments(max_grad_norm=0.0). The bound of each sample is make_private's.",
    )


def _refuse(sentence: str, *, where: str, path: str, advice: str) -> NoReturn:
    raise OptionError(sentence, where=where, path=path, advice=advice)


class PartsOfBatches(Sampler[list[int]]):
    """The batches of a sampler, each in a fixed number of parts. See Note [Parts of a Poisson batch]."""

    def __init__(self, batches: Any, parts: int) -> None:
        self.batches, self.parts = batches, parts

    def __len__(self) -> int:
        return len(self.batches) * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            cuts = [len(batch) * part // self.parts for part in range(self.parts + 1)]
            yield from (batch[start:end] for start, end in pairwise(cuts))


def split(loader: DataLoader[Any], parts: int) -> DataLoader[Any]:
    """Return a loader of the same batches, each in so many parts."""
    return DataLoader(
        loader.dataset,
        batch_sampler=PartsOfBatches(loader.batch_sampler, parts),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
