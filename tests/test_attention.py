"""Attention: nn.MultiheadAttention in every form, the transformer layers, and parameters in an attention mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxgrad.testing import assert_per_sample_grads
from tests.quick import TRACED

B, T, S, E, HEADS = 3, 5, 4, 8, 2
DOUBLE = torch.float64


class Attention(nn.Module):
    def __init__(self, call: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.attention, self.call = nn.MultiheadAttention(E, HEADS, **{"batch_first": True, **options}), call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.attention, *inputs)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


def itself(attention: nn.Module, x: Tensor) -> Any:
    return attention(x, x, x)


def without_weights(attention: nn.Module, x: Tensor) -> Tensor:
    return attention(x, x, x, need_weights=False)[0]


def weights_of_each_head(attention: nn.Module, x: Tensor) -> Any:
    return attention(x, x, x, average_attn_weights=False)


def other(attention: nn.Module, x: Tensor, y: Tensor) -> Any:
    return attention(x, y, y)


def three(attention: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(q, k, v)


def shared_mask(attention: nn.Module, x: Tensor) -> Any:
    return attention(x, x, x, attn_mask=torch.linspace(-1, 1, T * T, dtype=x.dtype, device=x.device).view(T, T))


def own_mask(attention: nn.Module, x: Tensor, mask: Tensor) -> Any:
    return attention(x, x, x, attn_mask=mask.flatten(0, 1))


def padding(attention: nn.Module, x: Tensor) -> Any:
    return attention(x, x, x, key_padding_mask=x[..., 0] > 0.5)


def causal(attention: nn.Module, x: Tensor) -> Tensor:
    mask = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    return attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[tuple[int, ...]]]] = {
    "self": (itself, {}, [(B, T, E)]),
    "without weights": (without_weights, {}, [(B, T, E)]),
    "weights of each head": (weights_of_each_head, {}, [(B, T, E)]),
    "without bias": (itself, {"bias": False}, [(B, T, E)]),
    "bias_kv and zero_attn": (itself, {"add_bias_kv": True, "add_zero_attn": True}, [(B, T, E)]),
    "cross": (other, {}, [(B, T, E), (B, S, E)]),
    "kdim and vdim": (three, {"kdim": 6, "vdim": 7}, [(B, T, E), (B, S, 6), (B, S, 7)]),
    "a mask that all share": (shared_mask, {}, [(B, T, E)]),
    "a mask of each sample": (own_mask, {}, [(B, T, E), (B, HEADS, T, T)]),
    "key_padding_mask": (padding, {}, [(B, T, E)]),
    "causal": (causal, {}, [(B, T, E)]),
    "as long as the batch": (itself, {}, [(B, B, E)]),
}


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("name", CASES)
def test_multihead_attention(name: str, backend: str, device: torch.device) -> None:
    call, options, shapes = CASES[name]
    model = Attention(call, **options).to(device, DOUBLE)
    inputs = [values(*shape).to(device).requires_grad_() for shape in shapes]
    assert_per_sample_grads(model, *inputs, backend=backend)


@pytest.mark.parametrize("name", ["self", "cross", "kdim and vdim", "bias_kv and zero_attn"])
def test_sequence_first(name: str) -> None:
    call, options, shapes = CASES[name]

    def output_alone(*arguments: Any) -> Tensor:
        return call(*arguments)[0]  # the weights have the samples first even here

    model = Attention(output_alone, **options, batch_first=False).to(DOUBLE)
    inputs = [values(*shape).transpose(0, 1).contiguous() for shape in shapes]
    assert_per_sample_grads(model, *inputs, backend="eager", batch_first=False)


def test_dropout() -> None:
    assert_per_sample_grads(Attention(itself, dropout=0.3).to(DOUBLE), values(B, T, E), backend="eager", seed=1)


@pytest.mark.inductor
def test_through_inductor(device: torch.device) -> None:
    model = Attention(other, add_bias_kv=True).to(device)
    assert_per_sample_grads(model, *(values(B, n, E).float().to(device) for n in (T, S)), backend="inductor")


ENCODER: dict[str, Any] = dict(d_model=E, nhead=HEADS, dim_feedforward=16, batch_first=True)
LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(**ENCODER, dropout=0.0), 1),
    "encoder layer, norm first, gelu": (
        lambda: nn.TransformerEncoderLayer(**ENCODER, dropout=0.0, norm_first=True, activation="gelu"),
        1,
    ),
    "encoder layer in eval mode": (lambda: nn.TransformerEncoderLayer(**ENCODER).eval(), 1),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(**ENCODER, dropout=0.0), 2),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER, dropout=0.0), 2), 1),
    "transformer": (lambda: nn.Transformer(E, HEADS, 2, 2, 16, 0.0, batch_first=True), 2),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", LAYERS)
def test_transformer_layers(name: str) -> None:
    build, inputs = LAYERS[name]
    shapes = [(B, T, E), (B, S, E)][:inputs]
    assert_per_sample_grads(build().to(DOUBLE), *(values(*shape) for shape in shapes), backend="eager")


def test_dropout_in_a_layer() -> None:
    model = nn.TransformerEncoderLayer(**ENCODER, dropout=0.2).to(DOUBLE)
    assert_per_sample_grads(model, values(B, T, E), backend="eager", seed=2)


class PositionBias(nn.Module):
    """A table of relative positions, added to the scores of every head."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * T - 1))
        self.gate = nn.Linear(E, HEADS) if own else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        steps = torch.arange(x.shape[1], device=x.device)
        bias = self.table[:, steps[:, None] - steps + T - 1]
        if self.gate is not None:
            bias = bias * self.gate(x).transpose(1, 2).unsqueeze(-1).sigmoid()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("backend", TRACED)
@pytest.mark.parametrize("own", [False, True])
def test_a_parameter_in_the_mask(own: bool, backend: str, device: torch.device) -> None:
    model = PositionBias(own).to(device, DOUBLE)
    assert_per_sample_grads(model, values(B, T, E).to(device), backend=backend)
