"""DistributedDataParallel in two processes against one that sees all samples; all else that distributes is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxgrad
from fxgrad.errors import OptionError
from tests import ddp_options
from tests.processes import findings
from tests.two_processes import (
    BATCH,
    EXPECTED,
    MAX_GRAD_NORM,
    POISSON,
    STEPS,
    WORLD,
    data,
    every_case,
    loss,
    model,
)

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-6

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found: one pair of them for all tests."""
    return findings("tests.two_processes", tmp_path_factory.mktemp("processes"), timeout=800)


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

    def test_what_goes_past_the_clipping_is_refused(self, found: Any) -> None:
        for each in found:
            assert "not clipped arrived at parameter '0." in each["outside"]["said"]
            assert all(each["outside"]["left"])

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

    def test_the_first_batch_is_checked_by_all(self, found: Any) -> None:
        """Where each has more than one sample: in the same call, or in a private step; what one sees, all raise."""
        for rank, each in enumerate(found):
            waiting = [[True, True, False, False], [True, False, False, False], [True, False, False, False]]
            for case, steps in zip(each["first batch"], waiting, strict=True):
                assert case["waiting"] == steps
                assert case["raised"][0] == ""
                seen = r"sample. \d" if rank == 1 else "the first batch of another process shows it"
                assert re.search(f"samples influence each other: {seen}", case["raised"][1])


@pytest.mark.parametrize("case", ddp_options.CASES)
def test_options_of_distributed_data_parallel(found: Any, case: str) -> None:
    for each in found:
        assert each["options"].get(case, "not run, as an earlier case failed") == "", each["options"].get(case)


class TestPoisson:
    """Each process draws on its own: other numbers of samples, and of physical batches."""

    @pytest.mark.parametrize("case", POISSON)
    def test_the_parameters_are_those_of_dp_sgd_by_hand(self, found: Any, case: str) -> None:
        expected = model().double()
        steps = list(zip(*(each[case]["samples"] for each in found), strict=True))
        for parts in steps:
            total = {name: torch.zeros_like(p) for name, p in expected.named_parameters()}
            for x in torch.cat(parts).double():
                grads = torch.autograd.grad(loss(expected(x[None])), list(expected.parameters()))
                norm = torch.stack([g.norm() for g in grads]).norm()
                for name, g in zip(total, grads, strict=True):
                    total[name] += g * (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1)
            with torch.no_grad():
                for name, p in expected.named_parameters():
                    p.sub_(0.1 * total[name] / EXPECTED)
        for each in found:
            same_parameters(each[case], {name: p.float() for name, p in expected.state_dict().items()})
            assert each[case]["history"] == [(0.0, EXPECTED / len(data()), len(steps))]

    @pytest.mark.parametrize("case", POISSON)
    def test_the_processes_have_different_batches(self, found: Any, case: str) -> None:
        """Else the test above shows nothing."""
        first, second = (each[case] for each in found)
        assert first["sizes"] != second["sizes"]
        empty = [[i for i, x in enumerate(each["samples"]) if not len(x)] for each in (first, second)]
        assert empty[0] != empty[1]
        if "physical" in case:
            assert len(first["sizes"]) != len(second["sizes"])
            assert max(first["sizes"] + second["sizes"]) == 1


class TestRefusedInTwoProcesses:
    @pytest.mark.parametrize("case", ["wrapped afterwards", "wrapped afterwards, one backward"])
    def test_a_model_that_is_wrapped_afterwards(self, found: Any, case: str) -> None:
        for each in found:
            assert each["refused"][case].startswith("2 processes train, and the model is not wrapped")
            assert "Pass make_private the wrapped model" in each["refused"][case]

    def test_a_model_of_its_own_that_is_wrapped(self, found: Any) -> None:
        for each in found:
            sentence = each["refused"]["of its own, and wrapped"]
            assert sentence.startswith("independent=True, and the model is in DistributedDataParallel")

    def test_clipping_that_opacus_has_for_one_process(self, found: Any) -> None:
        for each in found:
            sentence = each["refused"]["clipped per layer"]
            assert sentence.startswith("clipping='per_layer', and the model is in DistributedDataParallel")

    def test_a_group_of_some_processes(self, found: Any) -> None:
        for each in found:
            sentence = each["refused"]["a group of its own"]
            assert sentence.startswith("the model is distributed over 1 of 2 processes")


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

    def test_dtensor(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))
        view: Any = fxgrad.transform(model(), backend="eager")
        with pytest.raises(OptionError, match="an input is a DTensor"):
            view(distribute_tensor(data()[:BATCH], mesh, [Replicate()]))
        spread = model()
        weight = spread[0].get_parameter("weight").detach()
        spread[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
        with pytest.raises(OptionError, match=r"parameter '0.weight' is a DTensor"):
            fxgrad.transform(spread)

    def test_parameters_that_a_property_gathers(self) -> None:
        """As SimpleFSDP has them: DTensors, of which the modules' properties make whole local tensors."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (1,))

        def whole(module: Any) -> Any:
            shard = module._parameters["weight"]
            return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("sum")])

        class Gathering(nn.Linear):
            weight = property(whole)

        layer = nn.Linear(3, 2, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        layer.__class__ = Gathering
        assert not isinstance(layer(torch.randn(4, 3)), torch.distributed.tensor.DTensor)
        x = torch.randn(4, 3)
        with pytest.raises(OptionError, match=r"grad_sample of a parameter belongs to the whole parameter"):
            fxgrad.transform(layer, backend="eager")(x)
        alone = nn.Linear(3, 2, bias=False)
        alone.weight = nn.Parameter(layer.weight.detach().clone())
        views = [fxgrad.transform(one, quantity=fxgrad.ClippedGrad(0.1), backend="eager") for one in (layer, alone)]
        for view in views:
            view(x).square().sum().backward()
        found: Any = layer._parameters["weight"]
        torch.testing.assert_close(found.grad.full_tensor(), alone.weight.grad)
