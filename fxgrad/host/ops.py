"""Operators of PyTorch as objects: their kinds, their schemas, their definitions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
"""The classes of ``torch.ops.aten.add.Tensor``, of ``torch.ops.aten.add``, and of operators that take functions.

Why: they distinguish a graph's calls of operators from calls of Python functions. The arguments of a packet choose an
overload. The bodies of ``cond``, ``scan`` or a checkpoint are graphs of their own, into which the passes go.
Without: no ATen op has a name, a rule or a schema; custom ops, control flow and checkpoints are unknown ops.
"""

set_grad_enabled = torch._C._set_grad_enabled
"""The function by which Dynamo writes `torch.no_grad` into a graph.

Why: what stands between two calls of it has no gradient.
Without: calls under no_grad count as uses of parameters with gradients.
"""

enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode
"""The functions by which Dynamo writes `torch.inference_mode` into a graph.

Why, since, without: as `set_grad_enabled`.
"""


def schema(op: OpOverload) -> torch.FunctionSchema:
    """Return what an overload is called, takes and writes to.

    Why: PyTorch has no public way to the names, defaults and aliases of an overload's arguments.
    Without: positional arguments have no names, and ops that write in place are not known.
    """
    return op._schema


def schemas(target: Any) -> list[torch.FunctionSchema]:
    """Return the schema of an overload, those of all overloads of a packet, none of anything else.

    Why, without: as `schema`.
    """
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    found = getattr(target, "_schema", None)
    return [] if found is None else [found]


def schemas_of_name(name: str) -> list[torch.FunctionSchema]:
    """Return the schemas of all overloads of ``aten::add``; none of a name that is no operator's.

    Why: `torch.add` and `Tensor.add` have no Python signature.
    Without: arguments of builtin functions cannot be bound to names.
    """
    return list(torch._C._jit_get_schemas_for_operator(name))


def qualified_name(op: OpOverload | OpOverloadPacket) -> str:
    """``aten::add``, of any of its overloads too.

    Why: rules and tables know ops by name; a packet prints only as ``aten.add``.
    Without: ops have no names, so no rules.
    """
    name: str = op._schema.name if isinstance(op, OpOverload) else op._qualified_op_name
    return name


def overload_of(target: Any) -> Any:
    """Return the overload that `torch.library.custom_op` made; any other target as it is.

    Why: a user's ``@custom_op`` function is an object that is no operator itself.
    Without: users' custom ops are unknown functions.
    """
    return getattr(target, "_opoverload", target)


@contextlib.contextmanager
def defined_in_python(definitions: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Let ops that have no definition in Python have these while a trace runs.

    Why: C++ shape rules of composite ops turn a symbolic batch into a number.
    Without: ``take_along_dim`` fixes the batch size of the graph.
    """
    key = DispatchKey.CompositeImplicitAutograd
    ours = [(op, run) for op, run in definitions.items() if key not in op.py_kernels]
    try:
        for op, run in ours:
            op.py_kernels[key] = run
            op._dispatch_cache.clear()
        yield
    finally:
        for op, _ in ours:
            op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions to core ATen ops, by overload; the dict is the caller's own.

    Why: PyTorch's public table, `torch.export.default_decompositions`, is for exported programs.
    Without: composite ops without a rule of ours get the generic rule, which is slower, or are refused.
    """
    return dict(torch._decomp.core_aten_decompositions().items())
