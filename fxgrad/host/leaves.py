"""TorchDynamo's record of what requires a gradient, where a model calls ``requires_grad_()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import TensorVariable, builtin

from fxgrad.host.dynamo import traces_backward

BEGINS = "begins_to_require_a_gradient"
"""In the meta of a node on whose value forward calls ``requires_grad_()``: for each call, the last node before it.

Why, without: as `leaves_followed`.
"""


@contextlib.contextmanager
def leaves_followed() -> Iterator[None]:
    """Let Dynamo follow ``h.requires_grad_()`` on a value of the model to which no gradient belongs yet.

    Later values require a gradient, as in eager PyTorch, and ``h.requires_grad`` says so. The graph has no op of it:
    the node of h has ``BEGINS`` in its meta, and may not leave the graph. ``h.requires_grad = True`` does the same.
    As before are inputs, values with another name in the graph, graphs with breaks, transforms of torch.func, and
    `traces_backward`, for which Dynamo has nodes of its own.

    Why: transformers does so for checkpoints over frozen embeddings (``enable_input_require_grads()``, which peft
    calls) and for the position bias of T5. No parameter's gradient passes there, and Dynamo breaks the graph.
    Since: torch 2.11 breaks at any ``requires_grad_()``, later ones where such a value reaches an output. Up to 2.12
    one class follows ``setattr`` and other builtins, and remembers how.
    Without: LoRA with gradient checkpoints is refused, and T5 with them.
    """
    tensors: Any = TensorVariable
    builtins: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
    set_by = "_call_setattr" if builtins is not builtin.BuiltinVariable else "call_setattr"
    theirs = {name: getattr(tensors, name) for name in ("method_requires_grad_", "method_attr_requires_grad")}
    setter = getattr(builtins, set_by)

    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        followed = _followed(self, tx, requires_grad)
        return self if followed else theirs["method_requires_grad_"](self, tx, requires_grad)

    def method_attr_requires_grad(self: Any, tx: Any) -> Any:
        """An op in place on the value, or on a view of it, may have changed the flag since."""
        value = _value(self)
        if value is not None:
            self.requires_grad = value.requires_grad
        return theirs["method_attr_requires_grad"](self, tx)

    def call_setattr(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        named = isinstance(obj, TensorVariable) and name.is_python_constant()
        asked = named and name.as_python_constant() == "requires_grad"
        return value if asked and _followed(obj, tx, value) else setter(self, tx, obj, name, value)

    def put(methods: dict[str, Any], of_setattr: Any) -> None:
        for name, method in methods.items():
            setattr(tensors, name, method)
        setattr(builtins, set_by, of_setattr)
        getattr(builtins, "call_function_handler_cache", {}).clear()

    put({one.__name__: one for one in (method_requires_grad_, method_attr_requires_grad)}, call_setattr)
    try:
        yield
    finally:
        put(theirs, setter)


def _followed(tensor: Any, tx: Any, requires_grad: Any) -> bool:
    """Let a tensor, as Dynamo knows it, require a gradient or none, if no op has to say so; return whether it does."""
    node, value, asked = tensor.as_proxy().node, _value(tensor), requires_grad
    if not isinstance(asked, bool):
        asked = asked.as_python_constant() if asked.is_python_constant() else None
    leaf = value is not None and value.is_leaf and not tensor.source
    if not leaf or not tx.output.root_tx.one_graph or not isinstance(asked, bool):
        return False
    if value.requires_grad == asked:
        return True
    inside_transform = torch._C._functorch.peek_interpreter_stack() is not None
    named_twice = any(one is not node and _example(one) is value for one in node.graph.nodes)
    if inside_transform or named_twice or traces_backward() or _of_a_body(node):
        return False
    value.requires_grad_(asked)
    tensor.requires_grad = asked
    node.meta.setdefault(BEGINS, []).append([*node.graph.nodes][-1])
    return True


def _of_a_body(node: fx.Node) -> bool:
    """Return whether a value comes into the body of a checkpoint, or out of one: it may have a name beyond."""
    source = node.args[0] if node.args else None
    out = isinstance(source, fx.Node) and isinstance(source.target, torch._ops.HigherOrderOperator)
    return out or node.op == "placeholder" or isinstance(node.target, torch._ops.HigherOrderOperator)


def _value(tensor: Any) -> Any:
    return _example(tensor.as_proxy().node)


def _example(node: fx.Node) -> Any:
    meta = node.meta
    return meta.get("example_value")
