"""`python -m fxgrad doctor` and `explain`: what they print, what they find wrong, and their exit codes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import fxgrad
from fxgrad.command_line import doctor, factories
from fxgrad.command_line.main import main
from fxgrad.costs import machines
from fxgrad.kernels.compiled import Library

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def run(*arguments: str) -> int:
    return main(arguments, fxgrad.__version__)


def values(text: str) -> dict[str, str]:
    """What the report says of each subject."""
    lines = text.partition("\n\n")[0].splitlines()
    return {subject: value for subject, value in (re.split(r"  +", line, maxsplit=1) for line in lines)}


# doctor


def test_a_machine_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    text = capsys.readouterr().out
    said = values(text)
    assert text.endswith("\n\nNothing is wrong.\n")
    assert said["fxgrad"] == f"{fxgrad.__version__}, {Path(fxgrad.__file__).parent}"
    assert said["torch"] == torch.__version__ and said["Python"].startswith(sys.version.split()[0])
    assert said["sympy"] == importlib.metadata.version("sympy")
    assert said["opacus"] == importlib.metadata.version("opacus")
    assert said["kernels"] == f"on: {', '.join(library.computes for library in doctor.KERNELS)}"
    assert said["Inductor's cache"] == f"{os.environ['TORCHINDUCTOR_CACHE_DIR']}, writable"
    assert said["speed of cpu"] == "of the reference machine, whatever this one is (FXGRAD_MACHINE=reference)"
    assert said["threads"].startswith(f"{torch.get_num_threads()} on ")
    assert said["C++ compiler"] and said["device cpu"] and said["terminal"]


def test_a_machine_without_a_compiler_or_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    missing = {"CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path / "file"), "FXGRAD_MACHINE": ""}
    done = subprocess.run(
        [sys.executable, "-m", "fxgrad", "doctor"], env={**os.environ, **missing}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    said = values(done.stdout)
    assert said["C++ compiler"] == "none"
    assert said["kernels"] == "off: no C++ compiler; PyTorch's ops compute the same, and take longer"
    assert said["fxgrad's cache"] == f"{tmp_path}/file/fxgrad, not writable"
    assert said["speed of cpu"].startswith("not measured yet")
    assert re.findall(r"^wrong: (.*)\n  (.*)$", done.stdout, re.MULTILINE) == [
        (
            'without a C++ compiler backend="inductor", the default, fails on CPU: No working C++ compiler found in '
            "torch._inductor.config.cpp.cxx: (None, '/bin/false')",
            f'{doctor.INSTALL} backend="aot_eager" works without.',
        ),
        (
            f"{tmp_path}/file/fxgrad cannot be written, so each process measures the machine anew",
            "Name another place in the environment variable XDG_CACHE_HOME.",
        ),
    ]


def test_caches_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise NotADirectoryError(20, "Not a directory", str(tmp_path / "file" / "inductor"))

    (tmp_path / "file").touch()
    monkeypatch.setattr(doctor, "cache_folder", fail)
    monkeypatch.setenv(machines.VARIABLE, str(tmp_path / "file" / "machines.json"))
    inductor, own = doctor._caches()
    assert inductor.fault == f"{tmp_path}/file/inductor cannot be written, so nothing compiles"
    assert own.fault and own.advice == "Name another place in the environment variable FXGRAD_MACHINE."
    monkeypatch.setattr(doctor, "cache_folder", lambda: str(tmp_path / "not" / "there"))
    monkeypatch.setenv(machines.VARIABLE, str(tmp_path / "not" / "machines.json"))
    assert not any(finding.fault for finding in doctor._caches())
    monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may write anywhere
    assert all(finding.fault for finding in doctor._caches())


def test_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Library("common.cpp", "missing.cpp", computes="gradients of embeddings")
    monkeypatch.setattr(doctor, "KERNELS", [*doctor.KERNELS, broken])
    _, found = doctor._compiler_and_kernels()
    assert found.value == "off for gradients of embeddings" and found.advice == doctor.INSTALL
    assert found.fault.startswith(
        "the kernels in C++ for gradients of embeddings do not compile: FileNotFoundError: [Errno 2] No such file"
    )


def test_every_library_is_looked_at() -> None:
    declared = [path for path in (ROOT / "fxgrad" / "kernels").rglob("*.py") if "= Library(" in path.read_text()]
    named = {path.stem for path in declared} - {"recurrence"}  # of operators
    assert len(doctor.KERNELS) == len(named) == 7


def test_the_bounds_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'"torch>={doctor.OLDEST_TORCH}"' in project
    assert f'opacus = ["opacus>={doctor.OPACUS[0]},<{doctor.OPACUS[1]}"]' in project


@pytest.mark.parametrize(
    "version, fault",
    [
        ("1.6.3", ""),
        ("1.5.4", "fxgrad.opacus needs opacus 1.6, and this is 1.5.4"),
        ("1.10", "fxgrad.opacus needs opacus 1.6, and this is 1.10"),
    ],
)
def test_opacus_of_another_version(version: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    *_, opacus = doctor._packages()
    assert (opacus.value, opacus.fault) == (version, fault)


def test_no_opacus_and_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "opacus":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "OLDEST_TORCH", "99.1")
    torch_, *_, opacus = doctor._packages()
    assert opacus.value.startswith("not installed") and not opacus.fault
    assert torch_.fault == f"fxgrad needs torch 99.1 or later, and this is {torch.__version__}"


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert doctor._devices() == [CPU, torch.device("cuda", 0)]  # both are of one kind
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    faults = {finding.subject: finding.fault for finding in doctor._hardware()}
    assert faults["device cuda:0"] and not faults["device cuda:1"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert not any(finding.fault for finding in doctor._hardware())


def test_speeds_are_measured_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machines.VARIABLE, str(tmp_path / "machines.json"))
    assert doctor._speeds(CPU).value.startswith("not measured yet")
    slow = replace(machines.REFERENCE, name=machines.entry_of(CPU), mkl=1e9)
    for mkl, best in ((20e9, 20), (10e9, 20), (30e9, 30)):
        monkeypatch.setattr(machines, "measure", lambda *_, mkl=mkl, **__: replace(slow, mkl=mkl))
        machines.measure_again(CPU)
        assert doctor._speeds(CPU).value.startswith(f"mkl {best} Gflop/s, onednn 90 Gflop/s")
    assert "memory 16 GB/s, cache 50 GB/s, call 400 k/s (measured 3x, last on 20" in doctor._speeds(CPU).value
    machines.file().write_text(json.dumps({machines.entry_of(CPU): asdict(slow)}))  # as a user writes it
    machines.measure_again(CPU)
    assert doctor._speeds(CPU).value.endswith(f"call 400 k/s (written by hand in {tmp_path}/machines.json)")


def test_measure_is_an_option(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured: list[torch.device] = []
    monkeypatch.setattr(doctor, "measure_again", measured.append)
    assert run("doctor", "--measure") == 0
    assert measured == doctor._devices()


# explain

MODULE = """
import torch, fxgrad
from torch import nn

