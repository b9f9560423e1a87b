"""The text of a value, equal in every process for what computes the same; a value of an unknown kind has none."""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property, partial
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxgrad.capture.sharded_sums import ClippedByUnit
from fxgrad.compile.code_text import Unreadable, imported_name, text_of_builtin, text_of_class, text_of_function
from fxgrad.host.fake import FakeTensor
from fxgrad.host.ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from fxgrad.ops.facts import EXAMPLE, FAKE, TRACED
from fxgrad.ops.values import attribute
from fxgrad.quantities import ClippedGrad, GradDot

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_LISTS = (tuple, list, torch.Size, immutable_list)
_DICTS = (dict, OrderedDict, immutable_dict, MappingProxyType)
_OPERATORS = frozenset({"aten", "prims", "prim", "fxgrad"})  # operators whose Python code is in the versions
_LARGEST = 1 << 24  # elements of a constant tensor that are hashed

# Facts of a node that decide nothing behind the passes: places in the user's files, values that the inputs determine,
# and notes that the target holds.
_IGNORED = frozenset(
    """stack_trace nn_module_stack source_fn_stack fwd_source_fn_stack seq_nr creation_timestamp original_aten
    from_node val tensor_meta grapharg torch_fn desc tensor_dict steal_arg call samples use policy unbacked_bindings
    user_cache_hash is_wrapped _dynamo_source""".split()
) | {EXAMPLE.key, FAKE.key, TRACED.key}


class Texts:
    """What writes texts; an object inside of itself, such as a function that closes over itself, is a number there."""

    def __init__(self) -> None:
        self._open: list[int] = []

    def of(self, value: Any) -> str:
        """Return a value's text; raise Unreadable where it has none."""
        kind = type(value)
        if kind in _PLAIN or kind in _OF_TORCH:
            return f"{kind.__name__} {value!r}"
        if isinstance(value, enum.Enum):
            return f"{self.of(kind)}.{value.name}"
        if kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
            return f"{kind.__name__} {value.node.expr}"
        if isinstance(value, sympy.Basic):
            return f"sympy {sympy.srepr(value)}"
        if isinstance(value, fx.Node):
            return f"%{value.name}"
        if isinstance(value, ModuleType | OpOverload | OpOverloadPacket):
            return self._named(value)
        if kind is slice:
            return f"slice({self._all((value.start, value.stop, value.step))})"
        if kind in _LISTS:
            return f"{kind.__name__}({self._all(value)})"
        if kind in _DICTS:
            return f"dict({', '.join(f'{self.of(name)}: {self.of(one)}' for name, one in value.items())})"
        if kind in (set, frozenset):
            return f"set({', '.join(sorted(map(self.of, value)))})"
        return self._within(value)

    def _all(self, values: Iterable[Any]) -> str:
        return ", ".join(map(self.of, values))

    def _within(self, value: Any) -> str:
        if id(value) in self._open:
            return f"^{self._open.index(id(value))}"
        self._open.append(id(value))
        try:
            return self._of_object(value)
        finally:
            self._open.pop()

    def _of_object(self, value: Any) -> str:
        if isinstance(value, FakeTensor):
            return self.of_metadata(value)
        if isinstance(value, Tensor):
            raise Unreadable("a tensor, whose numbers may change")
        if isinstance(value, fx.GraphModule):
            return self.of_graph(value)
        if isinstance(value, type):
            return text_of_class(value, self.of)
        if isinstance(value, FunctionType):
            return imported_name(value) or text_of_function(value, self.of)
        if type(value) is partial:
            return f"partial {self.of(value.func)} {self.of(value.args)} {self.of(value.keywords)}"
        if isinstance(value, MethodType):
            return f"{self.of(value.__func__)} of {self.of(value.__self__)}"
        if isinstance(value, BuiltinFunctionType | MethodDescriptorType):
            return text_of_builtin(value)
        if isinstance(value, HigherOrderOperator):
            return f"higher_order {value.name()}"
        return self._of_instance(value)

    def _of_instance(self, value: Any) -> str:
        """Return the class and the attributes of an object of fxgrad's, or of a class that derives from one."""
        kind = type(value)
        if not any(base.__module__.split(".")[0] == "fxgrad" for base in kind.__mro__):
            raise Unreadable(f"a value of the type {kind.__module__}.{kind.__qualname__}")
        if isinstance(value, tuple):  # a NamedTuple
            return f"{self.of(kind)}({self._all(tuple(value))})"
        computed = {name for base in kind.__mro__ for name, one in vars(base).items() if type(one) is cached_property}
        own = {name: one for name, one in vars(value).items() if name not in computed}
        if kind in (
            ClippedGrad,
            ClippedByUnit,
        ):  # its numbers are an input, of which each call gets as many as there are groups
            del own["max_grad_norm"]
        if kind is GradDot:  # each call gets its tensors as inputs
            own["vectors"] = {name: self.of_metadata(vector) for name, vector in value.vectors.items()}
        return f"{self.of(kind)} {', '.join(f'{name}={self.of(one)}' for name, one in sorted(own.items()))}"

    def _named(self, value: Any) -> str:
        if not isinstance(value, ModuleType):
            if str(value).split(".")[0] not in _OPERATORS:
                raise Unreadable(f"the operator {value} has a backward that no key shows")
            return f"operator {value}"
        name = imported_name(value)
        if name is None:
            raise Unreadable(f"the module {value.__name__}")
        return f"module {name}"

    def of_metadata(self, value: Tensor) -> str:
        """Return a tensor's text without its numbers."""
        if type(value).__module__.split(".")[0] != "torch" or value.layout != torch.strided:
            raise Unreadable(f"a tensor of the type {type(value).__name__}")
        metadata = (tuple(value.shape), value.stride(), value.storage_offset())
        flags = (value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference())
        return f"{type(value).__name__} {self.of(metadata)} {value.dtype} {value.device} {flags}"

    def of_constant(self, value: Any) -> str:
        """Return the text of a graph's attribute; of a tensor with its numbers, and otherwise as of any value."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return self.of(value)
        if value.numel() > _LARGEST:
            raise Unreadable(f"a constant tensor of {value.numel()} elements")
        numbers = value.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
        return f"{self.of_metadata(value)} {hashlib.sha256(numbers.numpy().tobytes()).hexdigest()}"

    def of_graph(self, gm: fx.GraphModule) -> str:
        """Return all nodes of a graph, with their targets by value."""
        return "\n".join(self._of_node(gm, node) for node in gm.graph.nodes)

    def _of_node(self, gm: fx.GraphModule, node: fx.Node) -> str:
        target = node.target if isinstance(node.target, str) else self.of(node.target)
        if node.op == "call_module":
            raise Unreadable(f"a call of the module {target}")
        if node.op == "get_attr":
            target = f"{target} = {self.of_constant(attribute(gm, node))}"
        facts = {name: fact for name, fact in sorted(node.meta.items()) if name not in _IGNORED}
        return f"{node.name} {node.op} {target} {self.of(node.args)} {self.of(node.kwargs)} {self.of(facts)}"
