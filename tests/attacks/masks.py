"""Values under a mask whose op does not work, or is another one, on the values that the mask leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.attacks.model import Program, attacks


def counts(x: Tensor) -> Tensor:
    """Count to 0, 1 or 2 for each number."""
    return (x > 0).long() + (x > 1).long()


def divided(how: Any) -> Program:
    """The program that scales by counts, where those above one are ``how`` of themselves: one less is never zero."""

    def program(m: Any, x: Tensor) -> Tensor:
        c = counts(x) + counts(x.flip(1))
        mask = c > 1
        c[mask] = how(c[mask])
        return m(x) * c

    return program


def remainder_in_place(c: Tensor) -> Tensor:
    c %= c - 1
    return c


def quotient_in_place(c: Tensor) -> Tensor:
    c //= c - 1
    return c


def shifted_in_place(c: Tensor) -> Tensor:
    c <<= c - 1
    return c


def of_a_float(m: Any, x: Tensor) -> Tensor:
    h, mask = m(x).clone(), x > 0.5
    rest = h[mask]
    rest %= 0.3
    h[mask] = rest
    return h


def by_the_first(m: Any, x: Tensor) -> Tensor:
    c = counts(x)
    mask = c > 1
    c[mask] = c[mask] // c[0, 0].clamp(min=1)
    return m(x) * c


ATTACKS = attacks(
    "masks",
    right={
        "a remainder of a number": divided(lambda c: 7 % (c - 1)),
        "a remainder": divided(lambda c: c % (c - 1)),
        "a remainder in place": divided(remainder_in_place),
        "a quotient": divided(lambda c: c // (c - 1)),
        "a quotient in place": divided(quotient_in_place),
        "a quotient of a number": divided(lambda c: 7 // (c - 1)),
        "a quotient without its fraction": divided(lambda c: torch.div(c, c - 1, rounding_mode="trunc")),
        "a rest of the sign": divided(lambda c: torch.fmod(-c, c - 1)),
        "a remainder of a tensor": divided(lambda c: torch.remainder(torch.tensor(5), c - 1)),
        "a remainder by truth": divided(lambda c: torch.remainder(c, c > 1)),
        "a true quotient": divided(lambda c: (c / (c - 1)).long()),
        "a power": divided(lambda c: 2 ** (c - 1)),
        "shifted in place": divided(shifted_in_place),
        "a remainder of a float": of_a_float,
    },
    refused={"a quotient by the first": by_the_first},
)
