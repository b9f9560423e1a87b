"""One of two processes with SimpleFSDP's models: `python -m tests.simple_processes RANK FOLDER [case ..]`.

Each case compares what SimpleFSDP leaves with the loop over single samples of both processes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fxgrad
from fxgrad.errors import AlreadySet, OptionError, UnclippedGrad
from fxgrad.testing import per_sample_grads
from tests.sharded_processes import WORLD, C, loss, main, refused
from tests.simple_models import FULLY, REPLICATE, Gather, Mlp, Transformer, divided

CASES: dict[str, Callable[[int], None]] = {}
LONG: set[str] = set()
"""Cases of the long run."""


def case(run: Callable[[int], None]) -> Callable[[int], None]:
    CASES[run.__name__] = run
    return run


def long(run: Callable[[int], None]) -> Callable[[int], None]:
    LONG.add(run.__name__)
    return case(run)


def mesh() -> Any:
    return init_device_mesh("cpu", (WORLD,))


def made(kind: Callable[..., nn.Module], dtype: torch.dtype = torch.double) -> Any:
    torch.manual_seed(0)
    return kind().to(dtype)


def rows(sizes: Sequence[int], seed: int = 1, dtype: torch.dtype = torch.double) -> list[Tensor]:
    """Return each process's rows, the same on both."""
    made = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return list(made.to(dtype).split(list(sizes)))


def ids(sizes: Sequence[int], seed: int = 1) -> list[Tensor]:
    return list(torch.randint(7, (sum(sizes), 4), generator=torch.Generator().manual_seed(seed)).split(list(sizes)))


def clipped_sums(model: nn.Module, batch: Sequence[Tensor], divisor: float = WORLD) -> dict[str, Tensor]:
    """Return the clipped sums over all processes, by the loop over single samples."""
    rows = per_sample_grads(model, loss, (torch.cat(list(batch)),))
    each = torch.stack([g.flatten(1).norm(dim=1) for g in rows.values()]).norm(dim=0)
    factors = (C / (each + 1e-6)).clamp(max=1)
    return {name: torch.einsum("n,n...->...", factors, g) / divisor for name, g in rows.items()}


def whole(tensor: Any) -> Tensor:
    value: Tensor = tensor.full_tensor()
    return value


def assert_grads(model: nn.Module, expected: Mapping[str, Tensor | None], tolerance: float = 1e-10) -> None:
    """Compare p.grad, a DTensor placed as its parameter; to the largest entry of any, as keys' biases have noise."""
    largest = max([float(g.abs().max()) for g in expected.values() if g is not None], default=1.0)
    for name, p in model.named_parameters():
        found, value = p.grad, expected.get(name)
        if value is None:
            assert found is None, name
            continue
        assert found is not None, name
        assert type(found) is type(p.data) and found.placements == p.placements, name  # type: ignore[attr-defined]
        assert found.dtype is p.dtype, name
        error = (whole(found) - value).abs().max() / max(float(value.abs().max()), 1e-3 * largest, 1e-30)
        assert error <= tolerance, (name, float(error))


def clipping(model: nn.Module, backend: str = "eager", **options: Any) -> Any:
    return fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C, **options), backend=backend)


SIZES = [(4, 4), (0, 7), (1, 7), (2, 1), (3, 5), (1, 0), (0, 0), (5, 2), (1, 1), (6, 3)]


def trains(
    rank: int,
    model: Any,
    private: Any,
    batches: Sequence[Sequence[Tensor]],
    tolerance: float = 1e-10,
    divisor: float = WORLD,
) -> None:
    """Take private steps of AdamW beside a model on one process, with the gradients of the loop."""
    optimizer = torch.optim.AdamW(private.parameters(), lr=0.01)
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        loss(private(batch[rank])).backward()
        expected = clipped_sums(model, batch, divisor)
        assert_grads(private, expected, tolerance)
        for name, p in model.named_parameters():
            p.grad = expected[name]
        optimizer.step()
        other.step()
    for (name, p), q in zip(private.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(whole(p), q, rtol=0, atol=10 * tolerance), name


@case
def mlp(rank: int) -> None:
    model = made(Mlp)
    trains(rank, model, clipping(divided(copy.deepcopy(model), mesh())), [rows(s, i) for i, s in enumerate(SIZES)])


@case
def transformer(rank: int) -> None:
    model = made(Transformer)
    trains(rank, model, clipping(divided(copy.deepcopy(model), mesh())), [ids(s, i) for i, s in enumerate(SIZES[1:4])])


@long
def mlp_by_aot(rank: int) -> None:
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh()), "aot_eager")
    trains(rank, model, private, [rows(s, i) for i, s in enumerate(SIZES)])


