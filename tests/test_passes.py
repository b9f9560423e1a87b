"""Each pass on a small model: where it must not fire, what it refuses. What it makes of a graph is in tests/passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxgrad
from fxgrad.api import engine_of
from fxgrad.compile.pipeline import PASSES, copy_graph, run_passes
from fxgrad.errors import MixedSamples, SpecViolation, UncoveredParameter, UnknownOp
from fxgrad.graph.context import last_own_line
from fxgrad.passes.attach_taps import attach_taps
from fxgrad.passes.prove_coverage import prove_coverage
from fxgrad.passes.prove_independence import prove_independence
from fxgrad.proof.following import Follow
from fxgrad.proof.rules import RULES
from fxgrad.runtime.targets import DeriveTarget, TapTarget
from fxgrad.tracing import Trace, capture
from tests.passes.pictures import Program, Small, X


def after(name: str, model: nn.Module, *args: Tensor) -> Trace:
    """The graph as the named pass leaves it."""
    names = [run.__name__ for run in PASSES]
    engine = engine_of(fxgrad.transform(model))
    assert engine is not None
    return capture(engine, args, {}, PASSES[: names.index(name) + 1])


def nodes(trace: Trace, kind: type) -> list[fx.Node]:
    return [node for node in trace.graph_module.graph.nodes if isinstance(node.target, kind)]


def layouts(function: Callable[..., Any], *args: Tensor) -> list[str]:
    """What infer_samples says of every value that a function computes."""
    trace = after("infer_samples", Program(function), *args)
    return [
        str(node.meta["samples"])
        for node in trace.graph_module.graph.nodes
        if "call" in node.meta and node.meta["samples"] is not None
    ]


def test_separate_draws_gives_each_sample_its_mask() -> None:
    def attend(own: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=own.w, dropout_p=0.5)

    text = str(after("separate_draws", Program(attend), torch.randn(3, 4, 5)))
    assert "expand = expand(w, B, -1, -1)" in text and "attn_mask=expand" in text


def test_separate_draws_must_not_fire_on_samples() -> None:
    def drop(own: Any, x: Tensor) -> Tensor:
        q = F.dropout(x @ own.w, 0.5)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=own.w, dropout_p=0.0)

    before, now = (after(name, Program(drop), torch.randn(3, 4, 4)) for name in ("infer_samples", "separate_draws"))
    assert str(before) == str(now)


def test_separate_writes_must_not_fire_on_samples_or_on_what_nothing_else_reads() -> None:
    def written(m: Program, x: Tensor) -> Tensor:
        h = x @ m.w
        h[:, 0].mul_(m.b[0])
        return h + (m.b * 2).add_(1)

    trace = after("separate_writes", Program(written), torch.randn(3, 4))
    assert "clone" not in str(trace)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


def test_normalize_calls() -> None:
    spellings: list[Callable[..., Any]] = [
        lambda own, x: x + own.b,
        lambda own, x: torch.add(x, own.b),
        lambda own, x: x.add(own.b),
        lambda own, x: torch.ops.aten.add.Tensor(x, own.b),
    ]
    for spelling in spellings:
        graph = after("normalize_calls", Program(spelling), torch.randn(3, 4)).graph_module.graph
        (call,) = [node.meta["call"] for node in graph.nodes if "call" in node.meta]
        arguments = {name: str(value) for name, value in call.arguments.items()}
        assert call.op == "add" and not call.inplace
        assert list(arguments) == ["input", "other", "alpha"] and arguments["alpha"] == "1"
        assert call.given == {"input", "other"}


def test_normalize_calls_leaves_the_native_call_alone() -> None:
    before, now = (after(name, Small(), X) for name in ("propagate_shapes", "normalize_calls"))
    assert str(before) == str(now)


def test_decompose_calls_writes_attention_in_known_ops() -> None:
    graph = after("decompose_calls", Attention(), torch.randn(3, 5, 4)).graph_module.graph
    ops = [node.meta["call"].op for node in graph.nodes if "call" in node.meta]
    assert "multi_head_attention_forward" not in ops
    assert ops.count("linear") == 2 and ops.count("scaled_dot_product_attention") == 1


def test_decompose_calls_must_not_fire_on_known_ops() -> None:
    before, now = (after(name, Small(), X) for name in ("normalize_calls", "decompose_calls"))
    assert str(before) == str(now)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda own, x: x.transpose(0, 1), ["batched(1)"]),
        (lambda own, x: x.transpose(0, 1).reshape(-1, 4), ["batched(1)", "batched(0, 3, 1)"]),
        (lambda own, x: x.reshape(-1, 4), ["batched(0, 1, 3)"]),
        (lambda own, x: x.repeat(2, 1, 1), ["batched(0, 2, 1)"]),
        (lambda own, x: x.repeat_interleave(2, 0), ["batched(0, 1, 2)"]),
        (lambda own, x: x.flatten(1).view(-1, 2, 6).flatten(0, 1), ["batched(0)", "batched(0)", "batched(0, 1, 2)"]),
        (lambda own, x: torch.cat([own.b.expand(len(x), 1, 4), x], 1)[:, 1:], ["batched(0)"] * 3),
        (lambda own, x: x.roll(1, 1), ["batched(0)"]),
        (lambda own, x: x[torch.arange(len(x)), 1], ["constant", "batched(0)"]),
        (lambda own, x: own.w * own.b, ["uniform"]),
        (lambda own, x: x.mean(), ["mixed"]),
    ],
)
def test_infer_samples_follows(function: Callable[..., Any], expected: list[str]) -> None:
    assert layouts(lambda own, x: (function(own, x), x @ own.w), torch.randn(5, 3, 4))[: len(expected)] == expected


@pytest.mark.parametrize("move", [lambda x: x.flip(0), lambda x: x.roll(1, 0), lambda x: x[torch.randperm(len(x))]])
def test_infer_samples_refuses_moved_samples(move: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(MixedSamples, match="matmul lets samples influence each other"):
        layouts(lambda own, x: move(x) @ own.w, torch.randn(5, 4))


@pytest.mark.parametrize("use", [lambda pairs: pairs.sum(1), lambda pairs: pairs.t(), lambda pairs: pairs * 2])
def test_infer_samples_refuses_pairs_of_samples_unless_returned(use: Callable[[Tensor], Tensor]) -> None:
    assert layouts(lambda own, x: (x @ own.w) @ (x @ own.w).t(), torch.randn(5, 4))[-1] == "mixed"
    with pytest.raises(MixedSamples, match="pairs of samples"):
        layouts(lambda own, x: use((x @ own.w) @ (x @ own.w).t()), torch.randn(5, 4))


def test_propagate_shapes_refuses_a_fixed_batch() -> None:
    with pytest.raises(fxgrad.FxgradError, match=r"fixes (its|the) batch size|every number of samples"):
        fxgrad.trace(Program(lambda own, x: x.view(5, 4) @ own.w), torch.randn(5, 4))


def test_attach_taps_must_not_fire_without_a_gradient() -> None:
    def frozen(own: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = own.b * 2
        result: Tensor = x @ own.w.detach() * scale + own.b
        return result

    trace = fxgrad.trace(Program(frozen), torch.randn(3, 4))
    assert [node.target.strategy.use.op for node in nodes(trace, TapTarget)] == ["add"]  # type: ignore[union-attr]
    assert not nodes(trace, DeriveTarget)


def test_attach_taps_refuses_a_parameter_in_a_sum_over_samples() -> None:
    with pytest.raises(fxgrad.FxgradError, match="add lets samples influence each other"):
        fxgrad.trace(Program(lambda own, x: (x @ own.w).sum() + own.b.sum()), torch.randn(3, 4))


def test_prove_coverage_finds_a_missing_tap() -> None:
    trace = after("attach_taps", Small(), X)
    graph_module = copy_graph(trace.graph_module)
    tap = next(node for node in graph_module.graph.nodes if isinstance(node.target, TapTarget))
    tap.replace_all_uses_with(tap.args[2])
    graph_module.graph.erase_node(tap)
    with pytest.raises(UncoveredParameter, match="where no tap sees it"):
        run_passes(graph_module, trace.context, [prove_coverage])


def test_the_spec_finds_a_bypassed_tap() -> None:
    def bypass(gm: fx.GraphModule, ctx: Any) -> fx.GraphModule:
        tap = next(node for node in gm.graph.nodes if isinstance(node.target, TapTarget))
        user = next(iter(tap.users))
        user.replace_input_with(tap, tap.args[2])
        return gm

    bypass.__name__ = "attach_taps"
    trace = after("attach_taps", Small(), X)
    with pytest.raises(SpecViolation, match="is bypassed by"):
        run_passes(trace.graph_module, trace.context, [bypass])


def test_passes_leave_the_graph_before_them_as_it_was() -> None:
    trace = after("infer_samples", Small(), X)
    before = str(trace)
    run_passes(trace.graph_module, trace.context, [attach_taps, prove_coverage, prove_independence])
    assert str(trace) == before


def test_trace_runs_nothing() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    state = torch.random.get_rng_state()
    fxgrad.trace(model, torch.ones(4, 3))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_a_lost_layout_names_the_line() -> None:
    with pytest.raises(MixedSamples, match="cannot be followed") as caught:
        fxgrad.trace(Program(lambda own, x: own.b.repeat(len(x)).view(4, -1).t() + x), torch.randn(3, 4))
    assert caught.value.where.startswith("test_passes.py:")


@pytest.mark.parametrize("folder", ["/home/me/fxgrad", "/home/me/fxgrad/examples", "/home/me"])
def test_lines_of_a_folder_that_is_called_as_the_package(folder: str) -> None:
    """A clone's folder has its name."""
    own = f'  File "{folder}/model.py", line 7, in forward\n    return x - x.mean(0)\n'
    inside = f'  File "{fxgrad.__path__[0]}/api.py", line 9, in __call__\n    return call()\n'
    assert last_own_line(own + inside) == "model.py:7   return x - x.mean(0)"


