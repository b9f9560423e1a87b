"""The compiler behind fxgrad, by the name the user gave: Inductor, with two bugs mended, and others.

Note [Lost renames]
~~~~~~~~~~~~~~~~~~~
A buffer that an op writes into has another name after it, so that what reads it then is scheduled behind. Up to torch
2.13 a loop whose sizes are computed again for a fusion forgets the new name, and may run first: the backward of a
max_pool2d with windows that overlap adds into zeros, and the loop behind it read the zeros (PyTorch issue 185509).
The gradients of all layers before it were zero, without a word. Renaming once more is what torch 2.14 does. Inductor's
cache does not tell what was scheduled without it: the tag does, for the process, since backwards are compiled later.

Note [Floats that are read]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
``n = int(w.sum().item() / 100)`` is a symbolic expression of the float that was read. The backward's code computes n
from the symbol and needs its value. The partitioner saves n; the symbols in it are saved where they are integers, and
forgotten where they are floats. The backward then names a variable that it never received. In a plain compiled model
this happens where the tensor that was read is not saved; with taps, the weight often is not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, fx

from fxgrad.capture import progress
from fxgrad.capture.options import Inner
from fxgrad.compile.channels_last import is_channels_last, lay_out, return_contiguous, write_once
from fxgrad.compile.compared import save_compared
from fxgrad.compile.earlier import lowest
from fxgrad.compile.folded import fold_batches
from fxgrad.compile.freed_images import free_images, mask_images
from fxgrad.compile.joined_squares import KEPT, join_squares
from fxgrad.compile.merged import merge_equal
from fxgrad.compile.mutated import keep_unchanged
from fxgrad.compile.rows import write_rows
from fxgrad.compile.spread import spread_late
from fxgrad.errors import refuse_choice
from fxgrad.host import inductor
from fxgrad.host.conversions import in_front
from fxgrad.host.dynamo import written_now
from fxgrad.host.layouts import read_as_traced
from fxgrad.host.names import called_as
from fxgrad.host.versions import at_least
from fxgrad.kernels.compiled import ask_about_vectors, conversions
from fxgrad.kernels.fusible import opened
from fxgrad.kernels.on_cpu import decompositions as on_cpu_decompositions
from fxgrad.kernels.on_gpu import form_of
from fxgrad.kernels.operators import DIRECT


def compile_fx(gm: fx.GraphModule, examples: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's own entry point; on CPU with other forms of some ops, and a thread that asks about vectors."""
    prepare()
    on_cpu = any(isinstance(example, Tensor) and example.device.type == "cpu" for example in examples)
    vectors = ask_about_vectors() if on_cpu else None
    if on_cpu:
        kwargs["decompositions"] = on_cpu_decompositions(kwargs.get("decompositions") or inductor.decompositions())

    def compile_traced(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with progress.inductor(kwargs.get("is_backward", False)):
            if vectors is not None:
                vectors.result()
            gm = opened(gm, form_of, but=KEPT)
            if on_cpu:
                join_squares(gm)
            gm = opened(gm, form_of)
            fold_batches(gm)
            spread_late(gm)
            if kwargs.get("is_inference"):  # else AOTAutograd has done so where it parted the graph
                merge_equal(gm)
            if on_cpu:
                write_rows(gm)
            if "get_decomp_fn" in kwargs:  # part of Inductor's key: ours has no text, and fxgrad's source is in the key
                kwargs["get_decomp_fn"] = inductor.decompositions
            if kwargs.get("is_backward"):
                if on_cpu and any(map(is_channels_last, args[0])):
                    return_contiguous(gm)
                    _write_images(gm)
            # what the user's views are made of, behind the graph, has the layout that was traced
            elif not inductor.show_bases(gm) and on_cpu and lay_out(gm):
                _write_images(gm)
            with contextlib.ExitStack() as stack:
                stack.enter_context(called_as(DIRECT))
                if on_cpu:
                    stack.enter_context(read_as_traced())
                    stack.enter_context(inductor.reordered(lowest))
                    stack.enter_context(in_front(conversions()))
                return inductor.compile_traced(gm, *args, **kwargs)

    with inductor.before_partition(keep_unchanged, save_compared, *((mask_images,) if on_cpu else ())):
        return inductor.compile_fx(gm, examples, inner_compile=compile_traced, **kwargs)


def _write_images(gm: fx.GraphModule) -> None:
    write_once(gm)
    free_images(gm)


@functools.lru_cache(maxsize=1)
def prepare() -> None:
    """Import Inductor and mend it, before a graph's own tag is set: see Note [Lost renames]."""
    inductor.import_compiler()
    progress.stage("imported Inductor")
    inductor.bind_floats()
    mended = "floats bound, kernels earlier, doubles by vectors, operators direct"
    if not at_least("2.14"):
        inductor.keep_renames()
        mended += ", renames kept"
    torch.compiler.config.cache_key_tag = f"{torch.compiler.config.cache_key_tag} {mended}"


def inner_compiler(backend: str | Inner) -> Inner:
    """Return the compiler behind: Inductor, AOTAutograd alone, nothing, or the user's own."""
    if callable(backend):
        return backend
    if backend == "inductor":
        return compile_fx
    if backend == "aot_eager":
        return inductor.aot_eager(keep_unchanged)
    if backend == "eager":
        return _as_it_is
    choices = "inductor", "aot_eager", "eager"
    refuse_choice("backend", backend, choices, "a callable", "It is the compiler behind fxgrad.")


def _as_it_is(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
    """Return the graph's own function; its code is written first, as a lazy module would print it with an error."""
    written_now(gm)
    return gm.forward
