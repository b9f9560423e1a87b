"""Sizes that may be symbols."""

from __future__ import annotations

from typing import Any


def hint(size: Any) -> int:
    """Return a size, or for one that changes from call to call what it was in the first."""
    node = getattr(size, "node", None)
    if node is None:
        return int(size)
    return int(node.hint) if node.hint is not None else 64
