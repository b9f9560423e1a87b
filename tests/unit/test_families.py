"""An op stands in one family; ATen's own tag speaks for what no table names."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from fxgrad.ops.calls import bind, op_name
from fxgrad.ops.families import (
    _TABLE,
    Family,
    believed,
    draws,
    family_of,
    register_family,
)
from tests.unit.nodes import call

X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    "op, family",
    [
        ("gelu", Family.ELEMENTWISE),
        ("special_bessel_j0", Family.ELEMENTWISE),  # by ATen's tag
        ("permute", Family.MOVEMENT),
        ("softmax", Family.ALONG),
        ("amax", Family.ALONG),  # not linear in the samples
        ("sum", Family.REDUCTION),
        ("matmul", Family.CONTRACTION),
        ("layer_norm", Family.NORMALISED),
        ("conv2d", Family.PER_ROW),
        ("adaptive_avg_pool2d", Family.PER_IMAGE),
        ("max_pool3d_with_indices", Family.PER_IMAGE),
        ("embedding", Family.LOOKUP),
        ("scaled_dot_product_attention", Family.ATTENTION),
        ("cross_entropy", Family.LOSS),
        ("zeros_like", Family.FACTORY),
        ("linalg_solve", Family.OVER_DIMS),
        ("gather", Family.PER_INDEX),
        ("index_put", Family.INDEX_PUT),
        ("searchsorted", Family.SOUGHT),
        ("fxgrad::recurrence", Family.RECURRENT),
        ("fxgrad::pack", Family.PACKED),
        ("fxgrad.samples.control_flow.scan", Family.CONTROL),
        ("torch.autograd.Function", None),
        ("multi_head_attention_forward", None),  # decomposed
        ("mine::tanh", None),  # a user's own op is not ATen's of its name
        ("no_such_op", None),
    ],
)
def test_families(op: str, family: Family | None) -> None:
    assert family_of(op) is family


def test_an_op_stands_in_one_table() -> None:
    """But losses without a reduction: which dims they work over, the table of OVER_DIMS says."""
    families = {family: names for names, family in _TABLE}
    for one, other in combinations(families, 2):
        if (one, other) != (Family.LOSS, Family.OVER_DIMS):
            assert families[one].isdisjoint(families[other]), (one, other)


def test_a_users_word() -> None:
    def mine(x: torch.Tensor) -> torch.Tensor:
        return x

    name = op_name(mine)
    assert family_of(name) is None and not believed(name)
    register_family(mine, Family.ALONE)
    assert family_of(name) is Family.ALONE and believed(name)


@pytest.mark.parametrize(
    "node, random",
    [
        (call(F.dropout, X, 0.5), True),
        (call(F.dropout, X, 0.5, False), False),
        (call(F.dropout, X, 0.0), False),
        (call(torch.dropout, X, 0.5, False), False),
        (call(F.scaled_dot_product_attention, X, X, X), False),
        (call(F.scaled_dot_product_attention, X, X, X, dropout_p=0.1), True),
        (call(torch.rand_like, X), True),
        (call(torch.zeros_like, X), False),
        (call("bernoulli_", X), True),
    ],
)
def test_what_draws_random_numbers(node: torch.fx.Node, random: bool) -> None:
    assert draws(bind(node)) is random
