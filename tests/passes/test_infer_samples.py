"""Every value says where its samples are: constant, uniform, batched (where?), or mixed."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.infer_samples import infer_samples
from tests.passes.pictures import Program, Small, X, around


def test_merged_samples() -> None:
    assert_expected_inline(
        around(infer_samples, Small(), X),
        """\
before:
inputs:
  x: f32[B, 5, 3]
  fc.weight: f32[4, 3]                                            trainable
  fc.bias: f32[4]                                                 trainable
  scale: f32[4]                                                   trainable
graph:
  view = view(x, 5*B, 3)                                          f32[5*B, 3]
  linear = linear(view, fc.weight, fc.bias)                       f32[5*B, 4]
  mul = mul(linear, scale)                                        f32[5*B, 4]
  view_2 = view(mul, B, 5, -1)                                    f32[B, 5, 4]
  mean = mean(view_2, 1)                                          f32[B, 4]
return (mean,)

after infer_samples:
inputs:
  x: f32[B, 5, 3]                                                 batched(0)
  fc.weight: f32[4, 3]                                            trainable
  fc.bias: f32[4]                                                 trainable
  scale: f32[4]                                                   trainable
graph:
  view = view(x, 5*B, 3)                                          f32[5*B, 3] batched(0, 1, 5)
  linear = linear(view, fc.weight, fc.bias)                       f32[5*B, 4] batched(0, 1, 5)
  mul = mul(linear, scale)                                        f32[5*B, 4] batched(0, 1, 5)
  view_2 = view(mul, B, 5, -1)                                    f32[B, 5, 4] batched(0)
  mean = mean(view_2, 1)                                          f32[B, 4] batched(0)
return (mean,)
""",
    )


def loss(m: Program, x: Tensor) -> tuple[Tensor, Tensor]:
    scale = m.w * 2
    places = torch.arange(4.0)
    h = (x + places) @ scale
    return h, h.square().sum()


def test_the_four_kinds() -> None:
    assert_expected_inline(
        around(infer_samples, Program(loss), torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]
graph:
  mul = mul(w, 2)                                                 f32[4, 4]
  arange = arange(4.0)                                            f32[4]
  add = add(args[0], arange)                                      f32[B, 4]
  matmul = matmul(add, mul)                                       f32[B, 4]
  square = square(matmul)                                         f32[B, 4]
  sum = sum(square)                                               f32[]
return (matmul, sum)

after infer_samples:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]                                              batched(0)
graph:
  mul = mul(w, 2)                                                 f32[4, 4] uniform
  arange = arange(4.0)                                            f32[4] constant
  add = add(args[0], arange)                                      f32[B, 4] batched(0)
  matmul = matmul(add, mul)                                       f32[B, 4] batched(0)
  square = square(matmul)                                         f32[B, 4] batched(0)
  sum = sum(square)                                               f32[] mixed
return (matmul, sum)
""",
    )
