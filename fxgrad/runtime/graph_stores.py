"""The stores of graphs that torch.compile handed to the backend "fxgrad": without the model, one for each graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import attrgetter

from torch import Tensor

from fxgrad.quantities import Quantity
from fxgrad.runtime.store import Store

STORES: weakref.WeakSet[Store] = weakref.WeakSet()


def latest_with(quantity: Quantity, parameters: Iterable[Tensor]) -> Store | None:
    """Return the store of these parameters that has reported last, if it was made for this very object."""
    stores = [one for one in _stores_of(parameters) if any(asked is quantity for asked in one.quantities)]
    latest = max(stores, key=attrgetter("results.last"), default=None)
    return latest if latest is not None and latest.results else None


def clear_results(parameters: Iterable[Tensor]) -> None:
    """Forget what graphs with these parameters reported."""
    for store in _stores_of(parameters) if STORES else ():
        store.results.clear()


def _stores_of(parameters: Iterable[Tensor]) -> list[Store]:
    ids = frozenset(map(id, parameters))
    return [store for store in STORES if not ids.isdisjoint(store.owned)]
