"""What of a table of parameters `make test` takes; the rest is left to `make long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

TRACED = ["aot_eager", pytest.param("eager", marks=pytest.mark.long)]
"""AOTAutograd makes the graph functional that "eager" runs as it is: right through the first says all but that much."""


def long_but(quick: Callable[..., bool], rows: Iterable[Any]) -> list[Any]:
    """Mark each row for `make long` but those of which `quick` is true; a tuple is what `quick` is called with."""
    return [
        pytest.param(*of, marks=() if quick(*of) else pytest.mark.long)
        for of in (row if isinstance(row, tuple) else (row,) for row in rows)
    ]
