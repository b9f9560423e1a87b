"""The table's second part: parameters that are changed, moved or handed out before they meet the samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.cases import Case, Weight, case, ids, layer, w, x

aten = torch.ops.aten


def of(name: str, function: Callable[..., Tensor], *weights: Weight, tolerance: float | None = None) -> Case:
    """`x * function(*weights)`, with x of that shape for every sample."""
    shape = function(*(torch.ones(weight.shape) for weight in weights)).shape

    def call(value: Tensor, *parameters: Tensor) -> Tensor:
        return value * function(*parameters)

    return case(name, call, x(..., *shape), *weights, tolerance=tolerance)


MOVED = [
    of("view", lambda w: w.view(2, -1), w(4, 3)),
    of("reshape", lambda w: w.t().reshape(6, 2), w(4, 3)),
    of("flatten", lambda w: w.flatten(1), w(2, 3, 4)),
    of("unflatten", lambda w: w.unflatten(-1, (2, 2)), w(3, 4)),
    of("unsqueeze", lambda w: w.unsqueeze(-1), w(3)),
    of("squeeze", lambda w: w.squeeze(), w(1, 3, 1)),
    of("squeeze of one dim", lambda w: w.squeeze(0), w(1, 3, 1)),
    of("contiguous", lambda w: w.t().contiguous(), w(4, 3)),
    of("clone", lambda w: w.clone(), w(3)),
    of("view_as", lambda w: w.view_as(torch.empty(2, 6)), w(4, 3)),
    of("reshape_as", lambda w: w.t().reshape_as(torch.empty(2, 6)), w(4, 3)),
    of("ravel", lambda w: w.ravel(), w(4, 3)),
    of("_unsafe_view", lambda w: aten._unsafe_view(w, [2, 6]), w(4, 3)),
    of("alias", lambda w: aten.alias(w), w(3)),
    of("transpose", lambda w: w.transpose(0, -1), w(2, 3, 4)),
    of("transpose by names", lambda w: torch.transpose(w, dim1=-2, dim0=2), w(2, 3, 4)),
    of("t", lambda w: w.t(), w(4, 3)),
    of("t of a vector", lambda w: w.t(), w(3)),
    of("T", lambda w: w.T, w(4, 3)),
    of("mT", lambda w: w.mT, w(2, 3, 4)),
    of("permute", lambda w: w.permute(2, 0, 1), w(2, 3, 4)),
    of("permute from the end", lambda w: torch.permute(w, (-1, 0, -2)), w(2, 3, 4)),
    of("expand", lambda w: w.expand(2, -1, 3), w(4, 1)),
    of("expand_as", lambda w: w.expand_as(torch.empty(2, 4, 3)), w(4, 1)),
    of("broadcast_to", lambda w: w.broadcast_to(2, 4, 3), w(4, 1)),
    of("repeat", lambda w: w.repeat(2, 3), w(4, 2)),
    of("repeat into more dims", lambda w: w.repeat(2, 1, 3), w(4, 2)),
    of("cat", lambda v, w: torch.cat([v, torch.zeros(1, 3, device=v.device), w, v]), w(2, 3), w(1, 3)),
    of("cat on the last dim", lambda v, w: torch.cat([v, w], dim=-1), w(2, 3), w(2, 1)),
    of("stack", lambda v, w: torch.stack([v, w, v]), w(3), w(3)),
    of("stack on the last dim", lambda v, w: torch.stack([v, w], -1), w(3), w(3)),
    of("select", lambda w: w.select(1, 2), w(4, 3)),
    of("select from the end", lambda w: w.select(-2, -1), w(4, 3)),
    of("narrow", lambda w: w.narrow(1, 1, 2), w(4, 3)),
    of("narrow from the end", lambda w: w.narrow(-1, -2, 2), w(4, 3)),
    of("chunk", lambda w: w.chunk(3, -1)[2] * w.chunk(3, -1)[0][..., :1], w(2, 5)),
    of("split", lambda w: w.split(2)[1].exp(), w(5, 3)),
    of("split into sizes", lambda w: w.split([1, 3], dim=-1)[1], w(2, 4)),
    of("split_with_sizes", lambda w: w.split_with_sizes([1, 3], dim=1)[1], w(2, 4)),
    of("tensor_split", lambda w: w.tensor_split(3)[2], w(5, 3)),
    of("tensor_split at places", lambda w: w.tensor_split((1, 3), dim=-1)[1], w(2, 5)),
    of("unbind", lambda w: w.unbind(1)[2], w(4, 3)),
    of("unbind from the end", lambda w: w.unbind(-2)[0], w(4, 3)),
    of("getitem at a place", lambda w: w[-1], w(4, 3)),
    of("getitem of a range", lambda w: w[:, 1:3], w(4, 3)),
    of("getitem with a step", lambda w: w[1::2, None], w(5, 3)),
    of("getitem with dots", lambda w: w[..., 0, None], w(2, 4, 3)),
    of("getitem of a list", lambda w: w[[0, 2, 0]], w(4, 3)),
    of("getitem of a table", lambda w: w[(torch.arange(4)[:, None] - torch.arange(4)).abs().to(w.device)], w(4, 3)),
    of("to", lambda w: w.to(torch.float32).to(torch.float64), w(3), tolerance=1e-6),
    of("float", lambda w: w.float().double(), w(3), tolerance=1e-6),
    of("double", lambda w: w.double().exp(), w(3)),
    of("type_as", lambda w: w.type_as(torch.empty(1, dtype=torch.float32, device=w.device)), w(3), tolerance=1e-6),
    of("half", lambda w: w.half() * 2, w(3), tolerance=1e-2),
    of("bfloat16", lambda w: w.bfloat16() * 2, w(3), tolerance=5e-2),
    of("roll", lambda w: w.roll(1, 0), w(4, 3)),
    of("flip", lambda w: w.flip(-1), w(4, 3)),
    of("pad", lambda w: F.pad(w, (1, 2)), w(4, 3)),
    of("repeat_interleave", lambda w: w.repeat_interleave(2, 0), w(4, 3)),
    of("tile", lambda w: w.tile(2, 1), w(4, 3)),
    of("tril", lambda w: w.tril(), w(4, 4)),
    of("diagonal", lambda w: w.diagonal(), w(4, 4)),
    of("index_select of a constant", lambda w: w.index_select(0, torch.tensor([2, 0, 2], device=w.device)), w(4, 3)),
]  # fmt: skip


def coordinates(v: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """A position bias from an MLP over coordinates."""
    grid = torch.linspace(-1, 1, 4, dtype=v.dtype, device=v.device)
    return F.linear(F.linear(grid.unsqueeze(1), v, b).tanh(), w)


FUNCTIONS = [
    of("norm", lambda w: w / w.norm(), w(4, 3)),
    of("normalize", lambda w: F.normalize(w, dim=1), w(4, 3)),
    of("softmax", lambda w: w.softmax(-1), w(4, 3)),
    of("exp", lambda w: w.exp(), w(4, 3)),
    of("std", lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True), w(4, 3)),
    of("sum", lambda w: w.sum(), w(4, 3)),
    of("max", lambda w: w.max(0).values, w(4, 3)),
    of("sort", lambda w: w.sort()[0], w(4, 3)),
    of("cumsum", lambda w: w.cumsum(0), w(4, 3)),
    of("matmul of two parameters", lambda v, w: v @ w, w(4, 2), w(2, 3)),
    of("matmul of a parameter by itself", lambda w: w @ w.t(), w(4, 2)),
    of("einsum of a parameter by itself", lambda w: torch.einsum("ij,kj->ik", w, w), w(4, 2)),
    of("outer of two parameters", torch.outer, w(4), w(3)),
    of("linear of coordinates", coordinates, w(3, 1), w(3), w(2, 3)),
    of("linear of a parameter", F.linear, w(2, 3), w(4, 3), w(4)),
    of("conv1d of a parameter", F.conv1d, w(1, 4, 9), w(6, 4, 3), w(6)),
    of("conv1d of an unbatched parameter", F.conv1d, w(4, 9), w(6, 4, 3), w(6)),
    of("layer_norm of a parameter", lambda v, w: F.layer_norm(v, (3,), w, w), w(4, 3), w(3)),
    of("group_norm of a parameter", lambda v, w: F.group_norm(v, 3, w), w(1, 6, 4), w(6)),
    of("prelu of a parameter", F.prelu, w(2, 3), w(3)),
    of("embedding of positions", lambda w: F.embedding(torch.arange(4, device=w.device), w), w(7, 3)),
    of("embedding of positions with padding",
       lambda w: F.embedding(torch.arange(4, device=w.device), w, padding_idx=2), w(7, 3)),
    of("interpolate", lambda w: F.interpolate(w, scale_factor=2.0, mode="linear"), w(1, 3, 4)),
    of("exp of a complex number of two", lambda v, w: torch.exp(torch.complex(-v.exp(), w)).imag, w(4), w(4)),
    of("power of a complex number", lambda v, w: torch.view_as_real(torch.complex(v, w) ** 2), w(4), w(4)),
    of("exp of 1j", lambda w: torch.exp(1j * w).imag, w(4)),
    of("a complex piece", lambda w: torch.view_as_complex(w)[:, :2].real, w(4, 3, 2)),
    of("a complex transpose", lambda w: torch.view_as_real(torch.view_as_complex(w).t()), w(4, 3, 2)),
    of("complex and real together",
       lambda v, w: torch.view_as_real(torch.stack([torch.complex(v, w), v + 0j])), w(4), w(4)),
    of("irfft of a product", lambda v, w: torch.fft.irfft(torch.fft.rfft(v) * torch.fft.rfft(w), n=6), w(6), w(6)),
    of("irfft of complex pairs", lambda w: torch.fft.irfft(torch.view_as_complex(w), n=4), w(3, 2)),
    of("add in place to a copy", lambda v, w: v.clone().add_(w).mul_(w), w(4, 3), w(3)),
    layer("linear with weight_norm", lambda: parametrizations.weight_norm(nn.Linear(3, 4)), x(..., 3)),
    layer("linear with spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), x(..., 3)),
    layer("linear with spectral_norm in eval mode", lambda: parametrizations.spectral_norm(nn.Linear(3, 4)).eval(),
          x(..., 3)),
    layer("conv1d with weight_norm", lambda: parametrizations.weight_norm(nn.Conv1d(4, 6, 3)), x(4, 9)),
]  # fmt: skip


def cls(x: Tensor, w: Tensor) -> Tensor:
    """A class token before the patches."""
    return torch.cat([w.expand(x.shape[0], -1, -1), x], dim=1)


def written(x: Tensor, w: Tensor) -> Tensor:
    """A layer's result written into a part of a buffer."""
    out = torch.zeros_like(x)
    out[:, 1:] = F.linear(x[:, 1:], w)
    return out


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 0.5


