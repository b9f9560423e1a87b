"""Change each sample in turn, and look at whom else it reaches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fxgrad.batch import tensors_in
from fxgrad.errors import FxgradError
from fxgrad.samples.layouts import Layout, samples_first
from fxgrad.verification.verdict import Influence
from fxgrad.verification.witness import Nest, Whole, Witness, differs

Found = dict[str, Tensor] | FxgradError  # every parameter's grad_sample, or why there is none


def probe(
    witness: Witness, whole: Whole, transformed: Callable[[Nest], Found], found: Found
) -> tuple[list[Layout | None], list[Influence]]:
    """Where the samples are in every output, and which samples see each other.

    Where a value's dimension may hold the samples in more than one way, the one is taken in which they see
    each other least. What the loss or the gradients make of an output that already mixes says nothing new.
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
        again = found if isinstance(found, FxgradError) else transformed(witness.inputs.changed(i))
        if not isinstance(found, FxgradError) and not isinstance(again, FxgradError):
            grads.add(i, _rows_of_grads(again, found, n))
    best = [min(seen, key=len, default=None) for seen in outputs]
    influences = [item for k, way in enumerate(best) if way for item in way.influences(f"output {k}")]
    influences = influences or loss.influences("loss") or grads.influences("grad_sample")
    return [way.place if way else None for way in best], influences


class _Seen:
    """Which samples a change of each sample reached, if ``place`` is where they are."""

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
    """The outputs of a sample alone, for their shapes; None where the model does not take one alone."""
    try:
        with witness.forward(witness.model, witness.inputs.sample(0)) as output:
            leaves = [leaf.detach() for leaf in tensors_in(output)]
    except Exception:  # such as batch_norm's, which wants two
        leaves = []
    return leaves if len(leaves) == len(whole.outputs) else [None] * len(whole.outputs)


def candidates(value: Tensor, alone: Tensor | None, n: int) -> list[Layout]:
    """Where the samples may be in an output, most likely first; ``alone`` is one sample's, if it could be had."""
    if alone is not None and alone.shape == value.shape and n > 1:
        return []
    dims = [d for d in range(value.dim()) if value.shape[d] and value.shape[d] % n == 0]
    if alone is not None and alone.dim() == value.dim():
        dims = [d for d in dims if n == 1 or value.shape[d] == n * alone.shape[d]]
    found = []
    for d in dims:
        k = value.shape[d] // n
        found += [Layout(d, outer, k // outer) for outer in range(1, k + 1) if k % outer == 0]
    return found


def rows_changed(after: Tensor, before: Tensor, place: Layout, n: int) -> list[int]:
    """The samples whose part of a value differs."""
    if after.shape != before.shape:
        return list(range(n))
    different = differs(after, before)
    different = different.flatten(before.dim()).any(-1) if different.dim() > before.dim() else different
    changed = samples_first(different, place, n).flatten(1).any(1)
    return [i for i in range(n) if changed[i]]


def _rows_of_loss(
    by_output: Sequence[Tensor | None], whole: Whole, options: Sequence[Sequence[Layout]], n: int
) -> list[int]:
    """The samples at whose outputs the loss has another gradient."""
    found: set[int] = set()
    for g, before, places in zip(by_output, whole.by_output, options, strict=True):
        if g is not None and before is not None and places:
            ways = [rows_changed(g, before, place, n) for place in places]
            found.update(ways[min(range(len(ways)), key=lambda k: len(ways[k]))])
    return sorted(found)


def _rows_of_grads(after: Mapping[str, Tensor], before: Mapping[str, Tensor], n: int) -> list[int]:
    rows = [rows_changed(after[name], g, Layout(0), n) for name, g in before.items()]
    return sorted(set().union(*rows))
