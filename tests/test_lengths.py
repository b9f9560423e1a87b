"""A file holds one idea and a function does one thing: 400 lines a file, 40 a function without its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_rooms import modules

FILE, FUNCTION = 400, 40  # lines
EXCEPTIONS = {
    "fxgrad.opacus.preparing.make_private": "its signature is Opacus's, with an option a line",
    "fxgrad.testing.assert_per_sample_grads": "its signature is public, with an option a line",
}


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the functions of a file with their lines, decorators and docstrings left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            docstring = first if ast.get_docstring(node, clean=False) is not None else None
            of_docstring = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - of_docstring


@pytest.mark.parametrize("name, path", modules().items(), ids=modules())
def test_lengths(name: str, path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= FILE
    long = {f"{name}.{function}" for function, lines in functions(ast.parse(source)) if lines > FUNCTION}
    assert long == {exception for exception in EXCEPTIONS if exception.rpartition(".")[0] == name}


def test_few_exceptions() -> None:
    assert len(EXCEPTIONS) <= 5
