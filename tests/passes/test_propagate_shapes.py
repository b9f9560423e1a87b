"""Sizes are those of fake tensors in which the sample dimensions, and they alone, carry B."""

from __future__ import annotations

from expecttest import assert_expected_inline

from fxgrad.passes.propagate_shapes import propagate_shapes
from tests.passes.pictures import Small, X, around


def test_as_many_positions_as_samples() -> None:
    assert_expected_inline(
        around(propagate_shapes, Small(), X),
        """\
before:
inputs:
  x: f32[s, 5, 3]
  fc.weight: f32[4, 3]                                            trainable
  fc.bias: f32[4]                                                 trainable
  scale: f32[4]                                                   trainable
graph:
  view = view(x, 5*s, 3)
  linear = linear(view, fc.weight, fc.bias)
  mul = mul(linear, scale)
  view_2 = view(mul, s, 5, -1)
  mean = mean(view_2, 1)
return (mean,)

after propagate_shapes:
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
""",
    )
