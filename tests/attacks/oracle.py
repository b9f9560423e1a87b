"""What an attack comes to, by an oracle that knows nothing of fxgrad's passes: the loop over single samples."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor

import fxgrad
from fxgrad.errors import FxgradError
from tests.attacks.model import FEATURES, Attack, Net

SIZE = 6
RIGHT, REFUSED, WRONG = "right", "refused", "wrong in silence"


def rows_of(net: Net, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Each sample's gradients, by plain autograd, one sample at a time."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in net.named_parameters()}
    for i in range(len(x)):
        y = net(x[i : i + 1])
        part = g[i : i + 1] if g.shape[:1] == x.shape[:1] else g
        grads = torch.autograd.grad((y * part).sum(), list(net.parameters()), allow_unused=True, materialize_grads=True)
        for name, grad in zip(rows, grads, strict=True):
            rows[name].append(grad)
    return {name: torch.stack(found) for name, found in rows.items()}


def outcome(attack: Attack, device: torch.device, size: int = SIZE, **options: Any) -> tuple[str, str]:
    """RIGHT, REFUSED or WRONG, and what was said."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.nullcontext() if device.type == "cpu" else device:  # where programs make tensors of their own
            return _outcome(attack, device, size, options)
    finally:
        torch.set_default_dtype(default)


def _outcome(attack: Attack, device: torch.device, size: int, options: dict[str, Any]) -> tuple[str, str]:
    net = Net(attack.program).to(device)
    x = torch.randn(size, FEATURES, dtype=torch.float64, device=device)
    other = copy.deepcopy(net)
    try:
        view = fxgrad.transform(net, **{"backend": "eager", **options})
        y = view(x.clone())
        g = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1), device="cpu").to(device)
        (y * g).sum().backward()
    except FxgradError as error:
        return REFUSED, str(error)
    found = {name: getattr(p, "grad_sample", None) for name, p in net.named_parameters()}
    try:
        expected = rows_of(other, x, g)
    except Exception as error:  # what has no meaning for one sample is no one's gradient
        return WRONG, f"a single sample raises {error}"
    for name, rows in expected.items():
        given = found[name]
        own = torch.zeros_like(rows) if given is None else given
        if own.shape != rows.shape or not torch.allclose(own, rows, rtol=1e-8, atol=1e-10):
            return WRONG, f"{name} is off"
    return RIGHT, ""
