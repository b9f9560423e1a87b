"""Copies of Opacus's optimizers, which PyTorch cannot make."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

from opacus.optimizers import DPOptimizer

from fxgrad.errors import OptionError

# Note [Copies of an optimizer]
# Opacus's optimizers do not call Optimizer.__init__. Optimizer.__setstate__, by which copy.deepcopy and pickle end,
# wraps `step` of the class in a function that reads the hooks which __init__ makes: from then on every optimizer of
# that class, and of those derived from it, fails in its step. So ours have these hooks, whoever copied another.


def refuse_copies(optimizer: DPOptimizer) -> None:
    """Let copy.deepcopy and pickle raise, and let copies of other optimizers change nothing for this one.

    See Note [Copies of an optimizer].
    """
    optimizer.__deepcopy__ = optimizer.__reduce_ex__ = _refused
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def _refused(_: Any) -> NoReturn:
    raise OptionError(
        "a private optimizer cannot be copied: the copy would step copies of the parameters, which no model has",
        advice="Save optimizer.state_dict(), and load it into the optimizer that make_private returns for the copied "
        "model.",
    )
