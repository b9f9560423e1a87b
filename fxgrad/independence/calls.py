"""One call of an ATen op as the rules of this package see it: its arguments, with ids in the place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fxgrad.independence.origins import any_samples, compact
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
        Quotients, remainders, comparisons, limits and what rounds may do something else from some sample on, at the
        product of all constants at the latest; trials go that far. Of anything else nothing is known.
        """
        if self.has_unknown(trial):
            return False
        bends, places, reach, factors = False, True, 1.0, 1.0
        stack: list[Known] = [self] if self.varies(trial) else []
        while stack:
            one = stack.pop()
            name = _name(one.func)
            if name not in _LINEAR | _BENDING or one.value(trial).dtype in _NARROW:
                return False
            bent = (name in _BENDING and not _is_whole(one)) or one.value(trial).dtype not in _WHOLE
            bends, places = bends or bent, places and (name in _PLACES or not bent)
            leaves = torch.utils._pytree.tree_leaves((one.args, one.kwargs))
            varying = [arg for arg in leaves if isinstance(arg, Known) and arg.varies(trial)]
            if name == "mul" and len(varying) > 1:
                return False
            stack += varying
            least = 2.0 if name in _SUMS else 1.0  # a sum of many ones is large
            reach *= least if name in _FILLED or len(varying) > 1 else 1.0
            for arg in leaves:
                if isinstance(arg, Known):
                    reach *= 1.0 if arg.varies(trial) else max(least, _reach(arg.value(trial), trial))
                elif not linear_in_batch(arg, trial):
                    return False
                elif name == "mul" and isinstance(arg, int):
                    factors *= _reach(arg, trial)
                elif name not in _OF_FORM and not (name == "slice" and _is_no_end(arg)):
                    bends = bends or isinstance(arg, float)
                    reach *= max(least if type(arg) is int and arg else 1.0, _reach(arg, trial))
        return not bends or reach * (1.0 if places else factors) < _FURTHEST

    def has_unknown(self, trial: Trial) -> bool:
        """Whether a number in it was read from a constant: the trial has a stand-in for that."""
        leaves = torch.utils._pytree.tree_leaves((self.args, self.kwargs))
        return any(arg.has_unknown(trial) if isinstance(arg, Known) else bool(trial.unknown(arg)) for arg in leaves)


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
        return max(1.0, abs(float(trial.without_samples(arg))))
    if isinstance(arg, bool) or not isinstance(arg, int | float) or not arg:
        return 1.0
    return float(max(abs(arg), 1 / abs(arg)))


NO_END = 1 << 62  # what ATen says for a slice without an end


def _is_no_end(arg: Any) -> bool:
    return isinstance(arg, int) and abs(arg) >= NO_END


def _is_whole(one: Known) -> bool:
    """``x[:]``"""
    return _name(one.func) == "slice" and one.args[2:3] in ((0,), (None,)) and one.args[3] >= NO_END


def _name(func: Any) -> str:
    return str(func._schema.name).split("::")[1]


