"""Activation checkpoints and nested compile regions inside the model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager_decomp_partition as partitioned
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fxgrad
from fxgrad.testing import assert_per_sample_grads
from fxgrad.tracing import Trace


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = x + self.dropout(self.down(torch.relu_(self.up(self.norm(x)))))
        return h


class Checkpointed(nn.Module):
    """Blocks, each under a checkpoint of its own where ``reentrant`` is no None."""

    def __init__(self, reentrant: bool | None, width: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head, self.reentrant = nn.Linear(width, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_against_the_loop(backend: str, device: torch.device) -> None:
    x = torch.randn(5, 6, 4, dtype=torch.double, device=device, requires_grad=True)
    assert_per_sample_grads(Checkpointed(False).double().to(device), x, backend=backend)


def test_the_reentrant_form(device: torch.device) -> None:
    """PyTorch's own loop cannot differentiate it by inputs: the model without checkpoints is the reference."""
    x = torch.randn(5, 6, 4, dtype=torch.double, device=device)
    found = []
    for reentrant in (None, True):
        torch.manual_seed(0)
        model = Checkpointed(reentrant).double().to(device)
        assert_per_sample_grads(model, x, backend="aot_eager") if reentrant is None else None
        fxgrad.transform(model, backend="aot_eager")(x).square().sum().backward()
        found.append([parameter.grad_sample for parameter in model.parameters()])  # type: ignore[attr-defined]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_no_samples(device: torch.device, reentrant: bool) -> None:
    """An empty batch runs on stand-ins for the parameters, which a recomputation does not see."""
    model = fxgrad.transform(Checkpointed(reentrant).to(device), quantity=fxgrad.ClippedGrad(1.0), backend="eager")
    x = torch.randn(0, 6, 4, device=device, requires_grad=True)
    model(x).square().sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


class Nested(Checkpointed):
    def both(self, x: Tensor) -> Tensor:
        return self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=False)) * self.head.weight[0, 0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.both, x, use_reentrant=False))
        return out


