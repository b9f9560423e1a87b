"""Sizes in the symbol B."""

from __future__ import annotations

import sympy
import torch

from fxgrad.samples.symbols import UNKNOWN, Symbols, expression


def made() -> tuple[Symbols, torch.SymInt, torch.SymInt]:
    """Symbols with a batch of 7 and a length of 5."""
    symbols = Symbols()
    return symbols, symbols.batch(7), symbols.new("T0", 5)


def test_sizes_are_shown_in_their_names() -> None:
    symbols, b, t = made()
    assert symbols.show_shape([b, 12 * b, b * t, t + 1, 4]) == "[B, 12*B, B*T0, T0 + 1, 4]"


def test_which_sizes_hold_the_batch() -> None:
    symbols, b, t = made()
    assert symbols.batch_dims([4, b, t, 2 * b, b * t]) == [1, 3, 4]
    assert not symbols.holds_batch(7)  # its hint is no reason


def test_rows_of_packed_data_hold_it_too() -> None:
    symbols, _, t = made()
    assert not symbols.holds_batch(t)
    symbols.count_rows(t)
    assert symbols.holds_batch(t) and symbols.holds_batch(2 * t)


def test_numbers_of_sizes() -> None:
    symbols, b, t = made()
    assert [symbols.evaluate(size, 3) for size in (b, 2 * b + t, 4, "same")] == [3, 11, 4, "same"]


def test_a_size_that_the_data_decides() -> None:
    symbols, b, _ = made()
    with symbols.mode:
        found = torch.ones(4).nonzero().shape[0]
    assert symbols.evaluate(found, 3) == UNKNOWN
    assert symbols.evaluate(found + b, 3) == UNKNOWN + 3


def test_a_size_as_an_expression() -> None:
    symbols, b, _ = made()
    assert expression(b) == symbols.symbol
    assert expression(2 * b) == 2 * symbols.symbol
    assert expression(7) == sympy.Integer(7)


def test_an_op_that_fixes_the_batch_is_noticed() -> None:
    symbols, b, t = made()
    assert t == 5 and not symbols.specialised()  # another size may be fixed
    assert b == 7 and symbols.specialised()


def test_equal_hints_are_no_reason_for_one_symbol() -> None:
    symbols = Symbols()
    b, t = symbols.batch(5), symbols.new("T0", 5)
    assert expression(b) != expression(t)


def test_a_batch_is_neither_one_nor_none() -> None:
    """Shapes are followed for the batches to come, of which no size is 0 or 1."""
    symbols, b, _ = made()
    with symbols.mode:
        x = torch.empty(b, 3)
        assert x.stride() == (3, 1) and x.shape[0] is not None
        assert bool(b > 1)
    assert not symbols.specialised()
