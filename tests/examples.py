"""Loads the examples by their files: Opacus's wheel brings a package of the name `examples`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples"
DEMO = FOLDER / "demo"


def load(name: str) -> Any:
    """The module of ``examples/name.py``."""
    spec = importlib.util.spec_from_file_location(f"fxgrad_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
