"""timm's families against the loop over single samples, and with dropout against full batches under one seed."""

from __future__ import annotations

import pytest

import fxgrad
from fxgrad.testing import assert_per_sample_grads
from tests.zoo.models import TOLERANCE
from tests.zoo.timm_models import create, timm_family

# PyTorch's own backward of batch_norm in eval mode is wrong for a batch of one whose gradient has the channels last
# (on CPU, torch 2.13), so the truth about xcit are forwards of the whole batch.
WITHOUT_BATCHES_OF_ONE = {"xcit"}


@pytest.mark.parametrize("name", timm_family)
def test_equals_the_loop(name: str) -> None:
    """In one graph: fxgrad.transform refuses a graph break."""
    model, inputs = timm_family.build(name)
    seed = 0 if name in WITHOUT_BATCHES_OF_ONE else None
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=TOLERANCE, seed=seed)


@pytest.mark.parametrize("name", timm_family.but_long("beit", "cait"))
def test_with_dropout(name: str) -> None:
    model, inputs = timm_family.build(name, dropout=0.2)
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=TOLERANCE, seed=1)


def test_batch_norm_in_training_mode_is_refused() -> None:
    model, inputs = create("xcit_nano_12_p16_224", img_size=32, embed_dim=16, depth=1, num_heads=2, num_classes=5)
    with pytest.raises(fxgrad.errors.MixedSamples, match=r"batch_norm in training mode .*\n.*xcit\.py"):
        fxgrad.transform(model, backend="eager")(inputs["x"])
