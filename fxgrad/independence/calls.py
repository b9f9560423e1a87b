"""One call of an ATen op as the rules of this package see it: its arguments, with ids in the place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxgrad.independence.origins import any_samples, compact, no_samples
from fxgrad.independence.trials import Trial

LARGEST = 1 << 24  # ids of more elements than that are not made


class Undecided(Exception):
    """Where the samples go is not known; the text says why."""


@dataclass
class Known:
    """A value made of sizes and numbers alone, computed where it is asked for."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    select: int | None = None  # of several outputs
    values: dict[int, Tensor] = field(default_factory=dict)  # by the trial's batch

    def value(self, trial: Trial) -> Tensor:
        if trial.batch not in self.values:
            args, kwargs = torch.utils._pytree.tree_map(lambda arg: _concrete(arg, trial), (self.args, self.kwargs))
            kwargs = {name: arg for name, arg in kwargs.items() if name not in ("device", "pin_memory", "layout")}
            found = self.func(*args, **kwargs)
            self.values[trial.batch] = found if self.select is None else found[self.select]
        return self.values[trial.batch]

    def varies(self, trial: Trial) -> bool:
        """Whether it depends on the number of samples."""
        for arg in torch.utils._pytree.tree_leaves((self.args, self.kwargs)):
            if isinstance(arg, Known) and arg.varies(trial):
                return True
            if _has_batch(arg, trial):
                return True
        return False

    def certain(self, trial: Trial) -> bool:
        """Whether what it is at these samples says what it is at any other number of them.

        Sums of whole numbers and products with constants are linear in B and in the position, so they hide nothing.
        Quotients, remainders, comparisons and limits may do something else from some sample on, at the product of
        all constants at the latest; trials go that far. Of anything else nothing is known.
        """
        bends, filled, reach, factors = False, False, 1.0, 1.0
        stack: list[Known] = [self] if self.varies(trial) else []
        while stack:
            one = stack.pop()
            name = _name(one.func)
            if name not in _LINEAR | _BENDING or one.value(trial).dtype in _NARROW:
                return False
            bends = bends or (name in _BENDING and not _is_whole(one))
            filled = filled or name in _FILLED
            leaves = torch.utils._pytree.tree_leaves((one.args, one.kwargs))
            varying = [arg for arg in leaves if isinstance(arg, Known) and arg.varies(trial)]
            if name == "mul" and len(varying) > 1:
                return False
            stack += varying
            for arg in leaves:
                if isinstance(arg, Known):
                    reach *= 1.0 if arg.varies(trial) else _reach(arg.value(trial), trial)
                elif not linear_in_batch(arg, trial):
                    return False
                elif name == "mul" and isinstance(arg, int):
                    factors *= _reach(arg, trial)
                elif name not in _OF_FORM:
                    bends = bends or isinstance(arg, float)
                    reach *= _reach(arg, trial)
        return not bends or reach * (factors if filled else 1.0) < _FURTHEST


def _has_batch(arg: Any, trial: Trial) -> bool:
    return isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool) and trial.symbol in arg.node.expr.free_symbols


_FURTHEST = 64  # below the third trial's number of samples


def _reach(arg: Any, trial: Trial) -> float:
    """How far along the samples a number may have its effect."""
    if isinstance(arg, Tensor):
        values = arg.detach().abs().double().flatten()
        values = torch.cat([values, values.reciprocal()])
        return float(values[values.isfinite()].max().clamp(min=max(1, arg.numel()))) if arg.numel() else 1.0
    if isinstance(arg, torch.SymInt):
        arg = arg.node.expr.subs({trial.symbol: 0})
        return max(1.0, abs(float(arg))) if arg.is_number else 1.0
    if isinstance(arg, bool) or not isinstance(arg, int | float) or not arg or abs(arg) >= NO_END:
        return 1.0
    return max(abs(arg), 1 / abs(arg))


NO_END = 1 << 62  # what ATen says for a slice without an end


def _is_whole(one: Known) -> bool:
    """``x[:]``"""
    return _name(one.func) == "slice" and one.args[2:3] in ((0,), (None,)) and one.args[3] >= NO_END


def _name(func: Any) -> str:
    return str(func._schema.name).split("::")[1]


_OF_FORM = frozenset(  # whose numbers are shapes and dimensions
    """zeros ones detach clone alias view _unsafe_view unsqueeze squeeze expand transpose permute t lift_fresh_copy
    lift_fresh zeros_like ones_like new_zeros new_ones repeat""".split()
)
_FILLED = frozenset("ones ones_like new_ones full full_like new_full".split())
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16)
_BENDING = frozenset(
    """floor_divide div remainder eq ne lt le gt ge clamp clamp_min clamp_max minimum maximum where logical_and
    logical_or logical_not bitwise_and floor trunc ceil index index_select gather select slice cat stack flip roll
    sort""".split()
)
_LINEAR = _OF_FORM | frozenset("arange full add sub mul neg rsub _to_copy scalar_tensor full_like".split())


def _concrete(arg: Any, trial: Trial) -> Any:
    if isinstance(arg, Known):
        return arg.value(trial)
    return trial.number(arg)


