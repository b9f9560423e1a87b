"""Private fine-tuning of a Llama that FSDP2 shards over processes, with a checkpoint for another number of them.

    torchrun --nproc-per-node 2 examples/fsdp2_private.py --save checkpoint            # needs opacus and transformers
    python examples/fsdp2_private.py --resume checkpoint                               # one process goes on
    torchrun --nproc-per-node 2 examples/fsdp2_private.py --adapters                   # LoRA; needs peft, too

Each sentence counts up from a random word, and its second half repeats the first. A small Llama with random weights
learns the second halves, as a whole or in LoRA's adapters with a frozen base. What has to be said is

  - `fully_shard` comes first, then the optimizer, then a checkpoint's state, and `make_private` last, in every process;
  - every process passes the whole dataset, and gets Poisson batches of its own part of it. They may be empty, which
    transformers' Llama does not take: with 256 sentences in a process, each in a batch by 1/8, none is in practice;
  - the loss is a sum over samples (`loss_reduction="sum"`): an empty batch has no mean;
  - the checkpoint has the accountant beside the shards, and no seed: a resumed training draws new noise.

It prints the loss before and after, and epsilon. The exit code is 1 if the loss is not finite, if a frozen parameter
has moved, or if the accountant has not counted every step.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import fxgrad.losses
import fxgrad.opacus

WORDS, LENGTH, DELTA = 16, 8, 1e-3


def sentences(n: int) -> Tensor:
    """Words that count up from a random one, twice; the same in every process."""
    half = torch.randint(WORDS, (n, 1), generator=torch.Generator().manual_seed(1)).expand(n, LENGTH // 2)
    half = (half + torch.arange(LENGTH // 2)) % WORDS
    return torch.cat([half, half], 1)


def make_model(adapters: bool) -> nn.Module:
    """A small Llama, the same in every process; with adapters its own parameters are frozen."""
    torch.manual_seed(0)
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
    model = LlamaForCausalLM(config)
    if not adapters:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))


def shard(model: nn.Module) -> nn.Module:
    """Make each decoder layer a unit, and the model around them."""
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    for name, part in model.named_modules():
        if type(part).__name__ == "LlamaDecoderLayer":
            assert name
            fully_shard(part, mesh=mesh)
    return cast(nn.Module, fully_shard(model, mesh=mesh))


def losses(logits: Tensor, words: Tensor) -> Tensor:
    """Each sample's mean over the words of its second half: [B]."""
    labels = words.clone()
    labels[:, : LENGTH // 2] = -100
    return fxgrad.losses.token_mean(logits[:, :-1], labels[:, 1:])


def mean_loss(model: nn.Module, words: Tensor) -> float:
    with torch.no_grad():
        return losses(model(input_ids=words).logits, words).mean().item()


def local_parts(model: nn.Module) -> dict[str, Tensor]:
    """This process's part of each parameter."""
    return {name: value.to_local().clone() for name, value in model.state_dict().items() if isinstance(value, DTensor)}


def steps_of(engine: Any) -> int:
    """The steps that the accountant has counted."""
    return sum(steps for _, _, steps in engine.accountant.history)


def meet() -> torch.device:
    """Join the other processes of torchrun; without it there are none."""
    cuda = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    if not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Private fine-tuning of a small Llama that FSDP2 shards.")
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="of all processes together, on average")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--adapters", action="store_true", help="train LoRA's adapters, not the whole model")
    parser.add_argument("--save", help="a folder for a checkpoint at the end")
    parser.add_argument("--resume", help="a folder with a checkpoint, of any number of processes")
    parser.add_argument("--backend", default="aot_eager")
    return parser.parse_args(arguments)


def train(options: argparse.Namespace, device: torch.device) -> bool:
    words = sentences(options.sentences).to(device)
    model = shard(make_model(options.adapters).to(device))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
    engine: Any = PrivacyEngine(accountant="rdp")
    if options.resume:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "accountant": engine.accountant.state_dict()}
        load(state, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        engine.accountant.load_state_dict(state["accountant"])
    counted, before = steps_of(engine), local_parts(model)

    private, private_optimizer, loader = fxgrad.opacus.make_private(
        engine,
        module=model.train(),
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(words), options.batch),
        noise_multiplier=options.noise,
        max_grad_norm=1.0,
        loss_reduction="sum",
        one_backward=True,
        check_first_batch=False,
        backend=options.backend,
    )
    first, steps = mean_loss(private, words), 0
    for _ in range(options.epochs):
        for (batch,) in loader:
            private_optimizer.zero_grad()
            losses(private(input_ids=batch).logits, batch).sum().backward()
            private_optimizer.step()
            steps += 1
    last = mean_loss(private, words)

    if options.save:
        model_state, optimizer_state = get_state_dict(model, optimizer)  # AdamW's own state has no secret
        state = {"model": model_state, "optimizer": optimizer_state, "accountant": engine.accountant.state_dict()}
        save(state, checkpoint_id=options.save)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} process(es), {steps} private steps; {len(frozen)} tensors are frozen")
        print(f"loss {first:.4f} -> {last:.4f} nats for each word")
        print(f"epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA}, of {steps_of(engine)} steps", flush=True)
    after = local_parts(model)
    unmoved = all(torch.equal(after[name], before[name]) for name in frozen)
    return unmoved and math.isfinite(last) and steps_of(engine) == counted + steps


def main(arguments: Sequence[str] | None = None) -> int:
    warnings.filterwarnings("ignore", "Secure RNG turned off")
    options = parse(arguments)
    device = meet()
    try:
        good = train(options, device)
        if dist.get_rank() == 0 or not good:
            print("good" if good else "FELL SHORT", flush=True)
    finally:
        dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
