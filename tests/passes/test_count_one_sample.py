"""In a batch of one, all that depends on an input is the sample's, wherever it stands."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

import fxgrad
from fxgrad.passes.count_one_sample import count_one_sample
from tests.passes.pictures import Program, around


def total(m: Program, x: Tensor) -> Tensor:
    return (x @ (m.w * 2)).sum() + torch.ones(4)


def test_a_batch_of_one_whose_norm_is_bounded() -> None:
    model = fxgrad.transform(Program(total), quantity=fxgrad.ClippedGrad(1.0))
    assert_expected_inline(
        around(count_one_sample, model, torch.randn(1, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[1, 4]
graph:
  mul = mul(w, 2)                                                 f32[4, 4]
  matmul = matmul(args[0], mul)                                   f32[1, 4]
  sum = sum(matmul)                                               f32[]
  ones = ones(4)                                                  f32[4]
  add = add(sum, ones)                                            f32[4]
return (add,)

after count_one_sample:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[1, 4]                                              batched(all)
graph:
  mul = mul(w, 2)                                                 f32[4, 4] uniform
  matmul = matmul(args[0], mul)                                   f32[1, 4] batched(all)
  sum = sum(matmul)                                               f32[] batched(all)
  ones = ones(4)                                                  f32[4] constant
  add = add(sum, ones)                                            f32[4] batched(all)
return (add,)
""",
    )
