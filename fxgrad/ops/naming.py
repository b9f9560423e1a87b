"""Names that tell objects of one Python name apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

_NAMES = WeakIdKeyDictionary()
_COUNTS: Counter[str] = Counter()


def distinct_name(value: Any, name: str) -> str:
    """Return ``name``, with a number behind it if another object had that name before."""
    if value not in _NAMES:
        _COUNTS[name] += 1
        _NAMES[value] = name if _COUNTS[name] == 1 else f"{name}#{_COUNTS[name]}"
    return str(_NAMES[value])
