"""Mixed values: ops that may follow where samples have met."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from fxgrad.ops.calls import CALL
from fxgrad.ops.facts import FAKE
from fxgrad.ops.families import MOVEMENT
from fxgrad.ops.values import upstream
from fxgrad.samples.layouts import SAMPLES, Kind, kind_of
from fxgrad.samples.operands import Crossed, Op, Operand
from fxgrad.samples.replay import Replay

# Note [Mixed values]
# ~~~~~~~~~~~~~~~~~~~
# A loss inside the model has summed its samples away. Its gradient by each sample's values is still
# that sample's own share as long as nothing but a linear map follows; a nonlinear function of a sum
# over samples lets one sample's data decide about another's gradient. So a mixed value may be summed,
# averaged, scaled by what carries no gradient, moved, and returned. Everything else is refused. A value
# with two sample dims, such as x @ x.T, holds products of one sample's values with another's: it may be
# returned and nothing else.
_LINEAR = frozenset("add sub sum mean nansum neg mul div clone to float double half bfloat16".split()) | MOVEMENT

COUNTING = frozenset("nonzero argwhere masked_select".split())
"""Ops whose result has as many elements as they find in the whole batch."""
BY_MASK = "Write torch.where(mask, f(x), x), or a sum of x * mask."
PICKS = "takes samples out of the batch by their places"
PICK_ADVICE = "Work on all samples at once, or use torch.vmap for a function of one sample."


def divided(tokens: bool = True) -> Crossed:
    """Return the refusal of a mean over the tokens of all samples, or over the weights of their classes."""
    number = "the number of tokens in the whole batch" if tokens else "what all labels of the batch weigh together"
    own = (
        "or a mean over each sample's own tokens: fxgrad.losses.token_mean(logits, labels)."
        if tokens
        else 'or the mean of what reduction="none" returns, with loss_reduction="mean" of fxgrad.transform.'
    )
    return Crossed(
        f"{number} divides every sample's loss, so that each sample's clipped gradient depends on the others",
        f'Take the sum (reduction="sum"), {own}',
        whole=True,
    )


def check_mixed(op: Op, clips: bool) -> None:
    """Refuse an op whose output carries a gradient through mixed values. See Note [Mixed values]."""
    traced = [operand for operand in op.operands if operand.samples.traced]
    if not traced:
        return
    if any(len(op.symbols.batch_dims(operand.fake.shape)) > 1 for operand in traced):
        raise Crossed("a value of pairs of samples may only be returned")
    meets_others = Kind.BATCHED in op.kinds or any(operand.samples.kind is not Kind.MIXED for operand in traced)
    divides = op.call.op == "div" and any(operand.name == "other" for operand in traced)
    if meets_others or divides or op.call.op not in _LINEAR or (op.call.op == "mul" and len(traced) > 1):
        _check_cut(op.operands)
        _check_picked(op)
        _check_sorted(op.operands)
        raise Crossed("a value that depends on several samples may only be summed, scaled and returned")
    _check_factors(op, clips)


def _check_cut(operands: Sequence[Operand]) -> None:
    """Name the line that cuts values to a length made of all samples, if one did: later ops are not at fault."""
    node = _first_cut(operands, ("getitem", "narrow", "slice"))
    if node is None:
        return
    if any(kind_of(arg) is Kind.MIXED and not isinstance(FAKE.of(arg), Tensor) for arg in node.all_input_nodes):
        raise Crossed(
            f"{CALL.of(node).op} cuts each sample to a length that all samples of the batch decide",
            "Cut the inputs before the call, or leave the padding in and mask it.",
            node,
        )


def _check_picked(op: Op) -> None:
    """Name the line that takes one sample out of the batch, and not the first op with the result."""
    node = _first_cut(op.operands, ("getitem", "select"))
    if node is not None and not op.symbols.batch_dims(FAKE.of(node).shape):
        raise Crossed(f"{CALL.of(node).op} {PICKS}", PICK_ADVICE, node)


def _check_sorted(operands: Sequence[Operand]) -> None:
    """Name the line that sorts samples by their lengths for `pack_padded_sequence`, and not the layer behind it."""
    node = _first_cut(operands, ("getitem", "index", "index_select"))
    if node is None or not any(kind_of(arg) is Kind.MIXED for arg in node.all_input_nodes[1:]):
        return
    made_of = upstream(*(operand.node for operand in operands))
    if any(CALL.on(one) and CALL.of(one).op == "fxgrad::pack" for one in made_of):
        raise Crossed(
            "it puts the samples into an order that all of them decide",
            "Leave them in their own order: pack_padded_sequence(.., enforce_sorted=False) sorts and unsorts them.",
            node,
        )


def _first_cut(operands: Sequence[Operand], ops: tuple[str, ...]) -> fx.Node | None:
    """Return the call of one of these ops in which a batched value became mixed."""
    mixed = [operand.node for operand in operands if operand.samples.kind is Kind.MIXED]
    for node in upstream(*mixed, through=_mixed_operands):
        call, source = CALL.get(node), node.args[0] if node.args else None
        if call is not None and call.op in ops and isinstance(source, fx.Node) and kind_of(source) is Kind.BATCHED:
            return node
    return None


def _mixed_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that are mixed, and calls with several outputs."""
    return [arg for arg in node.all_input_nodes if kind_of(arg) is Kind.MIXED or isinstance(SAMPLES.get(arg), list)]


def _check_factors(op: Op, clips: bool) -> None:
    """Refuse a factor of a sum over samples that holds their data, with or without a gradient; a count may divide."""
    factors = [one for one in op.operands if one.samples.kind is Kind.MIXED and not one.samples.traced]
    if op.call.op in ("add", "sub"):
        factors = [one for one in factors if one.name not in ("input", "other")]
    if not factors:
        return
    if op.call.op != "div" or not all(one.name == "other" and _is_count(one.node, op.replay) for one in factors):
        raise Crossed("one sample's data scale another's gradient, detached or not")
    if clips:
        raise divided()


def _is_count(number: fx.Node, replay: Replay) -> bool:
    """Decide whether a value is made only of integer and bool inputs of the model: a number of tokens, not their data.

    Values that are written over, or drawn, contain more than the operands of their nodes.
    """

    def holds_data(node: fx.Node) -> bool:
        if kind_of(node) in (None, Kind.CONSTANT):
            return False
        return bool(FAKE.of(node).dtype.is_floating_point) if node.op == "placeholder" else replay.changes(node)

    return not any(map(holds_data, upstream(number)))
