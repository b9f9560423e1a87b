"""Private training of models that FSDP2 divides, in two processes; each case is in tests/private_sharded.py."""

from __future__ import annotations

import pytest

from tests.private_sharded import CASES
from tests.sharded_processes import WORLD
from tests.test_sharded import findings

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return findings("tests.private_sharded", tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("case", CASES)
def test_private_sharded(found: list[dict[str, str]], case: str) -> None:
    for rank in range(WORLD):
        assert found[rank].get(case, "not run, as an earlier case failed") == "", found[rank].get(case)
