"""Slices assigned, values written through views: samples and parameters are followed through memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import FxgradError, LostLayout, MixedSamples, UnsupportedOp
from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED


class Model(nn.Module):
    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.b, self.body = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w)


def a_parameter_into_a_slice(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[:, 0] = m.b[0]
    return h.tanh()


def samples_and_a_parameter_into_zeros(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], 4)
    h[:, :2] = m.b[:2]
    h[:, 2:] = m.linear(x)[:, 2:]
    return h * m.b


def columns_of_zeros(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], 4, 2)
    h[:, :, 0] = m.linear(x)
    h[:, 1, 1] = x[:, 0]
    return h


def merged_samples(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0] * 2, 4)
    h[:, 1:] = m.linear(x).repeat_interleave(2, 0)[:, 1:]
    return (h * m.b).view(-1, 2, 4)


def every_other_row(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], 2, 4)
    h[:, 0] = m.linear(x)
    h[:, 1] = m.b
    return h.view(-1, 4).tanh().view(-1, 8)


def shifted(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    out = torch.zeros_like(h)
    out[:, 1:] = h[:, :-1]
    out[:, 0] = m.b[0]
    return out * m.b


def step_by_step(m: Model, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[0], 3, 4)
    for t in range(3):
        h[:, t] = m.linear(x) * (h[:, t - 1] + 1 if t else 1)
    return h * m.b


def leading_ones(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[:, :2] = m.b[None, None, 2:]
    h[..., -1] = 3
    return h.tanh()


def a_number_by_mask(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[h.detach() > 0] = 0.5
    return h * m.b


def a_parameter_by_mask(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[x[:, 0] > 0] = m.b
    return h.tanh()


def a_parameter_by_mask_of_every_place(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x).unsqueeze(1).repeat(1, 2, 1)
    h[torch.stack([x[:, 0] > 0, x[:, 1] > 0], 1)] = m.b
    return h.tanh()


def a_parameter_by_list(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[:, [0, 2]] = m.b[:2]
    return h.tanh()


def a_parameter_at_each_samples_own_place(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[torch.arange(x.shape[0], device=x.device), (x[:, 0] > 0).long()] = m.b[0]
    return h.tanh()


def samples_at_each_samples_own_place(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[torch.arange(x.shape[0], device=x.device), (x[:, 0] > 0).long()] = x[:, 1] * m.b[1]
    return h.tanh()


def views_changed_in_place(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[:, 0].mul_(m.b[0])
    h[:, 1:3].add_(m.b[1:3])
    h[..., None][:, 2] *= m.b[:1]
    return h * m.b


def a_row_of_a_function(m: Model, x: Tensor) -> Tensor:
    u = m.w * 1
    u[0].mul_(2)
    return F.linear(x, u)


def a_weight_put_together(m: Model, x: Tensor) -> Tensor:
    u = torch.zeros(4, 3, dtype=x.dtype, device=x.device)
    u[0] = m.w[1]
    u[1:] = m.w[1:] * 2
    return F.linear(x, u)


def a_weight_with_zeros(m: Model, x: Tensor) -> Tensor:
    u = m.w * 1
    u[0] = 0
    return F.linear(x, u)


def places_of_a_function(m: Model, x: Tensor) -> Tensor:
    u = m.w * 1
    u[[1, 2]] = m.w[:2]
    return F.linear(x, u)


def a_mask_of_a_function(m: Model, x: Tensor) -> Tensor:
    u = m.w * 1
    u[m.w > 0] = m.b[0]
    return F.linear(x, u)


def rows_by_mask(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    keep = h.detach() > 0
    h[keep] = h[keep] * 2
    return h * m.b


def a_function_by_its_own_mask(m: Model, x: Tensor) -> Tensor:
    u = m.w * 1
    u[u > 0] *= 2
    return F.linear(x, u)


def a_view_from_before(m: Model, x: Tensor) -> Tensor:
    u = m.w * 1
    v = u[0]
    u.mul_(3)
    return F.linear(x, u) + v.sum()


def a_transposed_weight(m: Model, x: Tensor) -> Tensor:
    u = (m.w * 2).t()
    u[1] = m.b
    u[:, 0].mul_(m.w[0, 0])
    v = u.t()
    v[2, 2] = 5
    return x @ u + F.linear(x, v)


def without_gradients(m: Model, x: Tensor) -> Tensor:
    h, u = m.linear(x), m.w * 1
    with torch.no_grad():
        h[:, 0] = m.b[0]
        u[0] = 1
    return h * m.b + F.linear(x, u)


def index_copied_and_filled(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h = h.index_copy(1, torch.tensor([0, 2], device=x.device), m.b[:2].expand(x.shape[0], 2))
    return h.index_fill_(1, torch.tensor([1], device=x.device), 0.5).tanh()


def the_data_alone(m: Model, x: Tensor) -> Tensor:
    m.w.data[0].clamp_(-0.5, 0.5)
    h = m.linear(x) * m.w.data.norm()
    h.data[:, 1] = 7
    return h * m.b


def a_mask_of_bytes(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[(x[:, 0] > 0).to(torch.uint8)] = m.b
    return h.tanh()


def a_parameter_added_at_places(m: Model, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    h = m.linear(x).index_put_((rows[:, None], torch.tensor([0, 0, 1], device=x.device)), m.b[:3], accumulate=True)
    return h.index_put(indices=[rows, (x[:, 0] > 0).long()], values=m.b[0]).tanh()


def rows_added_to_their_samples(m: Model, x: Tensor) -> Tensor:
    h, size = m.linear(x.repeat_interleave(2, 0)), x.shape[0]
    own = torch.arange(2 * size, device=x.device) // 2
    some = torch.zeros(size, 4, dtype=x.dtype, device=x.device).index_add_(0, own, h * m.b)
    more = m.linear(x).index_add(0, own, h, alpha=3).scatter_add(0, own[:, None].expand(-1, 2), h[:, 1:3])
    return some + x.new_zeros(size, 4).index_put((own,), h.sin(), accumulate=True) * more


def samples_along_columns(m: Model, x: Tensor) -> Tensor:
    """The positions of a sample next to each other, summed; then those of all samples for each position."""
    h = m.linear(x).tanh()  # [B, 4]
    pairs = torch.arange(4 * x.shape[0], device=x.device) // 2
    flat = x.new_zeros(2 * x.shape[0]).index_add(0, pairs, h.reshape(-1)).view(-1, 2)
    across = torch.arange(4 * x.shape[0], device=x.device) % (2 * x.shape[0])
    return flat + x.new_zeros(2 * x.shape[0]).index_add(0, across, h.t().reshape(-1)).view(2, -1).t() * m.b[:2]


def half_by_half(m: Model, x: Tensor) -> Tensor:
    """Merged samples written in parts: position by position, then all samples of a position, through a view too."""
    h, size = m.linear(x), x.shape[0]
    by_sample, by_position, viewed = (x.new_zeros(2 * size, 4) for _ in range(3))
    by_sample[0::2] = h
    by_sample[1::2] = h.sin()
    by_position[:size] = h * m.b
    by_position[size:] = m.b
    viewed.view(size, 2, 4)[:, 0] = h
    viewed.mul_(m.b)
    viewed.view(size, 2, 4)[:, 1] = h.cos()
    return by_sample.view(-1, 8) * viewed.view(-1, 8) * by_position.view(2, -1, 4).transpose(0, 1).reshape(-1, 8)


def nothing_written(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[:0] = m.b
    h[x.shape[0] :] = 1.0
    h[:, []] = 2.0
    h[:, 4:] = m.b[:0]
    return h * m.b


def reshaped_in_place(m: Model, x: Tensor) -> Tensor:
    h, u, mask = m.linear(x), 2 * m.b, x.new_ones(4)
    h.sin_().unsqueeze_(1)
    h.mul_(2)
    t = m.linear(x)
    t.t_().add_(m.b[:, None])
    u.unsqueeze_(0)
    mask.unsqueeze_(0)
    return (h * u).transpose_(0, 1).squeeze_(0) * t.t() * mask


def results_that_are_saved(m: Model, x: Tensor) -> Tensor:
    h, signed = m.linear(x).abs() + 0.5, m.linear(x).sin()
    same = h
    h **= m.b.abs()
    signed[:, :2].copysign_(m.b[2:])
    u = 2 * m.b.abs()
    u.pow_(m.b)
    return m.linear(x).hypot_(m.b) * same.sin() * signed + (x[:, :1] * x[:, :1] + u).float_power_(m.b)


BODIES = [
    a_parameter_into_a_slice, samples_and_a_parameter_into_zeros, columns_of_zeros, merged_samples,
    every_other_row, shifted, step_by_step, leading_ones, a_number_by_mask, a_parameter_by_mask,
    a_parameter_by_mask_of_every_place, a_parameter_by_list, a_parameter_at_each_samples_own_place,
    samples_at_each_samples_own_place, views_changed_in_place, a_row_of_a_function, a_weight_put_together,
    a_weight_with_zeros, a_view_from_before, a_transposed_weight, without_gradients, index_copied_and_filled,
    places_of_a_function, a_mask_of_a_function, rows_by_mask, a_function_by_its_own_mask, the_data_alone,
    a_mask_of_bytes, a_parameter_added_at_places,
    rows_added_to_their_samples, samples_along_columns, half_by_half, nothing_written, reshaped_in_place,
    results_that_are_saved,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")  # PyTorch's word on byte masks
@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_against_the_loop(body: Any, backend: str, device: torch.device) -> None:
    model, x = Model(body).double().to(device), torch.randn(5, 3, dtype=torch.double, device=device)
    assert_per_sample_grads(model, x, backend=backend)


@pytest.mark.inductor
def test_through_inductor(device: torch.device) -> None:
    bodies = [samples_and_a_parameter_into_zeros, a_parameter_at_each_samples_own_place, a_transposed_weight]
    for body in bodies:
        assert_per_sample_grads(Model(body).to(device), torch.randn(5, 3, device=device), tolerance=1e-4)


@pytest.mark.parametrize("size", [1, 5])
def test_a_weight_clamped_in_the_forward(size: int, device: torch.device) -> None:
    def clamped(m: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.w.clamp_(-0.5, 0.5)
        return m.linear(x)

    model, x = Model(clamped).double().to(device), torch.randn(size, 3, dtype=torch.double, device=device)
    fxgrad.transform(model, backend="aot_eager")(x).sum().backward()
    assert model.w.abs().max() == 0.5
    grad_sample: Tensor = model.w.grad_sample  # type: ignore[attr-defined]
    torch.testing.assert_close(grad_sample, x.unsqueeze(1).expand(-1, 4, -1))


def test_a_batch_of_one_written_into_zeros(device: torch.device) -> None:
    """Samples that arrive through memory alone are no output of parameters alone."""

    def flags(m: Model, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], 4, dtype=torch.bool, device=x.device)
        h[:, 1] = x[:, 0] > 0
        return h * m.b + 0.5

    for size in (1, 5):
        x = torch.randn(size, 3, dtype=torch.double, device=device)
        assert_per_sample_grads(Model(flags).double().to(device), x, backend="eager")


def one_sample_from_the_next(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    out = torch.zeros_like(h)
    out[1:] = h[:-1]
    return out * h


def one_sample_alone(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h[0] = m.b
    return h.tanh()


def in_the_order_of_the_data(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    out = torch.zeros_like(h)
    out[x[:, 0].argsort()] = h
    return out * m.b


def an_index_of_all_samples(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    return h.index_add(1, (x[:, 0] > 0).long(), x.new_ones(x.shape[0], x.shape[0])) * m.b


def samples_through_a_view_of_others(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h.view(-1)[::2].mul_(m.b[0])
    h.t()[0, :] = h.sum(0).sum()
    return h.tanh()


def added_to_the_next_sample(m: Model, x: Tensor) -> Tensor:
    h, places = m.linear(x.repeat_interleave(2, 0)), torch.arange(2 * x.shape[0], device=x.device) % x.shape[0]
    return x.new_zeros(x.shape[0], 4).index_add_(0, places, h) * m.b


def a_parameter_added_to_the_first_samples(m: Model, x: Tensor) -> Tensor:
    h, places = m.linear(x), torch.arange(4, device=x.device) % x.shape[0]
    return h.index_add(0, places, m.b.expand(4, -1)).tanh()


def an_index_turned_in_place(m: Model, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0], device=x.device)
    index.copy_(index.flip(0))
    return m.linear(x[index]) * m.b


def an_index_turned_through_a_view(m: Model, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0], device=x.device)
    both = torch.stack([index, index])
    both[0] = index.flip(0)
    return m.linear(x[both[0]]) * m.b


def an_index_turned_by_out(m: Model, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[0], device=x.device)
    torch.sub(x.shape[0] - 1, index, out=index)
    return m.linear(x[index]) * m.b


@pytest.mark.parametrize(
    "body",
    [one_sample_from_the_next, one_sample_alone, in_the_order_of_the_data, an_index_of_all_samples,
     samples_through_a_view_of_others, added_to_the_next_sample, a_parameter_added_to_the_first_samples,
     an_index_turned_in_place, an_index_turned_through_a_view, an_index_turned_by_out],
    ids=lambda body: body.__name__,
)  # fmt: skip
def test_one_sample_written_into_another_is_refused(body: Any, device: torch.device) -> None:
    gs = fxgrad.transform(Model(body).to(device), backend="eager")
    with pytest.raises(MixedSamples, match=f"in {body.__name__}|test_assignments.py"):
        gs(torch.randn(5, 3, device=device))


def test_a_number_of_rows_written_at_each_sample_is_refused(device: torch.device) -> None:
    """The rows are as many as the weights were stacked; the places are as many as there are samples."""

    class Stacked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x)
            h[torch.arange(x.shape[0], device=x.device)] = torch.stack([self.weight[0]] * 3)
            return super().forward(x + h)

    gs = fxgrad.transform(Stacked(3, 2).to(device), backend="eager")
    with pytest.raises(LostLayout, match="an assignment does not work for every number of samples"):
        gs(torch.randn(3, 3, device=device))


def test_a_parameter_into_a_buffer_is_refused(device: torch.device) -> None:
    class Keeps(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("kept", torch.zeros(2))

        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.kept[:1] = self.bias[:1]
            return super().forward(x) + self.kept

    gs = fxgrad.transform(Keeps().to(device), backend="eager")
    with pytest.raises(UnsupportedOp, match="writes a function of parameters into an input of the model"):
        gs(torch.randn(5, 3, device=device))


def into_rows(u: Tensor) -> None:
    with torch.no_grad():
        u[1] = 1


def into_detached_rows(u: Tensor) -> None:
    u.detach()[1] = 1


@pytest.mark.parametrize("write", [into_rows, into_detached_rows])
def test_a_write_without_gradients_after_one_with_them_is_refused(write: Any, device: torch.device) -> None:
    def twice(m: Model, x: Tensor) -> Tensor:
        u = m.w * 1
        u[0].mul_(2)
        write(u)
        return F.linear(x, u)

    with pytest.raises(FxgradError, match="fill_ writes without gradients into a function of parameters"):
        fxgrad.transform(Model(twice).to(device), backend="eager")(torch.randn(5, 3, device=device))
