"""DistributedDataParallel in two processes against one that sees all samples; all else that distributes is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxgrad
from fxgrad.errors import OptionError
from tests.two_processes import BATCH, STEPS, WORLD, data, every_case, model

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-6

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found: one pair of them for all tests."""
    folder = tmp_path_factory.mktemp("processes")
    commands = [[sys.executable, "-m", "tests.two_processes", str(rank), str(folder)] for rank in range(WORLD)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # if one of them still waits for the other
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    torch.manual_seed(0)
    return every_case(None)


class TestTwoProcesses:
    def test_rows_are_those_of_the_process_s_own_samples(self, found: Any, alone: Any) -> None:
        for name, (rows, grad) in alone["grad_sample"].items():
            assert grad is None
            halves = [each["grad_sample"][name] for each in found]
            close(torch.cat([rows for rows, _ in halves]), rows)
            assert all(grad is None or not grad.any() for _, grad in halves)  # DDP makes zeros of None

    def test_clipped_sums_are_averaged_over_the_processes(self, found: Any, alone: Any) -> None:
        for name, whole in alone["clipped"].items():
            for each in found:
                close(each["clipped"][name], whole / WORLD)

    @pytest.mark.parametrize("case", ["private mean", "private sum", "one backward mean", "one backward sum"])
    def test_a_private_step_is_that_of_the_whole_batch(self, found: Any, alone: Any, case: str) -> None:
        for each in found:
            same_parameters(each[case], alone[case])
            assert each[case]["optimizer"] == f"Distributed{alone[case]['optimizer']}"
            assert each[case]["history"] == alone[case]["history"] == [(0.0, 1 / STEPS, STEPS)]

    @pytest.mark.parametrize("case", ["private noise", "one backward noise"])
    def test_noise_is_added_once(self, found: Any, alone: Any, case: str) -> None:
        """The first process draws what one process alone would."""
        for each in found:
            same_parameters(each[case], alone[case])
        assert not torch.allclose(found[0][case]["0.weight"], found[0]["private mean"]["0.weight"], atol=1e-3)


    def test_the_first_batch_is_checked_by_all_in_the_same_call(self, found: Any) -> None:
        """Where each of them has more than one sample; what one sees, all raise."""
        for rank, each in enumerate(found):
            for case in each["first batch"]:
                assert case["waiting"] == [True, True, False, False]
                assert case["raised"][0] == ""
                seen = r"sample. \d" if rank == 1 else "the first batch of another process shows it"
                assert re.search(f"samples influence each other: {seen}", case["raised"][1])


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def same_parameters(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    start = model().state_dict()
    for name, before in start.items():
        close(ours[name], theirs[name])
        assert (theirs[name] - before).abs().max() > 1e-3


@pytest.fixture(scope="module")
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meet = tmp_path_factory.mktemp("group") / "meet"
    dist.init_process_group("gloo", f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
class TestRefused:
    def test_data_parallel(self) -> None:
        with pytest.raises(OptionError, match=r"nn.DataParallel is not supported.*\n  Transform the model itself"):
            fxgrad.transform(nn.DataParallel(model()))
        with pytest.raises(OptionError, match="in DataParallel '0'"):
            fxgrad.transform(nn.Sequential(nn.DataParallel(model())))

    def test_a_copy_of_a_transformed_model_for_data_parallel(self) -> None:
        with pytest.raises(OptionError, match=r"nn.DataParallel is not supported"):
            fxgrad.transform(model())._replicate_for_data_parallel()

    def test_distributed_data_parallel_inside(self) -> None:
        with pytest.raises(OptionError, match="goes around a transformed model, not into it"):
            fxgrad.transform(DistributedDataParallel(model()))

    @pytest.mark.parametrize("use_orig_params", [True, False])
    def test_fully_sharded_data_parallel(self, use_orig_params: bool) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        def sharded(net: nn.Module) -> nn.Module:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one process is no shard, and there is no GPU
                return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=use_orig_params)

        with pytest.raises(OptionError, match=r"FSDP.* is not supported yet"):
            fxgrad.transform(sharded(model()))
        around = sharded(fxgrad.transform(model(), backend="eager"))
        with pytest.raises(OptionError, match=r"FSDP.* is not supported yet"):
            around(data()[:BATCH])

    def test_fully_shard_and_dtensor(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        view: Any = fxgrad.transform(model(), backend="eager")
        with pytest.raises(OptionError, match="an input is a DTensor"):
            view(distribute_tensor(data()[:BATCH], mesh, [Replicate()]))
        fully_shard(view, mesh=mesh)
        with pytest.raises(OptionError, match=r"parameter '0.weight' is a DTensor: sharded models"):
            view(data()[:BATCH])
        with pytest.raises(OptionError, match=r"FSDP.* is not supported yet"):
            fxgrad.transform(cast(nn.Module, fully_shard(model(), mesh=mesh)))
        spread = model()
        weight = spread[0].get_parameter("weight").detach()
        spread[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
        with pytest.raises(OptionError, match=r"parameter '0.weight' is a DTensor"):
            fxgrad.transform(spread)
