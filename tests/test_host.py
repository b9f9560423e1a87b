"""Private names of PyTorch: all of them in fxgrad/host, each where PyTorch has it and doing what fxgrad needs.

A release of PyTorch that moves a name fails here with ``PyTorch moved ..``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import math
import operator
import os
import re
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from fxgrad.host.dynamo import active_callback
from fxgrad.host.inductor import import_compiler
from fxgrad.host.versions import at_least
from fxgrad.kernels.compiled import conversions
from fxgrad.samples.symbols import Symbols
from tests.private_names import defined, files, is_private, known_attributes, private_names

ROOT = Path(__file__).parents[1]
HOST = ROOT / "fxgrad/host"

Check = Callable[[Any], None]
CHECKS: dict[str, Check] = {}


def check(*names: str) -> Callable[[Check], Check]:
    """Register a test of names of one module of the room, which the test gets."""

    def register(test: Check) -> Check:
        assert not CHECKS.keys() & set(names)
        CHECKS.update(dict.fromkeys(names, test))
        return test

    return register


def documented() -> Iterator[tuple[str, str]]:
    """Every name of the room, ``module.name``, and its docstring: one string may stand behind several assignments."""
    for path in sorted(HOST.glob("*.py")):
        said = ""
        for node in reversed(ast.parse(path.read_text()).body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield f"{path.stem}.{node.name}", ast.get_docstring(node) or ""
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                yield f"{path.stem}.{ast.unparse(target)}", said
                continue
            text = node.value if isinstance(node, ast.Expr) else None
            said = str(text.value) if isinstance(text, ast.Constant) else ""


NAMES = {name: said for name, said in documented() if not is_private(name.split(".")[1])}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for the names of each check; the checks are registered below."""
    if "names" in metafunc.fixturenames:
        groups = {test: [name for name, one in CHECKS.items() if one is test] for test in CHECKS.values()}
        metafunc.parametrize("names", groups.values(), ids=[" ".join(names) for names in groups.values()])


def test_pytorch_has(names: list[str]) -> None:
    """Each name stands where PyTorch has it, and does what its docstring says."""
    said = "PyTorch moved or changed what " + ", ".join(f"fxgrad.host.{name}" for name in names) + " stands for"
    try:
        CHECKS[names[0]](importlib.import_module(f"fxgrad.host.{names[0].split('.')[0]}"))
    except (ImportError, AttributeError, TypeError, KeyError, NameError) as error:
        pytest.fail(f"{said}: {type(error).__name__}: {error}")
    except AssertionError as error:
        raise AssertionError(f"{said}: {error}") from error


def test_every_name_has_a_test() -> None:
    assert CHECKS.keys() == NAMES.keys()


@pytest.mark.parametrize("name", sorted(name for name in NAMES if not name.startswith("versions.")))
def test_says_why_and_what_without(name: str) -> None:
    said = NAMES[name].lower()
    assert all(word in said for word in ("why", "without")), f"the docstring of fxgrad.host.{name}"


def test_the_room_says_since_when() -> None:
    """One sentence for all names: from the oldest PyTorch that fxgrad supports."""
    said = ast.get_docstring(ast.parse((HOST / "__init__.py").read_text())) or ""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None and f"\nSince: torch {oldest[1]} to " in said


# Private names elsewhere


def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(ROOT): ast.parse(path.read_text()) for path in files(ROOT)}


def own_names() -> set[str]:
    return {name for tree in trees().values() for name in defined(tree)}


def test_private_names_live_in_their_room() -> None:
    own, attributes = own_names(), known_attributes(ROOT)
    found = [
        f"{path}:{line}: {name}"
        for path, tree in sorted(trees().items())
        for line, name in sorted(private_names(tree, own, attributes))
    ]
    assert not found, "private names of PyTorch outside of fxgrad/host:\n" + "\n".join(found)


def test_every_file_is_searched() -> None:
    searched = {str(path) for path in trees()}
    assert {"fxgrad/engine.py", "fxgrad/kernels/recurrent/packed.py", "passes/infer_samples.py"} <= searched
    assert not any(path.startswith("fxgrad/host/") for path in searched)


@pytest.fixture(scope="module")
def ours() -> set[str]:
    return own_names()


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch._functorch.config as c", "torch._functorch.config"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("from torch.fx._lazy_graph_module import f", "torch.fx._lazy_graph_module.f"),
        ("import torch\ntorch._C._set_grad_enabled(True)", "torch._C._set_grad_enabled"),
        ("from torch import nn\nnn.modules._functions", "torch.nn.modules._functions"),
        ("x._version", "?._version"),
        ("f(x)[0]._cdata", "?._cdata"),
        ("self._parameters", "?._parameters"),
        ("x._indices()", "?._indices"),  # a function of fxgrad's has this name, too
        ("getattr(x, '_backward_hooks', None)", "?._backward_hooks"),
        ("attrgetter('_version')", "?._version"),
        ("x.__dict__.pop('_dynamo_dynamic_indices', None)", "?._dynamo_dynamic_indices"),
        ("MARKS = ('_dynamo_dynamic_indices',)", "?._dynamo_dynamic_indices"),
        ("class A(nn.Module):\n  def _call_impl(self): ...", "?._call_impl"),
    ],
)
def test_a_private_name_is_found(program: str, name: str, ours: set[str]) -> None:
    assert name in {found for _, found in private_names(ast.parse(program), ours, known_attributes(ROOT))}


@pytest.mark.parametrize(
    "program",
    [
        "import torch\ntorch.ops.aten._softmax.default",
        "import torch\ntorch.ops.mkldnn._linear_pointwise(x)",
        "import torch\ntorch._check(x > 0)",
        "OPS = {'_softmax': 'softmax', '_ctc_loss': None}",
        "from torch.fx.experimental.symbolic_shapes import guard_or_false",
        "class A:\n  def _mine(self): ...\n  def f(self): self._compiled()",
        "import sys\nsys._getframe()",
        "pair._replace(first=1)",
        "x.__dict__, x.__torch_function__",
        "getattr(x, '_fxgrad_task', None)",
    ],
)
def test_other_names_are_not(program: str, ours: set[str]) -> None:
    assert not private_names(ast.parse(program), ours, known_attributes(ROOT))


# versions


