"""What is read off an einsum equation, against what torch.einsum does with it."""

from __future__ import annotations

import doctest

import pytest
import torch

import fxgrad.ops.equation
from fxgrad.ops.equation import Equation, Subscripts

TEXTS = ["n...o,n...i->noi", "nkc...,nkc...->nc", "n...->n", "nab->nb", "nke,nki,nko->neio", "bi,oi", "...d,ed->...e"]


def test_the_examples_of_the_docstrings() -> None:
    found = doctest.testmod(fxgrad.ops.equation)
    assert found.attempted and not found.failed


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_and_written_back(text: str) -> None:
    assert str(Equation.of(text)) == text
    assert Equation.of(" ".join(text).replace("- >", "->").replace(". . .", "...")) == Equation.of(text)


@pytest.mark.parametrize("text", [text for text in TEXTS if "->" in text])
def test_names_are_the_dimensions_that_einsum_sees(text: str) -> None:
    equation, sizes = Equation.of(text), dict(zip("nkocidabet", range(2, 12), strict=True)) | {".1": 2, ".2": 3}
    ranks = [len(operand.letters) + 2 * operand.dots for operand in equation.inputs]
    shapes = [[sizes[name] for name in names] for names in equation.names(ranks)]
    result = torch.einsum(text, *map(torch.ones, shapes))
    assert list(result.shape) == [sizes[name] for name in equation.output_names(ranks)]
    assert equation.sizes(shapes).items() <= sizes.items()
    added = [sizes[name] for name in equation.summed(ranks)]
    assert result.unique().tolist() == [float(torch.tensor(added).prod())]


@pytest.mark.parametrize(
    ("text", "product"),
    {
        "n...o,n...i->noi": True,
        "n...a,n...b->nab": True,
        "n...a,n...b->nba": False,
        "n...a,n...a->naa": False,
        "n...o,n...n->non": False,
        "b...o,b...i->boi": False,
        "no,ni->noi": False,
        "n...o,n...i": False,
        "n...ot,n...it->noi": False,
        "n...o,n...i,n...j->noij": False,
    }.items(),
)
def test_what_is_a_product_over_positions(text: str, product: bool) -> None:
    assert Equation.of(text).is_product == product


def test_a_dimension_of_one_is_broadcast_whoever_comes_first() -> None:
    for shapes in ([(2, 1, 3), (2, 5, 4)], [(2, 5, 3), (2, 1, 4)]):
        assert Equation.of("n...o,n...i->noi").sizes(shapes)[".1"] == 5


def test_what_an_equation_says_of_itself() -> None:
    assert Equation.of("nab,nab->na").is_entrywise and not Equation.of("nab,nac->na").is_entrywise
    assert Equation.of("nab,b->na").has_shared_operand and not Equation.of("nab,nb->na").has_shared_operand
    assert Equation.of("ii->i").repeats_a_letter and not Equation.of("ij,jk->ik").repeats_a_letter
    assert Equation.of("ij->...ij").has_dots and not Equation.of("ij->ij").has_dots
    assert Equation.of("bi,oi").output is None and Equation.of("bi,oi->").output == Subscripts("")


def test_a_group_s_members_are_summed() -> None:
    g, x, w = torch.randn(6, 2, 3), torch.randn(6, 2, 4), torch.randn(4)
    equation = Equation.of("nao,nai,i->noi")
    grouped = torch.einsum(str(equation.in_groups()), g.view(2, 3, 2, 3), x.view(2, 3, 2, 4), w)
    torch.testing.assert_close(grouped, torch.einsum(str(equation), g, x, w).view(2, 3, 3, 4).sum(1))
