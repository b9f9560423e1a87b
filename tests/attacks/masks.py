"""Values under a mask: ops that fail on what the mask leaves out, and ops on whole rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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


def rows(how: Any) -> Program:
    """The program that replaces rows of a layer's output, where the first feature is positive, by ``how`` of them."""

    def program(m: Any, x: Tensor) -> Tensor:
        h, mask = m(x), x[:, 0] > 0
        new = h.clone()
        new[mask] = how(m, h[mask], x[mask])
        return new

    return program


def tokens(m: Any, x: Tensor) -> Tensor:
    """Two tokens a sample, those chosen through a small network."""
    h, mask = torch.stack([m(x), x], 1), x[:, :2] > 0
    new = h.clone()
    new[mask] = F.linear(m(h[mask]).relu(), m.weight).softmax(-1)
    return new.sum(1)


ATTACKS = attacks(
    "writes",
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
        "shifted by the method's name": divided(lambda c: c.__ilshift__(c - 1)),
        "or else, by the method's name": divided(lambda c: c.__ixor__(c - 1)),
        "a remainder of a float": of_a_float,
        "rows by softmax": rows(lambda m, h, x: h.softmax(-1)),
        "rows that are not finite elsewhere": rows(lambda m, h, x: (h / (x - 1)).log_softmax(-1)),
        "rows by a layer": rows(lambda m, h, x: m(h)),
        "rows by a matrix, in two names": rows(lambda m, h, x: (h @ m.weight).mul_(2) + m.bias),
        "tokens by layers": tokens,
    },
    refused={
        "a quotient by the first": by_the_first,
        "rows by softmax over rows": rows(lambda m, h, x: h.softmax(0)),
        "rows by their own products": rows(lambda m, h, x: h @ h.t() @ h),
        "rows by a matrix of all": rows(lambda m, h, x: h @ (m.weight * x.sum())),
        "rows by a vector of all": rows(lambda m, h, x: m.weight @ h.sum(0)),
    },
)
