"""The examples run at tiny size, and their own comparisons hold. Those with timm or the Trainer are in tests/zoo."""

from __future__ import annotations

import importlib
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import DEMO, load


def test_the_gradient_noise_scale(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("gradient_noise_scale").main(["--steps", "3", "--batch", "16", "--backend", "eager"]) == 0
    assert capsys.readouterr().out.endswith("good\n")


def test_attribution_over_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--checkpoints 2 --epochs 1 --images 320 --dim 64 --backend eager"
    assert load("attribution").main(tiny.split()) == 0
    assert " graph(s) for the first of 2 checkpoints, 0 for the others\ngood\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["denoising", "speech_ctc"])
def test_clipped_sums_beside_a_loop(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(name).main("--steps 2 --batch 8 --backend eager".split()) == 0
    assert capsys.readouterr().out.endswith("good\n")


def test_another_clipped_sum_falls_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = load("speech_ctc")
    loop = module.loop
    monkeypatch.setattr(module, "loop", lambda *batch: 1.01 * loop(*batch))
    assert module.main("--steps 1 --batch 4 --backend eager".split()) == 1
    assert capsys.readouterr().out.endswith("FELL SHORT\n")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of examples/demo, by their names."""
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at it
def test_the_demo_makes_a_page(demo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert load("demo/__main__").main(["--quick", "--backend", "eager", "--page", str(page)]) == 0
    assert capsys.readouterr().out == f"the page: {page}\n"
    text = page.read_text()
    HTMLParser().feed(text)
    assert text.count("<picture>") == 7 and "$" not in text
    assert not re.findall(r"""(?:src|srcset|href)="(?!data:)""", text)  # one file, without network


@pytest.mark.parametrize(
    "value, relation, bound, code",
    [(0.9, ">=", 0.9, 0), (0.89, ">=", 0.9, 1), (5.0, "<=", 5.0, 0), (5.1, "<=", 5.0, 1), (math.nan, "<=", 5.0, 1)],
)
def test_the_demo_judges_its_claims(demo: Any, value: float, relation: Any, bound: float, code: int) -> None:
    claims = demo("claims")
    claim = claims.Claim("a number", value, relation, bound)
    assert claims.judge([claim]) == code
    assert claims.judge([claims.Claim("another", 1.0, ">=", 0.0), claim]) == code
    assert ("fails" in demo("page").table([claim])) == bool(code)


def test_the_demo_judges_something(demo: Any) -> None:
    assert demo("claims").judge([]) == 1


def test_the_demo_fails_by_its_figures(demo: Any) -> None:
    """Figures that prove nothing do not pass: no privacy, a slow step, a scale that stays."""
    private = demo("private_training")
    times = {private.PLAIN: 1.0, private.OURS: 3.0, private.HOOKS: 2.0, private.GHOST: 2.0}
    weak = private.PrivateTraining([0.9], [0.8], 6.0, 1.0, times)
    assert [claim.holds for claim in weak.claims()] == [False, False, False]
    noise = demo("noise_scale")
    steps = torch.arange(6)
    flat = noise.NoiseScale(steps, torch.full((6,), 50.0), torch.tensor([[50.0, -1.0]] * 6), torch.zeros(6))
    assert flat.factor == math.inf
    assert [claim.holds for claim in flat.claims()] == [False, False]
