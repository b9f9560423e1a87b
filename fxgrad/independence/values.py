"""Values of a walk: functional tensors around fake ones, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from fxgrad.independence.calls import Origins
from fxgrad.independence.following import Follow
from fxgrad.independence.longest.steps import filled
from fxgrad.independence.origins import no_samples
from fxgrad.independence.trials import ROWS, Trial
from fxgrad.samples.layouts import Layout


class Met(Exception):
    """Samples are, or may be, where they must not be."""

    def __init__(self, what: str, node: fx.Node, origins: Origins) -> None:
        super().__init__(what)
        self.what, self.node, self.origins = what, node, origins


class Values:
    """Makes values, and says which samples they hold."""

    def __init__(self, follow: Follow) -> None:
        self.follow = follow
        self.packs: dict[str, int] = {}  # packed sequences, by the name of their sizes or their order

    def fresh(self, fake: Tensor, origins: Origins) -> Any:
        """A value that no op made."""
        with torch.no_grad(), _disable_current_modes():
            plain = fake.detach()
        self.follow.set(plain, origins)
        return FunctionalTensor.to_functional(plain)

    def expected(self, fake: Tensor, layout: Layout | None) -> tuple[Tensor, ...]:
        """The ids that a layout says."""
        with _disable_current_modes():
            return tuple(_laid_out(trial, fake, layout, self.packs) for trial in self.follow.trials)

    def origins(self, value: Any) -> Origins:
        inner = value if not isinstance(value, FunctionalTensor) else self.inner(value)
        with _disable_current_modes():
            return self.follow.of(inner)

    def inner(self, value: Any) -> Any:
        """The fake value in a functional tensor, whatever was written into it."""
        torch._functionalize_sync(value.elem)
        return torch._from_functional_tensor(value.elem)

    def like(self, value: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """A gradient of this value, with its ids changed; behind the ends of shorter samples it is zero."""
        origins = self.origins(value)
        with _disable_current_modes():
            ids = tuple(change(one) for one in origins.ids)
        padded = {dim: filled(steps, 0.0) for dim, steps in origins.padded.items()}
        return self.fresh(self.inner(value), replace(origins, ids=ids, known=None, padded=padded))

    def behind_ends(self, value: Any, number: float | None) -> Any:
        """The value, with something else known of what stands behind the ends of shorter samples."""
        if not isinstance(value, FunctionalTensor):
            return value
        origins = self.origins(value)
        if origins.padded:
            padded = {dim: replace(filled(steps, number), finite=steps.safe) for dim, steps in origins.padded.items()}
            self.follow.set(self.inner(value), replace(origins, padded=padded))
        return value


def _laid_out(trial: Trial, fake: Tensor, layout: Layout | None, packs: dict[str, int]) -> Tensor:
    """The ids 1..B of a value with a layout; where rows of packed data are, ids of their own."""
    if layout is None:
        return no_samples(fake.dim())
    (size,) = trial.shape([fake.shape[layout.dim]])
    if layout.rows is not None:
        pack = packs.get(layout.rows[0], -2)
        ids = torch.arange(size, dtype=torch.int32) + ROWS * (pack + 1)
    else:
        outer = None if layout.outer is None else trial.number(layout.outer)
        inner = None if layout.inner is None else trial.number(layout.inner)
        inner = inner if inner is not None else size // (trial.batch * (outer or 1))
        ids = (torch.arange(size, dtype=torch.int32) // max(1, inner)) % trial.batch + 1
    return ids.reshape([-1 if dim == layout.dim else 1 for dim in range(fake.dim())])
