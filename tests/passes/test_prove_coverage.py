"""The graph stays as it is, or there is an error: a gradient path from a parameter that ends in no tap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import fxgrad
from fxgrad.errors import UncoveredParameter
from fxgrad.ops.facts import TRACED
from fxgrad.passes.prove_coverage import prove_coverage
from fxgrad.rules.uses import USE
from fxgrad.runtime.targets import DeriveTarget, TapTarget
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
gradient placeholders:
  grad_placeholder(w)
graph:
  tape = new_tape[GradSample]()
  handle = collect(tape, B, grad_placeholder(w))
  matmul = matmul(args[0], w.detach())                            f32[B, 4] batched(0)
  matmul' = tap_matmul(tape, B, matmul, handle, args[0], w.detach())  rule
return (matmul',)

after prove_coverage:
the same graph
""",
    )


def taps(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if isinstance(node.target, TapTarget)]


def derives(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if isinstance(node.target, DeriveTarget)]


def without_tap(graph: fx.Graph) -> None:
    (tap,) = taps(graph)
    tap.replace_all_uses_with(tap.args[2])  # type: ignore[arg-type]
    graph.erase_node(tap)


def test_a_missing_tap() -> None:
    with pytest.raises(UncoveredParameter) as caught:
        spoilt(prove_coverage, without_tap, model(), torch.randn(3, 4))
    assert_expected_inline(
        caught.value.sentence, """matmul uses detach where no tap sees it: a bug in fxgrad, please report it"""
    )


def behind_another_value(graph: fx.Graph) -> None:
    """``tap(x @ w).relu()`` -> ``tap((x @ w).relu())``"""
    (tap,) = taps(graph)
    (relu,) = tap.users
    relu.replace_input_with(tap, tap.args[2])  # type: ignore[arg-type]
    relu.append(tap)
    tap.args = (*tap.args[:2], relu, *tap.args[3:])
    relu.replace_all_uses_with(tap, delete_user_cb=lambda user: user is not tap)


def beside_another_reader(graph: fx.Graph) -> None:
    """The tap stands behind the op, and what reads the op's value reads it past the tap."""
    (tap,) = taps(graph)
    tap.replace_all_uses_with(tap.args[2])  # type: ignore[arg-type]


def behind_the_parameter(graph: fx.Graph) -> None:
    """``tap(x @ w)`` -> ``x @ tap(w)``"""
    (tap,) = taps(graph)
    product = tap.args[2]
    assert isinstance(product, fx.Node) and isinstance(tap.target, TapTarget)
    weight = product.args[1]
    without_tap(graph)
    with graph.inserting_before(product):
        moved = graph.call_function(tap.target, (*tap.args[:2], weight, *tap.args[3:]))
    product.replace_input_with(weight, moved)  # type: ignore[arg-type]


def flagged_without_gradient(graph: fx.Graph) -> None:
    behind = taps(graph)[0].args[2]
    assert isinstance(behind, fx.Node)
    without_tap(graph)
    TRACED.put(behind, False)


def changed_use(graph: fx.Graph, **changes: Any) -> None:
    """Let the first tap's recorded use say something else."""
    tap = taps(graph)[0]
    assert isinstance(tap.target, TapTarget)
    use = replace(tap.target.strategy.use, **changes)
    tap.target = TapTarget(replace(tap.target.strategy, use=use), tap.target.handles)
    USE.put(tap, use)


def names_the_other_parameter(graph: fx.Graph) -> None:
    changed_use(graph, wrt={1: 1})


def names_no_parameter(graph: fx.Graph) -> None:
    changed_use(graph, wrt={})


def reads_nothing(graph: fx.Graph) -> None:
    (tap,) = taps(graph)
    tap.args = (*tap.args[:4], None, *tap.args[5:])


def reads_another_value(graph: fx.Graph) -> None:
    (tap,) = taps(graph)
    tap.args = (*tap.args[:4], *tap.args[5:3:-1])


def without_derive(graph: fx.Graph) -> None:
    first, second = derives(graph)
    first.replace_all_uses_with(second.args[2])  # type: ignore[arg-type]
    graph.erase_node(first)


