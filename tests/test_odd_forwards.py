"""Forwards that once crashed, or were refused without need: each sample's gradient, by the loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

import fxgrad
from fxgrad.errors import (
    FxgradError,
    GraphBreak,
    MixedSamples,
    OptionError,
    OutsideGraph,
    TooManyGraphs,
)
from fxgrad.testing import assert_per_sample_grads

LOG = logging.getLogger(__name__)


@lru_cache(None)
def _once(self: Any, *args: Any) -> None:
    """As Hugging Face does it."""
    self.warning(*args)


class Model(nn.Module):
    def __init__(self, program: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.program = nn.Linear(3, 3), program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer, x)


def normalised_by_its_shape(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    return F.layer_norm(h, h.shape[1:]).sin()


def warned(m: Any, x: Tensor) -> Tensor:
    warnings.warn("a model's own", stacklevel=2)
    return m(x)


def printed(m: Any, x: Tensor) -> Tensor:
    print("a model's own", x.shape)
    return m(x)


def logged(m: Any, x: Tensor) -> Tensor:
    LOG.warning("a model's own %s", x.shape)
    LOG.info("another")
    return m(x)


def logged_once(m: Any, x: Tensor) -> Tensor:
    LOG.warning_once("a model's own")  # type: ignore[attr-defined]
    return m(x)


def rows_alike(model: Any, x: Tensor, quantity: Any) -> None:
    view = fxgrad.transform(model, quantity=quantity, backend="eager")
    fxgrad.zero_grad(view)
    view(x).square().sum().backward()
    for name, p in model.named_parameters():
        rows = []
        for i in range(len(x)):
            loss = model(x[i : i + 1]).square().sum()
            rows.append(torch.autograd.grad(loss, dict(model.named_parameters())[name])[0])
        if isinstance(quantity, fxgrad.GradSample):
            torch.testing.assert_close(p.grad_sample, torch.stack(rows))
        else:
            torch.testing.assert_close(p.grad, torch.stack(rows).sum(0))


@pytest.mark.parametrize("program", [warned, printed, logged, logged_once])
def test_messages(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", _once, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows_alike(Model(program), torch.randn(4, 3), fxgrad.GradSample())


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.ClippedGrad(1e6)], ids=str)
def test_a_shape_to_normalise_at_several_lengths(quantity: Any) -> None:
    model = Model(normalised_by_its_shape)
    for length in (4, 5, 7):
        for p in model.parameters():
            p.grad = None
        rows_alike(model, torch.randn(6, length, 3), quantity)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.ClippedGrad(1e6)], ids=str)
def test_vmap_over_samples(quantity: Any, size: int) -> None:
    model = Model(lambda m, x: torch.vmap(lambda z: torch.tanh(m.weight @ z + m.bias))(x))
    rows_alike(model, torch.randn(size, 3), quantity)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("kind", [nn.EmbeddingBag, nn.Embedding, partial(nn.Embedding, padding_idx=1)], ids=str)
def test_a_sparse_table(kind: Any, size: int) -> None:
    table, ids = kind(7, 3, sparse=True), torch.randint(7, (size, 4))
    fxgrad.transform(table, backend="aot_eager")(ids).square().sum().backward()
    found: Any = table.weight
    for i in range(size):
        (row,) = torch.autograd.grad(table(ids[i : i + 1]).square().sum(), table.weight)
        torch.testing.assert_close(found.grad_sample[i], row.to_dense())


ATEN_EMBEDDINGS: dict[str, Any] = {
    "function": torch.embedding,
    "packet": torch.ops.aten.embedding,
    "overload": torch.ops.aten.embedding.default,
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("op", ATEN_EMBEDDINGS.values(), ids=ATEN_EMBEDDINGS)
def test_a_sparse_table_of_aten(op: Any, size: int) -> None:
    model = Model(lambda m, ids: op(m.weight, ids, -1, False, True))
    dense = Model(lambda m, ids: op(m.weight, ids))
    dense.load_state_dict(model.state_dict())
    ids = torch.randint(3, (size, 4))
    for one in (model, dense):
        fxgrad.transform(one, backend="aot_eager")(ids).square().sum().backward()
    found, expected = (one.get_parameter("layer.weight").grad_sample for one in (model, dense))  # type: ignore[attr-defined]
    torch.testing.assert_close(found, expected)


class Started(nn.Module):
    """A recurrent layer with an initial state of its own."""

    def __init__(self, kind: Any, **settings: Any) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True, **settings)
        self.states = nn.ParameterList(nn.Parameter(torch.randn(2, 1, 4)) for _ in range(1 + (kind is nn.LSTM)))

    def forward(self, x: Tensor) -> Tensor:
        first = [state.expand(-1, len(x), -1).contiguous() for state in self.states]
        h: Tensor = self.layer(x, tuple(first) if len(first) > 1 else first[0])[0]
        return h


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("settings", [{"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_initial_states_that_are_trained(kind: Any, settings: dict[str, Any], size: int) -> None:
    for quantity in (fxgrad.GradSample(), fxgrad.ClippedGrad(1e6)):
        rows_alike(Started(kind, **settings), torch.randn(size, 5, 3), quantity)


def test_one_by_one_is_refused_at_once() -> None:
    """PyTorch would unroll it for the thousands of samples that stand in for any number."""
    view = fxgrad.transform(Model(lambda m, x: torch.stack([m(row) for row in x.unbind(0)])), backend="eager")
    with pytest.raises(fxgrad.errors.FxgradError, match="unbind fixes the batch size") as raised:
        view(torch.randn(6, 3))
    assert "torch.vmap" in str(raised.value)


def test_an_assert_on_the_batch_size_is_the_models_own() -> None:
    namespace: dict[str, Any] = {}  # pytest rewrites asserts in its own files
    exec("def checked(m, x):\n    assert x.shape[0] == 8, 'eight samples'\n    return m(x)", namespace)
    model = Model(namespace["checked"])
    view = fxgrad.transform(model, backend="eager")
    x = torch.randn(8, 3)
    view(x).sum().backward()
    found: Any = model.layer.weight
    torch.testing.assert_close(found.grad_sample, x[:, None].expand(8, 3, 3))
    fxgrad.zero_grad(model)
    with pytest.raises(AssertionError, match="eight samples"):
        view(torch.randn(9, 3))


def hooked_parameter(m: Any, x: Tensor) -> Tensor:
    m.weight.register_hook(lambda g: 2 * g)
    return m(x)


def test_hooks_that_forward_sets_on_a_parameter() -> None:
    view = fxgrad.transform(Model(hooked_parameter), backend="eager")
    with pytest.raises(fxgrad.errors.OptionError, match=r"'layer.weight' has a hook .* no gradient for it") as raised:
        view(torch.randn(4, 3))
    assert "forward may set it" in str(raised.value)


def summed_over_processes(m: Any, x: Tensor) -> Tensor:
    return m(x) / functional.all_reduce(x.abs().sum(), "sum", [0])


def written_over_processes(m: Any, x: Tensor) -> Tensor:
    total = x.abs().sum()
    dist.all_reduce(total)
    return m(x) / total


def gathered(m: Any, x: Tensor) -> Tensor:
    return functional.all_gather_tensor(m(x), 0, [0])


@pytest.mark.parametrize("mixing", ["error", "allow"])
@pytest.mark.parametrize("program", [summed_over_processes, written_over_processes, gathered])
def test_collectives_in_the_model_are_refused(program: Any, mixing: Any, tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        view = fxgrad.transform(Model(program), backend="eager", mixing=mixing)
        with pytest.raises(fxgrad.errors.MixedSamples, match="brings in other processes' samples"):
            view(torch.randn(4, 3))
    finally:
        dist.destroy_process_group()


# What one graph cannot hold


def retained(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h.retain_grad()
    return h


def by_ctc(m: Any, x: Tensor) -> Tensor:
    scores = m(x).log_softmax(-1).unsqueeze(0).expand(5, -1, -1)
    labels, lengths = torch.ones(len(x), 2, dtype=torch.long), torch.full((len(x),), 5)
    return F.ctc_loss(scores, labels, lengths, torch.full((len(x),), 2), reduction="none")


def differentiated_inside(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    (g,) = torch.autograd.grad(h.sum(), m.weight, create_graph=True)
    return h * g.sum()


def requires_a_gradient_of_an_input(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m(x.requires_grad_())
    return out


def requires_a_gradient_by_assignment(m: Any, x: Tensor) -> Tensor:
    x.requires_grad = True
    out: Tensor = m(x)
    return out


def made_in_forward(m: Any, x: Tensor) -> Tensor:
    return m(x) @ nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(
    ("program", "text", "advice"),
    [
        (retained, r"retain_grad\(\) keeps the gradient of a value inside the model", "Return the value"),
        (by_ctc, "ctc_loss has lengths inside that the data decides", "compute the loss outside of it"),
        (differentiated_inside, r"forward calls torch.autograd.grad", "Write it with torch.func.grad"),
        (requires_a_gradient_of_an_input, "forward sets requires_grad of a tensor", "before the model is called"),
        (requires_a_gradient_by_assignment, "forward sets requires_grad of a tensor", "before the model is called"),
        (made_in_forward, "forward makes a Parameter, which none of the model's parameters is", "Make it in __init__"),
    ],
)
def test_lines_that_no_graph_holds(program: Any, text: str, advice: str) -> None:
    with pytest.raises(GraphBreak, match=text) as caught:
        fxgrad.transform(Model(program), backend="eager")(torch.randn(4, 3))
    assert "test_odd_forwards.py:" in caught.value.where
    assert advice in caught.value.advice
    assert "fullgraph" not in str(caught.value)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("of", ["", "layer"])
def test_backward_hooks_of_modules_are_refused(register: str, of: str) -> None:
    model = Model(lambda m, x: m(x))
    getattr(model.get_submodule(of), register)(lambda *_: None)
    with pytest.raises(GraphBreak, match="a module has a backward hook") as caught:
        fxgrad.transform(model, backend="eager")(torch.randn(4, 3))
    assert caught.value.where == "on the model itself" if not of else "lambda m, x: m(x)" in caught.value.where
    assert "Remove the hook" in caught.value.advice


class Counting(Model):
    """Its forward reads what changes from call to call."""

    steps = 0

    def forward(self, x: Tensor, name: str = "") -> Tensor:
        return self.layer(x) * (self.steps + len(name))


def stepped(model: Any, i: int) -> tuple[Tensor]:
    model.steps = i
    return (torch.randn(4, 3),)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model, i: (torch.randn(4, 3), "a" * i), "name was '', 'a', .*, and is something else now"),
        (stepped, r"self\.steps was 0, 1, .*, 7, and is"),
        (lambda model, i: (torch.randn(4, *[1] * i, 3),), "tensor 'x' rank mismatch"),
    ],
    ids=["argument", "attribute", "rank"],
)
def test_too_many_graphs(change: Any, text: str) -> None:
    model = Counting(lambda m, x: x)
    view = fxgrad.transform(model, backend="eager")
    with pytest.raises(TooManyGraphs, match=text) as caught:
        for i in range(10):
            view(*change(model, i))
    assert "raise torch._dynamo.config.recompile_limit" in caught.value.advice


# Advice


def mixes(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    return h - h.mean(0)


def breaks(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    torch._dynamo.graph_break()
    return m(h)


QUANTITIES = [
    fxgrad.GradSample(),
    fxgrad.NormSample(),
    fxgrad.ClippedGrad(1.0),
    fxgrad.SquaredGrad(),
    fxgrad.GradVariance(),
    fxgrad.GradGram(),
    fxgrad.GradProjection(4, 0),
    fxgrad.Grad(),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(("program", "option"), [(mixes, dict(mixing="allow")), (breaks, dict(fullgraph=False))])
@pytest.mark.parametrize("quantity", QUANTITIES, ids=str)
def test_no_advice_leads_to_a_refusal(quantity: Any, program: Any, option: Any, check: bool) -> None:
    """An option is advised where it can be passed beside the others, and nowhere else."""
    (name,) = option

    def transformed(**options: Any) -> Any:
        return fxgrad.transform(Model(program), quantity=quantity, backend="eager", **options)

    try:
        transformed(check_first_batch=check)
    except OptionError:
        return  # nothing to check: no call, and no advice
    with pytest.raises(FxgradError) as caught:
        transformed(check_first_batch=check)(torch.randn(4, 3))
    try:
        transformed(check_first_batch=check, **option)
        takes = True
    except OptionError:
        takes = False
    assert (f"pass {name}=" in caught.value.advice) == takes


def test_verify_advises_what_the_model_takes() -> None:
    model = Model(mixes)
    private = fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0), backend="eager")
    for view, advised in ((model, True), (private, False)):
        with pytest.raises(MixedSamples) as caught:
            fxgrad.verify(view, torch.randn(4, 3)).raise_if_wrong()
        assert ("mixing" in caught.value.advice) == advised


# Parameters that are not registered

OUTSIDE = nn.Parameter(torch.randn(3, 3))


class Listed(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3) if first else nn.Identity()
        self.layers, self.by_name = [nn.Linear(3, 3)], {"w": nn.Parameter(torch.randn(3, 3))}


class InAList(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](self.first(x))


class InADict(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.by_name["w"]


class InAClosure(Listed):
    def __init__(self, first: bool) -> None:
        super().__init__(first)
        w = nn.Parameter(torch.randn(3, 3))
        self.product = lambda x: x @ w

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.first(x))


class AGlobal(Listed):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ OUTSIDE


UNREGISTERED = {InAList: r"'layers\[0\]\.weight'", InADict: r"'by_name\['w'\]'", InAClosure: "'closure of product'"}


@pytest.mark.parametrize("kind", [InAList, InADict, InAClosure, AGlobal])
def test_parameters_that_are_not_registered(kind: Any) -> None:
    text = UNREGISTERED.get(kind, "'OUTSIDE'")
    with pytest.raises(OutsideGraph, match=f"{text} is a Parameter that model.parameters") as caught:
        fxgrad.transform(kind(True), backend="eager")(torch.randn(4, 3))
    assert "nn.ModuleList" in caught.value.advice
    with pytest.raises(OutsideGraph, match="the model has no trainable parameters, and what it returns requires a gra"):
        fxgrad.transform(kind(False), backend="eager")(torch.randn(4, 3))


def test_a_model_without_parameters_runs() -> None:
    model = fxgrad.transform(nn.Sequential(nn.ReLU()), backend="eager")
    assert not model(torch.randn(4, 3)).requires_grad
    assert model(torch.randn(4, 3, requires_grad=True)).requires_grad


# What is under a mask, changed and written back


def doubled(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h[h > 0] *= 2
    return h.sin()


def changed_by_several_ops(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    mask = h > 0
    h[mask] = (h[mask] * x[mask]).exp().sin() + 1
    return h.sin()


def infinite_where_the_mask_is_off(m: Any, x: Tensor) -> Tensor:
    h = m(x) - 0.3
    h[h > 0] = h[h > 0].sqrt()
    h[h < -0.5] = (-h[h < -0.5]).log()
    return h.sin()


def whole_rows(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h[x[:, 0] > 0] = h[x[:, 0] > 0] * m.bias
    return h.sin()


def in_place_in_between(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    mask = h > 0
    t = h[mask]
    t *= 2
    t += m.weight.mean()
    h[mask] = t
    return h.sin()


def into_a_new_tensor(m: Any, x: Tensor) -> Tensor:
    h, y = torch.zeros_like(x), m(x)
    mask = x > 0
    h[mask] = y[mask]
    h[mask] *= 3
    return h.sin()


def chosen_under_the_mask(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    mask = h > 0
    h[mask] = torch.where(h[mask] > 0.5, h[mask], h[mask] * 2)
    return h.sin()


UNDER_A_MASK = [
    doubled,
    changed_by_several_ops,
    infinite_where_the_mask_is_off,
    whole_rows,
    in_place_in_between,
    into_a_new_tensor,
    chosen_under_the_mask,
]


@pytest.mark.parametrize("size", [5, 1])
@pytest.mark.parametrize("program", UNDER_A_MASK)
def test_under_a_mask(program: Any, size: int) -> None:
    assert_per_sample_grads(Model(program).double(), torch.randn(size, 3, dtype=torch.float64), backend="eager")


@pytest.mark.parametrize("program", UNDER_A_MASK)
def test_under_a_mask_and_clipped(program: Any) -> None:
    rows_alike(Model(program).double(), torch.randn(5, 3, dtype=torch.float64), fxgrad.ClippedGrad(1e9))


@pytest.mark.inductor
def test_under_a_mask_through_inductor() -> None:
    assert_per_sample_grads(Model(infinite_where_the_mask_is_off), torch.randn(5, 3), backend="inductor")


def summed_under_the_mask(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    mask = h > 0
    h[mask] = h[mask] / h[mask].sum()
    return h


def drawn_under_the_mask(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h[h > 0] = F.dropout(h[h > 0])
    return h


def under_another_mask(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    h[h < 0] = h[h > 0]
    return h


def under_a_mask_that_changed(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    mask = h > 0
    t = h[mask]
    mask.logical_not_()
    h[mask] = t
    return h


def read_before_a_write(m: Any, x: Tensor) -> Tensor:
    """The two masks are the same words, of different values."""
    h = m(x)
    t = h[h > 0]
    h.neg_()
    h[h > 0] = t
    return h


def read_elsewhere(m: Any, x: Tensor) -> Tensor:
    h = m(x)
    t = h[h > 0]
    h[h > 0] = 2 * t
    return h + t.sum()


@pytest.mark.parametrize(
    "program",
    [
        summed_under_the_mask,
        drawn_under_the_mask,
        under_another_mask,
        under_a_mask_that_changed,
        read_before_a_write,
        read_elsewhere,
    ],
)
def test_what_meets_under_a_mask_is_refused(program: Any) -> None:
    with pytest.raises(MixedSamples, match="how many elements a mask selects, all samples decide together") as caught:
        fxgrad.transform(Model(program), backend="eager")(torch.randn(5, 3))
    assert "Write torch.where(mask, f(x), x)" in caught.value.advice


# Samples as channels


def instances_as_channels(m: Any, x: Tensor) -> Tensor:
    return F.instance_norm(m(x).unsqueeze(0)).squeeze(0).sin()


def kernels_of_their_own(m: Any, x: Tensor) -> Tensor:
    """A kernel for each sample, made of its first row."""
    n = x.shape[0]
    kernels, bias = m(x[:, :2]).reshape(2 * n, 1, 3).repeat(1, 4, 1), m(x)[:, 0, :2].reshape(-1)
    return F.conv1d(m(x).reshape(1, 4 * n, 3), kernels, bias, groups=n).view(n, -1)


def several_groups_each(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return F.conv1d(m(x).reshape(1, 4 * n, 3), m(x).reshape(4 * n, 1, 3), groups=4 * n, padding=1).view(n, -1)


@pytest.mark.parametrize("program", [instances_as_channels, kernels_of_their_own, several_groups_each])
def test_samples_as_channels(program: Any) -> None:
    model, x = Model(program).double(), torch.randn(5, 4, 3, dtype=torch.float64)
    assert_per_sample_grads(model, x, backend="eager")
    rows_alike(model, x, fxgrad.ClippedGrad(1e9))


def weighted_instances(m: Any, x: Tensor) -> Tensor:
    return F.instance_norm(m(x).unsqueeze(0), weight=x.sum((1, 2))).squeeze(0)


def groups_over_samples(m: Any, x: Tensor) -> Tensor:
    n = x.shape[0]
    return F.conv1d(m(x).reshape(1, 4 * n, 3), m(x).reshape(4 * n, 1, 3).repeat(1, 4 * n, 1), groups=1).view(n, -1)


@pytest.mark.parametrize("program", [weighted_instances, groups_over_samples])
def test_samples_as_channels_that_meet_are_refused(program: Any) -> None:
    with pytest.raises(MixedSamples, match=r"(its weight holds samples|on another dimension than 0)"):
        fxgrad.transform(Model(program), backend="eager")(torch.randn(5, 4, 3))


# Padding


def trimmed(m: Any, x: Tensor) -> Tensor:
    longest = (x[..., 0] > 0).sum(1).max().item()
    x = x[:, :longest]
    return m(m(x).sin()).sum(1)


def test_padding_cut_to_the_longest_names_the_line_that_cuts() -> None:
    with pytest.raises(MixedSamples, match="cuts each sample to a length that all samples") as caught:
        fxgrad.transform(Model(trimmed), backend="eager")(torch.randn(5, 4, 3))
    assert "x = x[:, :longest]" in caught.value.where
    assert "before the call, or leave the padding in and mask it" in caught.value.advice


# Rows of merged samples, picked by data


def last_of_each(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    h = m(x)
    n, t, d = h.shape
    return h.reshape(n * t, d)[torch.arange(n) * t + lengths - 1].sin()


def last_by_index_select(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    n, t, d = x.shape
    return m(x.view(-1, d).index_select(0, (lengths - 1) + torch.arange(0, n * t, t))).sin()


def last_by_the_data(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    h = m(x)
    n, t, d = h.shape
    own = (x[..., 0] > 0).sum(1).clamp(min=1)
    return h.reshape(n * t, d)[torch.arange(n) * t + own - 1].sin() * lengths[:, None]


def several_each(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """As BERT gathers the tokens that were masked."""
    h = m(x)
    n, t, d = h.shape
    places = torch.stack([lengths - 1, lengths // 2], 1) + (torch.arange(n) * t).unsqueeze(1)
    return h.view(n * t, d).index_select(0, places.view(-1)).view(n, 2, d).sin() + h.view(n * t, d)[places]


class WithLengths(nn.Module):
    def __init__(self, program: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.program = nn.Linear(3, 3), program

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.program(self.layer, x, lengths)


def with_lengths(program: Any) -> tuple[Any, Tensor, Tensor]:
    return WithLengths(program).double(), torch.randn(4, 5, 3, dtype=torch.float64), torch.tensor([1, 3, 5, 2])


PICKED = [last_of_each, last_by_index_select, last_by_the_data, several_each]


@pytest.mark.parametrize("program", PICKED)
def test_rows_of_merged_samples(program: Any) -> None:
    model, x, lengths = with_lengths(program)
    assert_per_sample_grads(model, x, lengths, backend="eager")
    assert_per_sample_grads(model, x[:1], lengths[:1], backend="eager")


@pytest.mark.inductor
def test_rows_of_merged_samples_through_inductor() -> None:
    model, x, lengths = with_lengths(last_of_each)
    assert_per_sample_grads(model.float(), x.float(), lengths, backend="inductor")


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("wrong", [[0, 3, 5, 2], [1, 0, 5, 2], [1, 3, 5, 6]])
def test_a_row_of_another_sample_is_an_error_when_it_is_read(wrong: list[int], backend: str) -> None:
    model, x, lengths = with_lengths(last_of_each)
    view = fxgrad.transform(model, backend=backend)
    view(x, lengths)
    fxgrad.zero_grad(view)
    with pytest.raises(RuntimeError, match=r"an index leaves the rows of its own sample.*h\.reshape\(n \* t, d\)"):
        view(x, torch.tensor(wrong))


def test_a_sum_in_a_row_of_another_sample_is_an_error() -> None:
    def in_its_segment(m: Any, x: Tensor, places: Tensor) -> Tensor:
        flat = torch.zeros(x.shape[0] * 6, 3, dtype=x.dtype)
        return flat.index_add(0, torch.arange(x.shape[0]) * 6 + places, m(x[:, 0])).view(-1, 6, 3).sin()

    model, x, places = with_lengths(in_its_segment)
    assert_per_sample_grads(model, x, places, backend="eager")
    with pytest.raises(RuntimeError, match="an index leaves the rows of its own sample"):
        fxgrad.transform(model, backend="eager")(x, torch.tensor([1, 3, 6, 2]))


def any_row(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return m(x).view(-1, 3)[lengths].sin()


def samples_last(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    h = m(x.transpose(0, 1))
    t, n, d = h.shape
    return h.reshape(n * t, d)[torch.arange(n) * t + lengths - 1].sin()


@pytest.mark.parametrize("program", [any_row, samples_last])
def test_rows_that_nothing_says_are_a_samples_own(program: Any) -> None:
    model, x, lengths = with_lengths(program)
    with pytest.raises(MixedSamples, match="it moves the samples to where they cannot be followed"):
        fxgrad.transform(model, backend="eager")(x, lengths)


# The batch in pieces


def in_chunks(m: Any, x: Tensor) -> Tensor:
    return torch.cat([c.sin() * m.bias for c in m(x).chunk(2)]).cos()


def in_many_chunks(m: Any, x: Tensor) -> Tensor:
    return torch.cat(tuple(map(m, x.chunk(12))), dim=0).cos()


def in_pieces_of_two(m: Any, x: Tensor) -> Tensor:
    return torch.cat([m(c).sin() for c in x.split(2)]).cos()


def in_layers(m: Any, x: Tensor) -> Tensor:
    pieces = []
    for c in x.split(3, dim=0):
        h = F.layer_norm(F.linear(m(c).tanh(), m.weight), (3,)).softmax(-1)
        pieces.append(F.dropout(h * c, training=False))
    return torch.cat(pieces)


IN_PIECES = [in_chunks, in_many_chunks, in_pieces_of_two, in_layers]


@pytest.mark.parametrize("program", IN_PIECES)
def test_the_batch_in_pieces(program: Any) -> None:
    model = Model(program).double()
    for size in (5, 4, 1, 2, 13):
        assert_per_sample_grads(model, torch.randn(size, 3, dtype=torch.float64), backend="eager")
    rows_alike(model, torch.randn(5, 3, dtype=torch.float64), fxgrad.ClippedGrad(1e9))


def test_rows_of_a_weight_in_pieces() -> None:
    """Along other dimensions pieces are what they were: these are a parameter's."""
    model = Model(lambda m, x: x @ torch.cat([c.softmax(0) for c in m.weight.chunk(3)])).double()
    assert_per_sample_grads(model, torch.randn(5, 3, dtype=torch.float64), backend="eager")