@check("versions.TORCH", "versions.at_least")
def _(host: Any) -> None:
    from torch.torch_version import TorchVersion

    assert str(host.TORCH) == torch.__version__
    assert host.at_least("2.9") and host.at_least("2.11") and not host.at_least("99.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "TORCH", TorchVersion("2.9.1+cpu"))
        assert host.at_least("2.9.1") and not host.at_least("2.14")  # as text it is later
        patch.setattr(host, "TORCH", TorchVersion("2.14.0.dev20260301"))
        assert host.at_least("2.13") and not host.at_least("2.14")


# pytree

NEST = ({"a": 1, "b": [2, 3]}, 4)


@check("pytree.tree_leaves", "pytree.arg_tree_leaves", "pytree.tree_map")
def _(host: Any) -> None:
    assert host.tree_leaves(NEST) == [1, 2, 3, 4]
    assert host.arg_tree_leaves(1, [2], c=3) == [1, 2, 3]
    assert host.tree_map(lambda leaf: -leaf, NEST) == ({"a": -1, "b": [-2, -3]}, -4)


@check("pytree.tree_flatten", "pytree.tree_unflatten", "pytree.tree_structure", "pytree.TreeSpec")
def _(host: Any) -> None:
    leaves, spec = host.tree_flatten(NEST)
    assert leaves == [1, 2, 3, 4] and isinstance(spec, host.TreeSpec) and spec == host.tree_structure(NEST)
    assert host.tree_unflatten(leaves, spec) == NEST


@check("pytree.broadcast_to_and_flatten")
def _(host: Any) -> None:
    spec = host.tree_structure(NEST)
    assert host.broadcast_to_and_flatten((0, 1), spec) == [0, 0, 0, 1]
    assert host.broadcast_to_and_flatten((0, 1, 2), spec) is None


# ops

ADD = torch.ops.aten.add
MUL = operator.mul


@check("ops.OpOverload", "ops.OpOverloadPacket", "ops.HigherOrderOperator")
def _(host: Any) -> None:
    assert isinstance(ADD.Tensor, host.OpOverload) and isinstance(ADD, host.OpOverloadPacket)
    assert isinstance(torch.ops.higher_order.cond, host.HigherOrderOperator)


@check("ops.set_grad_enabled", "ops.enter_inference_mode", "ops.exit_inference_mode", "dynamo.source_of")
def _(_: Any) -> None:
    from fxgrad.host.dynamo import source_of
    from fxgrad.host.ops import enter_inference_mode, exit_inference_mode, set_grad_enabled

    def quiet(x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = x * 2
        with torch.no_grad():
            return y * 2

    graph = captured(quiet, torch.ones(3)).graph
    names = {set_grad_enabled, enter_inference_mode, exit_inference_mode}
    assert names <= {node.target for node in graph.nodes}, "of no_grad and inference_mode in a graph"
    source = source_of(next(iter(graph.nodes)))
    assert source is not None, "_dynamo_source"
    name = source.name() if callable(source.name) else source.name
    assert name == "L['x']" and source.is_input
    assert source_of(graph.output_node()) is None


def captured(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> torch.fx.GraphModule:
    """The graph that Dynamo makes of a function."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(*args)
    return graphs[0]


@check("ops.schema", "ops.schemas", "ops.schemas_of_name", "ops.qualified_name")
def _(host: Any) -> None:
    assert [a.name for a in host.schema(ADD.Tensor).arguments] == ["self", "other", "alpha"]
    assert host.schemas(ADD.Tensor) == [host.schema(ADD.Tensor)] and len(host.schemas(ADD)) == len(ADD.overloads())
    assert host.schemas(torch.add) == []
    assert {s.overload_name for s in host.schemas_of_name("aten::add")} >= {"Tensor", "Scalar"}
    assert host.schemas_of_name("aten::no_such_op") == []
    assert host.qualified_name(ADD.Tensor) == host.qualified_name(ADD) == "aten::add"


@torch.library.custom_op("fxgrad_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@check("ops.overload_of")
def _(host: Any) -> None:
    assert host.overload_of(twice) is torch.ops.fxgrad_tests.twice.default
    assert host.overload_of(ADD.Tensor) is ADD.Tensor and host.overload_of(print) is print


@check("ops.defined_in_python")
def _(host: Any) -> None:
    from fxgrad.host.dispatch import enable_python_dispatcher

    op, calls = torch.ops.aten.take_along_dim.default, []
    with host.defined_in_python({op: lambda *args: calls.append(args)}), enable_python_dispatcher():
        op(torch.zeros(2), torch.zeros(2, dtype=torch.long), 0)
    assert len(calls) == 1, "the definition ran"
    with enable_python_dispatcher():
        assert op(torch.zeros(2), torch.zeros(2, dtype=torch.long), 0).shape == (2,)
    assert len(calls) == 1, "and is gone"


@check("ops.core_decompositions")
def _(host: Any) -> None:
    table = host.core_decompositions()
    assert torch.ops.aten.addcmul.default in table and torch.ops.aten.mm.default not in table
    table.clear()
    assert host.core_decompositions()


# dispatch


@check("dispatch.TorchDispatchMode", "dispatch.disable_current_modes")
def _(host: Any) -> None:
    seen = []

    class Mode(host.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) * 2
        with host.disable_current_modes():
            torch.ones(2) + 2
    assert torch.ops.aten.mul.Tensor in seen and ADD.Tensor not in seen


@check("dispatch.any_mode", "dispatch.mode_of_the_user")
def _(host: Any) -> None:
    """That Dynamo compiles nothing under such a mode, tests/test_switched_off.py sees."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(host.TorchDispatchMode):  # type: ignore[misc]
        pass

    assert not host.any_mode() and host.mode_of_the_user() is None
    with FakeTensorMode():
        assert host.any_mode() and host.mode_of_the_user() is None
        with Mode() as mode:
            assert host.any_mode() == 2 and host.mode_of_the_user() is mode


@check("dispatch.any_autocast")
def _(host: Any) -> None:
    assert not host.any_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert host.any_autocast()


@check("dispatch.enable_python_dispatcher")
def _(host: Any) -> None:
    assert not torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher")
    with host.enable_python_dispatcher():
        assert torch._C._dispatch_tls_is_dispatch_key_included("PythonDispatcher")


@check("dispatch.KeySet", "dispatch.autocast_keys", "dispatch.autocast_key", "dispatch.without_keys")
def _(host: Any) -> None:
    keys = host.autocast_keys("cpu")
    assert isinstance(keys, host.KeySet) and host.autocast_key("cpu") == "AutocastCPU" and "AutocastCPU" in str(keys)
    a = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16
        with host.without_keys(keys):
            assert (a @ a).dtype is torch.float32


@torch.library.custom_op("fxgrad_tests::slope", mutates_args=())
def slope(x: Tensor, inside: bool) -> Tensor:
    from fxgrad.host.dispatch import with_autograd

    with with_autograd() if inside else contextlib.nullcontext(), torch.enable_grad():
        leaf = x.detach().requires_grad_()
        y = leaf.square().sum()
        return torch.autograd.grad(y, leaf)[0] if y.requires_grad else torch.zeros_like(x)


@check("dispatch.with_autograd")
def _(_: Any) -> None:
    x = torch.tensor([3.0])
    assert slope(x, False).item() == 0, "autograd records inside of operators: with_autograd is not needed"
    assert slope(x, True).item() == 6


@check("dispatch.(BELOW_AUTOGRAD, BELOW_VIEWS)", "dispatch.DEVICES")
def _(host: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.testing._internal.two_tensor import TwoTensor

    library = torch.library.Library("fxgrad_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    seen: list[bool] = []

    def at_autograd(keys: Any, x: Tensor) -> Any:
        seen.append((keys & host.BELOW_VIEWS).highestPriorityTypeId() in host.DEVICES)
        return torch.ops.fxgrad_test.twice.default.redispatch(keys & host.BELOW_AUTOGRAD, x)

    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("twice", at_autograd, "Autograd", with_keyset=True)
    x, twice = torch.ones(2, requires_grad=True), torch.ops.fxgrad_test.twice
    assert twice(x).sum() == 4
    with torch.no_grad(), torch.autocast("cpu"):
        assert twice(x).sum() == 4
    assert seen == [True, True]
    with FakeTensorMode() as mode:
        twice(mode.from_tensor(torch.ones(2)))
    make_fx(twice)(torch.ones(2))
    twice(torch.ones(2, device="meta"))
    twice(torch.ones(2).to_sparse())
    twice(TwoTensor(torch.ones(2), torch.ones(2)))
    assert not any(seen[2:]) and len(seen) == 7


@check("dispatch.tracer")
def _(host: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    said = []

    def double(x: Tensor) -> Tensor:
        said.append(host.tracer() is not None)
        return x * 2

    make_fx(double)(torch.ones(2))
    assert said == [True] and host.tracer() is None


# functorch


@check("functorch.innermost_transform", "functorch.is_batched", "functorch.is_wrapped")
def _(host: Any) -> None:
    said: list[Any] = []

    def look(x: Tensor) -> Tensor:
        said.append((host.innermost_transform() is not None, host.is_batched(x), host.is_wrapped(x)))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    look(torch.ones(3))
    assert said == [(True, True, True), (True, False, True), (False, False, False)]


@check("functorch.unwrap_if_dead")
def _(host: Any) -> None:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    x = torch.ones(3)
    torch.func.grad(keep)(x)
    assert host.is_wrapped(kept[0])
    assert not host.is_wrapped(host.unwrap_if_dead(kept[0]))
    assert host.unwrap_if_dead(x) is x


@check("functorch.forward_level")
def _(host: Any) -> None:
    from torch.autograd import forward_ad

    assert host.forward_level() == -1
    with forward_ad.dual_level():
        assert host.forward_level() == 0


@check("functorch.merge_equal_nodes")
def _(host: Any) -> None:
    """What it is for, tests/test_merged.py sees."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    one, two = (graph.call_function(torch.ops.aten.exp.default, (x,)) for _ in range(2))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (one, two)))
    gm = fx.GraphModule(nn.Module(), graph)
    host.merge_equal_nodes(gm)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)) == 1
    assert gm(torch.zeros(2)).tolist() == [2, 2]


@check("functorch.aot_settings")
def _(host: Any) -> None:
    from torch._functorch import config

    before = config.donated_buffer
    with host.aot_settings(donated_buffer=not before, force_non_lazy_backward_lowering=True):
        assert config.donated_buffer is not before and config.force_non_lazy_backward_lowering
    assert config.donated_buffer is before


@check("functorch.must_be_in_backward")
def _(host: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def double(x: Tensor) -> Tensor:
        with torch.fx.traceback.preserve_node_meta(), host.must_be_in_backward():
            return x * 2

    graph = make_fx(double)(torch.ones(2)).graph
    tags = [node.meta.get("partitioner_tag") for node in graph.nodes if node.op == "call_function"]
    assert tags == ["must_be_in_backward"]


# caching


@check("caching.count_as_known", "caching.found_as")
def _(host: Any) -> None:
    from torch._functorch._aot_autograd import autograd_cache
    from torch.fx.graph_module import _format_import_statement
    from torch.package.importer import sys_importer

    from fxgrad.ops.user_functions import UserFunction
    from fxgrad.runtime.targets import SingleTarget

    if not at_least("2.13"):
        return
    target, graph = SingleTarget(0), torch.fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"),))
    with pytest.raises(autograd_cache.BypassAOTAutogradCache, match=r"call_function|Unsupported"):
        autograd_cache.check_node_safe(node)
    host.count_as_known(node, "a key")
    autograd_cache.check_node_safe(node)
    with host.found_as(target, "of_x"):
        assert _format_import_statement("tap", target, sys_importer).endswith(f"{target.__module__} import of_x as tap")
    assert target.__qualname__ == "single" and not hasattr(importlib.import_module(target.__module__), "of_x")
    function = UserFunction(torch.fx.GraphModule({}, graph), torch.fx.GraphModule({}, graph), {})
    with host.found_as(function, "of_y"):
        assert sys_importer.get_name(function) == (function.__module__, "of_y")
    assert "__qualname__" not in vars(function)


@check("caching.around_the_trace")
def _(host: Any) -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        pass

    graphs = [torch.fx.symbolic_trace(lambda x: x + 1)] * 2
    with torch.device("cpu"):
        assert host.around_the_trace() == []
    with Mode():
        assert host.around_the_trace() == ["the mode Mode"]
    with torch.autograd.graph.saved_tensors_hooks(*graphs):
        assert host.around_the_trace() == ["saved_tensors_hooks that are graphs"]


@check("caching.ranges_and_guards")
def _(host: Any) -> None:
    symbols = Symbols()
    size = symbols.new("T", 5)
    before = host.ranges_and_guards([3, size])
    assert "[2, int_oo]" in before[0] and host.ranges_and_guards([3]) == []
    assert bool(size > 4)
    assert len(host.ranges_and_guards([3, size])) == len(before) + 1


# fake


@check("fake.FakeTensor", "fake.FakeTensorMode")
def _(host: Any) -> None:
    with host.FakeTensorMode():
        x = torch.ones(2, 3) @ torch.ones(3, 5)
    assert isinstance(x, host.FakeTensor) and x.shape == (2, 5)


@check("fake.FunctionalTensor", "fake.FunctionalTensorMode", "fake.functional", "fake.settled", "fake.writes_into")
def _(host: Any) -> None:
    plain = torch.zeros(4)
    with host.FunctionalTensorMode():
        value = host.functional(plain)
        assert isinstance(value, host.FunctionalTensor) and host.writes_into(value) == 0
        value[:2].add_(1)  # by a view
        assert host.writes_into(value) > 0
        assert host.settled(value).tolist() == [1, 1, 0, 0]
    assert plain.tolist() == [0, 0, 0, 0]


@check("fake.uncached")
def _(host: Any) -> None:
    mode = host.FakeTensorMode()
    before = mode.cache_info()
    with mode, host.uncached(mode):
        torch.ones(3, 5, 7).tanh()
    assert mode.cache_info() == before


# tensors


@check("tensors.assert_on_device")
def _(host: Any) -> None:
    host.assert_on_device(torch.tensor(True), "unseen")
    with pytest.raises(RuntimeError, match="seen"):
        host.assert_on_device(torch.tensor(False), "seen")


@check("tensors.unchanged_since")
def _(host: Any) -> None:
    x, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1))
    unchanged = host.unchanged_since([x, other])
    assert unchanged(x, other) is True and unchanged(other, x) is False
    assert unchanged(torch.ones(2, 3).requires_grad_(), other) is False, "class"
    with torch.autocast("cpu", torch.bfloat16):
        assert unchanged(x, other) is False, "autocast"
    x.requires_grad_(False)
    assert unchanged(x, other) is False, "requires_grad"
    x.requires_grad_()
    for data in (torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(2, 3).double()):
        before, x.data = x.data, data
        assert unchanged(x, other) is False, data
        x.data = before
        assert unchanged(x, other) is True


@check("tensors.identity", "tensors.version", "tensors.set_versions", "tensors.is_view")
def _(host: Any) -> None:
    x = torch.zeros(3)
    view = x[:2]
    assert host.identity(x) == host.identity(x) != host.identity(view)
    assert host.identity(x.untyped_storage()) == host.identity(view.untyped_storage())
    assert host.is_view(view) and not host.is_view(x)
    before = host.version(x)
    view.add_(1)
    assert host.version(x) == host.version(view) == before + 1
    other = torch.zeros(1)
    host.set_versions((x, other), (1 << 20, 7))
    assert (host.version(x), host.version(other)) == (1 << 20, 7)


@check("tensors.has_no_memory")
def _(host: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    (zeros,) = torch.autograd.grad(x.sgn().sum(), x)
    assert host.has_no_memory(zeros) and not host.has_no_memory(zeros.clone()) and not host.has_no_memory(x)


@check("tensors.hooks_of", "tensors.attach_hooks", "tensors.post_accumulate_hooks")
def _(host: Any) -> None:
    x, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert not host.hooks_of(x) and not host.post_accumulate_hooks(x)
    seen: list[Tensor] = []
    handle = x.register_hook(seen.append)
    assert list(host.hooks_of(x)) == [handle.id]
    torch.utils.swap_tensors(x, other)  # the Python object keeps its dict of hooks, of which the tensor knows nothing
    x.sum().backward()
    assert list(host.hooks_of(x)) == [handle.id] and not seen
    host.attach_hooks(x)
    x.sum().backward()
    assert len(seen) == 1, "hooks after swap_tensors"
    x.register_post_accumulate_grad_hook(lambda _: None)
    assert host.post_accumulate_hooks(x)


# autograd


@check(
    "autograd.current_task", "autograd.will_execute", "autograd.autograd_engine", "autograd.BACKWARD_CODE",
    "autograd.outputs_of_backward",
)  # fmt: skip
def _(host: Any) -> None:
    import sys

    x, y, said = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True), dict[str, Any]()
    product = x * y
    node_of_x, node_of_y = (node for node, _ in product.grad_fn.next_functions)  # type: ignore[union-attr]

    def look(_: Tensor) -> None:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not host.BACKWARD_CODE:
            frame = frame.f_back
        assert frame is not None, "BACKWARD_CODE is of no frame of a backward"
        said["outputs"] = host.outputs_of_backward(frame.f_locals)
        said["task"] = host.current_task()
        said["will"] = host.will_execute(node_of_x), host.will_execute(node_of_y)
        host.autograd_engine.queue_callback(lambda: said.update(last=x.grad is not None))

    product.register_hook(look)
    total = product.sum()
    assert host.current_task() == -1
    total.backward(inputs=[x])
    assert said["outputs"][0] is total and said["task"] >= 0
    assert said["will"] == (True, False) and said["last"]
    assert host.current_task() == -1


@check("autograd.compiles_backward")
def _(host: Any) -> None:
    seen: list[bool] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(host.compiles_backward())
            return g * 2

    from torch._dynamo import compiled_autograd

    for context in (contextlib.nullcontext(), compiled_autograd._enable(torch.compile(backend="eager"))):
        with context:
            Seen.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert seen[0] is False and seen[-1] is True


@check("autograd.adds_to_leaves")
def _(host: Any) -> None:
    seen: list[bool] = []
    x = torch.ones(3, requires_grad=True)

    def look(_: Tensor) -> None:
        frame: Any = sys._getframe()
        while frame.f_code is not host.BACKWARD_CODE:
            frame = frame.f_back
        seen.append(host.adds_to_leaves(frame.f_locals))

    x.register_hook(look)
    x.sum().backward()
    torch.autograd.backward([x], [torch.ones(3)])
    torch.autograd.backward([x.sum()], inputs=[x])
    torch.autograd.grad(x.sum(), [x])
    torch.autograd.grad([x], [x], torch.ones(3))
    assert seen == [True, True, True, False, False]


@check("autograd.retains_graph", "autograd.writes_over_saved")
def _(host: Any) -> None:
    from fxgrad.host.functorch import aot_settings

    x = torch.ones(3, requires_grad=True)
    seen: list[bool] = []

    def of(**settings: Any) -> Tensor:
        torch._dynamo.reset()
        with aot_settings(force_non_lazy_backward_lowering=True, **settings):
            y = torch.compile(lambda x: x.exp().sin().sum(), backend="aot_eager")(x)
        assert isinstance(y, Tensor) and y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grads: seen.append(host.retains_graph()))
        return y

    assert not host.writes_over_saved(x.sin().grad_fn)
    y = of(donated_buffer=True)
    assert host.writes_over_saved(y.grad_fn)
    with pytest.raises(RuntimeError, match="donated"):
        y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]
    with torch._functorch.config.patch(donated_buffer=False):
        assert not host.writes_over_saved(of().grad_fn)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@check("autograd.function_of", "autograd.outputs_like")
def _(host: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    own: Any = Own.apply(x)
    assert host.function_of(type(own.grad_fn)) is Own
    assert [tuple(one.shape) for one in host.outputs_like(own.grad_fn)] == [(3,)]
    assert [tuple(one.shape) for one in host.outputs_like(own.sum().grad_fn)] == [()]


@check("autograd.are_saved_tensors_hooked")
def hooks_that_are_set(host: Any) -> None:
    assert not host.are_saved_tensors_hooked()
    with torch.autograd.graph.save_on_cpu():
        assert host.are_saved_tensors_hooked()
    assert not host.are_saved_tensors_hooked()


@check("autograd.saved_tensors_hooks_aside")
def _(host: Any) -> None:
    packed: list[str] = []

    def hooks(name: str) -> Any:
        def pack(x: Tensor) -> Tensor:
            packed.append(name)
            return x

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    x = torch.ones(1, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with host.saved_tensors_hooks_aside():
            x.exp()
        assert packed == []
        x.exp()
        assert packed == ["inner"]
    with hooks("outer"):
        with host.saved_tensors_hooks_aside():
            pass
        x.exp()
    assert packed == ["inner", "outer"]


# rnn


@check("rnn.pack_rows", "rnn.pad_rows")
def _(host: Any) -> None:
    x = torch.arange(6.0).view(3, 2)  # [T, B]
    rows, sizes = host.pack_rows(x, torch.tensor([3, 1]), False)
    assert rows.tolist() == [0, 1, 2, 4] and sizes.tolist() == [2, 1, 1]
    padded, lengths = host.pad_rows(rows, sizes, False, -1.0, 4)
    assert padded.tolist() == [[0, 1], [2, -1], [4, -1], [-1, -1]] and lengths.tolist() == [3, 1]


@check("rnn.flat_weights")
def _(host: Any) -> None:
    layer = nn.GRU(2, 3)
    weights = [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0]
    assert all(a is b for a, b in zip(host.flat_weights(layer), weights, strict=True))
    layer._flat_weights[0] = other = torch.zeros(9, 2)
    assert host.flat_weights(layer)[0] is other
    layer.bias_hh_l0 = nn.Parameter(torch.zeros(9))
    assert host.flat_weights(layer)[0] is layer.weight_ih_l0


@check("rnn.refresh_weights")
def _(host: Any) -> None:
    layer: Any = nn.GRU(2, 3)
    weights = {name: p * 1 for name, p in layer.named_parameters()}
    torch.func.functional_call(layer, weights, (torch.zeros(1, 1, 2),))
    assert not layer._flat_weights[0].is_leaf
    host.refresh_weights(layer)
    assert layer._flat_weights[0] is layer.weight_ih_l0
    layer._flat_weights[0] = other = torch.zeros(9, 2)
    host.refresh_weights(layer)
    assert layer._flat_weights[0] is other


# modules


@check("modules.BatchNorm", "modules.NormBase")
def _(host: Any) -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, host.BatchNorm)
    assert issubclass(nn.InstanceNorm2d, host.NormBase) and issubclass(nn.BatchNorm2d, host.NormBase)
    assert not issubclass(nn.InstanceNorm2d, host.BatchNorm) and not issubclass(nn.GroupNorm, host.NormBase)


@check("modules.held_by", "modules.INNER")
def _(host: Any) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3)})
    parameters, modules = host.held_by(model)
    assert parameters == {} and modules == {"a": model["a"]} and modules is getattr(model, host.INNER)
    assert list(host.held_by(model["a"])[0]) == ["weight", "bias"]


@check("loaders.drawing_iterator", "loaders.sampler_in", "loaders.count_returned")
def _(host: Any) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    class Batches(list[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            for batch in super().__iter__():
                drawn.append(host.drawing_iterator())
                yield batch

    for workers, ahead in ((0, 0), (1, 2)):
        drawn: list[Any] = []
        sampler = Batches([[0], [1], [2], [3]])
        loader: Any = DataLoader(TensorDataset(torch.arange(4)), batch_sampler=sampler, num_workers=workers)
        iterator = iter(loader)
        first = host.sampler_in(iterator)
        assert isinstance(first, types.GeneratorType) and first is host.sampler_in(iterator)
        for count in range(1, 3):
            assert host.count_returned(iterator) == count - 1
            next(iterator)
            assert host.count_returned(iterator) == count and drawn == [iterator] * (count + ahead)
    two = TensorDataset(torch.arange(2))
    loader = DataLoader(two, batch_sampler=Batches([[0], [1]]), num_workers=1, persistent_workers=True)
    assert len({id(iter(loader)) for _ in range(2)}) == 1  # one object
    epochs = []
    for _ in range(2):
        iterator = iter(loader)
        epochs.append((host.count_returned(iterator), host.sampler_in(iterator)))
        assert len(list(iterator)) == host.count_returned(iterator) == 2
    assert [count for count, _ in epochs] == [0, 0] and epochs[0][1] is not epochs[1][1]
    assert host.drawing_iterator() is None


@check("modules.wrapped_by_ddp")
def _(host: Any) -> None:
    assert host.wrapped_by_ddp() is None
    with nn.parallel.DistributedDataParallel._inside_ddp_forward(object.__new__(nn.parallel.DistributedDataParallel)):
        assert isinstance(host.wrapped_by_ddp(), nn.parallel.DistributedDataParallel)
    assert host.wrapped_by_ddp() is None


@check("modules.own_parameter")
def _(host: Any) -> None:
    class Hidden(nn.Linear):
        weight = property(lambda module: torch.zeros(2, 2))

    layer = nn.Linear(2, 2)
    own = layer.weight
    layer.__class__ = Hidden
    assert not layer.weight.any()
    layer.__class__ = type("Shown", (Hidden,), {"weight": host.own_parameter("weight")})
    assert layer.weight is own


@check("dtensors.dtensor_type")
def _(host: Any) -> None:
    import torch.distributed.tensor

    assert host.dtensor_type() is torch.distributed.tensor.DTensor


@check("dtensors.Chain", "dtensors.chain_of")
def _(host: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh = init_device_mesh("cpu", (1,))
        leaf: Any = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Shard(0)]))
        values = [
            leaf.redistribute(placements=[Replicate()], backward_dtype=dtype).to_local(grad_placements=[Partial("avg")])
            for dtype in (None, None, torch.float64)
        ]
        chains = [host.chain_of(value) for value in values]
        assert all(chain.source is leaf and chain.placements == (Replicate(),) for chain in chains)
        assert all(chain.grad_placements == (Partial("avg"),) for chain in chains)
        assert chains[0].settings == chains[1].settings != chains[2].settings
        assert host.chain_of(leaf.redistribute(placements=[Replicate()]).to_local()).grad_placements == ()
        for other in (2 * values[0], leaf.to_local(), torch.ones(3), (2 * leaf).full_tensor(), values[0].detach()):
            assert host.chain_of(other) is None
    finally:
        dist.destroy_process_group()


@check("modules.VERSIONS")
def _(host: Any) -> None:
    assert getattr(nn.BatchNorm1d(2).state_dict(), host.VERSIONS) == {"": {"version": 2}}


@check("modules.FSDP_MANAGED", "modules.FSDP_FLAT")
def _(host: Any) -> None:
    from torch.distributed.fsdp import _dynamo_utils, _flat_param

    part = nn.Linear(2, 2)
    _dynamo_utils._annotate_modules_for_dynamo(part, set(), True)
    assert part.__dict__.get(host.FSDP_MANAGED), "the attribute of modules inside of FSDP"
    source = Path(str(_flat_param.__file__)).with_name("fully_sharded_data_parallel.py").read_text()
    assert f'FLAT_PARAM = "{host.FSDP_FLAT}"' in source


@check(*(f"tensor_parallel.{name}" for name in "StyleHook style_hook style_hooks is_distributed".split()))
def _(host: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        parallelize_module,
    )

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh, layer, plain = init_device_mesh("cpu", (1,)), nn.Linear(3, 2), nn.Linear(3, 2)
        parallelize_module(layer, mesh, ColwiseParallel())
        ((before,), (after,), others) = host.style_hooks(layer)
        assert host.is_distributed(layer) and not host.is_distributed(plain) and not others
        whole, divided = (Replicate(),), (Shard(-1),)
        assert before == host.StyleHook("ColwiseParallel", (whole, whole), mesh)
        assert after == host.StyleHook("ColwiseParallel", (divided, True), mesh)
        parallelize_module(
            plain, mesh, PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        )
        ((prepares,), (), others) = host.style_hooks(plain)
        assert prepares == host.StyleHook("PrepareModuleInput", (whole, whole, False, {}, {}, False), mesh)
        parallelize_module(
            after_all := nn.Linear(3, 2),
            mesh,
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        )
        ((), (prepares,), others) = host.style_hooks(after_all)
        assert prepares == host.StyleHook("PrepareModuleOutput", (whole, whole, True), mesh)
        assert not others and host.style_hook(print) is None
    finally:
        dist.destroy_process_group()


@check("processes.shared_store")
def _(host: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        store = host.shared_store()
        store.set("fxgrad/a key", "a value")
        assert store.check(["fxgrad/a key"]) and not store.check(["fxgrad/another"])
        assert store.get("fxgrad/a key") == b"a value"
    finally:
        dist.destroy_process_group()


@check(
    *(
        f"fsdp.{name}"
        for name in "State state_of forward_hooks class_of register begin is_outermost inner_units".split()
    ),
    *(f"fsdp.{name}" for name in "groups free is_sharded reduce pairs precision offloads".split()),
    *(f"fsdp.{name}" for name in "gather_group reshards_after_forward show_wholes show_shards copies_of".split()),
    *(f"fsdp.{name}" for name in "in_order_of_reduction reduces_at_once reduce_group wholes_of".split()),
    "fsdp.cast_inputs",
    "fsdp.cast_outputs",
    "fsdp.manages",
    *(f"fsdp.{name}" for name in "local_part altered_reduction meshes_of".split()),
)
def _(host: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        mesh = init_device_mesh("cpu", (1,))
        model: Any = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        fully_shard(model[0], mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        inner = _unit(host, model[0])
        assert host.offloads(inner)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
        root, inner = (_unit(host, part) for part in (model, model[0]))
        assert host.class_of(type(model)) is nn.Sequential and host.class_of(nn.Linear) is nn.Linear
        assert host.precision(root) == (torch.bfloat16, torch.float64) and host.precision(inner) == (None, None)
        assert host.cast_inputs(root, (torch.ones(1),), {})[0][0].dtype is torch.bfloat16
        assert host.cast_outputs(root, torch.ones(1)).dtype is torch.float64
        assert not host.offloads(root) and host.is_outermost(inner)
        args, kwargs = host.begin([root], model, (torch.ones(4, 3),), {})
        assert torch.equal(args[0], torch.ones(4, 3)) and kwargs == {}
        assert host.inner_units(root) == [root, inner] and not host.is_outermost(inner)
        assert len(list(host.groups([root, inner]))) == 2 and host.is_sharded([root, inner])
        gathered = lambda *states: all(group.is_unsharded for group in host.groups(states))  # noqa: E731
        assert not gathered(root, inner)
        for group in host.groups([root, inner]):
            host.gather_group(group)
        assert gathered(root, inner) and not host.is_sharded([root, inner])
        shards = host.pairs([root, inner])
        assert host.manages(model.parameters()) and not host.manages(nn.Linear(2, 2).parameters())
        assert [type(whole) for _, whole in shards] == 4 * [nn.Parameter]
        assert host.meshes_of([root, inner]) == {id(whole): mesh for _, whole in shards}
        assert {id(whole) for _, whole in shards} == set(map(id, model.parameters()))
        for _, whole in shards:
            whole.grad = torch.ones_like(whole)
        host.free([root])
        assert not gathered(root, inner) and gathered(inner)
        host.reduce([root])
        assert not gathered(inner) and {id(shard) for shard, _ in shards} == set(map(id, model.parameters()))
        assert all(bool((p.grad.full_tensor() == 1).all()) for p in model.parameters())
        _gathers_and_reduces_one(host, root, inner, model[0])
        part = host.local_part(shards[0][0])
        assert type(part) is Tensor and part is host.local_part(shards[0][0]) and host.local_part(part) is part
        assert host.altered_reduction([inner]) == "" and host.altered_reduction([root]) == "MixedPrecisionPolicy"
        other = object.__new__(type(model))
        object.__setattr__(other, "__dict__", model.__dict__)
        host.register(other, root)
        other.set_requires_gradient_sync(False)
        assert not next(host.groups([root])).reduce_grads
    finally:
        dist.destroy_process_group()


def _gathers_and_reduces_one(host: Any, root: Any, inner: Any, module: Any) -> None:
    """One unit alone, which begins and ends in shards."""
    (group,) = host.groups([inner])
    assert host.in_order_of_reduction([root]) == [*host.groups([root, inner])]
    assert host.reshards_after_forward(group) and not host.reshards_after_forward(next(host.groups([root])))
    shard, wholes = module.weight, host.wholes_of(group)
    host.show_wholes(group)
    assert module.weight is wholes[0] and wholes[0].untyped_storage().nbytes() == 0
    host.show_shards(group)
    assert module.weight is shard
    copies = host.copies_of(group)
    assert host.is_sharded([inner]) and torch.equal(copies[0], shard.full_tensor())
    host.gather_group(group)
    assert all(one.is_unsharded for one in host.groups([inner])) and module.weight is wholes[0]
    assert host.reduces_at_once([root, inner])
    parts = host.reduce_group(group, [torch.full_like(whole, 3) for whole in wholes])
    assert parts[0][0] is shard and all(bool((part.full_tensor() == 3).all()) for _, part in parts)
    assert bool((shard.grad.full_tensor() == 1).all()) and wholes[0].grad is None
    host.free([inner])


def _unit(host: Any, module: nn.Module) -> Any:
    before, after = host.forward_hooks(module)
    (state,) = map(host.state_of, before.values())
    assert state is not None and [host.state_of(hook) for hook in after.values()] == [state]
    assert host.state_of(print) is None
    return state


@check("modules.has_backward_hooks", "modules.is_compiled_in_place")
def _(host: Any) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not host.has_backward_hooks(one) and not host.is_compiled_in_place(one)
    one.register_full_backward_hook(lambda *_: None)
    other.register_full_backward_pre_hook(lambda *_: None)
    assert host.has_backward_hooks(one) and host.has_backward_hooks(other)
    one.compile(backend="eager")
    assert host.is_compiled_in_place(one) and not host.is_compiled_in_place(other)


@check("modules.refuse_replicas")
def _(host: Any) -> None:
    from torch.nn.parallel.replicate import replicate

    class Part(nn.Module):
        pass

    host.refuse_replicas(Part, lambda: ValueError("no replicas"))
    with pytest.raises(ValueError, match="no replicas"):
        Part()._replicate_for_data_parallel()
    assert "_replicate_for_data_parallel()" in inspect.getsource(replicate), "what nn.DataParallel calls"


@check("modules.on_other_tensors")
def _(host: Any) -> None:
    model = nn.Linear(2, 2, bias=False)
    own = model.weight
    with host.on_other_tensors(model, {"weight": torch.zeros(2, 2)}):
        assert model(torch.ones(1, 2)).sum() == 0
    assert model.weight is own


@check("modules.without_checkpoints")
def _(host: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    x, runs = torch.ones(1, requires_grad=True), []

    def sine(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.sin(x)

    kept: list[Any] = []
    with host.without_checkpoints(), host.without_checkpoints():
        kept += [checkpoint(sine, x, use_reentrant=reentrant) for reentrant in (True, False)]
    kept += [checkpoint(sine, x, use_reentrant=reentrant) for reentrant in (True, False)]
    names = [type(y.grad_fn).__name__ for y in kept]
    assert names == ["SinBackward0", "SinBackward0", "CheckpointFunctionBackward", "SinBackward0"]
    for y, count in zip(kept, (0, 0, 1, 1), strict=True):
        runs.clear()
        y.backward()
        assert len(runs) == count


@check("modules.is_filled")
def _(host: Any) -> None:
    assert host.is_filled(nn.Linear(2, 2)) and not host.is_filled(nn.Linear.__new__(nn.Linear))


@check("modules.step_pre_hooks", "modules.own_step_hooks")
def _(host: Any) -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert list(host.step_pre_hooks(optimizer)) == [handle.id]
    step = torch.optim.Optimizer.profile_hook_step(lambda self: "stepped")
    bare = object.__new__(torch.optim.SGD)
    with pytest.raises(AttributeError) as caught:
        step(bare)
    assert str(caught.value)
    host.own_step_hooks(bare)
    assert not host.step_pre_hooks(bare) and step(bare) == "stepped"


@check("modules.has_scaled")
def _(host: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert not host.has_scaled(scaler)
    scaler.scale(torch.ones(1))
    assert host.has_scaled(scaler)


# dynamo


@check(
    "dynamo.TorchDynamoException", "dynamo.Unsupported", "dynamo.graph_break", "dynamo.TorchRuntimeError",
    "dynamo.UserError", "dynamo.InternalTorchDynamoError",
)  # fmt: skip
def _(host: Any) -> None:
    def broken(x: Tensor) -> Tensor:
        host.graph_break(msg="because I say so")
        return x

    with pytest.raises(host.Unsupported, match="because I say so"):
        captured(broken, torch.ones(2))
    with pytest.raises(host.TorchRuntimeError) as caught:
        captured(lambda x: x @ x, torch.ones(2, 3))
    assert str(caught.value)
    raised = (host.Unsupported, host.TorchRuntimeError, host.UserError, host.InternalTorchDynamoError)
    assert all(issubclass(kind, host.TorchDynamoException) for kind in raised)


@check("dynamo.BackendCompilerFailed", "dynamo.CaptureAgain")
def _(host: Any) -> None:
    told = []

    def backend(gm: Any, _: Any) -> Any:
        told.append(gm)
        if len(told) == 1:
            raise host.CaptureAgain
        raise ValueError("of the backend")

    with pytest.raises(host.BackendCompilerFailed) as error:
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
    assert isinstance(error.value.inner_exception, ValueError) and len(told) == 2


@check("dynamo.FailOnRecompileLimitHit", "dynamo.failed_guards", "dynamo.recompile_limit")
def _(host: Any) -> None:
    def power(x: Tensor, words: str) -> Tensor:
        return x * len(words)

    compiled = torch.compile(power, backend="eager", fullgraph=True)
    assert host.failed_guards(compiled) == []
    with torch._dynamo.config.patch(recompile_limit=2):
        assert host.recompile_limit() == 2
        compiled(torch.ones(1), "a")
        compiled(torch.ones(1), "bb")
        assert any("words" in reason for reason in host.failed_guards(compiled))
        with pytest.raises(host.FailOnRecompileLimitHit) as caught:
            compiled(torch.ones(1), "ccc")
        assert str(caught.value)


@check("dynamo.OptimizedModule", "dynamo.innermost_fn")
def _(host: Any) -> None:
    assert isinstance(torch.compile(nn.Linear(2, 2)), host.OptimizedModule)

    def inner() -> None: ...

    assert host.innermost_fn(torch.compiler.disable(inner)) is inner and host.innermost_fn(inner) is inner


@check("dynamo.mark_dynamic", "dynamo.maybe_mark_dynamic", "dynamo.MARKS", "dynamo.MARKS_OF_SAVED")
def _(host: Any) -> None:
    for mark in (host.mark_dynamic, host.maybe_mark_dynamic):
        x = torch.ones(5, 2)
        mark(x, 0)
        assert vars(x) and vars(x).keys() <= set(host.MARKS), sorted(vars(x))
        product = captured(lambda x: x * 2, x).graph.find_nodes(op="call_function", target=MUL)[0]
        shape = product.meta["example_value"].shape
        assert isinstance(shape[0], torch.SymInt) and shape[1] == 2
        torch._dynamo.reset()
    assert set(host.MARKS_OF_SAVED) < set(host.MARKS)
    x, w = torch.ones(5, 2), torch.ones(2, requires_grad=True)
    host.mark_dynamic(x, 0)
    torch.compile(lambda x, w: (x * w).exp(), backend="aot_eager")(x, w)
    assert vars(x).keys() <= set(host.MARKS), sorted(vars(x))


@check("dynamo.active_callback")
def _(host: Any) -> None:
    said = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def outside() -> None:
        said.append(host.active_callback())

    def function(x: Tensor) -> Tensor:
        outside()
        return x * 2

    assert host.active_callback() is None
    torch.compile(function, backend="eager")(torch.ones(1))
    assert host.active_callback() is None and said == [None]


@check("dynamo.compilation", "dynamo.compile_lock")
def _(host: Any) -> None:
    begun: list[bool] = []
    triggers: list[str] = []

    def begin(event: Any) -> None:
        triggers.append(event.callback_trigger.name)

        def grab() -> None:
            begun.append(not host.compile_lock.acquire(blocking=False))

        thread = threading.Thread(target=grab)
        thread.start()
        thread.join()

    host.compilation.register_start_callback(begin)
    assert begin in host.compilation.start_callbacks
    try:
        captured(lambda x: x * 2, torch.ones(1))
    finally:
        host.compilation.remove_start_callback(begin)
    assert begun == [True], "a compilation begins with its callbacks, and holds its lock"
    assert triggers == ["DYNAMO"], "a callback gets what a compilation begins with"
    with host.compile_lock, host.compile_lock:  # the same thread may take it again
        pass


@check("dynamo.ConstantSource")
def _(host: Any) -> None:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    symbol = env.create_symbol(7, host.ConstantSource("rows"), DimDynamic.DYNAMIC, None)
    assert isinstance(env.create_symintnode(symbol, hint=7, source=host.ConstantSource("rows")), torch.SymInt)


@check("dynamo.checkpoint_contexts")
def _(host: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    def contexts() -> Any:
        return contextlib.nullcontext(), contextlib.nullcontext()

    def outer(x: Tensor, context_fn: Any = None) -> Any:
        more = {} if context_fn is None else {"context_fn": context_fn}
        return checkpoint(torch.sin, x, use_reentrant=False, **more)

    for given in (contexts, None):
        gm = captured(lambda x, given=given: outer(x, given), torch.ones(1, requires_grad=True))
        bodies = [part for part in gm.children() if isinstance(part, torch.fx.GraphModule)]
        assert [host.checkpoint_contexts(body) for body in bodies] == [given], "in the meta of a checkpoint's body"
        torch._dynamo.reset()


@check("dynamo.recurrent_modules_allowed")
def _(host: Any) -> None:
    model, x = nn.GRU(2, 3), torch.ones(4, 1, 2)
    with host.recurrent_modules_allowed():
        captured(model, x)
    torch._dynamo.reset()
    with pytest.raises(host.Unsupported) as caught:
        captured(model, x)
    assert str(caught.value)


@check("dynamo.traces_backward")
def _(host: Any) -> None:
    assert host.traces_backward() is False
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            assert host.traces_backward() is True


@check("leaves.leaves_followed", "leaves.BEGINS")
def _(host: Any) -> None:
    """What is followed, and what is not, tests/test_leaves.py sees."""
    from torch._dynamo.exc import Unsupported

    seen = []

    def inner(x: Tensor) -> Tensor:
        y = (x * 2).requires_grad_()
        seen.append((y + 1).requires_grad)
        return y * 3

    def assigned(x: Tensor) -> Tensor:
        y = x * 2
        y.requires_grad = True
        seen.append((y + 1).requires_grad)
        return y * 3

    for function in (inner, assigned):
        with host.leaves_followed():
            gm = captured(function, torch.ones(1))
        assert seen == [True] and "requires_grad" not in gm.code
        assert [node.target for node in gm.graph.nodes if host.BEGINS in node.meta] == [operator.mul]
        seen.clear()
        torch._dynamo.reset()
        with pytest.raises(Unsupported, match="requires_grad"):
            captured(function, torch.ones(1))
        torch._dynamo.reset()


@check("dynamo.specialize_floats", "dynamo.release_floats")
def _(host: Any) -> None:
    inputs: list[int] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        inputs.append(len(values))
        if host.specialize_floats(values):
            raise host.CaptureAgain
        return gm

    numbers = {"rate": 0.0}
    run = torch.compile(lambda x: x * numbers["rate"], backend=backend)
    for numbers["rate"] in (0.5, 0.7, 0.9):
        assert run(torch.ones(1)).item() == pytest.approx(numbers["rate"])
    assert inputs == [1, 2, 1, 1], "a float that changed is an input, then a constant, as it is in later captures"
    host.release_floats()
    numbers["rate"] = 0.4
    run(torch.ones(1))
    assert inputs[4:] == [2, 1], "until it is released"
    host.release_floats()


@check("dynamo.sizes_apart")
def _(host: Any) -> None:
    def symbols() -> int:
        torch._dynamo.reset()
        graph = captured(lambda x, y: (x * 2, y * 2), torch.ones(5, 2), torch.ones(5, 3), dynamic=True).graph
        sizes = [node.meta["example_value"].shape[0] for node in graph.find_nodes(op="call_function", target=MUL)]
        return len({size.node.expr for size in sizes})

    logs = torch._guards.log, torch._subclasses.fake_tensor.log
    assert symbols() == 1
    with host.sizes_apart():
        assert all(log.disabled for log in logs) and symbols() == 2
    assert symbols() == 1 and not any(log.disabled for log in logs)


@check("dynamo.unrecorded")
def _(host: Any) -> None:
    def recorded() -> bool:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x * 2, backend="eager")
        compiled(torch.ones(2))
        with torch.profiler.profile(acc_events=True) as profiler:
            compiled(torch.ones(2))
        return any(event.name == "Pregraph bytecode" for event in profiler.events())

    assert recorded()
    with host.unrecorded():
        assert not recorded()


@check("dynamo.sizes_read_plainly")
def _(host: Any) -> None:
    def helper_is_called() -> bool:
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x * x.shape[0] + x.stride(0), backend="eager", dynamic=True)
        compiled(torch.ones(3, 2))
        with mock.patch.object(torch._dynamo.utils, "call_size", wraps=torch._dynamo.utils.call_size) as helper:
            assert compiled(torch.ones(5, 2)).eq(7).all()
        return bool(helper.called)

    before = torch._dynamo.source.TensorPropertySource.reconstruct
    assert helper_is_called()
    with host.sizes_read_plainly():
        assert not helper_is_called()
    assert torch._dynamo.source.TensorPropertySource.reconstruct is before


@check("dispatch.is_profiled")
def _(host: Any) -> None:
    assert not host.is_profiled()
    with torch.profiler.profile():
        assert host.is_profiled()
    assert not host.is_profiled()


@torch.library.custom_op("fxgrad_tests::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    return x * 3


tripled.register_fake(torch.empty_like)


@check("names.called_as")
def _(host: Any) -> None:
    called, x = "torch.ops.fxgrad_tests.tripled.default", torch.ones(3)
    for names in {called: "torch.square"}, {"torch.ops.aten.mm.default": "torch.square"}:
        torch._dynamo.reset()
        with torch._inductor.utils.fresh_cache(), host.called_as(names):
            assert torch.compile(tripled)(x + 1).eq(4 if called in names else 6).all()
    torch._dynamo.reset()
    with torch._inductor.utils.fresh_cache():
        assert torch.compile(tripled)(x + 1).eq(6).all()


@check("patches.set_meanwhile")
def _(host: Any) -> None:
    setting: ContextVar[int] = ContextVar("setting", default=0)
    seen: list[int] = []
    with pytest.raises(ZeroDivisionError, match=r"^$"), host.set_meanwhile(setting, 1) as value:
        other = threading.Thread(target=lambda: seen.append(setting.get()))
        other.start()
        other.join()
        seen.append(setting.get())
        raise ZeroDivisionError
    assert seen == [0, 1] and value == 1 and setting.get() == 0


@check("conversions.converts_through_memory", "conversions.in_front")
def _(host: Any) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.double() * 3 + y, (y * x.double()).float()

    x, y = torch.randn(5, 37), torch.randn(5, 37, dtype=torch.float64)
    x[0, :3], y[1, :3] = torch.tensor([math.nan, math.inf, -0.0]), torch.tensor([1e300, -1e300, 1e-310])
    for text in conversions(), "// nothing\n":
        torch._dynamo.reset()
        with torch._inductor.utils.fresh_cache(), host.in_front(text):
            found, codes = run_and_get_code(torch.compile(function), x, y)
        assert all(map(torch.equal, *([one.nan_to_num(7e7) for one in all] for all in (found, function(x, y)))))
        if host.converts_through_memory():
            assert text and text.strip().splitlines()[-1] in codes[0]


@check("inductor.Kernel", "inductor.reordered")
def _(host: Any) -> None:
    seen: list[Any] = []

    def choose(orders: Any) -> tuple[int, list[int]]:
        kernels, given = orders
        seen.append(kernels)
        assert all(isinstance(kernel, host.Kernel) for kernel in (*kernels, *given))
        assert sorted(kernel.made for kernel in given) == sorted(kernel.made for kernel in kernels)
        return 1, sorted(range(len(given)), key=lambda i: (len(given[i].behind), -i))

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y) @ (y @ x)

    x, y = torch.randn(64, 64), torch.randn(64, 64)
    with torch._inductor.utils.fresh_cache():
        with host.reordered(choose):
            torch.testing.assert_close(torch.compile(function)(x, y), function(x, y), atol=1e-3, rtol=1e-3)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function)(x, y), function(x, y), atol=1e-3, rtol=1e-3)
    if not at_least("2.13"):
        assert not seen
        return
    (kernels,) = seen
    size = 4 * 64 * 64
    assert [kernel.behind for kernel in kernels] == [frozenset(), frozenset(), frozenset({0, 1})]
    assert [size, size] == [kernel.made for kernel in kernels[:2]]
    assert (size, frozenset({2})) in kernels[2].reads and not any(kernel.acts for kernel in kernels)


@check("lookup.run_found", "lookup.is_usual")
def _(host: Any) -> None:
    traced: list[bool] = []

    def function(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            traced.append(False)
            raise KeyError("no graph")
        return x + 1

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(KeyError, match="no graph"):
        host.run_found(compiled, (torch.ones(3),), {})
    compiled(torch.ones(3))
    assert torch.equal(host.run_found(compiled, (torch.ones(3),), {}), 2 * torch.ones(3)) and traced == [False]
    with pytest.raises(KeyError, match="no graph"):
        host.run_found(compiled, (torch.ones(3, dtype=torch.float64),), {})
    assert active_callback() is None

    def fails(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.embedding(torch.tensor([7]), x)

    failing = torch.compile(fails, backend="eager", fullgraph=True)
    failing(torch.ones(9, 2))
    with contextlib.suppress(IndexError):
        host.run_found(failing, (torch.ones(9, 2)[:3],), {})
    assert not torch.is_autocast_enabled("cpu") and active_callback() is None
    assert host.is_usual(compiled) and not host.is_usual(function)
    with torch.compiler.set_stance("force_eager"):
        assert not host.is_usual(compiled)


@check("lookup.FoundGraph")
def _(host: Any) -> None:
    factor = torch.ones(3)

    def function(*args: Tensor, **kwargs: Any) -> Tensor:
        return args[0] * factor

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert host.FoundGraph.of(compiled) is None
    compiled(torch.ones(3))
    graph = host.FoundGraph.of(compiled)
    if not at_least("2.13"):
        assert graph is None
        return
    assert graph.fits((torch.ones(3),)) and torch.equal(graph.call(2 * torch.ones(3)), 2 * torch.ones(3))
    others = [(torch.ones(4),), (torch.ones(3), torch.ones(3)), (torch.ones(3, dtype=torch.float64),), (3,), ()]
    assert not any(map(graph.fits, others))
    with torch.no_grad():
        assert not graph.fits((torch.ones(3),))
    assert active_callback() is None and graph.fits((torch.ones(3),))
    compiled(torch.ones(3, dtype=torch.float64))
    tried = host.FoundGraph.of(compiled)
    assert tried.fits((torch.ones(3, dtype=torch.float64),)) and not graph.fits((torch.ones(3),))
    torch._dynamo.reset()
    assert not graph.fits((torch.ones(3),)) and not tried.fits((torch.ones(3, dtype=torch.float64),))


@check("autograd.run_backward")
def _(host: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    host.run_backward((x.sum(),), (torch.tensor(3.0),), False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert torch.equal(x.grad, 3 * torch.ones(2))  # type: ignore[arg-type]
    assert host.run_backward.__code__ is host.BACKWARD_CODE


@check("autograd.held_by_others")
def _(host: Any) -> None:
    other, leaf = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not host.held_by_others([other, leaf])
    loss = leaf.sum()
    assert host.held_by_others([other, leaf]) == at_least("2.13")  # a graph holds the node, and nobody in Python
    node: Any = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert host.held_by_others([other, leaf])
    del node, loss
    assert not host.held_by_others([other, leaf])


@check("dynamo.as_it_is")
def _(host: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    graphs: list[fx.GraphModule] = []

    def hook(g: Tensor) -> Tensor:
        return g.sin()

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    x.register_hook(host.as_it_is(hook))
    y = x.sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo looks at y.grad
        torch.compile(lambda: y.backward(), backend=keep)()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3).sin()), "the function runs"
    assert not any("sin" in gm.code for gm in graphs), "a function that Dynamo left alone"


@check("dynamo.calls_ignored")
def _(host: Any) -> None:
    said = []

    def tell(x: Any) -> None:
        said.append(x)

    def told(x: Tensor) -> Tensor:
        tell(x)
        return x * 2

    with host.calls_ignored([print]), host.calls_ignored([tell]):
        captured(told, torch.ones(1))
    assert not said, "a call that Dynamo left out"
    both = host._LoggedByName([tell]).union([print])
    assert tell in both and print in both and sorted(both) == sorted([tell.__qualname__, "print"])


@check("dynamo.substitute")
def _(host: Any) -> None:
    """That a rule of Dynamo's is taken away first, tests/test_packed.py sees."""

    def original(x: Tensor) -> Tensor:
        return x + int(x.sum().item() * 0 + 1)

    host.substitute(original, lambda x: x * 7)
    assert captured(lambda x: original(x), torch.ones(1)).graph.find_nodes(op="call_function", target=MUL)
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    assert isinstance(get_torch_obj_rule_map(), dict)


@check("dynamo.traced_in")
def _(host: Any) -> None:
    from fxgrad.host.fake import FakeTensorMode

    mode = FakeTensorMode()
    with host.traced_in(mode):
        assert torch._guards.detect_fake_mode() is mode
    assert torch._guards.detect_fake_mode() is None


@check("dynamo.lazy_graph_module")
def _(host: Any) -> None:
    gm = torch.fx.symbolic_trace(lambda x: x * 2)
    lazy = host.lazy_graph_module(gm, gm.graph, "Doubled")
    assert lazy._needs_recompile() and lazy(torch.ones(1)).item() == 2
    assert isinstance(lazy, torch.fx.GraphModule)


@check("dynamo.find_main")
def _(host: Any) -> None:
    from torch._dynamo import symbolic_convert

    real, other = sys.modules["__main__"], types.ModuleType("__main__")
    namespace = {"__import___main__": real}
    host.find_main(namespace)
    assert namespace == {"__import___main__": real} and symbolic_convert._import_module("__main__") is real
    sys.modules["__main__"] = other
    try:
        host.find_main(namespace)
        assert not namespace and symbolic_convert._import_module("__main__") is other
    finally:
        sys.modules["__main__"] = real
        host.find_main(namespace)


@check("dynamo.written_now")
def _(host: Any) -> None:
    gm = torch.fx.symbolic_trace(lambda x: x * 2)
    lazy = host.lazy_graph_module(gm, gm.graph, "Doubled")
    host.written_now(lazy)
    assert not lazy._needs_recompile() and lazy.forward(torch.ones(1)).item() == 2
    host.written_now(gm)  # any other has its code


# inductor


@check("inductor.import_toolchain", "inductor.load_library", "inductor.find_vectors")
def _(host: Any) -> None:
    host.import_toolchain()
    host.find_vectors()
    library = host.load_library('extern "C" int fxgrad_tests_seven() { return 7; }')
    assert library.fxgrad_tests_seven() == 7


@check("inductor.graphs_called", "inductor.run_without_gradients")
def _(host: Any) -> None:
    torch._dynamo.reset()
    compiled, x, y = torch.compile(lambda x, y: (x @ y).exp()), torch.ones(3, 3), torch.ones(3, 3)
    with host.graphs_called() as calls:
        found = compiled(x, y)
    ((graph, given, returned),) = calls
    assert [*map(id, given)] == [id(x), id(y)] and returned[0] is found
    compiled(x, y)
    assert len(calls) == 1
    p = torch.ones(3, 3, requires_grad=True)
    (again,) = host.run_without_gradients(graph, [p, y])
    assert torch.is_grad_enabled() and again.equal(found) and not again.requires_grad


@check("inductor.find_compiler", "inductor.cache_folder")
def _(host: Any) -> None:
    run = subprocess.run([host.find_compiler(), "--version"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout
    folder = Path(host.cache_folder())
    assert folder.is_dir() and str(folder) == os.environ["TORCHINDUCTOR_CACHE_DIR"]


@check("inductor.import_compiler", "inductor.compile_fx", "inductor.compile_traced")
def _(host: Any) -> None:
    from fxgrad.host.functorch import aot_settings

    host.import_compiler()
    seen, x = [], torch.ones(3)

    def inner(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[0])
        return host.compile_traced(*args, **kwargs)

    def backend(gm: Any, examples: Any) -> Any:
        return host.compile_fx(gm, examples, inner_compile=inner)

    with aot_settings(enable_autograd_cache=False):  # which would keep what the inner compiler made
        assert torch.compile(lambda x: x * 2 + 1, backend=backend)(x).tolist() == [3, 3, 3]
    assert len(seen) == 1


@check("inductor.show_bases")
def _(host: Any) -> None:
    """What it is for, tests/test_on_cpu.py sees."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    output = graph.output((x, x, x, x))
    gm = fx.GraphModule(nn.Module(), graph)
    output.meta["user_visible_output_idxs"] = [0]
    assert host.show_bases(gm) is False
    assert output.meta["user_visible_output_idxs"] == [0]  # outside of a trace nothing is known
    context = torch._guards.TracingContext(None)
    described: Any = SimpleNamespace(num_forward_returns=3, num_intermediate_bases=2)
    context.fw_metadata = described
    with torch._guards.tracing(context):
        assert host.show_bases(gm) is True
    assert output.meta["user_visible_output_idxs"] == [0, 1, 2]
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta

    assert "num_intermediate_bases" in ViewAndMutationMeta.__annotations__


@check("inductor.before_partition")
def _(host: Any) -> None:
    """Behind the user's own, where a forward is still with its backward; the user's setting comes back."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    order: list[str] = []

    class Users(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            order.append("user's")

        def uuid(self) -> str:
            return "user's"

    users = Users()
    with config.patch(joint_custom_post_pass=users):
        with host.before_partition(lambda graph: order.append("ours")):
            assert "user's" in getattr(config.joint_custom_post_pass, "uuid")()  # noqa: B009
            x = torch.ones(3, requires_grad=True)
            torch.compile(lambda x: x.square().sum(), backend=host.compile_fx)(x).backward()
        assert config.joint_custom_post_pass is users
    assert order[:2] == ["user's", "ours"]


@check("layouts.read_as_traced")
def _(host: Any) -> None:
    """What a convolution has computed comes with its channels last; this kernel takes a contiguous value only."""
    import_compiler()
    x = torch.rand(2, 3, 4, 4)

    def compiled() -> Any:
        graph = fx.Graph()
        last = graph.call_function(
            torch.ops.aten.clone.default, (graph.placeholder("x"),), {"memory_format": torch.channels_last}
        )
        value = graph.call_function(torch.ops.aten.sin.default, (last,))
        copied = graph.call_function(torch.ops.aten.clone.default, (value,), {"memory_format": torch.contiguous_format})
        graph.output((value, graph.call_function(torch.ops.aten.linalg_matrix_exp.default, (copied,))))
        return torch._inductor.compile_fx.compile_fx_inner(fx.GraphModule(nn.Module(), graph), [x])

    with host.read_as_traced():
        of_traced = compiled()
    torch.testing.assert_close(of_traced([x])[1], torch.matrix_exp(x.sin()))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        compiled()([x])


@check("layouts.written_as")
def _(host: Any) -> None:
    """Its effect on a backward, tests/test_on_cpu.py sees."""
    import_compiler()
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = host.written_as(graph.call_function(torch.ops.aten.neg.default, (x,)), (1, 2))
    graph.output((node,))
    gm = fx.GraphModule(nn.Module(), graph)
    compiled = torch._inductor.compile_fx.compile_fx_inner(gm, [torch.randn(2, 3)])
    given = torch.randn(2, 3)
    (result,) = compiled([given])
    assert torch.equal(result, -given) and result.stride() == (1, 2)


@check("layouts.write_as_inferred")
def _(host: Any) -> None:
    """Its effect on one graph of a whole step, tests/test_channels_last.py sees."""
    import_compiler()
    seen: list[bool] = []

    @torch.library.custom_op("fxgrad_tests::in_any_layout", mutates_args=(), tags=(torch.Tag.flexible_layout,))
    def in_any_layout(x: Tensor) -> Tensor:
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return x.sum()

    in_any_layout.register_fake(lambda x: x.new_empty(()))
    for written in (False, True):
        graph = fx.Graph()
        last: Any = {"memory_format": torch.channels_last}
        copied = graph.call_function(torch.ops.aten.clone.default, (graph.placeholder("x"),), last)
        value = graph.call_function(torch.ops.aten.exp.default, (copied,))
        if written:
            host.write_as_inferred(value)
        graph.output((graph.call_function(torch.ops.fxgrad_tests.in_any_layout.default, (value,)),))
        gm = fx.GraphModule(nn.Module(), graph)
        torch._inductor.compile_fx.compile_fx_inner(gm, [torch.randn(2, 3, 4, 5)])([torch.randn(2, 3, 4, 5)])
    assert seen == [False, True]


@check("inductor.decompositions")
def _(host: Any) -> None:
    assert torch.ops.aten.native_layer_norm.default in host.decompositions()


@check("inductor.aot_eager")
def _(host: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    changed: list[Any] = []
    torch.compile(lambda x: x.square().sum(), backend=host.aot_eager(changed.append))(x).backward()
    assert len(changed) == 1 and isinstance(changed[0], fx.Graph)
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2]


@check("inductor.keep_renames")
def _(host: Any) -> None:
    """What it is for, tests/test_inductor.py sees."""
    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerNode

    assert {"mutation_renames", "read_writes"} <= {*dir(BaseSchedulerNode), *BaseSchedulerNode.__annotations__}
    assert "set_read_writes" in dir(SchedulerNode) and "recompute_size_and_body" in vars(SchedulerNode)
    done: list[Any] = []
    node = SimpleNamespace(
        read_writes=SimpleNamespace(rename=lambda names: ("renamed", names)),
        mutation_renames={"a": "b"},
        set_read_writes=done.append,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SchedulerNode, "recompute_size_and_body", lambda node, more: done.append(more))
        host.keep_renames()
        SchedulerNode.recompute_size_and_body(node, "sizes")  # type: ignore[arg-type]
    assert done == ["sizes", ("renamed", {"a": "b"})]


@check("inductor.bind_floats")
def _(host: Any) -> None:
    """What it is for, tests/test_inductor.py sees."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    shapes = ShapeEnv()
    graph = fx.Graph()
    read = {name: graph.placeholder(name) for name in ("float", "same", "less", "int", "tensor")}
    number: Any = shapes.create_unbacked_symfloat()
    values = (number, number, number - 1, shapes.create_unbacked_symint(), torch.ones(1))
    for node, value in zip(read.values(), values, strict=True):
        node.meta["val"] = value
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_symbol_binding_fx_node", "find_symbol_binding_fx_nodes"):
            patch.setattr(partitioners, name, getattr(partitioners, name))
        host.bind_floats()
        assert list(partitioners.find_symbol_binding_fx_nodes(graph).values()) == [read["float"], read["int"]]
        assert partitioners.is_symbol_binding_fx_node(read["less"]) is None