_OF_FORM = frozenset(  # whose numbers are shapes and dimensions
    """zeros ones detach clone alias view _unsafe_view unsqueeze squeeze expand transpose permute t lift_fresh_copy
    lift_fresh zeros_like ones_like new_zeros new_ones repeat""".split()
)
_FILLED = frozenset("ones ones_like new_ones".split())
_SUMS = frozenset("add sub rsub arange".split()) | _FILLED
_PLACES = frozenset("cat stack flip index index_select gather select slice roll".split())  # which compare no values
_WHOLE = (torch.int64, torch.int32)
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
    renormed: Any = None  # a table: what is known of the indices of the rows scaled last, and by which norm

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
    followed: Collection[Any] = ()  # symbols read from data: which samples are in them is followed elsewhere
    looked_at: set[int] = field(default_factory=set)  # the ids of tensors whose samples the rule asked for

    @property
    def name(self) -> str:
        return str(self.func._schema.name).split("::")[1]

    def has(self, name: str) -> bool:
        return isinstance(self.arguments.get(name), Tensor)

    def of(self, tensor: Tensor) -> Tensor:
        self.looked_at.add(id(tensor))
        return self.origins(tensor).ids[self.place]

    def ids(self, name: str) -> Tensor:
        return self.of(self.arguments[name])

    def shape(self, name: str) -> list[int]:
        self._check_seen(self.arguments[name].shape)
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
        self.check_linear(arg)
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
        """Refuse numbers that depend on B in another way than ``a B + b``, and those that nobody knows."""
        raw = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
        if not all(linear_in_batch(number, self.trial) for number in raw):
            raise Undecided("what it does depends on the number of samples in a way that is not linear")
        self._check_seen(raw)
        return raw

    def _symbols(self) -> set[Any]:
        """The symbols in its arguments for which a trial has a stand-in."""
        leaves = torch.utils._pytree.tree_leaves(dict(self.arguments))
        numbers = [number for leaf in leaves for number in (leaf.shape if isinstance(leaf, Tensor) else [leaf])]
        return {symbol for number in numbers for symbol in self.trial.unknown(number)}

    def _check_seen(self, numbers: Sequence[Any]) -> None:
        """Refuse numbers that were read from a constant: a trial has a stand-in for them."""
        if any(self.trial.unknown(number) - set(self.followed) for number in numbers):
            raise Undecided("what it does depends on a number that is known at run time")

    def check_numbers(self, numbers: Any, along: str, dim: int) -> None:
        """Refuse what may do nothing at this many samples and something at more, along a dimension of an argument."""
        raw = self.arguments[along].shape[dim]
        if not self.depends(raw):
            return  # no more samples will make it longer
        size = self.trial.number(raw)
        for number in self.check_linear(numbers):
            fixed = self.trial.without_samples(number)
            if _is_no_end(fixed) and self.name.startswith("slice"):
                continue
            if self.trial.last and size <= abs(fixed) and size > 1:
                raise Undecided(f"what it does with {abs(fixed)} rows or more is not known")

    def check_sizes(self) -> None:
        """Refuse sizes of which more samples make something else than ``a B + b``, or that are mostly b."""
        outputs = [out for out in self.outputs if isinstance(out, Tensor)]
        for tensor in (*(tensor for _, tensor in self.tensors()), *outputs):
            for size in filter(self.depends, tensor.shape):
                if _bends(size, self.trial):
                    raise Undecided("its size depends on the number of samples in a way that is not linear")
                fixed = abs(self.trial.without_samples(size))
                if self.trial.last and self.trial.number(size) <= 2 * fixed:
                    raise Undecided(f"what it does with {fixed} rows or more is not known")

    def depends(self, size: Any) -> bool:
        """Whether a size depends on the number of samples."""
        return isinstance(size, torch.SymInt) and _has_batch(size, self.trial)

    def out_rank(self, i: int = 0) -> int:
        return int(self.outputs[i].dim())

    def out_shape(self, i: int = 0) -> list[int]:
        sizes = [size for size in self.outputs[i].shape if self.trial.unknown(size)]
        given = self._symbols() if sizes else set()  # others are the call's own: their samples are its operands'
        self._check_seen([size for size in sizes if self.trial.unknown(size) & given])
        return self.trial.shape(self.outputs[i].shape)

    def ranked(self, ids: Tensor, i: int = 0) -> Tensor:
        """Ids with as many dimensions as an output: more of them on the left."""
        rank = self.out_rank(i)
        return ids.reshape([1] * (rank - ids.dim()) + list(ids.shape)) if ids.dim() < rank else ids


def _bends(size: Any, trial: Trial) -> bool:
    """Whether a size is a quotient, a remainder, a minimum .. of B."""
    import sympy

    return any(trial.symbol in one.free_symbols for one in size.node.expr.atoms(sympy.Function))


def linear_in_batch(number: Any, trial: Trial) -> bool:
    """Whether a number is ``a B + b``: no quotient, remainder, minimum or comparison of B."""
    import sympy

    if not isinstance(number, torch.SymInt):
        return not _has_batch(number, trial)
    expr = number.node.expr
    batch = trial.symbol
    if batch not in expr.free_symbols:
        return True
    return not _bends(number, trial) and bool(expr.is_polynomial(batch)) and sympy.degree(expr, batch) <= 1


def settled(ids: Tensor, shape: Sequence[int], rank: int) -> Tensor:
    """Ids as they are kept: no larger than they have to be, of the value's rank."""
    if ids.dim() != rank:
        return any_samples(rank)
    fits = all(size in (1, own) for size, own in zip(ids.shape, shape, strict=True))
    return compact(ids).contiguous() if fits else any_samples(rank)
