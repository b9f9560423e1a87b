"""The probe: it changes each sample in turn and records the other samples that change with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fxgrad.errors import FxgradError
from fxgrad.samples.batch import tensors_in
from fxgrad.samples.layouts import Layout, samples_first
from fxgrad.verification.oracle import Grads
from fxgrad.verification.verdict import Influence
from fxgrad.verification.witness import Nest, Whole, Witness, differs

Rows = list[list[int]]  # for each sample, the samples whose values its change reached


def probe(
    witness: Witness, whole: Whole, transformed: Callable[[Nest], Grads], unchanged: Grads | None
) -> list[Influence]:
    """Set the layout of the samples in each output of ``whole``, and return the influences between samples.

    If a value has several possible layouts, take the one with the fewest influences. Influences on the loss or the
    gradients are reported only if no output mixes samples.
    """
    n = witness.n
    options = [candidates(y, one, n) for y, one in zip(whole.outputs, _one_alone(witness, whole), strict=True)]
    whole.places = [places[0] if places else None for places in options]
    if n == 1:
        return []
    outputs: list[list[Rows]] = [[[] for _ in places] for places in options]
    loss: Rows = []
    grads: Rows = []
    for i in range(n):
        nest = witness.inputs.changed(i)
        with witness.forward(witness.model, nest) as output:
            leaves = tensors_in(output)
            by_output = witness.by_output(output)
        for y, before, places, reached in zip(leaves, whole.outputs, options, outputs, strict=True):
            for place, rows in zip(places, reached, strict=True):
                rows.append(rows_changed(y.detach(), before, place, n))
        loss.append(_rows_of_loss(by_output, whole, options, n))
        grads.append([])
        if unchanged is not None:
            with contextlib.suppress(FxgradError):
                grads[i] = _rows_of_grads(transformed(witness.inputs.changed(i)), unchanged, n)
    influences: list[Influence] = []
    for k, (places, reached) in enumerate(zip(options, outputs, strict=True)):
        each = [_influences(rows, f"output {k}") for rows in reached]
        if each:
            best = min(range(len(each)), key=lambda way: sum(len(one.targets) for one in each[way]))
            whole.places[k] = places[best]
            influences += each[best]
    return influences or _influences(loss, "loss") or _influences(grads, "grad_sample")


def _influences(rows: Rows, value: str) -> list[Influence]:
    others = [tuple(j for j in reached if j != i) for i, reached in enumerate(rows)]
    return [Influence(i, targets, value) for i, targets in enumerate(others) if targets]


def _one_alone(witness: Witness, whole: Whole) -> Sequence[Tensor | None]:
    """Return the outputs for one sample alone, for their shapes; None if the model rejects a batch of one."""
    try:
        with witness.forward(witness.model, witness.inputs.sample(0)) as output:
            leaves = [leaf.detach() for leaf in tensors_in(output)]
    except Exception:  # such as that of batch_norm, which needs two samples
        leaves = []
    return leaves if len(leaves) == len(whole.outputs) else [None] * len(whole.outputs)


def candidates(value: Tensor, alone: Tensor | None, n: int) -> list[Layout]:
    """Return the possible layouts of an output, most likely first; ``alone`` is the output for one sample, or None."""
    if alone is not None and alone.shape == value.shape and n > 1:
        return []
    dims = [d for d in range(value.dim()) if value.shape[d] and value.shape[d] % n == 0]
    if alone is not None and alone.dim() == value.dim():
        dims = [d for d in dims if n == 1 or value.shape[d] == n * alone.shape[d]]
    layouts = []
    for d in dims:
        k = value.shape[d] // n
        layouts += [Layout(d, outer, k // outer) for outer in range(1, k + 1) if k % outer == 0]
    return layouts


def rows_changed(after: Tensor, before: Tensor, place: Layout, n: int) -> list[int]:
    """Return the samples whose part of a value differs."""
    if after.shape != before.shape:
        return list(range(n))
    different = differs(after, before)
    different = different.flatten(before.dim()).any(-1) if different.dim() > before.dim() else different
    changed = samples_first(different, place, n).flatten(1).any(1)
    return [i for i in range(n) if changed[i]]


def _rows_of_loss(
    by_output: Sequence[Tensor | None], whole: Whole, options: Sequence[Sequence[Layout]], n: int
) -> list[int]:
    """Return the samples at whose outputs the gradient of the loss differs."""
    changed: set[int] = set()
    for g, before, places in zip(by_output, whole.by_output, options, strict=True):
        if g is not None and before is not None and places:
            fewest = min([rows_changed(g, before, place, n) for place in places], key=len)
            changed.update(fewest)
    return sorted(changed)


def _rows_of_grads(after: Mapping[str, Tensor], before: Mapping[str, Tensor], n: int) -> list[int]:
    rows = [rows_changed(after[name], g, Layout(0), n) for name, g in before.items()]
    return sorted(set().union(*rows))
