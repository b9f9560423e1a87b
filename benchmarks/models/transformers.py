"""Attention over positions: of vectors, text and images; and a long convolution in its place."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks import Spec, class_losses, next_words, token_losses, vectors

CLASSES = 10
NO_LAYER_NORM = {"backpack": "no rule for LayerNorm", "backpack_l2": "no rule for LayerNorm"}
EXPANDED = {"expanded_weights": "no rule for expand", "opacus_ew": "no rule for expand", **NO_LAYER_NORM}
TIED = {"opacus_ghost": "refuses tied parameters", **NO_LAYER_NORM}


class Block(nn.Module):
    """A pre-norm transformer block: self-attention, then a perceptron four times as wide."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        heads = F.scaled_dot_product_attention(
            q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3), is_causal=self.causal
        )
        x = x + self.out(heads.transpose(-2, -3).flatten(-2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class Transformer(nn.Module):
    """Blocks over a sequence of vectors, averaged over positions and classified."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(-2))
        return logits


class LongConvolution(nn.Module):
    """A causal depthwise convolution over time, then a perceptron; both beside a shortcut."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, kernel, padding=kernel - 1, groups=width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(self.norm1(x).transpose(1, 2))[..., : x.shape[1]]
        x = x + mixed.transpose(1, 2)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        logits: Tensor = self.head(x.mean(1))
        return logits


class Language(nn.Module):
    """A causal transformer over token ids; the head may be the embedding itself.

    Positions are ids expanded to the batch: libraries with hooks take each module's first dimension for it.
    """

    def __init__(self, words: int, length: int, layers: int, width: int, heads: int, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads, causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.words(ids) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Places(nn.Module):
    """A class token before the patches, and what tells their places apart."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 1 + patches, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places


class Vision(nn.Module):
    """A vision transformer."""

    def __init__(self, size: int, patch: int, layers: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = Places((size // patch) ** 2, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.places(self.patches(x).flatten(2).transpose(1, 2))
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


def character_gpt() -> nn.Module:
    return Language(words=65, length=256, layers=6, width=384, heads=6, tied=False)


def tied_gpt() -> nn.Module:
    return Language(words=50257, length=64, layers=2, width=256, heads=4, tied=True)


def tiny_vision() -> nn.Module:
    return Vision(size=224, patch=16, layers=12, width=192, heads=3, classes=1000)


TRANSFORMERS: dict[str, Spec] = {
    "TF-4": Spec(
        lambda: Transformer(layers=4, width=256, heads=4),
        32,
        vectors(64, 256, classes=CLASSES),
        class_losses,
        cannot=NO_LAYER_NORM,
    ),
    "c07-transformer": Spec(
        lambda: Transformer(layers=2, width=256, heads=4),
        32,
        vectors(256, 256, classes=CLASSES),
        class_losses,
        cannot=NO_LAYER_NORM,
    ),
    "c07-longconv": Spec(
        lambda: LongConvolution(256, kernel=64),
        32,
        vectors(256, 256, classes=CLASSES),
        class_losses,
        cannot=NO_LAYER_NORM,
    ),
    "c11-gpt": Spec(character_gpt, 8, next_words(256, 65), token_losses, cannot=NO_LAYER_NORM),
    "c12-tied-gpt": Spec(tied_gpt, 16, next_words(64, 50257), token_losses, cannot=TIED),
    "c13-vit": Spec(tiny_vision, 16, vectors(3, 224, 224, classes=1000), class_losses, cannot=EXPANDED),
}
