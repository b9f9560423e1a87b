"""What is done alike to pieces of the batch is done to the whole."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.join_pieces import join_pieces
from tests.passes.pictures import Program, around


def in_pieces(m: Program, x: Tensor) -> Tensor:
    return torch.cat([(piece @ m.w).relu() for piece in x.chunk(2)])


def test_pieces_that_are_treated_alike() -> None:
    assert_expected_inline(
        around(join_pieces, Program(in_pieces), torch.randn(4, 4)),
        """\
before:
inputs:
  args[0]: f32[s, 4]
  w: f32[4, 4]                                                    trainable
graph:
  chunk = chunk(args[0], 2)
  getitem = getitem(chunk, 0)
  getitem_2 = getitem(chunk, 1)
  matmul = matmul(getitem, w)
  relu = relu(matmul)
  matmul_2 = matmul(getitem_2, w)
  relu_2 = relu(matmul_2)
  cat = cat([relu, relu_2])
return (cat,)

after join_pieces:
graph:
  matmul = matmul(args[0], w)
  relu = relu(matmul)
return (relu,)
""",
    )
