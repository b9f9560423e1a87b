"""A test that expects an error says which one: by `match=`, or by what it reads of the caught error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def unsaid(tree: ast.AST) -> list[int]:
    """The lines of `pytest.raises` that any error of the class would do for."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "pytest.raises"]
    open_ones = [call for call in calls if "match" not in {keyword.arg for keyword in call.keywords}]
    if not open_ones:
        return []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    looked_at = {call for function in functions for call in caught(function)}
    return [call.lineno for call in open_ones if call not in looked_at]


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return ""


def caught(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """The calls of `pytest.raises` whose error the function reads."""
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(function):
        for item in node.items if isinstance(node, ast.With) else ():
            if isinstance(item.optional_vars, ast.Name) and item.optional_vars.id in read:
                yield item.context_expr


def test_every_expected_error_is_said() -> None:
    files = {path.relative_to(HERE): ast.parse(path.read_text()) for path in HERE.rglob("*.py")}
    assert not [f"{path}:{line}" for path, tree in files.items() for line in unsaid(tree)]


@pytest.mark.parametrize(
    "body, said",
    [
        ("with pytest.raises(E):\n  f()", False),
        ("with torch.no_grad(), pytest.raises(E):\n  f()", False),
        ("with pytest.raises(E) as error:\n  f()", False),
        ("pytest.raises(E, f)", False),
        ("with pytest.raises(E, match='why'):\n  f()", True),
        ("with pytest.raises(E) as error:\n  f()\n assert error.value.where", True),
    ],
)
def test_what_is_said(body: str, said: bool) -> None:
    other = "def other():\n return error"
    assert unsaid(ast.parse(f"def test():\n {body}\n{other}")) == ([] if said else [2])
