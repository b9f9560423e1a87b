"""Large images are freed before the gradient by them is computed: the same gradients, and a lower peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils.checkpoint import checkpoint

import fxgrad
from benchmarks.memory import peak_bytes
from benchmarks.models import MODELS
from benchmarks.peers import ours
from benchmarks.tasks import Task, make_task
from fxgrad.kernels.on_cpu import at_most, kept_where
from tests.quick import long_but
from tests.test_on_cpu import agrees, images

pytestmark = pytest.mark.inductor

Behind = Callable[[Tensor], Tensor]


class Blocks(nn.Module):
    """Two convolutions with a ReLU each; the second and what is behind it differ."""

    def __init__(self, behind: Behind = lambda h: F.avg_pool2d(h, 2), **second: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, **{"kernel_size": 3, "padding": 1, **second})
        self.behind, self.head = behind, nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.behind(self.second(self.first(x).relu()).relu())
        logits: Tensor = self.head(h.flatten(1))
        return logits


def built(*args: Any, **kwargs: Any) -> nn.Module:
    model = Blocks(*args, **kwargs)
    model(images())
    return model


def whole_step(model: nn.Module, x: Tensor, backend: str) -> tuple[list[Tensor], str]:
    """Return the clipped gradients of one graph, and Inductor's code."""
    private = fxgrad.transform(copy.deepcopy(model), fxgrad.ClippedGrad(0.5), backend=backend)
    step = fxgrad.forward_backward(private, lambda model, x: model(x).square().sum())
    _, codes = run_and_get_code(step, x)
    return [p.grad for p in private.parameters() if p.grad is not None], "".join(codes)


SECOND: dict[str, dict[str, Any]] = {
    "padded": {},
    "stepping": {"stride": 2},
    "with a rest": {"kernel_size": 2, "stride": (2, 3), "padding": 0},
    "dilated": {"dilation": (2, 1), "padding": (2, 1)},
    "grouped": {"groups": 2},
    "depthwise": {"groups": 4, "bias": False},
    "of one pixel": {"kernel_size": 1, "padding": 0},
    "of all": {"kernel_size": 7, "padding": 0},
}


@pytest.mark.parametrize("second", long_but(lambda second: second in ("padded", "with a rest", "grouped"), SECOND))
def test_convolutions(second: str) -> None:
    model = built(lambda h: F.adaptive_avg_pool2d(h, 1), **SECOND[second])
    agrees(model, images())
    _, code = whole_step(model, images(), "inductor")
    assert "at_most" in code and "transposed=True" in code
    torch.manual_seed(0)
    x = images(3)
    torch.testing.assert_close(whole_step(model, x, "inductor")[0], whole_step(model, x, "eager")[0])


BEHIND: dict[str, Behind] = {
    "max pooling": lambda h: F.max_pool2d(h, 3, 2),
    "read twice": lambda h: F.avg_pool2d(h, 2) + h.mean((2, 3), keepdim=True),
    "read by what saves it": lambda h: h * h.mean((2, 3), keepdim=True).sigmoid(),
    "returned": lambda h: h,
    "in channels": lambda h: h.softmax(1)[:, :, ::2],
}


@pytest.mark.parametrize("behind", long_but(lambda behind: behind == "read by what saves it", BEHIND))
def test_behind_a_relu(behind: str) -> None:
    model = built(BEHIND[behind])
    agrees(model, images())
    x = images(3)
    torch.testing.assert_close(whole_step(model, x, "inductor")[0], whole_step(model, x, "eager")[0])


class Shared(nn.Module):
    """One image is read by two convolutions, and by the sum behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Conv2d(n, 3, 3, padding=1) for n in (2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        return (self.one(h).relu() + self.other(h).relu() + h).mean((2, 3))


@pytest.mark.parametrize("n", [1, 4])
def test_an_image_with_several_readers(n: int) -> None:
    model = Shared()
    agrees(model, images(n))
    x = images(n)
    torch.testing.assert_close(whole_step(model, x, "inductor")[0], whole_step(model, x, "eager")[0])


class Beside(nn.Module):
    """One convolution reads the image, and one what a threshold makes of it; or two thresholds of one image."""

    def __init__(self, first: Behind, second: Behind) -> None:
        super().__init__()
        self.image, self.one, self.other = (nn.Conv2d(n, 3, 3, padding=1) for n in (2, 3, 3))
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        h = self.image(x)
        return (self.one(self.first(h)) + self.other(self.second(h))).square().mean((1, 2, 3))


def low(h: Tensor) -> Tensor:
    return F.threshold(h, 0.1, 0.5)


def high(h: Tensor) -> Tensor:
    return F.threshold(h, 0.3, 0.2)


def as_it_is(h: Tensor) -> Tensor:
    return h


@pytest.mark.parametrize(("first", "second"), [(as_it_is, low), (low, as_it_is), (low, high)])
def test_an_image_and_its_thresholds(first: Behind, second: Behind) -> None:
    model = Beside(first, second)
    agrees(model, images())
    x = images(3)
    torch.testing.assert_close(whole_step(model, x, "inductor")[0], whole_step(model, x, "eager")[0])


class Turned(nn.Module):
    """What is saved for the backward is a view of a convolution's result, of the same sizes."""

    def __init__(self, turn: Behind) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.threshold(self.turn(self.first(x)), 0.1, 0.5)).square().mean((1, 2, 3))


