"""Two tapes: one multiplies out as it goes, one keeps factors; what quantities get from them is the same."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

import fxgrad
from fxgrad.costs.choices import Planner
from fxgrad.quantities import Quantity
from fxgrad.runtime import tape as tapes
from fxgrad.runtime.tape import DenseTape, FactorTape, Like, Tape, tape_for
from fxgrad.terms import Materialised, Term

N = 3
G, X = torch.randn(N, 5, 2, dtype=torch.float64), torch.randn(N, 5, 4, dtype=torch.float64)
ROWS = torch.einsum("nko,nki->noi", G, X)
NORMS, ROWS_OF_ALL = fxgrad.NormSample(), fxgrad.GradSample()


def new(quantities: Sequence[Quantity], loss_scale: float | str = 1) -> Tape:
    """Return a tape for one parameter, ``[2, 4]``."""
    likes = [Like("w", (2, 4), torch.float64)]
    return tape_for(quantities)(quantities, loss_scale, likes, [0] * len(quantities), Planner())


def product() -> Term:
    return Term("n...o,n...i->noi", G, X)


def results(tape: Tape) -> list[Tensor]:
    return [result for result in tape.results(N, G, []) if result is not None]


@pytest.mark.parametrize(
    "quantities, kind",
    [([ROWS_OF_ALL], DenseTape), ([NORMS], FactorTape), ([ROWS_OF_ALL, NORMS], FactorTape)],
    ids=["gradients", "norms", "both"],
)
def test_what_is_asked_for_decides_the_tape(quantities: list[Quantity], kind: type[Tape]) -> None:
    assert tape_for(quantities) is kind


def test_a_dense_tape_adds_up_as_it_goes() -> None:
    tape = new([ROWS_OF_ALL])
    tape.note(0, product())
    tape.note(0, ROWS)
    (part,) = tape.parts[0]
    assert isinstance(part, Materialised)
    torch.testing.assert_close(results(tape)[0], 2 * ROWS)


def test_a_factor_tape_keeps_factors() -> None:
    g, x = G[:, :1], X[:, :1]
    tape = new([NORMS])
    tape.note(0, Term("n...o,n...i->noi", g, x))
    (part,) = tape.parts[0]
    assert isinstance(part, Term)
    torch.testing.assert_close(results(tape)[0], (g.mT @ x).flatten(1).norm(dim=1))


def test_a_factor_tape_multiplies_out_what_is_smaller_so() -> None:
    tape = new([NORMS])
    tape.note(0, product())  # five positions of 2 + 4 numbers, and a gradient of 8
    (part,) = tape.parts[0]
    assert isinstance(part, Materialised)
    torch.testing.assert_close(results(tape)[0], ROWS.flatten(1).norm(dim=1))


def test_norms_are_of_the_sum_of_two_uses() -> None:
    tape = new([NORMS])
    tape.note(0, product())
    tape.note(0, ROWS)
    torch.testing.assert_close(results(tape)[0], 2 * ROWS.flatten(1).norm(dim=1))


@pytest.mark.parametrize("loss_scale, factor", [(1, 1), (4.0, 4), ("mean", N)])
@pytest.mark.parametrize("quantity", [ROWS_OF_ALL, NORMS], ids=["gradients", "norms"])
def test_a_divided_loss_is_scaled_once(quantity: Quantity, loss_scale: float | str, factor: float) -> None:
    tape = new([quantity], loss_scale)
    tape.note(0, Term("n...o,n...i->noi", tape.scaled(G, N), X))
    expected = factor * ROWS
    torch.testing.assert_close(
        results(tape)[0], expected if quantity is ROWS_OF_ALL else expected.flatten(1).norm(dim=1)
    )


@pytest.mark.parametrize("quantity", [ROWS_OF_ALL, NORMS], ids=["gradients", "norms"])
def test_a_real_parameter_has_the_real_part(quantity: Quantity) -> None:
    tape = new([quantity])
    tape.note(0, torch.complex(ROWS, 3 * ROWS))
    torch.testing.assert_close(results(tape)[0], ROWS if quantity is ROWS_OF_ALL else ROWS.flatten(1).norm(dim=1))


def test_a_parameter_without_a_use_has_zeros() -> None:
    assert not results(new([ROWS_OF_ALL]))[0].any() and not results(new([NORMS]))[0].any()


def test_another_backward_forgets_one_that_was_left() -> None:
    tape = new([ROWS_OF_ALL])
    with mock.patch.object(tapes, "current_task", side_effect=[1, 1, 2]):
        tape.begin()
        tape.note(0, product())
        tape.begin()
        assert tape.parts
        tape.begin()
    assert not tape.parts
