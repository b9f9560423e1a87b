"""Each kind of term: what it answers from its factors, against the gradients multiplied out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxgrad.gradients.parts import merged
from fxgrad.kernels.settings import Settings
from fxgrad.samples.symbols import expression
from fxgrad.terms import Einsum, Materialised, OneHot, Part, Patches, Product, Table, Term, Windows
from fxgrad.terms.part import Packed
from fxgrad.terms.work import Way

N = 6


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N, *shape, dtype=dtype)


def windows(groups: int = 1, transposed: bool = False) -> Term:
    settings = Settings((1, 1), (1, 1), (1, 1), transposed, (0, 0), groups)
    return Term("nko...,nk...i->noi", randn(2, 4, 5, 6), Patches(randn(2, 4, 5, 6), (4, 4 // groups, 3, 3), settings))


def table(padding: int | None = None, classes: int = 7, width: int = 3, shape: tuple[int, ...] | None = None) -> Term:
    ids = OneHot(torch.randint(classes, (N, 2, 4)), classes, padding)
    return Term("n...v,n...d->nvd", ids, randn(2, 4, width), shape=shape)


COMPLEX = torch.complex128
TERMS: dict[str, tuple[type[Term], Callable[[], Term]]] = {
    "one position": (Product, lambda: Term("n...o,n...i->noi", randn(5), randn(3))),
    "positions": (Product, lambda: Term("n...o, n...i -> noi", randn(2, 4, 5), randn(2, 4, 3))),
    "in other letters": (Product, lambda: Term("n...a,n...b->nab", randn(4, 5), randn(4, 3))),
    "in another shape": (Product, lambda: Term("n...o,n...i->noi", randn(4, 4), randn(4, 3), shape=(2, 6))),
    "complex": (Product, lambda: Term("n...o,n...i->noi", randn(4, 5, dtype=COMPLEX), randn(4, 3, dtype=COMPLEX))),
    "table": (Table, table),
    "table with padding": (Table, lambda: table(padding=2)),
    "table in another shape": (Table, lambda: table(shape=(3, 7))),
    "windows": (Windows, windows),
    "windows in groups": (Windows, lambda: windows(groups=2)),
    "transposed windows": (Windows, lambda: windows(transposed=True)),
    "sum": (Einsum, lambda: Term("n...o->no", randn(4, 5))),
    "one position's sum": (Einsum, lambda: Term("n...o->no", randn(1, 5))),
    "entries": (Einsum, lambda: Term("nkc...,nkc...->nc", randn(2, 3, 4), randn(2, 3, 4))),
    "three factors": (Einsum, lambda: Term("n...o,n...i,n...j->noij", randn(4, 2), randn(4, 3), randn(4, 5))),
    "a shared factor": (Einsum, lambda: Term("nab,b->nab", randn(2, 3), torch.ones(3, dtype=torch.float64))),
    "broadcast": (Einsum, lambda: Term("n...,n...i->ni", randn(4), randn(1, 3))),
}
every_term = pytest.mark.parametrize("name", TERMS)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def made(name: str) -> tuple[Term, Tensor]:
    """A term and the gradients that its equation gives, by `torch.einsum` of factors without kinds."""
    term = TERMS[name][1]()
    return term, term.dense()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, check_dtype=False)


def choose(term: Term) -> Way:
    return next(way for way in term.contraction().ways if way is not Way.MATERIALISE)


@every_term
def test_the_constructor_picks_the_kind(name: str) -> None:
    kind, make = TERMS[name]
    term = make()
    assert type(term) is kind and isinstance(term, Term)
    assert type(term.scaled(lambda factor: factor * 2)) is kind and type(copy.copy(term)) is kind
    close(term.scaled(lambda factor: factor * 2).dense(), 2 * term.dense())


@pytest.mark.parametrize("name", [name for name, (kind, _) in TERMS.items() if kind in (Product, Einsum)])
def test_gradients_are_the_einsum(name: str) -> None:
    term, dense = made(name)
    close(dense, torch.einsum(str(term.equation), *term.tensors()).reshape(dense.shape))


@every_term
def test_shapes_are_known_without_multiplying_out(name: str) -> None:
    term, dense = made(name)
    assert term.own_shape() == dense.shape[1:] and term.dtype() == dense.dtype
    assert term.contraction().elements == dense[0].numel()
    assert term.contraction().factors > 0 and expression(term.flops()) > 0


@every_term
def test_norms_and_their_bounds(name: str) -> None:
    term, dense = made(name)
    truth = dense.flatten(1).abs().square().sum(1).sqrt()
    for norms, bounds in (term.norms(choose), term.materialised().norms(choose)):
        close(norms, truth)
        assert bool((bounds >= truth * (1 - 1e-15)).all()) and bool((bounds <= truth * (1 + 1e-9)).all())
    close(term.materialised().rows, dense)
    assert bool((term.rounding() < 1e-9).all())


@every_term
def test_weighted_sums_and_products(name: str) -> None:
    term, dense = made(name)
    c, vector = torch.rand(N, dtype=torch.float64), torch.randn(dense.shape[1:], dtype=torch.float64)
    c[1] = 0
    for onednn in (False, True):
        total = term.weighted(c, False, onednn)
        close(
            total.reshape(dense.shape[1:]),
            (
                dense.mT @ c.to(dense.dtype)
                if dense.dim() == 2
                else torch.einsum("n,n...->...", c.to(dense.dtype), dense)
            ),
        )
    close(term.dot(vector.to(dense.dtype)), (dense * vector).flatten(1).sum(1))


@every_term
def test_groups_of_samples(name: str) -> None:
    term, dense = made(name)
    close(term.grouped(2).dense(), dense.unflatten(0, (-1, 2)).sum(1))


@every_term
def test_lines_are_read_from_what_an_operator_gets(name: str) -> None:
    term, dense = made(name)
    readable = term.by_lines()
    packed = Packed.of([readable, readable], dense.dtype)
    again, same = packed.parts()
    assert type(again) is type(same) is type(readable)
    width = again.width or 1
    count = dense[0].numel() // width
    lines = dense.reshape(N, count, width)
    for chosen in (slice(0, 2), slice(1, count), torch.tensor([0, count - 1])):
        close(again.read(chosen, width), lines[:, chosen].flatten(1))
    touched = again.touched()
    if touched is not None:
        others = [line for line in range(count) if line not in touched]
        assert not lines[:, others].any()


def test_what_factors_give_at_once() -> None:
    for name in TERMS:
        term, dense = made(name)
        rows, gram, squares = dense.flatten(1), term.gram(dense.dtype), term.squares()
        assert gram is not None or name != "one position"
        if gram is not None:
            close(gram, rows @ rows.t())
        if squares is not None:
            close(squares, rows.square().sum(0))


def test_parts_of_one_form_are_merged_in_the_order_of_the_kinds() -> None:
    names = ["table", "sum", "positions", "table with padding", "in other letters", "table", "in another shape"]
    parts: list[Part] = [made(name)[0] for name in names] + [Materialised(randn(5)), Materialised(randn(5))]
    found = merged(parts)
    assert [type(part) for part in found] == [Einsum, Product, Product, Table, Table, Materialised]
    sums = {Product: [parts[2], parts[4]], Table: [parts[0], parts[5]]}
    for part in (found[2], found[3]):
        close(part.dense(), sum((one.dense() for one in sums[type(part)]), torch.zeros(())))  # type: ignore[index]
    close(found[-1].dense(), parts[-1].dense() + parts[-2].dense())


def test_tables_of_other_lines_are_not_merged() -> None:
    parts: list[Part] = [table(), table(classes=21, width=1, shape=(7, 3))]
    assert merged(parts) == parts
    close(parts[1].added_to(parts[0].dense()), parts[0].dense() + parts[1].dense())


def test_a_few_rows_are_added_in_their_places() -> None:
    total = randn(50, 3)
    rows = table(classes=50, padding=1)
    close(rows.added_to(total), total + rows.dense())
