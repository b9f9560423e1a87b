"""An op with a parameter reads it detached, and a tap stands behind it."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from fxgrad.passes.attach_taps import attach_taps
from tests.passes.pictures import Program, Small, X, around


def test_taps_behind_ops() -> None:
    assert_expected_inline(
        around(attach_taps, Small(), X),
        """\
before:
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

after attach_taps:
gradient placeholders:
  grad_placeholder(scale)
  grad_placeholder(fc.weight)
  grad_placeholder(fc.bias)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, grad_placeholder(scale), grad_placeholder(fc.weight), grad_placeholder(fc.bias))
  view = view(x, 5*B, 3)                                          f32[5*B, 3] batched(0, 1, 5)
  linear = linear(view, fc.weight.detach(), fc.bias.detach())     f32[5*B, 4] batched(0, 1, 5)
  linear' = tap_linear(tape, B, linear, handle, view, fc.weight.detach(), fc.bias.detach())  rule
  mul = mul(linear', scale.detach())                              f32[5*B, 4] batched(0, 1, 5)
  mul' = tap_mul(tape, B, mul, handle, linear', scale.detach())   elementwise
  view_2 = view(mul', B, 5, -1)                                   f32[B, 5, 4] batched(0)
  mean = mean(view_2, 1)                                          f32[B, 4] batched(0)
return (mean,)
""",
    )


def test_functions_of_parameters() -> None:
    model = Program(lambda m, x: x @ m.w.t()[:, :2] + m.b.chunk(2)[1])
    assert_expected_inline(
        around(attach_taps, model, torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]                                              batched(0)
  b: f32[4]                                                       trainable
graph:
  t = t(w)                                                        f32[4, 4] uniform
  getitem = getitem(t, (:, :2))                                   f32[4, 2] uniform
  matmul = matmul(args[0], getitem)                               f32[B, 2] batched(0)
  chunk = chunk(b, 2)                                             (f32[2], f32[2]) uniform, uniform
  getitem_2 = getitem(chunk, 1)                                   f32[2] uniform
  add = add(matmul, getitem_2)                                    f32[B, 2] batched(0)
return (add,)

after attach_taps:
gradient placeholders:
  grad_placeholder(w)
  grad_placeholder(b)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, grad_placeholder(w), grad_placeholder(b))
  t = t(w.detach())                                               f32[4, 4] uniform
  derived = derive_t(tape, B, handle, w.detach())                 rule
  getitem = getitem(t, (:, :2))                                   f32[4, 2] uniform
  derived_2 = derive_getitem(tape, B, derived, t)                 rule
  matmul = matmul(args[0], getitem)                               f32[B, 2] batched(0)
  matmul' = tap_matmul(tape, B, matmul, derived_2, args[0], getitem)  rule
  chunk = chunk(b.detach(), 2)                                    (f32[2], f32[2]) uniform, uniform
  getitem_2 = getitem(chunk, 1)                                   f32[2] uniform
  derived_3 = derive_chunk(tape, B, handle, b.detach())           rule
  add = add(matmul', getitem_2)                                   f32[B, 2] batched(0)
  add' = tap_add(tape, B, add, derived_3, matmul', getitem_2)     elementwise
return (add',)
""",
    )
