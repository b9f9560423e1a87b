"""What fxgrad's passes know of a node, and how they read it: typed keys of ``node.meta``.

| fact | written by | value |
|---|---|---|
| ``EXAMPLE`` | TorchDynamo | the node's value in Dynamo's trace |
| ``FAKE`` | propagate_shapes | the node's value as fake tensors in which B is a symbol |
| ``TRACED`` | propagate_shapes | whether a trainable parameter's gradient flows into the value |
| ``CALL`` (calls.py) | normalize_calls | the call in its normal form |
| ``SAMPLES`` (samples/layouts.py) | infer_samples | where the value's samples are |
| ``USE`` (rules/uses.py) | attach_taps | the use of parameters behind which the node stands |
| ``POLICY`` (runtime/checkpointing.py) | inline_regions | the policy of the selective checkpoint around the node |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch import fx

from fxgrad.errors import SpecViolation

T = TypeVar("T")


class Fact(Generic[T]):
    """One key of ``node.meta``: its name, the types of its values, and the pass that writes it."""

    def __init__(self, key: str, by: str, *types: type) -> None:
        self.key, self.by, self.types = key, by, types

    def of(self, node: Any) -> T:  # an operand from node.args has no narrower type
        """Return a node's fact; raise SpecViolation where no pass has written it."""
        try:
            value: T = node.meta[self.key]
        except KeyError:
            raise SpecViolation(f"{node.name} has no {self.key!r}: {self.by} writes it") from None
        return value

    def get(self, node: fx.Node, default: T | None = None) -> T | None:
        """Return a node's fact, or the default."""
        return node.meta.get(self.key, default)

    def on(self, node: fx.Node) -> bool:
        """Return whether a node has the fact."""
        return self.key in node.meta

    def put(self, node: fx.Node, value: T) -> None:
        """Write a node's fact; raise SpecViolation for a value of another type."""
        if self.types and not isinstance(value, self.types):
            raise SpecViolation(f"{node.name} cannot have {type(value).__name__} as its {self.key!r}")
        node.meta[self.key] = value


def put_facts(node: fx.Node, facts: Mapping[Fact[Any], Any]) -> None:
    """Write several facts of a node."""
    for fact, value in facts.items():
        fact.put(node, value)


EXAMPLE: Fact[Any] = Fact("example_value", "TorchDynamo")
FAKE: Fact[Any] = Fact("fake", "propagate_shapes")
TRACED: Fact[Any] = Fact("traced", "propagate_shapes", bool, list)  # a list for several outputs


def value_of(node: fx.Node) -> Any:
    """Return a node's value as fake tensors; before propagate_shapes, its value in Dynamo's trace."""
    return (FAKE if FAKE.on(node) else EXAMPLE).get(node)
