"""Single layers, at two batch sizes. The loss is half the squared distance from random targets."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.models.convolutional import NO_GROUP_NORM
from benchmarks.models.transformers import NO_LAYER_NORM
from benchmarks.tasks import Spec, regressions, square_losses

WIDTH, LENGTH, WORDS, CHANNELS, SIDE = 256, 64, 1000, 64, 16
SEQUENCE, IMAGE = (LENGTH, WIDTH), (CHANNELS, SIDE, SIDE)
NO_ATTENTION_RULE = {
    **dict.fromkeys(("backpack", "backpack_l2"), "no rule for MultiheadAttention"),
    **dict.fromkeys(("expanded_weights", "opacus_ew"), "no rule for MultiheadAttention"),
    **dict.fromkeys(
        ("opacus_hooks", "opacus_functorch", "opacus_ghost"),
        "its attention with batch_first computes something else than nn.MultiheadAttention",
    ),
}


class Attention(nn.Module):
    """Self-attention by nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return output


class Outputs(nn.Module):
    """A recurrent layer's outputs without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)[0]
        return output


def _words(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (batch, LENGTH)), torch.randn(batch, *SEQUENCE)


def _recurrent(kind: type[nn.RNNBase], batch: int) -> Spec:
    return Spec(
        lambda: Outputs(kind(WIDTH, WIDTH, batch_first=True)),  # type: ignore[call-arg, arg-type]
        batch,
        regressions(SEQUENCE, SEQUENCE),
        square_losses,
        compiled=False,
    )


def _layers(batch: int) -> dict[str, Spec]:
    def spec(build: Callable[[], nn.Module], shape: tuple[int, ...], cannot: dict[str, str]) -> Spec:
        return Spec(build, batch, regressions(shape, shape), square_losses, cannot=cannot)

    return {
        "linear": spec(lambda: nn.Linear(WIDTH, WIDTH), SEQUENCE, {}),
        "conv": spec(lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), IMAGE, {}),
        "layer_norm": spec(lambda: nn.LayerNorm(WIDTH), SEQUENCE, NO_LAYER_NORM),
        "group_norm": spec(lambda: nn.GroupNorm(8, CHANNELS), IMAGE, NO_GROUP_NORM),
        "embedding": Spec(lambda: nn.Embedding(WORDS, WIDTH), batch, _words, square_losses),
        "mha": spec(Attention, SEQUENCE, NO_ATTENTION_RULE),
        "lstm": _recurrent(nn.LSTM, batch),
        "gru": _recurrent(nn.GRU, batch),
        "rnn": _recurrent(nn.RNN, batch),
    }


LAYERS: dict[str, Spec] = {f"c14-{name}-{batch}": spec for batch in (16, 64) for name, spec in _layers(batch).items()}
