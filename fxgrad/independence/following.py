"""Runs a graph functionalized, op by op, and follows which samples each value depends on."""

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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fxgrad.independence import rules
from fxgrad.independence.calls import Call, Known, Origins, Undecided, settled
from fxgrad.independence.longest.steps import Padded, Seen, Steps, held
from fxgrad.independence.origins import MANY, SUM, any_samples, folded, joined, no_samples
from fxgrad.independence.padding import Padding, numbers_of
from fxgrad.independence.rules.lookups import form
from fxgrad.independence.trials import Trial

_KEY = "_fxgrad_origins"


MEET = " lets samples influence each other"
LONGEST = " may see how long the longest sample is"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def watched(mode: FakeTensorMode, watcher: Callable[[Any, Any, Any, Any], None]) -> Iterator[None]:
    """Let a watcher know of every ATen op on fake tensors, and of what it returned.

    A TorchDispatchMode of its own would stand above functionalization, where values are still written to; and rules of
    cond, scan and their kin are found by the very class of a mode.
    """
    dispatch, inside = mode.__torch_dispatch__, False

    def watch(_: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal inside
        if inside:  # the ops that an op is made of are its own
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
    """Sees every ATen op below functionalization, where nothing is written and nothing is a number of a tensor."""

    def __init__(self, trials: Sequence[Trial], *, clips: bool) -> None:
        self.trials, self.clips = tuple(trials), clips
        self.numbers: dict[Any, Origins] = {}  # symbols that stand for what is read from data
        self.node: Any = None  # of the user's graph
        self.padding = Padding()  # those of these that say how long packed data is
        self.packs: list[Sequence[Tensor]] = []  # of each packed sequence: the sample of each of its parts

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One op, and what it returned."""
        several = isinstance(result, tuple | list)
        outputs = list(result) if several else [result]  # what lists in it hold, nobody sees
        if any(isinstance(out, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool) for out in outputs):
            with _disable_current_modes():  # ids are plain tensors
                self._record(func, args, kwargs, outputs, several)

    def of(self, tensor: Tensor) -> Origins:
        """What is known of a value: of a tensor that is in the graph as it is, that it is a constant."""
        found = getattr(tensor, _KEY, None)
        if found is None:
            unseen = isinstance(tensor, FakeTensor)
            ids = tuple((any_samples if unseen else no_samples)(tensor.dim()) for _ in self.trials)
            found = Origins(ids, blame="it is not known where a value comes from" if unseen else "")
        return found

    def set(self, tensor: Tensor, origins: Origins) -> None:
        setattr(tensor, _KEY, origins)

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[Any], several: bool) -> None:
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        held = [self.of(tensor) for tensor in tensors]
        numbers = self._numbers(func, args, kwargs, outputs)
        source = [*held, *numbers]
        padded = self._padded(func, args, kwargs, outputs)
        if padded is not None and all(one.alone for one in source) and not _reads_memory(func):
            known = self._known(func, args, kwargs, tensors)
            return self._constants(outputs, known, held, several, padded)
        found, blame = self._ids(func, args, kwargs, outputs, seen=padded is None)
        own = _is_own(func)
        for i, out in enumerate(outputs):
            if isinstance(out, Tensor):
                ids = [self._with_numbers(func, ids[i], numbers, place) for place, ids in enumerate(found)]
                origins = self._origins(func, out, ids, source, blame)
                origins = replace(origins, padded=padded[i] if padded else {})
                self.set(out, origins if own else self._with_bounds(func, args, kwargs, held, origins, out))
            self._note_symbols(out, held, extent=own)
        if own:
            self._packed(func, args, kwargs, outputs)
        return None

    def _padded(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> list[Padded] | None:
        """What is known of each output along longest samples; None where the op may see how long they are."""
        if not self.padding or not isinstance(func, torch._ops.OpOverload):
            return [{} for _ in outputs]
        arguments = _bound(func, args, kwargs)
        call = Call(func, arguments, outputs, self.trials[0], 0, self.of, self.clips, self.packs)
        try:
            return self.padding.after(call, rules.of(func))
        except Seen:
            return None

    def _with_bounds(
        self, func: Any, args: Any, kwargs: Any, held: list[Origins], origins: Origins, out: Any
    ) -> Origins:
        """What is known besides of whole numbers, and of tables with rows scaled."""
        if not isinstance(func, torch._ops.OpOverload):
            return origins
        name = func._schema.name.removeprefix("aten::")
        if name == "embedding_renorm":
            return replace(origins, renormed=_renormed(_bound(func, args, kwargs), held))
        if held and held[0].renormed is not None and name in ("detach", "alias", "clone", "view", "_unsafe_view"):
            origins = replace(origins, renormed=held[0].renormed)
        return numbers_of(name, _bound(func, args, kwargs), self.of, out, origins)

    def _packed(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> None:
        """What fxgrad's own operators on packed data say besides."""
        arguments = _bound(func, args, kwargs)
        if func is torch.ops.fxgrad.pack.default:
            self._are_lengths(arguments["lengths"], len(self.packs) - 1)  # or packing fails
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
        """A value, and what it is a cast of, says how many steps the samples of a packed sequence have."""
        while tensor is not None and not tensor.dtype.is_floating_point:
            origins = self.of(tensor)
            self.set(tensor, replace(origins, least=1, ends=pack))
            tensor = origins.cast_of

    def _constants(
        self, outputs: list[Any], known: Known | None, held: list[Origins], several: bool, padded: list[Padded]
    ) -> None:
        """No operand holds samples, so no output does; its value is known where theirs are."""
        traced = torch.is_grad_enabled() and any(one.traced for one in held)
        for i, out in enumerate(outputs):
            if isinstance(out, Tensor):
                ids = tuple(no_samples(out.dim()) for _ in self.trials)
                own = replace(known, select=i, values={}) if known and several else known
                flows = traced and out.is_floating_point()
                self.set(out, Origins(ids, flows, counted=True, known=own, padded=padded[i]))

    def _known(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Known | None:
        if not isinstance(func, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if func._schema.name in (
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

        own_args, own_kwargs = torch.utils._pytree.tree_map(stand_in, (tuple(args), dict(kwargs)))
        return Known(func, own_args, own_kwargs)

    def _value(self, tensor: Tensor) -> Any:
        known = self.of(tensor).known
        if known is not None:
            return known
        return tensor if type(tensor) is Tensor and tensor.device.type != "meta" else None

    def _numbers(self, func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> list[Origins]:
        """The samples in numbers that were read from data, among the arguments and in sizes."""
        if not self.numbers or _is_own(func):  # ours say themselves what they do with sizes
            return []
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        sizes = _symbols(size for out in outputs if isinstance(out, Tensor) for size in out.shape)
        if self.padding and isinstance(func, torch._ops.OpOverload):
            leaves = self.padding.read(func._schema.name.removeprefix("aten::"), _bound(func, args, kwargs))
            sizes = {symbol for symbol in sizes if symbol not in self.padding}
        return [self.numbers[one] for one in _symbols(leaves) | sizes if one in self.numbers]

    def _with_numbers(self, func: Any, ids: Tensor, numbers: list[Origins], place: int) -> Tensor:
        parts = [number.ids[place] for number in numbers if bool(number.ids[place].any())]
        if not parts:
            return ids
        found = joined(ids, *parts)
        counts = all(number.counted for number in numbers) and not self.clips
        if counts and func in (torch.ops.aten.div.Tensor, torch.ops.aten.true_divide.Tensor):
            return torch.where(ids == SUM, SUM, found)  # Note [Token counts]
        return found

    def note_packed(self, data: Tensor, sizes: Tensor, pack: int) -> None:
        """A packed sequence that is an input: how many rows and steps it has, all its samples decide."""
        whole = Origins(tuple(any_samples(0) for _ in self.trials))
        rows, steps = _symbols(data.shape[:1]), _symbols(sizes.shape[:1])
        self.numbers |= dict.fromkeys(rows | steps, whole)
        self.padding.rows |= rows
        for length in steps:
            self.padding.enter(length, pack)

    def _note_symbols(self, out: Any, held: list[Origins], *, extent: bool) -> None:
        """Symbols that appear in a value for the first time hold what its operands hold.

        Where they are an extent, as of packed rows, what has that size need not.
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
                            *(folded(one.ids[p], range(one.ids[p].dim())).reshape([]) for one in held),
                        )
                        for p in range(len(self.trials))
                    ]
                    self.numbers[symbol] = Origins(tuple(whole), counted=all(one.counted or one.alone for one in held))
                    if extent:
                        self.padding.rows.add(symbol)

    def _ids(
        self, func: Any, args: Any, kwargs: Any, outputs: list[Any], *, seen: bool
    ) -> tuple[list[list[Tensor]], str]:
        """The ids of each output in each trial; of what is not known, MANY, and why."""
        blank = [[any_samples(out.dim() if isinstance(out, Tensor) else 0) for out in outputs] for _ in self.trials]
        if not isinstance(func, torch._ops.OpOverload):
            return blank, f"nobody has said how {func} treats samples"
        name = func._schema.name.removeprefix("aten::")
        if func._schema.is_mutable:
            return blank, f"{name} writes where it cannot be followed"
        rule = rules.of(func)
        if rule is None:
            return blank, f"nobody has said how {name} treats samples"
        if seen:
            return blank, f"{name}{LONGEST}"
        arguments = _bound(func, args, kwargs)
        found = []
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
            found.append(
                [
                    (no_samples(out.dim()) if _is_empty(out) else settled(one, trial.shape(out.shape), out.dim()))
                    if isinstance(out, Tensor)
                    else one
                    for one, out in zip(several, outputs, strict=True)
                ]
            )
        if new:
            self.packs.append(new)
        return found, name + MEET

    def _origins(self, func: Any, out: Tensor, ids: list[Tensor], held: list[Origins], blame: str) -> Origins:
        met = any(bool((one == MANY).any()) for one in ids)
        before = next((one for one in held if one.blame), None)
        traced = torch.is_grad_enabled() and out.is_floating_point() and any(one.traced for one in held)
        if isinstance(func, torch._ops.OpOverload) and func._schema.name == "aten::detach":
            traced = False
        return Origins(
            tuple(ids),
            traced,
            all(one.counted or one.alone for one in held) and not blame.endswith(LONGEST),
            None,
            (before.blame if before else blame) if met else "",
            (before.where if before else self.node) if met else None,
        )


def _is_empty(out: Tensor) -> bool:
    """Whether a value has no elements, however many samples there are."""
    return any(type(size) is int and size == 0 for size in out.shape)


def _reads_memory(func: Any) -> bool:
    """Whether an op reads what lies beside its operand: there, samples may be."""
    return isinstance(func, torch._ops.OpOverload) and func._schema.name.startswith("aten::as_strided")


def _renormed(arguments: Mapping[str, Any], held: Sequence[Origins]) -> tuple[Origins, Any, Any] | None:
    """Whose rows are short enough, by which norm, and of which shape the table is.

    Rows that were scaled by another norm before are not known.
    """
    table, indices = held[0], held[1]
    norm = arguments["max_norm"], arguments["norm_type"]
    if not all(type(one) in (int, float) for one in norm):
        return None
    known = (norm, form(arguments["self"]))
    again = table.renormed is not None and table.renormed[1:] == known
    return (indices, *known) if table.alone or again else None


def _is_own(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "fxgrad"


def _symbols(numbers: Iterable[Any]) -> set[Any]:
    symbolic = [one for one in numbers if isinstance(one, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return {symbol for one in symbolic for symbol in one.node.expr.free_symbols}


def _bound(func: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any]:
    """An op's arguments by name, defaults filled in."""
    found = {}
    for i, one in enumerate(func._schema.arguments):
        if i < len(args):
            found[one.name] = args[i]
        elif one.name in kwargs:
            found[one.name] = kwargs[one.name]
        else:
            found[one.name] = one.default_value if one.has_default_value() else None
    return found
