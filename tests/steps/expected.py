"""What a step, and so a program, does with samples."""

from __future__ import annotations

from enum import Enum


class Expected(Enum):
    """What a step does with samples."""

    APART = "keeps samples apart"
    MIXES = "mixes samples"
    DEPENDS = "mixes samples for some data or numbers of samples"
