"""`fxgrad.verify` of Hugging Face's models with ``labels=``, which return a loss of the batch and logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import fxgrad
from fxgrad.verification import verifying
from tests.zoo.models import B, Inputs
from tests.zoo.transformers_models import TEXT, gpt2_config, hidden, ids

IGNORED = -100


def gpt2(dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    model = hf.GPT2LMHeadModel(gpt2_config(dropout))
    model.loss_type = "ForCausalLM"  # what it falls back to, with a warning that Dynamo does not trace
    tokens = ids()
    return model, {"input_ids": tokens, "labels": tokens}


def bert_pre_training(dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    model = hf.BertForPreTraining(hf.BertConfig(**TEXT, **hidden(dropout)))
    tokens = ids()
    return model, {"input_ids": tokens, "labels": tokens, "next_sentence_label": torch.arange(B) % 2}


def ignored(inputs: Inputs) -> Inputs:
    labels = inputs["labels"].clone()
    labels[0, 2:] = labels[1, :1] = IGNORED
    return {**inputs, "labels": labels}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("model_and_inputs", [gpt2, bert_pre_training])
def test_a_loss_and_logits(model_and_inputs: Callable[..., Any], dropout: float) -> None:
    model, inputs = model_and_inputs(dropout)
    verdict = fxgrad.verify(model, **inputs)
    verdict.raise_if_wrong()
    assert verdict.ok and not any("eval mode" in note for note in verdict.notes)


@pytest.mark.parametrize("model_and_inputs", [gpt2, bert_pre_training])
def test_labels_with_unequal_counts(model_and_inputs: Callable[..., Any]) -> None:
    """Pre-training divides one loss by the number of labels, another by that of samples: the shares differ."""
    model, inputs = model_and_inputs()
    verdict = fxgrad.verify(model, **ignored(inputs))
    assert {p.verdict for p in verdict.parameters} == {"right"}
    assert {influence.what for influence in verdict.influences} == {"grad_sample"}


@pytest.mark.parametrize("labels", [dict, ignored])
def test_a_wrong_sample_is_seen(labels: Callable[[Inputs], Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    right = verifying._Verification._transformed_grads

    def wrong(self: Any, *args: Any) -> dict[str, Tensor]:
        grads = right(self, *args)
        return {name: torch.cat([g[:1] * 1.001, g[1:]]) for name, g in grads.items()}

    monkeypatch.setattr(verifying._Verification, "_transformed_grads", wrong)
    model, inputs = gpt2()
    verdict = fxgrad.verify(model, **labels(inputs))
    assert {p.verdict for p in verdict.parameters} == {"wrong"}
    assert {p.sample for p in verdict.parameters} == {0}
