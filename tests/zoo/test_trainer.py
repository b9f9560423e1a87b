"""The examples with Hugging Face's Trainer: one equals a loop over single sentences, one keeps a privacy budget."""

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


@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_private_fine_tuning_with_lora(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "--sentences 64 --batch 16 --epochs 2 --epsilon 50 --backend eager"
    assert load("lora_private").main(tiny.split()) == 0
    said = capsys.readouterr().out
    assert "8 private steps of 2176 parameters; 21 tensors are frozen\n" in said
    assert said.endswith("good\n")
