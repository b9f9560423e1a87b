"""Steps that are written as texts: `"{x} * {n}"` takes rows `x` of shape [B, C] and a number `n`.

A text with slots makes two or three steps. Each slot is filled from its own table (`slots.py`), with numbers, rows or
indices that keep samples apart, or with such that do not; so whatever has to be refused has a twin that must not be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tests.steps.builder import Builder, Layout, Value
from tests.steps.expected import Expected
from tests.steps.slots import FILLS
from tests.steps.step import Build, Step, Table


def texts(
    kind: str,
    *,
    apart: Mapping[str, str] | None = None,
    mixes: Mapping[str, str] | None = None,
    depends: Mapping[str, str] | None = None,
    either: Mapping[str, str] | None = None,
) -> Table:
    """The steps of one kind; those of `either` have slots, and are what is filled in."""
    columns = {Expected.APART: apart, Expected.MIXES: mixes, Expected.DEPENDS: depends}
    steps = [
        Step(kind, name, written(text, expected), expected)
        for expected, column in columns.items()
        for name, text in (column or {}).items()
    ]
    for name, text in (either or {}).items():
        steps += [
            Step(kind, f"{name}, {expected.name.lower()}", written(text, expected), expected)
            for expected in Expected
            if any(FILLS[expected].get(slot) for slot in slots_of(text))
        ]
    return steps


# ---------------------------------------------------------------------------- texts

PLACE = re.compile(r"\{([a-zA-Z]\w*)\}")
WIDEST = 8  # columns of the rows that a text works on


def slots_of(text: str) -> list[str]:
    """The slots of a text, in order, each once."""
    known = {slot for fills in FILLS.values() for slot in fills}
    return list(dict.fromkeys(slot for slot in PLACE.findall(text) if slot in known))


def written(text: str, expected: Expected) -> Build:
    """The step that writes the text; its last line is the new value, of the shape of the rows."""

    def build(b: Builder, v: Value) -> Value | None:
        x = rows(b, v)
        if x is None:
            return None
        code, learned = expand(b, text, x, expected)
        *lines, result = code.split("\n")
        b.lines.extend(lines)
        return b.like(result, x, learned=learned)

    return build


def expand(b: Builder, text: str, x: Value, expected: Expected) -> tuple[str, bool]:
    """The text with all of its places filled, and whether a parameter is in it.

    One slot decides: it is filled as expected; where the step mixes, each of the others may.
    """
    slots = slots_of(text)
    deciding = [slot for slot in slots if FILLS[expected].get(slot)]
    decides = b.rng.choice(deciding) if deciding else ""
    filled: dict[str, str] = {}
    for slot in slots:
        mixes_too = expected is Expected.MIXES and b.chance(0.5)
        kind = expected if slot == decides else Expected.MIXES if mixes_too else Expected.APART
        filled[slot] = b.rng.choice(FILLS[kind].get(slot) or FILLS[Expected.APART][slot])
        if slots_of(filled[slot]):
            filled[slot] = expand(b, filled[slot], x, kind)[0]
        if " " in filled[slot] and slot not in ("at", "br"):
            filled[slot] = f"({filled[slot]})"
    for slot, code in filled.items():
        text = text.replace(f"{{{slot}}}", code)
    names: dict[str, str] = {}

    def place(match: re.Match[str]) -> str:
        key = match[1]
        if key not in names:
            names[key] = PLACES[key](b, x)
        return names[key]

    code = PLACE.sub(place, text)
    return code, "self.p" in code or "self.m" in code


def class_ids(b: Builder, x: Value) -> str:
    """A class below C for each sample: from an integer input, or the place of the largest value."""
    flat = [ids for ids in b.ids if ids.rank == 1 and ids.layout == Layout(0)]
    return f"({flat[0].name} % {x.shape[1]})" if flat and b.chance(0.5) else f"{x.name}.argmax(1)"


PLACES: dict[str, Callable[[Builder, Value], str]] = {
    "x": lambda b, x: x.name,
    "B": lambda b, x: b.rng.choice(["B", f"{x.name}.shape[0]", f"len({x.name})", f"{x.name}.size(0)"]),
    "C": lambda b, x: str(x.shape[1]),
    "ids": class_ids,
    "p": lambda b, x: b.bare((x.shape[1],)),
    "W": lambda b, x: b.bare((x.shape[1], x.shape[1])),
    "k": lambda b, x: b.constant((x.shape[1],)),
    "m": lambda b, x: b.module(f"nn.Linear({x.shape[1]}, {x.shape[1]})"),
    "state": lambda b, x: b.buffer(f"torch.zeros({x.shape[1]})"),
    **{letter: lambda b, x: b.name("a") for letter in ("y", "z", "t")},
}
"""What stands for a place that is no slot: the same within one text."""


def rows(b: Builder, v: Value) -> Value | None:
    """The value as [B, C] with C between 2 and `WIDEST`, the samples in front; None where it has no samples."""
    if v.layout is None or v.numel == 0:
        return None
    if v.layout.dim != 0 or v.shape[0] != 1:
        d, outer, inner = v.layout
        sizes = [*v.sizes()[:d], str(outer), "B", str(inner), *v.sizes()[d + 1 :]]
        shape = (1, *v.shape[:d], outer, inner, *v.shape[d + 1 :])
        v = b.emit(f"{v.name}.reshape({', '.join(sizes)}).movedim({d + 1}, 0)", shape, Layout(0), v)
    if v.rank != 2:
        v = b.emit(f"{v.name}.reshape(B, {v.numel})", (1, v.numel), Layout(0), v)
    if v.shape[1] > WIDEST:
        v = b.emit(f"{v.name}[:, :{WIDEST}]", (1, WIDEST), Layout(0), v)
    if v.shape[1] == 1:
        v = b.emit(f"torch.cat([{v.name}, {v.name}.cos()], 1)", (1, 2), Layout(0), v)
    return v
