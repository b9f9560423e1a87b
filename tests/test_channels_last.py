"""The layout of images around convolutions: what Inductor is told of a graph, and one graph of a whole step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fxgrad
from fxgrad.compile.channels_last import lay_out
from fxgrad.host.versions import at_least
from tests.quick import long_but
from tests.test_on_cpu import ENDS, VIEWS, Network, Normed, agrees, halves, images

aten = torch.ops.aten


@torch.library.custom_op("fxgrad_tests::first_in_memory", mutates_args=())
def first_in_memory(x: Tensor) -> Tensor:
    """What no declaration allows another layout."""
    return x.as_strided((4,), (1,)).clone()


@first_in_memory.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(4)


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Return a graph as a forward's comes to Inductor: the user sees its first output."""
    mode = FakeTensorMode()
    gm = make_fx(function)(*(mode.from_tensor(one) for one in inputs))
    output = gm.graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
    output.meta["user_visible_output_idxs"] = [0]
    return gm


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


X, W = torch.randn(2, 3, 6, 6), torch.randn(3, 3, 3, 3)

# Each reads the first convolution's result, and depends on how it lies in memory, or may.
ASK: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "as_strided": (lambda h: h.as_strided((2, 36), (108, 1)), aten.as_strided.default),
    "other bits": (lambda h: h.view(torch.int16).float(), aten.view.dtype),
    "unknown to fxgrad": (lambda h: h.cumsum(2), aten.cumsum.default),
    "random": (torch.bernoulli, aten.bernoulli.default),
    "attention": (
        lambda h: aten._scaled_dot_product_flash_attention_for_cpu(h, h, h)[0],
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ),
    "another library's": (first_in_memory, torch.ops.fxgrad_tests.first_in_memory.default),
}


@pytest.mark.parametrize(("reads", "op"), ASK.values(), ids=ASK)
def test_what_may_depend_on_the_layout_gets_the_traced_one(reads: Callable[[Tensor], Tensor], op: Any) -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        h = conv(x, w)
        return conv(h.relu(), w).sum() + reads(h).sum()

    gm = traced(function, X, W)
    assert lay_out(gm)
    (reader,) = gm.graph.find_nodes(op="call_function", target=op)
    assert all(one.kwargs == {"memory_format": torch.contiguous_format} for one in reader.all_input_nodes)
    convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert all(one.args[0].kwargs == {"memory_format": torch.channels_last} for one in convolutions)
    if op is not aten.bernoulli.default:
        torch.testing.assert_close(gm(X, W)[0], function(X, W), rtol=1e-4, atol=1e-4)


def test_what_the_user_sees_keeps_its_layout() -> None:
    gm = traced(lambda x, w: (conv(x, w), conv(x, w).relu()), X, W)
    assert lay_out(gm)
    seen, saved = gm(X, W)
    assert seen.is_contiguous() and saved.is_contiguous(memory_format=torch.channels_last)


def test_what_a_reader_and_a_backward_share_is_saved_as_traced() -> None:
    gm = traced(lambda x, w: (first_in_memory(kept := conv(x, w)), kept), X, W)
    assert lay_out(gm)
    assert gm(X, W)[1].is_contiguous()


Function = Callable[[Tensor, Tensor], Any]
LEFT: dict[str, tuple[Function, Tensor, Tensor]] = {
    "a traced layout that is not contiguous": (lambda x, w: first_in_memory(conv(x, w).transpose(2, 3)), X, W),
    "sequences": (lambda x, w: F.conv1d(x, w), X[:, :, 0], W[:, :, 0]),
    "no convolution": (lambda x, w: x * w.sum(), X, W),
}


@pytest.mark.parametrize("given", LEFT.values(), ids=LEFT)
def test_a_graph_that_stays(given: tuple[Function, Tensor, Tensor]) -> None:
    function, *inputs = given
    gm = traced(function, *inputs)
    before = gm.print_readable(print_output=False)
    assert not lay_out(gm)
    assert gm.print_readable(print_output=False) == before


def loss_fn(model: nn.Module, x: Tensor) -> Any:
    """The loss, and what the model returns."""
    outputs = model(x)
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    seen = [one.detach() for one in several]
    return sum(one.tanh().square().sum() for one in several), *seen


QUICK = "read twice", "a view, as tokens", "of the convolution", "turned over", "its edges repeated"