@dataclass(frozen=True)
class Origins:
    """What is known of one tensor: its ids in each trial, and how it came about."""

    ids: tuple[Tensor, ...]
    traced: bool = False  # a gradient flows through it
    counted: bool = False  # nothing but integer and bool inputs of the model holds samples in it
    known: Known | None = None
    blame: str = ""  # how samples met in it
    where: Any = None  # the node of the user's graph in which they did
    pack: int | None = None  # the packed sequences that it says the sizes or the order of
    padded: Mapping[int, Any] = field(default_factory=dict)  # dimensions with the steps of the longest sample
    least: int | None = None  # integers: none is smaller
    ends: int | None = None  # it is how many steps each sample of this packed sequence has
    cast_of: Any = None  # the tensor that it has the whole numbers of
    renormed: Any = None  # a table: what is known of the indices of the rows that were scaled

    @property
    def alone(self) -> bool:
        """Whether no samples are in it."""
        with _disable_current_modes():
            return not any(bool(ids.any()) for ids in self.ids)


@dataclass
class Call:
    """A call in one trial."""

    func: Any
    arguments: Mapping[str, Any]  # by name, defaults filled in
    outputs: Sequence[Any]
    trial: Trial
    place: int  # of the trial among all
    origins: Callable[[Any], Origins]
    clips: bool
    packs: Sequence[Sequence[Tensor]] = ()  # of each packed sequence so far: the sample of each of its parts
    new_pack: list[Tensor] = field(default_factory=list)  # of the one that the call makes
    read: set[int] = field(default_factory=set)  # the tensors that the rule looked at, by id

    @property
    def name(self) -> str:
        return str(self.func._schema.name).split("::")[1]

    def has(self, name: str) -> bool:
        return isinstance(self.arguments.get(name), Tensor)

    def of(self, tensor: Tensor) -> Tensor:
        self.read.add(id(tensor))
        return self.origins(tensor).ids[self.place]

    def check_read(self) -> None:
        """Refuse an operand with samples that the rule did not look at."""
        for name, tensor in self.tensors():
            if id(tensor) not in self.read and bool(self.origins(tensor).ids[self.place].any()):
                raise Undecided(f"nobody has said what it does with {name}")

    def ids(self, name: str) -> Tensor:
        return self.of(self.arguments[name])

    def shape(self, name: str) -> list[int]:
        return self.trial.shape(self.arguments[name].shape)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor among the arguments, with its argument's name."""
        found = []
        for name, arg in self.arguments.items():
            if isinstance(arg, Tensor):
                found.append((name, arg))
            elif isinstance(arg, list | tuple):
                found.extend((name, item) for item in arg if isinstance(item, Tensor))
        return found

    def get(self, name: str) -> Any:
        """A number, or a list of them, as it is in this trial."""
        arg = self.arguments[name]
        return [self.trial.number(item) for item in arg] if isinstance(arg, list | tuple) else self.trial.number(arg)

    def dims(self, name: str, rank: int) -> list[int]:
        """Dimensions from the left; all of them where none is named."""
        given = self.get(name)
        if given is None or (isinstance(given, list) and not given):
            return list(range(rank))
        return [dim % max(rank, 1) for dim in (given if isinstance(given, list) else [given])]

    def full(self, ids: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
        """Ids with these dimensions at the value's own size."""
        sizes = [shape[dim] if dim in dims else size for dim, size in enumerate(ids.shape)]
        count = 1
        for size in sizes:
            count *= size
        if count > LARGEST:
            raise Undecided("it is too large to be followed")
        return ids.expand(sizes)

    def check_linear(self, numbers: Any) -> list[Any]:
        """Refuse numbers that depend on B in another way than ``a B + b``."""
        raw = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
        if not all(map(self.trial.knows, raw)):
            raise Undecided("what it does depends on a number that is read from data")
        if not all(linear_in_batch(number, self.trial) for number in raw):
            raise Undecided("what it does depends on the number of samples in a way that is not linear")
        return raw

    def check_numbers(self, numbers: Any, along: str, dim: int) -> None:
        """Refuse what may do nothing at this many samples and something at more, along a dimension of an argument."""
        raw = self.arguments[along].shape[dim]
        if not isinstance(raw, torch.SymInt) or self.trial.symbol not in raw.node.expr.free_symbols:
            return  # no more samples will make it longer
        size = self.trial.number(raw)
        for number in self.check_linear(numbers):
            plain = self.trial.number(number)
            fixed = isinstance(number, int) and not isinstance(number, bool)
            if self.trial.last and fixed and size <= abs(plain) < NO_END and size > 1:
                raise Undecided(f"what it does with {plain} rows or more is not known")

    def out_rank(self, i: int = 0) -> int:
        return int(self.outputs[i].dim())

    def out_shape(self, i: int = 0) -> list[int]:
        return self.trial.shape(self.outputs[i].shape)

    def ranked(self, ids: Tensor, i: int = 0) -> Tensor:
        """Ids with as many dimensions as an output: more of them on the left."""
        rank = self.out_rank(i)
        return ids.reshape([1] * (rank - ids.dim()) + list(ids.shape)) if ids.dim() < rank else ids


def linear_in_batch(number: Any, trial: Trial) -> bool:
    """Whether a number is ``a B + b``: no quotient, remainder, minimum or comparison of B."""
    import sympy

    if not isinstance(number, torch.SymInt):
        return not _has_batch(number, trial)
    expr = number.node.expr
    batch = trial.symbol
    if batch not in expr.free_symbols:
        return True
    inside = any(batch in one.free_symbols for one in expr.atoms(sympy.Function))
    return not inside and bool(expr.is_polynomial(batch)) and sympy.degree(expr, batch) <= 1


def settled(ids: Tensor, shape: Sequence[int], rank: int) -> Tensor:
    """Ids as they are kept: no larger than they have to be, of the value's rank."""
    if 0 in shape:
        return no_samples(rank)
    if ids.dim() != rank:
        return any_samples(rank)
    fits = all(size in (1, own) for size, own in zip(ids.shape, shape, strict=True))
    return compact(ids).contiguous() if fits else any_samples(rank)
