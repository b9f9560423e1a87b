"""fxgrad: a gradient per sample, from an ordinary model, through torch.compile.

>>> import torch, fxgrad
>>> model = fxgrad.transform(torch.nn.Linear(3, 2), backend="eager")
>>> model(torch.randn(8, 3)).square().sum().backward()
>>> model.weight.grad_sample.shape
torch.Size([8, 2, 3])
"""

from fxgrad import errors, testing
from fxgrad.api import transform, zero_grad
from fxgrad.errors import FxgradError
from fxgrad.quantities import GradSample

__version__ = "0.1.0"

__all__ = ["FxgradError", "GradSample", "errors", "testing", "transform", "zero_grad"]
