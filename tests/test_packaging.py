"""What is installed is what lies in the folders, and `passes` is importable by one name only."""

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fxgrad
import fxgrad.passes

ROOT = Path(__file__).parents[1]


def listed_packages() -> set[str]:
    """`packages` of pyproject.toml (Python 3.10 has no tomllib)."""
    found = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert found is not None
    return set(re.findall(r'"([\w.]+)"', found[1]))


READ = {".cpp", ".css", ".html", ".js", ".typed"}  # what modules read beside them


def source_files() -> dict[str, Path]:
    """Every module of fxgrad by its path inside the installed package."""
    files = {p.relative_to(ROOT).as_posix(): p for p in (ROOT / "fxgrad").rglob("*.py")}
    files |= {f"fxgrad/{p.relative_to(ROOT).as_posix()}": p for p in (ROOT / "passes").rglob("*.py")}
    return files


def test_every_package_is_listed() -> None:
    folders = {name.rpartition("/")[0].replace("/", ".") for name in source_files()}
    assert listed_packages() == folders


def test_the_link_shows_the_passes() -> None:
    link = ROOT / "fxgrad" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


def test_passes_are_imported_as_fxgrad_passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "passes", raising=False)
    with pytest.raises(ImportError, match=re.escape("fxgrad.passes")):
        importlib.import_module("passes")
    assert fxgrad.passes.__name__ == "fxgrad.passes"


def test_the_backend_is_an_entry_point() -> None:
    (backend,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fxgrad")
    assert backend.value == "fxgrad.backend:fxgrad_backend"
    assert callable(backend.load())


def test_runtime_dependencies() -> None:
    requires = importlib.metadata.requires("fxgrad") or []
    assert {r for r in requires if "extra ==" not in r} == {"torch>=2.11", "sympy"}


def test_the_version_stands_in_one_place() -> None:
    """The wheel and the site take it from the package."""
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in text and 'version = { attr = "fxgrad.__version__" }' in text
    assert not re.search(r'^version = "', text, re.M)
    assert re.fullmatch(r"\d+\.\d+\.\d+", fxgrad.__version__)


def test_public_names_exist() -> None:
    for name in fxgrad.__all__:
        assert hasattr(fxgrad, name), name


def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy_sources(source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("fxgrad-*.whl")
    assert wheel.name.split("-")[1] == fxgrad.__version__
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    others = {p.relative_to(ROOT).as_posix() for p in (ROOT / "fxgrad").rglob("*.*") if p.suffix in READ}
    assert {"fxgrad/py.typed", "fxgrad/kernels/depthwise.cpp", "fxgrad/explanation/page.css"} <= others
    assert names == {*source_files(), *others}


def copy_sources(to: Path) -> None:
    """Away from the checkout: a `build/` left there by an older build would end up in the wheel."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "fxgrad", "passes"):
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, symlinks=True)
        else:
            shutil.copy(ROOT / name, target)
