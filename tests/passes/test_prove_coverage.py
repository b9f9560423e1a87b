"""The graph stays as it is, or there is an error: a gradient path from a parameter that ends in no tap."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxgrad.errors import UncoveredParameter
from fxgrad.passes.prove_coverage import prove_coverage
from fxgrad.runtime.targets import TapTarget
from tests.passes.pictures import Program, around, spoilt


def model() -> Program:
    return Program(lambda m, x: x @ m.w)


def test_a_covered_parameter() -> None:
    assert_expected_inline(
        around(prove_coverage, model(), torch.randn(3, 4)),
        """\
before:
inputs:
  w: f32[4, 4]                                                    trainable
  args[0]: f32[B, 4]                                              batched(0)
ghosts:
  ghost(w)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, ghost(w))
  matmul = matmul(args[0], w.detach())                            f32[B, 4] batched(0)
  matmul' = tap_matmul(tape, B, matmul, handle, args[0], w.detach())  rule
return (matmul',)

after prove_coverage:
the same graph
""",
    )


def without_tap(graph: fx.Graph) -> None:
    (tap,) = [node for node in graph.nodes if isinstance(node.target, TapTarget)]
    tap.replace_all_uses_with(tap.args[2])
    graph.erase_node(tap)


def test_a_missing_tap() -> None:
    with pytest.raises(UncoveredParameter) as caught:
        spoilt(prove_coverage, without_tap, model(), torch.randn(3, 4))
    assert_expected_inline(
        caught.value.sentence, """matmul uses detach where no tap sees it: a bug in fxgrad, please report it"""
    )
