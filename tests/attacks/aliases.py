"""Memory with several names: values read before a write, and read again by another name after it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.attacks.model import attacks

# refused: an op is called on the same name before the write and after it


def sine_before_and_after(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.sin()
    z.add_(x.mean(0))
    return m(before + z.sin())


def layer_before_and_after(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = m(z)
    z.add_(x.mean(0))
    return before * m(z)


def flipped_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.tanh()
    z.copy_(x.flip(0))
    return m(before + z.tanh())


def zeros_filled_between(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    before = z.sin()
    z.copy_(x.flip(0))
    return m(before + z.sin() + x)


def a_state_between(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    before = m(x + state.tanh())
    state.add_(x.mean(0))
    return before + m(x + state.tanh())


def columns_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.cos()
    z[:, :2].add_(x.mean(0)[:2])
    return m(before + z.cos())


def a_column_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z * 2
    z[:, 0] = x[:, 0].flip(0)
    return m(before + z * 2)


def unbound_column_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.sum(1)
    z.unbind(1)[0].add_(x.mean())
    return m(x + (before + z.sum(1))[:, None])


def flattened_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    flat = z.view(-1)
    before = z * 2
    flat.add_(x.flip(0).reshape(-1))
    return m(before + z * 2)


def transposed_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.t().cos()
    z.t().sub_(x.t().mean(1, keepdim=True))
    return m((before + z.t().cos()).t())


def detached_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    other = z.detach()
    before = z.cos()
    other.sub_(x.mean(0))
    return m(before + z.cos())


def data_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.cos()
    z.data.sub_(x.mean(0))
    return m(before + z.cos())


def out_between(m: Any, x: Tensor) -> Tensor:
    z = torch.empty_like(x)
    torch.sin(x, out=z)
    before = z.tanh()
    torch.sin(x.flip(0), out=z)
    return m(before + z.tanh())


def softmax_out_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.cos()
    torch.softmax(x, 0, out=z)
    return m(before + z.cos())


def layer_output_between(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    before = h.relu()
    h.add_(h.flip(0))
    return h.relu() + before


def slot_between(m: Any, x: Tensor) -> Tensor:
    slots = torch.zeros(2, x.shape[0], 3)
    slots[0] = x
    before = m(slots[0].tanh())
    slots[0] = x.roll(1, 0)
    return before + m(slots[0].tanh())


def two_zeros(m: Any, x: Tensor) -> Tensor:
    """Both were made alike; one is written to."""
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    first.copy_(x.flip(0))
    return m(second + x) + m(first + x)


# refused: memory is written by one name and read by another


def by_slice(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    name = state[:]
    state.copy_(x.mean(0))
    return m(x + name)


def by_row(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(2, 3)
    row = state[0]
    state.copy_(x.mean(0).expand(2, 3))
    return m(x + row)


def by_view(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    name = state.view(1, 3)
    state.add_(x.mean(0))
    return m(x + name)


def by_detach(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    name = state.detach()
    state.add_(x.detach().mean(0))
    return m(x + name)


def by_expand(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    name = state.expand(x.shape[0], 3)
    state.add_(x.mean(0))
    return m(x + name)


def by_strides(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(6)
    name = torch.as_strided(state, (3,), (1,), 0)
    state[:3] = x.mean(0)
    return m(x + name)


def by_unbind(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(2, 3)
    _, row = state.unbind(0)
    state[1] = x.mean(0)
    return m(x + row)


def by_split(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(2, 3)
    _, row = state.split(1)
    state[1] = x.mean(0)
    return m(x + row)


def by_reshape(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(2, 3)
    state.reshape(-1).add_(x.mean())
    return m(x + state[1])


def by_contiguous(m: Any, x: Tensor) -> Tensor:
    """A contiguous tensor is its own contiguous tensor."""
    state = torch.zeros(2, 3)
    state.contiguous().add_(x.mean())
    return m(x + state[1])


def by_to(m: Any, x: Tensor) -> Tensor:
    """A tensor of the dtype is its own conversion."""
    state = torch.zeros(2, 3)
    state.to(state.dtype).add_(x.mean())
    return m(x + state[1])


def by_swapdims(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    torch.swapdims(state[None], 0, 1).add_(x.mean(0)[:, None])
    return m(x + state)


def by_complex(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3, dtype=torch.complex128)
    parts = torch.view_as_real(state)
    state.add_(x.mean(0))
    return m(x + parts[:, 0])


def by_real(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3, dtype=torch.complex128)
    state.real.copy_(x.mean(0))
    return m(x + state.real)


def by_diagonal(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3, 3)
    state.fill_diagonal_(1.0)
    state.diagonal().add_(x.mean(0))
    return m(x @ state)


def by_mask(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    state[state == 0] = x.mean()
    return m(x + state)


def by_columns_of_zeros(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    state.transpose(0, 1)[0] = x[:, 0].flip(0)
    return m(x + state)


def by_set(m: Any, x: Tensor) -> Tensor:
    state: Any = torch.zeros(3)
    state.set_(x.mean(0))
    return m(x + state)


def by_statistics(m: Any, x: Tensor) -> Tensor:
    """Batch norm's running mean is the batch's mean."""
    mean = torch.zeros(3)
    F.batch_norm(x, mean, torch.ones(3), training=True, momentum=1.0)
    return m(x + mean)


def by_statistics_that_were_read(m: Any, x: Tensor) -> Tensor:
    before = x - m.memory
    F.batch_norm(x.detach(), m.memory, torch.ones(3), training=True, momentum=1.0)
    return m(before) + m(x - m.memory)


def statistics_of_samples(m: Any, x: Tensor) -> Tensor:
    """Batch norm of a constant writes into a mean of samples, which it leaves between both."""
    mean = x.mean(0).clone()
    F.batch_norm(torch.ones(2, 3), mean, torch.ones(3), training=True)
    return m(x + mean)


def a_buffer(m: Any, x: Tensor) -> Tensor:
    m.memory.copy_(x.detach().mean(0))
    return m(x + m.memory)


def a_buffer_between(m: Any, x: Tensor) -> Tensor:
    before = m.memory.sin()
    m.memory.copy_(x.detach().mean(0))
    return m(x + before + m.memory.sin())


def a_buffer_by_view(m: Any, x: Tensor) -> Tensor:
    name = m.memory.view(1, 3)
    m.memory.copy_(x.detach().mean(0))
    return m(x + name)


def a_buffer_by_strides(m: Any, x: Tensor) -> Tensor:
    torch.as_strided(m.memory, (3,), (1,), 0).copy_(x.detach().mean(0))
    return m(x + m.memory)


def a_buffer_as_bias(m: Any, x: Tensor) -> Tensor:
    m.memory.copy_(x.detach().mean(0))
    return F.linear(x, m.weight, m.memory)


def a_buffer_of_a_norm(m: Any, x: Tensor) -> Tensor:
    m.memory.copy_(x.detach().mean(0))
    return F.layer_norm(x, (3,), m.bias, m.memory)


def beyond_a_row(m: Any, x: Tensor) -> Tensor:
    """The row was named before the samples were written behind it, and as_strided reads beyond it."""
    padded = torch.zeros(x.shape[0] + 1, 3)
    row = padded[0]
    padded[1:] = x
    return m(x + row.as_strided((3,), (1,), 3))


def beyond_a_flat_slice(m: Any, x: Tensor) -> Tensor:
    flat = torch.zeros(x.numel() + 3)
    start = flat[:3]
    flat[3:] = x.flatten()
    return m(x + torch.as_strided(start, (3,), (1,), 3))


def beyond_a_row_of_a_sum(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(2, 3)
    row = state[0]
    state[1:2].copy_(x.mean(0, keepdim=True))
    return m(x + torch.as_strided(row, (3,), (1,), 3))


def beyond_a_row_of_cat(m: Any, x: Tensor) -> Tensor:
    padded = torch.cat([torch.zeros(1, 3), x])
    return m(x + padded[0].as_strided((3,), (1,), 3))


def all_beyond_a_row_of_cat(m: Any, x: Tensor) -> Tensor:
    padded = torch.cat([torch.zeros(1, 3), x])
    return m(x + padded[0].as_strided((x.shape[0], 3), (3, 1), 3).mean(0))


def beyond_a_written_row(m: Any, x: Tensor) -> Tensor:
    padded = torch.zeros(x.shape[0] + 1, 3)
    padded[1:] = x
    return m(x + padded[0].as_strided((3,), (1,), 3))


def written_beyond_a_row(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(2, 3)
    row = state[1]
    torch.as_strided(state[0], (3,), (1,), 3).copy_(x.mean(0))
    return m(x + row)


# right


def scaled_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.cos()
    z.mul_(2)
    return m(before + z.cos())


def own_sum_between(m: Any, x: Tensor) -> Tensor:
    z = x.clone()
    before = z.sin()
    z.add_(x.mean(1, keepdim=True))
    return m(before + z.sin())


def own_rows_by_view(m: Any, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    name = z.view(-1, 3)
    z.copy_(x * 2)
    return m(x + name)


def constant_by_view(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(3)
    name = state.view(1, 3)
    state.add_(2.0)
    return m(x + name)


def a_product_under_its_name(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    before = h
    h @= m.weight
    return before + h.sin()


def a_weight_under_its_name(m: Any, x: Tensor) -> Tensor:
    twice = m.weight * 2
    before = twice.t()
    twice @= m.weight
    return x @ before @ twice


def shifted_under_a_name(m: Any, x: Tensor) -> Tensor:
    signs = torch.ones(3, dtype=torch.long)
    name = signs.view(1, 3)
    signs <<= (x > 0).sum(0)
    return m(x * name)


def shifted_samples(m: Any, x: Tensor) -> Tensor:
    signs = (x > 0).long()
    name = signs.view(-1)
    signs <<= 2
    signs >>= 1
    return m(x) * name.view(-1, 3)


ATTACKS = attacks(
    "writes",
    right={
        "scaled between two calls": scaled_between,
        "an own sum between two calls": own_sum_between,
        "own rows, by a view": own_rows_by_view,
        "a constant, by a view": constant_by_view,
        "a product under its name": a_product_under_its_name,
        "a weight under its name": a_weight_under_its_name,
        "shifted samples": shifted_samples,
    },
    refused={
        "a sine before and after": sine_before_and_after,
        "a layer before and after": layer_before_and_after,
        "flipped between two calls": flipped_between,
        "zeros filled between two calls": zeros_filled_between,
        "a state between two calls": a_state_between,
        "columns between two calls": columns_between,
        "a column between two calls": a_column_between,
        "an unbound column between two calls": unbound_column_between,
        "flattened, between two calls": flattened_between,
        "transposed, between two calls": transposed_between,
        "detached, between two calls": detached_between,
        "data between two calls": data_between,
        "out= between two calls": out_between,
        "out= of softmax between two calls": softmax_out_between,
        "a layer's output between two calls": layer_output_between,
        "a slot between two calls": slot_between,
        "two tensors of zeros": two_zeros,
        "shifted under a name": shifted_under_a_name,
        "read by a slice": by_slice,
        "read by a row": by_row,
        "read by a view": by_view,
        "read by detach": by_detach,
        "read by expand": by_expand,
        "read by as_strided": by_strides,
        "read by unbind": by_unbind,
        "read by split": by_split,
        "written by reshape": by_reshape,
        "written by contiguous": by_contiguous,
        "written by to": by_to,
        "written by swapdims": by_swapdims,
        "read by view_as_real": by_complex,
        "written by real": by_real,
        "written by diagonal": by_diagonal,
        "written by a mask": by_mask,
        "written by columns": by_columns_of_zeros,
        "written by set_": by_set,
        "written by batch norm": by_statistics,
        "written by batch norm between two calls": by_statistics_that_were_read,
        "a mean of samples that batch norm writes to": statistics_of_samples,
        "written beyond a row": written_beyond_a_row,
        "read beyond a row": beyond_a_written_row,
        "a buffer": a_buffer,
        "a buffer between two calls": a_buffer_between,
        "a buffer, by a view": a_buffer_by_view,
        "a buffer, by as_strided": a_buffer_by_strides,
        "a buffer as bias": a_buffer_as_bias,
        "a buffer as the bias of a norm": a_buffer_of_a_norm,
        "read beyond a row named before": beyond_a_row,
        "read beyond a slice named before": beyond_a_flat_slice,
        "read beyond a row of cat": beyond_a_row_of_cat,
        "all read beyond a row of cat": all_beyond_a_row_of_cat,
        "a sum read beyond a row named before": beyond_a_row_of_a_sum,
    },
)
