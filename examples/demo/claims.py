"""A claim of the page is a measured number and the bound that it has to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Claim:
    text: str
    value: float
    relation: Literal[">=", "<="]
    bound: float

    @property
    def holds(self) -> bool:
        """Whether the number keeps its bound; NaN does not."""
        return self.value >= self.bound if self.relation == ">=" else self.value <= self.bound

    def __str__(self) -> str:
        wanted = "at least" if self.relation == ">=" else "at most"
        verdict = "holds" if self.holds else "FAILS"
        return f"{verdict}: {self.text}: {self.value:.3g} ({wanted} {self.bound:.3g})"


def judge(claims: Sequence[Claim]) -> int:
    """Print every claim; the exit code is 1 if one of them fails."""
    for claim in claims:
        print(claim)
    return 0 if claims and all(claim.holds for claim in claims) else 1
