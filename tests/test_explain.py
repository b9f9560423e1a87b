"""`fxgrad.explain`: the table, the data, the page, and that the model is left alone."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxgrad
from fxgrad.errors import BatchSizeError, MixedSamples
from fxgrad.explanation.drawing import grouped
from fxgrad.explanation.findings import Cost


class Model(nn.Module):
    """Tied, frozen and unused parameters, and a function of one."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.w, self.spare = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(2))
        self.enc.bias.requires_grad_(False)
        self.blocks[1][0].weight = self.blocks[0][0].weight  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        h = self.enc(x)
        for block in self.blocks:
            h = h + block(h)
        result: Tensor = h @ self.w.t().exp()
        return result


def language_model(layers: int) -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(11, 8), encoder, nn.Linear(8, 3))


def lines_away(text: str) -> str:
    """The snapshot of this file's line numbers would change with every line above."""
    return re.sub(r"test_explain.py:\d\d", "test_explain.py:##", text)


def test_the_table() -> None:
    assert_expected_inline(
        lines_away(str(fxgrad.explain(Model(), torch.randn(5, 3)))),
        """\
Model at B = 5

parameter                             shape   use            line                by           term              samples        grad_sample  flops
w                                     [4, 4]  t              test_explain.py:##  rule         moved             shared by all        320 B      0
                                              exp of t       test_explain.py:##  elementwise  summed            shared by all                 160
                                              matmul of exp  test_explain.py:##  rule         n...o,n...i->noi  dim 0: B                      160
spare                                 [2]     unused                                                                                  40 B
enc.weight                            [4, 3]  linear         test_explain.py:##  rule         n...o,n...i->noi  dim 0: B             240 B    120
enc.bias                              [4]     frozen
blocks.0.0.weight, blocks.1.0.weight  [4, 4]  linear         test_explain.py:##  rule         n...o,n...i->noi  dim 0: B             320 B    160
                                              linear         test_explain.py:##  rule         n...o,n...i->noi  dim 0: B                      160
blocks.0.0.bias                       [4]     linear         test_explain.py:##  rule         n...o->no         dim 0: B              80 B     20
blocks.0.1.weight                     [4]     layer_norm     test_explain.py:##  rule         n...a->na         dim 0: B              80 B     20
blocks.0.1.bias                       [4]     layer_norm     test_explain.py:##  rule         n...a->na         dim 0: B              80 B     20
blocks.1.0.bias                       [4]     linear         test_explain.py:##  rule         n...o->no         dim 0: B              80 B     20
blocks.1.1.weight                     [4]     layer_norm     test_explain.py:##  rule         n...a->na         dim 0: B              80 B     20
blocks.1.1.bias                       [4]     layer_norm     test_explain.py:##  rule         n...a->na         dim 0: B              80 B     20

total                   plain step  with fxgrad
forward                   600 flop     600 flop
backward                1.08 kflop   1.08 kflop
saved for the backward       544 B        544 B
gradients                    280 B       1.4 kB""",  # noqa: E501
    )


def test_where_the_samples_are_in_a_transformer() -> None:
    found = fxgrad.explain(language_model(1), torch.randint(11, (4, 5)))
    by_name = {p.name: p for p in found.parameters}
    (step,) = by_name["1.layers.0.self_attn.out_proj.weight"].steps
    assert (step.samples, step.output) == ("dim 0: 5*B", "f32[5*B, 8]")
    assert step.module == "1.layers.0.self_attn: MultiheadAttention"
    (step,) = by_name["1.layers.0.self_attn.in_proj_weight"].steps
    assert (step.samples, step.output) == ("dim 1: B", "f32[5, B, 24]")
    (step,) = by_name["0.weight"].steps
    assert step.terms == ("n...v,n...d->nvd",)
    assert step.flops.formula == "40*B" and step.flops.value == 160
    assert by_name["0.weight"].bytes.formula == "352*B"


