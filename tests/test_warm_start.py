"""A process that compiles a graph again finds it in AOTAutograd's cache, under a key that shows all that decides it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fxgrad.compile import warm_start
from fxgrad.compile.code_text import Unreadable
from fxgrad.host.versions import at_least
from tests.key_changes import CHANGES, SAME, UNREADABLE, Step
from tests.quick import long_but
from tests.warm_steps import STEPS

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:Deterministic")
KEYS: dict[str, str] = {}


def key(name: str) -> str:
    """Return the key under a change, computed once."""
    if name not in KEYS:
        made = CHANGES[name].key()
        assert made is not None, f"{name}: the graph is not stored"
        KEYS[name] = made
    return KEYS[name]


def test_the_same_step_has_the_same_key() -> None:
    if not at_least("2.13"):
        assert Step().key() is None
        return
    assert Step().key() == key("nothing")
    for name, (other, step) in SAME.items():
        assert step.key() == key(other), name


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "nothing"])
def test_each_change_changes_the_key(name: str) -> None:
    if at_least("2.13"):
        others = {other: made for other, made in KEYS.items() if other != name}
        assert key(name) not in others.values() and key(name) != key("nothing")


NOT_STORED = "AOTAutograd's cache does not store this graph: "


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_has_no_text_is_not_stored(name: str, caplog: pytest.LogCaptureFixture) -> None:
    step, sentence = UNREADABLE[name]
    with caplog.at_level(logging.INFO, "fxgrad"):
        assert step.key() is None
    if at_least("2.13"):
        (message,) = [message for message in caplog.messages if message.startswith(NOT_STORED)]
        assert re.search(sentence, message), message


def test_a_key_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> str:
        raise TypeError("no such thing")

    monkeypatch.setattr(warm_start, "key_of", fails)
    with caplog.at_level(logging.INFO, "fxgrad"):
        assert Step().key() is None
    if at_least("2.13"):
        assert f"{NOT_STORED}TypeError: no such thing" in caplog.messages


def test_the_hash_of_the_source_covers_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes stand behind a link; a file that changed since the process began has no hash."""
    shutil.copytree(ROOT / "fxgrad", tmp_path / "fxgrad", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(warm_start, "_STARTED", time.time() + 60)
    hash_of = warm_start.hash_of_source.__wrapped__
    hashes = [hash_of(tmp_path / "fxgrad")]
    for file in ("passes/attach_taps.py", "kernels/common.cpp", "errors.py"):
        with open(tmp_path / "fxgrad" / file, "a") as stream:
            stream.write("\n")
        hashes.append(hash_of(tmp_path / "fxgrad"))
    assert len(set(hashes)) == 4 and hashes[0] == hash_of(ROOT / "fxgrad")
    monkeypatch.setattr(warm_start, "_STARTED", time.time() - 60)
    with pytest.raises(Unreadable, match="has changed since this process began"):
        hash_of(tmp_path / "fxgrad")


def run(cache: Path, *options: str, **environment: str) -> dict[str, Any]:
    """Run the steps in a fresh process with this folder as PyTorch's cache."""
    names = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "tests.warm_steps", *options],
        cwd=ROOT, env={**os.environ, **names}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def hits(said: dict[str, Any]) -> tuple[int, int]:
    return said.get("autograd_cache_hit", 0), said.get("autograd_cache_miss", 0)


@pytest.mark.skipif(not at_least("2.13"), reason="before torch 2.13 AOTAutograd's cache stores no graph with a tap")
@pytest.mark.parametrize("steps", long_but(lambda steps: steps == 3, [3, len(STEPS)]))
def test_a_hit_gives_what_a_miss_gives(steps: int, tmp_path: Path) -> None:
    """A warm process, one with the artifacts of another, and one with broken entries give the same bits."""
    cache, artifacts, first = tmp_path / "cache", tmp_path / "artifacts", ("--first", str(steps))
    cold = run(cache, *first, "--save", str(artifacts))
    assert hits(cold) == (0, steps) and cold["autograd_cache_saved"] == steps
    warm = run(cache, *first)
    assert hits(warm) == (steps, 0) and warm["results"] == cold["results"]
    carried = run(tmp_path / "elsewhere", *first, "--load", str(artifacts))
    assert hits(carried) == (steps, 0) and carried["results"] == cold["results"]
    spoil(cache / "aotautograd", steps)
    broken = run(cache, "--first", "2")  # the two oldest entries: one of each kind
    assert hits(broken) == (0, 2) and broken["results"] == cold["results"][:2]


def spoil(folder: Path, count: int) -> None:
    """Truncate every second entry by age, and write garbage into the others."""
    entries = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    assert len(entries) == count
    for i, entry in enumerate(entries):
        entry.write_bytes(entry.read_bytes()[:100] if i % 2 else b"no entry")
