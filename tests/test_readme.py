"""The programs of README and of the pages in docs/ run, and mistakes give the errors that are shown."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fxgrad

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MISTAKEN = ROOT / "docs" / "mistakes.md"
THROUGH_INDUCTOR = [README, ROOT / "docs" / "running.md"]
PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in "checks guarantees how_it_works private quantities versioning what_it_takes".split()
]
NOT_RUN = {
    "devices.md": "its program needs several processes: tests/test_sharded.py has others",
    "passes.md": "tools/pictures.py writes it from tests that run",
    "performance.md": "its two lines belong to two processes: tests/test_warm_start.py has them",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def programs(page: Path) -> list[str]:
    """The programs of a page that have no mistake."""
    return [text for language, text in blocks(page) if language == "python" and "# mistake" not in text]


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "page",
    [*PAGES, *(pytest.param(page, marks=pytest.mark.inductor) for page in THROUGH_INDUCTOR)],
    ids=lambda page: page.name,
)
def test_the_programs_of_a_page_run(page: Path) -> None:
    """One behind the other, as a reader would paste them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    assert programs(page)
    for program in programs(page):
        exec(compile(program, page.name, "exec"), namespace)


def test_every_page_with_programs_is_run() -> None:
    """Here, or by a test file that names the page."""
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("*.py") if file != Path(__file__))
    here = {page.name for page in [*PAGES, *THROUGH_INDUCTOR, MISTAKEN]}
    left = {page.name for page in (ROOT / "docs").glob("*.md") if programs(page)} - here
    assert {name for name in left if name not in tests} == NOT_RUN.keys()


MISTAKES = [
    (code, shown)
    for (language, code), (_, shown) in pairwise(blocks(MISTAKEN))
    if language == "python" and "# mistake" in code
]


@pytest.mark.parametrize("program, shown", MISTAKES, ids=[code.split("\n")[0][11:] for code, _ in MISTAKES])
def test_the_mistakes_give_their_errors(program: str, shown: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    (imports,) = programs(MISTAKEN)
    exec(imports, namespace)
    with pytest.raises(fxgrad.FxgradError) as caught:
        exec(compile(program, "mistakes.md", "exec"), namespace)
    assert f"{type(caught.value).__name__}: {caught.value}" == shown.strip()


def test_every_mistake_is_found() -> None:
    assert len(MISTAKES) == sum(page.read_text().count("# mistake:") for page in (ROOT / "docs").glob("*.md")) == 3


def test_the_shown_lines_of_a_graph_are_those_of_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "how_it_works.md"
    exec(programs(page)[0], {})
    traced = capsys.readouterr().out.splitlines()
    shown = [line[2:] for line in page.read_text().splitlines() if line.startswith("    linear_2")]
    assert len(shown) == 2 and set(shown) <= set(traced)


def test_the_first_screen_has_the_program_and_the_picture() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    screen = "\n".join(lines[:45])
    assert programs(README)[0] in screen and "](docs/pictures/" in screen
