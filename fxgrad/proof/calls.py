"""One call of an ATen op as the proof's rules see it: its arguments, with sample ids in place of tensor values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.fake import FakeTensor
from fxgrad.host.ops import OpOverload, schema
from fxgrad.host.pytree import tree_leaves, tree_map
from fxgrad.proof.origins import any_samples, no_samples
from fxgrad.proof.trials import Trial, symbols_of
from fxgrad.samples.symbols import bends, expression

_KEY = "_fxgrad_origins"
_OF_STORAGE = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
LARGEST = 1 << 24  # the largest tensor of ids that fxgrad materialises, in elements


class Reason(Enum):
    """The kind of reason why a value depends on several samples, which decides the advice."""

    MEET = "samples meet in a call, by its rule"
    NO_RULE = "the proof has no rule for a call"
    LONGEST = "a call may see the length of the longest sample"
    OTHER = "the sentence says it"


@dataclass(frozen=True)
class Blame:
    """The reason why a value depends on several samples, as a sentence, and the node of the user's graph."""

    sentence: str
    where: fx.Node | None = None
    reason: Reason = Reason.OTHER


class Undecided(Exception):
    """Raised when a rule cannot tell which samples an output depends on; the message says why."""

    def __init__(self, why: str, reason: Reason = Reason.OTHER) -> None:
        super().__init__(why)
        self.reason = reason


def name_of(func: Any) -> str:
    """Return an op's name, with its namespace if that is not PyTorch's."""
    space, name = schema(func).name.split("::")
    return name if space in ("aten", "prims") else f"{space}::{name}"


