"""The graph stays as it is, or there is an error: samples are where infer_samples did not put them."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxgrad.errors import MixedSamples
from fxgrad.passes.prove_independence import prove_independence
from tests.passes.pictures import Program, around, spoilt


def model() -> Program:
    return Program(lambda m, x: (x * 2) @ m.w)


def test_samples_where_they_should_be() -> None:
    assert_expected_inline(
        around(prove_independence, model(), torch.randn(3, 4)),
        """\
before:
inputs:
  args[0]: f32[B, 4]                                              batched(0)
  w: f32[4, 4]                                                    trainable
gradient placeholders:
  grad_placeholder(w)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, grad_placeholder(w))
  mul = mul(args[0], 2)                                           f32[B, 4] batched(0)
  matmul = matmul(mul, w.detach())                                f32[B, 4] batched(0)
  matmul' = tap_matmul(tape, B, matmul, handle, mul, w.detach())  rule
return (matmul',)

after prove_independence:
the same graph
""",
    )


def reversed_rows(graph: fx.Graph) -> None:
    (mul,) = [node for node in graph.nodes if node.name == "mul"]
    mul.target, mul.args = torch.flip, (mul.args[0], (0,))


def test_rows_of_other_samples() -> None:
    """A graph in which infer_samples was wrong."""
    with pytest.raises(MixedSamples) as caught:
        spoilt(prove_independence, reversed_rows, model(), torch.randn(3, 4))
    assert_expected_inline(caught.value.sentence, """its samples are not where they were taken to be""")
