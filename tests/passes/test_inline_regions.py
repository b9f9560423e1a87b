"""A checkpoint's body stands where it is called, and is tagged to be computed again."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from fxgrad.passes.inline_regions import inline_regions
from tests.passes.pictures import Program, around


def checkpointed(m: Program, x: Tensor) -> Tensor:
    h: Tensor = checkpoint(lambda x: (x @ m.w).tanh(), x, use_reentrant=False)
    return h + m.b


def tag(node: fx.Node) -> str | None:
    return f"{node.name}: {node.meta['recompute'].name}" if "recompute" in node.meta else None


def test_a_checkpoint() -> None:
    assert_expected_inline(
        around(inline_regions, Program(checkpointed), torch.randn(3, 4), note=tag),
        """\
before:
inputs:
  args[0]: f32[s, 4]
  w: f32[4, 4]                                                    trainable
  b: f32[4]                                                       trainable
graph:
  tag_activation_checkpoint = tag_activation_checkpoint(wrap_body_0, s, args[0], w, use_reentrant=False)
  getitem = getitem(tag_activation_checkpoint, 0)
  add = add(getitem, b)
return (add,)
wrap_body_0:
inputs:
  args[0]: f32[s, 4]
  w: f32[4, 4]                                                    trainable
graph:
  matmul = matmul(args[0], w)
  tanh = tanh(matmul)
return (tanh,)

after inline_regions:
graph:
  matmul = matmul(args[0], w)
  tanh = tanh(matmul)
  add = add(tanh, b)
return (add,)
notes:
  matmul: PREFER_RECOMPUTE
  tanh: PREFER_RECOMPUTE
""",
    )
