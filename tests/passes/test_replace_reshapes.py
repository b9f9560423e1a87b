"""What changes its shape in place becomes a new value, which is read in its place from there on."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from fxgrad.passes.replace_reshapes import replace_reshapes
from tests.passes.pictures import Program, around


def turned(m: Program, x: Tensor) -> Tensor:
    u = m.w * 2
    u.t_()
    return x @ u


def test_a_transposition_in_place() -> None:
    assert_expected_inline(
        around(replace_reshapes, Program(turned), torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[s, 4]
graph:
  mul = mul(w, 2)
  t = t_(mul)
  matmul = matmul(args[0], mul)
return (matmul,)

after replace_reshapes:
graph:
  mul = mul(w, 2)
  t = t(mul)
  matmul = matmul(args[0], t)
return (matmul,)
""",
    )
