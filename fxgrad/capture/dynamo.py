"""The configuration of TorchDynamo for one call: dynamic dimensions, and what it must not specialise on.

A call that finds its graph needs none of it, so a call configures Dynamo only when a compilation starts:

    call            run() sets itself as this thread's call and looks for a graph: where there is one it runs
                    finds none: it calls the compiled function
    Dynamo          looks again: now it calls its start callbacks, `_on_start` among them
    _on_start       configure() enters all settings, context managers, until the call ends
    backend         check_configured(): the callback did not fire, as another compilation was in progress
    call            catches the error, configures Dynamo, and calls the compiled function again
    call            leaves all settings

The settings are, in their order: the lock, `marked`, `sizes_unseen`, `traceable_definitions`, `recurrent_modules`,
`leaves_followed`, `messages_ignored`, `unrecorded` and `sizes_read_plainly`. The lock comes first and goes last,
because all threads share what the others change.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import opt_einsum

from fxgrad.capture import progress
from fxgrad.capture.captured import SAMPLE_DIM
from fxgrad.capture.definitions import traceable_definitions
from fxgrad.capture.recurrent_modules import recurrent_modules
from fxgrad.errors import OutsideGraph
from fxgrad.host.dispatch import any_mode, mode_of_the_user
from fxgrad.host.dynamo import MARKS as PYTORCH_MARKS
from fxgrad.host.dynamo import (
    MARKS_OF_SAVED,
    TorchDynamoException,
    calls_ignored,
    compilation,
    compile_lock,
    find_main,
    mark_dynamic,
    maybe_mark_dynamic,
    sizes_apart,
    sizes_read_plainly,
    unrecorded,
)
from fxgrad.host.leaves import leaves_followed
from fxgrad.host.lookup import is_usual, run_found
from fxgrad.samples.batch import PACKED_SIZES, Batch, dynamic_dim

MARKS = (*PYTORCH_MARKS, SAMPLE_DIM)

_MARKED = frozenset(MARKS)
_COUNT = itertools.count()


class _Current(threading.local):
    """The call of this thread; Dynamo compiles in the thread that calls."""

    call: CapturedCall | None = None
    originals: bool = False  # whether transformed parts run as their originals
    searching: bool = False  # whether the compiled function that is called has to have a graph


_CURRENT = _Current()
runs_as_originals = partial(getattr, _CURRENT, "originals")


@contextlib.contextmanager
def as_originals() -> Iterator[None]:
    """Run transformed models as their originals in this thread: they are parts of one that runs on no samples."""
    before, _CURRENT.originals = _CURRENT.originals, True
    try:
        yield
    finally:
        _CURRENT.originals = before


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_capturing() -> bool:
    """Return whether what Dynamo traces is for fxgrad: a part of a model that one of fxgrad's calls captures.

    No guard is needed: Dynamo keeps what it compiled for one backend apart from what it compiled for another.
    """
    return _CURRENT.call is not None


class NoGraph(Exception):
    """Raised by a compiled function that is called for a graph it does not have."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_searching() -> bool:
    """Return whether a graph is looked for; what runs this instead of a graph has none. False while Dynamo traces."""
    return _CURRENT.searching


