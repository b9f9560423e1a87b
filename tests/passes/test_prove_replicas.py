"""The graph stays as it is, or there is an error: a value that counts as equal on all processes is not, or its gradient.

``w`` is a sharded parameter here, and ``b`` a replicated one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

import fxgrad
from fxgrad.compile.pipeline import Pass, run_passes
from fxgrad.errors import OptionError
from fxgrad.graph.context import Context
from fxgrad.kernels.collectives import (
    copy_to_region,
    gather_from_region,
    gather_from_sequence,
    reduce_from_region,
    scatter_to_region,
)
from fxgrad.passes.prove_replicas import prove_replicas
from tests.passes.pictures import Program, around

TWO = "0,1"  # a group of two processes, which no graph here runs on


def proved(function: Callable[..., Any], *shape: int) -> None:
    """Trace a program, of which w is sharded."""

    def passes(gm: fx.GraphModule, ctx: Context, passes: Sequence[Pass]) -> fx.GraphModule:
        ctx.varying = frozenset(node for node, name in ctx.names.items() if name == "w")
        return run_passes(gm, ctx, passes)

    with mock.patch("fxgrad.tracing.run_passes", passes):
        fxgrad.trace(fxgrad.transform(Program(function), quantity=fxgrad.NormSample()), torch.randn(*(shape or (3, 4))))


def test_a_picture() -> None:
    assert_expected_inline(
        around(prove_replicas, Program(lambda m, x: copy_to_region(x, TWO) @ m.w), torch.randn(3, 4)),
        """\
before:
inputs:
  args[0]: f32[B, 4]                                              batched(0)
  w: f32[4, 4]                                                    trainable
graph:
  copy_to_region = copy_to_region(args[0], '0,1')                 f32[B, 4] batched(0)
  matmul = matmul(copy_to_region, w)                              f32[B, 4] batched(0)
return (matmul,)

after prove_replicas:
the same graph
""",
    )


def leaves_again(m: Any, x: Tensor) -> Tensor:
    return reduce_from_region(copy_to_region(x + m.b, TWO) @ m.w, TWO) + m.b


def by_parts(m: Any, x: Tensor) -> Tensor:
    return gather_from_region(scatter_to_region(x + m.b, -1, TWO) * m.w[0, :2], -1, TWO)


def along_a_sequence(m: Any, x: Tensor) -> Tensor:
    part = scatter_to_region(x + m.b, 1, TWO)
    return reduce_from_region(gather_from_sequence(part, 1, TWO) @ m.w, TWO)


@pytest.mark.parametrize("function, shape", [(leaves_again, (3, 4)), (by_parts, (3, 4)), (along_a_sequence, (3, 6, 4))])
def test_what_is_right(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    proved(function, *shape)


def in_place(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    view = h[:]
    view.add_(x @ m.w)
    return h


REFUSED: dict[str, tuple[str, Callable[..., Any]]] = {
    "the input of a sharded layer": ("another one on each", lambda m, x: reduce_from_region((x + m.b) @ m.w, TWO)),
    "a replicated parameter inside": (
        "another one on each",
        lambda m, x: reduce_from_region(copy_to_region(x, TWO) @ m.w * m.b, TWO),
    ),
    "an output": ("returns a value that differs", lambda m, x: copy_to_region(x, TWO) @ m.w),
    "an output by a view": ("returns a value that differs", in_place),
    "a sum of what is equal": ("a value that is equal", lambda m, x: reduce_from_region(x + m.b, TWO)),
    "a copy of what differs": (
        "a value that differs",
        lambda m, x: reduce_from_region(copy_to_region(x @ m.w, TWO), TWO),
    ),
    "dropout": ("random numbers", lambda m, x: torch.nn.functional.dropout(x + m.b, 0.5)),
    "a parameter alone": ("without samples", lambda m, x: reduce_from_region(x @ m.w * copy_to_region(m.b, TWO), TWO)),
    "beside what has no gradient": ("another one on each", lambda m, x: (x + m.b) * (x @ m.w).detach()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    sentence, function = REFUSED[name]
    with pytest.raises(OptionError, match=sentence):
        proved(function)


def test_samples_on_the_divided_dimension() -> None:
    """Dimension 0 is the samples': the pass before finds that out."""
    with pytest.raises(fxgrad.errors.MixedSamples, match="along the sample dimension"):
        proved(lambda m, x: scatter_to_region(x + m.b, 0, TWO) @ m.w, 4, 4)
