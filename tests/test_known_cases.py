"""Whole models that today's tools for per-sample gradients get wrong, miss or refuse, each against the loop.

Other files hold the cases of single ops (test_rules), recurrent layers (test_recurrent, test_packed), attention
(test_attention), batches (test_batch), state (test_state) and what is refused (test_refusals).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import fxgrad
from fxgrad.testing import assert_per_sample_grads


class Model(nn.Module):
    """Some modules and a forward."""

    def __init__(self, forward: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def images(*shape: int) -> Tensor:
    return torch.randn(3, *shape, dtype=torch.double)


def tokens(length: int) -> Tensor:
    return torch.randint(7, (3, length))


def value(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


Case = tuple[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]]


def layer(name: str, module: Callable[[], nn.Module], *inputs: Callable[[], Tensor]) -> Case:
    return name, lambda: (module(), tuple(make() for make in inputs))


LAYERS: list[Case] = [
    layer("embedding with padding_idx", lambda: nn.Embedding(7, 3, padding_idx=1), lambda: tokens(5)),
    *[
        layer(f"conv padded {mode}",
          partial(nn.Conv2d, 2, 3, 3, padding=1, padding_mode=mode),
              lambda: images(2, 5, 6))
        for mode in ("circular", "reflect", "replicate")
    ],
    layer("conv padded same", lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=2), lambda: images(2, 9)),
    layer("linear on 4-D input", lambda: nn.Linear(3, 2), lambda: images(2, 4, 3)),
    layer("layer norm without bias", lambda: nn.LayerNorm(3, bias=False), lambda: images(2, 3)),
    layer("layer norm without affine",
          lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False)),
          lambda: images(2, 3)),
    *[
        layer(f"embedding bag, {mode}", partial(nn.EmbeddingBag, 7, 3, mode=mode),
          lambda: tokens(4))
        for mode in ("sum", "mean", "max")
    ],
    layer("embedding bag, weighted", lambda: nn.EmbeddingBag(7, 3, mode="sum"), lambda: tokens(4),
          lambda: None,  # type: ignore[arg-type, return-value]
          lambda: images(4)),
    layer("depthwise conv", lambda: nn.Conv2d(4, 8, 3, groups=4), lambda: images(4, 5, 5)),
    layer("grouped conv", lambda: nn.Conv1d(4, 6, 3, groups=2), lambda: images(4, 9)),
    layer("transposed conv", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), lambda: images(4, 5, 5)),
    layer("group norm", lambda: nn.GroupNorm(2, 4), lambda: images(4, 5)),
    layer("instance norm", lambda: nn.InstanceNorm1d(4, affine=True), lambda: images(4, 5)),
    layer("rms norm", lambda: nn.RMSNorm(5), lambda: images(4, 5)),
    layer("frozen batch norm", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)).eval(),
          lambda: images(4, 5)),
    layer("prelu", lambda: nn.PReLU(4), lambda: images(4, 5)),
    layer("bilinear", lambda: nn.Bilinear(3, 4, 2), lambda: images(3), lambda: images(4)),
]  # fmt: skip


def tied_head(m: Any, ids: Tensor) -> Tensor:
    return F.linear(m.embed(ids).tanh(), m.embed.weight)


def called_twice(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(m.a(x).relu()) * m.scale
    return out


def one_in_two_layers(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.w), m.w.t(), m.b) + F.linear(x, m.w).sum(-1, keepdim=True)


def class_token(m: Any, x: Tensor) -> Tensor:
    h = torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1) + m.positions[: x.shape[1] + 1]
    return (m.a(h) * m.scale)[:, 0] @ m.w


def half_frozen(weight: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(("weight" in name) == weight)
    return model


class Positive(nn.Module):
    """A user's parametrization."""

    def forward(self, w: Tensor) -> Tensor:
        return F.softplus(w) / w.abs().sum()


