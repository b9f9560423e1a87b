"""Elementwise ops: an element depends on those at its place, by broadcasting."""

from __future__ import annotations

import torch
from torch import Tensor

from fxgrad.independence.calls import Call
from fxgrad.independence.origins import MANY, NONE, SUM, added, joined, multiplied, no_samples
from fxgrad.independence.rules.registry import follows, names_of


def pointwise(call: Call) -> Tensor | list[Tensor]:
    """Any function of the elements at one place."""
    found = call.ranked(joined(no_samples(0), *(call.of(tensor) for _, tensor in call.tensors())))
    return [found] * len(call.outputs)


@follows(*names_of("neg clone _to_copy alias detach lift_fresh lift_fresh_copy conj_physical"))
def same(call: Call) -> Tensor:
    """Linear in the one operand; casts that are not (to bool, to narrower integers) `applied` knows."""
    ((_, source),) = call.tensors()
    return call.of(source)


@follows("add", "sub", "rsub")
def add(call: Call) -> Tensor:
    return call.ranked(_sum(call, [tensor for _, tensor in call.tensors()]))


def _sum(call: Call, terms: list[Tensor]) -> Tensor:
    """A sum; what carries no gradient adds nothing to any sample's share of a sum over samples.

    So a sum over samples hides what else was added to it, whatever samples that is of. This is right where the sum is
    used linearly from there on, up to the loss: the gradient of the whole is then that of the sum. It is nowhere used
    in another way, as any function but a linear one (a mask, a square, a product with samples) makes MANY of SUM.
    """
    traced = [call.origins(term).traced for term in terms]
    parts = [call.of(term) for term in terms]
    if any(traced) and not all(traced):
        sums = added(*(part for part, flows in zip(parts, traced, strict=True) if flows))
        rest = joined(*(part for part, flows in zip(parts, traced, strict=True) if not flows))
        sums, rest = torch.broadcast_tensors(sums, rest)
        return torch.where(sums == SUM, SUM, added(sums, rest))
    return added(*parts)


@follows("mul")
def mul(call: Call) -> Tensor:
    parts = [call.of(tensor) for _, tensor in call.tensors()]
    return call.ranked(parts[0] if len(parts) == 1 else multiplied(*parts))


@follows("div")
def div(call: Call) -> Tensor:
    """Linear in the dividend, where it rounds nothing; a number of tokens may divide a sum (Note [Token counts])."""
    a = call.ids("self")
    if call.arguments.get("rounding_mode") is not None:
        return call.ranked(joined(*(call.of(tensor) for _, tensor in call.tensors())))
    if not call.has("other"):
        return a
    other = call.origins(call.arguments["other"])
    b = call.ids("other")
    a, b = torch.broadcast_tensors(a, b)
    by = torch.where(b == NONE, NONE, joined(a, b))
    found = torch.where(by == NONE, a, torch.where(a == NONE, joined(b), by))
    if other.counted and not other.traced and not call.clips:
        found = torch.where((a == SUM) & (b != NONE), SUM, found)
    return call.ranked(found)


# Note [Token counts]
# ~~~~~~~~~~~~~~~~~~~
# The mean of a loss over tokens divides a sum over samples by a number that all of them decide. It is made of labels
# and masks, so of integers and bools; grad_sample is then the gradient of a sample's share, as README defines it.
# Quantities that clip refuse it, and so does what follows here.


@follows("where")
def where(call: Call) -> Tensor:
    """Linear in what is chosen between, where no sample decides."""
    condition = call.ids("condition")
    chosen = added(*(call.of(tensor) for name, tensor in call.tensors() if name != "condition"))
    condition, chosen = torch.broadcast_tensors(condition, chosen)
    return call.ranked(torch.where(condition == NONE, chosen, joined(condition, chosen)))


@follows("masked_fill")
def masked_fill(call: Call) -> Tensor:
    mask, source = torch.broadcast_tensors(call.ids("mask"), call.ids("self"))
    value = call.ids("value") if call.has("value") else no_samples(0)
    chosen = added(source, value)
    return call.ranked(torch.where(mask == NONE, chosen, joined(mask, chosen)))


@follows("copy", "fill", unread=["self"])
def copy(call: Call) -> Tensor:
    """What is written over is gone."""
    name = "src" if "src" in call.arguments else "value"
    return call.ranked(call.ids(name)) if call.has(name) else no_samples(call.out_rank())


@follows(
    *names_of(
        "zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full "
        "new_empty new_empty_strided zero empty_permuted"
    ),
    unread=["self"],
)
def form_alone(call: Call) -> Tensor:
    """Shape, dtype and device are taken of the operand, and nothing else."""
    return no_samples(call.out_rank())


for _name in names_of(
    "native_dropout bernoulli _prelu_kernel gelu silu mish elu celu leaky_relu rrelu_with_noise hardtanh "
    "hardswish hardsigmoid log_sigmoid_forward softplus softshrink hardshrink threshold logit addcmul addcdiv "
    "lerp clamp clamp_min clamp_max nan_to_num floor_divide remainder maximum minimum fmod ldexp xlogy polar "
    "complex uniform normal normal_functional random exponential log_normal geometric poisson binomial frexp "
    "heaviside hypot atan2 nextafter gcd lcm special_zeta special_xlog1py _conj _neg_view _efficientzerotensor "
    "rrelu_with_noise_functional"
):
    follows(_name)(pointwise)

assert MANY < SUM < NONE
