"""torch.utils.data.DataLoader: the iteration that draws a batch, and the batches that it has returned."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import dataloader as _dataloader

_Iterator = _dataloader._BaseDataLoaderIter
_DRAWS = _Iterator._next_index.__code__


def drawing_iterator() -> Any:
    """Return the iterator of a DataLoader in which the caller runs, as a part of its sampler; None outside of one.

    Why: Opacus's sampler of parts announces each part to the optimizer as it is drawn, and workers draw in advance.
    Without: after a part without a step, all later announcements would be taken for other parts.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _DRAWS:
            return frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def sampler_in(iterator: Any) -> Any:
    """Return the sampler's iterator; with persistent workers, each epoch has a new one in the same object.

    Why: an epoch has to be told from the one before.
    Without: the parts of two epochs would be counted as one.
    """
    return iterator._sampler_iter


def count_returned(iterator: Any) -> int:
    """Return the number of batches that the user got of this epoch.

    Why: the step is for the last one.
    Without: a part that the user passes over goes unnoticed.
    """
    count: int = iterator._num_yielded
    return count
