"""An op without a known family is decomposed into ops that have one."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fxgrad.passes.decompose_calls import decompose_calls
from tests.passes.pictures import Program, around


def test_an_op_that_nobody_classified() -> None:
    model = Program(lambda m, x: torch.trapezoid(x @ m.w))
    assert_expected_inline(
        around(decompose_calls, model, torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]
graph:
  matmul = matmul(args[0], w)                                     f32[B, 4]
  trapezoid = trapezoid(matmul)                                   f32[B]
return (trapezoid,)

after decompose_calls:
graph:
  matmul = matmul(args[0], w)                                     f32[B, 4]
  select = select(matmul, -1, -1)                                 f32[B]
  select_2 = select(matmul, -1, 0)                                f32[B]
  add = add(select_2, select)                                     f32[B]
  mul = mul(add, 0.5)                                             f32[B]
  sum = sum(matmul, [-1])                                         f32[B]
  sub = sub(sum, mul)                                             f32[B]
  mul_2 = mul(sub, 1.0)                                           f32[B]
return (mul_2,)
""",
    )
