"""fxgrad: a gradient per sample, from an ordinary model, through torch.compile.

>>> import torch, fxgrad
>>> model = fxgrad.transform(torch.nn.Linear(3, 2), backend="eager")
>>> model(torch.randn(8, 3)).square().sum().backward()
>>> model.weight.grad_sample.shape
torch.Size([8, 2, 3])
"""

from fxgrad import errors, losses, testing
from fxgrad.api import release, result, transform, zero_grad
from fxgrad.compat import call_for_per_sample_grads
from fxgrad.delivered import delivered
from fxgrad.errors import FxgradError
from fxgrad.explanation.explaining import Explanation, explain
from fxgrad.extend import implements_per_sample_grads, register_op
from fxgrad.forward_backward import forward_backward
from fxgrad.kernels.memory import empty_cache
from fxgrad.ops.families import Family
from fxgrad.quantities import (
    ClippedGrad,
    Clipping,
    Delivery,
    Grad,
    GradDot,
    GradGram,
    GradProjection,
    GradSample,
    GradVariance,
    NormSample,
    Quantity,
    SquaredGrad,
)
from fxgrad.terms import OneHot, Term
from fxgrad.tracing import Trace, trace
from fxgrad.verification.verdict import Verdict
from fxgrad.verification.verifying import verify
from fxgrad.warming import warm_up

__version__ = "0.9.0"

__all__ = [
    "ClippedGrad",
    "Clipping",
    "Delivery",
    "Explanation",
    "Family",
    "FxgradError",
    "Grad",
    "GradDot",
    "GradGram",
    "GradProjection",
    "GradSample",
    "GradVariance",
    "NormSample",
    "OneHot",
    "Quantity",
    "SquaredGrad",
    "Term",
    "Trace",
    "Verdict",
    "call_for_per_sample_grads",
    "delivered",
    "empty_cache",
    "errors",
    "explain",
    "forward_backward",
    "implements_per_sample_grads",
    "losses",
    "register_op",
    "release",
    "result",
    "testing",
    "trace",
    "transform",
    "verify",
    "warm_up",
    "zero_grad",
]