model, x = nn.Linear(3, 2), torch.randn(5, 3)

class Scaled(nn.Linear):
    def forward(self, x, by):
        return super().forward(x) * by

def two(): return model, (x,)
def three(): return Scaled(3, 2), [x], {"by": 2.0}
def clipped(): return fxgrad.transform(model, quantity=fxgrad.ClippedGrad(1.0)), (x,)
def mixing(): return nn.Sequential(model, nn.BatchNorm1d(2)), (x,)
def one(): return model
def four(): return model, (x,), {}, 1
def tensor(): return model, x
def no_model(): return x, (x,)
def no_kwargs(): return model, (x,), 1
def fails():
    raise ValueError("no\\ndata")
def leaves(): raise SystemExit(3)
def takes(one): pass
number = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with modules, which is the current one, as `python -m` has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cl_models.py").write_text(MODULE)
    (tmp_path / "cl_broken.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "cl_needs.py").write_text("import cl_absent\n")
    (tmp_path / "cl_leaves.py").write_text("raise SystemExit\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("cl_")]:
        del sys.modules[name]


@pytest.mark.parametrize("factory, says", [("two", "Linear at B = 5"), ("three", "Scaled at B = 5")])
def test_explain_prints_and_writes(factory: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", f"cl_models:{factory}", "--out", "page.html") == 0
    out, err = capsys.readouterr()
    assert out.startswith(says) and out.endswith("\n\nThe page: page.html\n") and not err
    model, args, *kwargs = getattr(sys.modules["cl_models"], factory)()
    explanation = fxgrad.explain(model, *args, **(kwargs[0] if kwargs else {}))
    assert out.startswith(str(explanation))
    assert (folder / "page.html").read_text() == explanation.to_html()


def test_a_transformed_model_has_its_own_quantity(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "cl_models:clipped") == 0
    assert "rank_one" in capsys.readouterr().out and (folder / "explanation.html").exists()


def test_a_model_that_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "cl_models:mixing") == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("MixedSamples: batch_norm in training mode") and "GroupNorm" in err
    assert not (folder / "explanation.html").exists()


FORM = "has to return (model, args) or (model, args, kwargs)"
WRONG = {
    "cl_models": "'cl_models' is not of the form module:factory, such as train:example",
    ":two": "':two' is not of the form module:factory, such as train:example",
    "cl_models.py:two": "'cl_models.py' is a file; name its module: cl_models:two",
    "./a/b.py": "'./a/b.py' is a file; name its module: a.b:factory",
    "cl_nothing:two": "no module 'cl_nothing' in .* or on the path of Python",
    "cl_models.sub:two": "no module 'cl_models.sub' in .* or on the path of Python",
    "cl_needs:two": "importing the module of cl_needs:two raised ModuleNotFoundError: No module named 'cl_absent' "
    r"\(.*cl_needs.py:1\)",
    "cl_broken:two": r"importing the module of cl_broken:two raised ZeroDivisionError: .* \(.*cl_broken.py:2\)",
    "cl_leaves:two": r"importing the module of cl_leaves:two raised SystemExit: \(.*cl_leaves.py:1\)",
    "cl_models:twoo": "module 'cl_models' has no 'twoo'. Did you mean 'two'\\?",
    "cl_models:zzzzz": "module 'cl_models' has no 'zzzzz'.",
    "cl_models:number": "cl_models:number is of type int; it has to be a function that returns .*",
    "cl_models:model": "cl_models:model is of type Linear; it has to be a function that returns .*",
    "cl_models:one": f"cl_models:one {re.escape(FORM)}, not a Linear",
    "cl_models:four": f"cl_models:four {re.escape(FORM)}, not a tuple of 4",
    "cl_models:tensor": rf"cl_models:tensor {re.escape(FORM)}; its args are of type Tensor, not a tuple \(x,\)",
    "cl_models:no_model": f"cl_models:no_model {re.escape(FORM)}; its model is of type Tensor",
    "cl_models:no_kwargs": f"cl_models:no_kwargs {re.escape(FORM)}; its kwargs are of type int, not a dict",
    "cl_models:fails": r"calling cl_models:fails raised ValueError: no data \(.*cl_models.py:21\)",
    "cl_models:leaves": r"calling cl_models:leaves raised SystemExit: 3 \(.*cl_models.py:22\)",
    "cl_models:takes": r"calling cl_models:takes raised TypeError: takes\(\) missing 1 required .*",
}


@pytest.mark.parametrize("name, says", WRONG.items(), ids=WRONG)
def test_wrong_input_gets_a_sentence(name: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", name) == 2
    out, err = capsys.readouterr()
    assert not out and re.fullmatch(f"python -m fxgrad explain: {says}\n", err), err


def test_any_other_error_is_a_sentence_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("size")

    monkeypatch.setattr(factories, "explain", fail)
    assert run("explain", "cl_models:two") == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m fxgrad explain: explaining the model of cl_models:two raised KeyError: 'size' (")


@pytest.mark.parametrize("place, says", [("no/page.html", "no folder no"), (".", "Is a directory: .")])
def test_a_page_that_cannot_be_written(place: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "cl_models:two", "--out", place) == 2
    assert capsys.readouterr().err == f"python -m fxgrad explain: --out: {says}\n"


@pytest.mark.parametrize("arguments, says", [([], "required: command"), (["docter"], "invalid choice: 'docter'")])
def test_an_unknown_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run("--version")
    assert left.value.code == 0 and capsys.readouterr().out == f"fxgrad {fxgrad.__version__}\n"
