"""Run the graph on fake tensors in which the sample dimensions, and they alone, carry the symbol B."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from fxgrad.calls import op_name
from fxgrad.context import Context, last_own_line, source_line
from fxgrad.errors import BatchSizeError, FxgradError, LostLayout, UnsupportedOp

_TRANSFORMS = frozenset(
    """_saved_tensors_hooks_disable _grad_increment_nesting _vmap_increment_nesting _jvp_increment_nesting
    _make_dual _enter_dual_level""".split()
)


def propagate_shapes(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: every node has ``fake`` and ``traced``."""
    with torch.enable_grad(), ctx.symbols.mode, enable_python_dispatcher():
        _Propagate(gm, ctx).run(*(ctx.inputs[node.name] for node in gm.graph.find_nodes(op="placeholder")))
    return gm


class _Propagate(fx.Interpreter):
    """fx's interpreter on fake values, naming the user's line where an op fails."""

    def __init__(self, gm: fx.GraphModule, ctx: Context) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.ctx = ctx
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        if op_name(n.target) in _TRANSFORMS:
            raise UnsupportedOp(
                "torch.func inside of the model: its derivatives have no taps",
                where=source_line(n) or last_own_line(self._stack_before(n)),
                advice="Write the derivative out, or leave it out of the model.",
            )
        try:
            value = super().run_node(n)
        except FxgradError:
            raise
        except Exception as error:
            raise LostLayout(
                f"{n.name} does not work for every number of samples: {str(error).splitlines()[0]}",
                where=source_line(n),
                advice="Write sizes in terms of x.shape[0], or use -1 in view and reshape.",
            ) from error
        if self.ctx.symbols.specialised():
            raise BatchSizeError(
                f"{op_name(n.target)} fixes the batch size: it works for one number of samples only",
                where=source_line(n),
                advice="Write sizes in terms of x.shape[0], or use -1; where they are, PyTorch's own shape "
                "rule for the op fixes it: write it with another op (gather for take_along_dim).",
            )
        if op_name(n.target) == "fxgrad::pack":
            self.ctx.symbols.count_rows(value[0].shape[0])
        n.meta["fake"] = value
        n.meta["traced"] = traced(value)
        return value

    def _stack_before(self, n: fx.Node) -> str:
        """Where the user's code was, of a node that no line made."""
        while n.op != "root" and not n.stack_trace:
            n = n.prev
        return n.stack_trace or ""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.ctx.symbols.mode.from_tensor(value) if isinstance(value, Tensor) else value


def traced(value: Any) -> Any:
    """Whether a gradient reaches a trainable parameter from here (a list for several outputs)."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, tuple | list):
        return [traced(item) for item in value]
    return False
