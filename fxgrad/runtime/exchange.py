"""Inner products with the samples of other processes: `GradGram(all_processes=True)`.

A backward computes the products of the process's own samples, and hands the factors of their gradients over. At its
end the processes exchange them:

    sizes        all know how many samples each has, and of what form its factors are
    factors      of one process after the other: all others multiply their own samples' gradients with them

So the factors of two processes are in memory at a time, and every process takes part, with samples or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxgrad.errors import OptionError
from fxgrad.gradients.others import inner_products
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.kernels.handing import hand_gradients, number_of
from fxgrad.kernels.precision import accumulating
from fxgrad.quantities import Delivery, GradGram, Quantity
from fxgrad.quantities.base import values_of
from fxgrad.runtime.forward import Forward
from fxgrad.terms.part import Packed

_ALIGNED = 16  # bytes; a tensor in a buffer begins at a multiple of this


@dataclass(frozen=True, repr=False)
class GramOfAll(GradGram):
    """The products of the own samples; hands the factors of their gradients over."""

    receiver: int = field(default=0, kw_only=True, repr=False)

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                f"{self} needs processes, and torch.distributed is not initialised",
                advice="Call torch.distributed.init_process_group first, or leave out all_processes=True.",
            )
        return super().deliveries(n, parameters)

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        (own,) = super().compute(grads, n, given)
        for g in (one for one in grads if one.parts):
            packed, lines, scale = g.packed()
            own = hand_gradients(
                own, [scale, *packed.tensors], packed.numbers, packed.layout, lines, g.name, self.receiver
            )
        return [own]

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, GradGram.__name__)


@dataclass(frozen=True)
class _Gradients:
    """The gradients of one parameter: a sum of packed parts times a scale."""

    packed: Packed
    lines: list[int]  # how many, and the elements of one
    scale: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.scale, *self.packed.tensors]

    def form(self) -> Any:
        """Return all but the tensors' values, as plain Python."""
        kinds = [(str(one.dtype).removeprefix("torch."), list(one.shape)) for one in self.tensors]
        return self.packed.layout, self.packed.numbers, self.lines, kinds

    @classmethod
    def of(cls, form: Any, buffer: Tensor, start: int) -> tuple[_Gradients, int]:
        """Return what a buffer holds from a place on, and where that ends."""
        layout, numbers, lines, kinds = form
        tensors = []
        for name, shape in kinds:
            size = _bytes(name, shape)
            tensors.append(buffer[start : start + size].view(getattr(torch, name)).view(shape))
            start += _padded(size)
        return cls(Packed(layout, tensors[1:], numbers), lines, tensors[0]), start


class Exchange:
    """The exchange of one quantity of one model."""

    count = 0  # how many have had a call in this process

    def __init__(self) -> None:
        self.place = 0  # among those that have had a call, by the first: the same in each process
        self.calls = 0
        self.number = number_of(self)
        self.own: dict[str, list[_Gradients]] = {}  # of the running backward, by parameter; a graph adds an entry

    def entered(self, forward: Forward) -> None:
        """Count a call of the model: processes meet only in the same one."""
        if not self.place:
            Exchange.count += 1
            self.place = Exchange.count
        self.calls += 1
        forward.call = self.calls

    def begin(self, forward: Forward) -> None:
        """Forget what a backward that raised has left, before one begins."""
        if forward.enclosing != -1:
            raise OptionError(
                "GradGram(all_processes=True) does not know a transformed model under a reentrant checkpoint",
                advice="Use checkpoints with use_reentrant=False, or transform the model around them.",
            )
        self.own.clear()

    def receive_gradients(
        self, tensors: Sequence[Tensor], numbers: Sequence[int], layout: str, lines: Sequence[int], name: str
    ) -> None:
        """Take the gradients of a parameter; a compiler reuses their memory behind the operator."""
        scale, *own = [one.detach().clone() for one in tensors]
        self.own.setdefault(name, []).append(_Gradients(Packed(layout, own, list(numbers)), list(lines), scale))

    @torch.no_grad()
    def end(self, own: Tensor, forward: Forward, group_size: int) -> Tensor:
        """Return the products ``[n, m]`` of the n own samples with the m of all processes, from ``[n, n]``."""
        gradients, self.own = self.own, {}
        sent = [(name, one.form()) for name, ones in gradients.items() for one in ones]
        forms = _gathered(_Form(self.place, forward.call, group_size, len(own), _parameters(forward), sent))
        blocks = []
        for rank, form in enumerate(forms):
            if rank == dist.get_rank():
                _send(gradients, own.device)
                blocks.append(own)
                continue
            block = own.new_zeros(len(own), form.samples)
            for name, others in _received(form, rank, own.device):
                for mine in gradients.get(name, ()) if block.numel() else ():
                    products = inner_products(mine.packed, mine.lines, others.packed, others.lines)
                    block += (products * mine.scale * others.scale).to(block.dtype)
            blocks.append(block)
        return torch.cat(blocks, 1)


