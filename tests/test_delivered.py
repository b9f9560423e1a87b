"""`fxgrad.delivered`: the attribute of a parameter, or an error that says why there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.errors import OptionError


def test_it_is_the_attribute() -> None:
    quantities = [fxgrad.GradSample(), fxgrad.NormSample(), fxgrad.SquaredGrad(), fxgrad.GradVariance()]
    plain = nn.Linear(3, 2)
    model = fxgrad.transform(plain, quantity=quantities, backend="eager")
    model(torch.randn(5, 3)).square().sum().backward()
    p = plain.weight
    shapes = {"grad_sample": (5, 2, 3), "norm_sample": (5,), "squared_grad_sum": (2, 3), "grad_variance": (2, 3)}
    for name, shape in shapes.items():
        assert fxgrad.delivered(p, name) is getattr(p, name) and getattr(p, name).shape == shape
    assert fxgrad.delivered(p) is fxgrad.delivered(p, "grad_sample")
    model.zero_grad()
    with pytest.raises(OptionError, match=r"nothing has set grad_sample .* \[2, 3\]\n  Call it"):
        fxgrad.delivered(p)


def test_there_is_none_by_that_name() -> None:
    with pytest.raises(OptionError, match="nothing has set grad_samples"):
        fxgrad.delivered(nn.Parameter(torch.ones(2)), "grad_samples")


def test_a_list_is_no_tensor() -> None:
    model = fxgrad.transform(nn.Linear(3, 2), accumulate="append", backend="eager")
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
    with pytest.raises(OptionError, match=r'is a list of 2 tensors, not one\n  Read .* accumulate="append" out'):
        fxgrad.delivered(model.weight)
