"""No op that draws random numbers uses a parameter: dropout(w) is a product with noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from fxgrad.passes.separate_draws import separate_draws
from tests.passes.pictures import Program, around


def test_dropout_of_a_parameter() -> None:
    model = Program(lambda m, x: x @ F.dropout(m.w, 0.5))
    assert_expected_inline(
        around(separate_draws, model, torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]                                              batched(0)
graph:
  dropout = dropout(w, 0.5)                                       f32[4, 4] uniform
  matmul = matmul(args[0], dropout)                               f32[B, 4] batched(0)
return (matmul,)

after separate_draws:
graph:
  ones_like = ones_like(w)                                        f32[4, 4] constant
  dropout = dropout(ones_like, 0.5)                               f32[4, 4] constant
  mul = mul(w, dropout)                                           f32[4, 4] uniform
  matmul = matmul(args[0], mul)                                   f32[B, 4] batched(0)
return (matmul,)
""",
    )
