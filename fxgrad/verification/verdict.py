"""The result of `fxgrad.verify`: a verdict for each parameter, and the influences between samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxgrad.errors import FxgradError, MixedSamples, RuleError
from fxgrad.graph.printing import table


@dataclass(frozen=True)
class ParameterVerdict:
    """The comparison of one parameter's ``grad_sample`` with that of the loop over samples.

    ``verdict`` is "right", "wrong", "unused" (zeros, as they should be), "frozen", "refused", "not compared" or "no
    reference" (each sample's share of a loss inside the model is unknown).
    ``error`` is ``max|a - b| / max(max|b|, 1e-3 of the model's largest |b|)``, and ``sample`` the sample with the
    largest error; both are None without a comparison.
    """

    name: str
    shape: tuple[int, ...]
    verdict: str
    error: float | None = None
    sample: int | None = None


@dataclass(frozen=True)
class Influence:
    """An influence: a change of sample ``source`` changed a value of the samples ``targets``.

    ``what`` names the value: "output 0" (the first tensor of the model's output), "loss" (its gradient by the
    outputs) or "grad_sample".
    """

    source: int
    targets: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Verdict:
    """The result of `fxgrad.verify`; ``str()`` is a table, and `raise_if_wrong` is for tests.

    Attributes:
        ok: whether every trainable parameter is right and samples are independent (or may mix).
        batch_size: the number of samples.
        dtype: the dtype of the comparison.
        witness: the reference of the comparison of grad_sample; empty without a comparison.
        tolerance: the largest accepted error.
        parameters: a `ParameterVerdict` for each parameter.
        influences: an `Influence` for each sample whose change affected others.
        mixing_allowed: whether the model is transformed with mixing="allow".
        refusal: the error of a model that fxgrad refuses, else None.
        output_error: the error of the transformed model's outputs against the plain model's; None: not compared.
        sum_error: the error of the samples' sum against the ordinary gradient; None: not compared.
        notes: sentences on missing comparisons, with reasons.
        may_mix: whether the model's other options permit mixing="allow".

    >>> import torch, fxgrad
    >>> fxgrad.verify(torch.nn.Linear(3, 2), torch.randn(5, 3)).ok
    True
    """

    batch_size: int
    dtype: str  # of the comparison
    witness: str  # the reference of grad_sample; empty without a comparison
    tolerance: float
    parameters: tuple[ParameterVerdict, ...]
    influences: tuple[Influence, ...]
    mixing_allowed: bool
    refusal: FxgradError | None
    output_error: float | None  # of the transformed model's outputs against the plain model's
    sum_error: float | None  # of the samples' sum against the ordinary gradient
    notes: tuple[str, ...] = ()
    may_mix: bool = True  # whether the model's other options permit mixing="allow"

    @property
    def ok(self) -> bool:
        """Whether all trainable parameters are right, samples independent (or may mix), and outputs and sums agree."""
        judged = [p.verdict for p in self.parameters if p.verdict != "frozen"]
        accepted = {"right", "unused"} | ({"not compared"} if self.mixing_allowed else set())
        by_sum = "not compared" in judged  # the sum is then the only check
        return (
            self.refusal is None
            and (self.mixing_allowed or not self.influences)
            and all(verdict in accepted for verdict in judged)
            and (self.output_error or 0.0) <= self.tolerance
            and (not by_sum or (self.sum_error or 0.0) <= self.tolerance)
        )

    def raise_if_wrong(self) -> None:
        """Raise unless ``ok``: the refusal itself, `MixedSamples`, or `RuleError` with the worst parameter."""
        if self.refusal is not None:
            raise self.refusal
        if self.ok:
            return
        if self.influences and not self.mixing_allowed:
            raise MixedSamples(
                f"samples influence each other: {_influence_lines(self.influences, self.batch_size)[0]}",
                advice='Make the model treat samples alone, or transform it with mixing="allow".'
                if self.may_mix
                else "Make the model treat samples alone.",
            )
        raise RuleError(
            self._wrong(),
            advice="Look up the parameter's rules in fxgrad.explain(model, ...), and try each with "
            "fxgrad.testing.check_rule.",
        )

    def _wrong(self) -> str:
        wrong = [p for p in self.parameters if p.verdict == "wrong" and p.error is not None]
        if wrong:
            worst = max(wrong, key=lambda p: p.error or 0.0)
            sample = "" if worst.sample is None else f", most for sample {worst.sample}"
            return f"grad_sample of '{worst.name}' is off by {worst.error:.1e} (tolerance {self.tolerance:.0e}){sample}"
        if self.output_error is not None and self.output_error > self.tolerance:
            return f"the outputs are off by {self.output_error:.1e} (tolerance {self.tolerance:.0e})"
        if self.sum_error is not None and self.sum_error > self.tolerance:
            return f"the samples' gradients do not add up to the ordinary one: off by {self.sum_error:.1e}"
        return "nothing was compared: " + "; ".join(self.notes)

    def __str__(self) -> str:
        samples = "1 sample" if self.batch_size == 1 else f"{self.batch_size} samples"
        against = f"; against {self.witness}" if self.witness else ""
        lines = [f"{samples} in {self.dtype}, tolerance {self.tolerance:.0e}{against}", ""]
        lines += table(["parameter", "shape", "error", "worst sample", "verdict"], self._rows(), right={2, 3})
        lines += ["", *self._sentences()]
        return "\n".join(lines)

    __repr__ = __str__

    def _rows(self) -> list[list[str]]:
        return [
            [
                p.name,
                str(list(p.shape)),
                "" if p.error is None else f"{p.error:.1e}",
                str(p.sample) if p.verdict == "wrong" else "",
                p.verdict.upper() if p.verdict == "wrong" else p.verdict,
            ]
            for p in self.parameters
        ]

    def _sentences(self) -> Iterable[str]:
        if self.output_error is not None:
            yield f"outputs against the plain model's: {self.output_error:.1e}"
        if self.sum_error is not None:
            yield f"sum over samples against the ordinary gradient: {self.sum_error:.1e}"
        if self.influences:
            yield "mixing: " + "\n        ".join(_influence_lines(self.influences, self.batch_size))
        elif self.batch_size > 1:
            of = "output or gradient" if self.refusal is None else "output"
            yield f"mixing: none; each sample was changed in turn, and no other's {of} moved"
        for note in self.notes:
            yield f"note: {note}"
        if self.refusal is not None:
            yield f"refused: {type(self.refusal).__name__}: {self.refusal}"
        yield f"verdict: {'ok' if self.ok else 'refused' if self.refusal is not None else 'NOT OK'}"


def _influence_lines(influences: Sequence[Influence], n: int) -> list[str]:
    """Return one sentence per source of an influence, or one in all if every sample affects every other."""
    lines = []
    for what in dict.fromkeys(influence.what for influence in influences):
        of_value = [influence for influence in influences if influence.what == what]
        whose = {"grad_sample": "the grad_sample", "loss": "the loss's gradient"}.get(what, what)
        if sum(len(influence.targets) for influence in of_value) == n * (n - 1):
            lines.append(f"every sample changes {whose} of every other")
            continue
        lines += [f"sample {i.source} changes {whose} of {_samples(i.targets)}" for i in of_value]
    return lines


def _samples(targets: Sequence[int]) -> str:
    """Format sample numbers with runs of neighbours: ``samples 1, 3 to 7``."""
    by_run = groupby(enumerate(targets), lambda pair: pair[1] - pair[0])  # neighbours differ as their positions do
    runs = [[target for _, target in run] for _, run in by_run]
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"sample{'s' if len(targets) > 1 else ''} {', '.join(words)}"
