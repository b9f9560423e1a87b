"""Nests of tuples, lists and dicts, as PyTorch walks them."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree

TreeSpec = _pytree.TreeSpec
tree_leaves = _pytree.tree_leaves
arg_tree_leaves = _pytree.arg_tree_leaves
tree_map = _pytree.tree_map
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_structure = _pytree.tree_structure
"""List the leaves of a nest, map them, take a nest apart into leaves and a `TreeSpec`, its form, and put it together.

`arg_tree_leaves` lists those of positional and keyword arguments, faster than `tree_leaves` of a pair.

Why: it is the one walk that knows the classes that PyTorch and users have registered.
Without: tensors in nested inputs, outputs and arguments of ops (`cat`, `stack`) are not met.
"""


def broadcast_to_and_flatten(prefix: Any, spec: TreeSpec) -> list[Any] | None:
    """Repeat each leaf of a prefix for all that stands below it in a nest; None where it is no prefix.

    Why: it is how torch.vmap reads ``in_dims``, which our sample dims are written like.
    Without: sample dims have to be given for each tensor of a nest by itself.
    """
    return _pytree._broadcast_to_and_flatten(prefix, spec)