def derive_of_another_value(graph: fx.Graph) -> None:
    """Behind each value stands a derive, and both are of the first value."""
    first, second = derives(graph)
    assert isinstance(first.target, DeriveTarget) and isinstance(second.target, DeriveTarget)
    second.target = DeriveTarget(first.target.strategy, second.target.key, first.target.handles)
    second.args = first.args


def exchanged_derives(graph: fx.Graph) -> None:
    first, second = derives(graph)
    first.target, second.target = (
        DeriveTarget(one.target.strategy, other.target.key, one.target.handles)  # type: ignore[union-attr]
        for one, other in ((first, second), (second, first))
    )


def with_a_handle_of_another(graph: fx.Graph) -> None:
    first, second = derives(graph)
    for tap in taps(graph):
        tap.replace_input_with(second, first)


RELU = Program(lambda m, x: (x @ m.w).relu())
TWO = Program(lambda m, x: x @ m.w + m.b)
DERIVED = Program(lambda m, x: x @ m.w.exp() + x @ m.w.sin())


@pytest.mark.parametrize(
    ("spoil", "program"),
    [
        (without_tap, RELU),
        (behind_another_value, RELU),
        (beside_another_reader, RELU),
        (behind_the_parameter, RELU),
        (flagged_without_gradient, RELU),
        (names_the_other_parameter, TWO),
        (names_no_parameter, RELU),
        (reads_nothing, RELU),
        (reads_another_value, Program(lambda m, x: m.w @ x)),
        (without_derive, DERIVED),
        (derive_of_another_value, DERIVED),
        (exchanged_derives, DERIVED),
        (with_a_handle_of_another, DERIVED),
    ],
)
def test_a_mistake_in_the_graph(spoil: Callable[[fx.Graph], None], program: Program) -> None:
    x = torch.randn(3, 4, 4) if spoil is reads_another_value else torch.randn(3, 4)
    with pytest.raises(UncoveredParameter, match="where no tap sees it"):
        spoilt(prove_coverage, spoil, program, x)


def test_no_gradient_needs_no_tap() -> None:
    def program(m: Any, x: Any) -> Any:
        with torch.no_grad():
            scale = m.w.norm()
        noise = torch.zeros_like(m.w) + x.new_ones(m.w.shape)
        return (x @ m.w) * scale + x @ noise * (m.w > 0).sum() * m.w.detach().exp().mean() + m.w.argmax()

    trace = fxgrad.trace(Program(program), torch.randn(3, 4))
    assert len(taps(trace.graph_module.graph)) == 1 and not derives(trace.graph_module.graph)


def test_copies_of_a_parameter() -> None:
    """The readers of copies name the one that was copied (`attach_taps`), however the copies are spelt."""
    for spell in (lambda w, x: w.expand(x.shape[0], 4, 4), lambda w, x: w.repeat((x.shape[0], 1, 1)),
                  lambda w, x: w.expand_as(x), lambda w, x: w.broadcast_to(x.shape)):  # fmt: skip
        trace = fxgrad.trace(Program(lambda m, x, spell=spell: torch.bmm(x, spell(m.w, x))), torch.randn(3, 4, 4))
        assert len(taps(trace.graph_module.graph)) == len(derives(trace.graph_module.graph)) == 1


@pytest.mark.parametrize(
    "program",
    [
        lambda m, x: x.clone() @ m.w.clone(),
        lambda m, x: (h := x * 2, h @ m.w, h.add_(1), h @ m.w)[1::2],  # what a tap reads is copied before it is written
        lambda m, x: (u := m.w * 2, u.mul_(3), x @ u)[2],  # a function of parameters in its second version
        lambda m, x: sum(x @ part for part in m.w.t().chunk(2, 1)),
        lambda m, x: x.reshape(x.shape[:1] + m.w.size()[1:]) @ m.w.view(m.w.size()).max(0)[0],
        lambda m, x: (x @ m.w).add_(m.b).relu_() + m.w.t()[0] * m.w[:, 1],
        lambda m, x: m.w[(x > 0).long()].sum(1) + m.w.expand(x.shape[0], 4, 4)[:, 0] * m.b.expand_as(x),
    ],
)
def test_what_is_covered(program: Callable[..., Any]) -> None:
    assert taps(fxgrad.trace(Program(program), torch.randn(3, 4)).graph_module.graph)
