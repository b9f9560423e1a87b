"""The findings of `fxgrad.explain` as dataclasses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

VERSION = 1  # of to_dict()


@dataclass(frozen=True)
class Cost:
    """A cost as a formula in the symbolic sizes, and as a number for this batch.

    For an unknown cost, ``formula`` is empty and ``value`` None. If the cost depends on data, only ``value`` is None.
    """

    formula: str = ""
    value: int | None = None


@dataclass(frozen=True)
class Option:
    """One strategy to contract a use's gradient, with its costs; ``milliseconds`` is the cost model's estimate."""

    way: str
    flops: Cost
    bytes: Cost
    milliseconds: float


@dataclass(frozen=True)
class Contracted:
    """The chosen strategy, if no quantity needs the gradient itself."""

    way: str
    why: str
    materialised: bool  # the graph has the gradients [B, *shape] as a value, alive to the end of the backward
    options: tuple[Option, ...] = ()  # all possible strategies; empty without a choice


@dataclass(frozen=True)
class Step:
    """One op in which a parameter, or a function of parameters, is differentiated."""

    op: str
    node: str  # its name in the graph
    by: str  # "rule", "elementwise", "generic" or "own backward"
    of: str  # the function of parameters that it uses: "" for the parameter itself
    terms: tuple[str, ...]  # the einsums of its per-sample gradient; or "summed", "moved", "pulled back", "no gradient"
    module: str
    line: str  # of the user's source: file, number, code
    output: str  # dtype and shape of its output
    samples: str  # their layout in the output
    flops: Cost
    contracted: Contracted | None = None  # None if a quantity needs the gradients themselves


@dataclass(frozen=True)
class Explained:
    """One parameter; ``status`` is "trained", "unused", "frozen", or "unreached" if no gradient reaches its uses.

    If ``materialised`` is False, no value of the compiled graph is its gradients of all samples.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    status: str
    bytes: Cost  # of its materialised gradients
    steps: tuple[Step, ...] = ()
    materialised: bool = True


@dataclass(frozen=True)
class Total:
    """One line of the totals: the costs of the plain step and of the transformed model."""

    what: str
    unit: str
    plain: Cost
    fxgrad: Cost


@dataclass(frozen=True)
class Value:
    """One value of the rewritten graph, as drawn."""

    name: str
    op: str
    kind: str  # "constant", "uniform", "batched" or "mixed"
    modules: tuple[str, ...]  # the modules that compute it, outermost first
    line: str
    dtype: str
    sizes: tuple[str, ...]
    samples: str
    sample_dim: int | None
    operands: tuple[str, ...]  # names of values
    parameters: tuple[str, ...]  # names of trainable parameters
    constants: tuple[str, ...]  # names of frozen parameters, buffers and inputs that all samples share
    tap: str = ""  # the rule that differentiates it: "rule: n...o,n...i->noi"


@dataclass(frozen=True)
class Findings:
    """The treatment of a model by fxgrad, as data."""

    model: str
    batch_size: int
    sizes: dict[str, int]  # symbol -> size
    parameters: tuple[Explained, ...]
    totals: tuple[Total, ...]
    notes: tuple[str, ...]
    values: tuple[Value, ...]  # of the graph, in its order: inputs, ops, the output
    quantities: tuple[str, ...] = ()
    machine: str = ""  # the machine of the estimated milliseconds

    def to_dict(self) -> dict[str, Any]:
        """Return all findings as JSON types; ``version`` changes when a key's meaning does."""
        data: dict[str, Any] = json.loads(json.dumps({"version": VERSION, **asdict(self)}))
        return data

    def heading(self) -> str:
        """Return the model's name and the sizes that the numbers are for."""
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes.items())
        return f"{self.model} at {sizes}" + (f", for {', '.join(self.quantities)}" if self.machine else "")
