"""Training loops that divide each batch's loss: by the number of batches for one step, or by the batch's tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fxgrad.errors import MixedSamples, OptionError
from fxgrad.runtime.autograd_graph import frames_from, is_divided

Variables = Mapping[str, Any]  # of a calling function


def check_undivided(roots: Iterable[Any]) -> None:
    """Raise where a root of the running backward call is a loss that a training loop divided for accumulation.

    A product that is divided passes: it is the advice. What an op saved is freed by now, so the divisor is read from
    the variables of the calling functions.
    """
    if not any(map(is_divided, roots)):
        return
    for loop, divisor, advice in _loops():
        if divisor > 1:
            raise OptionError(
                f"{loop} divided the loss by {divisor} for gradient accumulation: each sample's norm would be "
                f"{divisor} times too small, and clipped that much too late",
                advice=advice,
            )


def check_uncounted(arguments: Variables) -> None:
    """Raise where Hugging Face's Trainer gives a model with token labels the number of the whole batch's tokens.

    The number is an input without samples, so the graph does not show what it counts.
    """
    labels, number = arguments.get("labels"), arguments.get("num_items_in_batch")
    if number is not None and isinstance(labels, Tensor) and labels.dim() > 1:
        raise MixedSamples(
            "the model divides its loss by num_items_in_batch, the number of tokens of all samples: one sample's "
            "length would scale the gradients of the others",
            path="model(labels=.., num_items_in_batch=..) -> loss / num_items_in_batch",
            advice="Pass the Trainer compute_loss_func=, a sum over samples of their own losses: "
            "fxgrad.losses.token_mean gives those of a language model.",
        )


def _loops() -> Iterator[tuple[str, int, str]]:
    """Yield the training loops that call backward: the name, the divisor, and what to do."""
    for thread in list(sys._current_frames().values()):  # on CUDA the engine's threads are not the caller's
        for frame in frames_from(thread):
            for (function, loop), (divisor, advice) in _LOOPS.items():
                if frame.f_code.co_name == function:
                    yield loop, divisor(frame.f_locals), advice


def _accelerate(variables: Variables) -> int:
    owner = variables.get("self")
    return getattr(owner, "gradient_accumulation_steps", 1) if type(owner).__name__ == "Accelerator" else 1


def _hugging_face(variables: Variables) -> int:
    divides = variables.get("loss_is_scaled_for_ga") is False
    return getattr(variables.get("self"), "current_gradient_accumulation_steps", 1) if divides else 1


def _lightning(variables: Variables) -> int:
    return getattr(getattr(variables.get("self"), "trainer", None), "accumulate_grad_batches", 1)


_LOOPS: Mapping[tuple[str, str], tuple[Callable[[Variables], int], str]] = {
    ("backward", "Accelerate"): (
        _accelerate,
        "Call accelerator.backward(loss * accelerator.gradient_accumulation_steps).",
    ),
    ("training_step", "The Trainer"): (
        _hugging_face,
        "Pass the Trainer compute_loss_func=, a sum over samples: then it leaves the loss as it is.",
    ),
    ("backward_fn", "Lightning"): (
        _lightning,
        "Let training_step return loss * self.trainer.accumulate_grad_batches.",
    ),
}
