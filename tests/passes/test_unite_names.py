"""A tensor that an op returns as it is keeps its name: dropout that is off, and what runs without gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.unite_names import unite_names
from tests.passes.pictures import Program, around


def dropped(m: Program, x: Tensor) -> Tensor:
    return F.dropout(x, training=False).mul_(m.b)


def test_a_dropout_that_is_off() -> None:
    assert_expected_inline(
        around(unite_names, Program(dropped), torch.randn(3, 4)),
        """\
before:
inputs:
  args[0]: f32[s, 4]
  b: f32[4]                                                       trainable
graph:
  dropout = dropout(args[0], training=False)
  mul = mul_(dropout, b)
return (mul,)

after unite_names:
graph:
  mul = mul_(args[0], b)
return (mul,)
""",
    )
