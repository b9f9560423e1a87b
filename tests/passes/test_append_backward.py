"""A graph that returns a loss also returns the gradients by its placeholders."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.append_backward import append_backward
from tests.passes.pictures import Program, around


def test_the_gradients_of_a_loss() -> None:
    def loss(m: Program, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, m.w, m.b).square().sum()

    assert_expected_inline(
        around(append_backward, Program(loss), torch.randn(5, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  b: f32[4]                                                       trainable
  args[0]: f32[B, 4]                                              batched(0)
gradient placeholders:
  grad_placeholder(w)
  grad_placeholder(b)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, grad_placeholder(w), grad_placeholder(b))
  linear = linear(args[0], w.detach(), b.detach())                f32[B, 4] batched(0)
  linear' = tap_linear(tape, B, linear, handle, args[0], w.detach(), b.detach())  rule
  square = square(linear')                                        f32[B, 4] batched(0)
  sum = sum(square)                                               f32[] mixed
return (sum,)

after append_backward:
graph:
  leaf = leaf(grad_placeholder(w))
  leaf_2 = leaf(grad_placeholder(b))
  tape = new_tape[GradSample]()
  handle = collect(tape, B, leaf, leaf_2)
  linear = linear(args[0], w.detach(), b.detach())                f32[B, 4] batched(0)
  linear' = tap_linear(tape, B, linear, handle, args[0], w.detach(), b.detach())  rule
  square = square(linear')                                        f32[B, 4] batched(0)
  sum = sum(square)                                               f32[] mixed
  gradients = gradients(sum, leaf, leaf_2)
  getitem = getitem(gradients, 0)
  getitem_2 = getitem(gradients, 1)
  detach = detach(sum)
return (detach, getitem, getitem_2)
""",
    )
