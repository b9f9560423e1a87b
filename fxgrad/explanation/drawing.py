"""The HTML page of an explanation: the tables, and the graph as a column of ops with its edges beside it.

The page is self-contained: its style and its script are inline, and it loads no font or library. It can be read without
the script, and the groups of modules open and close. The script draws the edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from fxgrad.explanation.findings import Explained, Findings, Value
from fxgrad.explanation.text import cells, options_of, show, titles_of, way_cell

ROWS_AT_FIRST = 90  # a graph with more rows starts with its inner modules closed
LINES_AT_ONCE = 40  # a table with more lines scrolls in a box


def page(findings: Findings) -> str:
    """Return a complete HTML document."""
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = [
        f"<header><h1>{escape(findings.model)}</h1><p>{_subject(findings)} at {_sizes(findings)}</p></header>",
        *_totals(findings),
        *_parameters(findings),
        *_ways(findings),
        *_graph(findings),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>fxgrad: {escape(findings.model)}</title>",
            f"<style>\n{style}</style></head><body>",
            *parts,
            f"<script>\n{script}</script></body></html>",
            "",
        ]
    )


def _subject(findings: Findings) -> str:
    return escape(", ".join(findings.quantities)) if findings.machine else "per-sample gradients"


def _sizes(findings: Findings) -> str:
    return ", ".join(f"<b>{escape(name)}</b> = {size}" for name, size in findings.sizes.items())


def _totals(findings: Findings) -> Iterator[str]:
    yield '<section class="totals"><table><thead><tr><th></th><th>plain step</th><th>with fxgrad</th></tr></thead>'
    yield "<tbody>"
    for total in findings.totals:
        numbers = "".join(
            f'<td class="number" title="{escape(cost.formula)}">{escape(show(cost, total.unit)) or "?"}</td>'
            for cost in (total.plain, total.fxgrad)
        )
        yield f"<tr><th>{escape(total.what)}</th>{numbers}</tr>"
    yield "</tbody></table>"
    if findings.notes:
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in findings.notes) + "</ul>"
    yield "</section>"


def _parameters(findings: Findings) -> Iterator[str]:
    largest = max((p.bytes.value or 0 for p in findings.parameters), default=0)
    heads = "".join(f"<th{_number(title)}>{title}</th>" for title in titles_of(findings))
    tall = " tall" if sum(max(1, len(p.steps)) for p in findings.parameters) > LINES_AT_ONCE else ""
    yield f'<section><h2>Parameters</h2><div class="wide{tall}"><table class="parameters">'
    yield f"<thead><tr>{heads}</tr></thead>"
    for p in findings.parameters:
        yield f'<tbody class="{p.status}">{"".join(_parameter_rows(p, largest, bool(findings.machine)))}</tbody>'
    yield "</table></div></section>"


def _number(title: str) -> str:
    return ' class="number"' if title in ("grad_sample", "flops", "bytes", "ms") else ""


def _ways(findings: Findings) -> Iterator[str]:
    """Yield the table of strategies and their costs, for uses with a choice."""
    rows = [row for p in findings.parameters for row in options_of(p)]
    if not rows:
        return
    titles = ("parameter", "use", "way", "flops", "bytes", "ms", "why")
    heads = "".join(f"<th{_number(title)}>{title}</th>" for title in titles)
    tall = " tall" if len(rows) > LINES_AT_ONCE else ""
    yield f"<section><h2>Ways</h2><p>estimated for {escape(findings.machine)}</p>"
    yield f'<div class="wide{tall}"><table class="parameters"><thead><tr>{heads}</tr></thead><tbody>'
    for row in rows:
        cells_of = "".join(f"<td{_number(title)}>{escape(cell)}</td>" for title, cell in zip(titles, row, strict=True))
        yield f"<tr>{cells_of}</tr>"
    yield "</tbody></table></div></section>"


def _parameter_rows(p: Explained, largest: int, ways: bool) -> Iterator[str]:
    count = max(1, len(p.steps))
    name = ", ".join([p.name, *p.aliases])
    share = 100 * (p.bytes.value or 0) / largest if largest else 0
    first = f'<th rowspan="{count}">{escape(name)}</th><td rowspan="{count}">{p.dtype}{escape(str(list(p.shape)))}</td>'
    size = (
        f'<td rowspan="{count}" class="number bar" style="--share:{share:.1f}%" title="{escape(p.bytes.formula)}">'
        f"{escape(show(p.bytes, 'B'))}</td>"
    )
    size = "" if ways else size
    if not p.steps:
        yield f'<tr>{first}<td colspan="5"><i>{p.status}</i></td>{size or "<td></td>"}<td></td></tr>'
    for i, step in enumerate(p.steps):
        use, line, by, term, samples = map(escape, cells(step))
        target = f'<a href="#v-{escape(step.node)}">{use}</a>'
        row = (
            f'<td>{target}</td><td title="{escape(step.line)}">{line}</td><td><span class="tap {by.split()[0]}">{by}'
            f"</span></td><td><code>{term}</code></td><td>{samples}</td>"
        )
        flops = f'<td class="number" title="{escape(step.flops.formula)}">{escape(show(step.flops, ""))}</td>'
        way = f'<td title="{escape(step.contracted.why)}">{way_cell(step)}</td>' if step.contracted and ways else ""
        yield f"<tr>{first if i == 0 else ''}{row}{way}{size if i == 0 else ''}{flops}</tr>"


@dataclass
class _Group:
    """Consecutive values of one module; values of its submodules are nested groups."""

    name: str
    items: list[_Group | Value] = field(default_factory=list)

    def values(self) -> Iterator[Value]:
        for item in self.items:
            if isinstance(item, _Group):
                yield from item.values()
            else:
                yield item


def grouped(values: Sequence[Value]) -> _Group:
    """Group values by module, in their order; a module with a single op forms no group."""
    top = _Group("")
    for value in values:
        group = top
        for name in value.modules:
            last = group.items[-1] if group.items else None
            if not (isinstance(last, _Group) and last.name == name):
                last = _Group(name)
                group.items.append(last)
            group = last
        group.items.append(value)
    return _flattened(top)


def _flattened(group: _Group) -> _Group:
    items: list[_Group | Value] = []
    for item in group.items:
        if isinstance(item, _Group):
            inner = _flattened(item)
            items += inner.items if len(list(inner.values())) == 1 else [inner]
        else:
            items.append(item)
    return _Group(group.name, items)


def _graph(findings: Findings) -> Iterator[str]:
    kinds = ("batched", "uniform", "constant", "mixed")
    words = ("holds the samples", "function of parameters", "the same for all", "mixes samples")
    legend = "".join(
        f'<span class="{kind}"><span class="dot"></span>{word}</span>' for kind, word in zip(kinds, words, strict=True)
    )
    yield f'<section><h2>Graph</h2><p class="legend">{legend}<span><b class="sample">B</b> sample dimension</span>'
    yield '<span><span class="pill">parameter</span></span><span><span class="tap">tap</span></span>'
    yield '<button data-open="1">open all</button><button data-open="">close all</button></p>'
    yield '<div class="wide"><div class="graph"><svg aria-hidden="true"></svg>'
    top = grouped(findings.values)
    depth = _open_depth(top)
    for item in top.items:
        yield from _item(item, "", depth)
    yield "</div></div></section>"


def _open_depth(top: _Group) -> int:
    """Return the depth to which groups are open at first, so that the rows fit on a page."""
    depth = 0
    while depth < 20 and _visible(top, depth + 1) <= ROWS_AT_FIRST:
        depth += 1
    return depth


def _visible(group: _Group, depth: int) -> int:
    if depth < 0:
        return 0
    return sum(1 + _visible(item, depth - 1) if isinstance(item, _Group) else 1 for item in group.items)


def _item(item: _Group | Value, outer: str, depth: int) -> Iterator[str]:
    if isinstance(item, Value):
        yield _row(item, outer)
        return
    path, _, kind = item.name.partition(": ")
    values = list(item.values())
    parameters = len({name for value in values for name in value.parameters})
    counts = f"{len(values)} ops" + (f", {parameters} parameters" if parameters else "")
    inner_path = path.removeprefix(f"{outer}.") if outer else path
    yield f'<details{" open" if depth > 0 else ""}><summary><span class="dot"></span><b>{escape(inner_path)}</b> '
    yield f"{escape(kind)} <small>{counts}</small></summary>"
    for inner in item.items:
        yield from _item(inner, path, depth - 1)
    yield "</details>"


def _row(value: Value, module: str) -> str:
    sizes = [
        f'<b class="sample">{escape(size)}</b>' if i == value.sample_dim else escape(size)
        for i, size in enumerate(value.sizes)
    ]
    shape = f"{value.dtype}[{', '.join(sizes)}]" if value.dtype else ""
    label = f"{value.op} <small>{escape(value.line)}</small>" if value.op == "input" else f"{escape(value.op)}"
    line = "" if value.op == "input" else value.line.split("   ")[0]
    pills = [_pill("pill", name, module) for name in value.parameters]
    pills += [_pill("pill still", name, module) for name in value.constants]
    kind = value.tap.partition(":")[0].split(" ")[0]
    tap = f'<span class="tap {kind}">{escape(value.tap)}</span>' if value.tap else ""
    innermost = value.modules[-1] if value.modules else ""
    return (
        f'<div class="row {value.kind}" id="v-{escape(value.name)}" data-from="{" ".join(value.operands)}" '
        f'title="{escape(" · ".join(word for word in (innermost, value.line, value.samples) if word))}">'
        f'<span class="dot"></span><span class="op">{label}</span><span class="shape">{shape}</span>'
        f'<span class="line">{escape(line)}</span><span class="pills">{"".join(pills)}</span>{tap}</div>'
    )


def _pill(kind: str, name: str, module: str) -> str:
    """Return the label of a parameter, named relative to the module of its group."""
    label = name.removeprefix(f"{module}.") if module else name
    return f'<span class="{kind}" title="{escape(name)}">{escape(label)}</span>'
