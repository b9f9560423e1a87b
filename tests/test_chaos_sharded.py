"""Random steps of FSDP2 in two processes, which are in tests/chaos_sharded.py; a process that waits fails the test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from fxgrad.errors import NonFinite, RefusedElsewhere
from fxgrad.runtime import processes
from tests.processes import findings
from tests.sharded_processes import WORLD

pytestmark = pytest.mark.timeout(1500)


@pytest.mark.parametrize(
    "case", ["short", *(pytest.param(f"long {backend}", marks=pytest.mark.long) for backend in ("eager", "aot_eager"))]
)
def test_random_steps(tmp_path: Path, case: str) -> None:
    assert findings("tests.chaos_sharded", tmp_path, case) == [{case: ""}] * WORLD


REFUSED = {
    "backward": "NonFinite: the gradients or the weights of 2 samples hold Inf or NaN",
    "call": "UnknownArgument: the call",
}


@pytest.mark.parametrize("case", ["backward", pytest.param("call", marks=pytest.mark.long)])
def test_a_process_that_refuses_is_named(tmp_path: Path, case: str) -> None:
    """The other process learns it as the connection ends, long before the group's timeout of half an hour."""
    refuses, waits = findings("tests.chaos_sharded", tmp_path, case)
    assert REFUSED[case].partition(": ")[2] in refuses[case]
    assert f"another process has refused a step: process 0 refused its call 2: {REFUSED[case]}" in waits[case]
    # What refuses when it has reduced lets the other process end its step, and not begin the next.
    assert re.search("call [23] of sharded models in process 1", waits[case]), waits[case]
    assert float(waits["seconds"]) < 60


def test_only_what_is_refused_in_the_same_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(processes.Calls, "count", 5)
    try:
        with monkeypatch.context() as other:
            other.setattr(dist, "get_rank", lambda: 1)
            with pytest.raises(NonFinite, match="samples"), processes.collective():
                raise NonFinite("samples hold NaN")
        for count, error in ((4, RefusedElsewhere), (5, RefusedElsewhere), (6, RefusedElsewhere), (7, RuntimeError)):
            monkeypatch.setattr(processes.Calls, "count", count)
            with pytest.raises(error, match=r"samples hold NaN|^timed out$") as raised, processes.collective():
                raise RuntimeError("timed out")
            assert type(raised.value) is error
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="group"), processes.collective():
        raise ValueError("of no group")
