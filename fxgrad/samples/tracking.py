"""Layout rules: one handler per family of ops.

A handler gets one op with the layouts of its operands. It returns the layout of an output, or the reason why the op
mixes samples. It refuses in doubt and never guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sympy import simplify
from torch import Tensor, fx

from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.equation import Equation, Subscripts
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import Family
from fxgrad.ops.worked_dims import OVER_LAST
from fxgrad.samples.layouts import Kind, Layout
from fxgrad.samples.operands import Answer, Handler, Mixes, Op, Operand, by_shape, refuse_dims
from fxgrad.samples.over_dims import over_dims, worked_dims
from fxgrad.samples.places import index_put, per_index
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
    """Follow bucketize and searchsorted, elementwise in the values; the boundaries must be shared by all samples."""
    for operand in op.operands:
        if operand.name in ("boundaries", "sorted_sequence", "sorter") and (operand.layout or operand.fake.dim() != 1):
            return Mixes("its boundaries are not the same for all samples")
    return elementwise(op, output)


def along(op: Op, output: Tensor) -> Answer:
    """Follow softmax, cumsum, sort, sum, ..., which batch over all dims that they do not name."""
    linear = op.call.op in ("sum", "mean", "nansum")
    for operand, layout in op.batched:
        if "other" in op.call.arguments and op.call.op in ("max", "min"):
            return elementwise(op, output)
        dims = op.dims("dim", operand.fake.dim())
        if "dim" not in op.call.arguments and op.call.op in _DEFAULT_DIM:
            dims = [_DEFAULT_DIM[op.call.op] % operand.fake.dim()]
        if dims is None or layout.dim in dims:
            return Mixes("it works along the sample dimension", linear=linear)
    return by_shape(op, output)


_DEFAULT_DIM = {"msort": 0}


def movement(op: Op, output: Tensor) -> Answer:
    raise NotImplementedError("movement ops answer for all outputs at once: see movement_layouts")


def contraction(op: Op, output: Tensor) -> Answer:
    """Follow a matrix product; the contracted dim may not hold samples, and the batch dims broadcast as in matmul."""
    if op.call.op == "einsum":
        return _einsum(op, output)
    if op.call.op not in _CONTRACTED:
        return Mixes("nobody says which of its dims are contracted")
    summed = {layout.dim in _contracted_dims(op, operand) for operand, layout in op.batched}
    if True in summed:  # Σ_n a_n b_n, a contraction over the samples of all operands
        alike = len({layout.at(0) for _, layout in op.batched}) == 1
        return Mixes("it sums over the sample dimension", linear=summed == {True} and alike and op.call.op in _SUMS)
    answer = by_shape(op, output)
    if isinstance(answer, Mixes):
        return answer
    return _lined_up(op, output, answer)


def _contracted_dims(op: Op, operand: Operand) -> Sequence[int]:
    """Return the dims of an operand that a product contracts; a vector's only dim in any position."""
    ndim, dims = operand.fake.dim(), _CONTRACTED[op.call.op].get(operand.name, ())
    if op.call.op != "tensordot":
        return [max(dim, -ndim) % ndim for dim in dims]
    pair = op.call.get("dims")
    if isinstance(pair, int):
        return range(ndim - pair, ndim) if operand.name == "a" else range(pair)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return range(ndim)
    return [dim % ndim for dim in pair[operand.name == "b"]]


def _lined_up(op: Op, output: Tensor, answer: Layout) -> Answer:
    """Check that the operands' batch dims (all but the last two) align from the right."""
    vector = any(operand.fake.dim() == 1 for operand in op.operands)
    for operand, layout in op.batched:
        if layout.at(0) != answer.at(0):
            return Mixes("its operands hold the samples in different orders")
        place = layout.dim - operand.fake.dim()
        if op.call.op not in ("matmul", "rmatmul"):
            continue
        right = operand.name == ("other" if op.call.op == "matmul" else "input")
        moves = vector and not (right and place == -1)  # the result lacks one of the last two dims
        if place + moves != answer.dim - output.dim():
            return Mixes("its operands hold the samples in different places")
    return answer


_SUMS = frozenset("matmul rmatmul mm bmm mv dot vdot inner".split())  # contractions of one dim of both operands

_CONTRACTED: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"input": (-1,), "weight": (-1,)},
    "matmul": {"input": (-1,), "other": (-2,)},
    "rmatmul": {"input": (-2,), "other": (-1,)},
    "mm": {"input": (1,), "mat2": (0,)},
    "bmm": {"input": (2,), "mat2": (1,)},
    "addmm": {"mat1": (1,), "mat2": (0,)},
    "baddbmm": {"batch1": (2,), "batch2": (1,)},
    "mv": {"input": (1,), "vec": (0,)},
    "addmv": {"mat": (1,), "vec": (0,)},
    "dot": {"input": (0,), "tensor": (0,)},
    "vdot": {"input": (0,), "other": (0,)},
    "inner": {"input": (-1,), "other": (-1,)},
    "ger": {},
    "outer": {},
    "addr": {},
    "bilinear": {"input1": (-1,), "input2": (-1,)},
    "addbmm": {"batch1": (0, 2), "batch2": (0, 1)},
    "tensordot": {},
    "cdist": {"x1": (-1,), "x2": (-1,)},
}


