"""Per-sample gradients as what they are made of: `Term` and its kinds."""

from fxgrad.kernels.factors import Factor, OneHot, Patches
from fxgrad.terms.base import Term, is_one
from fxgrad.terms.einsum import Einsum
from fxgrad.terms.part import Materialised, Part, part_of
from fxgrad.terms.product import Product
from fxgrad.terms.table import Table
from fxgrad.terms.windows import Windows

__all__ = [
    "Einsum",
    "Factor",
    "Materialised",
    "OneHot",
    "Part",
    "Patches",
    "Product",
    "Table",
    "Term",
    "Windows",
    "is_one",
    "part_of",
]

Term.kinds[:] = [Product, Table, Windows, Einsum]
