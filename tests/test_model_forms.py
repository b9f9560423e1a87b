"""Forms of Hugging Face models: those in which samples stay apart against the loop, and their neighbours that mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import fxgrad
from fxgrad.errors import FxgradError, LostLayout, MixedSamples, UnknownOp, UnsupportedOp
from fxgrad.testing import assert_per_sample_grads

# of Dynamo itself, which makes one to trace it
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

B, C, T = 4, 2, 5


class Choices(nn.Module):
    """BertForMultipleChoice: words of [B * C, T], and a table's rows by ids that hold no samples."""

    types: Tensor

    def __init__(self, ids_of: Callable[[Tensor, int], Tensor], end: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words, self.table = (
            nn.Parameter(torch.randn(7, 3, generator=generator, dtype=torch.float64)) for _ in range(2)
        )
        self.register_buffer("types", torch.tensor([[0, 1, 2, 2, 1, 0, 3, 3]]))
        self.ids_of, self.end = ids_of, end

    def forward(self, ids: Tensor) -> Tensor:
        return self.end(self, ids, self.ids_of(self.types, len(ids)))


def added(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    """[B * C, T, 3], with the samples outside."""
    h = F.embedding(ids.flatten(0, 1), m.words) + F.embedding(types, m.table)
    return h.tanh().sum((1, 2)).view(-1, C)


def added_by_steps(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    """[C * B, T, 3], with the samples inside."""
    h = F.embedding(ids.transpose(0, 1).flatten(0, 1), m.words) + F.embedding(types, m.table)
    return h.tanh().sum((1, 2)).view(C, -1).t()


def scaled_first(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    copies = (F.embedding(types, m.table, padding_idx=1) * 2).sin()
    return (F.embedding(ids.flatten(0, 1), m.words) * copies).sum((1, 2)).view(-1, C)


def of_a_function(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    h = F.embedding(ids.flatten(0, 1), m.words) * F.embedding(types, m.table.cumsum(0))
    return h.sum((1, 2)).view(-1, C)


def expanded(types: Tensor, b: int) -> Tensor:
    return types[:, :T].expand(b * C, T)


def gathered(types: Tensor, b: int) -> Tensor:
    return torch.gather(types.expand(b * C, -1), 1, torch.arange(T)[None].expand(b * C, -1))


def of_each_choice(types: Tensor, b: int) -> Tensor:
    """Rows that differ between the choices."""
    return types[0, : C * T].view(1, C, T - 1).expand(b, -1, -1).reshape(b * C, -1)


def of_each_choice_inside(types: Tensor, b: int) -> Tensor:
    return types[0, : C * T].view(C, 1, T - 1).expand(-1, b, -1).reshape(b * C, -1)


KEPT: dict[str, tuple[Any, Any, int]] = {
    "expanded ids": (expanded, added, T),
    "gathered ids": (gathered, added, T),
    "ids of each choice": (of_each_choice, added, T - 1),
    "ids of each choice, samples inside": (of_each_choice_inside, added_by_steps, T - 1),
    "copies changed before they meet": (expanded, scaled_first, T),
    "a table that is a function": (expanded, of_a_function, T),
}


def tokens(length: int) -> Tensor:
    return torch.randint(7, (B, C, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", KEPT)
def test_rows_of_a_table_by_ids_without_samples(name: str) -> None:
    ids_of, end, length = KEPT[name]
    assert_per_sample_grads(Choices(ids_of, end), tokens(length), check_sum=True)


def in_two_orders(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    """Meet the samples outside, and then inside."""
    copies = F.embedding(types, m.table)
    one = F.embedding(ids.flatten(0, 1), m.words) * copies
    other = F.embedding(ids.transpose(0, 1).flatten(0, 1), m.words) * copies
    return one.sum((1, 2)).view(-1, C) + other.sum((1, 2)).view(C, -1).t()


def meeting_in_two_orders(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    h = F.embedding(ids.flatten(0, 1), m.words) + F.embedding(types, m.table)
    other = F.embedding(ids.transpose(0, 1).flatten(0, 1), m.words)
    return (h * other).sum((1, 2)).view(-1, C)


def never_met(m: Any, ids: Tensor, types: Tensor) -> Any:
    return F.embedding(ids, m.words), F.embedding(types, m.table).sum((1, 2)).view(-1, C)


def along_copies(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    return F.embedding(ids.flatten(0, 1), m.words) + F.embedding(types, m.table).cumsum(0)


def next_samples(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    h = F.embedding(ids.flatten(0, 1), m.words) + F.embedding(types, m.table)
    return h.roll(1, 0)[0] * h


def of_renormed_rows(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    return F.embedding(ids.flatten(0, 1), m.words) + F.embedding(types, m.table * 2, max_norm=1.0)


def by_frequency(m: Any, ids: Tensor, types: Tensor) -> Tensor:
    return F.embedding(ids.flatten(0, 1), m.words) + F.embedding(types, m.table, scale_grad_by_freq=True)


LOST, ORDERS = "order that cannot be followed", "its operands hold the samples in different orders"
MIXING: dict[Any, tuple[type[FxgradError], str]] = {
    in_two_orders: (MixedSamples, ORDERS),
    meeting_in_two_orders: (MixedSamples, ORDERS),
    never_met: (LostLayout, LOST),
    along_copies: (LostLayout, LOST),
    next_samples: (MixedSamples, "roll lets samples influence each other"),
    of_renormed_rows: (LostLayout, LOST),
    by_frequency: (UnsupportedOp, "it counts an id over the whole batch"),
}


@pytest.mark.parametrize("end", MIXING, ids=lambda end: end.__name__)
def test_rows_of_a_table_that_mix(end: Any) -> None:
    error, said = MIXING[end]
    with pytest.raises(error, match=said):
        fxgrad.transform(Choices(expanded, end), backend="eager")(tokens(T))


class Softmax(Function):
    """A softmax whose backward calls PyTorch's, over a dimension of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dim_of_backward: int) -> Tensor:
        out = x.softmax(dim)
        ctx.dim = dim_of_backward
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return torch._softmax_backward_data(g, out, ctx.dim, out.dtype), None, None


class LogSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, dim_of_backward: int) -> Tensor:
        out = x.log_softmax(dim)
        ctx.dim = dim_of_backward
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return torch._log_softmax_backward_data(g, out, ctx.dim, out.dtype), None, None


class XSoftmax(Softmax):
    """DeBERTa's, with a mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, dim: int) -> Tensor:  # type: ignore[override]
        ctx.dim = dim
        hidden = ~mask
        out = torch.softmax(x.masked_fill(hidden, torch.finfo(x.dtype).min), dim).masked_fill(hidden, 0)
        ctx.save_for_backward(out)
        return out


class Scored(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4).double()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), x)


def values() -> Tensor:
    return torch.randn(B, T, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


SOFTMAXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda h, x: Softmax.apply(h, -1, -1),
    "softmax over steps": lambda h, x: Softmax.apply(h, 1, 1),
    "another dim in the backward": lambda h, x: Softmax.apply(h, 1, 2),
    "log_softmax": lambda h, x: LogSoftmax.apply(h, 2, -1),
    "samples behind": lambda h, x: Softmax.apply(h.movedim(0, 2), 0, 0).movedim(2, 0),
    "merged samples": lambda h, x: Softmax.apply(h.flatten(0, 1), -1, -1).unflatten(0, (-1, T)),
    "with a mask": lambda h, x: XSoftmax.apply(h, (x.sum(-1, keepdim=True) > 0).expand_as(h), -1),
    "the derivative itself": lambda h, x: torch._softmax_backward_data(
        h, x.softmax(-1).repeat(1, 1, 2)[..., :4], 1, h.dtype
    ),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_derivatives_of_softmax_in_a_backward(name: str) -> None:
    assert_per_sample_grads(Scored(SOFTMAXES[name]), values())


OVER_SAMPLES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax over samples": lambda h, x: Softmax.apply(h, 0, 0),
    "its backward alone": lambda h, x: Softmax.apply(h, -1, 0),
    "log_softmax's backward alone": lambda h, x: LogSoftmax.apply(h, -1, -3),
    "merged samples": lambda h, x: Softmax.apply(h.flatten(0, 1), -1, 0),
    "the derivative itself": lambda h, x: torch._softmax_backward_data(h, h.detach(), 0, h.dtype),
    "the derivative at others": lambda h, x: torch._softmax_backward_data(h, h.detach().roll(1, 0), 2, h.dtype),
    "the derivative in another order": lambda h, x: torch._softmax_backward_data(
        h.flatten(0, 1), h.detach().transpose(0, 1).flatten(0, 1), 1, h.dtype
    ),
}


@pytest.mark.parametrize("name", OVER_SAMPLES)
def test_derivatives_of_softmax_over_samples(name: str) -> None:
    with pytest.raises(MixedSamples, match=r"influence each other"):
        fxgrad.transform(Scored(OVER_SAMPLES[name]), backend="eager")(values())


class OfGroupNorm(Function):
    """Its backward calls an op that the proof does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        mean = x.mean((1, 2))[:, None]
        backward = torch.ops.aten.native_group_norm_backward
        by_x: Tensor = backward(g, x, mean, mean, None, len(x), T, 4, 1, [True, False, False])[0]
        return by_x


def test_an_unknown_op_in_a_backward() -> None:
    with pytest.raises(UnknownOp, match="fxgrad does not know how native_group_norm_backward treats samples"):
        fxgrad.transform(Scored(lambda h, x: OfGroupNorm.apply(h)), backend="eager")(values())


class Cache:
    """An object that is no dataclass, as DynamicCache is none."""

    def __init__(self, *layers: Tensor) -> None:
        self.layers = list(layers)


class Cached(nn.Module):
    """Put what the layer gives behind what a cache holds."""

    def __init__(self, read: Callable[[Any], Cache] = lambda cache: cache) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        self.read = read

    def forward(self, x: Tensor, past: Any) -> Tensor:
        return torch.cat([self.read(past).layers[0], self.layer(x)], 1).cumsum(1)


def test_samples_in_an_object() -> None:
    """The error names them, and the way that it shows leads on."""
    said = r"input 'past.layers\[0\]' is as long as the batch, and in an object"
    with pytest.raises(LostLayout, match=said):
        fxgrad.transform(Cached(), backend="eager")(values(), Cache(values()))
    assert_per_sample_grads(Cached(lambda past: Cache(*past)), values(), [values()])


def test_an_object_that_is_not_at_fault() -> None:
    fixed = Cached(lambda past: Cache(torch.zeros(B, T, 3) + past.layers[0]))
    for held in (torch.zeros(T, 1), torch.zeros(1)):
        with pytest.raises(LostLayout, match=r"cat does not work for every number(?s:.)*Write sizes in terms of"):
            fxgrad.transform(fixed, backend="eager")(values(), Cache(held))


def written_rows(h: Tensor) -> Tensor:
    rows = list(h)
    rows[0].mul_(2)
    return torch.stack(rows)


def written_result(h: Tensor) -> Tensor:
    """The result is a copy: h keeps its values."""
    result = torch.cat(list(h))
    result.mul_(2)
    return result.unflatten(0, (-1, T)) * h


def without_a_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        rows = list(h)
    return torch.stack(rows) * h


def all_without_a_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        copy = torch.stack(list(h))
    return copy * h


# LLaVA's torch.cat(list(features)), and other ways to write it
REJOINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat of a list": lambda h, x: torch.cat(list(h), 0).unflatten(0, (-1, T)) * 2,
    "concat": lambda h, x: torch.concat([*h], dim=0).sin().unflatten(0, (-1, T)),
    "stack of unbind": lambda h, x: torch.stack(h.unbind()).sin(),
    "stack of unbind along 0": lambda h, x: torch.stack(tuple(torch.unbind(h, dim=0)), dim=0),
    "stack by places": lambda h, x: torch.stack([h[i] for i in range(len(h))]),
    "twice": lambda h, x: torch.stack(list(torch.stack(list(h)).sin())),
    "with a sum of rows": lambda h, x: torch.stack(list(h)).sum(),
    "another dim than the samples'": lambda h, x: (
        torch.cat(list(h.transpose(0, 1))).unflatten(0, (T, -1)).transpose(0, 1)
    ),
    "the result written over": lambda h, x: written_result(h),
    "without a gradient": lambda h, x: all_without_a_gradient(h),
}


@pytest.mark.parametrize("name", REJOINED)
def test_rows_put_together_again(name: str) -> None:
    assert_per_sample_grads(Scored(REJOINED[name]), values())


def test_rows_of_other_batches() -> None:
    """A graph is for its number of rows: each number has its own."""
    model = Scored(lambda h, x: torch.cat(list(h)).sin().unflatten(0, (-1, T)))
    alone = [torch.autograd.grad(model(x[None]).sum(), [*model.parameters()]) for x in values()]
    view = fxgrad.transform(model, backend="eager")
    for size in (3, 1, 4, 2):
        fxgrad.zero_grad(model)
        view(values()[:size]).sum().backward()
        for k, p in enumerate(model.parameters()):
            truth = torch.stack([grads[k] for grads in alone[:size]])
            torch.testing.assert_close(p.grad_sample, truth)  # type: ignore[attr-defined]


MOVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "backwards": lambda h, x: torch.stack([*h][::-1]),
    "all but one": lambda h, x: torch.cat([*h][1:]),
    "one twice": lambda h, x: torch.stack([h[0], h[0], h[2], h[3]]),
    "the first ones": lambda h, x: torch.stack([h[0], h[1]]),
    "of two values": lambda h, x: torch.stack([h[0], h[1], h.sin()[2], h[3]]),
    "side by side": lambda h, x: torch.cat(list(h), 1),
    "one summed": lambda h, x: torch.stack([*h[:3], h[3] + h[0]]),
    "joined and picked": lambda h, x: torch.stack(list(h))[1] * h,
    "a row beside": lambda h, x: torch.stack(list(h)) * h[0],
    "rows written over": lambda h, x: written_rows(h),
    "rows without a gradient": lambda h, x: without_a_gradient(h),
    "scaled one by one": lambda h, x: torch.stack([row * i for i, row in enumerate(h)]),
}


@pytest.mark.parametrize("name", MOVED)
def test_rows_put_together_otherwise(name: str) -> None:
    said = "out of the batch by their places|influence each other|does not work for every number of samples"
    with pytest.raises((MixedSamples, LostLayout), match=said):
        fxgrad.transform(Scored(MOVED[name]), backend="eager")(values())
