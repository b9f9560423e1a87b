"""Write docs/passes.md from the pictures in tests/passes: each pass on a small program, before and after.

python tools/pictures.py           # write the page
python tools/pictures.py --check   # exit with 1 if the page is not what would be written
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests" / "passes"
PAGE = ROOT / "docs" / "passes.md"
HEAD = """# The passes in pictures

Each pass is shown on a small program: the graph that it gets and the graph that it leaves. `B` is the batch size. The
right column shows shapes, the samples of a value, or how a tap differentiates its op. `tools/pictures.py` writes this
page from `tests/passes`, where the same pictures are tests. `Small` and `Program` are models of
[pictures.py](../tests/passes/pictures.py). [design.md](design.md) explains the passes' order.
"""


def passes() -> list[str]:
    """Return the names in design.md's table, in order."""
    table = (ROOT / "docs" / "design.md").read_text().partition("<!-- passes: begin -->")[2].partition("<!--")[0]
    return [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]


def section(name: str) -> str:
    """Return a pass's part of the page: its test's docstring, the program, and the first picture."""
    source = (TESTS / f"test_{name}.py").read_text()
    module = ast.parse(source)
    test, call = next(
        (test, node)
        for test in module.body
        if isinstance(test, ast.FunctionDef)
        for node in ast.walk(test)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_expected_inline"
    )
    drawn, picture = call.args
    setup = [node for node in test.body if node.end_lineno is not None and node.end_lineno < call.lineno]
    assert isinstance(drawn, ast.Call) and isinstance(picture, ast.Constant)
    _, model, *inputs = drawn.args
    parts = [text(source, node) for node in definitions(module, [*setup, *drawn.args])]
    parts += ["\n".join(text(source, node) for node in setup)] if setup else []
    parts.append(f"around({name}, {', '.join(map(ast.unparse, [model, *inputs]))})")
    program = "\n\n".join(parts)
    blocks = f"```python\n{program}\n```\n\n```text\n{picture.value.rstrip()}\n```"
    return f"## {name}\n\n{ast.get_docstring(module)}\n\n{blocks}\n"


def definitions(module: ast.Module, users: list[ast.AST]) -> list[ast.stmt]:
    """Return the functions and classes of a test module that nodes name, and those that these name."""
    own = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used: dict[str, ast.stmt] = {}
    waiting = list(users)
    while waiting:
        for node in ast.walk(waiting.pop()):
            if isinstance(node, ast.Name) and node.id in own and node.id not in used:
                used[node.id] = own[node.id]
                waiting.append(own[node.id])
    return [node for node in module.body if node in used.values()]


def text(source: str, node: ast.AST) -> str:
    """Return a statement's source, moved to the left margin."""
    lines = ast.get_source_segment(source, node, padded=True) or ""
    margin = len(lines) - len(lines.lstrip())
    return "\n".join(line[margin:] if line[:margin].isspace() else line for line in lines.splitlines())


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *map(section, passes())])


def main(arguments: list[str]) -> int:
    """Write the page, or compare it with what stands there."""
    if "--check" in arguments:
        return int(PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
