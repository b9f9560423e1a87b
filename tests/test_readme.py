"""The README's programs run, and its mistakes give the errors it shows."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import fxgrad

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
PROGRAMS = [code for language, code in BLOCKS if language == "python" and "# mistake" not in code]
MISTAKES = [
    (code, shown)
    for (language, code), (_, shown) in pairwise(BLOCKS)
    if language == "python" and "# mistake" in code
]


@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_the_programs_run() -> None:
    assert len(PROGRAMS) == 7
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for program in PROGRAMS:
        exec(compile(program, "README.md", "exec"), namespace)


@pytest.mark.parametrize("program, shown", MISTAKES, ids=[code.split("\n")[0][11:] for code, _ in MISTAKES])
def test_the_mistakes_give_their_errors(program: str, shown: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("import torch, fxgrad", namespace)
    with pytest.raises(fxgrad.FxgradError) as caught:
        exec(compile(program, "README.md", "exec"), namespace)
    assert f"{type(caught.value).__name__}: {caught.value}" == shown.strip()


@pytest.mark.parametrize("page", ["guarantees.md"])
def test_the_programs_of_a_page_run(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for program in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
        exec(compile(program, page, "exec"), namespace)


def test_every_mistake_is_found() -> None:
    assert len(MISTAKES) == README.count("# mistake")