class CapturedCall:
    """One call of a compiled function, in which every size that can be dynamic is."""

    def __init__(
        self,
        batch: Batch,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        every_size: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.batch, self.args, self.kwargs, self.every_size, self.model = batch, args, kwargs, every_size, model
        self.settings: contextlib.ExitStack | None = None

    def run(self, compiled: Callable[..., Any]) -> Any:
        """Return ``compiled(*args, **kwargs)``."""
        if any_mode():
            _check_modes()
        if _on_start not in compilation.start_callbacks:  # torch._dynamo.reset() forgets it
            compilation.register_start_callback(_on_start)
        enclosing, _CURRENT.call = _CURRENT.call, self
        searching, _CURRENT.searching = _CURRENT.searching, False
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what other compiled models marked, and their marks
        try:
            for tensor in self.batch.tensors:
                attributes = tensor.__dict__
                if not _MARKED.isdisjoint(attributes):
                    marks = {mark: attributes.pop(mark) for mark in MARKS_OF_SAVED if mark in attributes}
                    saved.append((attributes, marks))
                    if not _MARKED.isdisjoint(attributes):
                        self.configure()  # guards would see the user's marks
            if self.settings is None and self.every_size and is_usual(compiled):
                _CURRENT.searching = True
                try:
                    return run_found(compiled, self.args, self.kwargs)
                except NoGraph:
                    _CURRENT.searching = False
            try:
                return compiled(*self.args, **self.kwargs)
            except TorchDynamoException:
                if self.settings is not None:
                    raise
            # The callback did not fire, because another compilation was in progress: configure, and call again.
            self.configure()
            return compiled(*self.args, **self.kwargs)
        finally:
            _CURRENT.call, _CURRENT.searching = enclosing, searching
            if self.settings is not None:
                self.settings.close()
            else:
                for tensor in self.batch.tensors:  # AOTAutograd marks what it saves
                    for mark in MARKS_OF_SAVED:
                        tensor.__dict__.pop(mark, None)
            for attributes, marks in saved:
                attributes.update(marks)

    def configure(self) -> None:
        """Configure Dynamo from now to the end of the call."""
        if self.settings is not None:
            return
        find_main(globals())
        self.settings = contextlib.ExitStack()
        marks = marked(self.batch, self.every_size)
        definitions = traceable_definitions(), recurrent_modules(self.model)
        of_capture = sizes_unseen(), *definitions, leaves_followed(), messages_ignored()
        of_steps = unrecorded(), sizes_read_plainly()
        for setting in (compile_lock, marks, *of_capture, *of_steps):
            self.settings.enter_context(setting)
        self.settings.callback(progress.end)


def _check_modes() -> None:
    """Raise under a mode in which Dynamo would not compile, and would skip the function in later calls, too."""
    mode = mode_of_the_user()
    if mode is not None:
        raise OutsideGraph(
            f"the model is called inside of a {type(mode).__name__}, a TorchDispatchMode, in which TorchDynamo "
            "captures nothing",
            advice="Call it outside of that. For flops and memory there is fxgrad.explain(model, *inputs).",
        )


def _on_start(event: Any) -> None:
    """Configure Dynamo for this thread's call; Dynamo calls this at the start of every compilation."""
    if _CURRENT.call is not None:
        _CURRENT.call.configure()
        if event.callback_trigger.name == "DYNAMO":  # not a backward
            progress.begin()


def current_call() -> CapturedCall | None:
    """Return the call for which this thread's backend compiles."""
    return _CURRENT.call


class NotConfigured(Exception):
    """Raised by a backend: Dynamo captured the graph without the configuration."""


def check_configured() -> None:
    """Raise if Dynamo captured the running call without the configuration: its sizes may be specialised."""
    if _CURRENT.call is not None and _CURRENT.call.settings is None:
        raise NotConfigured


def fresh_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` as a function with a new code object and a new name.

    Dynamo caches graphs per code object, and what it learned about changing sizes per name. So calls of another
    model change nothing here.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_searching():
            raise NoGraph
        return original(*args, **kwargs)

    name = f"call_{next(_COUNT)}"
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)


def unmark(tensor: Tensor) -> None:
    """Remove all marks from a tensor, fxgrad's and PyTorch's."""
    for mark in MARKS:
        tensor.__dict__.pop(mark, None)


@contextlib.contextmanager
def marked(batch: Batch, fullgraph: bool = True) -> Iterator[None]:
    """Mark the user's tensors with their roles, and their sample dimensions as dynamic, until the context ends."""
    kept: list[tuple[weakref.ref[Tensor], dict[str, Any]]] = []
    try:
        for tensor, role in batch.roles():
            attributes = tensor.__dict__
            kept.append((weakref.ref(tensor), {k: attributes[k] for k in MARKS if k in attributes}))
            unmark(tensor)
            setattr(tensor, SAMPLE_DIM, role)
            dim = dynamic_dim(role)
            if dim is not None and batch.size > 1:
                # Behind a graph break, samples may meet a value whose size Dynamo has not seen vary yet. The longest
                # samples of two packed sequences may be equally long.
                sure = fullgraph and role != PACKED_SIZES
                mark = mark_dynamic if sure else maybe_mark_dynamic
                mark(tensor, dim)
        yield
    finally:
        for reference, before in kept:
            tensor_kept = reference()
            if tensor_kept is not None:
                unmark(tensor_kept)
                tensor_kept.__dict__.update(before)


@contextlib.contextmanager
def sizes_unseen() -> Iterator[None]:
    """Give equal sizes separate symbols: a sequence may be as long as the batch by chance.

    Sizes may not choose the order of an einsum either: opt_einsum, where installed, specialises the batch size. The
    log shows no message where PyTorch specialises it.
    """
    einsum, opt_einsum.enabled = opt_einsum.enabled, False  # not its `flags`: they do not nest
    try:
        with sizes_apart():
            yield
    finally:
        opt_einsum.enabled = einsum


@contextlib.contextmanager
def messages_ignored() -> Iterator[None]:
    """Ignore prints, logs and warnings of a model's forward: they do nothing in a graph and do not break it."""
    named = [value for name, value in vars(logging.Logger).items() if name in _LOGS or name.endswith("_once")]
    with calls_ignored([print, warnings.warn, *named]):
        yield


_LOGS = frozenset("debug info warning warn error exception critical fatal log warning_advice".split())
