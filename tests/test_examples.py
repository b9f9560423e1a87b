"""The examples run at tiny size, and their own comparisons hold. The Trainer's is in tests/zoo."""

from __future__ import annotations

import pytest

from tests.examples import load


def test_the_gradient_noise_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("gradient_noise_scale").main(["--steps", "3", "--batch", "16", "--backend", "eager"]) == 0
    assert capsys.readouterr().out.endswith("good\n")


def test_attribution_over_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--checkpoints 2 --epochs 1 --images 320 --dim 64 --backend eager"
    assert load("attribution").main(tiny.split()) == 0
    assert " graph(s) for the first of 2 checkpoints, 0 for the others\ngood\n" in capsys.readouterr().out