def frames_by_copies(x: Tensor, w: Tensor) -> Tensor:
    """(B*T, C), one row of w for every t."""
    rows = x.flatten(0, 1) * w.repeat(x.shape[0], 1)
    return rows.view(x.shape)


def frames_by_steps(x: Tensor, w: Tensor) -> Tensor:
    """(T*B, C), one row of w for every t."""
    rows = x.transpose(0, 1).flatten(0, 1) * w.repeat_interleave(x.shape[0], 0)
    return rows.view(-1, *x.shape[::2]).transpose(0, 1)


def windows(x: Tensor, w: Tensor) -> Tensor:
    """(B*2, C), shifted by one row of parameters for all and a mask for each of two windows."""
    mask = torch.linspace(-1, 1, 6, dtype=x.dtype, device=x.device).view(2, 3).expand(len(x), 2, 3).reshape(-1, 3)
    return (x.flatten(0, 1) * (w + mask).sin()).view(x.shape)


HANDED_OUT = [
    case("expand to the samples", cls, x(4, 3), w(1, 1, 3)),
    case("expand_as to the samples", lambda x, w: w.expand_as(x) * x, x(..., 3), w(3)),
    case("broadcast_to to the samples", lambda x, w: torch.broadcast_to(w, x.shape) + x, x(..., 3), w(1)),
    case("repeat to the samples", lambda x, w: torch.cat([x, w.repeat(len(x), 2, 1)], 1), x(4, 3), w(1, 3)),
    case("repeat into merged rows", frames_by_copies, x(2, 3), w(2, 3)),
    case("repeat_interleave into merged rows", frames_by_steps, x(2, 3), w(2, 3)),
    case("expand into merged rows", lambda x, w: (x.view(-1, 3) * w.expand(len(x), 2, 3).reshape(-1, 3)).view(x.shape),
         x(2, 3), w(2, 3)),
    case("add to a mask for merged rows", windows, x(2, 3), w(3)),
    case("cat of nothing with the samples", lambda x, w: torch.cat([(x * w)[:, 4:] * w, x], 1), x(4, 3), w(3)),
    case("stack with the samples", lambda x, w: torch.stack([x, w.expand_as(x)], -1), x(..., 3), w(3)),
    case("cat with the samples", lambda x, v, w: torch.cat([v * x, w.expand(len(x), 2)], 1), x(3), w(3), w(2)),
    case("getitem of a new dim", lambda x, w: x + w[None, :, None], x(4, 3), w(4)),
    case("getitem by ids of a function", lambda i, v, w: torch.cat([v, w])[i], ids(5, ...), w(2, 3), w(3, 3)),
    case("embedding in a function", lambda i, v, w: F.embedding(i, v @ w), ids(4, ...), w(4, 2), w(2, 3)),
    case("linear written into a slice", written, x(4, 3), w(3, 3)),
    case("linear with low rank", lora, x(..., 3), w(4, 3), w(2, 3), w(4, 2)),
    case("linear with halves of one weight", lambda x, w: F.linear(x, w[:2]) * F.linear(x, w.chunk(2)[1]),
         x(..., 3), w(4, 3)),
    case("linear and its transpose", lambda x, w: F.linear(F.linear(x, w).tanh(), w.t()), x(..., 3), w(4, 3)),
    case("linear, weight also a factor", lambda x, w: F.linear(x, w) * w[0] + w.sum(), x(..., 3), w(3, 3)),
    case("scaled_dot_product_attention with a bias",
         lambda q, k, v, w: F.scaled_dot_product_attention(q, k, v, attn_mask=w), x(2, 4, 3), x(2, 4, 3), x(2, 4, 3),
         w(2, 4, 4)),
    layer("linear called twice", lambda: _Twice(nn.Linear(3, 3)), x(..., 3)),
]  # fmt: skip


class _Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.inner(x).tanh())


__all__ = ["FUNCTIONS", "HANDED_OUT", "MOVED"]
