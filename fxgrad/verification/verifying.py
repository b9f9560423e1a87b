"""`fxgrad.verify`: the numerical check of a model's per-sample gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fxgrad.api import engine_of, transform, zero_grad
from fxgrad.capture.options import check_module
from fxgrad.capture.sharded import check_not_sharded
from fxgrad.errors import BatchSizeError, FxgradError, OptionError
from fxgrad.first_batch.compared_rows import difference, largest
from fxgrad.host.pytree import tree_leaves
from fxgrad.kernels.precision import TOLERANCE
from fxgrad.quantities import GradSample
from fxgrad.quantities.products import of_one_process
from fxgrad.samples.batch import map_tensors, tensors_in
from fxgrad.tracing import settled_batch
from fxgrad.untouched import random_numbers_kept
from fxgrad.verification.oracle import Grads, LossFn, dense, distance, relative_errors
from fxgrad.verification.probe import probe
from fxgrad.verification.undivided import shares, weighted
from fxgrad.verification.verdict import Influence, ParameterVerdict, Verdict
from fxgrad.verification.witness import Inputs, Nest, NotAlone, Whole, Witness, copied_alike

Row = tuple[str, float | None, int | None]  # a parameter's verdict, error and worst sample


def verify(model: nn.Module, *args: Any, loss_fn: LossFn | None = None, **kwargs: Any) -> Verdict:
    """Check numerically that ``model(*args, **kwargs)`` gets the right per-sample gradients.

    verify makes two checks on a copy of the model, in float64 if the model runs in it, else in the model's dtype. It
    changes each sample in turn: no outputs or gradients of other samples may change. It compares ``grad_sample`` with
    plain autograd on one sample at a time. If the model draws random numbers, the reference is a forward of the
    whole batch under the same seed, with a backward through one sample's outputs.

    The model stays unchanged: parameters, gradients, buffers, modes and random states are as before.
    The cost is about two forward and backward passes per sample.

    Args:
        model: a model, or a transformed one, whose options then apply, its backend too (else "aot_eager").
        args: as the model takes them.
        loss_fn: a function of the model's output for the whole batch that returns the loss, a scalar or one number
            per sample; it may use the batch's targets. None: a sum in which each element of the output has another
            term. A loss inside the model, such as a mean over the batch's tokens, counts with each sample's share.
            The rows of ``grad_sample`` are compared with dL/dW(i) as `transform` defines it. For a mean over samples,
            pass a model transformed with ``loss_reduction="mean"``; otherwise the gradients are divided by B.
        kwargs: as the model takes them. ``sample_weight=`` of a clipping quantity has no part in what is compared.

    Returns:
        A `Verdict`: ``print`` it for a table, read ``.ok``, or call ``.raise_if_wrong()`` in a test. The verdict of a
        model that fxgrad refuses has the error.

    Raises:
        BatchSizeError: the inputs' number of samples is unknown or zero.
        OptionError: the model or an input cannot be copied sample by sample.
        Exception: any error of the model and ``loss_fn`` themselves.

    Source: the loop over single samples with plain ``torch.autograd``.

    >>> verdict = verify(nn.Linear(3, 2), torch.randn(5, 3))
    >>> verdict.ok, [(p.name, p.verdict) for p in verdict.parameters]
    (True, [('weight', 'right'), ('bias', 'right')])
    """
    check_module("verify", model)
    check_not_sharded(model, "verify")
    engine = engine_of(model)
    options = {"backend": "aot_eager"} if engine is None else dict(vars(type(model))["_fxgrad_arguments"])
    options["check_first_batch"] = False  # every sample is changed here
    options["on_result"] = None  # the user's steps are reported, and none is made here
    original = model if engine is None else engine.model
    if engine is not None:
        options["quantity"] = [of_one_process(one) for one in engine.store.quantities]
        if not any(isinstance(one, GradSample) for one in options["quantity"]):
            # grad_sample is compared; what the model's own quantities refuse is refused here, too
            options["quantity"], options["strategy"] = [GradSample(), *options["quantity"]], None
        engine.pop_sample_weight("forward", kwargs)  # it weighs clipped sums, and no grad_sample
    if any(map(_is_packed, tree_leaves((args, kwargs), is_leaf=_is_packed))):
        raise OptionError(
            "verify cannot take single samples out of a PackedSequence",
            advice="Pass padded inputs to a model that packs them itself.",
        )
    with random_numbers_kept(original):
        may_mix = engine is None or engine.options.takes(mixing="allow")
        return _Verification(original, options, (args, kwargs), loss_fn, may_mix).verdict()


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


@dataclass
class _Verification:
    """The verification of one model."""

    original: nn.Module
    options: dict[str, Any]
    nest: Nest
    loss_fn: LossFn | None
    may_mix: bool
    notes: list[str] = field(default_factory=list)
    witness: Witness = field(init=False)
    transformed: nn.Module = field(init=False)
    dtype: torch.dtype = torch.float64
    coarsest: torch.dtype = torch.float64  # of all that is computed
    tolerance: float = TOLERANCE[torch.float64]
    refusal: FxgradError | None = None
    output_error: float | None = None
    sum_error: float | None = None
    method: str = ""  # of the reference

    def verdict(self) -> Verdict:
        whole = self._choose_dtype()
        if whole.draws and self.options["backend"] == "inductor":
            self.notes.append('through "aot_eager": Inductor draws other random numbers than the plain model')
            self.transformed = transform(self.witness.model, **{**self.options, "backend": "aot_eager"})
        grads, influences = self._probe(whole)
        if whole.draws and self._without_rows(whole):
            self.notes.append("the model draws random numbers and returns a loss of all samples: tried in eval mode")
            self.witness.model.eval()
            whole = self.witness.whole()
            grads, seen = self._probe(whole)
            influences = influences or seen
        rows = {} if grads is None else self._rows(grads, whole, influences)
        return Verdict(
            self.witness.n,
            _name(self.dtype),
            self.method,
            self.tolerance,
            tuple(self._verdicts(rows)),
            tuple(influences),
            self.options.get("mixing") == "allow",
            self.refusal,
            self.output_error,
            self.sum_error,
            tuple(self.notes),
            self.may_mix,
        )

    def _choose_dtype(self) -> Whole:
        """Copy the model and its inputs, in float64 if the model runs in it, and run the whole batch."""
        dtypes = {p.dtype for p in self.original.parameters() if p.is_floating_point()}
        if dtypes <= {torch.float64}:
            return self._prepare(convert=False)
        try:
            return self._prepare(convert=True)
        except FxgradError:
            raise
        except Exception as error:  # any error: use the model's dtype instead
            first = (str(error).splitlines() or [""])[0]
            self.notes.append(f"not in float64, where the model raises {type(error).__name__}: {first}")
        self.dtype = max(dtypes, key=_tolerance)
        self.coarsest, self.tolerance = self.dtype, _tolerance(self.dtype)
        return self._prepare(convert=False)

    def _prepare(self, *, convert: bool) -> Whole:
        model = copied(self.original)
        model = model.double() if convert else model
        self.transformed = transform(model, **self.options)
        engine = engine_of(self.transformed)
        assert engine is not None
        new = copied_alike({id(x): x.detach() for x in tensors_in(self.nest)}, double=convert)
        nest: Nest = map_tensors(self.nest, lambda x: new[id(x)].requires_grad_(x.requires_grad))
        inputs = Inputs(nest, settled_batch(engine, *nest))
        if inputs.batch.size == 0:
            raise BatchSizeError("verify needs samples: the batch is empty", advice="Pass a batch of two or more.")
        scale = self.options.get("loss_reduction", "sum")
        scale = 1 if scale == "sum" else inputs.batch.size if scale == "mean" else scale
        self.witness = Witness(model, inputs, self.loss_fn, float(scale))
        whole = self.witness.whole()
        coarsest = max(whole.dtypes, key=_tolerance, default=self.dtype)
        if _tolerance(coarsest) > self.tolerance:
            self.coarsest, self.tolerance = coarsest, _tolerance(coarsest)
            self.notes.append(f"the model computes in {_name(coarsest)} inside")
        return whole

    def _without_rows(self, whole: Whole) -> bool:
        """Decide whether each sample's part of the loss shows only in the samples alone."""
        return self.witness.n > 1 and any(one.through is None for one in whole.undivided)

    def _probe(self, whole: Whole) -> tuple[Grads | None, list[Influence]]:
        """Return the transformed model's grad_sample, None if fxgrad refuses it, and the influences between samples."""
        grads = None
        if self.refusal is None:
            self.output_error = None
            try:
                grads = self._transformed_grads(self.witness.inputs.fresh(), whole)
            except FxgradError as error:
                self.refusal = error
        influences = probe(self.witness, whole, self._transformed_grads, grads)
        whole.undivided = self.witness.undivided(whole, self.tolerance)
        return grads, influences

    def _transformed_grads(self, nest: Nest, whole: Whole | None = None) -> Grads:
        """Return ``grad_sample`` of every parameter; with ``whole``, compare the outputs with the plain model's."""
        witness = self.witness
        zero_grad(witness.model)
        try:
            with witness.forward(self.transformed, nest) as output:
                if whole is not None:
                    self.output_error = _outputs_error(tensors_in(output), whole.outputs)
                loss = witness.loss(output)
                if loss.requires_grad:
                    loss.backward()
            grads: Grads = {}
            for name, p in witness.parameters.items():
                grad_sample = getattr(p, "grad_sample", None)
                grads[name] = p.new_zeros(witness.n, *p.shape) if grad_sample is None else grad_sample
            return grads
        finally:
            zero_grad(witness.model)

    def _rows(self, grads: Grads, whole: Whole, influences: list[Influence]) -> dict[str, Row]:
        """Compare ``grad_sample`` with the ordinary gradient and, if the samples are independent, with single ones."""
        plain = dense(whole.grads, self.witness.parameters)
        by_sum = {name: g.sum(0) for name, g in grads.items()}
        self.sum_error = distance(by_sum, {name: g * self.witness.scale for name, g in plain.items()})
        if any(influence.what.startswith("output") for influence in influences):
            self.notes.append("not compared with single samples, which do not see each other")
            return dict.fromkeys(grads, ("not compared", None, None))
        if whole.draws and self._without_rows(whole):
            self.notes.append("not compared: the model draws random numbers in eval mode too")
            return dict.fromkeys(grads, ("not compared", None, None))
        truth = self._truth(whole)
        if truth is None:
            return dict.fromkeys(grads, ("no reference", None, None))
        return self._compare(grads, truth, whole)

    def _truth(self, whole: Whole) -> Grads | None:
        """Return every sample's gradients by plain autograd, as `transform` scales them; None if they are unknown."""
        scale = torch.full([self.witness.n], self.witness.scale, dtype=torch.float64)
        if not whole.draws:
            try:
                truth, undivided = self.witness.alone(whole, self.tolerance)
            except NotAlone as reason:
                self.notes.append(str(reason))
            except Exception as error:  # the model rejects a batch of one
                self.notes.append(f"one sample alone raises {type(error).__name__}")
            else:
                self.method = "the loop over single samples"
                weighed = self._with_shares(truth, undivided, whole)
                return None if weighed is None else weighted(weighed, scale)
        if self._without_rows(whole):
            self.notes.append("each sample's share of the model's own loss is unknown without samples alone")
            return None
        self.method = "one sample's outputs at a time, in forwards of the batch under one seed"
        return weighted(self.witness.within(whole), scale)

    def _with_shares(self, truth: Grads, undivided: list[Grads], whole: Whole) -> Grads | None:
        """Add each sample's share of the undivided outputs; None if a share is unknown."""
        for one, rows in zip(whole.undivided, undivided, strict=True):
            weights = shares(rows, one.grads, self.tolerance, torch.finfo(self.coarsest).eps)
            if weights is not None:
                self._note_shares(weights * self.witness.scale)
            elif one.through is None:
                self.method = ""  # of no reference
                self.notes.append(
                    f"each sample's share of output {one.index} is unknown: "
                    "pass a loss_fn of outputs with samples, or fewer samples"
                )
                return None
            if weights is not None and one.through is None:
                own = weighted(rows, weights)
                truth = {name: g + own[name] for name, g in truth.items()}
        return truth

    def _note_shares(self, weights: Tensor) -> None:
        """Note the factor of each sample's own loss, unless it is 1."""
        n = self.witness.n
        if largest(weights - 1) < self.tolerance:
            return
        mean = largest(weights - 1 / n) < self.tolerance
        factors = ", ".join(f"{round(weight, 9) + 0.0:.3g}" for weight in weights.tolist())  # no -0, no 1e-17
        advice = '1/B: pass loss_reduction="mean" to undo it' if mean else factors
        note = f"the model's own loss weighs each sample's by {advice}"
        if note not in self.notes:
            self.notes.append(note)

    def _compare(self, grads: Grads, truth: Grads, whole: Whole) -> dict[str, Row]:
        """Return the verdict, the error and the worst sample of every trainable parameter."""
        rows: dict[str, Row] = {}
        for name, error in relative_errors(grads, truth).items():
            off = difference(grads[name], truth[name])
            sample = int(off.reshape(len(off), -1).amax(1).argmax()) if error and off.numel() else None
            verdict = "wrong" if error > self.tolerance else "unused" if whole.grads[name] is None else "right"
            rows[name] = (verdict, error, sample)
        return rows

    def _verdicts(self, rows: dict[str, Row]) -> Iterator[ParameterVerdict]:
        first: dict[int, str] = {}
        for name, p in self.witness.model.named_parameters(remove_duplicate=False):
            if first.setdefault(id(p), name) != name:
                self.notes.append(f"'{name}' is '{first[id(p)]}'")
                continue
            default = ("refused", None, None) if p.requires_grad else ("frozen", None, None)
            yield ParameterVerdict(name, tuple(p.shape), *rows.get(name, default))


def copied(model: nn.Module) -> nn.Module:
    """Deep-copy a model; tensors that a forward left on its modules are detached."""
    left = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Tensor) and not v.is_leaf]
    try:
        return copy.deepcopy(model, {id(value): value.detach().clone() for value in left})
    except Exception as error:
        raise OptionError(
            f"the model cannot be copied: {type(error).__name__}: {error}",
            advice="verify leaves the model as it is and works on a copy.deepcopy of it: make that possible.",
        ) from error


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, 0.0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _outputs_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    named = [{f"output {k}": y.detach() for k, y in enumerate(outputs)} for outputs in (actual, expected)]
    return distance(*named)
