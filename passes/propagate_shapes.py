"""Run the graph on fake tensors in which the sample dimensions, and they alone, carry the symbol B."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from fxgrad.calls import bind, op_name
from fxgrad.context import Context, source_line
from fxgrad.errors import BatchSizeError, FxgradError, LostLayout


def propagate_shapes(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: every node has ``fake`` and ``traced``."""
    with torch.enable_grad(), ctx.symbols.mode, enable_python_dispatcher():
        _Propagate(gm, ctx).run(*(ctx.inputs[node.name] for node in gm.graph.find_nodes(op="placeholder")))
    return gm


_UNROLLING = frozenset("unbind split unsafe_split".split())


class _Propagate(fx.Interpreter):
    """fx's interpreter on fake values, naming the user's line where an op fails."""

    def __init__(self, gm: fx.GraphModule, ctx: Context) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.ctx = ctx
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("call_function", "call_method") and self._unrolls(n):
            raise self._fixed(n)
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
            raise self._fixed(n)
        if op_name(n.target) == "fxgrad::pack":
            self.ctx.symbols.count_rows(value[0].shape[0])
        n.meta["fake"] = value
        n.meta["traced"] = traced(value)  # see Note [In place without gradients]
        return value

    def _unrolls(self, n: fx.Node) -> bool:
        """Whether an op makes a value of each sample: PyTorch would make one for each of a stand-in's thousands."""
        if op_name(n.target) not in _UNROLLING:
            return False
        call = bind(n)
        source, dim = call.get("input"), call.get("dim", 0)
        if not isinstance(source, fx.Node) or not isinstance(dim, int):
            return False
        shape = source.meta["fake"].shape
        sizes = call.get("split_size", call.get("split_size_or_sections", 1))
        return isinstance(sizes, int) and self.ctx.symbols.holds_batch(shape[dim])

    def _fixed(self, n: fx.Node) -> BatchSizeError:
        advice = (
            "Write sizes in terms of x.shape[0], or use -1; where they are, PyTorch's own shape rule for the op fixes "
            "it: write it with another op (gather for take_along_dim)."
        )
        if op_name(n.target) in _UNROLLING:
            advice = (
                "Work on all samples at once, or use torch.vmap, instead of going through them one by one. Pieces that "
                "are treated alike, row by row, and put together in their order by torch.cat are followed."
            )
        return BatchSizeError(
            f"{op_name(n.target)} fixes the batch size: it works for one number of samples only",
            where=source_line(n),
            advice=advice,
        )

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.ctx.symbols.mode.from_tensor(value) if isinstance(value, Tensor) else value


# Note [In place without gradients]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Under torch.no_grad an op in place changes a tensor's values, and autograd goes on as if it had not. What the
# op returns is that tensor, which may still require a gradient; but none flows through the op.


def traced(value: Any) -> Any:
    """Whether a gradient reaches a trainable parameter through here (a list for several outputs)."""
    if isinstance(value, Tensor):
        return value.requires_grad and torch.is_grad_enabled()
    if isinstance(value, tuple | list):
        return [traced(item) for item in value]
    return False
