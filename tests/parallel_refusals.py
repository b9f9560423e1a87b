"""What tensor parallelism refuses: cases of tests/parallel_processes.py, on both processes."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import fxgrad
import fxgrad.opacus
from fxgrad.errors import FxgradError, MixedSamples, OptionError, UnclippedGrad
from tests.parallel_processes import (
    CASES,
    Block,
    C,
    Llama,
    Mlp,
    Transformer,
    assert_close,
    case,
    divided,
    divided_llama,
    divided_mlp,
    ids,
    made,
    mesh,
    values,
    whole,
)
from tests.sharded_processes import loss, refused

__all__ = ["CASES"]


class Styled(PrepareModuleInput):
    """A style of the user's own."""

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), desired_input_layouts=Replicate())


def refused_call(part: str, model: nn.Module, x: Tensor, quantity: Any = None) -> None:
    quantity = fxgrad.ClippedGrad(C) if quantity is None else quantity
    refused(OptionError, part, lambda: fxgrad.transform(model, quantity=quantity, backend="eager")(x))


@case
def other_inputs(rank: int) -> None:
    private = fxgrad.transform(divided_mlp(made(Mlp)), quantity=fxgrad.ClippedGrad(C), backend="eager")
    refused(OptionError, "different inputs", lambda: private(values(4, 6, seed=rank)))
    refused(OptionError, "different inputs", lambda: private(values(4 + rank, 6)))
    loss(private(values(4, 6))).backward()