@pytest.mark.inductor
@pytest.mark.parametrize("behind", long_but(lambda behind: behind in QUICK, ENDS | VIEWS))
def test_one_graph(behind: str, device: torch.device) -> None:
    """Gradients are those of "eager", results lie in memory as those of the model do."""
    model, x = Network((ENDS | VIEWS)[behind]).to(device), images(device=device)
    expected = loss_fn(model, x)
    grads: list[list[Tensor]] = []
    for backend in ("inductor", "eager"):
        private = fxgrad.transform(copy.deepcopy(model), fxgrad.ClippedGrad(0.5), backend=backend)
        results = fxgrad.forward_backward(private, loss_fn)(x)
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)
            assert one.stride() == other.stride()
        grads.append([p.grad for p in private.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def parts_and_edges(h: Tensor) -> Any:
    return *halves(F.max_pool2d(h, 2)), ENDS["its edges repeated"](h)


@pytest.mark.inductor
def test_one_graph_of_several_sizes_of_images() -> None:
    """What has no known size lies in memory as the model's results do, too."""
    model = Network(parts_and_edges)
    step = fxgrad.forward_backward(fxgrad.transform(model, fxgrad.ClippedGrad(0.5)), loss_fn)
    for size in ((4, 2, 7, 7), (3, 2, 8, 9)):
        x = torch.randn(size)
        for one, other in zip(step(x), loss_fn(model, x), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)
            assert one.stride() == other.stride()


class Between(nn.Module):
    """Two convolutions, and an op between them that Inductor calls as it is."""

    def __init__(self, between: Callable[[Tensor], Tensor], turned: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.between, self.turned = between, turned

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        out = self.last(self.between(h)).mean((2, 3))
        return out + h.transpose(1, 2).cumsum(1).mean((1, 2, 3)).unsqueeze(1) if self.turned else out


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "edges repeated": lambda h: F.pad(h, (1, 2, 0, 1), mode="replicate"),
    "an exponential": lambda h: torch.matrix_exp(h / 10),
    "edges repeated, one row": lambda h: F.pad(h.flatten(2), (1, 2), mode="replicate").unsqueeze(2),
}


@pytest.mark.inductor
@pytest.mark.skipif(not at_least("2.13"), reason="older versions give what a convolution computes")
@pytest.mark.parametrize("turned", [False, True])  # a value that is read, turned over, as it was traced
@pytest.mark.parametrize("between", BETWEEN)
def test_pytorchs_kernels_between_convolutions(between: str, turned: bool) -> None:
    """A plain compiled model raises for these."""
    model = Between(BETWEEN[between], turned)
    agrees(model, images())
    x, grads = images(3), []
    for backend in ("inductor", "eager"):
        private = fxgrad.transform(copy.deepcopy(model), fxgrad.ClippedGrad(0.5), backend=backend)
        fxgrad.forward_backward(private, lambda model, x: model(x).square().sum())(x)
        grads.append([p.grad for p in private.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """Each block's result is a sum of what a norm makes of a convolution's, and of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[3](self.first(x)).relu()
        for convolution, norm in zip(self.convolutions, self.norms, strict=False):
            h = (norm(convolution(h)) + h).relu()
        return h.mean((2, 3))


ONCE: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "max pooling": (lambda: Network(lambda h: F.max_pool2d(h.relu(), 2).flatten(1)), ("(196, 49, 7, 1)",)),
    "average pooling": (lambda: Network(lambda h: F.avg_pool2d(h.relu(), 2).mean((2, 3))), ("(196, 49, 7, 1)",)),
    "norms of groups": (Normed, ("(784, 49, 7, 1)", "(784, 196, 49, 1)")),
    "sums of branches": (Residual, ("(392, 49, 7, 1)",)),
}


@pytest.mark.inductor
@pytest.mark.parametrize(("build", "contiguous"), ONCE.values(), ids=ONCE)
def test_one_graph_writes_no_image_twice(build: Callable[[], nn.Module], contiguous: tuple[str, ...]) -> None:
    """On CPU: not once with channels last, for the next convolution, and once contiguous, for the backward."""
    private = fxgrad.transform(build(), fxgrad.ClippedGrad(1.0))
    step = fxgrad.forward_backward(private, lambda model, x: model(x).square().sum())
    _, (code, *_) = run_and_get_code(step, images())
    assert not any(strides in code for strides in contiguous)


@pytest.mark.inductor
def test_a_gradient_that_branches_share_is_written_with_channels_last() -> None:
    torch.manual_seed(0)
    agrees(Residual(), images())
    private = fxgrad.transform(Residual(), fxgrad.ClippedGrad(1.0))
    _, codes = run_and_get_code(lambda: private(images()).square().sum().backward())
    assert not any("(392, 49, 7, 1)" in code for code in codes)


@pytest.mark.inductor
def test_one_graph_copies_a_weight_once() -> None:
    """For the convolution and for its backward."""
    private = fxgrad.transform(Residual(), fxgrad.ClippedGrad(1.0))
    step = fxgrad.forward_backward(private, lambda model, x: model(x).square().sum())
    _, codes = run_and_get_code(step, images())
    assert sum(code.count("empty_strided_cpu((8, 8, 3, 3), (72, 1, 24, 8)") for code in codes) == 3


@pytest.mark.inductor
@pytest.mark.parametrize("n", [1, 4])
def test_a_backward_returns_what_is_contiguous(n: int) -> None:
    """One image's convolution has the gradient that PyTorch returns, which lies in memory as the image does."""
    agrees(Network(lambda h: h.relu().mean((2, 3))), images(n))
