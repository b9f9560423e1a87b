"""Find the private names of PyTorch that a Python file uses.

What counts: a module or a name of PyTorch that begins with an underscore, imported or reached by dots; an
attribute with an underscore of any object, by dots or by `getattr` and its kin; a method that overrides a private
one of PyTorch's; and a string that is the name of such an attribute.

What does not count: ``torch.ops``, whose names, private or not, are names of operators, as those in our tables are;
names that fxgrad itself defines; those of named tuples, of Python's `sys` and of Opacus; and `PUBLIC`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from torch import fx, nn, optim

PUBLIC = {
    "torch._check": "documented at pytorch.org as the way to state a condition in a traced program",
}
"""Names with an underscore that PyTorch documents, each with the reason to use it as a public one."""

NOT_TORCH = {
    "_replace": "a named tuple's",
    "_fields": "a named tuple's",
    "_getframe": "of Python's sys",
    "_current_frames": "of Python's sys",
    "_check_skip_next_step": "of Opacus's optimizer, whose releases are pinned",
    "_get_flat_grad_sample": "of Opacus's optimizer, whose releases are pinned",
}
"""Names with an underscore that are neither PyTorch's nor fxgrad's."""

_BY_NAME = frozenset("getattr hasattr setattr delattr attrgetter methodcaller get pop".split())
_GRAPH = fx.symbolic_trace(nn.Identity())
_OF_PYTORCH = (nn.LSTM(1, 1), nn.Parameter(), _GRAPH, _GRAPH.graph, _GRAPH.graph.output_node(), fx.Interpreter(_GRAPH))
SHARED = frozenset(name for one in (*_OF_PYTORCH, fx.Tracer, optim.Optimizer) for name in dir(one))
"""Names of PyTorch's: a method of fxgrad's with such a name overrides one, or looks as if it did."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file gives to functions, methods, classes and attributes of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            yield from (field.id for field in fields if isinstance(field, ast.Name))


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def private_names(tree: ast.AST, own: Collection[str], attributes: Collection[str]) -> set[tuple[int, str]]:
    """The private names of PyTorch in a file, with their lines.

    ``own`` are names that fxgrad defines, ``attributes`` the private attributes of PyTorch that are known.
    """
    aliases = dict(_aliases(tree))
    own = {name for name in own if name not in SHARED} | set(defined(tree))
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        found |= {(node.lineno, name) for name in _named(node, aliases, own, attributes)}  # type: ignore[attr-defined]
    return found


def _named(node: ast.AST, aliases: dict[str, str], own: Collection[str], attributes: Collection[str]) -> list[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute):
        path = _dotted(node, aliases)
        if path is not None and path.startswith("torch.ops."):
            return []
        if path is None or not _of_torch(path):
            ours = node.attr in own and (node.attr not in SHARED or _is_own(node.value))
            return [] if ours or node.attr in NOT_TORCH or not is_private(node.attr) else [f"?.{node.attr}"]
        names = [path]
    elif isinstance(node, ast.Call) and _called(node) in _BY_NAME:
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        known = {*own, *NOT_TORCH}
        return [f"?.{text}" for text in texts if is_private(text) and text not in known and not _is_ours(text)]
    elif isinstance(node, ast.ClassDef) and node.bases:
        methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
        return [f"?.{name}" for name in methods if is_private(name) and name in SHARED]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [f"?.{node.value}"] if node.value in attributes else []
    else:
        return []
    private = [name for name in names if _of_torch(name) and any(map(is_private, name.split(".")))]
    return [name for name in private if not _is_public(name)]


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What the names that a file imports stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The path of a chain of attributes that begins at an imported name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, aliases)
        return None if base is None else f"{base}.{node.attr}"
    return None


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _of_torch(path: str) -> bool:
    return path.split(".")[0] == "torch" and not path.startswith("torch.ops.")


def _is_public(path: str) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in PUBLIC)


def _is_ours(text: str) -> bool:
    return text.startswith("_fxgrad")


def known_attributes(root: Path) -> frozenset[str]:
    """The private attributes of PyTorch that its room names, by dots or as a string."""
    nodes = [node for path in (root / "fxgrad/host").glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    dots = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(name for name in texts | dots if is_private(name) and name.isidentifier())


def files(root: Path) -> Iterator[Path]:
    """Every Python file of the package outside the room of private names."""
    for path in [*(root / "fxgrad").rglob("*.py"), *(root / "passes").glob("*.py")]:
        inside = path.relative_to(root).parts
        if inside[:2] not in {("fxgrad", "host"), ("fxgrad", "passes")}:
            yield path
