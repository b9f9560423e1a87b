"""Prove, for a tensor-parallel model, that what counts as replicated is, and its gradient too."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx

from fxgrad.errors import FxgradError, OptionError
from fxgrad.graph.context import Context, path_to, source_line
from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE, TRACED
from fxgrad.ops.families import Family, draws, family_of
from fxgrad.ops.forms import QUERIES
from fxgrad.ops.values import memories, memory
from fxgrad.ops.written import tensors_written
from fxgrad.samples.layouts import holds_samples, samples_of_outputs

# Note [Replicated values]
# ~~~~~~~~~~~~~~~~~~~~~~~~
# A value is replicated if every process of the group has the same one, and varies otherwise. A sharded parameter
# varies. An op of replicated values is replicated, any other varies. The gradient of a replicated value has to be the
# same on every process, and whole: so nothing that varies may use a replicated value through which a gradient flows,
# except by an operator of kernels/collectives.py, whose backward adds the processes' gradients up. By induction from
# the outputs, which have to be replicated, the gradient of every replicated value is then whole, and that of a sharded
# parameter is the process's own part of the whole parameter's. JAX's shard_map types its values in the same way
# ("varying manual axes").

_VARYING_OPERAND = {  # whether the operand has to vary, and whether the result does
    "fxgrad::copy_to_region": (False, True),
    "fxgrad::reduce_from_region": (True, False),
    "fxgrad::gather_from_region": (True, False),
    "fxgrad::scatter_to_region": (False, True),
    "fxgrad::gather_from_sequence": (True, True),
    "fxgrad::reduce_scatter_to_sequence": (True, True),
    "fxgrad::rows_of_region": (False, True),
}


def prove_replicas(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: samples are known. After: the graph, unaltered, or an error naming the line."""
    if ctx.varying is None:
        return gm
    written: set[int | None] = set()  # memory into which something is written that varies
    while True:
        before = len(written)
        varying = _varying(gm.graph, ctx, written)
        if len(written) == before:
            break
    for node in gm.graph.nodes:
        _check(node, varying, ctx)
    return gm


def _varying(graph: fx.Graph, ctx: Context, written: set[int | None]) -> set[fx.Node]:
    """Return the nodes whose values vary, as far as it is known what is written to each memory."""
    assert ctx.varying is not None
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        call = CALL.get(node)
        if call is None:
            varies = node.name in ctx.varying
        elif call.op in _VARYING_OPERAND:
            varies = _VARYING_OPERAND[call.op][1]
        else:
            varies = call.op not in QUERIES and (draws(call) or any(arg in varying for arg in node.all_input_nodes))
        if varies or not written.isdisjoint(memories(node)):
            varying.add(node)
            written.update(memory(base) for base in tensors_written(node))
    return varying


def _check(node: fx.Node, varying: set[fx.Node], ctx: Context) -> None:
    """Refuse a node whose operands, or whose gradients, are not what it takes them for."""
    call = CALL.get(node)
    if node.op == "output" or call is None:
        _check_border(node, varying, ctx)
    elif family_of(call.op) in (Family.FUNCTION, Family.CONTROL):
        raise _refusal(
            "an op with a body of its own in a tensor-parallel model is not supported",
            node,
            ctx,
            "Leave out autograd.Function, cond, scan, map and while_loop.",
        )
    elif call.op in _VARYING_OPERAND:
        _check_collective(node, call.op, varying, ctx)
    elif draws(call):
        sentence = f"{call.op} draws random numbers, which differ between the processes"
        raise _refusal(sentence, node, ctx, "Leave dropout out of the model.")
    elif node in varying and any(arg not in varying for arg in _traced(node)):
        raise _refusal(
            f"{call.op} uses a value that is equal on all processes together with what differs, and its gradient "
            "would be another one on each",
            node,
            ctx,
            _ADVICE,
        )


def _check_border(node: fx.Node, varying: set[fx.Node], ctx: Context) -> None:
    """Refuse what differs between the processes where it leaves the graph, by an output or in an input's memory."""
    assert ctx.varying is not None
    if node.op == "output" and any(arg in varying for arg in node.all_input_nodes):
        raise _refusal(
            "the model returns a value that differs between the processes of tensor parallelism",
            node,
            ctx,
            "Let the last parallel layer return it whole, by output_layouts=Replicate().",
        )
    if node in varying and node.name not in ctx.varying:
        raise _refusal("an input is overwritten by what differs between the processes", node, ctx, _ADVICE)


_ADVICE = (
    "Let values enter and leave a sharded stretch through ColwiseParallel, RowwiseParallel and "
    "SequenceParallel; leave out parameters and dropout that work on parts of a value."
)


def _check_collective(node: fx.Node, op: str, varying: set[fx.Node], ctx: Context) -> None:
    (operand,) = (arg for arg in node.all_input_nodes if isinstance(FAKE.of(arg), Tensor))
    name = op.removeprefix("fxgrad::")
    if (operand in varying) is not _VARYING_OPERAND[op][0]:
        state = "differs between the processes" if operand in varying else "is equal on all processes"
        raise _refusal(
            f"a parallel layer takes a value that {state} for one that "
            f"{'is equal on all' if operand in varying else 'differs'} ({name})",
            node,
            ctx,
            "Check input_layouts= of the layer: they have to say how the value lies on the processes.",
        )
    if bool(TRACED.of(operand)) and not all(map(holds_samples, samples_of_outputs(operand))):
        raise _refusal(
            f"a value of parameters alone, without samples, goes through a parallel layer ({name})",
            node,
            ctx,
            "Add it to a value that holds samples first.",
        )


def _traced(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operands through which a trainable parameter's gradient flows."""
    for arg in node.all_input_nodes:
        traced = TRACED.get(arg)
        if any(traced) if isinstance(traced, list) else traced:
            yield arg


def _refusal(sentence: str, node: fx.Node, ctx: Context, advice: str) -> FxgradError:
    path = "" if node.op == "output" else path_to(node, ctx)
    return OptionError(sentence, where=source_line(node), path=path, advice=advice)
