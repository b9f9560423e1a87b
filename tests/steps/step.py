"""A step of a random program: its kind and name, how it is written, and what it does with samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.steps.builder import Builder, Value
from tests.steps.expected import Expected

Build = Callable[[Builder, Value], Value | None]


@dataclass(frozen=True)
class Step:
    """`build` writes the lines and returns the new value, or None where the step does not apply."""

    kind: str
    name: str
    build: Build
    expected: Expected


Table = list[Step]


def table(kind: str, expected: Expected) -> tuple[Table, Callable[[Build], Build]]:
    """A table, and the decorator that enters a function in it under the function's name."""
    steps: Table = []

    def enter(build: Build) -> Build:
        steps.append(Step(kind, build.__name__, build, expected))
        return build

    return steps, enter
