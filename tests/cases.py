"""The table of cases: one line for one use of one op.

A line names the op (its first word) and what is special about the use, and gives the call with its arguments:
`x(..., 3)` is an input that holds samples, `[B, *extra, 3]`, and `w(4, 3)` a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxgrad.kernels.grouped import grouped_rows

BATCH = 5
EXTRA: tuple[tuple[int, ...], ...] = ((), (BATCH,), (2, 3))
"""Dims between the samples and the op's own: none, one (as large as the batch, which must not matter), two."""


@dataclass(frozen=True)
class Input:
    """One sample's shape, `...` where extra dims may stand; integers below `high` where it is given."""

    shape: tuple[int | EllipsisType, ...]
    high: int = 0

    def make(self, extra: Sequence[int], device: torch.device, requires_grad: bool) -> Tensor:
        sizes = [size for item in self.shape for size in (extra if item is ... else (item,))]
        if self.high:
            return torch.randint(self.high, (BATCH, *sizes), device=device)
        value = torch.randn(BATCH, *sizes, dtype=torch.float64, device=device)
        return value.requires_grad_(requires_grad)


@dataclass(frozen=True)
class Weight:
    shape: tuple[int, ...]


def x(*shape: int | EllipsisType) -> Input:
    """An input of floats."""
    return Input(shape)


def ids(high: int, *shape: int | EllipsisType) -> Input:
    """An input of integers below `high`."""
    return Input(shape, high)


def w(*shape: int) -> Weight:
    """A parameter."""
    return Weight(shape)


class Op(nn.Module):
    """`call` on inputs and parameters, as a module."""

    def __init__(self, call: Callable[..., Any], arguments: Sequence[Input | Weight]) -> None:
        super().__init__()
        self.call = call
        self.names = [f"w{i}" if isinstance(a, Weight) else None for i, a in enumerate(arguments)]
        for name, argument in zip(self.names, arguments, strict=True):
            if isinstance(argument, Weight):
                assert name is not None
                self.register_parameter(name, nn.Parameter(torch.empty(argument.shape)))

    def forward(self, *inputs: Tensor) -> Any:
        rest = iter(inputs)
        arguments = [next(rest) if name is None else getattr(self, name) for name in self.names]
        return self.call(*arguments)


