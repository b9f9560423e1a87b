"""One of two processes with models that parallelize_module divides: `python -m tests.parallel_processes RANK FOLDER`.

Each case compares what tensor parallelism leaves with the loop over single samples of the model before it was divided,
in one process. Both processes have the same batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxgrad
from fxgrad.testing import per_sample_grads
from tests.sharded_processes import WORLD, loss, main

C = 0.5
CASES: dict[str, Callable[[int], None]] = {}
LONG = "inductor transformer_by_aot llama_by_aot llama_tied_by_aot".split()
"""Cases of the long run: two layers, more batches, and another backend."""


def case(run: Callable[[int], None]) -> Callable[[int], None]:
    CASES[run.__name__] = run
    return run


class Mlp(nn.Module):
    def __init__(self, width: int = 6, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias), nn.Linear(2 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Each process has its own heads: the code counts them from the width that it sees."""

    def __init__(self, width: int = 8, size: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width)
        self.second, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    def __init__(self, words: int = 7, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args, **options).double()


def mesh() -> Any:
    return init_device_mesh("cpu", (WORLD,))


def divided(model: nn.Module, **plan: Any) -> nn.Module:
    return parallelize_module(model, mesh(), plan)


def divided_mlp(model: nn.Module) -> nn.Module:
    return divided(model, up=ColwiseParallel(), down=RowwiseParallel())


def divided_transformer(model: Any) -> nn.Module:
    plan: dict[str, ParallelStyle] = {f"attention.{part}": ColwiseParallel() for part in "qkv"}
    plan |= {"attention.out": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh(), plan)
    return divided(
        model, table=ColwiseParallel(output_layouts=Replicate()), head=ColwiseParallel(output_layouts=Replicate())
    )