def centred(m: Any, x: Tensor) -> Tensor:
    return torch.cat([c - c.mean(0) for c in m(x).chunk(2)])


def along_the_pieces(m: Any, x: Tensor) -> Tensor:
    return torch.cat([c.softmax(0) for c in m(x).chunk(2)])


def in_another_order(m: Any, x: Tensor) -> Tensor:
    return torch.cat([c.sin() for c in reversed(m(x).chunk(2))])


def each_in_its_way(m: Any, x: Tensor) -> Tensor:
    return torch.cat([i * c for i, c in enumerate(m(x).chunk(2))])


def with_each_other(m: Any, x: Tensor) -> Tensor:
    a, b = m(x).chunk(2)
    return torch.cat([a * b, b * a])


def read_beside(m: Any, x: Tensor) -> Tensor:
    pieces = [c.sin() for c in m(x).chunk(2)]
    return torch.cat(pieces) + pieces[0].sum()


def one_without_gradients(m: Any, x: Tensor) -> Tensor:
    a, b = m(x).chunk(2)
    with torch.no_grad():
        a = a.sin()
    return torch.cat([a, b.sin()])


def one_after_a_write(m: Any, x: Tensor) -> Tensor:
    scale = torch.ones(3)
    a, b = m(x).chunk(2)
    a = a * scale
    scale.mul_(2)
    return torch.cat([a, b * scale])


