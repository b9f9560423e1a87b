"""Mixtures of experts: tokens of all samples sorted by their expert, and put back."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import FxgradError
from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED, long_but


@torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """The operator that the transformers library brings, for its name and its arguments."""
    out, start = input.new_zeros(input.shape[0], weight.shape[2]), 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = input[start:end] @ weight[group]
        start = end
    return out


@grouped_mm.register_fake
def _(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


def _backward(ctx: object, g: Tensor) -> tuple[Tensor, Tensor, None]:
    input, weight, offs = ctx.saved_tensors  # type: ignore[attr-defined]
    with torch.enable_grad():
        x, w = input.detach().requires_grad_(), weight.detach().requires_grad_()
        starts = list(itertools.pairwise([0, *offs.tolist()]))
        out = torch.cat([x[a:b] @ w[i] for i, (a, b) in enumerate(starts)])
    of_x, of_w = torch.autograd.grad(out, (x, w), g)
    return of_x, of_w, None


grouped_mm.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Experts(nn.Module):
    """A router, and experts as one weight of all."""

    def __init__(self, body: Callable[[Experts, Tensor, Tensor, Tensor], Tensor], top: int = 2) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 12, 4)), nn.Parameter(torch.randn(3, 4, 6))
        self.bias, self.body, self.top = nn.Parameter(torch.randn(3, 12)), body, top

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top, -1)
        return x + self.body(self, tokens, chosen.reshape(-1), weights.reshape(-1)).view_as(x)

    def work(self, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        gate, up = (grouped_mm(rows, self.up.transpose(1, 2), ends) + self.bias[ids]).chunk(2, -1)
        return grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), ends)


def sizes_of(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)


def sort_and_put_back(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, order = torch.sort(ids)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(sorted_ids)) * weights[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return out[inverse].view(tokens.shape[0], m.top, -1).sum(1)


def argsort_twice(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    order = ids.argsort()
    sorted_ids = ids[order]
    rows = tokens.repeat_interleave(m.top, 0)[order]
    out = m.work(rows, sorted_ids, sizes_of(sorted_ids)) * weights[order, None]
    return out[order.argsort()].view(tokens.shape[0], m.top, -1).sum(1)


def sorted_work(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted results in the experts' order, and that order."""
    sorted_ids, order = torch.sort(ids)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(sorted_ids))
    return out * weights[order].unsqueeze(-1), order


