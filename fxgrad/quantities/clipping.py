"""The sum of the samples' gradients, each scaled by a function of its own norm: DP-SGD's step in one backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fxgrad.errors import NonFinite, OptionError
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.operators.memory import stored
from fxgrad.operators.norms import is_wide, root_sum_squares
from fxgrad.precision import accumulating, at_most
from fxgrad.quantities.base import GRAD, OUTSIDE, RESULT, Delivery, Outside, Quantity, first

Weights = Literal["clip", "automatic"] | Callable[[Tensor], Tensor]
Groups = Literal["flat", "per_parameter"] | Sequence[Sequence[str]]
EPSILON = 1e-6  # in min(1, C / (n + ε)), as DP-SGD's implementations have it


class Clipping(NamedTuple):
    """What `fxgrad.result` gives for `ClippedGrad`."""

    norm_sample: Tensor  # [B], or [groups, B] where there are several groups
    weight: Tensor  # of the same shape: what each sample's gradient was multiplied by
    nonfinite: Tensor  # the number of samples whose gradient or weight was Inf or NaN


@dataclass(frozen=True)
class ClippedGrad(Quantity):
    """``p.grad += Σ_i c_i g_i`` with ``c_i = min(1, C / (n_i + 1e-6))``, in one backward (Abadi et al. 2016).

    n_i is the norm of sample i's gradient over all parameters. The norms, the weights and the number of samples
    whose gradient or weight was Inf or NaN, which weigh 0, are `fxgrad.result(model, quantity)`, a `Clipping`. In
    floating point c_i is taken from an upper bound of n_i, so that ``‖c_i g_i‖ <= C (1 + 1e-5)`` for g_i in exact
    arithmetic, whatever cancels, and what the sample adds to p.grad is no longer, up to the rounding of p.grad itself.
    Assumed is that activations, a norm layer's normalised input and the gradients between ops are as the model computed
    them in its own dtype (where one decides the next, as in ``sin(1e18 * w)``, float64 may give another gradient
    altogether); that float64 loses nothing in ops without a rule and on the way through functions of parameters, such
    as ``2 * w`` (of numbers of 1e17 it loses ones); and that ops that are not PyTorch's own, and bodies of control flow
    that name a dtype, lose nothing inside.

    Args:
        max_grad_norm: C, or one number for each group, in their order; of "per_parameter" that of
            ``named_parameters()``, of which those count that are trainable and used. With "clip"
            inf clips nothing; other weights refuse it.
        groups: "flat": one norm over all parameters; "per_parameter": each by itself; or lists of names, which
            name every trainable parameter once.
        weights: "clip"; "automatic": ``C / (n + gamma)`` (Bu et al. 2022); or a function of the norms ``[B]`` that
            returns the weights ``[B]``, made of PyTorch ops. It gets upper bounds of the norms, and fxgrad bounds
            nothing: a weight may be negative. A weight of Inf or NaN counts as 0, and its sample as nonfinite.
        gamma: the stabiliser of "automatic", positive and finite.
        sample_weight: whether calls of the model take ``sample_weight=``, a tensor ``[B]`` that multiplies the
            weights: 0 for padding, which then counts for nothing, also where it holds NaN.
        nonfinite: "zero", or "raise": then a gradient or a weight of Inf or NaN is an error, and p.grad stays as it is.
        outside: what happens when a gradient arrives at a parameter that did not come through the transformed call.
            "error": `fxgrad.errors.UnclippedGrad` in the backward, with every p.grad as it was before. "allow": it is
            added where it depends on parameters alone, as a penalty's does (numbers and the weights of losses count
            as constants); the autograd graph behind it is walked in each backward. "unchecked": it is added.

    Raises:
        OptionError: at once, where an argument has a value that it cannot take; in the first backward, where
            weights= returns another shape than that of the norms.

    >>> import torch, fxgrad
    >>> clipped = fxgrad.ClippedGrad(max_grad_norm=1.0)
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2, bias=False), quantity=clipped, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> round(float(model.weight.grad.norm()), 3)  # five equal gradients of norm 1
    5.0
    """

    max_grad_norm: float | Sequence[float]
    groups: Groups = "flat"
    weights: Weights = "clip"
    gamma: float = 0.01
    sample_weight: bool = False
    nonfinite: Literal["zero", "raise"] = "zero"
    outside: Outside = "error"

    guards_grad: ClassVar[bool] = True
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        given = self.max_grad_norm
        bounds = list(given) if isinstance(given, Sequence) else [given]
        if not bounds or not all(is_positive(c) for c in bounds):
            raise OptionError(f"max_grad_norm has to be positive, not {given!r}")
        if isinstance(self.groups, str) and self.groups not in ("flat", "per_parameter"):
            raise OptionError(f"groups has to be 'flat', 'per_parameter' or lists of names, not {self.groups!r}")
        if not callable(self.weights) and self.weights not in ("clip", "automatic"):
            raise OptionError(f"weights has to be 'clip', 'automatic' or a function, not {self.weights!r}")
        if self.outside not in OUTSIDE:
            raise OptionError(f"outside has to be 'error', 'allow' or 'unchecked', not {self.outside!r}")
        if self.weights != "clip" and math.inf in bounds:
            raise OptionError(
                f"max_grad_norm=inf needs weights='clip', not {self.weights!r}: its weights would be Inf or NaN",
                advice="Pass a finite max_grad_norm; the sum of all gradients, not clipped, is fxgrad.Grad().",
            )
        if not is_positive(self.gamma) or self.gamma == math.inf:
            raise OptionError(
                f"gamma has to be a positive number, and finite, not {self.gamma!r}",
                advice="It keeps C / (n + gamma) below C / n; Bu et al. use 0.01.",
            )
        if self.nonfinite not in ("zero", "raise"):
            raise OptionError(f"nonfinite has to be 'zero' or 'raise', not {self.nonfinite!r}")

    def check(self, options: Any) -> None:
        if options.mixing != "error":
            raise OptionError(
                "ClippedGrad refuses mixing='allow': a sample's clipped part would not bound its influence",
                advice="Use layers that treat samples alone, such as GroupNorm.",
            )
        if not options.named and self.groups == "per_parameter" and isinstance(self.max_grad_norm, Sequence):
            raise OptionError(
                "torch.compile does not say in which order the model has its parameters, which max_grad_norm= follows",
                advice="Pass one number as max_grad_norm, or use fxgrad.transform.",
            )

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        one = first(parameters)
        groups = self._groups(list(parameters))
        shape = (n,) if len(groups) == 1 else (len(groups), n)
        grads = [Delivery(GRAD, name, tuple(p.shape), p.dtype, p.device) for name, p in parameters.items()]
        reports = [Delivery(RESULT, None, shape, accumulating(one.dtype), one.device)] * 2
        return [*grads, *reports, Delivery(RESULT, None, (), torch.float32, one.device)]

    def inputs(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        one = first(parameters)
        weight = Delivery("sample_weight", None, (n,), accumulating(one.dtype), one.device)
        return [weight] if self.sample_weight else []

    def values(self, forward: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        if not self.sample_weight:
            return []
        one = first(parameters)
        dtype = accumulating(one.dtype)
        if forward.sample_weight is None:
            return [one.detach().new_ones(self.units(forward.size), dtype=dtype)]
        return [forward.sample_weight.detach().to(one.device, dtype)]

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Tensor]:
        names = [g.name for g in grads]
        groups = self._groups(names)
        dtype = grads[0].accumulating
        found = {g.name: g.norms() for g in grads}
        none = grads[0].like.new_zeros(n, dtype=torch.float64)  # of a group that is frozen
        wide = any(is_wide(g.dtype) for g in grads)
        norms = torch.stack([root_sum_squares([found[name][0] for name in group] or [none], wide) for group in groups])
        most = torch.stack([root_sum_squares([found[name][1] for name in group] or [none], wide) for group in groups])
        finite = (norms < math.inf).all(0) if len(groups) > 1 else norms[0] < math.inf  # neither of NaN
        pairs = zip(most, self._bounds(groups), strict=True)
        weight = torch.stack([at_most(self._weight(bound, c), dtype) for bound, c in pairs])
        if given:
            weight = weight * given[0]
        finite = finite & weight.isfinite().all(0)
        if given:
            weight, finite = torch.where(given[0] == 0, 0, weight), finite | (given[0] == 0)
        weight = torch.where(finite, weight, 0)
        weight = stored(weight)
        of = {name: i for i, group in enumerate(groups) for name in group}
        rows = weight.unbind(0)  # one tensor for all of a group: what they share is summed once
        summed = [g.weighted(rows[of[g.name]]) for g in grads]
        shape = (n,) if len(groups) == 1 else (len(groups), n)
        return [*summed, norms.to(dtype).reshape(shape), weight.reshape(shape), (~finite).sum(dtype=torch.float32)]

    def arrived(self, results: Sequence[Tensor | None]) -> None:
        """Raise before anything is stored, where that is asked for."""
        count = results[2]
        if self.nonfinite == "raise" and count is not None and int(count):
            raise NonFinite(
                f"the gradients or the weights of {int(count)} samples hold Inf or NaN",
                advice='Find them by their norms, or pass nonfinite="zero" to leave them out.',
            )

    def packed(self, results: Sequence[Tensor]) -> Clipping:
        """What `fxgrad.result` returns."""
        norms, weight, nonfinite = results
        return Clipping(norms, weight, nonfinite.long())

    def _weight(self, norms: Tensor, c: float) -> Tensor:
        if callable(self.weights):
            weight = self.weights(norms)
            if not isinstance(weight, Tensor) or weight.shape != norms.shape:
                shape = f"the shape {list(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
                raise OptionError(
                    f"weights= returned {shape} for the norms of {len(norms)} samples",
                    advice="Return a tensor of the norms' shape, such as torch.full_like(norms, 0.5).",
                )
            return weight.to(norms.dtype)
        if self.weights == "automatic":
            return c / (norms + self.gamma)
        return (c / (norms + EPSILON)).clamp(max=1)

    def _groups(self, names: Sequence[str]) -> list[list[str]]:
        if self.groups == "flat":
            return [list(names)]
        if self.groups == "per_parameter":
            return [[name] for name in names]
        groups = [[name for name in group if name in names] for group in self.groups]
        given = [name for group in groups for name in group]
        if sorted(given) != sorted(names):
            wrong = sorted(set(names) ^ set(given)) or sorted({name for name in given if given.count(name) > 1})
            raise OptionError(
                f"groups= has to name every trainable parameter once: {', '.join(wrong)}",
                advice="Put each into one group, or freeze it.",
            )
        return groups

    def _bounds(self, groups: Sequence[Sequence[str]]) -> list[float]:
        given = self.max_grad_norm
        bounds = list(given) if isinstance(given, Sequence) else [given] * len(groups)
        if len(bounds) != len(groups):
            raise OptionError(
                f"max_grad_norm has {len(bounds)} numbers for {len(groups)} groups",
                advice="Give one for each group; parameters that are frozen or that the model does not use are none.",
            )
        return bounds

    def __str__(self) -> str:
        return f"ClippedGrad({self.max_grad_norm})"


def is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0
