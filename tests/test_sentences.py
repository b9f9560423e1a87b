"""README, CONTRIBUTING and docs/ are written in short sentences; tools/sentences.py measures them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "sentences.py"
MEAN, LONGEST = 20, 40  # words


def load() -> Any:
    spec = importlib.util.spec_from_file_location("fxgrad_sentences", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sentences = load()

PAGE = """# A heading is no sentence at all

One two `three = 3.0 * x` four. Five (e.g. six) seven!
Does [eight nine](docs/ten.md) end?

| a table | counts for nothing |
|---|---|

    indented = "code. Not counted."

- one item
- another item
  goes on. It ends

```python
fenced = "code"
```

<!-- a comment -->
x = 2 words
"""


def test_sentences_are_split_and_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert [(s.line, s.words) for s in sentences.find_sentences(page)] == [
        (3, 4),
        (3, 4),
        (4, 4),
        (11, 2),
        (12, 4),
        (13, 2),
        (20, 3),
    ]


def test_a_sentence_that_is_too_long_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Short.\n\n" + " ".join(["word"] * 41) + ".\n")
    assert sentences.main([str(page)]) == 1
    assert f"{page}:3: 41 words" in capsys.readouterr().out
    page.write_text(" ".join(["word"] * 40) + ".\n")
    assert sentences.main([str(page)]) == 0


@pytest.mark.parametrize("page", sentences.pages(), ids=lambda page: page.name)
def test_sentences_are_short(page: Path) -> None:
    measured = sentences.find_sentences(page)
    assert [str(s) for s in measured if s.words > LONGEST] == []
    assert sentences.mean(measured) <= MEAN
