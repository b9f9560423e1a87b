"""The LSTM's kernel in C++ against the loops in Python that take its place where nothing compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxgrad.kernels.compiled import Library
from fxgrad.kernels.recurrent import lstm_kernel, walk

T, IN = 9, 7


def run(batch: int, hidden: int, dtype: torch.dtype, lengths: Tensor | None, reverse: bool) -> list[Tensor]:
    """Everything the recurrence and its backward return."""
    torch.manual_seed(0)
    x, h, c = (torch.randn(*size, dtype=dtype) for size in ((T, batch, IN), (batch, hidden), (batch, hidden)))
    sizes = (4 * hidden, IN), (4 * hidden,), (4 * hidden, hidden), (4 * hidden,)
    weights = [torch.randn(size, dtype=dtype) / max(4, hidden**0.5) for size in sizes]
    out = torch.ops.fxgrad.recurrence("LSTM", x, lengths, h, c, *weights, None, reverse)
    hs, _, *saved = out
    dhs, dc = torch.randn_like(hs), torch.randn_like(c)
    back = torch.ops.fxgrad.recurrence_backward("LSTM", dhs, dc, lengths, weights[2], None, hs, *saved, reverse)
    over = None if lengths is None else torch.arange(T)[:, None] >= lengths
    gates = saved[0] if over is None else saved[0].masked_fill(over.unsqueeze(-1), 0)  # read by nothing there
    return [*out[:2], gates, *out[3:], *back]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize(("batch", "hidden"), [(5, 1), (1, 16), (5, 37), (19, 37), (4, 130), (3, 300)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_the_kernel_computes_what_the_loops_do(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    close: float,
    batch: int,
    hidden: int,
    lengths: bool,
    reverse: bool,
) -> None:
    of_samples = (torch.arange(batch) * 5 + 8) % T + 1 if lengths else None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # for the last two, whose steps are worth it
    monkeypatch.setattr(walk, "BLOCK", 4 * batch * hidden * dtype.itemsize)  # of four steps
    by_kernel = run(batch, hidden, dtype, of_samples, reverse)
    monkeypatch.setattr(lstm_kernel.KERNELS, "functions", None)
    for found, expected in zip(by_kernel, run(batch, hidden, dtype, of_samples, reverse), strict=True):
        torch.testing.assert_close(found, expected, rtol=close, atol=close)


def test_the_kernel_is_used() -> None:
    assert lstm_kernel.applies(torch.zeros(1)) and lstm_kernel.applies(torch.zeros(1, dtype=torch.float64))
    assert not lstm_kernel.applies(torch.zeros(1, dtype=torch.bfloat16))


def test_the_users_compiler_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's settings are those of the thread that traces."""
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    seen: list[Any] = []
    monkeypatch.setattr(CppCodeCache, "load", lambda _: seen.append(config.cpp.cxx))
    with config.patch({"cpp.cxx": ("some compiler",)}):
        library = Library(computes="LSTMs")  # no sources: nothing is looked for in what the compiler made
        library.start(torch.zeros(1))
        assert library.functions is None
    assert seen == [("some compiler",)]


def test_without_a_compiler_the_loops_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    def fail(*_: Any, **__: Any) -> Any:
        raise InvalidCxxCompiler

    monkeypatch.setattr(CppCodeCache, "load", fail)
    library = Library(*lstm_kernel.KERNELS.sources, computes="LSTMs")
    library.start(torch.zeros(1))
    with pytest.warns(RuntimeWarning, match="computes LSTMs without its kernels"):
        assert library.functions is None
