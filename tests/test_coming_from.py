"""The programs of docs/coming_from.md run beside the libraries they name, and its table of models is what happens."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.testing import relative_error
from tests.opacus_settings import WARNINGS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming_from.md").read_text()
START, *SECTIONS = re.split(r"^## (?:From )?", PAGE, flags=re.MULTILINE)
PROGRAMS = {title: code for title, *code in (re.split(r"\n", section, maxsplit=1) for section in SECTIONS)}
NEEDS = {"BackPACK": "backpack", "JAX Privacy": "jax_privacy"}  # JAX Privacy comes with the peers extra alone
B = 4
JAX_WARNINGS = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


WITH_PROGRAMS = [title for title, (text,) in PROGRAMS.items() if blocks(text)]


@JAX_WARNINGS
@pytest.mark.parametrize("title", [pytest.param(title, marks=WARNINGS) for title in WITH_PROGRAMS])
def test_the_programs_of_a_section_run(title: str) -> None:
    if title in NEEDS:
        pytest.importorskip(NEEDS[title])
    names: dict[str, Any] = {"__name__": "__main__"}
    for program in blocks(START) + blocks(PROGRAMS[title][0]):
        exec(compile(program, "coming_from.md", "exec"), names)


def test_every_section_compares() -> None:
    assert WITH_PROGRAMS == ["Opacus", "BackPACK", "torch.func", "PyTorch's expanded weights", "JAX Privacy"]
    assert all("assert_close(" in "".join(blocks(PROGRAMS[title][0])) for title in WITH_PROGRAMS)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bfxgrad\.(?!opacus)([\w.]*\w)", PAGE))))
def test_every_name_is_public(name: str) -> None:
    first, *rest = name.split(".")
    assert first in fxgrad.__all__
    found = getattr(fxgrad, first)
    for attribute in rest:
        found = getattr(found, attribute)


def run_twice(model: nn.Module, layer: nn.Linear, around: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """Two backwards without clearing."""
    for x in torch.ones(B, 6), torch.eye(B, 6):
        with around():
            loss_of(model(x)).backward()
    return layer.weight


def twice_by_fxgrad(layer: nn.Linear, accumulate: Any) -> Any:
    return run_twice(fxgrad.transform(layer, accumulate=accumulate, backend="eager"), layer)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_opacus_makes_a_list() -> None:
    layer, same = nn.Linear(6, 6), nn.Linear(6, 6)
    same.load_state_dict(layer.state_dict())
    p, q = run_twice(GradSampleModule(layer, loss_reduction="sum"), layer), twice_by_fxgrad(same, "append")
    assert isinstance(p.grad_sample, list) and isinstance(q.grad_sample, list)
    torch.testing.assert_close(p.grad_sample, q.grad_sample)
    assert p.grad is not None and q.grad is None


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_backpack_overwrites() -> None:
    library = pytest.importorskip("backpack")
    grads = importlib.import_module("backpack.extensions").BatchGrad
    layer, same = nn.Linear(6, 6), nn.Linear(6, 6)
    same.load_state_dict(layer.state_dict())
    p = run_twice(library.extend(layer), layer, lambda: library.backpack(grads()))
    torch.testing.assert_close(p.grad_batch, twice_by_fxgrad(same, "overwrite").grad_sample)


@JAX_WARNINGS
def test_jax_privacy_leaves_padding_out_and_makes_zeros_of_infinite_elements() -> None:
    jax_privacy = pytest.importorskip("jax_privacy.clipping")
    jnp = importlib.import_module("jax.numpy")
    clip = jax_privacy.clipped_grad(lambda w, x: (x @ w).sum(), l2_clip_norm=1.0)
    rows = [[3.0, 0.0], [0.0, 2.0], [torch.inf, 0.5]]
    padded = clip(jnp.ones(2), jnp.array(rows[:2]), is_padding_example=jnp.array([False, True]))
    assert padded.tolist() == [1.0, 0.0] == pytest.approx(by_clipping(rows[:2], [1.0, 0.0])[0], rel=1e-4)
    assert clip(jnp.ones(2), jnp.array(rows)).tolist() == [1.0, 1.5]
    sums, nonfinite = by_clipping(rows, [1.0, 1.0, 1.0])
    assert sums == pytest.approx([1.0, 1.0], rel=1e-4)
    assert nonfinite == 1


def by_clipping(rows: list[list[float]], weights: list[float]) -> tuple[list[float], int]:
    """The clipped sum and the number of samples that count as nonfinite."""
    layer, quantity = nn.Linear(2, 1, bias=False), fxgrad.ClippedGrad(1.0, sample_weight=True)
    model = fxgrad.transform(layer, quantity=quantity, backend="eager")
    model(torch.tensor(rows), sample_weight=torch.tensor(weights)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad[0].tolist(), int(fxgrad.result(model, quantity).nonfinite)


# ---------------------------------------------------------------------------- the table of models


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gamma = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.layer(x)


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.token = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))


class Two(nn.Module):
    """Two layers, and how they are called."""

    def __init__(self, call: Callable[[Two, Tensor], Tensor], tied: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.call = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False), call
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class First(nn.Module):
    """The first output of a layer that returns several."""

    def __init__(self, layer: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.inputs)[0]


def branch(model: Two, x: Tensor) -> Tensor:
    h = model.first(x)
    if h.max() > 0:
        h = h.tanh()
    return model.last(h)


def centre(h: Tensor) -> Tensor:
    return h - h.mean(0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear layers and tanh": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
    "LayerNorm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
    "`x + self.gamma * self.layer(x)`": Scaled,
    "a class token, `cat([token, x])`": Token,
    "two layers with one weight": lambda: Two(lambda m, x: m.last(m.first(x).tanh()), tied=True),
    "`F.linear(x, self.layer.weight)`": lambda: Two(lambda m, x: F.linear(m.first(x).tanh(), m.last.weight)),
    "nn.LSTM": lambda: First(nn.LSTM(6, 6, batch_first=True)),
    "nn.GRU": lambda: First(nn.GRU(6, 6, batch_first=True)),
    "nn.MultiheadAttention": lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), inputs=3),
    "activation checkpoint": lambda: Two(lambda m, x: m.last(checkpoint(m.first, x, use_reentrant=False).tanh())),
    "`if h.max() > 0:`": lambda: Two(branch),
    "`h - h.mean(0)`": lambda: Two(lambda m, x: m.last(centre(m.first(x)).tanh())),
    "BatchNorm in training mode": lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 6), nn.BatchNorm1d(6)),
}
MIXING = ("`h - h.mean(0)`", "BatchNorm in training mode")  # no sample has a gradient of its own


def loss_of(output: Tensor) -> Tensor:
    return output.sin().sum()


def attribute_of(model: nn.Module, name: str) -> dict[str, Any]:
    return {each: getattr(p, name, None) for each, p in model.named_parameters()}


def by_opacus(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss_of(GradSampleModule(model, loss_reduction="sum")(x)).backward()
    return attribute_of(model, "grad_sample")


def by_ghost(model: nn.Module, x: Tensor) -> dict[str, Any]:
    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=1.0, use_ghost_clipping=True
    )
    loss_of(wrapped(x)).backward()
    return {"norms": wrapped.get_norm_sample()}


def by_backpack(model: nn.Module, x: Tensor) -> dict[str, Any]:
    library, extensions = importlib.import_module("backpack"), importlib.import_module("backpack.extensions")
    with library.backpack(extensions.BatchGrad()):
        loss_of(library.extend(model)(x)).backward()
    return attribute_of(model, "grad_batch")


def by_expanded_weights(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss_of(call_for_per_sample_grads(model)(x)).backward()
    return attribute_of(model, "grad_sample")


def by_vmap(model: nn.Module, x: Tensor) -> dict[str, Any]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    return vmap(grad(lambda params, row: loss_of(functional_call(model, params, (row[None],)))), (None, 0))(params, x)


def by_fxgrad(model: nn.Module, x: Tensor) -> dict[str, Any]:
    loss_of(fxgrad.transform(model, backend="eager")(x)).backward()
    return attribute_of(model, "grad_sample")


LIBRARIES: dict[str, Callable[[nn.Module, Tensor], dict[str, Any]]] = {
    "Opacus": by_opacus,
    "Opacus ghost": by_ghost,
    "BackPACK": by_backpack,
    "expanded weights": by_expanded_weights,
    "vmap(grad)": by_vmap,
    "fxgrad": by_fxgrad,
}


def loop(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    rows = [torch.autograd.grad(loss_of(model(x[i : i + 1])), [*parameters.values()]) for i in range(B)]
    return {name: torch.stack(each) for name, *each in zip(parameters, *rows, strict=True)}


def outcome(library: str, name: str) -> str:
    """What a cell of the table says."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(B, 5, 6)
    try:
        found = LIBRARIES[library](copy.deepcopy(model), x)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, fxgrad.FxgradError):
        return "raises"
    if any(each is None for each in found.values()):
        return "left out"
    if name in MIXING:
        return "unnoticed"
    expected = loop(model, x)
    if library == "Opacus ghost":
        expected = {"norms": torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)}
    return "exact" if relative_error(found, expected) < 1e-5 else "wrong"


def table() -> dict[str, dict[str, str]]:
    """The page's table: what each library does with each model."""
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in PROGRAMS["The same models"][0].partition("| word | meaning |")[0].splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip(): dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_table_has_every_model_and_library() -> None:
    assert list(table()) == list(MODELS)
    assert all(list(row) == list(LIBRARIES) for row in table().values())


VERSIONS = {package: version for package, version in re.findall(r"(torch|Opacus|BackPACK) (\d+\.\d+)[,)]", PAGE)}
COLUMNS = LIBRARIES if torch.__version__.startswith(f"{VERSIONS['torch']}.") else ["fxgrad"]


def test_the_table_is_that_of_the_usual_versions() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    names = {"torch": "torch", "Opacus": "opacus", "BackPACK": "backpack-for-pytorch"}
    assert {name: pinned[package] for name, package in names.items()} == VERSIONS


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("library", COLUMNS)
def test_a_column_of_the_table(library: str) -> None:
    if library in NEEDS:
        pytest.importorskip(NEEDS[library])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch._dynamo changes the filters
        found = {name: outcome(library, name) for name in MODELS}
    assert found == {name: row[library] for name, row in table().items()}
