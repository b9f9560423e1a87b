"""The site shows every page, every public name, every pass and every example; the check of its links finds faults."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fxgrad
from fxgrad.compile import pipeline

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TREES = re.compile(r"^```\{toctree\}\n(.*?)^```|^\.\. toctree::\n((?:   .*\n|\n)*)", re.MULTILINE | re.DOTALL)
MADE = {"gallery/index"}  # by sphinx-gallery, from examples/gallery
API = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.rst")))
DOCUMENTED = re.findall(r"^\.\. auto(?:function|class|module):: ([\w.]+)$", API, re.MULTILINE)


def entries(page: Path) -> Iterator[str]:
    """Yield the pages that the trees of a page list, from the root of the site."""
    for markdown, rst in TREES.findall(page.read_text()):
        for line in (markdown or rst).splitlines():
            if line.strip() and not line.strip().startswith(":"):
                name = re.sub(r"^.*<(.*)>$", r"\1", line.strip())
                yield (page.parent / name).relative_to(DOCS).as_posix()


def source(name: str) -> Path:
    """Return the file of a page."""
    return next(file for file in (DOCS / f"{name}.md", DOCS / f"{name}.rst") if file.exists())


def test_the_tree_holds_every_page() -> None:
    seen: list[str] = []
    waiting = ["index"]
    while waiting:
        name = waiting.pop()
        seen.append(name)
        if name not in MADE:
            waiting += entries(source(name))
    files = [file for file in DOCS.rglob("*") if file.suffix in (".md", ".rst") and "_build" not in file.parts]
    pages = {file.relative_to(DOCS).with_suffix("").as_posix() for file in files if file.parts[-2] != "gallery"}
    assert sorted(seen) == sorted(pages | MADE)


def test_the_reference_has_every_public_name() -> None:
    """FxgradError stands with its module."""
    named = {f"fxgrad.{name}" for name in fxgrad.__all__}
    assert named - set(DOCUMENTED) == {"fxgrad.FxgradError"}
    assert {"fxgrad.errors", "fxgrad.opacus", "fxgrad.rules"} <= set(DOCUMENTED)
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


def test_the_reference_has_every_pass_in_order() -> None:
    runs = [*pipeline.PASSES, *pipeline.LAST, *pipeline.WHOLE, *pipeline.ONE, *pipeline.SINGLE]
    names = list(dict.fromkeys(f"{run.__module__}.{run.__name__}" for run in runs))
    assert [name for name in DOCUMENTED if name.startswith("fxgrad.passes.")] == names


def test_every_example_is_shown() -> None:
    shown = re.findall(r"literalinclude\} \.\./examples/(\w+)\.py", (DOCS / "programs.md").read_text())
    assert sorted(shown) == sorted(file.stem for file in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", ["index.md", "start.md"])
def test_the_programs_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An indented block behind a program that prints is what it prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    text = (DOCS / page).read_text()
    programs = re.findall(r"```python\n(.*?)```\n+((?:    [^\n]*\n)*)", text, re.DOTALL)
    assert len(programs) == text.count("```python")
    for program, shown in programs:
        exec(compile(program, page, "exec"), namespace)
        printed = capsys.readouterr().out
        assert not shown or printed == re.sub(r"^    ", "", shown, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def check_site() -> Any:
    spec = importlib.util.spec_from_file_location("fxgrad_check_site", ROOT / "tools" / "check_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOOD = '<p id="here"><a href="b.html#there">b</a> <a href="#here">up</a> <a href="https://a.test/x">out</a></p>'
FAULTS = {
    '<a href="c.html">c</a>': "a.html: no file for c.html",
    '<a href="b.html#nowhere">b</a>': "a.html: no place for b.html#nowhere",
    '<a href="#nowhere">up</a>': "a.html: no place for #nowhere",
    '<img src="missing.png">': "a.html: no file for missing.png",
    '<script src="https://a.test/x.js"></script>': "a.html: loads https://a.test/x.js",
    '<link rel="stylesheet" href="//a.test/x.css">': "a.html: loads //a.test/x.css",
}


def test_a_whole_site_has_no_faults(check_site: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    assert check_site.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "every link of the site leads somewhere\n"


@pytest.mark.parametrize("html, fault", FAULTS.items(), ids=FAULTS.values())
def test_a_fault_is_found(check_site: Any, tmp_path: Path, html: str, fault: str) -> None:
    (tmp_path / "a.html").write_text(GOOD + html)
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    assert check_site.find_faults(tmp_path) == [fault]


def test_a_site_without_pages_is_a_fault(check_site: Any, tmp_path: Path) -> None:
    assert check_site.main([str(tmp_path)]) == 1
