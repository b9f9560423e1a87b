"""What the processes of torch.distributed share beside their collectives."""

from __future__ import annotations

from typing import Any


def shared_store() -> Any:
    """Return the key-value store through which the processes found each other.

    Why: a process that refuses a step cannot say so in a collective, as the others are in another one.
    Without: the others' errors do not name the process that refused.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