@dataclass
class Known:
    """A value made only of sizes and constants, computed on demand."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    select: int | None = None  # the index among several outputs
    values: dict[int, Tensor] = field(default_factory=dict)  # by the trial's batch size

    def value(self, trial: Trial) -> Tensor:
        def concrete(arg: Any) -> Any:
            if isinstance(arg, Tensor):  # a constant of the graph, on whichever device
                return arg.cpu()
            return arg.value(trial) if isinstance(arg, Known) else trial.number(arg)

        if trial.batch not in self.values:
            args, kwargs = tree_map(concrete, (self.args, self.kwargs))
            kwargs = {name: arg for name, arg in kwargs.items() if name not in ("device", "pin_memory", "layout")}
            result = self.func(*args, **kwargs)
            self.values[trial.batch] = result if self.select is None else result[self.select]
        return self.values[trial.batch]

    @cached_property
    def symbols(self) -> frozenset[sympy.Symbol]:
        """Return the symbols in the arguments, and in the calls that made them."""
        leaves = tree_leaves((self.args, self.kwargs))
        return frozenset().union(*(arg.symbols if isinstance(arg, Known) else symbols_of(arg) for arg in leaves))

    def varies(self, trial: Trial) -> bool:
        """Decide whether the value depends on the batch size."""
        return trial.symbol in self.symbols

    def certain(self, trial: Trial) -> bool:
        """Decide whether the value in this trial determines the value at every batch size.

        Sums of integers and products with constants are linear in B and in the position, so every trial sees them.
        Quotients, remainders, comparisons, bounds and rounding may change their behaviour from some sample on. That
        happens at the product of all constants at the latest, and the trials are larger. Other ops are not certain.
        """
        if self.has_unknown(trial):
            return False
        bends, places, reach, factors = False, True, 1.0, 1.0
        stack: list[Known] = [self] if self.varies(trial) else []
        while stack:
            known = stack.pop()
            name = name_of(known.func)
            if name not in _LINEAR | _BENDING or known.value(trial).dtype in _NARROW:
                return False
            bent = (name in _BENDING and not _is_whole(known)) or known.value(trial).dtype not in _WHOLE
            bends, places = bends or bent, places and (name in _PLACES or not bent)
            leaves = tree_leaves((known.args, known.kwargs))
            varying = [arg for arg in leaves if isinstance(arg, Known) and arg.varies(trial)]
            if (name == "mul" and len(varying) > 1) or (name == "cumsum" and not _is_filled(known.args[0])):
                return False
            stack += varying
            least = 2.0 if name in _SUMS else 1.0  # a sum over many ones is large
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
        """Decide whether the value uses a number that was read from a tensor, for which the trial has a stand-in."""
        return not self.symbols <= trial.values.keys()


_FURTHEST = 64  # below the third trial's number of samples


def _reach(arg: Any, trial: Trial) -> float:
    """Bound the sample index up to which a number may take effect."""
    if isinstance(arg, Tensor):
        values = arg.detach().abs().double().flatten()
        values = torch.cat([values, values.reciprocal()])
        return float(values[values.isfinite()].max().clamp(min=max(1, arg.numel()))) if arg.numel() else 1.0
    if isinstance(arg, torch.SymInt):
        return max(1.0, abs(float(trial.without_samples(arg))))
    if isinstance(arg, bool) or not isinstance(arg, int | float) or not arg:
        return 1.0
    return float(max(abs(arg), 1 / abs(arg)))


NO_END = 1 << 62  # ATen's end of a slice without an end


def _is_no_end(arg: Any) -> bool:
    return isinstance(arg, int) and abs(arg) >= NO_END


def _is_whole(known: Known) -> bool:
    """Decide whether a call is ``x[:]``."""
    return name_of(known.func) == "slice" and known.args[2:3] in ((0,), (None,)) and known.args[3] >= NO_END


def _is_filled(value: Any) -> bool:
    """Decide whether a value is one repeated number, so that its running sums are linear in the position."""
    return isinstance(value, Known) and name_of(value.func) in _FILLED | {"full"}


_OF_FORM = frozenset(  # ops whose integers are only shapes and dimensions
    """zeros ones detach clone alias view _unsafe_view unsqueeze squeeze expand transpose permute t lift_fresh_copy
    lift_fresh zeros_like ones_like new_zeros new_ones repeat""".split()
)
_FILLED = frozenset("ones ones_like new_ones".split())
_SUMS = frozenset("add sub rsub arange cumsum".split()) | _FILLED
_PLACES = frozenset("cat stack flip index index_select gather select slice roll".split())  # ops that compare no values
_WHOLE = (torch.int64, torch.int32)
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16)
_BENDING = frozenset(
    """floor_divide div remainder eq ne lt le gt ge clamp clamp_min clamp_max minimum maximum where logical_and
    logical_or logical_not bitwise_and floor trunc ceil index index_select gather select slice cat stack flip roll
    sort""".split()
)
_LINEAR = _OF_FORM | frozenset("arange full add sub mul neg rsub cumsum _to_copy scalar_tensor full_like".split())


@dataclass(frozen=True)
class Origins:
    """The facts known of one tensor: its sample ids in each trial, and its history."""

    ids: tuple[Tensor, ...]
    traced: bool = False  # a gradient flows through it
    counted: bool = False  # its samples come only from integer and bool inputs of the model
    known: Known | None = None
    blame: Blame | None = None  # the reason why it depends on several samples
    pack: int | None = None  # the packed sequence whose batch sizes or sort order it is
    padded: Mapping[int, Any] = field(default_factory=dict)  # by dimension: the steps of the longest sample
    least: int | None = None  # a lower bound of its integers
    ends: int | None = None  # the packed sequence whose lengths it is
    cast_of: Any = None  # the tensor whose integers it has, after a cast
    renormed: Any = None  # a table: the facts of the indices of the rows renormed last, and the norm

    @cached_property
    def alone(self) -> bool:
        """Decide whether the tensor depends on no sample."""
        with disable_current_modes():
            return not any(bool(ids.any()) for ids in self.ids)


class Facts:
    """The facts known of a graph's values, numbers and packed sequences while it is followed."""

    def __init__(self, trials: Sequence[Trial], *, clips: bool) -> None:
        self.trials, self.clips = tuple(trials), clips
        self.numbers: dict[Any, Origins] = {}  # the symbols of numbers read from data
        self.packs: list[Sequence[Tensor]] = []  # for each packed sequence: the sample of each part

    def of(self, tensor: Tensor) -> Origins:
        """Return the facts known of a value; a real tensor in the graph is a constant."""
        origins: Origins | None = getattr(tensor, _KEY, None)
        if origins is not None:
            return origins
        if isinstance(tensor, FakeTensor):
            unseen = Blame("it is not known where a value comes from")
            return Origins(self.everywhere(any_samples(tensor.dim())), blame=unseen)
        return Origins(self.everywhere(no_samples(tensor.dim())))

    def set(self, tensor: Tensor, origins: Origins) -> None:
        setattr(tensor, _KEY, origins)

    def everywhere(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Return the ids of a value for which they are equal in each trial."""
        return (ids,) * len(self.trials)


class Call:
    """A call of an op, in one trial at a time."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, facts: Facts) -> None:
        self.func, self.args, self.kwargs, self.facts = func, args, kwargs, facts
        self.several = isinstance(result, tuple | list)
        self.outputs = list(result) if self.several else [result]  # nested lists are not looked into
        self.is_op = isinstance(func, OpOverload)  # not cond, scan and the like
        self.name = name_of(func) if self.is_op else str(func)
        self.is_own = self.name.startswith("fxgrad::")
        self.arguments = _arguments(func, args, kwargs) if self.is_op else {**kwargs, "operands": args}
        self.tensors = [  # each tensor among the arguments, with the name of its argument
            (name, leaf)
            for name, argument in self.arguments.items()
            for leaf in tree_leaves(argument)
            if isinstance(leaf, Tensor)
        ]
        self.new_pack: list[Tensor] = []  # for a packed sequence that this call makes: the sample of each part
        self.enter(0)

    def enter(self, place: int) -> None:
        """Begin a trial."""
        self.place, self.trial = place, self.facts.trials[place]
        self.looked_at: set[int] = set()  # `id()` of each tensor whose samples the rule asked for

    def run(self, changed: Mapping[str, Any]) -> Any:
        """Run the op with some arguments changed, wherever and however it would store its result."""
        arguments, declared = {**self.arguments, **changed}, schema(self.func).arguments
        named = {one.name: arguments[one.name] for one in declared if one.kwarg_only and one.name not in _OF_STORAGE}
        return self.func(*(arguments[one.name] for one in declared if not one.kwarg_only), **named)

    def has(self, name: str) -> bool:
        return isinstance(self.arguments.get(name), Tensor)

    def of(self, tensor: Tensor) -> Tensor:
        self.looked_at.add(id(tensor))
        return self.facts.of(tensor).ids[self.place]

    def ids(self, name: str) -> Tensor:
        return self.of(self.arguments[name])

    def all_ids(self) -> list[Tensor]:
        """Return the ids of each tensor among the arguments."""
        return [self.of(tensor) for _, tensor in self.tensors]

    def shape(self, name: str) -> list[int]:
        self._check_seen(self.arguments[name].shape)
        return self.trial.shape(self.arguments[name].shape)

    def get(self, name: str) -> Any:
        """Return the number, or list of numbers, that an argument is in this trial."""
        arg = self.arguments[name]
        self.check_linear(arg)
        return [self.trial.number(item) for item in arg] if isinstance(arg, list | tuple) else self.trial.number(arg)

    def dims(self, name: str, rank: int) -> list[int]:
        """Return an argument's dimensions counted from the left; all dimensions if it names none."""
        named = self.get(name)
        if named is None or (isinstance(named, list) and not named):
            return list(range(rank))
        return [dim % max(rank, 1) for dim in (named if isinstance(named, list) else [named])]

    def full(self, ids: Tensor, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
        """Expand ids to the value's sizes along the dimensions ``dims``."""
        sizes = [shape[dim] if dim in dims else size for dim, size in enumerate(ids.shape)]
        if math.prod(sizes) > LARGEST:
            raise Undecided("it is too large to be followed")
        return ids.expand(sizes)

    def check_linear(self, numbers: Any) -> list[Any]:
        """Refuse numbers that are not ``a B + b``, and numbers known only at run time."""
        raw = list(numbers) if isinstance(numbers, list | tuple) else [numbers]
        if not all(linear_in_batch(number, self.trial) for number in raw):
            raise Undecided("what it does depends on the number of samples in a way that is not linear")
        self._check_seen(raw)
        return raw

    def _symbols(self) -> set[Any]:
        """Return the symbols in the arguments for which the trial has a stand-in."""
        sizes = [size for _, tensor in self.tensors for size in tensor.shape]
        return {symbol for number in (*sizes, *tree_leaves(self.arguments)) for symbol in self.trial.unknown(number)}

    def _check_seen(self, numbers: Sequence[Any]) -> None:
        """Refuse numbers read from a tensor, for which the trial has only a stand-in."""
        if any(self.trial.unknown(number) - self.facts.numbers.keys() for number in numbers):
            raise Undecided("what it does depends on a number that is known at run time")

    def check_numbers(self, numbers: Any, dim: int) -> None:
        """Refuse numbers along a dimension of the first operand that may take effect only at a larger batch size."""
        raw = self.arguments["self"].shape[dim]
        if not self.depends(raw):
            return  # its size does not grow with the batch
        size = self.trial.number(raw)
        for number in self.check_linear(numbers):
            fixed = self.trial.without_samples(number)
            if _is_no_end(fixed) and self.name.startswith("slice"):
                continue
            if self.trial.last and size <= abs(fixed) and size > 1:
                raise Undecided(f"what it does with {abs(fixed)} rows or more is not known")

    def check_sizes(self) -> None:
        """Refuse sizes that are not ``a B + b``, and sizes in which b outweighs ``a B``."""
        outputs = [out for out in self.outputs if isinstance(out, Tensor)]
        for tensor in (*(tensor for _, tensor in self.tensors), *outputs):
            for size in filter(self.depends, tensor.shape):
                if bends(expression(size), self.trial.symbol):
                    raise Undecided("its size depends on the number of samples in a way that is not linear")
                fixed = abs(self.trial.without_samples(size))
                if self.trial.last and self.trial.number(size) <= 2 * fixed:
                    raise Undecided(f"what it does with {fixed} rows or more is not known")

    def depends(self, size: Any) -> bool:
        """Decide whether a size depends on the batch size."""
        return isinstance(size, torch.SymInt) and self.trial.symbol in symbols_of(size)

    def out_rank(self, i: int = 0) -> int:
        return int(self.outputs[i].dim())

    def out_shape(self) -> list[int]:
        shape = self.outputs[0].shape
        sizes = [size for size in shape if self.trial.unknown(size)]
        in_arguments = self._symbols() if sizes else set()  # other symbols are new, with the samples of the operands
        self._check_seen([size for size in sizes if self.trial.unknown(size) & in_arguments])
        return self.trial.shape(shape)

    def ranked(self, ids: Tensor) -> Tensor:
        """Add leading dimensions to ids up to the rank of the first output."""
        return ids.reshape([1] * (self.out_rank() - ids.dim()) + list(ids.shape))


@lru_cache
def _linear(expr: sympy.Expr, batch: sympy.Symbol) -> bool:
    return not bends(expr, batch) and bool(expr.is_polynomial(batch)) and sympy.degree(expr, batch) <= 1


def linear_in_batch(number: Any, trial: Trial) -> bool:
    """Decide whether a number is ``a B + b``, without a quotient, remainder, minimum or comparison of B."""
    if trial.symbol not in symbols_of(number):
        return True
    return isinstance(number, torch.SymInt) and _linear(number.node.expr, trial.symbol)


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    """Return an op's arguments by name, with defaults filled in."""
    declared = schema(func).arguments
    given = {**dict(zip((argument.name for argument in declared), args, strict=False)), **kwargs}
    return {argument.name: given.get(argument.name, argument.default_value) for argument in declared}
