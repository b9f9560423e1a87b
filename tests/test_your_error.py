"""docs/your_error.md: other tools raise the errors it quotes, and fxgrad's programs agree with single samples."""

from __future__ import annotations

import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import opacus
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxgrad
from fxgrad.testing import per_sample_grads, relative_error

NUMBERS = itertools.count()
ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "your_error.md").read_text()
BEGINNING, *SECTIONS = PAGE.split("\n## ")
HEADINGS = [section.split("\n")[0] for section in SECTIONS]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
SHAPE = re.compile(r"^(\S+\.grad_sample)  # (\[.*\])$", re.MULTILINE)
INPUT = re.compile(r"^loss\(\w+\((\w+)\)\)\.backward\(\)", re.MULTILINE)
VERSIONS = dict(re.findall(r"(\w+) (\d+\.\d+\.\d+)", BEGINNING))
QUOTED = (torch.__version__.split("+")[0], opacus.__version__) == (VERSIONS["PyTorch"], VERSIONS["Opacus"])

ignored_warnings = pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off:UserWarning",
    "ignore:Full backward hook is firing:UserWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",  # of Dynamo
    "ignore:Extension saving to grad_batch does not have an extension:UserWarning",
)


class Program(NamedTuple):
    code: str
    error: str  # what it raises, on one line; empty if it works


def programs(text: str) -> Iterator[Program]:
    """Yield each program with the error that stands below it."""
    blocks = BLOCK.findall(text)
    for (language, code), (below, error) in zip(blocks, [*blocks[1:], ("python", "")], strict=True):
        if language == "python":
            yield Program(code, " ".join(error.split()) if below == "text" else "")


def run(program: Program, namespace: dict[str, Any]) -> None:
    torch.manual_seed(0)
    exec(compile(program.code, "your_error.md", "exec"), namespace)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the page's first program, in a module: Dynamo looks for the globals of a forward there."""
    module = types.ModuleType(f"your_error_{next(NUMBERS)}")  # Dynamo caches modules by name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (program,) = programs(BEGINNING)
    run(program, vars(module))
    return vars(module)


def check_error(program: Program, namespace: dict[str, Any], heading: str) -> None:
    """The whole text is that of the versions which the page names; its heading is part of it in all."""
    name = program.error.split(":")[0]
    with pytest.raises(Exception) as caught:
        run(program, namespace)
    text = " ".join(f"{type(caught.value).__name__}: {caught.value}".split())
    assert type(caught.value).__name__ == name
    assert heading in text
    assert heading in program.error
    if QUOTED:
        assert text == program.error


def check_gradients(program: Program, namespace: dict[str, Any]) -> None:
    """Every parameter's per-sample gradients are those of the loop; the shapes beside them are true."""
    run(program, namespace)
    model = namespace["model"]
    (inputs,) = INPUT.findall(program.code)
    computed = {name: p.grad_sample for name, p in model.named_parameters()}
    assert relative_error(computed, per_sample_grads(model, namespace["loss"], (namespace[inputs],), seed=0)) < 1e-4
    for value, shape in SHAPE.findall(program.code):
        assert str(list(eval(value, namespace).shape)) == shape


@ignored_warnings
@pytest.mark.parametrize("section", SECTIONS, ids=HEADINGS)
def test_another_tool_fails_and_fxgrad_works(section: str, names: dict[str, Any]) -> None:
    if "from backpack" in section:
        pytest.importorskip("backpack")
    *failing, working = programs(section)
    for program in failing:
        check_error(program, names, section.split("\n")[0])
    check_gradients(working, names)


@ignored_warnings
def test_fxgrad_works_where_backpack_is_not_installed(names: dict[str, Any]) -> None:
    (section,) = [section for section in SECTIONS if "from backpack" in section]
    *_, working = programs(section)
    check_gradients(working, names)


def test_each_section_has_errors_and_one_program_that_works() -> None:
    assert len(SECTIONS) >= 10
    for section in SECTIONS:
        *failing, working = programs(section)
        assert [bool(program.error) for program in [*failing, working]] == [True] * len(failing) + [False]
        assert failing
        assert len(BLOCK.findall(section)) == section.count("```") / 2
        assert sum(line.strip() != "" for line in working.code.splitlines()) <= 8


def test_the_versions_are_those_that_the_suite_pins() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\ntorch=={VERSIONS['PyTorch']}\n" in pins
    assert f"\nopacus=={VERSIONS['Opacus']}\n" in pins


# What the page says beside its programs


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(3, 4), nn.Linear(4, 2), True

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


def agrees(model: nn.Module, names: dict[str, Any], prepare: Callable[[], object] = lambda: None) -> bool:
    """Say whether the model's gradients by fxgrad are those of the loop, which runs after `prepare`."""
    names["loss"](fxgrad.transform(model, backend="aot_eager")(names["x"])).backward()
    computed = {name: p.grad_sample for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    prepare()
    return relative_error(computed, per_sample_grads(model, names["loss"], (names["x"],))) < 1e-4


def test_a_reentrant_checkpoint_raises_the_same(names: dict[str, Any]) -> None:
    """The loop cannot use it either: it refuses torch.autograd.grad."""
    model = Reentrant()
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        names["by_vmap"](model, names["x"])
    assert agrees(model, names, lambda: setattr(model, "reentrant", False))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_takes_lstm(names: dict[str, Any]) -> None:
    class Outputs(nn.LSTM):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x)[0]

    model = Outputs(3, 4, batch_first=True)
    expected = per_sample_grads(model, names["loss"], (names["sequences"],))
    assert relative_error(names["by_vmap"](model, names["sequences"]), expected) < 1e-4


@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM])
@ignored_warnings
def test_opacus_says_the_same_of_recurrent_layers(layer: type[nn.GRU] | type[nn.LSTM], names: dict[str, Any]) -> None:
    with pytest.raises(opacus.validators.errors.UnsupportedModuleError, match=f"We do not support nn.{layer.__name__}"):
        opacus.PrivacyEngine().make_private(**names["training"](layer(3, 4), names["sequences"]))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.used(x)


@ignored_warnings
def test_opacus_does_not_initialize_what_is_unused(names: dict[str, Any]) -> None:
    hooked, optimizer, _ = opacus.PrivacyEngine().make_private(**names["training"](Unused(), names["x"]))
    names["loss"](hooked(names["x"])).backward()
    with pytest.raises(ValueError, match="Per sample gradient is not initialized"):
        optimizer.step()
    model = Unused()
    assert agrees(model, names)
    assert model.unused.weight.grad_sample.count_nonzero() == 0  # type: ignore[attr-defined]


def test_a_branch_on_the_batch_is_refused(names: dict[str, Any]) -> None:
    (section,) = [section for section in SECTIONS if section.startswith("data-dependent")]
    check_error(next(programs(section)), names, "data-dependent control flow")
    with pytest.raises(fxgrad.errors.GraphBreak, match="Data-dependent branching"):
        fxgrad.transform(names["Branching"](), backend="aot_eager")(names["x"])


def test_batch_norm_is_refused_or_evaluated(names: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(fxgrad.errors.MixedSamples, match="batch_norm in training mode lets samples influence"):
        fxgrad.transform(model, backend="aot_eager")(names["x"])
    model[1].eval()
    assert agrees(model, names)
