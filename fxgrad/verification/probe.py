"""The probe: it changes each sample in turn and records the other samples that change with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fxgrad.errors import FxgradError
from fxgrad.samples.batch import tensors_in
from fxgrad.samples.layouts import Layout, samples_first
from fxgrad.verification.verdict import Influence
from fxgrad.verification.witness import Nest, Whole, Witness, differs

Found = dict[str, Tensor] | FxgradError  # each parameter's grad_sample, or the refusal


def probe(
    witness: Witness, whole: Whole, transformed: Callable[[Nest], Found], unchanged: Found
) -> tuple[list[Layout | None], list[Influence]]:
    """Return the layout of the samples in each output, and the influences between samples.

    If a value has several possible layouts, take the one with the fewest influences. Influences on the loss or the
    gradients are reported only if no output mixes samples.
    """
    n = witness.n
    options = [candidates(y, one, n) for y, one in zip(whole.outputs, _one_alone(witness, whole), strict=True)]
    if n == 1:
        return [places[0] if places else None for places in options], []
    outputs = [[_Seen(place, n) for place in places] for places in options]
    loss, grads = _Seen(None, n), _Seen(None, n)
    for i in range(n):
        nest = witness.inputs.changed(i)
        with witness.forward(witness.model, nest) as output:
            leaves = tensors_in(output)
            by_output = witness.by_output(output)
        for y, before, seen in zip(leaves, whole.outputs, outputs, strict=True):
            for way in seen:
                assert way.place is not None
                way.add(i, rows_changed(y.detach(), before, way.place, n))
        loss.add(i, _rows_of_loss(by_output, whole, options, n))
        again = unchanged if isinstance(unchanged, FxgradError) else transformed(witness.inputs.changed(i))
        if not isinstance(unchanged, FxgradError) and not isinstance(again, FxgradError):
            grads.add(i, _rows_of_grads(again, unchanged, n))
    best = [min(seen, key=len, default=None) for seen in outputs]
    influences = [item for k, way in enumerate(best) if way for item in way.influences(f"output {k}")]
    influences = influences or loss.influences("loss") or grads.influences("grad_sample")
    return [way.place if way else None for way in best], influences


class _Seen:
    """The samples that a change of each sample reached, under the layout ``place``."""

    def __init__(self, place: Layout | None, n: int) -> None:
        self.place = place
        self.others: list[tuple[int, ...]] = [()] * n

    def add(self, i: int, rows: Sequence[int]) -> None:
        self.others[i] = tuple(j for j in rows if j != i)

    def __len__(self) -> int:
        return sum(len(targets) for targets in self.others)

    def __bool__(self) -> bool:
        return True

    def influences(self, what: str) -> list[Influence]:
        return [Influence(i, targets, what) for i, targets in enumerate(self.others) if targets]


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
            ways = [rows_changed(g, before, place, n) for place in places]
            changed.update(ways[min(range(len(ways)), key=lambda k: len(ways[k]))])
    return sorted(changed)


def _rows_of_grads(after: Mapping[str, Tensor], before: Mapping[str, Tensor], n: int) -> list[int]:
    rows = [rows_changed(after[name], g, Layout(0), n) for name, g in before.items()]
    return sorted(set().union(*rows))
