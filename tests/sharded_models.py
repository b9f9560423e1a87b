"""One of several processes that train models FSDP2 shards: `python -m tests.sharded_models RANK FOLDER WORLD CASES`.

A case is "MODEL LAYOUT BACKEND DTYPE": ten steps beside the loop over the samples of all processes. Parameters are
compared in float64 and float32, behind AdamW; bfloat16 is what MixedPrecisionPolicy casts to, and is compared with what
plain FSDP2 loses by it.
"""

from __future__ import annotations

import copy
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxgrad
from fxgrad.testing import per_sample_grads
from tests.sharded_processes import loss

STEPS, WORDS, LENGTH = 10, 11, 6
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# Larger than usual: where a gradient is next to nothing, Adam's first steps are as large as elsewhere.
EPS = 1e-4
# A key bias of attention has the gradient 0; float32 leaves 2e-6 beside gradients of 300, in plain PyTorch, too.
EPS_OF = {("gpt", "float32"): 0.1}
LAYOUTS = ("root", "blocks", "hybrid")
MODELS: dict[str, Callable[[], tuple[nn.Module, Sequence[nn.Module], Callable[[int], Tensor]]]] = {}
"""By name: a model, the modules that are units beside the root, and n samples."""


def model(build: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[build.__name__] = build
    return build


def numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def words(n: int) -> Tensor:
    return torch.randint(WORDS, (n, LENGTH))


@model
def mlp() -> Any:
    net = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 3))
    return net, [net[0], net[2]], numbers(5)


@model
def cnn() -> Any:
    def block(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())

    net = nn.Sequential(block(1), block(4), nn.AvgPool2d(6), nn.Flatten(), nn.Linear(4, 3))
    return net, [net[0], net[1]], numbers(1, 6, 6)


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    """The head is the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@model
def gpt() -> Any:
    net = Gpt()
    return net, list(net.blocks), words


class Adapted(nn.Module):
    """A frozen layer beside a trainable product of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lower = nn.Linear(base.in_features, 2, bias=False)
        self.upper = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.upper(self.lower(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import tests.import_torchvision  # noqa: F401, I001 - before transformers
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
        self.inner = LlamaForCausalLM(config).requires_grad_(False)
        for layer in self.inner.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
            layer.mlp.down_proj = Adapted(layer.mlp.down_proj)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids).logits


@model
def llama() -> Any:
    net = Llama()
    return net, list(net.inner.model.layers), words


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


@model
def lstm() -> Any:
    net = Sequences()
    return net, [net.rnn], numbers(4, 3)


class Experts(nn.Module):
    """Two of four experts for each word, weighted by a router."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, places = self.router(x).topk(2, -1)
        weights = torch.zeros_like(self.router(x)).scatter(-1, places, chosen.softmax(-1))
        parts = [weights[..., i : i + 1] * expert(x).tanh() for i, expert in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0)


@model
def moe() -> Any:
    net = nn.Sequential(nn.Linear(4, 6), Experts(), Experts(), nn.Linear(6, 3))
    return net, [net[1], net[2]], numbers(5, 4)


def rows_of(alone: nn.Module, x: Tensor, bound: float) -> dict[str, Tensor]:
    """Return each sample's clipped gradients, divided by the number of processes, by the loop."""
    rows = per_sample_grads(alone, loss, (x,))
    factors = (bound / (norms_of(rows) + 1e-6)).clamp(max=1) / dist.get_world_size()
    return {name: torch.einsum("n,n...->n...", factors, g) for name, g in rows.items()}


def norms_of(rows: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)


def sharded(net: nn.Module, blocks: Sequence[nn.Module], layout: str, **options: Any) -> nn.Module:
    for block in () if layout == "root" else blocks:
        fully_shard(block, mesh=mesh_of(layout), **options)
    fully_shard(net, mesh=mesh_of(layout), **options)
    return net


def mesh_of(layout: str) -> DeviceMesh:
    world = dist.get_world_size()
    shape = (2, world // 2) if layout == "hybrid" else (world,)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def batch_of(step: int, name: str, samples: Callable[[int], Tensor], least: int = 0) -> tuple[Tensor, Sequence[Tensor]]:
    """Return a step's samples, and those of each process, of different numbers."""
    least = max(least, int(name == "llama"))  # transformers' attention reshapes no empty batch
    sizes = [(3 * process + step) % 5 + least for process in range(dist.get_world_size())]
    torch.manual_seed(step)
    x = samples(sum(sizes))
    return x, x.split(sizes)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def whole(p: Any) -> Tensor:
    full: Tensor = p.full_tensor()
    return full.detach().double()


def trains(rank: int, name: str, layout: str, backend: str, kind: str) -> float:
    """Return the largest error of a parameter after ten steps of AdamW, of which the first clip half of the samples."""
    dtype: torch.dtype = getattr(torch, kind)
    torch.manual_seed(0)
    net, blocks, samples = MODELS[name]()
    net.to(torch.float64)
    alone = copy.deepcopy(net)
    bound = float(norms_of(per_sample_grads(alone, loss, (batch_of(1, name, samples)[0],))).median())
    quantity = fxgrad.ClippedGrad(bound)
    private = fxgrad.transform(sharded(net.to(dtype), blocks, layout), quantity=quantity, backend=backend)
    eps = EPS_OF.get((name, kind), EPS)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=eps) for one in (private, alone)]
    for step in range(STEPS):
        x, parts = batch_of(step, name, samples)
        optimizers[0].zero_grad()
        loss(private(cast(parts[rank], dtype))).backward()
        rows = rows_of(alone, x, bound)
        for parameter_name, parameter in alone.named_parameters():
            parameter.grad = rows[parameter_name].sum(0) if parameter_name in rows else None
        for optimizer in optimizers:
            optimizer.step()
    errors = {
        parameter_name: float((whole(p) - q).abs().max())
        for (parameter_name, p), q in zip(private.named_parameters(), alone.parameters(), strict=True)
    }
    worst = max(errors, key=lambda one: math.inf if math.isnan(errors[one]) else errors[one])
    assert errors[worst] <= TOLERANCE[kind], (worst, errors[worst])
    return errors[worst]


