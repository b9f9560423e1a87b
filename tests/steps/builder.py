"""What a random program is made of: values whose layout is known by construction, parameters, lines of Python.

A `Value` is a name in the generated `forward` with its shape and the place of the samples in it; a `Builder` holds
the pool of values and writes the lines. The layouts here are the generator's own bookkeeping: they are what the
passes under test have to find by themselves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.steps.expected import Expected

VOCABULARY = 5  # integer inputs are below this
MAX_SIZE = 256  # elements per sample of any value


class Layout(NamedTuple):
    """Dim `dim` has size outer * B * inner, the sample index in the middle."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True)
class Value:
    """A tensor of the program: shape[layout.dim] is outer * inner and stands for outer * B * inner."""

    name: str
    shape: tuple[int, ...]
    layout: Layout | None  # None: the same for all samples
    learned: bool  # depends on a parameter

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def other_dims(self) -> list[int]:
        """The dims that hold no samples."""
        return [d for d in range(self.rank) if self.layout is None or d != self.layout.dim]

    def size(self, dim: int) -> str:
        """The size of a dim as the program writes it: a number, B, or read off the value itself."""
        if self.name != "x0" and (int(self.name[1:]) + dim) % 5 == 0:
            return f"{self.name}.shape[{dim}]"
        if self.layout is None or dim != self.layout.dim:
            return str(self.shape[dim])
        return "B" if self.shape[dim] == 1 else f"{self.shape[dim]} * B"

    def sizes(self) -> list[str]:
        return [self.size(d) for d in range(self.rank)]


def tuple_text(sizes: Sequence[str | int]) -> str:
    """("B", 3) -> "(B, 3)"; one size keeps its comma."""
    return "(" + ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "") + ")"


@dataclass
class Builder:
    """A program being written; `rng` decides everything, `batch` is the size that other dims often equal."""

    rng: random.Random
    batch: int
    declarations: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ids: list[Value] = field(default_factory=list)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    steps: list[str] = field(default_factory=list)
    mixed: Value | None = None  # what the step that does not keep samples apart gave
    expected: Expected = Expected.APART  # of that step
    counter: int = 0

    # ---- choices

    def chance(self, probability: float) -> bool:
        return self.rng.randrange(100) >= 100 - round(100 * probability)  # 0, hypothesis' simplest number, is a no

    def small(self) -> int:
        """A size for a dim without samples: often the batch size, sometimes 1."""
        return self.rng.choice([self.batch, self.batch, self.batch, 1, 2, 2, 3, 3, 4, 5])

    def axis(self, value: Value, dim: int) -> int:
        """The dim as the program names it, counted from either end."""
        return dim if self.chance(0.6) else dim - value.rank

    # ---- lines

    def name(self, letter: str) -> str:
        self.counter += 1
        return f"{letter}{self.counter}"

    def emit(
        self,
        code: str,
        shape: Sequence[int],
        layout: Layout | None,
        *sources: Value,
        learned: bool = False,
    ) -> Value:
        """Write `v = code` and put v into the pool; v is learned if one of its sources is."""
        if math.prod(shape) > MAX_SIZE:
            raise TooLarge
        value = Value(self.name("v"), tuple(shape), layout, learned or any(s.learned for s in sources))
        self.used.update(s.name for s in sources)
        self.lines.append(f"{value.name} = {code}")
        self.values.append(value)
        return value

    def like(self, code: str, value: Value, *sources: Value, learned: bool = False) -> Value:
        """`emit` with the shape and layout of `value`, which is also a source."""
        return self.emit(code, value.shape, value.layout, value, *sources, learned=learned)

    # ---- things that belong to the module

    def declare(self, letter: str, code: Callable[[str], str] | str) -> str:
        name = self.name(letter)
        self.declarations.append(code(name) if callable(code) else f"self.{name} = {code}")
        return f"self.{name}"

    def module(self, code: str) -> str:
        return self.declare("m", code)

    def buffer(self, code: str) -> str:
        return self.declare("c", lambda name: f'self.register_buffer("{name}", {code})')

    def constant(self, shape: Sequence[int]) -> str:
        return self.buffer(f"torch.empty({tuple_text(shape)})")

    def mask(self, shape: Sequence[int]) -> str:
        bits = [self.rng.randint(0, 1) for _ in range(math.prod(shape))]
        return self.buffer(f"torch.tensor({bits}, dtype=torch.bool).reshape({tuple_text(shape)})")

    def index(self, size: int, count: int) -> str:
        return self.buffer(f"torch.tensor({[self.rng.randrange(size) for _ in range(count)]})")

    def bare(self, shape: Sequence[int]) -> str:
        """A bare parameter of this shape, at times one that is there already."""
        known = [name for name, other in self.parameters.items() if other == tuple(shape)]
        if known and self.chance(0.4):
            return self.rng.choice(known)
        name = self.declare("p", f"nn.Parameter(torch.empty({tuple_text(shape)}))")
        self.parameters[name] = tuple(shape)
        if self.chance(0.1):
            self.declarations.append(f"{name}.requires_grad_(False)")
        return name

    def parameter(self, *shape: int, depth: int = 2) -> str:
        """An expression of this shape over parameters alone: a bare one, or some function of bare ones."""
        if depth == 0 or self.chance(0.55):
            return self.bare(shape)
        recipe = self.rng.choice(RECIPES)
        return recipe(self, shape, depth - 1) or self.bare(shape)


