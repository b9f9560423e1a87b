"""What TorchDynamo is told while it traces a call: where the samples are, and what it must not assume.

Nothing of it is needed by a call that finds its graph, so it is told where a compilation begins; what holds then, holds
until the call ends.
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
from typing import Any

import torch
import torch._dynamo
import torch.fx.experimental._config as shapes_config
from torch import Tensor
from torch._dynamo import exc
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import compile_lock
from torch.backends import opt_einsum

from fxgrad.batch import PACKED_SIZES, Batch, dynamic_dim
from fxgrad.captured import SAMPLE_DIM, called_with
from fxgrad.recurrent.modules import recurrent_modules
from fxgrad.shape_rules import symbolic_shape_rules

_OF_SAVED = ("_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices")  # from 2.13 on, and before
MARKS = (
    *_OF_SAVED,
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_specialize_on",
    "_has_dynamo_dim_marking",
    SAMPLE_DIM,
)

_MARKED = frozenset(MARKS)
_COUNT = itertools.count()


class _Capturing:
    """Whether a call of fxgrad's own is under way: what Dynamo traces then is for fxgrad."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1


CAPTURING = _Capturing()  # in every call: where a transformed model calls another, the graph is guarded by it


class _Current(threading.local):
    """The call this thread is in: Dynamo compiles in the thread that calls."""

    call: CapturedCall | None = None


_CURRENT = _Current()


class CapturedCall:
    """One call of a function that Dynamo compiles, in which every size is a symbol that can be one."""

    def __init__(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any], every_size: bool = True) -> None:
        self.batch, self.args, self.kwargs, self.every_size = batch, args, kwargs, every_size
        self.told: contextlib.ExitStack | None = None

    def run(self, compiled: Callable[..., Any]) -> Any:
        """``compiled(*args, **kwargs)``."""
        if _begin not in callback_handler.start_callbacks:  # torch._dynamo.reset() forgets it
            callback_handler.register_start_callback(_begin)
        enclosing, _CURRENT.call = _CURRENT.call, self
        try:
            if any(not _MARKED.isdisjoint(tensor.__dict__) for tensor in self.batch.tensors):
                self.tell()  # guards would look at what users marked
            with CAPTURING:
                try:
                    return compiled(*self.args, **self.kwargs)
                except exc.TorchDynamoException:
                    if self.told is not None:
                        raise
                # Something else was compiling, and nobody said that this had begun: once more, and told before.
                self.tell()
                return compiled(*self.args, **self.kwargs)
        finally:
            _CURRENT.call = enclosing
            if self.told is not None:
                self.told.close()
            else:
                for tensor in self.batch.tensors:  # AOTAutograd marks what it saves
                    for mark in _OF_SAVED:
                        tensor.__dict__.pop(mark, None)

    def tell(self) -> None:
        """What Dynamo has to know, from now to the end of the call."""
        if self.told is None:
            self.told = contextlib.ExitStack()
            self.told.enter_context(compile_lock)  # the marks, and the settings, are every thread's
            self.told.enter_context(marked(self.batch, self.every_size))
            self.told.enter_context(called_with(self.args, self.kwargs))
            self.told.enter_context(sizes_unseen())
            self.told.enter_context(symbolic_shape_rules())
            self.told.enter_context(recurrent_modules())
            self.told.enter_context(messages_ignored())


def _begin(_: Any) -> None:
    """Called by Dynamo at the beginning of every compilation, fxgrad's or not."""
    if _CURRENT.call is not None:
        _CURRENT.call.tell()


def current_call() -> CapturedCall | None:
    """The call for which this thread's backend compiles."""
    return _CURRENT.call


class Untold(Exception):
    """A backend's: the graph was made of a call of which Dynamo knew nothing."""


def check_told() -> None:
    """For a backend, before it believes what the graph says of its sizes."""
    if _CURRENT.call is not None and _CURRENT.call.told is None:
        raise Untold


def fresh_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` as a function with a code object and a name of its own.

    Dynamo keeps its graphs per code object, and what it learnt about changing sizes per name: another
    model's calls are none of this one's business.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    name = f"call_{next(_COUNT)}"
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)


@contextlib.contextmanager
def marked(batch: Batch, fullgraph: bool = True) -> Iterator[None]:
    """The user's tensors, marked with their roles and dynamic on their sample dims, as long as the call lasts."""
    kept: list[tuple[weakref.ref[Tensor], dict[str, Any]]] = []
    try:
        for tensor, role in batch.roles():
            attributes = tensor.__dict__
            kept.append((weakref.ref(tensor), {k: attributes[k] for k in MARKS if k in attributes}))
            for mark in MARKS:
                attributes.pop(mark, None)
            setattr(tensor, SAMPLE_DIM, role)
            dim = dynamic_dim(role)
            if dim is not None and batch.size > 1:
                # Behind a graph break samples may meet a value whose size Dynamo has not seen vary yet; the
                # longest sample of a packed sequence may be as long as another's.
                sure = fullgraph and role != PACKED_SIZES
                mark = torch._dynamo.mark_dynamic if sure else torch._dynamo.maybe_mark_dynamic
                mark(tensor, dim)
        yield
    finally:
        for reference, before in kept:
            found = reference()
            if found is not None:
                for mark in MARKS:
                    found.__dict__.pop(mark, None)
                found.__dict__.update(before)


@contextlib.contextmanager
def sizes_unseen() -> Iterator[None]:
    """Equal sizes are no reason for one symbol: a sequence may be as long as the batch by chance.

    Nor may sizes choose the order of an einsum: opt_einsum, where installed, makes the batch a number. Where PyTorch
    makes it one, that is no news for the log.
    """
    duck, einsum, silent = shapes_config.use_duck_shape, opt_einsum.enabled, torch._guards.log.disabled
    # Not opt_einsum's `flags`: they do not nest.
    shapes_config.use_duck_shape = opt_einsum.enabled = False
    torch._guards.log.disabled = True
    try:
        yield
    finally:
        shapes_config.use_duck_shape, opt_einsum.enabled, torch._guards.log.disabled = duck, einsum, silent


@contextlib.contextmanager
def messages_ignored() -> Iterator[None]:
    """What a model prints, logs or warns of in its forward does nothing in a graph, and is no reason to break it."""
    named = [value for name, value in vars(logging.Logger).items() if name in _LOGS or name.endswith("_once")]
    ignored = {*getattr(torch._dynamo.config, _IGNORED), print, warnings.warn, *named}
    with torch._dynamo.config.patch({_IGNORED: ignored}):
        yield


# Before it had the first name it knew methods of loggers alone.
_IGNORED = next(
    name for name in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(torch._dynamo.config, name)
)
_LOGS = frozenset("debug info warning warn error exception critical fatal log warning_advice".split())