@dataclass(frozen=True)
class Case:
    """A model made around one op, and the inputs it takes."""

    name: str
    build: Callable[[], nn.Module]
    arguments: tuple[Input, ...]
    tolerance: float | None = None

    @property
    def op(self) -> str:
        """The canonical name of the op that the case is about."""
        return self.name.split()[0]

    @property
    def extra(self) -> tuple[tuple[int, ...], ...]:
        return EXTRA if any(... in argument.shape for argument in self.arguments) else EXTRA[:1]

    @property
    def leading(self) -> bool:
        """Whether all extra dims stand right behind the samples."""
        return all(argument.shape[:1] == (...,) for argument in self.arguments)

    def model(self, device: torch.device) -> nn.Module:
        """The model in float64, with random parameters and buffers."""
        model = self.build().to(device, torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
            for name, buffer in model.named_buffers():
                if name.startswith("running"):
                    buffer.copy_(torch.rand(buffer.shape) + 0.5)
        return model

    def inputs(self, device: torch.device, extra: Sequence[int] = (), requires_grad: bool = True) -> list[Tensor]:
        return [argument.make(extra, device, requires_grad) for argument in self.arguments]


def case(name: str, call: Callable[..., Any], *arguments: Input | Weight, tolerance: float | None = None) -> Case:
    """`call(*arguments)`"""
    inputs = tuple(argument for argument in arguments if isinstance(argument, Input))
    return Case(name, lambda: Op(call, arguments), inputs, tolerance)


def layer(name: str, build: Callable[[], nn.Module], *inputs: Input) -> Case:
    """`build()(*inputs)`"""
    return Case(name, build, inputs)


def with_(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """The function with some arguments given (a plain function: TorchDynamo sees through it)."""

    def call(*arguments: Any) -> Any:
        return function(*arguments, **settings)

    return call


PRODUCTS = [
    case("linear", F.linear, x(..., 3), w(4, 3), w(4)),
    case("linear without bias", F.linear, x(..., 3), w(4, 3)),
    case("linear to one number", F.linear, x(..., 3), w(3)),
    case("linear to one number, with a bias", F.linear, x(..., 2, 3), w(3), w()),
    case("linear of a parameter, by the samples", lambda x, w: F.linear(w, x).T, x(3), w(4, 3)),
    case("linear twice with one weight", lambda x, w, b: F.linear(F.linear(x, w, b), w), x(..., 3), w(3, 3), w(3)),
    case("matmul", torch.matmul, x(..., 4, 3), w(3, 2)),
    case("matmul from the left", torch.matmul, w(2, 4), x(..., 4, 3)),
    case("matmul as an operator", lambda x, w: x @ w, x(..., 3), w(3, 2)),
    case("matmul as a method", lambda x, w: w.matmul(x), x(..., 4, 3), w(2, 4)),
    case("matmul with a vector", torch.matmul, x(..., 3), w(3)),
    case("matmul with a vector from the left", torch.matmul, w(4), x(..., 4, 3)),
    case("matmul with a batch of weights", torch.matmul, x(..., 2, 4, 3), w(2, 3, 2)),
    case("matmul with a batch of weights from the left", torch.matmul, w(2, 2, 4), x(..., 2, 4, 3)),
    case("matmul with a batch of one weight", torch.matmul, x(..., 2, 4, 3), w(1, 3, 2)),
    case("matmul with a batch of one weight from the left", torch.matmul, w(1, 2, 4), x(..., 2, 4, 3)),
    case("matmul with more dims", lambda x, w: (x @ w).movedim(1, 0), x(4, 3), w(6, 1, 3, 2)),
    case("matmul with more dims from the left", lambda x, w: (w @ x).movedim(1, 0), x(4, 3), w(6, 1, 2, 4)),
    case("matmul over columns of samples", lambda x, w: (w @ x.T).T, x(3), w(4, 3)),
    case("matmul with one weight on both sides", lambda x, w: w @ (x @ w), x(..., 3, 3), w(3, 3)),
    case("rmatmul", lambda x, w: x.__rmatmul__(w), x(..., 4, 3), w(2, 4)),
    case("rmatmul from the left", lambda x, w: w.__rmatmul__(x), x(..., 4, 3), w(3, 2)),
    case("mm", torch.mm, x(3), w(3, 4)),
    case("mm from the left", lambda x, w: torch.mm(w, x.t()).t(), x(3), w(4, 3)),
    case("bmm", lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), x(2, 3), w(2, 3, 4)),
    case("bmm from the left", lambda x, w: torch.bmm(w, x.permute(1, 2, 0)).permute(2, 0, 1), x(2, 3), w(2, 4, 3)),
    case("mv", torch.mv, x(3), w(3)),
    case("addmm", torch.addmm, w(4), x(3), w(3, 4)),
    case("addmm scaled", with_(torch.addmm, beta=0.5, alpha=2.0), w(1, 4), x(3), w(3, 4)),
    case("addmm of a number", torch.addmm, w(1), x(3), w(3, 4)),
    case("addmm as a method", lambda b, x, w: b.addmm(x, w, beta=2), w(4), x(3), w(3, 4)),
    case("addmm from the left", lambda b, w, x: torch.addmm(b, w, x.t(), alpha=3).t(), w(4, 1), w(4, 3), x(3)),
    case("addmm to the samples", torch.addmm, x(4), x(3), w(3, 4)),
    case("baddbmm", lambda b, x, w: torch.baddbmm(b, x.transpose(0, 1), w, beta=0.5, alpha=2).transpose(0, 1),
         w(2, 1, 4), x(2, 3), w(2, 3, 4)),
    case("baddbmm from the left", lambda b, w, x: torch.baddbmm(b, w, x.permute(1, 2, 0)).permute(2, 0, 1),
         w(2, 4, 1), w(2, 4, 3), x(2, 3)),
    case("baddbmm of a bias alone", with_(torch.baddbmm, beta=2), w(2, 4), x(2, 3), x(3, 4)),
    case("bmm of every sample's own copy", lambda x, w: torch.bmm(x, w.expand(len(x), 3, 4)), x(6, 3), w(3, 4)),
    case("matmul of every sample's own copy", lambda x, w: w.expand(len(x), 4, 6) @ x, x(6, 3), w(4, 6)),
    case("einsum of every sample's own copy", lambda x, w: torch.einsum("bti,bio->bto", x, w.expand(len(x), 3, 4)),
         x(6, 3), w(3, 4)),
    case("expand read and added",
         lambda i, x, w: w.expand(len(i), 7, 3).gather(1, i) + w.expand(len(i), 7, 3)[:, :6] * x,
         ids(7, 6, 3), x(6, 3), w(7, 3)),
    case("addmv", torch.addmv, x(), x(3), w(3)),
    case("tensordot", with_(torch.tensordot, dims=1), x(..., 3), w(3, 4)),
    case("tensordot of two dims", with_(torch.tensordot, dims=([2, 1], [0, 2])), x(4, 3), w(3, 2, 4)),
    case("tensordot from the left", lambda x, w: torch.tensordot(w, x, dims=([-1], [2])).movedim(2, 0), x(4, 3),
         w(5, 2, 3)),
    case("outer", lambda x, w: torch.outer(x, w), x(), w(3)),
    case("bilinear", F.bilinear, x(..., 3), x(..., 2), w(4, 3, 2), w(4)),
]  # fmt: skip


def einsum(equation: str) -> Callable[..., Tensor]:
    def call(*operands: Tensor) -> Tensor:
        return torch.einsum(equation, *operands)

    return call


EINSUMS = [
    case("einsum", einsum("bi,oi->bo"), x(3), w(4, 3)),
    case("einsum with the weight first", einsum("oi,bti->bto"), w(4, 3), x(2, 3)),
    case("einsum over heads", einsum("bti,hid->bhtd"), x(4, 3), w(2, 3, 5)),
    case("einsum into a sum", einsum("bti,oi->bo"), x(2, 3), w(4, 3)),
    case("einsum elementwise", einsum("bti,i->bti"), x(2, 3), w(3)),
    case("einsum outer", einsum("b,i->bi"), x(), w(3)),
    case("einsum of three", einsum("bi,ij,bj->b"), x(3), w(3, 4), x(4)),
    case("einsum of two parameters", einsum("bi,ij,jk->bk"), x(3), w(3, 4), w(4, 2)),
    case("einsum with one weight twice", lambda x, w: torch.einsum("bi,ij,jk->bk", x, w, w), x(3), w(3, 3)),
    case("einsum with dots", einsum("...i,oi->...o"), x(..., 3), w(4, 3)),
    case("einsum with dots in the weight", einsum("bhi,...oi->bh...o"), x(2, 3), w(6, 4, 3)),
    case("einsum with the result left out", einsum("bi,ij"), x(3), w(3, 4)),
    case("einsum with a summed letter of the weight", einsum("bi,io->b"), x(3), w(3, 4)),
    case("einsum with a letter of the weight alone", einsum("bi,ioz->bo"), x(3), w(3, 4, 2)),
    case("einsum of a diagonal", einsum("bi,ii->bi"), x(3), w(3, 3)),
    case("einsum with broadcasting", einsum("bti,ti->bi"), x(4, 3), w(1, 3)),
    case("einsum with a letter n", einsum("bnd,de->bne"), x(2, 3), w(3, 4)),
    case("einsum with n of the weight", einsum("btd,nd->btn"), x(2, 3), w(4, 3)),
    case("einsum with spaces", einsum("b i, o i -> b o"), x(3), w(4, 3)),
    case("einsum with a list", lambda x, w: torch.einsum("bi,oi->bo", [x, w]), x(3), w(4, 3)),
    case("einsum of sublists", lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [0, 2]), x(3), w(4, 3)),
]

