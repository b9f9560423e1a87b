"""Per-sample clipping inside of Hugging Face's Trainer, with gradient accumulation: DP-SGD's step, in one backward.

    python examples/trainer.py [--steps 60] [--noise 0.0]        # needs transformers and accelerate

The Trainer is given a transformed model and knows nothing of it: `fxgrad.ClippedGrad` adds each micro-batch's clipped
sum to p.grad, as any backward adds a gradient, and the Trainer steps after every few of them. What has to be said is

  - the loss sums over the samples (`compute_loss_func`): the Trainer then leaves its scale alone, and each sample's
    gradient is that of its own loss, however many micro-batches there are;
  - a callback turns the sum into a mean, and adds the noise, before each step of the optimizer;
  - the Trainer's own clipping, of the gradient that is already summed up, is off.

For privacy that is accounted for, with Poisson batches, see `fxgrad.opacus`.

A small BERT learns whether a sentence has more of one word than of another; sentences differ in length. Without noise,
its parameters are compared with those of a plain loop that clips sample by sample. The exit code is 1 if they differ.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import fxgrad

MAX_DIFFERENCE = 1e-4
WORDS, LENGTH, FIRST, SECOND = 12, 16, 3, 4
Sentence = dict[str, Tensor]


def sentences(n: int) -> list[Sentence]:
    """Random words, padded to LENGTH with word 0; label 1 where FIRST is seen more often than SECOND."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (n, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    words *= mask
    labels = ((words == FIRST).sum(1) > (words == SECOND).sum(1)).long()
    columns = {"input_ids": words, "attention_mask": mask, "labels": labels}
    return [{name: column[i] for name, column in columns.items()} for i in range(n)]


def make_bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs.logits, labels, reduction="sum")


class MeanWithNoise(TrainerCallback):
    """The sum of `samples` clipped gradients -> their mean, with noise of standard deviation noise * max_grad_norm."""

    def __init__(self, samples: int, noise: float, max_grad_norm: float) -> None:
        self.samples, self.std = samples, noise * max_grad_norm

    def on_pre_optimizer_step(self, *_: Any, model: nn.Module, **__: Any) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad), alpha=self.std).div_(self.samples)


def plain_training(model: nn.Module, data: list[Sentence], samples: int, steps: int, lr: float, c: float) -> None:
    """The same without the Trainer and without fxgrad, one sentence at a time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    parameters = list(model.parameters())
    for step in range(steps):
        summed = [torch.zeros_like(p) for p in parameters]
        for sentence in data[step * samples : (step + 1) * samples]:
            inputs = {name: column[None] for name, column in sentence.items()}
            labels = inputs.pop("labels")
            grads = torch.autograd.grad(summed_loss(model(**inputs), labels), parameters)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for total, g in zip(summed, grads, strict=True):
                total.add_(g * min(1.0, c / (norm.item() + 1e-6)))
        for p, total in zip(parameters, summed, strict=True):
            p.grad = total / samples
        optimizer.step()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Per-sample clipping inside of Hugging Face's Trainer.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args(arguments)

    set_seed(0)
    samples = options.micro_batch * options.accumulate
    data = sentences(samples * options.steps)
    model = make_bert()
    other = copy.deepcopy(model)
    clipped = fxgrad.ClippedGrad(max_grad_norm=options.max_grad_norm)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=fxgrad.transform(model, quantity=clipped, backend=options.backend),
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=options.micro_batch,
                gradient_accumulation_steps=options.accumulate,
                max_grad_norm=0.0,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                train_sampling_strategy="sequential",
            ),
            train_dataset=data,
            compute_loss_func=summed_loss,
            callbacks=[MeanWithNoise(samples, options.noise, options.max_grad_norm)],
            optimizers=(torch.optim.SGD(model.parameters(), lr=options.lr), None),
        )
        trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, factor=1.0)
        trainer.train()

    print(f"{trainer.state.global_step} steps of {options.accumulate} micro-batches of {options.micro_batch} sentences")
    if options.noise:
        return 0
    plain_training(other.train(), data, samples, options.steps, options.lr, options.max_grad_norm)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    difference = max((a - b).abs().max().item() for a, b in pairs)
    print("largest difference from clipping one sentence at a time")
    print(f"    {difference:.1e}   (at most {MAX_DIFFERENCE:.0e} wanted)")
    good = trainer.state.global_step == options.steps and difference <= MAX_DIFFERENCE
    print("good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
