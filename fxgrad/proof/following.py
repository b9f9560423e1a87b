"""The observer that follows, op by op in a functionalized graph, the samples that each value depends on."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.fake import FakeTensor, FakeTensorMode
from fxgrad.host.ops import OpOverload, schema
from fxgrad.host.pytree import tree_leaves, tree_map
from fxgrad.proof import rules
from fxgrad.proof.calls import Call, Known, Origins, Undecided, settled
from fxgrad.proof.longest.steps import Padded, Seen, Steps, held
from fxgrad.proof.origins import MANY, SUM, any_samples, folded, joined, no_samples
from fxgrad.proof.padding import Padding, numbers_of
from fxgrad.proof.rules.lookups import form
from fxgrad.proof.trials import Trial

_KEY = "_fxgrad_origins"


MEET = " lets samples influence each other"
LONGEST = " may see how long the longest sample is"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def watched(mode: FakeTensorMode, watcher: Callable[[Any, Any, Any, Any], None]) -> Iterator[None]:
    """Call a watcher with every ATen op on fake tensors and its result.

    A separate TorchDispatchMode would run above functionalization, where ops still write to values. PyTorch also looks
    up the rules of cond, scan and similar ops by the exact class of a mode.
    """
    dispatch, inside = mode.__torch_dispatch__, False

    def watch(_: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal inside
        if inside:  # an op within another op is not reported
            return dispatch(func, types, args, kwargs)
        inside = True
        try:
            result = dispatch(func, types, args, kwargs)
        finally:
            inside = False
        watcher(func, args, kwargs or {}, result)
        return result

    mode.__torch_dispatch__ = MethodType(watch, mode)  # type: ignore[method-assign]
    try:
        with mode:
            yield
    finally:
        del mode.__torch_dispatch__


class Follow:
    """The observer of every ATen op below functionalization, where no op writes to a tensor.

    Numbers read from a tensor are symbols there.
    """

    def __init__(self, trials: Sequence[Trial], *, clips: bool) -> None:
        self.trials, self.clips = tuple(trials), clips
        self.numbers: dict[Any, Origins] = {}  # the symbols of numbers read from data
        self.node: Any = None  # the current node of the user's graph
        self.padding = Padding()  # those of the symbols that are lengths of packed data
        self.packs: list[Sequence[Tensor]] = []  # for each packed sequence: the sample of each part

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the facts of one op's results."""
        several = isinstance(result, tuple | list)
        outputs = list(result) if several else [result]  # nested lists are not looked into
        if any(isinstance(out, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) for out in outputs):
            with disable_current_modes():  # ids are plain tensors
                self._record(func, args, kwargs, outputs, several)

    def of(self, tensor: Tensor) -> Origins:
        """Return the facts known of a value; a real tensor in the graph is a constant."""
        origins = getattr(tensor, _KEY, None)
        if origins is None:
            unseen = isinstance(tensor, FakeTensor)
            ids = tuple((any_samples if unseen else no_samples)(tensor.dim()) for _ in self.trials)
            origins = Origins(ids, blame="it is not known where a value comes from" if unseen else "")
        return origins

    def set(self, tensor: Tensor, origins: Origins) -> None:
        setattr(tensor, _KEY, origins)

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[Any], several: bool) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        operands = [self.of(tensor) for tensor in tensors]
        from_data = self._numbers(func, args, kwargs, outputs)
        source = [*operands, *from_data]
        padded = self._padded(func, args, kwargs, outputs)
        if padded is not None and all(part.alone for part in source) and not _reads_memory(func):
            known = self._known(func, args, kwargs, tensors)
            return self._constants(outputs, known, operands, several, padded)
        ids_of_trials, blame = self._ids(func, args, kwargs, outputs, seen=padded is None)
        is_own = _is_own(func)
        for i, out in enumerate(outputs):
            if isinstance(out, Tensor):
                ids = [self._with_numbers(func, ids[i], from_data, place) for place, ids in enumerate(ids_of_trials)]
                origins = self._origins(func, out, ids, source, blame)
                origins = replace(origins, padded=padded[i] if padded else {})
                self.set(out, origins if is_own else self._with_bounds(func, args, kwargs, operands, origins, out))
            self._note_symbols(out, operands, extent=is_own)
        if is_own:
            self._packed(func, args, kwargs, outputs)
        return None

    def _padded(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> list[Padded] | None:
        """Return the padded dimensions of each output; None if the op may see the longest length."""
        if not self.padding or not isinstance(func, OpOverload):
            return [{} for _ in outputs]
        arguments = _bound(func, args, kwargs)
        call = Call(func, arguments, outputs, self.trials[0], 0, self.of, self.clips, self.packs)
        try:
            return self.padding.after(call, rules.of(func))
        except Seen:
            return None

    def _with_bounds(
        self, func: Any, args: Any, kwargs: Any, operands: list[Origins], origins: Origins, out: Any
    ) -> Origins:
        """Add the known bounds of integers, and the renormed rows of embedding tables."""
        if not isinstance(func, OpOverload):
            return origins
        name = schema(func).name.removeprefix("aten::")
        if name == "embedding_renorm":
            return replace(origins, renormed=_renormed(_bound(func, args, kwargs), operands))
        copies = name in ("detach", "alias", "clone", "view", "_unsafe_view")
        if operands and operands[0].renormed is not None and copies:
            origins = replace(origins, renormed=operands[0].renormed)
        return numbers_of(name, _bound(func, args, kwargs), self.of, out, origins)

    def _packed(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """Record the lengths and packed sequences that fxgrad's operators on packed data define."""
        arguments = _bound(func, args, kwargs)
        if func is torch.ops.fxgrad.pack.default:
            self._are_lengths(arguments["lengths"], len(self.packs) - 1)  # otherwise packing raises
            (length,) = _symbols(outputs[1].shape)
            self.padding.enter(length, len(self.packs) - 1)
            for out in outputs[1:]:
                self.set(out, replace(self.of(out), pack=len(self.packs) - 1))
        elif func is torch.ops.fxgrad.packed_lengths.default:
            self._are_lengths(outputs[0], self.of(arguments["batch_sizes"]).pack)
        elif func is torch.ops.fxgrad.pad_packed_to_longest.default:
            (length,) = _symbols(outputs[0].shape[:1])
            self.padding.enter(length, self.of(arguments["batch_sizes"]).pack)
            value = float(arguments["value"])
            steps = Steps(length, number=value, finite=math.isfinite(value))
            self.set(outputs[0], replace(self.of(outputs[0]), padded={0: held(steps, outputs[0].dtype)}))

    def _are_lengths(self, tensor: Any, pack: int | None) -> None:
        """Record that a value, and the tensors it was cast from, are the lengths of a packed sequence."""
        while tensor is not None and not tensor.dtype.is_floating_point:
            origins = self.of(tensor)
            self.set(tensor, replace(origins, least=1, ends=pack))
            tensor = origins.cast_of

    def _constants(
        self, outputs: list[Any], known: Known | None, operands: list[Origins], several: bool, padded: list[Padded]
    ) -> None:
        """Record outputs that depend on no sample; their values are known if those of the operands are."""
        traced = torch.is_grad_enabled() and any(one.traced for one in operands)
        for i, out in enumerate(outputs):
            if isinstance(out, Tensor):
                ids = tuple(no_samples(out.dim()) for _ in self.trials)
                known_output = replace(known, select=i, values={}) if known and several else known
                flows = traced and out.is_floating_point()
                self.set(out, Origins(ids, flows, counted=True, known=known_output, padded=padded[i]))

    def _known(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Known | None:
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if schema(func).name in (
            "aten::empty",
            "aten::empty_like",
            "aten::new_empty",
            "aten::empty_strided",
        ):
            return None
        values = {id(tensor): self._value(tensor) for tensor in tensors}
        if any(value is None for value in values.values()):
            return None

        def stand_in(arg: Any) -> Any:
            return values[id(arg)] if isinstance(arg, Tensor) else arg

        known_args, known_kwargs = tree_map(stand_in, (tuple(args), dict(kwargs)))
        return Known(func, known_args, known_kwargs)

    def _value(self, tensor: Tensor) -> Any:
        known = self.of(tensor).known
        if known is not None:
            return known
        return tensor if type(tensor) is Tensor and tensor.device.type != "meta" else None

    def _numbers(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> list[Origins]:
        """Return the origins of numbers read from data, in the arguments and in the sizes of the outputs."""
        if not self.numbers or _is_own(func):  # the rules of fxgrad's operators treat sizes themselves
            return []
        leaves = tree_leaves((args, kwargs))
        sizes = _symbols(size for out in outputs if isinstance(out, Tensor) for size in out.shape)
        if self.padding and isinstance(func, OpOverload):
            leaves = self.padding.read(schema(func).name.removeprefix("aten::"), _bound(func, args, kwargs))
            sizes = {symbol for symbol in sizes if symbol not in self.padding}
        return [self.numbers[one] for one in _symbols(leaves) | sizes if one in self.numbers]

    def _with_numbers(self, func: Any, ids: Tensor, numbers: list[Origins], place: int) -> Tensor:
        parts = [number.ids[place] for number in numbers if bool(number.ids[place].any())]
        if not parts:
            return ids
        both = joined(ids, *parts)
        counts = all(number.counted for number in numbers) and not self.clips
        if counts and func in (torch.ops.aten.div.Tensor, torch.ops.aten.true_divide.Tensor):
            return torch.where(ids == SUM, SUM, both)  # Note [Token counts]
        return both

    def note_packed(self, data: Tensor, sizes: Tensor, pack: int) -> None:
        """Record an input that is a packed sequence; its row and step counts depend on all its samples."""
        whole = Origins(tuple(any_samples(0) for _ in self.trials))
        rows, steps = _symbols(data.shape[:1]), _symbols(sizes.shape[:1])
        self.numbers |= dict.fromkeys(rows | steps, whole)
        self.padding.rows |= rows
        for length in steps:
            self.padding.enter(length, pack)

    def _note_symbols(self, out: Any, operands: list[Origins], *, extent: bool) -> None:
        """Give each new symbol in a value the samples of the value's operands.

        If the symbol is an ``extent``, such as a count of packed rows, a value of that size need not depend on them.
        """
        sizes = out.shape if isinstance(out, Tensor) else [out]
        for size in sizes:
            if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
                continue
            for symbol in size.node.expr.free_symbols:
                if symbol not in self.numbers and symbol not in self.trials[0].values:
                    whole = [
                        joined(
                            no_samples(0),
                            *(folded(one.ids[p], range(one.ids[p].dim())).reshape([]) for one in operands),
                        )
                        for p in range(len(self.trials))
                    ]
                    counted = all(one.counted or one.alone for one in operands)
                    self.numbers[symbol] = Origins(tuple(whole), counted=counted)
                    if extent:
                        self.padding.rows.add(symbol)

    def _ids(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], *, seen: bool
    ) -> tuple[list[list[Tensor]], str]:
        """Return the ids of each output in each trial; where they are unknown, MANY and the reason."""
        blank = [[any_samples(out.dim() if isinstance(out, Tensor) else 0) for out in outputs] for _ in self.trials]
        if not isinstance(func, OpOverload):
            return blank, f"nobody has said how {func} treats samples"
        name = schema(func).name.removeprefix("aten::")
        if schema(func).is_mutable:
            return blank, f"{name} writes where it cannot be followed"
        rule = rules.of(func)
        if rule is None:
            return blank, f"nobody has said how {name} treats samples"
        if seen:
            return blank, f"{name}{LONGEST}"
        arguments = _bound(func, args, kwargs)
        ids_of_trials = []
        new: list[Tensor] = []
        for place, trial in enumerate(self.trials):
            call = Call(
                func, arguments, outputs, trial, place, self.of, self.clips, self.packs, new, self.numbers.keys()
            )
            try:
                ids = rules.applied(rule, call)
            except Undecided as reason:
                return blank, f"{name}: {reason}"
            except (
                RuntimeError,
                ValueError,
                IndexError,
                TypeError,
                KeyError,
                StopIteration,
            ) as error:
                log.debug("the rule of %s failed: %s", name, error)
                return blank, f"{name} is used in a way that is not known"
            several = ids if isinstance(ids, list) else [ids]
            ids_of_trials.append(
                [
                    (no_samples(out.dim()) if _is_empty(out) else settled(result, trial.shape(out.shape), out.dim()))
                    if isinstance(out, Tensor)
                    else result
                    for result, out in zip(several, outputs, strict=True)
                ]
            )
        if new:
            self.packs.append(new)
        return ids_of_trials, name + MEET

    def _origins(self, func: Any, out: Tensor, ids: list[Tensor], sources: list[Origins], blame: str) -> Origins:
        met = any(bool((one == MANY).any()) for one in ids)
        before = next((one for one in sources if one.blame), None)
        traced = torch.is_grad_enabled() and out.is_floating_point() and any(one.traced for one in sources)
        if isinstance(func, OpOverload) and schema(func).name == "aten::detach":
            traced = False
        return Origins(
            tuple(ids),
            traced,
            all(one.counted or one.alone for one in sources) and not blame.endswith(LONGEST),
            None,
            (before.blame if before else blame) if met else "",
            (before.where if before else self.node) if met else None,
        )


def _is_empty(out: Tensor) -> bool:
    """Decide whether a value has no elements at any batch size."""
    return any(type(size) is int and size == 0 for size in out.shape)


def _reads_memory(func: Any) -> bool:
    """Decide whether an op may read memory outside its operand, where other samples may be."""
    return isinstance(func, OpOverload) and schema(func).name.startswith("aten::as_strided")


def _renormed(arguments: Mapping[str, Any], operands: Sequence[Origins]) -> tuple[Origins, Any, Any] | None:
    """Return the origins of the indices whose rows are renormed, the norm, and the table's shape.

    Return None if the rows were renormed by another norm before.
    """
    table, indices = operands[0], operands[1]
    norm = arguments["max_norm"], arguments["norm_type"]
    if not all(type(number) in (int, float) for number in norm):
        return None
    known = (norm, form(arguments["self"]))
    again = table.renormed is not None and table.renormed[1:] == known
    return (indices, *known) if table.alone or again else None


def _is_own(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.namespace == "fxgrad"


def _symbols(numbers: Iterable[Any]) -> set[Any]:
    symbolic = [one for one in numbers if isinstance(one, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return {symbol for one in symbolic for symbol in one.node.expr.free_symbols}


def _bound(func: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    """Return an op's arguments by name, with defaults filled in."""
    bound = {}
    for i, argument in enumerate(schema(func).arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound
