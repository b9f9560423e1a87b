"""The example with Hugging Face's Trainer: what it trains is what a loop over single sentences does."""

from __future__ import annotations

import pytest

from tests.examples import load

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.mark.parametrize("noise", ["0.0", "1.0"])
def test_gradient_accumulation_in_the_trainer(capsys: pytest.CaptureFixture[str], noise: str) -> None:
    tiny = f"--steps 3 --micro-batch 3 --accumulate 2 --backend eager --noise {noise}"
    assert load("trainer").main(tiny.split()) == 0
    said = capsys.readouterr().out
    assert "3 steps of 2 micro-batches of 3 sentences\n" in said
    assert said.endswith("good\n") == (noise == "0.0")
