"""The kernels in C++ for a convolution's per-sample weight gradients, against PyTorch's in float64."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxgrad
from fxgrad.kernels import compiled, norms, window_gram_kernel, window_kernel
from fxgrad.kernels.convolutions import conv_rows
from fxgrad.kernels.norms import CHAIN
from fxgrad.kernels.precision import unit
from fxgrad.kernels.settings import Settings
from fxgrad.kernels.windows import window_norms, window_rows
from fxgrad.testing import assert_per_sample_grads, per_sample_grads
from tests.layouts import LAYOUTS, expanded, in_layout


def operands(
    n: int,
    k: int,
    size: tuple[int, int],
    channels: tuple[int, int],
    kernel: tuple[int, int],
    told: Settings,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """g and input ``[n, k, channels, *space]``, and the weight's shape."""
    input = torch.randn(n, k, channels[0], *size)
    fan_out, fan_in = channels if told.transposed else channels[::-1]
    weight = torch.empty(fan_out, fan_in // told.groups, *kernel)
    y = torch.convolution(input.flatten(0, 1), weight, None, *told)
    return torch.randn(n, k, *y.shape[1:]), input, tuple(weight.shape)


def expected(g: Tensor, input: Tensor, kernel: tuple[int, ...], told: Settings) -> Tensor:
    """One sample after another in float64, by PyTorch's own op."""
    rows = []
    for own, x in zip(g.double(), input.double(), strict=True):
        weight = own.new_empty(kernel)
        rows.append(torch.ops.aten.convolution_backward(own, x, weight, None, *told, (False, True, False))[1])
    return torch.stack(rows)


@pytest.mark.parametrize(("channels", "kernel"), [((33, 41), (3, 3)), ((64, 40), (1, 5)), ((3, 700), (5, 4))])
def test_large_results_are_written_past_the_cache(channels: tuple[int, int], kernel: tuple[int, int]) -> None:
    told = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    g, input, shape = operands(95, 1, (6, 7), channels, kernel, told)
    assert window_kernel.applies(g, input, shape, told) and 95 * torch.Size(shape).numel() * 4 > 4 << 20
    found, _ = window_rows(g, input, list(shape), told.numbers())
    torch.testing.assert_close(found.double(), expected(g, input, shape, told), rtol=1e-4, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_shape_and_layout(data: Any) -> None:
    draw = data.draw
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3, 8, 17, 33]))
    longest = 5 if groups < 8 else 10
    windows = st.tuples(st.integers(1, longest), st.integers(1, longest))
    kernel, stride, dilation = draw(windows), draw(pair), draw(pair)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    size = tuple(d * (each - 1) + 1 + draw(st.integers(0, 5)) for each, d in zip(kernel, dilation, strict=True))
    large, small = [(1, 1), (3, 5), (16, 8), (17, 9), (40, 20)], [(1, 1), (1, 1), (1, 2), (2, 1), (3, 2)]
    fan_in, fan_out = draw(st.sampled_from(large if groups < 8 else small))
    channels = groups * fan_in, groups * fan_out
    transposed = draw(st.sampled_from([False, False, True]))
    if transposed:  # something has to be left
        padding = tuple(min(p, d * (each - 1) // 2) for p, each, d in zip(padding, kernel, dilation, strict=True))
    steps = zip(stride, dilation, strict=True)
    extra = tuple(draw(st.integers(0, max(both) - 1)) for both in steps) if transposed else (0, 0)
    told = Settings(stride, padding, dilation, transposed, extra, groups)
    torch.manual_seed(draw(st.integers(0, 99)))
    g, input, shape = operands(draw(st.integers(1, 3)), draw(st.integers(1, 2)), size, channels, kernel, told)
    g, input = (in_layout(value, draw(st.sampled_from(LAYOUTS))) for value in (g, input))
    g, input = (expanded(value, *draw(st.sets(st.integers(0, 4), max_size=2))) for value in (g, input))
    assert window_kernel.applies(g, input, shape, told) or 1 < groups < 8
    true = expected(g, input, shape, told)
    out, found = window_rows(g, input, shape, told.numbers())
    atol = 5e-5 if transposed else 1e-5  # more positions are added up, ten times as many
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=atol)
    norms = true.flatten(1).norm(dim=1)
    plain = groups == 1 and not transposed and g.shape[1] == 1
    assert not plain or window_gram_kernel.applies(g, input, shape)
    by_gram = [window_norms(g, input, shape, told.numbers(), True)] if plain else []
    for norm, bound in (found, window_norms(g, input, shape, told.numbers(), False), *by_gram):
        torch.testing.assert_close(norm, norms, rtol=1e-5, atol=1e-7)
        assert (bound >= norms * (1 - 1e-12)).all()
        assert (bound <= norms + 1e-3 * g.flatten(1).norm(dim=1) * input.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("dim", range(5))
@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (1, True), (2, False), (32, False)], ids=str)
def test_values_that_are_expanded(dim: int, groups: int, transposed: bool) -> None:
    """A sum over channels hands back one gradient for all of them, 0 numbers apart."""
    told = Settings((1, 1), (1, 1), (1, 1), transposed, (0, 0), groups)
    g, input, shape = operands(3, 2, (6, 5), (32, 64), (3, 3), told)
    for both in (expanded(g, dim), input), (g, expanded(input, dim)):
        out, found = window_rows(*both, shape, told.numbers())
        true = expected(*both, shape, told)
        torch.testing.assert_close(out.double(), true, rtol=1e-4, atol=1e-4)
        norms = true.flatten(1).norm(dim=1)
        for norm, bound in found, window_norms(*both, shape, told.numbers(), False):
            torch.testing.assert_close(norm, norms, rtol=1e-5, atol=0)
            assert (bound >= norms * (1 - 1e-12)).all()


