"""What a release states outside of the code agrees with the code: versions, the workflows, the issue templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import fxgrad

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = ("other", "refused_model", "wrong_number")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def tried_versions() -> list[str]:
    """The versions of PyTorch that tools/matrix.sh tries."""
    listed = re.search(r"versions=\((\d[\d. ]+)\)", (ROOT / "tools" / "matrix.sh").read_text())
    assert listed is not None
    return listed[1].split()


def pinned_torch() -> str:
    pin = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    return pin[1]


def test_the_citation_names_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == fxgrad.__version__
    assert citation["license"] in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(workflow: Path) -> None:
    """A tag may move; the comment names the tag that the commit had."""
    uses = re.findall(r"uses: (.*)", workflow.read_text())
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_read_and_end(workflow: Path) -> None:
    content = read(workflow)
    assert content["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 120 for job in content["jobs"].values())


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_workflows_run_is_in_the_repository(workflow: Path) -> None:
    runs = [step["run"] for job in read(workflow)["jobs"].values() for step in job["steps"] if "run" in step]
    scripts = [match[1] for run in runs if (match := re.match(r"(?:\w+=\S+ )*((?:\.ci|tools)/\S+)", run))]
    assert scripts and all((ROOT / script).stat().st_mode & 0o100 for script in scripts)


def test_the_matrix_covers_the_supported_versions() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "matrix.yml")["jobs"]["suite"]["strategy"]["matrix"]
    assert matrix["torch"] == tried_versions()
    pythons = [*matrix["python"], *(row["python"] for row in matrix["include"])]
    assert sorted(pythons) == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert {row["torch"] for row in matrix["include"]} == {pinned_torch()}


def test_the_pages_name_the_supported_versions() -> None:
    versions = tried_versions()
    lowest, highest = (version.rpartition(".")[0] for version in (versions[0], versions[-1]))
    page = (ROOT / "docs" / "versioning.md").read_text()
    assert f"| {lowest} to {highest} | supported |" in page
    assert f"The whole suite ran on {pinned_torch().rpartition('.')[0]}." in page
    assert f'"torch>={lowest}"' in (ROOT / "pyproject.toml").read_text()
    table = re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)
    assert table == versions


@pytest.mark.parametrize("name", FORMS)
def test_issue_forms_ask_for_what_repeats_the_problem(name: str) -> None:
    form = read(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    asked = {part["id"]: str(part["attributes"]) for part in form["body"] if "id" in part}
    assert {"program", "explain", "versions"} <= set(asked)
    assert "python -m fxgrad doctor" in asked["versions"]
    assert all(any(word in text for text in asked.values()) for word in ("fxgrad.verify", "fxgrad.explain"))


def test_there_are_no_other_forms() -> None:
    files = {path.name for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()}
    assert files == {"config.yml", *(f"{name}.yml" for name in FORMS)}