@long
def transformer_by_aot(rank: int) -> None:
    model = made(Transformer)
    private = clipping(divided(copy.deepcopy(model), mesh()), "aot_eager")
    trains(rank, model, private, [ids(s, i) for i, s in enumerate(SIZES)])


@long
def transformer_for_ten_steps(rank: int) -> None:
    model = made(Transformer)
    trains(rank, model, clipping(divided(copy.deepcopy(model), mesh())), [ids(s, i) for i, s in enumerate(SIZES)])


@long
def inductor(rank: int) -> None:
    model = made(Mlp, torch.float32)
    private = clipping(divided(copy.deepcopy(model), mesh()), "inductor")
    trains(rank, model, private, [rows(s, dtype=torch.float32) for s in SIZES[3:6]], tolerance=1e-5)


@case
def replicated(rank: int) -> None:
    """The mode without shards, and the sum in place of the average."""
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh(), REPLICATE, Gather("sum")))
    trains(rank, model, private, [rows(s) for s in SIZES[:4]], divisor=1)


@case
def divided_behind_transform(rank: int) -> None:
    model = made(Mlp)
    other = copy.deepcopy(model)
    private = clipping(other)
    divided(other, mesh())
    trains(rank, model, private, [rows(s) for s in SIZES[:2]])


@case
def collectives_of_a_step(rank: int) -> None:
    """As many as the plain step has; a tied parameter is gathered and reduced once, and by the plain step twice."""
    for kind, batch, tied in ((Mlp, rows((2, 3)), 0), (Transformer, ids((2, 3)), 1)):
        plain = divided(made(kind), mesh())
        counts = [_collectives(one, batch[rank]) for one in (plain, clipping(divided(made(kind), mesh())))]
        parameters = len(list(plain.parameters()))
        assert counts[0] == [parameters + tied] * 2, counts
        assert counts[1] == [parameters] * 2, counts


def _collectives(model: Any, x: Tensor) -> list[int]:
    loss(model(x)).backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss(model(x)).backward()
    every = {one.key: one.count for one in seen.key_averages()}
    return [sum(n for key, n in every.items() if key.startswith(f"_c10d_functional::{op}")) for op in OPS]


OPS = ("all_gather_into_tensor", "reduce_scatter_tensor")


@case
def norms_and_sums(rank: int) -> None:
    """Results are of the process's own samples; Grad is the plain gradient."""
    model = made(Transformer)
    plain = divided(copy.deepcopy(model), mesh())
    norms = fxgrad.NormSample()
    private = fxgrad.transform(divided(copy.deepcopy(model), mesh()), quantity=[norms, fxgrad.Grad()], backend="eager")
    for batch in (ids((2, 3)), ids((0, 2)), ids((1, 4))):
        fxgrad.zero_grad(private)
        plain.zero_grad()
        loss(private(batch[rank])).backward()
        loss(plain(batch[rank])).backward()
        assert_grads(private, {name: whole(p.grad) for name, p in plain.named_parameters()})
        found = per_sample_grads(model, loss, (torch.cat(batch),))
        own = slice(0, len(batch[0])) if rank == 0 else slice(len(batch[0]), None)
        for name, p in private.named_parameters():
            expected = found[name].flatten(1).norm(dim=1)[own]
            assert torch.allclose(p.norm_sample, expected, rtol=1e-10, atol=1e-12), name
        each = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)[own]
        assert torch.allclose(fxgrad.result(private, norms), each, rtol=1e-10)


@case
def bfloat16_by_policy(rank: int) -> None:
    """Norms and sums are those of the gathered value's gradient; p.grad is the parameter's own kind."""
    model = made(Mlp, torch.float32)
    gather = Gather("avg", torch.bfloat16, torch.float32)
    private = clipping(divided(copy.deepcopy(model), mesh(), gather=gather))
    batch = rows((3, 5), dtype=torch.bfloat16)
    outputs = private(batch[rank])
    assert outputs.dtype is torch.bfloat16
    loss(outputs).backward()
    assert_grads(private, clipped_sums(model.double(), [one.double() for one in batch]), tolerance=0.05)


@case
def accumulated_over_steps(rank: int) -> None:
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh()))
    batches = rows((2, 3)), rows((0, 4), seed=2)
    for batch in batches:
        loss(private(batch[rank])).backward()
    sums = [clipped_sums(model, batch) for batch in batches]
    assert_grads(private, {name: sums[0][name] + sums[1][name] for name in sums[0]})


