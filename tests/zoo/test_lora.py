"""LoRA on a frozen base: the adapters have per-sample gradients, and nothing is kept or computed for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import fxgrad
from fxgrad.runtime.targets import CollectTarget, DeriveTarget, TapTarget
from fxgrad.testing import assert_per_sample_grads
from tests.zoo.models import TOLERANCE, Inputs, scatter
from tests.zoo.transformers_models import transformers_family

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LAYERS = {"llama": ["q_proj", "v_proj", "down_proj"], "bert": ["query", "value"], "t5": ["q", "v"]}


def adapted(name: str, dropout: float = 0.0) -> tuple[nn.Module, Inputs]:
    model, inputs = transformers_family.build(name)
    options: dict[str, Any] = {"r": 2, "lora_alpha": 4, "lora_dropout": dropout, "target_modules": LAYERS[name]}
    model = get_peft_model(model, LoraConfig(**options)).double()
    scatter(model)
    return model, inputs


@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_loop(name: str) -> None:
    model, inputs = adapted(name)
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=TOLERANCE)


def test_with_dropout() -> None:
    model, inputs = adapted("llama", dropout=0.2)
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=TOLERANCE, seed=1)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_under_checkpoints(name: str) -> None:
    """Behind frozen embeddings a hook of transformers calls ``requires_grad_()``, for a checkpoint's backward."""
    model, inputs = adapted(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model.enable_input_require_grads()  # type: ignore[operator]
    model.train()
    assert_per_sample_grads(model, **inputs, backend="eager", tolerance=TOLERANCE)


def test_nothing_for_frozen_layers() -> None:
    """One tap for every use of an adapter's matrix, and no gradient placeholder for anything else."""
    model, inputs = adapted("llama")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * len(LAYERS["llama"]) and all("lora_" in name for name in trained)

    nodes = fxgrad.trace(model, **inputs).graph_module.graph.nodes
    taps = [node for node in nodes if isinstance(node.target, TapTarget)]
    assert [node.target.strategy.use.op for node in taps] == ["linear"] * len(trained)
    assert not any(isinstance(node.target, DeriveTarget) for node in nodes)
    (collect,) = (node for node in nodes if isinstance(node.target, CollectTarget))
    assert len(collect.args) - 2 == len(trained)


def test_nothing_kept_for_frozen_layers() -> None:
    """Between forward and backward, no more is kept than by the plain model (but for one number per parameter)."""
    model, inputs = adapted("llama")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    def size(run: nn.Module) -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            output = run(**inputs).logits  # holds what was kept
        return sum(kept.values()) if output.requires_grad else 0

    plain, transformed = size(model), size(fxgrad.transform(model, backend="eager"))
    assert 0 < transformed <= 1.02 * plain
