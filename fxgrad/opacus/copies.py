"""Refusal of copies of Opacus's optimizers, which PyTorch cannot copy correctly."""

from __future__ import annotations

from typing import Any, NoReturn

from opacus.optimizers import DPOptimizer

from fxgrad.errors import OptionError
from fxgrad.host.modules import own_step_hooks

# Note [Copies of an optimizer]
# Opacus's optimizers do not call Optimizer.__init__. copy.deepcopy and pickle end in Optimizer.__setstate__, which
# wraps the `step` of the class in a function that reads the hooks made by __init__. From then on the step of every
# optimizer of that class and its subclasses fails. So fxgrad sets these hooks on each of its optimizers.


def refuse_copies(optimizer: DPOptimizer) -> None:
    """Make copy.deepcopy and pickle raise, and keep this optimizer working after copies of others.

    See Note [Copies of an optimizer].
    """
    optimizer.__deepcopy__ = optimizer.__reduce_ex__ = _refused
    own_step_hooks(optimizer)


def _refused(_: Any) -> NoReturn:
    raise OptionError(
        "a private optimizer cannot be copied: the copy would step copies of the parameters, which no model has",
        advice="Save optimizer.state_dict(), and load it into the optimizer that make_private returns for the copied "
        "model.",
    )
