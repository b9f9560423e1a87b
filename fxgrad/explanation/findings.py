"""What `fxgrad.explain` found, as data and as text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxgrad.printing import table

VERSION = 1  # of to_dict()


@dataclass(frozen=True)
class Cost:
    """A cost as a formula in the symbolic sizes, and the number it is for the batch at hand.

    ``formula`` is empty and ``value`` None where it is not known, ``value`` alone where the data decides.
    """

    formula: str = ""
    value: int | None = None


@dataclass(frozen=True)
class Option:
    """One way to contract a use's gradient, and what it takes; ``milliseconds`` are the cost model's estimate."""

    way: str
    flops: Cost
    bytes: Cost
    milliseconds: float


@dataclass(frozen=True)
class Contracted:
    """The way that was chosen, where the gradient itself is not asked for."""

    way: str
    why: str
    materialised: bool  # the gradients [B, *shape] are a value of the graph, and held to the end of the backward
    options: tuple[Option, ...] = ()  # every way it can have; none where there is nothing to choose


@dataclass(frozen=True)
class Step:
    """One op in which a parameter, or a function of parameters, is differentiated."""

    op: str
    node: str  # its name in the graph
    by: str  # "rule", "elementwise", "generic" or "own backward"
    of: str  # the function of parameters that it uses: "" for the parameter itself
    terms: tuple[str, ...]  # the einsums of its gradient per sample; "summed" where the rule gives a tensor
    module: str
    line: str  # of the user's source: file, number, code
    output: str  # dtype and shape of its output
    samples: str  # where they are in it
    flops: Cost
    contracted: Contracted | None = None  # None where the gradients themselves are asked for


@dataclass(frozen=True)
class Explained:
    """One parameter; ``status`` is "trained", "unused" or "frozen".

    Where ``materialised`` is False, no value of the compiled graph has its gradients of all samples.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    status: str
    bytes: Cost  # of its gradients, multiplied out
    steps: tuple[Step, ...] = ()
    materialised: bool = True


@dataclass(frozen=True)
class Total:
    """One line of the totals: the plain step's, and the transformed model's."""

    what: str
    unit: str
    plain: Cost
    fxgrad: Cost


@dataclass(frozen=True)
class Value:
    """One value of the rewritten graph, and how it is drawn."""

    name: str
    op: str
    kind: str  # "constant", "uniform", "batched" or "mixed"
    modules: tuple[str, ...]  # the modules it is computed in, outermost first
    line: str
    dtype: str
    sizes: tuple[str, ...]
    samples: str
    sample_dim: int | None
    operands: tuple[str, ...]  # names of values
    parameters: tuple[str, ...]  # names of trainable parameters
    constants: tuple[str, ...]  # names of frozen parameters, buffers and inputs that all samples share
    tap: str = ""  # how it is differentiated: "rule: n...o,n...i->noi"


@dataclass(frozen=True)
class Explanation:
    """What fxgrad does with a model: ``str()`` is a table, `to_dict` data for JSON, `to_html` a page."""

    model: str
    batch_size: int
    sizes: dict[str, int]  # symbol -> size
    parameters: tuple[Explained, ...]
    totals: tuple[Total, ...]
    notes: tuple[str, ...]
    values: tuple[Value, ...]  # of the graph, in its order: inputs, ops, the output
    quantities: tuple[str, ...] = ()
    machine: str = ""  # that milliseconds are estimated for

    def to_dict(self) -> dict[str, Any]:
        """Everything, in what JSON knows; ``version`` changes when a key's meaning does."""
        found: dict[str, Any] = _plain({"version": VERSION, **_fields(self)})
        return found

    def to_html(self, path: str | Path | None = None) -> str:
        """A page with the table and the graph, which needs nothing but itself; written to ``path`` where given."""
        from fxgrad.explanation.drawing import page

        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        right = {8} if self.machine else {7, 8}
        rows = [row for p in self.parameters for row in _rows(p, bool(self.machine))]
        lines = [self.heading(), "", *table(titles_of(self), rows, right=right)]
        if self.machine:
            rows = [row for p in self.parameters for row in options_of(p)]
            titles = ["parameter", "use", "way", "flops", "bytes", "ms", "why"]
            lines += ["", f"estimated for {self.machine}", *table(titles, rows, right={3, 4, 5})] if rows else []
        titles = ["total", "plain step", "with fxgrad"]
        rows = [[t.what, show(t.plain, t.unit), show(t.fxgrad, t.unit)] for t in self.totals]
        lines += ["", *table(titles, rows, right={1, 2})]
        lines += [""] * bool(self.notes) + [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__

    def heading(self) -> str:
        """The model, and the sizes that numbers are given for."""
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        return f"{self.model} at {sizes}" + (f", for {', '.join(self.quantities)}" if self.machine else "")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(_fields(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def titles_of(found: Explanation) -> list[str]:
    """The columns of the table: gradients that are asked for have a size, others a way."""
    size = "way" if found.machine else "grad_sample"
    return ["parameter", "shape", "use", "line", "by", "term", "samples", size, "flops"]


def _rows(p: Explained, ways: bool) -> list[list[str]]:
    """The parameter's lines of the table: one for each step, one where there is none."""
    first = [", ".join([p.name, *p.aliases]), str(list(p.shape))]
    size = "" if ways else show(p.bytes, "B")
    if not p.steps:
        return [[*first, p.status, "", "", "", "", size, ""]]
    return [
        [
            *(first if i == 0 else ["", ""]),
            *cells(step),
            way_cell(step) if ways else size if i == 0 else "",
            show(step.flops, ""),
        ]
        for i, step in enumerate(p.steps)
    ]


def way_cell(step: Step) -> str:
    """The way of a step."""
    return "" if step.contracted is None else step.contracted.way


def options_of(p: Explained) -> list[list[str]]:
    """What each way of a parameter's uses takes, the chosen one with its reason; of one way there is nothing to say."""
    rows = []
    for step in p.steps:
        found = step.contracted
        for option in found.options if found is not None and len(found.options) > 1 else ():
            assert found is not None
            why = found.why if option.way == found.way else ""
            numbers = [show(option.flops, ""), show(option.bytes, "B"), f"{option.milliseconds:.3g}"]
            rows.append([p.name, cells(step)[0], option.way, *numbers, why])
    return rows


def cells(step: Step) -> list[str]:
    """Use, line, strategy, term and samples of a step, as text."""
    use = f"{step.op} of {step.of}" if step.of else step.op
    line = step.line.split("   ")[0] or step.module.split(":")[0]
    return [use, line, step.by, "; ".join(step.terms), step.samples]


_PREFIXES = ("", "k", "M", "G", "T", "P")


def show(cost: Cost, unit: str) -> str:
    """A number in three digits: ``1.23 MB``; the formula where there is no number."""
    value: float | None = cost.value
    if value is None:
        return cost.formula
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = str(cost.value) if power == 0 else f"{value:.3g}"
    return f"{digits} {_PREFIXES[power]}{unit}".rstrip()
