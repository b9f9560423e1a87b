"""What the tests of fxgrad.opacus share: warnings that Opacus gives, and arguments of adaptive clipping."""

from __future__ import annotations

from typing import Any

import pytest

WARNINGS = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),  # Opacus's own hooks
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo looks at it
]
ADAPTIVE: dict[str, Any] = dict(
    clipping="adaptive",
    max_grad_norm=0.5,
    target_unclipped_quantile=0.5,
    clipbound_learning_rate=0.2,
    max_clipbound=1e2,
    min_clipbound=1e-2,
    unclipped_num_std=1.0,
)
