"""Every spelling of an op gets one name and one form, beside the call that stays as it is."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from fxgrad.passes.normalize_calls import normalize_calls
from tests.passes.pictures import Program, around


def spelt(m: Program, x: Tensor) -> Tensor:
    h = torch.matmul(x, m.w) + m.b
    h = h.add(m.b, alpha=2)
    return torch.ops.aten.add.Tensor(h, m.b)


def form(node: fx.Node) -> str | None:
    if "call" not in node.meta:
        return None
    call = node.meta["call"]
    arguments = [name if isinstance(value, fx.Node) else f"{name}={value}" for name, value in call.arguments.items()]
    return f"{call.op}({', '.join(arguments)})"


def test_spellings_of_a_sum() -> None:
    assert_expected_inline(
        around(normalize_calls, Program(spelt), torch.randn(3, 4), note=form),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]
  b: f32[4]                                                       trainable
graph:
  matmul = matmul(args[0], w)                                     f32[B, 4]
  add = add(matmul, b)                                            f32[B, 4]
  add_2 = add(add, b, alpha=2)                                    f32[B, 4]
  add_3 = add(add_2, b)                                           f32[B, 4]
return (add_3,)

after normalize_calls:
the same graph
notes:
  matmul(input, other)
  add(input, other, alpha=1)
  add(input, other, alpha=2)
  add(input, other, alpha=1)
""",
    )
