"""The suite of the benchmarks: its models build, its harness measures, and rejects what is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import calls, kept, page, peers, plot, reference, report, results, roofline, tasks
from benchmarks.measure import Comparison, median_ratio
from benchmarks.models import MODELS, find_models
from benchmarks.models.perceptrons import perceptron
from benchmarks.peers import engine, functional
from benchmarks.results import FXGRAD, PLAIN, Record, Results

PARAMETERS = {
    "c02-mnist": 26_010,
    "c03-cifar-64": 605_226,
    "c06-simple": 1_199_882,
    "c09-ffn50": 49 * 90_300 + 3_010,
    "c14-lstm-16": 2 * (4 * 256 * 256 + 4 * 256),
}


@pytest.fixture(scope="module")
def task() -> tasks.Task:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.randint(10, (4,))
    return tasks.Task("toy", perceptron(5, 7, 10), x, y, tasks.class_losses, backend="aot_eager")


@pytest.fixture(scope="module")
def record(task: tasks.Task) -> Record:
    rates = roofline.Rates(1e11, 1e10)
    return Comparison(task, FXGRAD, rounds=2, rates=rates).compare("G")


@pytest.mark.parametrize("name", [name for name in MODELS if not name.endswith("-64") or name == "c03-cifar-64"])
def test_every_model_has_a_loss_for_each_sample(name: str) -> None:
    spec = MODELS[name]
    model = spec.build()
    x, y = spec.data(2)
    with torch.no_grad():
        losses = spec.losses(model(x[:1]), y[:1])

    assert losses.shape == (1,)
    assert losses.isfinite().all()
    assert spec.cannot.keys() <= peers.PEERS.keys()
    if name in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["c02-mnist", "c04-embedding", "c14-lstm-16", "c16-depthwise"])
def test_fxgrad_is_right_on_a_small_batch(name: str) -> None:
    task = tasks.make_task(name, replace(MODELS[name], batch=2), "cpu", backend="eager")
    record = Comparison(task, FXGRAD, rounds=0).compare("G")

    assert record.failed is None
    assert record.error is not None and record.error < reference.TOLERANCES["G"]


@pytest.mark.parametrize("peer", [FXGRAD, "vmap", "microbatch"])
def test_every_quantity_is_checked_against_the_loop(task: tasks.Task, peer: str) -> None:
    comparison = Comparison(task, peer, rounds=0)

    for quantity in tasks.QUANTITIES:
        assert comparison.compare(quantity).failed is None


@pytest.mark.parametrize("quantity", tasks.QUANTITIES)
@pytest.mark.parametrize("wrong_by", [1e-3, float("nan")])
def test_a_wrong_peer_is_reported_as_failed(
    task: tasks.Task, monkeypatch: pytest.MonkeyPatch, wrong_by: float, quantity: tasks.Quantity
) -> None:
    def wrong(task: tasks.Task, quantity: tasks.Quantity) -> engine.Engine:
        right = functional.vmap(task, quantity)
        return replace(right, results=lambda: {name: r * (1 + wrong_by) for name, r in right.results().items()})

    monkeypatch.setitem(peers.PEERS, "wrong", wrong)
    record = Comparison(task, "wrong", rounds=0).compare(quantity)

    assert record.failed is not None
    assert record.error is None
    assert "FAILED" in report.format_table([record])


def test_a_peer_without_a_quantity_is_reported_as_failed(task: tasks.Task) -> None:
    pytest.importorskip("opacus")
    record = Comparison(task, "opacus_ghost", rounds=0).compare("G")

    assert record.failed == "CannotError: ghost clipping computes no per-sample gradients"


def test_fxgrad_is_measured_on_a_toy_model(task: tasks.Task, record: Record) -> None:
    assert record.failed is None
    assert record.rounds == 2
    assert record.graphs == 1
    assert record.ratio is not None
    assert record.ratio.low <= record.ratio.median <= record.ratio.high
    assert record.error is not None and record.error < 1e-5
    assert record.peak_bytes[FXGRAD] >= task.grad_sample_bytes
    assert record.peak_bytes[PLAIN] < task.grad_sample_bytes
    assert record.floor is not None and record.floor > 0


def test_results_are_kept_shown_and_drawn(record: Record, tmp_path: Path) -> None:
    failed = Record("toy", "opacus_ghost", "G", failed="no such thing")
    written = Results(results.describe_machine(), roofline.Rates(1e11, 1e10))
    for one in (record, failed, record):
        written.add(one)
    written.save(tmp_path / "results.json")
    again = results.load(tmp_path / "results.json")

    assert again == written
    assert len(again.records) == 2
    assert "toy" in report.format_table(again.records)
    assert "peak <= plain" in report.format_gates(report.find_gates(again))
    assert "| failed |" in report.format_markdown(again)
    assert "100 Gflop/s" in report.format_rates(again)
    plot.draw(again, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_the_page_is_what_the_report_writes(tmp_path: Path) -> None:
    assert page.PAGE.read_text() == page.text(), "run python -m benchmarks report"
    page.draw(tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 10_000


def test_a_page_shows_what_its_file_has(monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = page.text(), kept.read
    intel = read("intel")
    changed = replace(intel, models=[replace(intel.models[0], plain_ms=7.89), *intel.models[1:]])
    monkeypatch.setattr(kept, "read", lambda name: changed if name == "intel" else read(name))
    assert [line for line in page.text().splitlines() if line not in before.splitlines()] == [
        "| MLP-3 | 7.89 | 1.25 [1.23, 1.25] | 0.87 [0.86, 0.88] | 5.63 [5.52, 5.71] | 1.15 | 1.14 | 343 (380) |"
    ]


def test_the_geometric_means_are_of_the_models() -> None:
    means = [kept.read("intel").mean(quantity) for quantity in kept.QUANTITIES]
    assert means == pytest.approx([1.17, 0.99, 1.50], abs=0.005)


def test_new_figures_are_kept_for_the_page(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    failed = Record("toy", "opacus_ghost", "G", failed="no such thing")
    beside = replace(record, peer="vmap", fxgrad_ratio=results.Interval(0.5, 0.4, 0.6))
    times = [results.CompileRecord("toy", name, "G", 2.0 * i, 0.5, 1) for i, name in ((1, PLAIN), (2, FXGRAD))]
    measured = Results(results.describe_machine(), roofline.Rates(1e11, 1e10), [record, failed, beside], times)
    measured.save(tmp_path / "measured.json")
    kept.write("new", kept.Kept("old", "2.0", "none", models=[kept.Figures("toy", 1.0, target_C=1.5)]))
    page.main(["keep", str(tmp_path / "measured.json"), "new", "--source", "a test"])
    new = kept.read("new")

    assert new.source == "a test"
    assert new.models[0].target_C == 1.5
    assert new.rates == {"matmul_gflops": 100, "stored_gb": 10}
    assert new.compile == [kept.Compile("toy", "G", 2.0, 4.0, 0.5)]
    assert new.peers == {"G": [{"model": "toy", "opacus_ghost": "failed", "vmap": 0.5}]}
    assert record.ratio is not None
    assert new.models[0].G is not None and new.models[0].G.ratio == round(record.ratio.median, 3)
    assert "| toy | failed | 0.50 |" in page.peers(new, "G")


def test_models_are_found_by_how_they_begin() -> None:
    assert find_models(["c01", "CNN-6"]) == ["CNN-6", "c01-ffnn", "c01-logistic"]
    with pytest.raises(ValueError, match="no model 'c99'"):
        find_models(["c99"])


def test_weight_gradients_are_a_third_of_a_deep_perceptron() -> None:
    spec = replace(MODELS["c09-ffn50"], batch=2)
    work = roofline.count_work(tasks.make_task("c09-ffn50", spec, "cpu"))

    assert work is not None
    assert work.weight_gradients / work.step == pytest.approx(1 / 3, rel=0.02)


def test_samples_on_an_edge_are_no_samples() -> None:
    pooled = torch.tensor([[1.0, 0.5, -1.0, -2.0], [1.0, 1.0, -1.0, -2.0]]).view(2, 1, 2, 2)
    rectified = torch.tensor([[1.0, -1.0], [1.0, 1e-9]])

    assert tasks.are_decided(torch.nn.MaxPool2d(2), pooled).tolist() == [True, False]
    assert tasks.are_decided(torch.nn.ReLU(), rectified).tolist() == [True, False]


def test_median_ratio_of_paired_rounds_cancels_a_common_drift() -> None:
    plain = [1.0, 2.0, 3.0, 4.0, 5.0]
    interval = median_ratio([2 * seconds for seconds in plain], plain)

    assert interval.median == interval.low == interval.high == 2.0


def test_a_step_is_timed_and_its_calls_are_counted() -> None:
    plain, private = calls.steps_of(2, "aot_eager")
    plain(), private()

    assert [len(times) for times in calls.times_in_turn((plain, private), 3)] == [3, 3]
    assert 0 < calls.calls_of(plain) < calls.calls_of(private)