@dataclass(frozen=True)
class _Form:
    """What a process says of its gradients before it sends them."""

    place: int  # of the model
    call: int  # of the model
    group_size: int
    samples: int
    parameters: dict[str, str]  # the shapes of all that it trains, and the dtypes of their products
    gradients: list[tuple[str, Any]]  # of each parameter, in the order in which they are sent


def _parameters(forward: Forward) -> dict[str, str]:
    return {name: f"{accumulating(p.dtype)} {list(p.shape)}" for name, p in forward.parameters.items()}


def _gathered(own: _Form) -> list[_Form]:
    """Return what all processes say, in order; raise in all of them unless they are in one step of one model."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for rank, one in enumerate(every):
        _check_equal(every[0], one, rank)
    return every


def _check_equal(first: _Form, one: _Form, rank: int) -> None:
    """Raise, in every process, where the first and another one do not mean the same."""
    both = f"processes 0 and {rank}"
    if one.place != first.place:
        raise OptionError(
            f"{both} exchange gradients of different models",
            advice="Call the models in one order in every process, and backward() once for each.",
        )
    if one.call != first.call:
        raise OptionError(
            f"{both} are in different steps: calls {first.call} and {one.call} of the model with gradients",
            advice="If one process leaves a step out, as after an error, let all leave it out. Evaluate under "
            "torch.no_grad(). Transform the model anew in every process to count from 0.",
        )
    if one.group_size != first.group_size:
        raise OptionError(
            f"{both} have groups of {first.group_size} and {one.group_size} rows",
            advice="Pass the same group_size in every process.",
        )
    alone = sorted(one.parameters.keys() ^ first.parameters.keys())
    if alone:
        raise OptionError(
            f"{both} train different parameters: '{alone[0]}' is trained in one of them alone",
            advice="Make the same model in every process, and freeze the same parameters.",
        )
    odd = sorted(name for name, kind in one.parameters.items() if kind != first.parameters[name])
    if odd:
        raise OptionError(
            f"{both} have different models: '{odd[0]}' is {first.parameters[odd[0]]} and {one.parameters[odd[0]]}",
            advice="Give the model the same shapes and dtypes in every process.",
        )


def _send(gradients: Mapping[str, Sequence[_Gradients]], device: torch.device) -> None:
    """Send the own gradients to all others, in one buffer."""
    tensors = [tensor for ones in gradients.values() for one in ones for tensor in one.tensors]
    if not tensors:
        return
    pieces = []
    for tensor in tensors:
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        pieces.append(torch.nn.functional.pad(flat, (0, _padded(len(flat)) - len(flat))))
    dist.broadcast(torch.cat(pieces).to(device), src=dist.get_rank())


def _received(form: _Form, rank: int, device: torch.device) -> Iterator[tuple[str, _Gradients]]:
    """Yield the gradients that one process sends, by parameter."""
    if not form.gradients:
        return
    sizes = [_padded(_bytes(*kind)) for _, (*_, kinds) in form.gradients for kind in kinds]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=rank)
    start = 0
    for name, one in form.gradients:
        gradients, start = _Gradients.of(one, buffer, start)
        yield name, gradients


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * int(getattr(torch, dtype).itemsize)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def exchanges_of(quantities: Sequence[Quantity]) -> tuple[dict[int, Exchange], tuple[Quantity, ...]]:
    """Return the exchanges by the places of their quantities, and what each process computes."""
    for quantity in quantities:
        if isinstance(quantity, GradGram) and type(quantity) is not GradGram and quantity.all_processes:
            raise OptionError(
                f"all_processes=True is for GradGram alone, and {type(quantity).__name__} derives from it",
                advice="Use fxgrad.GradGram(all_processes=True), or a quantity of the process's own samples.",
            )
    exchanges = {i: Exchange() for i, q in enumerate(quantities) if type(q) is GradGram and q.all_processes}
    own = [
        GramOfAll(**values_of(q), receiver=exchanges[i].number) if i in exchanges else q
        for i, q in enumerate(quantities)
    ]
    return exchanges, tuple(own)
