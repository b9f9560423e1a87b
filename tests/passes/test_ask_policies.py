"""What a selective checkpoint holds asks its policy when it is traced."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fxgrad.passes.ask_policies import ask_policies
from fxgrad.runtime.checkpointing import AskedTarget
from tests.passes.pictures import Program, around


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(keep_products)


def checkpointed(m: Program, x: Tensor) -> Tensor:
    h: Tensor = checkpoint(lambda x: (x @ m.w).tanh(), x, use_reentrant=False, context_fn=contexts)
    return h + m.b


def asks(node: fx.Node) -> str | None:
    if not isinstance(node.target, AskedTarget):
        return None
    end = " first" if node.target.first else " last" if node.target.last else ""
    return f"{node.name} asks the policy{end}"


def test_a_selective_checkpoint() -> None:
    assert_expected_inline(
        around(ask_policies, Program(checkpointed), torch.randn(3, 4), note=asks),
        """\
before:
inputs:
  args[0]: f32[B, 4]                                              batched(0)
  w: f32[4, 4]                                                    trainable
  b: f32[4]                                                       trainable
gradient placeholders:
  grad_placeholder(w)
  grad_placeholder(b)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, grad_placeholder(w), grad_placeholder(b))
  matmul = matmul(args[0], w.detach())                            f32[B, 4] batched(0)
  matmul' = tap_matmul(tape, B, matmul, handle, args[0], w.detach())  rule
  tanh = tanh(matmul')                                            f32[B, 4] batched(0)
  add = add(tanh, b.detach())                                     f32[B, 4] batched(0)
  add' = tap_add(tape, B, add, handle, tanh, b.detach())          elementwise
return (add',)

after ask_policies:
the same graph
notes:
  matmul asks the policy first
  tanh asks the policy last
""",
    )