def added_at_the_tokens(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, order = sorted_work(m, tokens, ids, weights)
    return torch.zeros_like(tokens).index_add_(0, order // m.top, out)


def added_at_listed_tokens(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Which token a place is, from a table of them, and half of the sum onto what was there."""
    table = torch.arange(tokens.shape[0], device=tokens.device).unsqueeze(1).expand(-1, m.top).reshape(-1)
    sorted_ids, order = torch.sort(ids)
    token = table[order]
    out = m.work(tokens[token], sorted_ids, sizes_of(sorted_ids)) * weights[order].view(-1, 1)
    return (2 * tokens).index_add(0, token, out, alpha=0.5)


def scattered(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, order = sorted_work(m, tokens, ids, weights)
    token = order.div(m.top, rounding_mode="floor")
    half = torch.zeros_like(tokens).scatter_add_(0, token.unsqueeze(-1).expand_as(out), out)
    return half + tokens.scatter_add(0, token[:, None].expand(-1, out.shape[1]), out)


def put_and_accumulated(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, order = sorted_work(m, tokens, ids, weights)
    final = tokens.new_zeros(tokens.shape[0], 4)
    return final.index_put_((order // m.top,), out, accumulate=True)


def assigned_in_order(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, order = sorted_work(m, tokens, ids, weights)
    places = torch.empty_like(out)
    places[order] = out
    places[order] += out
    return places.view(tokens.shape[0], m.top, -1).sum(1)


def scaled_in_place(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, order = torch.sort(ids)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(sorted_ids))
    out[:, :2].mul_(weights[order].unsqueeze(-1))
    return out[order.argsort()].view(tokens.shape[0], m.top, -1).sum(1)


def copied_in_order(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, order = sorted_work(m, tokens, ids, weights)
    return out.new_zeros(out.shape).index_copy_(0, order, out).view(tokens.shape[0], m.top, -1).sum(1)


WAYS_BACK = [
    sort_and_put_back, argsort_twice, added_at_the_tokens, added_at_listed_tokens, scattered, put_and_accumulated,
    assigned_in_order, copied_in_order, scaled_in_place,
]  # fmt: skip


QUICK = (sort_and_put_back, added_at_listed_tokens, put_and_accumulated, scaled_in_place)


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize(
    ("body", "top"),
    long_but(lambda body, top: (top == 2 and body in QUICK) or body is scattered, itertools.product(WAYS_BACK, (1, 2))),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_against_the_loop(body: Callable[..., Tensor], top: int, backend: str, device: torch.device) -> None:
    x = torch.randn(4, 5, 4, dtype=torch.double, device=device, requires_grad=True)
    model = Experts(body, top).double().to(device)
    assert_per_sample_grads(model, x, backend=backend)


@pytest.mark.inductor
@pytest.mark.parametrize("body", [sort_and_put_back, added_at_the_tokens], ids=lambda body: body.__name__)
def test_through_inductor(body: Callable[..., Tensor], device: torch.device) -> None:
    model = Experts(body).to(device)
    assert_per_sample_grads(model, torch.randn(4, 5, 4, device=device), tolerance=1e-4)


def only_the_first(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts of limited capacity: which tokens are dropped depends on all samples."""
    sorted_ids, order = torch.sort(ids)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(sorted_ids))
    out = torch.where(torch.arange(out.shape[0], device=out.device)[:, None] < 9, out, 0 * out)
    return out[order.argsort()].view(tokens.shape[0], m.top, -1).sum(1)


def other_sizes(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, order = torch.sort(ids)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(2 - sorted_ids))
    return out[order.argsort()].view(tokens.shape[0], m.top, -1).sum(1)


def sizes_of_truncated_ids(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A cast that loses what the ids are: the groups' sizes are other ones."""
    sorted_ids, order = torch.sort(ids)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(sorted_ids.to(torch.bool)))
    return out[order.argsort()].view(tokens.shape[0], m.top, -1).sum(1)


def next_to_each_other(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, order = torch.sort(ids)
    rows = tokens[order // m.top]
    out = m.work(rows + rows.roll(1, 0), sorted_ids, sizes_of(sorted_ids))
    return out[order.argsort()].view(tokens.shape[0], m.top, -1).sum(1)


def largest_group_first(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The groups stand in another order than their sizes."""
    sorted_ids, order = torch.sort(ids, descending=True)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(sorted_ids))
    return out[order.argsort()].view(tokens.shape[0], m.top, -1).sum(1)


def never_put_back(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, order = torch.sort(ids)
    out = m.work(tokens[order // m.top], sorted_ids, sizes_of(sorted_ids))
    return out.view(tokens.shape[0], m.top, -1).sum(1)


def added_at_the_next_token(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, order = sorted_work(m, tokens, ids, weights)
    return torch.zeros_like(tokens).index_add_(0, (order // m.top + 1) % tokens.shape[0], out)


def added_by_expert(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, order = sorted_work(m, tokens, ids, weights)
    return tokens + out.new_zeros(3, out.shape[1]).index_add_(0, ids[order], out)[0].tanh()


def unsorted_rows_added(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    _, order = sorted_work(m, tokens, ids, weights)
    rows = (tokens @ m.bias[:, :4].T @ m.bias[:, :4]).repeat_interleave(m.top, 0)
    return torch.zeros_like(tokens).index_add_(0, order // m.top, rows)


def assigned_twice(m: Experts, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Which of a token's two rows stays depends on their order."""
    out, order = sorted_work(m, tokens, ids, weights)
    final = torch.zeros_like(tokens)
    final[order // m.top] += out
    return final


@pytest.mark.parametrize(
    "body",
    [only_the_first, other_sizes, sizes_of_truncated_ids, next_to_each_other, largest_group_first, never_put_back,
     added_at_the_next_token, added_by_expert, unsorted_rows_added, assigned_twice],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_what_depends_on_the_order_is_refused(body: Callable[..., Tensor], device: torch.device) -> None:
    gs = fxgrad.transform(Experts(body).to(device), backend="eager")
    with pytest.raises(FxgradError, match=r"(grouped_mm_fallback|index_add) lets samples influence each other"):
        gs(torch.randn(4, 5, 4, device=device))
