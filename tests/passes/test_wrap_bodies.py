"""An op that has graphs among its arguments is one call on values: the graphs are in its target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.wrap_bodies import wrap_bodies
from tests.passes.pictures import Program, around


class Scaled(torch.autograd.Function):
    """x w, whose backward is its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of Dynamo itself
def test_an_autograd_function() -> None:
    model = Program(lambda m, x: Scaled.apply(x, m.b))
    assert_expected_inline(
        around(wrap_bodies, model, torch.randn(3, 4)),
        """\
before:
inputs:
  b: f32[4]                                                       trainable
  args[0]: f32[s, 4]
graph:
  autograd_function_apply = autograd_function_apply(fwd_body_0, bwd_body_0, s, args[0], b, non_differentiable_idx=[], saved_for_backward_idx=[1, 2])
  getitem = getitem(autograd_function_apply, 0)
return (getitem,)
fwd_body_0:
inputs:
  args[0]: f32[s, 4]
  b: f32[4]                                                       trainable
graph:
  _set_grad_enabled = _set_grad_enabled(False)
  mul = mul(args[0], b)
  _set_grad_enabled_2 = _set_grad_enabled(True)
return ((mul,), (s, b, args[0]))
bwd_body_0:
inputs:
  g: f32[s, 4]
  b: f32[4]                                                       trainable
  args[0]: f32[s, 4]
graph:
  _set_grad_enabled = _set_grad_enabled(False)
  mul = mul(g, b)
  mul_2 = mul(g, args[0])
  sum = sum(mul_2, 0)
  _set_grad_enabled_2 = _set_grad_enabled(True)
return (None, mul, sum)

after wrap_bodies:
graph:
  autograd_function = autograd_function(s, args[0], b)
  getitem = getitem(autograd_function, 0)
return (getitem,)
""",
    )


def hooked(m: Program, x: Tensor) -> Tensor:
    h: Tensor = x @ m.w
    h.register_hook(lambda g: g * 2)
    return h + m.b


def test_a_hook_on_a_value() -> None:
    assert_expected_inline(
        around(wrap_bodies, Program(hooked), torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[s, 4]
  b: f32[4]                                                       trainable
graph:
  matmul = matmul(args[0], w)
  register_hook = register_hook(matmul, hook_body_0, s)
  add = add(register_hook, b)
return (add,)
hook_body_0:
inputs:
  g: f32[s, 4]
graph:
  mul = mul(g, 2)
return mul

after wrap_bodies:
graph:
  matmul = matmul(args[0], w)
  autograd_function = autograd_function(matmul, s)
  getitem = getitem(autograd_function, 0)
  add = add(getitem, b)
return (add,)
""",
    )
