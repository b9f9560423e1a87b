"""Prove that no sample is where infer_samples did not put it."""

from __future__ import annotations

import torch
from torch import fx

from fxgrad.errors import FxgradError, MixedSamples, UnknownOp
from fxgrad.graph.context import Context, path_to, source_line
from fxgrad.host.dispatch import enable_python_dispatcher
from fxgrad.host.fake import FunctionalTensorMode
from fxgrad.ops.calls import CALL
from fxgrad.ops.families import believed
from fxgrad.proof.calls import Reason
from fxgrad.proof.following import MEET, Follow, watched
from fxgrad.proof.sharing import Written
from fxgrad.proof.trials import trials_of
from fxgrad.proof.values import Met
from fxgrad.proof.walking import Walk
from fxgrad.samples.tracking import averages_labels


def prove_independence(gm: fx.GraphModule, ctx: Context) -> fx.GraphModule:
    """Before: taps are attached. After: the graph, unaltered, or an error naming the line.

    The graph is run once more, functionalized: ATen ops that write nothing, on fake tensors, each with ids of the
    samples that its elements depend on. What infer_samples found is not looked at until a tap, or an output, says where
    it takes the samples to be.
    """
    if ctx.single or not ctx.sample_dims:
        return gm
    ops = {CALL.of(node).op for node in gm.graph.nodes if CALL.on(node)}
    ctx.notes += [f"your word for it: {op} treats samples alone" for op in sorted(filter(believed, ops))]
    try:
        try:
            _walk(gm, ctx, share=True)
        except Written:
            _walk(gm, ctx, share=False)
    except Met as met:
        refusal = _refusal(met, ctx)
        if ctx.mixing != "allow":
            raise refusal from None
        ctx.notes.append(f"{refusal.sentence} ({refusal.where})")
    return gm


def _walk(gm: fx.GraphModule, ctx: Context, *, share: bool) -> None:
    follow = Follow(trials_of(ctx.symbols), clips=ctx.alone)
    walk = Walk(gm, ctx, follow, share=share)
    mode = FunctionalTensorMode(_allow_token_discovery=True)  # checks of linear algebra have an order
    with torch.enable_grad(), watched(ctx.symbols.mode, follow), enable_python_dispatcher(), mode:
        walk.run(*walk.inputs())


def _refusal(met: Met, ctx: Context) -> FxgradError:
    node, reason, call = met.node, met.blame.reason, CALL.get(met.node)
    sentence = call.op + MEET if reason is Reason.MEET and call is not None else met.blame.sentence
    advice = _ADVICE.get(reason, ctx.keep_apart)
    if reason is Reason.MEET and call is not None and averages_labels(call):
        sentence += ": its mean is divided by the number of labels in the batch that are not ignore_index"
        advice = _MEAN_OF_LABELS
    error = UnknownOp if reason is Reason.NO_RULE else MixedSamples
    return error(sentence, where=source_line(node), path=path_to(node, ctx), advice=advice)


_MEAN_OF_LABELS = (
    'Take the mean of what reduction="none" returns, which divides by the number of all labels, and pass '
    'loss_reduction="mean" to fxgrad.transform. fxgrad.losses.token_mean is the mean over each sample\'s tokens.'
)
_ADVICE = {
    Reason.NO_RULE: "If it treats each sample alone, put it in a function that torch.library.custom_op makes, and "
    "say so with fxgrad.extend.register_op.",
    Reason.LONGEST: "Pass total_length= to pad_packed_sequence; or put zeros (for a sum) or minus infinity (for "
    "a softmax or a maximum) behind the ends: out.masked_fill(torch.arange(out.shape[1]) >= lengths[:, None], ..).",
}
