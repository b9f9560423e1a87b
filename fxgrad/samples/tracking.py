"""Layout rules: one handler per family of ops.

A handler gets one op with the layouts of its operands. It returns the layout of an output, or the reason why the op
mixes samples. It refuses in doubt and never guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sympy import simplify
from torch import Tensor, fx

from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import Family
from fxgrad.ops.worked_dims import OVER_LAST
from fxgrad.samples.contractions import contraction
from fxgrad.samples.layouts import Kind, Layout, kind_of
from fxgrad.samples.mixed import PICK_ADVICE, PICKS
from fxgrad.samples.operands import Answer, Handler, Mixes, Op, Operand, by_shape
from fxgrad.samples.over_dims import over_dims, worked_dims
from fxgrad.samples.places import bags, index_put, per_index
from fxgrad.samples.symbols import expression


def elementwise(op: Op, output: Tensor) -> Answer:
    answer = by_shape(op, output)
    if isinstance(answer, Mixes):
        return answer
    from_right = answer.dim - output.dim()
    for operand, layout in op.batched:
        if layout.dim - operand.fake.dim() != from_right or layout.at(0) != answer.at(0):
            return Mixes("its operands hold the samples in different places")
    return answer


def sought(op: Op, output: Tensor) -> Answer:
    """Follow bucketize and searchsorted, elementwise in the values; each row of values has its row of boundaries."""
    for operand, layout in op.batched:
        if operand.name in ("boundaries", "sorted_sequence", "sorter") and layout.dim in operand.last_dims(1):
            return Mixes("its boundaries are not the same for all samples")
    return elementwise(op, output)


def along(op: Op, output: Tensor) -> Answer:
    """Follow softmax, cumsum, sort, sum, ..., which batch over all dims that they do not name."""
    if op.call.op in ("max", "min") and "other" in op.call.arguments:
        return elementwise(op, output)
    linear = op.call.op in ("sum", "mean", "nansum")
    for operand, layout in op.batched:
        dims = [0] if op.call.op == "msort" else op.dims("dim", operand.fake.dim())
        if dims is None or layout.dim in dims:
            return Mixes("it works along the sample dimension", linear=linear)
    return by_shape(op, output)


def normalised(op: Op, output: Tensor) -> Answer:
    shape = op.call.get("normalized_shape", ())
    shape = FAKE.of(shape) if isinstance(shape, fx.Node) else shape  # h.shape[1:]
    if _on_last_dims(op, len(shape)):
        return Mixes("it normalises over the sample dimension")
    return by_shape(op, output)


def per_image(op: Op, output: Tensor) -> Answer:
    if _on_last_dims(op, next((int(c) for c in op.call.op if c.isdigit()), 2)):
        return Mixes("it works across the sample dimension")
    return by_shape(op, output)


def attention(op: Op, output: Tensor) -> Answer:
    """Follow batch dims that align from the right, as in scaled_dot_product_attention."""
    if _on_last_dims(op, 2):
        return Mixes("it attends over the sample dimension")
    return elementwise(op, output)


def _on_last_dims(op: Op, count: int) -> bool:
    """Decide whether an operand has its samples among its last ``count`` dims."""
    return any(layout.dim in operand.last_dims(count) for operand, layout in op.batched)


def per_row(op: Op, output: Tensor) -> Answer:
    name = op.call.op
    if name == "batch_norm" and op.call.get("training") is True:
        return Mixes("batch_norm in training mode lets samples influence each other")
    rank = 2 + _spatial(name) if _spatial(name) else None
    layout_of_one_image = _as_channels(op) if name == "instance_norm" else _as_groups(op) if rank is not None else None
    if layout_of_one_image is not None:
        return layout_of_one_image
    for operand, layout in op.batched:
        if operand.name == "weight":
            return _kernels(op, output, layout) if name.startswith("conv") else Mixes("its weight holds samples")
        if name.startswith("grid_sample") and layout.dim != 0:
            return _grid(op, operand, layout)
        if layout.dim != 0 or (rank is not None and operand.fake.dim() != rank):
            return Mixes("it gets its samples on another dimension than 0")
        if name == "embedding_bag" and operand.fake.dim() == 1:
            return bags(op, output)
    layouts = {layout for _, layout in op.batched}
    return layouts.pop() if len(layouts) == 1 else by_shape(op, output)


def _as_channels(op: Op) -> Layout | None:
    """Return the layout of ``instance_norm(h.unsqueeze(0))`` without weights, samples as channels; otherwise None."""
    (operand, layout), *others = op.batched
    alone = not others and len(op.operands) == 1 and op.call.get("use_input_stats", True) is True
    return layout if alone and operand.name == "input" and layout.dim == 1 else None


def _as_groups(op: Op) -> Layout | None:
    """Return the layout of ``conv2d(x.view(1, B * C, ..), w, groups=B)``, one group per sample; otherwise None."""
    groups = op.call.get("groups", 1)
    per_sample = expression(FAKE.of(groups) if isinstance(groups, fx.Node) else groups) / op.symbols.symbol
    places = {operand.name: (layout.dim, layout.outer) for operand, layout in op.batched}
    if "transpose" in op.call.op or not simplify(per_sample).is_Integer or len(places) < len(op.operands):
        return None
    image, kernels = op.operand("input"), op.operand("weight")
    if image is None or image.fake.dim() != 2 + _spatial(op.call.op) or kernels is None or kernels.layout is None:
        return None
    expected = {"input": (1, 1), "weight": (0, 1), "bias": (0, 1)}
    return kernels.layout.at(1) if places.items() <= expected.items() else None


def _grid(op: Op, operand: Operand, layout: Layout) -> Answer:
    """Follow samples as channels of a shared grid's image, or as positions in a grid on a shared image."""
    alone = len(list(op.batched)) == 1
    if alone and operand.name == "input" and layout.dim == 1:
        return layout
    if alone and operand.name == "grid" and layout.dim < operand.fake.dim() - 1:
        return layout.at(layout.dim + 1)
    return Mixes("it gets its samples on another dimension than 0")


