"""Values of a walk: functional tensors that wrap fake tensors, and the origins of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.fake import FunctionalTensor, functional, settled
from fxgrad.proof.calls import Blame, Origins
from fxgrad.proof.following import Follow
from fxgrad.proof.longest.steps import filled
from fxgrad.proof.origins import along_dim, no_samples
from fxgrad.proof.trials import Trial, rows_of
from fxgrad.samples.layouts import Layout


class Met(Exception):
    """Raised when samples influence each other, or when the proof cannot rule it out."""

    def __init__(self, why: str | Blame, node: fx.Node, origins: Origins | None = None) -> None:
        super().__init__(why)
        known = None if origins is None else origins.blame
        self.blame = known or (why if isinstance(why, Blame) else Blame(why))
        self.node = self.blame.where or node


class Values:
    """The factory of a walk's values, with their origins."""

    def __init__(self, follow: Follow) -> None:
        self.follow = follow
        self.packs: dict[str, int] = {}  # the packed sequence of each name of batch sizes or a sort order

    def fresh(self, fake: Tensor, origins: Origins) -> Any:
        """Make a value with the given origins, outside any op."""
        with torch.no_grad(), disable_current_modes():
            plain = fake.detach()
        self.follow.set(plain, origins)
        return functional(plain)

    def expected(self, fake: Tensor, layout: Layout | None) -> tuple[Tensor, ...]:
        """Return the ids of a value with this layout, in each trial."""
        with disable_current_modes():
            return tuple(_laid_out(trial, fake, layout, self.packs) for trial in self.follow.trials)

    def origins(self, value: Any) -> Origins:
        inner = value if not isinstance(value, FunctionalTensor) else self.inner(value)
        with disable_current_modes():
            return self.follow.of(inner)

    def inner(self, value: Any) -> Any:
        """Return the fake tensor in a functional tensor, after all pending writes."""
        return settled(value)

    def like(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Make a gradient of this value, with changed ids and zero padding."""
        origins = self.origins(value)
        with disable_current_modes():
            ids = tuple(change(one) for one in origins.ids)
        padded = {dim: filled(steps, 0.0) for dim, steps in origins.padded.items()}
        return self.fresh(self.inner(value), replace(origins, ids=ids, known=None, padded=padded))

    def hide_padding(self, value: Any) -> Any:
        """Forget the known padding of a value, except whether it is finite."""
        if isinstance(value, FunctionalTensor):
            origins = self.origins(value)
            padded = {dim: steps.unknown(finite=steps.safe) for dim, steps in origins.padded.items()}
            self.follow.set(self.inner(value), replace(origins, padded=padded))
        return value


def _laid_out(trial: Trial, fake: Tensor, layout: Layout | None, packs: dict[str, int]) -> Tensor:
    """Return the ids 1..B of a value with a layout; for rows of packed data, one id per row."""
    if layout is None:
        return no_samples(fake.dim())
    size = trial.number(fake.shape[layout.dim])
    if layout.rows is not None:
        ids = rows_of(packs.get(layout.rows[0], -2), size)
    else:
        outer, inner = trial.number(layout.outer), trial.number(layout.inner)
        inner = inner if inner is not None else size // (trial.batch * (outer or 1))
        ids = (torch.arange(size, dtype=torch.int32) // max(1, inner)) % trial.batch + 1
    return along_dim(ids, layout.dim, fake.dim())
