"""The parts of logical batches: which part a step is for, and whether the logical batch ends with it.

Opacus's BatchMemoryManager appends a signal to a queue for each part that its sampler draws, and each step takes the
first one. fxgrad ties a signal to the part it was given for.

    sampler draws part n of an iteration    signal_skip_step -> Part(skip, iteration, n)
    the loader returns part n               iteration.returned() == n + 1
    step                                    the first signal has to be that of part n
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

from fxgrad.errors import UnaccountedGrad
from fxgrad.host.loaders import count_returned, drawing_iterator, sampler_in

# Note [Signals of parts]
# The queue alone shifts when a part has no finished step: the step raised, the user's code passed over the part, or
# the loop was left while workers had drawn in advance. All later steps then take the signals of other parts. Two
# Poisson batches become one release, in which a sample may count twice, and the accountant counts one step.
#
# So a signal has the iteration of the loader that drew it, and its number there. A step takes a signal only if the
# loader has returned just that part as its last one. A new iteration ends all earlier ones: what they have summed is
# never released. Signals that the user's code gives have no iteration; one at most may wait for a step.

MANAGER = "BatchMemoryManager"
RECOVER = "optimizer.zero_grad() drops what is left of this logical batch; go on with the same part, or with the next."


class Iteration:
    """One pass over a loader of parts."""

    def __init__(self, iterator: Any) -> None:
        self._iterator, self._sampler = weakref.ref(iterator), weakref.ref(sampler_in(iterator))
        self.drawn = 0
        self.given_up = -1  # parts up to this one need no step: one of them was refused

    def is_of(self, iterator: Any) -> bool:
        return self._iterator() is iterator and self._sampler() is sampler_in(iterator)

    def returned(self) -> int | None:
        """Return the number of parts that the loader has returned; None if the pass is over."""
        iterator = self._iterator()
        return count_returned(iterator) if iterator is not None and self.is_of(iterator) else None


@dataclass(frozen=True)
class Part:
    """A signal: whether the step for a part is a virtual one."""

    skip: bool
    iteration: Iteration | None = None
    number: int = 0


class Signals:
    """The signals that wait for their steps. See Note [Signals of parts]."""

    def __init__(self) -> None:
        self.waiting: deque[Part] = deque()
        self.iteration: Iteration | None = None  # the last that has begun
        self.summed: Iteration | None = None  # the one whose parts the virtual steps have summed
        self.ended: weakref.WeakSet[Iteration] = weakref.WeakSet()
        self._of: weakref.WeakKeyDictionary[Any, Iteration] = weakref.WeakKeyDictionary()

    def add(self, skip: bool) -> bool:
        """Record a signal; return whether it begins a new iteration."""
        iterator = drawing_iterator()
        if iterator is None:
            self.waiting.append(Part(skip))
            return False
        iteration = self._of.get(iterator)
        if iteration is None or not iteration.is_of(iterator):
            iteration = self._of[iterator] = Iteration(iterator)
        begins = iteration.drawn == 0
        if begins:
            if self.iteration is not None:
                self.ended.add(self.iteration)
            self.waiting = deque(part for part in self.waiting if part.iteration is None)
            self.iteration = iteration
        self.waiting.append(Part(skip, iteration, iteration.drawn))
        iteration.drawn += 1
        return begins

    def part(self, is_summing: bool) -> Part | None:
        """Return the signal for this step; None if there is none, and it is a real step.

        Args:
            is_summing: whether virtual steps have left sums.
        """
        part = self._first()
        if is_summing and self.summed is not (None if part is None else part.iteration):
            _refuse(
                "p.summed_grad holds parts of a logical batch whose loop was left before its last part, and this step "
                "is for another batch",
                advice="Call optimizer.zero_grad(), which drops them.",
            )
        return part

    def _first(self) -> Part | None:
        """Return the signal of the part that the loader has returned last."""
        if not self.waiting:
            return None
        if self.waiting[0].iteration is None:
            return self._first_of_the_user()
        returned = self._returned(self.waiting[0].iteration)
        while self.waiting[0].number < min(returned - 1, self._given_up() + 1):
            self.waiting.popleft()
            if not self.waiting:
                return None
        part = self.waiting[0]
        if part.number < returned - 1:
            count = returned - 1 - part.number
            _refuse(
                f"{count} part{'s' * (count > 1)} of {MANAGER} had no step: this step would take the place of an "
                "earlier one, and two logical batches would become one",
                advice="Take a step for each part, also for an empty one, before the loader returns the next: skip no "
                f"part by continue, and draw none ahead. {RECOVER}",
            )
        if part.number > returned - 1:
            _refuse(
                f"this step is for no part of {MANAGER}: the last one has had its step",
                advice=f"Take one step for each part. If the loop was left, delete its iterator. {RECOVER}",
            )
        return part

    def _first_of_the_user(self) -> Part:
        if len(self.waiting) > 1:
            _refuse(
                f"{len(self.waiting)} signals of signal_skip_step wait for one step: some are of steps that raised or "
                "were never taken",
                advice="Give one signal, and take its step. optimizer.zero_grad() now drops the signals and what "
                "virtual steps have left.",
            )
        return self.waiting[0]

    def _returned(self, iteration: Iteration) -> int:
        """Return the number of parts that a loop has got; raise if it is over, or not the last one."""
        if iteration in self.ended or self.waiting[-1].iteration is not iteration:
            _refuse(
                "the parts of two loops come in turns, and their logical batches would mix",
                advice="Go through one loader of parts at a time. optimizer.zero_grad() drops what they have summed.",
            )
        returned = iteration.returned()
        if returned is None:
            _refuse(
                f"signals wait for parts of a loop over {MANAGER}'s loader that has ended",
                advice="Take each step inside the loop, and do not make a list of the parts. optimizer.zero_grad() now "
                "drops these signals and what virtual steps have left.",
            )
        return returned

    def _given_up(self) -> int:
        iteration = self.waiting[0].iteration
        return -1 if iteration is None else iteration.given_up

    def took(self, part: Part | None) -> None:
        """Remove the signal of a step that is done."""
        if part is not None:
            self.waiting.popleft()
        self.summed = part.iteration if part is not None and part.skip else None

    def give_up(self) -> None:
        """Drop what belongs to a refused step, or to a loop that has ended; the signals of later parts remain."""
        kept: deque[Part] = deque()
        for part in self.waiting:
            returned = None if part.iteration is None or part.iteration in self.ended else part.iteration.returned()
            if part.iteration is not None and returned is not None and part.number >= returned - 1:
                kept.append(part)
                part.iteration.given_up = returned - 1
        self.waiting, self.summed = kept, None

    def clear(self) -> None:
        """Drop all signals."""
        if self.iteration is not None:
            self.ended.add(self.iteration)
        self.waiting, self.summed, self.iteration = deque(), None, None


def _refuse(sentence: str, *, advice: str) -> NoReturn:
    raise UnaccountedGrad(
        sentence,
        where="optimizer.step()",
        path=f"{MANAGER} -> signal_skip_step for each part that its sampler draws -> step",
        advice=advice,
    )