@case
def other_weights(rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(6), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.norm(x))

    model = divided(made(Model), **{"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    with torch.no_grad():
        model.norm.weight.add_(rank)  # type: ignore[operator, union-attr]
    refused_call("different replicated parameters", model, values(4, 6))


@case
def rank_in_forward(rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x * (1 + rank))

    model = divided(made(Model), **{"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    refused_call("different programs", model, values(4, 6))


@case
def parameter_between(rank: int) -> None:
    """A parameter on a part of a value: PyTorch leaves another gradient of it on each process."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.scale, self.down = nn.Linear(6, 12), nn.Parameter(torch.ones(6)), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x) * self.scale)

    model = divided(made(Model), up=ColwiseParallel(), down=RowwiseParallel())
    refused_call("its gradient would be another one on each", model, values(4, 6))


@case
def replicated_beside_sharded(rank: int) -> None:
    """The input of a sharded layer, used once more beside it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 12), nn.Linear(12, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.down(self.up(x) + x)

    model = divided(made(Model), up=ColwiseParallel(), down=RowwiseParallel())
    refused_call("its gradient would be another one on each", model, values(4, 6))


@case
def varying_output(rank: int) -> None:
    model = divided(made(Mlp), up=ColwiseParallel(output_layouts=Replicate()), down=ColwiseParallel())
    refused_call("returns a value that differs", model, values(4, 6))


@case
def wrong_layout(rank: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 12), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = divided(made(Model), first=ColwiseParallel(), second=ColwiseParallel(output_layouts=Replicate()))
    refused_call("takes a value that differs", model, values(4, 6))
    model = divided(
        made(Mlp), up=ColwiseParallel(output_layouts=Replicate()), down=ColwiseParallel(input_layouts=Shard(1))
    )
    refused_call("takes a value that is equal", model, values(4, 6, 6))


@case
def outside_of_a_table(rank: int) -> None:
    """Where no process has the row, a look-up would be 0 in silence."""
    model = fxgrad.transform(divided_llama(made(Llama)), quantity=fxgrad.ClippedGrad(C), backend="eager")
    model(ids(4, 6))
    for wrong in (8, -1):
        x = ids(4, 6)
        x[0, 0] = wrong
        refused(Exception, "outside of an embedding's table", lambda x=x: model(x))  # type: ignore[misc]


@case
def samples_divided(rank: int) -> None:
    """PrepareModuleInput over the samples would put those of several processes together."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.mlp = nn.Linear(6, 6), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.enter(x))

    model = divided(
        made(Model),
        enter=RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        mlp=PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    )
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    refused(MixedSamples, "scatter_to_region lets samples influence", lambda: private(values(4, 6)))


@case
def dropout(rank: int) -> None:
    """PyTorch draws another mask on each process."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.mlp = nn.Linear(6, 6), Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(F.dropout(self.enter(x), 0.5))

    model = divided(made(Model), **{"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    refused_call("random numbers", model, values(4, 6))


@case
def hooks_of_parameters(rank: int) -> None:
    """A hook of the user's on a DTensor sees no gradient."""
    model = divided_mlp(made(Mlp))
    handle = model.get_parameter("up.weight").register_hook(lambda g: g)
    refused_call("with a hook", model, values(4, 6))
    handle.remove()


@case
def guarded(rank: int) -> None:
    """What the original model adds to p.grad is not clipped."""
    model = divided_mlp(made(Mlp))
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager")
    x = values(4, 6)
    loss(private(x)).backward()
    grads = [whole(p.grad).clone() for p in model.parameters()]
    refused(UnclippedGrad, "not clipped", lambda: loss(model(x)).backward())
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert_close(p.grad, grad, "p.grad")


@case
def two_views(rank: int) -> None:
    """A view that does not clip beside one that does, and two that clip in one backward."""
    model = divided_mlp(made(Mlp))
    clipping = [fxgrad.transform(model, quantity=fxgrad.ClippedGrad(C), backend="eager") for _ in range(2)]
    summing = fxgrad.transform(model, quantity=fxgrad.Grad(), backend="eager")
    x = values(4, 6)
    said = "another transformed view of the model clips"
    refused(UnclippedGrad, said, lambda: loss(summing(x)).backward())
    assert all(p.grad is None for p in model.parameters())
    both = loss(clipping[0](x)) + loss(clipping[1](x))
    refused(UnclippedGrad, "two transformed models deliver it", both.backward)
    assert all(p.grad is None for p in model.parameters())
    loss(clipping[0](x)).backward()


@case
def around(rank: int) -> None:
    """What goes around a model would wait for gradients that do not come by autograd."""
    private = fxgrad.transform(divided_mlp(made(Mlp)), quantity=fxgrad.ClippedGrad(C), backend="eager")
    with mock.patch("fxgrad.capture.parallel.wrapped_by_ddp", lambda: private):
        refused(OptionError, "around a tensor-parallel", lambda: private(values(4, 6)))


@case
def by_name(rank: int) -> None:
    """What is not known is refused before anything runs."""

    def refuse(part: str, model: nn.Module, **options: Any) -> None:
        known: dict[str, Any] = {"quantity": fxgrad.ClippedGrad(C), "backend": "eager", **options}
        refused(OptionError, part, lambda: fxgrad.transform(model, **known))

    refuse("GradSample", divided_mlp(made(Mlp)), quantity=fxgrad.GradSample())
    refuse("GradGram(all_processes=True)", divided_mlp(made(Mlp)), quantity=fxgrad.GradGram(all_processes=True))
    refuse("SquaredGrad", divided_mlp(made(Mlp)), quantity=fxgrad.SquaredGrad())
    refuse("check_first_batch", divided_mlp(made(Mlp)), check_first_batch=True)
    refuse("mixing", divided_mlp(made(Mlp)), quantity=fxgrad.Grad(), mixing="allow")
    refuse("use_local_output", divided(made(Mlp), up=ColwiseParallel(use_local_output=False), down=RowwiseParallel()))
    refuse("different sizes", divided(made(Mlp, 7), up=RowwiseParallel()))
    refuse("SequenceParallel", divided(made(Block), first=SequenceParallel()))
    whole_, part = Replicate(), Shard(1)
    padded = made(lambda: nn.Sequential(nn.Embedding(8, 4, padding_idx=0)))
    refuse("padding_idx", divided(padded, **{"0": RowwiseParallel(input_layouts=whole_)}))
    refuse("input_layouts", divided(made(Transformer, 8), table=RowwiseParallel(input_layouts=part)))
    refuse("stay DTensors", divided(made(Mlp), up=PrepareModuleInput(input_layouts=whole_, desired_input_layouts=part)))
    refuse(
        "from S(1) to S(0)",
        divided(made(Mlp), up=PrepareModuleOutput(output_layouts=part, desired_output_layouts=Shard(0))),
    )
    refuse("style", divided(made(Mlp), up=Styled()))
    by_hand = made(Mlp)
    by_hand.up.weight = nn.Parameter(distribute_tensor(by_hand.up.weight, mesh(), [Shard(0)]))  # type: ignore
    refuse("no parallel layer", by_hand)
    refused(FxgradError, "tensor-parallel", lambda: fxgrad.trace(divided_mlp(made(Mlp)), values(4, 6)))
    refused(FxgradError, "tensor-parallel", lambda: fxgrad.verify(divided_mlp(made(Mlp)), values(4, 6)))


def prepare(module: nn.Module, **options: Any) -> Any:
    """Make a model private, as a user would."""
    data = torch.utils.data.TensorDataset(values(8, 6), values(8, 6))
    return fxgrad.opacus.make_private(
        PrivacyEngine(),
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        one_backward=True,
        check_first_batch=False,
        backend="eager",
        **options,
    )


@case
def private_training(rank: int) -> None:
    """Noise of each process's own would let the replicas of a parameter differ."""

    said = "make_private does not know tensor-parallel models"
    refused(OptionError, said, lambda: prepare(divided_mlp(made(Mlp)), independent=True))
    transformed = fxgrad.transform(divided_mlp(made(Mlp)), quantity=fxgrad.ClippedGrad(1.0), backend="eager")
    refused(OptionError, said, lambda: prepare(transformed, independent=True))
    model = made(Mlp)
    private, *_kept = prepare(model, independent=True)  # without its optimizer a model is not private
    divided_mlp(model)
    gc.collect()
    refused(
        OptionError, "divided by fully_shard or parallelize_module after make_private", lambda: private(values(4, 6))
    )
