"""What a step on a GPU would do, as far as a machine without one can tell. See fake_cuda.py."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxgrad
from fxgrad.gradients import columns
from fxgrad.kernels import gram_kernel, norms, product_kernel, products, tables
from tests.fake_cuda import MODELS, QUANTITIES

ROOT = Path(__file__).parents[1]
TORCH = Path(torch.__file__).parent

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
on_cpu_build = pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA's own hooks")


PAIRS = list(itertools.product(MODELS, QUANTITIES))
QUICK = [(model, kind) for model, kind in PAIRS if kind == "clipped" or model == "reader"]
Reports = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("cuda") / "fake_cuda.so"
    include, lib = TORCH / "include", TORCH / "lib"
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"{ROOT}/tests/fake_cuda.cpp", "-o", f"{library}"]
    command += [f"-I{include}", f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    subprocess.run(command, check=True)
    return library


def reports_of(library: Path, pairs: list[tuple[str, str]]) -> Reports:
    """Each pair's report, from one process."""
    command = [sys.executable, "-m", "tests.fake_cuda", f"{library}", *(",".join(pair) for pair in pairs)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = map(json.loads, run.stdout.splitlines())
    return {(report["model"], report["quantity"]): report for report in found}


@pytest.fixture(scope="module")
def reports(library: Path) -> Reports:
    """Every model with one quantity, and every quantity with one model."""
    return reports_of(library, QUICK)


@needs_compiler
@on_cpu_build
@pytest.mark.parametrize(("model", "quantity"), QUICK)
def test_a_step_on_a_gpu_never_makes_the_host_wait(reports: Reports, model: str, quantity: str) -> None:
    report = reports[model, quantity]

    assert report["waits"] == []
    assert report["cpu"] == []


@needs_compiler
@on_cpu_build
@pytest.mark.long
def test_nor_does_any_other_model_with_any_quantity(library: Path) -> None:
    others = reports_of(library, [pair for pair in PAIRS if pair not in QUICK])

    assert len(others) == len(PAIRS) - len(QUICK)
    assert not {pair: report for pair, report in others.items() if report["waits"] or report["cpu"]}


@needs_compiler
@on_cpu_build
def test_the_graphs_have_the_operators_that_are_asked_about(
    reports: Reports,
) -> None:
    operators = {name.split(".")[1] for report in reports.values() for name in report["operators"]}

    assert operators >= {"product_rows", "product_norms", "window_rows", "window_norms", "row_norms", "recurrence"}


@needs_compiler
@on_cpu_build
def test_products_and_convolutions_are_left_to_inductor(reports: Reports) -> None:
    left = {name.split(".")[1] for report in reports.values() for name in report["left"]}

    assert not left & {"product_norms", "product_rows", "product_sum", "window_norms", "window_rows", "window_sum"}
    assert "recurrence" in left


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the ways that values on a GPU take."""
    for module in (norms, products):
        monkeypatch.setattr(module, "is_readable", lambda value: False)
    for library in (gram_kernel.KERNELS, product_kernel.KERNELS, tables.KERNELS):
        monkeypatch.setattr(library, "applies", lambda *values, copied=0: False)


SCALES = [1.0, 1e-30, 1e-44, 1e30, 3e37, 0.0]
HARD = [(a, b) for a in SCALES for b in SCALES if a * b < 1e38]


def rows(scales: list[float], *shape: int) -> Tensor:
    x = torch.randn(len(scales), *shape)
    return x * torch.tensor(scales).view(-1, *[1] * len(shape))


@pytest.mark.parametrize("gram", [False, True])
def test_norms_that_nobody_looks_at_hold_in_all_of_float32(unreadable: None, gram: bool) -> None:
    torch.manual_seed(0)
    g, x = rows([a for a, _ in HARD], 6, 3), rows([b for _, b in HARD], 6, 4)

    found, bound = torch.ops.fxgrad.product_norms.default(g, x, gram)
    true = (g.double().mT @ x.double()).flatten(1).norm(dim=1)

    # A product of powers of two is exact but for what underflows: 1e-30 of the largest entries' product.
    least = g.double().abs().amax((1, 2)) * x.double().abs().amax((1, 2))
    assert (bound >= true).all()
    assert torch.allclose(found, true, rtol=1e-5, atol=0)
    assert (bound <= 1.001 * true + 1e-15 * least).all()


@pytest.mark.parametrize("gram", [False, True])
def test_a_bound_counts_what_underflows(unreadable: None, gram: bool) -> None:
    g, x = torch.tensor([[[1.0], [1e-30]]]), torch.tensor([[[1e-30], [1.0]]])

    _, bound = torch.ops.fxgrad.product_norms.default(g, x, gram)

    assert bound.item() >= 2e-30


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(unreadable: None, gram: bool, bad: float) -> None:
    g, x = torch.ones(3, 2, 2), torch.ones(3, 2, 2)
    g[1, 0, 0] = bad

    found, bound = torch.ops.fxgrad.product_norms.default(g, x, gram)

    assert not bound[1].isfinite()
    assert torch.equal(found[[0, 2]], torch.tensor([4.0, 4.0], dtype=torch.float64))


def test_norms_of_rows_and_of_tables(unreadable: None) -> None:
    torch.manual_seed(0)
    scales = [1.0, 1e-30, 1e30, 1e37]
    g, ids = rows(scales, 5, 3), torch.randint(4, (4, 5))
    grads = torch.zeros(4, 4, 3, dtype=torch.float64)
    true = grads.scatter_add(1, ids.unsqueeze(2).expand_as(g), g.double()).flatten(1).norm(dim=1)

    found, bound = torch.ops.fxgrad.row_norms.default(ids, g, 4, -1)
    _, (of_products, least) = torch.ops.fxgrad.product_rows.default(g, torch.ones(4, 5, 1))

    assert torch.allclose(found, true, rtol=1e-5)
    assert (bound >= true).all()
    assert torch.allclose(of_products, g.double().sum(1).norm(dim=1), rtol=1e-5)
    assert (least >= g.double().sum(1).norm(dim=1)).all()


@pytest.mark.parametrize("quantity", [fxgrad.SquaredGrad(), fxgrad.GradVariance(), fxgrad.GradProjection(4, seed=0)])
def test_lines_of_a_table_that_nobody_counts(monkeypatch: pytest.MonkeyPatch, quantity: fxgrad.Quantity) -> None:
    """Blocks of three lines; ids that occur again, within a block and across two."""
    torch.manual_seed(0)
    table, ids = nn.Embedding(9, 2), torch.tensor([[3, 3, 8], [0, 3, 8], [5, 3, 0], [8, 8, 8]])
    monkeypatch.setattr(columns, "ELEMENTS", 3 * ids.numel() * 2 // 3)

    def result() -> Tensor:
        transformed = fxgrad.transform(table, quantity=quantity, backend="eager")
        transformed(ids).sin().sum((1, 2)).sum().backward()
        attribute = next((name for name in ("squared_grad_sum", "grad_variance") if hasattr(table.weight, name)), None)
        found = getattr(table.weight, attribute) if attribute else fxgrad.result(transformed, quantity)
        fxgrad.zero_grad(table)
        return found

    read = result()
    monkeypatch.setattr(columns, "is_readable", lambda value: False)

    assert torch.allclose(result(), read, rtol=1e-6)
    assert read.count_nonzero()
    assert columns.distinct(torch.tensor([4, 1, 4, 4, 0]), 7).tolist() == [0, 1, 4, 7, 7]
    assert columns.distinct(torch.empty(0, dtype=torch.long), 7).tolist() == []