def norms_of_pieces(m: Any, x: Tensor) -> Tensor:
    return torch.cat([F.batch_norm(c, None, None, training=True) for c in m(x).chunk(2)])


@pytest.mark.parametrize("mixing", ["error", "allow"])
@pytest.mark.parametrize(
    "program",
    [
        centred,
        along_the_pieces,
        in_another_order,
        each_in_its_way,
        with_each_other,
        read_beside,
        norms_of_pieces,
        one_without_gradients,
        one_after_a_write,
    ],
)
def test_pieces_that_meet_or_differ_are_refused(program: Any, mixing: Any) -> None:
    with pytest.raises(MixedSamples, match="it cuts the batch into pieces of several samples") as caught:
        fxgrad.transform(Model(program), backend="eager", mixing=mixing)(torch.randn(4, 3)).sum().backward()
    assert "put all pieces together in their order by torch.cat" in caught.value.advice


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_number_that_changes_between_calls(backend: str) -> None:
    """Dynamo makes an int argument dynamic at its second value, which may be 0, 1 or negative."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, k: int = 0) -> Tensor:
            return super().forward(x) * (k + 3)

    for numbers in ((0, 1, 2, 0), (7, 0, 5), (4, -2, 1)):
        torch._dynamo.reset()
        model = Scaled(3, 2).double()
        private, x = fxgrad.transform(model, backend=backend), torch.randn(4, 3, dtype=torch.float64)
        for k in numbers:
            fxgrad.zero_grad(private)
            private(x, k).sum().backward()
            rows: Any = model.weight.grad_sample  # type: ignore[attr-defined]
            torch.testing.assert_close(rows, (x * (k + 3)).unsqueeze(1).expand(4, 2, 3))