@case
def frozen_between_steps(rank: int) -> None:
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh()))
    batch = rows((2, 3))
    for frozen in ((), ("up.weight", "norm.bias"), ("down.weight",), ()):
        for one in (private, model):
            for name, p in one.named_parameters():
                p.requires_grad_(name not in frozen)
        private.zero_grad()
        loss(private(batch[rank])).backward()
        assert_grads(private, clipped_sums(model, batch))


@case
def gradients_past_the_clipping(rank: int) -> None:
    """What reaches a DTensor through the original model is no clipped gradient."""
    model = divided(made(Mlp), mesh())
    private = clipping(model)
    batch = rows((2, 3))
    for _ in range(2):
        refused(UnclippedGrad, "not clipped", lambda: loss(model(batch[rank])).backward())
        assert all(p.grad is None for p in model.parameters())
        loss(private(batch[rank])).backward()
        private.zero_grad()
    penalty = lambda: (loss(private(batch[rank])) + model.up.weight.square().sum()).backward()  # noqa: E731
    refused(UnclippedGrad, "not clipped", penalty)
    assert all(p.grad is None for p in model.parameters())
    loss(private(batch[rank])).backward()
    assert_grads(private, clipped_sums(made(Mlp), batch))


@case
def plain_again(rank: int) -> None:
    """The model itself goes on as SimpleFSDP has it, and nothing whole is left behind a step."""
    model, plain = (divided(made(Mlp), mesh()) for _ in range(2))
    private = clipping(model)
    batch, kinds = rows((2, 3)), [type(part) for part in model.modules()]
    loss(private(batch[rank])).backward()
    assert [type(part) for part in model.modules()] == kinds
    leaves = [p for p in private.__class__._fxgrad_engine.units.parameters() if p not in set(model.parameters())]
    assert len(leaves) == 6 and all(p.untyped_storage().nbytes() <= 8 for p in leaves)
    with torch.no_grad():
        assert torch.equal(private(batch[rank]), plain(batch[rank]))
    fxgrad.release(private)
    private.zero_grad()
    loss(model(batch[rank])).backward()
    loss(plain(batch[rank])).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(p.grad), whole(q.grad)), name


@case
def forwards_before_backwards(rank: int) -> None:
    """Two forwards of the same weights wait for their backwards; a forward of other weights ends the wait."""
    model = made(Mlp)
    for placements in (FULLY, REPLICATE):
        private = clipping(divided(copy.deepcopy(model), mesh(), placements))
        batches = rows((2, 3)), rows((4, 1), seed=2)
        losses = [loss(private(batch[rank])) for batch in batches]
        for one in losses:
            one.backward()
        sums = [clipped_sums(model, batch) for batch in batches]
        assert_grads(private, {name: sums[0][name] + sums[1][name] for name in sums[0]})
        early, late = (loss(private(batches[0][rank])) for _ in range(2))
        torch.optim.SGD(private.parameters(), lr=0.1).step()
        private.zero_grad()
        early.backward()  # at the weights of the forward
        assert_grads(private, sums[0])
        private.zero_grad()
        newest = loss(private(batches[0][rank]))
        refused(OptionError, "changed between a forward and its backward", late.backward)
        assert all(p.grad is None for p in private.parameters())
        newest.backward()
        stepped = copy.deepcopy(model)
        for (name, p), q in zip(private.named_parameters(), stepped.parameters(), strict=True):
            q.data -= 0.1 * (sums[0][name] + sums[1][name])
            assert torch.allclose(whole(p), q, rtol=0, atol=1e-12), name
        assert_grads(private, clipped_sums(stepped, batches[0]))


@case
def retained_graphs(rank: int) -> None:
    model = made(Mlp)
    private = clipping(divided(copy.deepcopy(model), mesh()))
    batch = rows((2, 3))
    outputs = loss(private(batch[rank]))
    outputs.backward(retain_graph=True)
    outputs.backward()
    assert_grads(private, {name: 2 * g for name, g in clipped_sums(model, batch).items()})
    private.zero_grad()
    outputs = private(batch[rank])
    outputs.sum().backward()
    refused(OptionError, "retain_graph=True", lambda: outputs.sum().backward())
    private.zero_grad()
    losses = [loss(private(batch[rank])) for _ in range(2)]
    refused(AlreadySet, "two forwards of the model meet", (losses[0] + losses[1]).backward)


if __name__ == "__main__":
    import tests.simple_more
    import tests.simple_refusals
    from tests.simple_processes import CASES as EVERY  # not those of __main__

    assert tests.simple_refusals.CASES is tests.simple_more.CASES is EVERY
    main(int(sys.argv[1]), Path(sys.argv[2]), EVERY)
