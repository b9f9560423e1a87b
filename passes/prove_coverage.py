"""Prove that no gradient path from a trainable parameter was missed."""

from __future__ import annotations

from torch import Tensor, fx

from fxgrad.errors import UncoveredParameter
from fxgrad.graph.context import Context, source_line
from fxgrad.ops.facts import COPIES, FAKE, TRACED
from fxgrad.runtime.targets import TAPS, CollectTarget, DeriveTarget, TapSeveralTarget, TapTarget
from fxgrad.samples.layouts import SAMPLES, Kind, Samples


def prove_coverage(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: taps are attached. After: the graph, unaltered, or an error naming the line.

    Walk from every parameter through all that is computed from it. A value of parameters alone needs a
    ``derive``, a value that holds samples too needs a ``tap``; what carries no gradient needs nothing.
    """
    frontier = [_native(node) for node in gm.graph.nodes if node.name in ctx.by_node]
    uniform = set(frontier)
    while frontier:
        node = frontier.pop()
        for user in node.users:
            if user.op == "output" or isinstance(user.target, (*TAPS, DeriveTarget, CollectTarget)):
                continue
            if COPIES.get(user):
                frontier.append(user)
                continue
            if not _carries_gradient(user):
                continue
            if _is_uniform(user):
                if not _derived(user) and user not in uniform:
                    _refuse(user, node)
                if user not in uniform:
                    uniform.add(user)
                    frontier.append(user)
            elif not _tapped(user):
                _refuse(user, node)
    return gm


def _native(parameter: fx.Node) -> fx.Node:
    users = list(parameter.users)
    if len(users) != 1 or users[0].target != "detach":
        raise UncoveredParameter(f"the parameter {parameter.name} is used without its tap: a bug in fxgrad")
    return users[0]


def _carries_gradient(node: fx.Node) -> bool:
    traced = TRACED.get(node)
    return any(traced) if isinstance(traced, list) else bool(traced)


def _is_uniform(node: fx.Node) -> bool:
    samples = SAMPLES.get(node)
    several = samples if isinstance(samples, list) else [samples]
    return all(s.kind is not Kind.BATCHED and s.kind is not Kind.MIXED for s in several if isinstance(s, Samples))


def _derived(node: fx.Node) -> bool:
    several = not isinstance(FAKE.of(node), Tensor)  # their getitems are walked to, and derived
    return several or isinstance(node.next.target, DeriveTarget)


def _tapped(node: fx.Node) -> bool:
    if any(isinstance(user.target, TapTarget) and user.args[2] is node for user in node.users):
        return True
    return any(isinstance(user.target, TapSeveralTarget) for output in node.users for user in output.users)


def _refuse(node: fx.Node, parameter: fx.Node) -> None:
    raise UncoveredParameter(
        f"{node.name} uses {parameter.name} where no tap sees it: a bug in fxgrad, please report it",
        where=source_line(node),
    )
