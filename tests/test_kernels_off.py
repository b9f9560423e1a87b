"""Where nothing compiles C++ the numbers are the same, and fxgrad says that it takes longer."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fxgrad
from fxgrad.kernels import gram_kernel, product_kernel, tables, window_kernel
from fxgrad.kernels.compiled import Library, libraries_asked
from fxgrad.kernels.recurrent import lstm_kernel


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    def fail(*_: Any, **__: Any) -> Any:
        raise InvalidCxxCompiler

    for room in (gram_kernel, lstm_kernel, product_kernel, tables, window_kernel):  # every other test needs them
        assert room.KERNELS.functions is not None
    monkeypatch.setattr(CppCodeCache, "load", fail)


def library() -> Library:
    return Library(*tables.KERNELS.sources, computes="gradients of embeddings")


OFF = "computes gradients of embeddings without its kernels in C\\+\\+, which takes longer: InvalidCxxCompiler: .*CXX"


def test_a_library_that_does_not_compile_warns_once_in_the_thread_that_asks(no_compiler: None) -> None:
    own = library()
    own.start(torch.zeros(1))
    assert own.why_off().startswith("InvalidCxxCompiler: No working C++ compiler")  # the compiler's thread is done
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=OFF):  # raised here, so it was not the other thread's
            _ = own.functions
        assert own.functions is None and own.functions is None


def test_a_library_that_compiles_does_not_warn() -> None:
    own = library()
    assert own.functions is not None and own.why_off() == ""


def test_libraries_that_a_trace_asks_for_are_noted() -> None:
    own = library()
    with libraries_asked() as asked:
        own.start(torch.zeros(1))
        own.start(torch.zeros(1))
        library().start(torch.zeros(1, dtype=torch.float64))  # of which it has no functions
    own.start(torch.zeros(1))
    assert asked == [own]


def test_the_source_alone_declares_what_a_kernel_takes() -> None:
    windows, lstm = window_kernel.KERNELS.functions, lstm_kernel.KERNELS.functions
    assert windows is not None and lstm is not None
    address, number = ctypes.c_void_p, ctypes.c_int64
    assert windows.window_rows.argtypes == [*[address] * 7, number, ctypes.c_int]
    assert lstm.backward_float64.argtypes == [*[address] * 8, number, ctypes.c_int, number, number, ctypes.c_int]
    with pytest.raises(TypeError, match="at least 9 arguments"):
        windows.depthwise_rows(None)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(50, 64), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.embed(x).sum(1))
        return y


def grads(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="aot_eager")
    transformed.zero_grad()
    transformed(x).square().sum().backward()
    grad = model.get_submodule("embed").weight.grad
    assert isinstance(grad, torch.Tensor)
    return grad.clone()


def test_a_step_warns_and_explain_notes_it(no_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Words(), torch.randint(50, (4, 2000))
    true = grads(model, x)
    monkeypatch.setattr(tables, "KERNELS", library())
    page = str(fxgrad.explain(model, x, quantity=fxgrad.ClippedGrad(1.0)))
    assert "note: kernels in C++ are off, so gradients of embeddings take longer: InvalidCxxCompiler" in page
    with pytest.warns(RuntimeWarning, match=OFF) as said:
        torch.testing.assert_close(grads(model, x), true, rtol=1e-4, atol=1e-6)
        grads(model, x)
    assert len(said) == 1


_PROGRAM = """
import torch, fxgrad
model, x = torch.nn.LSTM(5, 6, batch_first=True), torch.randn(4, 7, 5)
print(fxgrad.explain(model, x, quantity=fxgrad.ClippedGrad(1.0)))
transformed = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="aot_eager")
for _ in range(2):
    transformed(x)[0].square().sum().backward()
"""


def test_without_a_compiler_a_program_runs_and_says_what_takes_longer(tmp_path: Any) -> None:
    missing = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "always"}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env={**os.environ, **missing}, capture_output=True, text=True, check=True
    )
    assert run.stdout.count("note: kernels in C++ are off, so LSTMs take longer") == 1
    said = [line for line in run.stderr.splitlines() if "RuntimeWarning: fxgrad computes" in line]
    assert len(said) == len(set(said)) and sum("computes LSTMs without" in line for line in said) == 1, run.stderr
