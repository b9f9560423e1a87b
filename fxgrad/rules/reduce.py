"""Sums that rules share: back to a parameter's shape, one sample at a time."""

from __future__ import annotations

import string
from collections.abc import Sequence

from torch import Tensor

from fxgrad.terms import Term, is_one


def summed_to(grad: Tensor, shape: Sequence[int]) -> Term | Tensor:
    """Sum what broadcasting had repeated, but never the samples: ``[n, *broadcast] -> [n, *shape]``.

    A term, of which it is known how far it rounds; a tensor where nothing is added up.
    """
    dims = _repeated(grad, shape)
    return sum_dims(grad, dims, shape) if dims else grad.reshape(grad.shape[0], *shape)


def sum_dims(grad: Tensor, dims: Sequence[int], shape: Sequence[int]) -> Term:
    """Return the sum over some dims as a term, in a parameter's shape."""
    letters = [letter for letter in string.ascii_lowercase if letter != "n"][: grad.dim() - 1]
    kept = (letter for dim, letter in enumerate(letters, 1) if dim not in dims)
    return Term(f"n{''.join(letters)}->n{''.join(kept)}", grad, shape=shape)


def _repeated(grad: Tensor, shape: Sequence[int]) -> list[int]:
    """Return the dims of ``[n, *broadcast]`` along which broadcasting repeated what has this shape."""
    extra = grad.dim() - 1 - len(shape)
    ones = (dim for dim, size in enumerate(shape, 1 + extra) if is_one(size) and not is_one(grad.shape[dim]))
    return [*range(1, 1 + extra), *ones]


def sum_positions(grad: Tensor, keep: int) -> Term:
    """``[n, k.., *shape] -> [n, *shape]`` where shape has ``keep`` dims."""
    kept = "abcdefgh"[:keep]
    return Term(f"n...{kept}->n{kept}", grad)
