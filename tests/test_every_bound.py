"""‖c g‖ <= C (1 + 1e-5) for every case of the tables: data that cancels, is huge, tiny, denormal or of mixed scales.

g is each sample's gradient from plain autograd in float64, from the same numbers. What a case computes between its ops
is rounded before any rule sees it; such cases are in `BETWEEN`, with the reason, and keep to data that is exact there.
"""

from __future__ import annotations

import copy
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from tests.cases import Case
from tests.programs import quick_dynamo
from tests.test_rules import CASES, by_name

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
C = 1e-4
KINDS = ("integers", "pairs", "ends", "huge", "tiny", "denormal", "mixed")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_dynamo():
        yield


def spread(shape: Sequence[int], powers: int, like: Tensor) -> Tensor:
    """Numbers of both signs, of scales from 2^-powers to 2^powers."""
    return torch.randn(shape, device=like.device) * 2.0 ** torch.randint(-powers, powers + 1, shape, device=like.device)


def of_kind(kind: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Inputs of one kind in the place of given ones; ids stay as they are."""

    def one(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        shape = value.shape
        if kind == "integers":
            found = torch.randint(-8, 9, shape, device=value.device).float()
            if value.dim() > 1 and shape[1] > 1:
                found[:, 1] = found[:, 0]
            return found
        if kind in ("pairs", "ends"):  # the same at every position
            return torch.randn(shape[0], *[1] * (value.dim() - 1), device=value.device).expand(shape).clone()
        scale = {"huge": 1e18, "tiny": 1e-18, "denormal": 1e36}.get(kind)
        return spread(shape, 20, value) if scale is None else torch.randn(shape, device=value.device) * scale

    return [one(value.detach()) for value in inputs]


def gradient(kind: str, y: Tensor) -> Tensor:
    """dL/dy of one kind."""
    if kind == "integers":
        g = torch.randint(-8, 9, y.shape, device=y.device).float()
        if y.dim() > 1 and y.shape[1] > 1:
            g[:, 0], g[:, 1] = g[:, 0] * 2**22, -g[:, 0] * 2**22
        return g
    if kind == "pairs":
        flat = torch.randn(len(y), y[0].numel(), device=y.device) * 1e6
        flat[:, 1::2] = -flat[:, : flat.shape[1] // 2 * 2 : 2] * (1 + 2**-22)
        return flat.view(y.shape)
    if kind == "ends":
        flat = torch.ones(len(y), y[0].numel(), device=y.device)
        flat[:, 0], flat[:, -1] = 2.0**27, -(2.0**27)
        return flat.view(y.shape)
    scale = {"huge": 1e18, "tiny": 1e-18, "denormal": 1e-41}.get(kind)
    return spread(y.shape, 20, y) if scale is None else torch.randn(y.shape, device=y.device) * scale


def exact(model: nn.Module, inputs: Sequence[Tensor], g: Tensor) -> list[list[Tensor]]:
    """Every sample's gradients in float64."""
    wide = copy.deepcopy(model).double()
    wide.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    parameters = list(wide.parameters())
    found = []
    for i in range(len(g)):
        rows = [v[i : i + 1].double() if v.is_floating_point() else v[i : i + 1] for v in inputs]
        loss = (wide(*rows) * g[i : i + 1].double()).sum()
        found.append(list(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)))
    return found


def contributions(case: Case, kinds: Sequence[str], size: int, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The longest contribution of a sample, over C, for every kind of data."""
    torch.manual_seed(zlib.crc32(case.name.encode()))
    model = case.model(device).to(dtype)
    clipped = fxgrad.ClippedGrad(C)
    transformed = fxgrad.transform(model, quantity=clipped, backend="eager")
    extra = (40,) if len(case.extra) > 1 else ()
    found = {}
    for kind in kinds:
        given = of_kind(kind, [value[:size] for value in case.inputs(device, extra)])
        given = [value.to(dtype) if value.is_floating_point() else value for value in given]
        y = transformed(*given)
        g = gradient(kind, y).to(y.dtype)
        (y * g).sum().backward()
        weight = fxgrad.result(transformed, clipped).weight.double()
        delivered = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        fxgrad.zero_grad(transformed)
        assert all(bool(grad.isfinite().all()) for grad in delivered), kind
        norms = torch.stack([torch.stack([p.norm() for p in one]).norm() for one in exact(model, given, g)])
        lengths = torch.where(weight == 0, 0, weight * norms)
        found[kind] = max(lengths.tolist(), key=lambda v: math.inf if math.isnan(v) else v) / C
    return found
