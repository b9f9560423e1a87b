"""scikit-learn's handwritten digits, shuffled, in two parts, with some labels of the first part wrong on request."""

from __future__ import annotations

from typing import NamedTuple

import sklearn.datasets
import torch
from torch import Tensor


class Digits(NamedTuple):
    images: Tensor  # [n, 1, 8, 8] in 0..1, to train with
    labels: Tensor  # [n], what the network is trained to say
    truth: Tensor  # [n], what the images show
    test_images: Tensor  # [tests, 1, 8, 8]
    test_truth: Tensor  # [tests]


def load_digits(train: int, flipped_share: float = 0.0) -> Digits:
    """Split the 1797 digits into `train` images and the others, and move that share of the labels to another digit."""
    generator = torch.Generator().manual_seed(0)
    data = sklearn.datasets.load_digits()
    order = torch.randperm(len(data.target), generator=generator)
    images = (torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16)[order]
    truth = torch.tensor(data.target)[order]
    labels = truth[:train].clone()
    flipped = torch.randperm(train, generator=generator)[: int(flipped_share * train)]
    labels[flipped] = (labels[flipped] + torch.randint(1, 10, (len(flipped),), generator=generator)) % 10
    return Digits(images[:train], labels, truth[:train], images[train:], truth[train:])
