"""Functions inside functions: autograd.Function, checkpoints, torch.func, control flow, recurrences over samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.attacks.model import attacks


class Centred(torch.autograd.Function):
    """It mixes in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class CentredBackward(torch.autograd.Function):
    """It mixes in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0)


class SquaredTotal(torch.autograd.Function):
    """Of a sum over samples: its backward gives what all of them gave."""

    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        ctx.save_for_backward(total)
        return total * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * 2


class ScaledBackward(torch.autograd.Function):
    """Its backward is scaled by what its forward saw of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.abs().max())
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (scale,) = ctx.saved_tensors
        return g * scale


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def by_checkpoint(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda z: m(z - z.mean(0)), x, use_reentrant=False)


def own_by_checkpoint(m: Any, x: Tensor) -> Any:
    return checkpoint(lambda z: m(z).tanh(), x, use_reentrant=False)


def scanned(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    return m(scan(lambda c, row: (c + row, c * 1), x[0] * 0, x)[1])


def scanned_within(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    return m(scan(lambda c, column: (c + column, c * 1), x[:, 0] * 0, x.t())[1].t())


def branched(m: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda z: z * 2, lambda z: z * 3, (m(x),))


def branched_on_a_constant(m: Any, x: Tensor) -> Any:
    return torch.cond(torch.arange(3).sum() > 1, lambda z: z * 2, lambda z: z * 3, (m(x),))


def looped(m: Any, x: Tensor) -> Tensor:
    h = x
    for _ in range(3):
        h = torch.tanh(m(h) - h.mean(0))
    return h


def looped_within(m: Any, x: Tensor) -> Tensor:
    h = x
    for _ in range(3):
        h = torch.tanh(m(h) - h.mean(1, keepdim=True))
    return h


def gradient_of_a_sum(m: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: z.square().sum())(m(x))


def gradient_of_a_product(m: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: z.sum().square())(m(x))


def detached_in_a_derivative(m: Any, x: Tensor) -> Tensor:
    """A number beside it lets the derivative be written out by PyTorch's table, in which detach is an alias."""
    h = m(x)
    slope = torch.func.grad(lambda z: (z.sin() * (h - h.mean(1, keepdim=True)).detach()).sum())(h)
    return slope * m.bias.sum().item()


def vmapped_pairs(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    return torch.vmap(lambda row: (h @ row).sum())(h)


def vmapped_columns(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda column: column.cumsum(0), 1, 1)(m(x))


def vmapped_rows(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.cumsum(0))(m(x))


def recurrent_over_samples(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    outs = []
    for i in range(x.shape[0]):
        state = torch.tanh(m(x[i]) + state)
        outs.append(state)
    return torch.stack(outs)


def no_grad_statistics(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean(0)
    return m(x - mean)


def inference_statistics(m: Any, x: Tensor) -> Tensor:
    return m(x / x.detach().norm(dim=0))


def parameters_and_samples(m: Any, x: Tensor) -> Tensor:
    return x @ (m.weight - x.mean(0))


def weight_from_the_batch(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.weight * x.abs().max())


def bias_from_the_batch(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.weight, m.bias * x.mean(0)).tanh()


def hyper(m: Any, x: Tensor) -> Tensor:
    """A weight for each sample, made of the sample."""
    weights = m.weight[None] * x[:, None, :]
    return torch.bmm(weights, x.unsqueeze(2)).squeeze(2)


def hyper_of_the_next(m: Any, x: Tensor) -> Tensor:
    weights = m.weight[None] * x.roll(-1, 0)[:, None, :]
    return torch.bmm(weights, x.unsqueeze(2)).squeeze(2)


ATTACKS = attacks(
    "functions",
    right={
        "an autograd.Function": lambda m, x: Twice.apply(m(x)),
        "a checkpoint": own_by_checkpoint,
        "a scan within a sample": scanned_within,
        "a branch on a constant": branched_on_a_constant,
        "a loop within a sample": looped_within,
        "the gradient of a sum": gradient_of_a_sum,
        "a detached factor in a derivative": detached_in_a_derivative,
        "vmap over rows": vmapped_rows,
        "a weight for each sample": hyper,
    },
    refused={
        "a group norm of one sample": lambda m, x: m(
            torch.ops.aten.native_group_norm(x[:, :, None], None, None, 1, 3, x.shape[0], 1, 1e-5)[0][:, :, 0]
        ),
        "a function of the sum": lambda m, x: SquaredTotal.apply(m(x).sum()),
        "an autograd.Function that mixes forward": lambda m, x: Centred.apply(m(x)),
        "an autograd.Function that mixes before the layer": lambda m, x: m(Centred.apply(x)),
        "an autograd.Function that mixes backward": lambda m, x: CentredBackward.apply(m(x)),
        "an autograd.Function that scales backward": lambda m, x: ScaledBackward.apply(m(x)),
        "in a checkpoint": by_checkpoint,
        "a scan over samples": scanned,
        "a branch on the batch": branched,
        "a loop that centres": looped,
        "the gradient of a square": gradient_of_a_product,
        "vmap that closes over all": vmapped_pairs,
        "vmap over columns": vmapped_columns,
        "a recurrence over samples": recurrent_over_samples,
        "statistics under no_grad": no_grad_statistics,
        "detached statistics": inference_statistics,
        "a weight less the mean": parameters_and_samples,
        "a weight times the largest": weight_from_the_batch,
        "a bias times the mean": bias_from_the_batch,
        "a weight of the next sample": hyper_of_the_next,
        "linalg of all samples": lambda m, x: m(x @ torch.linalg.pinv(x) @ x),
        "least squares": lambda m, x: m(torch.linalg.lstsq(x, x.roll(1, 1)).solution).sum(0) + m(x),
        "eigenvalues of pairs": lambda m, x: m(x) * torch.linalg.eigvalsh(x.t() @ x),
        "matrix exponential": lambda m, x: m(x) @ torch.matrix_exp(x.t() @ x / 10),
        "a determinant": lambda m, x: m(x) * torch.linalg.det(x.t() @ x),
        "a trace": lambda m, x: m(x) * (x.t() @ x).trace(),
        "a dot product of all": lambda m, x: m(x) * torch.dot(x.flatten(), x.flatten()),
        "vdot": lambda m, x: m(x) * torch.vdot(x.flatten(), x.flatten()),
        "inner": lambda m, x: m(torch.inner(x, x) @ x),
        "chain of products": lambda m, x: m(torch.linalg.multi_dot([x, x.t(), x])),
        "addmm": lambda m, x: m(torch.addmm(x, x @ x.t(), x)),
        "baddbmm": lambda m, x: m(torch.baddbmm(x[None], (x @ x.t())[None], x[None])[0]),
        "addbmm": lambda m, x: m(torch.addbmm(torch.zeros(3, 3), x[:, :, None], x[:, None]) + x[:3]),
        "addr": lambda m, x: m(x) + torch.addr(torch.zeros(3, 3), x[0], x[1])[0],
        "renorm": lambda m, x: m(x.renorm(2, 1, 1.0)),
        "cummax": lambda m, x: m(x.cummax(0).values),
        "logcumsumexp": lambda m, x: m(x.logcumsumexp(0)),
        "quantile": lambda m, x: m(x - x.quantile(0.5, 0)),
        "kthvalue": lambda m, x: m(x - x.kthvalue(2, 0).values),
        "mode": lambda m, x: m(x.round() - x.round().mode(0).values),
        "argsort": lambda m, x: m(x + x.argsort(0)),
        "ranks": lambda m, x: m(x + x[:, 0].argsort().argsort()[:, None]),
        "topk of the batch": lambda m, x: m(x) * (x >= x.topk(2, 0).values[-1]),
        "unique": lambda m, x: m(x) + x.round().unique(return_inverse=True)[1].view_as(x),
        "any": lambda m, x: m(x) * (x > 1).any(0),
        "all": lambda m, x: m(x) * (x > -2).all(),
        "count_nonzero": lambda m, x: m(x) * (x > 0).count_nonzero(0),
        "isin": lambda m, x: m(x) * torch.isin(x.round(), x.round()[0]),
        "allclose": lambda m, x: m(x) * float(torch.allclose(x, x)),
        "equal": lambda m, x: m(x) * (2.0 if torch.equal(x, x.flip(0)) else 1.0),
        "nonzero": lambda m, x: m(x) * x.nonzero()[:, 0].float().mean(),
        "masked_select": lambda m, x: m(x) * x.masked_select(x > 0).mean(),
        "bincount of ids": lambda m, x: (
            m(x) / torch.bincount(x.argmax(1), minlength=3).clamp(min=1)[x.argmax(1)][:, None]
        ),
        "scatter of counts": lambda m, x: m(x) * torch.zeros(3).scatter_add(0, x.argmax(1), x[:, 0]),
        "index_add of counts": lambda m, x: m(x) * torch.zeros(3).index_add(0, x.argmax(1), x[:, 0]),
        "dropout of a batch's rate": lambda m, x: F.dropout(m(x), x.abs().mean().clamp(max=0.5).item()),
        "interpolated": lambda m, x: m(F.interpolate(x.t()[None], scale_factor=2, mode="linear")[0].t()[: x.shape[0]]),
        "grid_sample": lambda m, x: m(
            F.grid_sample(x[None, None], torch.zeros(1, x.shape[0], 3, 2), align_corners=True)[0, 0]
        ),
        "max_pool over samples": lambda m, x: m(F.max_pool1d(x.t()[None], 3, 1, 1)[0].t()),
        "local response": lambda m, x: m(F.local_response_norm(x.t()[None], 3)[0].t()),
        "conv over samples": lambda m, x: F.conv1d(x.t()[None], m.weight[:, :, None].expand(-1, -1, 3), padding=1)[
            0
        ].t(),
        "embedding bag with offsets": lambda m, x: F.embedding_bag(
            x.argmax(1), m.weight, torch.arange(0, x.shape[0]).clamp(max=3)
        ),
        "glu over samples": lambda m, x: m(F.glu(torch.cat([x, x.flip(0)]), 0)),
        "cosine over samples": lambda m, x: m(x) * F.cosine_similarity(x, x.flip(1), 0),
        "pairwise distance": lambda m, x: m(x) * F.pairwise_distance(x, x.flip(0))[:, None],
    },
)
