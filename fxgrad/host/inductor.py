"""Inductor, imported where it is first needed: that takes seconds."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fxgrad.host.dispatch import is_profiled
from fxgrad.host.patches import set_meanwhile
from fxgrad.host.versions import at_least


def import_toolchain() -> None:
    """Import what `load_library` and `find_vectors` need.

    Why: two threads that import it at once may see half of it, so the caller's thread imports it first.
    Without: ImportError, and no kernels in C++.
    """
    importlib.import_module("torch._inductor.codecache")


def import_compiler() -> None:
    """Import what `compile_fx` and `compile_traced` need.

    Why: as `import_toolchain`.
    Without: ImportError; backend="inductor", the default, does not work.
    """
    importlib.import_module("torch._inductor.compile_fx")


def load_library(text: str) -> ctypes.CDLL:
    """Compile C++ with Inductor's compiler, flags, cache and precompiled header, and load it.

    Why: `torch.utils.cpp_extension` needs ninja, and knows nothing of Inductor's flags for vectors. Inductor reads its
    header, of 100,000 lines, from a precompiled file only where it compiles its own kernels: a second for each library.
    Without: no kernels in C++: the same numbers, computed by PyTorch's ops, and slower.
    """
    library: ctypes.CDLL = _library_cache().load(text)
    return library


@functools.lru_cache(maxsize=1)
def _library_cache() -> Any:
    """Return Inductor's cache of libraries, with the header and the flags of its kernels, so that both share one."""
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache

    class Libraries(CppCodeCache):
        cpp_compile_command_flags = CppPythonBindingsCodeCache.cpp_compile_command_flags

        @classmethod
        def _get_uncompiled_header(cls, device: str) -> str | None:
            header: str | None = CppPythonBindingsCodeCache._get_uncompiled_header(device)
            return header

    return Libraries


def find_vectors() -> None:
    """Let Inductor ask the compiler which vectors it knows, and keep the answer for the process.

    Why: that takes seconds, which another thread can spend while the model is traced.
    Without: the first compilation takes longer.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()


def find_compiler() -> str:
    """Return the C++ compiler that Inductor calls; RuntimeError if none works.

    Why: which one that is, by the environment and by what runs, only Inductor knows.
    Without: `python -m fxgrad doctor` cannot name it.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    return str(get_cpp_compiler())


def cache_folder() -> str:
    """Return the folder of Inductor's caches, which this makes; OSError if that fails.

    Why: its name has the user's, and an environment variable may say another.
    Without: `python -m fxgrad doctor` cannot name it.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def compile_fx(gm: Any, examples: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's own entry point, which torch.compile calls.

    Why: the string "inductor" is for torch.compile; a backend of our own calls it with a graph.
    Without: backend="inductor", the default, does not work.
    """
    from torch._inductor import compile_fx as inductor

    return inductor.compile_fx(gm, examples, **kwargs)


def compile_traced(*args: Any, **kwargs: Any) -> Any:
    """Inductor behind AOTAutograd: what `compile_fx` calls for each graph (``inner_compile=``).

    Why: what is waited for before code is generated, is waited for here.
    Without: nothing compiles on CPU while the model is traced.
    """
    from torch._inductor import compile_fx as inductor

    return inductor.compile_fx_inner(*args, **kwargs)


@contextlib.contextmanager
def graphs_called() -> Iterator[list[tuple[Callable[[list[Any]], Any], list[Any], Any]]]:
    """Note each of Inductor's graphs that this thread calls meanwhile, what it was given, and what it returned.

    Why: AOTAutograd, which calls it, wraps it in a dozen calls that for most graphs do nothing.
    Without: each step of `forward_backward` takes some 10 us longer.
    """
    calls: list[tuple[Callable[[list[Any]], Any], list[Any], Any]] = []
    code, thread = sys.modules.get("torch._inductor.output_code"), threading.get_ident()
    if code is None:  # another backend
        yield calls
        return
    with _PATCHED:
        before = code.CompiledFxGraph.__call__

        def call(self: Any, inputs: list[Any]) -> Any:
            given = [*inputs]  # which it empties
            returned = before(self, inputs)
            if threading.get_ident() == thread:
                calls.append((self, given, returned))
            return returned

        code.CompiledFxGraph.__call__ = call
        try:
            yield calls
        finally:
            code.CompiledFxGraph.__call__ = before


