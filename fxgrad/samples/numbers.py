"""Numbers that depend on samples: ``x.max().item()``, ``x[x > 0].shape[0]``.

Such a number is an unbacked symbol in the graph: no input's size determines it. It depends on the operands of the op
that made it. So does every number and every tensor size in which the symbol occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxgrad.host.pytree import tree_leaves
from fxgrad.ops.calls import CALL, Call
from fxgrad.ops.facts import FAKE
from fxgrad.ops.forms import QUERIES
from fxgrad.samples.layouts import SAMPLES, Kind, Samples, holds_samples
from fxgrad.samples.operands import Operand
from fxgrad.samples.symbols import Symbols

LONGEST = "fxgrad::pad_packed_to_longest"
"""Its length depends on all samples, too; prove_independence follows the ops that read it (`proof.longest`)."""


class Numbers:
    """The symbols that depend on samples, collected in one walk over a graph."""

    def __init__(self, symbols: Symbols) -> None:
        self.symbols = symbols
        self.seen: set[sympy.Symbol] = set()
        self.of_samples: set[sympy.Symbol] = set()
        with symbols.mode:
            self.scalar = torch.empty(())  # in place of a number where an op takes tensors

    def read(self, node: fx.Node) -> None:
        """Record the symbols that occur first in this node."""
        new = _unbacked(FAKE.of(node)) - self.seen
        self.seen |= new
        call = CALL.get(node)
        if call is not None and call.op == LONGEST:
            return
        if any(holds_samples(SAMPLES.of(operand)) for operand in node.all_input_nodes):
            self.of_samples |= new

    def samples(self, call: Call, operands: Sequence[Operand]) -> Samples | None:
        """Return the samples of a call without a tensor output; None if it depends on no sample."""
        read = call.op not in QUERIES and any(holds_samples(operand.samples) for operand in operands)
        return Samples(Kind.MIXED) if read else None

    def corrected(self, node: fx.Node, samples: Any) -> Any:
        """Mark a value without a layout as mixed if its size depends on samples."""
        fake = FAKE.of(node)
        if isinstance(fake, tuple | list) and isinstance(samples, list):
            return [self._corrected(one, known) for one, known in zip(fake, samples, strict=True)]
        return self._corrected(fake, samples)

    def _corrected(self, fake: Any, samples: Samples | None) -> Samples | None:
        by_samples = _unbacked(fake) & self.of_samples - self.symbols.rows
        if not by_samples or (samples is not None and samples.kind is Kind.BATCHED):
            return samples
        return Samples(Kind.MIXED, traced=samples is not None and samples.traced)


def _unbacked(fake: Any) -> set[sympy.Symbol]:
    parts = [size for value in tree_leaves(fake) for size in (value.shape if isinstance(value, Tensor) else [value])]
    symbolic = (part for part in parts if isinstance(part, torch.SymInt | torch.SymFloat | torch.SymBool))
    return {symbol for part in symbolic for symbol in free_unbacked_symbols(part)}