@pytest.mark.parametrize(("threads", "copied"), [(1, 1 << 20), (2, 1 << 20), (5, 1 << 20), (1, 400), (2, 99)])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_sample_in_parts(monkeypatch: pytest.MonkeyPatch, threads: int, copied: int, groups: int) -> None:
    """Of its outputs, where there are more threads than samples or a copy of all would be large."""
    monkeypatch.setattr(compiled, "COPIED", copied)
    told = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    g, input, shape = operands(2, 1, (6, 5), (9, 63), (3, 3), told)
    assert window_kernel.applies(g, input, shape, told)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    out, found = window_rows(g, input, shape, told.numbers())
    true = expected(g, input, shape, told)
    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0], true.flatten(1).norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("channels", "shape"), [((3, 4), (3, 4, 5)), ((18, 18), (18, 1, 5))], ids=str)
def test_a_row_longer_than_a_chain_of_additions(channels: tuple[int, int], shape: tuple[int, ...]) -> None:
    told = Settings((1,), (2,), (1,), False, (0,), channels[1] // shape[1])
    g, input = torch.randn(2, 1, channels[0], 1500), torch.randn(2, 1, channels[1], 1500)
    assert window_kernel.applies(g, input, shape, told)
    out, _ = window_rows(g, input, shape, told.numbers())
    torch.testing.assert_close(out.double(), expected(g, input, shape, told), rtol=1e-4, atol=1e-4)


KINDS = pytest.mark.parametrize(("channels", "groups"), [((3, 8), 1), ((20, 20), 20)], ids=["one", "depthwise"])


@KINDS
@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e18, 1e30])
def test_norms_where_squares_leave_float32(scale: float, channels: tuple[int, int], groups: int) -> None:
    told = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    g, input, shape = operands(3, 1, (6, 5), channels, (3, 3), told)
    g = g.clone()
    g[1] *= scale
    norms = expected(g, input, shape, told).flatten(1).norm(dim=1)
    for norm, bound in (
        window_rows(g, input, shape, told.numbers())[1],
        window_norms(g, input, shape, told.numbers(), False),
    ):
        torch.testing.assert_close(norm, norms, rtol=1e-5, atol=0)
        assert (bound >= norms * (1 - 1e-12)).all() and (bound <= norms * 1.001).all()


