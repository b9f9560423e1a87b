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
            dtype = getattr(torch, name)
            size = torch.Size(shape).numel() * dtype.itemsize
            tensors.append(buffer[start : start + size].view(dtype).view(shape))
            start += _padded(size)
        return cls(Packed(layout, tensors[1:], numbers), lines, tensors[0]), start


class Exchange:
    """The exchange of one quantity of one model."""

    count = 0  # how many there have been in this process

    def __init__(self) -> None:
        Exchange.count += 1
        self.place = Exchange.count  # the same in each process, which has made the same models
        self.number = number_of(self)
        self.own: dict[str, list[_Gradients]] = {}  # of the running backward, by parameter; a graph adds an entry

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
    def end(self, own: Tensor, forward: Forward) -> Tensor:
        """Return the products ``[n, m]`` of the n own samples with the m of all processes, from ``[n, n]``."""
        gradients, self.own = self.own, {}
        forms = _gathered(_Form.of(self.place, gradients, own, forward))
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

    place: int
    samples: int
    parameters: dict[str, tuple[int, ...]]  # the shapes of all that it trains
    gradients: list[tuple[str, Any]]  # of each parameter, in the order in which they are sent

    @classmethod
    def of(cls, place: int, gradients: Mapping[str, Sequence[_Gradients]], own: Tensor, forward: Forward) -> _Form:
        shapes = {name: tuple(p.shape) for name, p in forward.parameters.items()}
        return cls(place, len(own), shapes, [(name, one.form()) for name, ones in gradients.items() for one in ones])


def _gathered(own: _Form) -> list[_Form]:
    """Return what all processes say, in order; raise in all of them unless they train the same."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for rank, one in enumerate(every):
        if one.place != every[0].place:
            raise OptionError(
                f"processes 0 and {rank} exchange gradients of different models",
                advice="Transform the models in one order in every process, and call backward() once for each.",
            )
        if one.parameters != every[0].parameters:
            odd = sorted(one.parameters.items() ^ every[0].parameters.items(), key=lambda item: item[0])
            raise OptionError(
                f"processes 0 and {rank} train different parameters: '{odd[0][0]}' is not the same in both",
                advice="Freeze the same parameters in every process.",
            )
    return every


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
    kinds = [kind for _, (*_, kinds) in form.gradients for kind in kinds]
    sizes = [torch.Size(shape).numel() * getattr(torch, name).itemsize for name, shape in kinds]
    buffer = torch.empty(sum(map(_padded, sizes)), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=rank)
    start = 0
    for name, one in form.gradients:
        gradients, start = _Gradients.of(one, buffer, start)
        yield name, gradients


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def exchanges_of(quantities: Sequence[Quantity]) -> tuple[dict[int, Exchange], tuple[Quantity, ...]]:
    """Return the exchanges by the places of their quantities, and what each process computes."""
    exchanges = {i: Exchange() for i, q in enumerate(quantities) if type(q) is GradGram and q.all_processes}
    own = [
        GramOfAll(**values_of(q), receiver=exchanges[i].number) if i in exchanges else q
        for i, q in enumerate(quantities)
    ]
    return exchanges, tuple(own)
