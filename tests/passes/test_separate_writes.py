"""What is written into a function of parameters is written to memory of its own."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.separate_writes import separate_writes
from tests.passes.pictures import Program, around


def written(m: Program, x: Tensor) -> Tensor:
    u = m.w * 2
    u[0].mul_(3)
    return x @ u


def test_a_row_written_to() -> None:
    assert_expected_inline(
        around(separate_writes, Program(written), torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]
graph:
  mul = mul(w, 2)                                                 f32[4, 4]
  getitem = getitem(mul, 0)                                       f32[4]
  mul_2 = mul_(getitem, 3)                                        f32[4]
  matmul = matmul(args[0], mul)                                   f32[B, 4]
return (matmul,)

after separate_writes:
graph:
  mul = mul(w, 2)                                                 f32[4, 4]
  getitem = getitem(mul, 0)                                       f32[4]
  clone = clone(getitem)                                          f32[4]
  mul_2 = mul_(clone, 3)                                          f32[4]
  put = put(mul, places_0_getitem, mul_2)                         f32[4, 4]
  matmul = matmul(args[0], put)                                   f32[B, 4]
return (matmul,)
""",
    )
