"""Pieces of a matrix: the term of a block is the term of the whole with fewer features, or with zeros around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.tensors import identity
from fxgrad.kernels.sizes import hint
from fxgrad.rules.strategies import Strategy
from fxgrad.terms import Part

Result = TypeVar("Result")
Back = Callable[[Tensor], dict[int, Tensor]]  # [m, *u.shape] -> for each of f's parameters [m, *w.shape]


def cut(strategy: Strategy, term: Part, values: list[Any], back: Back) -> dict[int, Part] | None:
    """The term of u as terms of what u was joined of, or of what u is a piece of; None where a piece is no block.

        u = cat([v, w])      Σ_k g_k ⊗ x_k -> Σ_k g_k[rows of w] ⊗ x_k[columns of w]
        u = w.chunk(3)[1]    Σ_k g_k ⊗ x_k -> Σ_k [0, g_k, 0] ⊗ [0, x_k, 0]

    Where a block lies is read off a tensor without memory: a view with the whole one's strides starts there.
    """
    if strategy.use.op == "cat":
        whole, pieces = traced((1, *term.own_shape()), values, back)
        places = {slot: _place(whole, piece) for slot, piece in pieces.items()}
        known = {slot: place for slot, place in places.items() if place is not None}
        blocks = {slot: term.block(place, pieces[slot].shape[1:]) for slot, place in known.items()}
        return blocks if len(blocks) == len(places) else None
    (slot,) = strategy.use.wrt

    def piece_of(whole: Tensor) -> Tensor:
        piece: Tensor = strategy.use.rerun([whole if i == slot else value for i, value in enumerate(values)])
        return piece

    whole, piece = traced(values[slot].shape, values, piece_of)
    if whole.dim() != 2:
        return None
    place = _place(whole, piece)
    return None if place is None else {slot: term.padded(place, whole.shape)}


def traced(shape: Sequence[int], values: Sequence[Any], of: Callable[[Tensor], Result]) -> tuple[Tensor, Result]:
    """Return a tensor without memory, and what becomes of it, behind the back of whoever is tracing."""
    kinds = [v.dtype for v in values if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())]
    dtype = kinds[0].to_real() if kinds else torch.float32  # no value is cast then, which needs the modes
    with disable_current_modes():
        whole = torch.empty([hint(size) for size in shape], device="meta", dtype=dtype)
        return whole, of(whole)


def _place(whole: Tensor, piece: Tensor) -> tuple[int, int] | None:
    """The first row and column of a block of a matrix, or of one in a batch of one; None for what is no block."""
    same = identity(piece.untyped_storage()) == identity(whole.untyped_storage())
    if whole.dim() < 2 or not same or piece.dim() != whole.dim() or piece.stride()[-2:] != whole.stride()[-2:]:
        return None
    row, column = divmod(int(piece.storage_offset() - whole.storage_offset()), whole.stride(-2))
    return row, column