def values(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(7, shape, generator=torch.Generator().manual_seed(seed))


def norm_of(p: Any) -> Tensor:
    norms: Tensor = p.norm_sample
    return norms


def norms_of(rows: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(found: Any, expected: Tensor, what: str, least: float = 1e-30) -> None:
    """Compare to 1e-10 of the largest entry, or of ``least``: a key's bias in attention has no gradient but noise."""
    scale = max(float(expected.detach().abs().max()), least)
    error = float((whole(found).detach() - expected.detach()).abs().max()) / scale
    assert error <= 1e-10, (what, error)


def placements_of(model: nn.Module, divide: Callable[[Any], nn.Module], x: Tensor) -> dict[str, Any]:
    """Return the placements that the plain model leaves p.grad with."""
    plain = divide(copy.deepcopy(model))
    loss(plain(x)).backward()
    found = {name: getattr(p.grad, "placements", None) for name, p in plain.named_parameters()}
    if isinstance(model, Llama):
        found["table.weight"] = (Shard(0),)  # the parameter's; PyTorch leaves Replicate
    return found


def trains(
    model: nn.Module, divide: Callable[[Any], nn.Module], batches: list[Tensor], backend: str = "aot_eager"
) -> None:
    """Take private steps of AdamW beside the same model in one process, with the gradients of the loop."""
    expected_placements = placements_of(model, divide, batches[0])
    alone, private = copy.deepcopy(model), divide(copy.deepcopy(model))
    clipped, norms = fxgrad.ClippedGrad(C), fxgrad.NormSample()
    private = fxgrad.transform(private, quantity=[clipped, norms], backend=backend)
    optimizer = torch.optim.AdamW(private.parameters(), lr=0.01, foreach=False)
    other = torch.optim.AdamW(alone.parameters(), lr=0.01, foreach=False)
    for x in batches:
        fxgrad.zero_grad(private)
        loss(private(x)).backward()
        rows = per_sample_grads(alone, loss, (x,))
        each = norms_of(rows)
        factors = (C / (each + 1e-6)).clamp(max=1)
        least = 1e-3 * float(each.max())
        for (name, p), q in zip(private.named_parameters(), alone.parameters(), strict=True):
            q.grad = torch.einsum("n,n...->...", factors, rows[name])
            assert_close(p.grad, q.grad, f"p.grad of {name}", least)
            assert_close(norm_of(p), rows[name].flatten(1).norm(dim=1), f"norms of {name}", least)
            assert getattr(p.grad, "placements", None) == expected_placements[name], name
        assert_close(fxgrad.result(private, norms), each, "norms")
        same_on_both(fxgrad.result(private, norms), *(norm_of(p) for p in private.parameters()))
        optimizer.step()
        other.step()
    for (name, p), q in zip(private.named_parameters(), alone.parameters(), strict=True):
        assert_close(p, q, name)


def same_on_both(*tensors: Any) -> None:
    """Compare bit for bit."""
    found: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(found, [tensor.tolist() for tensor in tensors])
    assert found[0] == found[1]


@case
def mlp(rank: int) -> None:
    trains(made(Mlp), divided_mlp, [values(5, 6), values(3, 6, seed=2), values(1, 6, seed=3), values(4, 6, seed=4)])


@case
def mlp_without_bias(rank: int) -> None:
    trains(made(Mlp, bias=False), divided_mlp, [values(5, 3, 6)])


@case
def inductor(rank: int) -> None:
    trains(made(Mlp), divided_mlp, [values(5, 6), values(3, 6, seed=2)], backend="inductor")


@case
def transformer(rank: int) -> None:
    trains(made(Transformer, blocks=1), divided_transformer, [ids(4, 6), ids(1, 6, seed=3)], backend="eager")


@case
def transformer_by_aot(rank: int) -> None:
    trains(made(Transformer), divided_transformer, [ids(4, 6), ids(3, 6, seed=2), ids(1, 6, seed=3), ids(4, 5, seed=4)])


@case
def other_layouts(rank: int) -> None:
    def divide(model: Any) -> nn.Module:
        return divided(
            model,
            up=ColwiseParallel(output_layouts=Replicate()),
            down=RowwiseParallel(input_layouts=Replicate()),
        )

    trains(made(Mlp), divide, [values(5, 6), values(3, 6, seed=2)])


@case
def sequence(rank: int) -> None:
    """Norms whose parameters' gradients are sums over the processes, each with its part of the sequence."""

    class Sequence(nn.Module):
        def __init__(self, world: int = 1) -> None:
            super().__init__()
            self.enter, self.norm, self.mlp = nn.Linear(6, 6), nn.LayerNorm(6), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(self.enter(x)))

    def divide(model: Any) -> nn.Module:
        return divided(
            model,
            **{
                "enter": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(use_local_output=True),
                "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
                "mlp.down": RowwiseParallel(),
            },
        )

    trains(made(Sequence), divide, [values(4, 6, 6), values(3, 6, 6, seed=2), values(1, 6, 6, seed=3)])


class Llama(nn.Module):
    """Pre-norm blocks as torchtitan divides them: between the layers each process has its part of the sequence."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.attention = nn.RMSNorm(width), Attention(width)
            self.second, self.mlp = nn.RMSNorm(width), Mlp(width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.first(x))
            return x + self.mlp(self.second(x))

    def __init__(self, words: int = 8, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(self.Layer(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def divided_llama(model: Any, over: Any = None) -> nn.Module:
    part, whole_, over = Shard(1), Replicate(), over or mesh()
    plan: dict[str, ParallelStyle] = {
        "first": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole_,)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=part),
        "second": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole_,)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=part),
    }
    for layer in model.layers:
        parallelize_module(layer, over, plan)
    around: dict[str, ParallelStyle] = {
        "table": RowwiseParallel(input_layouts=whole_, output_layouts=part),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole_),
    }
    return parallelize_module(model, over, around)


@case
def llama(rank: int) -> None:
    trains(made(Llama, layers=1), divided_llama, [ids(4, 6), ids(1, 6, seed=3), ids(4, 4, seed=4)], backend="eager")


@case
def llama_by_aot(rank: int) -> None:
    trains(made(Llama), divided_llama, [ids(4, 6), ids(3, 6, seed=2), ids(1, 6, seed=3), ids(4, 4, seed=4)])


@case
def llama_tied(rank: int) -> None:
    _trains_tied(made(Llama, layers=1), [ids(4, 4), ids(1, 6, seed=3)], "eager")


@case
def llama_tied_by_aot(rank: int) -> None:
    _trains_tied(made(Llama), [ids(4, 4), ids(1, 6, seed=3), ids(2, 8, seed=5)], "aot_eager")


def _trains_tied(model: Any, batches: list[Tensor], backend: str) -> None:
    """Train where the head is the table, divided by rows: as many samples as positions, and a batch of none."""

    def divide(model: Any) -> nn.Module:
        model = divided_llama(model)
        model.head.weight = model.table.weight
        return model

    model.head.weight = model.table.weight
    trains(model, divide, batches, backend)
    private = fxgrad.transform(divide(model), quantity=fxgrad.ClippedGrad(C), backend=backend)
    loss(private(ids(4, 4))).backward()
    before = {name: whole(p.grad).clone() for name, p in private.named_parameters()}
    loss(private(ids(0, 4))).backward()
    for name, p in private.named_parameters():
        assert_close(p.grad, before[name], name)


@case
def prepared_values(rank: int) -> None:
    """PrepareModuleInput by position and by name, PrepareModuleOutput, and both in one."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor, *, add: Tensor) -> tuple[Tensor, Tensor]:
            return self.mlp(x) + add, x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.add, self.inner, self.leave = nn.Linear(6, 6), nn.Linear(6, 6), Inner(), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y, same = self.inner(self.enter(x), add=self.add(x))
            return self.leave(y) + same

    def divide(model: Any) -> nn.Module:
        part, whole_ = Shard(1), Replicate()
        return divided(
            model,
            **{
                "enter": RowwiseParallel(input_layouts=whole_, output_layouts=part),
                "add": RowwiseParallel(input_layouts=whole_, output_layouts=part),
                "inner": PrepareModuleInputOutput(
                    input_layouts=(part,),
                    desired_input_layouts=(whole_,),
                    input_kwarg_layouts={"add": part},
                    desired_input_kwarg_layouts={"add": whole_},
                    use_local_input=True,
                    output_layouts=(whole_, whole_),
                    desired_output_layouts=(part, whole_),
                ),
                "inner.mlp.up": ColwiseParallel(),
                "inner.mlp.down": RowwiseParallel(),
                "leave": ColwiseParallel(input_layouts=part, output_layouts=whole_),
            },
        )

    trains(made(Outer), divide, [values(4, 6, 6), values(1, 6, 6, seed=3)])


@case
def sums_of_gradients(rank: int) -> None:
    """Grad adds up over two backwards, and frozen and replicated parameters are as they are."""
    model = made(Mlp)
    model.up.bias.requires_grad_(False)  # type: ignore[union-attr]
    alone, private = (
        copy.deepcopy(model),
        fxgrad.transform(divided_mlp(model), quantity=fxgrad.Grad(), backend="aot_eager"),
    )
    for x in (values(5, 6), values(3, 6, seed=2)):
        loss(private(x)).backward()
        loss(alone(x)).backward()
    for (name, p), q in zip(private.named_parameters(), alone.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            assert_close(p.grad, q.grad, name)


@case
def groups(rank: int) -> None:
    """One norm for each layer, over all processes."""
    model = made(Mlp)
    alone, names = copy.deepcopy(model), [["up.weight", "up.bias"], ["down.weight", "down.bias"]]
    clipped = fxgrad.ClippedGrad([0.3, 0.2], groups=names)
    private = fxgrad.transform(divided_mlp(model), quantity=clipped, backend="aot_eager")
    x = values(5, 6)
    loss(private(x)).backward()
    rows = per_sample_grads(alone, loss, (x,))
    for bound, group in zip((0.3, 0.2), names, strict=True):
        factors = (bound / (norms_of({name: rows[name] for name in group}) + 1e-6)).clamp(max=1)
        for name in group:
            expected = torch.einsum("n,n...->...", factors, rows[name])
            assert_close(private.get_parameter(name).grad, expected, name)


@case
def divided_behind_transform(rank: int) -> None:
    model = made(Mlp)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    loss(private(values(5, 6))).backward()
    fxgrad.zero_grad(private)
    alone = copy.deepcopy(model)
    divided_mlp(model)
    x = values(4, 6, seed=2)
    loss(private(x)).backward()
    rows = per_sample_grads(alone, loss, (x,))
    factors = (C / (norms_of(rows) + 1e-6)).clamp(max=1)
    for name, p in private.named_parameters():
        assert_close(p.grad, torch.einsum("n,n...->...", factors, rows[name]), name)


@case
def plain_again(rank: int) -> None:
    """The model itself goes on as PyTorch has it, between transformed calls, too."""
    model = divided_mlp(made(Mlp))
    x = values(4, 6)
    before = model(x)
    private = fxgrad.transform(model, quantity=fxgrad.Grad(), backend="eager")
    loss(private(x)).backward()
    assert_close(model(x), before.detach(), "outputs")
    with torch.no_grad():
        assert_close(private(x), before.detach(), "outputs")
    assert all(isinstance(p, DTensor) for p in private.parameters())


if __name__ == "__main__":
    import tests.parallel_refusals
    from tests.parallel_processes import CASES as EVERY  # not those of __main__

    assert tests.parallel_refusals.CASES is EVERY
    main(int(sys.argv[1]), Path(sys.argv[2]), EVERY)
