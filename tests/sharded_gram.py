"""Cases of tests/sharded_processes.py: `GradGram(all_processes=True)`, against the loop over the samples of all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxgrad
from fxgrad.errors import OptionError
from fxgrad.testing import per_sample_grads, relative_error
from tests.sharded_processes import C, assert_grads, case, clipped_sum, ids, loss, refused, tied, units


class Mixed(nn.Module):
    """One use of each kind: a table, convolutions with and without groups, norms, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(40, 6, padding_idx=3), nn.LayerNorm(8)
        self.conv, self.grouped = nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1, groups=4)
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.conv(self.table(x).mT).relu()).mT
        return self.layer(self.layer(self.norm(x)).tanh()) * self.scale


def products(model: nn.Module, batches: Sequence[Tensor], rank: int, group_size: int = 1) -> Tensor:
    """Return ``[n, m]``: the own samples of one process with those of all, by the loop over single samples."""
    every = []
    for batch in batches:
        rows = per_sample_grads(model, loss, (batch,))
        each = torch.cat(
            [rows[name].unsqueeze(-1).flatten(1) for name, p in model.named_parameters() if p.requires_grad], 1
        )
        every.append(each.unflatten(0, (-1, group_size)).sum(1) if len(batch) else each)
    return every[rank] @ torch.cat(every).t()


def assert_products(got: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if expected.numel():
        assert float((got - expected).abs().max() / expected.abs().max()) <= tolerance


def mixed(sizes: Sequence[int], lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, shape, generator=generator) for shape in zip(sizes, lengths, strict=True)]


BATCHES = [((3, 4), (7, 7)), ((1, 5), (7, 4)), ((0, 2), (3, 3)), ((0, 0), (3, 3)), ((2, 1), (2, 9))]


@case
def products_with_the_samples_of_all(
    rank: int, backend: str = "eager", dtype: torch.dtype = torch.float64, tolerance: float = 1e-10
) -> None:
    """Batches and sequences of any sizes; in float32 through Inductor in tests/sharded_long.py."""
    torch.manual_seed(0)
    model = Mixed().to(dtype)
    gram = fxgrad.GradGram(all_processes=True)
    reports: list[Tensor] = []
    private = fxgrad.transform(
        model, quantity=gram, backend=backend, on_result=lambda _, result: reports.append(result)
    )
    assert str(gram) == "GradGram(all_processes=True)"
    for seed, (sizes, lengths) in enumerate(BATCHES):
        batches = mixed(sizes, lengths, seed)
        loss(private(batches[rank])).backward()
        expected = products(copy.deepcopy(model).double(), batches, rank)
        assert_products(fxgrad.result(private, gram).double(), expected, tolerance)
        assert reports[-1] is fxgrad.result(private, gram)


@case
def products_of_means_and_groups(rank: int) -> None:
    """Each process divides by its own number of rows."""
    model = tied()
    gram = fxgrad.GradGram(all_processes=True, group_size=2)
    private = fxgrad.transform(model, quantity=gram, loss_reduction="mean", backend="eager")
    batches = ids((4, 6))
    outputs = private(batches[rank])
    (loss(outputs) / len(outputs)).backward()
    assert_products(fxgrad.result(private, gram), products(model, batches, rank, group_size=2))


@case
def products_of_forms_that_differ(rank: int) -> None:
    """One process has multiplied out what the other keeps as factors."""
    model = tied(blocks=1)
    gram = fxgrad.GradGram(all_processes=True)
    for ways in (("materialise", "gram"), (None, {"blocks.*": "materialise"})):
        private = fxgrad.transform(
            model, quantity=[gram, fxgrad.NormSample()], strategy=ways[rank], backend="eager", accumulate="overwrite"
        )
        batches = ids((2, 3))
        loss(private(batches[rank])).backward()
        assert_products(fxgrad.result(private, gram), products(model, batches, rank))


@case
def products_beside_a_clipped_sum(rank: int) -> None:
    """On units of FSDP2 and under DistributedDataParallel, with an empty batch among them."""
    arounds: tuple[Callable[[Any], Any], ...] = (units, DistributedDataParallel)
    for around in arounds:
        model = tied(blocks=1)
        alone = copy.deepcopy(model)
        gram = fxgrad.GradGram(all_processes=True)
        private = fxgrad.transform(model, quantity=[fxgrad.ClippedGrad(C), gram], backend="eager")
        wrapped = around(private)
        for sizes in ((3, 2), (0, 4), (1, 2)):
            batches = ids(sizes)
            wrapped.zero_grad()
            loss(wrapped(batches[rank])).backward()
            assert_products(fxgrad.result(private, gram), products(alone, batches, rank))
            expected = clipped_sum(alone, torch.cat(batches))
            if around is units:
                assert_grads(private, expected)
            else:
                grads = {name: p.grad for name, p in private.named_parameters() if p.grad is not None}
                assert relative_error(grads, expected) <= 1e-10


