"""What the passes share: the context they run in, and where in the user's model a node stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor, fx

from fxgrad.costs.choices import Planner
from fxgrad.host.modules import INNER
from fxgrad.host.ops import enter_inference_mode, exit_inference_mode, set_grad_enabled
from fxgrad.ops.calls import CALL
from fxgrad.ops.user_functions import FUNCTION, HOOK
from fxgrad.quantities import Delivery, GradSample, Quantity
from fxgrad.runtime.checkpointing import POLICY
from fxgrad.samples.layouts import SAMPLES
from fxgrad.samples.symbols import Symbols

Mixing = Literal["error", "allow"]


@dataclass(frozen=True)
class TrainableParameter:
    """One trainable parameter as the graph knows it."""

    node: str  # its placeholder
    name: str  # the user's name for it, such as "encoder.0.weight"
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Context:
    """What a run of the pipeline knows besides the graph."""

    symbols: Symbols
    inputs: dict[str, Any]  # placeholder -> its fake value
    parameters: list[TrainableParameter]
    sample_dims: dict[str, int]  # placeholder -> the dimension that holds the samples
    quantities: tuple[Quantity, ...] = (GradSample(),)
    loss_scale: float | str = 1  # what the loss was divided by; "mean": the number of samples
    mixing: Mixing = "error"
    names: dict[str, str] = field(default_factory=dict)  # placeholder -> the user's name
    # placeholders of packed sequences; the data's has the names of its batch_sizes and sorted_indices
    packed: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)  # placeholders of an op's body: their samples
    analyse: Callable[[fx.GraphModule, Context], fx.GraphModule] | None = None  # finds a body's samples

    single: bool = False  # whether it is a batch of one
    planner: Planner = field(default_factory=Planner)  # what chooses how each term is contracted
    # tensor parallelism: placeholders of parameters whose values or gradients differ between processes; else None
    varying: frozenset[str] | None = None
    may_mix: bool = True  # whether an error may advise mixing="allow"
    labels: dict[str, str] = field(default_factory=dict)  # placeholder the passes added -> how it is printed
    loss: int = 0  # the output that `append_backward` differentiates

    notes: list[str] = field(default_factory=list)  # what explain() says of the samples

    @property
    def alone(self) -> bool:
        """Whether a quantity speaks of single samples, so that a share of what all samples decide will not do."""
        return any(quantity.alone or quantity.guards_grad for quantity in self.quantities)

    @property
    def keep_apart(self) -> str:
        """Return what to do where samples meet."""
        allow = ', or pass mixing="allow"' if self.may_mix else ""
        return f"Keep the op within one sample{',' if allow else ', or'} leave it out of the model{allow}."

    def deliveries(self, n: Any) -> list[Delivery]:
        """Return what the backward of a batch of n delivers, all quantities in turn."""
        metas = self._metas()
        return [one for quantity in self.quantities for one in quantity.deliveries(quantity.units(n), metas)]

    def given(self, n: Any) -> list[Delivery]:
        """Return what the quantities are given at each call."""
        metas = self._metas()
        return [one for quantity in self.quantities for one in quantity.inputs(quantity.units(n), metas)]

    def counts_given(self) -> list[int]:
        """Return how many tensors each quantity is given."""
        return [len(quantity.inputs(1, self._metas())) for quantity in self.quantities]

    def _metas(self) -> dict[str, Tensor]:
        with torch.device("meta"):
            return {p.name: torch.empty(p.shape, dtype=p.dtype) for p in self.parameters}

    @property
    def by_node(self) -> dict[str, TrainableParameter]:
        return {parameter.node: parameter for parameter in self.parameters}

    def trainable(self, graph: fx.Graph) -> list[fx.Node]:
        """Return the parameters' nodes, in the parameters' order, which is the model's and not the graph's."""
        by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
        return [by_name[parameter.node] for parameter in self.parameters]


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n(?P<code>[^\n]*)')
_HOSTS = ("torch/nn/", "torch/_", "torch/utils/", "torch/functional.py", f"{PurePath(__file__).parents[1]}/")


def source_line(node: fx.Node) -> str:
    """Return the user's own line that made a node: ``model.py:41   x = self.bn(x)``."""
    return last_own_line(node.stack_trace or "") or _module(node)


def last_own_line(trace: str) -> str:
    """Return the last line of a stack trace that is neither PyTorch's nor fxgrad's."""
    frames = [f for f in _FRAME.finditer(trace) if not any(host in f["file"] for host in _HOSTS)]
    if not frames:
        return ""
    frame = frames[-1]
    return f"{PurePath(frame['file']).name}:{frame['line']}   {frame['code'].strip()}"


def _module(node: fx.Node) -> str:
    """Return the module a node comes from, where no line of the user's own made it: ``BatchNorm1d '1'``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path, kind = stack[-1]
    inside = re.sub(r"^L\['(original|self)'\]", "", str(path))  # fxgrad's and Dynamo's names of the model
    words = [a or b for a, b in re.findall(r"\['([^']+)'\]|\.(\w+)", inside) if (a or b) != INNER]
    name = getattr(kind, "__name__", kind)
    return f"in {name} '{words[-1]}'" if words else f"in {name}, the model itself"


def path_to(node: fx.Node, ctx: Context) -> str:
    """Return the path of samples to a node: ``x -> conv2d -> batch_norm``."""
    steps: list[str] = []
    current: fx.Node | None = node
    while current is not None and len(steps) < 12:
        call = CALL.get(current)
        name = ctx.names.get(current.name, current.name) if call is None else spoken(current, call.op)
        steps.append(name)
        current = next(_carriers(current), None)
    return " -> ".join(reversed(steps))


def spoken(node: fx.Node, op: str) -> str:
    """Return an op's name as the user wrote it: ``register_hook`` for the function that a hook became."""
    what = getattr(node.target, "what", None)  # of a UserFunction
    return op if what is None else {FUNCTION: "autograd.Function", HOOK: "register_hook"}[what]


def _carriers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands that hold samples, those first in which samples already met."""
    for wanted in ("mixed", "batched"):
        for operand in node.all_input_nodes:
            samples = SAMPLES.get(operand)
            kinds = [s for s in samples if s] if isinstance(samples, list) else [samples] if samples else []
            if any(s.kind.value == wanted for s in kinds):
                yield operand


def place_beside(node: fx.Node, new: fx.Node) -> None:
    """Let a new node count as part of an old one: the user's line, the module, a checkpoint around it."""
    new.meta.update({key: node.meta[key] for key in _OF_A_PLACE if key in node.meta})


OF_A_CHECKPOINT = frozenset({"recompute", "ac_graph_id", POLICY.key})
_OF_A_PLACE = ("stack_trace", "nn_module_stack", *OF_A_CHECKPOINT)


def without_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls of a graph that run under ``torch.no_grad`` or ``torch.inference_mode``."""
    stopped: set[fx.Node] = set()
    enabled, inference = True, False
    before: dict[Any, tuple[bool, bool]] = {}
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif node.target is enter_inference_mode:
            before[node] = enabled, inference
            enabled, inference = not node.args[0], bool(node.args[0])
        elif node.target is exit_inference_mode:
            enabled, inference = before[node.args[0]]
        if inference or not enabled:
            stopped.add(node)
    return stopped