TURNED: dict[str, Behind] = {
    "rows and columns": lambda h: h.transpose(2, 3),
    "channels and rows": lambda h: h.transpose(1, 2),
    "there and back": lambda h: h.transpose(1, 3).transpose(1, 3),
    "nothing": lambda h: h.detach() + (h - h.detach()),
}


@pytest.mark.parametrize("turn", TURNED)
def test_a_square_image_turned_over(turn: str) -> None:
    model = Turned(TURNED[turn])
    x = torch.randn(4, 2, 4, 4)
    agrees(model, x)
    torch.testing.assert_close(whole_step(model, x, "inductor")[0], whole_step(model, x, "eager")[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_that_are_none(dtype: torch.dtype) -> None:
    """As PyTorch's: what lies at the threshold passes nothing, what is NaN passes all, and 0 times infinity is 0."""
    out = torch.tensor([-0.0, 0.0, 1e-30, 1.0, torch.inf, torch.nan, -torch.inf], dtype=dtype)
    g = torch.tensor([torch.nan, torch.inf, 2.0, -torch.inf, 3.0, 4.0, torch.inf], dtype=dtype)
    expected = torch.ops.aten.threshold_backward(g, out, 0)
    torch.testing.assert_close(kept_where(g, at_most(out, 0.0)), expected, equal_nan=True, rtol=0, atol=0)
    compiled = torch.compile(lambda g, out: kept_where(g, at_most(out, 0.0)))
    torch.testing.assert_close(compiled(g, out), expected, equal_nan=True, rtol=0, atol=0)


def test_small_images_stay() -> None:
    """A mask takes a pass over its image: eight blocks of one size keep theirs."""
    layers = [layer for _ in range(8) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())]
    _, code = whole_step(nn.Sequential(*layers), images(), "inductor")
    assert "at_most" not in code


def test_other_dtypes_stay() -> None:
    """oneDNN has no double, and PyTorch's own transposed convolution takes one sample after the other."""
    _, code = whole_step(built().double(), images(dtype=torch.float64), "inductor")
    assert "at_most" not in code and "transposed=True" not in code


def test_batches_and_sizes() -> None:
    """One step, with batches of none and one, and images of another size, for which the rest of a row is a symbol."""
    model = nn.Sequential(built(lambda h: F.adaptive_avg_pool2d(h, 2), stride=2))
    model[0].head = nn.Linear(16, 3)
    loss = lambda model, x: model(x).square().sum()  # noqa: E731
    privates = [
        fxgrad.transform(copy.deepcopy(model), fxgrad.ClippedGrad(0.5), backend=backend)
        for backend in ("inductor", "eager")
    ]
    steps = [fxgrad.forward_backward(private, loss) for private in privates]
    for x in (images(), images(0), images(1), torch.randn(3, 2, 8, 9), images(2)):
        grads = []
        for private, step in zip(privates, steps, strict=True):
            private.zero_grad()
            step(x)
            grads.append([p.grad for p in private.parameters()])
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    """The image is computed again in the backward, and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = built()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = checkpoint(self.blocks, x, use_reentrant=False)
        return logits


def test_a_checkpoint_saves_no_mask() -> None:
    agrees(Checkpointed(), images())
    private = fxgrad.transform(Checkpointed(), fxgrad.ClippedGrad(0.5))
    _, codes = run_and_get_code(lambda: private(images()).square().sum().backward())
    assert len(codes) == 2 and "at_most" not in "".join(codes)


def peak_of(task: Task, whole: bool) -> int:
    torch._dynamo.reset()
    engine = ours.fxgrad(task, "C", whole=whole)
    for _ in range(3):
        engine.step()
    return peak_bytes(task, engine)


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_peak_of_a_small_network(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CNN-6 at a batch of 64: of 38 MB of the plain step, two images have 8 each."""
    task = make_task("CNN-6", MODELS["CNN-6"], "cpu")
    plain = ours.plain(task)
    plain.step()
    plain_peak, peak = peak_bytes(task, plain), peak_of(task, whole)
    assert peak <= 1.15 * plain_peak
    monkeypatch.setattr("fxgrad.compile.freed_images.LARGE", 1)
    with fresh_cache():
        assert peak + 5e6 < peak_of(task, whole)