_PATCHED = threading.RLock()  # patches are undone in the order they were made


def run_without_gradients(graph: Any, inputs: list[Any]) -> Sequence[Any]:
    """Call one of Inductor's graphs as AOTAutograd does where no gradient is wanted.

    Why: `torch.no_grad` takes as long as two of a small model's layers. The graph's own `__call__` labels its code for
    the profiler, and asks for a context of autotuning, which the first call has ended.
    Without: each step of `forward_backward` takes some 4 us longer.
    """
    labelled = is_profiled()
    enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        outputs: Sequence[Any] = graph(inputs) if labelled else graph.current_callable(inputs)
        return outputs
    finally:
        torch._C._set_grad_enabled(enabled)


class Kernel(NamedTuple):
    """What is compiled as one of a graph's kernels, or called as an op, in an order of them.

    Why: as `reordered`.
    Without: as `reordered`.
    """

    behind: frozenset[int]  # the kernels that have to run before it, by their places
    made: int  # the bytes it allocates
    reads: Sequence[tuple[int, frozenset[int]]]  # of each value that it reads: the bytes freed behind it, its readers
    acts: bool  # whether it does something else: it may raise an error, as an assert does


_Choose = Callable[[Sequence[Sequence[Kernel]]], tuple[int, Sequence[int]]]
_CHOOSE: ContextVar[_Choose | None] = ContextVar("_CHOOSE", default=None)


def reordered(choose: _Choose) -> AbstractContextManager[object]:
    """Run the kernels of each graph that this thread compiles meanwhile in the order that a function chooses.

    It gets them in the order that Inductor has chosen, and in that of the graph. It returns the number of one of these,
    and the kernels' places in it in the order in which they run.
    Why: Inductor's own order keeps gradients until the end of a backward, where its estimates of the peak are alike.
    Since: torch 2.13, tested. In an older PyTorch, what it knows of an order may leave out writes: nothing is changed.
    Without: right numbers, and for some models with biases a peak that is 1.3 times as high.
    """
    if not at_least("2.13"):
        return contextlib.nullcontext()
    _follow_order()
    return set_meanwhile(_CHOOSE, choose)


@functools.lru_cache(maxsize=1)
def _follow_order() -> None:
    """Let Inductor ask for an order, once."""
    from torch._inductor import memory

    inductors = memory.reorder_for_peak_memory

    def reorder_for_peak_memory(nodes: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*nodes]
        orders = [inductors(nodes, *args, **kwargs), given]
        choose = _CHOOSE.get()
        if choose is None:
            return orders[0]
        one, places = choose([_kernels(order) for order in orders])
        return [orders[one][i] for i in places]

    memory.reorder_for_peak_memory = reorder_for_peak_memory


def _kernels(nodes: Sequence[Any]) -> list[Kernel]:
    from torch._inductor.virtualized import V

    place, returned = {node: i for i, node in enumerate(nodes)}, {*V.graph.get_output_names()}

    def places(of: Any) -> frozenset[int]:
        return frozenset(place[node] for node in of if node in place)

    def kernel(node: Any) -> Kernel:
        planned = node.mpi_node
        freed = [one for one in planned.pred_buffers if one.get_name() not in returned]
        reads = [(one.mpi_buffer.size_free, places(one.mpi_buffer.succ_nodes)) for one in freed]
        return Kernel(places(planned.pred_nodes), planned.size, reads, node.has_side_effects())

    return [kernel(node) for node in nodes]


