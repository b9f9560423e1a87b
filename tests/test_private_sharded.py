"""Private training of models that FSDP2 divides, in two processes; each case is in tests/private_sharded.py."""

from __future__ import annotations

import pytest
import torch

import fxgrad.opacus.ledger as ledger
from tests.private_sharded import CASES
from tests.processes import findings
from tests.sharded_processes import WORLD

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return findings("tests.private_sharded", tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("case", CASES)
def test_private_sharded(found: list[dict[str, str]], case: str) -> None:
    for rank in range(WORLD):
        assert found[rank].get(case, "not run, as an earlier case failed") == "", found[rank].get(case)


def test_a_changed_shard_on_a_device_is_an_assertion_there(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = torch.tensor([1.0, float("nan")])
    recorded = ((1, 2, ledger.Contents(shard)),)
    monkeypatch.setattr(ledger, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(ledger.Contents, "__eq__", lambda contents, other: pytest.fail("the host waits"))
    assert ledger._is_unchanged(recorded, ((1, 2, ledger.Contents(shard)),))
    assert not ledger._is_unchanged(recorded, ((1, 3, ledger.Contents(shard)),))
    with pytest.raises(RuntimeError, match="changed behind its backward"):
        ledger._is_unchanged(recorded, ((1, 2, ledger.Contents(shard * 2)),))
