"""A matrix of random signs that is never stored: an entry is a hash of its place."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 22  # entries that are made at once


def times_signs(rows: Tensor, elements: Tensor, dim: int, seed: int, key: int) -> Tensor:
    """``[n, m] -> [n, dim]``: the product with the rows of the matrix that ``elements`` [m] names."""
    out = rows.new_zeros(rows.shape[0], dim)
    block = max(1, BLOCK // dim)
    for start in range(0, rows.shape[1], block):
        part = slice(start, start + block)
        out += rows[:, part] @ signs(elements[part], dim, seed, key).to(rows.dtype)
    return out


def signs(elements: Tensor, dim: int, seed: int, key: int) -> Tensor:
    """``[m, dim]`` of +1 and -1: one bit of a hash of (seed, key, element, column)."""
    element = elements.unsqueeze(1)
    column = torch.arange(dim, device=elements.device)
    state = _mixed(torch.tensor((seed ^ key * 0x9E3779B1) & _MASK, device=elements.device))
    state = _mixed(state ^ _mixed(element & _MASK) ^ _mixed((element >> 32) + 0x51ED270B))
    return 1 - 2 * (_mixed(state ^ _mixed(column + 0x2545F491)) & 1)


_MASK = (1 << 32) - 1


def _mixed(state: Tensor) -> Tensor:
    """Apply the finaliser of MurmurHash3 on 32 bits, held in int64: a product wraps, and its low half is right."""
    state = state & _MASK
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)
