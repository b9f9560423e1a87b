"""Text classified through an embedding, alone or before a recurrent layer."""

import torch
from torch import Tensor, nn

from benchmarks.tasks import Spec, class_losses, texts

WORDS, CLASSES, LENGTH = 10004, 2, 256


class Averaged(nn.Module):
    """The mean of the words' embeddings, classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(ids).mean(1))
        return logits


class Recurrent(nn.Module):
    """An LSTM over the words' embeddings; the mean of its outputs is classified."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(self.embedding(ids))[0]
        logits: Tensor = self.head(torch.mean(hidden, 1))
        return logits


SEQUENCES: dict[str, Spec] = {
    "c04-embedding": Spec(lambda: Averaged(16), 256, texts(LENGTH, WORDS, CLASSES), class_losses),
    "c05-lstm": Spec(
        lambda: Recurrent(100),
        32,
        texts(LENGTH, WORDS, CLASSES),
        class_losses,
        compiled=False,
    ),
}
