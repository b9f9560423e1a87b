"""Run the graph on fake tensors in which the sample dimensions, and they alone, carry the symbol B."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.errors import BatchSizeError, FxgradError, LostLayout, UnsupportedOp
from fxgrad.graph.context import Context, source_line
from fxgrad.graph.edit import made_of
from fxgrad.host.dispatch import enable_python_dispatcher
from fxgrad.host.tensors import version
from fxgrad.ops.calls import bind, op_name
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.values import memory
from fxgrad.ops.written import tensors_written
from fxgrad.samples.symbols import bends, expression


def propagate_shapes(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: a graph as Dynamo left it. After: every node has ``fake`` and ``traced``."""
    with torch.enable_grad(), ctx.symbols.mode, enable_python_dispatcher():
        _Propagate(gm, ctx).run(*(ctx.inputs[node.name] for node in gm.graph.find_nodes(op="placeholder")))
    return gm


_UNROLLING = frozenset("unbind split unsafe_split".split())
_RUNNING = frozenset({"running_mean", "running_var"})
_UNDECLARED = {"embedding": {"weight"}, "embedding_bag": {"weight"}, "instance_norm": _RUNNING, "batch_norm": _RUNNING}
"""The arguments that ops write into although no schema says so: the proof follows these writes, the rules know them."""

_FIXED_ADVICE = {
    **dict.fromkeys(
        _UNROLLING,
        "Work on all samples at once, or use torch.vmap, instead of going through them one by one. Pieces that "
        "are treated alike, row by row, and put together in their order by torch.cat are followed.",
    ),
    "one_hot": "Its number of classes is the batch size: column j stands for sample j, so a product with it picks "
    "other samples' rows. Use a number of classes that does not depend on the batch, or gather within a sample.",
}


class _Propagate(fx.Interpreter):
    """fx's interpreter on fake values, naming the user's line where an op fails."""

    def __init__(self, gm: fx.GraphModule, ctx: Context) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.ctx = ctx
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("call_function", "call_method") and self._unrolls(n):
            raise self._fixed(n)
        before = self._versions(n)
        try:
            value = super().run_node(n)
        except FxgradError:
            raise
        except Exception as error:
            raise self._failed(n, error) from error
        self._check_writes(n, before)
        if self.ctx.symbols.specialised():
            raise self._fixed(n)
        self.ctx.symbols.settle()
        if op_name(n.target) == "fxgrad::pack":
            self.ctx.symbols.count_rows(value[0].shape[0])
        FAKE.put(n, value)
        TRACED.put(n, traced(value))  # see Note [In place without gradients]
        return value

    def _versions(self, n: fx.Node) -> dict[fx.Node, int]:
        values = {arg: self.env[arg] for arg in n.all_input_nodes} if n.op in ("call_function", "call_method") else {}
        # Outside of inference mode PyTorch refuses to write into tensors made inside, and counts no writes into them.
        return {a: version(v) for a, v in values.items() if isinstance(v, Tensor) and not v.is_inference()}

    def _check_writes(self, n: fx.Node, before: dict[fx.Node, int]) -> None:
        """Raise where an op has written into what fxgrad takes to be only read: what else reads it is not followed."""
        changed = [arg for arg, count in before.items() if version(self.env[arg]) != count]
        if not changed:
            return
        written = [bind(n).get(name) for name in _UNDECLARED.get(op_name(n.target), ())]
        known = {memory(arg) for arg in (*tensors_written(n), *written) if isinstance(arg, fx.Node)}
        if any(memory(arg) not in known for arg in changed):
            raise UnsupportedOp(
                f"{op_name(n.target)} writes into a tensor in a way that fxgrad does not know",
                where=source_line(n),
                advice="Write it with an op whose name ends in an underscore, such as add_, or out of place.",
            )

    def _failed(self, n: fx.Node, error: Exception) -> FxgradError:
        """An op fails at other numbers of samples: it, or a reshape before it, has one of them for its own."""
        if op_name(n.target).startswith("_assert_scalar"):
            return BatchSizeError(
                "the model checks its sizes (torch._check), which holds for one number of samples only",
                where=source_line(n),
                advice="Check the batch size outside of the model.",
            )
        at = next(filter(self._divides_batch, made_of(n)), n)
        said = str(error).splitlines()[0].replace(str(self.ctx.symbols.symbol), "B")
        return LostLayout(
            f"{op_name(at.target)} does not work for every number of samples: {said if at is n else self._shapes(at)}",
            where=source_line(at),
            advice=self._advice(),
        )

    def _advice(self) -> str:
        """Return what to do where sizes do not go with B: a single sample without its dimension is known by its own."""
        for name, dim in self.ctx.sample_dims.items():
            value, shown = self.ctx.inputs[name], self.ctx.names.get(name, name)
            if dim != 0:
                return (
                    f"Input '{shown}' is taken to have its samples on dimension {dim}. If they are not there, correct "
                    f"in_dims= or batch_first=. Else write sizes in terms of {shown}.shape[{dim}]."
                )
            if value.dim() == 1 and value.is_floating_point():
                return (
                    f"Input '{shown}' has one dimension, which counts samples: for one sample, pass "
                    f"{shown}.unsqueeze(0). Else write sizes in terms of x.shape[0]."
                )
        return "Write sizes in terms of x.shape[0], or use -1 in view and reshape."

    def _divides_batch(self, n: fx.Node) -> bool:
        """Return whether a reshape divides the number of samples by a number: ``x.reshape(8, -1)``."""
        if op_name(n.target) not in ("view", "reshape"):
            return False
        return any(bends(expression(size), self.ctx.symbols.symbol) for size in FAKE.of(n).shape)

    def _shapes(self, n: fx.Node) -> str:
        """``its result is [8, 3*B // 8]``."""
        sizes = ", ".join(str(expression(size)) for size in FAKE.of(n).shape)
        return f"its result is [{sizes.replace(str(self.ctx.symbols.symbol), 'B')}]"

    def _unrolls(self, n: fx.Node) -> bool:
        """Whether an op makes a value of each sample: PyTorch would make one for each of a stand-in's thousands."""
        if op_name(n.target) not in _UNROLLING:
            return False
        call = bind(n)
        source, dim = call.get("input"), call.get("dim", 0)
        if not isinstance(source, fx.Node) or not isinstance(dim, int):
            return False
        shape = FAKE.of(source).shape
        sizes = call.get("split_size", call.get("split_size_or_sections", 1))
        return isinstance(sizes, int) and self.ctx.symbols.holds_batch(shape[dim])

    def _fixed(self, n: fx.Node) -> BatchSizeError:
        advice = (
            "Write sizes in terms of x.shape[0], or use -1; where they are, PyTorch's own shape rule for the op fixes "
            "it: write it with other ops (einsum for bilinear)."
        )
        return BatchSizeError(
            f"{op_name(n.target)} fixes the batch size: it works for one number of samples only",
            where=source_line(n),
            advice=_FIXED_ADVICE.get(op_name(n.target), advice),
        )

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self.ctx.symbols.mode.from_tensor(value) if isinstance(value, Tensor) else value


# Note [In place without gradients]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Under torch.no_grad an op in place changes a tensor's values, and autograd goes on as if it had not. What the
# op returns is that tensor, which may still require a gradient; but none flows through the op.


def traced(value: Any) -> Any:
    """Return whether a gradient reaches a trainable parameter through here (a list for several outputs)."""
    if isinstance(value, Tensor):
        return value.requires_grad and torch.is_grad_enabled()
    if isinstance(value, tuple | list):
        return [traced(item) for item in value]
    return False
