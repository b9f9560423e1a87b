"""Hugging Face's families against the loop over samples, and with dropout against full batches under one seed."""

from __future__ import annotations

import pytest
import transformers as hf

import fxgrad
from fxgrad.errors import GraphBreak
from fxgrad.testing import assert_per_sample_grads
from tests.zoo.models import TOLERANCE, scatter
from tests.zoo.transformers_models import grouped_heads, ids, padded, transformers_family

# Mamba asks through a cached function whether a faster scan is installed.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")

# Whatever the type of the weights, parts of these compute in float32, where every other order of a sum shows.
PARTLY_FLOAT32 = {"gemma2", "mamba"}


def check(name: str, dropout: float, seed: int | None) -> None:
    model, inputs = transformers_family.build(name, dropout)
    tolerance = 1e-6 if name in PARTLY_FLOAT32 else TOLERANCE
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=tolerance, seed=seed)


WITH_DROPOUT = ("deberta_v2", "gpt2", "swin", "t5")
SISTERS = ("clip_vision", "convnext", "distilbert", "opt", "qwen2", "roberta")
"""Their layers are those of vit, timm's convnext, bert, gpt2 and llama."""


@pytest.mark.parametrize("name", transformers_family.without(*WITH_DROPOUT, *SISTERS))
def test_equals_the_loop(name: str) -> None:
    """In one graph: fxgrad.transform refuses a graph break."""
    check(name, dropout=0.0, seed=None)


@pytest.mark.parametrize("name", transformers_family.but_long(*WITH_DROPOUT))
def test_with_dropout(name: str) -> None:
    """Mamba has none, and is right without it."""
    check(name, dropout=0.2, seed=1)


def test_mambas_associative_scan() -> None:
    """PyTorch's associative_scan, which Dynamo unrolls into halves and vmaps; in float32 as above."""
    config = hf.MambaConfig(vocab_size=9, hidden_size=8, state_size=2, num_hidden_layers=1, time_step_rank=2)
    model = hf.MambaModel(config).double()
    scatter(model)
    assert_per_sample_grads(model, input_ids=ids(3) % 9, use_cache=False, backend="eager", tolerance=1e-6)


def sorted_experts(experts: str) -> hf.MixtralForCausalLM:
    config = hf.MixtralConfig(
        **grouped_heads(0.0), num_local_experts=4, num_experts_per_tok=2, experts_implementation=experts
    )
    model = hf.MixtralForCausalLM(config)
    scatter(model)
    return model


def test_mixtral_with_sorted_tokens() -> None:
    """The tokens of all samples sorted by expert, and put back. PyTorch's grouped_mm has no float64."""
    assert_per_sample_grads(sorted_experts("grouped_mm"), **padded(), backend="eager", tolerance=1e-4)


def test_a_loop_over_the_experts_that_the_data_chose_is_refused() -> None:
    with pytest.raises(GraphBreak, match="for expert_idx in expert_hit"):
        fxgrad.transform(sorted_experts("eager"), backend="eager")(**padded())
