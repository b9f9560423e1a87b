"""A process that refuses a step of a sharded model says so, for the others, which wait for it in a collective.

    refuses   writes its error into the store of torch.distributed, if it is in a step of a sharded model
    waits     reads the store once its collective has failed: the other process ended, or the group's timeout is over

A step that nothing refuses does neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fxgrad.errors import FxgradError, RefusedElsewhere
from fxgrad.host.processes import shared_store

KEY = "fxgrad/refused/"


class Calls:
    """The number of calls of sharded models in this process, which is that of each process in the same step."""

    count = 0


def tell(error: FxgradError) -> None:
    """Let the other processes of a sharded model know what this one refuses."""
    if not Calls.count or isinstance(error, RefusedElsewhere) or not torch.distributed.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # the store is gone, and the error is to be seen
        said = f"{Calls.count} {type(error).__name__}: {error.sentence}"
        shared_store().set(f"{KEY}{torch.distributed.get_rank()}", said)


def refused_elsewhere() -> str:
    """Return what another process has refused in the running step, or the one before; "" for nothing."""
    found = []
    with contextlib.suppress(RuntimeError):
        store = shared_store()
        for rank in range(torch.distributed.get_world_size()):
            key = f"{KEY}{rank}"
            if rank != torch.distributed.get_rank() and store.check([key]):
                count, _, said = store.get(key).decode().partition(" ")
                if int(count) >= Calls.count - 1:
                    found.append(f"process {rank} refused its call {count}: {said}")
    return "; ".join(found)


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Let the others know of an error of fxgrad's in a call of a sharded model."""
    Calls.count += 1
    try:
        yield
    except FxgradError as error:
        tell(error)
        raise


@contextlib.contextmanager
def collective() -> Iterator[None]:
    """Name the process that has refused a step, where a collective fails."""
    try:
        yield
    except FxgradError as error:
        tell(error)
        raise
    except RuntimeError as error:
        said = refused_elsewhere()
        if not said:
            raise
        raise RefusedElsewhere(
            f"a collective failed, and another process has refused a step: {said}",
            where=f"call {Calls.count} of sharded models in process {torch.distributed.get_rank()}",
            advice="Mend what that process refuses. A process that waits ends with the group's timeout at the latest.",
        ) from error
