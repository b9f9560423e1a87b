"""Of a batch of one, a parameter's ordinary gradient is the sample's."""

from __future__ import annotations

from expecttest import assert_expected_inline

from fxgrad.passes.take_whole_gradient import take_whole_gradient
from tests.passes.pictures import Small, X, around


def test_a_batch_of_one() -> None:
    assert_expected_inline(
        around(take_whole_gradient, Small(), X[:1]),
        """\
before:
inputs:
  x: f32[1, 5, 3]
  fc.weight: f32[4, 3]                                            trainable
  fc.bias: f32[4]                                                 trainable
  scale: f32[4]                                                   trainable
graph:
  view = view(x, 5, 3)
  linear = linear(view, fc.weight, fc.bias)
  mul = mul(linear, scale)
  view_2 = view(mul, 1, 5, -1)
  mean = mean(view_2, 1)
return (mean,)

after take_whole_gradient:
gradient placeholders:
  grad_placeholder(scale)
  grad_placeholder(fc.weight)
  grad_placeholder(fc.bias)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, 1, grad_placeholder(scale), grad_placeholder(fc.weight), grad_placeholder(fc.bias))
  single = single(tape, handle, scale)
  single_2 = single(tape, handle, fc.weight)
  single_3 = single(tape, handle, fc.bias)
  view = view(x, 5, 3)
  linear = linear(view, single_2, single_3)
  mul = mul(linear, single)
  view_2 = view(mul, 1, 5, -1)
  mean = mean(view_2, 1)
return (mean,)
""",
    )
