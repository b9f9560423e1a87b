"""The loss that `assert_per_sample_grads` takes where it is given none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxgrad.errors import OptionError
from fxgrad.testing import assert_per_sample_grads


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_samples_along_another_dimension_are_refused(kind: Any) -> None:
    layer, x = kind(4, 3, batch_first=True).double(), torch.randn(5, 7, 4, dtype=torch.float64)
    with pytest.raises(OptionError, match=r"output 1, \[1, 5, 3\], does not have the 5 samples along dimension 0"):
        assert_per_sample_grads(layer, x, backend="eager")
    assert_per_sample_grads(layer, x, backend="eager", loss_fn=lambda outputs: outputs[0].sin().sum())


def test_outputs_without_a_gradient_may_have_any_shape() -> None:
    class Located(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x), torch.arange(7), torch.linspace(0, 1, 3)

    assert_per_sample_grads(Located(), torch.randn(5, 4), backend="eager")
