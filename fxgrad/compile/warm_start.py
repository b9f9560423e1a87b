"""A warm process starts warm: AOTAutograd's cache takes a graph with taps, under a key that shows all of it.

Note [Warm starts]
~~~~~~~~~~~~~~~~~~
AOTAutograd stores what it compiled, and finds it by the graph's code and its inputs' metadata. It stores no graph with
a call target that it does not know: a tap's result depends on its strategy, the quantities and the cost model. So
fxgrad writes a text of the graph in which every target stands with all that it holds, by value. The text's hash is
part of AOTAutograd's key (``cache_key_tag``), and each target then counts as known. A target that holds a value
without a text leaves the graph out of the cache, and the log says why.

Taps run while AOTAutograd traces. The tape lives there and then: of all this the compiled graph has ATen ops and
operators of fxgrad alone. The one thing that such an operator looks up in its process are the programs of the generic
rule. They are entered for each graph, whether the cache knows the graph or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, fx

from fxgrad.capture.options import Inner
from fxgrad.compile.code_text import Unreadable, imported_name
from fxgrad.compile.inductor import prepare
from fxgrad.compile.value_text import Texts
from fxgrad.host.caching import around_the_trace, count_as_known, found_as, ranges_and_guards
from fxgrad.host.tensors import identity
from fxgrad.host.versions import at_least
from fxgrad.kernels.generic import SampleProgram
from fxgrad.kernels.precision import settings_of_products
from fxgrad.ops.facts import EXAMPLE, FAKE
from fxgrad.ops.families import registered
from fxgrad.ops.user_functions import UserFunction
from fxgrad.rules.strategies import Generic
from fxgrad.runtime.targets import DeriveTarget, TapSeveralTarget, TapTarget, Target
from fxgrad.samples.control_flow import ControlFlow

log = logging.getLogger("fxgrad")
_STARTED = time.time()


@contextlib.contextmanager
def warm_start(gm: fx.GraphModule, inputs: Sequence[Any], backend: str | Inner) -> Iterator[None]:
    """Let AOTAutograd's cache store the graph that is compiled meanwhile. See Note [Warm starts]."""
    if backend == "inductor":
        prepare()
    key = _key_or_none(gm, inputs) if backend == "inductor" and at_least("2.13") else None
    if key is None:
        yield
        return
    for program in programs_of(gm):
        program.enter()
    tag = f"{torch.compiler.config.cache_key_tag} fxgrad {key}"
    patched = torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    with patched, _known(gm, key):
        yield


def _key_or_none(gm: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    try:
        return key_of(gm, inputs)
    except Unreadable as error:
        reason = str(error)
    except Exception as error:  # a value that cannot be read is no reason not to compile
        reason = f"{type(error).__name__}: {error}"
    log.info("AOTAutograd's cache does not store this graph: %s", reason)
    return None


@contextlib.contextmanager
def _known(gm: fx.GraphModule, key: str) -> Iterator[None]:
    """Give every target a name to be imported by, and mark what the key shows."""
    with contextlib.ExitStack() as stack:
        named: set[int] = set()
        for node in gm.graph.nodes:
            node.meta.setdefault(EXAMPLE.key, FAKE.get(node))
            if node.op != "call_function" or not _unknown(node.target):
                continue
            count_as_known(node, key)
            if imported_name(node.target) is None and id(node.target) not in named:
                named.add(id(node.target))
                stack.enter_context(found_as(node.target, f"of_{node.name}"))
        yield


def _unknown(target: Any) -> bool:
    """Return whether a call target is fxgrad's or the user's; which functions of PyTorch's to take, its cache knows."""
    return isinstance(target, Target | UserFunction | ControlFlow) or (
        isinstance(target, FunctionType) and target.__module__.split(".")[0] != "torch"
    )


def programs_of(gm: fx.GraphModule) -> Iterator[SampleProgram]:
    """Yield the programs of the generic rule that the compiled graph will look up."""
    for node in gm.graph.nodes:
        target = node.target
        if isinstance(target, TapTarget | TapSeveralTarget | DeriveTarget) and isinstance(target.strategy, Generic):
            operands = target.operands(node.args)
            yield from target.strategy.programs(
                [FAKE.get(one) if isinstance(one, fx.Node) else one for one in operands]
            )


def key_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return the hash of all that decides what a graph compiles to; raise Unreadable where that has no text."""
    for reason in around_the_trace():
        raise Unreadable(reason)
    texts = Texts()
    looked_up = [program.key for program in programs_of(gm)]
    parts = [*map(texts.of, (_versions(), _settings(), _sizes(inputs), looked_up)), *map(texts.of, inputs)]
    parts.append(texts.of_graph(gm))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _sizes(inputs: Sequence[Any]) -> list[Any]:
    """Return what is known of the symbolic sizes, what choices take them to be, and which inputs share memory."""
    sizes = [size for value in inputs for size in (value.shape if isinstance(value, Tensor) else [value])]
    hints = {str(size.node.expr): str(size.node.hint) for size in sizes if isinstance(size, torch.SymInt)}
    memories = [identity(value.untyped_storage()) for value in inputs if isinstance(value, Tensor)]
    return [sorted(hints.items()), ranges_and_guards(sizes), [memories.index(memory) for memory in memories]]


def _settings() -> list[Any]:
    """Return the settings that a trace reads besides those which AOTAutograd's own key has."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    autocast = [(device, torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)]
    return [
        torch.get_num_threads(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        settings_of_products(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        [bool(torch.backends.mkldnn.enabled), bool(torch.backends.cudnn.enabled), torch.backends.mkl.is_available()],
        sorted((op, str(family)) for op, family in registered().items()),
    ]


@cache
def _versions() -> list[str]:
    """Return the versions of all code that is not the user's."""
    return [
        hash_of_source(),
        str(torch.__version__),
        str(torch.version.git_version),
        sys.version,
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
    ]


@cache
def hash_of_source(folder: Path = Path(__file__).parents[1]) -> str:
    """Return the hash of fxgrad's own files; raise Unreadable if one has changed since the process began."""
    digest = hashlib.sha256()
    found = (Path(place) / file for place, _, files in os.walk(folder, followlinks=True) for file in files)
    try:
        for path in sorted(path for path in found if path.suffix in (".py", ".cpp")):
            if path.stat().st_mtime > _STARTED:
                raise Unreadable(f"{path.name} of fxgrad has changed since this process began")
            digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    except OSError as error:
        raise Unreadable(f"fxgrad's source cannot be read: {error}") from None
    return digest.hexdigest()
