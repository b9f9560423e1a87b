"""What must hold of a graph after each pass."""

from __future__ import annotations

from torch import Tensor, fx

from fxgrad.errors import SpecViolation
from fxgrad.graph.context import Context
from fxgrad.ops.calls import CALL, map_nodes
from fxgrad.ops.facts import FAKE
from fxgrad.ops.values import tensors_of
from fxgrad.runtime.targets import CollectTarget, DeriveTarget, NewTape, TapTarget
from fxgrad.samples.layouts import SAMPLES, Samples
from fxgrad.samples.symbols import expression

_CALLS = ("call_function", "call_method")


def check_spec(gm: fx.GraphModule, ctx: Context, *, after: str) -> None:
    """Raise SpecViolation where the pass left a graph it must not leave."""
    for check in _SPECS.get(after, ()):
        for node in gm.graph.nodes:
            problem = check(node, ctx)
            if problem:
                raise SpecViolation(f"after {after}: {node.name} {problem}")


def _has_fake(node: fx.Node, ctx: Context) -> str | None:
    return None if node.op == "output" or FAKE.on(node) else "has no fake value"


def _has_call(node: fx.Node, ctx: Context) -> str | None:
    if node.op not in _CALLS:
        return None
    if not CALL.on(node):
        return "is a call in no normal form"
    named: list[fx.Node] = []
    map_nodes(dict(CALL.of(node).arguments), named.append)
    return None if set(named) <= set(node.all_input_nodes) else "has a call that names other values than it reads"


def _has_samples(node: fx.Node, ctx: Context) -> str | None:
    if node.op == "output":
        return None
    if not SAMPLES.on(node):
        return "has no samples"
    samples, fake = SAMPLES.of(node), FAKE.of(node)
    if isinstance(fake, Tensor) and isinstance(samples, Samples) and samples.layout is not None:
        size = expression(fake.shape[samples.layout.dim])
        if not ctx.symbols.holds_batch(fake.shape[samples.layout.dim]):
            return f"is batched on a dimension of size {size}"
    return None


def _taps_are_wired(node: fx.Node, ctx: Context) -> str | None:
    if isinstance(node.target, TapTarget):
        tape, _, y = node.args[:3]
        if not (isinstance(tape, fx.Node) and isinstance(tape.target, NewTape)):
            return "writes on no tape"
        if not isinstance(y, fx.Node) or not tensors_of(FAKE.of(y)):
            return "stands behind no tensor"
        others = [user for user in y.users if not isinstance(user.target, TapTarget | DeriveTarget)]
        return f"is bypassed by {others[0].name}" if others else None
    return None


def _collects_once(node: fx.Node, ctx: Context) -> str | None:
    if isinstance(node.target, CollectTarget):
        collects = [n for n in node.graph.nodes if isinstance(n.target, CollectTarget)]
        if len(collects) != 1 or len(node.args) != 2 + len(ctx.labels):
            return "does not collect every parameter once"
    return None


_SPECS = {
    "propagate_shapes": (_has_fake,),
    **dict.fromkeys(
        """normalize_calls lower_assignments separate_writes decompose_calls unsort_routing split_lookups
        simplify_views""".split(),
        (_has_fake, _has_call),
    ),
    "infer_samples": (_has_fake, _has_call, _has_samples),
    "attach_taps": (_taps_are_wired, _collects_once),
}