def test_the_totals_are_those_of_a_real_step() -> None:
    model, ids = language_model(2), torch.randint(11, (4, 5))
    totals = {total.what: total for total in fxgrad.explain(model, ids).totals}
    with FlopCounterMode(display=False) as forward:
        output = model(ids)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert totals["forward"].plain.value == totals["forward"].fxgrad.value == forward.get_total_flops()
    assert totals["backward"].plain.value == totals["backward"].fxgrad.value == backward.get_total_flops()
    numbers = sum(p.numel() for p in model.parameters())
    assert (totals["gradients"].plain.value, totals["gradients"].fxgrad.value) == (4 * numbers, 16 * numbers)


def test_convolutions_cost_what_the_native_one_costs() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, stride=2))
    x = torch.randn(3, 2, 8, 8)
    totals = {total.what: total for total in fxgrad.explain(model, x).totals}
    with FlopCounterMode(display=False) as counter:
        output = model(x)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert totals["forward"].plain.value == forward
    assert totals["backward"].fxgrad.value == totals["backward"].plain.value == counter.get_total_flops()


def saved_by(model: nn.Module, x: Tensor) -> int:
    """What a real forward keeps for its backward, each storage once, without parameters and input."""
    known = {t.untyped_storage().data_ptr() for t in [x, *model.parameters()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = model(x)
    assert output.requires_grad
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in known)


def test_what_is_saved_for_the_backward() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x = torch.randn(5, 1, 8, 8)
    saved = {t.what: t for t in fxgrad.explain(model, x).totals}["saved for the backward"]
    assert saved.plain.value == saved.fxgrad.value == saved_by(model, x)


def test_what_is_saved_in_addition() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    saved = {t.what: t for t in fxgrad.explain(model, torch.randn(5, 3)).totals}["saved for the backward"]
    assert saved.plain.value == saved_by(model, torch.randn(5, 3)) == 16  # the norm
    # From which the weight's gradient is pulled back, op by op; Dynamo of 2.14 writes the norm in three of them.
    assert saved.fxgrad.value == (80 if torch.__version__ < "2.14" else 144)


def test_generic_and_opaque_work_is_not_counted_and_said() -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, self.w)

    found = fxgrad.explain(Distances(), torch.randn(4, 2, 3))
    (step,) = found.parameters[0].steps
    assert (step.by, step.terms, step.flops) == ("generic", ("per sample",), Cost())
    assert found.notes == ("flops leave out the generic rule, which runs the op's own derivative under vmap",)


class LSTMOfCells(nn.Module):
    """What nn.LSTM computes, in products that PyTorch's counter sees."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        h, c = (one[0] for one in state)
        w_ih, w_hh, b_ih, b_hh, *w_hr = self.lstm.parameters()
        for step in x.unbind(1):
            i, f, n, o = (F.linear(step, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * n.tanh()
            h = o.sigmoid() * c.tanh()
            h = h @ w_hr[0].t() if w_hr else h
        return h


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.Grad()], ids=str)
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM", "projected"])
def test_recurrent_layers_cost_what_their_products_cost(kind: str, quantity: Any) -> None:
    """First states require gradients, so that the product at the first step has one by each of its factors."""
    lstm, more = kind in ("LSTM", "projected"), {"proj_size": 3} if kind == "projected" else {}
    model = getattr(nn, "LSTM" if lstm else kind)(3, 5, batch_first=True, **more)
    x, h = torch.randn(4, 7, 3), torch.randn(1, 4, 3 if more else 5, requires_grad=True)
    state: Any = (h, torch.randn(1, 4, 5, requires_grad=True)) if lstm else h
    found = fxgrad.explain(model, x, state, quantity=quantity)
    with FlopCounterMode(display=False) as forward:
        output = LSTMOfCells(model)(x, state) if lstm else model(x, state)[0]
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    totals = {total.what: total for total in found.totals}
    for what, counter in (("forward", forward), ("backward", backward)):
        assert totals[what].plain.value == totals[what].fxgrad.value == counter.get_total_flops() > 0
    assert found.notes == ()
    assert {step.by for p in found.parameters for step in p.steps} == {"own backward"}


def test_layers_above_the_first_have_input_gradients() -> None:
    model, x, h = nn.GRU(3, 5, 2, batch_first=True), torch.randn(4, 7, 3), torch.randn(2, 4, 5, requires_grad=True)
    backward = fxgrad.explain(model, x, h).totals[1]
    with FlopCounterMode(display=False) as forward:
        output = model(x, h)[0]
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert backward.plain.value == backward.fxgrad.value == counter.get_total_flops() > forward.get_total_flops()


class Halfway(nn.Module):
    """Gradients reach ``a`` in both of its uses, and neither ``b`` nor ``c``; nothing uses ``d``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x) + self.a(self.b(x).detach()), self.c(x).argmax(-1)