CONVOLUTIONS = [
    case("conv1d", F.conv1d, x(4, 9), w(6, 4, 3), w(6)),
    case("conv1d without bias", F.conv1d, x(4, 9), w(6, 4, 3)),
    case("conv1d strided past the end", with_(F.conv1d, stride=3), x(4, 9), w(6, 4, 2), w(6)),
    case("conv1d padded and dilated", with_(F.conv1d, padding=2, dilation=2), x(4, 9), w(6, 4, 3), w(6)),
    case("conv1d same, odd total", with_(F.conv1d, padding="same"), x(4, 9), w(6, 4, 4), w(6)),
    case("conv1d same, odd total, dilated", with_(F.conv1d, padding="same", dilation=3), x(4, 9), w(6, 4, 2)),
    case("conv1d in groups", with_(F.conv1d, groups=2), x(4, 9), w(6, 2, 3), w(6)),
    case("conv1d by the position", F.conv1d, x(4, 9), w(6, 4, 1), w(6)),
    case("conv1d of one window", F.conv1d, x(4, 3), w(6, 4, 3), w(6)),
    case("conv2d", F.conv2d, x(4, 6, 5), w(6, 4, 3, 2), w(6)),
    case("conv2d strided", with_(F.conv2d, stride=2, padding=1), x(4, 6, 5), w(6, 4, 3, 3), w(6)),
    case("conv2d with pairs", with_(F.conv2d, stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
         x(4, 6, 5), w(6, 4, 3, 2), w(6)),
    case("conv2d same", with_(F.conv2d, padding="same", dilation=2), x(4, 6, 5), w(6, 4, 3, 3), w(6)),
    case("conv2d same, odd totals", with_(F.conv2d, padding="same"), x(4, 6, 5), w(6, 4, 2, 3), w(6)),
    case("conv2d valid", with_(F.conv2d, padding="valid", stride=2), x(4, 6, 5), w(6, 4, 3, 3), w(6)),
    case("conv2d in groups", with_(F.conv2d, groups=2, stride=2, padding=1), x(4, 6, 5), w(6, 2, 3, 3), w(6)),
    case("conv2d depthwise", with_(F.conv2d, groups=4, padding=1), x(4, 6, 5), w(8, 1, 3, 3), w(8)),
    case("conv2d twice with one weight", lambda x, w: F.conv2d(F.conv2d(x, w, padding=1), w), x(4, 6, 5),
         w(4, 4, 3, 3)),
    case("conv2d of frames", lambda x, w, b: F.conv2d(x.flatten(0, 1), w, b).unflatten(0, x.shape[:2]),
         x(3, 4, 6, 5), w(6, 4, 3, 3), w(6)),
    case("conv2d of frames, time first",
         lambda x, w: F.conv2d(x.transpose(0, 1).reshape(-1, 4, 6, 5), w).unflatten(0, (3, -1)).transpose(0, 1),
         x(3, 4, 6, 5), w(6, 4, 3, 3)),
    layer("conv1d circular", lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), x(4, 9)),
    layer("conv2d circular", lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), x(4, 6, 5)),
    layer("conv2d reflecting", lambda: nn.Conv2d(4, 6, 3, stride=2, padding=2, padding_mode="reflect"), x(4, 6, 5)),
    layer("conv2d replicating", lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="replicate"), x(4, 6, 5)),
    layer("conv2d same and circular", lambda: nn.Conv2d(4, 6, 2, padding="same", padding_mode="circular"), x(4, 6, 5)),
    case("conv3d", F.conv3d, x(2, 4, 5, 3), w(4, 2, 2, 3, 1), w(4)),
    case("conv3d with triples", with_(F.conv3d, stride=(1, 2, 1), padding=(1, 0, 1), groups=2),
         x(2, 4, 5, 3), w(4, 1, 2, 3, 2), w(4)),
    case("conv3d same, odd totals", with_(F.conv3d, padding="same"), x(2, 4, 5, 3), w(4, 2, 2, 3, 2)),
    case("conv_transpose1d", F.conv_transpose1d, x(4, 5), w(4, 6, 3), w(6)),
    case("conv_transpose1d without bias", with_(F.conv_transpose1d, stride=2), x(4, 5), w(4, 6, 3)),
    case("conv_transpose1d with everything",
         with_(F.conv_transpose1d, stride=3, padding=1, output_padding=2, groups=2, dilation=2),
         x(4, 5), w(4, 3, 3), w(6)),
    case("conv_transpose2d", with_(F.conv_transpose2d, stride=2, padding=1, output_padding=1),
         x(4, 3, 4), w(4, 6, 3, 3), w(6)),
    case("conv_transpose2d with pairs", with_(F.conv_transpose2d, stride=(2, 1), padding=(0, 1), output_padding=(1, 0)),
         x(4, 3, 4), w(4, 6, 2, 3), w(6)),
    case("conv_transpose2d depthwise", with_(F.conv_transpose2d, groups=4), x(4, 3, 4), w(4, 1, 2, 3), w(4)),
    case("conv_transpose3d", with_(F.conv_transpose3d, stride=2, output_padding=1), x(2, 2, 3, 2), w(2, 4, 2, 1, 3),
         w(4)),
]  # fmt: skip


