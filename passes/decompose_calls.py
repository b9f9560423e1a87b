"""Decompose ops without a known family into ATen ops that have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxgrad.graph.context import Context
from fxgrad.graph.edit import bind_again, flows_through, make, put_facts_beside
from fxgrad.host import pytree
from fxgrad.host.dispatch import enable_python_dispatcher
from fxgrad.host.fake import FakeTensor
from fxgrad.host.ops import HigherOrderOperator, core_decompositions
from fxgrad.ops.calls import CALL, Call, map_nodes, op_name
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import Family, family_of
from fxgrad.ops.inlining import inline
from fxgrad.ops.values import tensors_of
from fxgrad.rules import RULES

_TORCH_FUNC = "torch_func"  # what wrap_transforms made


def decompose_calls(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: every call has ``call``. After: the same, where it was possible in classified ops only.

    ``multi_head_attention_forward(..)`` -> ``linear, chunk, view, scaled_dot_product_attention, linear``.
    PyTorch's own composite definition is traced; where that says nothing, its decompositions are. An op
    that stays as it is, is refused by the next pass if it meets samples.
    """
    unknown = [node for node in gm.graph.nodes if _unclassified(node)]
    averaging = [node for node in gm.graph.nodes if _averages_parameter(node, ctx)]
    for node in unknown + averaging:
        body = _loss_of_elements(node, ctx) if node in averaging else _decomposition(node, ctx)
        if body is not None:
            inline(gm, node, body, body.meta["operands"], partial(_leave_facts, node))
    if unknown or averaging:
        _drop_unused_sizes(gm.graph)
        bind_again(gm.graph.nodes)
    return gm


def _unclassified(node: fx.Node) -> bool:
    call: Call | None = CALL.get(node)
    if call is None or isinstance(node.target, HigherOrderOperator) or not tensors_of(FAKE.of(node)):
        return False
    known = call.op in RULES or family_of(call.op) is not None
    return not known and not call.inplace and call.op not in ("getattr", "setitem")


# ----- losses of a parameter itself

_WEIGHTED = frozenset({"cross_entropy", "nll_loss"})  # their mean is one of the weights that they give to classes


def _averages_parameter(node: fx.Node, ctx: Context) -> bool:
    """Return whether a loss reduces what it compares a parameter to: ``mse_loss(w, x)``, a sum over samples already."""
    call: Call | None = CALL.get(node)
    if call is None or family_of(call.op) is not Family.LOSS or call.op in _WEIGHTED or isinstance(node.target, str):
        return False
    if call.get("reduction") not in ("mean", "sum") or call.given & {"size_average", "reduce"}:
        return False
    operands = [arg for arg in node.all_input_nodes if isinstance(FAKE.of(arg), Tensor)]
    shared = [arg for arg in operands if not ctx.symbols.batch_dims(FAKE.of(arg).shape)]
    return len(shared) < len(operands) and any(map(flows_through, shared))


def _loss_of_elements(node: fx.Node, ctx: Context) -> fx.GraphModule | None:
    """Return the loss of each element, and its sum or mean: a tap can stand between the two."""

    def loss(arguments: dict[str, Any]) -> Any:
        each = node.target(**{**arguments, "reduction": "none"})  # type: ignore[operator]
        return each.mean() if arguments["reduction"] == "mean" else each.sum()

    return _body(loss, _in_parts(dict(CALL.of(node).arguments), node, ctx), (None,), ctx, derives=False)


def _decomposition(node: fx.Node, ctx: Context) -> fx.GraphModule | None:
    """Return the op's graph in ATen ops; None where it has none in classified ones."""

    def call(arguments: Any) -> Any:
        args, kwargs = arguments
        target: Any = getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target
        return target(*args, **kwargs)

    derives = op_name(node.target) == _TORCH_FUNC
    arguments = _in_parts((node.args, dict(node.kwargs)), node, ctx)
    return _body(call, arguments, (None, _core_table()), ctx, derives=derives)


def _in_parts(arguments: Any, node: fx.Node, ctx: Context) -> Any:
    """A nest of arguments in which each operand is one value: the sizes that ``x.shape`` holds, not ``x.shape``."""

    def parts(arg: fx.Node) -> Any:
        if not isinstance(FAKE.of(arg), tuple | list):
            return arg
        with node.graph.inserting_before(node):
            each = [make(node.graph, ctx, getitem, (arg, i), beside=node) for i in range(len(FAKE.of(arg)))]
        return [parts(one) for one in each]

    return map_nodes(arguments, parts)


def _body(
    call: Callable[[Any], Any], arguments: Any, tables: Sequence[Any], ctx: Context, *, derives: bool
) -> fx.GraphModule | None:
    """Return a function of a nest of arguments as a graph of classified ops, by the first table that gives one."""
    flat, spec = pytree.tree_flatten(arguments)
    operands = [arg for arg in flat if isinstance(arg, fx.Node)]

    def of_operands(*values: Any) -> Any:
        rest = iter(values)
        return call(pytree.tree_unflatten([next(rest) if isinstance(arg, fx.Node) else arg for arg in flat], spec))

    for table in tables:
        body = _traced(of_operands, [FAKE.of(arg) for arg in operands], table, ctx, derives=derives)
        if body is not None and not any(_foreign(inner) or _lost(body, inner) for inner in body.graph.nodes):
            body.meta["operands"] = operands
            return body
    return None


@cache
def _core_table() -> dict[Any, Any]:
    """PyTorch's decompositions to core ops but that of ``detach``: as ``alias`` it would let gradients through."""
    table = core_decompositions()
    table.pop(torch.ops.aten.detach.default, None)
    return table


def _traced(
    call: Callable[..., Any], values: list[Any], table: Any, ctx: Context, *, derives: bool
) -> fx.GraphModule | None:
    """``derives``: the call takes derivatives itself, which are to be traced too."""
    try:
        with ctx.symbols.mode, torch.enable_grad(), enable_python_dispatcher():
            return make_fx(call, decomposition_table=table, pre_dispatch=not derives)(*values)
    except Exception:  # any failure to trace only means that the op stays whole
        return None


def _foreign(node: fx.Node) -> bool:
    if node.op != "call_function" or not tensors_of(node.meta.get("val")):
        return False
    name = op_name(node.target)
    return name.removesuffix("_") not in RULES and family_of(name.removesuffix("_")) is None and name != "getitem"


def _lost(body: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a value of the op's became a constant: tracing did not see where it came from."""
    return node.op == "get_attr" and isinstance(getattr(body, str(node.target)), FakeTensor)


def _leave_facts(node: fx.Node, copy: fx.Node, inner: fx.Node) -> None:
    """What the earlier passes would have found out about a node of the body: traced values say nothing of gradients."""
    copy.meta = {}
    put_facts_beside(node, copy, inner.meta.get("val"), stops=not flows_through(node))


def _drop_unused_sizes(graph: fx.Graph) -> None:
    """Sizes that a decomposition asked for and did not need."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (str(node.target).startswith("aten.sym_") or node.target is getitem):
            graph.erase_node(node)
