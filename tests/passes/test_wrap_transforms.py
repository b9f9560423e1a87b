"""What runs between the calls that open and close a level of torch.func is one call."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.wrap_transforms import wrap_transforms
from tests.passes.pictures import Program, around


def force(m: Program, x: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda x: (x @ m.w).sin().sum())(x)
    return found


def test_a_gradient_inside_of_the_model() -> None:
    assert_expected_inline(
        around(wrap_transforms, Program(force), torch.randn(3, 4)),
        """\
before:
inputs:
  args[0]: f32[s, 4]
  w: f32[4, 4]                                                    trainable
graph:
  _saved_tensors_hooks_disable = _saved_tensors_hooks_disable("torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks. Please open an issue with your use case.")
  _grad_increment_nesting = _grad_increment_nesting()
  _wrap_for_grad = _wrap_for_grad(args[0], 1)
  set_inplace_requires_grad_allowed = set_inplace_requires_grad_allowed(True)
  _set_tensor_requires_grad = _set_tensor_requires_grad(_wrap_for_grad)
  set_inplace_requires_grad_allowed_2 = set_inplace_requires_grad_allowed(False)
  matmul = matmul(_wrap_for_grad, w)
  sin = sin(matmul)
  sum = sum(sin)
  _autograd_grad = _autograd_grad((sum,), [_wrap_for_grad], create_graph=True)
  getitem = getitem(_autograd_grad, 0)
  _unwrap_for_grad = _unwrap_for_grad(getitem, 1)
  _unwrap_for_grad_2 = _unwrap_for_grad(sum, 1)
  _grad_decrement_nesting = _grad_decrement_nesting()
  _saved_tensors_hooks_enable = _saved_tensors_hooks_enable()
return (_unwrap_for_grad,)

after wrap_transforms:
graph:
  torch_func = torch_func(args[0], w)
  getitem = getitem(torch_func, 0)
return (getitem,)
""",
    )
