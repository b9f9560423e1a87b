"""Differentially private training: fxgrad's gradients under Opacus's optimizers, loaders and accountants.

Opacus's mode "no_op" leaves the gradients to somebody else: it validates the model, samples the batches, clips
``p.grad_sample``, adds noise and counts what privacy it costs. This package puts fxgrad into the empty place, and
refuses what would make the two disagree without a word.

Importing it needs Opacus (``pip install "fxgrad[opacus]"``); nothing else of fxgrad does.
"""

from fxgrad.errors import MissingPackage

try:
    import opacus  # noqa: F401
except ImportError as error:
    raise MissingPackage(
        "fxgrad.opacus needs Opacus, which is not installed",
        where=f"{type(error).__name__}: {error}",
        advice='Install it: pip install "fxgrad[opacus]".',
    ) from error

from fxgrad.opacus.preparing import make_private, make_private_with_epsilon
from fxgrad.opacus.validating import validate

__all__ = [
    "make_private",
    "make_private_with_epsilon",
    "validate",
]
