"""The README's programs run, and its mistakes give the errors it shows."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fxgrad

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
PROGRAMS = [code for language, code in BLOCKS if language == "python" and "# mistake" not in code]
MISTAKES = [
    (code, shown) for (language, code), (_, shown) in pairwise(BLOCKS) if language == "python" and "# mistake" in code
]


def read(statement: ast.stmt) -> set[str]:
    """The names that a statement reads, without the arguments of functions that it defines."""
    nodes = list(ast.walk(statement))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return names - {node.arg for node in nodes if isinstance(node, ast.arg)}


def bound(statement: ast.stmt) -> set[str]:
    """The names that a statement binds. A submodule's import binds no name that a program would read."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def preparing(program: int) -> list[ast.stmt]:
    """The statements of earlier programs that make what a program reads, and nothing else of these programs."""
    bodies = [ast.parse(one).body for one in PROGRAMS[: program + 1]]
    missing: set[str] = set()
    for statement in reversed(bodies.pop()):
        missing = missing - bound(statement) | read(statement)
    found: list[ast.stmt] = []
    for statement in reversed([statement for body in bodies for statement in body]):
        if missing & bound(statement):
            missing = missing - bound(statement) | read(statement)
            found.insert(0, statement)
    return found


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("program", range(len(PROGRAMS)), ids=[one.split("\n")[0].split("  ")[0] for one in PROGRAMS])
def test_a_program_runs(program: int) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(ast.Module(preparing(program), []), "README.md", "exec"), namespace)
    exec(compile(PROGRAMS[program], "README.md", "exec"), namespace)


def test_every_program_is_found() -> None:
    assert len(PROGRAMS) == 8


@pytest.mark.parametrize("program, shown", MISTAKES, ids=[code.split("\n")[0][11:] for code, _ in MISTAKES])
def test_the_mistakes_give_their_errors(program: str, shown: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("import torch, fxgrad", namespace)
    with pytest.raises(fxgrad.FxgradError) as caught:
        exec(compile(program, "README.md", "exec"), namespace)
    assert f"{type(caught.value).__name__}: {caught.value}" == shown.strip()


@pytest.mark.parametrize("page", ["guarantees.md"])
def test_the_programs_of_a_page_run(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for program in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
        exec(compile(program, page, "exec"), namespace)


def test_every_mistake_is_found() -> None:
    assert len(MISTAKES) == README.count("# mistake")
