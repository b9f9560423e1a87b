"""The folders of fxgrad are rooms on floors: a room imports from rooms below it, and no files import in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = """errors host kernels ops samples terms costs gradients quantities rules runtime graph proof passes capture
compile first_batch front explanation verification opacus command_line public""".split()
"""From the lowest up. A file beside the folders is "front"; what is listed below is a room by itself, or "public"."""

ALONE = {
    "fxgrad": "public",
    "fxgrad.__main__": "public",
    "fxgrad.testing": "public",
    "fxgrad.losses": "public",
    "fxgrad.errors": "errors",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    files = {f"fxgrad.{p.relative_to(ROOT / 'fxgrad').with_suffix('')}".replace("/", "."): p for p in own_files()}
    files |= {f"fxgrad.passes.{p.stem}": p for p in (ROOT / "passes").glob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def own_files() -> Iterator[Path]:
    folder = ROOT / "fxgrad"
    return (p for p in folder.rglob("*.py") if not p.is_relative_to(folder / "passes"))


def imported(name: str) -> set[str]:
    """The modules of the package that a module imports, also inside of functions and for types alone."""
    targets: set[str] = set()
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively"
            targets |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
    return (targets & modules().keys()) - {name} - parents(targets & modules().keys())


def parents(names: set[str]) -> set[str]:
    """The packages of modules that are imported from them."""
    return {name.rpartition(".")[0] for name in names}


def room(name: str) -> str:
    if name in ALONE:
        return ALONE[name]
    parts = name.split(".")
    return parts[1] if len(parts) > 2 or modules()[name].name == "__init__.py" else "front"


def test_every_folder_is_a_room() -> None:
    assert {room(name) for name in modules()} == set(ROOMS)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name: str) -> None:
    own = ROOMS.index(room(name))
    upward = sorted(other for other in imported(name) if ROOMS.index(room(other)) > own)
    assert not upward, f"{name} is in {room(name)!r} and imports from rooms above it: {upward}"


def test_no_files_import_in_a_circle() -> None:
    try:
        TopologicalSorter({name: imported(name) for name in modules()}).prepare()
    except CycleError as error:
        pytest.fail(f"these files import in a circle: {' -> '.join(error.args[1])}")


def test_rooms_have_a_purpose() -> None:
    """Each folder says in one line what it is for."""
    for name, path in modules().items():
        if path.name == "__init__.py":
            assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip(), name