def _einsum(op: Op, output: Tensor) -> Answer:
    equation = op.call.arguments["equation"]
    read = Equation.of(equation) if isinstance(equation, str) else None
    if read is None or read.output is None:
        return by_shape(op, output)
    held = set()
    for operand, layout, letters in _letters(op, read):
        names = letters.names(operand.fake.dim()) if layout.dim >= 0 else letters.letters
        if names[layout.dim] in letters.letters:  # no dimension behind dots
            held.add((names[layout.dim], layout.at(0)))
    if any(name not in read.output.letters for name, _ in held):  # Σ_n a_n b_n, where all that holds samples is summed
        return Mixes("it sums over the sample dimension", linear=len(held) == 1)
    return by_shape(op, output)


def _letters(op: Op, equation: Equation) -> Iterator[tuple[Operand, Layout, Subscripts]]:
    """Yield each batched operand of an einsum with its letters."""
    nodes = list(op.call.arguments["operands"])
    for operand, layout in op.batched:
        for node, letters in zip(nodes, equation.inputs, strict=True):
            if node is operand.node:
                yield operand, layout, letters


def normalised(op: Op, output: Tensor) -> Answer:
    shape = op.call.get("normalized_shape", ())
    shape = FAKE.of(shape) if isinstance(shape, fx.Node) else shape  # h.shape[1:]
    mixes = refuse_dims(
        op,
        lambda operand: range(operand.fake.dim() - len(shape), operand.fake.dim()),
        "it normalises over the sample dimension",
    )
    return mixes or by_shape(op, output)


def per_row(op: Op, output: Tensor) -> Answer:
    name = op.call.op
    if name == "batch_norm" and op.call.get("training") is True:
        return Mixes("batch_norm in training mode lets samples influence each other")
    rank = 2 + _spatial(name) if _spatial(name) else None
    layout_of_one_image = _as_channels(op) if name == "instance_norm" else _as_groups(op) if rank is not None else None
    if layout_of_one_image is not None:
        return layout_of_one_image
    for operand, layout in op.batched:
        unbatched = rank is not None and operand.fake.dim() != rank
        if operand.name == "weight" and name.startswith("conv"):
            return _kernels(op, output, layout)
        if name.startswith("grid_sample") and layout.dim != 0:
            return _grid(op, operand, layout)
        if operand.name == "weight":
            return Mixes("its weight holds samples")
        if layout.dim != 0 or unbatched:
            return Mixes("it gets its samples on another dimension than 0")
        if name == "embedding_bag" and operand.fake.dim() == 1:
            return Mixes("its bags are given by offsets, so a row is not a sample")
    layouts = {layout for _, layout in op.batched}
    return layouts.pop() if len(layouts) == 1 else by_shape(op, output)


def _as_channels(op: Op) -> Layout | None:
    """Return the layout of ``instance_norm(h.unsqueeze(0))`` without weights, samples as channels; otherwise None."""
    (operand, layout), *others = op.batched
    alone = not others and len(op.operands) == 1 and op.call.get("use_input_stats", True) is True
    return layout if alone and operand.name == "input" and layout.dim == 1 else None


def _as_groups(op: Op) -> Layout | None:
    """Return the layout of ``conv2d(x.view(1, B * C, ..), w, groups=B)``, one group per sample; otherwise None."""
    batched = {operand.name: (operand, layout) for operand, layout in op.batched}
    groups = op.call.get("groups", 1)
    size = expression(FAKE.of(groups) if isinstance(groups, fx.Node) else groups) / op.symbols.symbol
    if "transpose" in op.call.op or not simplify(size).is_Integer or len(batched) < len(op.operands):
        return None
    places = {name: (layout.dim, layout.outer) for name, (_, layout) in batched.items()}
    expected = {"input": (1, 1), "weight": (0, 1), "bias": (0, 1)}
    whole = batched["input"][0].fake.dim() == 2 + _spatial(op.call.op) if "input" in batched else False
    if not whole or "weight" not in batched or any(expected[name] != place for name, place in places.items()):
        return None
    return batched["weight"][1].at(1)


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


def per_image(op: Op, output: Tensor) -> Answer:
    spatial = next((int(c) for c in op.call.op if c.isdigit()), 2)
    mixes = refuse_dims(
        op,
        lambda operand: range(operand.fake.dim() - spatial, operand.fake.dim()),
        "it works across the sample dimension",
    )
    return mixes or by_shape(op, output)


def lookup(op: Op, output: Tensor) -> Answer:
    table, ids = op.operand("weight"), op.operand("input")
    if table is not None and table.layout is not None:
        features = table.layout.dim == 1 and op.call.get("max_norm") is None and (ids is None or ids.layout is None)
        return table.layout.at(output.dim() - 1) if features else Mixes("its table holds samples")
    return ids.layout if ids is not None and ids.layout is not None else Mixes("its ids hold no samples")


