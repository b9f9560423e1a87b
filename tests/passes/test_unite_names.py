"""A tensor that an op returns as it is keeps its name: dropout that is off, and what runs without gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.unite_names import unite_names
from tests.passes.pictures import Program, around


def dropped(m: Program, x: Tensor) -> Tensor:
    h = x @ m.w
    F.dropout(h, 0.5, training=False).mul_(2)
    return F.dropout(h + m.b, 0.5)


def test_a_dropout_that_is_off() -> None:
    assert_expected_inline(
        around(unite_names, Program(dropped), torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[s, 4]
  b: f32[4]                                                       trainable
graph:
  matmul = matmul(args[0], w)
  dropout = dropout(matmul, 0.5, training=False)
  mul = mul_(dropout, 2)
  add = add(matmul, b)
  dropout_2 = dropout(add, 0.5)
return (dropout_2,)

after unite_names:
graph:
  matmul = matmul(args[0], w)
  mul = mul_(matmul, 2)
  add = add(matmul, b)
  dropout = dropout(add, 0.5)
return (dropout,)
""",
    )
