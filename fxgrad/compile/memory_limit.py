"""Whether the results of a batch fit into memory: an error before it runs, where the system would end the process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fxgrad.errors import NotEnoughMemory
from fxgrad.graph.printing import table
from fxgrad.quantities import Quantity
from fxgrad.quantities.base import GRAD

WORTH_A_LOOK = 0.1  # of the room: below it, which gradients are held need not be known
_LISTED = 5


@dataclass
class Room:
    """The memory that one graph's results take, compared with what there is, once for each larger batch.

    Counted is what surely is allocated: the results, and the gradients [B, *p.shape] that are held on the way to them.
    The activations are the plain model's as well.
    """

    quantities: Sequence[Quantity]
    parameters: Mapping[str, Tensor]
    limit: int | str | None
    held: frozenset[str] = frozenset()  # parameters whose gradients are held, and are no result
    largest: int = 0  # the batch that was seen to fit

    def is_tight(self, n: int) -> bool:
        """Return whether holding all gradients would take a part of the room that is worth a look."""
        every = sum(n * p.numel() * p.element_size() for p in self.parameters.values())
        return self.limit is not None and every > WORTH_A_LOOK * min(map(self._room, self._devices()))

    def check(self, n: int) -> None:
        """Raise where a batch of n samples will not fit."""
        if self.limit is None or n <= self.largest:
            return
        for device in self._devices():
            costs, room = self._costs(n, device), self._room(device)
            if sum(costs.values()) > room:
                raise self._refused(n, device, costs, int(room))
        self.largest = n

    def _devices(self) -> list[torch.device]:
        return list(dict.fromkeys(p.device for p in self.parameters.values()))

    def _room(self, device: torch.device) -> float:
        return self.limit if isinstance(self.limit, int) else free_memory(device)

    def _costs(self, n: int, device: torch.device) -> dict[str, int]:
        """Bytes by what they are for; p.grad has the size that it has in any step."""
        costs: dict[str, int] = {}
        for quantity in self.quantities:
            for one in quantity.deliveries(quantity.units(n), self.parameters):
                if one.place != GRAD and one.device == device:
                    name = f"{one.place} of '{one.parameter}'" if one.parameter else f"results of {quantity}"
                    costs[name] = costs.get(name, 0) + math.prod(one.shape) * one.dtype.itemsize
        for name in self.held:
            p = self.parameters[name]
            if p.device == device:
                costs[f"gradients of '{name}'"] = n * p.numel() * p.element_size()
        return costs

    def _refused(self, n: int, device: torch.device, costs: Mapping[str, int], room: int) -> NotEnoughMemory:
        total = sum(costs.values())
        largest = sorted(costs.items(), key=lambda item: -item[1])
        rows = [[name, _shown(size)] for name, size in largest[:_LISTED]]
        rest = sum(size for _, size in largest[_LISTED:])
        rows += [[f"{len(largest) - _LISTED} others", _shown(rest)]] if rest else []
        lines = table(["what", "bytes"], [*rows, ["total", _shown(total)]], right={1})
        limit = "memory_limit= allows" if isinstance(self.limit, int) else f"are free on {device}"
        fits = int(n * room / total)
        batches = f"Take batches of at most {fits} samples" if fits else "Not one sample fits: allow more"
        dense = any(quantity.dense for quantity in self.quantities)
        other = ", or ask for what is made of the gradients (ClippedGrad, NormSample, GradDot)" if dense else ""
        other = ', or pass strategy="recompute", which holds no gradients' if self.held else other
        return NotEnoughMemory(
            f"a batch of {n} takes {_shown(total)} for its gradients, and {_shown(room)} {limit}",
            where="\n  ".join(lines),
            advice=f"{batches}{other}. memory_limit=None leaves the check out.",
        )


def free_memory(device: torch.device) -> float:
    """The bytes that can be allocated on a device; infinite where the system does not say. Nothing waits for it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type != "cpu":
        return math.inf
    return min(_of_the_system(), _of_the_group())


def _of_the_system() -> float:
    """Linux: what is available without swapping, and what may be swapped."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return float(sizes["MemAvailable"] + sizes.get("SwapFree", 0)) if "MemAvailable" in sizes else math.inf


_GROUPS = (  # the limit of a container: what it may hold, what it holds, and how much of that is cache
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def _of_the_group() -> float:
    for limit, usage, stat, cache in _GROUPS:
        try:
            allowed, used = int(Path(limit).read_text()), int(Path(usage).read_text())
            lines = dict(line.split() for line in Path(stat).read_text().splitlines())
        except (OSError, ValueError):  # another version of groups, or "max": no limit
            continue
        return float(allowed - used + int(lines.get(cache, 0)))
    return math.inf


def _shown(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