@case
def products_are_refused_in_all_processes(rank: int) -> None:
    """Where the parameters differ; the next step is right. `verify` asks no other process."""
    model: Any = tied()
    gram = fxgrad.GradGram(all_processes=True)
    private = fxgrad.transform(model, quantity=gram, backend="eager")
    batches = ids((2, 3))
    model.head.weight.requires_grad_(rank == 0)
    output = private(batches[rank])
    refused(OptionError, "'table.weight' is trained in one of them alone", lambda: loss(output).backward())
    refused(OptionError, "no backward", lambda: fxgrad.result(private, gram))
    model.head.weight.requires_grad_()
    output = private(batches[rank])
    handle = output.register_hook(lambda _: 1 / 0)
    try:
        loss(output).backward()
    except ZeroDivisionError:
        handle.remove()
    loss(private(batches[rank])).backward()
    assert_products(fxgrad.result(private, gram), products(model, batches, rank))
    if rank == 0:
        assert fxgrad.verify(private, batches[0], loss_fn=loss).ok
    dist.barrier()


@case
def products_of_two_models(rank: int) -> None:
    """The processes meet in one model after the other, and not in two at a time."""
    gram = fxgrad.GradGram(all_processes=True)
    pair = [fxgrad.transform(tied(blocks=1), quantity=gram, backend="eager") for _ in range(2)]
    batches = ids((2, 3))
    for private in pair:
        loss(private(batches[rank])).backward()
        assert_products(fxgrad.result(private, gram), products(tied(blocks=1), batches, rank))
    refused(OptionError, "of different models", lambda: loss(pair[rank](batches[rank])).backward())


@case
def products_of_steps_that_differ(rank: int) -> None:
    """A process whose backward raised, and that goes on alone, meets no earlier step of the other."""
    gram = fxgrad.GradGram(all_processes=True)
    private = fxgrad.transform(tied(blocks=1), quantity=gram, backend="eager")
    batches = ids((2, 3))
    output = private(batches[rank])
    if rank == 0:
        output.register_hook(lambda _: 1 / 0)
        try:
            loss(output).backward()
        except ZeroDivisionError:
            output = private(batches[rank])
    refused(OptionError, "are in different steps: calls 2 and 1", lambda: loss(output).backward())


@case
def products_of_models_that_differ(rank: int) -> None:
    """One process has other shapes, dtypes or groups, or has made models that the other does not know."""
    gram = fxgrad.GradGram(all_processes=True)
    if rank == 0:  # none of these has a call
        refused(OptionError, "in_dims", lambda: fxgrad.transform(tied(), quantity=gram, in_dims="zz"))
        copy.deepcopy(fxgrad.transform(tied(), quantity=gram, backend="eager"))
        fxgrad.warm_up(fxgrad.transform(tied(), quantity=gram, backend="eager"), ids((2, 3))[0])
    for made, part in (
        (nn.Linear(4, 4 + rank), "have different models: 'bias' is"),
        (nn.Linear(4, 4, dtype=(torch.float32, torch.float64)[rank]), "torch.float32 [4] and torch.float64 [4]"),
        (nn.Linear(4, 4, bias=rank == 0), "'bias' is trained in one of them alone"),
    ):
        private = fxgrad.transform(made, quantity=gram, backend="eager")
        output = private(torch.ones(3, 4, dtype=made.weight.dtype))
        refused(OptionError, part, loss(output).backward)
    groups = fxgrad.GradGram(all_processes=True, group_size=1 + rank)
    output = fxgrad.transform(nn.Linear(4, 4), quantity=groups, backend="eager")(torch.ones(2, 4))
    refused(OptionError, "groups of 1 and 2 rows", lambda: loss(output).backward())

    class Kernel(fxgrad.GradGram):
        pass

    kernel = Kernel(all_processes=True)
    refused(OptionError, "Kernel derives from it", lambda: fxgrad.transform(nn.Linear(2, 2), quantity=kernel))
    right = fxgrad.transform(tied(blocks=1), quantity=gram, backend="eager")
    batches = ids((2, 3))
    loss(right(batches[rank])).backward()
    assert_products(fxgrad.result(right, gram), products(tied(blocks=1), batches, rank))


@case
def products_need_the_models_own_call(rank: int) -> None:
    gram = fxgrad.GradGram(all_processes=True)
    options: Any = {"quantity": gram}
    compiled = torch.compile(nn.Linear(2, 2), backend="fxgrad", options=options)
    refused(Exception, "does not work with torch.compile", lambda: compiled(torch.ones(2, 2)))
    checkpointed = fxgrad.transform(nn.Linear(2, 2), quantity=gram, backend="eager")
    x = torch.ones(2, 2, requires_grad=True)
    y: Any = torch.utils.checkpoint.checkpoint(checkpointed, x, use_reentrant=True)
    refused(OptionError, "reentrant checkpoint", lambda: y.sum().backward())