def grouped(input: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of all samples, each times the weight of its group."""
    rows: Tensor = grouped_rows(input.flatten(0, 1), weight, ids.flatten())
    return rows.view(*ids.shape, -1)


LOOKUPS = [
    case("fxgrad::grouped_rows", grouped, x(6, 3), ids(4, 6), w(4, 3, 2)),
    case("fxgrad::grouped_rows with ids of no group", grouped, x(6, 3), ids(5, 6), w(4, 3, 2)),
    case("embedding", F.embedding, ids(7, ...), w(7, 3)),
    case("embedding with padding", with_(F.embedding, padding_idx=2), ids(7, ...), w(7, 3)),
    case("embedding with padding from the end", with_(F.embedding, padding_idx=-1), ids(7, ...), w(7, 3)),
    case("embedding of ATen", lambda i, w: torch.embedding(w, i), ids(7, ...), w(7, 3)),
    case("embedding of ATen by its overload", lambda i, w: torch.ops.aten.embedding(w, i), ids(7, ...), w(7, 3)),
    case("embedding of ATen with padding", lambda i, w: torch.embedding(w, i, 2), ids(7, ...), w(7, 3)),
    case("embedding with padding at 0", with_(F.embedding, padding_idx=0), ids(2, ...), w(7, 3)),
    case("embedding of two tables", lambda i, j, v, w: F.embedding(i, v) * F.embedding(j, w), ids(7, ...), ids(4, ...),
         w(7, 3), w(4, 3)),
    case("embedding tied to the head", lambda i, w: F.linear(F.embedding(i, w), w), ids(7, ...), w(7, 3)),
    *[
        case(f"embedding_bag, {mode}", with_(F.embedding_bag, mode=mode), ids(7, 5), w(7, 3))
        for mode in ("sum", "mean", "max")
    ],
    *[
        case(f"embedding_bag with padding, {mode}", with_(F.embedding_bag, mode=mode, padding_idx=-6), ids(3, 5),
             w(7, 3))
        for mode in ("sum", "mean", "max")
    ],
    *[
        case(f"embedding_bag with offsets, {mode}", lambda i, v, mode=mode: F.embedding_bag(
            i.flatten(), v, torch.arange(i.shape[0], device=i.device) * 5, mode=mode, padding_idx=2),
            ids(7, 5), w(7, 3))
        for mode in ("sum", "mean", "max")
    ],
    case("embedding_bag with offsets and weights", lambda i, s, v: F.embedding_bag(
        i.flatten(), v, torch.arange(i.shape[0] + 1, device=i.device) * 5, mode="sum", include_last_offset=True,
        per_sample_weights=s.flatten()), ids(7, 5), x(5), w(7, 3)),
    case("embedding_bag with weights", lambda i, s, v: F.embedding_bag(i, v, mode="sum", per_sample_weights=s),
         ids(7, 5), x(5), w(7, 3)),
    case("embedding_bag with weights of its own", lambda i, v, s: F.embedding_bag(
        i, v, mode="sum", per_sample_weights=s.expand(i.shape)), ids(7, 5), w(7, 3), w(5)),
    layer("embedding sparse", lambda: nn.Embedding(7, 3, padding_idx=1, sparse=True), ids(7, ...)),
    case("getitem", lambda i, w: w[i], ids(7, ...), w(7, 3)),
    case("getitem counted from the end", lambda i, w: w[i - 7], ids(7, ...), w(7, 3)),
    case("getitem in a tuple", lambda i, w: w[(i,)], ids(7, ...), w(7, 3, 2)),
    case("getitem of a vector", lambda i, w: w[i], ids(7, ...), w(7)),
    case("getitem with a slice behind", lambda i, w: w[i, 1:], ids(7, ...), w(7, 3)),
    case("getitem on the second dim", lambda i, w: w[:, i].movedim(0, -1), ids(3, ...), w(7, 3)),
    case("getitem with two indices", lambda i, j, w: w[i, j], ids(7, ...), ids(3, ...), w(7, 3)),
    case("getitem by a mask", lambda x, w: x * w[torch.tensor([True, False, True], device=x.device)], x(..., 2), w(3)),
    case("getitem with two indices and a slice between", lambda i, j, w: w[i, 1:, j], ids(7, 4), ids(3, 4), w(7, 3, 3)),
    case("getitem with two indices behind a slice", lambda i, j, w: w[:, i, j].movedim(0, -1), ids(4, 6), ids(3, 6),
         w(2, 4, 3)),
    case("getitem of every sample's own copy",
         lambda i, w: w.expand(len(i), 7, 3)[torch.arange(len(i), device=i.device)[:, None], i], ids(7, 4), w(7, 3)),
    case("index", lambda i, j, w: torch.ops.aten.index(w, [i, None, j - 3]), ids(7, 4), ids(3, 4), w(7, 2, 3)),
    case("gather", lambda i, w: w.expand(len(i), 7, 3).gather(1, i), ids(7, 6, 3), w(7, 3)),
    case("gather of a vector", lambda i, w: w.gather(0, i.flatten()).view(i.shape), ids(7, 4), w(7)),
    case("gather of other dims", lambda i, w: torch.gather(w.expand(len(i), -1, -1, -1), -1, i), ids(3, 2, 4, 6),
         w(2, 5, 3)),
    case("take_along_dim", lambda i, w: torch.take_along_dim(w, i.flatten()).view(i.shape), ids(7, 4), w(7)),
    case("index_select on the second dim", lambda i, w: w.index_select(1, i.flatten()).view(7, *i.shape).movedim(0, -1),
         ids(3, 2), w(7, 3)),
    case("index_select", lambda i, w: w.index_select(0, i.flatten()).view(*i.shape, 3), ids(7, 2), w(7, 3)),
]  # fmt: skip

NORMS = [
    case("layer_norm", lambda x, w, b: F.layer_norm(x, (3,), w, b), x(..., 3), w(3), w(3)),
    case("layer_norm without bias", lambda x, w: F.layer_norm(x, (3,), w, None, eps=0.1), x(..., 3), w(3)),
    case("layer_norm without weight", lambda x, b: F.layer_norm(x, (3,), bias=b), x(..., 3), w(3)),
    case("layer_norm over two dims", lambda x, w, b: F.layer_norm(x, (4, 3), w, b), x(..., 4, 3), w(4, 3), w(4, 3)),
    case("layer_norm twice with one weight", lambda x, w: F.layer_norm(F.layer_norm(x, (3,), w, w) ** 2, (3,), w),
         x(..., 3), w(3)),
    layer("layer_norm as a module", lambda: nn.LayerNorm(3, bias=False), x(..., 3)),
    layer("layer_norm without affine",
          lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)), x(..., 3)),
    case("rms_norm", lambda x, w: F.rms_norm(x, (3,), w), x(..., 3), w(3)),
    case("rms_norm over two dims", lambda x, w: F.rms_norm(x, (4, 3), w, eps=0.1), x(..., 4, 3), w(4, 3)),
    layer("rms_norm without affine", lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4, elementwise_affine=False)),
          x(..., 3)),
    case("group_norm", lambda x, w, b: F.group_norm(x, 3, w, b), x(6, ...), w(6), w(6)),
    case("group_norm without bias", lambda x, w: F.group_norm(x, 2, w, eps=0.1), x(6, ...), w(6)),
    layer("group_norm without affine", lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(3, 6, affine=False)),
          x(4, 5)),
    layer("instance_norm", lambda: nn.InstanceNorm1d(6, affine=True), x(6, 4)),
    layer("instance_norm in 2d", lambda: nn.InstanceNorm2d(6, affine=True, eps=0.1), x(6, 4, 3)),
    layer("instance_norm in 3d", lambda: nn.InstanceNorm3d(6, affine=True), x(6, 2, 3, 2)),
    layer("instance_norm with running statistics",
          lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True).eval(), x(6, 4, 3)),
    case("instance_norm without weight", lambda x, b: F.instance_norm(x, bias=b), x(6, 4), w(6)),
    layer("batch_norm", lambda: nn.BatchNorm1d(6).eval(), x(6)),
    layer("batch_norm with positions", lambda: nn.BatchNorm1d(6, eps=0.1).eval(), x(6, 4)),
    layer("batch_norm in 2d", lambda: nn.BatchNorm2d(6).eval(), x(6, 4, 3)),
    layer("batch_norm in 3d", lambda: nn.BatchNorm3d(6).eval(), x(6, 2, 3, 2)),
    layer("batch_norm without affine", lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6, affine=False)).eval(),
          x(3)),
]  # fmt: skip

ELEMENTWISE = [
    case("add", torch.add, x(..., 3), w(3)),
    case("add of a number", lambda x, w: w + x, x(..., 3), w()),
    case("add scaled", with_(torch.add, alpha=3), x(..., 3), w(3)),
    case("add scaled, parameter first", with_(torch.add, alpha=3), w(3), x(..., 3)),
    case("add over rows", torch.add, x(..., 4, 3), w(4, 1)),
    case("add in place", lambda x, w: (x * 2).add_(w, alpha=2), x(..., 3), w(3)),
    case("add of more dims", lambda x, w: (x + w).movedim(1, 0), x(3), w(4, 1, 3)),
    case("add to a column", lambda x, w: x.unsqueeze(-1) + w, x(...,), w(3)),
    case("sub", torch.sub, x(..., 3), w(3)),
    case("sub, parameter first", lambda x, w: w - x, x(..., 3), w(1)),
    case("rsub", lambda x, w: torch.rsub(x, w, alpha=2), x(..., 3), w(3)),
    case("mul", torch.mul, x(..., 3), w(3)),
    case("mul by one number", torch.mul, x(..., 3), w()),
    case("mul over rows and columns", torch.mul, x(..., 4, 3), w(1, 4, 1)),
    case("mul of an outer shape", lambda x, v, w: x * v * w, x(..., 4, 3), w(4, 1), w(3)),
    case("mul in place", lambda x, v, w: (x * v).mul_(w), x(..., 3), w(3), w(3)),
    case("mul twice with one weight", lambda x, w: (x * w).sin() * w, x(..., 3), w(3)),
    case("mul of more dims", lambda x, w: (x * w).movedim(1, 0), x(3), w(4, 1, 3)),
    case("mul with rows as many as samples", lambda x, w: (x * w).movedim(1, 0), x(3), w(BATCH, 1, 3)),
    case("mul over columns of samples", lambda x, w: (x.T * w).T, x(3), w(3, 1)),
    case("div", torch.div, x(..., 3), w(3)),
    case("div, parameter first", lambda x, w: w / (2 + x * x), x(..., 3), w(3)),
    case("div of two parameters", lambda x, v, w: v / (x * x + 1) / w, x(..., 3), w(3), w()),
    case("pow", lambda x, w: (x * x + 1) ** w, x(..., 3), w(3)),
    case("pow of a parameter", lambda x, w: w ** 2 * x, x(..., 3), w(3)),
    case("maximum", torch.maximum, x(..., 3), w(3)),
    case("atan2", torch.atan2, w(3), x(..., 3)),
    case("addcmul", torch.addcmul, w(3), x(..., 3), x(..., 3)),
    case("addcmul in the middle", with_(torch.addcmul, value=0.5), x(..., 3), w(3), x(..., 3)),
    case("addcmul of two", with_(torch.addcmul, value=2), x(..., 3), w(3), w(1)),
    case("addcmul of three", lambda x, b, v, w: x * torch.addcmul(b, v, w), x(..., 3), w(3), w(3), w(1)),
    case("addcdiv", lambda b, x, w: torch.addcdiv(b, x, w, value=2), w(), x(..., 3), w(3)),
    case("lerp", torch.lerp, w(3), x(..., 3), w()),
    case("where", lambda x, w: torch.where(x > 0, x, w), x(..., 3), w(3)),
    case("where, parameter first", lambda x, w: torch.where(x > 0, w, 0.0), x(..., 3), w(3)),
    case("where by ids", lambda i, x, v, w: torch.where(i > 3, v, w) * x, ids(7, ..., 1), x(..., 3), w(3), w()),
    case("masked_fill", lambda x, w: x.masked_fill(x > 0, w), x(..., 3), w()),
    case("clamp", lambda x, v, w: torch.clamp(x, v, w), x(..., 3), w(3), w(3)),
    case("prelu", F.prelu, x(..., 3), w(1)),
    case("prelu of numbers", F.prelu, x(), w(1)),
    case("prelu by the channel", F.prelu, x(6, ...), w(6)),
    case("prelu of copies", lambda x, v, w: x * F.prelu(v.expand(x.shape[0], 2, 3), w), x(2, 3), w(1, 2, 3), w(2)),
    case("prelu twice with one weight", lambda x, w: F.prelu(-F.prelu(x, w), w), x(6, ...), w(6)),
]  # fmt: skip