def _kernels(op: Op, output: Tensor, kernels: Layout) -> Answer:
    """Follow a convolution with one kernel per sample; its output channel belongs to that sample."""
    others = [layout for operand, layout in op.batched if operand.name != "weight"]
    image = op.operand("input")
    shared = image is not None and image.layout is None and op.call.get("groups", 1) == 1
    apart = kernels.dim == ("transpose" in op.call.op) and all(layout == kernels.at(0) for layout in others)
    channel = kernels.at(output.dim() - _spatial(op.call.op) - 1)
    return channel if shared and apart and by_shape(op, output) == channel else Mixes("its weight holds samples")


def _spatial(name: str) -> int:
    return int(name[-2]) if name.startswith("conv") and name.endswith("d") else 0


def lookup(op: Op, output: Tensor) -> Answer:
    table, ids = op.operand("weight"), op.operand("input")
    if table is not None and table.layout is not None:
        features = table.layout.dim == 1 and op.call.get("max_norm") is None and (ids is None or ids.layout is None)
        return table.layout.at(output.dim() - 1) if features else Mixes("its table holds samples")
    return ids.layout if ids is not None and ids.layout is not None else Mixes("its ids hold no samples")


def loss(op: Op, output: Tensor) -> Answer:
    """Follow a loss per element or row; a reduced loss is a linear sum over samples."""
    places = set()
    for operand, layout in op.batched:
        place = operand.place(_compared(op, operand))
        if place is None:
            return Mixes("it works along the sample dimension")
        places.add((place, layout.at(0)))
    if len(places) > 1:
        return Mixes("its operands hold the samples in different places")
    if op.call.get("reduction", "mean") not in ("none", 0):
        return Mixes("it sums or averages over the samples", linear=True)
    if op.call.op in OVER_LAST:
        return over_dims(op, output)
    return by_shape(op, output) if op.call.op in _OF_CLASSES else elementwise(op, output)


