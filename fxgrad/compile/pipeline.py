"""The compiler, as the list of its passes. Read this file first.

user's model --TorchDynamo--> graph
   inline_regions     the bodies of checkpoints where they are called
   unite_names        what an op returns as it is: one name
   wrap_bodies        an op with graphs as arguments is one call: autograd.Function, cond, scan
   wrap_transforms    a stretch under torch.func is one call
   decompose_recurrent  recurrent layers as one recurrence per layer and direction
   split_foreach      torch._foreach_mul([x, y], 2.) as x.mul(2.), y.mul(2.)
   join_pieces        cat([f(c) for c in x.chunk(2)]) as f(x)
   replace_reshapes   x.t_() as a new value
   propagate_shapes   run it on fake tensors in which the sample dims carry the symbol B
   normalize_calls    one name and one form for every call
   lower_assignments  x[i] = v as an in-place op on a view
   separate_writes    an in-place op on a function of parameters gets memory of its own
   decompose_calls    ops without a known family, as ATen ops that have one
   unsort_routing     tokens that were sorted by expert stay in the samples' order
   split_lookups      rows that an index picks for each sample: among the sample's own
   simplify_views     no view merges a dimension that a later one splits again
   infer_samples      every value: constant, uniform, batched (where?), or mixed
   prove_replicas     tensor parallelism: what counts as equal on all processes is, and its gradient
   separate_draws     dropout(w) -> w * dropout(ones_like(w))
   attach_taps        op(x, w) -> op(x, w.detach()) and a tap behind it
   prove_coverage     every gradient path that leaves a parameter ends in a tap
   prove_independence every sample is where infer_samples put it, and nowhere else
   ask_policies       what a selective checkpoint holds asks its policy when it is traced
   append_backward    of forward_backward: the loss's gradients by the placeholders, inside of the graph
--> AOTAutograd + Inductor
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxgrad.errors import LostLayout
from fxgrad.graph.context import Context
from fxgrad.graph.spec import check_spec
from fxgrad.host.dynamo import lazy_graph_module, traced_in
from fxgrad.ops.calls import CALL
from fxgrad.passes.append_backward import append_backward
from fxgrad.passes.ask_policies import ask_policies
from fxgrad.passes.attach_taps import attach_taps
from fxgrad.passes.count_one_sample import count_one_sample
from fxgrad.passes.decompose_calls import decompose_calls
from fxgrad.passes.decompose_recurrent import decompose_recurrent
from fxgrad.passes.infer_samples import infer_samples
from fxgrad.passes.inline_regions import inline_regions
from fxgrad.passes.join_pieces import join_pieces
from fxgrad.passes.lower_assignments import lower_assignments
from fxgrad.passes.normalize_calls import normalize_calls
from fxgrad.passes.propagate_shapes import propagate_shapes
from fxgrad.passes.prove_coverage import prove_coverage
from fxgrad.passes.prove_independence import prove_independence
from fxgrad.passes.prove_replicas import prove_replicas
from fxgrad.passes.replace_reshapes import replace_reshapes
from fxgrad.passes.separate_draws import separate_draws
from fxgrad.passes.separate_writes import separate_writes
from fxgrad.passes.simplify_views import simplify_views
from fxgrad.passes.split_foreach import split_foreach
from fxgrad.passes.split_lookups import split_lookups
from fxgrad.passes.take_whole_gradient import take_whole_gradient
from fxgrad.passes.unite_names import unite_names
from fxgrad.passes.unsort_routing import unsort_routing
from fxgrad.passes.wrap_bodies import wrap_bodies
from fxgrad.passes.wrap_transforms import wrap_transforms
from fxgrad.quantities import Quantity

Pass = Callable[[fx.GraphModule, Context], fx.GraphModule]

PASSES: tuple[Pass, ...] = (
    inline_regions,
    unite_names,
    wrap_bodies,
    wrap_transforms,
    decompose_recurrent,  # before shapes: PyTorch's own ops would unroll time to find theirs
    split_foreach,
    join_pieces,  # before shapes: pieces of so many samples fix their number
    replace_reshapes,  # before shapes: a fake value would change its own under the nodes that stand before
    propagate_shapes,
    normalize_calls,  # needs shapes: argument types distinguish overloads
    lower_assignments,
    separate_writes,
    decompose_calls,
    unsort_routing,
    split_lookups,
    simplify_views,
    infer_samples,
    prove_replicas,
    separate_draws,
    attach_taps,
    prove_coverage,
    prove_independence,
)
ANALYSIS: tuple[Pass, ...] = PASSES[: PASSES.index(infer_samples) + 1]  # up to where a graph's samples are known

# A batch of one needs no samples found: its ordinary gradient is the sample's.
NAMES: tuple[Pass, ...] = (inline_regions, unite_names)  # the graph with one name for each tensor
DEFINITIONS: tuple[Pass, ...] = (*NAMES, decompose_recurrent)  # the graph in ops with rules
SINGLE: tuple[Pass, ...] = (*DEFINITIONS, take_whole_gradient)

# But autograd adds that up in the model's dtype. Where norms are bounded, rules make it of the sample's whole values.
ONE: tuple[Pass, ...] = (
    *PASSES[: PASSES.index(separate_writes)],
    count_one_sample,  # before writes: what holds the sample is written to in place
    separate_writes,
    decompose_calls,
    count_one_sample,
    prove_replicas,
    separate_draws,
    attach_taps,
    prove_coverage,
)


def passes_of(n: int, quantities: Sequence[Quantity]) -> tuple[Pass, ...]:
    """Return the passes for n samples."""
    bounded = not all(quantity.dense for quantity in quantities)
    return PASSES if n != 1 else ONE if bounded else SINGLE


LAST: tuple[Pass, ...] = (ask_policies,)  # what only the inner compiler has to see
WHOLE: tuple[Pass, ...] = (append_backward,)  # of `forward_backward`, whose graphs are whole steps

seconds: dict[str, float] = {}  # time spent in each pass since the process began


def run_passes(gm: fx.GraphModule, ctx: Context, passes: Sequence[Pass] = PASSES) -> fx.GraphModule:
    """Run the passes in order; after each, lint the graph and check its spec.

    A pass gets a graph of its own, so the one before it stays as it was.
    """
    ctx.analyse = _analyse
    with traced_in(ctx.symbols.mode):  # what PyTorch traces in here has our fake tensors, not Dynamo's
        for run in passes:
            start = time.perf_counter()
            try:
                gm = run(copy_graph(gm), ctx)
            except GuardOnDataDependentSymNode as error:
                raise _undecided(error) from error
            gm.graph.lint()
            check_spec(gm, ctx, after=run.__name__)
            seconds[run.__name__] = seconds.get(run.__name__, 0.0) + time.perf_counter() - start
    gm.recompile()
    return gm


def _undecided(error: GuardOnDataDependentSymNode) -> LostLayout:
    said = str(error).splitlines()[0]
    return LostLayout(
        f"what the model does depends on a size that only the data decides: {said}",
        advice="Use sizes that the inputs' shapes give: pass total_length= to pad_packed_sequence, mask instead of "
        "selecting.",
    )


def _analyse(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Return the body of an op, up to where its samples are known."""
    return run_passes(gm, ctx, ANALYSIS)


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a new graph with the same nodes, names and facts.

    Its Python code is written when it first runs; graphs between passes never run.
    """
    graph = fx.Graph()
    inputs = gm.graph.find_nodes(op="placeholder")  # torch 2.11 leaves those of sizes behind other nodes
    copies: dict[fx.Node, fx.Node] = {node: graph.node_copy(node) for node in inputs}
    result = graph.graph_copy(gm.graph, copies)
    output = gm.graph.output_node()
    graph.output(result).meta = dict(output.meta)
    for copy in copies.values():
        if CALL.on(copy):
            CALL.put(copy, CALL.of(copy).moved(copies))
    return lazy_graph_module(gm, graph, type(gm).__name__)
