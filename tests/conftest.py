"""What every test starts from: fresh Dynamo caches, one seed, exact float32, and a device to run on."""

import gc
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fxgrad.costs import machines
from fxgrad.kernels import operators
from fxgrad.ops.families import _REGISTERED, family_of
from fxgrad.rules import RULES

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_collection_finish() -> None:
    """What is imported is there to stay: the collector, a tenth of a test's time, need not walk through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def _what_is_left_stays() -> Iterator[None]:
    """PyTorch keeps what fake tensors showed: without it, and past what is left, collecting is quick."""
    yield
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    gc.collect()
    gc.freeze()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="session")
def _exact_float32() -> None:
    """TF32 keeps 10 bits of the mantissa: a right gradient would miss 1e-4."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(autouse=True, scope="session")
def _reference_machine() -> Iterator[None]:
    """What is compiled does not depend on how fast a machine happens to be; processes that tests start inherit it."""
    with mock.patch.dict(os.environ, {machines.VARIABLE: "reference"}):
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_warm_starts() -> Iterator[None]:
    """A test that patches fxgrad neither finds what another process compiled, nor leaves anything for one."""
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}),
    ):
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_operator_returns_its_arguments() -> Iterator[None]:
    """What compilers take for new memory is new."""

    def memories(values: Any) -> set[int]:
        tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.layout is torch.strided]
        return {one.untyped_storage().data_ptr() for one in tensors if one.numel()}

    def check(name: str, arguments: Any, results: Any) -> None:
        assert memories(arguments).isdisjoint(memories(results)), f"{name} returns memory of its arguments"

    with mock.patch.object(operators, "looks_on", check):
        yield


@pytest.fixture(autouse=True, scope="session")
def _guards_untimed() -> Iterator[None]:
    """For a statistic that nobody reads, Dynamo empties the processor's caches after each compilation."""
    with mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, create=True):
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_workers_of_inductor() -> Iterator[None]:
    """Each process of the suite has a core; those that Inductor starts would import torch to wait for it."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.fixture(autouse=True)
def _fresh_start() -> Iterator[None]:
    """No test sees another's compiled graphs, random numbers or default dtype."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(autouse=True)
def _tables_restored() -> Iterator[None]:
    """Rules and families that a test registers are gone after it."""
    rules, families = dict(RULES), dict(_REGISTERED)
    yield
    RULES.clear()
    RULES.update(rules)
    _REGISTERED.clear()
    _REGISTERED.update(families)
    family_of.cache_clear()