@pytest.mark.parametrize("quantity", [fxgrad.GradSample(), fxgrad.ClippedGrad(1.0)], ids=str)
def test_what_no_gradient_reaches(quantity: Any) -> None:
    found = fxgrad.explain(Halfway(), torch.randn(5, 3), quantity=quantity)
    assert {p.name[0]: p.status for p in found.parameters} == {
        "a": "trained",
        "b": "unreached",
        "c": "unreached",
        "d": "unused",
    }
    terms = [step.terms for p in found.parameters for step in p.steps]
    assert terms == [("n...o,n...i->noi",), ("n...o,n...i->noi",), ("no gradient",), ("no gradient",)]


def test_what_is_pulled_back_through_functions_of_parameters() -> None:
    """Of what moves no flops are counted; of the rest it is not known how often it is done."""
    found = fxgrad.explain(Model(), torch.randn(5, 3), quantity=fxgrad.ClippedGrad(1.0))
    (steps,) = (p.steps for p in found.parameters if p.name == "w")
    assert [(step.terms[0], step.flops.value) for step in steps] == [
        ("moved", 0),
        ("pulled back", None),
        ("n...o,n...i->noi", 160),
    ]


@pytest.mark.parametrize("run", [fxgrad.explain, fxgrad.trace])
def test_wrong_inputs_raise_what_the_model_raises(run: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.GroupNorm(2, 4))
    random = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(4x5 and 3x4\)"):
        run(model, torch.randn(4, 5, generator=torch.Generator()))
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        run(model, torch.ones(4, 3), torch.ones(4, 3))
    assert torch.equal(random, torch.get_rng_state())


