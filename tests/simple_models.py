"""Models as SimpleFSDP makes them: parameters are DTensors, and properties gather them inside of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

FULLY, HYBRID, REPLICATE = (Shard(0),), (Replicate(), Shard(0)), (Replicate(),)
"""The placements of the modes "fully_shard", "hybrid_shard" and "replicate"."""


class Gather(nn.Module):
    """A shard -> the whole local tensor, whose gradient the processes reduce."""

    def __init__(
        self, reduce_op: str = "avg", dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.reduce_op, self.dtype, self.reduce_dtype = reduce_op, dtype, reduce_dtype
        self.active = True

    def forward(self, shard: Any) -> Any:
        if not self.active:
            return shard
        dims = shard.device_mesh.ndim
        whole = shard.redistribute(
            placements=[Replicate()] * dims, forward_dtype=self.dtype, backward_dtype=self.reduce_dtype
        )
        return whole.to_local(grad_placements=[Partial(self.reduce_op)] * dims)


def gathering(module: nn.Module, keys: Sequence[str], gather: Any) -> None:
    """Let properties of a module's class return what ``gather`` makes of its parameters."""

    def of(key: str) -> property:
        return property(lambda self: gather(self._parameters[key]))

    kind = type(module)
    module.__class__ = type(f"Gathering{kind.__name__}", (kind,), {key: of(key) for key in keys})


def divided(model: Any, mesh: Any, placements: Sequence[Placement] = FULLY, gather: Any = None) -> Any:
    """Divide every parameter; what is tied stays tied."""
    gather = Gather() if gather is None else gather
    shards: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        parameters = dict(module.named_parameters(recurse=False))
        for key, p in parameters.items():
            if id(p) not in shards:
                shard = nn.Parameter(distribute_tensor(p.detach(), mesh, placements), p.requires_grad)
                shards |= {id(p): shard, id(shard): shard}
            module.register_parameter(key, shards[id(p)])
        gathering(module, list(parameters), gather)
    return model


class Mlp(nn.Module):
    """Seven and three are odd, so shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.second, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one[:, None] for one in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Token ids to logits; the head is the table, and one scale belongs to the model itself."""

    def __init__(self, words: int = 7, width: int = 6) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)
