"""The pages under docs/ agree with the code, and their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fxgrad.compile import pipeline

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DESIGN = (ROOT / "docs" / "design.md").read_text()


def test_the_table_of_passes_is_the_pipeline() -> None:
    (table,) = re.findall(r"<!-- passes: begin -->(.*?)<!-- passes: end -->", DESIGN, re.DOTALL)
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    usual = [*pipeline.PASSES, *pipeline.LAST, *pipeline.WHOLE]
    only_one = [run for run in [*pipeline.ONE, *pipeline.SINGLE] if run not in usual]
    assert names == list(dict.fromkeys(run.__name__ for run in [*usual, *only_one]))


def test_a_list_in_the_pipeline_is_the_same() -> None:
    """Its docstring may list the passes, or refer to the table."""
    names = [run.__name__ for run in [*pipeline.PASSES, *pipeline.LAST, *pipeline.WHOLE]]
    first_words = re.findall(r"^\s+(\w+)", pipeline.__doc__ or "", re.MULTILINE)
    assert [word for word in first_words if word in names] in ([], names)


def test_the_design_is_short_enough_to_read() -> None:
    assert len(DESIGN.splitlines()) <= 250


def test_the_pictures_of_passes_are_those_of_the_tests() -> None:
    """`python tools/pictures.py` writes the page."""
    assert subprocess.run([sys.executable, ROOT / "tools" / "pictures.py", "--check"]).returncode == 0


FOLDERS = "fxgrad", "passes", "tests", "benchmarks", "examples", "tools"
OF_PYTORCH = {"_per_sample_grad", "conv_utils", "expanded_weights_impl", "expanded_weights_utils"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_classes_that_a_page_names_exist(page: Path) -> None:
    """A name with a place, `runtime/tape.py`, is that of a file there; a file that a reader is to write is no file."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    code = "\n".join(path.read_text() for path in files)
    for name in re.findall(r"`([\w/]+)\.py`", page.read_text()):
        known = any(path.as_posix().endswith(f"/{name}.py") for path in files)
        assert known or name.split("/")[-1] in {*OF_PYTORCH, "test_expanded_weights", "verb_object"}, name
    if page.name in ("design.md", "samples.md", "costs.md", "bound.md", "kernels.md"):
        for name in re.findall(r"`((?:[A-Z][a-z]+)+)`", page.read_text()):
            assert re.search(rf"\b{name}\b", code), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
