"""Rules of elementwise ops: an element depends on the operands' elements at its position, by broadcasting."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.proof.calls import Call
from fxgrad.proof.origins import MANY, NONE, SUM, added, joined, multiplied, no_samples
from fxgrad.proof.rules.registry import follows


@follows(
    """native_dropout bernoulli _prelu_kernel gelu silu mish elu celu leaky_relu rrelu_with_noise hardtanh hardswish
    hardsigmoid log_sigmoid_forward softplus softshrink hardshrink threshold logit addcmul addcdiv lerp clamp clamp_min
    clamp_max nan_to_num floor_divide remainder maximum minimum fmod ldexp xlogy polar complex uniform normal
    normal_functional random exponential log_normal geometric poisson binomial frexp heaviside hypot atan2 nextafter gcd
    lcm special_zeta special_xlog1py _conj _neg_view _efficientzerotensor rrelu_with_noise_functional"""
)
def pointwise(call: Call) -> Tensor | list[Tensor]:
    """Follow an arbitrary function of the elements at one position."""
    ids = call.ranked(joined(no_samples(0), *call.all_ids()))
    return [ids] * len(call.outputs)


@follows("neg clone _to_copy alias detach lift_fresh lift_fresh_copy conj_physical")
def same(call: Call) -> Tensor:
    """Keep the ids of the one operand; `applied` treats casts that are not linear (to bool, to narrower integers)."""
    ((_, source),) = call.tensors
    return call.of(source)


@follows("add sub rsub")
def add(call: Call) -> Tensor:
    return call.ranked(_sum(call, [tensor for _, tensor in call.tensors]))


def _sum(call: Call, terms: list[Tensor]) -> Tensor:
    """Return the ids of a sum; a term without gradient adds nothing to a sample's share of a sum over samples.

    A sum over samples stays SUM after such a term is added, whatever samples the term depends on. This holds if all
    later ops up to the loss are linear in the sum: the gradient of the total is then that of the sum. Any other use
    (a mask, a square, a product with samples) turns SUM into MANY.
    """
    traced = [call.facts.of(term).traced for term in terms]
    parts = [call.of(term) for term in terms]
    if any(traced) and not all(traced):
        sums = added(*(part for part, flows in zip(parts, traced, strict=True) if flows))
        rest = joined(*(part for part, flows in zip(parts, traced, strict=True) if not flows))
        sums, rest = torch.broadcast_tensors(sums, rest)
        return torch.where(sums == SUM, SUM, added(sums, rest))
    return added(*parts)


@follows("mul")
def mul(call: Call) -> Tensor:
    parts = call.all_ids()
    return call.ranked(parts[0] if len(parts) == 1 else multiplied(*parts))


@follows("div")
def div(call: Call) -> Tensor:
    """Divide: linear in the dividend without rounding; a token count may divide a sum (Note [Token counts])."""
    a = call.ids("self")
    if call.arguments.get("rounding_mode") is not None:
        return call.ranked(joined(*call.all_ids()))
    if not call.has("other"):
        return a
    other = call.facts.of(call.arguments["other"])
    b = call.ids("other")
    a, b = torch.broadcast_tensors(a, b)
    by = torch.where(b == NONE, NONE, joined(a, b))
    quotient = torch.where(by == NONE, a, torch.where(a == NONE, joined(b), by))
    if other.counted and not other.traced and not call.facts.clips:
        quotient = torch.where((a == SUM) & (b != NONE), SUM, quotient)
    return call.ranked(quotient)


# Note [Token counts]
# ~~~~~~~~~~~~~~~~~~~
# The mean of a loss over tokens divides a sum over samples by a token count that depends on all samples. The count is
# made of labels and masks, which are integers and bools. grad_sample is then the gradient of a sample's share, as
# docs/quantities.md defines it. Quantities that clip or speak of one sample refuse such a mean, and so do these rules.


@follows("where masked_fill")
def where(call: Call) -> Tensor:
    """Select elementwise: linear in the values if the condition depends on no sample."""
    decides = "condition" if call.name == "where" else "mask"
    chosen = added(*(call.of(tensor) for name, tensor in call.tensors if name != decides))
    condition, chosen = torch.broadcast_tensors(call.ids(decides), chosen)
    return call.ranked(torch.where(condition == NONE, chosen, joined(condition, chosen)))


@follows("copy fill", unread="self")
def copy(call: Call) -> Tensor:
    """Overwrite the first operand, whose ids are lost."""
    name = "src" if "src" in call.arguments else "value"
    return call.ranked(call.ids(name)) if call.has(name) else no_samples(call.out_rank())


@follows(
    """zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full
    new_empty new_empty_strided zero empty_permuted""",
    unread="self",
)
def form_alone(call: Call) -> Tensor:
    """Return the ids of a new tensor that takes only shape, dtype and device from its operand."""
    return no_samples(call.out_rank())


assert MANY < SUM < NONE
