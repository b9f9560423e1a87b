"""The observer that follows, op by op in a functionalized graph, the samples that each value depends on."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fxgrad.host.dispatch import disable_current_modes
from fxgrad.host.fake import FakeTensorMode, uncached
from fxgrad.host.ops import schema
from fxgrad.host.pytree import tree_map
from fxgrad.proof import longest, rules
from fxgrad.proof.bounds import numbers_of, numbers_read
from fxgrad.proof.calls import Blame, Call, Facts, Known, Origins, Reason, Undecided
from fxgrad.proof.longest.steps import Padded, Padding, Seen, Steps, held
from fxgrad.proof.origins import MANY, SUM, any_samples, joined, no_samples, whole
from fxgrad.proof.rules.lookups import form
from fxgrad.proof.trials import Symbolic, Trial, symbols_in

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
        with mode, uncached(mode):  # equal calls are shared before they get here
            yield
    finally:
        del mode.__torch_dispatch__


class Follow(Facts):
    """The observer of every ATen op below functionalization, where no op writes to a tensor.

    Numbers read from a tensor are symbols there.
    """

    def __init__(self, trials: Sequence[Trial], *, clips: bool) -> None:
        super().__init__(trials, clips=clips)
        self.node: Any = None  # the current node of the user's graph
        self.padding = Padding()  # the symbols of `numbers` that are lengths of packed data

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the facts of one op's results."""
        call = Call(func, args, kwargs, result, self)
        if any(isinstance(out, Tensor | Symbolic) for out in call.outputs):
            with disable_current_modes():  # ids are plain tensors
                self._record(call)

    def _record(self, call: Call) -> None:
        operands = [self.of(tensor) for _, tensor in call.tensors]
        from_data = self._numbers(call)
        sources = [*operands, *from_data]
        padded = self._padded(call)
        if padded is not None and all(part.alone for part in sources) and not _reads_memory(call):
            self._constants(call, operands, padded)
            return
        ids_of_trials, blame = self._ids(call, seen=padded is None)
        for i, out in enumerate(call.outputs):
            if isinstance(out, Tensor):
                ids = [self._with_numbers(call, ids[i], from_data, place) for place, ids in enumerate(ids_of_trials)]
                origins = self._origins(call, out, tuple(ids), sources, blame)
                origins = replace(origins, padded=padded[i] if padded else {})
                self.set(out, self._with_bounds(call, operands, origins, out))
            self._note_symbols(call, out, operands)
        if call.is_own:
            self._packed(call)

    def _padded(self, call: Call) -> list[Padded] | None:
        """Return the padded dimensions of each output; None if the op may see the longest length."""
        if not self.padding or not call.is_op:
            return [{} for _ in call.outputs]
        try:
            return longest.after(call, rules.of(call.func), self.padding)
        except Seen:
            return None

    def _with_bounds(self, call: Call, operands: list[Origins], origins: Origins, out: Tensor) -> Origins:
        """Add the known bounds of integers, and the renormed rows of embedding tables."""
        if not call.is_op or call.is_own:
            return origins
        if call.name == "embedding_renorm":
            return replace(origins, renormed=_renormed(call, operands))
        if operands and call.name in ("detach", "alias", "clone", "view", "_unsafe_view"):
            origins = replace(origins, renormed=operands[0].renormed)
        return numbers_of(call, out, origins)

    def _packed(self, call: Call) -> None:
        """Record the lengths and packed sequences that fxgrad's operators on packed data define."""
        arguments, outputs = call.arguments, call.outputs
        if call.name == "fxgrad::pack":
            pack = len(self.packs) - 1
            self._are_lengths(arguments["lengths"], pack)  # otherwise packing raises
            (length,) = symbols_in(outputs[1].shape)
            self.padding.enter(length, pack)
            for out in outputs[1:]:
                self.set(out, replace(self.of(out), pack=pack))
        elif call.name == "fxgrad::packed_lengths":
            self._are_lengths(outputs[0], self.of(arguments["batch_sizes"]).pack)
        elif call.name == "fxgrad::pad_packed_to_longest":
            (length,) = symbols_in(outputs[0].shape[:1])
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

    def _constants(self, call: Call, operands: list[Origins], padded: list[Padded]) -> None:
        """Record outputs that depend on no sample; their values are known if those of the operands are."""
        known = self._known(call)
        traced = torch.is_grad_enabled() and any(one.traced for one in operands)
        for i, out in enumerate(call.outputs):
            if isinstance(out, Tensor):
                ids = self.everywhere(no_samples(out.dim()))
                known_output = replace(known, select=i, values={}) if known and call.several else known
                flows = traced and out.is_floating_point()
                self.set(out, Origins(ids, flows, counted=True, known=known_output, padded=padded[i]))

    def _known(self, call: Call) -> Known | None:
        drawn = call.is_op and torch.Tag.nondeterministic_seeded in call.func.tags
        if not call.is_op or drawn or call.name in ("empty", "empty_like", "new_empty", "empty_strided"):
            return None
        values = {id(tensor): self._value(tensor) for _, tensor in call.tensors}
        if any(value is None for value in values.values()):
            return None

        def stand_in(arg: Any) -> Any:
            return values[id(arg)] if isinstance(arg, Tensor) else arg

        return Known(call.func, *tree_map(stand_in, (tuple(call.args), dict(call.kwargs))))

    def _value(self, tensor: Tensor) -> Any:
        known = self.of(tensor).known
        if known is not None:
            return known
        return tensor if type(tensor) is Tensor and tensor.device.type != "meta" else None

    def _numbers(self, call: Call) -> list[Origins]:
        """Return the origins of numbers read from data, in the arguments and in the sizes of the outputs."""
        if not self.numbers or call.is_own:  # the rules of fxgrad's operators treat sizes themselves
            return []
        sizes = symbols_in(size for out in call.outputs if isinstance(out, Tensor) for size in out.shape)
        if self.padding and call.is_op:
            sizes = {symbol for symbol in sizes if symbol not in self.padding}
        return [
            self.numbers[one] for one in symbols_in(numbers_read(call, self.padding)) | sizes if one in self.numbers
        ]

    def _with_numbers(self, call: Call, ids: Tensor, numbers: list[Origins], place: int) -> Tensor:
        parts = [number.ids[place] for number in numbers if bool(number.ids[place].any())]
        if not parts:
            return ids
        both = joined(ids, *parts)
        counts = all(number.counted for number in numbers) and not self.clips
        if counts and call.func in (torch.ops.aten.div.Tensor, torch.ops.aten.true_divide.Tensor):
            return torch.where(ids == SUM, SUM, both)  # Note [Token counts]
        return both

    def note_packed(self, data: Tensor, sizes: Tensor, samples: Sequence[Tensor]) -> int:
        """Record an input that is a packed sequence; its row and step counts depend on all its samples."""
        pack = len(self.packs)
        self.packs.append(samples)
        rows, steps = symbols_in(data.shape[:1]), symbols_in(sizes.shape[:1])
        self.numbers |= dict.fromkeys(rows | steps, Origins(self.everywhere(any_samples(0))))
        self.padding.rows |= rows
        for length in steps:
            self.padding.enter(length, pack)
        return pack

    def _note_symbols(self, call: Call, out: Any, operands: list[Origins]) -> None:
        """Give each new symbol in a value the samples of the value's operands.

        The symbols of fxgrad's operators are extents, such as a count of packed rows. A value of such a size need not
        depend on the samples.
        """
        for symbol in symbols_in(out.shape if isinstance(out, Tensor) else [out]):
            if symbol not in self.numbers and symbol not in self.trials[0].values:
                several = zip(*(one.ids for one in operands), strict=True) if operands else [()] * len(self.trials)
                ids = tuple(joined(no_samples(0), *map(whole, parts)) for parts in several)
                self.numbers[symbol] = Origins(ids, counted=all(one.counted or one.alone for one in operands))
                if call.is_own:
                    self.padding.rows.add(symbol)

    def _ids(self, call: Call, *, seen: bool) -> tuple[list[list[Tensor]], Blame]:
        """Return the ids of each output in each trial; where they are unknown, MANY and the reason."""
        name = schema(call.func).name.removeprefix("aten::") if call.is_op else call.name
        try:
            ids = self._ids_by_rule(call, name, seen=seen)
        except Undecided as why:
            blank = [any_samples(out.dim() if isinstance(out, Tensor) else 0) for out in call.outputs]
            return [blank] * len(self.trials), Blame(str(why), self.node, why.reason)
        if call.new_pack:
            self.packs.append(call.new_pack)
        return ids, Blame(name + MEET, self.node, Reason.MEET)

    def _ids_by_rule(self, call: Call, name: str, *, seen: bool) -> list[list[Tensor]]:
        """Return the ids of each output in each trial; raise `Undecided` with a whole sentence if they are unknown."""
        if call.is_op and schema(call.func).is_mutable:
            raise Undecided(f"{name} writes where it cannot be followed")
        rule = rules.of(call.func) if call.is_op else None
        if rule is None:
            raise Undecided(f"fxgrad does not know how {name} treats samples", Reason.NO_RULE)
        if seen:
            raise Undecided(f"{name}{LONGEST}", Reason.LONGEST)
        ids_of_trials = []
        for place in range(len(self.trials)):
            call.enter(place)
            try:
                ids_of_trials.append(rules.applied(rule, call))
            except Undecided as why:
                raise Undecided(f"{name}: {why}", why.reason) from None
            except (RuntimeError, ValueError, IndexError, TypeError, KeyError, StopIteration) as error:
                log.debug("the rule of %s failed: %s", name, error)
                raise Undecided(f"{name} is used in a way that is not known") from None
        return ids_of_trials

    def _origins(
        self, call: Call, out: Tensor, ids: tuple[Tensor, ...], sources: list[Origins], blame: Blame
    ) -> Origins:
        met = any(bool((one == MANY).any()) for one in ids)
        before = next((one.blame for one in sources if one.blame), None)
        traced = torch.is_grad_enabled() and out.is_floating_point() and any(one.traced for one in sources)
        counted = all(one.counted or one.alone for one in sources) and blame.reason is not Reason.LONGEST
        return Origins(ids, traced and call.name != "detach", counted, blame=(before or blame) if met else None)


def _reads_memory(call: Call) -> bool:
    """Decide whether an op may read memory outside its operand, where other samples may be."""
    return call.name.startswith("as_strided")


def _renormed(call: Call, operands: Sequence[Origins]) -> tuple[Origins, Any, Any] | None:
    """Return the origins of the indices whose rows are renormed, the norm, and the table's shape.

    Return None if the rows were renormed by another norm before.
    """
    table, indices = operands[0], operands[1]
    norm = call.arguments["max_norm"], call.arguments["norm_type"]
    if not all(type(number) in (int, float) for number in norm):
        return None
    known = (norm, form(call.arguments["self"]))
    again = table.renormed is not None and table.renormed[1:] == known
    return (indices, *known) if table.alone or again else None