class Layers(nn.Module):
    """Equal layers; one may write to its input, or hide a write from the graph."""

    def __init__(self, depth: int, change: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(depth))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.change(x)
        return x


def followed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many ATen ops the proof follows."""
    count = 0
    record = Follow._record

    def counted(self: Follow, *args: Any) -> None:
        nonlocal count
        count += 1
        record(self, *args)

    monkeypatch.setattr(Follow, "_record", counted)
    after("prove_independence", model, torch.randn(4, 3))
    monkeypatch.setattr(Follow, "_record", record)
    return count


def test_alike_layers_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    assert followed(Layers(3), monkeypatch) == followed(Layers(9), monkeypatch)


def test_what_is_written_to_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's value is written to with samples; the layers before it are alike, and hold none of that."""
    after("prove_independence", Layers(3, lambda h: h.mul_(2)), torch.randn(4, 3))
    with pytest.raises(MixedSamples, match="getitem takes samples out of the batch by their places"):
        after("prove_independence", Layers(3, lambda h: h[1:].add_(h[:-1].clone())), torch.randn(4, 3))


def test_an_op_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "mm")
    monkeypatch.delitem(RULES, "addmm")
    with pytest.raises(UnknownOp, match=r"fxgrad does not know how addmm treats samples[^$]*register_op"):
        after("prove_independence", Layers(1), torch.randn(4, 3))
