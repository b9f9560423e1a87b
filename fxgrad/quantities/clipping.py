"""`ClippedGrad`: the sum of the samples' gradients, each scaled by a function of its norm, as in DP-SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxgrad.errors import NonFinite, OptionError, names_checked, nearest, refuse_choice
from fxgrad.gradients.sample_grads import SampleGrads
from fxgrad.host.autograd import are_saved_tensors_hooked
from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.tensors import version
from fxgrad.kernels.memory import stored
from fxgrad.kernels.norms import is_wide, root_sum_squares
from fxgrad.kernels.precision import accumulating, at_most
from fxgrad.quantities.base import GRAD, OUTSIDE, Delivery, Outside, Quantity, first, like_parameters, of_model

Weights = Literal["clip", "automatic"] | Callable[[Tensor], Tensor]
Groups = Literal["flat", "per_parameter"] | Sequence[Sequence[str]]
GROUPS, WEIGHTS, NONFINITE = ("flat", "per_parameter"), ("clip", "automatic"), ("zero", "raise")
EPSILON = 1e-6  # in min(1, C / (n + ε)), as in implementations of DP-SGD


class Clipping(NamedTuple):
    """The result of `ClippedGrad`, as returned by `fxgrad.result`.

    Attributes:
        norm_sample: the norm of each sample's gradient, ``[B]``, or ``[groups, B]`` for several groups.
        weight: the factor of each sample's gradient, of the same shape.
        nonfinite: the number of samples whose gradient or weight was Inf or NaN, a 0-dim tensor.

    >>> import torch, fxgrad
    >>> clipped = fxgrad.ClippedGrad(max_grad_norm=1.0)
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2, bias=False), quantity=clipped, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> clipping = fxgrad.result(model, clipped)
    >>> tuple(clipping.weight.shape), int(clipping.nonfinite)
    ((5,), 0)
    """

    norm_sample: Tensor  # [B], or [groups, B] for several groups
    weight: Tensor  # of the same shape: the factor of each sample's gradient
    nonfinite: Tensor  # the number of samples whose gradient or weight was Inf or NaN


# Note [C as an input]
# C is an input of the compiled graph, of one number for each group in float64. So a schedule of C compiles nothing, and
# a process that trains with another C finds the graph in the cache. The backward reads the input where all of the
# quantity is computed, never in the forward (see Note [What stays in the backward]). A tensor as max_grad_norm is
# copied into the input as the backward begins. The copy goes past autograd's count of versions, which would refuse the
# write to a saved tensor.


@names_checked
@dataclass(frozen=True, eq=False, repr=False)
class ClippedGrad(Quantity):
    """The sum of the samples' gradients, each scaled to a norm of at most C: DP-SGD's step in one backward.

    Delivers:
        ``p.grad += Σ_i c_i g_i`` with ``c_i = min(1, C / (n_i + 1e-6))``, where n_i is the norm of sample i's gradient
        over all parameters. ``fxgrad.result(model, quantity)`` is a `Clipping`.

    Args:
        max_grad_norm: C, or one number for each group, in their order. The order of "per_parameter" is that of
            ``named_parameters()``; only parameters that are used and trainable in the call count. With weights="clip",
            inf clips nothing; other weights refuse it. For a schedule, pass a tensor, 0-dim or ``[groups]``, and write
            to it: each backward reads it, without a compilation and without waiting for a device. Where the tensor is
            NaN, 0 or less, every sample counts as nonfinite.
        groups: "flat": one norm over all parameters; "per_parameter": one norm for each; or lists of names, which
            name every trainable parameter once.
        weights: "clip"; "automatic": ``C / (n + gamma)`` (Bu et al. 2022); or a function of the norms ``[B]`` that
            returns the weights ``[B]``, made of PyTorch ops. It gets upper bounds of the norms, and fxgrad does not
            bound its weights: they may be negative. A weight of Inf or NaN counts as 0, and its sample as nonfinite.
        bounded: whether a function's weights are limited to ``±C / (n + 1e-6)``, as differential privacy needs.
        gamma: the stabiliser of "automatic", positive and finite.
        sample_weight: whether calls of the model take ``sample_weight=``, a tensor ``[B]`` that multiplies the
            weights. A weight of 0 marks padding, which then contributes nothing, even if it has NaN.
        nonfinite: "zero": a sample with a gradient or weight of Inf or NaN weighs 0. "raise": it is an error, and
            p.grad stays unchanged.
        outside: the policy for a parameter's gradient that did not come through the transformed call.
            "error": `fxgrad.errors.UnclippedGrad` in the backward, with every p.grad as it was before. "allow": it is
            added if it depends only on parameters, as a penalty does (numbers and the weights of losses count as
            constants); fxgrad walks its autograd graph in each backward. "unchecked": it is added.
        group_size: how many consecutive rows of a batch are one sample.

    Guarantees:
        In floating point, fxgrad computes c_i from an upper bound of n_i. So ``‖c_i g_i‖ <= C (1 + 1e-5)`` for g_i in
        exact arithmetic, under any cancellation. The sample's addition to p.grad has the same bound, up to the
        rounding of p.grad itself. Three assumptions:

        - Activations, a norm layer's normalised input and the gradients between ops are those that the model computed
          in its dtype. If rounding in one changes the next, as in ``sin(1e18 * w)``, float64 may give an entirely
          different gradient.
        - float64 loses nothing in ops without a rule and on the way through functions of parameters, such as
          ``2 * w`` (of numbers of 1e17 it loses ones).
        - Ops from outside PyTorch, and bodies of control flow that name a dtype, lose nothing inside.

    Raises:
        OptionError: at once, if an argument has an invalid value; in the first backward, if weights= returns another
            shape than that of the norms.
        OptionError: in the backward, if a tensor as max_grad_norm changed after the forward, which ran under
            ``torch.autograd.graph.saved_tensors_hooks``.
        UnclippedGrad: in the backward, see ``outside``.
        NonFinite: in the backward, see ``nonfinite``.

    Source: Abadi et al. 2016, "Deep learning with differential privacy".

    >>> import torch, fxgrad
    >>> clipped = fxgrad.ClippedGrad(max_grad_norm=1.0)
    >>> model = fxgrad.transform(torch.nn.Linear(3, 2, bias=False), quantity=clipped, backend="eager")
    >>> model(torch.ones(5, 3)).sum().backward()
    >>> round(float(model.weight.grad.norm()), 3)  # five equal gradients of norm 1
    5.0
    """

    max_grad_norm: float | Sequence[float] | Tensor
    groups: Groups = "flat"
    weights: Weights = "clip"
    gamma: float = 0.01
    sample_weight: bool = False
    nonfinite: Literal["zero", "raise"] = "zero"
    outside: Outside = "error"
    bounded: bool = False

    guards_grad: ClassVar[bool] = True
    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("sample_weight", "bounded"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(
                    f"{name} has to be True or False, not {getattr(self, name)!r}",
                    advice="Pass weights to the calls of the model, not to ClippedGrad.",
                )
        if self.groups not in GROUPS and not _are_names(self.groups):
            refuse_choice("groups", self.groups, GROUPS, "lists of names", "A group of each layer is a list of names.")
        if not callable(self.weights) and self.weights not in WEIGHTS:
            refuse_choice("weights", self.weights, WEIGHTS, "a function", "A function gets norms and returns weights.")
        if self.outside not in OUTSIDE:
            refuse_choice("outside", self.outside, OUTSIDE)
        if not is_positive(self.gamma) or self.gamma == math.inf:
            raise OptionError(
                f"gamma has to be a positive number, and finite, not {self.gamma!r}",
                advice="It keeps C / (n + gamma) below C / n; Bu et al. use 0.01.",
            )
        if self.nonfinite not in NONFINITE:
            otherwise = "'zero' leaves such samples out; 'raise' is an error in the backward."
            refuse_choice("nonfinite", self.nonfinite, NONFINITE, otherwise=otherwise)

    def _check_numbers(self) -> None:
        bound = self.max_grad_norm
        bounds = list(bound) if isinstance(bound, Sequence) else [bound]
        if isinstance(bound, Tensor):
            if bound.dim() > 1 or not bound.numel() or not bound.is_floating_point():
                raise OptionError(
                    f"max_grad_norm is a tensor of shape {list(bound.shape)} and {bound.dtype}: it has to be of "
                    "floating point, 0-dim or with one number for each group",
                    advice="Pass torch.tensor(1.0), and write to it: C.fill_(0.5).",
                )
            return
        if not bounds or not all(is_positive(c) for c in bounds):
            raise OptionError(
                f"max_grad_norm has to be a positive number, not {_short(bound)}",
                advice="It is the largest norm of a sample's gradient, such as 1.0; inf clips nothing.",
            )
        if self.weights != "clip" and math.inf in bounds:
            raise OptionError(
                f"max_grad_norm=inf needs weights='clip', not {self.weights!r}: its weights would be Inf or NaN",
                advice="Pass a finite max_grad_norm; the sum of all gradients, not clipped, is fxgrad.Grad().",
            )

    def check(self, options: Any) -> None:
        if options.mixing != "error":
            raise OptionError(
                "ClippedGrad refuses mixing='allow': a sample's clipped part would not bound its influence",
                advice="Use layers that treat samples alone, such as GroupNorm.",
            )
        if not options.named and self.groups == "per_parameter" and self._several() is not None:
            raise OptionError(
                "torch.compile does not say in which order the model has its parameters, which max_grad_norm= follows",
                advice="Pass one number as max_grad_norm, or use fxgrad.transform.",
            )

    def deliveries(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        groups = self._groups(list(parameters))
        report = of_model((n,) if len(groups) == 1 else (len(groups), n), parameters)
        return [*like_parameters(GRAD, parameters), report, report, replace(report, shape=(), dtype=torch.float32)]

    def inputs(self, n: Any, parameters: Mapping[str, Tensor]) -> list[Delivery]:
        groups = self._groups(list(parameters))
        self._check_bounds(len(groups))
        bounds = Delivery("max_grad_norm", None, (len(groups),), torch.float64, first(parameters).device)
        return [bounds, *([replace(of_model((n,), parameters), place="sample_weight")] if self.sample_weight else [])]

    def values(self, forward: Any, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        like = first(parameters)
        groups = 1 if self.groups == "flat" else len(self._groups(list(parameters)))
        if isinstance(self.max_grad_norm, (int, float)):  # asked first: other classes take longer
            bounds = _constants((self.max_grad_norm,) * groups, like.device)
        else:
            self._check_numbers()  # which may have changed
            self._check_bounds(groups)
            bounds = self._bounds(groups, like.device)
        if isinstance(self.max_grad_norm, Tensor):
            written = version(self.max_grad_norm) if are_saved_tensors_hooked() else None
            forward.at_backward.append(partial(self._read_again, bounds, written))
        if not self.sample_weight:
            return [bounds]
        dtype = accumulating(like.dtype)
        if forward.sample_weight is None:
            return [bounds, like.detach().new_ones(self.units(forward.size), dtype=dtype)]
        return [bounds, forward.sample_weight.detach().to(like.device, dtype)]

    def functions(self) -> list[Callable[..., Any]]:
        return [self.weights] if callable(self.weights) else []

    def _bounds(self, groups: int, device: torch.device) -> Tensor:
        """Return C for each group. See Note [C as an input]."""
        bound = self.max_grad_norm
        if not isinstance(bound, Tensor):
            return _constants(tuple(bound) if isinstance(bound, Sequence) else (bound,) * groups, device)
        there = bound.detach().to(device, torch.float64, non_blocking=True)
        return there.repeat(groups) if bound.dim() == 0 else there.clone()

    def _read_again(self, bounds: Tensor, written: int | None) -> None:
        """Copy max_grad_norm into a graph's input as the backward begins."""
        assert isinstance(self.max_grad_norm, Tensor)
        if written is not None and version(self.max_grad_norm) != written:
            raise OptionError(
                "max_grad_norm changed between forward and backward under saved_tensors_hooks, which may copy it",
                advice="Change it before the forward.",
            )
        bounds.data.copy_(self._bounds(len(bounds), bounds.device))

    def compute(self, grads: Sequence[SampleGrads], n: int, given: Sequence[Tensor]) -> list[Any]:
        names = [g.name for g in grads]
        groups = self._groups(names)
        bounds, *given = given
        dtype = grads[0].accumulating
        both = {g.name: g.norms() for g in grads}
        zero = grads[0].like.new_zeros(2, n, dtype=torch.float64)  # the norms of a frozen group
        wide = any(is_wide(g.dtype) for g in grads)
        of_groups = [root_sum_squares([both[name] for name in group] or [zero], wide) for group in groups]
        norms, most = (torch.stack([rows[i] for rows in of_groups]) for i in (0, 1))
        finite = (norms < math.inf).all(0) if len(groups) > 1 else norms[0] < math.inf  # False for NaN, too
        bounds = torch.where(bounds > 0, bounds, math.nan)
        pairs = zip(most, bounds.unbind(0), strict=True)
        weight = torch.stack([at_most(self._weight(bound, c), dtype) for bound, c in pairs])
        if given:
            weight = weight * given[0]
        finite = finite & weight.isfinite().all(0)
        if given:
            weight, finite = torch.where(given[0] == 0, 0, weight), finite | (given[0] == 0)
        weight = torch.where(finite, weight, 0)
        weight = stored(weight)
        group_of = {name: i for i, group in enumerate(groups) for name in group}
        weight, summed = self.weighted_sums(grads, weight, group_of)
        shape = (n,) if len(groups) == 1 else (len(groups), n)
        return [*summed, norms.to(dtype).reshape(shape), weight.reshape(shape), (~finite).sum(dtype=torch.float32)]

    def weighted_sums(
        self, grads: Sequence[SampleGrads], weight: Tensor, group_of: Mapping[str, int]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the weights ``[groups, n]``, and each parameter's weighted sum."""
        rows = weight.unbind(0)  # one tensor per group, so that shared terms are summed once
        return weight, [g.weighted(rows[group_of[g.name]]) for g in grads]

    def arrived(self, results: Sequence[Tensor | None]) -> None:
        """Raise for nonfinite samples, if nonfinite="raise", before any delivery is stored."""
        count = results[2]
        if self.nonfinite == "raise" and count is not None and int(count):
            raise NonFinite(
                f"the gradients or the weights of {int(count)} samples hold Inf or NaN",
                advice='Find them by their norms, or pass nonfinite="zero" to leave them out.',
            )

    def packed(self, results: Sequence[Tensor]) -> Clipping:
        """Make the value of `fxgrad.result` from the results."""
        norms, weight, nonfinite = results
        return Clipping(norms, weight, nonfinite.long())

    def _weight(self, norms: Tensor, c: Tensor) -> Tensor:
        if callable(self.weights):
            weight = self._asked(norms.clone())  # it may write to its argument
            if not isinstance(weight, Tensor) or weight.shape != norms.shape:
                shape = f"the shape {list(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
                raise OptionError(
                    f"weights= returned {shape} for the norms of {len(norms)} samples",
                    advice="Return a tensor of the norms' shape, such as torch.full_like(norms, 0.5).",
                )
            weight, most = weight.to(norms.dtype), c / (norms + EPSILON)
            return weight.clamp(-most, most) if self.bounded else weight
        if self.weights == "automatic":
            return c / (norms + self.gamma)
        return (c / (norms + EPSILON)).clamp(max=1)

    def _asked(self, norms: Tensor) -> Any:
        """Call the user's function, which is traced."""
        assert callable(self.weights)
        try:
            return self.weights(norms)
        except GuardOnDataDependentSymNode as error:
            raise OptionError(
                "weights= decides by the numbers of the norms, which its graph does not have",
                advice="Choose by torch.where(norms > 1, .., ..).",
            ) from error

    def _groups(self, names: Sequence[str]) -> list[list[str]]:
        if self.groups == "flat":
            return [list(names)]
        if self.groups == "per_parameter":
            return [[name] for name in names]
        groups = [[name for name in group if name in names] for group in self.groups]
        listed = [name for group in groups for name in group]
        if sorted(listed) != sorted(names):
            wrong = sorted(set(names) ^ set(listed)) or sorted({name for name in listed if listed.count(name) > 1})
            strays = [name for group in self.groups for name in group if name not in names]
            meant = next(
                (
                    f"'{one}' is no trainable parameter: did you mean '{name}'? "
                    for name in wrong
                    for one in strays
                    if nearest(one, [name])
                ),
                "",
            )
            raise OptionError(
                f"groups= has to name every trainable parameter once: {', '.join(wrong)}",
                advice=f"{meant}Put each into one group, or freeze it.",
            )
        return groups

    def _several(self) -> int | None:
        """Return how many numbers max_grad_norm has; None if it is one for all groups."""
        bound = self.max_grad_norm
        if isinstance(bound, Tensor):
            return len(bound) if bound.dim() else None
        return len(bound) if isinstance(bound, Sequence) else None

    def _check_bounds(self, groups: int) -> None:
        several = self._several()
        if several not in (None, groups):
            raise OptionError(
                f"max_grad_norm has {several} numbers for {groups} groups",
                advice="Give one for each group; parameters that are frozen or that the model does not use are none.",
            )

    def __eq__(self, other: object) -> bool:
        """Compare the fields; a tensor as max_grad_norm by its numbers now."""
        if self is other:
            return True
        if not isinstance(other, ClippedGrad) or type(self) is not type(other):
            return NotImplemented
        return all(_plain(getattr(self, one.name)) == _plain(getattr(other, one.name)) for one in fields(self))

    def __hash__(self) -> int:
        return hash((type(self), self.group_size, self.gamma))


@lru_cache(maxsize=64)
def _constants(bounds: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers as one tensor; on a device they arrive without waiting for it."""
    with torch.inference_mode(False), disable_current_modes():  # later calls use them again
        return torch.tensor(bounds, dtype=torch.float64, device="cpu").to(device, non_blocking=True)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def is_positive(value: Any) -> bool:
    """Return whether a value is a positive number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0
    except OverflowError:
        return False


def _short(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:40]}.."


def _are_names(groups: Any) -> bool:
    """Return whether groups are lists of names."""
    if isinstance(groups, str) or not isinstance(groups, Sequence) or not groups:
        return False
    return all(isinstance(group, list | tuple) and all(isinstance(one, str) for one in group) for group in groups)