def show_bases(gm: Any) -> bool:
    """Tell Inductor that the user sees what AOTAutograd returns for views, in a forward's graph; return if it does.

    Why: two views of one value that a model returns are made behind the graph, from the value, by the strides that it
    was traced with. Inductor keeps only the user's own outputs to these, and lays out others as a convolution likes.
    Without: ``h[:, :4].flatten(1), h[:, 4:].flatten(1)`` of a convolution's h has its numbers mixed up, without a word.
    """
    context = torch._guards.TracingContext.try_get()
    described = None if context is None else context.fw_metadata
    output = gm.graph.output_node()
    visible = output.meta.get("user_visible_output_idxs")
    if described is None or visible is None or not described.num_intermediate_bases:
        return False
    end = described.num_forward_returns
    bases = range(end - described.num_intermediate_bases, end)
    values = output.args[0]
    output.meta["user_visible_output_idxs"] = [*visible, *(i for i in bases if isinstance(values[i], torch.fx.Node))]
    return True


@contextlib.contextmanager
def before_partition(*changes: Callable[[torch.fx.Graph], None]) -> Iterator[None]:
    """Run functions on each traced graph of a forward with its backward before they are parted, behind the user's own.

    Why: which values a backward computes again is decided there, by tags on nodes.
    Without: the gradient of ``tanh(x).amax(-1)`` may be NaN, or go to another element, without a word.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    users: Any = config.joint_custom_post_pass
    passes = [one for one in (users if isinstance(users, list | tuple) else [users]) if one is not None]

    class Behind(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for one in (*passes, *changes):
                one(graph)

        def uuid(self) -> Any:
            """PyTorch caches no graph of a pass without one. fxgrad's source is in the key of what it compiles."""
            names = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in passes]
            return None if None in names else (*(change.__qualname__ for change in changes), *names)

    with config.patch(joint_custom_post_pass=Behind()):
        yield


def decompositions() -> Any:
    """Return Inductor's table of decompositions, with which AOTAutograd traces for it.

    Why: the ops inside of an operator are traced when AOTAutograd is done.
    Without: nothing compiles; without the table, Inductor lacks lowerings of some ops.
    """
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def aot_eager(change: Callable[[torch.fx.Graph], None]) -> Callable[..., Any]:
    """Return the backend that traces with AOTAutograd and runs the graph as it is, changed before it is parted.

    Why: ``backend="aot_eager"``, and every test that needs no generated code.
    Without: backend="aot_eager" does not work.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def parted(joint: Any, *args: Any, **kwargs: Any) -> Any:
        change(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def aot_eager(gm: Any, examples: Any) -> Any:
        compiler = boxed_nop
        settings: Any = {"partition_fn": parted, "keep_inference_input_mutations": True}
        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, **settings)(gm, examples)

    return aot_eager


def keep_renames() -> None:
    """Patch Inductor's scheduler: nodes whose sizes are computed again keep the names that writes gave their inputs.

    Why: PyTorch issue 185509; see Note [Lost renames] in fxgrad/compile/inductor.py.
    Since: needed up to torch 2.13, which has the method; 2.11 to 2.13, tested.
    Without: gradients of layers before a max_pool2d with overlapping windows may be zero, without a word.
    """
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    @functools.wraps(original)
    def recompute_size_and_body(node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign, assignment]


def bind_floats() -> None:
    """Patch AOTAutograd's partitioner: a float read from a tensor is saved where an expression of it is.

    Why: see Note [Floats that are read] in fxgrad/compile/inductor.py.
    Without: a backward that needs ``int(w.sum().item() / 100)`` may end in a NameError of Inductor's code.
    """
    from torch._functorch import partitioners
    from torch.fx.experimental import symbolic_shapes

    bound = symbolic_shapes.is_symbol_binding_fx_node

    @functools.wraps(bound)
    def is_symbol_binding_fx_node(node: Any) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymFloat) and value.node.expr.is_symbol:
            return value.node.expr
        return bound(node)

    def find_symbol_binding_fx_nodes(graph: Any) -> dict[Any, Any]:
        first: dict[Any, Any] = {}
        for node in graph.nodes:
            first.setdefault(is_symbol_binding_fx_node(node), node)
        first.pop(None, None)
        return first

    replaced = {function.__name__: function for function in (is_symbol_binding_fx_node, find_symbol_binding_fx_nodes)}
    vars(partitioners).update(replaced)