def rounds(rank: int, name: str, layout: str, backend: str) -> float:
    """Return the error of the sum of all gradients, over that of plain FSDP2 under the same policy, of ten steps.

    Both have the same parameters in each step, and the loop has them in float64, as bfloat16 rounds them: what is left
    are the roundings in the forward and the backward. The bound clips nothing, so that the sums mean the same.
    """
    torch.manual_seed(0)
    net, blocks, samples = MODELS[name]()
    alone = copy.deepcopy(net).double()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    copies = [copy.deepcopy((net, blocks)) for _ in range(2)]
    plain, model = (sharded(*one, layout, mp_policy=policy) for one in copies)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(math.inf), backend=backend)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    errors = []
    for step in range(STEPS):
        x, parts = batch_of(step, name, samples, least=1)
        with torch.no_grad():
            for p, q, r in zip(plain.parameters(), private.parameters(), alone.parameters(), strict=True):
                q.copy_(p)
                r.copy_(whole(p).bfloat16())
        for one in (plain, private):
            one.zero_grad()
            loss(one(cast(parts[rank], torch.bfloat16))).backward()
        rounded = cast(cast(x, torch.bfloat16), torch.float64)
        sums = {key: g.sum(0) for key, g in rows_of(alone, rounded, math.inf).items()}
        errors.append([error_of(one, sums) for one in (plain, private)])
        optimizer.step()
    of_plain, of_private = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert 0 < of_private <= 2 * of_plain < 0.1, errors
    print(f"{name}: {of_private:.1e}, of plain FSDP2 {of_plain:.1e}")
    return of_private / of_plain


def error_of(model: nn.Module, sums: Mapping[str, Tensor]) -> float:
    """Return the norm of the error of p.grad over all parameters, relative to the norm of p.grad."""
    errors = [(whole(model.get_parameter(key).grad) - g).norm() for key, g in sums.items()]
    norms = [g.norm() for g in sums.values()]
    return float(torch.stack(errors).norm() / torch.stack(norms).norm())


def main(rank: int, folder: Path, world: int, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", meet, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    found: dict[str, str] = {}
    for case in cases:
        name, layout, backend, kind = case.split()
        try:
            run = rounds if kind == "bfloat16" else partial(trains, kind=kind)
            print(f"{world} {case}: {run(rank, name, layout, backend):.1e}", flush=True)
            found[case] = ""
        except Exception:
            found[case] = traceback.format_exc()
            print(found[case], flush=True)  # if the processes do not meet again
        torch.save(found, folder / f"{rank}.pt")
        failed = torch.tensor(bool(found[case]))
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:  # the other may wait in a collective
            break


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
