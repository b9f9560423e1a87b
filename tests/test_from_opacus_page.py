"""docs/from_opacus.md names every option of the installed Opacus; its programs run, and its tables are true."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import opacus
import pytest
import torch
import torch.distributed as dist
from opacus import accountants, layers, optimizers, schedulers
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample.utils import get_gsm_class, get_hooks_class
from opacus.optimizers import get_optimizer_class
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fxgrad.opacus
from fxgrad.errors import FxgradError
from fxgrad.opacus import PrivacyEngine
from tests.opacus_settings import ADAPTIVE, WARNINGS

pytestmark = [
    *WARNINGS,
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the smallest alpha:UserWarning"),
]

PAGE = (Path(__file__).parents[1] / "docs" / "from_opacus.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
ENGINE, PRIVATE, BUDGET = "The engine", "make_private", "make_private_with_epsilon"
FIRST: dict[str, Any] = dict(noise_multiplier=1.0, max_grad_norm=1.0, backend="eager")
ADAPTIVE_OPTIONS = {name: value for name, value in ADAPTIVE.items() if name not in ("clipping", "max_grad_norm")}


def rows(section: str) -> list[list[str]]:
    """The cells of each row of a section's tables, without the heads."""
    lines = re.findall(r"^\|(.*)\|$", SECTIONS[section], re.MULTILINE)
    found = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    rules = [i for i, row in enumerate(found) if set("".join(row)) == {"-"}]
    return [row for i, row in enumerate(found) if i not in rules and i + 1 not in rules]


def named(section: str) -> set[str]:
    """What stands in backquotes in the first cells."""
    return {name for row in rows(section) for name in re.findall(r"`(\w+|\w+\.\w+)`", row[0])}


def options(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def classes(module: Any, base: type = object) -> set[str]:
    return {
        name for name, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, base) and name[0] != "_"
    }


def test_every_option_is_named() -> None:
    assert named(ENGINE) == options(opacus.PrivacyEngine.__init__)
    of_private = options(opacus.PrivacyEngine.make_private)
    of_optimizers = set().union(*(options(getattr(optimizers, name).__init__) for name in classes(optimizers)))
    elsewhere = named(ENGINE) | named("Optimizers")
    assert named(PRIVATE) == of_private | (of_optimizers - elsewhere)
    of_accountants = set().union(*(options(getattr(accountants, name).get_epsilon) for name in classes(accountants)))
    of_budget = options(opacus.PrivacyEngine.make_private_with_epsilon) | options(get_noise_multiplier) | of_accountants
    assert named(BUDGET) == of_budget - of_private - named(ENGINE) - {"delta", "args"}


def test_every_value_is_named() -> None:
    modes = {
        mode
        for function in (get_gsm_class, get_hooks_class)
        for tested in re.findall(r"if grad_sample_mode (?:==|in) (.*):", inspect.getsource(function))
        for mode in re.findall(r'"(\w+)"', tested)
    }
    clippings = set(re.findall(r'clipping == "(\w+)"', inspect.getsource(get_optimizer_class)))
    assert len(modes) > 5 and len(clippings) > 2
    examples = [row[1] for row in rows(PRIVATE)]
    for option, values in {"grad_sample_mode": modes, "clipping": clippings}.items():
        assert {value for value in values if any(f'{option}="{value}"' in example for example in examples)} == values


def test_every_name_is_named() -> None:
    assert classes(optimizers, optimizers.DPOptimizer) <= named("Optimizers")
    assert classes(schedulers) == named("Large batches and schedules")
    assert classes(layers) == named("Layers and norms")
    methods = {name for name in vars(opacus.PrivacyEngine) if name[0] != "_"}
    hooks = {name for name, _ in inspect.getmembers(opacus.GradSampleModule) if name[0] != "_"}
    own = hooks - {name for name, _ in inspect.getmembers(nn.Module)} - {"forward"}
    assert (methods | set(opacus.__all__) | own) - {"utils"} <= named("Other names of Opacus")


@pytest.fixture(scope="module", autouse=True)
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process, which DistributedDataParallel needs."""
    dist.init_process_group("gloo", f"file://{tmp_path_factory.mktemp('meet') / 'file'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(section: str, example: str) -> None:
    """Take a step with the example's arguments."""
    model = nn.Linear(3, 2)
    names = dict(torch=torch, nn=nn, opacus=opacus, model=model, adaptive=ADAPTIVE_OPTIONS)
    names["DistributedDataParallel"] = DistributedDataParallel
    given: dict[str, Any] = eval(f"dict({example})", names)
    engine = PrivacyEngine(**({"accountant": "rdp"} if section != ENGINE else given))
    x, y = torch.randn(16, 3), torch.randint(2, (16,))
    arguments: dict[str, Any] = FIRST | dict(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), 8),
    )
    make: Any = engine.make_private
    if section == BUDGET:
        del arguments["noise_multiplier"]
        arguments |= dict(target_epsilon=4.0, target_delta=1e-3, epochs=1, epsilon_tolerance=1.0, alphas=[2.0, 8.0])
        make = engine.make_private_with_epsilon
    made = make(**arguments | (given if section != ENGINE else {}))
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction=given.get("loss_reduction", "mean"))
    criterion(made[0](x[:8]), y[:8]).backward()
    made[1].step()
    assert len(engine.accountant) == 1


EXAMPLES = [(section, *row[1:]) for section in (ENGINE, PRIVATE, BUDGET) for row in rows(section) if row[1]]


@pytest.mark.parametrize("section, example, answer", EXAMPLES, ids=[f"{one[0]}: {one[1]}" for one in EXAMPLES])
def test_a_row_is_true(section: str, example: str, answer: str) -> None:
    code = example.strip("`").replace("\\|", "|")
    refused = re.search(r'refused: "(.*?)"(?=$| Instead)', answer)
    if refused is None:
        assert answer.startswith("works")
        run(section, code)
        return
    with pytest.raises(FxgradError) as raised:
        run(section, code)
    assert raised.value.sentence == refused[1]
    assert raised.value.advice


def test_its_programs_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make: Any = fxgrad.opacus.make_private
    monkeypatch.setitem(make.__kwdefaults__, "backend", "eager")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 4
    for program in programs:
        exec(compile(program, "from_opacus.md", "exec"), namespace)
    assert re.fullmatch(r"\d\.\d\nGroupNorm\n", capsys.readouterr().out)