class TooLarge(Exception):
    """The op would make a value too large: the generator takes another one."""


# ---------------------------------------------------------------------------- functions of parameters alone

Recipe = Callable[[Builder, tuple[int, ...], int], str | None]
RECIPES: list[Recipe] = []


def recipe(function: Recipe) -> Recipe:
    RECIPES.append(function)
    return function


@recipe
def sliced(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    if not shape:
        return None
    d = b.rng.randrange(len(shape))
    before, after = b.rng.randint(0, 2), b.rng.randint(0, 2)
    larger = (*shape[:d], before + shape[d] + after, *shape[d + 1 :])
    index = [":"] * d + [f"{before}:{before + shape[d]}"]
    return f"{b.parameter(*larger, depth=depth)}[{', '.join(index)}]"


@recipe
def selected(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    d, count = b.rng.randint(0, len(shape)), b.rng.randint(1, 3)
    larger = (*shape[:d], count, *shape[d:])
    return f"{b.parameter(*larger, depth=depth)}.select({d}, {b.rng.randrange(count)})"


@recipe
def transposed(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    if len(shape) < 2:
        return None
    i, j = b.rng.sample(range(len(shape)), 2)
    swapped = list(shape)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    if len(shape) == 2 and b.chance(0.5):
        return f"{b.parameter(*swapped, depth=depth)}.t()"
    return f"{b.parameter(*swapped, depth=depth)}.transpose({i}, {j})"


@recipe
def concatenated(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    dims = [d for d, size in enumerate(shape) if size > 1]
    if not dims:
        return None
    d = b.rng.choice(dims)
    cut = b.rng.randint(1, shape[d] - 1)
    first = b.parameter(*shape[:d], cut, *shape[d + 1 :], depth=depth)
    rest = (*shape[:d], shape[d] - cut, *shape[d + 1 :])
    if b.chance(0.3):
        return f"F.pad({first}, {tuple_text([0, 0] * (len(shape) - 1 - d) + [0, shape[d] - cut])})"
    return f"torch.cat([{first}, {b.parameter(*rest, depth=depth)}], {d})"


@recipe
def stacked(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    if not shape or shape[0] > 3:
        return None
    rows = [b.parameter(*shape[1:], depth=depth) for _ in range(shape[0])]
    return f"torch.stack([{', '.join(rows)}])"


@recipe
def reshaped(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    if not shape:
        return f"{b.parameter(1, depth=depth)}.squeeze(0)"
    if len(shape) == 1 or b.chance(0.5):
        return f"{b.parameter(math.prod(shape), depth=depth)}.view({tuple_text(shape)})"
    merged = (shape[0] * shape[1], *shape[2:])
    return f"{b.parameter(*merged, depth=depth)}.unflatten(0, {tuple_text(shape[:2])})"


@recipe
def expanded(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    if not shape:
        return None
    d = b.rng.randrange(len(shape))
    narrow = b.parameter(*shape[:d], 1, *shape[d + 1 :], depth=depth)
    return f"{narrow}.expand({tuple_text(shape)})"


@recipe
def normalized(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    p = b.bare(shape)
    dim = b.rng.randrange(len(shape)) if shape else None
    forms = [f"({p} / ({p}.norm() + 0.1))", f"({p} * {p}.abs().mean())"]
    if dim is not None:
        forms += [
            f"F.normalize({p}, dim={dim}, eps=0.1)",
            f"{p}.softmax({dim})",
            f"{p}.cumsum({dim})",
        ]
        forms += [f"({p} - {p}.mean({dim}, keepdim=True))"]
    return b.rng.choice(forms)


@recipe
def elementwise(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    p = b.parameter(*shape, depth=depth)
    form = b.rng.choice(
        [
            "{p}.tanh()",
            "{p}.exp()",
            "({p} + {q})",
            "({p} * {q})",
            "({p} * {c})",
            "torch.where({k}, {p}, {q})",
        ]
    )
    q = b.parameter(*shape, depth=depth) if "{q}" in form else ""
    c = b.constant(shape) if "{c}" in form else ""
    return form.format(p=p, q=q, c=c, k=b.mask(shape) if "{k}" in form else "")


@recipe
def product(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    if len(shape) != 2:
        return None
    inner = b.rng.randint(1, 3)
    return f"({b.parameter(shape[0], inner, depth=depth)} @ {b.parameter(inner, shape[1], depth=depth)})"


@recipe
def looked_up(b: Builder, shape: tuple[int, ...], depth: int) -> str | None:
    if len(shape) != 2:
        return None
    rows = b.rng.randint(2, 4)
    table = b.parameter(rows, shape[1], depth=depth)
    if b.chance(0.5):
        return f"F.embedding({b.index(rows, shape[0])}, {table})"
    return f"{table}[{b.index(rows, shape[0])}]"