class LowRank(nn.Module):
    """LoRA on a frozen layer."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * self.up(self.down(x))
        return out


def orthogonal_linear(by: str) -> nn.Module:
    return orthogonal(nn.Linear(4, 4), orthogonal_map=by)


def parametrized(module: nn.Module, name: str, by: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, name, by)
    return module


PARAMETERS: list[Case] = [
    layer("tied embedding and head", lambda: Model(tied_head, embed=nn.Embedding(7, 3)), lambda: tokens(5)),
    layer("one module called twice", lambda: Model(called_twice, a=nn.Linear(3, 3), scale=value()), lambda: images(3)),
    layer("one parameter in two layers", lambda: Model(one_in_two_layers, w=value(4, 3), b=value(3)),
          lambda: images(5, 3)),
    layer("bare parameters", lambda: Model(class_token, token=value(1, 1, 3), positions=value(9, 3), scale=value(),
          w=value(3, 2), a=nn.Linear(3, 3)), lambda: images(4, 3)),
    layer("an unused parameter", lambda: Model(lambda m, x: m.a(x), a=nn.Linear(3, 2), b=value(4)), lambda: images(3)),
    layer("weights frozen", lambda: half_frozen(False), lambda: images(3)),
    layer("biases frozen", lambda: half_frozen(True), lambda: images(3)),
    layer("weight_norm", lambda: weight_norm(nn.Conv2d(2, 3, 3)), lambda: images(2, 5, 5)),
    layer("spectral_norm", lambda: nn.Sequential(spectral_norm(nn.Linear(3, 4))), lambda: images(3)),
    *[
        layer(f"orthogonal by {by}", partial(orthogonal_linear, by),
          lambda: images(4))
        for by in ("matrix_exp", "cayley", "householder")
    ],
    layer("a user's parametrization", lambda: parametrized(nn.Linear(3, 4), "weight", Positive()), lambda: images(3)),
    layer("two parametrizations",
          lambda: parametrized(parametrizations.weight_norm(nn.Linear(3, 4)), "bias", Positive()),
          lambda: images(3)),
    layer("low rank on a frozen layer", lambda: nn.Sequential(LowRank(nn.Linear(4, 5), 2), nn.Tanh(),
          LowRank(nn.Linear(5, 3), 2)), lambda: images(6, 4)),
]  # fmt: skip


def relative_positions(m: Any, x: Tensor) -> Tensor:
    t = x.shape[1]
    distance = torch.arange(t)[:, None] - torch.arange(t)[None] + t - 1
    return (x @ x.transpose(1, 2) + m.table[distance]).softmax(-1) @ m.a(x)


def frames(m: Any, x: Tensor) -> Tensor:
    b, f = x.shape[:2]
    out: Tensor = m.a(x.flatten(0, 1)).mean((2, 3)).view(b, f, -1).mean(1)
    return out


def windows(m: Any, x: Tensor) -> Tensor:
    b, h, w, c = x.shape
    parts = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    parts = m.a(parts + m.bias)
    back = parts.view(b, h // 2, w // 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)
    return torch.roll(back, (-1, -1), (1, 2)) * m.scale


def unfolded(m: Any, x: Tensor) -> Tensor:
    patches = F.unfold(x, 2, stride=2).transpose(1, 2)
    out = F.fold(m.a(patches).transpose(1, 2), x.shape[-2:], 2, stride=2)
    return F.pixel_shuffle(F.pixel_unshuffle(out, 2) * m.scale, 2)


def rolled_and_repeated(m: Any, x: Tensor) -> Tensor:
    h = m.a(x.repeat_interleave(3, 0)).roll(1, 1)
    first, second = h.view(x.shape[0], 3, *x.shape[1:]).flip(1).chunk(2, -1)
    out: Tensor = (first - second)[:, [2, 0]] * m.scale
    return out


def guided(m: Any, x: Tensor) -> Tensor:
    """Samples beside as many rows of a frozen value, and of zeros, as a guided diffusion model has them"""
    both = torch.cat([x, m.none.expand_as(x), torch.zeros_like(x)])
    with_it, without, zero = m.head(both).tanh().chunk(3)
    return with_it + 2 * (with_it - without) + zero


def with_a_mask(m: Any, x: Tensor, keep: Tensor) -> Tensor:
    out: Tensor = m.a(x).masked_fill(~keep, 0)
    return out[:, :, 2]


def nested(m: Any, batch: dict[str, Any]) -> dict[str, Any]:
    h = m.a(batch["x"][0]) + m.a(batch["x"][1])
    return {"out": (h, h * m.scale), "size": 3}


def time_major(m: Any, x: Tensor) -> Tensor:
    h = x.transpose(0, 1)
    t, b, c = h.shape
    out: Tensor = m.a(h.reshape(t * b, c)).view(t, b, -1).tanh().sum(0)
    return out


PLACES: list[Case] = [
    layer("position ids", lambda: Model(lambda m, ids: m.a(ids) + m.b(torch.arange(ids.shape[1]).to(ids.device)[None]),
          a=nn.Embedding(7, 3),
          b=nn.Embedding(9, 3)), lambda: tokens(5)),
    layer("relative positions", lambda: Model(relative_positions, a=nn.Linear(3, 2), table=value(9)),
          lambda: images(5, 3)),
    layer("view(B*T, C)", lambda: Model(lambda m, x: m.a(x.view(-1, 4)).view(len(x), -1), a=nn.Linear(4, 2)),
          lambda: images(5, 4)),
    layer("time-major", lambda: Model(time_major, a=nn.Linear(4, 2)), lambda: images(5, 4)),
    layer("frames through a CNN", lambda: Model(frames, a=nn.Conv2d(2, 3, 3)), lambda: images(4, 2, 5, 5)),
    layer("windows", lambda: Model(windows, a=nn.Linear(3, 2), bias=value(4, 3), scale=value(2)),
          lambda: images(4, 6, 3)),
    layer("unfold and fold", lambda: Model(unfolded, a=nn.Linear(8, 8), scale=value(8, 1, 1)), lambda: images(2, 4, 6)),
    layer("rolled and repeated", lambda: Model(rolled_and_repeated, a=nn.Linear(4, 4), scale=value(2)),
          lambda: images(5, 4)),
    layer("guidance beside the samples", lambda: Model(guided, head=nn.Linear(4, 2),
          none=nn.Parameter(torch.randn(4), requires_grad=False)), lambda: images(4)),
    ("nested inputs", lambda: (Model(nested, a=nn.Linear(4, 5), scale=value()), ({"x": [images(4), images(4)]},))),
    layer("batch size as another size", lambda: nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 3, 3)),
          lambda: images(3, 3)),
]  # fmt: skip


def loss_inside(m: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.a(x)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"), logits


def list_of_outputs(m: Any, x: Tensor) -> list[Tensor]:
    return [m.a(x), m.a(x).relu() * m.scale, x]


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.relu(m.a(x)) * 2
    h += m.a.bias
    h[:, 0] = m.scale
    return h


def detached(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        gate = torch.sigmoid(m.a(x))
    out: Tensor = h * gate + h.detach() * m.scale
    return out


STRUCTURE: list[Case] = [
    layer("in-place ops", lambda: Model(in_place, a=nn.Linear(4, 3), relu=nn.ReLU(inplace=True), scale=value()),
          lambda: images(4)),
    layer("no_grad and detach", lambda: Model(detached, a=nn.Linear(4, 3), scale=value(3)), lambda: images(4)),
    layer("loss inside", lambda: Model(loss_inside, a=nn.Linear(4, 3)), lambda: images(5, 4),
          lambda: torch.tensor([[0, 1, 2, -100, -100], [2] * 5, [1, -100, -100, -100, -100]])),
    layer("list of outputs", lambda: Model(list_of_outputs, a=nn.Linear(4, 3), scale=value(3)), lambda: images(4)),
]  # fmt: skip

CASES = LAYERS + PARAMETERS + PLACES + STRUCTURE


@pytest.mark.parametrize("make", [make for _, make in CASES], ids=[name for name, _ in CASES])
def test_against_the_loop(make: Callable[[], tuple[nn.Module, tuple[Any, ...]]], device: torch.device) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    to_device = torch.utils._pytree.tree_map_only
    inputs = to_device(Tensor, lambda tensor: tensor.to(device), inputs)
    assert_per_sample_grads(model.double().to(device), *inputs, backend="eager", tolerance=1e-9)


def test_an_input_that_all_samples_share(device: torch.device) -> None:
    keep = torch.tensor([True, False, True, True, False], device=device)
    model = Model(with_a_mask, a=nn.Linear(4, 5)).double().to(device)
    assert_per_sample_grads(model, images(2, 4).to(device), keep, in_dims=(0, None), backend="eager")


def test_frozen_layers_cost_nothing(device: torch.device) -> None:
    """Low rank on frozen layers: no tap, no gradient placeholder and nothing saved for the base."""
    first, second = LowRank(nn.Linear(64, 64), 2), LowRank(nn.Linear(64, 64), 2)
    model = nn.Sequential(first, second).to(device)
    text = str(fxgrad.trace(model, torch.randn(8, 64, device=device)))
    assert text.count("tap_") == 4 and "grad_placeholder(0.base" not in text
    out = fxgrad.transform(model, backend="aot_eager")(torch.randn(8, 64, device=device))
    saved = getattr(out.grad_fn, "saved_tensors", ())
    weights = [tensor for tensor in saved if tensor.shape == (64, 64)]
    assert {tensor.data_ptr() for tensor in weights} <= {second.base.weight.data_ptr()}
    out.sum().backward()
    assert not hasattr(first.base.weight, "grad_sample")
