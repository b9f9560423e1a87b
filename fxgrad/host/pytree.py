"""Nests of tuples, lists and dicts, as PyTorch walks them."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree

tree_leaves = _pytree.tree_leaves
"""List the leaves of a nest.

Why: it is the one walk that knows the classes that PyTorch and users have registered.
Since: torch 2.11 to 2.13, tested.
Without: tensors in a model's nested inputs and outputs are not met.
"""

arg_tree_leaves = _pytree.arg_tree_leaves
"""List the leaves of positional and keyword arguments.

Why: of a call's arguments, faster than `tree_leaves` of a pair.
Since: torch 2.11 to 2.13, tested.
Without: the batch size of a layer's inputs is not read where there are several.
"""

tree_map = _pytree.tree_map
"""Apply a function to each leaf of a nest.

Why: an op's arguments are nests of fake tensors, of which each gets a stand-in.
Since: torch 2.11 to 2.13, tested.
Without: ops that take lists of tensors (`cat`, `stack`) are not replayed.
"""

tree_flatten = _pytree.tree_flatten
"""Split a nest into its leaves and a `TreeSpec`.

Why: a call is traced by its tensors alone, and called with the nest.
Since: torch 2.11 to 2.13, tested.
Without: ops with nested arguments are not decomposed or checked.
"""

tree_unflatten = _pytree.tree_unflatten
"""Make a nest from leaves and a `TreeSpec`: what undoes `tree_flatten`.

Why: a call is traced by its tensors alone, and called with the nest.
Since: torch 2.11 to 2.13, tested.
Without: ops with nested arguments are not decomposed or checked.
"""

tree_structure = _pytree.tree_structure
"""The `TreeSpec` of a nest.

Why: sample dims may be given for a part of the arguments, like vmap's ``in_dims``.
Since: torch 2.11 to 2.13, tested.
Without: `broadcast_to_and_flatten` has nothing to broadcast to.
"""

TreeSpec = _pytree.TreeSpec
"""The form of a nest, without its leaves.

Why: annotations name it.
Since: torch 2.11 to 2.13, tested.
Without: nothing but the annotations.
"""


def broadcast_to_and_flatten(prefix: Any, spec: TreeSpec) -> list[Any] | None:
    """Repeat each leaf of a prefix for all that stands below it in a nest; None where it is no prefix.

    Why: it is how torch.vmap reads ``in_dims``, which our sample dims are written like.
    Since: torch 2.11 to 2.13, tested.
    Without: sample dims have to be given for each tensor of a nest by itself.
    """
    return _pytree._broadcast_to_and_flatten(prefix, spec)
