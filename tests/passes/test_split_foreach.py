"""torch._foreach_mul([x, y], 2.)  ->  x.mul(2.), y.mul(2.)"""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.split_foreach import split_foreach
from tests.passes.pictures import Program, around


def both_scaled(m: Program, x: Tensor) -> Tensor:
    scaled, bias = torch._foreach_mul([x @ m.w, m.b], 2.0)
    return scaled + bias


def test_a_list_of_tensors() -> None:
    assert_expected_inline(
        around(split_foreach, Program(both_scaled), torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[s, 4]
  b: f32[4]                                                       trainable
graph:
  matmul = matmul(args[0], w)
  _foreach_mul = _foreach_mul([matmul, b], 2.0)
  getitem = getitem(_foreach_mul, 0)
  getitem_2 = getitem(_foreach_mul, 1)
  add = add(getitem, getitem_2)
return (add,)

after split_foreach:
graph:
  matmul = matmul(args[0], w)
  mul = mul(matmul, 2.0)
  mul_2 = mul(b, 2.0)
  add = add(mul, mul_2)
return (add,)
""",
    )
