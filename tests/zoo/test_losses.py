"""Losses inside of Hugging Face's models: labels with unequal numbers of tokens, and CLIP's contrastive head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import fxgrad
from fxgrad.testing import relative_error
from tests.zoo.models import TOLERANCE, B, Inputs, scatter
from tests.zoo.transformers_models import clip_config, gpt2_config, images, padded

IGNORED = -100


def named_grads(model: nn.Module, n: int) -> dict[str, Tensor]:
    return {name: p.grad_sample[n] for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[attr-defined]


def test_labels_with_unequal_counts() -> None:
    """The loss is a mean over the tokens of all samples: sample i has its share of it, none without labels."""
    model = hf.GPT2LMHeadModel(gpt2_config(0.0)).double()
    scatter(model)
    model.loss_type = "ForCausalLM"  # what it falls back to, with a warning that Dynamo does not trace
    inputs = padded()
    labels = inputs["input_ids"].clone()
    labels[0, 3:], labels[1], labels[2, 0] = IGNORED, IGNORED, IGNORED
    counts = (labels[:, 1:] != IGNORED).sum(1)
    assert counts.tolist() == [2, 0, 4]

    fxgrad.transform(model, backend="aot_eager")(**inputs, labels=labels).loss.backward()
    parameters = dict(model.named_parameters())
    assert all(torch.equal(g, torch.zeros_like(g)) for g in named_grads(model, 1).values())
    for n in (0, 2):
        own = {name: value[n : n + 1] for name, value in inputs.items()}
        loss = model(**own, labels=labels[n : n + 1]).loss * counts[n] / counts.sum()
        expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        assert relative_error(named_grads(model, n), expected) <= TOLERANCE


def clip() -> tuple[Any, Inputs]:
    model = hf.CLIPModel(clip_config(0.0)).double()
    scatter(model)
    return model, {**padded(), "pixel_values": images()["pixel_values"].double()}


def test_the_contrastive_head_is_refused() -> None:
    model, inputs = clip()
    with pytest.raises(fxgrad.errors.MixedSamples, match=r"value of pairs of samples(.|\n)*modeling_clip\.py"):
        fxgrad.transform(model, backend="eager")(**inputs)


def test_the_contrastive_head_with_mixing_allowed() -> None:
    """dL/dW(i), where sample i goes through both towers with its own copy W(i) of every parameter."""
    model, inputs = clip()
    model.logit_scale.requires_grad_(False)
    fxgrad.transform(model, backend="eager", mixing="allow")(**inputs, return_loss=True).loss.backward()

    copies = {
        name: p.detach().expand(B, *p.shape).clone().requires_grad_()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    texts, pictures = [], []
    for n in range(B):
        own = {name: value[n : n + 1] for name, value in inputs.items()}
        output = torch.func.functional_call(model, {name: w[n] for name, w in copies.items()}, (), own)
        texts.append(output.text_embeds)
        pictures.append(output.image_embeds)
    logits = torch.cat(texts) @ torch.cat(pictures).T * model.logit_scale.exp()
    pairs = torch.arange(B)
    loss = (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2
    expected = dict(zip(copies, torch.autograd.grad(loss, list(copies.values())), strict=True))
    actual = {name: p.grad_sample for name, p in model.named_parameters() if p.requires_grad}
    assert relative_error(actual, expected) <= TOLERANCE


def test_a_trained_scale_of_pairs_is_refused() -> None:
    """logits[i, j] belongs to two samples, so there is no copy of the scale for it."""
    model, inputs = clip()
    with pytest.raises(fxgrad.errors.UncoveredParameter, match=r"modeling_clip\.py:\d+ .*logit_scale"):
        fxgrad.transform(model, backend="eager", mixing="allow")(**inputs)
