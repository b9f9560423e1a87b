"""The harness of the benchmarks runs on a toy model, and rejects wrong gradients."""

import pytest
import torch

from benchmarks import peers
from benchmarks.measure import FXGRAD, PLAIN, compare, median_ratio
from benchmarks.models import Task, perceptron
from benchmarks.report import find_gates, format_gates, format_table


@pytest.fixture
def task() -> Task:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.randint(10, (4,))
    return Task("toy", perceptron(5, 7, 10), x, y, backend="aot_eager")


def test_compare_measures_fxgrad_on_a_toy_model(task: Task) -> None:
    record = compare(task, FXGRAD, rounds=2)

    assert record.failed is None
    assert record.rounds == 2
    assert record.ratio is not None
    assert record.ratio.low <= record.ratio.median <= record.ratio.high
    assert record.error is not None and record.error < 1e-5
    assert record.peak_bytes[FXGRAD] >= task.grad_sample_bytes
    assert record.peak_bytes[PLAIN] < task.grad_sample_bytes
    assert "toy" in format_table([record])
    assert "peak <= plain" in format_gates(find_gates([record], {}))


@pytest.mark.parametrize("wrong_by", [1e-3, float("nan")])
def test_compare_reports_a_wrong_peer_as_failed(
    task: Task, monkeypatch: pytest.MonkeyPatch, wrong_by: float
) -> None:
    def wrong(task: Task) -> peers.Engine:
        engine = peers.vmap(task)

        def grads() -> dict[str, torch.Tensor]:
            return {name: g * (1 + wrong_by) for name, g in engine.grads().items()}

        return peers.Engine(engine.step, engine.clear, grads)

    monkeypatch.setitem(peers.PEERS, "wrong", wrong)
    record = compare(task, "wrong", rounds=2)

    assert record.failed is not None
    assert record.ratio is None


def test_median_ratio_of_paired_rounds_cancels_a_common_drift() -> None:
    plain = [1.0, 2.0, 3.0, 4.0, 5.0]
    interval = median_ratio([2 * seconds for seconds in plain], plain)

    assert interval.median == interval.low == interval.high == 2.0
