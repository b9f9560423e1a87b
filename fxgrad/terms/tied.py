"""An embedding tied to a head: two kinds of terms of one parameter, whose norms need no common form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxgrad.kernels.in_parts import inner_of
from fxgrad.kernels.norms import frobenius, gamma
from fxgrad.kernels.precision import rounding_of_factors
from fxgrad.kernels.tables import without
from fxgrad.terms.part import ChooseWay, Part
from fxgrad.terms.product import Product
from fxgrad.terms.table import Table


def norms_of_tied(parts: Sequence[Part], way: ChooseWay) -> Tensor | None:
    """``‖E + H‖² = ‖E‖² + ‖H‖² + 2 <E, H>``, the last one gather of a Gram matrix; None where parts are no such two."""
    product, table = parts if len(parts) == 2 else (None, None)  # as `merged` orders them
    if not (isinstance(product, Product) and isinstance(table, Table)):
        return None
    if not product.result_shape() == product.own_shape() == table.own_shape() == table.result_shape():
        return None
    norms = table.norms(way), product.norms(way)
    rows, (h, x) = table.rows, product.sides
    g = without(rows.padding, rows.ids, table.g)
    met = h.gather(2, rows.ids.unsqueeze(1).expand(-1, h.shape[1], -1))  # [n, l, k]
    gram = inner_of(x)(x, g)
    products = (met * gram).double()
    cross = products.sum((1, 2))
    lengths_of_x = frobenius(x.flatten(0, 1)).view(x.shape[:2]).unsqueeze(2)
    lengths_of_g = frobenius(g.flatten(0, 1)).view(g.shape[0], 1, -1)
    relative = gamma(x.shape[2], x.dtype) + rounding_of_factors(x)
    slack = relative * (met.double().abs() * (lengths_of_x * lengths_of_g)).sum((1, 2))
    square, bound = (one.square() + other.square() + 2 * cross for one, other in zip(*norms, strict=True))
    bound = bound + 2 * slack * (1 + 1e-9)
    return torch.stack([square.clamp(min=0).sqrt(), bound.clamp(min=0).sqrt() * (1 + 1e-12)])