class Returns(Checkpointed):
    """A checkpoint with keyword arguments, several outputs, a tied layer and a recurrent one inside."""

    def __init__(self) -> None:
        super().__init__(False)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def body(self, x: Tensor, scale: float, other: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.blocks[0](x) * scale, {"h": self.lstm(other)[0]}

    def forward(self, x: Tensor) -> Tensor:
        a, rest = checkpoint(self.body, x, 2.0, other=x.flip(-1), use_reentrant=False)
        out: Tensor = self.head(self.blocks[0](a) + rest["h"])
        return out


@pytest.mark.parametrize("model", [lambda: Nested(False), Returns], ids=["nested", "returns"])
@pytest.mark.parametrize("size", [1, 5])
def test_other_forms(model: Any, size: int, device: torch.device) -> None:
    x = torch.randn(size, 6, 4, dtype=torch.double, device=device)
    assert_per_sample_grads(model().double().to(device), x, backend="aot_eager")


@pytest.mark.inductor
def test_dropout_is_drawn_once(device: torch.device) -> None:
    """What the backward computes again has the forward's own mask: a dropped unit has no gradient."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.dropout = nn.Parameter(torch.ones(64)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(lambda t: torch.sin(self.dropout(t)) * self.scale, x, use_reentrant=False)
            return out

    model = Dropped().to(device)
    out = fxgrad.transform(model)(torch.ones(4, 64, device=device))
    out.sum().backward()
    grad_sample: Tensor = model.scale.grad_sample  # type: ignore[attr-defined]
    torch.testing.assert_close(grad_sample, out.detach())
    assert 0 < (out == 0).sum() < 256


def test_what_is_checkpointed_is_computed_again(device: torch.device) -> None:
    """The forward keeps less for the backward, as the plain model's does."""
    kept = {}
    for reentrant in (None, False):
        torch._dynamo.reset()
        gs = fxgrad.transform(Checkpointed(reentrant, width=32, layers=4).to(device), backend=partitioned)
        out = gs(torch.randn(8, 64, 32, device=device))
        kept[reentrant] = _bytes_kept(out)
    assert kept[False] < 0.5 * kept[None]


def _bytes_kept(out: Tensor) -> int:
    saved = [value.untyped_storage() for value in _saved(out) if isinstance(value, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in saved}.values())


def _saved(out: Tensor) -> list[Any]:
    """What the compiled graph's node keeps for its backward."""
    stack, found = [out.grad_fn], []
    while stack:
        node = stack.pop()
        if node is None:
            continue
        found += list(getattr(node, "saved_tensors", ()))
        stack += [following for following, _ in node.next_functions]
    return found


class Selective(Checkpointed):
    """Blocks of which a policy keeps every second product; it counts them, anew for each checkpoint."""

    def __init__(self, reentrant: bool | None, context_fn: Any = None, width: int = 4) -> None:
        super().__init__(reentrant, width)
        self.context_fn = context_fn

    def block(self, i: int, x: Tensor) -> Tensor:
        block: Block = self.blocks[i]  # type: ignore[assignment]
        return x + block.down(torch.sin(block.up(block.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            if self.context_fn is None:
                x = checkpoint(self.block, i, x, use_reentrant=False)
            else:
                x = checkpoint(self.block, i, x, use_reentrant=False, context_fn=self.context_fn)
        out: Tensor = self.head(x)
        return out


def every_second_product() -> Any:
    seen = 0

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        if op not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen += 1
        return CheckpointPolicy.MUST_SAVE if seen % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


every_product = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("backend", ["eager", partitioned], ids=["eager", "partitioned"])
def test_a_selective_checkpoint_against_the_loop(backend: Any, size: int, device: torch.device) -> None:
    x = torch.randn(size, 6, 4, dtype=torch.double, device=device, requires_grad=True)
    model = Selective(False, every_second_product).double().to(device)
    assert_per_sample_grads(model, x, backend=backend)


def test_what_a_policy_saves_is_kept(device: torch.device) -> None:
    """As much as the plain compiled model keeps, to the byte."""
    kept = []
    for context_fn in (None, every_second_product, every_product):
        torch._dynamo.reset()
        model, x = Selective(False, context_fn).to(device), torch.randn(8, 6, 4, device=device)
        own = _bytes_kept(fxgrad.transform(model, backend=partitioned)(x))
        kept.append(own)
        if context_fn is every_second_product:
            torch._dynamo.reset()
            assert own == _bytes_kept(torch.compile(model, backend=partitioned, dynamic=True)(x))
    assert kept[0] < kept[1] < kept[2]


def test_a_policy_is_asked_about_each_op_once(device: torch.device) -> None:
    asked = []

    def contexts() -> Any:
        asked.append("begin")

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            asked.append(op._schema.name.removeprefix("aten::"))
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    class One(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            body = super().forward
            out: Tensor = checkpoint(lambda t: torch.sin(body(t)), x, use_reentrant=False, context_fn=contexts)
            return out

    fxgrad.transform(One(4, 3).to(device), backend="aot_eager")(torch.randn(5, 4, device=device))
    assert asked[-4:] == ["begin", "t", "addmm", "sin"]
    assert asked.count("addmm") == 1


def test_a_nested_compile_region(device: torch.device) -> None:
    class Regions(Checkpointed):
        def __init__(self) -> None:
            super().__init__(None)
            self.region = torch.compiler.nested_compile_region(lambda block, x: block(x))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.region(block, x)
            out: Tensor = self.head(x)
            return out

    x = torch.randn(5, 6, 4, dtype=torch.double, device=device)
    assert_per_sample_grads(Regions().double().to(device), x, backend="aot_eager")


def test_no_checkpoint_is_left_in_the_graph(device: torch.device) -> None:
    trace: Trace = fxgrad.trace(Checkpointed(False).to(device), torch.randn(5, 4, device=device))
    assert "checkpoint" not in str(trace)


class RecurrentUnderCheckpoints(nn.Module):
    """A recurrent layer whose outputs and last states come out of one checkpoint and go into another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = getattr(nn, kind)(3, 4, batch_first=True)
        self.second = getattr(nn, kind)(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, states = checkpoint(self.first, x, use_reentrant=False)
        z = checkpoint(lambda y, s: dict(zip("ys", self.second(y, s), strict=True)), y, states, use_reentrant=False)
        last = z["s"][0] if isinstance(z["s"], tuple) else z["s"]
        return z["y"].sum(1) + last[-1]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_states_of_recurrent_layers_cross_checkpoints(kind: str) -> None:
    assert_per_sample_grads(RecurrentUnderCheckpoints(kind), torch.randn(5, 6, 3))