@KINDS
def test_a_sample_that_is_not_finite_stays_alone(channels: tuple[int, int], groups: int) -> None:
    told = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    g, input, shape = operands(4, 1, (6, 5), channels, (3, 3), told)
    g[1, 0, 0, 0, 0], input[2, 0, 0, 0, 0] = torch.inf, torch.nan
    out, found = window_rows(g, input, shape, told.numbers())
    assert out[[0, 3]].isfinite().all() and found[:, [0, 3]].isfinite().all()
    assert not found[1, 1].isfinite() and not found[1, 2].isfinite()


def test_what_it_does_not_take_is_left_to_pytorch() -> None:
    told = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    g, input, shape = operands(2, 1, (6, 5), (4, 8), (3, 3), told)
    assert window_kernel.applies(g, input, shape, told)
    assert not window_kernel.applies(g.double(), input.double(), shape, told)
    assert not window_kernel.applies(g, input, (8, 1, 3, 3), told._replace(groups=4))
    deep = told._replace(stride=(1, 1, 1), padding=(1, 1, 1), dilation=(1, 1, 1))
    assert not window_kernel.applies(g.unsqueeze(-1), input.unsqueeze(-1), (*shape, 3), deep)
    assert not window_kernel.applies(g[:0], input[:0], shape, told)