def weighs_labels(op: Op) -> bool:
    """Decide whether a mean divides by a number made from labels: class weights, or a count of tokens not ignored."""
    if not averages_labels(op.call) or not _of_numbers(op):
        return False
    return counts_tokens(op) or op.call.get("weight") is not None or "ignore_index" in op.call.given


def counts_tokens(op: Op) -> bool:
    """Decide whether a loss has several labels for each sample."""
    target = op.operand("target")
    return target is not None and (target.fake.dim() > 1 or (target.layout is not None and target.layout.merged))


def _of_numbers(op: Op) -> bool:
    target = op.operand("target")
    return target is not None and not target.fake.is_floating_point()


def averages_labels(call: Call) -> bool:
    """Decide whether a loss is a mean over labels, of which some may not count."""
    return call.op in _OF_CLASSES and call.get("reduction", "mean") in ("mean", 1)


_OF_CLASSES = frozenset({"cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})


def _compared(op: Op, operand: Operand) -> Sequence[int]:
    """Return the dims that a loss per row reduces: classes, features."""
    ndim = operand.fake.dim()
    if op.call.op in OVER_LAST:
        return worked_dims(op, operand)
    if op.call.op not in _OF_CLASSES:
        return ()
    if operand.name == "weight":
        return range(ndim)
    scores = operand.name == "input" or operand.fake.is_floating_point()  # a target may hold probabilities
    return [min(1, ndim - 1)] if scores and ndim else ()


def recurrent(op: Op, output: Tensor) -> Answer:
    """Follow a recurrent layer, with samples on dim 1 of x and on dim 0 of states and lengths."""
    for operand, layout in op.batched:
        if operand.name in ("w_ih", "b_ih", "w_hh", "b_hh", "w_hr"):
            return Mixes("its weights hold samples")
        if layout.dim != (1 if operand.name == "x" else 0):
            return Mixes("it runs along the sample dimension")
    merges = {layout.at(0) for _, layout in op.batched}
    return by_shape(op, output) if len(merges) == 1 else Mixes("its operands hold the samples in different orders")


def packed(op: Op, output: Tensor) -> Answer:
    """Follow an op on packed data: padded values have sequences on dim 1, packed ones rows on dim 0 by an index."""
    values = op.operand("x") or op.operand("data")
    layout = None if values is None else values.layout
    if op.call.op == "fxgrad::pack":
        lengths = op.operand("lengths")
        if layout is None or lengths is None or lengths.layout is None or output is not op.outputs[0]:
            return Mixes("the order of its samples depends on all of them")
        if layout.rows or layout.dim != 1 or lengths.layout != layout.at(0):
            return Mixes("its lengths are not those of its samples, one for each")
        return Layout(0, layout.outer, layout.inner, (f"{op.node.name}[1]", f"{op.node.name}[2]"))
    rows = (_source(op.call.get("batch_sizes")), _source(op.call.get("order")))
    if layout is None:
        return Mixes("what it packs holds no samples")
    if op.call.op == "fxgrad::packed_lengths":
        return Layout(0, layout.outer, layout.inner)
    if op.call.op == "fxgrad::repack":
        alike = layout.rows is None and layout.dim == 1
        return Layout(0, layout.outer, layout.inner, rows) if alike else Mixes("it packs what is not padded")
    if layout.rows != rows or layout.dim != 0:
        return Mixes("its rows are not in the order of its indices")
    return Layout(1, layout.outer, layout.inner)


def _source(node: Any) -> str:
    """Return one name for all reads of a value: ``pack[1]`` for one of several outputs."""
    if isinstance(node, fx.Node) and CALL.on(node) and CALL.of(node).op == "getitem":
        return f"{node.args[0]}[{node.args[1]}]"
    return str(node)


HANDLERS: dict[Family | None, Handler] = {
    Family.ELEMENTWISE: elementwise,
    Family.ALONG: along,
    Family.REDUCTION: along,
    Family.CONTRACTION: contraction,
    Family.NORMALISED: normalised,
    Family.PER_ROW: per_row,
    Family.PER_IMAGE: per_image,
    Family.LOOKUP: lookup,
    Family.ATTENTION: attention,
    Family.LOSS: loss,
    Family.RECURRENT: recurrent,
    Family.PACKED: packed,
    Family.PER_INDEX: per_index,
    Family.INDEX_PUT: index_put,
    Family.ALONE: by_shape,
    Family.OVER_DIMS: over_dims,
    Family.SOUGHT: sought,
}


def track(op: Op) -> list[Answer | None]:
    """Return the answer for each output of an op; None for an output that is no tensor."""
    if op.family is Family.MOVEMENT:
        return movement(op)
    outputs = op.outputs
    if op.family is Family.RECURRENT:  # an empty output is a placeholder that this kind of layer lacks
        outputs = [None if out.dim() == 1 else out for out in outputs]
    return [HANDLERS[op.family](op, out) if isinstance(out, Tensor) else None for out in outputs]


def movement(op: Op) -> list[Answer | None]:
    """Follow a movement op by its replay on sample ids, all outputs at once."""
    outputs, moved = op.outputs, op.operand("input")
    if op.call.op == "expand_as" and moved is not None and moved.layout is None:
        return [by_shape(op, outputs[0])]  # one copy per sample of the tensor whose shape it takes
    if op.call.op == "broadcast_tensors":
        return [elementwise(op, out) for out in outputs]  # all of one shape
    layouts = op.replay.layouts(op.node, outputs)
    if op.call.op == "cat" and layouts == [None]:  # batched rows next to a constant with one row per sample
        constants = [operand for operand in op.operands if kind_of(operand.node) is Kind.CONSTANT]
        lined_up = {operand.node: operand.layout for operand in constants if operand.layout is not None}
        layouts = op.replay.layouts(op.node, outputs, lined_up)
    return [
        (layout or _placed(op, out) or _lost(op)) if isinstance(out, Tensor) else None
        for out, layout in zip(outputs, layouts, strict=True)
    ]


def _lost(op: Op) -> Mixes:
    """Return the reason why a layout is unknown, with advice."""
    fakes = [FAKE.of(arg) for arg in op.node.all_input_nodes[1:]]
    if op.call.op in ("getitem", "index") and any(isinstance(f, Tensor) and f.dtype == torch.bool for f in fakes):
        return Mixes(
            "how many elements a mask selects, all samples decide together",
            advice="Write torch.where(mask, f(x), x), or a sum of x * mask. Elementwise functions of x[mask] may be "
            "written back, as in x[mask] *= 2.",
        )
    if op.call.op in _CUTTING:
        return Mixes(
            "it cuts the batch into pieces of several samples",
            advice="Work on the whole batch; or do the same to each piece, row by row, and put all pieces together in "
            "their order by torch.cat.",
        )
    if op.call.op in _PICKING and not any(isinstance(fake, Tensor) for fake in fakes):
        return Mixes(f"{op.call.op} {PICKS}", advice=PICK_ADVICE)
    return Mixes("it moves the samples to where they cannot be followed")


_PICKING = frozenset("getitem select narrow slice".split())
_CUTTING = frozenset("chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split hsplit vsplit".split())


def _placed(op: Op, output: Tensor) -> Layout | None:
    """Return the layout of a value without elements, read from its shape; None for other values."""
    empty = any(isinstance(size, int) and size == 0 for size in output.shape)
    answer = by_shape(op, output) if empty else None
    return answer if isinstance(answer, Layout) else None
