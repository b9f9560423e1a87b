"""An assignment is an op in place on a view; one by a mask chooses."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.lower_assignments import lower_assignments
from tests.passes.pictures import Program, around


def assigned(m: Program, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, :2] = x[:, 2:] @ m.w[2:, :2]
    h[x[:, 0] > 0] = m.b
    return h


def test_a_slice_and_a_mask() -> None:
    assert_expected_inline(
        around(lower_assignments, Program(assigned), torch.randn(3, 4)),
        """\
before:
inputs:
  args[0]: f32[B, 4]
  w: f32[4, 4]                                                    trainable
  b: f32[4]                                                       trainable
graph:
  zeros_like = zeros_like(args[0])                                f32[B, 4]
  getitem = getitem(args[0], (:, 2:))                             f32[B, 2]
  getitem_2 = getitem(w, (2:, :2))                                f32[2, 2]
  matmul = matmul(getitem, getitem_2)                             f32[B, 2]
  setitem = setitem_(zeros_like, (:, :2), matmul)
  getitem_3 = getitem(args[0], (:, 0))                            f32[B]
  gt = gt(getitem_3, 0)                                           b8[B]
  setitem_2 = setitem_(zeros_like, gt, b)
return (zeros_like,)

after lower_assignments:
graph:
  zeros_like = zeros_like(args[0])                                f32[B, 4]
  getitem = getitem(args[0], (:, 2:))                             f32[B, 2]
  getitem_2 = getitem(w, (2:, :2))                                f32[2, 2]
  matmul = matmul(getitem, getitem_2)                             f32[B, 2]
  getitem_3 = getitem(zeros_like, (:, :2))                        f32[B, 2]
  copy = copy_(getitem_3, matmul)                                 f32[B, 2]
  getitem_4 = getitem(args[0], (:, 0))                            f32[B]
  gt = gt(getitem_4, 0)                                           b8[B]
  getitem_5 = getitem(zeros_like, (:, :))                         f32[B, 4]
  unsqueeze = unsqueeze(gt, -1)                                   b8[B, 1]
  where = where(unsqueeze, b, getitem_5)                          f32[B, 4]
  copy_2 = copy_(getitem_5, where)                                f32[B, 4]
return (zeros_like,)
""",
    )
