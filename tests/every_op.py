"""The ways in which a sample of PyTorch's operator database, of any op, is a model with samples, and their verdicts.

One way is one sample of an op with one of its floating tensors as the trainable parameter p, shared by all samples of
the batch, and another one batched: along a new leading dim where the op takes that, else along the first of its own
dims that works; then integer tensors, and then all others, may be batched with it. Where no other tensor can be
batched, p enters through a batched value, `op(x ⊙ p)`, once with a new leading dim and once along a dim that it has.

A loop over single samples decides alone what applies: ops that draw no random numbers, gradients that are finite, and
singles side by side that are the batch. fxgrad then runs on three samples and on four. Where samples meet, it has to
refuse or to give dL/dW(i), which `op(x ⊙ p)` with p expanded to the batch says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxgrad
from fxgrad.kernels.precision import TOLERANCE
from fxgrad.testing import (
    default_loss,
    per_sample_grads,
    relative_error,
)
from fxgrad.verification.oracle import state_restored
from tests.database_models import NEW, PADDED, Call, Plan, compiled_module
from tests.databases import Case, Verdict, op_db, verdict
from tests.independence import sample_dims_of_output, tensors_of

BATCHES = (3, 4)  # of the first call and of the second
COPIES = max(BATCHES)

ROUNDING = {"float": 1e-6, "half": 1e-2, "bfloat16": 5e-2}
"""Ops that compute in another dtype, with the relative error that this leaves."""

ENTRIES = [info for info in op_db if torch.float64 in info.supported_dtypes("cpu") and info.supports_autograd]


@dataclass(frozen=True)
class InPlace:
    """An op's variant in place, on a copy of its first tensor, as an entry of the database."""

    info: Any

    @property
    def full_name(self) -> str:
        return f"{self.info.full_name} in place"

    def op(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.info.inplace_variant(x.clone(), *args, **kwargs)

    def sample_inputs(self, *args: Any, **kwargs: Any) -> Any:
        return self.info.sample_inputs(*args, **kwargs)


IN_PLACE = [InPlace(info) for info in ENTRIES if info.inplace_variant is not None and info.supports_inplace_autograd]


class Role(Call):
    """A call with one of its tensors as the trainable parameter p, by itself or in a product with samples."""

    def __init__(self, op: Any, name: str, sample: Any, parameter: int = -1, factors: str = "") -> None:
        super().__init__(op, name, (sample.input, *sample.args), sample.kwargs)
        self.parameter, self.factors = parameter, factors

    def parameters(self, batched: tuple[int, ...]) -> list[int]:
        return [self.parameter]

    def batched(self, k: int, dim: int, copies: int = COPIES) -> Tensor | None:
        x: Tensor = self.leaves[k]
        if k == self.parameter:
            return self._factors(x, dim)
        if dim < 0:
            return super().batched(k, dim, copies)
        if x.dim() <= dim or not x.shape[dim]:
            return None
        rows = x.index_select(dim, torch.arange(copies) % x.shape[dim])
        return rows * _ramp(rows, dim) if x.is_floating_point() else rows

    def _factors(self, p: Tensor, dim: int) -> Tensor | None:
        """What p is multiplied by: near one, and for each sample another."""
        if dim == PADDED or p.dim() <= dim or (dim >= 0 and not p.shape[dim]):
            return None
        ones = torch.ones_like(p)[None] if dim < 0 else torch.ones_like(p).narrow(dim, 0, 1)
        if self.factors == "one":
            ones = ones.new_ones([1] * ones.dim())
        else:
            ones = ones * torch.linspace(0.8, 1.0, ones.numel(), dtype=p.dtype).reshape(ones.shape)
        near_one = torch.tensor([1.0, 0.83, 0.89, 0.8][:COPIES], dtype=p.dtype)  # no mean of which is a median
        return ones * near_one.reshape([-1 if k == max(dim, 0) else 1 for k in range(ones.dim())])

    def _batched_term(self, k: int, term: str, module: nn.Module, plan: Plan | None) -> str:
        if k != self.parameter:
            return term
        p = self.leaves[k]
        shared = p.narrow(plan.dim, 0, 1) if plan is not None and plan.dim >= 0 else p
        module.p = nn.Parameter(shared.clone())
        return f"({term} * self.p)"

    def model(self, batched: tuple[int, ...], plan: Plan | None) -> nn.Module:
        expression, module = self.expression(batched, plan)
        return compiled_module(module, expression, [f"x{n}" for n in range(len(batched))], {"op": self.op})


def _ramp(x: Tensor, dim: int) -> Tensor:
    shape = [-1 if k == dim else 1 for k in range(x.dim())]
    return torch.linspace(1.0, 0.8, x.shape[dim], dtype=x.dtype).reshape(shape)


@dataclass(frozen=True)
class MergedCase(Case):
    """A case in whose one output sample n is at each place n of `dim`, split into `outer`, the samples, and `inner`."""

    dim: int = 0
    outer: int = 1
    inner: int = 1

    def loss_fn(self, output: Any) -> Tensor:
        (y,) = tensors_of(output)
        samples = y.shape[self.dim] // (self.outer * self.inner)
        split = y.unflatten(self.dim, (self.outer, samples, self.inner)).movedim(self.dim + 1, 0)
        return default_loss(split)


def merged(case: Case) -> Case:
    """The case with its samples merged into a dim of the output, where that says what it returns."""
    with torch.no_grad():
        whole = tensors_of(case.model(*(x.clone() for x in case.inputs)))
        cut = [[x.narrow(d or 0, n, 1).clone() for x, d in zip(case.inputs, case.in_dims or (), strict=True)]
               for n in range(COPIES)]  # fmt: skip
        try:
            parts = [tensors_of(case.model(*xs)) for xs in cut]
        except Exception:  # the op does not take one sample alone
            return case
    if len(whole) != 1 or any(len(part) != 1 or part[0].dim() != whole[0].dim() for part in parts):
        return case
    for dim, size in enumerate(parts[0][0].shape):
        for outer in (n for n in range(2, size + 1) if size % n == 0):
            split = torch.stack([part[0].unflatten(dim, (outer, size // outer)) for part in parts], dim + 1)
            y = split.flatten(dim, dim + 2)
            if y.shape == whole[0].shape and torch.allclose(y, whole[0], 1e-9, 1e-9, equal_nan=True):
                fields = {name: getattr(case, name) for name in ("name", "model", "inputs", "in_dims", "tolerance")}
                return MergedCase(**fields, out_dims=[dim], dim=dim, outer=outer, inner=size // outer)
    return case


@dataclass(frozen=True)
class Way:
    """A case with, where samples meet in it, what op(x ⊙ p) takes the copies of p along (None: nobody knows)."""

    case: Case
    copies: int | None = None


def ways(info: Any, name: str, sample: Any) -> tuple[list[Way], str]:
    """The cases of one sample, else why no loop over samples says what is right."""
    seen = Role(info.op, name, sample)
    why = _inapplicable(info.op, seen, sample)
    found = [] if why else [way for p in sorted(seen.differentiable) for way in _ways_of(info, name, sample, p)]
    return found, why or ("" if found else "no-batch")


def _inapplicable(op: Any, call: Role, sample: Any) -> str:
    """Why a sample takes no part; empty where it does."""
    if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in call.leaves):
        return "sparse"
    if not call.differentiable:
        return "no-gradient"
    if any(not x.numel() for x in tensors_of([sample.input, sample.args, sample.kwargs])):
        return "empty"
    arguments = ((sample.input, *sample.args), sample.kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, arguments)  # op may work in place
    before = torch.get_rng_state()
    try:
        found = tensors_of(op(*args, **kwargs))
    except Exception:  # the op refuses its own sample, or this build of PyTorch does
        return "fails"
    if any(y.layout is not torch.strided for y in found):
        return "sparse"
    if not any(y.requires_grad and y.numel() for y in found):
        return "no-gradient"
    return "" if torch.equal(before, torch.get_rng_state()) else "random"


def _ways_of(info: Any, name: str, sample: Any, p: int) -> Iterator[Way]:
    call = Role(info.op, f"{name}: tensor {p} trains", sample, p)
    floats = [k for k in call.tensors if k != p and call.leaves[k].is_floating_point()]
    indices = [k for k in call.tensors if not call.leaves[k].is_floating_point()]
    others = tuple(k for k in call.tensors if k != p)
    met: list[Way] = []
    applies = False
    for x in floats:
        sets = dict.fromkeys([(x,), tuple(sorted((x, *indices))), others])
        for way in _first(call, [Plan(s, dim) for s in sets for dim in (NEW, 0, PADDED, 1, 2, 3)]):
            if way.case.out_dims is not None:
                applies = True
                yield way
            else:
                met.append(way)
    yield from met[:1]
    met = []
    for dims in ((NEW,), (0, 1, 2, 3)):
        for factors in ("all", "one"):
            call = Role(info.op, f"{name}: tensor {p} trains in a product", sample, p, factors)
            sets = dict.fromkeys([(p,), tuple(sorted((p, *indices))), tuple(sorted((p, *others)))])
            found = list(_first(call, [Plan(s, dim) for s in sets for dim in dims], through=True))
            met += [way for way in found if way.case.out_dims is None]
            right = [way for way in found if way.case.out_dims is not None]
            if right and not applies:
                yield right[0]
            if right:
                break
    yield from met[:1] if floats else met[:2]


def _first(call: Role, plans: Iterable[Plan], *, through: bool = False) -> Iterator[Way]:
    """The first of the plans in which samples stay alone; before it, the first in which they meet."""
    met = False
    for plan in plans:
        if not UNCHECKED.get(call.name.partition("[")[0], _any)(call, plan):
            continue
        inputs = [x for k in plan.batched if (x := call.batched(k, plan.dim)) is not None]
        if len(inputs) < len(plan.batched):
            continue
        dims = tuple(max(plan.dim, 0) for _ in inputs)
        model = call.model(plan.batched, plan)
        fewer = [x.narrow(d, 0, min(BATCHES)) for x, d in zip(inputs, dims, strict=True)]
        if not _runs(model, fewer) or not _runs(model, inputs):
            continue
        out_dims, again = (sample_dims_of_output(model, xs, dims) for xs in (inputs, fewer))
        out_dims = out_dims if out_dims == again else None
        tolerance = ROUNDING.get(call.op.__name__)
        case = Case(f"{call.name}, {plan}", model, tuple(inputs), dims, out_dims, tolerance=tolerance)
        case = merged(case) if out_dims is None else case
        out_dims = case.out_dims
        if out_dims is not None and _finite(case):
            yield Way(case)
            return
        if out_dims is None and not met:
            met = True
            yield Way(case, plan.dim if through else None)


def _any(call: Role, plan: Plan) -> bool:
    return True


def _in_front(call: Role, plan: Plan) -> bool:
    return plan.dim == NEW and set(call.tensors) <= {*plan.batched, call.parameter}


def _of_rows(call: Role, plan: Plan) -> bool:
    return plan.dim == 0 and plan.batched == (0,)


def _of_full_rank(call: Role, plan: Plan) -> bool:
    return call.factors != "one" or plan.dim == NEW


def _none(call: Role, plan: Plan) -> bool:
    return False


UNCHECKED = {
    "nn.functional.ctc_loss": _none,  # its samples are on different dims
    "_segment_reduce.lengths": _none,  # its segments are no samples
    "_segment_reduce.offsets": _none,
    "nn.functional.scaled_dot_product_attention": _in_front,
    "lu_unpack": _in_front,
    "native_batch_norm": _of_rows,
    "_native_batch_norm_legit": _of_rows,
    "_batch_norm_with_update": _of_rows,
    # A column times a row is singular, and its pivots are 0 or 1e-17, as a processor rounds.
    "lu": _of_full_rank,
    "linalg.lu": _of_full_rank,
    "linalg.lu_factor": _of_full_rank,
    "linalg.lu_factor_ex": _of_full_rank,
}
"""The plans that fit, of ops that read and write beside their memory where sizes do not, or whose results are noise."""


def _runs(model: nn.Module, inputs: list[Any]) -> bool:
    """Whether the plain batch has gradients, and finite ones."""
    try:
        outputs = [y for y in tensors_of(model(*(x.clone() for x in inputs))) if y.requires_grad]
        grads = torch.autograd.grad(outputs, list(model.parameters()), [torch.ones_like(y) for y in outputs])
    except Exception:  # whatever the op objects to, it is not a legal call
        return False
    return all(bool(g.isfinite().all()) for g in grads) and any(y.numel() for y in outputs)


def _finite(case: Case) -> bool:
    try:
        grads = per_sample_grads(case.model, case.loss_fn, case.inputs, in_dims=case.in_dims)
    except Exception:
        return False
    return all(bool(g.isfinite().all()) for g in grads.values())


def check(way: Way, *, input_gradients: bool) -> None:
    """Runs the case with both batch sizes; AssertionError where a number is not the loop's."""
    case = way.case
    mean = {"loss_reduction": "mean"} if case.out_dims and "mean" in case.out_dims else {}
    tolerance = case.tolerance or TOLERANCE[torch.float64]
    transformed = fxgrad.transform(case.model, in_dims=case.in_dims, backend="eager", **mean)  # type: ignore[arg-type]
    assert case.in_dims is not None
    try:
        for batch in BATCHES:
            pairs = list(zip(case.inputs, case.in_dims, strict=True))
            cut = [x.narrow(d, 0, batch).clone() for x, d in pairs if d is not None]
            wanted = input_gradients and _differentiates(case.model, cut)
            inputs = [x.requires_grad_(wanted and x.is_floating_point()) for x in cut]
            plain = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
            found = _run(case, transformed, inputs)
            right = _run(case, case.model, plain)
            right["grad_sample"] = (
                _definition(way, plain)
                if case.out_dims is None
                else per_sample_grads(case.model, case.loss_fn, [x.detach() for x in plain], in_dims=case.in_dims)
            )
            for what, value in found.items():
                error = relative_error(_without_noise(value), _without_noise(right[what]))
                assert error <= tolerance, f"{what} off by {error:.1e} at batch {batch}"
    finally:
        fxgrad.zero_grad(case.model)


def _differentiates(model: nn.Module, inputs: list[Any]) -> bool:
    """Whether the op takes inputs that require gradients: not all weights of losses do."""
    try:
        model(*(x.clone().requires_grad_(x.is_floating_point()) for x in inputs))
    except RuntimeError:
        return False
    return True


def _run(case: Case, model: nn.Module, inputs: list[Tensor]) -> dict[str, dict[str, Tensor]]:
    """Outputs, gradients of the inputs and, where there are, per sample, after one forward and one backward."""
    with state_restored(case.model):
        output = model(*(x.clone() for x in inputs))  # op may work in place
        loss = case.loss_fn(output)
        if not loss.requires_grad:
            raise AssertionError("no gradient arrives")
        loss.backward()
    sources = {f"x{k}": x for k, x in enumerate(inputs) if x.requires_grad}
    found = {
        "forward": {f"output {k}": y.detach() for k, y in enumerate(tensors_of(output))},
        "input gradient": {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in sources.items()},
        "grad_sample": {name: getattr(p, "grad_sample", p.detach()) for name, p in case.model.named_parameters()},
    }
    fxgrad.zero_grad(case.model)
    return found


def _without_noise(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients that are zero but for rounding, as zeros."""
    return {name: torch.zeros_like(x) if x.numel() and x.abs().max() < 1e-13 else x for name, x in values.items()}


class Unjudged(AssertionError):
    """Samples meet, fxgrad does not refuse, and nobody knows what is right."""


def _definition(way: Way, inputs: list[Tensor]) -> dict[str, Tensor]:
    """dL/dW(i) of op(x ⊙ p), with a copy of p for every sample."""
    if way.copies is None:
        return _of_a_sum(way.case, inputs) or _of_a_mean(way.case, inputs)
    case, dim = way.case, max(way.copies, 0)
    assert case.in_dims is not None
    (shared,) = case.model.parameters()
    batch = inputs[0].shape[case.in_dims[0] or 0]
    whole = shared.detach()[None] if way.copies < 0 else shared.detach()
    copies = whole.expand([batch if k == dim else size for k, size in enumerate(whole.shape)]).clone()
    try:
        case.model.p = nn.Parameter(copies)
        (grad,) = torch.autograd.grad(case.loss_fn(case.model(*(x.detach() for x in inputs))), [case.model.p])
    finally:
        case.model.p = shared
    return {"p": grad if way.copies < 0 else grad.movedim(dim, 0).unsqueeze(dim + 1)}


def _of_a_sum(case: Case, inputs: list[Tensor]) -> dict[str, Tensor]:
    """dL/dW(i) where the outputs are sums of the single samples' ones: J_iᵀ dL/dy; empty where they are not."""
    assert case.in_dims is not None
    pairs = list(zip(inputs, case.in_dims, strict=True))
    names, parameters = zip(*case.model.named_parameters(), strict=True)
    parts = []
    try:
        for n in range(inputs[0].shape[case.in_dims[0] or 0]):
            parts.append(tensors_of(case.model(*(x.detach().narrow(d or 0, n, 1) for x, d in pairs))))
    except Exception:  # the op does not take one sample alone
        return {}
    whole = [y.detach().requires_grad_() for y in tensors_of(case.model(*(x.detach() for x in inputs)))]
    sums = [torch.stack(column).sum(0) for column in zip(*parts, strict=True) if len({y.shape for y in column}) == 1]
    if [y.shape for y in sums] != [y.shape for y in whole] or not all(map(torch.allclose, sums, whole)):
        return {}
    grads = torch.autograd.grad(case.loss_fn(whole), whole)
    found = [torch.autograd.grad(part, parameters, grads) for part in parts]
    return {name: torch.stack(column) for name, column in zip(names, zip(*found, strict=True), strict=True)}


def _of_a_mean(case: Case, inputs: list[Tensor]) -> dict[str, Tensor]:
    """dL/dW(i) of a mean whose weights differ, L_i / Σ_m w_m: by the same loss with reduction="sum"."""
    source = str(case.model.source)
    arguments = [f"x{k}" for k in range(len(inputs))]
    names = {"op": type(case.model).forward.__globals__["op"]}
    summed = compiled_module(copy.deepcopy(case.model), f"{source[:-1]}, reduction='sum')", arguments, names)
    if "reduction=" in source or sample_dims_of_output(summed, inputs, case.in_dims or ()) != ["sum"]:
        raise Unjudged("samples meet, and it is not refused")
    factor = (case.model(*inputs) / summed(*inputs)).detach()
    found = per_sample_grads(summed, case.loss_fn, [x.detach() for x in inputs], in_dims=case.in_dims)
    return {name: g * factor for name, g in found.items()}


def judge(way: Way, *, input_gradients: bool) -> Verdict:
    """The verdict on one way."""
    case = way.case
    return verdict(
        lambda: check(way, input_gradients=input_gradients), alone=case.out_dims is not None, describe=case.describe
    )


def judge_mixing(way: Way) -> Verdict:
    """The verdict with mixing="allow": the ordinary gradient is the sum of `grad_sample`, and what Grad() gives."""
    return verdict(lambda: check_sums(way.case), alone=True, describe=way.case.describe)


def check_sums(case: Case) -> None:
    """AssertionError where, with mixing="allow", the rows' sum or Grad() are not the plain model's gradient."""
    model, inputs = case.model, [x.detach() if isinstance(x, Tensor) else x for x in case.inputs]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with state_restored(model):
        loss = case.loss_fn(model(*_clones(inputs)))
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    expected = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), grads, strict=True)}
    quantities = [fxgrad.GradSample(), fxgrad.Grad()]
    transformed = fxgrad.transform(model, quantity=quantities, in_dims=case.in_dims, mixing="allow", backend="eager")
    try:
        with state_restored(model):
            case.loss_fn(transformed(*_clones(inputs))).backward()
        rows: dict[str, Any] = {name: getattr(p, "grad_sample", None) for name, p in trained.items()}
        found = {
            "the sum of grad_sample": {name: _sum(row, trained[name]) for name, row in rows.items()},
            "Grad()": {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()},
        }
    finally:
        fxgrad.zero_grad(model)
    for what, value in found.items():
        error = relative_error(_without_noise(value), _without_noise(expected))
        assert error <= (case.tolerance or TOLERANCE[torch.float64]), f"{what} is off by {error:.1e}"


def _clones(inputs: list[Any]) -> list[Any]:
    """What an op in place may change."""
    return [x.clone() if isinstance(x, Tensor) else x for x in inputs]


def _sum(rows: Tensor | None, p: Tensor) -> Tensor:
    return torch.zeros_like(p) if rows is None else rows.sum(0)
