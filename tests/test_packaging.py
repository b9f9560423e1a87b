"""What is installed is what lies in the folders, and `passes` is importable by one name only."""

import email
import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
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


SOURCES = ("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md", "pyproject.toml")
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy_sources(source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return out


def wheel_and_names(built: Path) -> tuple[zipfile.ZipFile, set[str]]:
    (path,) = built.glob("fxgrad-*.whl")
    assert path.name.split("-")[1] == fxgrad.__version__
    wheel = zipfile.ZipFile(path)
    return wheel, set(wheel.namelist())


def test_the_wheel_holds_every_module_and_nothing_else(built: Path) -> None:
    names = {name for name in wheel_and_names(built)[1] if ".dist-info/" not in name}
    others = {p.relative_to(ROOT).as_posix() for p in (ROOT / "fxgrad").rglob("*.*") if p.suffix in READ}
    assert {"fxgrad/py.typed", "fxgrad/kernels/depthwise.cpp", "fxgrad/explanation/page.css"} <= others
    assert names == {*source_files(), *others}


def test_the_metadata_is_complete(built: Path) -> None:
    wheel, names = wheel_and_names(built)
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_string(wheel.read(name).decode())
    assert metadata["Name"] == "fxgrad" and metadata["Version"] == fxgrad.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert {"Typing :: Typed", "Intended Audience :: Science/Research"} <= set(metadata.get_all("Classifier", []))
    assert metadata["Keywords"]


def test_the_classifiers_name_the_pythons_that_the_suite_ran_on() -> None:
    """Others are added when tools/matrix.sh has run there."""
    page = (ROOT / "docs" / "versioning.md").read_text()
    ran = re.findall(r"^\| (3[\d., ]+) \| the suite ran \|$", page, re.MULTILINE)
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert classified and classified == ", ".join(ran).split(", ")


def test_the_source_distribution_holds_what_the_wheel_needs(built: Path) -> None:
    (path,) = built.glob("fxgrad-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    own = {name for name in names if not name.startswith("fxgrad.egg-info/")}
    packages = {"fxgrad", "passes"}
    assert {name for name in own if name.partition("/")[0] not in packages} == {*SOURCES, "PKG-INFO", "setup.cfg"}
    assert {name.replace("fxgrad/passes/", "passes/") for name in source_files()} <= own


def copy_sources(to: Path) -> None:
    """Away from the checkout: a `build/` left there by an older build would end up in the wheel."""
    for name in (*SOURCES, "fxgrad", "passes", "tests"):
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, symlinks=True)
        else:
            shutil.copy(ROOT / name, target)
