"""What becomes of a result where one is still set from an earlier backward: the `accumulate` policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fxgrad.errors import OptionError, nearest
from fxgrad.quantities import Quantity

Accumulate = Literal["error", "append", "sum", "overwrite"]
POLICIES: tuple[Accumulate, ...] = ("error", "append", "sum", "overwrite")


def check_policy(policy: str, quantities: Sequence[Quantity]) -> None:
    """Refuse what is no policy, and "sum" for results that do not add up."""
    if policy not in POLICIES:
        raise OptionError(
            f"accumulate has to be one of {', '.join(POLICIES)}, not {policy!r}", advice=nearest(policy, POLICIES)
        )
    lone = _lone(quantities)
    if policy == "sum" and lone is not None:
        raise OptionError(
            f"accumulate='sum' would add the results of several backwards, and those of {lone} do not add up",
            advice=f"Pass accumulate={_others(quantities)}.",
        )


def how_to_clear(quantities: Sequence[Quantity], private: bool) -> str:
    """Return advice for results that are still set; of a model of ``make_private`` the optimizer clears them."""
    if private:
        return (
            "Call zero_grad() of make_private's optimizer before the forward, and evaluate under torch.no_grad(). "
            "Lightning runs the forward first: use make_private(.., one_backward=True) there."
        )
    return (
        "Call the model's zero_grad() first (an optimizer's clears p.grad alone), or pass "
        f"accumulate={_others(quantities)}. Evaluate under torch.no_grad()."
    )


def _lone(quantities: Sequence[Quantity]) -> Quantity | None:
    """Return a quantity whose results of several backwards do not add up."""
    return next((quantity for quantity in quantities if not quantity.accumulates), None)


def _others(quantities: Sequence[Quantity]) -> str:
    """Return the policies besides "error" that these quantities take, in words."""
    return '"append", "sum" or "overwrite"' if _lone(quantities) is None else '"append" or "overwrite"'
