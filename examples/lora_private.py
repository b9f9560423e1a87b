"""Private fine-tuning of a language model with LoRA: differential privacy, an accountant, and Hugging Face's Trainer.

    python examples/lora_private.py [--epochs 10] [--epsilon 8]      # needs opacus, transformers, accelerate and peft

Each sentence counts up from a random word, and its second half repeats the first. A small Llama with random weights is
frozen; LoRA's adapters and the head learn the second halves within a privacy budget.

What has to be said is

  - the whole PEFT model is made private: frozen layers have no per-sample gradients;
  - the loss is a mean over samples of each sample's own mean over tokens (`fxgrad.losses.token_mean`);
  - the Trainer's own clipping is off (`max_grad_norm=0.0`), and the callback gives it the Poisson batches.

It prints epsilon, checks that the budget is kept, that the frozen layers have not moved, and that the loss has fallen.
The exit code is 1 if one of these does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from opacus import PrivacyEngine
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import fxgrad.losses
import fxgrad.opacus

WORDS, LENGTH, DELTA, MAX_GRAD_NORM = 16, 8, 1e-3, 1.0
Sentence = dict[str, Tensor]


def sentences(n: int) -> list[Sentence]:
    """Words that count up from a random one, twice; only the second half counts in the loss."""
    half = torch.randint(WORDS, (n, 1), generator=torch.Generator().manual_seed(1)).expand(n, LENGTH // 2)
    half = (half + torch.arange(LENGTH // 2)) % WORDS
    words = torch.cat([half, half], 1)
    labels = words.clone()
    labels[:, : LENGTH // 2] = -100
    return [{"input_ids": words[i], "labels": labels[i]} for i in range(n)]


def make_model() -> nn.Module:
    """A small Llama with adapters at its projections; the head is trained as a whole."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    adapters = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj", "down_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    return get_peft_model(LlamaForCausalLM(config), adapters)


def next_word_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean over samples of each sample's mean over the words that count."""
    return fxgrad.losses.token_mean(outputs.logits[:, :-1], labels[:, 1:]).mean()


def mean_loss(model: nn.Module, data: list[Sentence]) -> float:
    batch = {name: torch.stack([sentence[name] for sentence in data]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        return next_word_loss(model.eval()(input_ids=batch["input_ids"]), batch["labels"]).item()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Private fine-tuning of a small Llama with LoRA.")
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--backend", default="aot_eager")
    options = parser.parse_args(arguments)

    warnings.filterwarnings("ignore", "Secure RNG turned off")
    set_seed(0)
    data: Any = sentences(options.sentences)  # PyTorch's types want a Dataset, and take a list
    model = make_model()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = mean_loss(model, data)

    engine, secret = PrivacyEngine(accountant="rdp"), torch.Generator()
    secret.seed()  # from the system's entropy; the Trainer gives the global generator a known seed
    private, optimizer, loader = fxgrad.opacus.make_private_with_epsilon(
        engine,
        module=model.train(),
        optimizer=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=options.lr),
        data_loader=DataLoader(data, batch_size=options.batch),
        target_epsilon=options.epsilon,
        target_delta=DELTA,
        epochs=options.epochs,
        max_grad_norm=MAX_GRAD_NORM,
        one_backward=True,
        backend=options.backend,
        noise_generator=secret,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=private,
            args=TrainingArguments(
                output_dir=folder,
                num_train_epochs=options.epochs,
                gradient_accumulation_steps=options.accumulate,  # parts of each Poisson batch
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="epoch",
                disable_tqdm=True,
            ),
            compute_loss_func=next_word_loss,
            optimizers=(optimizer, None),
        )
        fxgrad.opacus.TrainerCallback(engine, loader, delta=DELTA).attach(trainer)
        trainer.train()

    after, epsilon = mean_loss(model, data), trainer.state.log_history[-1]["epsilon"]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trainer.state.global_step} private steps of {trained} parameters; {len(frozen)} tensors are frozen")
    print(f"loss {before:.2f} -> {after:.2f} nats for each word")
    print(f"epsilon {epsilon:.2f} at delta {DELTA}   (at most {options.epsilon} wanted)")
    unmoved = all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    good = epsilon == engine.get_epsilon(DELTA) <= options.epsilon and unmoved and after < before
    print("good" if good else "FELL SHORT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