@KINDS
def test_without_a_compiler_pytorchs_kernels_run(
    monkeypatch: pytest.MonkeyPatch, channels: tuple[int, int], groups: int
) -> None:
    told = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    g, input, shape = operands(3, 1, (6, 5), channels, (3, 3), told)
    out, found = window_rows(g, input, shape, told.numbers())
    monkeypatch.setattr(window_kernel.KERNELS, "functions", None)
    for one, other in zip((out, found), window_rows(g, input, shape, told.numbers()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    by_pytorch = torch.empty(shape).expand(3, *shape).clone()
    conv_rows(g, input, shape, told, by_pytorch)
    torch.testing.assert_close(out, by_pytorch, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("shape", [(2000, 1, 1), (1, 700, 513), (3, 1, 2)], ids=str)
def test_the_bound_counts_the_sums_that_are_added(shape: tuple[int, int, int], groups: int) -> None:
    """Each image's sum is added to those before: 1 + 2^-24 + 2^-24 + .. stays 1 in float32."""
    k, rows, columns = shape
    told = Settings((1, 1), (0, 0), (1, 1), False, (0, 0), groups)
    g = torch.full((1, k, groups, rows, columns), 2.0**-12)
    g[0, 0, :, 0, 0] = 1
    norm = g[0, :, 0].double().square().sum() * groups**0.5
    for found in (
        window_rows(g, g, (groups, 1, 1, 1), told.numbers())[1],
        window_norms(g, g, (groups, 1, 1, 1), told.numbers(), False),
    ):
        assert found[1, 0] >= norm * (1 - 1e-9)


@KINDS
def test_equal_samples_have_equal_bounds_in_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, channels: tuple[int, int], groups: int
) -> None:
    told = Settings((1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    g, input, shape = operands(1, 1, (6, 5), channels, (3, 3), told)
    g, input = g.expand(3, *g.shape[1:]), input.expand(3, *input.shape[1:])
    for threads in (1, 4, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        _, (_, bound) = window_rows(g, input, shape, told.numbers())
        assert (bound == bound[0]).all()


@pytest.mark.parametrize("layout", ["plain", "channels last", "expanded"])
def test_gram_matrices_of_a_row_of_pixels(layout: str) -> None:
    told = Settings((2,), (3,), (2,), False, (0,), 1)
    g, input, shape = torch.randn(4, 1, 300, 11), torch.randn(4, 1, 40, 19), (300, 40, 3)
    if layout == "expanded":  # as of a mean over space
        g = expanded(g, 3)
    else:
        g, input = in_layout(g, layout), in_layout(input, layout)
    assert window_gram_kernel.applies(g, input, shape)
    norm, bound = window_norms(g, input, shape, told.numbers(), True)
    true = expected(g, input, shape, told).flatten(1).norm(dim=1)
    torch.testing.assert_close(norm, true, rtol=1e-6, atol=0)
    assert (bound >= true).all() and (bound <= 1.001 * true).all()


def test_sizes_have_one_order_in_python_and_in_c() -> None:
    """`Shape` goes to C++ as memory: a field in another place would be another size, and no error."""
    source = (Path(window_kernel.__file__).parent / "shape.cpp").read_text()
    (body,) = re.findall(r"struct Shape \{(.*?)\};", source, re.DOTALL)
    declared = re.findall(r"\w+(?=[,;])", body)
    assert declared == [field[0] for field in window_kernel.Shape._fields_]
    assert ctypes.sizeof(window_kernel.Shape) == 8 * len(declared)


def test_sums_are_as_long_in_python_as_in_c() -> None:
    """`norms.CHAIN` bounds the rounding of sums that common.cpp makes."""
    source = (Path(window_kernel.__file__).parent / "common.cpp").read_text()
    (chain,) = re.findall(r"int64_t CHAIN = (\d+)", source)
    assert int(chain) == CHAIN


def test_bounds_have_the_same_constants_in_python_and_in_c() -> None:
    """Kernels bound norms themselves, and Python does where no kernel applies."""
    source = (Path(window_kernel.__file__).parent / "common.cpp").read_text()
    constants: dict[str, Any] = {"CHAIN": CHAIN}
    for name in ("UNIT", "SQUARED", "SMALL"):
        (value,) = re.findall(rf"double {name} = (.*?);", source)
        constants[name] = eval(value, constants)
    assert constants["UNIT"] == unit(torch.float32) and constants["SMALL"] == norms.SMALL
    assert constants["SQUARED"] == norms.gamma(CHAIN, torch.float32)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "over channels": lambda h: h.sum(1),
    "over pixels": lambda h: h.sum((2, 3)),
    "over channels and rows": lambda h: h.mean((1, 2)),
    "over all": lambda h: h.sum((1, 2, 3)),
    "of one channel": lambda h: h[:, :1].expand_as(h).sum(1),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("summed", SUMS.values(), ids=SUMS)
def test_a_network_that_ends_in_a_sum(summed: Callable[[Tensor], Tensor], backend: str) -> None:
    """One gradient comes back for all that were added."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(6, 16, 3), nn.Conv2d(16, 24, 3)

        def forward(self, x: Tensor) -> Tensor:
            return summed(self.last(self.first(x).relu()))

    torch.manual_seed(0)
    assert_per_sample_grads(Network(), torch.randn(4, 6, 9, 8), backend=backend)


@pytest.mark.parametrize("strategy", ["materialise", "recompute"])
def test_a_sum_over_channels_is_clipped(strategy: str) -> None:
    torch.manual_seed(0)
    model, x, quantity = nn.Conv2d(6, 16, 3), torch.randn(4, 6, 9, 8), fxgrad.ClippedGrad(1.0)

    def loss(h: Tensor) -> Tensor:
        return h.sum(1).square().sum()

    true = torch.cat([g.flatten(1) for g in per_sample_grads(model, loss, [x]).values()], 1)
    private = fxgrad.transform(model, quantity, backend="aot_eager", strategy=strategy)
    loss(private(x)).backward()
    norms = fxgrad.result(private, quantity).weight * true.norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(4, dtype=norms.dtype), rtol=1e-4, atol=0)
