"""The HTML page of an explanation: the tables, and the graph as a column of ops with its edges beside it.

The page is self-contained: its style and its script are inline, and it loads no font or library. It can be read without
the script, and the groups of modules open and close. The script draws the edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from fxgrad.explanation.findings import Explained, Findings, Value
from fxgrad.explanation.text import NUMBERS, OPTION_TITLES, TOTAL_TITLES, cells, options_of, show, titles_of, way_cell

ROWS_AT_FIRST = 90  # a graph with more rows starts with its inner modules closed
LINES_AT_ONCE = 40  # a table with more lines scrolls in a box


def page(findings: Findings) -> str:
    """Return a complete HTML document."""
    folder = Path(__file__).parent
    template, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    return template.format(
        model=escape(findings.model),
        subject=escape(", ".join(findings.quantities)) if findings.machine else "per-sample gradients",
        sizes=", ".join(f"<b>{escape(name)}</b> = {size}" for name, size in findings.sizes.items()),
        totals=_totals(findings),
        parameters=_parameters(findings),
        ways=_ways(findings),
        graph=_graph(findings),
        style=style,
        script=script,
    )


def element(name: str, *content: str, **attributes: object) -> str:
    """Return an HTML element of HTML contents; attributes are escaped, and those that are None omitted.

    >>> element("td", "<b>1</b>", class_="number", title="B < 2")
    '<td class="number" title="B &lt; 2"><b>1</b></td>'
    """
    names = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{escape(str(value))}"' for key, value in names.items())
    return f"<{name}{words}>{''.join(content)}</{name}>"


def _totals(findings: Findings) -> str:
    heads = [element("th", title) for title in ("", *TOTAL_TITLES[1:])]
    rows = []
    for total in findings.totals:
        numbers = [
            element("td", escape(show(cost, total.unit)) or "?", class_="number", title=cost.formula)
            for cost in (total.plain, total.fxgrad)
        ]
        rows.append(element("tr", element("th", escape(total.what)), *numbers))
    table = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    notes = [element("li", escape(note)) for note in findings.notes]
    return table + (element("ul", *notes) if notes else "")


def _parameters(findings: Findings) -> str:
    largest = max((p.bytes.value or 0 for p in findings.parameters), default=0)
    rows = [list(_parameter_rows(p, largest, bool(findings.machine))) for p in findings.parameters]
    pairs = zip(findings.parameters, rows, strict=True)
    bodies = [element("tbody", *rows_of_p, class_=p.status) for p, rows_of_p in pairs]
    return _wide_table(titles_of(findings), bodies, sum(map(len, rows)))


def _ways(findings: Findings) -> str:
    """Return the table of strategies and their costs, for uses with a choice."""
    options = [row for p in findings.parameters for row in options_of(p)]
    if not options:
        return ""
    rows = []
    for row in options:
        pairs = zip(OPTION_TITLES, row, strict=True)
        rows.append(element("tr", *(element("td", escape(cell), class_=_number(title)) for title, cell in pairs)))
    remark = element("p", f"estimated for {escape(findings.machine)}")
    table = _wide_table(OPTION_TITLES, [element("tbody", *rows)], len(rows))
    return element("section", element("h2", "Ways"), remark, table)


def _wide_table(titles: Sequence[str], bodies: Sequence[str], lines: int) -> str:
    heads = [element("th", title, class_=_number(title)) for title in titles]
    table = element("table", element("thead", element("tr", *heads)), *bodies, class_="parameters")
    return element("div", table, class_="wide tall" if lines > LINES_AT_ONCE else "wide")


def _number(title: str) -> str | None:
    return "number" if title in NUMBERS else None


def _parameter_rows(p: Explained, largest: int, ways: bool) -> Iterator[str]:
    count = max(1, len(p.steps))
    name = element("th", escape(", ".join([p.name, *p.aliases])), rowspan=count)
    first = name + element("td", escape(f"{p.dtype}{list(p.shape)}"), rowspan=count)
    share = f"--share:{100 * (p.bytes.value or 0) / largest if largest else 0:.1f}%"
    bar = {"class_": "number bar", "style": share, "title": p.bytes.formula}
    size = "" if ways else element("td", escape(show(p.bytes, "B")), rowspan=count, **bar)
    if not p.steps:
        yield element("tr", first, element("td", element("i", p.status), colspan=5), size or "<td></td>", "<td></td>")
    for i, step in enumerate(p.steps):
        use, line, by, term, samples = map(escape, cells(step))
        yield element(
            "tr",
            first if i == 0 else "",
            element("td", element("a", use, href=f"#v-{step.node}")),
            element("td", line, title=step.line),
            element("td", element("span", by, class_=f"tap {by.split()[0]}")),
            element("td", element("code", term)),
            element("td", samples),
            element("td", way_cell(step), title=step.contracted and step.contracted.why) if ways else "",
            size if i == 0 else "",
            element("td", escape(show(step.flops, "")), class_="number", title=step.flops.formula),
        )


@dataclass
class Group:
    """Consecutive values of one module; those of its submodules are groups among the items."""

    name: str
    values: list[Value]
    items: list[Group | Value]


def grouped(values: Sequence[Value], depth: int = 0) -> list[Group | Value]:
    """Group values by module, in their order; a module with a single op forms no group."""
    items: list[Group | Value] = []
    for name, run in groupby(values, lambda value: value.modules[depth] if depth < len(value.modules) else None):
        members = list(run)
        if name is None or len(members) == 1:
            items += members
        else:
            items.append(Group(name, members, grouped(members, depth + 1)))
    return items


def _graph(findings: Findings) -> str:
    items = grouped(findings.values)
    depth = next((depth for depth in range(20) if _visible(items, depth + 1) > ROWS_AT_FIRST), 20)
    return "".join(_item(item, "", depth) for item in items)


def _visible(items: Sequence[Group | Value], depth: int) -> int:
    """Count the rows if groups are open down to a depth."""
    inner = [item.items for item in items if isinstance(item, Group)] if depth > 0 else []
    return len(items) + sum(_visible(below, depth - 1) for below in inner)


def _item(item: Group | Value, outer: str, depth: int) -> str:
    if isinstance(item, Value):
        return _row(item, outer)
    path, _, kind = item.name.partition(": ")
    parameters = len({name for value in item.values for name in value.parameters})
    counts = f"{len(item.values)} ops" + (f", {parameters} parameters" if parameters else "")
    name = element("b", escape(_relative(path, outer)))
    summary = element("summary", element("span", class_="dot"), name, f" {escape(kind)} ", element("small", counts))
    rows = [_item(inner, path, depth - 1) for inner in item.items]
    return element("details", summary, *rows, open="" if depth > 0 else None)


def _row(value: Value, module: str) -> str:
    sizes = [
        element("b", escape(size), class_="sample") if i == value.sample_dim else escape(size)
        for i, size in enumerate(value.sizes)
    ]
    label, line = escape(value.op), value.line.split("   ")[0]
    if value.op == "input":
        label, line = f"{label} {element('small', escape(value.line))}", ""
    kinds = dict.fromkeys(value.parameters, "pill") | dict.fromkeys(value.constants, "pill still")
    pills = [element("span", escape(_relative(name, module)), class_=kinds[name], title=name) for name in kinds]
    tap = element("span", escape(value.tap), class_=f"tap {value.tap.partition(':')[0].split(' ')[0]}")
    titles = [*value.modules[-1:], value.line, value.samples]
    return element(
        "div",
        element("span", class_="dot"),
        element("span", label, class_="op"),
        element("span", f"{value.dtype}[{', '.join(sizes)}]" if value.dtype else "", class_="shape"),
        element("span", escape(line), class_="line"),
        element("span", *pills, class_="pills"),
        tap if value.tap else "",
        class_=f"row {value.kind}",
        id=f"v-{value.name}",
        data_from=" ".join(value.operands),
        title=" · ".join(word for word in titles if word),
    )


def _relative(name: str, module: str) -> str:
    """Return a name relative to the module around it."""
    return name.removeprefix(f"{module}.") if module else name