def attention(op: Op, output: Tensor) -> Answer:
    mixes = refuse_dims(
        op,
        lambda operand: range(max(operand.fake.dim() - 2, 0), operand.fake.dim()),
        "it attends over the sample dimension",
    )
    return mixes or elementwise_dims(op, output)


def elementwise_dims(op: Op, output: Tensor) -> Answer:
    """Follow batch dims that align from the right, as in scaled_dot_product_attention."""
    return elementwise(op, output)


def loss(op: Op, output: Tensor) -> Answer:
    """Follow a loss per element or row; a reduced loss is a linear sum over samples."""
    places = set()
    for operand, layout in op.batched:
        others = [dim for dim in range(operand.fake.dim()) if dim not in _compared(op, operand)]
        if layout.dim not in others:
            return Mixes("it works along the sample dimension")
        places.add((others.index(layout.dim) - len(others), layout.at(0)))
    if len(places) > 1:
        return Mixes("its operands hold the samples in different places")
    if op.call.get("reduction", "mean") not in ("none", 0):
        return Mixes("it sums or averages over the samples", linear=True)
    if op.call.op in OVER_LAST:
        return over_dims(op, output)
    return by_shape(op, output) if op.call.op in _OF_CLASSES else elementwise(op, output)


def counts_tokens(call: Call, operands: Sequence[Operand]) -> bool:
    """Decide whether a mean divides by a number made from labels: class weights, or a count of tokens not ignored."""
    if call.op not in _OF_CLASSES or call.get("reduction", "mean") not in ("mean", 1):
        return False
    target = next((operand for operand in operands if operand.name == "target"), None)
    if target is None or target.fake.is_floating_point():
        return False
    tokens = target.fake.dim() > 1 or (target.layout is not None and target.layout.merged)
    return tokens or call.get("weight") is not None or "ignore_index" in call.given


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
    merges = set()
    for operand, layout in op.batched:
        if operand.name in ("w_ih", "b_ih", "w_hh", "b_hh", "w_hr"):
            return Mixes("its weights hold samples")
        if layout.dim != (1 if operand.name == "x" else 0):
            return Mixes("it runs along the sample dimension")
        merges.add(layout.at(0))
    return by_shape(op, output) if len(merges) == 1 else Mixes("its operands hold the samples in different orders")


def packed(op: Op, output: Tensor) -> Answer:
    """Follow an op on packed data: padded values have sequences on dim 1, packed ones rows on dim 0 by an index."""
    values = op.operand("x") or op.operand("data")
    layout = None if values is None else values.layout
    if op.call.op == "fxgrad::pack":
        lengths = op.operand("lengths")
        if layout is None or lengths is None or lengths.layout is None or output is not op.output[0]:
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


HANDLERS: dict[Family, Handler] = {
    Family.ELEMENTWISE: elementwise,
    Family.MOVEMENT: movement,
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


def track(op: Op, family: Family) -> list[Answer | None]:
    """Return the answer for each output of an op; None for an output that is no tensor."""
    outputs = list(op.output) if isinstance(op.output, tuple | list) else [op.output]
    if family is Family.MOVEMENT:
        return _movement_layouts(op, outputs)
    handler = HANDLERS[family]
    if family is Family.RECURRENT:  # an empty output is a placeholder that this kind of layer lacks
        outputs = [None if out.dim() == 1 else out for out in outputs]
    return [handler(op, out) if isinstance(out, torch.Tensor) else None for out in outputs]


def _movement_layouts(op: Op, outputs: list[Any]) -> list[Answer | None]:
    moved = op.operand("input")
    if op.call.op == "expand_as" and moved is not None and moved.layout is None:
        return [by_shape(op, outputs[0])]  # one copy per sample of the tensor whose shape it takes
    if op.call.op == "broadcast_tensors":
        return [elementwise(op, out) for out in outputs]  # all of one shape
    replayed = op.replay.layouts(op.node, op.output)
    if replayed is None and op.call.op == "cat":  # batched rows next to a constant with one row per sample
        constants = [operand for operand in op.operands if op.replay.samples(operand.node).kind is Kind.CONSTANT]
        lined_up = {operand.node: operand.layout for operand in constants if operand.layout is not None}
        replayed = op.replay.layouts(op.node, op.output, lined_up)
    layouts = replayed if isinstance(op.output, tuple | list) else [replayed]
    lost = _lost(op)
    return [
        None if not isinstance(out, torch.Tensor) else _placed(op, out) or lost if layout is None else layout
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


PICKS = "takes samples out of the batch by their places"
PICK_ADVICE = "Work on all samples at once, or use torch.vmap for a function of one sample."
_PICKING = frozenset("getitem select narrow slice".split())
_CUTTING = frozenset("chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split hsplit vsplit".split())


def _placed(op: Op, output: Tensor) -> Layout | None:
    """Return the layout of a value without elements, read from its shape; None for other values."""
    empty = any(isinstance(size, int) and size == 0 for size in output.shape)
    answer = by_shape(op, output) if empty else None
    return answer if isinstance(answer, Layout) else None
