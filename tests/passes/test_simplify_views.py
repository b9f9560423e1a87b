"""No view merges a dimension that a later one splits again."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

import fxgrad
from fxgrad.passes.simplify_views import simplify_views
from tests.passes.pictures import Program, around


def heads(m: Program, x: Tensor) -> Tensor:
    steps, samples, _ = x.shape
    return (x @ m.w).view(steps, samples * 2, 2).transpose(0, 1).view(samples, 2, steps, 2)


def test_heads_of_attention() -> None:
    model = fxgrad.transform(Program(heads), in_dims=1)
    assert_expected_inline(
        around(simplify_views, model, torch.randn(5, 3, 4)),
        """\
before:
inputs:
  args[0]: f32[5, B, 4]
  w: f32[4, 4]                                                    trainable
graph:
  matmul = matmul(args[0], w)                                     f32[5, B, 4]
  view = view(matmul, 5, 2*B, 2)                                  f32[5, 2*B, 2]
  transpose = transpose(view, 0, 1)                               f32[2*B, 5, 2]
  view_2 = view(transpose, B, 2, 5, 2)                            f32[B, 2, 5, 2]
return (view_2,)

after simplify_views:
graph:
  matmul = matmul(args[0], w)                                     f32[5, B, 4]
  view = view(matmul, 5, B, 2, 2)                                 f32[5, B, 2, 2]
  permute = permute(view, 1, 2, 0, 3)                             f32[B, 2, 5, 2]
return (permute,)
""",
    )