class Remembering(nn.Linear):
    """Changes what it has, and then fails."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.calls, self.names, self.sizes, self.last = [0], {"first"}, {"b": 1}, 0
        self.total = nn.Buffer(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        self.names.add("second")
        self.sizes["c"] = 2
        self.last = 5
        self.total.add_(1)
        return super().forward(x)


@pytest.mark.parametrize("run", [fxgrad.explain, fxgrad.trace])
def test_a_model_that_fails_is_left_as_it_was(run: Any) -> None:
    model = Remembering()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(model, torch.ones(4, 5))
    assert (model.calls, model.names, model.sizes, model.last) == ([0], {"first"}, {"b": 1}, 0)
    assert not model.total.any()


def test_torch_func_inside_the_model() -> None:
    class Derivative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Any:
            return torch.func.vmap(torch.func.grad(lambda v: (v * self.w).sin().sum()))(x)

    found = fxgrad.explain(Derivative(), torch.randn(5, 3))
    assert found.notes == () and len(found.parameters[0].steps) == 2
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_a_batch_of_one_and_of_none() -> None:
    one, five = (fxgrad.explain(nn.Linear(3, 2), torch.randn(n, 3)) for n in (1, 5))
    assert [p.bytes.value for p in one.parameters] == [24, 8]
    assert [p.bytes.formula for p in one.parameters] == [p.bytes.formula for p in five.parameters]
    assert one.sizes == {"B": 1}
    with pytest.raises(BatchSizeError, match="explain needs samples: the batch is empty"):
        fxgrad.explain(nn.Linear(3, 2), torch.randn(0, 3))


def test_a_transformed_models_options_apply() -> None:
    model = fxgrad.transform(nn.Linear(3, 2), batch_first=False)
    found = fxgrad.explain(model, torch.randn(7, 4, 3))
    assert found.sizes["B"] == 4 and found.parameters[0].steps[0].samples == "dim 1: B"


def test_a_refusal_is_raised() -> None:
    with pytest.raises(MixedSamples, match="batch_norm in training mode"):
        fxgrad.explain(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(5, 3))


def test_the_model_is_left_as_it_was() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(5, 3, requires_grad=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads, state = [p.grad for p in model.parameters()], copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    fxgrad.explain(model, x)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert x.grad is None and not hasattr(x, "_fxgrad_sample_dim")


def test_to_dict_is_json_and_stable() -> None:
    found, again = (fxgrad.explain(Model(), torch.randn(5, 3)).to_dict() for _ in range(2))
    assert json.loads(json.dumps(found)) == found == again
    assert list(found) == [
        "version", "model", "batch_size", "sizes", "parameters", "totals", "notes", "values", "quantities", "machine",
    ]  # fmt: skip
    first = found["parameters"][0]
    assert first["status"] == "trained" and first["bytes"] == {"formula": "64*B", "value": 320}
    assert [step["op"] for step in first["steps"]] == ["t", "exp", "matmul"]
    assert first["steps"][2]["line"].endswith("result: Tensor = h @ self.w.t().exp()")


def test_the_drawn_graph() -> None:
    values = {value.name: value for value in fxgrad.explain(Model(), torch.randn(5, 3)).values}
    kinds = {value.op: value.kind for value in values.values()}
    assert kinds == {
        "input": "batched", "linear": "batched", "layer_norm": "batched", "add": "batched", "t": "uniform",
        "exp": "uniform", "matmul": "batched", "output": "batched",
    }  # fmt: skip
    matmul = next(value for value in values.values() if value.op == "matmul")
    assert [values[name].op for name in matmul.operands] == ["add", "exp"]
    assert matmul.tap == "rule: n...o,n...i->noi"
    linear = next(value for value in values.values() if value.op == "linear")
    assert (linear.parameters, linear.constants) == (("enc.weight",), ("enc.bias",))
    assert all(name in values for value in values.values() for name in value.operands)


def test_a_module_of_one_op_is_no_group() -> None:
    top = grouped(fxgrad.explain(Model(), torch.randn(5, 3)).values)
    names = [item.name if hasattr(item, "items") else item.op for item in top]
    assert names == [
        "input", "linear", "blocks.0: Sequential", "add", "blocks.1: Sequential", "add", "t", "exp", "matmul", "output",
    ]  # fmt: skip


VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Fails on tags that do not match; collects attributes and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("layers", [1, pytest.param(4, marks=pytest.mark.long)])
def test_the_page_is_well_formed_and_needs_nothing_else(layers: int, tmp_path: Path) -> None:
    found = fxgrad.explain(language_model(layers), torch.randint(11, (4, 5)))
    text = found.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids)) == len(found.values)
    assert not [a for a in reader.attributes if a[1] in ("src", "srcset") or a[0] == "link"]
    links = [value for _, key, value in reader.attributes if key == "href"]
    assert links and all(link.startswith("#v-") and link[1:] in reader.ids for link in links)
    outside = set(re.findall(r"https?://[^\s\"')]+|@import|url\(", text))
    assert outside <= {"http://www.w3.org/2000/svg"}


def test_what_the_page_says_of_a_user_is_escaped() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("<w&>", nn.Parameter(torch.randn(3)))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x * getattr(self, "<w&>"))

    text = fxgrad.explain(Odd(), torch.randn(5, 3)).to_html()
    assert "<w&>" not in text and "&lt;w&amp;&gt;" in text


def test_costs_are_expressions_in_every_size_that_changes() -> None:
    model: Any = fxgrad.transform(nn.Linear(3, 2))
    found = fxgrad.explain(model, torch.randn(4, 6, 3))
    assert found.parameters[0].steps[0].flops == Cost("72*B", 288)
