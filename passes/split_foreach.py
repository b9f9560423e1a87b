"""Write ops on lists of tensors as one op for each tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fxgrad.graph.context import Context, place_beside
from fxgrad.graph.edit import replace_outputs
from fxgrad.ops.calls import op_name
from fxgrad.ops.facts import EXAMPLE

_PREFIX = "_foreach_"
_ALIKE = frozenset(
    """abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor
    frac lerp lgamma log log10 log1p log2 max maximum minimum mm mul neg norm pow reciprocal round rsqrt sigmoid sign
    sin sinh sqrt sub tan tanh trunc zero""".split()
)
_OF_TENSORS = frozenset({"maximum", "minimum"})  # single ops that take no number and write nothing in place
_ORDER = "self other scalar scalars tensors1 weights weight exponent src tensor1 tensor2 ord".split()


def split_foreach(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: no op of ``torch._foreach_*`` that PyTorch defines tensor by tensor.

    ``a, b = torch._foreach_mul([x, y], 2.)`` -> ``a = x.mul(2.); b = y.mul(2.)``. In place, the tensors are written
    one after the other, as PyTorch does on CPU. What no single op computes (`_foreach_powsum`, a maximum with a number)
    stays.
    """
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and _splits(node):
            _write(gm.graph, node)
    return gm


def _splits(node: fx.Node) -> bool:
    name = op_name(node.target)
    if not name.startswith(_PREFIX) or name.removeprefix(_PREFIX).removesuffix("_") not in _ALIKE:
        return False
    lists = [arg for arg in _arguments(node) if isinstance(arg, list | tuple)]
    if not lists or any(user.target is not operator.getitem for user in node.users):
        return False
    if name.removeprefix(_PREFIX) in _OF_TENSORS:
        return len(lists) == 2 and all(isinstance(other, fx.Node) for other in lists[1])
    scaled = "addc" in name and isinstance(_value(node), fx.Node)  # by the numbers in one tensor
    return not scaled and name.removeprefix(_PREFIX).removesuffix("_") not in _OF_TENSORS


def _arguments(node: fx.Node) -> list[Any]:
    """Return the arguments that a single op takes by place."""
    named = sorted((name for name in node.kwargs if name in _ORDER), key=_ORDER.index)
    return [*node.args, *(node.kwargs[name] for name in named)]


def _value(node: fx.Node) -> Any:
    """Return what ``addcmul`` and ``addcdiv`` scale the product by: one number, or one for each tensor."""
    by_place = node.args[3] if len(node.args) > 3 else 1
    return node.kwargs.get("value", node.kwargs.get("scalars", by_place))


def _write(graph: fx.Graph, node: fx.Node) -> None:
    name = op_name(node.target).removeprefix(_PREFIX)
    with graph.inserting_before(node):
        results = [_single(graph, name, args, kwargs) for args, kwargs in _calls(node, name)]
    examples = EXAMPLE.get(node)
    for i, result in enumerate(results):
        place_beside(node, result)
        if isinstance(examples, Sequence):
            EXAMPLE.put(result, examples[i])
    replace_outputs(node, results)


def _calls(node: fx.Node, name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield the arguments of each single op: of a list its own element, and whatever else all share."""
    args, kwargs = _arguments(node), {key: value for key, value in node.kwargs.items() if key not in _ORDER}
    if name.startswith("addc"):
        args, kwargs = args[:3], {"value": _value(node)}
    lists = [arg for arg in args if isinstance(arg, list | tuple)]

    def own(arg: Any, i: int) -> Any:
        return arg[i] if isinstance(arg, list | tuple) else arg

    for i in range(len(lists[0])):
        yield [own(arg, i) for arg in args], {key: own(arg, i) for key, arg in kwargs.items()}


def _single(graph: fx.Graph, name: str, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    op = name.removesuffix("_")
    if op == "norm":
        return graph.call_function(torch.linalg.vector_norm, tuple(args), kwargs)
    if not isinstance(args[0], fx.Node):  # pow of a number
        return graph.call_function(getattr(torch, op), tuple(args), kwargs)
    return graph.call_method(name, tuple(args), kwargs)
