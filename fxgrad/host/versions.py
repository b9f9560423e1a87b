"""Which PyTorch this is."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

TORCH = TorchVersion(str(torch.__version__))
"""The release that runs, which compares with a text as versions do."""


def at_least(release: str) -> bool:
    """Return whether this PyTorch is a release or a later one; versions compare by their numbers: 2.9 is before 2.14.

    A prerelease counts as earlier than its release, as PEP 440 has it: ``2.14.0.dev20260301`` is not ``2.14`` yet.
    """
    return bool(release <= TORCH)
