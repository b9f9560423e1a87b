"""FSDP2 in two processes against the loop over single samples; each case is in tests/sharded_processes.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FSDPModule, UnshardHandle

import tests.sharded_gram
import tests.sharded_long
import tests.sharded_machines
import tests.sharded_memory
import tests.sharded_misuse
import tests.sharded_more  # registers cases
from fxgrad.kernels.gathering import layout_of
from tests.processes import ROOT, findings
from tests.sharded_processes import CASES, WORLD

PAGE = (ROOT / "docs" / "devices").with_suffix(".md")  # its table is read here; its program needs several devices

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two processes found: one pair of them for all cases."""
    return findings("tests.sharded_processes", tmp_path_factory.mktemp("processes"))


def test_every_method_has_a_row_and_a_case() -> None:
    """A method that a version of PyTorch adds is not known to be honoured."""
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    ways = {name: row.split("|")[2].split()[0].strip(":;") for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    public = {name for name in vars(FSDPModule) if name[0] != "_"}
    public |= {f"UnshardHandle.{name}" for name in vars(UnshardHandle) if name[0] != "_"}
    assert {name: ways.get(name) for name in public if ways.get(name) not in ("honoured", "ignored", "refused")} == {}
    assert public <= CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_sharded(found: list[dict[str, str]], case: str) -> None:
    for rank in range(WORLD):
        assert found[rank].get(case, "not run, as an earlier case failed") == "", found[rank].get(case)


def test_a_graph_that_gathers_reads_no_empty_parameter() -> None:
    """Inductor copies what an operator takes, such as a convolution's weight, and ended the process with a signal."""
    arguments = torch.ops.fxgrad.gather_unit.default._schema.arguments
    assert [a.name for a in arguments if "Tensor" in str(a.type)] == ["after"]
    like = torch.empty(4, 2, 3, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    wholes = [like, torch.empty(5), torch.empty(())]
    layouts = [one for whole in wholes for one in layout_of(whole)]
    with FakeTensorMode():
        made = torch.ops.fxgrad.gather_unit(torch.ones(1), layouts, 0, 0, [3, 4, 5])
    facts = [[(one.shape, one.stride(), one.dtype) for one in ones] for ones in (made, wholes)]
    assert facts[0] == facts[1]


@pytest.mark.long
def test_sharded_long(tmp_path: Path) -> None:
    """What takes longer; see tests/sharded_long.py."""
    passed = dict.fromkeys(tests.sharded_long.CASES, "")
    assert findings("tests.sharded_long", tmp_path) == [passed] * WORLD
