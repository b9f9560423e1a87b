"""‖c g‖ <= C (1 + 1e-5) for every case of the tables: data that cancels, is huge, tiny, denormal or of mixed scales.

g is each sample's gradient from plain autograd in float64, from the same parameters, inputs and dL/dy. What a model
computes between two ops is rounded before any rule sees it, forward and backward: such cases are in `BETWEEN`.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.rules import RULES
from tests.cases import Case
from tests.programs import quick_dynamo
from tests.test_rules import CASES, by_name

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
C = 1e-4
KINDS = ("plain", "integers", "pairs", "ends", "huge", "tiny", "denormal", "mixed")
DTYPES = (torch.float32, torch.bfloat16)


BETWEEN_OPS = frozenset(  # and what the gradient is by float64's own numbers is something else
    {
        "mul twice with one weight",  # the second product's gradient comes back through a sine of 1e36
        "pow",  # its base is x² + 1
        "rms_norm",  # eps is the dtype's own
        "rms_norm without affine",
        "half",  # the function itself rounds gradients to half precision, in float64 as well
        "bfloat16",
        "linear with spectral_norm",  # a call moves the vectors that the next one takes
    }
)
BETWEEN_OPS_OF_BFLOAT16 = frozenset(
    {
        "linear twice with one weight", "matmul with one weight on both sides", "expand read and added",
        "conv2d twice with one weight", "embedding of two tables", "embedding tied to the head",
        "layer_norm twice with one weight", "layer_norm without affine", "group_norm without affine",
        "mul of an outer shape", "mul in place", "div, parameter first", "div of two parameters",
        "where by ids", "norm", "prelu twice with one weight", "std", "linear of coordinates", "add in place to a copy",
        "linear with weight_norm", "linear with spectral_norm in eval mode", "conv1d with weight_norm",
        "repeat into merged rows", "repeat_interleave into merged rows", "expand into merged rows",
        "add to a mask for merged rows", "linear with low rank", "linear with halves of one weight",
        "linear and its transpose", "linear, weight also a factor", "linear called twice",
        "embedding_bag with weights of its own", "prelu of copies",
        # there are no complex numbers of bfloat16
        "exp of a complex number of two", "power of a complex number", "exp of 1j", "a complex piece",
        "a complex transpose", "complex and real together", "irfft of a product", "irfft of complex pairs",
    }
)  # fmt: skip
BETWEEN = {torch.float32: BETWEEN_OPS, torch.bfloat16: BETWEEN_OPS | BETWEEN_OPS_OF_BFLOAT16}
CHECKED = [case for case in CASES if case.name not in BETWEEN_OPS]
WAYS = [(size, dtype) for dtype in DTYPES for size in (3, 1)]


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
        scale = {"plain": 1.0, "huge": 1e18, "tiny": 1e-18, "denormal": 1e36}.get(kind)
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
    scale = {"plain": 1.0, "huge": 1e18, "tiny": 1e-18, "denormal": 1e-41}.get(kind)
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


def contributions(
    case: Case, size: int, dtype: torch.dtype, device: torch.device, seed: int = 0, kinds: Sequence[str] = KINDS
) -> dict[str, float]:
    """The longest contribution of a sample, over C, for every kind of data; p.grad is the contributions' sum."""
    torch.manual_seed(zlib.crc32(case.name.encode()) + seed)
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
        assert alone(transformed, given, g) <= 1 + 1e-5 + torch.finfo(dtype).eps, kind
        grads = exact(model, given, g)
        norms = torch.stack([torch.stack([p.norm() for p in one]).norm() for one in grads])
        if kind == "plain":
            for p, *of_samples in zip(delivered, *grads, strict=True):
                expected = torch.stack([c * one for c, one in zip(weight, of_samples, strict=True)]).sum(0)
                off = (p.double() - expected).norm()
                assert float(off) <= size * C * (1e-2 if dtype is torch.bfloat16 else 1e-4), kind
        lengths = torch.where(weight == 0, 0, weight * norms)
        found[kind] = max(lengths.tolist(), key=lambda v: math.inf if math.isnan(v) else v) / C
    return found


def alone(transformed: nn.Module, given: Sequence[Tensor], g: Tensor) -> float:
    """The length of what one sample leaves in p.grad, over C, where no other sample has a gradient."""
    only = torch.zeros_like(g)
    only[-1] = g[-1]
    (transformed(*given) * only).sum().backward()
    grads = [p.grad.double().norm() for p in transformed.parameters() if p.grad is not None]
    fxgrad.zero_grad(transformed)
    return float(torch.stack(grads).norm()) / C


def check(case: Case, size: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    found = contributions(case, size, dtype, device, seed)
    assert all(length <= 1 + 1e-5 for length in found.values()), found


@pytest.mark.parametrize("place", range(len(CHECKED)), ids=lambda place: by_name(CHECKED[place]))
def test_every_case(place: int, device: torch.device) -> None:
    """One size and dtype for each case, in turn; `test_every_case_in_every_way` takes all."""
    case, (size, dtype) = CHECKED[place], WAYS[place % len(WAYS)]
    check(case, size, torch.float32 if case.name in BETWEEN[dtype] else dtype, device)


@pytest.mark.long
@pytest.mark.parametrize(("size", "dtype"), WAYS, ids=str)
@pytest.mark.parametrize("case", CHECKED, ids=by_name)
def test_every_case_in_every_way(case: Case, size: int, dtype: torch.dtype, device: torch.device) -> None:
    if case.name not in BETWEEN[dtype]:
        for seed in range(3):
            check(case, size, dtype, device, seed)


def test_every_rule_has_a_case_that_is_checked() -> None:
    names = {case.name for case in CASES}
    assert names >= BETWEEN[torch.bfloat16]
    assert RULES.keys() <= {case.op for case in CHECKED} | {"half", "bfloat16", "rms_norm"}
