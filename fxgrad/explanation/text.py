"""An explanation as text tables."""

from __future__ import annotations

from collections.abc import Sequence

from fxgrad.explanation.findings import Cost, Explained, Findings, Step
from fxgrad.graph.printing import table

OPTION_TITLES = ("parameter", "use", "way", "flops", "bytes", "ms", "why")
TOTAL_TITLES = ("total", "plain step", "with fxgrad")
NUMBERS = {"grad_sample", "flops", "bytes", "ms", "plain step", "with fxgrad"}  # the titles of columns of numbers
PREFIXES = ("", "k", "M", "G", "T", "P")


def titles_of(findings: Findings) -> list[str]:
    """Return the titles of the columns: materialised gradients have a size, others a strategy."""
    size = "way" if findings.machine else "grad_sample"
    return ["parameter", "shape", "use", "line", "by", "term", "samples", size, "flops"]


def _rows(p: Explained, ways: bool) -> list[list[str]]:
    """Return the table's lines of a parameter: one per step, or one without steps."""
    first = [", ".join([p.name, *p.aliases]), str(list(p.shape))]
    size = "" if ways else show(p.bytes, "B")
    if not p.steps:
        return [[*first, p.status, "", "", "", "", size, ""]]
    rows = [[*cells(step), way_cell(step) if ways else "", show(step.flops, "")] for step in p.steps]
    rows[0][-2] = rows[0][-2] or size
    return [[*(first if i == 0 else ["", ""]), *row] for i, row in enumerate(rows)]


def way_cell(step: Step) -> str:
    """Return the strategy of a step."""
    return "" if step.contracted is None else step.contracted.way


def options_of(p: Explained) -> list[list[str]]:
    """Return the costs of each strategy of a parameter's uses with a choice, and the reason of the chosen one."""
    rows = []
    for step, contracted in [(step, step.contracted) for step in p.steps]:
        if contracted is not None and len(contracted.options) > 1:
            for option in contracted.options:
                why = contracted.why if option.way == contracted.way else ""
                numbers = [show(option.flops, ""), show(option.bytes, "B"), f"{option.milliseconds:.3g}"]
                rows.append([p.name, cells(step)[0], option.way, *numbers, why])
    return rows


def cells(step: Step) -> list[str]:
    """Return use, line, rule, term and samples of a step as text."""
    use = f"{step.op} of {step.of}" if step.of else step.op
    line = step.line.split("   ")[0] or step.module.split(":")[0]
    return [use, line, step.by, "; ".join(step.terms), step.samples]


def show(cost: Cost, unit: str) -> str:
    """Format a cost in three digits: ``1.23 MB``; return the formula if there is no number."""
    value: float | None = cost.value
    if value is None:
        return cost.formula
    power = 0
    while abs(value) >= 999.5 and power < len(PREFIXES) - 1:
        value, power = value / 1000, power + 1
    digits = str(cost.value) if power == 0 else f"{value:.3g}"
    return f"{digits} {PREFIXES[power]}{unit}".rstrip()


def as_text(findings: Findings) -> str:
    """Return the tables of parameters, of strategies with a choice, and of totals, and the notes."""
    rows = [row for p in findings.parameters for row in _rows(p, bool(findings.machine))]
    options = [row for p in findings.parameters for row in options_of(p)]
    totals = [[t.what, show(t.plain, t.unit), show(t.fxgrad, t.unit)] for t in findings.totals]
    lines = [findings.heading(), "", *_table(titles_of(findings), rows)]
    lines += ["", f"estimated for {findings.machine}", *_table(OPTION_TITLES, options)] if options else []
    lines += ["", *_table(TOTAL_TITLES, totals)]
    lines += [""] * bool(findings.notes) + [f"note: {note}" for note in findings.notes]
    return "\n".join(lines)


def _table(titles: Sequence[str], rows: list[list[str]]) -> list[str]:
    return table(titles, rows, right={i for i, title in enumerate(titles) if title in NUMBERS})
