"""Differentially private training: fxgrad's gradients under Opacus's optimizers, loaders and accountants.

In its mode "no_op", Opacus validates the model, samples the batches, clips ``p.grad_sample``, adds noise and counts the
privacy cost. It does not compute the gradients: fxgrad does. This package refuses settings in which the two would
silently disagree.

Only this package of fxgrad needs Opacus (``pip install "fxgrad[opacus]"``).
"""

from typing import TYPE_CHECKING, Any

from fxgrad.errors import MissingPackage

try:
    import opacus  # noqa: F401
except ImportError as error:
    raise MissingPackage(
        "fxgrad.opacus needs Opacus, which is not installed",
        where=f"{type(error).__name__}: {error}",
        advice='Install it: pip install "fxgrad[opacus]".',
    ) from error

from fxgrad.opacus.fixing import fix
from fxgrad.opacus.preparing import make_private, make_private_with_epsilon
from fxgrad.opacus.privacy_engine import PrivacyEngine
from fxgrad.opacus.validating import validate

if TYPE_CHECKING:
    from fxgrad.opacus.trainer_callback import TrainerCallback

__all__ = ["PrivacyEngine", "TrainerCallback", "fix", "make_private", "make_private_with_epsilon", "validate"]


def __getattr__(name: str) -> Any:
    if name != "TrainerCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fxgrad.opacus.trainer_callback import TrainerCallback  # imports transformers

    return TrainerCallback
